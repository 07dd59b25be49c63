"""Two jobs beside each other: are the gradients those of the trusted one, and if not, which mistake is it?

    examine_job(one, many)    ->    Verdict("wrong", "rank 0's label ...", ["labels_per_shard"], lines)

1. Each gradient of each rank, before clipping; the norm that clipping took; the gradients after it.
2. Where all of them are right, the job is healthy. Else: are the jobs comparable at all? (weights, data, dropout)
3. The name: a factor of the gradients; what the whole numbers tell; labels beside losses; messages. Else the module.

Some ranks only may have right gradients, make new weights of them, and send these. Such a job is told by its next step.

Before: gradients.py. After: the command, __main__.py.
Source: the names are those of ../whole_models/README.md.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ring_doctor.asking.answers import CANNOT_TELL, RIGHT, SAID, WRONG_RING
from ring_doctor.asking.job import CannotExamine
from ring_doctor.jobs.gradients import LOSS, Gradients, compared, distance, dtypes_of, gradients_of
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
APART = ("mask", "cu_seq", "document", "segment", "length")  # in arguments that separate documents, or mask padding


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

    `calls` are steps in words, where each begins anew, on all ranks: whole_models/whole_model.py.
    """
    dealt: set[str] = set()  # weights that only some ranks make anew: the others must get them
    for step in range(steps):
        clips = all(of["steps"][step]["norm"] is not None for of in (*one.ranks, *many.ranks))
        found = gradients_of(one, many, moved, step, "before" if clips else "gradient")
        whole = whole_numbers(one, many, step, layout)
        wrong = [name for name, x in found.items() if x.off and (calls or len(x.off) == len(x.errors))]
        after = gradients_of(one, many, moved, step, "gradient") if clips else found
        some = [x for x in (*found.values(), *after.values()) if x.off or len(x.errors) < len(many.ranks)]
        dealt |= {x.weight for x in some}
        verdict = _drifted(many, dealt, step)
        if clips and not verdict:
            verdict = _of_clipping(one, many, found, after, step) if not wrong else _clipped_early(found, after)
        if wrong or verdict:
            if why := not_comparable(one, many, found, step) or (not calls and other_data(whole)):
                raise CannotExamine(why)
            verdict = verdict or _named(one, many, found, wrong, whole, step)
            again = f"Step {step} was right and step {step + 1} is wrong: look for state that a step leaves behind."
            verdict.lines += [again] if step and not calls else []
            verdict.says += f", {calls[step]}" if calls and calls[step] else ""
            break
    verdict = verdict or _healthy(one, many, found, whole, steps, dealt)
    verdict.lines += _table(one, many, found, whole, step)
    errors = {name: max(x.errors.values()) for name, x in found.items()}
    finite = {name: error if math.isfinite(error) else None for name, error in errors.items()}
    verdict.numbers = {"layout": whole.layout, "errors": finite, "allowed": {n: x.allowed for n, x in found.items()}}
    return verdict


def _healthy(one: Job, many: Job, found: Gradients, whole: Whole, steps: int, dealt: set[str]) -> Verdict:
    """The verdict where nothing is wrong. Raises CannotExamine where mistakes may hide."""
    coarse, which = max(x.allowed for x in found.values()), "step 1" if steps == 1 else f"steps 1 to {steps}"
    hidden = f"in {dtypes_of(one)[0]}, rounding may change a gradient by {coarse:.0%}"
    if coarse > TOO_COARSE:
        raise CannotExamine(f"nothing is wrong, but {hidden}; expected float32 or float64, or a smaller model")
    unseen = set.intersection(*(set(seen["later"]) for seen in one.ranks[0]["steps"][:steps]))
    first, last = (many.ranks[0]["steps"][step]["weights"] for step in (0, steps - 1))
    if all(first.get(name, last[name]).equal(last[name]) for name in dealt):
        unseen |= dealt
    if unseen:
        said = f"nothing is wrong at {which}, but the step of {_some(sorted(unseen))} was not seen on all ranks"
        raise CannotExamine(f"{said}: its optimizer waits, or gets wrong gradients; expected --steps {steps + 1}")
    lines = ["What the optimizer makes of them was not compared."]
    lines += [f"Mistakes may hide: {hidden}."] if coarse > COARSE else []
    if whole.cp == 1 and len(whole.rows) == len(many.ranks) * len(whole.texts) > len(whole.texts):
        lines.append("Every rank has all tokens: no sequence is shared out.")
    said = f"the gradients of {len(many.ranks)} ranks are those of the first job, at {which}"
    return Verdict(RIGHT, said, lines=lines)


