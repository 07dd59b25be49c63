"""The catalogue, continued: partial results that are merged wrongly.

A ring computes the softmax of a row in P pieces. These mistakes put the pieces together wrongly, or round them.

Before: mistakes.py. After: mistakes_of_travel.py.
Source: each entry names who had it, where that is public.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ring_doctor.case import Case
from ring_doctor.mistakes import mistake, replaces, variant_of
from ring_doctor.paper_ring import Rows, Scores, Steps, Values

MERGE = "where the result of a new block meets the running result"


def _running_sums(
    steps: Steps, *, l_rescaled: bool, o_rescaled: bool, rounded: Callable[[Case, Tensor], Tensor] = lambda case, o: o
) -> Steps:
    """m, l and o are carried from block to block, rescaled or not, and o is `rounded` after each block."""

    def combine(steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        m = torch.full_like(scores[0][..., 0], -math.inf)
        l, o = torch.zeros_like(m), torch.zeros_like(scores[0] @ values[0])
        for s, v in zip(scores, values, strict=True):
            largest = torch.maximum(m, s.amax(dim=-1))
            known = largest.masked_fill(largest == -math.inf, 0.0)
            f, p = torch.exp(m - known), torch.exp(s - known[..., None])
            l = (l * f if l_rescaled else l) + p.sum(dim=-1)
            o = rounded(case, (o * f[..., None] if o_rescaled else o) + p @ v)
            m = largest
        return o / l[..., None], m + l.log()

    return replace(steps, combine=combine)


@mistake("The running maximum grows, and the old sums l and o are not rescaled to it.", look=MERGE, chapter=1)
def no_rescale(steps: Steps) -> Steps:
    return _running_sums(steps, l_rescaled=False, o_rescaled=False)


@mistake("The running maximum grows, and of the old sums only o is rescaled to it. l is not.", look=MERGE, chapter=1)
def l_not_rescaled(steps: Steps) -> Steps:
    return _running_sums(steps, l_rescaled=False, o_rescaled=True)


@mistake("The running maximum grows, and of the old sums only l is rescaled to it. o is not.", look=MERGE, chapter=1)
def o_not_rescaled(steps: Steps) -> Steps:
    return _running_sums(steps, l_rescaled=True, o_rescaled=False)


@variant_of(o_not_rescaled)
@replaces("merge")
def average_not_rescaled(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    """A block's average gets its share of the whole, and the average so far keeps the share that it had."""
    _, merged = steps.merge(case, out, lse, out_j, lse_j)
    return out + torch.exp(lse_j - merged.masked_fill(merged == -math.inf, 0.0))[..., None] * out_j, merged


