"""A ring on paper: all ranks in one process, in float64, in steps that a mistake can replace.

    forward     for t = 0 ... P-1:  s_t = scale Q K_jᵀ where visible;   (out, lse) = combine(s_0 ... s_P-1, V_j ...)
    backward    for t = 0 ... P-1:  p = e^(s_t - lse),  dS = p ∘ (dO V_jᵀ - δ)
                                    dQ += scale dS K_j,  dK_j += scale dSᵀ Q,  dV_j += pᵀ dO

The block that a rank *believes* to hold in round t is j = (r - t) mod P. The block that the rank really holds is
another step, because a wrong neighbour changes what is in hand and not what the rank believes. With `RIGHT` the result
is full attention. With `replace(RIGHT, scale=...)` the result is what a ring with this mistake would return.

Shapes: the whole q, d_out (B, H, S, D), k and v (B, G, S, D) of a `Case`. A tile of scores is (B, H, Cq, Ck).

Before: asking/case.py. After: __init__.py: mistakes replace these steps.
Source: Liu et al. 2024, algorithm 1 and appendix A; Dao et al. 2022, algorithm 4.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, reduce

import torch
from torch import Tensor

from ring_doctor.asking.case import Case
from ringlab.basics.online_softmax import merge


class NotOnPaper(Exception):
    """The mistake cannot be computed for this case. Such a ring would crash or hang, as with chunks of two lengths."""


@dataclass(frozen=True)
class BlockGradients:
    """What one rank adds to dq, dk and dv in one round."""

    rank: int
    round: int
    world_size: int
    block: int  # believed
    hidden: bool  # no query sees a key
    d_q: Tensor  # (B, H, Cq, D)
    d_k: Tensor  # (B, G, Ck, D)
    d_v: Tensor  # (B, G, Ck, D)


Scores = list[Tensor]  # (B, H, Cq, Ck) of each round; -inf where hidden
Values = list[Tensor]  # (B, H, Ck, D) of each round
Rows = tuple[Tensor, Tensor]  # out (B, H, Cq, D) and lse (B, H, Cq) of a rank


# The steps of a right ring -----------------------------------------------------------------------------------------


def believed(case: Case, rank: int, t: int) -> int:
    """The block that a rank believes to have in round t. Mask and gradients are those of this block."""
    return (rank - t) % case.world_size


@lru_cache(maxsize=4096)
def sees(case: Case, rank: int, block: int) -> Tensor:
    """(Cq, Ck) bool: which keys of `block` the queries of `rank` see. Do not write into this tensor."""
    return case.visible()[case.positions(rank)][:, case.positions(block)]


def block_out(s: Tensor, v: Tensor) -> Tensor:
    """(B, H, Cq, D): what the kernel returns as the output of a tile; 0 for a query that sees no key of the tile."""
    return torch.softmax(s, dim=-1).masked_fill(s == -math.inf, 0.0) @ v


def combine(steps: "Steps", case: Case, scores: Scores, values: Values) -> Rows:
    """out and lse of a rank, from the tiles of all rounds, in their order."""
    of_tiles = [(steps.block_out(s, v), steps.block_lse(s)) for s, v in zip(scores, values, strict=True)]
    return reduce(lambda running, of_tile: steps.merge(case, *running, *of_tile), of_tiles)


def sink(case: Case, out: Tensor, lse: Tensor) -> Rows:
    """out and lse of a rank with the learned logit of each query head, which is the lse of a key whose value is 0."""
    return merge(out, lse, torch.zeros_like(out), case.sink_scores().double()[:, None].expand_as(lse))


def weights(s: Tensor, lse: Tensor) -> Tensor:
    """(B, H, Cq, Ck): the softmax weights of a tile in the backward pass, from the lse of the whole row."""
    return torch.exp(s - lse.masked_fill(lse == -math.inf, math.inf)[..., None])


def group_sum(case: Case, x: Tensor, heads: Tensor) -> Tensor:
    """(B, H, Ck, D) -> (B, G, Ck, D): the gradients of the query heads that share a K/V head, added up."""
    return x.new_zeros(x.shape[0], case.kv_heads, *x.shape[2:]).index_add(1, heads, x)


def add(case: Case, total: Tensor | None, part: Tensor) -> Tensor:
    """A sum over rounds, or over ranks, after one more part."""
    return part if total is None else total + part


@dataclass(frozen=True)
class Steps:
    """The steps of a ring. A mistake replaces one or more. From `weights` on they belong to the backward pass."""

    rounds: Callable = lambda case, rank: case.world_size  # how many blocks a rank computes on
    # the block whose K, and the block whose V, a rank really has in round t
    in_hand: Callable = lambda case, rank, t: (believed(case, rank, t), believed(case, rank, t))
    believed: Callable = believed
    sees: Callable = sees
    gathered: Callable = lambda keys, values: (keys, values)  # the chunks of all ranks
    keys_and_values: Callable = lambda t, k, v: (k, v)  # what is used as K and as V in round t
    scale: Callable = lambda case: 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    # (H,) int64: the K/V head of each query head
    kv_heads: Callable = lambda case: torch.arange(case.heads) // (case.heads // case.kv_heads)
    block_out: Callable = block_out
    block_lse: Callable = lambda s: s.logsumexp(dim=-1)  # (B, H, Cq): what the kernel returns as the lse of a tile
    merge: Callable = lambda case, out, lse, out_j, lse_j: merge(out, lse, out_j, lse_j)
    combine: Callable = combine
    sink: Callable = sink
    weights: Callable = weights
    # (B, H, Cq, 1): the sum over D of dO ∘ O; the scores s, weights p and values v of the tile are for mistakes
    delta: Callable = lambda s, p, v, d_out, out: (d_out * out).sum(dim=-1, keepdim=True)
    group_sum: Callable = group_sum
    parts: Callable = lambda d_q, d_k, d_v, scale: (d_q, d_k, d_v)  # what a tile adds to the sums of dq, dk and dv
    add_q: Callable = add
    add_kv: Callable = add
    home: Callable = lambda part: part.block  # the rank where a part of dk and dv ends; None: nowhere
    gives_q: Callable = lambda part: True  # whether the part counts in dq
    at_the_end: Callable = lambda case, results: results  # the whole results, when all is computed
    backward: "Steps | None" = None  # other steps for the backward pass; None: the same


RIGHT = Steps()
_NAMES = [field.name for field in fields(Steps)]
OF_THE_BACKWARD = {name: getattr(RIGHT, name) for name in _NAMES[_NAMES.index("weights") :]}


def compute(
    case: Case, steps: Steps = RIGHT, whole: tuple[Tensor, ...] | None = None, *, gradients: bool = True
) -> dict[str, Tensor]:
    """What a ring of these steps returns for the whole sequence: out, lse, and with `gradients` dq, dk and dv, float64.

    `whole`: other q, k, v, d_out than the case's own. Raises NotOnPaper where the steps need chunks of one length.
    """
    forward_alone = replace(steps, **OF_THE_BACKWARD)
    pass_of = _shared if whole is None and forward_alone == RIGHT else _forward
    (queries, keys, values, d_outs), rows, tiles = pass_of(case, forward_alone, whole)
    results = {name: case.join([part[i] for part in rows]) for i, name in enumerate(("out", "lse"))}
    if gradients:
        if back := steps.backward:
            tiles = [list(_tiles(case, back, rank, q, keys, values)) for rank, q in enumerate(queries)]
        results |= _backward(case, back or steps, [queries, keys, values], d_outs, rows, tiles)
    return steps.at_the_end(case, results)


def _forward(
    case: Case, steps: Steps, whole: tuple[Tensor, ...] | None
) -> tuple[list[list[Tensor]], list[Rows], "_Tiles"]:
    """The chunks of q, k, v and d_out, out and lse of each rank, and the tiles that these are made of."""
    queries, keys, values, d_outs = (case.chunks(x.double()) for x in (case.whole() if whole is None else whole))
    keys, values = steps.gathered(keys, values)
    tiles = [list(_tiles(case, steps, rank, q, keys, values)) for rank, q in enumerate(queries)]
    forward = []
    for rank, of_rank in enumerate(tiles):
        rows = 0 * queries[rank], torch.full_like(queries[rank][..., 0], -math.inf)  # of a ring of no rounds
        if of_rank:
            rows = steps.combine(steps, case, *([tile[i] for tile in of_rank] for i in (2, 4)))
            rows = steps.sink(case, *rows) if case.sinks else rows
        forward.append(rows)
    return [queries, keys, values, d_outs], forward, tiles


_shared = lru_cache(maxsize=64)(_forward)  # of all mistakes of the backward pass


_Tile = tuple[int, bool, Tensor, Tensor, Tensor]
_Tiles = list[list[_Tile]]  # of each rank


def _tiles(case: Case, its: Steps, rank: int, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Iterator[_Tile]:
    """Of each round: the block believed, whether no query sees a key, the scores; K and V for each head."""
    heads, scale = its.kv_heads(case), its.scale(case)
    for t in range(its.rounds(case, rank)):
        key_block, value_block = its.in_hand(case, rank, t)
        block = its.believed(case, rank, t)
        seen = its.sees(case, rank, block)
        k, v = (x[:, heads] for x in its.keys_and_values(t, keys[key_block], values[value_block]))
        if seen.shape != (q.shape[2], k.shape[2]) or v.shape[2] != k.shape[2]:
            raise NotOnPaper
        scores = (scale * q @ k.mT).masked_fill(~seen, -math.inf)
        yield block, not bool(seen.any()), scores, k, v


def _backward(
    case: Case, steps: Steps, inputs: list[list[Tensor]], d_outs: list[Tensor], forward: list[Rows], tiles: _Tiles
) -> dict[str, Tensor]:
    """The whole dq, dk and dv, by the formula, tile by tile. `inputs`: the chunks of q, k and v."""
    queries, parts = inputs[0], []
    heads, scale = steps.kv_heads(case), steps.scale(case)
    for rank, d_out in enumerate(d_outs):
        out, lse = forward[rank]
        for t, (block, hidden, s, k, v) in enumerate(tiles[rank]):
            p = steps.weights(s, lse)
            d_s = p * (d_out @ v.mT - steps.delta(s, p, v, d_out, out))
            d_q, *d_kv = steps.parts(scale * d_s @ k, scale * d_s.mT @ queries[rank], p.mT @ d_out, scale)
            d_k, d_v = (steps.group_sum(case, x, heads) for x in d_kv)
            parts.append(BlockGradients(rank, t, case.world_size, block, hidden, d_q, d_k, d_v))
    sums: dict[str, dict[int, Tensor]] = {"dq": {}, "dk": {}, "dv": {}}  # by rank
    for part in parts:  # in the order of the rounds of each rank
        if steps.gives_q(part):
            sums["dq"][part.rank] = steps.add_q(case, sums["dq"].get(part.rank), part.d_q)
    for part in sorted(parts, key=lambda part: part.round):  # a block's gradients meet the ranks in this order
        if (rank := steps.home(part)) is not None:
            for name, x in (("dk", part.d_k), ("dv", part.d_v)):
                _check_shapes([sums[name].get(rank, x)], [x])
                sums[name][rank] = steps.add_kv(case, sums[name].get(rank), x)
    results = {}
    for (name, of_ranks), of_inputs in zip(sums.items(), inputs, strict=True):
        chunks = [of_ranks.get(rank, torch.zeros_like(x)) for rank, x in enumerate(of_inputs)]
        _check_shapes(chunks, of_inputs)
        results[name] = case.join(chunks)
    return results


def _check_shapes(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    if any(x.shape != y.shape for x, y in zip(found, expected, strict=True)):
        raise NotOnPaper
