"""Wrong answers to the exercises of chapter 7, and what each must be told."""

import math

import torch

from notebooks.checks.causal_balance import check_idle_limit, check_striped_mask, check_zigzag_positions


def zigzag_of_even_worlds(rank, seq_len, P):
    half = seq_len // (4 * (P // 2))
    late = 2 * P - 1 - rank
    return [*range(rank * half, (rank + 1) * half), *range(late * half, (late + 1) * half)]


def mask_of_even_chunks(rank, block, C):
    return torch.ones(C // 2 * 2, C // 2 * 2).tril(0 if block <= rank else -1).bool()


def added(rank, block, C, hidden):
    """A mask that is added to the scores."""
    return torch.zeros(C, C).masked_fill(torch.ones(C, C).tril(-(block > rank)) == 0, hidden)


WRONG_ANSWERS = [
    (check_zigzag_positions, lambda r, S, P: [2 * r, 2 * r + 1, 8 + 2 * r, 9 + 2 * r], "counted from the end"),
    (check_zigzag_positions, lambda r, S, P: list(range(r * S // P, (r + 1) * S // P)), "contiguous layout"),
    (check_zigzag_positions, lambda r, S, P: range(r, S, P), "striped layout"),
    (check_zigzag_positions, lambda r, S, P: [14, 15, 0, 1], "rising order"),
    (check_zigzag_positions, lambda r, S, P: [r], "2 early and 2 late"),
    (check_zigzag_positions, zigzag_of_even_worlds, "S = 24, P = 3, rank 0"),
    (check_zigzag_positions, lambda r, S, P: [2 * r, 2 * r + 1, 14 - 2 * r, 15 - 2 * r], "S = 24, P = 3, rank 0"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C).tril().bool(), "the diagonal is hidden"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C).tril(-(block != rank)).bool(), "is visible"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C).triu(1).bool(), "True for the hidden pairs"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C).triu().bool(), "turned over"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C).bool(), "every tile is a triangle"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C + 1).bool(), "expected shape (4, 4), got (4, 5)"),
    (check_striped_mask, lambda rank, block, C: torch.eye(C).bool(), "must not be later"),
    (check_striped_mask, mask_of_even_chunks, "expected shape (5, 5), got (4, 4), for C = 5, rank 0 and block 0"),
    (check_striped_mask, lambda rank, block, C: torch.ones(4, 4).tril(-(block > rank)).bool(), "for C = 5, rank 0"),
    (check_idle_limit, 7 / 8, "rank 7 never waits"),
    (check_idle_limit, 7 / 16, "round 0 is half"),
    (check_idle_limit, 0.5, "limit of many"),
    (check_idle_limit, 8 / 15, "in which they work"),
    (check_idle_limit, 3 / 7, "limit of 4 ranks"),
    (check_idle_limit, 0.47, "0.47 is right but not exact enough: give 3 decimals"),
    *((check_idle_limit, share, "not per cent") for share in (46.67, 46.7, 46.666, 47)),
    (check_idle_limit, 1.01 * 7 / 15, "32 blocks of work"),
    (check_idle_limit, 0.1, "32 blocks of work"),
    (check_idle_limit, "7/15", "expected a number, got str"),
    (check_zigzag_positions, lambda r, S, P: "0, 1", "expected a list of positions, got str"),
    (check_zigzag_positions, lambda r, S, P: [[2 * r, 2 * r + 1], [14, 15]], "expected a number, got list"),
    (check_striped_mask, lambda rank, block, C: [[True] * C] * C, "every tile is a triangle"),
    (check_striped_mask, lambda rank, block, C: torch.zeros(C, C), "every tile is a triangle"),
    (check_striped_mask, lambda rank, block, C: added(rank, block, C, -torch.inf), "not numbers to add to scores"),
    (check_striped_mask, lambda rank, block, C: added(rank, block, C, -1e30), "not numbers to add to scores"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C).tril(-1).bool(), "the diagonal is visible"),
    (check_idle_limit, True, "expected a number, got bool"),
    (check_idle_limit, math.nan, "32 blocks of work"),
]