def _drifted(many: Job, dealt: set[str], step: int) -> Verdict | None:
    """What is wrong where a rank did not get the weights that only others' optimizers have made."""
    first, *others = (of["steps"][step]["weights"] for of in many.ranks)
    for rank, name in ((rank, name) for rank in range(len(others)) for name in sorted(dealt) if step):
        if distance(others[rank][name], first[name]) > DRIFT:
            said = f"rank {rank + 1} has other weights than rank 0 after step {step} ({name}): only some ranks"
            return sick(f"{said} get its right gradient, and the others must get the new weight")
    return None


def not_comparable(one: Job, many: Job, found: Gradients, step: int) -> str:
    """Why another result of the second job is no mistake, or ""."""
    for name, x in found.items():
        right = one.ranks[0]["weights"][name]
        if off := [of["rank"] for of in many.ranks if distance(of["weights"][x.weight], right) > SAME]:
            said = f"rank {off[0]} of the second job begins with other weights than the first job ({name})"
            return f"{said}; expected one seed, or one checkpoint, in both"
    if any(one_pass["draws"] for seen in (*one.ranks, *many.ranks) for one_pass in passes(seen, step)):
        return "a model draws random numbers, and two jobs draw others; expected no dropout"
    dtypes, others = dtypes_of(one), dtypes_of(many)
    if (dtypes[0], dtypes[-1]) != (others[0], others[-1]):
        return f"the first job computes in {', '.join(dtypes)}, the second in {', '.join(others)}; expected the same"
    sending = max(of["steps"][step]["sending"] for of in many.ranks)
    return f"gradients are wrong before {sending}.step, which sends messages: what it sums is not seen" * bool(sending)


def _clipped_early(found: Gradients, after: Gradients) -> Verdict | None:
    """Wrong gradients before clipping that are not those of all tokens, and are summed after it."""
    early = not all(x.alike for x in found.values()) and all(x.alike for x in after.values())
    return sick(CLIPPED, "clipped_before_sum") if early else None


def _of_clipping(one: Job, many: Job, found: Gradients, after: Gradients, step: int) -> Verdict | None:
    """What is wrong where the gradients before clipping are right: the norm, or the gradients after it."""
    off = {rank for x in found.values() for rank in x.off}
    right, *norms = (of["steps"][step]["norm"] for of in (one.ranks[0], *many.ranks) if of["rank"] not in off)
    whole, *given = torch.tensor([right, *norms], dtype=torch.float64)
    slack = max(x.allowed for x in after.values())
    norm = compared("the norm", whole, dict(enumerate(given)), 0.0, slack, len(many.ranks))
    wrong = [name for name, x in after.items() if len(x.off) == len(x.errors)]
    if not norm.off and not wrong:
        return None
    said = f"the norm for clipping is {', '.join(f'{x:.4g}' for x in norms[:FEW])}, and that of the whole gradient"
    said += f" {right:.4g}" + (f"; wrong after clipping: {_some(wrong)}" if wrong else "")
    by_root = norm.factor == "times_root_p"
    return sick(said, *["gradients_over_root_p"] * by_root or ["clipped_per_rank"] * (not norm.alike))


def _named(one: Job, many: Job, found: Gradients, wrong: list[str], whole: Whole, step: int) -> Verdict:
    """The name of what is wrong with the gradients: of a factor, or of what was seen; else the first wrong module."""
    ranks = sorted({rank for name in wrong for rank in found[name].off})
    times = sorted({f"{x:.4g}" for name in wrong if (x := found[name].times) is not None})
    said = f"{len(wrong)} of {len(found)} gradients are wrong ({_some(wrong)})"
    said += f" on rank {', '.join(map(str, ranks))} only" if len(ranks) < len(many.ranks) else ""
    said += f", × {', '.join(times[:FEW])}" if times else ""
    names = {("loss_" if name == LOSS else "gradients_") + found[name].factor for name in wrong}
    if all(found[name].factor for name in wrong):
        return sick(said, *sorted(names))
    seen = told(whole) or _mean_of_means(one, many, step)
    if any(name for name, _ in seen):
        return sick("; ".join(shown for _, shown in seen), *(name for name, _ in seen if name))
    differs, where = _outputs(one, many, whole, step, max(x.allowed for x in found.values()))
    given, got = ([one_pass for of in job.ranks for one_pass in passes(of, step)] for job in (one, many))
    shard = min((len(row.tokens) for row in whole.rows), default=0)
    if differs and whole.cp > 1 and max(one_pass["sent"] for one_pass in got) < 2 * shard:
        return sick("torch.distributed sends no numbers of each token in the forward pass", "ring_not_called")
    lost = [key for p in given for key in p["whole_numbers"] if not any(key in q["whole_numbers"] for q in got)]
    for key in (key for key in lost if differs and any(word in key for word in APART)):
        return sick(f"the model gets no {key}, as that of the first job does", "documents_lost")
    return sick("; ".join([where, said, *(shown for _, shown in seen)]))


