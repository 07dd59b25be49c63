"""What the ranks returned beside what was predicted: the same, the same but for factors, or something else.

    explain(results, predicted, allowed)            ->  ModelDiagnosis(("loss_times_p",)), or None
    unlike(results, exact)                          ->  "on rank 1, there is no gradient of head.weight", or ""
    judge(patient, results, exact, predict, ...)    ->  a World for each P, the names that fit all, the wrong results

Two results are the same when they differ by at most `allowed`, as a share of the norm of what was predicted. A name
must explain every wrong world. One mistake is tried first, then two together.

Shapes: those of model_calls.py.

Before: model_mistakes.py, the predictions. After: model_clues.py, where nothing has a name.
Source: the bound is derived in `tolerance`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ring_doctor.asking.answers import FAILED, OK, WRONG
from ring_doctor.whole_models.model_calls import Returned
from ring_doctor.whole_models.model_mistakes import Prediction, norm_of

LOSS = "the loss"  # its name beside those of the gradients
OfRanks = list[Returned] | str  # what each rank returned, or why the function did not return


@dataclass(frozen=True)
class ModelDiagnosis:
    """Mistakes that together explain a result. `detail` says in which weights, if not in all."""

    names: tuple[str, ...]
    detail: str = ""


@dataclass(frozen=True)
class World:
    """What was found with P processes."""

    world_size: int
    hidden: str  # which labels were hidden, in words; "": none
    right: bool
    error: float  # the largest error of the loss or of a gradient, as a share of its norm
    failure: str = ""  # why the function did not return, or why its results cannot be compared

    @property
    def state(self) -> str:
        return OK if self.right else FAILED if self.failure else WRONG

    @property
    def asked(self) -> str:
        """The question in words: "P = 3, some labels hidden"."""
        return f"P = {self.world_size}" + (f", {self.hidden}" if self.hidden else "")

    def says(self, allowed: float) -> str:
        """The largest error beside what rounding allows, or why there is none."""
        return self.failure or f"off by {self.error:.1e} of the norm, rounding allows {allowed:.1e}"


def unlike(results: list[Returned], exact: Returned) -> str:
    """Why the results cannot be compared: on a rank the gradients have other names or shapes. "" if they can."""
    expected = exact.numbers
    for rank, result in enumerate(results):
        found = result.numbers
        missing, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        if missing or more:
            said = f"{missing[0]} is missing" if missing else f"{more[0]} is there too"
            return f"on rank {rank}, {said}; expected the names of one process"
        for what, x in expected.items():
            if found[what].shape != x.shape:
                given = f"on rank {rank}, {what} has shape {tuple(found[what].shape)}"
                return f"{given}; expected {tuple(x.shape)} as on one process: gather the parts, or return DTensors"
    return ""


def tolerance(result: Returned, tokens: int) -> float:
    """How far two right computations of a model may be apart, as a share of the norm of a gradient.

    u = eps/2 of the coarsest dtype of the results. The gradient of a weight is the end of a chain of products. The
    chain has one link for each weight in the forward pass, and one in the backward pass: 2T links for T gradients. A
    sum of n products is off by (1 + √n) u Σ|x||y|, as ringlab/support/rounding.py derives; n is the number of tokens,
    or the longest side of a weight. In the end the terms of `tokens` tokens are added. They have both signs, so their
    sum is smaller than the sum of their sizes, by √tokens if signs are random. Both computations err, hence 2.
    """
    longest = max([tokens, *(side for gradient in result.gradients.values() for side in gradient.shape)])
    u = max(torch.finfo(dtype).eps for dtype in result.dtypes) / 2
    return 2 * 2 * len(result.gradients) * (1 + math.sqrt(longest)) * math.sqrt(tokens) * u


def distance(x: Tensor, y: Tensor, floor: float = 0.0) -> float:
    """How far x is from y, as a share of the norm of y. NaN is infinitely far from everything."""
    share = (x - y).norm().item() / max(y.norm().item(), floor, torch.finfo(torch.float64).tiny)
    return math.inf if math.isnan(share) else share


def floors_of(exact: Returned) -> dict[str, float]:
    """For each gradient 1% of the norm of an average gradient of its size. A smaller gradient may be rounding only.

    The gradient of the bias of keys is an example: it is 0, because a softmax does not see that bias.
    """
    of_one = 0.01 * norm_of(exact) / math.sqrt(sum(x.numel() for x in exact.gradients.values()))
    return {name: of_one * math.sqrt(x.numel()) for name, x in exact.gradients.items()}


def errors(result: Returned, exact: Returned) -> dict[str, float]:
    """The error of the loss and of each gradient, as a share of its norm."""
    found = {LOSS: distance(result.loss, exact.loss)}
    return found | {
        name: distance(result.gradients[name], exact.gradients[name], floor) for name, floor in floors_of(exact).items()
    }


def error_of(result: Returned, exact: Returned) -> float:
    """The largest of these errors."""
    return max(errors(result, exact).values())


def same(result: Returned, other: Returned, allowed: float) -> bool:
    """Whether two results of a rank are the same: NaN is like NaN."""
    both = (
        Returned(x.loss.nan_to_num(), {name: g.nan_to_num() for name, g in x.gradients.items()}, x.dtypes)
        for x in (result, other)
    )
    return error_of(*both) <= allowed


def explain(results: list[Returned], predicted: Returned, allowed: float) -> ModelDiagnosis | None:
    """The mistakes in the reduction over ranks that turn what was predicted into the results of the ranks.

    No mistakes where both are the same. None where no such mistake, nor two of them, turns one into the other.
    """
    of_loss = factors_of([result.loss for result in results], predicted.loss, 0.0, allowed)
    of_loss = [factor for factor in of_loss if "root" not in factor]  # √P is a mistake of norms
    floors = floors_of(predicted)
    fitting = {
        name: factors_of([result.gradients[name] for result in results], gradient, floors[name], allowed)
        for name, gradient in predicted.gradients.items()
    }
    if not of_loss or not all(fitting.values()):
        return None
    names = [f"loss_{of_loss[0]}"] if of_loss[0] else []
    of_all = [factor for factor in next(iter(fitting.values())) if all(factor in fits for fits in fitting.values())]
    if of_all:
        return ModelDiagnosis((*names, *([f"gradients_{of_all[0]}"] if of_all[0] else [])))
    details = []
    for factor in dict.fromkeys(fits[0] for fits in fitting.values() if fits[0]):
        weights = [name for name, fits in fitting.items() if fits[0] == factor]
        names.append(f"gradients_{factor}")
        details.append(f"gradients_{factor}: {len(weights)} of {len(fitting)} weights, {', '.join(weights[:4])}")
    return ModelDiagnosis(tuple(names), "; ".join(details))


def factors_of(
    parts: list[Tensor], right: Tensor, floor: float, allowed: float, sizes: Sequence[int] = ()
) -> list[str]:
    """The factors by which the ranks' results may differ from the right one. "" stands for no difference.

    Several factors fit a gradient that is 0. The simplest factor comes first. An empty list: no factor fits. `sizes`
    are the numbers of ranks that a factor may come from, by default all ranks.
    """
    total, sizes = torch.stack(parts).sum(dim=0), sizes or [len(parts)]
    if all(distance(part, parts[0], floor) <= allowed for part in parts):
        factors = [("", 1.0)]
        for P in sizes:
            factors += [("times_p", P), ("over_p", 1 / P), ("times_root_p", P**0.5), ("over_root_p", P**-0.5)]
        fits = [name for name, factor in factors if distance(parts[0], factor * right, floor) <= allowed]
        return list(dict.fromkeys(fits))
    reduced = any(distance(total / P, right, floor) <= allowed for P in (1, *sizes))
    return ["not_reduced"] if reduced else []


def judge(
    results: dict[int, OfRanks],
    exact: Returned,
    predictions: Callable[[int], list[Prediction]],
    allowed: float,
    loose: float,
    *,
    hidden: str = "",
) -> tuple[list[World], tuple[ModelDiagnosis, ...], dict[int, list[Returned]]]:
    """Compare the results with `exact`, within `allowed`, and the wrong results with the predictions, within `loose`.

    Returned are what was found with each P; the diagnoses with the fewest mistakes of those that explain every wrong
    world; and the results of the wrong worlds, if they can be compared.
    """
    worlds: list[World] = []
    wrong: dict[int, list[Returned]] = {}
    for P, of_ranks in results.items():
        failure, error = of_ranks if isinstance(of_ranks, str) else unlike(of_ranks, exact), math.inf
        if not isinstance(of_ranks, str) and not failure:
            error = max(error_of(result, exact) for result in of_ranks)
            wrong |= {P: of_ranks} if error > allowed else {}
        worlds.append(World(P, hidden, error <= allowed, error, failure))
    telling = {P: wrong[P] for P in wrong if P > 1} or wrong  # one process cannot show every mistake
    for together in (False, True):  # mistakes together only when no single one explains everything
        fits: list[dict[tuple[str, ...], ModelDiagnosis]] = []
        for P, of_ranks in sorted(telling.items()):
            fits.append({})
            tried = [each for each in predictions(P) if (len(each[0]) > 1) == together]
            for names, predict in tried:
                predicted = predict()
                if isinstance(predicted, str) or (names and same(predicted, exact, loose)):
                    continue  # it fails, or it does not show in this model
                if (found := explain(of_ranks, predicted, loose)) and (names := names + found.names):
                    fits[-1].setdefault(names, replace(found, names=names))
        if common := set.intersection(*map(set, fits)) if fits else set():
            break
    fewest = min(map(len, common), default=0)
    return worlds, tuple(fits[-1][names] for names in sorted(common) if len(names) == fewest), wrong
