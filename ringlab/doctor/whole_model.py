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
`ringlab.training.layouts.positions(layout, S, r, P)`. All else is what your function makes of them.

Before: examination.py, an attention by itself. After: the command, __main__.py.
Source: Liu et al. 2024, appendix A.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringlab.models.transformer import IGNORED
from ringlab.support.pool import LostRank, Raised, Ranks
from ringlab.support.processes import RankContext
from ringlab.training.layouts import LAYOUTS, positions

WORLDS = (2, 3, 4)
TOO_COARSE = 0.05  # rounding that hides mistakes: they begin at a few percent of a gradient


Step = Callable[..., tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Call:
    """The inputs of one call of the function."""

    text: Tensor  # (B, S + 1)
    options: dict[str, Tensor]  # positions and targets, if they are given


@dataclass(frozen=True)
class Returned:
    """What the function returned on a rank, or what it would return on all: float64, on the CPU."""

    loss: Tensor  # (), or (B, C) of a rank, or (B, S)
    gradients: dict[str, Tensor]
    dtypes: frozenset[torch.dtype]


@dataclass(frozen=True)
class Pattern:
    """What the function would return on P processes with these mistakes: a sum of calls on one process."""

    names: tuple[str, ...]
    calls: tuple[Call, ...]
    places: tuple[
        tuple[Tensor, Tensor], ...
    ]  # of each call: the tokens whose losses count, and where they stand in the text
    weights: tuple[float, ...]  # of the loss and the gradients of each call


@dataclass(frozen=True)
class Diagnosis:
    """Mistakes that together explain a result. `detail` says in which weights, if not in all."""

    names: tuple[str, ...]
    detail: str = ""


@dataclass(frozen=True)
class World:
    """What was found with P processes."""

    world_size: int
    hidden: bool  # with some labels hidden
    right: bool
    found: tuple[Diagnosis, ...]  # each of them explains the result
    error: float  # the largest error of the loss or of a gradient, as a share of its norm
    failure: str = ""  # why the function did not return


@dataclass(frozen=True)
class ModelExamination:
    """All that the doctor found out about a function."""

    worlds: tuple[World, ...]
    diagnoses: tuple[Diagnosis, ...]  # each of them explains every wrong world
    allowed: float
    notes: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        return all(world.right for world in self.worlds)


@dataclass(frozen=True)
class _Patient:
    """The function, and how it is called."""

    step: Step
    text: Tensor  # (B, S + 1)
    layout: str
    seed: int
    ranks: Ranks
    taken: frozenset[str]  # the options that the function takes

    @property
    def seq_len(self) -> int:
        return self.text.shape[1] - 1

    def shards(self, world_size: int, layout: str | None = None) -> list[Tensor]:
        return [positions(layout or self.layout, self.seq_len, rank, world_size) for rank in range(world_size)]

    def call(self, text: Tensor, targets: Tensor, at: Tensor) -> Call:
        """A call with all that the function takes."""
        given = {"targets": targets, "positions": at}
        return Call(text, {name: given[name] for name in given if name in self.taken})

    def whole(self, *names: str, targets: Tensor | None = None, at: Tensor | None = None) -> Pattern:
        """The whole text in one call, with these labels and positions, or the right ones."""
        everywhere = torch.arange(self.seq_len)
        targets, at = self.text[:, 1:] if targets is None else targets, everywhere if at is None else at
        return Pattern(names, (self.call(self.text, targets, at),), ((everywhere, everywhere),), (1.0,))

    def predict(self, patterns: Sequence[Pattern]) -> list[Returned]:
        """What the function would return with each pattern. Raises ValueError when it fails on one process."""
        try:
            [results] = self.call_all(1, [call for pattern in patterns for call in pattern.calls])
        except LostRank as lost:
            raise ValueError(f"on one process, {str(lost).splitlines()[0]}; expected it to return") from lost
        if isinstance(results, Raised):
            ours = results.kind == "ValueError"
            raise ValueError(results.message if ours else f"on one process, {_reason(results)}; expected it to return")
        results = iter(results)
        return [_add(pattern, [next(results) for _ in pattern.calls], self.seq_len) for pattern in patterns]

    def visit(self, world_size: int, call: Call) -> list[Returned] | str:
        """What each rank returned, or why there is no result."""
        try:
            outcomes = self.call_all(world_size, [call])
        except LostRank as lost:
            return str(lost).splitlines()[0]
        raised = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Raised)]
        if raised:  # the others lost their connections to the first
            rank, first = min(raised, key=lambda each: each[1].kind in ("RuntimeError", "DistBackendError"))
            return f"on rank {rank}, {_reason(first)}"
        return [results[0] for results in outcomes]

    def call_all(self, world_size: int, calls: list[Call]) -> list[Any]:
        """By rank: what the function returned, call by call, or Raised. Raises LostRank."""
        return self.ranks.outcomes(world_size, _call_all, self.step, calls, self.seed)


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

    `layout` is the one in which `step` shards. `seq_len` is a multiple of 24, so that zigzag suits 2, 3 and 4 ranks.
    Tokens are below `vocab`. torch's generator is seeded before each call. `ranks` are the processes (None: new ones).
    Raises ValueError when the function cannot be examined: it returns something else, it returns other numbers when
    it is called again, or its dtype is too coarse to tell a mistake from rounding.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    if seq_len < 1 or seq_len % 24:
        raise ValueError(f"seq_len is {seq_len}; expected a multiple of 24, which zigzag deals out to 2, 3 and 4 ranks")
    text = torch.randint(vocab, (batch, seq_len + 1), generator=torch.Generator().manual_seed(seed))
    taken = _keywords(step)
    own = Ranks(max(WORLDS)) if ranks is None else None
    try:
        return _examine(_Patient(step, text, layout, seed, ranks or own, taken))
    finally:
        if own:
            own.stop()


