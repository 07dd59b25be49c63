"""Checks of chapter 17: each token with the one before it, the longest text of a ring, what a player sees."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from notebooks.checks.answers import NotYet, compare_formula, difference, draws, exercise, numbers
from ringlab.training.layouts import LAYOUTS, positions


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


@exercise
def check_window(answer: Callable[[int, list[int], int, int], Any]) -> str | None:
    """(START, all pulls, t, window) -> the tokens that a player sees before pull t."""
    games = [(20, [3, 15, 8, 15, 1, 9, 12], window) for window in (3, 1, 5, 30)]
    games += [(r.randint(20, 40), [r.randrange(20) for _ in range(12)], r.randint(1, 14)) for r in draws()]
    for start, pulls, window in games:
        for t in range(len(pulls) + 1):
            expected = [start, *pulls[:t]][-window:]
            given = numbers(answer(start, pulls, t, window), "a list of tokens")
            if given == expected:
                continue
            wrong = {
                "the window must move on: it holds the last tokens, not the first": [start, *pulls[:t]][:window],
                "START is a token too, and it leaves the window like any other": [start, *pulls[:t][-window:]],
                "that is one token too many": [start, *pulls[:t]][-window - 1 :],
                "the game begins with START: before the first pull the player sees it": pulls[:t][-window:],
                "pull number t has not been made yet: the player must choose it": [start, *pulls[: t + 1]][-window:],
                "before pull number t, t pulls have been made": [start, *pulls[: max(t - 1, 0)]][-window:],
            }
            hint = next((hint for hint, tokens in wrong.items() if given == tokens), f"expected {expected}")
            raise NotYet(f"window {window}, t = {t}, you say {given}: {hint}")
