"""An entry of the catalogue of mistakes: its words are on a page, README.md, and its changes in a row of a table.

A mistake changes the steps of a ring on paper. So the doctor can compute what a ring *with that mistake* returns, for
any mask and number of ranks. The tables are the other files of this folder, by kind. A row is a name and the change:

    "own_block_skipped": [but(sees=lambda steps, case, rank, block: ...)]    the steps as they were, then the arguments

Some mistakes can be made in several ways whose numbers differ. They are further changes of one row.

Before: paper_ring.py. After: merging.py, the first entries.
Source: the page names who had a mistake, where that is public.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ring_doctor.asking.case import Case
from ring_doctor.mistakes.paper_ring import Steps
from ringlab.support.expect import expect

Results = dict[str, Tensor]
Change = Callable[[Steps], Steps]
PAGE = Path(__file__).with_name("README.md")
ENTRY = re.compile(
    r"^### (\w+)\n(.+)\n- Look at: (.+)(?:\n- Chapter: (\d+))?(?:\n- Seen in: (.+))?(?=\n\n|\n*\Z)", re.M
)


@dataclass(frozen=True)
class Mistake:
    """An entry of the catalogue."""

    name: str
    what: str  # what such a ring does, in a sentence
    look: str  # where in a ring to look
    chapter: int  # which explains it; 0: the appendix of states
    wild: tuple[str, ...] = ()  # who had it: repository and number
    variants: tuple[Change, ...] = field(default=(), compare=False)


def words(section: str, page: Path = PAGE) -> dict[str, Mistake]:
    """The mistakes under a heading of a page, by name, without their changes."""
    text = page.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {
        name: Mistake(name, what, look, int(chapter or 0), tuple(filter(None, wild.split("; "))))
        for name, what, look, chapter, wild in ENTRY.findall(text)
    }


def told(section: str, changes: Mapping[str, Sequence[Change]]) -> dict[str, Mistake]:
    """The mistakes of a table, by name, with the words of a section. Raises ValueError where either is missing."""
    known = words(section)
    alone = ", ".join(sorted(known.keys() ^ changes.keys()))
    expect(not alone, f"{alone} given once", f"words in {PAGE.name}, ## {section}, and a row in its table")
    return {name: replace(known[name], variants=tuple(variants)) for name, variants in changes.items()}


def but(**wrong: Callable[..., Any]) -> Change:
    """Some steps are wrong: by the name of a step, a function of the steps as they were and of its own arguments."""

    def change(steps: Steps) -> Steps:
        changed: dict[str, Any] = {step: partial(function, steps) for step, function in wrong.items()}
        return replace(steps, **changed)

    return change


def in_the_end(wrong: Callable[[Steps, Case, Results], Results], of: str = "dq") -> Change:
    """Other whole results where all is computed, and the result `of` is among them."""

    def at_the_end(steps: Steps, case: Case, results: Results) -> Results:
        results = steps.at_the_end(case, results)
        return results | wrong(steps, case, results) if of in results else results

    return but(at_the_end=at_the_end)
