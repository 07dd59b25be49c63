"""The simulated ring against closed forms, bounds and a real ring; its events against each other. Wrong ones fail."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab.planning.hidden_communication import ring_seconds
from ringlab.planning.simulated_ring import duration, simulate_timeline
from ringlab.support import timeline
from ringlab.training import overlap
from ringlab.training.causal import visible_pairs
from tests.attention import SEED
from tests.rings import chunks

TIMES = st.integers(0, 20)  # whole seconds: no rounding
WORLDS = st.integers(1, 9)


@st.composite
def rings(draw, least=0):
    """Seconds of computing by round and rank, and of hops."""
    P = draw(WORLDS)
    row = st.lists(st.integers(least, 20), min_size=P, max_size=P)
    return draw(st.lists(row, min_size=P, max_size=P)), draw(st.lists(TIMES, min_size=P, max_size=P))


def even(P, computing):
    return [[computing] * P] * P


def check_events(simulated, computing, hops):
    """Every rank computes on every block once, exactly when the rules of simulated_ring.py allow it.

    Rank r begins round t + 1 when it has computed and sent block t and received block t + 1; a hop begins when both its
    ranks have begun the round. `computing` must be above zero: a block that takes no time leaves no event.
    """
    P, events = len(hops), simulated(computing, hops)
    by = {(it.what, it.round, it.rank): it for it in events}
    assert len(by) == len(events), "the same thing twice"
    compute = [[by["compute", t, r] for r in range(P)] for t in range(P)]
    assert sum(it.what == "compute" for it in events) == P * P
    assert sum(it.what == "send" for it in events) == P * (P - 1)
    for r in range(P):
        mine = [compute[t][r] for t in range(P)]
        assert sorted(it.block for it in mine) == list(range(P))
        assert [it.end - it.start for it in mine] == [computing[t][r] for t in range(P)]
        assert mine[0].start == 0
        assert mine[0].block == r
        assert all(this.end <= following.start for this, following in pairwise(mine))
    for t in range(P - 1):
        for r in range(P):
            send, arrival = by["send", t, r], by["send", t, (r - 1) % P]
            assert send.end - send.start == hops[r], f"the hop {r} -> {r + 1} takes the time of another hop"
            assert send.block == compute[t][r].block, "it sends another block than the one in hand"
            assert arrival.block == compute[t + 1][r].block, "it computes on another block than it received"
            both = max(compute[t][r].start, compute[t][(r + 1) % P].start)
            assert send.start == both, f"the hop {r} -> {r + 1} of round {t} does not begin when both its ranks have"
            ready = max(compute[t][r].end, send.end, arrival.end)
            assert compute[t + 1][r].start == ready, f"rank {r} does not begin round {t + 1} when it can"
            wait = by.get(("wait", t, r))
            assert (wait is not None) == (ready > compute[t][r].end)
            if wait:
                assert (wait.start, wait.end) == (compute[t][r].end, ready)
                assert wait.block == compute[t + 1][r].block
    assert len(events) == P * P + P * (P - 1) + sum(it.what == "wait" for it in events)
    assert duration(events) == max(it.end for it in compute[-1])


def check_by_hand(simulated):
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


UNLIKE = [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3]], [2, 7, 1, 8]


def check_all(simulated):
    check_by_hand(simulated)
    check_events(simulated, *UNLIKE)


def test_by_hand():
    check_all(simulate_timeline)


@given(rings(least=1))
def test_events_fit_together(ring):
    check_events(simulate_timeline, *ring)


@given(WORLDS, TIMES, TIMES)
def test_a_uniform_ring_is_the_closed_form(P, computing, hop):
    assert duration(simulate_timeline(even(P, computing), [hop] * P)) == ring_seconds(P, computing, hop, overlap=True)


@given(TIMES, st.lists(TIMES, min_size=1, max_size=9))
def test_the_slowest_hop_rules_ranks_that_are_alike(computing, hops):
    """Exactly, for a hop longer or shorter than computing."""
    P = len(hops)
    assert duration(simulate_timeline(even(P, computing), hops)) == ring_seconds(P, computing, max(hops), overlap=True)


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


def recorded(context, x, lengths):
    chunk = chunks(context, lengths, x)[0]
    with timeline.record(chunk, ring=overlap.ring_attention) as events:
        overlap.ring_attention(chunk, chunk, chunk)
    return events


@pytest.mark.parametrize("P", [2, 3])
def test_a_real_ring_does_the_same_things_in_the_same_order(ranks, P):
    x = torch.randn(1, 1, 4 * P, 2, generator=torch.Generator().manual_seed(SEED))
    real = ranks(P, recorded, x, [4] * P)[0]
    model = simulate_timeline(
        even(P, 1.0), [2.0] * P
    )  # messages take longer than computing: every rank waits in every round, as the record of a real ring says

    def diary(events, what, rank):
        mine = sorted((it for it in events if (it.what, it.rank) == (what, rank)), key=lambda it: it.start)
        return [(it.round, it.block) for it in mine]

    for what in ("compute", "send", "wait"):
        for rank in range(P):
            assert diary(real, what, rank) == diary(model, what, rank), f"{what}, rank {rank}"


def test_one_rank_only_computes():
    assert [it.what for it in simulate_timeline([[3]], [7])] == ["compute"]
    assert duration(simulate_timeline([[3]], [7])) == 3
    assert duration(simulate_timeline([[0]], [7])) == 0


def test_a_block_that_takes_no_time_leaves_no_event_but_travels_on():
    """Contiguous and causal: rank 0 computes nothing of block 1."""
    events = simulate_timeline([[1, 1], [0, 2]], [3, 3])
    assert [(it.rank, it.round, it.block) for it in events if it.what == "compute"] == [(0, 0, 0), (1, 0, 1), (1, 1, 0)]
    assert [(it.rank, it.end) for it in events if it.what == "send"] == [(0, 3), (1, 3)]
    assert duration(events) == 5


@pytest.mark.parametrize(
    ("computing", "hops", "says"),
    [
        ([], [], r"0 rounds of \[\] ranks and 0 hops; expected P rounds of P ranks and P hops"),
        ([[1, 1]], [1, 1], r"1 rounds of \[2\] ranks and 2 hops"),
        ([[1, 1], [1]], [1, 1], r"2 rounds of \[1, 2\] ranks and 2 hops"),
        ([[1, 1], [1, 1]], [1], r"2 rounds of \[2\] ranks and 1 hops"),
        ([[1, 1], [1, -1]], [1, 1], "a time is negative; expected seconds"),
        ([[1, 1], [1, 1]], [-1, 1], "a time is negative; expected seconds"),
    ],
)
def test_bad_input(computing, hops, says):
    with pytest.raises(ValueError, match=says):
        simulate_timeline(computing, hops)
