"""Rings whose ranks or links differ: by hand, against closed forms, by properties, beside a real ring; host orders."""

import functools
from itertools import pairwise, permutations
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from ring_planner import unequal
from ring_planner.hidden_communication import AttentionLayer, block_flops, ring_seconds
from ring_planner.unequal import (
    best_order,
    duration,
    improved_order,
    proportional_chunks,
    score,
    simulate_timeline,
    unequal_ring,
)
from ringlab.ring import overlap, schedule
from ringlab.ring.causal import visible_pairs
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.ways.double_ring import DoubleRing

TIMES = st.integers(0, 20)  # whole seconds: no rounding
WORLDS = st.integers(1, 9)
LAYER = AttentionLayer(heads=1, kv_heads=1, head_dim=1, itemsize=2)  # 4 FLOPs a pair, 4 bytes a token
FLOPS = st.lists(st.integers(1, 50), min_size=1, max_size=7)


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
    """Every rank computes on every block once, exactly when the rules of unequal.py allow it."""
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


def test_unequal_chunks_by_hand():
    """2 ranks: 6 tokens at 12 FLOP/s and 2 at 4. Rank 0: 12 s and 4 s; rank 1: 4 s and 12 s.

    The message of block 0 takes 24 bytes / 1, that of block 1 8 bytes / 2.
    """
    lengths, flops = [6, 2], [12, 4]
    assert unequal_ring(lengths, flops, [100, 100], LAYER) == pytest.approx(12 + 4)
    assert unequal_ring(lengths, flops, [1, 2], LAYER) == pytest.approx(24 + 12)  # rank 1 waits for block 0
    assert unequal_ring(lengths, flops, [4, 0.5], LAYER) == pytest.approx(16 + 12)  # each has an end of both
    slow_last, work = [3, 3, 1, 1], block_flops(LAYER, 800**2)
    assert unequal_ring([300, 300, 100, 100], slow_last, [1e12] * 4, LAYER) > 1.1 * work / sum(slow_last)
    by_turns = [3, 1, 3, 1]
    assert unequal_ring([300, 100, 300, 100], by_turns, [1e12] * 4, LAYER) == pytest.approx(work / sum(by_turns))


@given(FLOPS, st.integers(100, 1000), st.integers(0, 1000))
def test_chunks_in_proportion(flops, more, rest):
    """They add up, faster ranks have more, and no ring is faster than all devices without a pause."""
    P, S = len(flops), len(flops) * more + rest
    lengths = proportional_chunks(S, flops)
    assert (sum(lengths), min(lengths) >= 1) == (S, True)
    for length, each in zip(lengths, flops, strict=True):
        assert abs(length - 1 - (S - P) * each / sum(flops)) < 1
    work = block_flops(LAYER, S**2)
    assert unequal_ring(lengths, flops, [1e12] * P, LAYER) * (1 + 1e-9) >= work / sum(flops)
    equal = unequal_ring([S / P] * P, flops, [1e12] * P, LAYER)
    assert equal == pytest.approx(work / P / min(flops), rel=1e-6)
    assert proportional_chunks(3, [1000, 1, 1]) == [1, 1, 1]


BAD = [
    (simulate_timeline, ([], []), "expected P rounds of P ranks and P - 1 of P hops"),
    (simulate_timeline, ([[1, 1]], [[1, 1]]), r"rounds of \[\[2\], \[2\]\]; expected P rounds"),
    (simulate_timeline, ([[1, 1], [1]], [[1, 1]]), r"rounds of \[\[2, 1\], \[2\]\]"),
    (simulate_timeline, ([[1, 1], [1, -1]], [[1, 1]]), "a time is negative; expected seconds"),
    (simulate_timeline, ([[1, 1], [1, 1]], [[-1, 1]]), "a time is negative; expected seconds"),
    (proportional_chunks, (2, [1, 1, 1]), "expected a token or more for each, FLOP/s above 0"),
    (proportional_chunks, (5, []), "expected a token or more for each, FLOP/s above 0"),
    (proportional_chunks, (5, [1, 0]), "expected a token or more for each, FLOP/s above 0"),
    (unequal_ring, ([1, 2], [1], [1, 1], LAYER), "2 lengths, 1 FLOP/s, 2 bandwidths; expected one for each rank"),
    (unequal_ring, ([1, 2], [1, 1], [1], LAYER), "expected one for each rank"),
    (unequal_ring, ([], [], [], LAYER), "expected one for each rank"),
    *((best_order, (it,), "expected a row for each host") for it in ([], [[1, 1]], [[1, 1], [1]], [[0, 1], [0, 0]])),
]


@pytest.mark.parametrize(("function", "given", "says"), BAD)
def test_bad_input(function, given, says):
    with pytest.raises(ValueError, match=says):
        function(*given)


@st.composite
def networks(draw, least=1, most=6):
    hosts = draw(st.integers(least, most))
    row = st.lists(st.integers(1, 9), min_size=hosts, max_size=hosts)
    return draw(st.lists(row, min_size=hosts, max_size=hosts))


