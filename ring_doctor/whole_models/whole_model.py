"""Mistakes of whole models in a ring, which no examination of an attention alone can find, by name.

    expected mistake  =  the same function on one process, called with the wrong positions, labels or tokens

You give a function that runs your model once. Every rank calls it with the same text, and shards it itself:

    def step(text, *, positions=None, targets=None):
        tokens, labels, at = my_shards(text)        # of this rank; everything below is yours
        ...
        return loss, gradients

`loss` is the loss that you report (no dimensions), or the loss of each token of this rank (B, C). `gradients` is a
dict: the name of a weight and its gradient, as the optimizer would get it (DTensors are gathered here). The two
keywords are optional. If your function takes them, it must obey them:
    targets (B, S)    the labels of the whole text, in place of text[:, 1:]; shard them. -100 is a token without a loss
    positions (S,)    what the model takes for the positions of its tokens. Given on one process only
Without targets every token has a label, and the doctor names wrong factors, and a ring that is not called in contiguous
chunks. If the step clips, let it clip to a small norm, so that every call is clipped; or return what the clipping gets.

The doctor calls the function on 1 process, where no ring can be wrong, and on 2, 3 and 4. Then it asks the function
itself, on 1 process, what it would return with a mistake. That is the diagnosis when loss and gradients are equal.

    text_of_model(found)        what a terminal shows; the first line is the verdict
    json_of_model(found)        the same for other programs, with the keys of an attention's report

What it cannot see, by design:
- One process is the judge. A model that is wrong there too (rotary of keys only, on every number of ranks) looks right.
- Dropout: other processes draw other masks, so nothing can be compared.
- One step of a short text: not the optimizer, accumulated gradients, saved checkpoints, nor the tiles of a kernel.
- In 16 bits rounding hides mistakes: a step must compute in float64, or with few weights in float32.

Shapes: text (B, S + 1), tokens and labels (B, S), the same on every rank. Rank r has C of the S tokens: those at
`ringlab.positions(layout, S, r, P)`. All else is what your function makes of them.

Before: model_clues.py, and report.py, an attention. After: the command, __main__.py.
Source: Liu et al. 2024, appendix A.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_doctor.asking.answers import RIGHT, RIGHT_AS_CLAIMED, SAID, WRONG_RING
from ring_doctor.asking.case import LAYOUTS
from ring_doctor.asking.examination import SECONDS
from ring_doctor.asking.job import CannotExamine
from ring_doctor.explaining.facts import Finding
from ring_doctor.mistakes import Mistake
from ring_doctor.report import explained, summary
from ring_doctor.whole_models.model_calls import ModelPatient, Returned, Step, options_of, without_dropout
from ring_doctor.whole_models.model_clues import clue
from ring_doctor.whole_models.model_comparison import (
    LOSS,
    ModelDiagnosis,
    World,
    error_of,
    errors,
    judge,
    same,
    tolerance,
)
from ring_doctor.whole_models.model_mistakes import (
    EPS,
    MISTAKES,
    Prediction,
    added,
    clipped_per_rank,
    norm_of,
    rank_by_rank,
    sharding_mistakes,
)
from ringlab.models.transformer import IGNORED
from ringlab.support.expect import expect
from ringlab.support.processes import Ranks

WORLDS = (2, 3, 4)
BATCH, SEQ_LEN = 2, 24  # tokens that zigzag deals out to 2, 3 and 4 ranks
TOO_COARSE = 0.05  # rounding that hides mistakes: they begin at a few percent of a gradient
HIDDEN, NO_LABELS = "some labels hidden", "a rank without labels"
NOT_ASKED = "not asked: dropout, accumulated gradients, the optimizer, checkpoints"
ALIKE = 1e-3  # norms that differ by less, as shares, are of clipped gradients: EPS moves them, if |g| is small
RACE = (
    "With {} ranks it returns other results when it is called again with the same text: look for a buffer that is "
    "written while it is being sent, for a wait that is missing, and for state that a call leaves behind"
)


@dataclass(frozen=True)
class ModelExamination:
    """All that the doctor found out about a function."""

    name: str
    worlds: tuple[World, ...]
    diagnoses: tuple[ModelDiagnosis, ...]  # each of them explains every wrong world
    allowed: float
    notes: tuple[str, ...]
    only: str = ""  # what the function was asked for, if not for everything: "a label for every token"
    clue: Finding | None = None  # where to look, if nothing explains the wrong worlds
    changes: bool = False  # from call to call

    @property
    def healthy(self) -> bool:
        """Whether what the function takes is right."""
        return all(world.right for world in self.worlds)

    @property
    def level(self) -> str:
        """How bad: "right", "right for what it takes" or "wrong"."""
        return WRONG_RING if not self.healthy else RIGHT_AS_CLAIMED if self.only else RIGHT

    @property
    def verdict(self) -> str:
        """One line: healthy, or sick and of what."""
        failed = [world for world in self.worlds if world.failure]
        if self.healthy:
            said = f"{SAID[self.level]}: {self.name}, loss and gradients are those of one process"
            return said + (f"; {self.only}" if self.only else "") + f"; {NOT_ASKED}"
        if self.changes:
            return f"SICK: {self.name} changes its results from call to call"
        if self.diagnoses:
            names = " or ".join(" and ".join(each.names) for each in self.diagnoses)
            return f"SICK: {names}, in {self.name}" + "".join(f"; {it.detail}" for it in self.diagnoses if it.detail)
        if failed and all(world.right or world.failure for world in self.worlds):
            return f"SICK: {self.name} fails with {failed[0].asked}: {failed[0].failure}"
        shown = self.clue.says if self.clue else "wrong numbers that no mistake of the catalogue gives"
        return f"SICK: {self.name}: {shown}"

    @property
    def mistakes(self) -> list[Mistake]:
        """The mistakes that the verdict names, each once."""
        return [MISTAKES[name] for name in dict.fromkeys(name for found in self.diagnoses for name in found.names)]

    @property
    def remarks(self) -> list[str]:
        """What else a reader must know about the verdict, in sentences."""
        said = list(self.notes)
        if len(self.diagnoses) > 1:
            said.append("no number of ranks tells these explanations apart: they give equal numbers")
        return [f"{words[0].upper()}{words[1:]}." for words in said]


def examine_model(
    step: Step,
    *,
    name: str = "the function",
    layout: str = "contiguous",
    vocab: int = 32,
    seed: int = 0,
    seconds: float = SECONDS,
    device: str = "cpu",
    ranks: Ranks | None = None,
) -> ModelExamination:
    """Call `step` on 1, 2, 3 and 4 processes, compare, and name the mistakes.

    `layout` is the layout of the shards of `step`; "module:function" names your own. Tokens are below `vocab`. torch's
    generator is seeded before each call. A call on several ranks may take `seconds`, beside the time that the first
    call took. `ranks` are the processes (None: new ones, on `device`). Raises ValueError for such an argument, or a
    function, that is not as described, and CannotExamine when nothing can be compared: on one process the function
    fails, returns something else, returns other numbers when it is called again, or has a dtype too coarse to tell a
    mistake from rounding; or it has dropout.
    """
    expect(
        layout in LAYOUTS or ":" in layout, f"layout is {layout!r}", f"one of {', '.join(LAYOUTS)}, or module:function"
    )
    expect(vocab > 0, f"vocab is {vocab}", "1 or more")
    text = torch.randint(vocab, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    processes = ranks or Ranks(max(WORLDS), device=device)
    usual = processes.seconds
    try:
        patient = ModelPatient(step, text, layout, seed, processes, options_of(step), seconds)
        patient.shards(max(WORLDS))  # raises ValueError for a function that is no layout
        return _examine(patient, name)
    finally:
        processes.seconds = usual
        if not ranks:
            processes.stop()


def _examine(patient: ModelPatient, name: str) -> ModelExamination:
    exact, allowed = _exact(patient)
    kind = _kind_of_loss(patient, exact, allowed) if "targets" in patient.takes else "unknown"
    tried = {"mean": ["mean"], "sum": ["sum"], "unknown": ["sum", "mean"] if patient.layout == "contiguous" else []}
    lacks = sorted({"positions", "targets"} - patient.takes)
    notes = [f"the function takes no {option}=, so not every mistake can be named" for option in lacks]
    if kind == "clipped":
        notes.append("the gradients of one process are clipped, which hides factors")

    def predictions(P: int) -> list[Prediction]:
        clipped = [(("clipped_per_rank",), lambda: clipped_per_rank(exact, P))] if kind == "clipped" else []
        return sharding_mistakes(patient, P, tried.get(kind, [])) + clipped

    # a gradient clipped to c had a norm of c or more, so EPS moves it, and a prediction, by a share of EPS/c at most
    loose = allowed + (2 * EPS / norm_of(exact) if kind == "clipped" else 0.0)
    results = {P: patient.ask(P) for P in (1, *WORLDS)}
    worlds, diagnoses, wrong = judge(results, exact, predictions, allowed, loose)
    only = "" if "targets" in patient.takes else "a label for every token"
    found = ModelExamination(name, tuple(worlds), diagnoses, allowed, tuple(notes), only)
    for P in wrong:
        for again in (patient.ask(P), patient.ask(P)):
            if isinstance(again, str) or not all(map(partial(same, allowed=allowed), again, wrong[P])):
                return replace(found, diagnoses=(), clue=Finding(RACE.format(P)), changes=True)
    scaled = [each for each in diagnoses if all(name.startswith(("loss_", "gradients_")) for name in each.names)]
    if "targets" in patient.takes and (scaled or not wrong):
        found = _with_hidden_labels(patient, found, kind, loose)
    if wrong and not found.diagnoses:
        replace(patient, step=partial(without_dropout, patient.step), takes=frozenset()).must()
        found = replace(found, clue=clue(patient, wrong, exact, allowed, clipped=kind == "clipped"))
    return found


def _exact(patient: ModelPatient) -> tuple[Returned, float]:
    """What the step returns on one process, and how far rounding may move it. Raises CannotExamine."""
    exact, again = patient.must(), patient.must()
    allowed = tolerance(exact, patient.labels.numel())
    if allowed > TOO_COARSE:
        dtypes = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in exact.dtypes))
        said = f"in {dtypes}, rounding may move a gradient of this model by {allowed:.0%}, which hides mistakes"
        raise CannotExamine(f"{said}; expected float64, or a smaller model in float32")
    if error_of(again, exact) > allowed:
        expected = "weights that are made anew in each call, and random numbers from torch's generator only"
        why = "torch.manual_seed is called before each call"
        raise CannotExamine(f"two calls on one process return different results; expected {expected}: {why}")
    return exact, allowed


def _kind_of_loss(patient: ModelPatient, exact: Returned, allowed: float) -> str:
    """What the loss is over the labels, "mean", "sum" or "other"; or "clipped", as are then the gradients.

    Found by hiding a quarter of the labels, and then the others. Raises CannotExamine where that has no effect.
    """
    everywhere = torch.arange(patient.seq_len)
    early = everywhere < patient.seq_len // 4
    parts = [patient.must(patient.labels.masked_fill(early == hide, IGNORED)) for hide in (True, False)]

    def off(result: Returned) -> float:
        return max(error for name, error in errors(result, exact).items() if name != LOSS)

    if off(parts[0]) <= allowed:
        expected = "it to take the place of text[:, 1:], (B, S), where -100 has no loss"
        raise CannotExamine(f"targets= has no effect on the gradients; expected {expected}")
    norms = [norm_of(result) for result in (exact, *parts)]
    if max(norms) - min(norms) < ALIKE * max(norms):
        return "clipped"
    for kind, weights in (("mean", (0.75, 0.25)), ("sum", (1.0, 1.0))):
        both = added(patient.seq_len, [(c, x, everywhere, everywhere) for c, x in zip(weights, parts, strict=True)])
        if isinstance(both, Returned) and off(both) <= allowed:
            return kind
    return "other"


def _with_hidden_labels(patient: ModelPatient, found: ModelExamination, kind: str, loose: float) -> ModelExamination:
    """Where all is right, or wrong by a factor, ask again with some labels hidden, and with all labels of a rank."""
    early = torch.arange(patient.seq_len // max(WORLDS) - 1)  # different numbers of labels, and each rank has one
    of_rank_0 = torch.cat([patient.shards(P)[0] for P in WORLDS])
    sizes = [world.world_size for world in found.worlds if not world.failure and world.world_size > 1]
    for words, tokens in ((HIDDEN, early), (NO_LABELS, of_rank_0)):
        hidden = patient.labels.index_fill(1, tokens, IGNORED)
        exact = patient.must(hidden)

        def predictions(P: int, exact: Returned = exact, hidden: Tensor = hidden) -> list[Prediction]:
            means = (("mean_of_means",), partial(rank_by_rank, patient, P, hidden, 1 / P))
            return [((), lambda: exact), *([means] if kind == "mean" else [])]

        results = {P: patient.ask(P, targets=hidden) for P in sizes}
        worlds, diagnoses, wrong = judge(results, exact, predictions, found.allowed, loose, hidden=words)
        found = replace(found, worlds=(*found.worlds, *worlds), diagnoses=diagnoses or found.diagnoses)
        if wrong and not found.diagnoses:
            note = f"with {words} no name explains the results: look at what the loss is divided by"
            said = clue(patient, wrong, exact, found.allowed, clipped=kind == "clipped")
            return replace(found, notes=(*found.notes, note), clue=said)
    return found


def text_of_model(found: ModelExamination) -> str:
    """The report for a terminal."""
    clue, lines = found.clue, [found.verdict]
    if clue and not found.verdict.endswith(f": {clue.says}"):
        lines.append(f"  {clue}")
    elif clue and clue.look:
        lines.append(f"  Look at {clue.look}.")
    lines += [*(f"  {words}" for words in found.remarks), *explained(found.mistakes), ""]
    for world in found.worlds:
        state = world.state if world.right else world.state.upper()
        lines.append(f"{state:<7}{world.asked}: {world.says(found.allowed)}")
    return "\n".join(lines)


def json_of_model(found: ModelExamination) -> dict[str, Any]:
    """The report as numbers, strings, lists and dicts. An infinite error is null."""
    return summary(found.name, found) | {
        "mistakes": [list(each.names) for each in found.diagnoses],
        "inference": [str(found.clue)] if found.clue else [],
        "answers": [
            {
                "question": world.asked,
                "ranks": world.world_size,
                "labels_hidden": bool(world.hidden),
                "state": world.state,
                "says": world.failure,
                "found": world.says(found.allowed),
                "errors": {"largest": world.error if math.isfinite(world.error) else None, "allowed": found.allowed},
            }
            for world in found.worlds
        ],
    }
