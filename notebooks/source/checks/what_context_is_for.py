"""Checks of chapter 15: each token with the one before it, the longest text of a ring."""

from collections.abc import Callable

import torch
from torch import Tensor

from notebooks.source.checks.answers import NotYet, compare_formula, difference, draws, exercise
from ringlab.ring.layouts import LAYOUTS, positions


@exercise
def check_pairs(answer: Callable[[Tensor, Tensor], Tensor]) -> str | None:
    """(texts (B, 1 + S), this rank's positions (C,)) -> its tokens (B, C, 2), each with the one before it."""
    drawn = [(r.choice(list(LAYOUTS)), r.randint(1, 4), r.randint(1, 7)) for r in draws()]
    for world_size, seq_len, layout in (
        *((3, 12, layout) for layout in LAYOUTS),
        (1, 6, "contiguous"),
        *((P, 2 * half * P, layout) for layout, half, P in drawn),
    ):
        texts = torch.randperm(1000)[: 2 * (1 + seq_len)].view(2, -1)
        for rank in range(world_size):
            at = positions(layout, seq_len, rank, world_size)
            own, before = texts[:, at + 1], texts[:, at]
            given = answer(texts, at)
            problem = difference(given, torch.stack([own, before], dim=2))
            if problem is None:
                continue
            wrong = {
                "that is the token and the one after it: with START in front, position s is token s + 1": [before, own],
                "the token before the first one of a chunk is on another rank: take it from the text": [
                    own,
                    own.roll(1, dims=1),
                ],
                "the token before the first one of a chunk is START on one rank only": [
                    own,
                    torch.cat([texts[:, :1].expand(2, 1), own[:, :-1]], dim=1),
                ],
                "the last token of the text, an answer, does not come before the first: START does": [
                    own,
                    texts[:, 1:].roll(1, dims=1)[:, at],
                ],
            }
            for hint, parts in wrong.items():
                if difference(given, torch.stack(parts, dim=2)) is None:
                    raise NotYet(f"{layout}, rank {rank} of {world_size}: {hint}")
            raise NotYet(f"{layout}, rank {rank} of {world_size}: {problem}")
    return "every rank has the whole text's ids here; a loader reads two tokens at each place instead"


@exercise
def check_longest_text(answer: Callable[..., float]) -> str | None:
    """(memory and weights of a rank, bytes kept for a token, P) -> tokens of the longest text."""
    compare_formula(
        answer,
        lambda memory, weights, kept, P: P * ((memory - weights) // kept),
        {
            "that is what one rank holds; a ring of P holds P times as many tokens": lambda m, w, k, P: (m - w) // k,
            "the weights need memory too": lambda m, w, k, P: P * (m // k),
            "every rank has all the weights: take them from the memory of each": lambda m, w, k, P: (P * m - w) // k,
            "each rank has whole tokens, so round on a rank": lambda m, w, k, P: P * (m - w) // k,
            "a rank keeps bytes for its own tokens only, and the ring adds P times the tokens": lambda m, w, k, P: (
                (m - w) // (k * P)
            ),
        },
        [(1000, 90, 7, 4), (500, 120, 11, 3), (64, 1, 5, 1), (10_000, 3_000, 33, 8)],
        "a rank has room for (memory - weights) // kept tokens, and there are P ranks",
        lambda random: (random.randint(5000, 9999), random.randint(1, 5000), *(random.randint(1, 99) for _ in "kP")),
    )