@given(networks())
def test_an_order_of_hosts_is_the_best_of_all(bandwidths):
    hosts = range(len(bandwidths))
    order = best_order(bandwidths)
    assert (sorted(order), order[0]) == ([*hosts], 0)
    hops = [bandwidths[order[i - 1]][order[i]] for i in hosts]
    assert score(order, bandwidths) == (min(hops), sum(hops))
    every = [[bandwidths[each[i - 1]][each[i]] for i in hosts] for each in permutations(hosts)]
    assert min(hops) == max(map(min, every)), "its slowest hop is not the fastest possible"
    assert sum(hops) == max(sum(each) for each in every if min(each) == min(hops))
    quick = improved_order(bandwidths)
    assert (sorted(quick), quick[0]) == ([*hosts], 0)
    assert score(quick, bandwidths) <= (min(hops), sum(hops))


@given(st.lists(st.integers(0, 3), min_size=10, max_size=16))
def test_hosts_in_racks_leave_each_rack_once(racks):
    """More hosts than are tried exactly; the best order is known: a hop between racks for each rack."""
    bandwidths = [[50 if i == j else 10 for j in racks] for i in racks]
    between = len(set(racks)) if len(set(racks)) > 1 else 0
    assert score(best_order(bandwidths), bandwidths)[1] == 50 * (len(racks) - between) + 10 * between


def test_the_search_mends_a_bad_first_order():
    """From host 0 the fastest links lead to a last hop of 1; turned round or moved, no hop is slower than 5."""
    links = [[0, 9, 5, 1], [9, 0, 9, 5], [5, 9, 0, 9], [1, 5, 9, 0]]
    assert score(improved_order(links), links)[0] == 5
    links = [[0, 7, 5, 7, 1], [4, 0, 7, 1, 2], [3, 2, 0, 9, 6], [1, 1, 9, 0, 6], [6, 3, 1, 2, 0]]
    assert improved_order(links) == (0, 1, 2, 3, 4)  # the first order follows links that leave a host
    with mock.patch.object(unequal, "improved_order", return_value="quick"):
        assert best_order([[1.0] * 9] * 9) == tuple(range(9))
        assert best_order([[1.0] * 10] * 10) == "quick"


# The double ring's own promise: how long a slow hop has --------------------------------------------------------------


def journal(context, shape, *, back=False):
    """What this rank does in the rounds of a pass, in order: rounds, and messages between hosts."""
    mesh, noted = init_device_mesh("cpu", shape), []
    across, _ = mesh.get_all_groups()

    def watched(real, what):
        def post(sent, received, group, **distance):
            works = real(sent, received, group, **distance)
            if group is not across:
                return works
            number = sum(entry[0] == f"{what} sent" for entry in noted)
            noted.append((f"{what} sent", number))
            return [mock.Mock(wait=functools.partial(wait, works, what, number))]

        return post

    def wait(works, what, number):
        noted.append((f"{what} waited for", number))
        for work in works:
            work.wait()

    k = torch.full((1, 1, 1, 1), float(context.rank))
    with (
        mock.patch.object(overlap, "post", watched(overlap.post, "K and V")),
        mock.patch.object(schedule, "post", watched(schedule.post, "sums")),
    ):
        ring = DoubleRing(Partition(Mask(), "contiguous", (1,) * context.world_size), 1.0, mesh)
        sums = ring.sums(k, k, k.dtype)
        for t, _, _, _ in (ring.rounds_back if back else ring.rounds)(k, k):
            noted.append(("round", t))
            if back:
                sums.of_round(t)
                sums.send_on(t)
        if back:
            sums.home()
    return noted


def assert_slow_hops_have_a_turn(journal_of_rank, n, g, turns):
    """n - 1 slow hops of K and V, and of the sums in a backward pass; each has the time of g rounds, but for one.

    In a backward pass the own turn is the last. Nothing is computed while the first K and V travel.
    """
    at = {entry: place for place, entry in enumerate(journal_of_rank)}
    assert len(at) == len(journal_of_rank)
    assert [t for what, t in journal_of_rank if what == "round"] == [u * g + s for u in turns for s in range(g)]
    for u in range(n - 1):  # K and V: from before the first round of turn u to after its last
        waited = at["K and V waited for", u]
        assert waited < at["round", (u + 1) * g]
        if turns[0] == 0 or u > 0:
            assert at["K and V sent", u] < at["round", u * g] <= at["round", (u + 1) * g - 1] < waited
    passed = list(turns)[1:] if turns[0] else []
    for i, following in enumerate(passed):  # the sums of a turn: from the first round of the next turn on
        assert at["round", following * g] < at["sums sent", i]
        rounds = [t for t in range(n * g) if at["sums sent", i] < at["round", t] < at["sums waited for", i]]
        assert len(rounds) == (g if following else g - 1)  # the last one ends with the pass
    slow = [what for what, _ in journal_of_rank if what.endswith("sent")]
    assert (slow.count("K and V sent"), slow.count("sums sent")) == (n - 1, len(passed))


@pytest.mark.parametrize("shape", [(1, 3), (3, 2), (2, 3)], ids=lambda shape: "{}x{}".format(*shape))
def test_a_slow_hop_has_the_time_of_a_turn(ranks, shape):
    n, g = shape
    for journal_of_rank in ranks(n * g, journal, shape):
        assert_slow_hops_have_a_turn(journal_of_rank, n, g, range(n))
    for journal_of_rank in ranks(n * g, functools.partial(journal, back=True), shape):
        assert_slow_hops_have_a_turn(journal_of_rank, n, g, [*range(1, n), 0])
