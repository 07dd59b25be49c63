"""Checks of chapter 13: the first key that a query sees, the hops of a window."""

import math
from collections.abc import Callable
from itertools import accumulate
from random import Random

from notebooks.source.checks.answers import NotYet, compare_formula, draws, exercise, number


def _lengths(random: Random) -> list[int]:
    return [random.randint(1, 6) for _ in range(random.randint(1, 6))]


@exercise
def check_first_key(answer: Callable[[int, list[int], int | None], int]) -> str | None:
    """(position, lengths, window or None) -> the first key that the query sees, under a causal mask."""
    cases: list[tuple[list[int], int | None]] = [([3, 5], None), ([3, 5], 2), ([1, 1, 4], 3), ([8], 5), ([2, 6, 4], 20)]
    cases += [(_lengths(random), random.choice((None, random.randint(1, 9)))) for random in draws()]
    for lengths, window in cases:
        starts = [0, *accumulate(lengths)]
        for position in reversed(range(sum(lengths))):
            given = number(answer(position, lengths, window))
            start = max(first for first in starts if first <= position)
            recent = start if window is None else position + 1 - window
            if given == max(start, recent):
                continue
            before = max((first for first in starts if first < position), default=0)
            hint = "it is the first token of the query's document, or the first of its window, whichever is later"
            if given == before and position == start:
                hint = "this query is the first of its document and sees itself only"
            elif given == position - start:
                hint = "that is the query's place in its own document; a key stands in the whole sequence"
            elif window is not None and given == max(start, recent - 1):
                hint = f"from there to {position} are {window + 1} keys, its own among them; the window has {window}"
            elif window is not None and given == max(start, recent + 1):
                hint = f"from there to {position} are {window - 1} keys; the window counts the query's own"
            elif given in (0, max(0, recent)) and given < start:
                hint = "that key is of another document"
            elif given == recent and recent < start:
                hint = "a window does not reach back before key 0"
            elif given == start:
                hint = "that is the start of its document; the window begins later"
            raise NotYet(f"lengths {lengths}, window {window}, query {position}, you say {given}: {hint}")


@exercise
def check_hops(answer: Callable[[int, int, int], float]) -> str | None:
    """(w, C, P) -> hops of a window in the contiguous layout."""
    compare_formula(
        answer,
        lambda w, C, P: min(math.ceil((w - 1) / C), P - 1),
        {
            "the query's own key is no way back: the farthest key is w - 1 tokens away": lambda w, C, P: min(
                math.ceil(w / C), P - 1
            ),
            "round up: one key in the next block needs the whole hop": lambda w, C, P: min((w - 1) // C, P - 1),
            "round up, and the farthest key is w - 1 tokens away": lambda w, C, P: min(w // C, P - 1),
            "after P - 1 hops every rank has seen all blocks": lambda w, C, P: math.ceil((w - 1) / C),
            "that is a ring without a window": lambda w, C, P: P - 1,
            "P - 1 hops bring all P blocks": lambda w, C, P: min(math.ceil((w - 1) / C), P),
            "these are the blocks a rank computes; it has its own without a hop": lambda w, C, P: min(
                math.ceil((w - 1) / C) + 1, P
            ),
        },
        [(1, 8, 4), (2, 8, 4), (8, 8, 4), (9, 8, 4), (10, 8, 4), (100, 8, 4), (17, 8, 4), (5, 8, 1), (16, 8, 8)],
        "the farthest key is w - 1 tokens back, and a hop reaches C tokens further",
        lambda random: (random.randint(1, 300), random.randint(1, 40), random.randint(1, 12)),
    )
    return "with a window of C + 1 tokens or fewer, one hop is enough for any number of ranks"
