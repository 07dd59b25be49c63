"""Rings of this project are right in every order of their steps, and each of their waits and flags is needed."""

from textwrap import indent

import pytest

from ringlab.basics.blocking_messages import ring_programs, simulate_messages
from ringlab.ring.masks import Mask
from ringlab.ring.schedule import Ring
from ringlab.ways.double_ring import DoubleRing
from ringlab.ways.shared_memory import SharedMemory, TwoLevels
from tests.orders import happens_before
from tests.orders.every_order import FLAGS, Scheduled, blocking, programs, rings_of
from tests.orders.happens_before import Await, Irecv, Isend, Raise, Use, Wait, check, of_blocking

X, Y = ("x",), ("y",)
READ, WRITE = Use(X), Use(X, writes=True)

# The check -----------------------------------------------------------------------------------------------------------

BAD = {  # programs, and what is bad
    "a write beside a read": (
        [[WRITE, Raise("ready"), WRITE], [Await("ready", 1), READ]],
        "rank 0 writes x while rank 1 reads it",
    ),
    "two writes": ([[WRITE], [Raise("f"), WRITE]], "rank 0 writes x while rank 1 writes it"),
    "half a message": (
        [[Isend(1, X), Wait((0,))], [Irecv(0, Y), Use(Y), Wait((0,))]],
        "rank 1 reads y while rank 1 receives it",
    ),
    "written while it is sent": (
        [[WRITE, Isend(1, X), WRITE, Wait((1,))], [Irecv(0, Y), Wait((0,))]],
        "rank 0 writes x while rank 0 sends it",
    ),
    "never waited for": ([[Isend(1, X), WRITE], [Irecv(0, Y)]], "writes x while rank 0 sends it"),
    "the wrong message": (
        [[Isend(1), Wait((0,)), Isend(1, X)], [Irecv(0), Irecv(0, Y), Wait((0,)), Use(Y, writes=True)]],
        "rank 1 writes y while rank 1 receives it",
    ),
    "nobody sends": ([[Irecv(1, X), Wait((0,))], []], "wait for ever: [0]"),
    "a flag too few": ([[Raise("f")], [Await("f", 1), Await("f", 2)]], "wait for ever: [1]"),
    "another channel": ([[Isend(1, (), "a"), Wait((0,))], [Irecv(0, (), "b"), Wait((0,))]], "wait for ever: [0, 1]"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_bad_is_found(case):
    programs, why = BAD[case]
    assert why in check(programs)


def test_readers_may_read_together_and_a_cell_is_free_after_its_message():
    assert not check([[WRITE, Raise("f"), READ], [Await("f", 1), READ], [Await("f", 1), READ]])
    assert not check(
        [[WRITE, Isend(1, X), Isend(1), Wait((1, 2)), WRITE], [Irecv(0, Y), Irecv(0), Wait((0, 1)), Use(Y)]]
    )


def test_what_a_rank_was_told_it_tells_the_next():
    """Rank 2 hears of the write from rank 1, which heard of it from rank 0."""
    told = [[Await("f", 1), Raise("g")], [Await("g", 1), READ]]
    assert not check([[WRITE, Raise("f")], *told])
    assert check([[Raise("f"), WRITE], *told])


def test_a_flag_has_one_owner():
    with pytest.raises(ValueError, match="f is raised by several ranks"):
        check([[Raise("f")], [Raise("f")]])


@pytest.mark.parametrize("even_odd", [True, False])
def test_it_says_what_the_simulator_says_of_one_order(even_odd):
    for world_size in range(2, 9):
        steps = ring_programs(world_size, hops=2, even_odd=even_odd)
        assert bool(check(of_blocking(steps))) == bool(simulate_messages(steps).waits_for) == (not even_odd)


def test_the_demonstration_says_what_its_docstring_shows(capsys):
    assert happens_before.main() == 0
    assert indent(capsys.readouterr().out, "    ") in happens_before.__doc__


# The rings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "name"), [(P, name) for P in (1, 2, 3, 4, 6) for name in rings_of(P)])
def test_every_order_is_right(world_size, name):
    ring, layers = rings_of(world_size)[name]
    assert not check(programs(ring, world_size, layers))


@pytest.mark.parametrize(("kind", "hops"), [(Ring, 1), (Ring, 2), (SharedMemory, 1), (SharedMemory, 2)])
def test_blocks_that_a_window_stops(kind, hops):
    """The sums come home from fewer hops. The last rank reads so many blocks."""
    steps = programs(Scheduled(kind), 4, 1, Mask(causal=True, window=hops + 1))
    assert not check(steps)
    read = {cell for step in steps[3] for cell in getattr(step, "cells", ()) if "copies of rank" in cell}
    assert len(read) == (2 * (hops + 1) if kind is SharedMemory else 0)  # K and V, its own too


def without(steps, at):
    """Without a step. Numbers of steps after it are still those of other steps."""
    return [*steps[:at], Use(()), *steps[at + 1 :]]


@pytest.mark.parametrize("name", rings_of(3))
def test_no_wait_is_there_for_nothing(name):
    """But for sends of ring_attn.py, whose blocks are never written again."""
    right, tried = programs(rings_of(3)[name][0], 3), 0  # of one layer: in later ones other flags say the same
    for at, step in enumerate(right[0]):
        of_send = isinstance(step, Wait) and all(isinstance(right[0][n], Isend) for n in step.steps)
        if isinstance(step, Await | Wait) and not (of_send and name == "blocking"):
            assert check([without(right[0], at), *right[1:]]), f"{step} is needless"
            tried += 1
    assert tried >= 6


def raised_early(steps, at):
    """A flag is raised one access too early."""
    before = max(n for n in range(at) if isinstance(steps[n], Use))
    return [*steps[:before], steps[at], *steps[before:at], *steps[at + 1 :]]


def test_no_flag_may_be_raised_before_what_it_promises():
    """But for "read" where no pass follows that would write the copies before the sums are home."""
    right = programs(Scheduled(SharedMemory), 3, 2)
    flags = [at for at, step in enumerate(right[0]) if isinstance(step, Raise)]
    of = [right[0][at].flag.split()[0] for at in flags]
    assert {flag: of.count(flag) for flag in FLAGS} == {"ready": 8, "read": 8, "turn": 4, "home": 2}
    needed = [at for n, at in enumerate(flags) if of[n] != "read" or of[:n].count("read") < 4]
    for at in needed:
        assert check([raised_early(right[0], at), *right[1:]]), right[0][at]


def test_the_rings_that_are_explored_are_those_of_this_project():
    assert {type(ring) for ring, _ in rings_of(4).values()} == {type(blocking), Scheduled}
    kinds = {ring.schedule for ring, _ in rings_of(4).values() if isinstance(ring, Scheduled)}
    assert kinds == {Ring, DoubleRing, SharedMemory, TwoLevels}
