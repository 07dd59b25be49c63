"""The benches of hosts measure what they should, and nothing wrong; their sums are right. Nothing is timed."""

import copy
from dataclasses import asdict
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from bench import five_ways, five_ways_table, hosts, record, turns, unequal_links
from bench import five_ways_predicted as prediction
from bench.five_ways import COMPUTING
from bench.five_ways_predicted import BACKWARD, FORWARD, ROTATIONS, TRAIN, peer
from ringlab.planning.hidden_communication import AttentionLayer, block_flops
from ringlab.planning.ways import WAYS, Cluster
from ringlab.training.causal import BlockSlice

SIZE = {"heads": 4, "kv_heads": 4, "head_dim": 8}


@pytest.fixture(scope="module")
def _allowed():
    if reason := hosts.why_not():
        pytest.skip(f"no hosts here: {reason}")


def one_rank(context, size):
    """Without hosts: a rank of a mesh of processes of this one."""
    mesh = init_device_mesh("cpu", (2, context.world_size // 2), mesh_dim_names=("hosts", "devices"))
    with mock.patch.object(turns, "PAUSE", 0.0):
        return five_ways.measured(context, mesh, **size)


@pytest.mark.slow
def test_a_rank_of_the_five_ways(ranks):
    row = ranks(4, one_rank, {"seq_len": 64, "repetitions": 1, **SIZE})[0]
    names = [*WAYS, *map(peer, ROTATIONS), COMPUTING]
    assert set(row["seconds"]) == {f"{name}, {which}" for name in names for which in (FORWARD, BACKWARD)}
    assert {len(seconds) for seconds in row["seconds"].values()} == {1}


def a_wrong_way(context, name):
    right = five_ways.attentions

    def attentions(mesh):
        ways = right(mesh)
        return {**ways, name: lambda *qkv: 1.001 * ways[name](*qkv)}

    with mock.patch.object(five_ways, "attentions", attentions):
        return one_rank(context, {"seq_len": 64, "repetitions": 1, **SIZE})


@pytest.mark.slow
def test_the_five_ways_do_not_measure_what_is_wrong(ranks):
    for raised in ranks.outcomes(4, a_wrong_way, "hybrid"):
        assert raised.message.startswith("hybrid: out is off by")


FLOPS, LATENCY = {FORWARD: 2e9, BACKWARD: 1e9}, 0.001
SENT = {("send", "inside"): 1e9, ("all-to-all", "inside"): 8e8, ("send", "between"): 1e7}  # bytes/s of a rank
SENT |= {("all-gather", "between"): 1.8e7, ("all-to-all", "between"): 1.2e7}


def calibrated(core=1e-9):
    """The calibration of 2 hosts of 2 ranks, whose speeds are the same for all lengths and bytes."""
    computing = [
        {"pass": which, "mask": mask, "length": length, "flops": FLOPS[which]}
        for which in FLOPS
        for mask in ("none", "causal")
        for length in (128, 256)
    ]
    messages = [
        {"kind": kind, "place": place, "bytes": size, "seconds": LATENCY + size / rate, "core": core * size}
        for (kind, place), rate in SENT.items()
        for size in (0, 10**6, 10**9)
    ]
    cluster = Cluster(2, 2, 2e9, 1e9, 2e7, 1, 5e9, LATENCY, LATENCY, 1e9, 0.001, 1.5)
    made = {"seconds": 30.0}
    return {"cluster": asdict(cluster), "computing": computing, "messages": messages, "made": made}


def as_predicted(rate=20e6, slower=1.0, core=1e-9, **ways):
    """Results of a machine that does what is predicted, but for `ways`, which take so many times as long."""
    cell = {"hosts": 2, "per_host": 2, "rate": rate}
    row = {**cell, "seq_len": 1024, "seconds": {}}
    results = {"dtype": "float32", **SIZE, "machines": [{**cell, "machine": calibrated(core)}], "rows": [row]}
    for way in WAYS:
        forward = prediction.predicted(results, row, way, FORWARD)
        both = prediction.predicted(results, row, way, TRAIN)
        for which, seconds in ((FORWARD, forward), (BACKWARD, both - forward)):
            row["seconds"][f"{way}, {which}"] = [slower * seconds * ways.get(way, 1.0)] * 2
    for which in (FORWARD, BACKWARD):
        row["seconds"] |= {f"{peer(rotation)}, {which}": [1.0, 1.0] for rotation in ROTATIONS}
    return results


@pytest.mark.parametrize("way", WAYS)
def test_computing_alone_by_hand(way):
    """All pieces have one speed, so only the pairs count: half of those of S x S, by four ranks."""
    results = as_predicted()
    layer = AttentionLayer(4, 4, 8, itemsize=4)
    for which in (FORWARD, BACKWARD):
        flops = block_flops(layer, 1024 * 1025 / 2 / 4, backward=which == BACKWARD)
        assert prediction.alone(results, results["rows"][0], way, which) == pytest.approx(
            flops / FLOPS[which], rel=4e-3
        )  # all-to-all, by a head: no rank has more; in zigzag a rank may have C pairs more


def test_speeds_between_two_lengths_and_beyond_them():
    table = [{"length": 128, "flops": 1.0}, {"length": 512, "flops": 3.0}]
    assert [prediction.flops_at(table, length) for length in (1, 128, 256, 512, 10**6)] == [1, 1, 2, 3, 3]


def test_a_long_triangle_is_short_ones_and_a_rectangle():
    machine = calibrated()
    for row in machine["computing"]:
        row["flops"] /= 2 if row["mask"] == "causal" else 1  # the kernel computes what it hides
    layer, whole = AttentionLayer(1, 1, 1), slice(None)
    for length, triangles in ((128, 1), (256, 1), (1024, 4)):
        tile = length / triangles
        seconds = prediction.piece_seconds(machine, layer, BlockSlice(whole, whole, True), length, FORWARD)
        hidden = triangles * tile * (tile + 1) / 2
        pairs = length * (length + 1) / 2 + hidden
        assert seconds == pytest.approx(4 * pairs / FLOPS[FORWARD])
    rectangle = BlockSlice(slice(0, 64), whole, False)
    assert prediction.piece_seconds(machine, layer, rectangle, 256, FORWARD) == pytest.approx(4 * 64 * 256 / 2e9)


@pytest.mark.parametrize(
    ("way", "inside", "between", "latencies"),
    [
        ("ring", 1e9, 2e7, (1, 1)),
        ("double ring", 1e9, 2e7, (1, 1)),
        ("all-gather", 1e9, 1.8e7, (1 / 3, 1 / 3)),  # each of three steps
        ("all-to-all", 8e8, 2 * 1.2e7 * 2 / 3, (1, 1)),  # two of a rank's three messages leave the host
        ("hybrid", 8e8, 2e7, (1, 1)),
    ],
)
def test_each_way_has_the_speed_of_its_messages(way, inside, between, latencies):
    machine = calibrated()
    cluster = prediction.wires(machine, Cluster(**machine["cluster"]), way)
    assert (cluster.bandwidth, cluster.host_bandwidth) == (pytest.approx(inside), pytest.approx(between))
    assert (cluster.latency, cluster.host_latency) == tuple(pytest.approx(each * LATENCY) for each in latencies)


def test_what_a_core_copies_by_hand(monkeypatch):
    """Ring of 4 ranks: 3 hops of K and V, 65,536 bytes each. A core copies them for its NIC, and for both its ranks."""
    computing, pass_of = [], prediction.pass_of

    def noted(way, work, **options):
        computing.append(block_flops(AttentionLayer(4, 4, 8, itemsize=4), 1024 * 256 / 2) / work.cluster.flops)
        return pass_of(way, work, **options)

    busy, free = as_predicted(core=1e-6), as_predicted(core=0.0)
    monkeypatch.setattr(prediction, "pass_of", noted)
    for results in (busy, free):
        prediction.predicted(results, results["rows"][0], "ring", FORWARD)
    assert computing[0] - computing[1] == pytest.approx(1e-6 * 3 * 65536 * (1 + 2))


def test_what_a_core_copies_and_agrees_on_is_predicted():
    """All-to-all hides nothing, so its core's copies cost nothing more; the ring's lengthen its computing."""
    busy, free = as_predicted(core=1e-8), as_predicted(core=0.0)
    (row,) = busy["rows"]
    for way, costs in (("all-to-all", False), ("ring", True)):
        with_copies, without = (
            prediction.predicted(results, results["rows"][0], way, FORWARD) for results in (busy, free)
        )
        assert (with_copies > without) == costs
    later = as_predicted()
    shortest = prediction.messages(later["machines"][0]["machine"], "all-to-all", "between")[0]
    before = prediction.predicted(later, row, "ring", TRAIN)
    shortest["seconds"] += 1
    assert prediction.predicted(later, row, "ring", TRAIN) == pytest.approx(before + 1)


def test_a_link_of_another_rate_is_as_much_faster():
    results = as_predicted()
    (row,) = results["rows"]
    twice = copy.deepcopy(results)
    for each in twice["machines"][0]["machine"]["messages"]:
        if each["place"] == "between":
            each["seconds"] = LATENCY + (each["seconds"] - LATENCY) / 2
    twice["machines"][0]["machine"]["cluster"]["host_bandwidth"] *= 2
    for way in WAYS:
        faster = prediction.predicted(results, row, way, TRAIN, rate=40e6)
        assert faster == pytest.approx(prediction.predicted(twice, row, way, TRAIN))
        assert faster < prediction.predicted(results, row, way, TRAIN)


def test_verdicts_of_the_five_ways():
    exact = as_predicted()
    assert five_ways_table.errors(exact) == pytest.approx([0.0] * 10)
    assert [five_ways_table.excess(exact, row, which) for row, which in five_ways_table.cells(exact)] == [0.0, 0.0]
    right, pairs = five_ways_table.pairs_in_order(exact)
    assert right == pairs >= 3
    slower = as_predicted(slower=1.2)
    assert five_ways_table.errors(slower) == pytest.approx([0.2] * 10)
    assert five_ways_table.pairs_in_order(slower) == (right, pairs)

    (row,) = exact["rows"]
    advised = min(WAYS, key=lambda way: prediction.predicted(exact, row, way, FORWARD))
    wrong = as_predicted(**{advised: 3.0})
    assert five_ways_table.excess(wrong, wrong["rows"][0], FORWARD) > 1
    right, pairs = five_ways_table.pairs_in_order(wrong)
    assert right < pairs
    fastest = five_ways_table.over_peers(exact)["fastest"]
    assert fastest[0] == pytest.approx(1 / prediction.predicted(exact, row, advised, FORWARD))


@pytest.mark.slow
@pytest.mark.exhaustive  # 44 s; test_a_rank_of_the_five_ways has its parts
@pytest.mark.usefixtures("_allowed")
def test_five_ways_bench_runs(tmp_path):
    results = five_ways.measure([(2, 2)], [50_000_000], {64: 1}, folder=tmp_path, **SIZE)
    results["machine"] = record.machine()
    assert "\n| 2 x 2 | 64 | 50 |" in five_ways_table.table(results)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("_allowed")
def test_unequal_links_bench_runs(tmp_path):
    size = {"seq_len": 64, "heads": 1, "head_dim": 8, "flops": 1e6, "repetitions": 1}
    cured = "devices 1 and 3 at a third, chunks in proportion"
    results = unequal_links.measure([cured], folder=tmp_path, **size)
    (row,) = results["rows"]
    assert row["lengths"] == [24, 9, 23, 8]
    assert len(row["bandwidths"]) == 4
    assert "| 24 9 23 8 |" in unequal_links.table(results)


def test_a_device_of_a_set_speed_takes_its_time_and_says_when_it_cannot():
    q = torch.randn(1, 2, 16, 8)
    late = []
    with mock.patch.object(unequal_links.time, "sleep") as sleep:
        for flops in (1.0, 1e30):
            with unequal_links.device_of(flops, late):
                unequal_links.flash_ring.fused_forward(q, q, q, scale=1.0)
    slept = [call.args[0] for call in sleep.call_args_list]
    assert slept[0] == pytest.approx(4 * 16 * 16 * 2 * 8, abs=10)
    assert slept[1] == 0.0
    assert late[0] == 0.0 < late[1]


def test_cases_of_unequal_links():
    assert unequal_links.plan("all alike", 64, 1e9) == ([0, 1, 2, 3], [16] * 4, [1e9] * 4)
    order, _, _ = unequal_links.plan("two slow wires, hosts in the best order", 64, 1e9)
    slow = {(0, 1), (2, 3)}
    assert not slow & {tuple(sorted(pair)) for pair in zip(order, [*order[1:], order[0]], strict=True)}
    assert set(unequal_links.GAINS) | set(unequal_links.GAINS.values()) <= set(unequal_links.CASES)
    rows = [
        {"case": case, "seconds": [seconds], "simulated": 2 * seconds}
        for case, seconds in zip(next(iter(unequal_links.GAINS.items())), (1.0, 3.0), strict=True)
    ]
    assert list(unequal_links.gains({"rows": rows}).values()) == [(3.0, 3.0)]