@mistake("Each block has its own maximum, and the blocks' sums are added as if they had one.", look=MERGE, chapter=1)
@replaces("combine")
def own_max_per_block(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
    maxima = [s.amax(dim=-1, keepdim=True) for s in scores]
    weights = [torch.exp(s - m.masked_fill(m == -math.inf, 0.0)) for s, m in zip(scores, maxima, strict=True)]
    l = torch.stack([p.sum(dim=-1, keepdim=True) for p in weights]).sum(dim=0)
    o = torch.stack([p @ v for p, v in zip(weights, values, strict=True)]).sum(dim=0)
    return o / l, (maxima[-1] + l.log())[..., 0]


@variant_of(own_max_per_block)
@replaces("combine")
def own_max_per_block_and_largest_in_lse(
    right: Steps, steps: Steps, case: Case, scores: Scores, values: Values
) -> Rows:
    out, lse = own_max_per_block(right).combine(steps, case, scores, values)
    largest = torch.stack([s.amax(dim=-1) for s in scores]).amax(dim=0)
    return out, lse - scores[-1].amax(dim=-1) + largest


@variant_of(own_max_per_block)
@replaces("combine")
def own_max_per_seen_block(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
    """A block that no query sees is left out. So the last maximum is that of another block."""
    seen = [i for i, s in enumerate(scores) if bool((s > -math.inf).any())] or [0]
    return own_max_per_block(right).combine(steps, case, [scores[i] for i in seen], [values[i] for i in seen])


def _with_right_lse(steps: Steps, out_of: Callable[[Tensor, Scores], Tensor]) -> Steps:
    """out is made of the blocks' own averages (rounds, B, H, Cq, D), and lse is right."""

    def combine(steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        averages = torch.stack([steps.block_out(s, v) for s, v in zip(scores, values, strict=True)])
        return out_of(averages, scores), torch.stack([steps.block_lse(s) for s in scores]).logsumexp(dim=0)

    return replace(steps, combine=combine)


@mistake(
    "The blocks' own softmax averages are added up. The weights of a row add up to the number of blocks.",
    look=MERGE,
    chapter=1,
)
def averages_added(steps: Steps) -> Steps:
    return _with_right_lse(steps, lambda averages, scores: averages.sum(dim=0))


def _counts(scores: Scores) -> Tensor:
    """(rounds, B, H, Cq, 1): 1.0 where a query sees something of a block."""
    return torch.stack([(s > -math.inf).any(dim=-1, keepdim=True).double() for s in scores])


@mistake(
    "The blocks' own softmax averages are averaged. Each block counts alike, whatever its weights add up to.",
    look=MERGE,
    chapter=1,
)
def averages_averaged(steps: Steps) -> Steps:
    return _with_right_lse(steps, lambda averages, scores: averages.sum(dim=0) / _counts(scores).sum(dim=0))


@variant_of(averages_averaged)
def averages_over_all_rounds(steps: Steps) -> Steps:
    return _with_right_lse(steps, lambda averages, scores: averages.mean(dim=0))


@variant_of(averages_averaged)
def averages_over_computed_blocks(steps: Steps) -> Steps:
    def out_of(averages: Tensor, scores: Scores) -> Tensor:
        return averages.sum(dim=0) / sum(bool((s > -math.inf).any()) for s in scores)

    return _with_right_lse(steps, out_of)


@mistake("Each merge takes the mean of the old and the new output, and leaves the lse out.", look=MERGE, chapter=8)
@replaces("merge")
def running_half(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    half = torch.where(lse_j > -math.inf, torch.where(lse > -math.inf, 0.5, 1.0), 0.0)[..., None]
    return out + half * (out_j - out), torch.logaddexp(lse, lse_j)


@variant_of(running_half)
@replaces("merge")
def running_half_of_all_rows(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    return (out if (lse_j == -math.inf).all() else (out + out_j) / 2), torch.logaddexp(lse, lse_j)


@variant_of(running_half)
@replaces("merge")
def running_half_of_hidden_blocks(
    steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor
) -> Rows:
    return (out + out_j) / 2, torch.logaddexp(lse, lse_j)


@mistake(
    "The kernel returns zeros as the lse of each block, and they are merged as if they were right.",
    look="what the kernel returns as lse, or the code that stands in for the kernel",
    chapter=8,
    wild=("yunchang, its attention without flash kernels",),
)
@replaces("block_lse")
def lse_of_zeros(steps: Steps, s: Tensor) -> Tensor:
    return steps.block_lse(s).clamp(-math.inf, -math.inf).masked_fill((s > -math.inf).any(dim=-1), 0.0)


@variant_of(lse_of_zeros)
def lse_of_zeros_in_hidden_rows(steps: Steps) -> Steps:
    return replace(steps, block_lse=lambda s: torch.zeros_like(s[..., 0]))


@variant_of(lse_of_zeros)
def lse_of_zeros_in_seen_blocks(steps: Steps) -> Steps:
    """A block that no query sees is left out. In the others a query that sees nothing gets a zero too."""

    def block_lse(s: Tensor) -> Tensor:
        return torch.zeros_like(s[..., 0]) if bool((s > -math.inf).any()) else steps.block_lse(s)

    return replace(steps, block_lse=block_lse)


BASE = "the kernel's documentation: is its lse a natural logarithm or a logarithm in base 2?"


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
@replaces("merge")
def natural_as_base_2(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    out, lse = steps.merge(case, out, lse * math.log(2), out_j, lse_j * math.log(2))
    return out, lse / math.log(2)


@mistake(
    "The output is merged, and the running lse stays the lse of the first block. Later blocks count too much.",
    look=MERGE,
    chapter=8,
)
def lse_not_updated(steps: Steps) -> Steps:
    return replace(steps, merge=lambda case, out, lse, *block: (steps.merge(case, out, lse, *block)[0], lse))


@mistake(
    "A merge gives the old output the share of the new output, and the new output the share of the old output.",
    look=MERGE,
    chapter=8,
)
@replaces("merge")
def shares_exchanged(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    out, _ = steps.merge(case, out, lse_j, out_j, lse)
    return out, torch.logaddexp(lse, lse_j)


@variant_of(shares_exchanged)
@replaces("merge")
def shares_of_seen_blocks_exchanged(
    steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor
) -> Rows:
    """A block that no query sees is left out."""
    return (out, lse) if (lse_j == -math.inf).all() else shares_exchanged(steps).merge(case, out, lse, out_j, lse_j)


@variant_of(shares_exchanged)
@replaces("merge")
def shares_of_seen_rows_exchanged(
    steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor
) -> Rows:
    """The row of a query that sees nothing of a block does not change."""
    exchanged, merged = shares_exchanged(steps).merge(case, out, lse, out_j, lse_j)
    return torch.where((lse_j > -math.inf)[..., None], exchanged, out), merged


@mistake(
    "Two lse are merged as the larger of them, and not as log(e^a + e^b). The shares of the blocks are then wrong.",
    look=MERGE,
    chapter=8,
)
@replaces("merge")
def lse_merged_by_maximum(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    """The shares of a merge add up to 1. The lse that it leaves is too small."""
    return steps.merge(case, out, lse, out_j, lse_j)[0], torch.maximum(lse, lse_j)


@variant_of(lse_merged_by_maximum)
@replaces("merge")
def shares_by_maximum(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    """The shares are e^(lse - new lse). They add up to more than 1, because the new lse is too small."""
    largest = torch.maximum(lse, lse_j)
    known = largest.masked_fill(largest == -math.inf, 0.0)
    old, new = (torch.exp(x - known)[..., None] for x in (lse, lse_j))
    return old * out + new * out_j, largest


@mistake(
    "Partial results are merged as e^a + e^b without their maximum. Large scores overflow, very small ones vanish.",
    look=MERGE,
    chapter=1,
    wild=("TransformerEngine PR #716",),
)
@replaces("merge")
def unstabilised(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    a, b = lse.exp(), lse_j.exp()
    return (out * a[..., None] + out_j * b[..., None]) / (a + b)[..., None], (a + b).log()


@mistake(
    "The running output is never divided by l, the sum of the weights.", look="the end of the forward pass", chapter=1
)
@replaces("combine")
def not_divided(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
    out, lse = right.combine(steps, case, scores, values)
    largest = torch.stack([s.amax(dim=-1) for s in scores]).amax(dim=0)
    return out * torch.exp(lse - largest)[..., None].nan_to_num(), lse


PADDING = "what pads K and V: its score must be -inf, because e^0 is 1"


def _padded(steps: Steps, *, multiple: int | None, where: Callable[[Tensor], Tensor]) -> Steps:
    """Each block gets keys of zeros up to a multiple, or up to the longest block: the score 0 and the value 0.

    `where` says from the scores of a tile (B, H, Cq, Ck) which queries (B, H, Cq, 1) see them.
    """

    def combine(of: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        longest = max(len(case.positions(rank)) for rank in range(case.world_size))
        wider = []
        for s in scores:
            more = longest - s.shape[-1] if multiple is None else -s.shape[-1] % multiple
            of_padding = torch.zeros_like(s[..., :1]).masked_fill(~where(s), -math.inf)
            wider.append(torch.cat([s, of_padding.expand(*s.shape[:-1], more)], dim=-1))
        longer = [
            torch.nn.functional.pad(v, (0, 0, 0, s.shape[-1] - v.shape[2])) for s, v in zip(wider, values, strict=True)
        ]
        return steps.combine(of, case, wider, longer)

    return replace(steps, combine=combine)


def _in_every_tile(s: Tensor) -> Tensor:
    return torch.ones_like(s[..., :1], dtype=torch.bool)


def _in_seen_tiles(s: Tensor) -> Tensor:
    return (s > -math.inf).any().expand(*s.shape[:-1], 1)


def _in_whole_tiles(s: Tensor) -> Tensor:
    """A triangle hides what comes after its keys."""
    return (s > -math.inf).all().expand(*s.shape[:-1], 1)


@mistake(
    "K and V are padded with zeros, and no mask hides the padding. Each key of it counts as e^0 in l.",
    look=PADDING,
    chapter=15,
)
def padding_unmasked(steps: Steps) -> Steps:
    return _padded(steps, multiple=8, where=_in_seen_tiles)


for _multiple, _where in itertools.product((None, 8, 16, 64, 128), (_in_seen_tiles, _in_every_tile, _in_whole_tiles)):
    if (_multiple, _where) != (8, _in_seen_tiles):
        variant_of(padding_unmasked)(partial(_padded, multiple=_multiple, where=_where))


@mistake("The lse that is returned is in base 2.", look="the lse that the forward pass returns or saves", chapter=8)
@replaces("at_the_end")
def lse_returned_in_base_2(steps: Steps, case: Case, results: dict[str, Tensor]) -> dict[str, Tensor]:
    results = steps.at_the_end(case, results)
    return results | {"lse": results["lse"] / math.log(2)}


def _in_16_bits(x: Tensor, case: Case, always: bool) -> Tensor:
    """x rounded to the dtype of q, or to bfloat16 whatever q is."""
    return x.to(torch.bfloat16 if always else case.dtype).double()


def _rounding_merge(
    steps: Steps, *, always: bool, all_rows: bool, out_too: bool = False, lse_too: bool = False, inputs: bool = False
) -> Steps:
    """A merge that rounds out or lse, and with `inputs` also the lse that it is given.

    Without `all_rows` the row of a query that sees nothing of a block does not change.
    """

    def merge(case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
        given = [_in_16_bits(x, case, always) if inputs else x for x in (lse, lse_j)]
        new, new_lse = steps.merge(case, out, given[0], out_j, given[1])
        new = _in_16_bits(new, case, always) if out_too else new
        new_lse = _in_16_bits(new_lse, case, always) if lse_too else new_lse
        seen = (lse_j > -math.inf) | all_rows
        return torch.where(seen[..., None], new, out), torch.where(seen, new_lse, lse)

    return replace(steps, merge=merge)


@mistake(
    "The running output is rounded to 16 bits at each merge. It must stay in float32.",
    look="the dtype of the buffer for the running output",
    chapter=8,
    wild=("ring-flash-attention #42", "ring-flash-attention #67", "flash-attention PR #2723"),
)
def sums_in_16_bits(steps: Steps) -> Steps:
    return _rounding_merge(steps, always=False, all_rows=False, out_too=True)


for _always, _all_rows in ((False, True), (True, False), (True, True)):
    variant_of(sums_in_16_bits)(partial(_rounding_merge, always=_always, all_rows=_all_rows, out_too=True))


def _undivided_sums_in_16_bits(steps: Steps, *, always: bool) -> Steps:
    return _running_sums(steps, l_rescaled=True, o_rescaled=True, rounded=lambda case, o: _in_16_bits(o, case, always))


for _always in (False, True):
    variant_of(sums_in_16_bits)(partial(_undivided_sums_in_16_bits, always=_always))


@mistake(
    "The lse is rounded to 16 bits. Shares of blocks are then wrong by up to a percent.",
    look="the dtype of the running lse",
    chapter=8,
)
def lse_in_16_bits(steps: Steps) -> Steps:
    return _rounding_merge(steps, always=False, all_rows=False, lse_too=True)


for _always, _all_rows, _inputs in itertools.product((False, True), repeat=3):
    variant_of(lse_in_16_bits)(
        partial(_rounding_merge, always=_always, all_rows=_all_rows, lse_too=True, inputs=_inputs)
    )
