"""The catalogue, continued: rings whose forward pass is right and whose gradients are not.

Before: mistakes_of_other_ways.py. After: catalogue.py, all entries together.
Source: each entry names who had it, where that is public.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from ring_doctor.case import Case
from ring_doctor.mistakes import Change, mistake, replaces, variant_of
from ring_doctor.mistakes_of_other_ways import hosts, rank_of_heads
from ring_doctor.paper_ring import BlockGradients, NotOnPaper, Rows, Scores, Steps, Values

RETURNED = "the order of what the backward pass returns: dq, dk, dv"
TRAVEL = "the buffer of dK and dV: it travels with its block, and one hop more brings it home"
ROWS = "what the backward pass of a block gets: the lse and δ of the whole row, not of the block"


@mistake("dK and dV are exchanged.", look=RETURNED, chapter=5)
def dk_dv_exchanged(steps: Steps) -> Steps:
    return replace(steps, parts=lambda q, k, v, scale: (q, v, k))


@mistake("dK and dV are added to one sum, and both are returned as this sum.", look=TRAVEL, chapter=5)
def dk_dv_added(steps: Steps) -> Steps:
    return replace(steps, parts=lambda q, k, v, scale: (q, k + v, k + v))


@mistake("dK and dV share one buffer: both are returned as dV, or both as dK.", look=TRAVEL, chapter=5)
def dv_in_place_of_dk(steps: Steps) -> Steps:
    return replace(steps, parts=lambda q, k, v, scale: (q, v, v))


@variant_of(dv_in_place_of_dk)
def dk_in_place_of_dv(steps: Steps) -> Steps:
    return replace(steps, parts=lambda q, k, v, scale: (q, k, k))


def changes_gradients(wrong: Callable[[Steps, Case, dict[str, Tensor]], dict[str, Tensor]]) -> Change:
    """Make a mistake of a function that returns other dq, dk or dv for the whole results."""

    @replaces("at_the_end")
    @wraps(wrong)
    def at_the_end(steps: Steps, case: Case, results: dict[str, Tensor]) -> dict[str, Tensor]:
        results = steps.at_the_end(case, results)
        return results | wrong(steps, case, results) if "dq" in results else results

    return at_the_end


def _chunks(case: Case, x: Tensor) -> Tensor:
    """(P, B, H, C, D): the chunks of all ranks."""
    if not case.equal_chunks:
        raise NotOnPaper
    return torch.stack([case.cut(x, rank) for rank in range(case.world_size)])


@mistake(
    "dK and dV are summed over all ranks chunk by chunk: each rank gets the sum, or the mean, of all ranks' dK and dV.",
    look="an all_reduce of dk and dv: each block's gradient belongs to one rank",
    chapter=5,
)
def gradients_summed_over_ranks(steps: Steps) -> Steps:
    return _over_ranks("dk", "dv", mean=False)(steps)


@variant_of(gradients_summed_over_ranks)
def gradients_averaged_over_ranks(steps: Steps) -> Steps:
    return _over_ranks("dk", "dv", mean=True)(steps)


def _over_ranks(*names: str, mean: bool) -> Change:
    """Each rank gets the sum, or the mean, of all ranks' chunks of these gradients."""

    def of_one(case: Case, x: Tensor) -> Tensor:
        chunks = _chunks(case, x)
        return case.join([chunks.mean(dim=0) if mean else chunks.sum(dim=0)] * case.world_size)

    return changes_gradients(lambda steps, case, results: {name: of_one(case, results[name]) for name in names})


@mistake(
    "dQ is summed over all ranks chunk by chunk: each rank gets the mean, or the sum, of all ranks' dQ.",
    look="an all_reduce of dq: a rank's queries are its own, and no other rank adds to their gradient",
    chapter=5,
)
def dq_averaged_over_ranks(steps: Steps) -> Steps:
    return _over_ranks("dq", mean=True)(steps)


@variant_of(dq_averaged_over_ranks)
def dq_summed_over_ranks(steps: Steps) -> Steps:
    return _over_ranks("dq", mean=False)(steps)


SLICE = "the slice of the gathered gradient that a rank returns: that of its own block, in the order of the gathered K"


