"""The explorer sees every order: its verdicts are those of brute force, and its runs are the shortest."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.basics.blocking_messages import ring_programs, simulate_messages
from tests.orders.interleavings import explore, of_blocking
from tests.orders.steps import Await, Irecv, Isend, Raise, Read, Wait, Write

X, Y = ("x",), ("y",)
NOTHING, ONE = frozenset(), frozenset([1])


def orders(programs, places=None, taken=()):
    """Every order in which the steps can be taken, as tuples of ranks, each with whether all ended. By brute force."""
    places = places or (0,) * len(programs)
    done = [program[:at] for program, at in zip(programs, places, strict=True)]

    def begun(kind, owner, peer):
        return sum(
            isinstance(step, kind) and (step.to if kind is Isend else step.source) == peer for step in done[owner]
        )

    def may(rank, step):
        if isinstance(step, Await):
            return sum(each == Raise(step.flag) for program in done for each in program) >= step.count
        if isinstance(step, Wait):
            for n in step.steps:
                mine = programs[rank][n]
                kind, other, peer = (Isend, Irecv, mine.to) if isinstance(mine, Isend) else (Irecv, Isend, mine.source)
                number = sum(
                    isinstance(each, kind) and (each.to if kind is Isend else each.source) == peer
                    for each in programs[rank][: n + 1]
                )
                if begun(other, peer, rank) < number:
                    return False
        return True

    ready = [r for r, at in enumerate(places) if at < len(programs[r]) and may(r, programs[r][at])]
    if not ready:
        yield taken, all(at == len(program) for at, program in zip(places, programs, strict=True))
    for rank in ready:
        yield from orders(programs, (*places[:rank], places[rank] + 1, *places[rank + 1 :]), (*taken, rank))


def is_bad(programs, order, ended):
    """Whether this order ends in waiting, or has two neighbours of different ranks that clash, or a wrong read."""
    if not ended:
        return True
    places, memory, under_way = [0] * len(programs), {}, [{} for _ in programs]
    sent = {}  # (from, to): the cells of messages of which one end has begun
    for rank in order:
        mine = programs[rank][places[rank]]
        for other, at in enumerate(places):
            theirs = list(under_way[other].values())
            if other != rank and at < len(programs[other]):
                theirs.append(programs[other][at])
            if any(set(uses(mine)) & set(uses(each)) and clash(mine, each) for each in theirs):
                return True
        if isinstance(mine, Read) and any(sorted(memory.get(c, "!")) != sorted(mine.expected) for c in mine.cells):
            return True
        if isinstance(mine, Write):
            for cell in mine.cells:
                old = memory.get(cell) if mine.add else ()
                memory[cell] = "!" if old is None or old == "!" else (*old, *mine.parts)
        if isinstance(mine, Isend | Irecv):
            under_way[rank][places[rank]] = mine
            pair = (rank, mine.to) if isinstance(mine, Isend) else (mine.source, rank)
            queue = sent.setdefault(pair, [])
            if queue and type(queue[0]) is not type(mine):
                ends = [queue.pop(0), mine]
                source, to = ends if isinstance(ends[0], Isend) else ends[::-1]
                for a, b in zip(source.cells, to.cells, strict=True):
                    memory[b] = memory.get(a, "!")
            else:
                queue.append(mine)
        if isinstance(mine, Wait):
            for n in mine.steps:
                del under_way[rank][n]
        places[rank] += 1
    return False


def uses(step):
    return getattr(step, "cells", ())


def clash(one, other):
    return isinstance(one, Write | Irecv) or isinstance(other, Write | Irecv)


@st.composite
def small_programs(draw):
    """Two or three ranks, up to five steps each, which share cells, flags and messages."""
    ranks, programs = draw(st.integers(2, 3)), []
    for rank in range(ranks):
        others = [other for other in range(ranks) if other != rank]
        program, open_messages = [], []
        for _ in range(draw(st.integers(0, 5 if ranks == 2 else 3))):
            kind = draw(st.sampled_from("rwafgsmv"))
            cell, other = (draw(st.sampled_from(["x", "y", f"own {rank}"])),), draw(st.sampled_from(others))
            if kind == "r":
                program.append(Read(cell, draw(st.sampled_from([NOTHING, ONE]))))
            if kind in "wa":
                program.append(Write(cell, draw(st.sampled_from([(), (1,)])), add=kind == "a"))
            if kind == "f":
                program.append(Raise(f"of {rank}"))
            if kind == "g":
                program.append(Await(f"of {other}", draw(st.integers(1, 2))))
            if kind in "sm":
                open_messages.append(len(program))
                program.append(Isend(other, cell) if kind == "s" else Irecv(other, cell))
            if kind == "v" and open_messages:
                program.append(Wait((open_messages.pop(0),)))
        programs.append(program)
    return programs


@settings(max_examples=250)
@given(programs=small_programs())
def test_the_verdict_is_that_of_brute_force(programs):
    bad = any(is_bad(programs, order, ended) for order, ended in orders(programs))
    reduced, every = explore(programs), explore(programs, every_order=True)
    assert (bool(reduced.why), bool(every.why)) == (bad, bad)
    assert reduced.run == every.run
    assert reduced.states <= every.states
    assert reduced.ends == every.ends == (0 if bad else 1)  # without a clash the order cannot matter


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
    found = explore(programs)
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
