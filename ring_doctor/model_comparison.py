"""What the ranks returned beside what was predicted: the same, the same but for factors, or something else.

    explain(results, predicted, shards, allowed)    ->  ModelDiagnosis(("loss_times_p",)), or None
    unlike(results, exact)                          ->  "on rank 1, there is no gradient of head.weight", or ""
    judge(patient, results, exact, patterns, ...)   ->  a World for each P, the names that fit all, the wrong results

Two results are the same when they differ by at most `allowed`, as a share of the norm of what was predicted. A name
must explain every wrong world. One mistake is tried first, then two together.

Shapes: those of model_calls.py.

Before: mistakes_of_models.py, the predictions. After: model_clues.py, where nothing has a name.
Source: the bound is derived in `tolerance`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ring_doctor.answers import FAILED, OK, WRONG
from ring_doctor.mistakes_of_models import Pattern, norm_of, predict
from ring_doctor.model_calls import ModelPatient, Returned

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
    hidden: bool  # with some labels hidden
    right: bool
    found: tuple[ModelDiagnosis, ...]  # each of them explains the result
    error: float  # the largest error of the loss or of a gradient, as a share of its norm
    failure: str = ""  # why the function did not return, or why its results cannot be compared

    @property
    def state(self) -> str:
        return OK if self.right else FAILED if self.failure else WRONG

    @property
    def asked(self) -> str:
        """The question in words: "P = 3, some labels hidden"."""
        return f"P = {self.world_size}" + (", some labels hidden" if self.hidden else "")

    def says(self, allowed: float) -> str:
        """The largest error beside what rounding allows, or why there is none."""
        return self.failure or f"off by {self.error:.1e} of the norm, rounding allows {allowed:.1e}"

    @property
    def scaled(self) -> bool:
        """Whether the result is right, or wrong by factors only."""
        factors = ("loss_", "gradients_")
        return self.right or any(all(name.startswith(factors) for name in found.names) for found in self.found)


def unlike(results: list[Returned], exact: Returned) -> str:
    """Why the results cannot be compared: on a rank the gradients have other names or shapes. "" if they can."""
    for rank, result in enumerate(results):
        missing = sorted(exact.gradients.keys() - result.gradients.keys())
        more = sorted(result.gradients.keys() - exact.gradients.keys())
        if missing or more:
            said = f"there is no gradient of {missing[0]}" if missing else f"there is a gradient of {more[0]} too"
            return f"on rank {rank}, {said}; expected the names of one process"
        for name, gradient in exact.gradients.items():
            if (found := result.gradients[name].shape) != gradient.shape:
                return (
                    f"on rank {rank}, the gradient of {name} has shape {tuple(found)}; expected "
                    f"{tuple(gradient.shape)} as on one process: gather the parts, or return DTensors"
                )
        if result.loss.dim() != exact.loss.dim():
            dims = f"{result.loss.dim()} dimensions; expected {exact.loss.dim()}"
            return f"on rank {rank}, the loss has {dims}, as on one process"
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


def floors_of(result: Returned) -> dict[str, float]:
    """For each gradient 1% of the norm of an average gradient of its size. A smaller gradient may be rounding only.

    The gradient of the bias of keys is an example: it is 0, because a softmax does not see that bias.
    """
    numbers, norm = sum(x.numel() for x in result.gradients.values()), norm_of([*result.gradients.values()])
    return {name: 0.01 * norm * math.sqrt(x.numel() / numbers) for name, x in result.gradients.items()}


def losses(results: list[Returned], shards: list[Tensor]) -> list[Tensor]:
    """The loss of each rank; of the losses (B, C) of tokens, those of all ranks in the order of the text, (B, S)."""
    if not results[0].loss.dim():
        return [result.loss for result in results]
    return [torch.cat([result.loss for result in results], dim=1)[:, torch.cat(shards).argsort()]]


def error_of(results: list[Returned], exact: Returned, shards: list[Tensor], *, loss: bool = True) -> float:
    """The largest error of the loss or of a gradient, as a share of its norm."""
    floors, errors = floors_of(exact), [distance(x, exact.loss) for x in (losses(results, shards) if loss else [])]
    for result in results:
        errors += [distance(result.gradients[name], exact.gradients[name], floors[name]) for name in floors]
    return max(errors)


def same(result: Returned, other: Returned, allowed: float) -> bool:
    """Whether two results of a rank are the same: NaN is like NaN."""
    pairs = [(result.loss, other.loss, 0.0)]
    pairs += [(result.gradients[name], other.gradients[name], floor) for name, floor in floors_of(other).items()]
    return all(distance(x.nan_to_num(), y.nan_to_num(), floor) <= allowed for x, y, floor in pairs)


def explain(
    results: list[Returned], predicted: Returned, shards: list[Tensor], allowed: float
) -> ModelDiagnosis | None:
    """The mistakes in the reduction over ranks that turn what was predicted into the results of the ranks.

    No mistakes where both are the same. None where no such mistake, nor two of them, turns one into the other.
    """
    of_loss = _factors(losses(results, shards), predicted.loss, 0.0, allowed)
    of_loss = [factor for factor in of_loss if "root" not in factor]  # √P is a mistake of norms
    floors = floors_of(predicted)
    fitting = {
        name: _factors([result.gradients[name] for result in results], gradient, floors[name], allowed)
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


def _factors(parts: list[Tensor], right: Tensor, floor: float, allowed: float) -> list[str]:
    """The factors by which the ranks' results may differ from the right one. "" stands for no difference.

    Several factors fit a gradient that is 0. The simplest factor comes first. An empty list: no factor fits.
    """
    P, total = len(parts), torch.stack(parts).sum(dim=0)
    if all(distance(part, parts[0], floor) <= allowed for part in parts):
        factors = {"": 1, "times_p": P, "over_p": 1 / P, "times_root_p": math.sqrt(P), "over_root_p": 1 / math.sqrt(P)}
        return [name for name, factor in factors.items() if distance(parts[0], factor * right, floor) <= allowed]
    reduced = any(distance(x, right, floor) <= allowed for x in (total, total / P))
    return ["not_reduced"] if reduced else []


def judge(
    patient: ModelPatient,
    results: dict[int, OfRanks],
    exact: Returned,
    patterns: Callable[[int], list[Pattern]],
    allowed: float,
    loose: float,
    *,
    hidden: bool = False,
) -> tuple[list[World], tuple[ModelDiagnosis, ...], dict[int, list[Returned]]]:
    """Compare the results with `exact`, within `allowed`, and the wrong results with the patterns, within `loose`.

    Returned are what was found with each P; the diagnoses with the fewest mistakes of those that explain every wrong
    world; and the results of the wrong worlds, if they can be compared.
    """
    worlds: list[World] = []
    wrong: dict[int, list[Returned]] = {}
    for P, of_ranks in results.items():
        failure = of_ranks if isinstance(of_ranks, str) else unlike(of_ranks, exact)
        error = math.inf
        if not isinstance(of_ranks, str) and not failure:
            error = error_of(of_ranks, exact, patient.shards(P))
            wrong |= {P: of_ranks} if error > allowed else {}
        worlds.append(World(P, hidden, error <= allowed, (), error, failure))
    telling = {P: wrong[P] for P in wrong if P > 1} or wrong  # one process cannot show every mistake
    fits = _fitting(patient, telling, patterns, loose)
    common = set.intersection(*(set(fit) for fit in fits.values())) if fits else set()
    explained = [replace(world, found=_fewest(fits.get(world.world_size, {}))) for world in worlds]
    return explained, _fewest({names: fits[max(telling)][names] for names in common}), wrong


def _fitting(
    patient: ModelPatient, wrong: dict[int, list[Returned]], patterns: Callable[[int], list[Pattern]], allowed: float
) -> dict[int, dict[tuple[str, ...], ModelDiagnosis]]:
    """For each wrong world the mistakes that explain it."""
    fits: dict[int, dict[tuple[str, ...], ModelDiagnosis]] = {P: {} for P in wrong}
    for few in (True, False):  # two mistakes together only when no single one explains everything
        tried = [(P, pattern) for P in wrong for pattern in patterns(P) if (len(pattern.names) < 2) == few]
        if not tried or set.intersection(*(set(fit) for fit in fits.values())):
            break
        for (P, pattern), predicted in zip(tried, predict(patient, [pattern for _, pattern in tried]), strict=True):
            found = predicted and explain(wrong[P], predicted, patient.shards(P), allowed)
            if found and (names := pattern.names + found.names):
                fits[P].setdefault(names, ModelDiagnosis(names, found.detail))
    return fits


def _fewest(fits: dict[tuple[str, ...], ModelDiagnosis]) -> tuple[ModelDiagnosis, ...]:
    """Those with the fewest mistakes."""
    least = min(map(len, fits), default=0)
    return tuple(fits[names] for names in sorted(fits) if len(names) == least)