def _examine(patient: _Patient) -> ModelExamination:
    text, seq_len = patient.text, patient.seq_len
    exact, again = patient.predict([patient.whole()] * 2)
    allowed = tolerance(exact, text[:, 1:].numel())
    if allowed > TOO_COARSE:
        dtypes = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in exact.dtypes))
        raise ValueError(
            f"in {dtypes}, rounding may move a gradient of this model by {allowed:.0%}, which hides mistakes; expected "
            f"float64, or a smaller model in float32"
        )
    if not _explain([again], exact, patient.shards(1), allowed):
        raise ValueError(
            "two calls on one process return different results; expected no dropout, and weights that are made anew "
            "in each call (torch.manual_seed is called before it)"
        )
    missing = sorted({"positions", "targets"} - patient.taken)
    notes = tuple(f"the function takes no {name}=, so not every mistake can be named" for name in missing)
    mean = "targets" in patient.taken and _divides_by_labels(patient, exact, allowed)
    plain = {P: patient.visit(P, Call(text, {})) for P in (1, *WORLDS)}
    worlds, diagnoses = _judge(patient, plain, exact, lambda P: _patterns(patient, P, mean), allowed)
    if "targets" in patient.taken:
        hidden = text[:, 1:].clone()
        hidden[:, : seq_len // max(WORLDS) - 1] = (
            IGNORED  # the ranks have different numbers of labels, and each has one
        )
        call = Call(text, {"targets": hidden})
        visits = {w.world_size: patient.visit(w.world_size, call) for w in worlds if w.world_size > 1 and _scaled(w)}
        patterns = {P: [patient.whole(targets=hidden), _mean_of_means(patient, P, hidden, mean)] for P in visits}
        [exact] = patient.predict([patient.whole(targets=hidden)])
        more, found = _judge(patient, visits, exact, patterns.__getitem__, allowed)
        worlds += [replace(world, hidden=True) for world in more]
        diagnoses = found or diagnoses  # the same factors, and more
    return ModelExamination(tuple(worlds), tuple(diagnoses), allowed, notes)


def tolerance(result: Returned, tokens: int) -> float:
    """How far two right computations of a model may be apart, as a share of the norm of a gradient.

    u = eps/2 of the coarsest dtype of the results. The gradient of a weight is the end of a chain of products. The
    chain has one link for each weight in the forward pass, and one in the backward pass: 2T links for T gradients. A
    sum of n products is off by (1 + √n) u Σ|x||y|, as ringlab/support/rounding.py derives; n is the number of tokens,
    or the longest side of a weight. In the end the terms of `tokens` tokens are added. They have both signs, so their
    sum is smaller than the sum of their sizes, by √tokens if signs are random. Both computations err, hence 2.
    """
    longest = max([tokens, *(side for gradient in result.gradients.values() for side in gradient.shape)])
    u = max(torch.finfo(dtype).eps for dtype in result.dtypes) / 2
    return 2 * 2 * len(result.gradients) * (1 + math.sqrt(longest)) * math.sqrt(tokens) * u


