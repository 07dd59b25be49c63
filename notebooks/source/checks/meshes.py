"""Checks of chapter 11: the loss of a rank, the norm of a gradient in slices."""

from itertools import product

import torch

from notebooks.source.checks.answers import Exercise, torch_generator


def _times(factor):
    return lambda total, here, batch, dp, cp, tp: total / batch * factor(dp, cp, tp)


check_rank_loss = Exercise(  # whose gradients fully_shard averages over dp · cp ranks
    right=lambda total, labels_here, labels_of_batch, dp, cp, tp: total / labels_of_batch * dp * cp,
    wrong={
        "fully_shard averages: every gradient is at 1 / (dp · cp) of the right one": _times(lambda dp, cp, tp: 1),
        "fully_shard divides already: undo that, do not do it twice": _times(lambda dp, cp, tp: 1 / (dp * cp)),
        "fully_shard averages over the rings too: cp alone is too little": _times(lambda dp, cp, tp: cp),
        "fully_shard averages over the ranks of a ring too: dp alone is too little": _times(lambda dp, cp, tp: dp),
        "tp ranks have the same tokens, and fully_shard does not average over them": _times(
            lambda dp, cp, tp: dp * cp * tp
        ),
        "in a mean over the rank's own labels, labels weigh more on a rank that has few": lambda s, n, *_: s / n,
        "a mean over the rank's own labels is wrong, and no factor cures it": (
            lambda s, n, N, dp, cp, tp: s / n * dp * cp
        ),
        "labels are not counted: a larger batch would take larger steps": lambda s, n, N, dp, cp, tp: s * dp * cp,
        "a sum alone: a larger batch would take larger steps": lambda s, *_: s,
    },
    cases={
        "every label of the batch has the same weight, and fully_shard divides by dp · cp": [
            (12.0, 6, 50, 2, 3, 5),
            (7.5, 4, 9, 1, 2, 2),
            (30.0, 11, 70, 3, 1, 2),
            (1.0, 2, 64, 4, 5, 1),
        ],
        "a rank may hold only padding; its loss is 0": [(0.0, 0, 9, 2, 2, 1)],
    },
    draw=lambda r: (r.uniform(0.1, 99), r.randint(1, 50), r.randint(50, 999), *(r.randint(1, 9) for _ in range(3))),
    remark="tp does not appear, and labels_here is needed only for the count of the batch",
)


def _slices(P, rows, generator):
    """The weights' rows of each rank, as fully_shard cuts them: the last rank may get no row of a weight."""
    weights = [(i + 1) * torch.randn(n, 3, generator=generator, dtype=torch.float64) for i, n in enumerate(rows)]
    chunks = [weight.chunk(P) for weight in weights]
    return ([[of[rank] if rank < len(of) else of[0][:0] for of in chunks] for rank in range(P)],)


def _norms(slices):
    """The norm of each rank's part, (P,)."""
    return torch.stack([torch.cat(mine).norm() for mine in slices])


GENERATOR = torch.Generator().manual_seed(0)
check_gradient_norm = Exercise(  # the slices of all gradients, rank by rank -> the norm of the whole gradient
    right=lambda slices: torch.cat([part for mine in slices for part in mine]).norm().item(),
    wrong={
        "that is the norm of the slices of rank 0": lambda slices: _norms(slices)[0],
        "that is the norm of the slices of the last rank": lambda slices: _norms(slices)[-1],
        "that is the largest norm of a rank": lambda slices: _norms(slices).max(),
        "norms do not add up; their squares do": lambda slices: _norms(slices).sum(),
        "norms do not add up, those of slices neither; their squares do": (
            lambda slices: sum(part.norm() for mine in slices for part in mine)
        ),
        "that is the mean of the norms of the ranks; each rank has its own part of the squares": (
            lambda slices: _norms(slices).mean()
        ),
        "the square root is missing": lambda slices: _norms(slices).square().sum(),
        "the squares of the ranks are added up, not averaged": lambda slices: _norms(slices).square().mean().sqrt(),
        "norms are squared before they are added": lambda slices: _norms(slices).sum().sqrt(),
    },
    cases={
        "take every number of every slice of every rank once: the root of the sum of their squares": [
            _slices(P, rows, GENERATOR) for P, rows in product((4, 3, 1), ([8, 7, 6], [12, 3, 5]))
        ]
    },
    draw=lambda r: _slices(r.randint(1, 9), [r.randint(1, 12) for _ in range(r.randint(1, 5))], torch_generator(r)),
    remark="this is one all_reduce of one number: the sum of squares of each rank",
)
