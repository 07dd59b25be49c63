"""Two jobs beside each other: are the gradients those of the trusted one, and if not, which mistake is it?

    examine_job(one, many)    ->    Verdict("wrong", "rank 0's label ...", ["labels_per_shard"], lines)

1. Each gradient of each rank, before clipping; the norm that clipping took; the gradients after it.
2. Where all of them are right, the job is healthy. Else: are the jobs comparable at all? (weights, data, dropout)
3. The name: a factor of the gradients; what the whole numbers tell; labels beside losses; messages. Else the module.

Some ranks only may have right gradients, make new weights of them, and send these (ZeRO-1). Such a job is refused.

Before: gradients.py. After: the command, __main__.py.
Source: the names are those of ../whole_models/README.md.
"""

import math
import tempfile
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ring_doctor.asking.answers import RIGHT, SAID, WRONG_RING
from ring_doctor.asking.job import CannotExamine
from ring_doctor.assertion import assert_healthy
from ring_doctor.jobs.gradients import LOSS, NORM, Gradients, compared, distance, dtypes_of, gradients_of
from ring_doctor.jobs.job import Job, run_job
from ring_doctor.jobs.seen import Clue, Ranks, Whole, check_data, told, whole_numbers
from ring_doctor.mistakes import words
from ring_doctor.report import explained
from ringlab.models.transformer import IGNORED

MISTAKES = words("Whole models", Path(__file__).parents[1] / "whole_models/README.md")
COARSE = 0.5  # rounding that hides most mistakes
SAME = 1e-6  # another share of what a weight and its squares add up to is another weight
NOT_SENT = "the others must get the new weights, which the doctor does not see"
CLIPPED = "the ranks have other gradients when clip_grad_norm_ is called, and the same ones at optimizer.step"
FEW = 4  # weights in a line
SEPARATE = ("mask", "cu_seq", "document", "segment", "length")  # in arguments that separate documents, or mask padding


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
        return {"level": self.level, "verdict": self.line, "mistakes": self.names, "remarks": self.lines} | self.numbers

    def __str__(self) -> str:
        lines = [self.line, *(f"  {line}" for line in self.lines)]
        return "\n".join(lines + explained([MISTAKES[name] for name in self.names if name in MISTAKES]))


def compare(one: Job, many: Job, moved: Job | None, calls: Sequence[str] = (), layout: str = "") -> Verdict:
    """The verdict about the second job. Raises CannotExamine where there is none.

    `calls` are steps in words, where each begins anew, on all ranks: whole_models/whole_model.py.
    """
    for step, kind in product(range(len(many.steps)), ("before", "gradient")):
        found, ones, ranks = gradients_of(one, many, moved, step, kind), one.steps[step], many.steps[step]
        if wrong := [name for name, x in found.items() if x.off and (calls or x.off == [*x.errors])]:
            break
        if some := [name for name, x in found.items() if len(x.errors) - len(x.off) < len(ranks)]:
            raise CannotExamine(f"only some ranks have the right gradient of {_some(some)}: {NOT_SENT}")
    whole = whole_numbers(ones, ranks, layout)
    if wrong:
        _refuse(one, many, step)
        if not calls and not all(found[name].factor for name in wrong):
            check_data(whole)
        after = gradients_of(one, many, moved, step, "gradient")
        clues = _named(ones, ranks, found, after, wrong, whole)
        when = calls[step] if calls else f"step {step} was right: look for state that it leaves behind" * (step > 0)
        verdict = Verdict(WRONG_RING, "; ".join(filter(None, [*(said for _, said in clues), when])))
        verdict.names = [name for name, _ in clues if name]
    else:
        verdict = _healthy(one, many, found, whole)
    verdict.lines += _table(ones, ranks, found, whole)
    errors = {name: max(x.errors.values()) for name, x in found.items()}
    finite = {name: error if math.isfinite(error) else None for name, error in errors.items()}
    verdict.numbers = {"layout": whole.layout, "errors": finite, "allowed": {n: x.allowed for n, x in found.items()}}
    return verdict


def _healthy(one: Job, many: Job, found: Gradients, whole: Whole) -> Verdict:
    """The verdict where nothing is wrong. Raises CannotExamine where mistakes may hide."""
    steps, P, coarse = len(many.steps), len(many.steps[0]), max(x.allowed for x in found.values())
    if coarse > COARSE:
        said = f"nothing is wrong, but in {dtypes_of(one)[0]}, rounding may change a gradient by {coarse:.0%}"
        raise CannotExamine(f"{said}; expected float32 or float64, or a smaller model")
    if set.intersection(*(ones[0]["later"] for ones in one.steps)):
        raise CannotExamine(f"nothing is wrong, but an optimizer had made no step; expected --steps {steps + 1}")
    everywhere = whole.cp == 1 and len(whole.rows) == P * len(whole.texts) > len(whole.texts)
    lines = ["Every rank has all tokens: no sequence is shared out."] if everywhere else []
    return Verdict(RIGHT, f"the gradients of {P} ranks are those of the first job, until step {steps}", lines=lines)


def _refuse(one: Job, many: Job, step: int) -> None:
    """Raise CannotExamine where another result of the second job is no mistake."""
    for (rank, of), (name, right) in product(enumerate(many.steps[0]), one.steps[0][0]["weights"].items()):
        if distance(of["weights"].get(name, right), right) > SAME:
            said = f"rank {rank} of the second job begins with other weights than the first job ({name})"
            raise CannotExamine(f"{said}; expected one seed, or one checkpoint, in both")
    if any(one_pass["draws"] for job in (one, many) for of in job.steps[step] for one_pass in of["passes"]):
        raise CannotExamine("a model draws random numbers, and two jobs draw others; expected no dropout")
    dtypes, others = dtypes_of(one), dtypes_of(many)
    if (dtypes[0], dtypes[-1]) != (others[0], others[-1]):
        said = f"the first job computes in {', '.join(dtypes)}, the second in {', '.join(others)}"
        raise CannotExamine(f"{said}; expected the same")
    if sending := max(of["sending"] for of in many.steps[step]):
        raise CannotExamine(f"gradients are wrong before {sending}.step, which sends messages: its sums are not seen")


