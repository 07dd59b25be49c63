"""Checks of the appendix on states: two maps in one, the gradient that goes the other way."""

from collections.abc import Callable

import torch
from torch import Tensor

from notebooks.source.checks.answers import NotYet, difference, draws, exercise, in_order, several, torch_generator


def _told(given: Tensor, right: Tensor, wrong: dict[str, Tensor]) -> None:
    """Raise NotYet where `given` is not `right`, with the hint whose result it is."""
    problem = difference(given, right)
    if problem is not None:
        raise NotYet(next((hint for hint, x in wrong.items() if difference(given, x) is None), problem))


def _cases() -> list[list[Tensor]]:
    """Four matrices each: of 2 x 2, 2 x 3, 2 x 2, 2 x 3 numbers at first, then of others."""
    generators = [torch.Generator().manual_seed(0), *map(torch_generator, draws())]
    sizes = [(2 + i % 3, 3 + i % 2) for i in range(len(generators))]
    return [
        [torch.randn(D, n, generator=generator, dtype=torch.float64) for n in (D, Dv, D, Dv)]
        for generator, (D, Dv) in zip(generators, sizes, strict=True)
    ]


@exercise
def check_two_maps(answer: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> str | None:
    """(keep_a, add_a, keep_b, add_b) -> keep and add of a, then b."""
    for keep_a, add_a, keep_b, add_b in _cases():
        right = {"keep": keep_b @ keep_a, "add": keep_b @ add_a + add_b}
        keep, add = several(answer(keep_a, add_a, keep_b, add_b), tuple(right))
        in_order((keep, add), right)
        order = "the state goes through a first, so a's matrix stands next to the state: on the right"
        _told(keep, right["keep"], {order: keep_a @ keep_b, "that is for numbers; these are matrices": keep_a * keep_b})
        kept = "what a has added goes through b too: b keeps only a part of it"
        _told(add, right["add"], {kept: add_a + add_b, order: keep_a @ add_b + add_a})
    return "with it, maps of 1, 2, 4, ... ranks become one"


@exercise
def check_state_gradient(answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str | None:
    """(keep, the gradient of the state after a rank, what the rank's own tokens give) -> of the state before it."""
    for keep, d_after, _, d_read in _cases():
        back = keep.mT @ d_after
        wrong = {
            "then nothing comes back from later ranks, as in the failure above": d_read,
            "the rank's own tokens read this state too": back,
            "the gradient goes back through the transposed matrix": keep @ d_after + d_read,
            "d_read is the gradient of the state before the rank: it goes through no map of this rank": keep.mT
            @ (d_after + d_read),
            "what later ranks find goes back through this rank's map": d_after + d_read,
        }
        _told(answer(keep, d_after, d_read), back + d_read, wrong)
    return "an affine map again, so hops, scan and gather serve the gradient too"
