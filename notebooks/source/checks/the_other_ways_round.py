"""Checks of chapter 17: gradients of copies, meshes of a hybrid."""

import torch

from notebooks.source.checks.answers import Exercise, torch_generator


def _copies(P, G, generator):
    return torch.randn(P, 5, 4, 3, generator=generator, dtype=torch.float64), G


def _grouped(of):
    """The gradients of the heads (B, G, S, D) that `of` makes of copies (G, P/G, B, S, D)."""
    return lambda copies, G: of(copies.unflatten(0, (G, -1))).transpose(0, 1)


def _drawn_copies(random):
    G = random.randint(1, 5)
    return _copies(G * random.randint(2, 4), G, torch_generator(random))


GENERATOR = torch.Generator().manual_seed(0)
check_copies = Exercise(  # gradients of copies (P, B, S, D), and G -> the gradients of the heads (B, G, S, D)
    right=lambda copies, G: copies.unflatten(0, (G, -1)).sum(dim=1).transpose(0, 1),
    wrong={
        "the numbers are right; B is the first dimension, then the heads": (
            lambda copies, G: copies.unflatten(0, (G, -1)).sum(dim=1)
        ),
        "the copies' gradients are parts of one gradient: add them, do not average": _grouped(lambda x: x.mean(dim=1)),
        "that is the gradient of the first copy; the other copies' queries count too": _grouped(lambda x: x[:, 0]),
        "that is the gradient of the last copy; the other copies' queries count too": _grouped(lambda x: x[:, -1]),
        "the copies of a head are on neighbouring ranks: 0, 0, 1, 1, not 0, 1, 0, 1": (
            lambda copies, G: copies.unflatten(0, (-1, G)).sum(dim=0).transpose(0, 1)
        ),
        "each head is summed over its own copies only": (
            lambda copies, G: copies.sum(dim=0)[:, None].expand(-1, G, -1, -1)
        ),
    },
    cases={
        "a head has the sum of its copies' gradients": [
            _copies(P, G, GENERATOR) for P, G in ((6, 2), (4, 2), (6, 3), (4, 4), (3, 1))
        ]
    },
    draw=_drawn_copies,
    remark="to_tokens adds them in this way",
)


def _meshes(possible):
    """The meshes (rows, ranks of a row) of P ranks whose rows have a length g that is possible(H, G, g)."""
    return lambda P, H, G: {(P // g, g) for g in range(1, P + 1) if P % g == 0 and possible(H, G, g)}


def _cluster(random):
    G = random.randint(1, 24)
    return random.randint(1, 48), random.randint(1, 6) * G, G


RIGHT = _meshes(lambda H, G, g: G % g == 0)
check_meshes = Exercise(  # -> meshes (rows, ranks of a row) with equal query heads on each rank, no copies of K/V heads
    right=lambda P, H, G: RIGHT(P, H, G),
    wrong={
        "a mesh is (rows, ranks of a row); yours are the wrong way round": (
            lambda P, H, G: {(g, n) for n, g in RIGHT(P, H, G)}
        ),
        "rows of 1 rank count too: that is the flat ring": _meshes(lambda H, G, g: G % g == 0 and g > 1),
        "these are all meshes that work; in some of them the heads are not equal, or K/V heads are copied": _meshes(
            lambda H, G, g: g <= H
        ),
        "the query heads are equal, but in some of them a K/V head is needed by several ranks of a row": _meshes(
            lambda H, G, g: H % g == 0
        ),
        "it is not enough that g is at most G: where g does not divide G, two ranks need the same K/V head": _meshes(
            lambda H, G, g: g <= G
        ),
    },
    cases={
        "rows times ranks of a row must be P, and every g that divides both P and G is there": [
            (8, 6, 2),
            (16, 40, 8),
            (12, 30, 10),
            (6, 8, 8),
            (24, 24, 4),
            (5, 4, 2),
            (8, 8, 8),
        ]
    },
    draw=_cluster,
    remark="a row may be as long as the largest number that divides both P and G",
)
