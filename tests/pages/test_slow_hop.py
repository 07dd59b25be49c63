"""The timeline of a ring whose ranks or links differ: by hand, against closed forms, by properties."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from figures.slow_hop import duration, simulate_timeline
from ring_planner.hidden_communication import ring_seconds
from ringlab.ring.causal import visible_pairs

TIMES = st.integers(0, 20)  # whole seconds: no rounding
WORLDS = st.integers(1, 9)


@st.composite
def rings(draw):
    """Seconds of computing, above 0, and of hops, by round and rank."""
    P = draw(WORLDS)

    def table(rounds, least):
        return [draw(st.lists(st.integers(least, 20), min_size=P, max_size=P)) for _ in range(rounds)]

    return table(P, 1), table(P - 1, 0)


def even(P, computing):
    return [[computing] * P] * P


def simulated(computing, hops):
    """With hops that are the same in all rounds."""
    return simulate_timeline(computing, [hops] * (len(computing) - 1))


@given(rings())
def test_events_fit_together(ring):
    """Every rank computes on every block once, exactly when the rules of slow_hop.py allow it."""
    computing, hops = ring
    P, events = len(computing), simulate_timeline(*ring)
    by = {(it.what, it.round, it.rank): it for it in events}
    assert len(by) == len(events), "the same thing twice"
    compute = [[by["compute", t, r] for r in range(P)] for t in range(P)]
    assert sum(it.what == "send" for it in events) == P * (P - 1)
    for r in range(P):
        mine = [compute[t][r] for t in range(P)]
        assert sorted(it.block for it in mine) == list(range(P))
        assert [it.end - it.start for it in mine] == [computing[t][r] for t in range(P)]
        assert (mine[0].start, mine[0].block) == (0, r)
        assert all(this.end <= following.start for this, following in pairwise(mine))
    for t in range(P - 1):
        for r in range(P):
            send, arrival = by["send", t, r], by["send", t, (r - 1) % P]
            assert send.end - send.start == hops[t][r], f"the hop {r} -> {r + 1} takes the time of another hop"
            assert send.block == compute[t][r].block, "it sends another block than the one in hand"
            assert arrival.block == compute[t + 1][r].block, "it computes on another block than it received"
            both = max(compute[t][r].start, compute[t][(r + 1) % P].start)
            assert send.start == both, f"the hop {r} -> {r + 1} of round {t} does not begin when both its ranks have"
            ready = max(compute[t][r].end, send.end, arrival.end)
            assert compute[t + 1][r].start == ready, f"rank {r} does not begin round {t + 1} when it can"
            wait = by.get(("wait", t, r))
            assert (wait is not None) == (ready > compute[t][r].end)
            if wait:
                assert (wait.start, wait.end, wait.block) == (compute[t][r].end, ready, compute[t + 1][r].block)
    assert duration(events) == max(it.end for it in compute[-1])


def test_a_timeline_by_hand():
    """3 ranks, computing 2 s; the hops take 1 s, 5 s (from rank 1 to 2) and 1 s. Rank 0 has no end of the slow one.

    Round 1 begins after 2 s on rank 0, 5 s on ranks 1 and 2. The hops 0 -> 1 and 2 -> 0 wait for those until 5 s, and
    end at 6 s: rank 0 begins round 2 then, ranks 1 and 2 after 10 s.
    """
    events = simulated(even(3, 2), [1, 5, 1])
    begins = {(it.round, it.rank): it.start for it in events if it.what == "compute"}
    assert [[begins[t, r] for r in range(3)] for t in range(3)] == [[0, 0, 0], [2, 5, 5], [6, 10, 10]]
    waits = {(it.round, it.rank): (it.start, it.end) for it in events if it.what == "wait"}
    assert waits == {(0, 1): (2, 5), (0, 2): (2, 5), (1, 0): (4, 6), (1, 1): (7, 10), (1, 2): (7, 10)}
    assert duration(events) == 12


@given(TIMES, st.lists(TIMES, min_size=1, max_size=9))
def test_the_slowest_hop_rules_ranks_that_are_alike(computing, hops):
    P = len(hops)
    assert duration(simulated(even(P, computing), hops)) == ring_seconds(P, computing, max(hops))


@pytest.mark.parametrize(("layout", "shown"), [("zigzag", 0), ("striped", 0), ("contiguous", 1 / 2)])
def test_causal_layouts_when_a_hop_takes_as_long_as_what_is_visible(layout, shown):
    """The exposed time of the messages, in unmasked rounds: half of the first hop of contiguous chunks, else none.

    The last rank of contiguous chunks computes on whole blocks, except on its diagonal block, which is half masked.
    """
    P, C = 4, 512
    visible = 1 if layout == "contiguous" else 1 / 2
    computing = (visible_pairs(layout, P * C, P) / C**2).tolist()
    with_hops, without = (duration(simulated(computing, [hop] * P)) for hop in (visible, 0))
    assert with_hops - without == pytest.approx(shown, abs=P / C)


def test_a_block_that_takes_no_time_leaves_no_event_but_travels_on():
    """Contiguous and causal: rank 0 computes nothing of block 1."""
    events = simulated([[1, 1], [0, 2]], [3, 3])
    assert [(it.rank, it.round, it.block) for it in events if it.what == "compute"] == [(0, 0, 0), (1, 0, 1), (1, 1, 0)]
    assert [(it.rank, it.end) for it in events if it.what == "send"] == [(0, 3), (1, 3)]
    assert duration(events) == 5
    assert duration(simulated([[0]], [7])) == 0


BAD = [
    (([], []), "expected P rounds of P ranks and P - 1 of P hops"),
    (([[1, 1]], [[1, 1]]), r"rounds of \[\[2\], \[2\]\]; expected P rounds"),
    (([[1, 1], [1]], [[1, 1]]), r"rounds of \[\[2, 1\], \[2\]\]"),
    (([[1, 1], [1, -1]], [[1, 1]]), "a time is negative; expected seconds"),
    (([[1, 1], [1, 1]], [[-1, 1]]), "a time is negative; expected seconds"),
]


@pytest.mark.parametrize(("given", "says"), BAD)
def test_bad_input(given, says):
    with pytest.raises(ValueError, match=says):
        simulate_timeline(*given)
