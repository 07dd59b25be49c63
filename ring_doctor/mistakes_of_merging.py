"""The catalogue, continued: partial results that are merged wrongly.

A ring computes the softmax of a row in P pieces. These mistakes put the pieces together wrongly, or round them.

Before: mistakes.py. After: mistakes_of_travel.py.
Source: each entry names who had it, where that is public.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ring_doctor.case import Case
from ring_doctor.mistakes import Change, but, entry
from ring_doctor.paper_ring import Rows, Scores, Steps, Values

# All blocks of a row: the step `combine` ---------------------------------------------------------------------------


def finite(lse: Tensor) -> Tensor:
    """0 in place of the -inf of a row that has seen no key."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def unrounded(case: Case, o: Tensor) -> Tensor:
    return o


def running_sums(
    *, l_rescaled: bool, o_rescaled: bool, rounded: Callable[[Case, Tensor], Tensor] = unrounded
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


def own_max(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
    maxima = [s.amax(dim=-1, keepdim=True) for s in scores]
    weights = [torch.exp(s - finite(m)) for s, m in zip(scores, maxima, strict=True)]
    l = torch.stack([p.sum(dim=-1, keepdim=True) for p in weights]).sum(dim=0)
    o = torch.stack([p @ v for p, v in zip(weights, values, strict=True)]).sum(dim=0)
    return o / l, (maxima[-1] + l.log())[..., 0]


def own_max_and_largest_in_lse(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
    out, lse = own_max(right, steps, case, scores, values)
    return out, lse - scores[-1].amax(dim=-1) + largest_of(scores)


def own_max_of_seen(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
    """A block that no query sees is left out. So the last maximum is that of another block."""
    seen = [i for i, s in enumerate(scores) if is_seen(s)] or [0]
    return own_max(right, steps, case, [scores[i] for i in seen], [values[i] for i in seen])


def undivided(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
    out, lse = right.combine(steps, case, scores, values)
    return out * torch.exp(lse - largest_of(scores))[..., None].nan_to_num(), lse


def with_right_lse(out_of: Callable[[Tensor, Scores], Tensor]) -> Change:
    """out is made of the blocks' own averages (rounds, B, H, Cq, D), and lse is right."""

    def combine(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        averages = torch.stack([steps.block_out(s, v) for s, v in zip(scores, values, strict=True)])
        return out_of(averages, scores), torch.stack([steps.block_lse(s) for s in scores]).logsumexp(dim=0)

    return but(combine=combine)


def is_seen(s: Tensor) -> bool:
    return bool((s > -math.inf).any())


def mean_of_seen_rows(averages: Tensor, scores: Scores) -> Tensor:
    counts = torch.stack([(s > -math.inf).any(dim=-1, keepdim=True).double() for s in scores])
    return averages.sum(dim=0) / counts.sum(dim=0)


def padded(*, multiple: int | None, where: Callable[[Tensor], Tensor]) -> Change:
    """Each block gets keys of zeros up to a multiple, or up to the longest block: the score 0 and the value 0.

    `where` says from the scores of a tile (B, H, Cq, Ck) which queries (B, H, Cq, 1) see them.
    """

    def combine(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        longest = max(len(case.positions(rank)) for rank in range(case.world_size))
        wider = []
        for s in scores:
            more = longest - s.shape[-1] if multiple is None else -s.shape[-1] % multiple
            of_padding = torch.zeros_like(s[..., :1]).masked_fill(~where(s), -math.inf)
            wider.append(torch.cat([s, of_padding.expand(*s.shape[:-1], more)], dim=-1))
        longer = [
            torch.nn.functional.pad(v, (0, 0, 0, s.shape[-1] - v.shape[2])) for s, v in zip(wider, values, strict=True)
        ]
        return right.combine(steps, case, wider, longer)

    return but(combine=combine)


def in_seen_tiles(s: Tensor) -> Tensor:
    return (s > -math.inf).any().expand(*s.shape[:-1], 1)


def in_every_tile(s: Tensor) -> Tensor:
    return torch.ones_like(s[..., :1], dtype=torch.bool)


def in_whole_tiles(s: Tensor) -> Tensor:
    """A triangle hides what comes after its keys."""
    return (s > -math.inf).all().expand(*s.shape[:-1], 1)


PADDED = itertools.product((None, 8, 16, 64, 128), (in_seen_tiles, in_every_tile, in_whole_tiles))
PADDINGS = sorted(PADDED, key=lambda how: how != (8, in_seen_tiles))  # the usual one first


# A new block and the result so far: the step `merge` ---------------------------------------------------------------

Merged = Callable[[Tensor, Tensor, Tensor, Tensor], Rows]  # out, lse, out_j, lse_j


def merge(wrong: Merged) -> Change:
    """A merge that does not use the right one."""
    return but(merge=lambda steps, case, *rows: wrong(*rows))


def average_not_rescaled(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    """A block's average gets its share of the whole, and the average so far keeps the share that it had."""
    _, merged = steps.merge(case, out, lse, out_j, lse_j)
    return out + torch.exp(lse_j - finite(merged))[..., None] * out_j, merged


def half(out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    """A query that sees nothing of one of the two keeps the other."""
    of_new = torch.where(lse_j > -math.inf, torch.where(lse > -math.inf, 0.5, 1.0), 0.0)[..., None]
    return out + of_new * (out_j - out), torch.logaddexp(lse, lse_j)


def half_of_seen_blocks(out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    return (out if (lse_j == -math.inf).all() else (out + out_j) / 2), torch.logaddexp(lse, lse_j)


def natural_as_base_2(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    out, lse = steps.merge(case, out, lse * math.log(2), out_j, lse_j * math.log(2))
    return out, lse / math.log(2)


def exchanged(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    out, _ = steps.merge(case, out, lse_j, out_j, lse)
    return out, torch.logaddexp(lse, lse_j)


def exchanged_in_seen_blocks(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    return (out, lse) if (lse_j == -math.inf).all() else exchanged(steps, case, out, lse, out_j, lse_j)


def exchanged_in_seen_rows(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    new, merged = exchanged(steps, case, out, lse, out_j, lse_j)
    return torch.where((lse_j > -math.inf)[..., None], new, out), merged


def shares_by_maximum(out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    """The shares are e^(lse - new lse). They add up to more than 1, because the new lse is too small."""
    largest = torch.maximum(lse, lse_j)
    known = finite(largest)
    old, new = (torch.exp(x - known)[..., None] for x in (lse, lse_j))
    return old * out + new * out_j, largest


def without_maximum(out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    a, b = lse.exp(), lse_j.exp()
    return (out * a[..., None] + out_j * b[..., None]) / (a + b)[..., None], (a + b).log()


def in_16_bits(x: Tensor, case: Case, always: bool) -> Tensor:
    """x rounded to the dtype of q, or to bfloat16 whatever q is."""
    return x.to(torch.bfloat16 if always else case.dtype).double()


def rounding(
    always: bool, all_rows: bool, inputs: bool = False, *, out_too: bool = False, lse_too: bool = False
) -> Change:
    """A merge that rounds out or lse, and with `inputs` also the lse that it is given.

    Without `all_rows` the row of a query that sees nothing of a block does not change.
    """

    def merge(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
        given = [in_16_bits(x, case, always) if inputs else x for x in (lse, lse_j)]
        new, new_lse = steps.merge(case, out, given[0], out_j, given[1])
        new = in_16_bits(new, case, always) if out_too else new
        new_lse = in_16_bits(new_lse, case, always) if lse_too else new_lse
        seen = (lse_j > -math.inf) | all_rows
        return torch.where(seen[..., None], new, out), torch.where(seen, new_lse, lse)

    return but(merge=merge)


def undivided_in_16_bits(always: bool) -> Change:
    return running_sums(l_rescaled=True, o_rescaled=True, rounded=lambda case, o: in_16_bits(o, case, always))


# What the kernel returns: the step `block_lse` ---------------------------------------------------------------------


def zeros_in_seen_rows(steps: Steps, s: Tensor) -> Tensor:
    return steps.block_lse(s).clamp(-math.inf, -math.inf).masked_fill((s > -math.inf).any(dim=-1), 0.0)


def returned_in_base_2(steps: Steps, case: Case, results: dict[str, Tensor]) -> dict[str, Tensor]:
    results = steps.at_the_end(case, results)
    return results | {"lse": results["lse"] / math.log(2)}


MERGE = "where the result of a new block meets the running result"
BASE = "the kernel's documentation: is its lse a natural logarithm or a logarithm in base 2?"
TWICE = (False, True)

# fmt: off
MISTAKES = (
    entry("no_rescale", "The running maximum grows, and the old sums l and o are not rescaled to it.", MERGE, 1,
          running_sums(l_rescaled=False, o_rescaled=False)),
    entry("l_not_rescaled",
          "The running maximum grows, and of the old sums only o is rescaled to it. l is not.", MERGE, 1,
          running_sums(l_rescaled=False, o_rescaled=True)),
    entry("o_not_rescaled",
          "The running maximum grows, and of the old sums only l is rescaled to it. o is not.", MERGE, 1,
          running_sums(l_rescaled=True, o_rescaled=False), but(merge=average_not_rescaled)),
    entry("own_max_per_block",
          "Each block has its own maximum, and the blocks' sums are added as if they had one.", MERGE, 1,
          *(but(combine=combine) for combine in (own_max, own_max_and_largest_in_lse, own_max_of_seen))),
    entry("averages_added",
          "The blocks' own softmax averages are added up. The weights of a row add up to the number of blocks.",
          MERGE, 1, with_right_lse(lambda averages, scores: averages.sum(dim=0))),
    entry("averages_averaged",
          "The blocks' own softmax averages are averaged. Each block counts alike, whatever its weights add up to.",
          MERGE, 1,
          with_right_lse(mean_of_seen_rows),
          with_right_lse(lambda averages, scores: averages.mean(dim=0)),
          with_right_lse(lambda averages, scores: averages.sum(dim=0) / sum(map(is_seen, scores)))),
    entry("running_half", "Each merge takes the mean of the old and the new output, and leaves the lse out.", MERGE, 8,
          merge(half), merge(half_of_seen_blocks),
          merge(lambda out, lse, out_j, lse_j: ((out + out_j) / 2, torch.logaddexp(lse, lse_j)))),
    entry("lse_of_zeros",
          "The kernel returns zeros as the lse of each block, and they are merged as if they were right.",
          "what the kernel returns as lse, or the code that stands in for the kernel", 8,
          but(block_lse=zeros_in_seen_rows),
          but(block_lse=lambda steps, s: torch.zeros_like(s[..., 0])),
          but(block_lse=lambda steps, s: torch.zeros_like(s[..., 0]) if is_seen(s) else steps.block_lse(s)),
          wild=("yunchang, its attention without flash kernels",)),
    entry("base_2_as_natural", "The blocks' lse are in base 2 and are merged as natural logarithms.", BASE, 8,
          but(block_lse=lambda steps, s: steps.block_lse(s) / math.log(2)),
          but(block_lse=lambda steps, s: steps.block_lse(s) / math.log(2),  # and the backward kernel takes such an lse
              weights=lambda steps, s, lse: steps.weights(s, lse * math.log(2))),
          wild=("flashinfer #2113", "vllm PR #28840", "sglang #40903")),
    entry("natural_as_base_2", "The blocks' lse are natural logarithms and are merged with powers of 2.", BASE, 8,
          but(merge=natural_as_base_2)),
    entry("lse_not_updated",
          "The output is merged, and the running lse stays the lse of the first block. Later blocks count too much.",
          MERGE, 8,
          but(merge=lambda steps, case, out, lse, *block: (steps.merge(case, out, lse, *block)[0], lse))),
    entry("shares_exchanged",
          "A merge gives the old output the share of the new output, and the new output the share of the old output.",
          MERGE, 8,
          *(but(merge=merge) for merge in (exchanged, exchanged_in_seen_blocks, exchanged_in_seen_rows))),
    entry("lse_merged_by_maximum",
          "Two lse are merged as the larger of them, and not as log(e^a + e^b). The shares of the blocks are then "
          "wrong.", MERGE, 8,
          but(merge=lambda steps, case, o, lse, o_j, lse_j: (steps.merge(case, o, lse, o_j, lse_j)[0],
                                                             torch.maximum(lse, lse_j))),
          merge(shares_by_maximum)),
    entry("unstabilised",
          "Partial results are merged as e^a + e^b without their maximum. Large scores overflow, very small ones "
          "vanish.", MERGE, 1, merge(without_maximum), wild=("TransformerEngine PR #716",)),
    entry("not_divided", "The running output is never divided by l, the sum of the weights.",
          "the end of the forward pass", 1, but(combine=undivided)),
    entry("padding_unmasked",
          "K and V are padded with zeros, and no mask hides the padding. Each key of it counts as e^0 in l.",
          "what pads K and V: its score must be -inf, because e^0 is 1", 13,
          *(padded(multiple=multiple, where=where) for multiple, where in PADDINGS)),
    entry("lse_returned_in_base_2", "The lse that is returned is in base 2.",
          "the lse that the forward pass returns or saves", 8, but(at_the_end=returned_in_base_2)),
    entry("sums_in_16_bits", "The running output is rounded to 16 bits at each merge. It must stay in float32.",
          "the dtype of the buffer for the running output", 8,
          *(rounding(*how, out_too=True) for how in itertools.product(TWICE, repeat=2)),
          *map(undivided_in_16_bits, TWICE),
          wild=("ring-flash-attention #42", "ring-flash-attention #67", "flash-attention PR #2723")),
    entry("lse_in_16_bits", "The lse is rounded to 16 bits. Shares of blocks are then wrong by up to a percent.",
          "the dtype of the running lse", 8,
          *(rounding(*how, lse_too=True) for how in itertools.product(TWICE, repeat=3))),
)
# fmt: on
