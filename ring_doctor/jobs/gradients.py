"""The gradients of two jobs beside each other: how far each is from right, and what rounding may do.

    gradients_of(one, many, moved, step, kind)    ->    Gradients: errors, allowed, factors, by weight

What rounding may change is measured. `moved` is the first job with weights moved by one unit of the narrowest dtype
that it computes in. One unit is twice the largest error of a rounding, and a weight's gradient passes some ten of them;
both jobs round. So UNITS times this change is allowed, and for no weight less than for all of them in the mean.

Shapes: a gradient is whole, as that of one process. One weight is in memory at a time, with the ranks' gradients of it.

Before: seen.py. After: verdict.py.
Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", sections 1.6 and 3.1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ring_doctor.asking.job import CannotExamine
from ring_doctor.jobs.job import Job
from ring_doctor.jobs.seen import divisors

UNITS = 8
TERMS = 64  # roundings of eps that are allowed where nothing was measured
LOSS = "the reported loss"  # it is one more gradient: ../whole_models
SMALL = 0.01  # of the norm of an average gradient: a smaller one, as of the bias of keys, may be rounding only


@dataclass
class Gradients:
    """The gradients of a step of the second job: by weight, how far they are from right, and what explains them."""

    pairs: list[tuple[str, str]]  # pairs_of
    allowed: dict[str, float]
    errors: dict[str, float] = field(default_factory=dict)  # the largest of a rank, as a share of the norm
    factors: dict[str, list[str]] = field(default_factory=dict)  # factors_of
    times: dict[str, float | None] = field(default_factory=dict)  # all ranks' gradient over the right one, or None
    wrong_ranks: set[int] = field(default_factory=set)
    owners: dict[str, list[int]] = field(default_factory=dict)  # the ranks whose gradient of a weight is compared
    alike: bool = True  # whether these are alike

    @property
    def wrong(self) -> list[str]:
        return [name for name, error in self.errors.items() if not error <= self.allowed[name]]

    @property
    def right_ranks(self) -> list[int]:
        """Ranks whose gradients are all right: none, unless together they have every weight."""
        right = {rank for of in self.owners.values() for rank in of} - self.wrong_ranks
        return sorted(right) if all(right & set(of) for of in self.owners.values()) else []


def distance(x: Tensor, y: Tensor, floor: float = 0.0) -> float:
    """How far x is from y, as a share of the norm of y. NaN is infinitely far from everything."""
    share = (x - y).norm().item() / max(y.norm().item(), floor, torch.finfo(torch.float64).tiny)
    return math.inf if math.isnan(share) else share


def factors_of(parts: list[Tensor], right: Tensor, floor: float, allowed: float, sizes: list[int]) -> list[str]:
    """The factors by which the ranks' results may differ from the right one. "" stands for no difference.

    Several factors fit a gradient that is 0. The simplest factor comes first. An empty list: no factor fits. `sizes`
    are the numbers of ranks that a factor may come from.
    """
    total = torch.stack(parts).sum(dim=0)
    if all(distance(part, parts[0], floor) <= allowed for part in parts):
        factors = [("", 1.0)]
        for P in sizes:
            factors += [("times_p", P), ("over_p", 1 / P), ("times_root_p", P**0.5), ("over_root_p", P**-0.5)]
        fits = [name for name, factor in factors if distance(parts[0], factor * right, floor) <= allowed]
        return list(dict.fromkeys(fits))
    reduced = any(distance(total / P, right, floor) <= allowed for P in (1, *sizes))
    return ["not_reduced"] if reduced else []


def eps_of(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps


def dtypes_of(job: Job) -> list[str]:
    """The dtypes of a job's gradients, and those that its modules and losses computed in: the narrowest first."""
    seen = [part for of_rank in job.ranks for step in of_rank["steps"] for part in (step, *step["passes"])]
    return sorted({dtype.removeprefix("torch.") for part in seen for dtype in part["dtypes"]}, key=eps_of, reverse=True)