def _mean_of_means(one: Job, many: Job, step: int) -> list[tuple[str, str]]:
    """Whether each rank divides its loss by the number of its own labels: told from both."""
    right, *losses = (sum(p["loss"] for p in passes(of, step)) for of in (one.ranks[0], *many.ranks))
    counts = [sum(int((x != IGNORED).sum()) for p in passes(of, step) for x in p["labels"]) for of in many.ranks]
    mean = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / max(sum(counts), 1)
    factors = [d**sign for d in divisors(len(losses)) for sign in (1, -1)]
    if len(set(counts)) > 1 and any(abs(mean - right * f) < 1e-3 * abs(right * f) for f in factors):
        shown = ", ".join(map(str, counts[:8]))
        return [("mean_of_means", f"the ranks have {shown} labels, and each divides by its own number")]
    return []


def _outputs(one: Job, many: Job, whole: Whole, step: int, allowed: float) -> tuple[bool, str]:
    """Whether a module may have another output, on all ranks together no multiple of the right one; and the first.

    They are in the order in which their calls end. Outputs of other padding have other sums.
    """
    text, asked = (sum(len(row.tokens) for row in rows) for rows in (whole.texts, whole.rows))
    right, *others = ([*of["steps"][step]["modules"]] for of in (one.ranks[0], *many.ranks))
    if not right or (text and asked % text):
        return True, "no output was compared: no module was seen, or the jobs pad to other lengths"
    for module, x in right:
        given = sum(y for of in others for name, y in of if name == module)
        if x and given and not any(abs(given / (d * x) - 1) <= allowed for d in divisors(len(others))):
            return True, f"the first module with another output is {module}: look there, and at what computes its input"
    return False, "every module that was seen has the right output: look at a backward pass, or at the sum of ranks"


def _some(names: list[str]) -> str:
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def _table(one: Job, many: Job, found: Gradients, whole: Whole, step: int) -> list[str]:
    """What was compared: a line of each kind."""
    worst, x = max(found.items(), key=lambda of: max(of[1].errors.values()) / of[1].allowed)
    share = f"is off by {max(x.errors.values()):.1e} of its norm, rounding allows {x.allowed:.1e}"
    how = f"{whole.layout} over {whole.cp} rank{'s' * (whole.cp > 1)}" if whole.layout else "in no layout that is known"
    first, *others = ("+".join(f"{p['loss']:.6g}" for p in passes(of, step)) for of in (one.ranks[0], *many.ranks))
    return [
        f"gradients  {len(found)}; the worst, of {worst}, {share}",
        f"tokens     {sum(len(row.tokens) for row in whole.texts)}, {how}",
        f"loss       {first}; by rank {', '.join(others[:8])}",
    ]


def examine_job(one: str, many: str, *, steps: int = 1, exact: bool = False, **how: Any) -> Verdict:
    """Run two commands until step `steps`, and compare them. The first is trusted.

    `exact` spares the third run, which measures what rounding may change: both jobs compute in float64, say. Other
    options: `run_job`. Raises CannotExamine where a job fails, or where the two cannot be compared.
    """
    with tempfile.TemporaryDirectory(prefix="ring-doctor-", ignore_cleanup_errors=True) as home:
        first = run_job(one, Path(home, "one"), steps=steps, **how)
        second = run_job(many, Path(home, "many"), steps=steps, **how)
        moved = None if exact else run_job(one, Path(home, "moved"), steps=steps, move=dtypes_of(first)[0], **how)
        return compare(first, second, moved, steps)


def assert_job(one: str, many: str, **options: Any) -> None:
    """Raise AssertionError with the report unless both commands have the same gradients. Options: `examine_job`."""
    try:
        found = examine_job(one, many, **options)
    except CannotExamine as error:
        found = Verdict(CANNOT_TELL, str(error))
    if found.level != RIGHT:
        raise AssertionError(str(found))
