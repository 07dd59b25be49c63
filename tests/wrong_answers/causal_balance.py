"""Wrong answers to the exercises of chapter 7, and what each must be told."""

import torch

from notebooks.checks.causal_balance import check_idle_limit, check_striped_mask, check_zigzag_positions

WRONG_ANSWERS = [
    (check_zigzag_positions, lambda r, S, P: [2 * r, 2 * r + 1, 8 + 2 * r, 9 + 2 * r], "counted from the end"),
    (check_zigzag_positions, lambda r, S, P: list(range(r * S // P, (r + 1) * S // P)), "contiguous layout"),
    (check_zigzag_positions, lambda r, S, P: range(r, S, P), "striped layout"),
    (check_zigzag_positions, lambda r, S, P: [14, 15, 0, 1], "rising order"),
    (check_zigzag_positions, lambda r, S, P: [r], "2 early and 2 late"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C).tril().bool(), "the diagonal is hidden"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C).tril(-(block != rank)).bool(), "is visible"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C).triu(1).bool(), "True for the hidden pairs"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C).triu().bool(), "turned over"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C).bool(), "every tile is a triangle"),
    (check_striped_mask, lambda rank, block, C: torch.ones(C, C + 1).bool(), "expected shape (4, 4), got (4, 5)"),
    (check_striped_mask, lambda rank, block, C: torch.eye(C).bool(), "must not be later"),
    (check_idle_limit, 7 / 8, "rank 7 never waits"),
    (check_idle_limit, 7 / 16, "round 0 is only half"),
    (check_idle_limit, 0.5, "limit of many"),
    (check_idle_limit, 8 / 15, "in which they work"),
    (check_idle_limit, 0.1, "32 blocks of work"),
]
