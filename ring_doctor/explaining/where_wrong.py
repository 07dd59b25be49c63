"""Where a result is wrong: on which ranks, in which sequences of the batch, heads, rows of a chunk.

    for pattern in WHERE: pattern.common(answers, "out")    ->    what is true of out in each of these wrong answers

A row is wrong if one of its numbers is off by more than rounding. A pattern speaks of an answer only if the answer can
show the opposite: a batch of 1 says nothing about the second sequence.

Before: facts.py. After: inference.py, all that is told.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ring_doctor.explaining.facts import Fact, Pattern
from ring_doctor.explaining.wrong_answer import WrongAnswer

AXES = {  # in words, and where to look
    "rank": ("on these ranks", "what these ranks do otherwise: a branch, the first or the last step, what arrives"),
    "sequence": ("in these sequences", "views and reshapes that mix B with another dimension, and an index [0]"),
    "head": ("in these heads", "how heads are split and broadcast; the K/V head of query head h is h // (H/G)"),
    "row": (
        "in these rows of each chunk",
        "where slices, masks and tiles begin and end: < or <=, the border of chunks",
    ),
}


def shapes(n: int) -> dict[str, Tensor]:
    """Some of n things in a row, (n,) bool, by name."""
    i = torch.arange(n)
    found = {"the first": i == 0, "the second": i == 1, "the last": i == n - 1, "all but the first": i > 0}
    found |= {"all but the last": i < n - 1, "the even ones": i % 2 == 0, "the odd ones": i % 2 == 1}
    found |= {"the first half": i < n // 2, "the last half": i >= n // 2}
    return found | {f"from {tile} on": i >= tile for tile in (32, 64, 128, 256) if tile < n}  # tiles of usual kernels


def _rows(wrong: WrongAnswer, bad: Tensor) -> list[Tensor]:
    """Of each rank which rows of its chunk are wrong: (C,)."""
    rows = bad.any(dim=3).flatten(0, 1).any(dim=0)
    return [rows[wrong.case.positions(rank)] for rank in range(wrong.case.world_size)]


def _find(axis: str, wrong: WrongAnswer, name: str) -> Iterator[Fact] | None:
    """What the wrong ones along an axis are. None where there is one thing only."""
    bad = wrong.bad_numbers(name)
    bad = bad if bad.dim() == 4 else bad[..., None]
    of = {
        "rank": lambda: [torch.stack([chunk.any() for chunk in _rows(wrong, bad)])],
        "sequence": lambda: [bad.flatten(1).any(dim=1)],
        "head": lambda: [bad.transpose(0, 1).flatten(1).any(dim=1)],
        "row": lambda: [chunk for chunk in _rows(wrong, bad) if chunk.any()],  # each must be so
    }[axis]()
    if len({len(each) for each in of}) != 1 or len(of[0]) == 1:
        return None
    known, h, G = shapes(len(of[0])), torch.arange(len(of[0])), wrong.case.kv_heads
    if axis == "head" and 1 < G < len(h):
        n = len(h) // G
        known |= {"all but the first of a group": h % n > 0, "those whose h mod G is not h // (H/G)": h % G != h // n}
    words, look = AXES[axis]
    told = (shape for shape, x in known.items() if all(torch.equal(each, x) for each in of))
    return (Fact(f"{words}: {shape}", look) for shape in told)


WHERE = [Pattern("{x}: wrong {words}", partial(_find, axis), clear=False) for axis in AXES]
