"""The catalogue, continued: partial results that are merged wrongly.

A ring computes the softmax of a row in P pieces. These mistakes put the pieces together wrongly, or round them.

Before: __init__.py, a row. After: travel.py.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ring_doctor.asking.case import Case
from ring_doctor.mistakes import Change, but, in_the_end, told
from ring_doctor.mistakes.paper_ring import Rows, Scores, Steps, Values


def in_seen_blocks(change: Change) -> Change:
    """The same in a ring that leaves out the blocks of which a rank sees nothing."""

    def combine(right: Steps, its: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        seen = [i for i, s in enumerate(scores) if (s > -math.inf).any()] or [0]
        return change(right).combine(its, case, [scores[i] for i in seen], [values[i] for i in seen])

    return lambda steps: replace(change(steps), combine=partial(combine, steps))


def in_seen_rows(change: Change) -> Change:
    """The same merge, but a query that sees nothing of a block keeps its row."""

    def merge(right: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
        new, new_lse = change(right).merge(case, out, lse, out_j, lse_j)
        seen = lse_j > -math.inf
        return torch.where(seen[..., None], new, out), torch.where(seen, new_lse, lse)

    return but(merge=merge)


def finite(lse: Tensor) -> Tensor:
    """0 in place of the -inf of a row that has seen no key."""
    return lse.masked_fill(lse == -math.inf, 0.0)


# All blocks of a row: the step `combine` ---------------------------------------------------------------------------


def running_sums(
    *, l_rescaled: bool, o_rescaled: bool, rounded: Callable[[Case, Tensor], Tensor] = lambda case, o: o
) -> Change:
    """m, l and o are carried from block to block, rescaled or not, and o is `rounded` after each block."""

    def combine(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        m = torch.full_like(scores[0][..., 0], -math.inf)
        l, o = torch.zeros_like(m), torch.zeros_like(scores[0] @ values[0])
        for s, v in zip(scores, values, strict=True):
            largest = torch.maximum(m, s.amax(dim=-1))
            known = finite(largest)
            f, p = torch.exp(m - known), torch.exp(s - known[..., None])
            l = (l * f if l_rescaled else l) + p.sum(dim=-1)
            o = rounded(case, (o * f[..., None] if o_rescaled else o) + p @ v)
            m = largest
        return o / l[..., None], m + l.log()

    return but(combine=combine)


def largest_of(scores: Scores) -> Tensor:
    """(B, H, Cq): the largest score of each row, of all blocks."""
    return torch.stack([s.amax(dim=-1) for s in scores]).amax(dim=0)


def own_max(m_of: Callable[[Scores], Tensor]) -> Change:
    """m_of says which m counts for lse."""

    def combine(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        weights = [torch.exp(s - finite(s.amax(dim=-1, keepdim=True))) for s in scores]
        l = torch.stack([p.sum(dim=-1) for p in weights]).sum(dim=0)
        o = torch.stack([p @ v for p, v in zip(weights, values, strict=True)]).sum(dim=0)
        return o / l[..., None], m_of(scores) + l.log()

    return but(combine=combine)


LAST_MAX = own_max(lambda scores: scores[-1].amax(dim=-1))


def undivided(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
    out, lse = right.combine(steps, case, scores, values)
    return out * torch.exp(lse - largest_of(scores))[..., None].nan_to_num(), lse


def with_right_lse(out_of: Callable[[Tensor], Tensor]) -> Change:
    """out is made of the blocks' own averages (rounds, B, H, Cq, D), and lse is right."""

    def combine(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        averages = torch.stack([steps.block_out(s, v) for s, v in zip(scores, values, strict=True)])
        return out_of(averages), torch.stack([steps.block_lse(s) for s in scores]).logsumexp(dim=0)

    return but(combine=combine)


MEAN = with_right_lse(lambda averages: averages.mean(dim=0))
MEAN_OF_SEEN_ROWS = with_right_lse(lambda averages: averages.sum(dim=0) / averages.any(dim=-1, keepdim=True).sum(dim=0))


def padded(multiple: int | None, *, whole_tiles: bool = False) -> Change:
    """Each block gets keys of zeros up to a multiple, or up to the longest block: the score 0 and the value 0.

    A mask of a triangle hides what comes after its keys, so with `whole_tiles` only tiles without a mask see them.
    """

    def combine(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        longest = max(len(case.positions(rank)) for rank in range(case.world_size))
        wider, longer = [], []
        for s, v in zip(scores, values, strict=True):
            more = longest - s.shape[-1] if multiple is None else -s.shape[-1] % multiple
            more = 0 if whole_tiles and not (s > -math.inf).all() else more
            wider.append(torch.nn.functional.pad(s, (0, more)))
            longer.append(torch.nn.functional.pad(v, (0, 0, 0, more)))
        return right.combine(steps, case, wider, longer)

    return but(combine=combine)


# A new block and the result so far: the step `merge` ---------------------------------------------------------------


def merge(wrong: Callable[[Tensor, Tensor, Tensor, Tensor], Rows]) -> Change:
    """A merge of out, lse, out_j, lse_j that does not use the right one."""
    return but(merge=lambda steps, case, *rows: wrong(*rows))


def average_not_rescaled(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    """A block's average gets its share of the whole, and the average so far keeps the share that it had."""
    _, merged = steps.merge(case, out, lse, out_j, lse_j)
    return out + torch.exp(lse_j - finite(merged))[..., None] * out_j, merged


HALF = merge(lambda out, lse, out_j, lse_j: ((out + out_j) / 2, torch.logaddexp(lse, lse_j)))


def natural_as_base_2(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    out, lse = steps.merge(case, out, lse * math.log(2), out_j, lse_j * math.log(2))
    return out, lse / math.log(2)


def exchanged(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    return steps.merge(case, out, lse_j, out_j, lse)[0], torch.logaddexp(lse, lse_j)


def shares_by_maximum(out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    """The shares are e^(lse - new lse). They add up to more than 1, because the new lse is too small."""
    largest = torch.maximum(lse, lse_j)
    old, new = (torch.exp(x - finite(largest))[..., None] for x in (lse, lse_j))
    return old * out + new * out_j, largest


def without_maximum(out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    a, b = lse.exp(), lse_j.exp()
    return (out * a[..., None] + out_j * b[..., None]) / (a + b)[..., None], (a + b).log()


def in_16_bits(x: Tensor, case: Case, always: bool) -> Tensor:
    """x rounded to the dtype of q, or to bfloat16 whatever q is."""
    return x.to(torch.bfloat16 if always else case.dtype).double()


def rounding(*results: str) -> Iterator[Change]:
    """Merges that round some of out, of lse, and of the lse that they are given, in all rows or in those that see."""
    for always in (False, True):

        def merge(steps: Steps, case: Case, *rows: Tensor, always: bool = always) -> Rows:
            out, lse, out_j, lse_j = rows
            if "given" in results:
                lse, lse_j = (in_16_bits(x, case, always) for x in (lse, lse_j))
            out, lse = steps.merge(case, out, lse, out_j, lse_j)
            out = in_16_bits(out, case, always) if "out" in results else out
            return out, in_16_bits(lse, case, always) if "lse" in results else lse

        yield in_seen_rows(but(merge=merge))
        yield but(merge=merge)


def from_the_first(change: Change) -> Change:
    """The same in a ring that has gathered all blocks, and takes them from the first to the last."""
    return lambda steps: replace(change(steps), believed=lambda case, rank, t: t, in_hand=lambda case, rank, t: (t, t))


def undivided_in_16_bits(always: bool) -> Change:
    return running_sums(l_rescaled=True, o_rescaled=True, rounded=lambda case, o: in_16_bits(o, case, always))


# What the kernel returns: the step `block_lse` ---------------------------------------------------------------------


ZERO_WHERE_UNSEEN = but(block_lse=lambda steps, s: finite(steps.block_lse(s)))
LSE_OF_ZEROS = but(block_lse=lambda steps, s: torch.zeros_like(s[..., 0]))
ZEROS_IN_SEEN_ROWS = but(block_lse=lambda steps, s: torch.where((s == -math.inf).all(dim=-1), -math.inf, 0.0).double())


def natural_m_and_log_2(steps: Steps, s: Tensor) -> Tensor:
    m = finite(s.amax(dim=-1))
    return m + (steps.block_lse(s) - m) / math.log(2)


def smooth(steps: Steps, t: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Each block's keys without their mean: its weights are right, and its lse is that of other scores."""
    k, v = steps.keys_and_values(t, k, v)
    return k - k.mean(dim=2, keepdim=True), v


SUMS_IN_16_BITS = *rounding("out"), *map(undivided_in_16_bits, (False, True))
CHANGES = {
    "no_rescale": [running_sums(l_rescaled=False, o_rescaled=False)],
    "l_not_rescaled": [running_sums(l_rescaled=False, o_rescaled=True)],
    "o_not_rescaled": [running_sums(l_rescaled=True, o_rescaled=False), but(merge=average_not_rescaled)],
    "own_max_per_block": [LAST_MAX, own_max(largest_of), in_seen_blocks(LAST_MAX)],
    "averages_added": [with_right_lse(lambda averages: averages.sum(dim=0))],
    "averages_averaged": [MEAN_OF_SEEN_ROWS, in_seen_blocks(MEAN), MEAN],
    "running_half": [in_seen_rows(HALF), in_seen_blocks(HALF), HALF],
    "lse_of_zeros": [ZEROS_IN_SEEN_ROWS, in_seen_blocks(LSE_OF_ZEROS), LSE_OF_ZEROS],
    "lse_0_of_unseen_rows": [ZERO_WHERE_UNSEEN, in_seen_blocks(ZERO_WHERE_UNSEEN)],
    "lse_of_shifted_scores": [but(keys_and_values=smooth)],
    "base_2_as_natural": [
        but(block_lse=lambda steps, s: steps.block_lse(s) / math.log(2)),
        but(block_lse=natural_m_and_log_2),
        but(merge=lambda steps, case, *rows: steps.merge(case, *rows[:3], rows[3] / math.log(2))),  # later blocks only
    ],
    "natural_as_base_2": [but(merge=natural_as_base_2)],
    "lse_not_updated": [but(merge=lambda steps, case, out, lse, *block: (steps.merge(case, out, lse, *block)[0], lse))],
    "shares_exchanged": [but(merge=exchanged), *(of(but(merge=exchanged)) for of in (in_seen_blocks, in_seen_rows))],
    "lse_merged_by_maximum": [
        but(merge=lambda steps, case, *rows: (steps.merge(case, *rows)[0], torch.maximum(*rows[1::2]))),
        merge(shares_by_maximum),
    ],
    "unstabilised": [merge(without_maximum)],
    "not_divided": [but(combine=undivided)],
    "padding_unmasked": [
        change
        for multiple in (8, None, 64, 128)
        for change in (in_seen_blocks(padded(multiple)), padded(multiple), padded(multiple, whole_tiles=True))
    ],
    "lse_returned_in_base_2": [in_the_end(lambda steps, case, x: {"lse": x["lse"] / math.log(2)}, "lse")],
    "sums_in_16_bits": [change for each in SUMS_IN_16_BITS for change in (each, from_the_first(each))],
    "lse_in_16_bits": [*rounding("lse"), *rounding("lse", "given")],
}
MISTAKES = told("Merging", CHANGES)
