"""Checks of chapter 15: each token with the one before it, the longest text of a ring."""

import torch

from notebooks.source.checks.answers import Exercise, torch_generator
from ringlab.ring.layouts import LAYOUTS, positions


def _pairs(before):
    """The rank's tokens (B, C, 2), each with the one that before(texts, at) says stands before it."""
    return lambda texts, at: torch.stack([texts[:, at + 1], before(texts, at)], dim=2)


def _texts(layout, S, rank, P, generator):
    return torch.randperm(1000, generator=generator)[: 2 * (1 + S)].view(2, -1), positions(layout, S, rank, P)


def _drawn(random):
    P = random.randint(1, 7)
    where = random.choice(list(LAYOUTS)), 2 * random.randint(1, 4) * P, random.randrange(P), P
    return _texts(*where, torch_generator(random))


GENERATOR = torch.Generator().manual_seed(0)
check_pairs = Exercise(  # texts (B, 1 + S), a rank's positions (C,) -> its tokens (B, C, 2), each with the one before
    right=_pairs(lambda texts, at: texts[:, at]),
    wrong={
        "that is the token and the one after it: with START in front, position s is token s + 1": (
            lambda texts, at: torch.stack([texts[:, at], texts[:, at + 1]], dim=2)
        ),
        "the token before the first one of a chunk is on another rank: take it from the text": _pairs(
            lambda texts, at: texts[:, at + 1].roll(1, dims=1)
        ),
        "the token before the first one of a chunk is START on one rank only": _pairs(
            lambda texts, at: torch.cat([texts[:, :1], texts[:, at + 1][:, :-1]], dim=1)
        ),
        "the last token of the text, an answer, does not come before the first: START does": _pairs(
            lambda texts, at: texts[:, 1:].roll(1, dims=1)[:, at]
        ),
    },
    cases={
        "the token at position s is text[s + 1], and text[s] stands before it": [
            *(_texts(layout, 12, rank, 3, GENERATOR) for layout in LAYOUTS for rank in range(3)),
            _texts("contiguous", 6, 0, 1, GENERATOR),
        ]
    },
    draw=_drawn,
    remark="every rank has the whole text's ids here; a loader reads two tokens at each place instead",
)

check_longest_text = Exercise(  # memory and weights of a rank, bytes kept for a token, P -> tokens
    right=lambda memory, weights, kept, P: P * ((memory - weights) // kept),
    wrong={
        "that is what one rank holds; a ring of P holds P times as many tokens": lambda m, w, k, P: (m - w) // k,
        "the weights need memory too": lambda m, w, k, P: P * (m // k),
        "every rank has all the weights: take them from the memory of each": lambda m, w, k, P: (P * m - w) // k,
        "each rank has whole tokens, so round on a rank": lambda m, w, k, P: P * (m - w) // k,
        "a rank keeps bytes for its own tokens only, and the ring adds P times the tokens": (
            lambda m, w, k, P: (m - w) // (k * P)
        ),
    },
    cases={
        "a rank has room for (memory - weights) // kept tokens, and there are P ranks": [
            (1000, 90, 7, 4),
            (500, 120, 11, 3),
            (64, 1, 5, 1),
            (10_000, 3_000, 33, 8),
        ]
    },
    draw=lambda random: (random.randint(5000, 9999), random.randint(1, 5000), *(random.randint(1, 99) for _ in "kP")),
)
