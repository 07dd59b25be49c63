"""The gradients of two jobs beside each other: how far each is from right, and what rounding may do.

    gradients_of(one, many, moved, step, kind)    ->    {weight: Compared}

What rounding may change is measured. `moved` is the first job with weights moved by one unit of the narrowest dtype
that it computes in. One unit is twice the largest error of a rounding, and a weight's gradient passes some ten of them;
both jobs round. So UNITS times this change is allowed, and for no weight less than for all of them in the mean.

A weight is compared on the ranks whose optimizers have it: a rank without it may hold anything.

Shapes: a gradient is whole, as that of one process. One weight is in memory at a time, with the ranks' gradients of it.

Before: seen.py. After: verdict.py.
Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", sections 1.6 and 3.1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_doctor.asking.job import CannotExamine
from ring_doctor.jobs.job import Job
from ring_doctor.jobs.seen import divisors

UNITS = 8
TERMS = 64  # roundings of eps that are allowed where nothing was measured
LOSS = "the reported loss"  # it is one more gradient: ../whole_models
SMALL = 0.01  # of the norm of an average gradient: a smaller one, as of the bias of keys, may be rounding only
POWERS = {"times_p": 1.0, "over_p": -1.0, "times_root_p": 0.5, "over_root_p": -0.5}  # of a number of ranks
EXPECTED = "expected one model in both jobs, on each rank whole or in DTensors; FSDP 1 has flat weights"


@dataclass(frozen=True)
class Compared:
    """A weight's gradient in the second job, on the ranks whose optimizers have the weight, beside the right one."""

    weight: str  # its name in the second job
    allowed: float  # what rounding may do, as a share of the norm
    errors: dict[int, float]  # by rank, as a share of the norm
    off: list[int]  # the ranks that have a wrong one
    alike: bool  # whether all ranks have the same one
    times: float | None  # which is this multiple of the right one; or None
    factor: str  # the name of the multiple: "times_p", ..., "not_reduced"; or ""


Gradients = dict[str, Compared]  # by the weight's name in the first job


def distance(x: Tensor, y: Tensor, floor: float = 0.0) -> float:
    """How far x is from y, as a share of the norm of y. NaN is infinitely far from everything."""
    share = (x - y).norm().item() / max(y.norm().item(), floor, torch.finfo(torch.float64).tiny)
    return math.inf if math.isnan(share) else share


def eps_of(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps


def dtypes_of(job: Job) -> list[str]:
    """The dtypes of a job's gradients, and those that its modules and losses computed in: the narrowest first."""
    seen = [part for of_rank in job.ranks for step in of_rank["steps"] for part in (step, *step["passes"])]
    return sorted({dtype.removeprefix("torch.") for part in seen for dtype in part["dtypes"]}, key=eps_of, reverse=True)


def pairs_of(one: Job, many: Job) -> dict[str, str]:
    """The names of each weight in both jobs, which may begin with other prefixes."""
    others, found = set.intersection(*(set(of["weights"]) for of in many.ranks)), {}
    for name in one.ranks[0]["weights"]:
        alike = [x for x in others if f".{x}".endswith(f".{name}") or f".{name}".endswith(f".{x}")]
        fits = [name] if name in others else alike
        if len(fits) != 1:
            raise CannotExamine(f"the weight {name} is not in both jobs, on all ranks; {EXPECTED}")
        found[name] = fits[0]
    return found


def _allowed(one: Job, moved: Job | None, step: int, kind: str) -> dict[str, tuple[float, float]]:
    """For each weight that has a gradient: a norm below which it is taken for rounding, and the share allowed."""
    sizes: dict[str, tuple[float, int]] = {}  # of the right gradients: the norm, and how many numbers
    changes: dict[str, float] = {}
    for name in one.ranks[0]["weights"]:
        right, near = (job.tensor(kind, step, name) for job in (one, moved or one))
        if right is not None and near is not None:
            sizes[name], changes[name] = (float(right.norm()), right.numel()), float((near - right).norm())
    norm = math.hypot(*(norm for name, (norm, _) in sizes.items() if name != LOSS))
    if not 0 < norm < math.inf:
        said = f"the norm of the gradients of step {step + 1} of the first job is {norm:g}"
        raise CannotExamine(f"{said}; those that a closure computes inside of a step are not seen: {one.command}")
    count = sum(n for _, n in sizes.values())
    floors = {name: SMALL * norm * math.sqrt(n / count) for name, (_, n) in sizes.items()}
    changes = {name: x / max(sizes[name][0], floors[name]) for name, x in changes.items()}
    usual = math.sqrt(sum(x * x for x in changes.values()) / len(changes))
    usual = max(usual, eps_of(dtypes_of(one)[0]) * (1 if usual else TERMS))
    return {name: (floors[name], UNITS * max(usual, change)) for name, change in changes.items()}


def gradients_of(one: Job, many: Job, moved: Job | None, step: int, kind: str) -> Gradients:
    """Compare the gradients of a step: before clipping (`kind` "before"), or those that the optimizer gets."""
    pairs, allowed, found = pairs_of(one, many), _allowed(one, moved, step, kind), {}
    P, trained = len(many.ranks), {pairs[name] for name in allowed}
    for name in {name for of in many.ranks for name in of["weights"]} - trained:
        if any(x is not None and x.any() for x in (many.tensor(kind, step, name, rank) for rank in range(P))):
            raise CannotExamine(f"{name} has a gradient in the second job only; expected the same frozen weights")
    for name, (floor, share) in allowed.items():
        owners = [of["rank"] for of in many.ranks if pairs[name] in of["steps"][step]["owned"]] or range(P)
        given = {rank: many.tensor(kind, step, pairs[name], rank) for rank in owners}
        if (right := one.tensor(kind, step, name)) is not None:
            parts = {rank: torch.zeros_like(right) if x is None else x for rank, x in given.items()}
            found[name] = compared(pairs[name], right, parts, floor, share, P)
    return found


def compared(weight: str, right: Tensor, parts: dict[int, Tensor], floor: float, allowed: float, P: int) -> Compared:
    """Compare what ranks have with the right one. A factor, or a mean, may be that of P ranks or of a group of them."""
    first, *others = parts.values()
    if shapes := [tuple(x.shape) for x in parts.values() if x.shape != right.shape]:
        said = f"{weight} has shape {shapes[0]} in the second job and {tuple(right.shape)} in the first"
        raise CannotExamine(f"{said}; {EXPECTED}")
    errors = {rank: distance(x, right, floor) for rank, x in parts.items()}
    off = [rank for rank, error in errors.items() if not error <= allowed]
    alike = all(distance(x, first, floor) <= allowed for x in others)
    times = float((first * right).sum() / right.square().sum().clamp(min=1e-300))
    multiple = alike and distance(first, times * right, floor) <= allowed
    named = [(name, d**power) for d in divisors(P)[:0:-1] for name, power in POWERS.items()]
    factors = [name for name, factor in named if multiple and abs(times / factor - 1) <= allowed]
    if not alike and any(distance(sum(others, first) / d, right, floor) <= allowed for d in divisors(P)):
        factors = ["not_reduced"]
    return Compared(weight, allowed, errors, off, alike, times if multiple else None, (factors or [""])[0])