def _divides_by_labels(patient: _Patient, exact: Returned, allowed: float) -> bool:
    """Whether the loss is divided by the number of labels. Found by hiding a quarter of them, and then the others."""
    early, labels = torch.arange(patient.seq_len) < patient.seq_len // 4, patient.text[:, 1:]
    late_part, early_part = (
        patient.whole(targets=labels.masked_fill(early == hide, IGNORED)) for hide in (True, False)
    )
    calls, places = late_part.calls + early_part.calls, late_part.places + early_part.places
    both = [Pattern((), calls, places, weights) for weights in ((1.0, 1.0), (0.75, 0.25))]
    late, *sums = (replace(x, loss=exact.loss) for x in patient.predict([late_part, *both]))
    fits = [_explain([x], exact, patient.shards(1), allowed) is not None for x in (late, *sums)]
    if fits not in ([False, True, False], [False, False, True]):
        raise ValueError(
            "targets= has not the expected effect; expected it to take the place of text[:, 1:], (B, S), where -100 "
            "has no loss, and the loss to be a sum or a mean over the other labels"
        )
    return fits[2]


def _patterns(patient: _Patient, world_size: int, mean: bool) -> list[Pattern]:
    """Every combination of mistakes that the inputs of calls on one process can imitate."""
    shards, labels = patient.shards(world_size), patient.text[:, 1:]
    targets, ats = [((), labels)], [((), torch.arange(patient.seq_len))]
    if "targets" in patient.taken:
        for wraps in (True, False):
            wrong = labels.clone()
            for at in shards:
                wrong[:, at[:-1]] = patient.text[:, at[1:]]
                wrong[:, at[-1]] = patient.text[:, at[0]] if wraps else IGNORED
            targets.append((("labels_per_shard",), wrong))
    if "positions" in patient.taken:
        for name in {"per_shard", *(f"of_{layout}" for layout in LAYOUTS)} - {f"of_{patient.layout}"}:
            others = [torch.arange(len(at)) for at in shards]
            if name != "per_shard":
                others = patient.shards(world_size, name.removeprefix("of_"))
            wrong = torch.empty(patient.seq_len, dtype=torch.int64)
            for at, other in zip(shards, others, strict=True):
                wrong[at] = other
            ats.append(((f"positions_{name}",), wrong))
    patterns = []
    for (wrong_labels, target), (wrong_positions, at) in product(targets, ats):
        patterns.append(patient.whole(*wrong_labels, *wrong_positions, targets=target, at=at))
        names = ("ring_not_called", *wrong_labels, *wrong_positions)
        patterns += _own_shards(patient, shards, names, target, at, mean)
    return patterns


def _own_shards(
    patient: _Patient, shards: list[Tensor], names: tuple[str, ...], targets: Tensor, at: Tensor, mean: bool
) -> list[Pattern]:
    """Each rank sees its own shard only: a call for each, with the shard at the beginning, where it sees nothing else.

    The other tokens follow, without labels, so that a loss that is divided by S is still divided by S.
    """
    P, C = len(shards), len(shards[0])
    places = tuple((torch.arange(C), shard) for shard in shards)
    if "targets" not in patient.taken:  # the labels are the next tokens, so the shard must be the whole text
        if patient.layout != "contiguous":
            return []
        calls = tuple(Call(patient.text[:, shard[0] : shard[-1] + 2], {}) for shard in shards)
        return [Pattern(names, calls, places, (weight,) * P) for weight in (1.0, 1 / P)]  # a sum, or a mean
    calls, labels = [], []
    for shard in shards:
        order = torch.cat([shard, *(other for other in shards if other is not shard)])
        text = torch.cat([patient.text[:, order], patient.text[:, -1:]], dim=1)
        own = targets[:, order].clone()
        own[:, C:] = IGNORED
        calls.append(patient.call(text, own, at[order]))
        labels.append((own != IGNORED).sum().item())
    weights = tuple(count / sum(labels) if mean else 1.0 for count in labels)
    return [Pattern(names, tuple(calls), places, weights)]


def _mean_of_means(patient: _Patient, world_size: int, targets: Tensor, mean: bool) -> Pattern:
    """Each rank's part of the loss is the mean over its own labels, and the parts are averaged."""
    shards = patient.shards(world_size)
    owns = []
    for shard in shards:
        own = torch.full_like(targets, IGNORED)
        own[:, shard] = targets[:, shard]
        owns.append(own)
    counts = [(own != IGNORED).sum().item() for own in owns]
    weights = tuple((1 if mean else sum(counts) / count) / world_size for count in counts)
    calls = tuple(call for own in owns for call in patient.whole(targets=own).calls)
    return Pattern(("mean_of_means",), calls, tuple((shard, shard) for shard in shards), weights)


