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
Without targets the doctor names wrong factors, and a ring that is not called in contiguous chunks.

The doctor calls the function on 1 process, where no ring can be wrong, and on 2, 3 and 4. Then it asks the function
itself, on 1 process, what it would return with a mistake. That is the diagnosis when loss and gradients are equal.

Shapes: text (B, S + 1), tokens and labels (B, S), the same on every rank. Rank r has C of the S tokens: those at
`ringlab.positions(layout, S, r, P)`. All else is what your function makes of them.

Before: model_comparison.py. After: the command, __main__.py.
Source: Liu et al. 2024, appendix A.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ringlab.doctor.case import LAYOUTS
from ringlab.doctor.model_calls import Call, ModelPatient, Returned, Step, options_of
from ringlab.doctor.model_comparison import ModelDiagnosis, explain, largest_error, tolerance
from ringlab.doctor.model_patterns import Pattern, mean_of_means, predict, sharding_mistakes, whole
from ringlab.models.transformer import IGNORED
from ringlab.support.pool import Ranks

WORLDS = (2, 3, 4)
TOO_COARSE = 0.05  # rounding that hides mistakes: they begin at a few percent of a gradient


@dataclass(frozen=True)
class World:
    """What was found with P processes."""

    world_size: int
    hidden: bool  # with some labels hidden
    right: bool
    found: tuple[ModelDiagnosis, ...]  # each of them explains the result
    error: float  # the largest error of the loss or of a gradient, as a share of its norm
    failure: str = ""  # why the function did not return


@dataclass(frozen=True)
class ModelExamination:
    """All that the doctor found out about a function."""

    worlds: tuple[World, ...]
    diagnoses: tuple[ModelDiagnosis, ...]  # each of them explains every wrong world
    allowed: float
    notes: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        return all(world.right for world in self.worlds)


