"""Checks of chapter 17: gradients of copies, meshes of a hybrid."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from notebooks.source.checks.answers import NotYet, difference, draws, exercise, items, numbers


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
