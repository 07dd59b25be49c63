"""Inference for a whole model: one sentence that says where to look, when no mistake of the catalogue explains it.

    clue(patient, wrong, exact, allowed)    ->    "The loss is right, and ..."

The evidence, in this order: numbers that are not finite; ranks that disagree; the loss beside the gradients; what the
gradients are multiplied by; the first wrong token, where the step returns the loss of each, and what it sees; the first
wrong gradient on the way from the last weight to the first.

Shapes: those of model_calls.py.

Before: model_comparison.py. After: whole_model.py.
"""

import torch

from ring_doctor.explaining.facts import listed
from ring_doctor.whole_models.model_calls import ModelPatient, Returned
from ring_doctor.whole_models.model_comparison import LOSS, distance, error_of, errors, floors_of

FEW = 3  # weights in a sentence


def clue(
    patient: ModelPatient, wrong: dict[int, list[Returned]], exact: Returned, allowed: float, *, clipped: bool
) -> str:
    """Where to look, in a sentence. `wrong` are the results of the wrong numbers of ranks; the largest is looked at."""
    P, results = max(wrong.items())
    if said := _of_ranks(results, exact, allowed):
        return said
    result, off = results[0], errors(results[0], exact)  # the ranks agree
    bad, loss_is_right = [name for name in exact.gradients if off[name] > allowed], off[LOSS] <= allowed
    times, all_bad = f"{float(result.loss.sum() / exact.loss.sum()):.4g}", len(bad) == len(exact.gradients)
    if not bad:
        return f"All gradients are right and the reported loss is wrong ({times} times): look at how it is reported."
    said = "The loss is right" if loss_is_right else f"The loss is {times} times the right one"
    if loss_is_right and clipped:
        return (
            f"{said}, and clipped gradients are wrong: look at the norm in the clipping, over all ranks and weights; "
            f"or return the gradients as they are before the clipping, to learn which of them are wrong."
        )
    more = f" and {len(bad) - FEW} more" if len(bad) > FEW else ""
    if (factors := _factors(bad, result, exact, allowed)) and (loss_is_right or all_bad):
        which = "every gradient is" if all_bad else f"of {listed(bad[:FEW])}{more} the gradient is"
        where = "what the loss or a weight's gradient is multiplied or divided by, the reduction, and clipping"
        return f"{said}, and {which} {factors} times the right one: look at {where}."
    if not loss_is_right:
        return f"The loss is wrong, and with it the gradients; {_of_tokens(patient.shards(P), result, exact, allowed)}."
    return (
        f"{said}, and the gradients of {listed(bad[-FEW:])}{more} are wrong: look at what happens to {bad[-1]}, the "
        f"first wrong one on the way back from the last weight: a tied weight, a hook, its place in the reduction, and "
        f"the backward pass of its layer."
    )


def _of_ranks(results: list[Returned], exact: Returned, allowed: float) -> str:
    """A rank whose numbers are not finite; the ranks that are wrong where others are right, or disagree."""
    for rank, result in enumerate(results):
        for what, x in result.numbers.items():
            if not x.isfinite().all():
                return (
                    f"On rank {rank}, {what} is not finite: look for a query that sees no key, for a division by 0 "
                    f"labels, and for memory that is read too early."
                )

    bad = [str(rank) for rank, x in enumerate(results) if error_of(x, exact) > allowed]
    if 0 < len(bad) < len(results):
        return (
            f"Only rank {listed(bad)} is wrong: look at what the code does for this rank alone, and at a collective "
            f"that not all ranks call."
        )
    if bad and any(error_of(x, results[0]) > allowed for x in results):
        return (
            "The ranks end with different results, and neither their sum nor their mean is right: look at the "
            "reduction over the ranks, and whether every rank and every weight takes part in it."
        )
    return ""


def _factors(bad: list[str], result: Returned, exact: Returned, allowed: float) -> str:
    """What the wrong gradients are multiplied by: "1.5" or "3 and 2"; "" if one of them is no multiple."""
    found, floors = [], floors_of(exact)
    for name in bad:
        x, right = result.gradients[name], exact.gradients[name]
        c = float((x * right).sum() / (right * right).sum())
        if not distance(x, c * right, floors[name]) <= allowed * max(1.0, abs(c)):
            return ""
        found.append(f"{c:.4g}")
    return listed(list(dict.fromkeys(found))[:FEW])


def _of_tokens(shards: list[torch.Tensor], result: Returned, exact: Returned, allowed: float) -> str:
    """The first token with a wrong loss, and what it sees."""
    if not exact.loss.dim():
        return "return the loss of each token, (B, C), to learn which tokens are wrong"
    wrong = (result.loss - exact.loss).abs() > allowed * exact.loss.abs().mean()
    first = int(wrong.any(dim=0).nonzero()[0])
    own = next(shard.tolist() for shard in shards if first in shard)
    if first == 0:
        return (
            "token 0 is wrong, which attends to itself only, so positions and masks do not matter there: look at "
            "tokens, labels and the loss, and at the division in the softmax"
        )
    if set(range(first)) <= set(own):
        return (
            f"token {first} is wrong, which in a causal model sees keys of its own rank only: look at what a rank does "
            f"alone: the rotation of queries and of keys, the mask of its own block, the scale"
        )
    return (
        f"the first wrong token is {first}, and tokens that see keys of their own rank only are right: look at what "
        f"the other ranks' keys are when they are used: which block, mask and positions, and the merge"
    )
