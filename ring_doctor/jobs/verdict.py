"""Two jobs beside each other: are the gradients those of the trusted one, and if not, which mistake is it?

    examine_job(one, many)    ->    Verdict("wrong", "rank 0's label ...", ["labels_per_shard"], lines)

1. Each gradient of each rank, before clipping; the norm that clipping took; the gradients after it.
2. Where all of them are right, the job is healthy. Else: are the jobs comparable at all? (weights, data, dropout)
3. The name: a factor of the gradients; what the whole numbers tell; labels beside losses; messages. Else the module.

Before: gradients.py. After: the command, __main__.py.
Source: the names are those of ../whole_models/README.md.
"""

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ring_doctor.asking.answers import CANNOT_TELL, RIGHT, SAID, WRONG_RING
from ring_doctor.asking.job import CannotExamine
from ring_doctor.jobs.gradients import TERMS, UNITS, Gradients, distance, dtypes_of, eps_of, factors_of, gradients_of
from ring_doctor.jobs.job import Job, run_job
from ring_doctor.jobs.seen import Whole, divisors, labels_of, other_data, passes, told, whole_numbers
from ring_doctor.mistakes import words
from ring_doctor.report import explained
from ringlab.models.transformer import IGNORED

MISTAKES = words("Whole models", Path(__file__).parents[1] / "whole_models/README.md")
COARSE, TOO_COARSE = 0.05, 0.5  # rounding that hides mistakes, and that hides most
SAME = 1e-6  # another share of what a weight and its squares add up to is another weight
FEW = 4  # weights in a line
APART = re.compile(r"mask|cu_seq|document|segment|length")  # arguments that separate documents, or mask padding


