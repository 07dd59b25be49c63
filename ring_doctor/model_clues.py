"""Inference for a whole model: one sentence that says where to look, when no mistake of the catalogue explains it.

    clue(patient, wrong, exact, allowed)    ->  "The loss is right, and ..."

The evidence, in this order: numbers that are not finite; ranks that disagree; the loss beside the gradients; which
weights are wrong, and by what. If the loss is wrong, the step is asked again on P ranks:

    one label and no other      the loss of one token: which tokens are wrong, and what they see
    a text of equal tokens      all keys and values of a layer are equal, so no weight of a softmax matters: if the
                                result is right now, the weights of each query add up to 1, whatever they are

Shapes: those of model_calls.py.

Before: model_comparison.py; facts.py, what follows from which of dq, dk and dv are wrong. After: whole_model.py.
"""

import re

import torch
from torch import Tensor

from ring_doctor.facts import OF_GRADIENTS, listed
from ring_doctor.model_calls import ModelPatient, Returned
from ring_doctor.model_comparison import LOSS, distance, error_of, errors, floors_of
from ringlab.models.transformer import IGNORED

PROJECTIONS = {  # as models name them: wq, q_proj, self_attn.query, to_q
    kind: re.compile(rf"(^|[._])({words})([._]|$)")
    for kind, words in {"dq": "wq|q|query", "dk": "wk|k|key", "dv": "wv|v|value"}.items()
}
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
    """The backward pass goes from the last weight to the first. Which projections are wrong in the last wrong layer?"""
    layer = _layer(bad[-1])
    before = {_layer(name) for name in names[: names.index(bad[-1])]} - {""}
    if not layer or not before <= {_layer(name) for name in bad}:
        return ""
    kinds = {x: [n for n in names if _layer(n) == layer and name.search(n)] for x, name in PROJECTIONS.items()}
    wrong = [x for x, weights in kinds.items() if set(weights) & set(bad)]
    here = f"of its projections, {OF_GRADIENTS[listed(wrong)]}" if wrong and all(kinds.values()) else "look there."
    return f"The loss is right. The gradients after {layer} are right, those of {layer} and before are wrong: {here}"


def _layer(name: str) -> str:
    """The name of a weight up to the number of its layer: "layers.1" of "layers.1.attn.wq.weight"."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found.group(1) if found else ""


def _of_forward(patient: ModelPatient, P: int, result: Returned, exact: Returned, allowed: float) -> str:
    """The loss and the gradients are wrong. Which tokens are wrong, and do the weights of a softmax matter?"""
    tokens, said = _wrong_tokens(patient, P, result, exact, allowed), ["The loss is wrong, and with it the gradients"]
    said += [] if tokens is None else [_told(tokens, patient.shards(P)) if tokens else OWN_LABELS]
    alike = patient.text[:1, :1].expand_as(patient.text).contiguous()
    alone, of_ranks = patient.ask(1, alike), patient.ask(P, alike)
    if 0 not in (tokens or ()) and not isinstance(alone, str) and not isinstance(of_ranks, str):
        off = max(error_of(each, alone[0]) for each in of_ranks)  # if token 0 is right: the labels are equal too
        right = "for a text of equal tokens all is right, so the weights of each query add up to 1"
        said += [right] * (off <= allowed)
    return "; ".join(said) + "."


def _told(tokens: list[int], shards: list[Tensor]) -> str:
    """What the wrong tokens have in common."""
    rank_of = {int(token): rank for rank, shard in enumerate(shards) for token in shard}
    first, rank = tokens[0], rank_of[tokens[0]]
    sees_others = [bool({rank_of[x] for x in range(token)} - {rank_of[token]}) for token in range(first + 1)]
    if first == 0:
        return (
            "token 0 is wrong, which attends to itself only, so positions and masks do not matter there: look at "
            "tokens, labels and the loss, and at the division in the softmax"
        )
    if set(tokens) <= {int(shard[-1]) for shard in shards}:
        return "only the last tokens of shards are wrong: look at their labels"
    if not sees_others[first]:
        return (
            f"token {first} is wrong, which in a causal model sees keys of its own rank only: look at what a rank does "
            f"alone: the rotation of queries and of keys, the mask of its own block, the scale"
        )
    if any(sees_others[x] and rank_of[x] != rank for x in range(first)):
        return f"the first wrong token is {first}, and tokens of other ranks are right: look at rank {rank} alone"
    return (
        f"the first wrong token is {first}, and tokens that see keys of their own rank only are right: look at what "
        f"the other ranks' keys are when they are used: which block, which mask, which positions, and the merge"
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
