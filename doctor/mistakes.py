"""The catalogue: what each known mistake makes of a ring. Here: merging, travelling, heads, and rows that are lost.

A mistake is a function that takes the steps of a ring on paper and replaces one of them. So the doctor can compute what
a ring *with that mistake* returns, for any mask and number of ranks, and two mistakes can be put together.

    @mistake("what such a ring does", look="where", chapter=4)
    def last_block_skipped(steps): return replace(steps, rounds=...)

Some mistakes can be made in two ways whose numbers differ. They are variants of one name: `@variant_of(...)`.

Shapes: those of paper_ring.py.

    $ python -m doctor.mistakes
    84 mistakes are known
    averages_added: The blocks' own softmax averages are added up. The weights of a row add up to the number of blocks.
    ...

Before: paper_ring.py. After: mistakes_of_masks.py and mistakes_of_gradients.py, the rest of the catalogue.
Source: each entry names who had it, where that is public.
"""

import importlib
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from doctor.case import Case
from doctor.paper_ring import Scores, Steps, Values

Change = Callable[[Steps], Steps]


@dataclass(frozen=True)
class Mistake:
    """An entry of the catalogue."""

    name: str
    what: str  # what such a ring does, in a sentence
    look: str  # where in a ring to look
    chapter: int  # which explains it
    wild: tuple[str, ...] = ()  # who had it: repository and number
    variants: list[Change] = field(default_factory=list, compare=False)


CATALOGUE: dict[str, Mistake] = {}


def mistake(what: str, *, look: str, chapter: int, wild: tuple[str, ...] = ()) -> Callable[[Change], Change]:
    """Enter a function into the catalogue, under its own name."""

    def enter(change: Change) -> Change:
        name = change.__name__
        CATALOGUE[name] = Mistake(name, what, look, chapter, wild, [change])
        return change

    return enter


def variant_of(first: Change) -> Callable[[Change], Change]:
    """Enter another way to make the same mistake."""

    def enter(change: Change) -> Change:
        CATALOGUE[first.__name__].variants.append(change)
        return change

    return enter


# Partial results are merged wrongly --------------------------------------------------------------------------------

MERGE = "where the result of a new block meets the running result"


@mistake("The running maximum grows, and the old sums l and o are not rescaled to it.", look=MERGE, chapter=1)
def no_rescale(steps: Steps) -> Steps:
    def combine(steps: Steps, case: Case, scores: Scores, values: Values) -> tuple[Tensor, Tensor]:
        m, l, o = torch.full_like(scores[0][..., 0], -math.inf), 0.0, 0.0
        for s, v in zip(scores, values, strict=True):
            m = torch.maximum(m, s.amax(dim=-1))
            p = torch.exp(s - m.masked_fill(m == -math.inf, 0.0)[..., None])
            l, o = l + p.sum(dim=-1), o + p @ v
        return o / l[..., None], m + l.log()

    return replace(steps, combine=combine)


@mistake("Each block has its own maximum, and the blocks' sums are added as if they had one.", look=MERGE, chapter=1)
def own_max_per_block(steps: Steps) -> Steps:
    def combine(steps: Steps, case: Case, scores: Scores, values: Values) -> tuple[Tensor, Tensor]:
        maxima = [s.amax(dim=-1, keepdim=True) for s in scores]
        weights = [torch.exp(s - m.masked_fill(m == -math.inf, 0.0)) for s, m in zip(scores, maxima, strict=True)]
        l = sum(p.sum(dim=-1, keepdim=True) for p in weights)
        return sum(p @ v for p, v in zip(weights, values, strict=True)) / l, (maxima[-1] + l.log())[..., 0]

    return replace(steps, combine=combine)


@variant_of(own_max_per_block)
def own_max_per_block_and_the_largest_in_lse(steps: Steps) -> Steps:
    def combine(inner: Steps, case: Case, scores: Scores, values: Values) -> tuple[Tensor, Tensor]:
        out, lse = own_max_per_block(steps).combine(inner, case, scores, values)
        largest = torch.stack([s.amax(dim=-1) for s in scores]).amax(dim=0)
        return out, lse - scores[-1].amax(dim=-1) + largest

    return replace(steps, combine=combine)


def _outs(steps: Steps, scores: Scores, values: Values) -> list[Tensor]:
    return [steps.block_out(s, v) for s, v in zip(scores, values, strict=True)]


def _with_right_lse(
    out_of: Callable[[list[Tensor], Scores], Tensor],
) -> Callable[..., tuple[Tensor, Tensor]]:
    def combine(steps: Steps, case: Case, scores: Scores, values: Values) -> tuple[Tensor, Tensor]:
        out = out_of(_outs(steps, scores, values), scores)
        return out, torch.stack([steps.block_lse(s) for s in scores]).logsumexp(dim=0)

    return combine


