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

What it cannot see, by design:
- One process is the judge. A model that is wrong there too (rotary of keys only, on every number of ranks) looks right.
- Dropout: other processes draw other masks, so nothing can be compared.
- One step of a short text, and every rank has a label: not the optimizer, accumulated gradients, saved checkpoints, the
  tiles of a kernel, nor a rank that divides 0 by 0 labels.
- In 16 bits rounding hides mistakes: a step must compute in float64, or with few weights in float32.

Shapes: text (B, S + 1), tokens and labels (B, S), the same on every rank. Rank r has C of the S tokens: those at
`ringlab.positions(layout, S, r, P)`. All else is what your function makes of them.

Before: model_clues.py, model_report.py. After: the command, __main__.py.
Source: Liu et al. 2024, appendix A.
"""

from dataclasses import replace

import torch

from ring_doctor.case import LAYOUTS
from ring_doctor.examination import SECONDS
from ring_doctor.job import CannotExamine
from ring_doctor.mistakes_of_models import (
    Pattern,
    added,
    clipped_per_rank,
    is_clipped,
    mean_of_means,
    predict,
    sharding_mistakes,
    slack,
    whole,
)
from ring_doctor.model_calls import Call, ModelPatient, Returned, Step, options_of
from ring_doctor.model_clues import clue
from ring_doctor.model_comparison import OfRanks, error_of, judge, same, tolerance
from ring_doctor.model_report import ModelExamination
from ringlab.models.transformer import IGNORED
from ringlab.support.processes import Ranks

WORLDS = (2, 3, 4)
TOO_COARSE = 0.05  # rounding that hides mistakes: they begin at a few percent of a gradient
RACE = (
    "With {} ranks it returns other results when it is called again with the same text: look for a buffer that is "
    "written while it is being sent, for a wait that is missing, and for state that a call leaves behind."
)
DROPOUT = (
    "the function drops numbers at random ({}): other processes draw other masks, so right results differ; "
    "expected dropout of 0, for example by model.eval(). Whether the masks of the ranks differ, as they must, cannot "
    "be examined: the doctor gives all ranks the same seed"
)


def examine_model(
    step: Step,
    *,
    name: str = "the function",
    layout: str = "contiguous",
    vocab: int = 32,
    seq_len: int = 24,
    batch: int = 2,
    seed: int = 0,
    seconds: float = SECONDS,
    ranks: Ranks | None = None,
) -> ModelExamination:
    """Call `step` on 1, 2, 3 and 4 processes, compare, and name the mistakes.

    `layout` is the layout of the shards of `step`; "module:function" names your own. `seq_len` is a multiple of 24, so
    that zigzag suits 2, 3 and 4 ranks. Tokens are below `vocab`. torch's generator is seeded before each call. A call
    on several ranks may take `seconds`, beside the time that the first call took. `ranks` are the processes (None: new
    ones). Raises ValueError for such an argument, or a function, that is not as described, and CannotExamine when
    nothing can be compared: on one process the function fails, returns something else, returns other numbers when it is
    called again, or has a dtype too coarse to tell a mistake from rounding; or it has dropout.
    """
    if layout not in LAYOUTS and ":" not in layout:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}, or module:function")
    if seq_len < 1 or seq_len % 24:
        raise ValueError(f"seq_len is {seq_len}; expected a multiple of 24, which zigzag deals out to 2, 3 and 4 ranks")
    for argument, number in (("vocab", vocab), ("batch", batch)):
        if number < 1:
            raise ValueError(f"{argument} is {number}; expected 1 or more")
    text = torch.randint(vocab, (batch, seq_len + 1), generator=torch.Generator().manual_seed(seed))
    takes = options_of(step)
    processes = ranks or Ranks(max(WORLDS))
    usual = processes.seconds
    try:
        patient = ModelPatient(step, text, layout, seed, processes, takes, seconds)
        patient.shards(max(WORLDS))  # raises ValueError for a function that is no layout
        return _examine(patient, name)
    finally:
        processes.seconds = usual
        if not ranks:
            processes.stop()


def _examine(patient: ModelPatient, name: str) -> ModelExamination:
    exact, allowed = _exact(patient)
    kind, clipped = _kind_of_loss(patient, exact, allowed) if "targets" in patient.takes else ("sum", False)
    lacks = sorted({"positions", "targets"} - patient.takes)
    notes = [f"the function takes no {option}=, so not every mistake can be named" for option in lacks]
    if kind == "other":
        why = "clipped" if clipped else "neither the mean nor the sum over the labels"
        notes.append(
            f"the gradients of one process are {why}: factors of them may be hidden, and the names ring_not_called and "
            f"mean_of_means are not tried"
        )

    def patterns(P: int) -> list[Pattern]:
        return sharding_mistakes(patient, P, kind) + [clipped_per_rank(patient, P)] * clipped

    loose = allowed + (slack(exact) if clipped else 0.0)
    plain = Call(patient.text, {})
    worlds, diagnoses, wrong = judge(patient, _on_worlds(patient, (1, *WORLDS), plain), exact, patterns, allowed, loose)
    only = "" if "targets" in patient.takes else "a label for every token"
    found = ModelExamination(name, tuple(worlds), diagnoses, allowed, tuple(notes), only)
    if changing := [P for P in wrong if not _again_the_same(patient, plain, wrong[P], allowed)]:
        return replace(found, diagnoses=(), clue=RACE.format(changing[0]), changes=True)
    if "targets" in patient.takes:
        found = _with_hidden_labels(patient, found, kind, loose)
    if wrong and not found.diagnoses:
        if drawn := patient.draws():
            raise CannotExamine(DROPOUT.format(", ".join(drawn)))
        found = replace(found, clue=clue(patient, wrong, exact, allowed, clipped=clipped))
    return found


def _exact(patient: ModelPatient) -> tuple[Returned, float]:
    """What the step returns on one process, and how far rounding may move it. Raises CannotExamine."""
    exact, again = _required(patient, [whole(patient)] * 2)
    allowed = tolerance(exact, patient.labels.numel())
    if allowed > TOO_COARSE:
        dtypes = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in exact.dtypes))
        raise CannotExamine(
            f"in {dtypes}, rounding may move a gradient of this model by {allowed:.0%}, which hides mistakes; expected "
            f"float64, or a smaller model in float32"
        )
    if error_of([again], exact, patient.shards(1)) > allowed:
        raise CannotExamine(
            "two calls on one process return different results; expected weights that are made anew in each call, and "
            "random numbers from torch's generator only: torch.manual_seed is called before each call"
        )
    return exact, allowed


def _with_hidden_labels(patient: ModelPatient, found: ModelExamination, kind: str, loose: float) -> ModelExamination:
    """The right worlds, and those that are wrong by a factor, are asked again with some labels hidden."""
    hidden = patient.labels.clone()  # the ranks have different numbers of labels, and each has one
    hidden[:, : patient.seq_len // max(WORLDS) - 1] = IGNORED
    sizes = tuple(world.world_size for world in found.worlds if world.scaled and world.world_size > 1)

    def patterns(P: int) -> list[Pattern]:
        means = [mean_of_means(patient, P, hidden)] if kind == "mean" else []
        return [whole(patient, targets=hidden), *means]

    [exact] = _required(patient, patterns(1)[:1])
    results = _on_worlds(patient, sizes, Call(patient.text, {"targets": hidden}))
    worlds, diagnoses, wrong = judge(patient, results, exact, patterns, found.allowed, loose, hidden=True)
    notes = found.notes
    if wrong and not diagnoses:
        notes += ("where labels are hidden, no name explains the results: look at what the loss is divided by",)
    diagnoses = diagnoses or found.diagnoses  # the same factors, and more
    return replace(found, worlds=(*found.worlds, *worlds), diagnoses=diagnoses, notes=notes)


def _required(patient: ModelPatient, patterns: list[Pattern]) -> list[Returned]:
    """The predictions, without which there is nothing to compare with."""
    return [result for result in predict(patient, patterns, required=True) if result]


def _on_worlds(patient: ModelPatient, sizes: tuple[int, ...], call: Call) -> dict[int, OfRanks]:
    """What the ranks return, for each number of ranks."""
    answered = {P: patient.on_ranks(P, [call]) for P in sizes}
    return {P: results if isinstance(results, str) else results[0] for P, results in answered.items()}


def _again_the_same(patient: ModelPatient, call: Call, results: list[Returned], allowed: float) -> bool:
    """Whether two more calls return what the first returned, on each rank."""
    again = patient.on_ranks(len(results), [call] * 2)
    return not isinstance(again, str) and all(
        same(result, first, allowed) for of_ranks in again for result, first in zip(of_ranks, results, strict=True)
    )


def _kind_of_loss(patient: ModelPatient, exact: Returned, allowed: float) -> tuple[str, bool]:
    """What the loss does over the labels, "mean", "sum" or "other", and whether the gradients are clipped.

    Found by hiding a quarter of the labels, and then the others. Raises CannotExamine where that has no effect.
    """
    everywhere = torch.arange(patient.seq_len)
    early = everywhere < patient.seq_len // 4
    hidden = [patient.labels.masked_fill(early == hide, IGNORED) for hide in (True, False)]
    parts = _required(patient, [whole(patient, targets=targets) for targets in hidden])
    if error_of(parts[:1], exact, [], loss=False) <= allowed:
        raise CannotExamine(
            "targets= has no effect on the gradients; expected it to take the place of text[:, 1:], (B, S), where -100 "
            "has no loss"
        )
    if is_clipped([exact, *parts]):
        return "other", True
    for kind, weights in (("mean", (0.75, 0.25)), ("sum", (1.0, 1.0))):
        both = added(weights, [(everywhere, everywhere)] * 2, patient.seq_len, parts)
        if error_of([both], exact, [], loss=False) <= allowed:
            return kind, False
    return "other", False
