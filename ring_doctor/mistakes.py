"""An entry of the catalogue of mistakes: a row of a table. The tables are in the files mistakes_of_*.py, by kind.

A mistake changes the steps of a ring on paper. So the doctor can compute what a ring *with that mistake* returns, for
any mask and number of ranks. A row has a name, what such a ring does, where to look, the chapter, and the change:

    entry("own_block_skipped", "A rank's own block is never used.", LOOP, 4,
          but(sees=lambda steps, case, rank, block: ...))         the steps as they were, then the arguments of `sees`

Some mistakes can be made in several ways whose numbers differ. They are further changes of one row. In a file of one's
own, a catalogue for --catalogue, a mistake is a function:

    @mistake("what such a ring does", look="where", chapter=4)
    @replaces("sees")
    def own_block_skipped(steps, case, rank, block): ...          the arguments of `sees` in paper_ring.py

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


def entry(name: str, what: str, look: str, chapter: int, *variants: Change, wild: tuple[str, ...] = ()) -> Mistake:
    """A row of a table."""
    return Mistake(name, what, look, chapter, wild, list(variants))


def but(**wrong: Callable[..., Any]) -> Change:
    """Some steps are wrong: by the name of a step, a function of the steps as they were and of its own arguments."""

    @wraps(next(iter(wrong.values())))
    def change(steps: Steps) -> Steps:
        changed: dict[str, Any] = {step: partial(function, steps) for step, function in wrong.items()}
        return replace(steps, **changed)

    return change


def replaces(step: str) -> Callable[[Callable[..., Any]], Change]:
    """`but` as a decorator: make a mistake of a wrong step."""
    return lambda wrong: but(**{step: wrong})


def mistake(what: str, *, look: str, chapter: int, wild: tuple[str, ...] = ()) -> Callable[[Change], Change]:
    """Enter a function into the catalogue, under its own name."""

    def enter(change: Change) -> Change:
        CATALOGUE[change.__name__] = entry(change.__name__, what, look, chapter, change, wild=wild)
        return change

    return enter
