"""Mistakes of whole models: what they are, and which calls on one process return what P processes with one return.

    labels_per_shard       the whole text in one call, with these wrong labels
    positions_per_shard    the whole text in one call, with these wrong positions; also positions_of_zigzag, ...
    ring_not_called        a call for each rank, with its shard at the beginning of the text; the results are added
    mean_of_means          a call for each rank, with the labels of its shard only; a weighted sum of the results
    clipped_per_rank       the whole text in one call, and the rows of each rank clipped by their own norm
    the others             factors of the right result: model_comparison.py

Clipping, g -> g min(1, c / |g|), shows on one process: whatever the labels are, the norm of all gradients is c. Then
factors are hidden, and the gradients of parts of the text cannot be added.

Shapes: those of model_calls.py; a shard is the positions (C,) of a rank's tokens.

Before: model_calls.py. After: model_comparison.py.
Source: each entry names who had it, where that is public; clipping: Pascanu, Mikolov & Bengio 2013, algorithm 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ring_doctor.case import LAYOUTS
from ring_doctor.mistakes import Mistake
from ring_doctor.model_calls import Call, ModelPatient, Returned
from ringlab.models.transformer import IGNORED

# fmt: off
ROWS: tuple[tuple[Any, ...], ...] = (  # name, chapter, what it is, where to look, who had it
    ("labels_per_shard", 10,
     "Labels are shifted inside each shard, so the last token of a shard has a wrong label or none. In the zigzag "
     "layout the token in the middle has a wrong label too.",
     "the shift of the labels: shift first, then shard, text[:, 1:][:, at]; the loss must not shift them again",
     "huggingface/transformers PR #36607", "verl PR #4250", "bionemo-recipes PR #1449"),
    ("positions_per_shard", 10,
     "Each rank counts the positions of its tokens from 0. Distances to tokens of other ranks are wrong. In "
     "contiguous chunks a rank that rotates the keys of others with its own positions gives the same numbers.",
     "where the model gets its positions: from ringlab.positions(layout, S, rank, P), not from arange(C); keys are "
     "rotated before they travel", "vllm-project/speculators PR #871"),
    *((f"positions_of_{layout}", 7,
       f"The positions of the tokens are made for the {layout} layout, and the tokens are dealt out in another layout.",
       "the sharding: tokens, labels and positions must come from one call, with one layout") for layout in LAYOUTS),
    ("positions_missing", 10,
     "The ranks' model gives every token the same position: queries and keys are not rotated.",
     "the path from the positions to the rotation: an attention that replaces another must rotate too"),
    ("rotated_twice", 10,
     "Queries and keys are rotated twice, so every distance counts double.",
     "the rotation: either the model rotates, or the ring that replaces its attention, not both"),
    ("ring_not_called", 12,
     "Each rank attends to its own shard only, and no K/V block moves. Training works, with a shorter context.",
     "which attention the model really calls: count the messages, or print inside the ring",
     "axolotl PR #3928", "NVIDIA-NeMo/Automodel #3507"),
    ("mean_of_means", 11,
     "Each rank divides by the number of its own labels, and the ranks' means are averaged. This is right only while "
     "all ranks have equally many labels, so not with padding, prompts or documents.",
     "the division of the loss: divide by the labels of all ranks, as ringlab/models/mesh.py does in batch_loss"),
    ("loss_times_p", 11,
     "The reported loss is P times the right loss: the means of P ranks were added.",
     "the reduction of the reported loss over the ranks of the ring",
     "huggingface/transformers PR #48167", "SkyRL PR #1420"),
    ("loss_over_p", 11,
     "The reported loss is 1/P of the right loss: the parts of one sum were averaged.",
     "the reduction of the reported loss over the ranks of the ring: parts must be summed"),
    ("loss_not_reduced", 11,
     "Each rank reports the loss of its own tokens.",
     "the reported loss: sum the losses and the numbers of labels over the ring, then divide",
     "pytorch/torchtitan #3329"),
    ("gradients_times_p", 11,
     "The gradients are P times the right ones: summed where the loss was scaled already, or summed twice. Adam hides"
     " it, clipping does not.",
     "the factor of the loss, and the reduction of the gradients: one of them too many"),
    ("gradients_over_p", 11,
     "The gradients are 1/P of the right ones: DDP and fully_shard average parts that must be summed. Adam hides it, "
     "clipping does not.",
     "the factor of the loss: multiply by the number of ranks, as ringlab/models/mesh.py does in batch_loss",
     "NVIDIA/Megatron-LM #673 asks why the factor is there"),
    ("gradients_times_root_p", 11,
     "The gradients are √P times the right ones.",
     "a factor that was meant for a norm, or for the learning rate"),
    ("gradients_over_root_p", 11,
     "The gradients are 1/√P of the right ones: clipping took the norm over P ranks that hold equal gradients.",
     "the norm in clipping: gradients that every rank holds are counted once, and only shards are added up"),
    ("clipped_per_rank", 11,
     "Each rank clips its shard of the weights by the norm of this shard. The step then has another direction.",
     "the norm in clipping: add the squares of the shards over all ranks, and clip by that norm"),
    ("gradients_not_reduced", 11,
     "Each rank keeps the gradients of its own tokens, so the ranks' weights drift apart.",
     "the step before the optimizer: sum the gradients over the ring, with all_reduce, DDP or fully_shard"),
)
# fmt: on
MISTAKES = {name: Mistake(name, what, look, chapter, tuple(wild)) for name, chapter, what, look, *wild in ROWS}

EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by |g| + EPS
ALIKE = 1e-3  # norms that differ by less, as shares, are of clipped gradients: EPS moves them, if |g| is small


@dataclass(frozen=True)
class Pattern:
    """Mistakes, and the calls whose results, put together, are the result of a step with these mistakes."""

    names: tuple[str, ...]
    calls: tuple[Call, ...]
    together: Callable[[Sequence[Returned]], Returned]


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
    patterns, shards = [], patient.shards(world_size)
    labels, ats = [("", patient.labels)], [("", torch.arange(patient.seq_len))]
    labels += _wrong_labels(patient, shards) if "targets" in patient.takes else []
    ats += _wrong_positions(patient, shards) if "positions" in patient.takes else []
    for (of_labels, targets), (of_positions, at) in product(labels, ats):
        names = tuple(name for name in (of_labels, of_positions) if name)
        patterns.append(whole(patient, *names, targets=targets, at=at))
        if kind != "other":
            patterns += _each_shard_alone(patient, shards, ("ring_not_called", *names), targets, at, kind)
    return patterns


def _wrong_labels(patient: ModelPatient, shards: list[Tensor]) -> list[tuple[str, Tensor]]:
    """Labels that are shifted inside each shard: its last one is its first token, or ignored."""
    rolled = patient.labels.clone()
    for at in shards:
        rolled[:, at] = patient.text[:, at].roll(-1, dims=1)
    ignored = rolled.clone()
    ignored[:, [int(at[-1]) for at in shards]] = IGNORED
    return [("labels_per_shard", rolled), ("labels_per_shard", ignored)]


def _wrong_positions(patient: ModelPatient, shards: list[Tensor]) -> list[tuple[str, Tensor]]:
    """Positions (S,) that wrong shards or a wrong rotation give."""
    in_text, P = torch.cat(shards).argsort(), len(shards)
    believed = {"positions_per_shard": [torch.arange(len(at)) for at in shards]}
    believed |= {f"positions_of_{name}": patient.shards(P, name) for name in LAYOUTS if name != patient.layout}
    right = torch.arange(patient.seq_len)
    wrong = {name: torch.cat(others)[in_text] for name, others in believed.items()}
    return [*wrong.items(), ("positions_missing", 0 * right), ("rotated_twice", 2 * right)]


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
    weights, tokens = [1 / world_size] * world_size, [(shard, shard) for shard in shards]
    return Pattern(("mean_of_means",), tuple(calls), partial(added, weights, tokens, patient.seq_len))


def norm_of(gradients: Sequence[Tensor]) -> float:
    """The norm of all gradients together."""
    return math.sqrt(sum(gradient.norm().item() ** 2 for gradient in gradients))


def is_clipped(results: Sequence[Returned]) -> bool:
    """Whether the gradients are clipped: the results are of different labels, and the norms are alike."""
    norms = [norm_of([*result.gradients.values()]) for result in results]
    return max(norms) - min(norms) < ALIKE * max(norms)


def slack(exact: Returned) -> float:
    """How far EPS moves a prediction from clipped gradients, as a share of its norm.

    A gradient that is clipped to c has a norm of c or more, so the factor c / (|g| + EPS) is off by EPS/c at most. The
    prediction and the result are both off.
    """
    return 2 * EPS / norm_of([*exact.gradients.values()])


def clipped_per_rank(patient: ModelPatient, world_size: int) -> Pattern:
    """Each rank clips its rows of the weights, as torch.chunk deals them out, by the norm of its rows."""

    def rows_clipped(results: Sequence[Returned]) -> Returned:
        [exact] = results
        gradients = {name: gradient.clone() for name, gradient in exact.gradients.items()}
        largest = norm_of([*exact.gradients.values()])
        for rank in range(world_size):  # the last ranks may have fewer rows, or none
            rows = [parts[rank] for x in gradients.values() if x.dim() and len(parts := x.chunk(world_size)) > rank]
            factor = largest / max(norm_of(rows), EPS)
            for part in rows:
                part *= factor  # a part is a view of its gradient
        return replace(exact, gradients=gradients)

    return Pattern(("clipped_per_rank",), whole(patient).calls, rows_clipped)