def pairs_of(one: Job, many: Job) -> list[tuple[str, str]]:
    """The names of each weight in both jobs, which may begin with other prefixes."""
    names, *ranks = (list(seen["weights"]) for seen in (one.ranks[0], *many.ranks))
    for rank, others in enumerate(ranks):
        if lacking := set(ranks[0]) ^ set(others):
            said = f"rank {rank} of the second job has another model than rank 0, by the weight {min(lacking)}"
            raise CannotExamine(f"{said}; expected one model on all ranks")
    found = []
    for name in names:
        fits = [o for o in ranks[0] if o == name] or [o for o in ranks[0] if f".{o}".endswith(f".{name}")]
        fits = fits or [o for o in ranks[0] if f".{name}".endswith(f".{o}")]
        if len(fits) != 1:
            flat = " and no flat weights of FSDP 1: take fully_shard" * ("_flat_param" in str(names + ranks[0]))
            raise CannotExamine(f"the weight {name} is not in both jobs; expected one model in both{flat}")
        found.append((name, fits[0]))
    return found


def gradients_of(one: Job, many: Job, moved: Job | None, step: int, kind: str, ranks: Sequence[int] = ()) -> Gradients:
    """Compare the gradients of a step: before clipping (`kind` "before"), or those that the optimizer gets.

    A weight that only some ranks' optimizers have is compared on these. Of all `ranks`, or of these.
    """
    pairs, P = pairs_of(one, many), len(many.ranks)
    ranks = ranks or range(P)
    sizes: dict[str, tuple[float, int]] = {}  # of the right gradients: the norm, and how many numbers
    changes: dict[str, float] = {}
    for name, _ in pairs:
        if (right := one.tensor(kind, step, name)) is not None:
            sizes[name] = float(right.norm()), right.numel()
            near = moved.tensor(kind, step, name) if moved else None
            changes |= {name: float((near - right).norm())} if near is not None else {}
    norm = math.hypot(*(norm for name, (norm, _) in sizes.items() if name != LOSS))
    if sizes and not 0 < norm < math.inf:
        said = f"the norm of the gradients of step {step + 1} of the first job is {norm:g}"
        raise CannotExamine(f"{said}; those that a closure computes inside of a step are not seen: {one.command}")
    count = sum(n for _, n in sizes.values())
    floors = {name: SMALL * norm * math.sqrt(n / count) for name, (_, n) in sizes.items()}
    changes = {name: x / max(sizes[name][0], floors[name]) for name, x in changes.items()}
    usual = math.sqrt(sum(x * x for x in changes.values()) / len(changes)) if changes else 0.0
    usual = max(usual, eps_of(dtypes_of(one)[0]) * (1 if usual else TERMS))
    found = Gradients(pairs, {name: UNITS * max(usual, changes.get(name, 0.0)) for name in sizes})
    trained = {other for name, other in pairs if name in sizes}
    for name in set(many.ranks[0]["weights"]) - trained:
        given = [many.tensor(kind, step, name, rank) for rank in range(P)]
        if any(part is not None and part.any() for part in given):
            raise CannotExamine(f"{name} has a gradient in the second job only; expected the same frozen weights")
    for name, other in pairs:
        if (right := one.tensor(kind, step, name)) is None:
            continue
        owners = [rank for rank in ranks if other in many.ranks[rank]["steps"][step]["owned"]] or list(ranks)
        given = [many.tensor(kind, step, other, rank) for rank in owners]
        parts = [torch.zeros_like(right) if x is None else x for x in given]
        if others := [tuple(x.shape) for x in parts if x.shape != right.shape]:
            said = f"{name} has shape {others[0]} in the second job and {tuple(right.shape)} in the first"
            raise CannotExamine(f"{said}; expected one model, whole on each rank or in DTensors")
        floor, allowed = floors[name], found.allowed[name]
        found.factors[name] = factors_of(parts, right, floor, allowed, divisors(P)[:0:-1])
        if name == LOSS:
            continue
        off = {rank: distance(x, right, floor) for rank, x in zip(owners, parts, strict=True)}
        found.wrong_ranks |= {rank for rank, error in off.items() if not error <= allowed}
        found.errors[name], found.owners[name] = max(off.values()), owners
        found.alike &= all(distance(x, parts[0], floor) <= allowed for x in parts)
        times = float((parts[0] * right).sum() / (right * right).sum().clamp(min=1e-300))
        multiple = all(distance(x, times * right, floor) <= allowed * abs(times) for x in parts)
        found.times[name] = times if multiple else None
    return found
