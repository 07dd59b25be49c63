"""The catalogue, continued: masks that are wrong in a ring.

What a query sees depends on where in the sequence its token and the key stand, and so on the layout. A mistake replaces
the step `sees`: which keys of a block the queries of a rank see. It is a formula about pairs, for each block:

    causal(lambda x: x.n <= x.i)        under a causal mask every block is a triangle by its own indices

Before: travel.py. After: other_ways.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ring_doctor.asking.case import Case, positions
from ring_doctor.mistakes import Change, but, told
from ring_doctor.mistakes.paper_ring import NotOnPaper, Steps
from ringlab.ring.layouts import LAYOUTS


class Pairs:
    """The queries of rank r, a column, and the keys of block j, a row: i and n in their chunks, p and c in all."""

    def __init__(self, steps: Steps, case: Case, r: int, j: int) -> None:
        self.steps, self.case, self.r, self.j, self.window = steps, case, r, j, case.window
        self.p, self.c = case.positions(r)[:, None], case.positions(j)
        self.rows, self.keys = len(self.p), len(self.c)
        self.i, self.n = torch.arange(self.rows)[:, None], torch.arange(self.keys)
        self.own, self.before, self.after = j == r, j < r, j > r  # the block is the rank's own, or of which ranks
        self.zigzag, self.striped = case.layout == "zigzag", case.layout == "striped"

    def of(self, **other: Any) -> Tensor:
        """The right pairs of a case that is another in this: (Cq, Ck) bool."""
        return self.steps.sees(replace(self.case, **other), self.r, self.j)

    @property
    def seen(self) -> Tensor:
        """The right pairs."""
        return self.of()

    def believed(self, at: Callable[[Case, int], Tensor]) -> Tensor:
        """The right pairs of a sequence in which the tokens of a rank stand at(case, rank)."""
        return self.case.visible()[at(self.case, self.r)][:, at(self.case, self.j)]


Sees = Callable[[Pairs], Any]  # (Cq, Ck) bool, or what broadcasts to it


def sees(wrong: Sees) -> Change:
    """These pairs are seen."""

    def mask(*tile: Any) -> Tensor:
        x = Pairs(*tile)
        return torch.as_tensor(wrong(x)).expand(x.rows, x.keys)

    return but(sees=mask)


def causal(wrong: Sees, *, only: bool = False) -> Change:
    """These pairs are seen in causal cases, and the right ones in the others.

    Windows and documents hide keys besides. With `only` they do not: this mask is all that the kernel gets.
    """

    def mask(x: Pairs) -> Tensor:
        if not x.case.causal or only:
            return wrong(x) if x.case.causal else x.seen
        near = True if x.window is None else x.c > x.p - x.window
        return x.of(causal=False, window=None) & near & wrong(x)

    return sees(mask)


def believed(at: Callable[[Case, int], Tensor]) -> Change:
    """The mask of a sequence in which the tokens of a rank stand at(case, rank)."""
    return sees(lambda x: x.believed(at))


def in_place_of(layout: str, case: Case, rank: int) -> Tensor:
    """The positions of a rank in another layout. Raises NotOnPaper where the tokens do not fit."""
    try:
        return positions(layout, case.seq_len, rank, case.world_size)
    except ValueError as error:
        raise NotOnPaper from error


def whole_tiles(tile: int) -> Change:
    return sees(lambda x: x.seen & (x.n < x.keys // tile * tile) if x.keys > tile else x.seen)


def other_window(x: Pairs, more: int) -> Tensor:
    return x.seen if x.window is None else x.of(window=max(1, x.window + more))


def window_alone(x: Pairs) -> Tensor:
    """The window as window_size (W - 1, right) without the causal mask; a right side of -1 has no end."""
    right = x.case.window_right
    near = (x.c > x.p - (x.window or 0)) & ((x.c <= x.p + right) | (right < 0))
    return x.of(causal=False, window=None) & near if right else x.seen


def fewer_hops(x: Pairs, less: int, more: int = 0) -> Tensor:
    hops = ((x.window or 0) - less) // x.keys + more
    return x.seen & (x.window is None or x.case.layout != "contiguous" or x.r - x.j <= hops)


def documents_by_indices(x: Pairs, *, tail_is_a_document: bool) -> Tensor:
    if x.case.documents is None:
        return x.seen
    ends = torch.tensor(list(accumulate(n // x.case.world_size for n in x.case.documents)))
    mine, theirs = (torch.searchsorted(ends, at, right=True) for at in (x.i, x.n))
    return x.of(documents=None) & (mine == theirs) & (tail_is_a_document | (mine < len(x.case.documents)))


CHANGES = {
    "mask_forgotten": [sees(lambda x: x.of(causal=False, window=None)), causal(lambda x: True)],
    "causal_per_block": [
        *(causal(lambda x: x.n <= x.i, only=only) for only in (True, False)),
        *(causal(lambda x: (x.n <= x.i) & x.seen.any(), only=only) for only in (True, False)),
    ],
    "only_own_masked": [*(causal(lambda x: x.seen | (not x.own), only=only) for only in (True, False))],
    "own_block_unmasked": [causal(lambda x: x.seen | x.own)],
    "mask_inverted": [causal(lambda x: x.c >= x.p), causal(lambda x: ~x.seen)],
    # In striped the blocks of earlier ranks are triangles too, and lose their diagonal.
    "diagonal_hidden": [
        causal(lambda x: x.seen & (x.c != x.p)),
        causal(lambda x: x.n < x.i if x.own or (x.striped and x.before) else x.seen),
        causal(lambda x: x.n < x.i - int(x.after) if x.own or x.striped else x.seen),  # and of those of later ranks
    ],
    "key_lost_at_a_border": [
        # the last or the first key of each block of other ranks, or of each block
        *map(lambda at: sees(lambda x: x.seen & ((x.n != at % x.keys) | x.own)), (-1, 0)),
        *map(lambda at: sees(lambda x: x.seen & (x.n != at % x.keys)), (-1, 0)),
        causal(lambda x: x.seen & ((x.n != x.keys - 1) | (x.j != x.r - 1))),  # of gathered keys: a key too early
    ],
    "causal_unasked": [sees(lambda x: x.of(causal=True))],
    "next_token_seen": [causal(lambda x: x.c <= x.p + 1), causal(lambda x: x.c <= x.p + 1 if x.own else x.seen)],
    "chunk_index_under_zigzag": [causal(lambda x: x.n <= x.i if x.own else x.before)],
    "halves_swapped": [causal(lambda x: x.believed(lambda case, r: case.positions(r).roll(x.rows // 2 * x.zigzag)))],
    **{f"positions_of_{layout}": [believed(partial(in_place_of, layout))] for layout in LAYOUTS},
    "last_tile_lost": [*(whole_tiles(tile) for tile in (128, 64, 256))],
    "window_ignored": [sees(lambda x: x.of(window=None))],
    "window_one_more": [sees(lambda x: other_window(x, 1)), sees(lambda x: other_window(x, 1) & x.seen.any())],
    "window_one_less": [sees(lambda x: other_window(x, -1))],
    "causal_forgotten_with_a_window": [sees(window_alone)],
    "window_hops_rounded_down": [
        # (W - 1) / C or W / C hops, rounded down: this is right where C divides W
        *(sees(partial(fewer_hops, less=less)) for less in (1, 0)),
        sees(partial(fewer_hops, less=3, more=1)),  # > and not >=: a chunk of which the window has one key is left out
    ],
    "documents_ignored": [sees(lambda x: x.of(documents=None))],
    "documents_per_chunk": [*(sees(partial(documents_by_indices, tail_is_a_document=tail)) for tail in (False, True))],
    "documents_end_with_the_chunk": [sees(lambda x: x.seen & (x.case.documents is None or x.own))],
}
MISTAKES = told("Masks", CHANGES)