@dataclass
class Verdict:
    """What is told of two jobs."""

    level: str
    says: str  # after the names
    names: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The first one of the report."""
        return f"{SAID[self.level]}: {'; '.join(filter(None, [' and '.join(self.names), self.says]))}"

    def as_json(self) -> dict[str, Any]:
        """The verdict for other programs."""
        said = {"level": self.level, "verdict": self.line, "mistakes": self.names, "remarks": self.lines}
        return said | self.numbers

    def __str__(self) -> str:
        lines = [self.line, *(f"  {line}" for line in self.lines)]
        return "\n".join(lines + explained([MISTAKES[name] for name in self.names if name in MISTAKES]))


def sick(says: str, *names: str) -> Verdict:
    return Verdict(WRONG_RING, says, list(names))


def compare(one: Job, many: Job, moved: Job | None, steps: int, calls: Sequence[str] = (), layout: str = "") -> Verdict:
    """The verdict about the second job. Raises CannotExamine where there is none.

    `calls` are steps in words, where each begins anew: whole_models/whole_model.py.
    """
    verdict, of_loss, read, sent = None, None, set[str](), dict[str, bool]()
    for step in range(steps):
        clip = [of["steps"][step]["norm"] is not None for of in (*one.ranks, *many.ranks)]
        kind = "gradient" if any(clip) and not all(clip) else "before"  # one of the jobs clips in another way
        found, whole = gradients_of(one, many, moved, step, kind), whole_numbers(one, many, step, layout)
        read |= found.errors.keys()
        if not found.errors:
            raise CannotExamine(f"no weight had a gradient in step {step + 1}: {one.command}")
        data = "" if calls else other_data(whole)
        if found.wrong and (why := not_comparable(one, many, found, step) or data or found.unseen):
            raise CannotExamine(why)
        verdict = sick(not_sent) if (not_sent := found.not_sent(many, step, sent)) else None
        verdict = verdict or (_named(one, many, found, whole, step) if found.wrong else None)
        verdict = verdict or (_of_clipping(one, many, moved, step) if all(clip) else None)
        of_loss = of_loss or _of_reported(one, many, moved, step, max(found.allowed.values()))
        if verdict:
            after = f"Step {step} was right and step {step + 1} is wrong: look for state that a step leaves behind."
            verdict.says += f", {calls[step]}" if calls and calls[step] else ""
            verdict.lines += [after] if step and not calls else []
            break
    if verdict and of_loss:
        verdict.names += of_loss.names
    if not verdict and not of_loss:
        coarse, which = max(found.allowed.values()), "step 1" if steps == 1 else f"steps 1 to {steps}"
        hidden = f"in {dtypes_of(one)[0]}, rounding may change a gradient by {coarse:.0%}"
        if coarse > (COARSE if calls else TOO_COARSE):  # a function can be asked in float64
            raise CannotExamine(f"nothing is wrong, but {hidden}; expected float32 or float64, or a smaller model")
        seen = [of["steps"][n] for of in one.ranks for n in range(steps)]
        later = set.intersection(*(set(at["later"]) for at in seen))
        hides = f"the optimizer of {_some(sorted(later))} made no step until then" if later else ""
        if still := [name for name, changed in sent.items() if not changed]:
            hides = f"only some ranks' optimizers have a gradient of {_some(still)}, and no change reached the others"
        if hides:
            raise CannotExamine(f"nothing is wrong at {which}, but {hides}; expected --steps {steps + 1}, or more")
        said = f"the gradients of {len(many.ranks)} ranks are those of the first job, at {which}"
        verdict = Verdict(RIGHT, said, lines=["What the optimizer makes of them was not compared."])
        if left := {name for at in seen for name in at["left"]} - read:
            verdict.lines.append(f"No optimizer used the gradients of {_some(sorted(left))}: not compared.")
        verdict.lines += [f"Mistakes may hide: {hidden}."] if coarse > COARSE else []
        copies = [len({n for n, _ in at}) == len(whole.text) for at in whole.at] if whole.cp == 1 else [False]
        verdict.lines += ["Every rank has all tokens: no sequence is shared out."] if all(copies) and copies[1:] else []
    verdict = verdict or of_loss
    assert verdict
    verdict.lines += _table(one, many, found, whole, step)
    finite = {name: x if math.isfinite(x) else None for name, x in found.errors.items()}
    verdict.numbers = {"layout": whole.layout, "errors": finite, "allowed": found.allowed}
    return verdict


def _of_reported(one: Job, many: Job, moved: Job | None, step: int, allowed: float) -> Verdict | None:
    """What is wrong with the reported loss, where it is known: of a job that is made of a step."""
    right, near, *given = (of["steps"][step]["reported"] for of in (one.ranks[0], (moved or one).ranks[0], *many.ranks))
    if right is None or not math.isfinite(right):
        return None
    allowed = max(allowed, TERMS * eps_of(dtypes_of(one)[0]), UNITS * abs(near / (right or 1.0) - 1))
    wanted, *parts = torch.tensor([right, *given], dtype=torch.float64)
    factors = [factor for factor in factors_of(parts, wanted, 0.0, allowed, [len(parts)]) if "root" not in factor]
    if "" in factors:
        return None
    said = f"the reported loss is {', '.join(f'{loss:.6g}' for loss in given)}, the right one {right:.6g}"
    return sick(said, *(f"loss_{factor}" for factor in factors[:1]))


def not_comparable(one: Job, many: Job, found: Gradients, step: int) -> str:
    """Why another result of the second job is no mistake, or ""."""
    for name, other in found.pairs:
        right, sums = one.ranks[0]["weights"][name], [of["weights"].get(other) for of in many.ranks]
        off = [x is not None and right is not None and distance(x, right) > SAME for x in sums]
        if any(off):
            said = f"rank {off.index(True)} of the second job begins with other weights than the first job ({name})"
            return f"{said}; expected one seed, or one checkpoint, in both"
    for job, which in ((one, "first"), (many, "second")):
        if any(one_pass["draws"] for seen in job.ranks for one_pass in passes(seen, step)):
            return f"the model of the {which} job draws random numbers, and two jobs draw others; expected no dropout"
    if dtypes_of(one)[-1] != dtypes_of(many)[-1]:
        return f"the first job computes in {', '.join(dtypes_of(one))}, the second in {', '.join(dtypes_of(many))}"
    return ""


def _of_clipping(one: Job, many: Job, moved: Job | None, step: int) -> Verdict | None:
    """What is wrong where all gradients are right before clipping."""
    right, *norms = (seen["steps"][step]["norm"] for seen in (one.ranks[0], *many.ranks))
    after = gradients_of(one, many, moved, step, "gradient")
    slack = max(after.allowed.values())
    if not after.wrong and all(abs(norm / right - 1) <= slack for norm in norms):
        return None
    shown = ", ".join(f"{norm:.4g}" for norm in norms[:FEW])
    shown = f"the norm for clipping is {shown}, and that of the whole gradient {right:.4g}"
    if any(abs(norm / norms[0] - 1) > slack for norm in norms):
        return sick(shown, "clipped_per_rank")
    if any(abs(norms[0] / right / math.sqrt(d) - 1) <= slack for d in divisors(len(many.ranks))[1:]):
        return sick(shown, "gradients_over_root_p")
    return sick(f"wrong after clipping only: {_some(after.wrong) or 'the norm'}; {shown}")


def _named(one: Job, many: Job, found: Gradients, whole: Whole, step: int) -> Verdict:
    """The name of what is wrong with the gradients, or where they begin to be wrong."""
    wrong = found.wrong
    if bad := [name for name in wrong if not math.isfinite(found.errors[name])]:
        return sick(f"the gradient of {bad[0]} is not finite: look for 0/0, and for a query that sees no key")
    if all(found.factors[name] for name in wrong):
        common = [f for f in found.factors[wrong[0]] if all(f in fits for fits in found.factors.values())]
        names = [f"gradients_{factor}" for factor in common[:1] or sorted({found.factors[name][0] for name in wrong})]
        some = "all weights" if common else f"{len(wrong)} of {len(found.errors)} weights, {_some(wrong)}"
        times = ", ".join(sorted({f"{found.times[name]:.4g}" for name in wrong})[:FEW])
        return sick(some + ("" if "gradients_not_reduced" in names else f", × {times}"), *names)
    seen = told(whole) or _mean_of_means(one, many, step)
    none = [name for name in wrong if found.multiples[name] and not found.times[name]]
    if not seen and not none and all(found.multiples.values()):
        times = ", ".join(sorted({f"{x:.4g}" for x in found.times.values()})[:FEW])
        return sick(f"every gradient is {times} times the right one: look at what divides the loss, and at clipping")
    if not seen and eps_of(narrow := dtypes_of(many)[0]) > eps_of(dtypes_of(one)[0]):
        raise CannotExamine(f"only the second job computes in {narrow}; expected the same dtypes, or autocast, in both")
    where = _first_module(one, many, whole, step, max(found.allowed.values()))
    sent = max((n for of in many.ranks for one_pass in passes(of, step) for _, n in one_pass["messages"]), default=0)
    shard = min((len(row.tokens) for rows in whole.ranks for row in rows), default=0)
    compiles = any(of["steps"][step]["compiles"] for of in many.ranks)  # then messages may be in a graph
    if where and whole.cp > 1 and sent < 2 * shard and not compiles:
        seen.append(("ring_not_called", "torch.distributed sends no numbers of each token in the forward pass"))
    if where and not seen and (lost := [key for key in _lost(one, many, step) if APART.search(key)]):
        seen.append(("documents_lost", f"the model gets no {lost[0]}, as that of the first job does"))
    if seen:
        return sick("; ".join(shown for _, shown in seen), *(name for name, _ in seen))
    said = _located(one, many, found, step)
    if where:
        return sick(f"{where}; {said}")
    if none:
        return sick(f"{_some(none)} has no gradient in the second job (is it frozen, or in no optimizer?); {said}")
    modules = [module for module, _ in reversed(one.ranks[0]["steps"][step]["modules"])]
    leaves = [at for at in modules if not any(name.startswith(f"{at}.") for name in modules)]
    met = [name for module in leaves for name in wrong if name.rpartition(".")[0] == module]
    for name in (met if wrong[1:] else wrong)[:1]:
        said += f"; a backward pass meets {name} first: look at the backward of what uses it, and of what comes after"
    return sick(f"{'every module that was seen has the right output' if modules else 'no module was seen'}; {said}")


def _located(one: Job, many: Job, found: Gradients, step: int) -> str:
    """Which gradients are wrong, on which ranks, by how much, and what the model of the second job does not get."""
    wrong, ranks = found.wrong, ", ".join(map(str, sorted(found.wrong_ranks)))
    only = f" on rank {ranks} only" if len(found.wrong_ranks) < len(many.ranks) else ""
    said = [f"{len(wrong)} of {len(found.errors)} gradients are wrong{only} ({_some(wrong)})"]
    if scaled := [name for name in wrong if found.factors[name]]:
        said.append(f"{len(scaled)} of them by gradients_{found.factors[scaled[0]][0]} only ({_some(scaled)})")
    largest, least = max(found.errors.values()), eps_of(dtypes_of(one)[0])
    units = ((dtype, eps_of(dtype)) for dtype in ("float32", "float16", "bfloat16"))
    casts = [dtype for dtype, eps in units if least < eps and eps / 16 < largest < 4 * eps]
    said += [f"rounding to {dtype} moves them as far: look for a cast" for dtype in casts[:1]]
    said += [f"the model gets no {key}, as that of the first job does" for key in _lost(one, many, step)[:1]]
    return "; ".join(said)


def _lost(one: Job, many: Job, step: int) -> list[str]:
    """The arguments with whole numbers that the model of the first job gets, and that of the second does not."""
    got = {key for seen in many.ranks for p in passes(seen, step) for key in p["whole_numbers"]}
    lost = [key for p in passes(one.ranks[0], step) for key in p["whole_numbers"] if key not in got]
    return [key for key in lost if "'" not in key and "embedding" not in key]  # those are of other passes


def _mean_of_means(one: Job, many: Job, step: int) -> list[tuple[str, str]]:
    """Whether each rank, or each pass, divides its loss by the number of its own labels: told from both."""
    trusted = passes(one.ranks[0], step)
    parts = [
        [(sum(int((x != IGNORED).sum()) for x in labels_of(p, trusted)), p["loss"]) for p in passes(of, step)]
        for of in many.ranks
    ]
    by_rank = [tuple(map(sum, zip(*of, strict=True))) for of in parts if of]
    right = sum(p["loss"] for p in trusted)
    for who, pairs in (("ranks", by_rank), ("passes", [pair for of in parts for pair in of])):
        counts = [n for n, _ in pairs]
        mean = sum(n * loss for n, loss in pairs) / max(sum(counts), 1)
        factors = [d**sign for d in divisors(len(pairs) or 1) for sign in (1, -1)]
        if len(set(counts)) > 1 and any(abs(mean - right * f) < 1e-3 * abs(right * f) for f in factors):
            shown = ", ".join(map(str, counts[:8]))
            return [("mean_of_means", f"the {who} have {shown} labels, and each divides by its own number")]
    return []


def _first_module(one: Job, many: Job, whole: Whole, step: int, allowed: float) -> str:
    """The first module, by the end of its call, whose outputs on all ranks together are no multiple of the right."""
    text, asked = (sum(len(x.tokens) for x in of) for of in (whole.text, [x for of in whole.ranks for x in of]))
    if text and asked % text:
        return f"the jobs pad to other lengths ({text} and {asked} tokens), so outputs of modules were not compared"
    sums: dict[str, float] = {}
    for seen in many.ranks:
        for name, x in seen["steps"][step]["modules"]:
            sums[name] = sums.get(name, 0.0) + x
    for name, x in one.ranks[0]["steps"][step]["modules"]:
        if name in sums and x and all(abs(sums[name] / (d * x) - 1) > allowed for d in divisors(len(many.ranks))):
            return f"the first module with another output is {name}: look there, and at what computes its input"
    return ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def _table(one: Job, many: Job, found: Gradients, whole: Whole, step: int) -> list[str]:
    """What was compared: a line of each kind."""
    worst = max(found.errors, key=lambda name: found.errors[name] / found.allowed[name])
    error, allowed = found.errors[worst], found.allowed[worst]
    share = f"the worst, of {worst}, is off by {error:.1e} of its norm, rounding allows {allowed:.1e}"
    how = "none was seen: no embedding was called outside of a compiled graph"
    if whole.text:
        shards = f"{whole.layout} over {whole.cp} ranks" if whole.cp > 1 else "whole sequences"
        count = sum(len(row.tokens) for row in whole.text)
        how = f"{count}, {shards if whole.layout else 'in no layout that is known'}"
    first, *others = ("+".join(f"{p['loss']:.6g}" for p in passes(of, step)) for of in (one.ranks[0], *many.ranks))
    lines = [f"gradients  {len(found.errors)}; {share}", f"tokens     {how}"]
    return lines + ([f"loss       {first}; by rank {', '.join(others[:8])}"] if first else [])


def examine_job(
    one: str,
    many: str,
    *,
    steps: int = 1,
    exact: bool = False,
    seconds: float = 600.0,
    progress: Callable[[str], None] = lambda words: None,
) -> Verdict:
    """Run two commands until step `steps`, and compare them. The first is trusted.

    `exact` spares the third run, which measures what rounding may change: both jobs compute in float64, say. A run may
    take `seconds`. Raises CannotExamine where a job fails, or where the two cannot be compared.
    """
    with tempfile.TemporaryDirectory(prefix="ring-doctor-", ignore_cleanup_errors=True) as home:
        how: dict[str, Any] = {"steps": steps, "seconds": seconds, "tell": progress}
        first = run_job(one, Path(home, "one"), **how)
        second = run_job(many, Path(home, "many"), **how)
        moved = None if exact else run_job(one, Path(home, "moved"), **how, move=dtypes_of(first)[0])
        return compare(first, second, moved, steps)


def assert_job(one: str, many: str, **options: Any) -> None:
    """Raise AssertionError with the report unless both commands have the same gradients. Options: `examine_job`."""
    try:
        found = examine_job(one, many, **options)
    except CannotExamine as error:
        raise AssertionError(f"{SAID[CANNOT_TELL]}: {error}") from None
    if found.level != RIGHT:
        raise AssertionError(str(found))
