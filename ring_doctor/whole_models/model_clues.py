"""Inference for a whole model: one sentence that says where to look, when no mistake of the catalogue explains it.

    clue(patient, wrong, exact, allowed)    ->  "The loss is right, and ..."

The evidence, in this order: numbers that are not finite; ranks that disagree; the loss beside the gradients; which
weights are wrong, and by what. If the loss is wrong, the step is asked again on P ranks with one label and no other:
which tokens are wrong, and what do they see?

Shapes: those of model_calls.py.

Before: model_comparison.py. After: whole_model.py.
"""

import re

import torch

from ring_doctor.explaining.facts import listed
from ring_doctor.whole_models.model_calls import ModelPatient, Returned
from ring_doctor.whole_models.model_comparison import LOSS, distance, error_of, errors, floors_of
from ringlab.models.transformer import IGNORED

OWN_LABELS = (
    "but with one label alone, given by targets=, the loss of each token is right: look at the labels that the "
    "function makes itself, and at what the loss is divided by"
)


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
    few = listed(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    if loss_is_right and clipped:
        return (
            f"{said}, and clipped gradients are wrong: look at the norm in the clipping, over all ranks and weights; "
            f"or return the gradients as they are before the clipping, to learn which of them are wrong."
        )
    if (factors := _factors(bad, result, exact, allowed)) and (loss_is_right or all_bad):
        which = "every gradient is" if all_bad else f"of {few} the gradient is"
        where = "what the loss or a weight's gradient is multiplied or divided by, the reduction, and clipping"
        return f"{said}, and {which} {factors} times the right one: look at {where}."
    if not loss_is_right:
        return _of_forward(patient, P, result, exact, allowed)
    if all_bad:
        return (
            f"{said} and every gradient is wrong, even that of {bad[-1]}: look at the backward pass of the loss and at "
            f"the reduction, before the attention."
        )
    return _in_a_layer(bad, list(exact.gradients)) or (
        f"{said}, and only the gradients of {few} are wrong: look at what happens to these weights alone: a tied "
        f"weight, an index, a hook, their place in the reduction."
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
    return listed(list(dict.fromkeys(found))[:3])


def _in_a_layer(bad: list[str], names: list[str]) -> str:
    """The backward pass goes from the last weight to the first. In which layer do its results become wrong?"""
    layer = _layer(bad[-1])
    before = {_layer(name) for name in names[: names.index(bad[-1])]} - {""}
    if not layer or not before <= {_layer(name) for name in bad}:
        return ""
    here = listed([name for name in bad if _layer(name) == layer])
    return f"The loss is right. The gradients after {layer} are right, others are wrong: look at {here}."


def _layer(name: str) -> str:
    """The name of a weight up to the number of its layer: "layers.1" of "layers.1.attn.wq.weight"."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found.group(1) if found else ""


def _of_forward(patient: ModelPatient, P: int, result: Returned, exact: Returned, allowed: float) -> str:
    """The loss and the gradients are wrong. Which tokens are wrong, and what do they see?"""
    said, tokens = "The loss is wrong, and with it the gradients", _wrong_tokens(patient, P, result, exact, allowed)
    if tokens is None:
        return f"{said}."
    if not tokens:
        return f"{said}; {OWN_LABELS}."
    if tokens[0] == 0:
        return (
            f"{said}; token 0 is wrong, which attends to itself only, so positions and masks do not matter there: look "
            f"at tokens, labels and the loss, and at the division in the softmax."
        )
    own = next(shard.tolist() for shard in patient.shards(P) if tokens[0] in shard)
    if set(range(tokens[0])) <= set(own):
        return (
            f"{said}; token {tokens[0]} is wrong, which in a causal model sees keys of its own rank only: look at what "
            f"a rank does alone: the rotation of queries and of keys, the mask of its own block, the scale."
        )
    return (
        f"{said}; the first wrong token is {tokens[0]}, and tokens that see keys of their own rank only are right: "
        f"look at what the other ranks' keys are when they are used: which block, mask and positions, and the merge."
    )


def _wrong_tokens(patient: ModelPatient, P: int, result: Returned, exact: Returned, allowed: float) -> list[int] | None:
    """The tokens with a wrong loss, in order; None where that cannot be found out.

    A step that returns one loss is asked again for each token, with the labels of this token only.
    """
    loss, right, S = result.loss, exact.loss, patient.seq_len
    if not right.dim() and "targets" in patient.takes:
        labels = [patient.labels.masked_fill(torch.arange(S) != token, IGNORED) for token in range(S)]
        alone, of_ranks = [patient.alone(each) for each in labels], [patient.ask(P, targets=each) for each in labels]
        right = torch.tensor([[found.loss for found in alone if not isinstance(found, str)]])
        loss = torch.tensor([[found[0].loss for found in of_ranks if not isinstance(found, str)]])
    if not right.dim() or loss.shape != right.shape or not (loss - right).isfinite().all():
        return None
    return torch.nonzero(((loss - right).abs() > allowed * right.abs().mean()).any(dim=0)).flatten().tolist()
