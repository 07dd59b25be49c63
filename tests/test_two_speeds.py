"""Five ways on hosts with NICs: by hand, closed forms, properties; and wrong schedules fail."""

from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ringlab.planning import two_speeds
from ringlab.planning.hidden_communication import (
    AttentionLayer,
    block_flops,
    hop_bytes,
    pass_seconds,
    ring_seconds,
)
from ringlab.planning.two_speeds import simulate, task_graph
from ringlab.planning.ways import RING_PER_HOST, WAYS, Cluster, traffic
from tests.clusters import CHUNK, LAYER, ONE_NIC, TWO, clusters, layers, ways_on

# TWO: 2 hosts of 2. A block takes 2 s of computing, in the backward pass 5 s. Inside, K and V take 1 s and gradients
# 2 s; between hosts 4 s and 8 s.
HAND = {  # seconds of the forward and the backward pass
    # Every rank has an end of a slow link. Backward: 5, then twice K, V and gradients, then gradients, and once more.
    ("ring", None): (3 * 4 + 2, 5 + 2 * (4 + 8) + 8 + 8),
    # Two turns of 2 rounds. The gradients of turn 0 leave at 15 s, after round 2, until 23 s; then those of turn 1.
    ("double ring", None): (4 * 2, 15 + 8 + 8),
    # A head's K and V take 3 s, its gradients 6 s. Computing a head takes 4 s (10 s).
    ("all-gather", None): (3 + 4 + 4, 3 + 10 + 10 + 6),
    # 384 bytes a NIC there and 128 back; one head of 32 tokens
    ("all-to-all", None): (6 + 8 + 2, 2 + 20 + 6),
    # 256 bytes there and 128 back, inside; two blocks of 16 tokens and 2 heads; K and V 4 s, gradients 8 s
    ("hybrid", 2): (1 + 4 + 4 + 0.5, 0.5 + 10 + 10 + 8 + 1),
    (RING_PER_HOST, None): (2 * 2, 2 * 5 + 2),  # two rounds; the gradients of round 1 travel home inside the host
}


def check_by_hand():
    for (way, split), passes in HAND.items():
        for backward, seconds in zip((False, True), passes, strict=True):
            took = simulate(way, TWO, LAYER, CHUNK, backward=backward, split=split)
            assert took == pytest.approx(seconds), (way, backward)
    # Two devices share a NIC: K and V take 8 s in turn 0; gradients take 16 s, twice
    for backward, seconds in ((False, 8 + 4), (True, 15 + 16 + 16)):
        assert simulate("double ring", ONE_NIC, LAYER, CHUNK, backward=backward) == pytest.approx(seconds)
    # The weights are 2816 · 2 bytes. A NIC carries 3/4 of them beside three hops of K and V, all the time.
    assert simulate("ring", TWO, LAYER, CHUNK, fsdp=True) == pytest.approx((3 * 256 + 2112) / 64)
    # Beside next to no tokens they are alone: gathered, and in the backward pass their gradients summed after that
    for backward, turns in ((False, 1), (True, 2)):
        took = simulate("ring", TWO, LAYER, 1e-9, fsdp=True, backward=backward)
        assert took == pytest.approx(turns * 2112 / 64), "a message is as fast as its NIC, and no faster"


def test_by_hand():
    check_by_hand()


PASSES = st.fixed_dictionaries({"backward": st.booleans(), "visible": st.sampled_from([0.5, 1.0])})


def alone(cluster, layer, chunk, *, backward, visible):
    return cluster.devices * block_flops(layer, visible * chunk**2, backward=backward) / cluster.flops


@given(layers(), clusters(), PASSES, st.booleans())
def test_one_host_stands_for_all(layer, cluster, kind, fsdp):
    """The schedule with one host for all takes as long as that of all ranks."""
    for way, split in ways_on(layer, cluster):
        lumped = simulate(way, cluster, layer, 8, split=split, fsdp=fsdp, **kind)
        with mock.patch.object(two_speeds, "alike", lambda layer, cluster, ranks: cluster.devices):
            assert simulate(way, cluster, layer, 8, split=split, fsdp=fsdp, **kind) == pytest.approx(lumped)


@given(layers(), clusters(), st.booleans())
def test_the_messages_are_the_bytes_of_ways(layer, cluster, backward):
    for way, split in ways_on(layer, cluster):
        carried = {}
        for task in task_graph(way, cluster, layer, 8, backward=backward, split=split).tasks:
            for link in task.links:
                carried[link] = carried.get(link, 0) + task.size * task.alike
        in_host = max((size for link, size in carried.items() if link[0] == "out" and "nic" not in link), default=0)
        between = max((size for link, size in carried.items() if link[:2] == ("out", "nic")), default=0)
        right = traffic(way, layer, 8, cluster, backward=backward, split=split)
        assert (in_host, between) == pytest.approx(right), way


@given(layers(), clusters(), PASSES)
def test_at_least_the_computing_and_the_messages(layer, cluster, kind):
    least = alone(cluster, layer, 8, **kind)
    for way, split in ways_on(layer, cluster):
        took = simulate(way, cluster, layer, 8, split=split, **kind)
        in_host, between = traffic(way, layer, 8, cluster, backward=kind["backward"], split=split)
        assert took * (1 + 1e-9) >= max(least, in_host / cluster.bandwidth, between / cluster.host_bandwidth)
        if cluster.devices == 1:
            assert took == pytest.approx(least)
        with_weights = simulate(way, cluster, layer, 8, split=split, fsdp=True, **kind)
        assert with_weights * (1 + 1e-9) >= took


