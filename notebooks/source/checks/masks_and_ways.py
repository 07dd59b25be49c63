"""Checks of chapters 13 and 16, and of the appendix on states."""

import math
from itertools import accumulate

import torch

from notebooks.source.checks.answers import Exercise

# Chapter 13: the first key that a query sees, the hops of a window ---------------------------------------------------


def _start(position, lengths):
    return max(start for start in [0, *accumulate(lengths)] if start <= position)


def _first(position, lengths, window, move=0):
    """The first key; where there is a window, `move` away from where it begins."""
    start = _start(position, lengths)
    return start if window is None else max(start, position + 1 - window + move)


OTHER = "that key is of another document"
LENGTHS = (([3, 5], None), ([3, 5], 2), ([1, 1, 4], 3), ([8], 5), ([2, 6, 4], 20))
check_first_key = Exercise(  # -> the first key that the query sees, under a causal mask
    right=lambda position, lengths, window: _first(position, lengths, window),
    wrong={
        "the first query of a document sees itself only": lambda p, lengths, window: (
            _first(p - 1, lengths, window) if p and _start(p, lengths) == p else _first(p, lengths, window)
        ),
        "that is the place in its document; a key stands in the sequence": "position - _start(position, lengths)",
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
    said="it is the first token of the query's document, or the first of its window, whichever is later",
    cases=[(p, lengths, window) for lengths, window in LENGTHS for p in reversed(range(sum(lengths)))],
)

check_hops = Exercise(  # of a window of w tokens in the contiguous layout
    right=lambda w, C, P: min(math.ceil((w - 1) / C), P - 1),
    wrong={
        "the query's own key is no way back: the farthest key is w - 1 tokens away": "min(math.ceil(w / C), P - 1)",
        "round up: one key in the next block needs the whole hop": "min((w - 1) // C, P - 1)",
        "round up, and the farthest key is w - 1 tokens away": "min(w // C, P - 1)",
        "after P - 1 hops every rank has seen all blocks": "math.ceil((w - 1) / C)",
        "that is a ring without a window": "P - 1",
        "P - 1 hops bring all P blocks": "min(math.ceil((w - 1) / C), P)",
        "these are the blocks a rank computes; it has its own without a hop": "min(math.ceil((w - 1) / C) + 1, P)",
    },
    said="the farthest key is w - 1 tokens back, and a hop reaches C tokens further",
    cases=[*((w, 8, 4) for w in (1, 2, 8, 9, 10, 100, 17)), (5, 8, 1), (16, 8, 8)],
    remark="with a window of C + 1 tokens or fewer, one hop is enough for any number of ranks",
)


# Chapter 16: gradients of copies, meshes of a hybrid -----------------------------------------------------------------


def _copies(P, G, generator):
    return torch.randn(P, 5, 4, 3, generator=generator, dtype=torch.float64), G


def _grouped(of):
    """The gradients of the heads (B, G, S, D) that `of` makes of copies (G, P/G, B, S, D)."""
    return lambda copies, G: of(copies.unflatten(0, (G, -1))).transpose(0, 1)


GENERATOR = torch.Generator().manual_seed(0)
check_copies = Exercise(  # gradients of copies (P, B, S, D), and G -> the gradients of the heads (B, G, S, D)
    right=lambda copies, G: copies.unflatten(0, (G, -1)).sum(dim=1).transpose(0, 1),
    wrong={
        "the numbers are right; B is the first dimension, then the heads": "copies.unflatten(0, (G, -1)).sum(dim=1)",
        "the copies' gradients are parts of one gradient: add them, do not average": _grouped(lambda x: x.mean(dim=1)),
        "that is the gradient of the first copy; the other copies' queries count too": _grouped(lambda x: x[:, 0]),
        "that is the gradient of the last copy; the other copies' queries count too": _grouped(lambda x: x[:, -1]),
        "copies of a head are neighbours: 0, 0, 1, 1": "copies.unflatten(0, (-1, G)).sum(dim=0).transpose(0, 1)",
        "each head is summed over its own copies only": "copies.sum(dim=0)[:, None].expand(-1, G, -1, -1)",
    },
    said="a head has the sum of its copies' gradients",
    cases=[_copies(P, G, GENERATOR) for P, G in ((6, 2), (4, 2), (6, 3), (4, 4), (3, 1))],
    remark="to_tokens adds them in this way",
)


def _meshes(possible):
    """The meshes (rows, ranks of a row) of P ranks whose rows have a length g that is possible(H, G, g)."""
    return lambda P, H, G: {(P // g, g) for g in range(1, P + 1) if P % g == 0 and possible(H, G, g)}


RIGHT = _meshes(lambda H, G, g: G % g == 0)
check_meshes = Exercise(  # -> meshes (rows, ranks of a row) with equal query heads on each rank, no copies of K/V heads
    right=lambda P, H, G: RIGHT(P, H, G),
    wrong={
        "a mesh is (rows, ranks of a row); yours are the wrong way round": "{(g, n) for n, g in RIGHT(P, H, G)}",
        "rows of 1 rank count too: that is the flat ring": _meshes(lambda H, G, g: G % g == 0 and g > 1),
        "all of these work; in some, heads are unequal or K/V heads copied": _meshes(lambda H, G, g: g <= H),
        "query heads are equal, but in some a K/V head is on several ranks": _meshes(lambda H, G, g: H % g == 0),
        "g at most G is not enough: g must divide G, or two ranks need a head": _meshes(lambda H, G, g: g <= G),
    },
    said="rows times ranks of a row must be P, and every g that divides both P and G is there",
    cases=[(8, 6, 2), (16, 40, 8), (12, 30, 10), (6, 8, 8), (24, 24, 4), (5, 4, 2), (8, 8, 8)],
    remark="a row may be as long as the largest number that divides both P and G",
)


# The appendix on states: two maps in one, the gradient that goes the other way ---------------------------------------


def _maps(generator, D=2, Dv=3):
    """keep (D, D), add (D, Dv), and the same once more."""
    return tuple(torch.randn(D, n, generator=generator, dtype=torch.float64) for n in (D, Dv, D, Dv))


def _gradients(maps):
    keep, d_after, _, d_read = maps
    return keep, d_after, d_read


ORDER = "the state goes through a first, so a's matrix stands next to the state: on the right"
check_two_maps = Exercise(  # keep and add of a, and of b -> of a, then b
    right=lambda keep_a, add_a, keep_b, add_b: {"keep": keep_b @ keep_a, "add": keep_b @ add_a + add_b},
    wrong={
        ORDER: "{'keep': keep_a @ keep_b, 'add': keep_a @ add_b + add_a}",
        "that is for numbers; these are matrices": "{'keep': keep_a * keep_b}",
        "what a has added goes through b too: b keeps only a part of it": "{'add': add_a + add_b}",
    },
    said="state -> keep_b @ (keep_a @ state + add_a) + add_b",
    cases=[_maps(torch.Generator().manual_seed(0))],
    remark="with it, maps of 1, 2, 4, ... ranks become one",
)

check_state_gradient = Exercise(  # of the state before a rank: keep, the one after it, and what its own tokens give
    right=lambda keep, d_after, d_read: keep.mT @ d_after + d_read,
    wrong={
        "then nothing comes back from later ranks, as in the failure above": "d_read",
        "the rank's own tokens read this state too": "keep.mT @ d_after",
        "the gradient goes back through the transposed matrix": "keep @ d_after + d_read",
        "d_read belongs to the state before the rank: it goes through no map of it": "keep.mT @ (d_after + d_read)",
        "what later ranks find goes back through this rank's map": "d_after + d_read",
    },
    said="what later ranks find, and what its own tokens read",
    cases=[_gradients(_maps(torch.Generator().manual_seed(0)))],
    remark="an affine map again, so hops, scan and gather serve the gradient too",
)
