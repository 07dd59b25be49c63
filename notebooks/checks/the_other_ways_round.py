"""Checks of chapter 17: the K/V head of a rank, gradients of copies, bytes of an all-to-all, meshes of a hybrid."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from notebooks.checks.answers import (
    NotYet,
    compare_formula,
    difference,
    draws,
    exercise,
    items,
    numbers,
)


def _rank(random: Random) -> tuple[int, int, int]:
    """r, G and P, where G divides P."""
    G = random.randint(1, 12)
    P = G * random.randint(1, 8)
    return random.randrange(P), G, P


@exercise
def check_kv_head(answer: Callable[[int, int, int], int]) -> str | None:
    """(r, G, P) -> the K/V head of rank r, where G divides P."""
    compare_formula(
        answer,
        lambda r, G, P: r * G // P,
        {
            "neighbouring ranks have neighbouring query heads, which share a K/V head: 0, 0, 1, 1, not 0, 1, 0, 1": (
                lambda r, G, P: r % G
            ),
            "P/G ranks have a copy of the same head, not G": lambda r, G, P: r // G,
            "a rank's number is not a head's: only the first G ranks would get different heads": (
                lambda r, G, P: min(r, G - 1)
            ),
            "G and P are the wrong way round": lambda r, G, P: r * P // G,
            "a head's number is whole: round down": lambda r, G, P: r * G / P,
            "round down, not to the nearest": lambda r, G, P: round(r * G / P),
            "that is the number of ranks with a copy of a head": lambda r, G, P: P // G,
        },
        [(r, G, P) for G, P in ((2, 4), (2, 6), (3, 12), (8, 16), (4, 4), (1, 3)) for r in range(P)],
        "G heads are dealt out to P ranks in order, P/G ranks for each",
        _rank,
    )
    return "the ranks of one head are neighbours"


@exercise
def check_copies(answer: Callable[[Tensor, int], Any]) -> str | None:
    """Gradients of copies (P, B, S, D), and G -> the gradients of the heads (B, G, S, D)."""
    generator = torch.Generator().manual_seed(0)
    drawn = [(G * random.randint(1, 4), G) for random in draws() for G in (random.randint(1, 5),)]
    for P, G in ((6, 2), (4, 2), (6, 3), (4, 4), (3, 1), *drawn):
        copies = torch.randn(P, 5, 4, 3, generator=generator, dtype=torch.float64)
        given, of_heads = answer(copies, G), copies.unflatten(0, (G, P // G))  # (G, P/G, B, S, D)
        right = of_heads.sum(dim=1)
        wrong = difference(given, right.transpose(0, 1))
        if wrong is None:
            continue
        if difference(given, right) is None:
            raise NotYet("the numbers are right; B is the first dimension, then the heads")
        hints = {
            "the copies' gradients are parts of one gradient: add them, do not average": of_heads.mean(dim=1),
            "that is the gradient of the first copy; the other copies' queries count too": of_heads[:, 0],
            "that is the gradient of the last copy; the other copies' queries count too": of_heads[:, -1],
            "the copies of a head are on neighbouring ranks: 0, 0, 1, 1, not 0, 1, 0, 1": (
                copies.unflatten(0, (P // G, G)).sum(dim=0)
            ),
            "each head is summed over its own copies only": copies.sum(dim=0, keepdim=True).expand(G, -1, -1, -1),
        }
        for hint, other in hints.items():
            if difference(given, other.transpose(0, 1)) is None:
                raise NotYet(hint)
        raise NotYet(f"P = {P}, G = {G}: {wrong}")
    return "to_tokens adds them in this way"


def _drawn(random: Random) -> tuple[int, ...]:
    """P, H, G, C, D and bytes of a number, where P divides G."""
    P, a, b, C, D = (random.randint(1, 9) for _ in range(5))
    return P, P * a * b, P * a, C, D, random.choice((2, 4, 8))


@exercise
def check_sent(answer: Callable[..., float]) -> str | None:
    """(P, H, G, C, D, itemsize) -> the bytes that a rank sends in a forward pass."""
    size = "q, k and v go out, and out comes back; a rank keeps one of P parts of each"

    def times(factor: Callable[[int, int, int], float]) -> Callable[..., float]:
        return lambda P, H, G, C, D, w: factor(P, H, G) * C * D * w

    compare_formula(
        answer,
        times(lambda P, H, G: (P - 1) * 2 * (H + G) / P),
        {
            "a rank does not send its own part: of P parts it keeps one": times(lambda P, H, G: 2 * (H + G)),
            "out must come back too: every rank sends the others' tokens of it": (
                times(lambda P, H, G: (P - 1) * (H + 2 * G) / P)
            ),
            "K and V are two tensors": times(lambda P, H, G: (P - 1) * (2 * H + G) / P),
            "k and v have G heads, not H": times(lambda P, H, G: (P - 1) * 4 * H / P),
            "q and out have H heads, not G": times(lambda P, H, G: (P - 1) * 4 * G / P),
            "that is a ring or an all-gather: they send whole blocks of K and V": times(
                lambda P, H, G: (P - 1) * 2 * G
            ),
            "to each other rank goes one part of P, not the whole chunk; and one rank was asked for, not all": times(
                lambda P, H, G: (P - 1) * 2 * (H + G)
            ),
            "that is one message; a rank sends one to each other rank": times(lambda P, H, G: 2 * (H + G) / P),
            "these are numbers; each has `itemsize` bytes": (
                lambda P, H, G, C, D, w: (P - 1) * 2 * (H + G) / P * C * D
            ),
            "that is forward and backward; only the forward pass was asked for": (
                times(lambda P, H, G: (P - 1) * 4 * (H + G) / P)
            ),
        },
        [
            (4, 8, 4, 100, 64, 2),
            (8, 32, 8, 1024, 128, 2),
            (2, 6, 2, 7, 16, 4),
            (1, 4, 4, 10, 8, 8),
            (6, 30, 6, 60, 32, 4),
        ],
        size,
        _drawn,
    )
    return "with many ranks it hardly grows: at most 2 · (H + G) · C · D numbers"


PAIRS = "pairs (rows, ranks of a row)"


@exercise
def check_meshes(answer: Callable[[int, int, int], Any]) -> str | None:
    """(P, H, G) -> the meshes (rows, ranks of a row) with equal query heads on each rank and no copies of K/V heads."""
    cases = [(8, 6, 2), (16, 40, 8), (12, 30, 10), (6, 8, 8), (24, 24, 4), (5, 4, 2), (8, 8, 8)]
    for random in draws():
        G = random.randint(1, 24)
        cases.append((random.randint(1, 48), random.randint(1, 6) * G, G))
    for P, H, G in cases:
        pairs = [numbers(mesh, PAIRS) for mesh in items(answer(P, H, G), f"a list of {PAIRS}")]
        if not all(len(pair) == 2 for pair in pairs):
            raise NotYet(f"expected a list of {PAIRS}")
        meshes = {(n, g) for n, g in pairs}
        if meshes != (right := _meshes(P, lambda g, G=G: G % g == 0)):
            raise NotYet(f"{P} ranks, {H} query heads on {G}, you say {sorted(meshes)}: {_why(meshes, right, P, H, G)}")
    return "a row may be as long as the largest number that divides both P and G"


def _meshes(P: int, possible: Callable[[int], bool]) -> set[tuple[int, int]]:
    return {(P // g, g) for g in range(1, P + 1) if P % g == 0 and possible(g)}


def _why(meshes: set[tuple[int, int]], right: set[tuple[int, int]], P: int, H: int, G: int) -> str:
    if any(n * g != P for n, g in meshes):
        return "rows times ranks of a row must be P"
    if meshes == {(g, n) for n, g in right}:
        return "a mesh is (rows, ranks of a row); yours are the wrong way round"
    if (P, 1) not in meshes:
        return "rows of 1 rank count too: that is the flat ring"
    if meshes == _meshes(P, lambda g: g <= H):
        return "these are all meshes that work; in some of them the heads are not equal, or K/V heads are copied"
    if meshes == _meshes(P, lambda g: H % g == 0):
        return "the query heads are equal, but in some of them a K/V head is needed by several ranks of a row"
    if meshes == _meshes(P, lambda g: g <= G):
        return "it is not enough that g is at most G: where g does not divide G, two ranks need the same K/V head"
    if meshes < right:
        return f"there are more: {sorted(right - meshes)[0]} for one"
    n, g = sorted(meshes - right)[0]
    return f"with {n} x {g}, {g} ranks share {H} query heads on {G}: not equal, or with copies"
