"""All-to-all (Ulysses): ranks exchange tokens for heads, compute whole attention on a few heads, and exchange back.

    before   rank r has all H heads of its C tokens
    between  rank r has H/P heads of all S tokens
    after    rank r has all H heads of its C tokens

A query head is attention by itself. So a rank can compute its heads alone, and no blocks travel while it computes. The
backward pass makes the same exchanges, in reverse.

Three mistakes here raise no error. Tokens arrive in order of rank, so the layout must be undone before a causal mask
fits. With more ranks than K/V heads, several ranks need the same one: each gets a copy, and the gradients of the copies
must be added. And heads must come back in the order in which they left.

Which query heads does a rank get, and which K/V heads do these need? Query head h uses K/V head h // (H/G).

    P divides G     rank r has H/P query heads on G/P K/V heads
    G divides P     rank r has H/P query heads, rounded up or down, on K/V head ⌊r·G/P⌋: P/G ranks have a copy of it
    neither         query heads are split as evenly as can be; a rank may have 1 on a K/V head and 2 on the next

Kernels for grouped queries want the same number of query heads on every K/V head. So such a rank computes its heads in
runs: in each of them the number is the same.

Shapes: q and out (B, H, C, D), k and v (B, G, C, D), chunks as in flash_ring.py. Between the exchanges rank r has H_r
of the query heads and G_r of the K/V heads: (B, H_r, S, D) and (B, G_r, S, D). In the forward pass it sends other ranks
their heads of its C tokens, and then their tokens of its heads of out. Where P divides G, these are
(1 - 1/P) · 2·B·(H + G)·C·D numbers. In the backward pass the ranks together send as many. All travel in q's dtype; the
gradients of copies are added in float32 at least.

    $ python -m ringlab.ways.all_to_all
    of 6 query heads on 2 the 4 ranks have 2 1 2 1
    zigzag: out would be off by 0.9913 if tokens stayed in order of rank
    4 ranks, S = 256, 6 query heads on 2, float32, against full attention in float64
    contiguous
    ok    out: largest error 5.8e-07, rounding allows 9.1e-06 (float32 sums)
    ...

Before: all_gather.py. After: hybrid.py, for more ranks than heads.
Source: Jacobs et al. 2023 (DeepSpeed Ulysses), section 3, for heads that divide. verl issue 1226: a model with 40 heads
on 8 that could take no more than 8 ranks. prime-rl PR 3042: copies of K/V heads.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import positions
from ringlab.ring.partition import Partition, Places, kept
from ringlab.ring.schedule import Round, Schedule, Sums
from ringlab.ways.heads import heads_of_ranks


def runs(mine: slice, served: int) -> list[tuple[slice, slice]]:
    """(query heads, K/V heads) of runs of the query heads `mine`, both counted from the rank's first.

    In a run every K/V head serves the same number. Where `served` = 3 query heads share a K/V head, query heads 2 to 6
    are cut into 2, 3 to 5, and 6: 1 on 1, 3 on 1, 1 on 1. Kernels for grouped queries take one run at a time.
    """
    users = Counter(h // served for h in range(mine.start, mine.stop)).values()  # of each K/V head, in order
    sizes = [(n, len(list(run))) for n, run in groupby(users)]
    ends = accumulate(((n * keys, keys) for n, keys in sizes), lambda end, run: (end[0] + run[0], end[1] + run[1]))
    return [
        (slice(queries_end - n * keys, queries_end), slice(keys_end - keys, keys_end))
        for (n, keys), (queries_end, keys_end) in zip(sizes, ends, strict=True)
    ]


def count(part: slice) -> int:
    """How many heads these are."""
    return part.stop - part.start


@dataclass(frozen=True)
class Alone:
    """The rounds of a rank that has all tokens: one block, its own, and nothing travels."""

    partition: Partition

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        yield 0, k, v, self.partition.pieces(0, 0)

    rounds_back = rounds

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> "OwnSums":
        return OwnSums(k, v, dtype)


class OwnSums:
    """dk (B, G, C, D) and dv (B, G, C, Dv) of the rank's own block, which no other rank adds to."""

    def __init__(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        self.d_kv = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v)]

    def of_round(self, t: int) -> list[Tensor]:
        return self.d_kv

    def send_on(self, t: int) -> None:
        pass

    def home(self) -> list[Tensor]:
        return self.d_kv


