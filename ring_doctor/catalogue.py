"""All the mistakes that the doctor knows, from the tables of seven files.

Shapes: those of paper_ring.py.

    $ python -m ring_doctor.catalogue
    ...
    averages_added: The blocks' own softmax averages are added up. The weights of a row add up to the number of blocks.
    ...

Before: mistakes_of_merging.py, mistakes_of_travel.py, mistakes_of_masks.py, mistakes_of_other_ways.py,
mistakes_of_gradients.py, mistakes_of_backward.py, mistakes_of_calls.py.
After: diagnosis.py, which compares a ring with all of them.
Source: each entry names who had it, where that is public.
"""

import sys

from ring_doctor import (
    mistakes_of_backward,
    mistakes_of_gradients,
    mistakes_of_masks,
    mistakes_of_merging,
    mistakes_of_other_ways,
    mistakes_of_travel,
)
from ring_doctor.mistakes import CATALOGUE
from ring_doctor.mistakes_of_calls import BY_WAY
from ring_doctor.mistakes_of_states import MISTAKES as OF_STATES
from ring_doctor.names import module_named

TABLES = (
    mistakes_of_other_ways,
    mistakes_of_gradients,
    mistakes_of_backward,
    mistakes_of_masks,
    mistakes_of_merging,
    mistakes_of_travel,
)
CATALOGUE.update((mistake.name, mistake) for table in TABLES for mistake in table.MISTAKES)
OF_GRADIENTS = frozenset(each.name for each in mistakes_of_gradients.MISTAKES + mistakes_of_backward.MISTAKES)


def enter(name: str) -> None:
    """Enter the mistakes of a module or of a file, my.py. Raises ValueError when it has none, or is none."""
    home = module_named(name).__name__
    if not any(variant.__module__ == home for mistake in CATALOGUE.values() for variant in mistake.variants):
        raise ValueError(f"{name} has no mistakes; expected functions under @mistake(...) of ring_doctor.mistakes")


def main() -> int:
    others = (*BY_WAY.values(), *OF_STATES)
    every = CATALOGUE | {mistake.name: mistake for mistake in others}
    for name, mistake in sorted(every.items()):
        print(f"{name}: {mistake.what}")
        if mistake.wild:
            print(f"    had it: {', '.join(mistake.wild)}")
    print(f"{len(CATALOGUE)} mistakes are known by what they return, {len(BY_WAY)} by when they show")
    print(f"{len(OF_STATES)} mistakes of rings of states")
    return 0


if __name__ == "__main__":
    sys.exit(main())
