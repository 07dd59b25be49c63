"""Two jobs beside each other: are the gradients those of the trusted one, and if not, which mistake is it?

    examine_job(one, many)    ->    Verdict("wrong", "rank 0's label ...", ["labels_per_shard"], lines)

1. Each gradient of each rank, before clipping; the norm that clipping took; the gradients after it.
2. Where all of them are right, the job is healthy. Else: are the jobs comparable at all? (weights, data, dropout)
3. The name: a factor of the gradients; what the whole numbers tell; labels beside losses; messages. Else the module.

Before: gradients.py. After: the command, __main__.py.
Source: the names are those of ../whole_models/README.md.
"""

import math
import operator
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ring_doctor.asking.answers import CANNOT_TELL, RIGHT, SAID, WRONG_RING
from ring_doctor.asking.job import CannotExamine
from ring_doctor.jobs.gradients import LOSS, Gradients, distance, dtypes_of, eps_of, gradients_of
from ring_doctor.jobs.job import Job, run_job
from ring_doctor.jobs.seen import Whole, divisors, other_data, passes, told, whole_numbers
from ring_doctor.mistakes import words
from ring_doctor.report import explained
from ringlab.models.transformer import IGNORED

MISTAKES = words("Whole models", Path(__file__).parents[1] / "whole_models/README.md")
COARSE, TOO_COARSE = 0.05, 0.5  # rounding that hides mistakes, and that hides most
DRIFT = 1e-12  # another share of it is another weight of one job: weights that were sent are alike to the last digit
SAME = 1e-6  # another share of what a weight and its squares add up to is another weight
CLIPPED = "the ranks have other gradients when clip_grad_norm_ is called, and the same ones at optimizer.step"
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
    verdict, of_loss = None, None
    dealt: set[str] = set()  # weights that only some ranks' optimizers make anew
    for step in range(steps):
        clip = [of["steps"][step]["norm"] is not None for of in (*one.ranks, *many.ranks)]
        kind = "gradient" if any(clip) and not all(clip) else "before"  # one of the jobs clips in another way
        found, whole = gradients_of(one, many, moved, step, kind), whole_numbers(one, many, step, layout)
        if not found.errors:
            raise CannotExamine(f"no weight had a gradient in step {step + 1}: {one.command}")
        owned, ranks = [set(of["steps"][step]["owned"]) for of in many.ranks], found.right_ranks
        dealt |= set.union(*owned) - set.intersection(*owned)
        if found.wrong and ranks and not calls:  # these may send the new weights
            dealt |= {other for name, other in found.pairs if name in found.wrong}
            found = gradients_of(one, many, moved, step, kind, ranks)
        if drifted := _drifted(many, dealt, step):
            if not found.wrong:
                raise CannotExamine(drifted)
            verdict = sick(drifted)
        elif found.wrong:
            if why := not_comparable(one, many, found, step) or ("" if calls else other_data(whole)):
                raise CannotExamine(why)
            summed = all(clip) and not found.alike and gradients_of(one, many, moved, step, "gradient").alike
            verdict = sick(CLIPPED, "clipped_before_sum") if summed else _named(one, many, found, whole, step)
        elif all(clip):
            verdict = _of_clipping(one, many, moved, step, ranks)
        of_loss = of_loss or _of_reported(one, many, found, step)
        if verdict:
            after = f"Step {step} was right and step {step + 1} is wrong: look for state that a step leaves behind."
            verdict.says += f", {calls[step]}" if calls and calls[step] else ""
            verdict.lines += [after] if step and not calls else []
            verdict.names += of_loss.names if of_loss else []
            break
    verdict = verdict or of_loss or _healthy(one, many, found, whole, steps, dealt)
    verdict.lines += _table(one, many, found, whole, step)
    finite = {name: x if math.isfinite(x) else None for name, x in found.errors.items()}
    verdict.numbers = {"layout": whole.layout, "errors": finite, "allowed": found.allowed}
    return verdict


