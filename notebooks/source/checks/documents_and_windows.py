"""Checks of chapter 13: the first key that a query sees, the hops of a window."""

import math
from itertools import accumulate

from notebooks.source.checks.answers import Exercise


def _start(position, lengths):
    return max(start for start in [0, *accumulate(lengths)] if start <= position)


def _first(position, lengths, window, move=0):
    """The first key; where there is a window, `move` away from where it begins."""
    start = _start(position, lengths)
    return start if window is None else max(start, position + 1 - window + move)


def _query(random):
    lengths = [random.randint(1, 6) for _ in range(random.randint(1, 6))]
    return random.randrange(sum(lengths)), lengths, random.choice((None, random.randint(1, 9)))


OTHER = "that key is of another document"
LENGTHS = (([3, 5], None), ([3, 5], 2), ([1, 1, 4], 3), ([8], 5), ([2, 6, 4], 20))
check_first_key = Exercise(  # -> the first key that the query sees, under a causal mask
    right=lambda position, lengths, window: _first(position, lengths, window),
    wrong={
        "the first query of a document sees itself only": lambda p, lengths, window: (
            _first(p - 1, lengths, window) if p and _start(p, lengths) == p else _first(p, lengths, window)
        ),
        "that is the query's place in its own document; a key stands in the whole sequence": (
            lambda p, lengths, window: p - _start(p, lengths)
        ),
        "that is one key too many: the window counts the query's own": lambda *query: _first(*query, move=-1),
        "that is one key too few; the window counts the query's own": lambda *query: _first(*query, move=1),
        OTHER: lambda p, lengths, window: 0,
        f"{OTHER}: a window ends where a document begins": (
            lambda p, lengths, window: _start(p, lengths) if window is None else max(0, p + 1 - window)
        ),
        f"{OTHER}, or there is none: a window ends where a document begins": (
            lambda p, lengths, window: _start(p, lengths) if window is None else p + 1 - window
        ),
        "a window does not reach back before key 0": lambda p, lengths, window: (
            p + 1 - window if window and _start(p, lengths) == 0 else _first(p, lengths, window)
        ),
        "that is the start of its document; the window begins later": lambda p, lengths, window: _start(p, lengths),
    },
    cases={
        "it is the first token of the query's document, or the first of its window, whichever is later": [
            (p, lengths, window) for lengths, window in LENGTHS for p in reversed(range(sum(lengths)))
        ]
    },
    draw=_query,
)

check_hops = Exercise(  # of a window of w tokens in the contiguous layout
    right=lambda w, C, P: min(math.ceil((w - 1) / C), P - 1),
    wrong={
        "the query's own key is no way back: the farthest key is w - 1 tokens away": (
            lambda w, C, P: min(math.ceil(w / C), P - 1)
        ),
        "round up: one key in the next block needs the whole hop": lambda w, C, P: min((w - 1) // C, P - 1),
        "round up, and the farthest key is w - 1 tokens away": lambda w, C, P: min(w // C, P - 1),
        "after P - 1 hops every rank has seen all blocks": lambda w, C, P: math.ceil((w - 1) / C),
        "that is a ring without a window": lambda w, C, P: P - 1,
        "P - 1 hops bring all P blocks": lambda w, C, P: min(math.ceil((w - 1) / C), P),
        "these are the blocks a rank computes; it has its own without a hop": (
            lambda w, C, P: min(math.ceil((w - 1) / C) + 1, P)
        ),
    },
    cases={
        "the farthest key is w - 1 tokens back, and a hop reaches C tokens further": [
            *((w, 8, 4) for w in (1, 2, 8, 9, 10, 100, 17)),
            (5, 8, 1),
            (16, 8, 8),
        ]
    },
    draw=lambda random: (random.randint(1, 300), random.randint(1, 40), random.randint(1, 12)),
    remark="with a window of C + 1 tokens or fewer, one hop is enough for any number of ranks",
)
