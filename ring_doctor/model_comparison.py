"""What the ranks returned beside what was predicted: the same, the same but for factors, or something else.

    explain(results, predicted, shards, allowed)    ->  ModelDiagnosis(("loss_times_p",)), or None
    unlike(results, exact)                          ->  "on rank 1, there is no gradient of head.weight", or ""
    judge(patient, results, exact, patterns, ...)   ->  Judgement: a World for each P, and the names that fit all

Two results are the same when they differ by at most `allowed`, as a share of the norm of what was predicted. A name
must explain every wrong world. One mistake is tried first, then two together.

Shapes: those of model_calls.py.

Before: model_patterns.py, the predictions. After: model_clues.py, where nothing has a name.
Source: the bound is derived in `tolerance`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ring_doctor.answers import FAILED, OK, WRONG
from ring_doctor.model_calls import ModelPatient, Returned
from ring_doctor.model_patterns import Pattern, predict


@dataclass(frozen=True)
class ModelDiagnosis:
    """Mistakes that together explain a result. `detail` says in which weights, if not in all."""

    names: tuple[str, ...]
    detail: str = ""


RIGHT = ModelDiagnosis(())


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


def explain(
    results: list[Returned], predicted: Returned, shards: list[Tensor], allowed: float
) -> ModelDiagnosis | None:
    """The mistakes in the reduction over ranks that turn what was predicted into the results of the ranks.

    No mistakes where both are the same. None where no such mistake, nor two of them, turns one into the other.
    """
    names: list[str] = []
    if predicted.loss.dim():
        if not distance(in_text(results, shards), predicted.loss) <= allowed:
            return None
    else:
        of_loss = _factors([result.loss for result in results], predicted.loss, 0.0, allowed)
        of_loss = [factor for factor in of_loss if "root" not in factor]  # √P is a mistake of norms
        if not of_loss:
            return None
        names += [f"loss_{of_loss[0]}"] if of_loss[0] else []
    floors = floors_of(predicted)
    fitting = {
        name: _factors([result.gradients[name] for result in results], gradient, floors[name], allowed)
        for name, gradient in predicted.gradients.items()
    }
    if not all(fitting.values()):
        return None
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


def distance(x: Tensor, y: Tensor, floor: float = 0.0) -> float:
    """How far x is from y, as a share of the norm of y. NaN is far from everything."""
    difference = (x - y).norm().item()
    return 0.0 if difference == 0 else difference / max(y.norm().item(), floor, torch.finfo(torch.float64).tiny)


def same(x: Returned, y: Returned, allowed: float) -> bool:
    """Whether two results of a rank are the same. NaN is taken for 0."""
    floors = floors_of(y)
    pairs = [(x.loss, y.loss, 0.0), *((x.gradients[name], y.gradients[name], floors[name]) for name in floors)]
    return all(distance(a.nan_to_num(), b.nan_to_num(), floor) <= allowed for a, b, floor in pairs)


def floors_of(result: Returned) -> dict[str, float]:
    """For each gradient 1% of the norm of an average gradient of its size. A smaller gradient may be rounding only.

    The gradient of the bias of keys is an example: it is 0, because a softmax does not see that bias.
    """
    numbers = sum(gradient.numel() for gradient in result.gradients.values())
    norm = math.sqrt(sum(gradient.norm().item() ** 2 for gradient in result.gradients.values()))
    return {name: 0.01 * norm * math.sqrt(gradient.numel() / numbers) for name, gradient in result.gradients.items()}


def largest_error(results: list[Returned], exact: Returned, shards: list[Tensor]) -> float:
    """The largest error of the loss or of a gradient, as a share of its norm."""
    floors = floors_of(exact)
    if exact.loss.dim():
        errors = [distance(in_text(results, shards), exact.loss)]
    else:
        errors = [distance(result.loss, exact.loss) for result in results]
    for result in results:
        errors += [distance(result.gradients[name], exact.gradients[name], floors[name]) for name in floors]
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def in_text(results: list[Returned], shards: list[Tensor]) -> Tensor:
    """The losses (B, C) of the ranks in the order of the text, (B, S)."""
    return torch.cat([result.loss for result in results], dim=1)[:, torch.cat(shards).argsort()]


OfRanks = list[Returned] | str  # what each rank returned, or why the function did not return


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


@dataclass(frozen=True)
class Judgement:
    """What was found with each number of processes."""

    worlds: tuple[World, ...]
    diagnoses: tuple[ModelDiagnosis, ...]  # each of them explains every wrong world; those with the fewest mistakes
    wrong: dict[int, list[Returned]] = field(repr=False)  # the results of the wrong worlds, if they can be compared


def judge(
    patient: ModelPatient,
    results: dict[int, OfRanks],
    exact: Returned,
    patterns: Callable[[int], list[Pattern]],
    allowed: float,
    loose: float,
    *,
    hidden: bool = False,
) -> Judgement:
    """Compare the results with `exact`, within `allowed`, and the wrong results with the patterns, within `loose`."""
    worlds, wrong = [], {}
    for P, of_ranks in results.items():
        failure = of_ranks if isinstance(of_ranks, str) else unlike(of_ranks, exact)
        if isinstance(of_ranks, str) or failure:
            worlds.append(World(P, hidden, False, (), math.inf, failure))
            continue
        right = explain(of_ranks, exact, patient.shards(P), allowed) == RIGHT
        worlds.append(World(P, hidden, right, (), largest_error(of_ranks, exact, patient.shards(P))))
        if not right:
            wrong[P] = of_ranks
    telling = {P: wrong[P] for P in wrong if P > 1} or wrong  # one process cannot show every mistake
    fits = _fitting(patient, telling, patterns, loose)
    common = set.intersection(*(set(fit) for fit in fits.values())) if fits else set()
    explained = tuple(replace(world, found=_fewest(fits.get(world.world_size, {}))) for world in worlds)
    return Judgement(explained, _fewest({names: fits[max(telling)][names] for names in common}), wrong)


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