def _healthy(one: Job, many: Job, found: Gradients, whole: Whole, steps: int, dealt: set[str]) -> Verdict:
    """The verdict where nothing is wrong. Raises CannotExamine where mistakes may hide."""
    coarse, which = max(found.allowed.values()), "step 1" if steps == 1 else f"steps 1 to {steps}"
    hidden = f"in {dtypes_of(one)[0]}, rounding may change a gradient by {coarse:.0%}"
    if coarse > TOO_COARSE:
        raise CannotExamine(f"nothing is wrong, but {hidden}; expected float32 or float64, or a smaller model")
    later = set.intersection(*(set(seen["later"]) for seen in one.ranks[0]["steps"][:steps]))
    first, last = (many.ranks[0]["steps"][step]["weights"] for step in (0, steps - 1))
    hides = f"the optimizer of {_some(sorted(later))} made no step until then" if later else ""
    if dealt and all(first.get(name, last[name]).equal(last[name]) for name in dealt):
        hides = f"only some ranks' optimizers get the right gradients of {_some(sorted(dealt))}"
        hides += ", and the others must get the new weights"
    if hides:
        raise CannotExamine(f"nothing is wrong at {which}, but {hides}; expected --steps {steps + 1}, or more")
    said = f"the gradients of {len(many.ranks)} ranks are those of the first job, at {which}"
    lines = ["What the optimizer makes of them was not compared."]
    lines += [f"Mistakes may hide: {hidden}."] if coarse > COARSE else []
    has_all = len(whole.at) > 1 and all(len({n for n, _ in at}) == len(whole.text) for at in whole.at)
    lines += ["Every rank has all tokens: no sequence is shared out."] if whole.cp == 1 and has_all else []
    return Verdict(RIGHT, said, lines=lines)


def _drifted(many: Job, dealt: set[str], step: int) -> str:
    """What is said where a rank did not get the weights that only others' optimizers have made, or ""."""
    first, *others = (of["steps"][step]["weights"] for of in many.ranks)
    for rank, name in ((r, name) for r, of in enumerate(others, start=1) for name in sorted(dealt) if step):
        if distance(others[rank - 1][name], first[name]) > DRIFT:
            said = f"rank {rank} has other weights than rank 0 after step {step} ({name})"
            return f"{said}: only some ranks' optimizers get its right gradient, and the others must get the new weight"
    return ""


def _of_reported(one: Job, many: Job, found: Gradients, step: int) -> Verdict | None:
    """What is wrong with the reported loss, where it is known: of a job that is made of a function."""
    if LOSS not in found.factors or "" in found.factors[LOSS]:
        return None
    right, *given = (job.tensor("before", step, LOSS, of["rank"]) for job in (one, many) for of in job.ranks)
    said = f"the reported loss is {', '.join(f'{loss:.6g}' for loss in given)}, the right one {right:.6g}"
    return sick(said, *[f"loss_{factor}" for factor in found.factors[LOSS] if "root" not in factor][:1])


def not_comparable(one: Job, many: Job, found: Gradients, step: int) -> str:
    """Why another result of the second job is no mistake, or ""."""
    for name, other in found.pairs:
        right = one.ranks[0]["weights"][name]
        if off := [of["rank"] for of in many.ranks if distance(of["weights"][other], right) > SAME]:
            said = f"rank {off[0]} of the second job begins with other weights than the first job ({name})"
            return f"{said}; expected one seed, or one checkpoint, in both"
    for job, which in ((one, "first"), (many, "second")):
        if any(one_pass["draws"] for seen in job.ranks for one_pass in passes(seen, step)):
            return f"the model of the {which} job draws random numbers, and two jobs draw others; expected no dropout"
    dtypes, others = dtypes_of(one), dtypes_of(many)
    if (dtypes[0], dtypes[-1]) != (others[0], others[-1]):
        return f"the first job computes in {', '.join(dtypes)}, the second in {', '.join(others)}; expected the same"
    sending = max(of["steps"][step]["sending"] for of in many.ranks)
    return f"gradients are wrong before {sending}.step, which sends messages: what it sums is not seen" * bool(sending)


def _of_clipping(one: Job, many: Job, moved: Job | None, step: int, ranks: list[int]) -> Verdict | None:
    """What is wrong where all gradients are right before clipping."""
    right, *norms = (seen["steps"][step]["norm"] for seen in (one.ranks[0], *map(many.ranks.__getitem__, ranks)))
    after = gradients_of(one, many, moved, step, "gradient", ranks)
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
    """The name of what is wrong with the gradients, by factors and whole numbers; else where they begin to be wrong."""
    wrong, weights = found.wrong, list(found.errors)
    times = ", ".join(sorted({f"{x:.4g}" for name in wrong if (x := found.times[name]) is not None})[:FEW])
    if all(found.factors[name] for name in wrong):
        common = [f for f in found.factors[wrong[0]] if all(f in found.factors[name] for name in weights)]
        names = [f"gradients_{factor}" for factor in common[:1] or sorted({found.factors[name][0] for name in wrong})]
        some = "all weights" if common else f"{len(wrong)} of {len(weights)} weights, {_some(wrong)}"
        return sick(some + (f", × {times}" if times else ""), *names)
    if seen := told(whole) or _mean_of_means(one, many, step):
        return sick("; ".join(shown for _, shown in seen), *(name for name, _ in seen))
    if all(found.times[name] for name in weights):
        return sick(f"every gradient is {times} times the right one: look at what divides the loss, and at clipping")
    return _located(one, many, found, whole, step)


