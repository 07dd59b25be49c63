"""Real rings, over real messages, a mistake in each: what the doctor must recognise, and what it cannot know.

    attention = sick("two_seats")          # pickles; call it on every rank: attention(q, k, v, scale=..., group=...)
    SICK["two_seats"].shows(case)          # whether its results must be wrong in this case of ring_doctor/case.py

BY_HAND are rings that share nothing with the doctor's catalogue: the patches of this project's rings, and some more of
each kind. OF_TABLE are rings from its rows, of mistakes of the forward pass: "two_seats", and "two_seats:1" for another
variant. In BY_HAND "name/variant" is the same mistake in another ring.
"""

import functools

from ring_doctor.catalogue import CATALOGUE
from tests.sick import backward, forward
from tests.sick.ring import CAUSAL, MASKED, ON_MESH
from tests.sick.table_ring import from_table

OF_TABLE = {
    f"{name}:{i}" if i else name: ring
    for name, mistake in CATALOGUE.items()
    for i, variant in enumerate(mistake.variants)
    if name != "sinks_per_block" and (ring := from_table(variant))  # these rings take no sinks
}
BY_HAND = {**forward.SICK, **backward.SICK}
SICK = {**OF_TABLE, **BY_HAND}
UNKNOWN = backward.UNKNOWN
ALL = {**SICK, **UNKNOWN}


def sick(name):
    """The ring with this mistake: f(q, k, v), with those of causal, layout, documents and window that it takes.

    What BY_HAND and OF_TABLE both have is that of BY_HAND.
    """
    function = {(): plain, CAUSAL: causal, MASKED: masked, ON_MESH: on_mesh}[ALL[name].takes]
    return functools.partial(function, name)


def of_table(name):
    return functools.partial(tabled, name)


def tabled(name, q, k, v, **options):
    return OF_TABLE[name](q, k, v, **options)


def plain(name, q, k, v, *, scale=None, group=None):
    return ALL[name](q, k, v, scale=scale, group=group)


def causal(name, q, k, v, *, causal=False, layout="contiguous", scale=None, group=None):
    return ALL[name](q, k, v, causal=causal, layout=layout, scale=scale, group=group)


def on_mesh(name, q, k, v, *, causal=False, layout="contiguous", scale=None):
    return ALL[name](q, k, v, causal=causal, layout=layout, scale=scale)


def masked(name, q, k, v, *, causal=False, layout="contiguous", documents=None, window=None, scale=None, group=None):
    options = {"causal": causal, "layout": layout, "documents": documents, "window": window}
    return ALL[name](q, k, v, **options, scale=scale, group=group)