@mistake(
    "The blocks' own softmax averages are added up. The weights of a row add up to the number of blocks.",
    look=MERGE,
    chapter=1,
)
def averages_added(steps: Steps) -> Steps:
    return replace(steps, combine=_with_right_lse(lambda outs, scores: sum(outs)))


def _counts(scores: Scores) -> Tensor:
    """(rounds, B, H, Cq, 1): 1.0 where a query sees something of a block."""
    return torch.stack([(s > -math.inf).any(dim=-1, keepdim=True).double() for s in scores])


@mistake(
    "The blocks' own softmax averages are averaged. Each block counts alike, whatever its weights add up to.",
    look=MERGE,
    chapter=1,
)
def averages_averaged(steps: Steps) -> Steps:
    return replace(steps, combine=_with_right_lse(lambda outs, scores: sum(outs) / _counts(scores).sum(dim=0)))


@variant_of(averages_averaged)
def averages_over_all_rounds(steps: Steps) -> Steps:
    return replace(steps, combine=_with_right_lse(lambda outs, scores: sum(outs) / len(outs)))


@variant_of(averages_averaged)
def averages_over_computed_blocks(steps: Steps) -> Steps:
    def out_of(outs: list[Tensor], scores: Scores) -> Tensor:
        return sum(outs) / sum(bool((s > -math.inf).any()) for s in scores)

    return replace(steps, combine=_with_right_lse(out_of))