def examine_model(
    step: Step,
    *,
    layout: str = "contiguous",
    vocab: int = 32,
    seq_len: int = 24,
    batch: int = 2,
    seed: int = 0,
    ranks: Ranks | None = None,
) -> ModelExamination:
    """Call `step` on 1, 2, 3 and 4 processes, compare, and name the mistakes.

    `layout` is the layout of the shards of `step`. `seq_len` is a multiple of 24, so that zigzag suits 2, 3 and 4
    ranks. Tokens are below `vocab`. torch's generator is seeded before each call. `ranks` are the processes (None: new
    ones). Raises ValueError when the function cannot be examined: it returns something else, it returns other numbers
    when it is called again, or its dtype is too coarse to tell a mistake from rounding.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    if seq_len < 1 or seq_len % 24:
        raise ValueError(f"seq_len is {seq_len}; expected a multiple of 24, which zigzag deals out to 2, 3 and 4 ranks")
    text = torch.randint(vocab, (batch, seq_len + 1), generator=torch.Generator().manual_seed(seed))
    takes = options_of(step)
    processes = ranks or Ranks(max(WORLDS))
    try:
        return _examine(ModelPatient(step, text, layout, seed, processes, takes))
    finally:
        if not ranks:
            processes.stop()


def _examine(patient: ModelPatient) -> ModelExamination:
    exact, again = predict(patient, [whole(patient)] * 2)
    allowed = tolerance(exact, patient.labels.numel())
    if allowed > TOO_COARSE:
        dtypes = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in exact.dtypes))
        raise ValueError(
            f"in {dtypes}, rounding may move a gradient of this model by {allowed:.0%}, which hides mistakes; expected "
            f"float64, or a smaller model in float32"
        )
    if not explain([again], exact, patient.shards(1), allowed):
        raise ValueError(
            "two calls on one process return different results; expected no dropout, and weights that are made anew "
            "in each call (torch.manual_seed is called before it)"
        )
    missing = sorted({"positions", "targets"} - patient.takes)
    notes = tuple(f"the function takes no {name}=, so not every mistake can be named" for name in missing)
    mean = "targets" in patient.takes and _divides_by_labels(patient, exact, allowed)
    plain = {P: patient.on_ranks(P, Call(patient.text, {})) for P in (1, *WORLDS)}
    worlds, diagnoses = _judge(patient, plain, exact, lambda P: sharding_mistakes(patient, P, mean), allowed)
    if "targets" in patient.takes:
        hidden = patient.labels.clone()  # the ranks have different numbers of labels, and each has one
        hidden[:, : patient.seq_len // max(WORLDS) - 1] = IGNORED
        call, scaled = Call(patient.text, {"targets": hidden}), [world for world in worlds if _scaled(world)]
        results = {w.world_size: patient.on_ranks(w.world_size, call) for w in scaled if w.world_size > 1}
        patterns = {P: [whole(patient, targets=hidden), mean_of_means(patient, P, hidden, mean)] for P in results}
        [exact] = predict(patient, [whole(patient, targets=hidden)])
        more, found = _judge(patient, results, exact, patterns.__getitem__, allowed)
        worlds += [replace(world, hidden=True) for world in more]
        diagnoses = found or diagnoses  # the same factors, and more
    return ModelExamination(tuple(worlds), tuple(diagnoses), allowed, notes)


def _divides_by_labels(patient: ModelPatient, exact: Returned, allowed: float) -> bool:
    """Whether the loss is divided by the number of labels. Found by hiding a quarter of them, and then the others."""
    early = torch.arange(patient.seq_len) < patient.seq_len // 4
    late_part, early_part = (
        whole(patient, targets=patient.labels.masked_fill(early == hide, IGNORED)) for hide in (True, False)
    )
    calls, tokens = late_part.calls + early_part.calls, late_part.tokens + early_part.tokens
    both = [Pattern((), calls, tokens, weights) for weights in ((1.0, 1.0), (0.75, 0.25))]
    late, *sums = (replace(x, loss=exact.loss) for x in predict(patient, [late_part, *both]))
    fits = [explain([x], exact, patient.shards(1), allowed) is not None for x in (late, *sums)]
    if fits not in ([False, True, False], [False, False, True]):
        raise ValueError(
            "targets= has not the expected effect; expected it to take the place of text[:, 1:], (B, S), where -100 "
            "has no loss, and the loss to be a sum or a mean over the other labels"
        )
    return fits[2]


def _judge(
    patient: ModelPatient,
    results: dict[int, list[Returned] | str],
    exact: Returned,
    patterns: Callable[[int], list[Pattern]],
    allowed: float,
) -> tuple[list[World], list[ModelDiagnosis]]:
    """What was found with each number of processes, and what explains all that is wrong, with the fewest mistakes."""
    worlds, sick = [], {}
    for P, of_ranks in results.items():
        if isinstance(of_ranks, str):
            worlds.append(World(P, False, False, (), math.inf, of_ranks))
            continue
        right = explain(of_ranks, exact, patient.shards(P), allowed) == ModelDiagnosis(())
        worlds.append(World(P, False, right, (), largest_error(of_ranks, exact, patient.shards(P))))
        if not right:
            sick[P] = of_ranks
    if len(sick) > 1:
        sick.pop(1, None)  # one process cannot show every mistake
    fits: dict[int, dict[tuple[str, ...], ModelDiagnosis]] = {P: {} for P in sick}
    common: set[tuple[str, ...]] = set()
    for few in (True, False):  # compositions only when no single mistake explains everything
        tried = [(P, pattern) for P in sick for pattern in patterns(P) if (len(pattern.names) < 2) == few]
        if common or not tried:
            break
        for (P, pattern), predicted in zip(tried, predict(patient, [pattern for _, pattern in tried]), strict=True):
            if found := explain(sick[P], predicted, patient.shards(P), allowed):
                names = pattern.names + found.names
                fits[P].setdefault(names, ModelDiagnosis(names, found.detail))
        common = set.intersection(*(set(fit) for fit in fits.values()))
    worlds = [replace(world, found=_fewest(fits.get(world.world_size, {}))) for world in worlds]
    return worlds, list(_fewest({names: fits[max(sick)][names] for names in common}))


def _scaled(world: World) -> bool:
    """Whether the result is right, or wrong by factors only."""
    factors = ("loss_", "gradients_")
    return world.right or any(all(name.startswith(factors) for name in found.names) for found in world.found)


def _fewest(fits: dict[tuple[str, ...], ModelDiagnosis]) -> tuple[ModelDiagnosis, ...]:
    """Those with the fewest mistakes."""
    least = min(map(len, fits), default=0)
    return tuple(fits[names] for names in sorted(fits) if len(names) == least)