def _located(one: Job, many: Job, found: Gradients, whole: Whole, step: int) -> Verdict:
    """The first module that is wrong, and what its input or the messages tell; else which gradients are wrong."""
    of_ranks = [one_pass for of in many.ranks for one_pass in passes(of, step)]
    differs, where = _outputs(one, many, whole, step, max(found.allowed.values()))
    shard = min((len(row.tokens) for rows in whole.ranks for row in rows), default=0)
    if differs and whole.cp > 1 and max(one_pass["sent"] for one_pass in of_ranks) < 2 * shard:
        return sick("torch.distributed sends no numbers of each token in the forward pass", "ring_not_called")
    got = {key for one_pass in of_ranks for key in one_pass["whole_numbers"]}
    given = [key for one_pass in passes(one.ranks[0], step) for key in one_pass["whole_numbers"]]
    lost = [key for key in dict.fromkeys(given) if key not in got and not key.startswith("embedding")]
    for key in filter(APART.search, lost if differs else ()):
        return sick(f"the model gets no {key}, as that of the first job does", "documents_lost")
    wrong, ranks = found.wrong, ", ".join(map(str, sorted(found.wrong_ranks)))
    only = f" on rank {ranks} only" if len(found.wrong_ranks) < len(many.ranks) else ""
    says = [where, f"{len(wrong)} of {len(found.errors)} gradients are wrong{only} ({_some(wrong)})"]
    if frozen := [name for name in wrong if found.times[name] == 0]:
        says.append(f"{_some(frozen)} has no gradient in the second job (is it frozen, or in no optimizer?)")
    largest, least = max(found.errors[name] for name in wrong), eps_of(dtypes_of(one)[0])
    units = {dtype: eps_of(dtype) for dtype in ("float32", "float16", "bfloat16")}
    casts = [dtype for dtype, eps in units.items() if least < eps and eps / 16 < largest < 4 * eps]
    says += [f"rounding to {dtype} moves them as far: look for a cast" for dtype in casts[:1]]
    says += [f"the model gets no {key}, as that of the first job does" for key in lost[:1]]
    return sick("; ".join(says))


def _mean_of_means(one: Job, many: Job, step: int) -> list[tuple[str, str]]:
    """Whether each rank, or each pass, divides its loss by the number of its own labels: told from both."""
    right = sum(p["loss"] for p in passes(one.ranks[0], step))
    ranks = [passes(of, step) for of in many.ranks]
    for who, parts in (("ranks", ranks), ("passes", [[p] for of in ranks for p in of])):
        counts = [sum(int((x != IGNORED).sum()) for p in part for x in p["labels"]) for part in parts]
        losses = [sum(p["loss"] for p in part) for part in parts]
        mean = sum(map(operator.mul, counts, losses)) / max(sum(counts), 1)
        factors = [d**sign for d in divisors(len(parts) or 1) for sign in (1, -1)]
        if len(set(counts)) > 1 and any(abs(mean - right * f) < 1e-3 * abs(right * f) for f in factors):
            shown = ", ".join(map(str, counts[:8]))
            return [("mean_of_means", f"the {who} have {shown} labels, and each divides by its own number")]
    return []


def _outputs(one: Job, many: Job, whole: Whole, step: int, allowed: float) -> tuple[bool, str]:
    """Whether a module has another output, on all ranks together no multiple of the right one; and which is the first.

    They are in the order in which their calls end.
    """
    text, asked = (sum(len(x.tokens) for x in of) for of in (whole.text, [x for of in whole.ranks for x in of]))
    if text and asked % text:
        return (
            True,
            f"the jobs pad to other lengths ({text} and {asked} tokens), so outputs of modules were not compared",
        )
    sums: dict[str, float] = {}
    for name, x in (output for of in many.ranks for output in of["steps"][step]["modules"]):
        sums[name] = sums.get(name, 0.0) + x
    modules = one.ranks[0]["steps"][step]["modules"]
    for name, x in modules:
        if name in sums and x and not any(abs(sums[name] / (d * x) - 1) <= allowed for d in divisors(len(many.ranks))):
            return True, f"the first module with another output is {name}: look there, and at what computes its input"
    right = "every module that was seen has the right output: look at a backward pass, or at the sum over the ranks"
    return False, right if modules else "no module was seen"


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
    return lines + ([f"loss       {first}; by rank {', '.join(others[:8])}"] if first not in ("", "0") else [])


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
