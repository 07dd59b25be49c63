"""Most masks let a query see one or two runs of keys. A rank's part of a block is then some rectangles and triangles.

    the query at position p sees the keys at    first(p) <= position < end(p)

    causal       first = 0                                end = p + 1
    documents    first = the first token of p's document  end = p + 1
    window w     first = p + 1 - w                        end = p + 1
    g global     first = the first token of p's document  end = first + g, or where the window begins: a second run

first and end never fall when p rises. So in the square of a rank's queries and a block's keys, each run is a staircase.
`cut` takes it apart: rectangles, triangles, and mirrored triangles, in which query i sees keys i ... to the last. A
fused kernel computes each of them whole, and computes nothing else.

Shapes: P ranks, `lengths[r]` tokens on rank r. first and end are (C,), int64, for the queries of a rank.

    $ python -m ringlab.training.masks
    8 tokens on 4 ranks, documents of 3 and 5 tokens
    contiguous: 2 hops; pairs on each rank 3 4 5 9
    zigzag: 3 hops; pairs on each rank 6 6 6 3
    striped: 3 hops; pairs on each rank 3 5 7 6
    ok    every pair that the mask shows is computed once, and no other

Before: fused_block.py. After: schedule.py, when these pieces are computed.
Source: Liu et al. 2024, section 3, leaves masks open; Beltagy et al. 2020 (Longformer), section 3.1, for windows.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ringlab.training.causal import LAYOUTS, BlockSlice, check_lengths, positions

TURNED = 768  # the largest mirrored triangle, in rows: the ring copies it in reverse order


def cut(first: Tensor, end: Tensor) -> Iterator[BlockSlice]:
    """Yield the pieces of a staircase in which query i sees keys first[i] ... end[i] - 1; each pair is in one piece.

    first and end (C,) int64 never fall. A query with end <= first sees nothing.
    """
    rows = (end > first).nonzero().flatten()  # the queries that see something
    first, end = first[rows], end[rows]
    steps = torch.stack([rows.diff(), first.diff(), end.diff()])  # (3, rows - 1), from a query to the next
    together = (steps[0] == 1) & (steps[1:] <= 1).all(dim=0)
    move = torch.where(together, 2 * steps[1] + steps[2], -1)
    changes = [*(1 + move.diff().nonzero().flatten()).tolist(), len(move)]
    rows, first, end, move = (x.tolist() for x in (rows, first, end, move))
    n = 0
    while n < len(rows):
        stop = n + 1  # the queries n ... stop - 1 move alike: each bound by 0 or 1 from a query to the next
        if n < len(move) and move[n] >= 0:
            stop += changes[bisect_right(changes, n)] - n
        first_moves, end_moves = divmod(move[n], 2) if stop > n + 1 else (0, 0)
        yield from pieces_of_run(rows[n], rows[n] + stop - n, first[n], end[n], first_moves, end_moves)
        n = stop


def pieces_of_run(i: int, stop: int, a: int, b: int, first_moves: int, end_moves: int) -> Iterator[BlockSlice]:
    """The pieces of queries i ... stop - 1, where i sees keys a ... b - 1, and each bound moves by 0 or 1 a query."""
    while i < stop:
        n = min(stop - i, b - a, TURNED) if first_moves else stop - i  # query i + n - 1 still sees key a + n - 1
        rows = slice(i, i + n)
        left = a + n if first_moves else a  # all n queries see the keys left ... right - 1
        right = b - 1 if end_moves and not first_moves else b
        if first_moves:
            yield BlockSlice(rows, slice(a, a + n), triangle=True, mirrored=True)
        if right > left:
            yield BlockSlice(rows, slice(left, right), triangle=False)
        if end_moves and first_moves and n > 1:
            yield BlockSlice(slice(i + 1, i + n), slice(b, b + n - 1), triangle=True)
        elif end_moves and not first_moves:
            yield BlockSlice(rows, slice(b - 1, b - 1 + n), triangle=True)
        i, a, b = i + n, a + n * first_moves, b + n * end_moves


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, and where the tokens of each rank stand: what each rank computes follows from both.

    Raises ValueError when the layout does not fit the lengths, the lengths of the documents do not add up to the
    tokens, a document is empty, the window is below 1 or without `causal`, or global tokens have no window.
    """

    layout: str
    lengths: tuple[int, ...]  # the chunk length C of every rank
    causal: bool = False
    documents: tuple[int, ...] | None = None  # their lengths in tokens, in order; None: one document
    window: int | None = None  # a query sees that many keys at most, its own among them
    global_tokens: int = 0  # besides its window, a query sees the first so many of its document

    def __post_init__(self) -> None:
        check_lengths(self.layout, list(self.lengths))
        if self.documents is not None and (sum(self.documents) != self.seq_len or min(self.documents) < 1):
            raise ValueError(
                f"documents of {_few(self.documents)} tokens, {sum(self.documents):,} in all, for a sequence of "
                f"{self.seq_len:,}; expected 1 token or more in each, and {self.seq_len:,} in all: padding counts as "
                f"one more document"
            )
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(
                f"window is {self.window} with causal={self.causal}; expected 1 token or more, and causal=True"
            )
        if self.global_tokens < 0 or (self.global_tokens and self.window is None):
            raise ValueError(
                f"global_tokens is {self.global_tokens} with window={self.window}; expected 0 or more, and a window: "
                f"without one a query sees the first tokens anyway"
            )

    @property
    def seq_len(self) -> int:
        return sum(self.lengths)

    def place(self, rank: int) -> Tensor:
        """Where in the sequence the tokens of `rank` stand: (C,), int64, rising."""
        if self.layout == "contiguous":
            before = sum(self.lengths[:rank])
            return torch.arange(before, before + self.lengths[rank])
        return positions(self.layout, self.seq_len, rank, len(self.lengths)).contiguous()

    def visible_keys(self, at: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The runs of keys, first <= position < end, that each query `at` (C,) sees: (C,) and (C,), no key in two."""
        begin, end = torch.zeros_like(at), torch.full_like(at, self.seq_len)
        if self.documents is not None:
            ends = torch.tensor(list(accumulate(self.documents)))
            document = torch.searchsorted(ends, at, right=True)
            end = ends[document]
            begin = end - torch.tensor(self.documents)[document]
        if self.causal:
            end = at + 1
        if self.window is None:
            return [(begin, end)]
        first = torch.maximum(begin, end - self.window)
        return [(first, end), (begin, torch.minimum(begin + self.global_tokens, first))]

    def runs(self, rank: int, block: int) -> list[tuple[Tensor, Tensor]]:
        """`visible_keys` of the queries of `rank`, counted in the keys of `block`."""
        keys = self.place(block)
        seen = self.visible_keys(self.place(rank))
        return [(torch.searchsorted(keys, first), torch.searchsorted(keys, end)) for first, end in seen]

    def pairs(self, rank: int) -> int:
        """How many (query, key) pairs `rank` computes in all rounds."""
        return sum(int((end - first).clamp(min=0).sum()) for first, end in self.visible_keys(self.place(rank)))

    @lru_cache(maxsize=4096)  # noqa: B019 (every layer of a model asks the same; masks are small)
    def pieces(self, rank: int, block: int) -> tuple[BlockSlice, ...]:
        """What `rank` computes of `block`. Without a mask, all of it, however many queries the rank has."""
        if not self.causal and self.documents is None:
            return (BlockSlice(slice(None), slice(None), triangle=False),)
        return tuple(piece for run in self.runs(rank, block) for piece in cut(*run))

    @property
    @lru_cache(maxsize=64)  # noqa: B019 (the same)
    def hops(self) -> int:
        """How often the blocks must move on: until no rank further on sees a key of any of them."""
        world_size = len(self.lengths)
        for hops in range(world_size - 1, 0, -1):
            for block in range(world_size):
                if any((end > first).any() for first, end in self.runs((block + hops) % world_size, block)):
                    return hops
        return 0


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def covered(mask: Mask) -> Tensor:
    """How many pieces each (query, key) pair of the sequence is in: (S, S), counted by drawing them all."""
    world_size = len(mask.lengths)
    times = torch.zeros(mask.seq_len, mask.seq_len, dtype=torch.int64)
    for rank in range(world_size):
        for block in range(world_size):
            for piece in mask.pieces(rank, block):
                rows, keys = mask.place(rank)[piece.queries], mask.place(block)[piece.keys]
                square = torch.ones(len(rows), len(keys), dtype=torch.int64)
                if piece.triangle:
                    square = square.triu() if piece.mirrored else square.tril()
                times[rows[:, None], keys] += square
    return times


def main() -> int:
    documents, P, ok = (3, 5), 4, True
    number = torch.tensor([0] * 3 + [1] * 5)  # of each token's document
    visible = (number[:, None] == number).tril().long()
    print(f"{sum(documents)} tokens on {P} ranks, documents of {' and '.join(map(str, documents))} tokens")
    for layout in LAYOUTS:
        mask = Mask(layout, (2,) * P, causal=True, documents=documents)
        drawn = covered(mask)
        work = " ".join(str(drawn[mask.place(rank)].sum().item()) for rank in range(P))
        print(f"{layout}: {mask.hops} hops; pairs on each rank {work}")
        ok &= torch.equal(drawn, visible)
    print(f"{'ok   ' if ok else 'WRONG'} every pair that the mask shows is computed once, and no other")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
