"""The mistakes of an attention ring: six tables by the numbers that they give, and one by the way to ask.

mistakes/README.md lists them in words. Shapes: those of mistakes/paper_ring.py.

Before: the tables in mistakes/.
After: explaining/diagnosis.py, which compares a ring with all of them.
Source: mistakes/README.md names who had each, where that is public; BY_WAY is what the users of public rings met.
"""

from ring_doctor.asking.questions import WAYS
from ring_doctor.mistakes import Mistake, backward, gradients, masks, merging, other_ways, told, travel

TABLES = (other_ways, gradients, backward, masks, merging, travel)
CATALOGUE: dict[str, Mistake] = {name: it for table in TABLES for name, it in table.MISTAKES.items()}

OF_WAYS = told("Ways to ask", {name: () for _, name in WAYS.values() if name})
BY_WAY = {way: OF_WAYS[name] for way, (_, name) in WAYS.items() if name}