class AllToAll(Schedule):
    """Tokens for heads, whole attention on these heads, and heads for tokens. Jacobs et al. 2023, section 3."""

    cross_attention = False  # all ranks exchange the same tokens

    @cached_property
    def exchange(self) -> "Exchange":
        """Who gets which heads. Raises ValueError for more ranks than query heads."""
        heads = heads_of_ranks(self.heads, self.kv_heads, len(self.partition.lengths))
        return Exchange(*heads, order(self.partition, range(len(self.partition.lengths))), self.group)

    @cached_property
    def between(self) -> Schedule | Alone:
        """The schedule between the exchanges: this rank has all tokens of its heads, in order."""
        return Alone(Partition(self.partition.mask, "contiguous", (self.partition.seq_len,)))

    def prepare(self) -> None:
        _ = self.exchange

    @property
    def own_heads(self) -> slice:
        return self.exchange.queries[dist.get_rank(self.exchange.group)]

    def to_heads(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.exchange.to_heads(tensors)

    def to_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.exchange.to_tokens(tensors)

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        return self.of_heads(self.between.rounds(k, v))

    def rounds_back(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        return self.of_heads(self.between.rounds_back(k, v))

    def of_heads(self, rounds: Iterator[Round]) -> Iterator[Round]:
        """The same rounds, with the pieces of each run of this rank's heads."""
        runs_of_heads = runs(self.own_heads, self.heads // self.kv_heads)
        for t, k_j, v_j, pieces in rounds:
            of_runs = (replace(p, heads=heads, kv_heads=keys) for heads, keys in runs_of_heads for p in pieces)
            yield t, k_j, v_j, tuple(of_runs)

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Sums:
        return self.between.sums(k, v, dtype)


@dataclass(frozen=True, eq=False)
class Exchange:
    """Who gets which heads, and where the tokens of each rank stand among those of all ranks of the group."""

    queries: list[slice]  # the query heads of each rank
    keys: list[slice]  # the K/V heads that they use
    order: tuple[Places, ...]  # of rank s: C_s
    group: ProcessGroup | None

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """q, or q, k and v, (B, H or G, C, D) -> (B, H_r or G_r, S, D): this rank's heads, all tokens in order."""
        B, rank = len(tensors[0]), dist.get_rank(self.group)
        shares = (self.queries, self.keys, self.keys)[: len(tensors)]
        mine = [(count(share[rank]), x.shape[-1]) for x, share in zip(tensors, shares, strict=True)]  # heads, and D
        parts = [[x[:, share[s]] for x, share in zip(tensors, shares, strict=True)] for s in range(len(self.order))]
        lengths = [*map(len, self.order)]
        shapes = [[(B, heads, C, D) for heads, D in mine] for C in lengths]
        wholes = [tensors[0].new_empty(B, heads, sum(lengths), D) for heads, D in mine]
        for places, arrived in zip(self.order, swap(parts, shapes, self.group), strict=True):
            for whole, part in zip(wholes, arrived, strict=True):
                places.put(whole, part)
        return wholes

    def to_tokens(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Undo `to_heads`: (B, H_r or G_r, S, D) -> (B, H or G, C, D). What comes for copies of a head is added."""
        B, shares = len(wholes[0]), (self.queries, self.keys, self.keys)[: len(wholes)]
        theirs = [(share, whole.shape[-1]) for whole, share in zip(wholes, shares, strict=True)]  # heads, and D
        C = len(self.order[dist.get_rank(self.group)])
        parts = [[places.take(whole) for whole in wholes] for places in self.order]
        shapes = [[(B, count(share[s]), C, D) for share, D in theirs] for s in range(len(self.order))]
        wide = accumulation_dtype(wholes[0].dtype)
        sums = [wholes[0].new_zeros(B, share[-1].stop, C, D, dtype=wide) for share, D in theirs]
        for s, arrived in enumerate(swap(parts, shapes, self.group)):
            for x, share, part in zip(sums, shares, arrived, strict=True):
                x[:, share[s]] += part
        return [x.to(wholes[0].dtype) for x in sums]


def swap(
    parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]], group: ProcessGroup | None
) -> list[list[Tensor]]:
    """Send the tensors parts[s] to rank s, in one message. Return those that came from rank s, of shapes[s]."""
    sizes = [[math.prod(shape) for shape in message] for message in shapes]
    sent = torch.cat([part.flatten() for part in chain(*parts)])
    received = sent.new_empty(sum(map(sum, sizes)))
    sent_sizes = [sum(part.numel() for part in to_rank) for to_rank in parts]
    dist.all_to_all_single(received, sent, [sum(message) for message in sizes], sent_sizes, group=group)
    arrived = iter(received.split([*chain(*sizes)]))
    return [[next(arrived).view(shape) for shape in message] for message in shapes]


@kept  # every layer of a model asks the same
def order(partition: Partition, ranks: range) -> tuple[Places, ...]:
    """Of each of these ranks: where its tokens stand among the tokens of all of them."""
    at = [partition.positions(rank) for rank in ranks]
    return tuple(map(Places, torch.cat(at).argsort().argsort().split([len(of_rank) for of_rank in at])))


def main() -> int:
    from ringlab.ring.cases import random_inputs, report_cases
    from ringlab.support.rounding import exact_attention

    H, G, S, P = 6, 2, 256, 4
    whole, attention = random_inputs(1, H, G, S, 64), partial(ring_flash_attention, schedule=AllToAll)
    shares = " ".join(str(count(mine)) for mine in heads_of_ranks(H, G, P)[0])
    print(f"of {H} query heads on {G} the {P} ranks have {shares}")
    order = torch.cat([positions("zigzag", S, rank, P) for rank in range(P)])
    as_they_come = [x[:, :, order] for x in whole[:3]]
    right, wrong = (exact_attention(*x, causal=True)["out"].exact for x in (whole[:3], as_they_come))
    off = (wrong - right[:, :, order]).abs().max()
    print(f"zigzag: out would be off by {off:.4f} if tokens stayed in order of rank")
    return 0 if report_cases(P, whole, attention) else 1


if __name__ == "__main__":
    sys.exit(main())
