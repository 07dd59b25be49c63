"""Inference: one sentence that says where to look, when no mistake of the catalogue explains what a step returned.

    clue(patient, wrong, exact, allowed)    ->  "The loss is right, and ..."

The evidence, in this order: numbers that are not finite; ranks that disagree; the loss beside the gradients; which
weights are wrong, and by what. If the loss is wrong, the step is asked again on P ranks:

    a text of equal tokens      all keys and values of a layer are equal, so no weight of a softmax matters: if the
                                result is right now, the weights of each query add up to 1, whatever they are
    one label hidden            the loss of one token, as a difference: which tokens are wrong, and what they see

Shapes: those of model_calls.py.

Before: model_comparison.py. After: whole_model.py.
Source: none.
"""

import re
from dataclasses import replace

import torch
from torch import Tensor

from ring_doctor.model_calls import Call, ModelPatient, Returned
from ring_doctor.model_comparison import RIGHT, distance, explain, floors_of, in_text, same
from ring_doctor.model_patterns import ALIKE, norm_of
from ringlab.models.transformer import IGNORED

PROJECTIONS = {  # as models name them: wq, q_proj, self_attn.query, to_q
    kind: re.compile(rf"(^|[._])({words})([._]|$)")
    for kind, words in {"q": "wq|q|query", "k": "wk|k|key", "v": "wv|v|value", "o": "wo|o|out|dense"}.items()
}
WHERE = {  # which projections have wrong gradients, in the last layer that has wrong gradients
    "kv": "those of K and V are wrong and Q's is right: look at how dK and dV travel, and who adds them up",
    "qk": "those of Q and K are wrong and V's is right: look at δ, the scale and lse in the backward pass",
    "q": "only Q's is wrong: look at how dQ is summed over the blocks",
    "k": "only K's is wrong: look at how dK travels",
    "v": "only V's is wrong: look at how dV travels",
    "qkv": "those of Q, K and V are wrong: look at the softmax weights and the mask in the backward pass",
}


def clue(
    patient: ModelPatient, wrong: dict[int, list[Returned]], exact: Returned, allowed: float, *, clipped: bool
) -> str:
    """Where to look, in a sentence. `wrong` are the results of the wrong numbers of ranks; the largest is looked at."""
    P, results = max(wrong.items())
    shards, floors = patient.shards(P), floors_of(exact)
    if said := _not_finite(results) or _some_ranks(results, exact, allowed):
        return said
    [result] = results[:1]  # the ranks agree
    if exact.loss.dim():
        loss_is_right = distance(in_text(results, shards), exact.loss) <= allowed
    else:
        loss_is_right = distance(result.loss, exact.loss) <= allowed
    bad = [
        name for name in floors if not distance(result.gradients[name], exact.gradients[name], floors[name]) <= allowed
    ]
    if not bad:
        factor = "" if exact.loss.dim() else f" ({result.loss / exact.loss:.4g} times the right loss)"
        return f"All gradients are right and the reported loss is wrong{factor}: look at how the loss is reported."
    factors = {name: _factor(result.gradients[name], exact.gradients[name], floors[name], allowed) for name in bad}
    if loss_is_right and clipped:
        return _of_clipped(norm_of(result), norm_of(exact), P)
    if loss_is_right:
        return _of_gradients(result, exact, bad, factors, floors, allowed)
    if said := _one_factor(list(factors.values()), allowed) if len(bad) == len(floors) else "":
        of_loss = "" if exact.loss.dim() else f", the loss {result.loss / exact.loss:.4g} times"
        return f"Every gradient is {said} times the right one{of_loss}: look at what the loss is divided by."
    return _of_forward(patient, P, exact, results, allowed)


def _not_finite(results: list[Returned]) -> str:
    for rank, result in enumerate(results):
        for name, x in {"the loss": result.loss, **result.gradients}.items():
            if not torch.isfinite(x).all():
                what = name if name == "the loss" else f"the gradient of {name}"
                return (
                    f"On rank {rank}, {what} is not finite: look for a query that sees no key, for a division by a "
                    f"number of labels that is 0, and for memory that is read before it is written."
                )
    return ""