def _slice_of(block: int) -> Change:
    return changes_gradients(
        lambda steps, case, results: {
            name: case.join([_chunks(case, results[name])[block]] * case.world_size) for name in ("dk", "dv")
        }
    )


@mistake(
    "dK and dV of the gathered K and V are right, and a rank cuts the wrong slice out of them: always the first block, "
    "always the last block, or a run of the sequence where its layout has other tokens.",
    look=SLICE,
    chapter=19,
)
def wrong_slice_of_the_gradient(steps: Steps) -> Steps:
    return _slice_of(0)(steps)


@variant_of(wrong_slice_of_the_gradient)
def last_slice_of_the_gradient(steps: Steps) -> Steps:
    return _slice_of(-1)(steps)


@variant_of(wrong_slice_of_the_gradient)
@changes_gradients
def run_of_the_gradient(steps: Steps, case: Case, results: dict[str, Tensor]) -> dict[str, Tensor]:
    lengths = [len(case.positions(rank)) for rank in range(case.world_size)]
    return {name: case.join(results[name].split(lengths, dim=2)) for name in ("dk", "dv")}


ROLLED = "the offset of the rows that a kernel writes of dK and dV: key 0 of a tile is row 0"


def _rolled(steps: Steps, *, names: tuple[str, ...], by: int) -> Steps:
    def roll(steps: Steps, case: Case, results: dict[str, Tensor]) -> dict[str, Tensor]:
        chunks = {
            name: [case.cut(results[name], rank).roll(by, dims=2) for rank in range(case.world_size)] for name in names
        }
        return {name: case.join(of_ranks) for name, of_ranks in chunks.items()}

    return changes_gradients(roll)(steps)


@mistake(
    "The rows of dK, of dV or of both are rolled by one inside each chunk: a key gets the gradient of its neighbour.",
    look=ROLLED,
    chapter=8,
)
def gradient_rows_rolled(steps: Steps) -> Steps:
    return _rolled(steps, names=("dk",), by=1)


for _names, _by in ((("dk",), -1), *((names, by) for names in (("dv",), ("dk", "dv")) for by in (1, -1))):
    variant_of(gradient_rows_rolled)(partial(_rolled, names=_names, by=_by))


@mistake(
    "The last hop is missing: a rank returns the gradients of the block of the next rank.",
    look=f"{TRAVEL}. After an all-gather: the slice of the sum that a rank keeps",
    chapter=5,
)
def gradients_not_sent_home(steps: Steps) -> Steps:
    return replace(steps, home=lambda part: (part.block - 1) % part.world_size)


@variant_of(gradients_not_sent_home)
@replaces("home")
def gradients_not_sent_to_the_next_host(steps: Steps, part: BlockGradients) -> int:
    """The last slow hop of a double ring is missing."""

    _, per_host = hosts(part.world_size)
    return (part.block - per_host % part.world_size) % part.world_size


@mistake(
    "The last hop returns two buffers, what was received and what was sent. They are taken for dK and for dV.",
    look="what the function of a hop returns: the received buffer holds both, dK and dV",
    chapter=5,
    wild=("lucidrains/ring-attention-pytorch 0.5.20, on CPUs",),
)
@changes_gradients
def received_and_sent(steps: Steps, case: Case, results: dict[str, Tensor]) -> dict[str, Tensor]:
    both = _chunks(case, results["dk"] + results["dv"])  # autograd adds up the dimension that is too many
    return {"dk": case.join(list(both)), "dv": case.join(list(both.roll(-1, dims=0)))}


@mistake(
    "The numbers of dK are right, in wrong places: a buffer that is transposed in memory was filled row by row.",
    look="torch.empty_like of a transposed gradient, and a message that is received into it",
    chapter=5,
    wild=("torch 2.13.0, torch.distributed.nn.functional.all_gather over gloo",),
)
@changes_gradients
def keys_gradient_in_memory_order(steps: Steps, case: Case, results: dict[str, Tensor]) -> dict[str, Tensor]:
    if case.heads != case.kv_heads:
        return {}  # the sum over query heads that share a K/V head is a new tensor, in the usual order
    chunks = [case.cut(results["dk"], rank) for rank in range(case.world_size)]
    return {"dk": case.join([chunk.reshape(chunk.mT.shape).mT for chunk in chunks])}