def _named(ones: Ranks, ranks: Ranks, found: Gradients, after: Gradients, wrong: list[str], whole: Whole) -> list[Clue]:
    """The name of what is wrong: of the order of sum and clipping, a factor, what was seen; else the first module.

    `after` are the gradients that optimizers get. With NORM in `found`, those before clipping are right.
    """
    if not all(x.alike for x in found.values()) and all(after[name].alike for name in found):
        return [("clipped_before_sum", CLIPPED)]
    off = sorted({rank for name in wrong for rank in found[name].off})
    times = sorted({f"{x:.4g}" for name in wrong if (x := found[name].times) is not None})
    said = f"{len(wrong)} of {len(found)} gradients are wrong ({_some(wrong)})"
    said += f" on rank {', '.join(map(str, off))} only" if len(off) < len(ranks) else ""
    said += f", × {', '.join(times[:FEW])}" if times else ""
    if all(found[name].factor for name in wrong):
        factors = {("loss_" if name == LOSS else "gradients_") + found[name].factor for name in wrong}
        return [*((name, "") for name in sorted(factors)), ("", said)]
    if norm := found.get(NORM):
        name = (norm.factor and f"gradients_{norm.factor}") if norm.alike else "clipped_per_rank"
        return [(name, f"clipping spoils right gradients; {said}")]
    clues = [*told(whole), *_mean_of_means(ones, ranks)]
    if any(name for name, _ in clues):
        return clues
    differs, where = _outputs(ones, ranks, whole, max(x.allowed for x in found.values()))
    shard = min((len(row.tokens) for row in whole.rows), default=0)
    if differs and whole.cp > 1 and all(p["sent"] < 2 * shard for of in ranks for p in of["passes"]):
        return [("ring_not_called", "torch.distributed sends no numbers of each token in the forward pass")]
    given, got = ({key for of in job for p in of["passes"] for key in ChainMap(*p["calls"])} for job in (ones, ranks))
    for key in sorted(given - got):
        if differs and any(word in key for word in SEPARATE):
            return [("documents_lost", f"the model gets no {key}, as that of the first job does")]
    return [("", where), ("", said), *clues]


def _mean_of_means(ones: Ranks, ranks: Ranks) -> list[Clue]:
    """Whether each rank divides its loss by the number of its own labels: told from both."""
    right, *losses = (sum(p["loss"] for p in of["passes"]) for of in (ones[0], *ranks))
    counts = [sum(int((x != IGNORED).sum()) for p in of["passes"] for x in p["labels"]) for of in ranks]
    parts = torch.tensor(counts) * torch.tensor(losses, dtype=torch.float64) / max(sum(counts), 1)
    mean = compared("the loss", torch.tensor(right, dtype=torch.float64), dict(enumerate(parts)), 0.0, 1e-3, len(ranks))
    said = f"the ranks have {', '.join(map(str, counts[:8]))} labels, and each divides by its own number"
    return [("mean_of_means", said)] if len(set(counts)) > 1 and mean.summed else []


def _outputs(ones: Ranks, ranks: Ranks, whole: Whole, allowed: float) -> tuple[bool, str]:
    """Whether a module may have another output, on all ranks together no multiple of the right one; and the first.

    They are in the order in which their calls end. Outputs of other padding have other sums.
    """
    text, asked = (sum(len(row.tokens) for row in rows) for rows in (whole.texts, whole.rows))
    right, *others = (of["modules"] for of in (ones[0], *ranks))
    if not right.keys() & set().union(*others) or (text and asked % text):
        return True, "no output was compared: no module was seen in both, or the jobs pad to other lengths"
    for module, x in right.items():
        parts = {rank: of[module] for rank, of in enumerate(others) if module in of}
        if x and parts and not compared(module, x, parts, 0.0, allowed, len(ranks)).summed:
            return True, f"the first module with another output is {module}: look there, and at what computes its input"
    return False, "every module that was seen has the right output: look at a backward pass, or at the sum of ranks"


def _some(names: list[str]) -> str:
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def _table(ones: Ranks, ranks: Ranks, found: Gradients, whole: Whole) -> list[str]:
    """What was compared: a line of each kind."""
    worst, x = max(found.items(), key=lambda of: max(of[1].errors.values()) / of[1].allowed)
    share = f"is off by {max(x.errors.values()):.1e} of its norm, rounding allows {x.allowed:.1e}"
    how = f"{whole.layout} over {whole.cp} rank{'s' * (whole.cp > 1)}" if whole.layout else "no known layout"
    first, *others = ("+".join(f"{p['loss']:.6g}" for p in of["passes"]) for of in (ones[0], *ranks))
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
        first = run_job(one, Path(home, "first"), steps=steps, **how)
        second = run_job(many, Path(home, "second"), steps=steps, **how)
        moved = None if exact else run_job(one, Path(home, "moved"), steps=steps, move=dtypes_of(first)[0], **how)
        return compare(first, second, moved)


def assert_job(one: str, many: str, **options: Any) -> None:
    """Raise AssertionError with the report unless both commands have the same gradients. Options: `examine_job`."""
    assert_healthy(examine_job, one, many, **options)
