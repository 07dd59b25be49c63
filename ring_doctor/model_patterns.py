"""Patterns: which calls on one process return what P processes with a mistake would return.

    labels_per_shard       the whole text in one call, with these wrong labels
    positions_per_shard    the whole text in one call, with these wrong positions; also positions_of_zigzag, ...
    ring_not_called        a call for each rank, with its shard at the beginning of the text; the results are added
    mean_of_means          a call for each rank, with the labels of its shard only; a weighted sum of the results
    clipped_per_rank       the whole text in one call, and the rows of each rank clipped by their own norm

Clipping, g -> g min(1, c / |g|), shows on one process: whatever the labels are, the norm of all gradients is c. Then
factors are hidden, and the gradients of parts of the text cannot be added.

Shapes: those of model_calls.py; a shard is the positions (C,) of a rank's tokens.

Before: model_calls.py. After: model_comparison.py.
Source: the mistakes are those of mistakes_of_models.py; clipping: Pascanu, Mikolov & Bengio 2013, algorithm 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter

import torch
from torch import Tensor

from ring_doctor.case import LAYOUTS
from ring_doctor.model_calls import Call, ModelPatient, Returned
from ringlab.models.transformer import IGNORED

EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by |g| + EPS
ALIKE = 1e-3  # norms that differ by less, as shares, are of clipped gradients: EPS moves them, if |g| is small

Labels = tuple[tuple[str, ...], Tensor]  # names of mistakes, and the labels or positions that they give


@dataclass(frozen=True)
class Pattern:
    """Mistakes, and the calls whose results, put together, are the result of a step with these mistakes."""

    names: tuple[str, ...]
    calls: tuple[Call, ...]
    together: Callable[[Sequence[Returned]], Returned | None]  # None: they do not show what the step would return


def predict(patient: ModelPatient, patterns: Sequence[Pattern], *, required: bool = False) -> list[Returned | None]:
    """What the step would return with each pattern; None where it raises, unless it is `required`.

    Raises CannotExamine as `on_one_process` does.
    """
    results = iter(patient.on_one_process([call for pattern in patterns for call in pattern.calls], required=required))
    of_patterns = [[next(results) for _ in pattern.calls] for pattern in patterns]
    return [
        None if None in found else pattern.together([result for result in found if result])
        for pattern, found in zip(patterns, of_patterns, strict=True)
    ]


def added(
    weights: Sequence[float], tokens: Sequence[tuple[Tensor, Tensor]], seq_len: int, results: Sequence[Returned]
) -> Returned:
    """The results of calls, times their weights, together. The losses of tokens, (B, S), are put in their places.

    `tokens` of each call: whose losses count, by their places in the call and in the text.
    """
    first, factors = results[0], torch.tensor(weights, dtype=torch.float64)

    def weighted(numbers: list[Tensor]) -> Tensor:
        return torch.tensordot(factors, torch.stack(numbers), dims=1)

    if first.loss.dim():
        loss = first.loss.new_zeros(len(first.loss), seq_len)
        for result, (in_call, in_text) in zip(results, tokens, strict=True):
            loss[:, in_text] = result.loss[:, in_call]
    else:
        loss = weighted([result.loss for result in results])
    gradients = {name: weighted([result.gradients[name] for result in results]) for name in first.gradients}
    return Returned(loss, gradients, first.dtypes)


def whole(patient: ModelPatient, *names: str, targets: Tensor | None = None, at: Tensor | None = None) -> Pattern:
    """The whole text in one call, with these labels and positions, or with the right ones."""
    everywhere = torch.arange(patient.seq_len)
    call = patient.call(patient.text, patient.labels if targets is None else targets, everywhere if at is None else at)
    return Pattern(names, (call,), itemgetter(0))


def sharding_mistakes(patient: ModelPatient, world_size: int, kind: str) -> list[Pattern]:
    """Every combination of wrong labels, wrong positions, and a ring that is not called; first the right one.

    `kind` of the loss over the labels: "mean", "sum", or "other"; of the last kind, parts cannot be added.
    """
    patterns = []
    labels, ats = _wrong_labels(patient, world_size), _wrong_positions(patient, world_size)
    for (of_labels, targets), (of_positions, at) in product(labels, ats):
        patterns.append(whole(patient, *of_labels, *of_positions, targets=targets, at=at))
        names = ("ring_not_called", *of_labels, *of_positions)
        if kind != "other":
            patterns += _each_shard_alone(patient, patient.shards(world_size), names, targets, at, kind)
    return patterns


def _wrong_labels(patient: ModelPatient, world_size: int) -> list[Labels]:
    """The right labels, and, if the step takes labels, those that are shifted inside each shard."""
    found: list[Labels] = [((), patient.labels)]
    for last_is_the_first in (True, False) if "targets" in patient.takes else ():
        wrong = patient.labels.clone()
        for at in patient.shards(world_size):
            wrong[:, at[:-1]] = patient.text[:, at[1:]]
            wrong[:, at[-1]] = patient.text[:, at[0]] if last_is_the_first else IGNORED
        found.append((("labels_per_shard",), wrong))
    return found


def _wrong_positions(patient: ModelPatient, world_size: int) -> list[Labels]:
    """The right positions, and, if the step takes positions, those that wrong shards or a wrong rotation give."""
    everywhere, shards = torch.arange(patient.seq_len), patient.shards(world_size)
    if "positions" not in patient.takes:
        return [((), everywhere)]
    in_text = torch.cat(shards).argsort()
    believed = {"positions_per_shard": [torch.arange(len(at)) for at in shards]}
    believed |= {f"positions_of_{name}": patient.shards(world_size, name) for name in LAYOUTS if name != patient.layout}
    wrong = {name: torch.cat(others)[in_text] for name, others in believed.items()}
    wrong |= {"positions_missing": 0 * everywhere, "rotated_twice": 2 * everywhere}
    return [((), everywhere), *(((name,), at) for name, at in wrong.items())]


def _each_shard_alone(
    patient: ModelPatient, shards: list[Tensor], names: tuple[str, ...], targets: Tensor, at: Tensor, kind: str
) -> list[Pattern]:
    """Each rank sees its own shard only: a call for each, with the shard at the beginning, where it sees nothing else.

    The other tokens follow, without labels, so that a loss that is divided by S is still divided by S.
    """
    P, C = len(shards), len(shards[0])
    tokens = tuple((torch.arange(C), shard) for shard in shards)
    if "targets" not in patient.takes:  # the labels are the next tokens, so the shard must be the whole text
        if patient.layout != "contiguous":
            return []
        texts = tuple(Call(patient.text[:, shard[0] : shard[-1] + 2], {}) for shard in shards)
        return [  # a sum, or a mean
            Pattern(names, texts, partial(added, (weight,) * P, tokens, patient.seq_len)) for weight in (1.0, 1 / P)
        ]
    calls, counts = [], []
    for shard in shards:
        order = torch.cat([shard, *(other for other in shards if other is not shard)])
        text = torch.cat([patient.text[:, order], patient.text[:, -1:]], dim=1)
        own = targets[:, order].clone()
        own[:, C:] = IGNORED
        calls.append(patient.call(text, own, at[order]))
        counts.append(int((own != IGNORED).sum()))
    weights = tuple(count / sum(counts) if kind == "mean" else 1.0 for count in counts)
    return [Pattern(names, tuple(calls), partial(added, weights, tokens, patient.seq_len))]


def mean_of_means(patient: ModelPatient, world_size: int, targets: Tensor) -> Pattern:
    """Each rank's part of the loss is the mean over its own labels, and the parts are averaged."""
    calls: list[Call] = []
    shards = patient.shards(world_size)
    for shard in shards:
        own = torch.full_like(targets, IGNORED)
        own[:, shard] = targets[:, shard]
        calls += whole(patient, targets=own).calls
    weights = [1 / world_size] * world_size
    tokens = [(shard, shard) for shard in shards]
    return Pattern(("mean_of_means",), tuple(calls), partial(added, weights, tokens, patient.seq_len))


