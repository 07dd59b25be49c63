"""The benches of hosts measure what they should, and nothing wrong; their sums are right. Nothing is timed."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from bench import five_ways, five_ways_table, hosts, record, turns, unequal_links
from bench import five_ways_predicted as prediction
from bench.five_ways import COMPUTING
from bench.five_ways_predicted import BACKWARD, FORWARD, ROTATIONS, TRAIN, peer
from ringlab.planning.hidden_communication import AttentionLayer, block_flops
from ringlab.planning.ways import WAYS

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
    names = [*WAYS, *map(peer, ROTATIONS), *(f"{name}, computing" for name in COMPUTING)]
    assert set(row["seconds"]) == {f"{name}, {which}" for name in names for which in (FORWARD, BACKWARD)}
    assert {len(seconds) for seconds in row["seconds"].values()} == {1}
    assert row["messages"]["bytes"] == 4 * 2 * 16 * 4 * 8  # K and V of 16 tokens
    assert min(row["messages"][name]["seconds"] for name in ("inside", "between")) > 0


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


def as_predicted(rate=20e6, slower=1.0, **ways):
    """Results of a machine that does what is predicted, but for `ways`, which take so many times as long."""
    cell = {"hosts": 2, "per_host": 2, "rate": rate, "seq_len": 1024}
    computing = {f"{name}, computing, {which}": [0.1] for name in COMPUTING for which in (FORWARD, BACKWARD)}
    computing |= {f"all-gather, computing, {which}": [0.1 / 4] for which in (FORWARD, BACKWARD)}  # of one head of 4
    messages = {"bytes": 65536, "agreement": 0.001}
    messages |= {
        "inside": {"seconds": 65536 / 1e9, "core": 1e-5},
        "between": {"seconds": 2 * 65536 / rate, "core": 1e-5},
    }
    row = {**cell, "seconds": computing, "messages": messages}
    results = {"dtype": "float32", **SIZE, "rows": [row]}
    for way in WAYS:
        forward = prediction.predicted(results, row, way, FORWARD)
        both = prediction.predicted(results, row, way, TRAIN)
        for which, seconds in ((FORWARD, forward), (BACKWARD, both - forward)):
            row["seconds"][f"{way}, {which}"] = [slower * seconds * ways.get(way, 1.0)] * 2
    for which in (FORWARD, BACKWARD):
        row["seconds"] |= {f"{peer(rotation)}, {which}": [1.0, 1.0] for rotation in ROTATIONS}
    return results


def test_speeds_of_a_row_by_hand():
    results = as_predicted()
    seen = prediction.speeds(results, results["rows"][0])
    flops = block_flops(AttentionLayer(4, 4, 8, itemsize=4), 1024**2 / 2 / 4)  # of each of 4 ranks, in 0.1 s
    assert seen.flops["ring", FORWARD] == seen.flops["all-gather", FORWARD] == pytest.approx(flops / 0.1)
    assert seen.flops["double ring", BACKWARD] == pytest.approx(2.5 * flops / 0.1)
    assert (seen.in_host, seen.between_hosts) == (pytest.approx(1e9), pytest.approx(20e6))
    assert prediction.at_rate(results, results["rows"], 40e6) == replace(seen, between_hosts=pytest.approx(40e6))


def test_what_a_core_copies_and_agrees_on_is_predicted():
    """All-to-all hides nothing, so only its agreement comes on top; the ring's copies lengthen its computing."""
    results = as_predicted(rate=1e12)
    (row,) = results["rows"]
    seen = prediction.speeds(results, row)
    free = replace(seen, copying=0.0)
    later = replace(seen, agreement=seen.agreement + 1)
    for way, costs in (("all-to-all", False), ("ring", True)):
        with_copies, without = (prediction.predicted_pass(results, row, each, way, FORWARD) for each in (seen, free))
        assert (with_copies > without) == costs
        assert prediction.predicted_pass(results, row, later, way, FORWARD) == pytest.approx(with_copies + 1)
    between = 3 * 2 * 256 * 4 * 8 * 4  # bytes: three hops of K and V
    ring = prediction.predicted_pass(results, row, seen, "ring", FORWARD) - seen.agreement
    assert ring == pytest.approx(0.1 + between * (seen.copying + 1 / seen.in_host), rel=1e-3)


def test_verdicts_of_the_five_ways():
    exact = as_predicted()
    assert five_ways_table.errors_where_computing_dominates(exact) == pytest.approx([0.0] * 10)
    assert [five_ways_table.excess(exact, row, which) for row, which in five_ways_table.cells(exact)] == [0.0, 0.0]
    right, pairs = five_ways_table.pairs_in_order(exact)
    assert right == pairs >= 3
    slower = as_predicted(slower=1.2)
    assert five_ways_table.errors_where_computing_dominates(slower) == pytest.approx([0.2] * 10)
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
