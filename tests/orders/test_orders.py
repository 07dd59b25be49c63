"""Rings of this project are right in every order of their steps; each wait and flag is needed; mistakes are found."""

import re
from unittest import mock

import pytest

from ringlab.basics.blocking_messages import ring_programs, simulate_messages
from ringlab.support.host_memory import HostMemory
from ringlab.training import overlap, schedule
from ringlab.training.double_ring import DoubleRing, DoubleSums
from ringlab.training.masks import Mask
from ringlab.training.overlap import two_buffers
from ringlab.training.schedule import Ring, TravellingSums
from ringlab.training.shared_memory import SharedMemory, SharedSums, TwoLevels
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


# Mistakes in the code ------------------------------------------------------------------------------------------------


def one_buffer(k, v, lengths, rank, dtype=None):
    right = two_buffers(k, v, lengths, rank, dtype)
    return lambda t: right(0)


def yielded_too_late(k, v, *, lengths, group=None, hops=None):
    """The next block arrives in the buffer of the block in hand: it is used one hop early."""
    rank, world_size, _, _ = overlap.neighbours(group)
    buffer = two_buffers(k, v, lengths, rank)
    here = k, v
    for t in range(world_size - 1):
        coming = overlap.keys_and_values(buffer((t + 1) // 2), k, v)
        works = overlap.post(here, coming, group)
        yield here
        for work in works:
            work.wait()
        here = coming
    yield here


def sums_that_do_not_wait(sums, t):
    return sums.both(sums.buffer(t))


def not_waited_between_hosts(sums, u):
    with mock.patch.object(TravellingSums, "wait"):
        parts = sums.ended.home()
    for total, part in zip(sums.between.of_round(u), parts, strict=True):
        total += part
    sums.between.send_on(u)


def home_too_early(sums, t):
    sums.wait_for_turn(t)
    with mock.patch.object(sums.memory, "wait"):  # for HOME
        right_send_on(sums, t)


def home_not_waited_for(sums):
    return sums.both(sums.own().add_(sums.coming))


right_send_on = SharedSums.send_on


MESSAGE = r"while rank \d (sends|receives)"
no_waiting = HostMemory, "wait_for_readers", lambda memory: memory.readers.clear()
# fmt: off
MISTAKES = {  # name: (the ring, its ranks, what is patched, what is said)
    "one buffer": ("overlapped", 3, (overlap, "two_buffers", one_buffer), MESSAGE),
    "a buffer one hop early": ("overlapped", 4, (schedule, "arriving_blocks", yielded_too_late), MESSAGE),
    "sums before they arrive": ("overlapped", 3, (TravellingSums, "of_round", sums_that_do_not_wait), MESSAGE),
    "home before they arrive": ("overlapped", 2, (TravellingSums, "home", home_not_waited_for), MESSAGE),
    "sums of a turn too early": ("double 2 x 2", 4, (DoubleSums, "pass_on", not_waited_between_hosts), MESSAGE),
    "readers are not waited for": ("shared memory", 2, no_waiting, "while rank 1 reads"),
    "two levels: sums too early": ("two levels 2 x 2", 4, (SharedSums, "send_on", home_too_early), "while rank "),
    "two levels: a block too early": ("two levels 2 x 2", 4, no_waiting, "while rank "),
    "two add at a time": ("shared memory", 3, (SharedSums, "wait_for_turn", lambda sums, t: None), "while rank "),
}
# fmt: on


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_ring_with_a_mistake_is_found(mistake):
    name, world_size, (home, function, wrong), said = MISTAKES[mistake]
    ring, layers = rings_of(world_size)[name]
    with mock.patch.object(home, function, wrong):
        steps = programs(ring, world_size, layers)
    assert re.search(said, check(steps))


def test_the_rings_that_are_explored_are_those_of_this_project():
    assert {type(ring) for ring, _ in rings_of(4).values()} == {type(blocking), Scheduled}
    kinds = {ring.schedule for ring, _ in rings_of(4).values() if isinstance(ring, Scheduled)}
    assert kinds == {Ring, DoubleRing, SharedMemory, TwoLevels}
