"""All the mistakes that the doctor knows, from the five files that enter them.

Shapes: those of paper_ring.py.

    $ python -m ringlab.doctor.catalogue
    ...
    averages_added: The blocks' own softmax averages are added up. The weights of a row add up to the number of blocks.
    ...

Before: mistakes_of_merging.py, mistakes_of_travel.py, mistakes_of_masks.py, mistakes_of_other_ways.py,
mistakes_of_gradients.py.
After: diagnosis.py, which compares a ring with all of them.
Source: each entry names who had it, where that is public.
"""

import sys

from ringlab.doctor import (  # noqa: F401 (each enters its mistakes when it is imported)
    mistakes_of_gradients,
    mistakes_of_masks,
    mistakes_of_merging,
    mistakes_of_other_ways,
    mistakes_of_travel,
)
from ringlab.doctor.mistakes import CATALOGUE


def main() -> int:
    for name, mistake in sorted(CATALOGUE.items()):
        print(f"{name}: {mistake.what}")
        if mistake.wild:
            print(f"    had it: {', '.join(mistake.wild)}")
    print(f"{len(CATALOGUE)} mistakes are known")
    return 0


if __name__ == "__main__":
    sys.exit(main())