def _judge(
    patient: _Patient,
    visits: dict[int, list[Returned] | str],
    exact: Returned,
    patterns: Callable[[int], list[Pattern]],
    allowed: float,
) -> tuple[list[World], list[Diagnosis]]:
    """What was found with each number of processes, and what explains all that is wrong, with the fewest mistakes."""
    worlds, sick = [], {}
    for P, results in visits.items():
        if isinstance(results, str):
            worlds.append(World(P, False, False, (), math.inf, results))
            continue
        right = _explain(results, exact, patient.shards(P), allowed) == Diagnosis(())
        worlds.append(World(P, False, right, (), _largest_error(results, exact, patient.shards(P))))
        if not right:
            sick[P] = results
    if len(sick) > 1:
        sick.pop(1, None)  # one process cannot show every mistake
    fits: dict[int, dict[tuple[str, ...], Diagnosis]] = {P: {} for P in sick}
    common: set[tuple[str, ...]] = set()
    for few in (True, False):  # compositions only when no single mistake explains everything
        tried = [(P, pattern) for P in sick for pattern in patterns(P) if (len(pattern.names) < 2) == few]
        if common or not tried:
            break
        for (P, pattern), predicted in zip(tried, patient.predict([pattern for _, pattern in tried]), strict=True):
            found = _explain(sick[P], predicted, patient.shards(P), allowed)
            if found:
                names = pattern.names + found.names
                fits[P].setdefault(names, Diagnosis(names, found.detail))
        common = set.intersection(*(set(fit) for fit in fits.values()))
    worlds = [replace(world, found=_fewest(fits.get(world.world_size, {}))) for world in worlds]
    return worlds, list(_fewest({names: fits[max(sick)][names] for names in common}))


def _scaled(world: World) -> bool:
    """Whether all is right, up to factors."""
    factors = ("loss_", "gradients_")
    return world.right or any(all(name.startswith(factors) for name in found.names) for found in world.found)


def _fewest(fits: dict[tuple[str, ...], Diagnosis]) -> tuple[Diagnosis, ...]:
    least = min(map(len, fits), default=0)
    return tuple(fits[names] for names in sorted(fits) if len(names) == least)


def _explain(results: list[Returned], predicted: Returned, shards: list[Tensor], allowed: float) -> Diagnosis | None:
    """What there is between the results, one a rank, and what was predicted: nothing, factors, or None of these."""
    names, floors = [], _floors(predicted)
    if predicted.loss.dim():
        joined = _join([result.loss for result in results], shards)
        if not _distance(joined, predicted.loss) <= allowed:
            return None
    else:
        found = _factors([result.loss for result in results], predicted.loss, 0.0, allowed)
        if not found:
            return None
        names += [f"loss_{found[0]}"] if found[0] else []
    each = {
        name: _factors([result.gradients[name] for result in results], gradient, floors[name], allowed)
        for name, gradient in predicted.gradients.items()
    }
    if not all(each.values()):
        return None
    common = [found for found in next(iter(each.values())) if all(found in other for other in each.values())]
    if common:
        return Diagnosis((*names, *([f"gradients_{common[0]}"] if common[0] else [])))
    details = []
    for found in dict.fromkeys(found[0] for found in each.values() if found[0]):
        weights = [name for name in each if each[name][0] == found]
        names.append(f"gradients_{found}")
        details.append(f"gradients_{found}: {len(weights)} of {len(each)} weights, {', '.join(weights[:4])}")
    return Diagnosis(tuple(names), "; ".join(details))


def _factors(parts: list[Tensor], right: Tensor, floor: float, allowed: float) -> list[str]:
    """What turns `right` into the ranks' parts, "" for nothing: the first is the least."""
    P, total = len(parts), sum(parts)
    if all(_distance(part, parts[0], floor) <= allowed for part in parts):
        factors = {"": 1, "times_p": P, "over_p": 1 / P, "times_root_p": math.sqrt(P)}
        return [name for name, factor in factors.items() if _distance(parts[0], factor * right, floor) <= allowed]
    reduced = any(_distance(x, right, floor) <= allowed for x in (total, total / P))
    return ["not_reduced"] if reduced else []


