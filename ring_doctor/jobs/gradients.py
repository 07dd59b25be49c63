"""The gradients of two jobs beside each other: how far each is from right, and what rounding may do.

    gradients_of(one, many, moved, step, kind)    ->    {weight: Compared}

What rounding may change is measured. `moved` is the first job with weights moved by one unit of the narrowest dtype
that it computes in. One unit is twice the largest error of a rounding, and a weight's gradient passes some ten of them;
both jobs round. So UNITS times this change is allowed, and for no weight less than for all of them in the mean.

A weight is compared on the ranks whose optimizers have it: a rank without it may hold anything. `compared` is for every
number that ranks have: gradients, their norm, losses, outputs of modules.

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
NORM = "1 / the norm for clipping"  # it is one more of the gradients that are clipped
SMALL = 0.01  # of the norm of an average gradient: a smaller one, as of the bias of keys, may be rounding only
POWERS = {"times_p": 1.0, "over_p": -1.0, "times_root_p": 0.5, "over_root_p": -0.5}  # of a number of ranks
EXPECTED = "expected one model and the same frozen weights, whole or in DTensors on each rank; FSDP 1 has flat weights"


@dataclass(frozen=True)
class Compared:
    """A weight's gradient in the second job, on the ranks whose optimizers have the weight, beside the right one."""

    allowed: float  # what rounding may do, as a share of the norm
    errors: dict[int, float]  # by rank, as a share of the norm
    off: list[int]  # the ranks that have a wrong one
    alike: bool  # whether all ranks have the same one
    summed: bool  # whether the ranks' sum is the right one, or a multiple of it
    times: float | None  # which is this multiple of the right one; or None
    factor: str  # the name of the multiple: "times_p", ..., "not_reduced"; or ""


Gradients = dict[str, Compared]  # by the weight's name


def distance(x: Tensor, y: Tensor, floor: float = 0.0) -> float:
    """How far x is from y, as a share of the norm of y. NaN is infinitely far from everything."""
    share = (x - y).norm().item() / max(y.norm().item(), floor, torch.finfo(torch.float64).tiny)
    return math.inf if math.isnan(share) else share


def eps_of(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps


def dtypes_of(job: Job) -> list[str]:
    """The dtypes of a job's gradients, and those that its modules and losses computed in: the narrowest first."""
    seen = {dtype for ranks in job.steps for of_rank in ranks for dtype in of_rank["dtypes"]}
    return sorted((dtype.removeprefix("torch.") for dtype in seen), key=eps_of, reverse=True)


def _allowed(one: Job, moved: Job | None, step: int, kind: str) -> dict[str, tuple[float, float]]:
    """For each weight that has a gradient: a norm below which it is taken for rounding, and the share allowed."""
    rows = {}  # how many numbers, the norm of the right gradient, and that of its change
    for name in one.steps[step][0]["weights"]:
        right, near = (job.gradients(kind, step, name).get(0) for job in (one, moved or one))
        if right is not None and near is not None:
            rows[name] = right.numel(), float(right.norm()), float((near - right).norm())
    counts, norms, changes = torch.tensor([*rows.values()], dtype=torch.float64).reshape(len(rows), 3).T
    norm = float(norms[[name != LOSS for name in rows]].norm())
    if not 0 < norm < math.inf:
        said = f"the norm of the gradients of step {step + 1} of the first job is {norm:g}"
        raise CannotExamine(f"{said}; those that a closure computes inside of a step are not seen")
    floors = SMALL * norm * (counts / counts.sum()).sqrt()
    changes = changes / torch.maximum(norms, floors)
    usual = float(changes.square().mean().sqrt())
    shares = UNITS * changes.clamp(min=max(usual, eps_of(dtypes_of(one)[0]) * (1 if usual else TERMS)))
    return dict(zip(rows, zip(floors.tolist(), shares.tolist(), strict=True), strict=True))


def gradients_of(one: Job, many: Job, moved: Job | None, step: int, kind: str) -> Gradients:
    """Compare the gradients of a step: "before" clipping, or those that optimizers get, and then NORM."""
    ones, ranks = one.steps[step], many.steps[step]
    clips = all(of["norm"] is not None for of in (*ones, *ranks))
    kind = kind if clips else "gradient"
    allowed, found = _allowed(one, moved, step, kind), {}
    for name in sorted({name for of in ranks for name in of["weights"]} ^ set(allowed)):
        if name in allowed or any(x.any() for x in many.gradients(kind, step, name).values()):
            raise CannotExamine(f"{name} has a gradient in one of the jobs only; {EXPECTED}")
    for name, (floor, share) in allowed.items():
        right = one.gradients(kind, step, name)[0]
        parts = many.gradients(kind, step, name) or dict.fromkeys(range(len(ranks)), torch.zeros_like(right))
        found[name] = compared(name, right, parts, floor, share, len(ranks))
    if clips and kind == "gradient":
        right, *others = torch.tensor([1 / of["norm"] for of in (ones[0], *ranks)], dtype=torch.float64)
        share = max(share for _, share in allowed.values())
        found[NORM] = compared(NORM, right, dict(enumerate(others)), 0.0, share, len(ranks))
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
    sums = [sum(others, first) * d**sign for d in divisors(P) for sign in (1, -1)]
    summed = any(distance(x, right, floor) <= allowed for x in sums)
    factors += ["not_reduced"] * (summed and not alike)
    return Compared(allowed, errors, off, alike, summed, times if multiple else None, (factors or [""])[0])
