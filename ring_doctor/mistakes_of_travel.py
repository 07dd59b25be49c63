"""The catalogue, continued: blocks that do not arrive, and what is wrong with scale, heads, sinks and lost rows.

Before: mistakes_of_merging.py. After: mistakes_of_masks.py.
Source: each entry names who had it, where that is public.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ring_doctor.case import Case
from ring_doctor.mistakes import Change, mistake, replaces, variant_of
from ring_doctor.paper_ring import NotOnPaper, Rows, Scores, Steps, Values

# Blocks do not arrive, or others do --------------------------------------------------------------------------------

LOOP = "the loop over the rounds: P rounds, P - 1 hops"
NEIGHBOUR = "the ranks that a hop sends to and receives from: (r + 1) mod P and (r - 1) mod P"


@mistake("The last block that arrives is never used.", look=LOOP, chapter=4)
def last_block_skipped(steps: Steps) -> Steps:
    return replace(steps, rounds=lambda case, rank: max(1, steps.rounds(case, rank) - 1))


@variant_of(last_block_skipped)
def last_block_skipped_on_one_rank_too(steps: Steps) -> Steps:
    return replace(steps, rounds=lambda case, rank: steps.rounds(case, rank) - 1)


@variant_of(last_block_skipped)
def last_needed_block_skipped(steps: Steps) -> Steps:
    """A ring that ends when no rank sees more, as with a window: of its blocks the last is skipped."""

    def rounds(case: Case, rank: int) -> int:
        P = case.world_size
        needed = [t for t in range(P) if any(steps.sees(case, r, (r - t) % P).any() for r in range(P))]
        return max(1, max(needed, default=0))

    return replace(steps, rounds=rounds)


@mistake("A rank's own block is never used: the work begins with the first block that arrives.", look=LOOP, chapter=4)
@replaces("sees")
def own_block_skipped(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    seen = steps.sees(case, rank, block)
    return torch.zeros_like(seen) if block == rank else seen


@mistake("There is a round too many, and in it a rank meets its own block for the second time.", look=LOOP, chapter=4)
def own_block_twice(steps: Steps) -> Steps:
    return replace(steps, rounds=lambda case, rank: steps.rounds(case, rank) + 1)


def _in_hand(steps: Steps, hand: Callable[[Case, int, int], tuple[int, int]]) -> Steps:
    def in_hand(case: Case, rank: int, t: int) -> tuple[int, int]:
        key_block, value_block = hand(case, rank, t)
        return key_block % case.world_size, value_block % case.world_size

    return replace(steps, in_hand=in_hand)


def _with_gradients(steps: Steps) -> Steps:
    """The gradients are added to the block that is really in hand: they travel the same wrong way."""
    return replace(steps, home=lambda part: part.held)


@mistake(
    "Each hop moves the blocks by two ranks, so with an even P half of the blocks never come.",
    look=NEIGHBOUR,
    chapter=4,
)
def two_seats(steps: Steps) -> Steps:
    return _in_hand(steps, lambda case, rank, t: (rank - 2 * t, rank - 2 * t))


@variant_of(two_seats)
def two_seats_gradients_too(steps: Steps) -> Steps:
    return _with_gradients(two_seats(steps))


@mistake(
    "The blocks come from rank r + 1, and the mask and the gradients count on blocks from rank r - 1.",
    look=NEIGHBOUR,
    chapter=4,
)
def other_way(steps: Steps) -> Steps:
    return _in_hand(steps, lambda case, rank, t: (rank + t, rank + t))


@variant_of(other_way)
def other_way_gradients_too(steps: Steps) -> Steps:
    return _with_gradients(other_way(steps))


@mistake(
    "The first block received is thrown away, and the block in hand is used again. The last block never comes.",
    look="which of the two buffers is computed on after the first hop",
    chapter=6,
)
def stale_first_block(steps: Steps) -> Steps:
    return _in_hand(steps, lambda case, rank, t: (rank - max(0, t - 1), rank - max(0, t - 1)))


@mistake(
    "There is one buffer only: the next block overwrites the block in hand before the rank computes on it.",
    look="the buffers: a block in use, and another buffer to receive into",
    chapter=6,
)
def overwritten_in_hand(steps: Steps) -> Steps:
    def hand(case: Case, rank: int, t: int) -> tuple[int, int]:
        block = rank - min(t + 1, case.world_size - 1)
        return block, block

    return _in_hand(steps, hand)


@variant_of(overwritten_in_hand)
def overwritten_in_hand_but_the_own_block(steps: Steps) -> Steps:
    """The own block lies elsewhere, and is used in round 0."""

    def hand(case: Case, rank: int, t: int) -> tuple[int, int]:
        block = rank - (min(t + 1, case.world_size - 1) if t else 0)
        return block, block

    return _in_hand(steps, hand)


OPPOSITE = "the hops of each direction: with an even P one direction makes P/2 hops and the other P/2 - 1"


def _two_ways(steps: Steps, rounds: Callable[[int], int]) -> Steps:
    """A ring whose blocks come from both sides: r, r - 1, r + 1, r - 2, ... in so many rounds."""

    def block(case: Case, rank: int, t: int) -> int:
        distance = (t + 1) // 2
        return (rank - distance if t % 2 else rank + distance) % case.world_size

    return replace(
        steps,
        rounds=lambda case, rank: rounds(case.world_size),
        believed=block,
        in_hand=lambda *at: (block(*at), block(*at)),
    )


@mistake(
    "Blocks travel in both directions, half of the hops each. With an even P the block of the rank opposite arrives "
    "from both sides, and counts twice.",
    look=OPPOSITE,
    chapter=4,
)
def opposite_block_twice(steps: Steps) -> Steps:
    return _two_ways(steps, lambda P: P // 2 * 2 + 1)


@mistake(
    "Blocks travel in both directions, half of the hops each. With an even P the block of the rank opposite never "
    "arrives.",
    look=OPPOSITE,
    chapter=4,
)
def opposite_block_missed(steps: Steps) -> Steps:
    return _two_ways(steps, lambda P: (P - 1) // 2 * 2 + 1)


WIRE = "the dtype of the buffers that are sent: K and V must travel in their own dtype"


def _sent_as(steps: Steps, dtype: torch.dtype, *, gradients_too: bool) -> Steps:
    """The rank's own block is not sent, and so not rounded. Of 16-bit inputs nothing is: see gradients_in_16_bits."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    def keys_and_values(t: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = steps.keys_and_values(t, k, v)
        return (rounded(k), rounded(v)) if t else (k, v)

    def add_kv(case: Case, total: Tensor | None, part: Tensor) -> Tensor:
        total = steps.add_kv(case, total, part)
        sent = gradients_too and case.world_size > 1 and case.dtype.itemsize > 2
        return rounded(total) if sent else total

    return replace(steps, keys_and_values=keys_and_values, add_kv=add_kv)