def norm_of(result: Returned) -> float:
    """The norm of all gradients together."""
    return math.sqrt(sum(gradient.norm().item() ** 2 for gradient in result.gradients.values()))


def is_clipped(results: Sequence[Returned]) -> bool:
    """Whether the gradients are clipped: the results are of different labels, and the norms are alike."""
    norms = [norm_of(result) for result in results]
    return max(norms) - min(norms) < ALIKE * max(norms)


def slack(exact: Returned) -> float:
    """How far EPS moves a prediction from clipped gradients, as a share of its norm.

    A gradient that is clipped to c has a norm of c or more, so the factor c / (|g| + EPS) is off by EPS/c at most. The
    prediction and the result are both off.
    """
    return 2 * EPS / norm_of(exact)


def clipped_per_rank(patient: ModelPatient, world_size: int) -> Pattern:
    """Each rank clips its rows of the weights, as torch.chunk deals them out, by the norm of its rows."""

    def rows_clipped(results: Sequence[Returned]) -> Returned:
        [exact] = results
        gradients = {name: gradient.clone() for name, gradient in exact.gradients.items()}
        for rank in range(world_size):  # the last ranks may have fewer rows, or none
            rows = [parts[rank] for x in gradients.values() if x.dim() and len(parts := x.chunk(world_size)) > rank]
            norm = math.sqrt(sum(part.norm().item() ** 2 for part in rows))
            for part in rows:
                part *= norm_of(exact) / max(norm, EPS)  # a part is a view of its gradient
        return replace(exact, gradients=gradients)

    return Pattern(("clipped_per_rank",), whole(patient).calls, rows_clipped)
