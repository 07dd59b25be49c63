"""A mask and a layout say what each rank computes of each block: some rectangles and triangles, and nothing else.

    positions of the queries  ->  first and end of the keys that they see, in all keys  ->  the same inside the block

first and end never fall from a query to the next. So in the square of a rank's queries and a block's keys, each run of
visible keys is a staircase. `cut` takes it apart: rectangles, triangles, and upper triangles, in which query i sees
keys i ... to the last. A fused kernel computes each of them whole.

Shapes: P ranks, `lengths[r]` tokens on rank r. first and end are (C,), int64, for the queries of a rank.

    $ python -m ringlab.ring.partition
    8 tokens on 4 ranks, documents of 3 and 5 tokens
    contiguous: 2 hops; pairs on each rank 3 4 5 9
    zigzag: 3 hops; pairs on each rank 6 6 6 3
    striped: 3 hops; pairs on each rank 3 5 7 6
    ok    every pair that the mask shows is computed once, and no other

Before: masks.py. After: schedule.py, when these pieces are computed.
Source: Liu et al. 2024, section 3, leaves masks open; Brandon et al. 2023, section 3, for the triangles of stripes.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ringlab.ring.layouts import LAYOUTS, NAMED, Layout, check_lengths, layout_of, order
from ringlab.ring.masks import Mask

LARGEST_UPPER = 768  # rows of an upper triangle at most: the ring copies it in reverse order
FEW = 2  # slices for which a tensor needs no index
Result = TypeVar("Result")


def kept(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function of an object and more: each result is kept in the object, and dies with it."""

    @wraps(function)
    def call(it: Any, *args: Any) -> Result:
        known = vars(it).setdefault(f"results of {function.__qualname__}", {})
        if args not in known:
            known[args] = function(it, *args)
        return known[args]

    return call


@dataclass(frozen=True)
class BlockSlice:
    """What a rank computes of a block: some of its queries, some of the block's keys, and all pairs or a triangle."""

    queries: slice
    keys: slice
    triangle: bool  # query i sees keys 0 ... i
    upper: bool = False  # the triangle is the upper one: query i sees keys i ... (for windows)
    heads: slice = field(default_factory=lambda: slice(None))  # of the queries; other ways take some at a time
    kv_heads: slice = field(default_factory=lambda: slice(None))  # of the block
    hidden: Tensor | None = None  # (B, 1, queries, keys), True where a query did not choose a key


def cut(first: Tensor, end: Tensor) -> Iterator[BlockSlice]:
    """Yield the pieces of a staircase in which query i sees keys first[i] ... end[i] - 1; each pair is in one piece.

    first and end (C,) int64 never fall. A query with end <= first sees nothing.
    """
    rows = (end > first).nonzero().flatten()  # the queries that see something
    first, end = first[rows], end[rows]
    moves = torch.stack([first.diff(), end.diff()])  # (2, rows - 1), from a query to the next
    together = (rows.diff() == 1) & (moves <= 1).all(dim=0)
    moves = moves.where(together, -1)
    changes = [*(1 + moves.diff().any(dim=0).nonzero().flatten()).tolist(), len(together)]
    row, begins, ends, first_moves, end_moves = (x.tolist() for x in (rows, first, end, *moves))
    n = 0
    while n < len(row):
        stop, bounds_move = n + 1, (0, 0)
        if n < len(first_moves) and first_moves[n] >= 0:  # the queries n ... stop - 1 move alike
            stop, bounds_move = changes[bisect_right(changes, n)] + 1, (first_moves[n], end_moves[n])
        yield from pieces_of_run(row[n], row[n] + stop - n, begins[n], ends[n], *bounds_move)
        n = stop


