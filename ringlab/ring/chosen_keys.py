"""Chosen keys: an index gives every key a score, and a query attends to the keys with the largest scores only.

    score of key t for query s    I[s, t] = Σ_j w[s, j] · relu(q[s, j] · k[t])        (DeepSeek's lightning indexer)
    chosen                        the `count` keys with the largest scores that the mask shows; ties: the first ones

The index keys are small, one head of E numbers, so a ring of their own goes first. A rank keeps the best `count` keys
so far, and merges each block that arrives into them. It never has a row of S scores. Then attention computes, of each
block, the tiles of which a query chose a key. Blocks travel as far as some rank needs one of them.

Shapes: index_q (B, J, C, E) and index_weights (B, J, C) of J index heads, index_k (B, C, E). chosen (B, C, count),
int64: positions in the whole sequence, or -1 where a query sees fewer keys.

    $ python -m ringlab.ring.chosen_keys
    the failure: 2 keys a query, the best of each rank's own shard: 6 of 8 queries miss a key
    ok    the ring: the keys of torch.topk of the whole row, on 4 ranks in 3 layouts

The choice has no gradient. In training the index gets a loss of its own (DeepSeek-V3.2, section 2.1).

Before: schedule.py. After: flash_ring.py, the attention to these keys, and latent_ring.py.
Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1, equations 1 and 2, with k = 2048.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringlab.basics.blockwise_attention import TILE
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.ring.backward import left_as_it_is
from ringlab.ring.layouts import LAYOUTS, Layout, shard, unshard
from ringlab.ring.partition import BlockSlice, Partition
from ringlab.ring.schedule import Group, Ring, Schedule, agree_on_schedule
from ringlab.support.agreement import agree, flat_group, members, one_pass
from ringlab.support.processes import RankContext, launch

Candidates = tuple[Tensor, Tensor]  # scores and positions (B, C, n): the best n keys so far


@left_as_it_is
@torch.no_grad()
def choose_keys(
    index_q: Tensor,
    index_weights: Tensor,
    index_k: Tensor,
    count: int,
    *,
    causal: bool = True,
    layout: str | Layout = "contiguous",
    documents: Sequence[int] | Tensor | None = None,
    group: Group = None,
) -> Tensor:
    """The positions (B, C, count), int64, of the keys with the largest index scores that each query of this rank sees.

    index_q (B, J, C, E), index_weights (B, J, C) and index_k (B, C, E) are this rank's chunks, as `ringlab.shard` cuts
    them in `layout`, of one floating dtype. Scores are computed in float32 at least. Of equal scores the smaller
    position is chosen. A query that sees fewer than `count` keys has all of them, then -1. No gradient goes through
    the choice. Every rank of the group must call it. Where the input of a rank is wrong or the ranks disagree, every
    rank raises the same ValueError before a key travels. DeepSeek-AI 2025, equations 1 and 2.
    """

    def check(*_: Tensor) -> None:
        check_index(index_q, index_weights, index_k, count)

    def same() -> dict[str, Any]:
        return {"J": index_q.shape[1], "E": index_q.shape[3], "count": count}

    k = index_k[:, None] if isinstance(index_k, Tensor) and index_k.dim() == 3 else index_k  # (B, 1, C, E)
    options: dict[str, Any] = {"causal": causal, "layout": layout, "documents": documents, "schedule": Ring}
    ring = agree_on_schedule(index_q, k, k, 1.0, group, "choose_keys", check=check, same=same, **options)
    with one_pass(ring.group), torch.autocast(index_q.device.type, enabled=False):  # it would score in 16 bits
        return best_of_blocks(index_q, index_weights, k, count, ring)


def check_index(index_q: Tensor, index_weights: Tensor, index_k: Tensor, count: int) -> None:
    """Raise ValueError unless the inputs of `choose_keys` fit each other."""
    if type(count) is not int or count < 1:
        raise ValueError(f"count is {count!r}; expected 1 key a query or more")
    inputs = {"index_q": index_q, "index_weights": index_weights, "index_k": index_k}
    for (name, x), dims in zip(inputs.items(), (4, 3, 3), strict=True):
        if not isinstance(x, Tensor) or x.dim() != dims or x.dtype != index_q.dtype or x.device != index_q.device:
            given = f"{x.dtype} of shape {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)
            expected = "index_q (B, J, C, E), index_weights (B, J, C), index_k (B, C, E), of one dtype, on one device"
            raise ValueError(f"{name} is {given}; expected {expected}")
    B, J, C, E = index_q.shape
    if index_weights.shape != (B, J, C) or index_k.shape != (B, C, E):
        shapes = ", ".join(f"{name} has shape {tuple(x.shape)}" for name, x in inputs.items())
        raise ValueError(f"{shapes}; expected (B, J, C, E), (B, J, C) and (B, C, E): chunks of the same tokens")


def best_of_blocks(index_q: Tensor, index_weights: Tensor, index_k: Tensor, count: int, ring: Schedule) -> Tensor:
    """`choose_keys` of checked chunks; index_k is (B, 1, C, E)."""
    (rank, world_size), partition = members(flat_group(ring.group)), ring.partition
    dtype, device, (B, _, C, _) = accumulation_dtype(index_q.dtype), index_q.device, index_q.shape
    ((first, end),) = partition.visible_keys(rank)
    first, end = (x.to(device)[:, None] for x in (first, end))  # (C, 1)
    scores = torch.full((B, C, count), -torch.inf, dtype=dtype, device=device)
    chosen = torch.full((B, C, count), -1, device=device)
    for t, k_j, _, pieces in ring.rounds(index_k, index_k[..., :0]):
        if not pieces:
            continue
        at = partition.positions((rank - t) % world_size).to(device)
        for i in range(0, C, TILE):
            rows = slice(i, i + TILE)
            q_i, w_i = index_q[:, :, rows].to(dtype), index_weights[:, :, rows, None].to(dtype)
            best = scores[:, rows], chosen[:, rows]
            for j in range(0, len(at), wide := max(TILE, count)):  # a merge costs a sort of the candidates
                keys = at[j : j + wide]
                tile = (w_i * torch.relu(q_i @ k_j[:, :, j : j + wide].to(dtype).mT)).sum(dim=1)  # (B, tile, wide)
                hidden = (keys < first[rows]) | (keys >= end[rows])
                best = better(best, (tile.masked_fill(hidden, -torch.inf), keys.expand_as(tile)), count)
            scores[:, rows], chosen[:, rows] = best
    return chosen.masked_fill(scores == -torch.inf, -1)


def better(a: Candidates, b: Candidates, count: int) -> Candidates:
    """The best `count` of the candidates a and b; of equal scores those at the smaller positions."""
    scores, at = (torch.cat(pair, dim=-1) for pair in zip(a, b, strict=True))
    at, order = at.sort(dim=-1)
    scores, by_score = scores.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return scores[..., :count], at.gather(-1, by_score)[..., :count]


# Attention to them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ChosenPartition(Partition):
    """What a rank computes of each block if its queries see only the keys that they chose."""

    chosen: Tensor  # (B, C, n) of this rank, positions or -1
    reach: int  # the most hops that a block makes to a rank that chose one of its keys

    @property
    def hops(self) -> int:
        return self.reach

    def pieces(self, rank: int, block: int) -> tuple[BlockSlice, ...]:
        """The tiles of `block` in which a query of this `rank` chose a key."""
        return tuple(self.tiles(self.positions(block).to(self.chosen.device)))

    def tiles(self, keys: Tensor) -> Iterator[BlockSlice]:
        n, found = len(keys), torch.searchsorted(keys, self.chosen)
        place = found.where(keys[found.clamp(max=n - 1)] == self.chosen, n)  # n: it is in another block
        for i in range(0, self.chosen.shape[1], TILE):
            of_rows = place[:, i : i + TILE]
            hidden = torch.ones(*of_rows.shape[:2], n + 1, dtype=torch.bool, device=keys.device)
            hidden = hidden.scatter_(2, of_rows, False)[:, None, :, :n]  # (B, 1, tile, n)
            wanted = (~hidden).any(dim=(0, 1, 2)).tolist()  # (n,), once: a GPU would wait for each question
            for j in (j for j in range(0, n, TILE) if any(wanted[j : j + TILE])):
                tile = hidden[..., j : j + TILE]
                yield BlockSlice(slice(i, i + TILE), slice(j, j + TILE), triangle=False, hidden=tile)


def facts_of_chosen(chosen: Tensor | None, q: Tensor, schedule: type[Schedule]) -> dict[str, Any]:
    """What the ranks must agree on. Raises ValueError unless chosen is None or (B, C, n), int64, in a ring."""
    if chosen is None:
        return {"chosen": None}
    B, _, C, _ = q.shape
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.int64 or chosen.device != q.device:
        given = f"{chosen.dtype} on {chosen.device}" if isinstance(chosen, Tensor) else repr(chosen)
        raise ValueError(f"chosen is {given}; expected int64, positions as choose_keys gives them, on {q.device}")
    if chosen.dim() != 3 or chosen.shape[:2] != (B, C) or not chosen.shape[2]:
        raise ValueError(f"chosen has shape {tuple(chosen.shape)}; expected ({B}, {C}, 1 or more), keys for each query")
    if schedule is not Ring:
        raise ValueError(f"chosen keys with schedule={schedule.__name__}; expected the ring: other ways know none")
    return {"chosen": chosen.shape[2]}


def with_chosen(schedule: Schedule, chosen: Tensor | None, function: str) -> Schedule:
    """The schedule, which computes and sends what is needed for the chosen keys. Raises ValueError on every rank."""
    if chosen is None:
        return schedule
    partition, group = schedule.partition, schedule.group
    hops = max(agree(partial(farthest, chosen, partition, group), group, function=f"{function}, chosen keys"))
    mask, layout, lengths = partition.mask, partition.layout, partition.lengths
    own = chosen.clone()  # the backward pass reads it too, and the caller may write into his
    return replace(schedule, partition=ChosenPartition(mask, layout, lengths, own, hops))


def farthest(chosen: Tensor, partition: Partition, group: Group) -> int:
    """How many hops a block makes to this rank that chose one of its keys: the most. Raises ValueError for others."""
    rank, world_size = members(flat_group(group))
    at, owner = partition.positions(rank), torch.empty(partition.seq_len, dtype=torch.int64, device=chosen.device)
    for r in range(world_size):
        owner[partition.positions(r).to(chosen.device)] = r
    if len(at) != chosen.shape[1]:
        raise ValueError(f"chosen keys of {chosen.shape[1]} queries for {len(at)} keys; expected as many of each")
    seen = chosen == -1
    for first, end in partition.visible_keys(rank):
        seen |= (first.to(chosen.device)[:, None] <= chosen) & (chosen < end.to(chosen.device)[:, None])
    if not seen.all():
        b, i, n = (~seen).nonzero()[0].tolist()
        key = f"chosen has key {int(chosen[b, i, n])} for the query at {int(at[i])}"
        raise ValueError(f"{key}; expected positions in the whole sequence that the mask shows this query, or -1")
    return max(((rank - owner[chosen[chosen >= 0]]) % world_size).unique().tolist(), default=0)


def chosen_of_rank(context: RankContext, whole: Sequence[Tensor], count: int, layout: str) -> Tensor:
    """This rank's chosen keys, for whole index_q (1, J, S, E), index_weights (1, J, S) and index_k (1, S, E)."""
    q, weights, k = whole
    mine = [shard(x, layout, context.rank, context.world_size) for x in (q, weights[..., None], k[:, None])]
    return choose_keys(mine[0], mine[1][..., 0], mine[2][:, 0], count, layout=layout)


