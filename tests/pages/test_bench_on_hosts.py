"""Benches on hosts of network namespaces: what is measured, predicted, and left behind. Nothing is timed; root only."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from bench import five_ways, gradients_home, hosts, overlap, overlap_threshold, record, unequal_links
from bench import five_ways_predicted as prediction
from bench.five_ways_predicted import BACKWARD, FORWARD, ROTATIONS, TRAIN, peer
from bench.overlap_threshold import knee, shares
from ringlab.planning.hidden_communication import AttentionLayer, block_flops, hidden_share
from ringlab.planning.ways import WAYS, Cluster
from ringlab.support.processes import launch
from tests.commands import LIMIT, ROOT, ends_soon, wait_for

SIZE = {"heads": 4, "kv_heads": 4, "head_dim": 8}


@pytest.fixture(scope="module")
def _allowed():
    if reason := hosts.why_not():
        pytest.skip(f"no hosts here: {reason}")


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


def test_verdicts_of_the_five_ways():
    exact = as_predicted()
    assert prediction.errors(exact) == pytest.approx([0.0] * 10)
    assert [prediction.excess(exact, row, which) for row, which in prediction.cells(exact)] == [0.0, 0.0]
    slower = as_predicted(slower=1.2)
    assert prediction.errors(slower) == pytest.approx([0.2] * 10)

    (row,) = exact["rows"]
    advised = min(WAYS, key=lambda way: prediction.predicted(exact, row, way, FORWARD))
    wrong = as_predicted(**{advised: 3.0})
    assert prediction.excess(wrong, wrong["rows"][0], FORWARD) > 1
    fastest = prediction.over_peers(exact)["fastest"]
    assert fastest[0] == pytest.approx(1 / prediction.predicted(exact, row, advised, FORWARD))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_allowed")
def test_unequal_links_bench_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    size = {"seq_len": 64, "heads": 1, "head_dim": 8, "flops": 1e6, "repetitions": 1}
    cured = "devices 1 and 3 at a third, chunks in proportion"
    results = unequal_links.measure([cured], **size)
    (row,) = results["rows"]
    assert row["lengths"] == [24, 9, 23, 8]
    assert len(row["bandwidths"]) == 4
    assert "| 24 9 23 8 |" in unequal_links.table(results)


# The hosts -----------------------------------------------------------------------------------------------------------

RATE = 50_000_000


def network(pid):
    """The network namespace that a process is in; None when the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def networks():
    return {network(path.name) for path in Path("/proc").glob("[0-9]*")}


def links():
    return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.usefixtures("_allowed")
def test_a_ring_over_two_nodes_is_full_attention():
    with hosts.hosts(2, RATE) as both:
        printed = hosts.torchrun(both, "ring_attn.py", "--seq-len", "37", processes=(1, 2))
    assert "P = 3 ranks, S = 37 tokens" in printed
    assert "ok    against full attention in float64" in printed


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_allowed")
def test_a_node_that_never_meets_the_other_is_ended(monkeypatch):
    monkeypatch.setattr(hosts, "GRACE", 1)
    with (
        ends_soon(),
        hosts.hosts(2, RATE) as both,
        pytest.raises(RuntimeError, match=r"host 0: status None (?s:.*)host 1: status [1-9]"),
    ):
        hosts.torchrun(both, "ring_attn.py", processes=(1, -1))


def said(host, *command):
    """What a command that prints JSON says on this host."""
    return json.loads(subprocess.run(host.inside(*command), capture_output=True, text=True, check=True).stdout)


def rates(host):
    """The bytes a second that each device of the host may send."""
    qdiscs = [it for it in said(host, "tc", "-j", "qdisc", "show") if it["kind"] != "noqueue"]
    assert {it["kind"] for it in qdiscs} == {"tbf"}
    return {it["dev"]: it["options"]["rate"] for it in qdiscs}


@pytest.mark.usefixtures("_allowed")
def test_the_link_is_throttled_each_way_and_the_only_one():
    with hosts.hosts(2, RATE) as both:
        for host in both:
            assert rates(host) == {hosts.LINK: RATE}
            devices = said(host, "ip", "-j", "address", "show", "up")
            assert [(it["ifname"], it["addr_info"][0]["local"]) for it in devices] == [
                ("lo", "127.0.0.1"),
                (hosts.LINK, host.address),
            ]