@given(layers(), clusters(), PASSES)
def test_a_ring_per_host_is_the_ring_of_one_host(layer, cluster, kind):
    took = simulate(RING_PER_HOST, cluster, layer, 8, **kind)
    assert took == pytest.approx(simulate("ring", replace(cluster, hosts=1), layer, 8, **kind))
    weights_alone = task_graph(RING_PER_HOST, replace(cluster, flops=1e18), layer, 1e-9, fsdp=True, **kind).seconds()
    assert simulate(RING_PER_HOST, cluster, layer, 8, fsdp=True, **kind) * (1 + 1e-6) >= max(took, weights_alone)


def times(cluster, faster, way, layer, chunk, split, kind):
    return [simulate(way, each, layer, chunk, split=split, **kind) for each in (cluster, replace(cluster, **faster))]


@given(layers(), clusters(), PASSES, st.sampled_from(["bandwidth", "host_bandwidth", "nics"]))
def test_more_bandwidth_is_never_slower(layer, cluster, kind, what):
    """Where as many devices share each NIC, and no group that exchanges heads is cut by the end of a host."""
    per_host = cluster.per_host
    assume(per_host % cluster.nics == 0)
    faster = {what: per_host if what == "nics" else 3 * getattr(cluster, what)}
    for way, split in ways_on(layer, cluster):
        if (split or 1) % per_host == 0 or per_host % (split or 1) == 0:
            slow, fast = times(cluster, faster, way, layer, 8, split, kind)
            assert fast <= slow * (1 + 1e-9), (way, split)


def test_elsewhere_a_faster_link_may_be_slower_by_a_percent():
    """Graham's anomaly: a message comes earlier, and so beside another one that more ranks wait for."""
    cluster, layer = Cluster(4, 3, 100, 64, 64, nics=2), AttentionLayer(2, 1, 4)
    slow, fast = times(cluster, {"bandwidth": 192}, "hybrid", layer, 8, 2, {})
    assert 1 < fast / slow < 1.02


@given(layers(), st.integers(1, 8), st.integers(1, 100), PASSES)
def test_a_ring_in_one_host_is_the_closed_form(layer, P, chunk, kind):
    host = Cluster(1, P, 1e5, 256)
    took = simulate("ring", host, layer, chunk, **kind)
    right = pass_seconds(layer, chunk, P, host.flops, host.bandwidth, **kind)
    if not kind["backward"]:
        assert took == pytest.approx(right)
        return
    # The closed form has gradients in the first hop too. So it is longer by a block's computing at most.
    computing = alone(host, layer, chunk, **kind) / P
    assert right - computing <= took * (1 + 1e-9)
    assert took <= right * (1 + 1e-9)
    if computing >= hop_bytes(layer, chunk, backward=True) / host.bandwidth:
        assert took == pytest.approx(right)
    assert simulate("double ring", host, layer, chunk, **kind) == pytest.approx(took)
    assert simulate("hybrid", host, layer, chunk, split=1, **kind) == took


@given(layers(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 100), PASSES)
def test_rings_of_hosts_are_closed_forms(layer, hosts, per_host, chunk, kind):
    """Forward: the slow hop rules the flat ring. In the double ring it has a turn, whose hops are fast here."""
    cluster = Cluster(hosts, per_host, 1e5, 1e12, 256)
    kind["backward"] = False
    computing, slow = alone(cluster, layer, chunk, **kind) / cluster.devices, hop_bytes(layer, chunk) / 256
    flat = ring_seconds(cluster.devices, computing, slow if hosts > 1 else 0, overlap=True)
    assert simulate("ring", cluster, layer, chunk, **kind) == pytest.approx(flat)
    double = ring_seconds(hosts, per_host * computing, slow, overlap=True)
    assert simulate("double ring", cluster, layer, chunk, **kind) == pytest.approx(double, rel=1e-4)


@pytest.mark.parametrize("way", [*WAYS, RING_PER_HOST])
def test_one_device_only_computes(way):
    one = Cluster(1, 1, 1024, 1)
    for backward in (False, True):
        tasks = task_graph(way, one, LAYER, 8, backward=backward, split=1 if way == "hybrid" else None, fsdp=True)
        assert {task.links for task in tasks.tasks} == {()}
        assert tasks.seconds() == pytest.approx(5 if backward else 2)


def test_the_example_of_the_issue():
    """16 hosts of 8, a NIC of 12.5 GB/s for each device, a million tokens: computing alone takes 249 ms."""
    cluster, layer, chunk = Cluster(16, 8, 990e12, 450e9, 12.5e9), AttentionLayer(32, 8, 128), 2**20 / 128
    ms = {
        (way, split): 1e3 * sum(simulate(way, cluster, layer, chunk, backward=each, split=split) for each in (0, 1))
        for way, split in (("ring", None), ("double ring", None), ("hybrid", 8))
    }
    # Gradients home: 67 MB at 12.5 GB/s take 5.4 ms. The flat ring: a hop takes 2.7 ms forward and 8.1 ms backward.
    assert ms["double ring", None] == pytest.approx(248.8 + 5.4 + 0.15, abs=0.1)
    assert ms["hybrid", 8] == pytest.approx(248.8 + 5.4 + 0.65, abs=0.1)
    assert ms["ring", None] == pytest.approx(127 * (2.684 + 8.053), rel=0.01)
