"""Mistakes of whole models: for each, the calls on one process that give its results.

    labels_per_shard       the whole text in one call, with these wrong labels
    positions_per_shard    the whole text in one call, with these wrong positions; also positions_of_zigzag, ...
    ring_not_called        a call for each rank, with its shard at the beginning of the text; the results are added
    mean_of_means          a call for each rank, with the labels of its shard only; a weighted sum of the results
    keys_rotated_on_arrival    the same, with the positions of its shard for all tokens
    clipped_per_rank       the whole text in one call, and the rows of each rank clipped by their own norm
    the others             factors of the right result: model_comparison.py

Clipping, g -> g min(1, c / |g|), shows on one process: whatever the labels are, the norm of all gradients is c. Then
factors are hidden, and the gradients of parts of the text cannot be added.

Shapes: those of model_calls.py; a shard is the positions (C,) of a rank's tokens.

Before: model_calls.py. After: model_comparison.py.
Source: README.md names who had each, where that is public; clipping: Pascanu, Mikolov & Bengio 2013, algorithm 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from ring_doctor.asking.case import LAYOUTS
from ring_doctor.mistakes import words
from ring_doctor.whole_models.model_calls import ModelPatient, Returned
from ringlab.models.transformer import IGNORED

MISTAKES = words("Whole models", Path(__file__).with_name("README.md"))
EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by |g| + EPS
Prediction = tuple[tuple[str, ...], Callable[[], Returned | str]]  # mistakes, and what the step returns with them
Part = tuple[float, Returned | str, Tensor, Tensor]  # a weight, a result, and whose losses count: see `added`


def added(seq_len: int, parts: Sequence[Part]) -> Returned | str:
    """Results times their weights, together; where one is missing, why. The losses of tokens are put in their places.

    A part tells whose losses count, by their places in its call and in the text.
    """
    results = [result for _, result, _, _ in parts if isinstance(result, Returned)]
    if missing := [result for _, result, _, _ in parts if isinstance(result, str)]:
        return missing[0]
    first, weights = results[0], torch.tensor([weight for weight, *_ in parts], dtype=torch.float64)

    def weighted(numbers: list[Tensor]) -> Tensor:
        return torch.tensordot(weights, torch.stack(numbers), dims=1)

    gradients = {name: weighted([result.gradients[name] for result in results]) for name in first.gradients}
    if not first.loss.dim():
        return Returned(weighted([result.loss for result in results]), gradients, first.dtypes)
    loss = first.loss.new_zeros(len(first.loss), seq_len)
    for (_, _, in_call, in_text), result in zip(parts, results, strict=True):
        loss[:, in_text] = result.loss[:, in_call]
    return Returned(loss, gradients, first.dtypes)


def sharding_mistakes(patient: ModelPatient, world_size: int, kinds: Sequence[str]) -> list[Prediction]:
    """Every combination of wrong labels, wrong positions, and a ring that is not called; first the right one.

    `kinds` of loss, over the labels, that are tried where results of ranks are added: "mean", "sum".
    """
    P, shards = world_size, patient.shards(world_size)
    labels = [((), patient.labels), *(_wrong_labels(patient, shards) if "targets" in patient.takes else [])]
    ats: list[tuple[tuple[str, ...], Tensor]] = [((), torch.arange(patient.seq_len))]
    ats += _wrong_positions(patient, shards) if "positions" in patient.takes else []
    found: list[Prediction] = []
    for (of_labels, targets), (of_positions, at) in product(labels, ats):
        names = (*of_labels, *of_positions)
        found.append((names, partial(patient.alone, targets, at)))
        for kind in kinds:
            found.append((("ring_not_called", *names), partial(_each_shard_alone, patient, shards, targets, at, kind)))
    for kind in kinds if patient.takes == {"positions", "targets"} and patient.layout != "contiguous" else ():
        rows = partial(rank_by_rank, patient, P, patient.labels, 1 / P if kind == "mean" else 1.0, own_positions=True)
        found.append((("keys_rotated_on_arrival",), rows))
    return found


def _wrong_labels(patient: ModelPatient, shards: list[Tensor]) -> list[tuple[tuple[str, ...], Tensor]]:
    """Labels that are shifted inside each shard: its last one is its first token, or ignored."""
    rolled = patient.labels.clone()
    for at in shards:
        rolled[:, at] = patient.text[:, at].roll(-1, dims=1)
    ignored = rolled.clone()
    ignored[:, [int(at[-1]) for at in shards]] = IGNORED
    return [(("labels_per_shard",), rolled), (("labels_per_shard",), ignored)]


def _wrong_positions(patient: ModelPatient, shards: list[Tensor]) -> list[tuple[tuple[str, ...], Tensor]]:
    """Positions (S,) that wrong shards or a wrong rotation give."""
    in_text, right = torch.cat(shards).argsort(), torch.arange(patient.seq_len)
    believed = {"positions_per_shard": [torch.arange(len(at)) for at in shards]}
    others = [name for name in LAYOUTS if name != patient.layout]
    believed |= {f"positions_of_{name}": patient.shards(len(shards), name) for name in others}
    wrong = {name: torch.cat(of_ranks)[in_text] for name, of_ranks in believed.items()}
    wrong |= {"positions_missing": 0 * right, "rotated_twice": 2 * right}
    return [((name,), at) for name, at in wrong.items()]


def _each_shard_alone(
    patient: ModelPatient, shards: list[Tensor], targets: Tensor, at: Tensor, kind: str
) -> Returned | str:
    """Each rank sees its own shard only: a call for each, with the shard at the beginning, where it sees nothing else.

    The other tokens follow, without labels, so that a loss that is divided by S is still divided by S. A step without
    targets= takes the next tokens for labels, so its text must be the shard alone, which is contiguous.
    """
    C, parts, counts = len(shards[0]), [], []
    for shard in shards:
        if "targets" in patient.takes:
            order = torch.cat([shard, *(other for other in shards if other is not shard)])
            text, own = torch.cat([patient.text[:, order], patient.text[:, -1:]], dim=1), targets[:, order].clone()
            own[:, C:] = IGNORED
        else:
            order, text, own = shard, patient.text[:, shard[0] : shard[-1] + 2], targets[:, shard]
        counts.append(int((own != IGNORED).sum()))
        parts.append((1.0, patient.alone(own, at[order], text), torch.arange(C), shard))
    if kind == "mean":
        parts = [(count / sum(counts), *part[1:]) for count, part in zip(counts, parts, strict=True)]
    return added(patient.seq_len, parts)


def rank_by_rank(
    patient: ModelPatient, world_size: int, targets: Tensor, weight: float, *, own_positions: bool = False
) -> Returned | str:
    """A call for each rank, with its own labels only, times a weight; or with its positions for every rank's tokens."""
    parts, shards = [], patient.shards(world_size)
    for shard in shards:
        own = torch.full_like(targets, IGNORED)
        own[:, shard] = targets[:, shard]
        at = shard.repeat(world_size)[torch.cat(shards).argsort()] if own_positions else None
        parts.append((weight, patient.alone(own, at), shard, shard))
    return added(patient.seq_len, parts)


def norm_of(result: Returned) -> float:
    """The norm of all gradients together."""
    return math.hypot(*(gradient.norm().item() for gradient in result.gradients.values()))


def clipped_per_rank(exact: Returned, world_size: int) -> Returned:
    """Each rank clips its rows of the weights, as torch.chunk deals them out, by the norm of its rows."""
    gradients = {name: gradient.clone() for name, gradient in exact.gradients.items()}
    for rank in range(world_size):  # the last ranks may have fewer rows, or none
        rows = [parts[rank] for x in gradients.values() if x.dim() and len(parts := x.chunk(world_size)) > rank]
        factor = norm_of(exact) / max(math.hypot(*(part.norm().item() for part in rows)), EPS)
        for part in rows:
            part *= factor  # a part is a view of its gradient
    return replace(exact, gradients=gradients)
