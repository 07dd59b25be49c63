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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ring_doctor.asking.job import CannotExamine
from ring_doctor.jobs.job import Job
from ring_doctor.jobs.seen import divisors

UNITS = 8
TERMS = 64  # roundings of eps that are allowed where nothing was measured
SMALL = 0.01  # of the norm of an average gradient: a smaller one, as of the bias of keys, may be rounding only


@dataclass
class Gradients:
    """The gradients of a step of the second job: by weight, how far they are from right, and what explains them."""

    pairs: list[tuple[str, str]]  # pairs_of
    allowed: dict[str, float]
    errors: dict[str, float] = field(default_factory=dict)  # the largest of a rank, as a share of the norm
    factors: dict[str, list[str]] = field(default_factory=dict)  # factors_of
    times: dict[str, float] = field(default_factory=dict)  # rank 0's gradient as the nearest multiple of the right one
    multiples: dict[str, bool] = field(default_factory=dict)  # whether all ranks' are this multiple
    wrong_ranks: set[int] = field(default_factory=set)
    dealt_out: list[str] = field(default_factory=list)  # weights whose gradient some ranks' optimizers lack: ZeRO-1, 2
    unseen: str = ""  # why wrong gradients may be right: messages in the step of an optimizer

    @property
    def wrong(self) -> list[str]:
        return [name for name, error in self.errors.items() if not error <= self.allowed[name]]

    def not_sent(self, many: Job, step: int, sent: dict[str, bool]) -> str:
        """What is said of a dealt-out weight that the ranks have not alike before a step, or "".

        `sent`: whether a change of it was seen on all ranks, by weight, until the last step; then until this one.
        """
        others, slack = dict(self.pairs), TERMS * eps_of("float64")
        at = [many.ranks[0]["steps"][step - 1]["sizes"], *(of["steps"][step]["sizes"] for of in many.ranks)]
        for name in [name for name in sent if all(others[name] in sizes for sizes in at)]:
            before, *now = (sizes[others[name]] for sizes in at)
            if off := [rank for rank, x in enumerate(now) if distance(x, now[0]) > slack]:
                who = f"rank {off[0]} has another {name} than rank 0 after step {step}"
                return f"{who}: only some ranks' optimizers had its gradient, and the others must get the new weight"
            sent[name] |= distance(now[0], before) > slack
        sent |= {name: False for name in self.dealt_out if name not in sent}
        return ""


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
    (names, others), found = (list(job.ranks[0]["weights"]) for job in (one, many)), []
    for name in names:
        fits = [o for o in others if o == name] or [o for o in others if f".{o}".endswith(f".{name}")]
        fits = fits or [o for o in others if f".{name}".endswith(f".{o}")]
        if len(fits) != 1:
            flat = " and no flat weights of FSDP 1: take fully_shard" * any("_flat_param" in x for x in names + others)
            raise CannotExamine(f"the weight {name} is not in both jobs; expected one model in both{flat}")
        found.append((name, fits[0]))
    return found


def _compared(one: Job, many: Job, moved: Job | None, step: int, kind: str) -> Gradients:
    pairs, P = pairs_of(one, many), len(many.ranks)
    sizes: dict[str, tuple[float, int]] = {}  # of the right gradients: the norm, and how many numbers
    changes: dict[str, float] = {}
    for name, _ in pairs:
        if (right := one.tensor(kind, step, name)) is not None:
            sizes[name] = float(right.norm()), right.numel()
            near = moved.tensor(kind, step, name) if moved else None
            changes |= {name: float((near - right).norm())} if near is not None else {}
    norm, count = math.hypot(*(norm for norm, _ in sizes.values())), sum(n for _, n in sizes.values())
    if not math.isfinite(norm):
        raise CannotExamine(f"a gradient of the first job is not finite: {one.command}")
    if sizes and not norm:
        said = f"all gradients of step {step + 1} of the first job are 0 when its optimizer begins the step"
        raise CannotExamine(f"{said}; those that a closure computes inside of the step are not seen: {one.command}")
    floors = {name: SMALL * norm * math.sqrt(n / count) for name, (_, n) in sizes.items()}
    changes = {name: x / max(sizes[name][0], floors[name], 1e-300) for name, x in changes.items()}
    usual = math.sqrt(sum(x * x for x in changes.values()) / len(changes)) if changes else 0.0
    usual = max(usual, eps_of(dtypes_of(one)[0]) * (1 if any(changes.values()) else TERMS))
    found = Gradients(pairs, {name: UNITS * max(usual, changes.get(name, 0.0)) for name in sizes})
    trained = {other for name, other in pairs if name in sizes}
    for name in many.ranks[0]["weights"]:
        given = [] if name in trained else [many.tensor(kind, step, name, rank) for rank in range(P)]
        if any(part is not None and part.any() for part in given):
            raise CannotExamine(f"{name} has a gradient in the second job only; expected the same frozen weights")
    for name, other in pairs:
        if (right := one.tensor(kind, step, name)) is None:
            continue
        if lacking := [of["rank"] for of in many.ranks if other not in of["weights"]]:
            said = f"rank {lacking[0]} of the second job has no weight {other}, as rank 0 has"
            raise CannotExamine(f"{said}; expected one model on all ranks")
        owners = [rank for rank, of in enumerate(many.ranks) if other in of["steps"][step]["owned"]] or range(P)
        given = [many.tensor(kind, step, other, rank) for rank in owners]
        parts = {r: torch.zeros_like(right) if x is None else x for r, x in zip(owners, given, strict=True)}
        if others := [tuple(x.shape) for x in parts.values() if x.shape != right.shape]:
            said = f"{name} has shape {others[0]} in the second job and {tuple(right.shape)} in the first"
            raise CannotExamine(f"{said}; expected one model, whole on each rank or in DTensors")
        off, allowed = {rank: distance(x, right, floors[name]) for rank, x in parts.items()}, found.allowed[name]
        some = [rank for rank, part in parts.items() if part.any() or not many.ranks[0]["steps"][step]["sizes"]]
        if some and all(off[rank] <= allowed for rank in some):  # the other ranks may get the new weight
            parts = {rank: parts[rank] for rank in some}
        found.dealt_out += [name] if len(parts) < P else []
        found.wrong_ranks |= {rank for rank in parts if not off[rank] <= allowed}
        found.errors[name] = max(off[rank] for rank in parts)
        shown = list(parts.values())
        found.factors[name] = factors_of(shown, right, floors[name], allowed, divisors(P)[:0:-1])
        times = found.times[name] = float((shown[0] * right).sum() / (right * right).sum().clamp(min=1e-300))
        found.multiples[name] = all(distance(x, times * right, floors[name]) <= allowed * abs(times) for x in shown)
    return found


def gradients_of(one: Job, many: Job, moved: Job | None, step: int, kind: str) -> Gradients:
    """Compare the gradients of a step: before clipping (`kind` "before"), or those that the optimizer gets.

    Where the second job's optimizer is none of torch's, and sums them in its step, take those that it leaves, if they
    are right, or all of them a multiple. Gradients of a rank were not summed, or not in their place.
    """
    found = _compared(one, many, moved, step, kind)
    own_steps = {name: n for of in many.ranks for name, n in of["steps"][step]["own_steps"].items()}
    sending = [name for name, n in own_steps.items() if n]
    if own_steps and (found.wrong or sending):
        after = _compared(one, many, moved, step, "after")
        if not after.wrong or all(fits and fits != ["not_reduced"] for fits in after.factors.values()):
            return after
    if sending:
        found.unseen = f"gradients are wrong before {sending[0]}.step, which sends messages: let it sum them in .grad"
    return found
