"""The explorer sees every order: what is bad is found, after the fewest steps."""

import pytest

from ringlab.basics.blocking_messages import ring_programs, simulate_messages
from tests.orders.interleavings import explore, of_blocking
from tests.orders.steps import Await, Irecv, Isend, Raise, Read, Wait, Write

X, Y = ("x",), ("y",)
ONE = frozenset([1])


@pytest.mark.parametrize(("n", "m"), [(0, 3), (2, 2), (4, 7)])
def test_ranks_that_share_nothing_reach_every_pair_of_places(n, m):
    programs = [[Write(X)] * n, [Write(Y)] * m]
    assert explore(programs, every_order=True).states == (n + 1) * (m + 1)
    assert explore(programs).states == n + m + 1


BAD = {  # programs, the number of steps of the shortest bad run, and what is bad
    "a write beside a read": (
        [[Write(X, (1,)), Raise("ready"), Write(X)], [Await("ready", 1), Read(X, ONE)]],
        3,
        "rank 0 writes x while rank 1 reads x",
    ),
    "two writes": ([[Write(X)], [Raise("f"), Write(X)]], 1, "rank 0 writes x while rank 1 writes x"),
    "nothing was written": ([[Read(X, ONE)]], 0, "rank 0 reads x: it holds nothing yet; expected 1"),
    "a part twice": (
        [[Write(X), Write(X, (1,), add=True), Write(X, (1,), add=True), Read(X, ONE)]],
        3,
        "rank 0 reads x: it holds 1 + 1; expected 1",
    ),
    "half a message": (
        [[Write(X, (1,)), Isend(1, X), Wait((1,))], [Irecv(0, Y), Read(Y, ONE), Wait((0,))]],
        1,
        "rank 1 reads y while rank 1 receives y",
    ),
    "written while it is sent": (
        [[Write(X, (1,)), Isend(1, X), Write(X), Wait((1,))], [Irecv(0, Y), Wait((0,))]],
        2,
        "rank 0 writes x while rank 0 sends x",
    ),
    "nobody sends": ([[Irecv(1, X), Wait((0,))], []], 1, "all wait: rank 0 for nobody"),
    "a flag too few": (
        [[Raise("f")], [Await("f", 1), Await("f", 2)]],
        2,
        "all wait: rank 1 for nobody",
    ),
    "another channel": (
        [[Isend(1, (), "a"), Wait((0,))], [Irecv(0, (), "b"), Wait((0,))]],
        2,
        "all wait: rank 0 for nobody, rank 1 for nobody",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_bad_is_found_after_the_fewest_steps(case):
    programs, steps, why = BAD[case]
    for every_order in (False, True):
        found = explore(programs, every_order=every_order)
        assert (found.why, len(found.run)) == (why, steps)


def test_readers_may_read_together_and_messages_bring_what_was_sent():
    read = Read(X, ONE)
    assert not explore([[Write(X, (1,)), Raise("f"), read], [Await("f", 1), read], [Await("f", 1), read]]).why
    sends = [Write(X, (1,)), Write(Y, (2,)), Isend(1, X), Isend(1, Y), Wait((2, 3))]
    receives = [Irecv(0, ("a",)), Irecv(0, ("b",)), Wait((0, 1)), Read(("a",), ONE), Read(("b",), frozenset([2]))]
    assert not explore([sends, receives], every_order=True).why


def test_a_flag_has_one_owner():
    with pytest.raises(ValueError, match="f is raised by several ranks"):
        explore([[Raise("f")], [Raise("f")]])


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("even_odd", [True, False])
def test_it_says_what_the_simulator_says_of_one_order(world_size, even_odd):
    programs = ring_programs(world_size, hops=2, even_odd=even_odd)
    assert bool(explore(of_blocking(programs)).why) == bool(simulate_messages(programs).waits_for)