@pytest.mark.usefixtures("_allowed")
def test_nothing_is_left_behind_by_success_or_by_an_error():
    before = links()
    for error in (None, OverflowError):
        with suppress(OverflowError), hosts.hosts(2, RATE) as both:
            made = {network(host.holder) for host in both}
            if error:
                raise error
        assert len(made - {network("self"), None}) == 2
        assert not made & networks()
    assert links() == before


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_allowed")
def test_nothing_is_left_behind_by_a_bench_that_is_killed(tmp_path):
    before = links()
    rank = f"import os, pathlib, time; pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).touch(); time.sleep(600)"
    (tmp_path / "rank.py").write_text(rank)
    bench = f"import sys; from bench.hosts import *\nwith hosts(2, {RATE}) as both: torchrun(both, sys.argv[1])"
    running = subprocess.Popen([sys.executable, "-c", bench, tmp_path / "rank.py"], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(lambda: list(tmp_path.glob("[01]")), 2)
    family = psutil.Process(running.pid).children(recursive=True)
    assert len(family) >= 7  # what holds the switch; for each host what holds it, torchrun, and a rank
    made = {network(process.pid) for process in family}
    assert len(made) == 3
    running.kill()
    assert running.wait(timeout=LIMIT) != 0
    wait_for(lambda: made - networks(), len(made))  # a process that its parent did not wait for ends a moment later
    assert links() == before


@pytest.mark.parametrize("bench", [overlap, overlap_threshold, five_ways, unequal_links, gradients_home])
@pytest.mark.parametrize(("root", "tool", "reason"), [(False, "/sbin/tc", "only root"), (True, None, "iproute2")])
def test_a_bench_measures_nothing_without_a_slow_link(bench, root, tool, reason, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(shutil, "which", lambda name: tool)
    monkeypatch.setattr(bench, "measure", None)  # calling it would fail
    assert bench.main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("nothing measured: ")
    assert reason in printed


def test_a_rank_of_the_bench():
    """Without two hosts: the ranks are processes of this one."""
    row = launch(one_hop, 2)[0]
    assert set(row) == {"computing", "messages", "ring", "waiting", "computing_meanwhile"}
    assert all(seconds > 0 for seconds in row.values())
    assert row["waiting"] + row["computing_meanwhile"] < row["ring"]


def one_hop(context):
    return overlap_threshold.measure_hop(context, 32, heads=2, head_dim=8, repetitions=1)


def row_of(chunk, *, flops, bandwidth, layer, slower=1.0):
    """A row as it would be on a machine of `flops`, `slower` while messages travel, and a link of `bandwidth`."""
    computing = 4 * chunk**2 * layer.heads * layer.head_dim / flops
    messages = 2 * chunk * layer.heads * layer.head_dim * 4 / bandwidth
    meanwhile = slower * computing
    waiting = max(0.0, messages - meanwhile)
    seen = {"chunk": chunk, "computing": computing, "messages": messages, "computing_meanwhile": meanwhile}
    seen |= {"waiting": waiting, "ring": meanwhile + waiting + computing}
    return {**seen, **shares(seen)}


@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_knee_of_a_machine_by_hand(slower):
    layer = AttentionLayer(8, 8, 64, itemsize=4)
    rows = [
        row_of(chunk, flops=1e11, bandwidth=1e8, layer=layer, slower=slower) for chunk in (256, 512, 1024, 2048, 4096)
    ]
    found = knee(rows, layer)
    assert found["flops"] == pytest.approx(1e11)
    assert found["bandwidth"] == pytest.approx(1e8)
    assert found["predicted"] == pytest.approx(2000)  # 4/2 · flops / bandwidth
    assert found["flops_meanwhile"] == pytest.approx(1e11 / slower)
    assert found["predicted_meanwhile"] == pytest.approx(2000 / slower)
    assert found["measured"] == pytest.approx(2000 / slower, rel=0.01)
    for it in rows:
        assert it["hidden"] == pytest.approx(hidden_share(it["chunk"], 2000 / slower))
    assert rows[-1]["overhead"] == pytest.approx((slower - 1) / 2)  # nobody waits, but one of two blocks takes longer
    rows[1]["hidden"] = -1.0  # a repetition disturbed
    assert knee(rows, layer)["measured"] == pytest.approx(2000 / slower, rel=0.01)
