"""The timeline of a ring whose ranks or links differ, from the ring's own code: by hand, against closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from figures.slow_hop import duration, simulate_timeline
from ring_planner.hidden_communication import ring_seconds
from ringlab.ring.causal import visible_pairs

TIMES = st.integers(0, 20)  # whole seconds: no rounding


def even(P, computing):
    return [[computing] * P] * P


def test_a_timeline_by_hand():
    """3 ranks, computing 2 s; the hops take 1 s, 5 s (from rank 1 to 2) and 1 s. Rank 0 has no end of the slow one.

    Round 1 begins after 2 s on rank 0, 5 s on ranks 1 and 2. The hops 0 -> 1 and 2 -> 0 wait for those until 5 s, and
    end at 6 s: rank 0 begins round 2 then, ranks 1 and 2 after 10 s.
    """
    events = simulate_timeline(even(3, 2), [1, 5, 1])
    begins = {(it.round, it.rank): it.start for it in events if it.what == "compute"}
    assert [[begins[t, r] for r in range(3)] for t in range(3)] == [[0, 0, 0], [2, 5, 5], [6, 10, 10]]
    waits = {(it.round, it.rank): (it.start, it.end) for it in events if it.what == "wait"}
    assert waits == {(0, 1): (2, 5), (0, 2): (2, 5), (1, 0): (4, 6), (1, 1): (7, 10), (1, 2): (7, 10)}
    assert duration(events) == 12


@given(TIMES, st.lists(TIMES, min_size=1, max_size=9))
def test_the_slowest_hop_rules_ranks_that_are_alike(computing, hops):
    P = len(hops)
    assert duration(simulate_timeline(even(P, computing), hops)) == ring_seconds(P, computing, max(hops))


@pytest.mark.parametrize(("layout", "shown"), [("zigzag", 0), ("striped", 0), ("contiguous", 1 / 2)])
def test_causal_layouts_when_a_hop_takes_as_long_as_what_is_visible(layout, shown):
    """The exposed time of the messages, in unmasked rounds: half of the first hop of contiguous chunks, else none.

    The last rank of contiguous chunks computes on whole blocks, except on its diagonal block, which is half masked.
    """
    P, C = 4, 512
    visible = 1 if layout == "contiguous" else 1 / 2
    computing = (visible_pairs(layout, P * C, P) / C**2).tolist()
    with_hops, without = (duration(simulate_timeline(computing, [hop] * P)) for hop in (visible, 0))
    assert with_hops - without == pytest.approx(shown, abs=P / C)


def test_a_block_that_takes_no_time_leaves_no_event_but_travels_on():
    """Contiguous and causal: rank 0 computes nothing of block 1."""
    events = simulate_timeline([[1, 1], [0, 2]], [3, 3])
    assert [(it.rank, it.round, it.block) for it in events if it.what == "compute"] == [(0, 0, 0), (1, 0, 1), (1, 1, 0)]
    assert [(it.rank, it.end) for it in events if it.what == "send"] == [(0, 3), (1, 3)]
    assert duration(events) == 5
    assert duration(simulate_timeline([[0]], [7])) == 0
