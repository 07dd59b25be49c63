"""The catalogue, continued: a right backward pass, whose gradients end in wrong places, are lost or get a factor.

Before: mistakes_of_other_ways.py. After: mistakes_of_backward.py.
Source: each entry names who had it, where that is public.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ring_doctor.case import Case
from ring_doctor.mistakes import Change, but, entry
from ring_doctor.mistakes_of_other_ways import hosts, lengths_of, rank_of_heads
from ring_doctor.paper_ring import BlockGradients, NotOnPaper, Steps

# Right gradients in wrong places, or times a factor -----------------------------------------------------------------

Results = dict[str, Tensor]
ALL, KV = ("dq", "dk", "dv"), ("dk", "dv")
SUM, MEAN = (lambda x: x.sum(0, True)), (lambda x: x.mean(0, True))  # every rank gets the same chunk


def in_the_end(wrong: Callable[[Steps, Case, Results], Results]) -> Change:
    """Other dq, dk or dv for the whole results."""

    def at_the_end(steps: Steps, case: Case, results: Results) -> Results:
        results = steps.at_the_end(case, results)
        return results | wrong(steps, case, results) if "dq" in results else results

    return but(at_the_end=at_the_end)


def chunks(case: Case, x: Tensor) -> Tensor:
    """(P, B, H, C, D): the chunks of all ranks."""
    if not case.equal_chunks:
        raise NotOnPaper
    return torch.stack([case.cut(x, rank) for rank in range(case.world_size)])


def changed(change: Callable[[Tensor], Tensor], *names: str) -> Change:
    """Of each of these results other chunks (P, B, H, C, D), or one (1, B, H, C, D) for all ranks."""

    def wrong(steps: Steps, case: Case, results: Results) -> Results:
        of_ranks = {name: chunks(case, results[name]) for name in names}
        return {name: case.join(list(change(x).expand_as(x))) for name, x in of_ranks.items()}

    return in_the_end(wrong)


def received_and_sent(steps: Steps, case: Case, results: Results) -> Results:
    both = chunks(case, results["dk"] + results["dv"])  # autograd adds up the dimension that is too many
    return {"dk": case.join(list(both)), "dv": case.join(list(both.roll(-1, dims=0)))}


def in_memory_order(steps: Steps, case: Case, results: Results) -> Results:
    if case.heads != case.kv_heads:
        return {}  # the sum over query heads that share a K/V head is a new tensor, in the usual order
    of_ranks = [case.cut(results["dk"], rank) for rank in range(case.world_size)]
    return {"dk": case.join([x.reshape(x.mT.shape).mT for x in of_ranks])}


def in_runs(steps: Steps, case: Case, results: Results) -> Results:
    return {name: case.join(results[name].split(lengths_of(case), dim=2)) for name in KV}


def counted_twice(steps: Steps, case: Case, results: Results) -> Results:
    ranks, heads = rank_of_heads(case), steps.kv_heads(case)
    copies = torch.tensor([len(ranks[heads == g].unique()) for g in range(case.kv_heads)])
    return {name: results[name] * copies[:, None, None] for name in KV}


def times_p(power: float, *names: str) -> Change:
    return changed(lambda x: x * len(x) ** power, *names)


def rolled(by: int, *names: str) -> Change:
    return changed(lambda x: x.roll(by, -2), *names)


def zero(*names: str) -> Change:
    return changed(torch.zeros_like, *names)


# The parts of dq, dk and dv that a tile adds, and where they go -----------------------------------------------------


def parts(wrong: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Change:
    return but(parts=lambda steps, *given: wrong(*given))


def in_the_other_half(
    steps: Steps, d_q: Tensor, d_k: Tensor, d_v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = steps.parts(d_q, d_k, d_v, scale)
    half = d_k.shape[2] // 2
    unseen = not (d_k[:, :, half:].any() or d_v[:, :, half:].any())  # no query sees the later half
    return (d_q, d_k.roll(half, dims=2), d_v.roll(half, dims=2)) if unseen else (d_q, d_k, d_v)


def home(wrong: Callable[[BlockGradients], int | None]) -> Change:
    """The rank where a part of dk and dv ends, modulo the number of ranks; None: nowhere."""

    def rank(steps: Steps, part: BlockGradients) -> int | None:
        return None if (to := wrong(part)) is None else to % part.world_size

    return but(home=rank)


def of_turn(turn: int) -> Change:
    """dK and dV are what the ranks of one host add: the block's own host (turn 0), or the host before it (turn -1)."""

    def rank(steps: Steps, part: BlockGradients) -> int | None:
        count, per_host = hosts(part.world_size)
        turns = (part.rank // per_host - part.block // per_host) % count
        return steps.home(part) if turns == turn % count else None

    return but(home=rank)


def of_group(keep: Callable[[Tensor], Tensor]) -> Change:
    """A sum that keeps some of the query heads (B, heads of a group, Ck, D) of each K/V head."""

    def group_sum(steps: Steps, case: Case, x: Tensor, heads: Tensor) -> Tensor:
        return torch.stack([keep(x[:, heads == g]) for g in range(case.kv_heads)], dim=1)

    return but(group_sum=group_sum)


def of_one_copy(choose: Callable[[Tensor], Tensor]) -> Change:
    def group_sum(steps: Steps, case: Case, x: Tensor, heads: Tensor) -> Tensor:
        ranks = rank_of_heads(case)
        kept = torch.stack([ranks[h] == choose(ranks[heads == heads[h]]) for h in range(case.heads)])
        return steps.group_sum(case, x * kept[:, None, None], heads)

    return but(group_sum=group_sum)


RETURNED = "the order of what the backward pass returns: dq, dk, dv"
TRAVEL = "the buffer of dK and dV: it travels with its block, and one hop more brings it home"
SLICE = "the slice of the gathered gradient that a rank returns: that of its own block, in the order of the gathered K"
KEPT = f"{TRAVEL}. After an all-gather: the slice of the sum that a rank keeps"
ROLLED = "the offset of the rows that a kernel writes of dK and dV: key 0 of a tile is row 0"
GROUP = "where query heads share a K/V head: its gradient is the sum over the group"
REPLICAS = "where G < P: the ranks that hold a copy of a K/V head; its gradient is the sum of their parts, once"
FACTOR = "what divides or multiplies the loss or the gradients: a mean over ranks instead of a sum, or the reverse"
FACTOR_OF_KEYS = "what sums dK and dV over ranks: a sum over copies that are equal, or a mean instead of a sum"

# fmt: off
MISTAKES = (
    entry("dk_dv_exchanged", "dK and dV are exchanged.", RETURNED, 5, parts(lambda q, k, v, scale: (q, v, k))),
    entry("dk_dv_added", "dK and dV are added to one sum, and both are returned as this sum.", TRAVEL, 5,
          parts(lambda q, k, v, scale: (q, k + v, k + v))),
    entry("dv_in_place_of_dk", "dK and dV share one buffer: both are returned as dV, or both as dK.", TRAVEL, 5,
          parts(lambda q, k, v, scale: (q, v, v)), parts(lambda q, k, v, scale: (q, k, k))),
    entry("gradients_summed_over_ranks",
          "dK and dV are summed over all ranks chunk by chunk: each rank gets the sum, or the mean, of all ranks' dK "
          "and dV.", "an all_reduce of dk and dv: each block's gradient belongs to one rank", 5,
          changed(SUM, *KV), changed(MEAN, *KV)),
    entry("dq_averaged_over_ranks",
          "dQ is summed over all ranks chunk by chunk: each rank gets the mean, or the sum, of all ranks' dQ.",
          "an all_reduce of dq: a rank's queries are its own, and no other rank adds to their gradient", 5,
          changed(MEAN, "dq"), changed(SUM, "dq")),
    entry("wrong_slice_of_the_gradient",
          "dK and dV of the gathered K and V are right, and a rank cuts the wrong slice out of them: always the first "
          "block, always the last block, or a run of the sequence where its layout has other tokens.", SLICE, 17,
          changed(lambda x: x[:1], *KV), changed(lambda x: x[-1:], *KV), in_the_end(in_runs)),
    entry("gradient_rows_rolled",
          "The rows of dK, of dV or of both are rolled by one inside each chunk: a key gets the gradient of its "
          "neighbour.", ROLLED, 8,
          *(rolled(by, *names) for names in (("dk",), ("dv",), KV) for by in (1, -1))),
    entry("gradients_not_sent_home",
          "The last hop is missing: a rank returns the gradients of the block of the next rank.", KEPT, 5,
          changed(lambda x: x.roll(-1, 0), *KV),
          changed(lambda x: x.roll(-hosts(len(x))[1], 0), *KV)),  # a slow hop of a double ring
    entry("received_and_sent",
          "The last hop returns two buffers, what was received and what was sent. They are taken for dK and for dV.",
          "what the function of a hop returns: the received buffer holds both, dK and dV", 5,
          in_the_end(received_and_sent), wild=("lucidrains/ring-attention-pytorch 0.5.20, on CPUs",)),
    entry("keys_gradient_in_memory_order",
          "The numbers of dK are right, in wrong places: a buffer that is transposed in memory was filled row by row.",
          "torch.empty_like of a transposed gradient, and a message that is received into it", 5,
          in_the_end(in_memory_order), wild=("torch 2.13.0, torch.distributed.nn.functional.all_gather over gloo",)),
    entry("gradients_sent_too_far",
          "There is a hop too many: a rank returns the gradients of the block of the rank before.", KEPT, 5,
          changed(lambda x: x.roll(1, 0), *KV)),
    entry("gradients_travel_other_way",
          "K and V come from one side, and their gradients are passed on to the other: parts reach the wrong block.",
          "the direction of both: a block's gradients must go the way of the block", 5,
          home(lambda part: 2 * part.rank - part.block), wild=("diffusers 0.42.1",)),
    entry("own_queries_only",
          "Only what a rank's own queries add to its own block is kept. The other ranks' parts of dK and dV are lost. "
          "An all-gather has this mistake when its backward pass does not add: it returns a part of the rank's own "
          "gradient.",
          "whether the messages that carry K and V have a backward pass; an all-gather needs a reduce-scatter. Is the "
          "ring meant for the forward pass only? Then ask with --forward-only", 5,
          home(lambda part: part.block if part.block == part.rank else None)),
    entry("gradients_stay_where_they_are_computed",
          "dK and dV stay where they are computed: a rank returns the sum of what its own queries give to all blocks.",
          f"{TRAVEL}. With autograd: whether the backward pass of a hop sends what it gets", 5,
          home(lambda part: part.rank)),
    entry("gradients_in_the_other_half",
          "Zigzag: where a rank sees only the earlier half of a block, its dK and dV are added to the later half.",
          "the slices of dK and dV that a half of a block is added to: the same as those of K and V", 7,
          but(parts=in_the_other_half)),
    entry("group_sum_missing", "Of the query heads that share a K/V head, only one counts in dK and dV.", GROUP, 8,
          of_group(lambda x: x[:, -1]), of_group(lambda x: x[:, 0])),
    entry("group_mean", "dK and dV are the mean over the query heads that share a K/V head, not the sum.", GROUP, 8,
          of_group(lambda x: x.mean(dim=1))),
    entry("replicated_head_gradient_not_summed",
          "All-to-all, a K/V head on several ranks: its owner keeps the gradient of one copy, and not the sum of all "
          "copies.", REPLICAS, 17, of_one_copy(torch.Tensor.min), of_one_copy(torch.Tensor.max)),
    entry("replicated_head_gradient_counted_twice",
          "All-to-all, a K/V head on several ranks: the copies' gradients are summed, and the sums of all copies are "
          "added again. dK and dV are too large by the number of copies.", REPLICAS, 17, in_the_end(counted_twice)),
    entry("host_sum_not_added",
          "Double ring: of dK and dV a block gets only what its own host adds. The sums of the other hosts are lost.",
          "where the sums of a turn inside a host meet the sums that travel between hosts: +=, after both are there",
          18, of_turn(0), of_turn(-1)),
    entry("gradients_times_p", "All gradients are P times too large.", FACTOR, 11, times_p(1, *ALL)),
    entry("dk_dv_times_p", "dK and dV are P times too large. dQ is right.", FACTOR_OF_KEYS, 11, times_p(1, *KV)),
    entry("gradients_over_p", "All gradients are P times too small.", FACTOR, 11, times_p(-1, *ALL)),
    entry("dk_dv_over_p", "dK and dV are P times too small. dQ is right.", FACTOR_OF_KEYS, 11, times_p(-1, *KV)),
    entry("dq_over_p", "dQ is P times too small. dK and dV are right.", FACTOR, 11, times_p(-1, "dq")),
    entry("gradients_over_p_squared", "All gradients are P² times too small.", f"{FACTOR}, made twice", 11,
          times_p(-2, *ALL)),
    entry("gradients_times_root_p", "All gradients are √P times too large.", FACTOR, 11, times_p(0.5, *ALL)),
    entry("no_gradient", "The gradients are zero: the result is cut off from its inputs.", "detach, no_grad, .data", 5,
          zero(*ALL)),
    entry("no_gradient_of_keys_and_values",
          "dK and dV are zero, and dQ is right: K and V are cut off from the result.",
          "whether the messages that carry K and V have a backward pass, also for the own block. Is the ring meant for "
          "the forward pass only? Then ask with --forward-only", 5, zero(*KV)),
    entry("no_gradient_of_one_input",
          "The gradient of one input is zero, and the others are right: this input is cut off from the result.",
          "detach, no_grad, .data, and what a backward pass returns for each input", 5, *map(zero, ("dk", "dv", "dq"))),
)
# fmt: on
