"""Checks of chapter 11: the loss of a rank, the norm of a gradient in slices."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from notebooks.source.checks.answers import NotYet, compare_formula, draws, exercise, number


@exercise
def check_rank_loss(answer: Callable[..., float]) -> str | None:
    """(sum of losses, labels of the rank, labels of the batch, dp, cp, tp) -> loss; fully_shard averages over dp·cp."""

    def right(total: float, labels_here: int, labels_of_batch: int, dp: int, cp: int, tp: int) -> float:
        return total / labels_of_batch * dp * cp

    def times(factor: Callable[[int, int, int], float]) -> Callable[..., float]:
        return lambda total, here, batch, dp, cp, tp: total / batch * factor(dp, cp, tp)

    compare_formula(
        answer,
        right,
        {
            "fully_shard averages: every gradient is at 1 / (dp · cp) of the right one": times(lambda dp, cp, tp: 1),
            "fully_shard divides already: undo that, do not do it twice": times(lambda dp, cp, tp: 1 / (dp * cp)),
            "fully_shard averages over the rings too: cp alone is too little": times(lambda dp, cp, tp: cp),
            "fully_shard averages over the ranks of a ring too: dp alone is too little": times(lambda dp, cp, tp: dp),
            "tp ranks have the same tokens, and fully_shard does not average over them": times(
                lambda dp, cp, tp: dp * cp * tp
            ),
            "in a mean over the rank's own labels, labels weigh more on a rank that has few": lambda s, n, *_: s / n,
            "a mean over the rank's own labels is wrong, and no factor cures it": lambda s, n, N, dp, cp, tp: (
                s / n * dp * cp
            ),
            "labels are not counted: a larger batch would take larger steps": lambda s, n, N, dp, cp, tp: s * dp * cp,
            "a sum alone: a larger batch would take larger steps": lambda s, *_: s,
        },
        [(12.0, 6, 50, 2, 3, 5), (7.5, 4, 9, 1, 2, 2), (30.0, 11, 70, 3, 1, 2), (1.0, 2, 64, 4, 5, 1)],
        "every label of the batch has the same weight, and fully_shard divides by dp · cp",
        lambda random: (
            random.uniform(0.1, 99),
            random.randint(1, 50),
            random.randint(50, 999),
            *(random.randint(1, 9) for _ in range(3)),
        ),
    )
    compare_formula(answer, right, {}, [(0.0, 0, 9, 2, 2, 1)], "a rank may hold only padding; its loss is 0")
    return "tp does not appear, and labels_here is needed only for the count of the batch"


@exercise
def check_gradient_norm(answer: Callable[[list[list[Tensor]]], Any]) -> str | None:
    """The slices of all gradients, rank by rank -> the norm of the whole gradient."""
    generator = torch.Generator().manual_seed(0)
    # Three weights, 3 columns wide, cut by rows as fully_shard does it: the last rank may get no row of a weight.
    drawn = [(r.randint(1, 9), [r.randint(1, 12) for _ in range(r.randint(1, 5))]) for r in draws()]
    for world_size, rows in (*product((4, 3, 1), ([8, 7, 6], [12, 3, 5])), *drawn):
        weights = [(i + 1) * torch.randn(n, 3, generator=generator, dtype=torch.float64) for i, n in enumerate(rows)]
        slices = [[_rows(weight, rank, world_size) for weight in weights] for rank in range(world_size)]
        given, expected = number(answer(slices)), torch.cat(weights).norm()
        if not torch.isclose(torch.tensor(given, dtype=torch.float64), expected):
            raise NotYet(f"{world_size} rank(s), norm {expected:.4f}, you say {given:.4f}: {_why(given, slices)}")
    return "this is one all_reduce of one number: the sum of squares of each rank"


def _rows(weight: Tensor, rank: int, world_size: int) -> Tensor:
    chunks = weight.chunk(world_size)
    return chunks[rank] if rank < len(chunks) else weight[:0]


def _why(given: float, slices: Sequence[Sequence[Tensor]]) -> str:
    norms = torch.stack([torch.cat(list(mine)).norm() for mine in slices])
    parts = torch.stack([part.norm() for mine in slices for part in mine])
    hints = {
        "that is the norm of the slices of rank 0": norms[0],
        "that is the norm of the slices of the last rank": norms[-1],
        "that is the largest norm of a rank": norms.max(),
        "norms do not add up; their squares do": norms.sum(),
        "norms do not add up, those of slices neither; their squares do": parts.sum(),
        "that is the mean of the norms of the ranks; each rank has its own part of the squares": norms.mean(),
        "the square root is missing": norms.square().sum(),
        "the squares of the ranks are added up, not averaged": norms.square().mean().sqrt(),
        "norms are squared before they are added": norms.sum().sqrt(),
    }
    for hint, wrong in hints.items():
        if torch.isclose(torch.tensor(given, dtype=torch.float64), wrong):
            return hint
    return "take every number of every slice of every rank once: the root of the sum of their squares"
