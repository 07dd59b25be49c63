"""Inference for a whole model: one sentence that says where to look, when no mistake of the catalogue explains it.

    clue(patient, wrong, exact, allowed)    ->  "The loss is right, and ..."

The evidence, in this order: numbers that are not finite; ranks that disagree; the loss beside the gradients; which
weights are wrong, and by what. If the loss is wrong, the step is asked again on P ranks:

    one label hidden            the loss of one token, as a difference: which tokens are wrong, and what they see
    a text of equal tokens      all keys and values of a layer are equal, so no weight of a softmax matters: if the
                                result is right now, the weights of each query add up to 1, whatever they are

Shapes: those of model_calls.py.

Before: model_comparison.py; facts.py, what follows from which of dq, dk and dv are wrong. After: whole_model.py.
"""

import re
from functools import partial

import torch
from torch import Tensor

from ring_doctor.facts import OF_GRADIENTS, listed
from ring_doctor.model_calls import Call, ModelPatient, Returned
from ring_doctor.model_comparison import distance, error_of, floors_of, losses
from ringlab.models.transformer import IGNORED

PROJECTIONS = {  # as models name them: wq, q_proj, self_attn.query, to_q
    kind: re.compile(rf"(^|[._])({words})([._]|$)")
    for kind, words in {"dq": "wq|q|query", "dk": "wk|k|key", "dv": "wv|v|value"}.items()
}


def clue(
    patient: ModelPatient, wrong: dict[int, list[Returned]], exact: Returned, allowed: float, *, clipped: bool
) -> str:
    """Where to look, in a sentence. `wrong` are the results of the wrong numbers of ranks; the largest is looked at."""
    P, results = max(wrong.items())
    if said := _of_ranks(results, exact, allowed):
        return said
    result, floors, loss = results[0], floors_of(exact), losses(results, patient.shards(P))[0]  # the ranks agree
    loss_is_right, times = distance(loss, exact.loss) <= allowed, float(loss.sum() / exact.loss.sum())
    bad = [n for n in floors if distance(result.gradients[n], exact.gradients[n], floors[n]) > allowed]
    if not bad:
        return (
            f"All gradients are right and the reported loss is wrong ({times:.4g} times): look at how it is reported."
        )
    said = "The loss is right" if loss_is_right else f"The loss is {times:.4g} times the right one"
    if loss_is_right and clipped:
        return (
            f"{said}, and clipped gradients are wrong: look at the norm in the clipping, over all ranks and weights; "
            f"or return the gradients as they are before the clipping, to learn which of them are wrong."
        )
    factors, all_bad = {}, len(bad) == len(floors)
    for name in bad:
        x, right = result.gradients[name], exact.gradients[name]
        factor = ((x * right).sum() / (right * right).sum()).item()
        if distance(x, factor * right, floors[name]) <= allowed * max(1.0, abs(factor)):
            factors[name] = factor
    known, f = len(factors) == len(bad), [*factors.values()]
    if known and max(f) - min(f) <= 4 * allowed * max(map(abs, f)) and (loss_is_right or all_bad):
        which = "every gradient is" if all_bad else f"of {_few(bad)} the gradient is"
        where = "what the loss is multiplied or divided by, the reduction, and clipping"
        return f"{said}, and {which} {f[0]:.4g} times the right one: look at {where}."
    if not loss_is_right:
        return _of_forward(patient, loss, exact, results, allowed)
    if known:
        return f"{said}, and each wrong gradient has its own factor: look at scaling and clipping weight by weight."
    if all_bad:
        return (
            f"{said} and every gradient is wrong, even that of {bad[-1]}: look at the backward pass of the loss and at "
            f"the reduction, before the attention."
        )
    return _in_a_layer(bad, list(floors)) or (
        f"{said}, and only the gradients of {_few(bad)} are wrong: look at what happens to these weights alone: a tied "
        f"weight, an index, a hook, their place in the reduction."
    )


def _of_ranks(results: list[Returned], exact: Returned, allowed: float) -> str:
    """A rank whose numbers are not finite; the ranks that are wrong where others are right, or disagree."""
    for rank, result in enumerate(results):
        for name, x in {"the loss": result.loss, **result.gradients}.items():
            if not torch.isfinite(x).all():
                what = f"the gradient of {name}" if name in result.gradients else name
                return (
                    f"On rank {rank}, {what} is not finite: look for a query that sees no key, for a division by 0 "
                    f"labels, and for memory that is read too early."
                )
    # where each rank has the losses of its own tokens, they are not compared
    error = partial(error_of, shards=[], loss=not exact.loss.dim())
    bad = [str(rank) for rank, result in enumerate(results) if error([result], exact) > allowed]
    if 0 < len(bad) < len(results):
        return (
            f"Only rank {listed(bad)} is wrong: look at what the code does for this rank alone, and at a collective "
            f"that not all ranks call."
        )
    if bad and error(results, results[0]) > allowed:
        return (
            "The ranks end with different results, and neither their sum nor their mean is right: look at the "
            "reduction over the ranks, and whether every rank and every weight takes part in it."
        )
    return ""


