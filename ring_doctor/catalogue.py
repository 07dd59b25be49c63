"""The mistakes of an attention ring: six tables by the numbers that they give, and one by the way to ask.

mistakes/README.md lists them in words. Shapes: those of mistakes/paper_ring.py.

Before: the tables in mistakes/.
After: explaining/diagnosis.py, which compares a ring with all of them.
Source: mistakes/README.md names who had each, where that is public; BY_WAY is what the users of public rings met.
"""

from ring_doctor.asking.case import Case
from ring_doctor.asking.names import module_named
from ring_doctor.asking.questions import WAYS
from ring_doctor.mistakes import CATALOGUE, backward, gradients, masks, merging, other_ways, told, travel
from ring_doctor.mistakes.paper_ring import RIGHT, NotOnPaper, compute
from ringlab.support.processes import place_of

TABLES = (other_ways, gradients, backward, masks, merging, travel)
for table in TABLES:
    CATALOGUE.update(table.MISTAKES)

OF_WAYS = told("Ways to ask", {name: () for _, name in WAYS.values() if name})
BY_WAY = {way: OF_WAYS[name] for way, (_, name) in WAYS.items() if name}


def enter(name: str) -> None:
    """Enter the mistakes of a module or of a file, my.py. Raises ValueError when it has none, or is none."""
    home = module_named(name).__name__
    own = [(it.name, change) for it in CATALOGUE.values() for change in it.variants if change.__module__ == home]
    if not own:
        raise ValueError(f"{name} has no mistakes; expected functions under @mistake(...) of ring_doctor.mistakes")
    for mistake, change in own:
        try:
            compute(Case(3, 18, True), change(RIGHT))
        except NotOnPaper:
            continue
        except Exception as error:
            said = f"{mistake} of {name} raises {type(error).__name__}: {error} ({place_of(error)})"
            expected = "a step of ring_doctor/mistakes/paper_ring.py, with its arguments"
            raise ValueError(f"{said}; expected {expected}") from error
