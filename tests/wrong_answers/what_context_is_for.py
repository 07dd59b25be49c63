"""Wrong answers to the exercises of chapter 15, and what each must be told."""

import torch

from notebooks.checks.what_context_is_for import check_longest_text, check_pairs


def pairs(before):
    """The right tokens, beside the ones that `before` gives for (texts, at)."""
    return lambda texts, at: torch.stack([texts[:, at + 1], before(texts, at)], dim=2)


def own_chunk(texts, at):
    own = texts[:, at + 1]
    return torch.cat([texts[:, :1], own[:, :-1]], dim=1)


WRONG_ANSWERS = [
    (check_pairs, lambda texts, at: torch.stack([texts[:, at], texts[:, at + 1]], dim=2), "the one after it"),
    (check_pairs, pairs(lambda texts, at: texts[:, at + 1].roll(1, dims=1)), "is on another rank"),
    (check_pairs, pairs(own_chunk), "START on one rank only"),
    (check_pairs, pairs(lambda texts, at: texts[:, 1:].roll(1, dims=1)[:, at]), "START does"),
    (check_pairs, pairs(lambda texts, at: texts[:, at + 1]), "off by up to"),
    (check_pairs, lambda texts, at: texts[:, at + 1], "expected shape"),
    (check_pairs, lambda texts, at: [1, 2], "expected shape (2, 4, 2), got (2,)"),
    (
        check_pairs,
        lambda texts, at: torch.stack([texts[:, (at + 2) % texts.shape[1]], texts[:, at + 1]], dim=2),
        "off by up to",
    ),
    (check_longest_text, lambda m, w, k, P: (m - w) // k, "what one rank holds"),
    (check_longest_text, lambda m, w, k, P: P * (m // k), "weights need memory"),
    (check_longest_text, lambda m, w, k, P: (P * m - w) // k, "memory of each"),
    (check_longest_text, lambda m, w, k, P: P * (m - w) // k, "round on a rank"),
    (check_longest_text, lambda m, w, k, P: (m - w) // (k * P), "its own tokens only"),
    (check_longest_text, lambda m, w, k, P: P * ((m - w) // k) + 1, "wrong in 4 of 4 cases"),
    (check_longest_text, lambda m, w, k, P: "many", "expected a number, got str"),
    (check_longest_text, lambda m, w, k, P: P * (m - w) / k, "wrong in 3 of 4 cases"),
]