def _few(names: list[str]) -> str:
    return listed(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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


def _of_forward(patient: ModelPatient, loss: Tensor, exact: Returned, results: list[Returned], allowed: float) -> str:
    """The loss and the gradients are wrong. Which tokens are wrong, and do the weights of a softmax matter?"""
    shards, said = patient.shards(len(results)), ["The loss is wrong, and with it the gradients"]
    tokens = _wrong_tokens(patient, len(results), torch.stack([loss, exact.loss]), allowed)
    said += [_told(tokens, shards)] if tokens else []
    alike = Call(patient.text[:1, :1].expand_as(patient.text).contiguous(), {})
    [alone], of_ranks = patient.on_one_process([alike]), patient.on_ranks(len(results), [alike])
    right = alone and not isinstance(of_ranks, str) and error_of(of_ranks[0], alone, shards) <= allowed
    if 0 not in tokens and right:  # of equal tokens the labels are equal too
        said.append("for a text of equal tokens all is right, so the weights of each query add up to 1")
    return "; ".join(said) + "."


def _told(tokens: list[int], shards: list[Tensor]) -> str:
    """What the wrong tokens have in common."""
    rank_of = {int(token): rank for rank, shard in enumerate(shards) for token in shard}
    first, rank = tokens[0], rank_of[tokens[0]]
    others = {token: {rank_of[x] for x in range(token)} - {rank_of[token]} for token in range(first + 1)}
    if first == 0:
        return (
            "token 0 is wrong, which attends to itself only, so positions and masks do not matter there: look at "
            "tokens, labels and the loss, and at the division in the softmax"
        )
    if set(tokens) <= {int(shard[-1]) for shard in shards}:
        return "only the last tokens of shards are wrong: look at their labels"
    if not others[first]:
        return (
            f"token {first} is wrong, which in a causal model sees keys of its own rank only: look at what a rank does "
            f"alone: the rotation of queries and of keys, the mask of its own block, the scale"
        )
    if any(others[x] and rank_of[x] != rank for x in range(first)):
        return f"the first wrong token is {first}, and tokens of other ranks are right: look at rank {rank} alone"
    return (
        f"the first wrong token is {first}, and tokens that see keys of their own rank only are right: look at what "
        f"the other ranks' keys are when they are used: which block, which mask, which positions, and the merge"
    )


def _wrong_tokens(patient: ModelPatient, P: int, wholes: Tensor, allowed: float) -> list[int]:
    """The tokens with a wrong loss, in order; none where that cannot be found out. `wholes`: the loss, the right loss.

    A loss of all tokens is asked for again with the labels of one token hidden. The difference is the loss of this
    token, and it has the rounding of both.
    """
    if wholes.dim() > 1:
        errors = (wholes[0] - wholes[1]).abs().amax(dim=0)
        return torch.nonzero(errors > allowed * wholes[1].abs().mean()).flatten().tolist()
    if "targets" not in patient.takes:
        return []
    S, everywhere = patient.seq_len, torch.arange(patient.seq_len)
    hidden = [patient.labels.masked_fill(everywhere == token, IGNORED) for token in range(S)]
    calls = [Call(patient.text, {"targets": targets}) for targets in hidden]
    ours, theirs = patient.on_one_process(calls), patient.on_ranks(P, calls)
    if isinstance(theirs, str) or None in ours:
        return []
    without = torch.stack([torch.stack([each[0].loss for each in theirs]), torch.stack([x.loss for x in ours if x])])
    for n, rest in ((S, S - 1), (1, 1)):  # the loss is a mean over the labels, or a sum: n losses in all
        of_tokens = n * wholes[:, None] - rest * without
        if distance(of_tokens[1].sum(), n * wholes[1]) <= 4 * S * S * allowed:
            errors = (of_tokens[0] - of_tokens[1]).abs()
            return torch.nonzero(errors > 4 * S * allowed * wholes.abs().max()).flatten().tolist()
    return []
