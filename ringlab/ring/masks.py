"""A mask says which keys a query sees. Most masks show a query one or two runs of keys.

    the query at position p sees the keys at    first(p) <= position < end(p)

    causal       first = 0                                end = p + 1
    documents    first = the first token of p's document  end = p + 1, or without `causal` the document's end
    window w     first = p + 1 - w                        end = p + 1
    g global     first = the first token of p's document  end = first + g, or where the window begins: a second run

first and end never fall when p rises: the next file makes use of it. A mask knows nothing of ranks, layouts or blocks.

Shapes: positions p, first and end are (C,), int64, for C queries anywhere in a sequence of S tokens.

    $ python -m ringlab.ring.masks
    8 tokens: documents of 3 and 5, a window of 2, 1 global token. Query p sees the keys #
    0  #.......
    1  ##......
    2  ###.....
    3  ...#....
    4  ...##...
    5  ...###..
    6  ...#.##.
    7  ...#..##
    ok    each query sees the keys that the words above say

Before: fused_block.py. After: partition.py, what each rank computes.
Source: Liu et al. 2024, section 3, leaves masks open; Beltagy et al. 2020 (Longformer), section 3.1, for windows.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor


def lengths_of(documents: Any) -> Any:
    """The lengths of documents, a list, tuple, tensor or array (documents,), as a tuple: a cache's key. Or as it is."""
    if isinstance(documents, Tensor | np.ndarray) and documents.ndim == 1:
        documents = documents.tolist()
    if not isinstance(documents, list | tuple):
        return documents
    lengths = tuple(documents)  # thousands, in each layer: so no line of Python for each
    return lengths if {*map(type, lengths)} == {int} else tuple(map(whole, lengths))


def whole(number: Any) -> Any:
    """A whole number of numpy as Python's. Others as they are."""
    return int(number) if isinstance(number, np.integer) else number


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees. The fields are arguments of `ring_flash_attention`.

    Raises ValueError when the lengths of documents or a window are no whole numbers, a document is empty, the window is
    below 1 or without `causal`, or global tokens have no window.
    """

    causal: bool = False
    documents: Sequence[int] | Tensor | None = None  # their lengths in tokens, in order; None: one document
    window: int | None = None  # a query sees that many keys at most, its own among them
    global_tokens: int = 0  # besides its window, a query sees the first so many of its document

    def __post_init__(self) -> None:
        object.__setattr__(self, "causal", bool(self.causal))
        lengths = lengths_of(self.documents)
        if lengths is not None and (not isinstance(lengths, tuple) or {*map(type, lengths)} != {int}):
            raise ValueError(
                f"documents is {lengths!r}; expected a list of their lengths, whole numbers, or a tuple or tensor "
                f"(documents,) of them, or None"
            )
        for name, value in (("documents", lengths), ("window", self.window), ("global_tokens", self.global_tokens)):
            object.__setattr__(self, name, whole(value))
        if self.window is not None and type(self.window) is not int:
            raise ValueError(f"window is {self.window!r}; expected a whole number of tokens, or None")
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(
                f"window is {self.window} with causal={self.causal}; expected 1 token or more, and causal=True"
            )
        if type(self.global_tokens) is not int:
            raise ValueError(f"global_tokens is {self.global_tokens!r}; expected a whole number of tokens")
        if self.global_tokens < 0 or (self.global_tokens and self.window is None):
            raise ValueError(
                f"global_tokens is {self.global_tokens} with window={self.window}; expected 0 or more, and a window: "
                f"without one a query sees the first tokens anyway"
            )

    @property
    def shows_all(self) -> bool:
        """Whether every query sees every key. Then queries need no positions: cross-attention is possible."""
        return not self.causal and self.documents is None

    def check_length(self, seq_len: int) -> None:
        """Raise ValueError unless the documents fill the sequence."""
        if self.documents is not None and (sum(self.documents) != seq_len or min(self.documents) < 1):
            few = ", ".join(map(str, self.documents[:8])) + (", ..." if len(self.documents) > 8 else "")
            raise ValueError(
                f"documents of {few} tokens, {sum(self.documents):,} in all, for a sequence of {seq_len:,}; expected "
                f"1 token or more in each, and {seq_len:,} in all: padding counts as one more document"
            )

    def visible_keys(self, at: Tensor, seq_len: int) -> list[tuple[Tensor, Tensor]]:
        """The runs of keys, first <= position < end, that each query `at` (C,) sees: (C,) and (C,), no key in two."""
        begin, end = torch.zeros_like(at), torch.full_like(at, seq_len)
        if self.documents is not None:
            ends = torch.tensor(list(accumulate(self.documents)))
            document = torch.searchsorted(ends, at, right=True)
            end = ends[document]
            begin = end - torch.tensor(self.documents)[document]
        if self.causal:
            end = at + 1
        if self.window is None:
            return [(begin, end)]
        window, global_tokens = min(self.window, seq_len), min(self.global_tokens, seq_len)
        first = torch.maximum(begin, end - window)
        return [(first, end), (begin, torch.minimum(begin + global_tokens, first))]

    def dense(self, at: Tensor, seq_len: int) -> Tensor:
        """Whether each query `at` (C,) sees each of S keys: (C, S), bool. For checks: a ring never makes it."""
        keys, seen = torch.arange(seq_len), torch.zeros(len(at), seq_len, dtype=torch.bool)
        for first, end in self.visible_keys(at, seq_len):
            seen |= (first[:, None] <= keys) & (keys < end[:, None])
        return seen


def main() -> int:
    S, documents, window, global_tokens = 8, (3, 5), 2, 1
    print(
        f"{S} tokens: documents of {' and '.join(map(str, documents))}, a window of {window}, {global_tokens} global "
        f"token. Query p sees the keys #"
    )
    at = torch.arange(S)
    seen = Mask(True, documents, window, global_tokens).dense(at, S)
    for p in range(S):
        print(f"{p}  {''.join('#' if key else '.' for key in seen[p].tolist())}")
    begin = torch.tensor([0] * 3 + [3] * 5)  # of each token's document
    behind = at[:, None] - at
    words = (begin[:, None] == begin) & (behind >= 0) & ((behind < window) | (at == begin[:, None]))
    ok = torch.equal(seen, words)
    print(f"{'ok   ' if ok else 'WRONG'} each query sees the keys that the words above say")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