@mistake("Each merge takes the mean of the old and the new output, and leaves the lse out.", look=MERGE, chapter=8)
def running_half(steps: Steps) -> Steps:
    def merge(case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.where(lse_j > -math.inf, torch.where(lse > -math.inf, 0.5, 1.0), 0.0)[..., None]
        return out + half * (out_j - out), torch.logaddexp(lse, lse_j)

    return replace(steps, merge=merge)


@variant_of(running_half)
def running_half_of_all_rows(steps: Steps) -> Steps:
    def merge(case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> tuple[Tensor, Tensor]:
        return (out if (lse_j == -math.inf).all() else (out + out_j) / 2), torch.logaddexp(lse, lse_j)

    return replace(steps, merge=merge)


@mistake(
    "The kernel returns zeros as the lse of each block, and they are merged as if they were right.",
    look="what the kernel returns as lse, or the code that stands in for the kernel",
    chapter=8,
    wild=("yunchang, its attention without flash kernels",),
)
def lse_of_zeros(steps: Steps) -> Steps:
    def block_lse(s: Tensor) -> Tensor:
        return steps.block_lse(s).clamp(-math.inf, -math.inf).masked_fill((s > -math.inf).any(dim=-1), 0.0)

    return replace(steps, block_lse=block_lse)


@variant_of(lse_of_zeros)
def lse_of_zeros_in_hidden_rows(steps: Steps) -> Steps:
    return replace(steps, block_lse=lambda s: torch.zeros_like(s[..., 0]))


BASE = "the kernel's documentation: is its lse a natural logarithm or one in base 2?"


@mistake(
    "The blocks' lse are in base 2 and are merged as natural logarithms.",
    look=BASE,
    chapter=8,
    wild=("flashinfer #2113", "vllm PR #28840", "sglang #40903"),
)
def base_2_as_natural(steps: Steps) -> Steps:
    return replace(steps, block_lse=lambda s: steps.block_lse(s) / math.log(2))


@variant_of(base_2_as_natural)
def base_2_in_the_backward_kernel_too(steps: Steps) -> Steps:
    """The backward kernel takes an lse in base 2, as the forward kernel returns it."""
    weights = steps.weights
    return replace(base_2_as_natural(steps), weights=lambda s, lse: weights(s, lse * math.log(2)))


@mistake("The blocks' lse are natural logarithms and are merged with powers of 2.", look=BASE, chapter=8)
def natural_as_base_2(steps: Steps) -> Steps:
    def merge(case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = steps.merge(case, out, lse * math.log(2), out_j, lse_j * math.log(2))
        return out, lse / math.log(2)

    return replace(steps, merge=merge)


@mistake(
    "The output is merged, and the running lse stays that of the first block. Later blocks count too much.",
    look=MERGE,
    chapter=8,
)
def lse_not_updated(steps: Steps) -> Steps:
    def merge(case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> tuple[Tensor, Tensor]:
        return steps.merge(case, out, lse, out_j, lse_j)[0], lse

    return replace(steps, merge=merge)


@mistake(
    "Partial results are merged as e^a + e^b without their maximum. Large scores overflow, very small ones vanish.",
    look=MERGE,
    chapter=1,
    wild=("TransformerEngine PR #716",),
)
def unstabilised(steps: Steps) -> Steps:
    def merge(case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> tuple[Tensor, Tensor]:
        a, b = lse.exp(), lse_j.exp()
        return (out * a[..., None] + out_j * b[..., None]) / (a + b)[..., None], (a + b).log()

    return replace(steps, merge=merge)


@mistake(
    "The running output is never divided by l, the sum of the weights.", look="the end of the forward pass", chapter=1
)
def not_divided(steps: Steps) -> Steps:
    def combine(inner: Steps, case: Case, scores: Scores, values: Values) -> tuple[Tensor, Tensor]:
        out, lse = steps.combine(inner, case, scores, values)
        largest = torch.stack([s.amax(dim=-1) for s in scores]).amax(dim=0)
        return out * torch.exp(lse - largest)[..., None].nan_to_num(), lse

    return replace(steps, combine=combine)


@mistake("The lse that is returned is in base 2.", look="the lse that the forward pass returns or saves", chapter=8)
def lse_returned_in_base_2(steps: Steps) -> Steps:
    return replace(steps, at_the_end=lambda case, results: _changed(steps, case, results, lse=1 / math.log(2)))


def _rounding_merge(
    steps: Steps, round_: Callable[[Case, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], *, all_rows: bool
) -> Steps:
    """A merge that rounds. Without `all_rows` a query that sees nothing of a block is left as it is."""

    def merge(case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> tuple[Tensor, Tensor]:
        rounded = round_(case, out, lse, out_j, lse_j)
        if all_rows:
            return rounded
        seen = lse_j > -math.inf
        return torch.where(seen[..., None], rounded[0], out), torch.where(seen, rounded[1], lse)

    return replace(steps, merge=merge)


def _dtype(case: Case, always: bool) -> torch.dtype:
    """The dtype of q, or bfloat16 whatever q is."""
    return torch.bfloat16 if always else case.dtype


def _sums_in_16_bits(steps: Steps, *, always: bool, all_rows: bool) -> Steps:
    def round_(case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = steps.merge(case, out, lse, out_j, lse_j)
        return out.to(_dtype(case, always)).double(), lse

    return _rounding_merge(steps, round_, all_rows=all_rows)


@mistake(
    "The running output is rounded to 16 bits at each merge. It must stay in float32.",
    look="the dtype of the buffer for the running output",
    chapter=8,
    wild=("ring-flash-attention #42", "ring-flash-attention #67", "flash-attention PR #2723"),
)
def sums_in_16_bits(steps: Steps) -> Steps:
    return _sums_in_16_bits(steps, always=False, all_rows=False)


for _always, _all_rows in ((False, True), (True, False), (True, True)):
    variant_of(sums_in_16_bits)(partial(_sums_in_16_bits, always=_always, all_rows=_all_rows))


def _undivided_sums_in_16_bits(steps: Steps, *, always: bool) -> Steps:
    """m, l and o are carried, and o is rounded."""

    def combine(steps: Steps, case: Case, scores: Scores, values: Values) -> tuple[Tensor, Tensor]:
        m, l, o = torch.full_like(scores[0][..., 0], -math.inf), 0.0, 0.0
        for s, v in zip(scores, values, strict=True):
            largest = torch.maximum(m, s.amax(dim=-1))
            known = largest.masked_fill(largest == -math.inf, 0.0)
            factor, p = torch.exp(m - known), torch.exp(s - known[..., None])
            m, l, o = largest, l * factor + p.sum(dim=-1), o * factor[..., None] + p @ v
            o = o.to(_dtype(case, always)).double()
        return o / l[..., None], m + l.log()

    return replace(steps, combine=combine)


for _always in (False, True):
    variant_of(sums_in_16_bits)(partial(_undivided_sums_in_16_bits, always=_always))


def _lse_in_16_bits(steps: Steps, *, always: bool, all_rows: bool, before: bool) -> Steps:
    """`before`: what is merged is rounded too, and not only the result."""

    def round_(case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> tuple[Tensor, Tensor]:
        dtype = _dtype(case, always)
        if before:
            lse, lse_j = (x.to(dtype).double() for x in (lse, lse_j))
        out, lse = steps.merge(case, out, lse, out_j, lse_j)
        return out, lse.to(dtype).double()

    return _rounding_merge(steps, round_, all_rows=all_rows)


@mistake(
    "The lse is rounded to 16 bits. Shares of blocks are then wrong by up to a percent.",
    look="the dtype of the running lse",
    chapter=8,
)
def lse_in_16_bits(steps: Steps) -> Steps:
    return _lse_in_16_bits(steps, always=False, all_rows=False, before=False)


for _always, _all_rows, _before in itertools.product((False, True), repeat=3):
    variant_of(lse_in_16_bits)(partial(_lse_in_16_bits, always=_always, all_rows=_all_rows, before=_before))


# Blocks do not arrive, or others do --------------------------------------------------------------------------------

LOOP = "the loop over the rounds: P rounds, P - 1 hops"
NEIGHBOUR = "the ranks that a hop sends to and receives from: (r + 1) mod P and (r - 1) mod P"


@mistake("The last block that arrives is never used.", look=LOOP, chapter=4)
def last_block_skipped(steps: Steps) -> Steps:
    return replace(steps, rounds=lambda case, rank: max(1, steps.rounds(case, rank) - 1))


@variant_of(last_block_skipped)
def last_block_skipped_on_one_rank_too(steps: Steps) -> Steps:
    return replace(steps, rounds=lambda case, rank: steps.rounds(case, rank) - 1)


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
    return replace(steps, home=lambda tile: tile.held)


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
    look="the buffers: one to compute on, another one to receive into",
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


TWO = "the messages of a hop: K and V of a block belong together"


@mistake("Only the keys go round. They meet the values of the rank's own block.", look=TWO, chapter=4)
def keys_without_values(steps: Steps) -> Steps:
    return _in_hand(steps, lambda case, rank, t: (rank - t, rank))


@mistake("Only the values go round. They meet the keys of the rank's own block.", look=TWO, chapter=4)
def values_without_keys(steps: Steps) -> Steps:
    return _in_hand(steps, lambda case, rank, t: (rank, rank - t))


@mistake("The buffers of K and V are exchanged at each hop.", look=TWO, chapter=6)
def keys_and_values_exchanged(steps: Steps) -> Steps:
    def exchanged(t: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (v, k) if t % 2 else (k, v)

    return replace(steps, keys_and_values=exchanged)


@variant_of(keys_and_values_exchanged)
def keys_and_values_exchanged_once(steps: Steps) -> Steps:
    return replace(steps, keys_and_values=lambda t, k, v: (v, k) if t else (k, v))


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


@mistake("The scores are scaled twice.", look=SCALE, chapter=8)
def scale_twice(steps: Steps) -> Steps:
    return replace(steps, scale=lambda case: steps.scale(case) ** 2)


@mistake("The scale is that of a head dimension padded to a multiple of 8.", look=SCALE, chapter=8)
def scale_of_padded_head(steps: Steps) -> Steps:
    def scale(case: Case) -> float:
        return (case.head_dim + -case.head_dim % 8) ** -0.5 if case.scale is None else steps.scale(case)

    return replace(steps, scale=scale)


@variant_of(scale_of_padded_head)
def scale_of_padded_head_always(steps: Steps) -> Steps:
    """A scale that was given is ignored."""
    return replace(steps, scale=lambda case: (case.head_dim + -case.head_dim % 8) ** -0.5)


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
    "The attention sinks are counted for each block, so P times.", look=SINKS, chapter=15, wild=("lmdeploy PR #3951",)
)
def sinks_per_block(steps: Steps) -> Steps:
    def sink(case: Case, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(case.world_size):
            out, lse = steps.sink(case, out, lse)
        return out, lse

    return replace(steps, sink=sink)


# Rows that are lost ------------------------------------------------------------------------------------------------


def _changed(steps: Steps, case: Case, results: dict[str, Tensor], **factors: float) -> dict[str, Tensor]:
    results = steps.at_the_end(case, results)
    return results | {name: results[name] * factor for name, factor in factors.items() if name in results}


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
        rows, keys = kept(case)[case.place(rank)], kept(case)[case.place(block)]
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

    def merge(case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> tuple[Tensor, Tensor]:
        merged, lse = steps.merge(case, out, lse, out_j, lse_j)
        return torch.where(out_j.isnan() | out.isnan(), math.nan, merged), lse

    return replace(steps, block_out=block_out, merge=merge)


@variant_of(nan_of_unseen_rows)
def nan_of_unseen_blocks(steps: Steps) -> Steps:
    return replace(nan_of_unseen_rows(steps), block_out=lambda s, v: torch.softmax(s, dim=-1) @ v)


def main() -> int:
    catalogue = importlib.import_module("doctor.diagnosis").CATALOGUE  # all entries, those of the other files too
    print(f"{len(catalogue)} mistakes are known")
    for name, entry in sorted(catalogue.items()):
        print(f"{name}: {entry.what}")
        if entry.wild:
            print(f"    had it: {', '.join(entry.wild)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