def _some_ranks(results: list[Returned], exact: Returned, allowed: float) -> str:
    """The ranks that are wrong where others are right, or disagree."""

    if exact.loss.dim():  # each rank has other tokens: their losses are not compared
        nothing = torch.zeros((), dtype=torch.float64)
        results, exact = [replace(result, loss=nothing) for result in results], replace(exact, loss=nothing)
    bad = [rank for rank, result in enumerate(results) if not same(result, exact, allowed)]
    if 0 < len(bad) < len(results):
        return (
            f"Only {_ranks(bad)} {'is' if len(bad) == 1 else 'are'} wrong: look at what the code does for "
            f"{'this rank' if len(bad) == 1 else 'these ranks'} alone, and at a collective that not all ranks call."
        )
    if bad and not all(same(result, results[0], allowed) for result in results):
        return (
            "The ranks end with different results, and neither their sum nor their mean is right: look at the "
            "reduction over the ranks, and whether every rank and every weight takes part in it."
        )
    return ""


def _ranks(ranks: list[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _factor(x: Tensor, right: Tensor, floor: float, allowed: float) -> float | None:
    """f if x is f times the right gradient, else None."""
    factor = ((x * right).sum() / (right * right).sum()).item()
    return factor if distance(x, factor * right, floor) <= allowed * max(1.0, abs(factor)) else None


def _one_factor(factors: list[float | None], allowed: float) -> str:
    """The factor that all are, in words; "" if they are not one."""
    found = [factor for factor in factors if factor is not None]
    if len(found) < len(factors) or max(found) - min(found) > 4 * allowed * max(map(abs, found)):
        return ""
    return f"{found[0]:.4g}"


def _of_clipped(norm: float, right: float, P: int) -> str:
    """The loss is right, and one process clips its gradients."""
    if abs(norm - right) > ALIKE * right:
        return (
            f"The loss is right, and the norm of all gradients is {norm:.4g} with {P} ranks, where one process clips "
            f"it to {right:.4g}: look at the clipping: first the sum over the ring, then one norm over all ranks and "
            f"weights, then the factor."
        )
    return (
        f"The loss is right, and the gradients, clipped to {right:.4g}, have another direction: let the function "
        f"return them as they are before the clipping, to learn which of them are wrong."
    )


def _of_gradients(
    result: Returned,
    exact: Returned,
    bad: list[str],
    factors: dict[str, float | None],
    floors: dict[str, float],
    allowed: float,
) -> str:
    """The loss is right. Which gradients are wrong, and by what?"""
    names, all_bad = list(floors), len(bad) == len(floors)
    if said := _one_factor(list(factors.values()), allowed):
        which = "every gradient" if all_bad else f"the gradient of {_listed(bad)}"
        verb = "is" if all_bad or len(bad) == 1 else "are"
        where = "the factor of the loss, the reduction, and clipping" if all_bad else "how these weights are reduced"
        return f"The loss is right, and {which} {verb} {said} times the right one: look at {where}."
    if None not in factors.values():
        return (
            "The loss is right, and each wrong gradient has the right direction and a factor of its own: look at "
            "clipping or scaling weight by weight, and at reductions that leave weights out."
        )
    if len(bad) == 1:
        [name] = bad
        x, right = result.gradients[name], exact.gradients[name]
        rows = (x - right).flatten(1).norm(dim=1) > allowed * right.norm() if x.dim() > 1 else torch.ones(1).bool()
        some = f" ({int(rows.sum())} of its {len(rows)} rows)" if 0 < rows.sum() < len(rows) else ""
        return (
            f"The loss is right, and only the gradient of {name}{some} is wrong: look at what happens to this weight "
            f"alone: a tied weight, an index, its place in the reduction."
        )
    last = bad[-1]
    if all_bad:
        return (
            f"The loss is right and every gradient is wrong, even that of {last}: look at the backward pass of the "
            f"loss and at the reduction, before the attention."
        )
    return _in_a_layer(bad, names) or (
        f"The loss is right, and the wrong gradients are of {_listed(bad)}: look at what these weights share that the "
        f"others do not have: a reduction, a hook, a group of parameters."
    )


def _in_a_layer(bad: list[str], names: list[str]) -> str:
    """The backward pass goes from the last weight to the first. Which projections are wrong in the last wrong layer?"""
    layer = _layer(bad[-1])
    before = {_layer(name) for name in names[: names.index(bad[-1])]} - {""}
    if not layer or not before <= {_layer(name) for name in bad}:
        return ""
    kinds = {kind: _of_kind(kind, layer, names) for kind in PROJECTIONS}
    wrong = "".join(kind for kind, weights in kinds.items() if set(weights) & set(bad))
    what = WHERE.get(wrong, "") if all(kinds.values()) else ""
    here = f"of its projections {what}" if what else "look at its backward pass"
    return f"The loss is right. The gradients after {layer} are right, those of {layer} and before are wrong: {here}."


def _of_kind(kind: str, layer: str, names: list[str]) -> list[str]:
    return [name for name in names if _layer(name) == layer and PROJECTIONS[kind].search(name)]


def _layer(name: str) -> str:
    """The name of a weight up to the number of its layer: "layers.1" of "layers.1.attn.wq.weight"."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found.group(1) if found else ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _of_forward(patient: ModelPatient, P: int, exact: Returned, results: list[Returned], allowed: float) -> str:
    """The loss and the gradients are wrong. Which tokens are wrong, and do the weights of a softmax matter?"""
    tokens = _wrong_tokens(patient, P, exact, results, allowed)
    said = ["The loss is wrong, and with it the gradients"]
    if tokens:
        said.append(_told(tokens, patient.shards(P)))
    if _right_for_equal_tokens(patient, P, allowed):
        said.append(
            "for a text of equal tokens all is right, so the weights of each query add up to 1: look at positions, "
            "masks and the order of keys, not at the division in the softmax, the loss or the reductions"
        )
    return "; ".join(said) + "."


def _told(tokens: list[int], shards: list[Tensor]) -> str:
    """What the wrong tokens have in common."""
    rank_of = {int(token): rank for rank, shard in enumerate(shards) for token in shard}
    alone = [token for token in tokens if all(rank_of[other] == rank_of[token] for other in range(token))]
    rank = rank_of[tokens[0]]
    earlier = {rank_of[token] for token in range(tokens[0]) if any(rank_of[x] != rank_of[token] for x in range(token))}
    if tokens[0] == 0:
        return (
            "token 0 is wrong, which attends to itself only, so that positions, masks and other keys cannot matter: "
            "look at tokens, labels and the loss, and at the division in the softmax"
        )
    if alone:
        return (
            f"token {alone[0]} is wrong, which in a causal model sees keys of its own rank only: look at what a rank "
            f"does alone: the rotation of queries and of keys, the mask of its own block, the scale"
        )
    if set(tokens) <= {int(shard[-1]) for shard in shards}:
        return "only the last tokens of shards are wrong: look at their labels"
    if earlier and rank not in earlier:
        return (
            f"the first wrong token is {tokens[0]}, of rank {rank}, and before it tokens of {_ranks(sorted(earlier))} "
            f"are right, which see keys of other ranks too: look at what the code does for rank {rank} alone"
        )
    return (
        f"the first wrong token is {tokens[0]}, and tokens that see keys of their own rank only are right: look at "
        f"what the other ranks' keys are when they are used: which block, which mask, which positions, and the merge"
    )


def _wrong_tokens(patient: ModelPatient, P: int, exact: Returned, results: list[Returned], allowed: float) -> list[int]:
    """The tokens with a wrong loss, in order; none where that cannot be found out.

    A loss of all tokens is asked for again with the labels of one token hidden. The difference is the loss of this
    token, and it has the rounding of both.
    """
    if exact.loss.dim():
        errors = (in_text(results, patient.shards(P)) - exact.loss).abs().amax(dim=0)
        return torch.nonzero(errors > allowed * exact.loss.abs().mean()).flatten().tolist()
    if "targets" not in patient.takes:
        return []
    calls, everywhere = [], torch.arange(patient.seq_len)
    for token in range(patient.seq_len):
        hidden = patient.labels.masked_fill(everywhere == token, IGNORED)
        calls.append(Call(patient.text, {"targets": hidden}))
    ours, theirs = patient.on_one_process(calls), patient.on_ranks(P, calls)
    if isinstance(theirs, str) or None in ours:
        return []
    alone = torch.stack([result.loss for result in ours if result])
    on_ranks = torch.stack([of_ranks[0].loss for of_ranks in theirs])
    wholes = torch.stack([results[0].loss, exact.loss])
    S, hidden_ones = patient.seq_len, torch.stack([on_ranks, alone])
    for n, rest in ((S, S - 1), (1, 1)):  # the loss is a mean over the labels, or a sum: n losses in all
        of_tokens = n * wholes[:, None] - rest * hidden_ones
        if distance(of_tokens[1].sum(), n * exact.loss) <= 4 * S * S * allowed:
            errors = (of_tokens[0] - of_tokens[1]).abs()
            return torch.nonzero(errors > 4 * S * allowed * wholes.abs().max()).flatten().tolist()
    return []


def _right_for_equal_tokens(patient: ModelPatient, P: int, allowed: float) -> bool:
    call = Call(patient.text[:1, :1].expand_as(patient.text).contiguous(), {})
    [exact], of_ranks = patient.on_one_process([call]), patient.on_ranks(P, [call])
    if exact is None or isinstance(of_ranks, str):
        return False
    return explain(of_ranks[0], exact, patient.shards(P), allowed) == RIGHT
