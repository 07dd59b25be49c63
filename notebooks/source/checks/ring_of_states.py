"""Checks of the appendix on states: two maps in one, the gradient that goes the other way."""

import torch

from notebooks.source.checks.answers import Exercise, torch_generator


def _maps(generator, D=2, Dv=3):
    """keep (D, D), add (D, Dv), and the same once more."""
    return tuple(torch.randn(D, n, generator=generator, dtype=torch.float64) for n in (D, Dv, D, Dv))


def _drawn(random):
    return _maps(torch_generator(random), random.randint(2, 4), random.randint(3, 4))


def _gradients(maps):
    keep, d_after, _, d_read = maps
    return keep, d_after, d_read


ORDER = "the state goes through a first, so a's matrix stands next to the state: on the right"
check_two_maps = Exercise(  # keep and add of a, and of b -> of a, then b
    right=lambda keep_a, add_a, keep_b, add_b: {"keep": keep_b @ keep_a, "add": keep_b @ add_a + add_b},
    wrong={
        ORDER: lambda keep_a, add_a, keep_b, add_b: {"keep": keep_a @ keep_b, "add": keep_a @ add_b + add_a},
        "that is for numbers; these are matrices": lambda keep_a, add_a, keep_b, add_b: {"keep": keep_a * keep_b},
        "what a has added goes through b too: b keeps only a part of it": (
            lambda keep_a, add_a, keep_b, add_b: {"add": add_a + add_b}
        ),
    },
    cases={"state -> keep_b @ (keep_a @ state + add_a) + add_b": [_maps(torch.Generator().manual_seed(0))]},
    draw=_drawn,
    remark="with it, maps of 1, 2, 4, ... ranks become one",
)

check_state_gradient = Exercise(  # of the state before a rank: keep, the one after it, and what its own tokens give
    right=lambda keep, d_after, d_read: keep.mT @ d_after + d_read,
    wrong={
        "then nothing comes back from later ranks, as in the failure above": lambda keep, d_after, d_read: d_read,
        "the rank's own tokens read this state too": lambda keep, d_after, d_read: keep.mT @ d_after,
        "the gradient goes back through the transposed matrix": lambda keep, d_after, d_read: keep @ d_after + d_read,
        "d_read is the gradient of the state before the rank: it goes through no map of this rank": (
            lambda keep, d_after, d_read: keep.mT @ (d_after + d_read)
        ),
        "what later ranks find goes back through this rank's map": lambda keep, d_after, d_read: d_after + d_read,
    },
    cases={
        "what later ranks find, and what its own tokens read": [_gradients(_maps(torch.Generator().manual_seed(0)))]
    },
    draw=lambda random: _gradients(_drawn(random)),
    remark="an affine map again, so hops, scan and gather serve the gradient too",
)
