"""Real rings, over real messages, a mistake in each: what the doctor must recognise, and what it cannot know.

    attention = sick("two_seats")          # pickles; call it on every rank: attention(q, k, v, scale=..., group=...)
    SICK["two_seats"].shows(case)          # whether its results must be wrong in this case of ring_doctor/case.py

The name of a mistake is that of the doctor's catalogue; "name/variant" is the same mistake in another ring.
"""

import functools

from tests.sick import unknown
from tests.sick.ring import CAUSAL, MASKED, ON_MESH

SICK = unknown.KNOWN
UNKNOWN = unknown.SICK  # not in the catalogue when these were written
COMPOSED = unknown.COMPOSED
ALL = {**SICK, **UNKNOWN, **COMPOSED}


def sick(name):
    """The ring with this mistake: f(q, k, v), with those of causal, layout, documents and window that it takes."""
    function = {(): plain, CAUSAL: causal, MASKED: masked, ON_MESH: on_mesh}[ALL[name].takes]
    return functools.partial(function, name)


def plain(name, q, k, v, *, scale=None, group=None):
    return ALL[name](q, k, v, scale=scale, group=group)


def causal(name, q, k, v, *, causal=False, layout="contiguous", scale=None, group=None):
    return ALL[name](q, k, v, causal=causal, layout=layout, scale=scale, group=group)


def on_mesh(name, q, k, v, *, causal=False, layout="contiguous", scale=None):
    return ALL[name](q, k, v, causal=causal, layout=layout, scale=scale)


def masked(name, q, k, v, *, causal=False, layout="contiguous", documents=None, window=None, scale=None, group=None):
    options = {"causal": causal, "layout": layout, "documents": documents, "window": window}
    return ALL[name](q, k, v, **options, scale=scale, group=group)