@mistake(
    "K and V are sent in fewer bits than they have, with or without their gradients. A rank's own block is exact, and "
    "blocks that arrive are rounded to 16 bits.",
    look=WIRE,
    chapter=8,
)
def sent_in_16_bits(steps: Steps) -> Steps:
    return _sent_as(steps, torch.bfloat16, gradients_too=False)


for _dtype, _gradients_too in ((torch.bfloat16, True), (torch.float16, False), (torch.float16, True)):
    variant_of(sent_in_16_bits)(partial(_sent_as, dtype=_dtype, gradients_too=_gradients_too))


TWO = "the messages of a hop: K and V of a block belong together"


@mistake("Only the keys go round. They meet the values of the rank's own block.", look=TWO, chapter=4)
def keys_without_values(steps: Steps) -> Steps:
    return _in_hand(steps, lambda case, rank, t: (rank - t, rank))


@mistake("Only the values go round. They meet the keys of the rank's own block.", look=TWO, chapter=4)
def values_without_keys(steps: Steps) -> Steps:
    return _in_hand(steps, lambda case, rank, t: (rank, rank - t))


@mistake("K and V are exchanged: at each hop, after the first hop, or by the caller.", look=TWO, chapter=6)
def keys_and_values_exchanged(steps: Steps) -> Steps:
    def exchanged(t: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (v, k) if t % 2 else (k, v)

    return replace(steps, keys_and_values=exchanged)


@variant_of(keys_and_values_exchanged)
def keys_and_values_exchanged_once(steps: Steps) -> Steps:
    return replace(steps, keys_and_values=lambda t, k, v: (v, k) if t else (k, v))


@variant_of(keys_and_values_exchanged)
def keys_and_values_exchanged_by_the_caller(steps: Steps) -> Steps:
    """The ring is right, and was called with V and K in exchanged order."""
    exchanged = replace(steps, keys_and_values=lambda t, k, v: (v, k))
    return replace(exchanged, parts=lambda q, k, v, scale: steps.parts(q, v, k, scale))


@mistake(
    "The ring is not called: each rank attends to its own chunk only.",
    look="whether the model calls the ring in every layer; whether the ring sends anything at all",
    chapter=14,
    wild=("axolotl PR #3928", "Automodel #3507"),
)
def never_called(steps: Steps) -> Steps:
    return replace(steps, rounds=lambda case, rank: 1)


@mistake(
    "Nothing moves: a rank computes P times on its own block, as if each time another one had come.",
    look="the messages, and whether what is received is what is computed on",
    chapter=4,
)
def nothing_moves(steps: Steps) -> Steps:
    return _in_hand(steps, lambda case, rank, t: (rank, rank))


# Scale and heads ---------------------------------------------------------------------------------------------------

SCALE = "the scale: 1/sqrt(D) once, for the D of one head"
HEADS = "which K/V head a query head h uses: h // (H/G)"


@mistake("The scores are not scaled.", look=SCALE, chapter=1)
def scale_missing(steps: Steps) -> Steps:
    return replace(steps, scale=lambda case: 1.0)


@mistake("A scale that is given is ignored: the scores are scaled by 1/√D.", look=SCALE, chapter=8)
def scale_ignored(steps: Steps) -> Steps:
    return replace(steps, scale=lambda case: case.head_dim**-0.5)


@mistake("The scores are scaled twice.", look=SCALE, chapter=8)
def scale_twice(steps: Steps) -> Steps:
    return replace(steps, scale=lambda case: steps.scale(case) ** 2)


@variant_of(scale_twice)
def one_over_d(steps: Steps) -> Steps:
    """1/D instead of 1/sqrt(D), whatever scale was given."""
    return replace(steps, scale=lambda case: 1 / case.head_dim)


@mistake("The scale is computed from a head dimension that is padded to a multiple of 8.", look=SCALE, chapter=8)
@replaces("scale")
def scale_of_padded_head(steps: Steps, case: Case) -> float:
    return (case.head_dim + -case.head_dim % 8) ** -0.5 if case.scale is None else steps.scale(case)


@variant_of(scale_of_padded_head)
def scale_of_padded_head_always(steps: Steps) -> Steps:
    """A scale that was given is ignored."""
    return replace(steps, scale=lambda case: (case.head_dim + -case.head_dim % 8) ** -0.5)


def _scale_of(size: Callable[[Case], float]) -> Change:
    """1/√size where no scale is given."""
    return lambda steps: replace(
        steps, scale=lambda case: size(case) ** -0.5 if case.scale is None else steps.scale(case)
    )


def _chunk(case: Case) -> int:
    if not case.equal_chunks:
        raise NotOnPaper
    return case.seq_len // case.world_size


@mistake(
    "The scale is not 1/√D: it is 1/√ of the tokens of a chunk, of all tokens, of the heads, of heads times D, of 64 "
    "or of 128.",
    look=f"{SCALE}. Which axis is D where tensors are (B, S, H, D)?",
    chapter=8,
)
def scale_of_another_size(steps: Steps) -> Steps:
    return _scale_of(_chunk)(steps)


for _size in (
    lambda case: case.seq_len,
    lambda case: case.heads,
    lambda case: case.heads * case.head_dim,
    lambda case: 64,
    lambda case: 128,
):
    variant_of(scale_of_another_size)(_scale_of(_size))


@mistake(
    "Query head h uses K/V head h mod G: groups are interleaved.",
    look=HEADS,
    chapter=8,
    wild=("vllm-omni PR #5716, a like case: heads padded independently, 28/7 became 28/8",),
)
def heads_interleaved(steps: Steps) -> Steps:
    return replace(steps, kv_heads=lambda case: torch.arange(case.heads) % case.kv_heads)


@mistake("All query heads use the first K/V head.", look=HEADS, chapter=8)
def first_kv_head_only(steps: Steps) -> Steps:
    return replace(steps, kv_heads=lambda case: torch.zeros(case.heads, dtype=torch.int64))


SINKS = "where the score of the sink enters: once for each row of the whole sequence"


@mistake(
    "The attention sinks are dropped: their gradient is exactly 0.",
    look=SINKS,
    chapter=15,
    wild=("TransformerEngine PR #3551",),
)
def sinks_dropped(steps: Steps) -> Steps:
    return replace(steps, sink=lambda case, out, lse: (out, lse))


@mistake(
    "The attention sinks are counted for each block that is computed, so up to P times.",
    look=SINKS,
    chapter=15,
    wild=("lmdeploy PR #3951",),
)
@replaces("sink")
def sinks_per_block(steps: Steps, case: Case, out: Tensor, lse: Tensor) -> Rows:
    for _ in range(case.world_size):
        out, lse = steps.sink(case, out, lse)
    return out, lse


@variant_of(sinks_per_block)
@replaces("combine")
def sinks_per_seen_block(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
    """A block that no query sees is left out, and its sink too."""
    out, lse = right.combine(steps, case, scores, values)
    for _ in range(sum(bool((s > -math.inf).any()) for s in scores) - 1 if case.sinks else 0):
        out, lse = right.sink(case, out, lse)
    return out, lse


# Rows that are lost ------------------------------------------------------------------------------------------------


@mistake(
    "A length that P does not divide is rounded down. The last tokens are no keys, and their rows are exactly 0.",
    look="every `length // P`",
    chapter=15,
    wild=("TransformerEngine #1930", "TransformerEngine #3331"),
)
def tail_lost(steps: Steps) -> Steps:
    def kept(case: Case) -> Tensor:
        """(S,) bool: True for the tokens that are not lost."""
        lengths = case.documents or (case.seq_len,)
        return torch.cat([torch.arange(n) < n // case.world_size * case.world_size for n in lengths])

    def sees(case: Case, rank: int, block: int) -> Tensor:
        rows, keys = kept(case)[case.positions(rank)], kept(case)[case.positions(block)]
        return steps.sees(case, rank, block) & rows[:, None] & keys

    return replace(steps, sees=sees)


@mistake(
    "A query that sees nothing of a block makes NaN, which stays in the running result.",
    look="the softmax of a row of -inf: its maximum is -inf, and -inf - (-inf) is NaN",
    chapter=7,
    wild=("axolotl #3026",),
)
def nan_of_unseen_rows(steps: Steps) -> Steps:
    def block_out(s: Tensor, v: Tensor) -> Tensor:
        return steps.block_out(s, v) if (s == -math.inf).all() else torch.softmax(s, dim=-1) @ v

    def merge(case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
        merged, lse = steps.merge(case, out, lse, out_j, lse_j)
        return torch.where(out_j.isnan() | out.isnan(), math.nan, merged), lse

    return replace(steps, block_out=block_out, merge=merge)


@variant_of(nan_of_unseen_rows)
def nan_of_unseen_blocks(steps: Steps) -> Steps:
    return replace(nan_of_unseen_rows(steps), block_out=lambda s, v: torch.softmax(s, dim=-1) @ v)
