"""The catalogue, continued: a right backward pass, whose gradients end in wrong places, are lost or get a factor.

Before: other_ways.py. After: backward.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ring_doctor.asking.case import Case
from ring_doctor.mistakes import Change, Results, but, in_the_end, told
from ring_doctor.mistakes.other_ways import hosts, lengths_of, rank_of_heads
from ring_doctor.mistakes.paper_ring import BlockGradients, NotOnPaper, Steps

# Right gradients in wrong places, or times a factor -----------------------------------------------------------------

ALL, KV = ("dq", "dk", "dv"), ("dk", "dv")
SUM, MEAN = (lambda x: x.sum(0, True)), (lambda x: x.mean(0, True))  # every rank gets the same chunk


def chunks(case: Case, x: Tensor) -> Tensor:
    """(P, B, H, C, D): the chunks of all ranks."""
    if not case.equal_chunks:
        raise NotOnPaper
    return torch.stack(case.chunks(x))


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
    return {"dk": case.join([x.reshape(x.mT.shape).mT for x in case.chunks(results["dk"])])}


def in_runs(steps: Steps, case: Case, results: Results) -> Results:
    return {name: case.join(results[name].split(lengths_of(case), dim=2)) for name in KV}


def times_p(power: float, *names: str) -> Change:
    return changed(lambda x: x * len(x) ** power, *names)


# The parts of dq, dk and dv that a tile adds, and where they go -----------------------------------------------------


def parts(wrong: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Change:
    return but(parts=lambda steps, *given: wrong(*given))


def in_the_other_half(
    steps: Steps, d_q: Tensor, d_k: Tensor, d_v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = steps.parts(d_q, d_k, d_v, scale)
    half = d_k.shape[2] // 2
    unseen = not d_v[:, :, half:].any()  # no query sees the later half
    return (d_q, d_k.roll(half, dims=2), d_v.roll(half, dims=2)) if unseen else (d_q, d_k, d_v)


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


CHANGES = {
    "dk_dv_exchanged": [parts(lambda q, k, v, scale: (q, v, k))],
    "dk_dv_added": [parts(lambda q, k, v, scale: (q, k + v, k + v))],
    "dv_in_place_of_dk": [parts(lambda q, k, v, scale: (q, v, v)), parts(lambda q, k, v, scale: (q, k, k))],
    "gradients_summed_over_ranks": [changed(SUM, *KV), changed(MEAN, *KV)],
    "dq_averaged_over_ranks": [changed(MEAN, "dq"), changed(SUM, "dq")],
    "wrong_slice_of_the_gradient": [changed(lambda x: x[:1], *KV), changed(lambda x: x[-1:], *KV), in_the_end(in_runs)],
    "gradients_not_sent_home": [
        changed(lambda x: x.roll(-1, 0), *KV),
        changed(lambda x: x.roll(-hosts(len(x))[1], 0), *KV),  # a slow hop of a double ring
    ],
    "received_and_sent": [in_the_end(received_and_sent)],
    "keys_gradient_in_memory_order": [in_the_end(in_memory_order)],
    "gradients_sent_too_far": [changed(lambda x: x.roll(1, 0), *KV)],
    "gradients_travel_other_way": [but(home=lambda steps, part: (2 * part.rank - part.block) % part.world_size)],
    "own_queries_only": [but(home=lambda steps, part: part.block if part.block == part.rank else None)],
    "gradients_stay_where_they_are_computed": [but(home=lambda steps, part: part.rank)],
    "gradients_in_the_other_half": [but(parts=in_the_other_half)],
    "group_sum_missing": [of_group(lambda x: x[:, -1]), of_group(lambda x: x[:, 0])],
    "group_mean": [of_group(lambda x: x.mean(dim=1))],
    "replicated_head_gradient_not_summed": [of_one_copy(torch.Tensor.min), of_one_copy(torch.Tensor.max)],
    "host_sum_not_added": [of_turn(0), of_turn(-1)],
    "gradients_times_p": [times_p(1, *ALL)],
    "dk_dv_times_p": [times_p(1, *KV)],
    "gradients_over_p": [times_p(-1, *ALL)],
    "dk_dv_over_p": [times_p(-1, *KV)],
    "dq_over_p": [times_p(-1, "dq")],
    "gradients_over_p_squared": [times_p(-2, *ALL)],
    "no_gradient": [changed(torch.zeros_like, *ALL)],
    "no_gradient_of_keys_and_values": [changed(torch.zeros_like, *KV)],
    "no_gradient_of_one_input": [changed(torch.zeros_like, name) for name in ("dk", "dv", "dq")],
}
MISTAKES = told("Gradients", CHANGES)
