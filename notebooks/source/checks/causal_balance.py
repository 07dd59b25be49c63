"""Checks of chapter 7: zigzag positions, the mask of a striped tile, the idle share."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from notebooks.source.checks.answers import NotYet, as_tensor, compare_number, difference, draws, exercise, numbers
from ringlab.ring.layouts import positions


@exercise
def check_zigzag_positions(answer: Callable[[int, int, int], list[int]]) -> str | None:
    """(rank, S, P) -> where the tokens of this rank stand in the sequence, in the zigzag layout."""
    drawn = [(random.randint(1, 5), random.randint(6, 12)) for random in draws()]
    for seq_len, world_size in ((16, 4), (24, 3), (30, 5), (4, 1), (12, 2), *((2 * half * P, P) for half, P in drawn)):
        for rank in range(world_size):
            given = numbers(answer(rank, seq_len, world_size), "a list of positions")
            expected = positions("zigzag", seq_len, rank, world_size).tolist()
            if given == expected:
                continue
            half = seq_len // (2 * world_size)
            other = [*range(rank * half, (rank + 1) * half)]
            other += [place + world_size * half for place in other]
            hint = f"it holds {half} early and {half} late token(s): halves {rank} and {2 * world_size - 1 - rank}"
            if given == other:
                hint = f"the late half is counted from the end: half {2 * world_size - 1 - rank}"
            elif sorted(given) == expected:
                hint = "these are the right tokens; give them in rising order"
            else:
                for layout in ("contiguous", "striped"):
                    if given == positions(layout, seq_len, rank, world_size).tolist():
                        hint = f"that is the {layout} layout"
            raise NotYet(f"S = {seq_len}, P = {world_size}, rank {rank}, you say {given}: {hint}")


@exercise
def check_striped_mask(answer: Callable[[int, int, int], Tensor]) -> str | None:
    """(rank, block, C) -> (C, C) bool, which pairs the causal mask leaves in the striped layout."""
    for world_size, C in ((3, 4), (4, 5), (2, 1), (5, 2), *((3, random.randint(6, 20)) for random in draws())):
        at = [positions("striped", C * world_size, rank, world_size) for rank in range(world_size)]
        for rank, block in product(range(world_size), repeat=2):
            given, expected = answer(rank, block, C), at[block] <= at[rank][:, None]
            problem = difference(given, expected)
            if problem is None:
                continue
            where = f"C = {C}, rank {rank} and block {block}"
            given = as_tensor(given, f"a tensor of shape {(C, C)}")
            if given.shape != expected.shape:
                raise NotYet(f"{problem}, for {where}")
            hint = "query i stands at rank + i P and key i at block + i P; a key must not be later"
            if not ((given == 0) | (given == 1)).all():
                hint = "return True for the pairs that are computed and False for others, not numbers to add to scores"
            elif torch.equal(given.bool(), ~expected):
                hint = "True means computed here; yours is True for the hidden pairs"
            elif block > rank and torch.equal(given.bool(), torch.ones(C, C).tril().bool()):
                hint = f"key i of block {block} comes after query i of rank {rank}: the diagonal is hidden"
            elif block == rank and torch.equal(given.bool(), torch.ones(C, C).tril(-1).bool()):
                hint = "on its own block a query sees itself: the diagonal is visible"
            elif block < rank and torch.equal(given.bool(), torch.ones(C, C).tril(-1).bool()):
                hint = f"key i of block {block} comes before query i of rank {rank}: the diagonal is visible"
            elif torch.equal(given.bool(), expected.T):
                hint = "rows are queries and columns are keys; yours is turned over"
            elif bool(given.all()) or not bool(given.any()):
                hint = "all or nothing is the contiguous layout; here every tile is a triangle"
            raise NotYet(f"{where}: {hint}")


@exercise
def check_idle_limit(answer: Any) -> str | None:
    """The idle share of 8 ranks with long contiguous chunks."""
    compare_number(
        answer,
        7 / 15,
        {
            7 / 8: "that is rank 0 in rounds 1 to 7; rank 7 never waits",
            7 / 16: "that is the share of the blocks that are hidden; but round 0 is half as long as the other rounds",
            1 / 2: "that is the limit of many ranks",
            8 / 15: "that is the share of the time in which they work",
            3 / 7: "that is the limit of 4 ranks",
        },
        "count in full blocks: 8 ranks for 7 1/2 rounds, and 32 blocks of work",
        decimals=3,
    )
    return "7/15 of the time; with zigzag this ring is 15/8 times as fast"
