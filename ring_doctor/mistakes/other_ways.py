"""The catalogue, continued: what goes wrong where a sequence is shared in another way than by a flat ring.

    all-gather    every rank gathers all K and V
    all-to-all    tokens of all heads <-> all tokens of some heads
    double ring   a ring in each host, a ring of hosts: 2 x 2 ranks where there are 4, and one host otherwise

Their right results are those of a ring, because all compute the same attention. So a mistake of theirs replaces a step
of the ring on paper too.

Shapes: those of paper_ring.py.

Before: masks.py. After: gradients.py.
Source: Jacobs et al. 2023 (DeepSpeed Ulysses), section 3; Llama team 2024, section 3.3.2 (all-gather).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ring_doctor.asking.case import Case
from ring_doctor.mistakes import Change, but, in_the_end, told
from ring_doctor.mistakes.masks import Pairs, believed, sees
from ring_doctor.mistakes.paper_ring import Steps
from ring_doctor.mistakes.travel import in_hand


def hosts(world_size: int) -> tuple[int, int]:
    """(hosts, ranks of a host): rank = host · ranks of a host + device."""
    return (2, 2) if world_size == 4 else (1, world_size)


def rank_of_heads(case: Case) -> Tensor:
    """(H,) int64: the rank that computes each query head after an all-to-all: runs of heads, the longer ones first."""
    runs = torch.arange(case.heads).tensor_split(case.world_size)
    return torch.cat([torch.full_like(run, rank) for rank, run in enumerate(runs)])


def dealt_in_turn(case: Case, heads: int) -> Tensor:
    """(heads,) int64: heads r, r + P, r + 2P, ... of rank r, rank by rank."""
    return torch.cat([torch.arange(heads)[rank :: case.world_size] for rank in range(case.world_size)])


def lengths_of(case: Case) -> list[int]:
    return [len(case.positions(rank)) for rank in range(case.world_size)]


# Heads and tokens after an all-to-all ------------------------------------------------------------------------------


def returned(change: Callable[[Case, Tensor], Tensor]) -> Change:
    return in_the_end(lambda steps, case, x: {"out": change(case, x["out"])}, "out")


def kv_heads_in_turn(steps: Steps, case: Case, *, few: bool = False) -> Tensor:
    if case.kv_heads < case.world_size:
        return rank_of_heads(case) % case.kv_heads
    return steps.kv_heads(case) if few else dealt_in_turn(case, case.kv_heads)[steps.kv_heads(case)]


def counted_from_the_rank(steps: Steps, case: Case) -> Tensor:
    ranks, n = rank_of_heads(case), case.heads // case.kv_heads
    first = (ranks[:, None] > ranks).sum(dim=1)  # the first query head of each one's rank
    return first // n + (torch.arange(case.heads) - first) // n


def in_runs(case: Case, out: Tensor) -> Tensor:
    """Rank r returns run r of the sequence, and not the tokens of its layout."""
    return case.join(out.tensor_split(case.world_size, dim=2))


# Where the mask believes the tokens to stand ----------------------------------------------------------------------


def as_gathered(case: Case, block: int) -> Tensor:
    """(C,): the numbers of a block's keys among the gathered keys, rank by rank."""
    return torch.arange(case.seq_len).split(lengths_of(case))[block]


def triangle_of_gathered(at: Callable[[Case, int], Tensor], *, from_the_end: bool) -> Change:
    """C queries and S keys at(case, block): query i sees the keys 0 to i, or with `from_the_end` 0 to i + S - C."""

    def seen(x: Pairs) -> Tensor:
        return at(x.case, x.j) <= x.i + (x.case.seq_len - x.rows) * from_the_end if x.case.causal else x.seen

    return sees(seen)


def undone_by_its_own_order(case: Case, rank: int) -> Tensor:
    return torch.cat([case.positions(r) for r in range(case.world_size)]).argsort().split(lengths_of(case))[rank]


# Two speeds of wire ------------------------------------------------------------------------------------------------


def of_double_ring(case: Case, rank: int, t: int) -> int:
    """The block of round t: in each turn the blocks of one host go round in the host."""
    count, per_host = hosts(case.world_size)
    turn, s = divmod(t, per_host)
    return (rank // per_host - turn) % count * per_host + (rank - s) % per_host


def double_ring(early: int, **more: Callable[..., object]) -> Change:
    """In the last round of a turn, before another turn, a rank has the block of round t + early."""

    def held(steps: Steps, case: Case, rank: int, t: int) -> tuple[int, int]:
        count, per_host = hosts(case.world_size)
        last = t % per_host == per_host - 1 and t < (count - 1) * per_host
        block = of_double_ring(case, rank, t + early * last)
        return block, block

    return but(believed=lambda steps, *at: of_double_ring(*at), in_hand=held, **more)


def rank_by_rank(steps: Steps, keys: list[Tensor], values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """K and V of rank 0, K and V of rank 1, ..., of which the first half is taken for K."""
    stack = [x for pair in zip(*steps.gathered(keys, values), strict=True) for x in pair]
    return stack[: len(keys)], stack[len(keys) :]


CHANGES = {
    "heads_permuted_after_all_to_all": [
        returned(lambda case, out: out[:, dealt_in_turn(case, case.heads)]),
        returned(lambda case, out: out[:, dealt_in_turn(case, case.heads).argsort()]),
    ],
    "kv_heads_dealt_in_turn": [but(kv_heads=kv_heads_in_turn), but(kv_heads=lambda *x: kv_heads_in_turn(*x, few=True))],
    "groups_counted_from_the_rank": [but(kv_heads=counted_from_the_rank)],
    "all_to_all_back_in_wrong_token_order": [
        returned(in_runs),
        returned(lambda case, out: in_runs(case, in_runs(case, out))),
    ],
    "keys_in_gathered_order": [sees(lambda x: x.case.visible()[x.p[:, 0]][:, as_gathered(x.case, x.j)])],
    "stack_viewed_in_the_wrong_order": [but(gathered=rank_by_rank)],
    "gathered_in_order_of_arrival": [in_hand(lambda r, t, P: t), in_hand(lambda r, t, P: 2 * r - t)],
    "causal_from_the_first_gathered_key": [
        *(triangle_of_gathered(at, from_the_end=False) for at in (as_gathered, Case.positions))
    ],
    "causal_to_the_last_gathered_key": [
        *(triangle_of_gathered(at, from_the_end=True) for at in (as_gathered, Case.positions))
    ],
    "layout_undone_the_wrong_way": [believed(undone_by_its_own_order)],
    "slow_hop_a_round_early": [double_ring(1)],
    "next_host_missing": [double_ring(0, rounds=lambda steps, case, rank: hosts(case.world_size)[1])],
}
MISTAKES = told("Other ways", CHANGES)