def _distance(x: Tensor, y: Tensor, floor: float = 0.0) -> float:
    """How far x is from y, as a share of the norm of y. NaN is far from everything."""
    distance = (x - y).norm().item()
    return 0.0 if distance == 0 else distance / max(y.norm().item(), floor, torch.finfo(torch.float64).tiny)


def _floors(result: Returned) -> dict[str, float]:
    """Norms below which a gradient is rounding only, as that of the bias of keys: 1% of the average gradient's."""
    numbers = sum(gradient.numel() for gradient in result.gradients.values())
    norm = math.sqrt(sum(gradient.norm().item() ** 2 for gradient in result.gradients.values()))
    return {name: 0.01 * norm * math.sqrt(gradient.numel() / numbers) for name, gradient in result.gradients.items()}


def _largest_error(results: list[Returned], exact: Returned, shards: list[Tensor]) -> float:
    floors, errors = _floors(exact), []
    if exact.loss.dim():
        errors.append(_distance(_join([result.loss for result in results], shards), exact.loss))
    else:
        errors += [_distance(result.loss, exact.loss) for result in results]
    for result in results:
        errors += [_distance(result.gradients[name], exact.gradients[name], floors[name]) for name in floors]
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _join(losses: list[Tensor], shards: list[Tensor]) -> Tensor:
    """The ranks' losses (B, C) in the order of the text, (B, S)."""
    joined = losses[0].new_empty(len(losses[0]), sum(map(len, shards)))
    for loss, shard in zip(losses, shards, strict=True):
        joined[:, shard] = loss
    return joined


def _add(pattern: Pattern, results: list[Returned], seq_len: int) -> Returned:
    """The results of the calls of a pattern, together."""
    weighted = list(zip(results, pattern.weights, strict=True))
    if results[0].loss.dim():
        loss = results[0].loss.new_zeros(len(results[0].loss), seq_len)
        for result, (there, here) in zip(results, pattern.places, strict=True):
            loss[:, here] = result.loss[:, there]
    else:
        loss = sum(weight * result.loss for result, weight in weighted)
    names = results[0].gradients
    gradients = {name: sum(weight * result.gradients[name] for result, weight in weighted) for name in names}
    return Returned(loss, gradients, results[0].dtypes)


def _reason(raised: Raised) -> str:
    lines = raised.message.strip().splitlines()
    return f"the function raised {raised.kind}" + (f": {lines[-1]}" if lines else "")


def _keywords(step: Step) -> frozenset[str]:
    """Which of positions= and targets= the function takes. Raises ValueError when it cannot be called with a text."""
    try:
        parameters = inspect.signature(step).parameters.values()
        inspect.signature(step).bind(None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{getattr(step, '__name__', step)!s} cannot be called with a text alone ({error}); expected "
            f"step(text, *, positions=None, targets=None)"
        ) from error
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return frozenset(name for name in ("positions", "targets") if anything or name in names)


def _call_all(context: RankContext, step: Step, calls: list[Call], seed: int) -> list[Returned]:
    """What the function returns on this rank, call by call."""
    results = []
    for call in calls:
        torch.manual_seed(seed)
        options = {name: value.to(context.device) for name, value in call.options.items()}
        results.append(_returned(step(call.text.to(context.device), **options), call.text, context.world_size))
    return results


def _returned(result: Any, text: Tensor, world_size: int) -> Returned:
    """The function's result, checked. Raises ValueError when it is not (loss, gradients)."""
    expected = "expected (loss, gradients): a tensor, and a dict of the gradient of each weight by its name"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict) or not result[1]:
        raise ValueError(f"the function returned {type(result).__name__}; {expected}")
    for name, gradient in result[1].items():
        if not isinstance(gradient, Tensor):
            raise ValueError(f"the gradient of {name} is {gradient!r:.60}; {expected}")
    loss, C = torch.as_tensor(result[0]).detach(), (text.shape[1] - 1) // world_size
    if loss.dim() and loss.shape != (len(text), C):
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}; expected a number, or a loss for each token of the rank, "
            f"(B, C) = {(len(text), C)}"
        )
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in result[1].items()}
    gradients = {name: x.detach().double().cpu() for name, x in whole.items()}
    dtypes = frozenset(x.dtype for x in (loss, *whole.values()) if x.is_floating_point())
    return Returned(loss.double().cpu(), gradients, dtypes)
