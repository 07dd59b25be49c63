"""The catalogue, continued: blocks that do not arrive, and what is wrong with scale, heads, sinks and lost rows.

Before: merging.py. After: masks.py.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ring_doctor.asking.case import Case
from ring_doctor.mistakes import Change, but, told
from ring_doctor.mistakes.masks import Pairs, sees
from ring_doctor.mistakes.paper_ring import NotOnPaper, Rows, Scores, Steps, Values

# Blocks do not arrive, or others do --------------------------------------------------------------------------------

Hand = Callable[[int, int, int], int]  # rank, round, ranks -> the block in hand, modulo the number of ranks


def in_hand(keys: Hand, values: Hand | None = None) -> Change:
    """K of one block and V of the same, or of another."""

    def blocks(steps: Steps, case: Case, rank: int, t: int) -> tuple[int, int]:
        P = case.world_size
        return keys(rank, t, P) % P, (values or keys)(rank, t, P) % P

    return but(in_hand=blocks)


def sent_as(dtype: torch.dtype) -> Change:
    """The rank's own block is not sent, and so not rounded."""

    def rounded(steps: Steps, t: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = steps.keys_and_values(t, k, v)
        return (k.to(dtype).double(), v.to(dtype).double()) if t else (k, v)

    return but(keys_and_values=rounded)


# Scale, heads, sinks, and rows that are lost -----------------------------------------------------------------------


def scale_of(size: Callable[[Case], float]) -> Change:
    """1/√size where no scale is given."""
    return but(scale=lambda steps, case: size(case) ** -0.5 if case.scale is None else steps.scale(case))


def chunk(case: Case) -> int:
    if not case.equal_chunks:
        raise NotOnPaper
    return case.seq_len // case.world_size


def more_sinks(steps: Steps, case: Case, out: Tensor, lse: Tensor) -> Rows:
    for _ in range(case.world_size):
        out, lse = steps.sink(case, out, lse)
    return out, lse


def sinks_of_seen_blocks(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
    """A block that no query sees is left out, and its sink too."""
    out, lse = right.combine(steps, case, scores, values)
    for _ in range(sum(bool((s > -math.inf).any()) for s in scores) - 1 if case.sinks else 0):
        out, lse = right.sink(case, out, lse)
    return out, lse


def tail_hidden(x: Pairs) -> Tensor:
    lengths = x.case.documents or (x.case.seq_len,)
    kept = torch.cat([torch.arange(n) < n // x.case.world_size * x.case.world_size for n in lengths])  # (S,)
    return x.seen & kept[x.p] & kept[x.c]


def nan_stays(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    merged, lse = steps.merge(case, out, lse, out_j, lse_j)
    return torch.where(out_j.isnan() | out.isnan(), math.nan, merged), lse


def nan_of_rows(steps: Steps, s: Tensor, v: Tensor) -> Tensor:
    return steps.block_out(s, v) if (s == -math.inf).all() else torch.softmax(s, dim=-1) @ v


CHANGES = {
    "last_block_skipped": [but(rounds=lambda steps, case, rank: max(1, steps.rounds(case, rank) - 1))],
    "own_block_skipped": [sees(lambda x: x.seen & (not x.own))],
    "own_block_twice": [but(rounds=lambda steps, case, rank: steps.rounds(case, rank) + 1)],
    "two_seats": [in_hand(lambda r, t, P: r - 2 * t)],
    "other_way": [in_hand(lambda r, t, P: r + t)],
    "stale_first_block": [in_hand(lambda r, t, P: r - max(0, t - 1))],
    "overwritten_in_hand": [
        in_hand(lambda r, t, P: r - min(t + 1, P - 1)),
        in_hand(lambda r, t, P: r - (min(t + 1, P - 1) if t else 0)),  # the own block lies elsewhere
    ],
    "last_hop_missing": [in_hand(lambda r, t, P: r - min(t, max(0, P - 2)))],
    "sent_in_16_bits": [sent_as(torch.bfloat16), sent_as(torch.float16)],
    "keys_without_values": [in_hand(lambda r, t, P: r - t, lambda r, t, P: r)],
    "values_without_keys": [in_hand(lambda r, t, P: r, lambda r, t, P: r - t)],
    "keys_and_values_exchanged": [
        but(keys_and_values=lambda steps, t, k, v: (v, k) if t % 2 else (k, v)),
        but(keys_and_values=lambda steps, t, k, v: (v, k) if t else (k, v)),
        but(keys_and_values=lambda steps, t, k, v: (v, k)),  # by the caller
        but(keys_and_values=lambda steps, t, k, v: (v, v) if t else (k, v)),  # in one buffer
    ],
    "never_called": [but(rounds=lambda steps, case, rank: 1)],
    "nothing_moves": [in_hand(lambda r, t, P: r)],
    "scale_missing": [but(scale=lambda steps, case: 1.0)],
    "scale_ignored": [but(scale=lambda steps, case: case.head_dim**-0.5)],
    "scale_twice": [
        but(scale=lambda steps, case: steps.scale(case) ** 2),
        but(scale=lambda steps, case: 1 / case.head_dim),  # not 1/√D, whatever scale was given
    ],
    "scale_of_another_size": [
        *map(scale_of, (chunk, lambda case: case.seq_len, lambda case: case.heads)),
        *map(scale_of, (lambda case: case.heads * case.head_dim, lambda case: case.value_dim or case.head_dim)),
        *map(lambda size: scale_of(lambda case: size), (16, 32, 64, 128, 256)),
    ],
    "heads_interleaved": [but(kv_heads=lambda steps, case: torch.arange(case.heads) % case.kv_heads)],
    "first_kv_head_only": [but(kv_heads=lambda steps, case: torch.zeros(case.heads, dtype=torch.int64))],
    "sinks_dropped": [but(sink=lambda steps, case, out, lse: (out, lse))],
    "sinks_per_block": [but(sink=more_sinks), but(combine=sinks_of_seen_blocks)],
    "tail_lost": [sees(tail_hidden)],
    "nan_of_unseen_rows": [
        but(block_out=nan_of_rows, merge=nan_stays),
        but(block_out=lambda steps, s, v: torch.softmax(s, dim=-1) @ v, merge=nan_stays),  # of unseen blocks too
    ],
}
MISTAKES = told("Travel", CHANGES)
