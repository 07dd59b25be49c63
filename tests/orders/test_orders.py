"""Rings of this project are right in every order of their steps, and each of their waits is needed."""

import pytest

from ringlab.ring.masks import Mask
from ringlab.ring.schedule import Ring
from tests.orders.every_order import Scheduled, programs, rings_of
from tests.orders.happens_before import Irecv, Isend, Use, Wait, check

X, Y = ("x",), ("y",)
READ, WRITE = Use(X), Use(X, writes=True)

# The check -----------------------------------------------------------------------------------------------------------

BAD = {  # programs, and what is bad
    "half a message": (
        [[Isend(1, X), Wait((0,))], [Irecv(0, Y), Use(Y), Wait((0,))]],
        "rank 1 reads y while it receives y",
    ),
    "written while it is sent": (
        [[WRITE, Isend(1, X), WRITE, Wait((1,))], [Irecv(0, Y), Wait((0,))]],
        "rank 0 writes x while it sends x",
    ),
    "never waited for": ([[Isend(1, X), WRITE], [Irecv(0, Y)]], "writes x while it sends x"),
    "the wrong message": (
        [[Isend(1), Wait((0,)), Isend(1, X)], [Irecv(0), Irecv(0, Y), Wait((0,)), Use(Y, writes=True)]],
        "rank 1 writes y while it receives y",
    ),
    "nobody sends": ([[Irecv(1, X), Wait((0,))], []], "wait for ever: [0]"),
    "another channel": ([[Isend(1, (), "a"), Wait((0,))], [Irecv(0, (), "b"), Wait((0,))]], "wait for ever: [0, 1]"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_bad_is_found(case):
    programs, why = BAD[case]
    assert why in check(programs)


def test_readers_may_read_together_and_a_cell_is_free_after_its_message():
    sends = [WRITE, Isend(1, X), Isend(1, X), READ, Wait((1, 2)), WRITE]
    assert not check([sends, [Irecv(0, Y), Irecv(0), Wait((0, 1)), Use(Y)]])


# The rings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "name"), [(P, name) for P in (1, 2, 3, 4, 6) for name in rings_of(P)])
def test_every_order_is_right(world_size, name):
    assert not check(programs(rings_of(world_size)[name], world_size))


@pytest.mark.parametrize("hops", [1, 2])
def test_blocks_that_a_window_stops(hops):
    """The sums come home from fewer hops."""
    assert not check(programs(Scheduled(Ring), 4, Mask(causal=True, window=hops + 1)))


def without(steps, at):
    """Without a step. Numbers of steps after it are still those of other steps."""
    return [*steps[:at], Use(()), *steps[at + 1 :]]


@pytest.mark.parametrize("name", rings_of(3))
def test_no_wait_is_there_for_nothing(name):
    """But for sends of ring_attn.py, whose blocks are never written again."""
    right, tried = programs(rings_of(3)[name], 3), 0
    for at, step in enumerate(right[0]):
        of_send = isinstance(step, Wait) and all(isinstance(right[0][n], Isend) for n in step.steps)
        if isinstance(step, Wait) and not (of_send and name == "blocking"):
            assert check([without(right[0], at), *right[1:]]), f"{step} is needless"
            tried += 1
    assert tried >= 6
