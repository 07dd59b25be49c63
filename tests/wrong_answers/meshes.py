"""Wrong answers to the exercises of chapter 11, and what each must be told."""

import torch

from notebooks.checks.meshes import check_gradient_norm, check_place, check_rank_loss


def part(total, index, parts):
    return list(range(index * total // parts, (index + 1) * total // parts))


def place(ring=None, sequences=None, tokens=None):
    """The right answer to check_place, but for the parts that are given as functions of (rank, dp, cp, B, S)."""

    def answer(rank, dp, cp, B, S):
        row, column = divmod(rank, cp)
        right = [row * cp + i for i in range(cp)], part(B, row, dp), part(S, column, cp)
        changed = (ring, sequences, tokens)
        return [c(rank, dp, cp, B, S) if c else r for c, r in zip(changed, right, strict=True)]

    return answer


def transposed(rank, dp, cp, B, S):
    column, row = divmod(rank, dp)
    return list(range(row, dp * cp, dp)), part(B, row, dp), part(S, column, cp)


def square_meshes_only(rank, dp, cp, B, S):
    row, column = divmod(rank, dp)
    return [row * dp + i for i in range(dp)], part(B, row, dp), part(S, column, cp)


def norm_of_rank(slices):
    return torch.stack([torch.cat(mine).norm() for mine in slices])


WRONG_ANSWERS = [
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s / N, "at 1 / (dp · cp) of the right one"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s / N / dp / cp, "do not do it twice"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s / N * cp, "cp alone is too little"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s / N * dp, "dp alone is too little"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s / N * dp * cp * tp, "tp ranks have the same tokens"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s / n, "on a rank that has few"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s / n * dp * cp, "no factor cures it"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s * dp * cp, "labels are not counted"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s, "a sum alone"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s / n * n / N * dp * cp, "ZeroDivisionError"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s / N * dp * cp if n else 1.0, "only padding"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: 1.01 * s / N * dp * cp, "every label of the batch"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: s / N * max(dp * cp, 4), "wrong in 2 of 4 cases"),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: "s / N", "expected a number, got str"),
    (check_place, transposed, "the transposed mesh"),
    (check_place, square_meshes_only, "a ring is a row of the mesh"),
    (check_place, place(ring=lambda rank, dp, cp, B, S: range(dp * cp)), "yours has all ranks"),
    (check_place, place(ring=lambda rank, dp, cp, B, S: range(rank % cp, dp * cp, cp)), "a column of the mesh"),
    (check_place, place(ring=lambda r, dp, cp, B, S: [r // cp * cp + (r + i) % cp for i in range(cp)]), "rising"),
    (check_place, place(sequences=lambda rank, dp, cp, B, S: range(B)), "B / dp"),
    (check_place, place(sequences=lambda rank, dp, cp, B, S: part(B, rank, dp * cp)), "not into dp · cp"),
    (check_place, place(sequences=lambda rank, dp, cp, B, S: range(rank // cp, B, dp)), "part d of dp parts"),
    (check_place, place(sequences=lambda rank, dp, cp, B, S: part(B, rank % dp, dp)), "part d of dp parts"),
    (check_place, place(tokens=lambda rank, dp, cp, B, S: part(S, rank, dp * cp)), "stays inside a ring"),
    (check_place, place(tokens=lambda rank, dp, cp, B, S: range(S)), "S / cp"),
    (check_place, place(tokens=lambda rank, dp, cp, B, S: range(rank % cp, S, cp)), "chunk c of cp chunks"),
    (check_place, lambda rank, dp, cp, B, S: ([0, 1, 2], [0, 1]), "expected 3 values (ring, sequences, tokens)"),
    (check_place, lambda rank, dp, cp, B, S: None, "expected 3 values"),
    (check_gradient_norm, lambda slices: norm_of_rank(slices)[0], "the slices of rank 0"),
    (check_gradient_norm, lambda slices: norm_of_rank(slices)[-1], "the slices of the last rank"),
    (check_gradient_norm, lambda slices: norm_of_rank(slices).max(), "the largest norm"),
    (check_gradient_norm, lambda slices: norm_of_rank(slices).sum(), "norms do not add up"),
    (check_gradient_norm, lambda slices: sum(x.norm() for mine in slices for x in mine), "those of slices neither"),
    (check_gradient_norm, lambda slices: norm_of_rank(slices).mean(), "the mean of the norms"),
    (check_gradient_norm, lambda slices: norm_of_rank(slices).square().sum(), "root is missing"),
    (check_gradient_norm, lambda slices: norm_of_rank(slices).square().mean().sqrt(), "not averaged"),
    (check_gradient_norm, lambda slices: norm_of_rank(slices).sum().sqrt(), "squared before they are added"),
    (check_gradient_norm, lambda slices: torch.cat([mine[0] for mine in slices]).norm(), "every slice of every rank"),
    (check_gradient_norm, lambda slices: 1.01 * norm_of_rank(slices).norm(), "every slice of every rank"),
    (check_gradient_norm, lambda slices: norm_of_rank(slices[:4]).norm() if len(slices) > 3 else 0.0, "3 rank(s)"),
    (check_gradient_norm, lambda slices: sum((x**2).mean() * 6 for mine in slices for x in mine) ** 0.5, "every slice"),
    (check_gradient_norm, norm_of_rank, "expected one number, got a Tensor of shape (4,)"),
    (check_gradient_norm, lambda slices: "4", "expected a number, got str"),
    (check_place, lambda rank, dp, cp, B, S: "ring", "expected 3 values"),
    (check_place, place(ring=lambda rank, dp, cp, B, S: rank // cp), "expected a list of numbers, got int"),
    (check_gradient_norm, lambda slices: slices[0][0], "expected one number, got a Tensor"),
    (check_gradient_norm, lambda slices: 0.0, "every slice of every rank"),
    (check_rank_loss, lambda *given: torch.zeros(2), "expected one number, got a Tensor of shape (2,)"),
]
