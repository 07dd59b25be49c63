"""Checks of chapter 7: zigzag positions, the mask of a striped tile, the idle share."""

import torch

from notebooks.source.checks.answers import Exercise
from ringlab.ring.layouts import positions


def _positions(layout):
    return lambda rank, S, P: positions(layout, S, rank, P).tolist()


def _late_half_first(rank, S, P):
    at = _positions("zigzag")(rank, S, P)
    return at[len(at) // 2 :] + at[: len(at) // 2]


def _late_half_from_the_end(rank, S, P):
    half = S // (2 * P)
    return [start + i for start in (rank * half, (rank + P) * half) for i in range(half)]


def _place(random):
    half, P = random.randint(1, 5), random.randint(6, 12)
    return random.randrange(P), 2 * half * P, P


check_zigzag_positions = Exercise(  # -> where the tokens of this rank stand in the sequence
    right=lambda rank, S, P: _positions("zigzag")(rank, S, P),
    wrong={
        "the late half is counted from the end: rank r holds halves r and 2P - 1 - r": _late_half_from_the_end,
        "these are the right tokens; give them in rising order": _late_half_first,
        "that is the contiguous layout": _positions("contiguous"),
        "that is the striped layout": _positions("striped"),
    },
    cases={
        "a rank holds as many early as late tokens: halves r and 2P - 1 - r": [
            (rank, S, P) for S, P in ((16, 4), (24, 3), (30, 5), (4, 1), (12, 2)) for rank in range(P)
        ]
    },
    draw=_place,
)


def _tril(rank, block, C, diagonal=0):
    return torch.ones(C, C).tril(diagonal) == 1


def _striped(rank, block, C):
    return _tril(rank, block, C, -int(block > rank))


check_striped_mask = Exercise(  # -> (C, C) bool: which pairs the causal mask leaves in the striped layout
    right=_striped,
    wrong={
        "where a key comes after its query, in a later block, the diagonal is hidden": _tril,
        "on its own block a query sees itself, and an earlier block comes before it: the diagonal is visible": (
            lambda rank, block, C: _tril(rank, block, C, -1)
        ),
        "key i of an earlier block comes before query i: the diagonal is visible": (
            lambda rank, block, C: _tril(rank, block, C, -int(block != rank))
        ),
        "True means computed here; yours is True for the hidden pairs": lambda *case: ~_striped(*case),
        "rows are queries and columns are keys; yours is turned over": lambda *case: _striped(*case).T,
        "all or nothing is the contiguous layout; here every tile is a triangle": (
            lambda rank, block, C: torch.ones(C, C, dtype=torch.bool)
        ),
        "return True for the pairs that are computed and False for others, not numbers to add to scores": (
            lambda *case: torch.zeros_like(_striped(*case), dtype=float).masked_fill(~_striped(*case), -torch.inf)
        ),
    },
    cases={
        "query i stands at rank + i P and key i at block + i P; a key must not be later": [
            (rank, block, C) for P, C in ((3, 4), (4, 5), (2, 1), (5, 2)) for rank in range(P) for block in range(P)
        ]
    },
    draw=lambda random: (random.randrange(3), random.randrange(3), random.randint(6, 20)),
)

check_idle_limit = Exercise(  # the idle share of 8 ranks with long contiguous chunks
    right=7 / 15,
    wrong={
        "that is rank 0 in rounds 1 to 7; rank 7 never waits": 7 / 8,
        "that is the share of the blocks that are hidden; but round 0 is half as long as the other rounds": 7 / 16,
        "that is the limit of many ranks": 1 / 2,
        "that is the share of the time in which they work": 8 / 15,
        "that is the limit of 4 ranks": 3 / 7,
        "give a share from 0 to 1, not per cent": 700 / 15,
    },
    cases={"count in full blocks: 8 ranks for 7 1/2 rounds, and 32 blocks of work": [()]},
    decimals=3,
    remark="7/15 of the time; with zigzag this ring is 15/8 times as fast",
)
