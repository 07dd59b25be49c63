"""Inference for a whole model: one sentence that says where to look, when no mistake of the catalogue explains it.

    clue(patient, wrong, exact, allowed)    ->    Finding("The loss is right, and ...", "the norm in ...")

The evidence, in this order: numbers that are not finite; ranks that disagree; the loss beside the gradients; what the
gradients are multiplied by; the wrong tokens, where the step returns the loss of each, and what they see; the weights
that are right; the first wrong gradient on the way from the last weight to the first.

Shapes: those of model_calls.py.

Before: model_comparison.py. After: whole_model.py.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from ring_doctor.explaining.facts import Finding, listed
from ring_doctor.whole_models.model_calls import ModelPatient, Returned
from ring_doctor.whole_models.model_comparison import LOSS, distance, error_of, errors, floors_of
from ringlab.models.transformer import IGNORED

FEW = 3  # weights in a sentence


def clue(
    patient: ModelPatient, wrong: dict[int, list[Returned]], exact: Returned, allowed: float, *, clipped: bool
) -> Finding:
    """What is seen and where to look. `wrong` are the results of the wrong numbers of ranks; the largest is taken."""
    P, results = max(wrong.items())
    if found := _of_ranks(results, exact, allowed):
        return found
    result, off = results[0], errors(results[0], exact)  # the ranks agree
    bad, loss_is_right = [name for name in exact.gradients if off[name] > allowed], off[LOSS] <= allowed
    times = f"{float(result.loss.sum() / exact.loss.sum()):.4g}"
    if not bad:
        return Finding(f"All gradients are right and the reported loss is wrong ({times} times)", "how it is reported")
    said = "The loss is right" if loss_is_right else f"The loss is {times} times the right one"
    if loss_is_right and clipped:
        look = "the norm in the clipping, over all ranks and weights; or return the gradients before it, to learn which"
        return Finding(f"{said}, and clipped gradients are wrong", look)
    if factors := _factors(bad, result, exact, allowed, P):
        names, which = list(factors), "every gradient is"
        look = "what the loss or a weight's gradient is multiplied or divided by, the reduction, and clipping"
        if len(names) < len(exact.gradients):
            which = f"of {listed(names[:FEW])}{_more(names)} the gradient is"
        if len(names) < len(bad):
            look = f"what the loss that {names[0]} serves is divided by; other weights serve two losses"
        times = listed(list(dict.fromkeys(factors.values()))[:FEW])
        return Finding(f"{said}, and {which} {times} times the right one", look)
    if not loss_is_right:
        floors = floors_of(exact)
        served = [name for name, x in exact.gradients.items() if name not in bad and float(x.norm()) > floors[name]]
        shown, look = _of_the_loss(patient, wrong, exact, allowed, attends=not served)
        if served:  # with what leads to it: attention is right, and a loss beside it is not
            known, where = f"right is the gradient of {listed(served[:FEW])}{_more(served)}", f"without {served[0]}"
            if len(bad) < min(FEW, len(served)):
                known, where = f"wrong is the gradient of {listed(bad)} alone", f"that {listed(bad)} alone serves"
            more = f", and there at {look}" if look else ""
            return Finding(f"The loss is wrong, and {known}; {shown}", f"a loss {where}{more}")
        return Finding(f"The loss is wrong, and with it the gradients; {shown}", look)
    look = f"what happens to {bad[-1]}, the first wrong one on the way back: a tied weight, a hook, the reduction"
    return Finding(f"{said}, and the gradients of {listed(bad[-FEW:])}{_more(bad)} are wrong", look)


def _more(names: list[str]) -> str:
    return f" and {len(names) - FEW} more" if len(names) > FEW else ""


def _of_ranks(results: list[Returned], exact: Returned, allowed: float) -> Finding | None:
    """A rank whose numbers are not finite; the ranks that are wrong where others are right, or disagree."""
    for rank, result in enumerate(results):
        for what, x in result.numbers.items():
            if not x.isfinite().all():
                causes = "a query that sees no key, for a division by 0 labels, and for memory that is read too early"
                return Finding(f"On rank {rank}, {what} is not finite: look for {causes}")
    bad = [str(rank) for rank, x in enumerate(results) if error_of(x, exact) > allowed]
    if 0 < len(bad) < len(results):
        look = "what the code does for this rank alone, and at a collective that not all ranks call"
        return Finding(f"Only rank {listed(bad)} is wrong", look)
    if bad and any(error_of(x, results[0]) > allowed for x in results):
        look = "the reduction over the ranks, and whether every rank and every weight takes part in it"
        return Finding("The ranks end with different results, and neither their sum nor their mean is right", look)
    return None


def _factors(bad: list[str], result: Returned, exact: Returned, allowed: float, P: int) -> dict[str, str]:
    """By weight, what its wrong gradient is multiplied by: "1.5" or "0.25 (1/P)". Others are no multiple."""
    found, floors = {}, floors_of(exact)
    for name in bad:
        x, right = result.gradients[name], exact.gradients[name]
        c = float((x * right).sum() / (right * right).sum())
        if x.numel() > 1 and distance(x, c * right, floors[name]) <= allowed * max(1.0, abs(c)):
            known = {"P": P, "1/P": 1 / P}
            found[name] = f"{c:.4g}" + "".join(f" ({word})" for word, n in known.items() if abs(c / n - 1) <= allowed)
    return found


def _counts_on_each_rank(wrong: dict[int, list[Returned]], exact: Returned, allowed: float) -> bool:
    """Whether a part of the loss counts P times: what is too much is P - 1 times the same, in all gradients too."""
    (least, (first, *_)), *more = sorted(wrong.items())
    if least == 1 or not more:
        return False
    for P, results in more:
        times = (P - 1) / (least - 1)
        loss = exact.loss + times * (first.loss - exact.loss)
        gradients = {name: x + times * (first.gradients[name] - x) for name, x in exact.gradients.items()}
        if error_of(results[0], Returned(loss, gradients, exact.dtypes)) > times * allowed:
            return False
    return True


def _losses(patient: ModelPatient, wrong: dict[int, Returned], exact: Returned) -> tuple[dict[int, Tensor], Tensor]:
    """The losses of tokens by the number of ranks, and on one process, (B, S); of a step that adds them up, (1, S).

    Such a step is called again for each token, with the labels of this token alone.
    """
    as_returned = {P: result.loss for P, result in wrong.items()}, exact.loss
    if exact.loss.dim() or "targets" not in patient.takes:
        return as_returned
    of_tokens = torch.eye(patient.seq_len, dtype=torch.bool)
    losses: dict[int, Tensor] = {}
    for P in (*wrong, 1):
        calls = [patient.ask(P, targets=patient.labels.where(token, IGNORED)) for token in of_tokens]
        found = [call[0].loss for call in calls if not isinstance(call, str)]
        if len(found) < len(calls):
            return as_returned
        losses[P] = torch.stack(found)[None].nan_to_num()  # NaN: it is divided by 0 labels
    return losses, losses[1]


def _of_the_loss(
    patient: ModelPatient, wrong: dict[int, list[Returned]], exact: Returned, allowed: float, *, attends: bool
) -> tuple[str, str]:
    """The part of the loss or the tokens that are wrong, and where to look; "" where nothing tells.

    It is told if it is so with each number of ranks. With `attends` attention may be to blame.
    """
    if _counts_on_each_rank(wrong, exact, allowed):
        return "a part of it counts P times", "what a second loss or a penalty is divided by, and who adds it"
    told: dict[tuple[int, ...], tuple[str, str]] = {}  # by the wrong tokens
    worlds = sorted({P for P in wrong if P > 1} or wrong)
    losses, right = _losses(patient, {P: wrong[P][0] for P in worlds}, exact)
    if not right.dim():
        return "return the loss of each token, (B, C), to learn which tokens are wrong", ""
    for P in worlds:
        off, least = losses[P] - right, allowed * right.abs().mean()
        masks = off.abs() > least, (losses[P] == 0) & (right.abs() > least)
        bad, unheard = (x.any(dim=0).nonzero().flatten().tolist() for x in masks)
        if bad and off.max() - off.min() <= least:
            look = "what is added to it: a penalty, or a balance of experts, of a shard in the place of the whole batch"
            told[()] = "the loss of each token is off by the same number", look
        else:
            told[tuple(bad)] = _of_tokens(patient.shards(P), set(bad), unheard, patient.seq_len, attends)
    (*_, of_last), (*_, last) = told, told.values()
    with_ranks = f"with {listed(list(map(str, worlds)))} ranks"
    if len(told) == 1 < len(worlds) and attends and min(of_last, default=0) > 0:
        look = "what belongs to these tokens wherever the ranks begin: positions, documents, rows of a table, labels"
        return f"{with_ranks} the same tokens are wrong: {_some(of_last)}", look
    if len({look for _, look in told.values()}) > 1:
        return (
            f"the first wrong token is {', '.join(str(min(tokens, default='none')) for tokens in told)} {with_ranks}",
            "",
        )
    return last


def _some(tokens: Collection[int]) -> str:
    """ "3, 4, 5, 6, 7, 8 and 10 more"."""
    more = f" and {len(tokens) - 2 * FEW} more" if len(tokens) > 2 * FEW else ""
    return ", ".join(map(str, sorted(tokens)[: 2 * FEW])) + more


def _of_tokens(shards: list[Tensor], bad: set[int], unheard: list[int], S: int, attends: bool) -> tuple[str, str]:
    """The wrong tokens of S, and where to look by what they see. The labels of the `unheard` change no loss."""
    if not bad:
        return "the loss of each token is right", "how they are put together"
    first, P = min(bad), len(shards)
    later = bad == set(range(first, S))  # they and all behind them
    own = next(shard.tolist() for shard in shards if first in shard)
    starts = {t for shard in shards for t in shard.tolist() if t and t - 1 not in shard}
    for n in range(1, FEW + 1):
        for which, run in (("last", range(-n, 0)), ("first", range(n))):
            edges = {t + i for t in starts for i in run}
            if not later and edges == bad - ({*range(S - n, S)} if which == "last" else set()):
                which += " token is" if n == 1 else f" {n} tokens are"
                return f"of each run of a rank's tokens only the {which} wrong", "labels that were shifted in it"
    if unheard and attends:
        look = "how the text is shared out: these tokens are on no rank, as where two parts of a program share it out"
        return f"with {P} ranks the label of token {_some(unheard)} has no effect on any rank", look
    if not attends or not later or first == S - 1:
        shown = f"with {P} ranks wrong is token {_some(bad)}" + ("" if S - 1 in bad else ", and later ones are right")
        return shown, "what these tokens have for themselves: labels, their weight in the loss, queries"
    if first == 0:
        shown = "token 0 is wrong, which attends to itself only, so positions and masks do not matter there"
        return shown, "tokens, labels and the loss, and at the division in the softmax"
    if set(range(first)) <= set(own):
        shown = f"token {first} is wrong, which in a causal model sees keys of its own rank only"
        look = "what a rank does alone: the rotation of queries and of keys, the mask of its own block, the scale"
        return shown, look
    shown = f"the first wrong token is {first}, and tokens that see keys of their own rank only are right"
    look = "what the other ranks' keys are when they are used: which block, mask and positions, and the merge"
    return shown, look