def main() -> int:
    J, S, E, P, count, ok = 2, 8, 4, 4, 2, True
    generator = torch.Generator().manual_seed(0)
    q, w, k = (torch.randn(shape, generator=generator) for shape in ((1, J, S, E), (1, J, S), (1, S, E)))
    scores = (w[..., None] * torch.relu(q @ k[:, None].mT)).sum(dim=1)[0]  # (S, S)
    past, shard_of = torch.ones(S, S, dtype=torch.bool).tril(), torch.arange(S) // (S // P)
    keys = []
    for seen in (past, past & (shard_of[:, None] == shard_of)):
        best = scores.masked_fill(~seen, -torch.inf).topk(count)
        keys.append([set(row.tolist()) - {-1} for row in best.indices.masked_fill(best.values == -torch.inf, -1)])
    missed = sum(not of_all <= of_own for of_all, of_own in zip(*keys, strict=True))
    print(f"the failure: {count} keys a query, the best of each rank's own shard: {missed} of {S} queries miss a key")
    for layout in LAYOUTS:
        of_ranks = launch(chosen_of_rank, P, (q, w, k), count, layout)
        chosen = unshard([x[:, None] for x in of_ranks], layout)[0, 0]
        ok &= [set(row.tolist()) - {-1} for row in chosen] == keys[0]
    print(f"{'ok   ' if ok else 'WRONG'} the ring: the keys of torch.topk of the whole row, on {P} ranks in 3 layouts")
    return 0 if ok and missed else 1


if __name__ == "__main__":
    sys.exit(main())