def pieces_of_run(i: int, stop: int, a: int, b: int, first_moves: int, end_moves: int) -> Iterator[BlockSlice]:
    """The pieces of queries i ... stop - 1, where i sees keys a ... b - 1, and each bound moves by 0 or 1 a query."""
    while i < stop:
        n = min(stop - i, b - a, LARGEST_UPPER) if first_moves else stop - i  # query i + n - 1 still sees key a + n - 1
        rows = slice(i, i + n)
        left = a + n if first_moves else a  # all n queries see the keys left ... right - 1
        right = b - 1 if end_moves and not first_moves else b
        if first_moves:
            yield BlockSlice(rows, slice(a, a + n), triangle=True, upper=True)
        if right > left:
            yield BlockSlice(rows, slice(left, right), triangle=False)
        if end_moves and first_moves and n > 1:
            yield BlockSlice(slice(i + 1, i + n), slice(b, b + n - 1), triangle=True)
        elif end_moves and not first_moves:
            yield BlockSlice(rows, slice(b - 1, b - 1 + n), triangle=True)
        i, a, b = i + n, a + n * first_moves, b + n * end_moves


class Places:
    """Where some tokens stand among those of a longer tensor (B, heads, S, D): in a few slices, or else by an index.

    Slices need nothing on the device. An index is copied there, and the host waits for it: so it is copied once.
    """

    def __init__(self, at: Tensor) -> None:
        """`at` (C,) are the places, int64, rising."""
        self.at, self.slices = at, list[slice]()
        begin, steps = 0, at.diff()
        while begin < len(at) and len(self.slices) <= FEW:
            step = int(steps[begin]) if begin < len(steps) else 1
            others = (steps[begin:] != step).nonzero()
            end = begin + 1 + (int(others[0]) if len(others) else len(steps) - begin)
            self.slices.append(slice(int(at[begin]), int(at[end - 1]) + 1, step))
            begin = end

    def __len__(self) -> int:
        return len(self.at)

    @kept
    def index(self, device: torch.device) -> Tensor:
        """The places (C,) on a device."""
        return self.at.to(device)

    def take(self, x: Tensor) -> Tensor:
        """These tokens of x (B, heads, S, D): (B, heads, C, D)."""
        if len(self.slices) > FEW:
            return x.index_select(2, self.index(x.device))
        parts = [x[:, :, part] for part in self.slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def put(self, x: Tensor, tokens: Tensor) -> None:
        """Write the tokens (B, heads, C, D) into x (B, heads, S, D)."""
        if len(self.slices) > FEW:
            x.index_copy_(2, self.index(x.device), tokens)
            return
        places = [x[:, :, part] for part in self.slices]
        for place, part in zip(places, tokens.split([place.shape[2] for place in places], dim=2), strict=True):
            place.copy_(part)


@dataclass(frozen=True)
class Partition:
    """What each rank computes of each block: from a mask, a layout and the chunk length C of every rank.

    Raises ValueError when the lengths do not fit the layout, or the documents of the mask do not fill the sequence.
    """

    mask: Mask
    layout: str | Layout
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        check_lengths(self.layout, self.lengths)
        self.mask.check_length(self.seq_len)

    @property
    def seq_len(self) -> int:
        return sum(self.lengths)

    def positions(self, rank: int) -> Tensor:
        """Where in the sequence the tokens of `rank` stand: (C,), int64, rising."""
        layout = layout_of(self.layout)
        if layout == NAMED["contiguous"]:  # its chunks may have any lengths
            before = sum(self.lengths[:rank])
            return torch.arange(before, before + self.lengths[rank])
        return layout.positions(self.seq_len, rank, len(self.lengths)).contiguous()

    @kept
    def places(self, rank: int) -> Places:
        """`positions`, to take the tokens of `rank` out of all, or to put them there."""
        return Places(self.positions(rank))

    @cached_property
    def order(self) -> int:
        """A number for the positions of all ranks, the same where they are the same."""
        return order(self.layout, self.seq_len, len(self.lengths))

    @cached_property
    def striped(self) -> bool:
        """Whether each rank has every P-th token, whatever the layout is called."""
        P = len(self.lengths)
        return all(torch.equal(self.positions(rank), torch.arange(rank, self.seq_len, P)) for rank in range(P))

    def visible_keys(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """`Mask.visible_keys` of the queries of `rank`."""
        return self.mask.visible_keys(self.positions(rank), self.seq_len)

    def runs(self, rank: int, block: int) -> list[tuple[Tensor, Tensor]]:
        """`visible_keys` of `rank`, counted in the keys of `block`."""
        keys = self.positions(block)
        seen = self.visible_keys(rank)
        return [(torch.searchsorted(keys, first), torch.searchsorted(keys, end)) for first, end in seen]

    def pairs(self, rank: int) -> int:
        """How many (query, key) pairs `rank` computes in all rounds."""
        return sum(int((end - first).clamp(min=0).sum()) for first, end in self.visible_keys(rank))

    @kept  # every layer of a model asks the same
    def pieces(self, rank: int, block: int) -> tuple[BlockSlice, ...]:
        """What `rank` computes of `block`. Where the mask shows all: the whole block, for any number of queries."""
        if self.mask.shows_all:
            return (BlockSlice(slice(None), slice(None), triangle=False),)
        return tuple(piece for run in self.runs(rank, block) for piece in cut(*run))

    @cached_property
    def hops(self) -> int:
        """How often the blocks must move on: until no rank further on sees a key of any of them."""
        world_size, hops = len(self.lengths), 0
        blocks = [self.positions(block) for block in range(world_size)]
        keys = pad_sequence(blocks, batch_first=True, padding_value=self.seq_len)  # (P, C)
        for rank, at in enumerate(blocks):
            for first, end in self.mask.visible_keys(at, self.seq_len):
                apart = first[1:] > end[:-1]  # between them are keys that no query of this rank sees
                first, end = first[F.pad(apart, (1, 0), value=True)], end[F.pad(apart, (0, 1), value=True)]
                begun, ended = (torch.searchsorted(keys, x.repeat(world_size, 1)) for x in (first, end))
                seen = (ended > begun).any(dim=1).nonzero().flatten()  # the blocks with a key in such a stretch
                hops = max([hops, *((rank - seen) % world_size).tolist()])
        return hops


def every(step: int, offset: int, part: slice) -> slice:
    """`part` of stripe number `offset`, counted in a sequence of `step` stripes: slice(a, b) of it is every step-th."""
    return slice(offset + step * part.start, offset + step * part.stop, step)


def covered(partition: Partition) -> Tensor:
    """How many pieces each (query, key) pair of the sequence is in: (S, S), counted by drawing them all."""
    world_size = len(partition.lengths)
    times = torch.zeros(partition.seq_len, partition.seq_len, dtype=torch.int64)
    for rank in range(world_size):
        for block in range(world_size):
            for piece in partition.pieces(rank, block):
                rows, keys = partition.positions(rank)[piece.queries], partition.positions(block)[piece.keys]
                square = torch.ones(len(rows), len(keys), dtype=torch.int64)
                if piece.triangle:
                    square = square.triu() if piece.upper else square.tril()
                times[rows[:, None], keys] += square
    return times


def main() -> int:
    documents, P, ok = (3, 5), 4, True
    number = torch.tensor([0] * 3 + [1] * 5)  # of each token's document
    visible = (number[:, None] == number).tril().long()
    print(f"{sum(documents)} tokens on {P} ranks, documents of {' and '.join(map(str, documents))} tokens")
    for layout in LAYOUTS:
        partition = Partition(Mask(causal=True, documents=documents), layout, (2,) * P)
        drawn = covered(partition)
        work = " ".join(str(drawn[partition.positions(rank)].sum().item()) for rank in range(P))
        print(f"{layout}: {partition.hops} hops; pairs on each rank {work}")
        ok &= torch.equal(drawn, visible)
    print(f"{'ok   ' if ok else 'WRONG'} every pair that the mask shows is computed once, and no other")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
