"""Real rings, over real messages, a mistake in each: what the doctor must recognise, and what it cannot know.

    attention = Sick("two_seats:0")        # pickles; call it on every rank: attention(q, k, v, scale=..., group=...)
    ALL["two_seats:0"].shows(case)         # whether its results must be wrong in this case of asking/case.py

BY_HAND are rings that share nothing with the doctor's catalogue: patches of this project's rings, and some more of each
kind; "name/variant" is another ring with a mistake. OF_TABLE are rings from its rows, of mistakes of the forward pass:
"name:0" from the first variant.
"""

import inspect
from dataclasses import dataclass

from ring_doctor.catalogue import CATALOGUE
from tests.doctor.sick.by_hand import BY_HAND, UNKNOWN
from tests.doctor.sick.table_ring import from_table

OF_TABLE = {
    f"{name}:{i}": ring
    for name, mistake in CATALOGUE.items()
    for i, variant in enumerate(mistake.variants)
    if name != "sinks_per_block" and (ring := from_table(variant))  # these rings take no sinks
}
ALL = {**OF_TABLE, **BY_HAND, **UNKNOWN}
OPTIONS = {"causal": False, "layout": "contiguous", "documents": None, "window": None, "scale": None, "group": None}
ARGUMENTS = dict.fromkeys("qkv", inspect.Parameter.empty) | OPTIONS  # and their defaults


@dataclass(frozen=True)
class Sick:
    """The ring of this name: f(q, k, v), with those options that it takes."""

    name: str

    @property
    def __signature__(self):
        takes = {*"qkv", "scale", "group", *ALL[self.name].takes}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        given = [inspect.Parameter(name, kind, default=default) for name, default in ARGUMENTS.items() if name in takes]
        return inspect.Signature(given)

    def __call__(self, q, k, v, **options):
        return ALL[self.name](q, k, v, **options)
