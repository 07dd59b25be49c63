"""Judging: what the step returned with each number of processes, and the mistakes that explain all of it.

    judge(patient, results, exact, patterns, ...)    ->  Judgement: a World for each P, and the common names

A name must explain every wrong world. One mistake is tried first, then two together.

Shapes: those of model_calls.py.

Before: model_comparison.py, one world. After: model_clues.py, where nothing has a name.
Source: none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ring_doctor.model_calls import ModelPatient, Returned
from ring_doctor.model_comparison import ModelDiagnosis, explain, largest_error, unlike
from ring_doctor.model_patterns import Pattern, predict

RIGHT = ModelDiagnosis(())
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
