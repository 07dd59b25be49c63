"""The mask that a layer of a Hugging Face model asks for: plain causal, a sliding window, or one that the ring refuses.

    causal_mask_function                                             None: plain causal
    and_masks(sliding_window_overlay(w), causal_mask_function)       w: a window of w tokens, its own among them
    and_masks(chunked_overlay(n, ...), causal_mask_function)         Chunks(n): of Llama 4; to a ring, documents
    bidirectional_mask_function                                      BothWays(): of an encoder
    any other, such as a window in both directions                   the rule in words, which a layer refuses

A model asks once for each kind of layer: it hands its rule to AttentionMaskInterface, and hands the answer to the
layers. transformers calls windows and chunks by one name, local_size. A ring that trusted it would take chunks for
windows. So the rule itself is read: by which functions of transformers it was made, and of what.

Shapes: a rule says of a query and a key, by their positions, whether the query sees the key.

    $ python -m ringlab.models.hugging_face_masks
    8 tokens, local_size is 3: rules of transformers, and the pairs (query, key) that they show
    ok      causal_mask_function: plain causal, 36 pairs
    ok      and_masks(sliding_window_overlay(3), causal_mask_function): a window of 3, 21 pairs
    ok      and_masks(chunked_overlay(3, a tensor), causal_mask_function): chunks of (3, 3, 2), 15 pairs
    ok      bidirectional_mask_function: both ways, 64 pairs
    refused and_masks(sliding_window_bidirectional_overlay(3), bidirectional_mask_function)

Before: hugging_face_batch.py, the batch. After: hugging_face_proof.py, which models may be cut.
Source: transformers 5.23, masking_utils.py; Beltagy et al. 2020 (Longformer), section 3.1, for windows.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringlab.support.extras import extra
from ringlab.training.masks import Mask

with extra("hf", __name__):
    from transformers import masking_utils
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        chunked_causal_mask_function,
        sdpa_mask,
        sliding_window_bidirectional_mask_function,
        sliding_window_causal_mask_function,
    )

from ringlab.models.hugging_face_batch import refuse


class Window(int):
    """The tokens of a window. A model may take all rows of it, as it would of a tensor. Gemma 4 does."""

    def __getitem__(self, rows: tuple[slice, ...]) -> "Window":
        if any(row not in (slice(None), slice(0, None)) for row in rows):
            raise TypeError(f"a window has no rows {rows}")
        return self


@dataclass(frozen=True)
class Chunks:
    """A token sees those before it in its own chunk of `size` tokens, counted from the first token of its document."""

    size: int

    def documents(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The lengths of the chunks in documents of `lengths`. To the ring each chunk is one document."""
        return tuple(min(self.size, n - first) for n in lengths for first in range(0, n, self.size))


@dataclass(frozen=True)
class BothWays:
    """Every token sees every other token of its document: an encoder."""


Asked = int | Chunks | BothWays | str | None  # a window; chunks; an encoder; another rule, in words; plain causal


def asked_mask(
    *, mask_function: Callable, attention_mask: Tensor | None = None, local_size: int | None = None, **_: Any
) -> Asked:
    """What the layers of a kind get: None for plain causal, the tokens of a window, or what else is asked.

    `mask_function` is the rule, `attention_mask` (B, C) is 0 for padding. It refuses nothing: a model may ask for a
    mask that no layer uses.
    """
    if attention_mask is not None and not attention_mask.all():
        return "a mask of padding"
    words = written(mask_function)
    if words == written(causal_mask_function):
        return None
    if words == written(bidirectional_mask_function):
        return BothWays()
    if local_size is not None and words == written(sliding_window_causal_mask_function(local_size)):
        return Window(local_size)
    if local_size is not None and words == written(chunked_causal_mask_function(local_size, torch.zeros(1))):
        return Chunks(local_size)  # the tensor counts padding on the left, of which a mask of ones has none
    return words


def written(rule: Any) -> str:
    """A rule as the calls that made it, read from its closure. Functions of other files stand with their file."""
    if isinstance(rule, tuple):
        return ", ".join(map(written, rule))
    if not inspect.isfunction(rule):
        return "a tensor" if isinstance(rule, Tensor) else repr(rule)
    name = rule.__qualname__.partition(".<locals>")[0]  # of the function that made the rule
    if rule.__module__ != masking_utils.__name__:
        name = f"{rule.__module__}.{name}"
    made_of = inspect.getclosurevars(rule).nonlocals.values()
    return f"{name}({', '.join(map(written, made_of))})" if made_of else name


def window_of(layer: str, mask: Asked | Tensor, sliding_window: int | None) -> int | None:
    """The window of a layer that was given `mask` and itself passes `sliding_window`; None for no window.

    Raises ValueError for another mask, and where the two windows differ: sdpa would follow the mask, and a flash
    attention the other one.
    """
    refuse({"attention_mask": None if isinstance(mask, int | Chunks | BothWays) else mask}, set())
    if sliding_window != (mask if isinstance(mask, int) else None):
        asked = "plain causal" if mask is None else f"a window of {mask}" if isinstance(mask, int) else str(mask)
        raise ValueError(f"{layer} passes sliding_window={sliding_window}, and its mask is {asked}; expected the same")
    return None if sliding_window is None else int(sliding_window)


def main() -> int:
    S, w, ok = 8, 3, True
    rules = {
        causal_mask_function: None,
        sliding_window_causal_mask_function(w): w,
        chunked_causal_mask_function(w, torch.zeros(1, dtype=torch.int64)): Chunks(w),
        bidirectional_mask_function: BothWays(),
        sliding_window_bidirectional_mask_function(w): "refused",
    }
    print(f"{S} tokens, local_size is {w}: rules of transformers, and the pairs (query, key) that they show")
    for rule, expected in rules.items():
        shown = sdpa_mask(1, S, S, mask_function=rule, local_size=w, allow_is_causal_skip=False)[0, 0]  # (S, S)
        asked = asked_mask(mask_function=rule, local_size=w)
        if isinstance(asked, str):
            print(f"refused {asked}")
            ok &= expected == "refused"
            continue
        chunks = asked.documents((S,)) if isinstance(asked, Chunks) else None
        window = int(asked) if isinstance(asked, int) else None
        causal = not isinstance(asked, BothWays)
        (first, end), *_ = Mask(causal, chunks, window).visible_keys(torch.arange(S), S)
        same = torch.equal(shown, (torch.arange(S) >= first[:, None]) & (torch.arange(S) < end[:, None]))
        kind = (
            f"chunks of {chunks}"
            if chunks
            else f"a window of {window}"
            if window
            else "plain causal"
            if causal
            else "both ways"
        )
        print(f"{'ok' if same else 'WRONG':8}{written(rule)}: {kind}, {shown.sum()} pairs")
        ok &= same and asked == expected
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
