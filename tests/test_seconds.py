"""The closed forms of all ways: by hand, against two machines played event by event, and by properties."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.planning.hidden_communication import block_flops, hop_bytes, ring_seconds
from ringlab.planning.seconds import Pass, beside, pass_of
from ringlab.planning.ways import Cluster
from tests.clusters import CHUNK, LAYER, ONE_NIC, TWO, clusters, layers, ways_on


def played(computing, message, slowdown, steps=20_000):
    """Seconds until both are done, in small steps: while the message travels, computing is slower."""
    now, left, step = 0.0, computing, (computing + message) / steps
    while left > 0 or now < message:
        left -= step / (slowdown if now < message else 1)
        now += step
    return now


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(1, 2))
def test_both_at_once(computing, message, slowdown):
    assert beside(computing, message, slowdown) == pytest.approx(played(computing, message, slowdown), rel=1e-3)


# TWO: a block is computed in 2 s, 5 s backward; K and V are 256 bytes, 1 s or 4 s; their sums 512, 2 s or 8 s


def test_a_ring_by_hand():
    """Forward: three rounds wait for a slow hop of 4 s. Backward, 5 s each: a hop of 4 s, then 5 beside 4, 12, 8 and 8.
    Published: 5 beside 4, 12, 12 and 8, then 8 s home."""
    assert pass_of("ring", Pass(TWO, LAYER, CHUNK)) == 3 * 4 + 2
    assert pass_of("ring", Pass(TWO, LAYER, CHUNK, True)) == 4 + 5 + 12 + 8 + 8
    assert pass_of("ring", Pass(TWO, LAYER, CHUNK, True, ours=False)) == 5 + 12 + 12 + 8 + 8
    two = replace(TWO, hosts=1)  # two ranks: ours has one message of sums, beside the own block
    assert pass_of("ring", Pass(two, LAYER, CHUNK, True)) == 1 + 5 + 5
    assert pass_of("ring", Pass(two, LAYER, CHUNK, True, ours=False)) == 5 + 5 + 2
    slow = replace(two, bandwidth=64)
    assert pass_of("ring", Pass(slow, LAYER, CHUNK, True)) == 4 + 5 + 8
    assert pass_of("ring", Pass(slow, LAYER, CHUNK, True, ours=False)) == 5 + 8 + 8


def test_a_double_ring_by_hand():
    """A turn of 4 s hides the slow hop of 4 s; on one card for both, the hop takes 8 s. Backward: a turn is 10 s, after
    a hop of 4 s, and 2 s bring the last sums home. Published: 8 s more, and no hop before."""
    assert pass_of("double ring", Pass(TWO, LAYER, CHUNK)) == 4 + 4
    assert pass_of("double ring", Pass(ONE_NIC, LAYER, CHUNK)) == 8 + 4
    assert pass_of("double ring", Pass(TWO, LAYER, CHUNK, True)) == 4 + 10 + 10 + 2
    assert pass_of("double ring", Pass(TWO, LAYER, CHUNK, True, ours=False)) == 10 + 10 + 2 + 8


def test_all_gather_by_hand():
    """Two heads of 384 bytes, gathered through two cards of 64: 3 s each; a head is computed in 4 s, 10 s backward.
    Published: both heads at once."""
    assert pass_of("all-gather", Pass(TWO, LAYER, CHUNK)) == 3 + 4 + 4
    assert pass_of("all-gather", Pass(TWO, LAYER, CHUNK, ours=False)) == 6 + 8
    assert pass_of("all-gather", Pass(TWO, LAYER, CHUNK, True)) == 3 + 10 + 10 + 6
    assert pass_of("all-gather", Pass(TWO, LAYER, CHUNK, True, ours=False)) == 6 + 20 + 12


def test_exchanges_by_hand():
    """The cards carry 3 + 3 heads of 64 bytes there and 1 + 1 back; hybrid: 4 and 2 heads inside, a hop of 256."""
    assert pass_of("all-to-all", Pass(TWO, LAYER, CHUNK)) == 6 + 8 + 2
    assert pass_of("hybrid", Pass(TWO, LAYER, CHUNK), 2) == 1 + max(4, 4) + 4 + 0.5


@given(layers(), clusters(), st.booleans())
def test_any_cluster(layer, cluster, backward):
    """No way is faster than computing alone, nor slower with faster links; hybrid of 1 is the ring."""
    alone = pass_of("ring", Pass(replace(cluster, hosts=1, per_host=1, nics=1), layer, 8, backward)) * cluster.devices
    for way, split in ways_on(layer, cluster):
        work = Pass(cluster, layer, 8, backward)
        seconds = pass_of(way, work, split)
        if layer.heads % cluster.devices == 0 and layer.kv_heads % cluster.devices == 0:
            assert seconds * (1 + 1e-9) >= alone
        fast = replace(cluster, bandwidth=1e9 * cluster.bandwidth, host_bandwidth=1e9 * cluster.host_bandwidth)
        assert pass_of(way, replace(work, cluster=fast), split) <= seconds * (1 + 1e-9)
        assert pass_of(way, replace(work, ours=False), split) >= seconds * (1 - 1e-9)
    assert pass_of("hybrid", work, 1) == pass_of("ring", work)


@given(layers(), st.integers(2, 9), st.integers(1, 99))
def test_a_flat_ring_is_the_formula_of_the_paper(layer, P, chunk):
    host = Cluster(1, P, 1000, 50)
    right = ring_seconds(P, block_flops(layer, chunk**2 / 2) / 1000, hop_bytes(layer, chunk) / 50)
    assert pass_of("ring", Pass(host, layer, chunk)) == pytest.approx(right)