@mistake(
    "There is a hop too many: a rank returns the gradients of the block of the rank before.",
    look=f"{TRAVEL}. After an all-gather: the slice of the sum that a rank keeps",
    chapter=5,
)
def gradients_sent_too_far(steps: Steps) -> Steps:
    return replace(steps, home=lambda part: (part.block + 1) % part.world_size)


@mistake(
    "K and V come from one side, and their gradients are passed on to the other: parts reach the wrong block.",
    look="the direction of both: a block's gradients must go the way of the block",
    chapter=5,
    wild=("diffusers 0.42.1",),
)
def gradients_travel_other_way(steps: Steps) -> Steps:
    return replace(steps, home=lambda part: (2 * part.rank - part.block) % part.world_size)


@mistake(
    "Only what a rank's own queries add to its own block is kept. The other ranks' parts of dK and dV are lost. An "
    "all-gather has this mistake when its backward pass does not add: it returns a part of the rank's own gradient.",
    look="whether the messages that carry K and V have a backward pass; an all-gather needs a reduce-scatter. Is the "
    "ring meant for the forward pass only? Then ask with --forward-only",
    chapter=5,
)
def own_queries_only(steps: Steps) -> Steps:
    return replace(steps, home=lambda part: part.block if part.block == part.rank else None)


@mistake(
    "dK and dV stay where they are computed: a rank returns the sum of what its own queries give to all blocks.",
    look=f"{TRAVEL}. With autograd: whether the backward pass of a hop sends what it gets",
    chapter=5,
)
def gradients_stay_where_they_are_computed(steps: Steps) -> Steps:
    return replace(steps, home=lambda part: part.rank)


