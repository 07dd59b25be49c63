"""The catalogue, continued: what goes wrong where a sequence is shared in another way than by a flat ring.

    all-gather    every rank gathers all K and V                    hybrid        all-to-all in a row, a ring across
    all-to-all    tokens of all heads <-> all tokens of some heads  double ring   a ring in each host, a ring of hosts

Their right results are those of a ring, because all compute the same attention. So a mistake of theirs replaces a step
of the ring on paper too. Two need a mesh. It has 2 x 2 ranks where there are 4, and one row otherwise.

Shapes: those of paper_ring.py.

Before: mistakes_of_masks.py. After: mistakes_of_gradients.py.
Source: Jacobs et al. 2023 (DeepSpeed Ulysses), section 3; Fang and Zhao 2024 (USP), section 4; Llama team 2024,
section 3.3.2 (all-gather).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ring_doctor.case import Case, positions
from ring_doctor.mistakes import mistake, variant_of
from ring_doctor.paper_ring import NotOnPaper, Steps


def hosts(world_size: int) -> tuple[int, int]:
    """(hosts, ranks of a host), or (rows, ranks of a row): rank = host · ranks of a host + device."""
    return (2, 2) if world_size == 4 else (1, world_size)


def rank_of_heads(case: Case) -> Tensor:
    """(H,) int64: the rank that computes each query head after an all-to-all: runs of heads, the longer ones first."""
    runs = torch.arange(case.heads).tensor_split(case.world_size)
    return torch.cat([torch.full_like(run, rank) for rank, run in enumerate(runs)])


def dealt_in_turn(case: Case, heads: int) -> Tensor:
    """(heads,) int64: heads r, r + P, r + 2P, ... of rank r, rank by rank."""
    return torch.cat([torch.arange(heads)[rank :: case.world_size] for rank in range(case.world_size)])


# Heads and tokens after an all-to-all ------------------------------------------------------------------------------

DEALT = "the order of heads in both all-to-alls: rank r has a run of query heads, and comes back with the same run"


def _returned(steps: Steps, change: Callable[[Case, Tensor], Tensor]) -> Steps:
    return replace(steps, returned=lambda case, out: change(case, steps.returned(case, out)))


@mistake(
    "After the second all-to-all the heads of out stand in another order: dealt out in turn, not in runs.",
    look=DEALT,
    chapter=19,
)
def heads_permuted_after_all_to_all(steps: Steps) -> Steps:
    return _returned(steps, lambda case, out: out[:, dealt_in_turn(case, case.heads)])


@variant_of(heads_permuted_after_all_to_all)
def heads_permuted_the_other_way(steps: Steps) -> Steps:
    return _returned(steps, lambda case, out: out[:, dealt_in_turn(case, case.heads).argsort()])


def _dealt_kv_heads(steps: Steps, *, split: bool, replicated: bool) -> Steps:
    def kv_heads(case: Case) -> Tensor:
        if case.kv_heads < case.world_size:
            return rank_of_heads(case) % case.kv_heads if replicated else steps.kv_heads(case)
        return dealt_in_turn(case, case.kv_heads)[steps.kv_heads(case)] if split else steps.kv_heads(case)

    return replace(steps, kv_heads=kv_heads)


@mistake(
    "All-to-all: query heads are dealt out in runs and K/V heads in turn: rank r gets K/V head r, r + P, ..., and for "
    "G < P head r mod G. Query heads meet K/V heads of other groups.",
    look="which K/V heads a rank gets: those of its query heads, for G < P head r·G // P",
    chapter=19,
)
def kv_heads_dealt_in_turn(steps: Steps) -> Steps:
    return _dealt_kv_heads(steps, split=True, replicated=True)


@variant_of(kv_heads_dealt_in_turn)
def kv_heads_split_in_turn(steps: Steps) -> Steps:
    return _dealt_kv_heads(steps, split=True, replicated=False)


@variant_of(kv_heads_dealt_in_turn)
def kv_heads_replicated_in_turn(steps: Steps) -> Steps:
    return _dealt_kv_heads(steps, split=False, replicated=True)


@variant_of(kv_heads_dealt_in_turn)
def kv_heads_tiled(steps: Steps) -> Steps:
    """For G < P the K/V heads are repeated as 0, 1, ..., 0, 1, ... until P divides their number."""

    def kv_heads(case: Case) -> Tensor:
        copies = math.lcm(case.kv_heads, case.world_size)
        if case.kv_heads >= case.world_size or case.heads % copies:  # such a ring refuses the second
            return steps.kv_heads(case)
        return torch.arange(case.heads) // (case.heads // copies) % case.kv_heads

    return replace(steps, kv_heads=kv_heads)


ORDER = "the order of the tokens around the attention: undo the layout before it, and make the layout again after it"


def _in_runs(case: Case, out: Tensor) -> Tensor:
    """Rank r returns run r of the sequence, and not the tokens of its layout."""
    return case.join(out.tensor_split(case.world_size, dim=2))


@mistake(
    "After the second all-to-all a rank holds the rows of other tokens: a run of the sequence, not its layout.",
    look=ORDER,
    chapter=19,
)
def all_to_all_back_in_wrong_token_order(steps: Steps) -> Steps:
    return _returned(steps, _in_runs)


@variant_of(all_to_all_back_in_wrong_token_order)
def layout_undone_a_second_time(steps: Steps) -> Steps:
    return _returned(steps, lambda case, out: _in_runs(case, _in_runs(case, out)))


# Where the mask believes the tokens to stand ----------------------------------------------------------------------


def _believes(
    steps: Steps, queries: Callable[[Case, int], Tensor], keys: Callable[[Case, int], Tensor] | None = None
) -> Steps:
    """The mask of these positions (C,), of a rank's queries and of a block's keys; None: as the queries."""

    def sees(case: Case, rank: int, block: int) -> Tensor:
        return case.visible()[queries(case, rank)][:, (keys or queries)(case, block)]

    return replace(steps, sees=sees)


def _lengths(case: Case) -> list[int]:
    return [len(case.positions(rank)) for rank in range(case.world_size)]


@mistake(
    "The gathered K and V lie rank by rank, and the mask takes this order for the order of the sequence.",
    look="the positions of the gathered keys: those of the layout, joined in the order of the ranks",
    chapter=19,
)
def keys_in_gathered_order(steps: Steps) -> Steps:
    return _believes(steps, Case.positions, lambda case, block: torch.arange(case.seq_len).split(_lengths(case))[block])


GATHERED = "the order of the gathered blocks: rank 0, 1, ..., for K, for V, for the mask and for dK and dV"


def _arrived(steps: Steps, order: Callable[[int, int], int], *, keys: bool = True, values: bool = True) -> Steps:
    """What is taken for block n is block order(rank, n)."""

    def in_hand(case: Case, rank: int, t: int) -> tuple[int, int]:
        block = steps.believed(case, rank, t)
        came = order(rank, block) % case.world_size
        return came if keys else block, came if values else block

    return replace(steps, in_hand=in_hand)


def _from_the_rank_before(rank: int, n: int) -> int:
    return rank - n


@mistake(
    "The blocks are joined in the order of their arrival, the own block first, and are taken for the blocks 0, 1, ... "
    "This is so for K and V, for K alone, or for V alone.",
    look=GATHERED,
    chapter=19,
)
def gathered_in_order_of_arrival(steps: Steps) -> Steps:
    return _arrived(steps, _from_the_rank_before)


for _keys, _values in ((True, False), (False, True)):
    variant_of(gathered_in_order_of_arrival)(partial(_arrived, order=_from_the_rank_before, keys=_keys, values=_values))


@variant_of(gathered_in_order_of_arrival)
def gathered_from_the_rank_after(steps: Steps) -> Steps:
    return _arrived(steps, lambda rank, n: rank + n)


IS_CAUSAL = "is_causal with C queries and S keys: give a mask made of positions, or the keys up to the rank's own block"


def _triangle_of_gathered(steps: Steps, *, from_the_end: bool, in_order: bool) -> Steps:
    """C queries and S gathered keys: query i sees the keys 0 to i, or with `from_the_end` 0 to i + S - C.

    The keys lie rank by rank, or, with `in_order`, in the order of the sequence.
    """

    def sees(case: Case, rank: int, block: int) -> Tensor:
        if not case.causal:
            return steps.sees(case, rank, block)
        lengths = _lengths(case)
        keys = case.positions(block) if in_order else torch.arange(case.seq_len).split(lengths)[block]
        return keys <= torch.arange(lengths[rank])[:, None] + (case.seq_len - lengths[rank]) * from_the_end

    return replace(steps, sees=sees)


@mistake(
    "K and V of all ranks are gathered, and is_causal begins at the first key: query i of every rank sees the gathered "
    "keys 0 to i.",
    look=IS_CAUSAL,
    chapter=19,
)
def causal_from_the_first_gathered_key(steps: Steps) -> Steps:
    return _triangle_of_gathered(steps, from_the_end=False, in_order=False)


@variant_of(causal_from_the_first_gathered_key)
def causal_from_the_first_key_of_the_sequence(steps: Steps) -> Steps:
    return _triangle_of_gathered(steps, from_the_end=False, in_order=True)


@mistake(
    "K and V of all ranks are gathered, and is_causal ends at the last key: every rank's queries are taken for the "
    "last C of the sequence, so query i sees the gathered keys 0 to i + S - C.",
    look=IS_CAUSAL,
    chapter=19,
)
def causal_to_the_last_gathered_key(steps: Steps) -> Steps:
    return _triangle_of_gathered(steps, from_the_end=True, in_order=False)


@variant_of(causal_to_the_last_gathered_key)
def causal_to_the_last_key_of_the_sequence(steps: Steps) -> Steps:
    return _triangle_of_gathered(steps, from_the_end=True, in_order=True)


@mistake(
    "After the exchange the layout is undone with its own order in the place of the inverse one: x[order] and not "
    "x[order.argsort()]. The mask then meets tokens in a third order.",
    look=ORDER,
    chapter=19,
)
def layout_undone_the_wrong_way(steps: Steps) -> Steps:
    def at(case: Case, rank: int) -> Tensor:
        order = torch.cat([case.positions(r) for r in range(case.world_size)])
        return order.argsort().split(_lengths(case))[rank]

    return _believes(steps, at)


def _of_row(case: Case, rank: int, *, sort: bool, layout_of_rows: bool) -> Tensor:
    """(C,): the positions that a rank's tokens get in a ring of rows.

    The positions of a row are the right positions of its tokens, or, with `layout_of_rows`, what the layout gives to
    rank `row` of so many rows. The tokens get them in the order of the sequence, `sort`, or rank by rank.
    """
    rows, per_row = hosts(case.world_size)
    row, number = divmod(rank, per_row)
    parts = [case.positions(row * per_row + i) for i in range(per_row)]
    at = torch.cat(parts)
    believed = at.sort().values
    if layout_of_rows:
        try:
            believed = positions(case.layout, case.seq_len, row, rows)
        except ValueError as error:  # the tokens do not fit that layout
            raise NotOnPaper from error
        if len(believed) != len(at):
            raise NotOnPaper
    if sort:
        believed = believed[at.argsort().argsort()]
    return believed.split([len(part) for part in parts])[number]


@mistake(
    "Hybrid: after the exchange in a row the tokens lie rank by rank, and the mask takes them for the row in order.",
    look="the positions of a row's tokens: those of all its ranks, in order. Striped chunks do not join to a stripe",
    chapter=19,
)
def positions_of_the_inner_layout(steps: Steps) -> Steps:
    return _believes(steps, lambda case, rank: _of_row(case, rank, sort=False, layout_of_rows=False))


@variant_of(positions_of_the_inner_layout)
def sorted_rows_taken_for_stripes(steps: Steps) -> Steps:
    """Right for contiguous and zigzag chunks."""
    return _believes(steps, lambda case, rank: _of_row(case, rank, sort=True, layout_of_rows=True))


@variant_of(positions_of_the_inner_layout)
def rows_taken_for_stripes(steps: Steps) -> Steps:
    return _believes(steps, lambda case, rank: _of_row(case, rank, sort=False, layout_of_rows=True))


@mistake(
    "Hybrid: the groups are exchanged. The all-to-all is in a column of the mesh and the ring in a row, and the mask "
    "takes each rank's tokens for those of the rank at the mirrored place of the mesh.",
    look="the two groups of the mesh: the dimension of the all-to-all, and the dimension of the ring",
    chapter=19,
)
def groups_exchanged(steps: Steps) -> Steps:
    def mirrored(case: Case, rank: int) -> Tensor:
        rows, per_row = hosts(case.world_size)
        return case.positions(rank % per_row * rows + rank // per_row)

    return _believes(steps, mirrored)


# Two speeds of wire ------------------------------------------------------------------------------------------------


def of_double_ring(case: Case, rank: int, t: int) -> int:
    """The block of round t: in each turn the blocks of one host go round in the host."""
    count, per_host = hosts(case.world_size)
    turn, s = divmod(t, per_host)
    return (rank // per_host - turn) % count * per_host + (rank - s) % per_host


def _double_ring(steps: Steps, hand: Callable[[Case, int, int], int]) -> Steps:
    return replace(steps, believed=of_double_ring, in_hand=lambda *at: (hand(*at), hand(*at)))


def _last_of_a_turn(case: Case, t: int) -> bool:
    """Whether round t is the last round of a turn, and another turn follows."""
    count, per_host = hosts(case.world_size)
    return t % per_host == per_host - 1 and t < (count - 1) * per_host


SLOW = "the buffers of a double ring: a block of the next host is used from the first round of the next turn on"


@mistake(
    "Double ring: in the last round of a turn a rank has the block of the next host already. One block is missed, and "
    "another block counts twice.",
    look=SLOW,
    chapter=20,
)
def slow_hop_a_round_early(steps: Steps) -> Steps:
    return _double_ring(steps, lambda case, rank, t: of_double_ring(case, rank, t + _last_of_a_turn(case, t)))


@variant_of(slow_hop_a_round_early)
def last_block_of_the_next_turn_early(steps: Steps) -> Steps:
    def hand(case: Case, rank: int, t: int) -> int:
        _, per_host = hosts(case.world_size)
        return of_double_ring(case, rank, t + per_host * _last_of_a_turn(case, t))

    return _double_ring(steps, hand)


@mistake(
    "Double ring: a rank meets only the blocks of its own host. The result is attention inside each host.",
    look="the loop over the turns: as many turns as hosts, and a slow hop between two turns",
    chapter=20,
)
def next_host_missing(steps: Steps) -> Steps:
    return replace(_double_ring(steps, of_double_ring), rounds=lambda case, rank: hosts(case.world_size)[1])
