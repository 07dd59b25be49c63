"""What mask a layer of a Hugging Face model asks for, read from the rule by which the model makes it.

    causal_mask_function                                             None: plain causal
    and_masks(sliding_window_overlay(w), causal_mask_function)       w: a window of w tokens, its own among them
    and_masks(chunked_overlay(n, ...), causal_mask_function)         ChunkedAttention(n): of Llama 4
    bidirectional_mask_function                                      BothWays(): of an encoder
    any other, such as a window in both directions                   the rule in words, which a layer refuses

A model asks once for each kind of layer: it hands its rule to AttentionMaskInterface, and hands the answer to the
layers. transformers calls windows and chunks by one name, local_size. A ring that trusted it would take chunks for
windows. So the rule itself is read: by which functions of transformers it was made, and of what.

Shapes: a rule says of a query and a key, by their positions, whether the query sees the key.

`python examples/compare.py` runs it: a first reader may skip this file.
Before: batch.py, the batch. After: attention.py, what a layer calls.
Source: transformers 5.23, masking_utils.py; Beltagy et al. 2020 (Longformer), section 3.1, for windows.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringlab.support.extras import extra

with extra("hf", __name__):
    from transformers import masking_utils
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        chunked_causal_mask_function,
        sliding_window_causal_mask_function,
    )

from ringlab.hugging_face.batch import refuse
from ringlab.support.expect import expect


class Window(int):
    """The tokens of a window. A model may take all rows of it, as it would of a tensor. Gemma 4 does."""

    def __getitem__(self, rows: tuple[slice, ...]) -> "Window":
        if any(row not in (slice(None), slice(0, None)) for row in rows):
            raise TypeError(f"a window has no rows {rows}")
        return self


@dataclass(frozen=True)
class ChunkedAttention:
    """A token sees those before it in its own chunk of `size` tokens, counted from the first token of its document."""

    size: int

    def documents(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The lengths of the chunks in documents of `lengths`. To the ring each chunk is one document."""
        return tuple(min(self.size, n - first) for n in lengths for first in range(0, n, self.size))


@dataclass(frozen=True)
class PlainCausal:
    """Plain causal, for layers that take rows of their mask for an indexer, with the documents of this forward pass."""

    documents: tuple[int, ...] | None

    def __getitem__(self, rows: Any) -> "PlainCausal":
        return self


@dataclass(frozen=True)
class BothWays:
    """Every token sees every other token of its document: an encoder."""


Asked = int | ChunkedAttention | BothWays | PlainCausal | str | None  # a window, ..., a rule in words, plain causal


def asked_mask(
    *, mask_function: Callable, attention_mask: Tensor | None = None, local_size: int | None = None, **_: Any
) -> Asked:
    """What the layers of a kind get: None for plain causal, the tokens of a window, or what else is asked.

    `mask_function` is the rule, `attention_mask` (B, C) is 0 for padding. It refuses nothing: a model may ask for a
    mask that no layer uses.
    """
    if attention_mask is not None and not attention_mask.all():
        return "a mask of padding"
    words = rule_in_words(mask_function)
    if words == rule_in_words(causal_mask_function):
        return None
    if words == rule_in_words(bidirectional_mask_function):
        return BothWays()
    if local_size is not None and words == rule_in_words(sliding_window_causal_mask_function(local_size)):
        return Window(local_size)
    if local_size is not None and words == rule_in_words(chunked_causal_mask_function(local_size, torch.zeros(1))):
        return ChunkedAttention(local_size)  # the tensor counts padding on the left, of which a mask of ones has none
    return words


def rule_in_words(rule: Any) -> str:
    """A rule as the calls that made it, read from its closure. Functions of other files stand with their file."""
    if isinstance(rule, tuple):
        return ", ".join(map(rule_in_words, rule))
    if not inspect.isfunction(rule):
        return "a tensor" if isinstance(rule, Tensor) else repr(rule)
    name = rule.__qualname__.partition(".<locals>")[0]  # of the function that made the rule
    if rule.__module__ != masking_utils.__name__:
        name = f"{rule.__module__}.{name}"
    made_of = inspect.getclosurevars(rule).nonlocals.values()
    return f"{name}({', '.join(map(rule_in_words, made_of))})" if made_of else name


def window_of(layer: str, mask: Asked | Tensor, sliding_window: int | None) -> int | None:
    """The window of a layer that was given `mask` and itself passes `sliding_window`; None for no window.

    Raises ValueError for another mask, and where the two windows differ: sdpa would follow the mask, and a flash
    attention the other one.
    """
    refuse({"attention_mask": None if isinstance(mask, int | ChunkedAttention | BothWays) else mask}, set())
    asked = "plain causal" if mask is None else str(mask)
    if isinstance(mask, int):
        asked = f"a window of {mask}"
    same = sliding_window == (mask if isinstance(mask, int) else None)
    expect(same, f"{layer} passes sliding_window={sliding_window}, and its mask is {asked}", "the same")
    return None if sliding_window is None else int(sliding_window)
