"""Checks of chapter 15: five X-rays, and a mistake that the catalogue does not know."""

import inspect
import re
import textwrap
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from notebooks.source.checks.answers import NotYet, StillOpen, called, exercise
from ring_doctor.asking.case import Case
from ring_doctor.catalogue import CATALOGUE, TABLES
from ring_doctor.explaining.xray import XRay, on_paper
from ring_doctor.mistakes import Change
from ring_doctor.mistakes.paper_ring import RIGHT, NotOnPaper, Steps, compute

# Small questions. A mistake shows in one of them. Chunks have one length, so nearly all can be computed on paper.
CASES = (
    Case(3, 12),
    Case(4, 16, causal=True, heads=4, kv_heads=2, head_dim=3),
    Case(3, 12, causal=True, layout="zigzag"),
    Case(3, 12, causal=True, layout="striped"),
    Case(3, 12, causal=True, documents=(5, 7)),
    Case(3, 12, causal=True, window=3),
)

ALL = ("out", "lse", "dq", "dk", "dv")


def same_numbers(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether all results are equal, but for rounding."""
    return all(torch.allclose(a[name], b[name], rtol=0, atol=1e-9, equal_nan=True) for name in a)


def names_of(change: Change, cases: Sequence[Case] = CASES) -> list[str]:
    """The entries of the catalogue that return the numbers of this change in all cases."""
    returned = [compute(case, change(RIGHT)) for case in cases]

    def fits(variant: Change) -> bool:
        computed = (compute(case, variant(RIGHT)) for case in cases)
        try:
            return all(same_numbers(mine, theirs) for mine, theirs in zip(computed, returned, strict=True))
        except NotOnPaper:  # this mistake has no numbers in a case, for example without a mask
            return False

    return [entry.name for entry in CATALOGUE.values() if any(fits(variant) for variant in entry.variants)]


def first(name: str) -> Change:
    """The first way to make the mistake of this name."""
    return CATALOGUE[name].variants[0]


def print_row(name: str) -> None:
    """Print the row of a mistake as it is in its table, on one line or on more."""
    for table in TABLES:
        if row := re.search(rf'^ {{4}}"{name}": .*?(?=^ {{4}}["#*]|^}})', inspect.getsource(table), re.M | re.S):
            print(textwrap.dedent(row[0]), end="")


# Five X-rays -------------------------------------------------------------------------------------------------------

LIST = (
    "averages_added",
    "averages_averaged",
    "base_2_as_natural",
    "causal_per_block",
    "chunk_index_under_zigzag",
    "delta_of_the_block",
    "gradients_not_sent_home",
    "gradients_travel_other_way",
    "halves_swapped",
    "last_block_skipped",
    "lse_of_the_block",
    "never_called",
    "own_block_twice",
    "stale_first_block",
)
FULL, ZIGZAG = Case(4, 8), Case(4, 8, causal=True, layout="zigzag")
SICK = {
    "A": ("stale_first_block", FULL),
    "B": ("gradients_not_sent_home", FULL),
    "C": ("averages_averaged", FULL),
    "D": ("chunk_index_under_zigzag", ZIGZAG),
    "E": ("lse_of_the_block", FULL),
}


@lru_cache
def _xray(name: str, case: Case) -> XRay:
    return on_paper(case, first(name)(RIGHT))


def xray_of_ring(letter: str) -> XRay:
    """The X-ray of the sick ring A, B, C, D or E, on 4 ranks with 2 tokens each."""
    return _xray(*SICK[letter])


def contradiction(shown: XRay, guessed: XRay) -> str | None:
    """The first tile in which the X-ray shows something else than a guess would; None where all numbers are equal."""
    for matrix, other in zip(shown.matrices, guessed.matrices, strict=True):
        for tile, expected in zip(matrix.tiles, other.tiles, strict=True):
            if tile.kind != expected.kind or (tile.words != expected.words and tile.amount is None):
                where = f"{matrix.name}, rank {tile.rank}, KV{tile.block}"
                return f"{where} would be {expected.words}, and the X-ray shows it as {tile.words}"
        sums, others = ("1" if each.sums is None else "another number" for each in (matrix, other))
        if sums != others:
            return f"in {matrix.name} the rows would sum to {others}, and the X-ray shows {sums}"
    for matrix, other in zip(shown.matrices, guessed.matrices, strict=True):
        off = (matrix.sheet.seen - other.sheet.seen).abs().max()
        if not off <= 1e-9:  # NaN, too
            return f"the same kinds of tiles, but {matrix.name} would have other numbers, off by up to {off:.2g}"
    return None


@exercise
def check_xrays(value):
    """{"A": name, ...}: the mistake in each of the five sick rings."""
    if not isinstance(value, dict) or set(value) != set(SICK):
        raise NotYet(f"expected a dict with the keys {', '.join(SICK)}")
    given = {letter: name for letter, name in value.items() if name is not ...}
    if not given:
        raise StillOpen
    for letter, name in given.items():
        if name not in LIST:
            raise NotYet(f"{letter}: {name!r} is not in the list")
        problem = contradiction(xray_of_ring(letter), _xray(name, SICK[letter][1]))
        if problem:
            raise NotYet(f"{letter} is not {name}: {problem}")
    if len(given) < len(SICK):
        raise NotYet(f"{', '.join(given)} right; {', '.join(sorted(SICK.keys() - given.keys()))} still open")
    return "five of five"


# A mistake that the doctor does not know ---------------------------------------------------------------------------


@exercise
def check_new_mistake(answer):
    """Steps -> Steps: a mistake that is not in the catalogue."""
    steps = answer(RIGHT)
    if not isinstance(steps, Steps):
        raise NotYet(f"expected Steps, as replace(steps, scale=...) returns them, got {type(steps).__name__}")
    if steps == RIGHT:
        raise NotYet("you replaced no step: these are the steps of a right ring")
    off = {name for case in CASES for name in called(_off, case, steps)}
    wrong = [name for name in ALL if name in off]
    if not wrong:
        raise NotYet(f"this ring is right: out, lse, dq, dk and dv are exact in all {len(CASES)} questions asked")
    if names := names_of(lambda _: steps):
        raise NotYet(f"the doctor knows it: {' or '.join(names)}")
    return (
        f"wrong in {', '.join(wrong)}, and no entry returns its numbers. To be known it needs an entry: your function "
        f"in a row of a table in ring_doctor/mistakes/, and its words in the README.md there"
    )


def _off(case: Case, steps: Steps) -> list[str]:
    """The results that are wrong."""
    right, returned = compute(case), compute(case, steps)
    return [name for name in right if not same_numbers({name: right[name]}, returned)]
