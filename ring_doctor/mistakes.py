"""An entry of the catalogue of mistakes. The entries are in the files mistakes_of_*.py, by kind.

A mistake is a function that takes the steps of a ring on paper and replaces a step. So the doctor can compute what a
ring *with that mistake* returns, for any mask and number of ranks, and two mistakes can be put together.

    @mistake("what such a ring does", look="where", chapter=4)
    def last_block_skipped(steps): return replace(steps, rounds=...)

    @mistake("what such a ring does", look="where", chapter=4)
    @replaces("sees")                                             # the wrong step itself, with the right steps before
    def own_block_skipped(steps, case, rank, block): ...          # the arguments of `sees` in paper_ring.py

Some mistakes can be made in two ways whose numbers differ. They are variants of one name: `@variant_of(...)`.

Before: paper_ring.py. After: mistakes_of_merging.py, the first entries.
Source: each entry names who had it, where that is public.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

from ring_doctor.paper_ring import Steps

Change = Callable[[Steps], Steps]


@dataclass(frozen=True)
class Mistake:
    """An entry of the catalogue."""

    name: str
    what: str  # what such a ring does, in a sentence
    look: str  # where in a ring to look
    chapter: int  # which explains it
    wild: tuple[str, ...] = ()  # who had it: repository and number
    variants: list[Change] = field(default_factory=list, compare=False)


CATALOGUE: dict[str, Mistake] = {}


def mistake(what: str, *, look: str, chapter: int, wild: tuple[str, ...] = ()) -> Callable[[Change], Change]:
    """Enter a function into the catalogue, under its own name."""

    def enter(change: Change) -> Change:
        name = change.__name__
        CATALOGUE[name] = Mistake(name, what, look, chapter, wild, [change])
        return change

    return enter


def variant_of(first: Change) -> Callable[[Change], Change]:
    """Enter another way to make the same mistake."""

    def enter(change: Change) -> Change:
        CATALOGUE[first.__name__].variants.append(change)
        return change

    return enter


def replaces(step: str) -> Callable[[Callable[..., Any]], Change]:
    """Make a mistake of a wrong step: a function of the right steps and of the arguments of this step."""

    def make(wrong: Callable[..., Any]) -> Change:
        @wraps(wrong)
        def change(steps: Steps) -> Steps:
            changed: dict[str, Any] = {step: partial(wrong, steps)}
            return replace(steps, **changed)

        return change

    return make