@mistake(
    "Zigzag: where a rank sees only the earlier half of a block, its dK and dV are added to the later half.",
    look="the slices of dK and dV that a half of a block is added to: the same as those of K and V",
    chapter=7,
)
def gradients_in_the_other_half(steps: Steps) -> Steps:
    def parts(d_q: Tensor, d_k: Tensor, d_v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        d_q, d_k, d_v = steps.parts(d_q, d_k, d_v, scale)
        half = d_k.shape[2] // 2
        unseen = not (d_k[:, :, half:].any() or d_v[:, :, half:].any())  # no query sees the later half
        return (d_q, d_k.roll(half, dims=2), d_v.roll(half, dims=2)) if unseen else (d_q, d_k, d_v)

    return replace(steps, parts=parts)


def _of_group(keep: Callable[[Tensor], Tensor]) -> Callable[[Case, Tensor, Tensor], Tensor]:
    """A group_sum that keeps some of the query heads of each K/V head."""

    def group_sum(case: Case, x: Tensor, heads: Tensor) -> Tensor:
        return torch.stack([keep(x[:, heads == g]) for g in range(case.kv_heads)], dim=1)

    return group_sum


GROUP = "where query heads share a K/V head: its gradient is the sum over the group"


@mistake("Of the query heads that share a K/V head, only one counts in dK and dV.", look=GROUP, chapter=8)
def group_sum_missing(steps: Steps) -> Steps:
    return replace(steps, group_sum=_of_group(lambda x: x[:, -1]))


@variant_of(group_sum_missing)
def group_sum_of_the_first(steps: Steps) -> Steps:
    return replace(steps, group_sum=_of_group(lambda x: x[:, 0]))


@mistake("dK and dV are the mean over the query heads that share a K/V head, not the sum.", look=GROUP, chapter=8)
def group_mean(steps: Steps) -> Steps:
    return replace(steps, group_sum=_of_group(lambda x: x.mean(dim=1)))


REPLICAS = "where G < P: the ranks that hold a copy of a K/V head; its gradient is the sum of their parts, once"


@mistake(
    "All-to-all, a K/V head on several ranks: its owner keeps the gradient of one copy, and not the sum of all copies.",
    look=REPLICAS,
    chapter=19,
)
def replicated_head_gradient_not_summed(steps: Steps) -> Steps:
    return _of_one_copy(steps, torch.Tensor.min)


@variant_of(replicated_head_gradient_not_summed)
def only_the_last_copy_counts(steps: Steps) -> Steps:
    return _of_one_copy(steps, torch.Tensor.max)


def _of_one_copy(steps: Steps, choose: Callable[[Tensor], Tensor]) -> Steps:
    def group_sum(case: Case, x: Tensor, heads: Tensor) -> Tensor:
        ranks = rank_of_heads(case)
        kept = torch.stack([ranks[h] == choose(ranks[heads == heads[h]]) for h in range(case.heads)])
        return steps.group_sum(case, x * kept[:, None, None], heads)

    return replace(steps, group_sum=group_sum)


@mistake(
    "All-to-all, a K/V head on several ranks: the copies' gradients are summed, and the sums of all copies are added "
    "again. dK and dV are too large by the number of copies.",
    look=REPLICAS,
    chapter=19,
)
@changes_gradients
def replicated_head_gradient_counted_twice(steps: Steps, case: Case, results: dict[str, Tensor]) -> dict[str, Tensor]:
    ranks, heads = rank_of_heads(case), steps.kv_heads(case)
    copies = torch.tensor([len(ranks[heads == g].unique()) for g in range(case.kv_heads)])
    return {name: results[name] * copies[:, None, None] for name in ("dk", "dv")}


def _of_turn(steps: Steps, turn: int) -> Steps:
    """dK and dV are what the ranks of one host add: the block's own host (turn 0), or the host before it (turn -1)."""

    def home(part: BlockGradients) -> int | None:
        count, per_host = hosts(part.world_size)
        turns = (part.rank // per_host - part.block // per_host) % count
        return steps.home(part) if turns == turn % count else None

    return replace(steps, home=home)


@mistake(
    "Double ring: of dK and dV a block gets only what its own host adds. The sums of the other hosts are lost.",
    look="where the sums of a turn inside a host meet the sums that travel between hosts: +=, after both are there",
    chapter=20,
)
def host_sum_not_added(steps: Steps) -> Steps:
    return _of_turn(steps, 0)


@variant_of(host_sum_not_added)
def host_sum_of_the_last_turn(steps: Steps) -> Steps:
    return _of_turn(steps, -1)


def _in_backward(steps: Steps, **changes: Callable[..., Any]) -> Steps:
    """Steps that are replaced in the backward pass only."""
    changed: dict[str, Any] = {**changes}
    return replace(steps, backward=replace(steps.backward or steps, **changed))


@mistake(
    "The backward pass uses the rank's own K and V in all rounds.",
    look="the blocks of the backward pass: they must travel again",
    chapter=5,
    wild=("diffusers #14265",),
)
def keys_of_hop_0(steps: Steps) -> Steps:
    return _in_backward(steps, in_hand=lambda case, rank, t: (rank, rank))


@mistake(
    "The backward pass leaves out a block that the forward pass has met: the last one, or the own one.",
    look="the rounds of the backward pass: the first, the last, and what a mask leaves out",
    chapter=5,
)
def block_left_out_in_backward(steps: Steps) -> Steps:
    return _left_out_in_backward(steps, lambda case, rank, block: block == (rank + 1) % case.world_size)


@variant_of(block_left_out_in_backward)
def own_block_left_out_in_backward(steps: Steps) -> Steps:
    return _left_out_in_backward(steps, lambda case, rank, block: block == rank)


@variant_of(block_left_out_in_backward)
def last_seen_block_left_out_in_backward(steps: Steps) -> Steps:
    """Under a causal mask blocks that no query sees are left out, and of the others the last one too."""

    def last(case: Case, rank: int, block: int) -> bool:
        P = case.world_size
        seen = [j for t in range(P) if steps.sees(case, rank, j := (rank - t) % P).any()]
        return len(seen) > 1 and block == seen[-1]

    return _left_out_in_backward(steps, last)


def _left_out_in_backward(steps: Steps, left_out: Callable[[Case, int, int], bool]) -> Steps:
    def sees(case: Case, rank: int, block: int) -> Tensor:
        seen = steps.sees(case, rank, block)
        return torch.zeros_like(seen) if case.world_size > 1 and left_out(case, rank, block) else seen

    return _in_backward(steps, sees=sees)


@mistake("The backward pass uses the lse of the last block, not the merged lse of the row.", look=ROWS, chapter=5)
def lse_of_the_last_block(steps: Steps) -> Steps:
    return _lse_of_the_last_block(steps, seen=False)


@variant_of(lse_of_the_last_block)
def lse_of_the_last_block_seen(steps: Steps) -> Steps:
    return _lse_of_the_last_block(steps, seen=True)


def _lse_of_the_last_block(steps: Steps, *, seen: bool) -> Steps:
    def combine(its: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        out, _ = steps.combine(its, case, scores, values)
        last = [s for s in scores if not seen or (s > -math.inf).any()][-1]
        return out, its.block_lse(last)

    return replace(steps, combine=combine)


@mistake(
    "The backward pass uses the lse of the first sequence of a batch for all of its sequences.",
    look="what is saved for the backward pass, and how its lse (B, H, S) is cut and viewed",
    chapter=5,
)
def lse_of_the_first_sequence(steps: Steps) -> Steps:
    return replace(steps, weights=lambda s, lse: steps.weights(s, lse[:1].expand_as(lse)))


@mistake("The backward pass uses the weights of each block by itself: the lse of the block.", look=ROWS, chapter=5)
def lse_of_the_block(steps: Steps) -> Steps:
    return replace(steps, weights=lambda s, lse: steps.weights(s, s.logsumexp(dim=-1)))


def _delta_of_the_block(steps: Steps) -> Callable[..., Tensor]:
    return lambda s, p, v, d_out, out: steps.delta(s, p, v, d_out, steps.block_out(s, v))


@mistake(
    "δ is computed with the output of each block, and not with the output of the whole row.",
    look=ROWS,
    chapter=5,
    wild=("tt-metal #53205",),
)
def delta_of_the_block(steps: Steps) -> Steps:
    return replace(steps, delta=_delta_of_the_block(steps))


@mistake("The backward pass uses a block's own output and lse.", look=ROWS, chapter=5)
def lse_and_delta_of_the_block(steps: Steps) -> Steps:
    return replace(lse_of_the_block(steps), delta=_delta_of_the_block(steps))


@mistake(
    "δ is summed over the keys of one block only: the sum of p ∘ dP over a block, with the weights of the whole row.",
    look=ROWS,
    chapter=5,
)
@replaces("delta")
def delta_summed_per_block(steps: Steps, s: Tensor, p: Tensor, v: Tensor, d_out: Tensor, out: Tensor) -> Tensor:
    return steps.delta(s, p, v, d_out, p @ v)


@mistake(
    "δ, or the output in it, is of another rank's rows: of the rank that has the keys, of the rank before, or of the "
    "next rank.",
    look="what travels in the backward pass: dO, out, lse and δ belong to the queries, and go where the queries go",
    chapter=5,
)
@replaces("delta_from")
def delta_of_another_rank(steps: Steps, case: Case, rank: int, block: int) -> tuple[int, int]:
    return block, block


@variant_of(delta_of_another_rank)
@replaces("delta_from")
def delta_with_the_output_of_another_rank(steps: Steps, case: Case, rank: int, block: int) -> tuple[int, int]:
    return rank, block


def _delta_of_a_neighbour(steps: Steps, *, distance: int) -> Steps:
    def neighbour(case: Case, rank: int, block: int) -> tuple[int, int]:
        other = (rank + distance) % case.world_size
        return other, other

    return replace(steps, delta_from=neighbour)


for _distance in (-1, 1):
    variant_of(delta_of_another_rank)(partial(_delta_of_a_neighbour, distance=_distance))


@mistake("δ is left out: dS = p ∘ dP.", look="dS = p ∘ (dP - δ)", chapter=5)
def delta_missing(steps: Steps) -> Steps:
    return replace(steps, delta=lambda s, p, v, d_out, out: torch.zeros_like(s[..., :1]))


@mistake("dQ, dK or both are not multiplied by the scale.", look="dQ = scale dS K, dK = scale dSᵀ Q", chapter=5)
def gradient_scale_missing(steps: Steps) -> Steps:
    return replace(steps, parts=lambda q, k, v, scale: steps.parts(q / scale, k / scale, v, scale))


@variant_of(gradient_scale_missing)
def dk_scale_missing(steps: Steps) -> Steps:
    return replace(steps, parts=lambda q, k, v, scale: steps.parts(q, k / scale, v, scale))


@variant_of(gradient_scale_missing)
def dq_scale_missing(steps: Steps) -> Steps:
    return replace(steps, parts=lambda q, k, v, scale: steps.parts(q / scale, k, v, scale))


ADD = "+= and not = where a round adds to a gradient"


def _last(case: Case, total: Tensor | None, part: Tensor) -> Tensor:
    return part


@mistake("dQ is what the last round adds: each round overwrites the round before.", look=ADD, chapter=5)
def dq_of_the_last_round(steps: Steps) -> Steps:
    return replace(steps, add_q=_last)


@variant_of(dq_of_the_last_round)
def dq_of_the_last_block_seen(steps: Steps) -> Steps:
    return replace(steps, add_q=_last, gives_q=lambda part: not part.hidden)


@mistake("dQ is only what the rank's own block gives.", look=ADD, chapter=5)
def dq_of_the_own_block(steps: Steps) -> Steps:
    return replace(steps, gives_q=lambda part: part.block == part.rank)


@mistake(
    "dK and dV are what the last rank adds: each rank overwrites the sums that arrive, instead of adding to them.",
    look=ADD,
    chapter=5,
)
def dk_dv_of_the_last_round(steps: Steps) -> Steps:
    return replace(steps, add_kv=_last)


@variant_of(dk_dv_of_the_last_round)
def dk_dv_of_the_last_rank_that_sees(steps: Steps) -> Steps:
    def home(part: BlockGradients) -> int | None:
        return None if part.hidden else steps.home(part)

    return replace(steps, add_kv=_last, home=home)


@mistake("The causal mask is forgotten in the backward pass.", look="the causal flag of the backward kernel", chapter=7)
def mask_forgotten_in_backward(steps: Steps) -> Steps:
    def sees(case: Case, rank: int, block: int) -> Tensor:
        return steps.sees(replace(case, causal=False, window=None), rank, block)

    return _in_backward(steps, sees=sees)


@variant_of(mask_forgotten_in_backward)
def triangles_whole_in_backward(steps: Steps) -> Steps:
    """Blocks that are left out stay out; the parts of a block that the kernel computes are whole."""

    def sees(case: Case, rank: int, block: int) -> Tensor:
        seen = steps.sees(case, rank, block)
        return seen.any(dim=1, keepdim=True) & seen.any(dim=0) if case.causal else seen

    return _in_backward(steps, sees=sees)


FACTOR = "what divides or multiplies the loss or the gradients: a mean over ranks instead of a sum, or the reverse"
FACTOR_OF_KEYS = "what sums dK and dV over ranks: a sum over copies that are equal, or a mean instead of a sum"


def _times_p(power: float, *names: str) -> Change:
    return changes_gradients(lambda steps, case, x: {name: x[name] * case.world_size**power for name in names})


@mistake("All gradients are P times too large.", look=FACTOR, chapter=13)
def gradients_times_p(steps: Steps) -> Steps:
    return _times_p(1, "dq", "dk", "dv")(steps)


@mistake("dK and dV are P times too large. dQ is right.", look=FACTOR_OF_KEYS, chapter=13)
def dk_dv_times_p(steps: Steps) -> Steps:
    return _times_p(1, "dk", "dv")(steps)


@mistake("All gradients are P times too small.", look=FACTOR, chapter=13)
def gradients_over_p(steps: Steps) -> Steps:
    return _times_p(-1, "dq", "dk", "dv")(steps)


@mistake("dK and dV are P times too small. dQ is right.", look=FACTOR_OF_KEYS, chapter=13)
def dk_dv_over_p(steps: Steps) -> Steps:
    return _times_p(-1, "dk", "dv")(steps)


@mistake("dQ is P times too small. dK and dV are right.", look=FACTOR, chapter=13)
def dq_over_p(steps: Steps) -> Steps:
    return _times_p(-1, "dq")(steps)


@mistake("All gradients are P² times too small.", look=f"{FACTOR}, made twice", chapter=13)
def gradients_over_p_squared(steps: Steps) -> Steps:
    return _times_p(-2, "dq", "dk", "dv")(steps)


@mistake("All gradients are √P times too large.", look=FACTOR, chapter=13)
def gradients_times_root_p(steps: Steps) -> Steps:
    return _times_p(0.5, "dq", "dk", "dv")(steps)


def _no_gradient_of(*names: str) -> Change:
    return changes_gradients(lambda steps, case, results: {name: torch.zeros_like(results[name]) for name in names})


@mistake("The gradients are zero: the result is cut off from its inputs.", look="detach, no_grad, .data", chapter=5)
def no_gradient(steps: Steps) -> Steps:
    return _no_gradient_of("dq", "dk", "dv")(steps)


@mistake(
    "dK and dV are zero, and dQ is right: K and V are cut off from the result.",
    look="whether the messages that carry K and V have a backward pass, also for the own block. Is the ring meant for "
    "the forward pass only? Then ask with --forward-only",
    chapter=5,
)
def no_gradient_of_keys_and_values(steps: Steps) -> Steps:
    return _no_gradient_of("dk", "dv")(steps)


@mistake(
    "The gradient of one input is zero, and the others are right: this input is cut off from the result.",
    look="detach, no_grad, .data, and what a backward pass returns for each input",
    chapter=5,
)
def no_gradient_of_one_input(steps: Steps) -> Steps:
    return _no_gradient_of("dk")(steps)


for _name in ("dv", "dq"):
    variant_of(no_gradient_of_one_input)(_no_gradient_of(_name))


@mistake(
    "dK and dV are rounded to the dtype of k at each hop. They must stay in float32.",
    look="the dtype of the buffer of dK and dV",
    chapter=8,
)
def gradients_in_16_bits(steps: Steps) -> Steps:
    return replace(steps, add_kv=_add_in_the_dtype_of_q)


@mistake("dQ is summed in the dtype of q. It must be summed in float32.", look="the dtype of the sum of dQ", chapter=8)
def dq_in_16_bits(steps: Steps) -> Steps:
    return replace(steps, add_q=_add_in_the_dtype_of_q)


@variant_of(gradients_in_16_bits)
def gradients_in_bfloat16(steps: Steps) -> Steps:
    """Whatever the dtype of q is."""
    return replace(steps, add_kv=_add_in_bfloat16)


@variant_of(gradients_in_16_bits)
def gradients_in_16_bits_by_reduce_scatter(steps: Steps) -> Steps:
    """The parts are in the dtype of k, and added in the order of gloo's reduce_scatter: the own part comes last."""

    def at(case: Case, rank: int, t: int) -> int:
        return steps.believed(case, rank, (t + 1) % case.world_size)

    return _in_backward(
        steps,
        in_hand=lambda case, rank, t: (at(case, rank, t), at(case, rank, t)),
        believed=at,
        add_kv=lambda case, total, part: _add_in_the_dtype_of_q(case, total, part.to(case.dtype).double()),
    )


@variant_of(dq_in_16_bits)
def dq_in_bfloat16(steps: Steps) -> Steps:
    return replace(steps, add_q=_add_in_bfloat16)


@variant_of(dq_in_16_bits)
def dq_in_16_bits_by_autograd(steps: Steps) -> Steps:
    """A new float32 copy of q in each round: autograd adds their gradients in the dtype of q, the last round first."""

    def at(t: int, world_size: int) -> int:
        return world_size - 1 - t

    return _in_backward(
        steps,
        in_hand=lambda case, rank, t: steps.in_hand(case, rank, at(t, case.world_size)),
        believed=lambda case, rank, t: steps.believed(case, rank, at(t, case.world_size)),
        add_q=lambda case, total, part: _add_in_the_dtype_of_q(case, total, part.to(case.dtype).double()),
    )


def _add_in_the_dtype_of_q(case: Case, total: Tensor | None, part: Tensor) -> Tensor:
    return (part if total is None else total + part).to(case.dtype).double()


def _add_in_bfloat16(case: Case, total: Tensor | None, part: Tensor) -> Tensor:
    return _add_in_the_dtype_of_q(replace(case, dtype=torch.bfloat16), total, part)
