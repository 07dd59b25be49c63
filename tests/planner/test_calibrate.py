"""Calibration: the sums are right for planted times, and real ranks give numbers that a machine can have."""

import json
import math
import os
import re
import sys
import time
from dataclasses import asdict, replace
from unittest import mock

import pytest
import torch

from ring_planner import calibrate
from ring_planner.hidden_communication import AttentionLayer
from ring_planner.machine import FIELDS, FORMAT, VERSION, read_machine, write_machine
from ring_planner.round_costs import causal_pairs
from ring_planner.ways import Cluster
from ringlab.support.timeline import Lap, laps
from tests.mistakes import refusal

LAYER = AttentionLayer(2, 2, 8, itemsize=4)


@pytest.mark.parametrize("fixed", [0.0, 3e-5, 0.01])
@pytest.mark.parametrize("rate", [1e9, 3e14])
def test_the_fit_finds_what_was_planted(fixed, rate):
    sizes = [rate * 1e-4 * 4**i for i in range(6)]
    found = calibrate.fit(sizes, [fixed + size / rate for size in sizes])
    assert found == (pytest.approx(fixed, abs=1e-12), pytest.approx(rate))


def test_a_fit_without_a_line_goes_through_zero():
    assert calibrate.fit([10.0], [2.0]) == (0.0, pytest.approx(5.0))
    for seconds in ([2.0, 1.0], [1.0, 5.0]):  # the longer call is the faster one; a call of nothing would take less
        assert calibrate.fit([10.0, 20.0], seconds) == (0.0, 20 / seconds[1])


def test_latency_of_the_shortest_message_and_bandwidth_of_the_longest():
    table = [{"bytes": size, "seconds": 0.002 + size / 1e9} for size in calibrate.BYTES]
    table[0]["seconds"] = 0.002
    assert calibrate.wire(table) == (0.002, pytest.approx(1e9))
    assert calibrate.wire(table[:1]) == (0.002, pytest.approx(calibrate.BYTES[0] / 0.001))  # one row says little


def timings(context):
    mine, calls = 0.02 * context.rank, []
    of_ranks = laps(lambda: calls.append(time.sleep(mine)), context.device, 3, lambda: calls.append("after"))
    return max(of_ranks).seconds, calls


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_call_ends_with_its_last_rank(ranks, world_size):
    for seconds, calls in ranks(world_size, timings):
        assert seconds >= 0.02 * (world_size - 1)  # of one call of three: not less, however fast the machine is
        assert calls == [None] * 3 + ["after"]


def test_a_copy_reads_each_byte_and_writes_it():
    watch = mock.Mock(**{"context.device": torch.device("cpu"), "typical.return_value": (2.0, 1.0)})
    with mock.patch.dict(calibrate.COPIED, cpu=1000):
        assert calibrate.memory(watch) == 2 * 1000 / 2.0


def test_short_calls_are_repeated_and_the_median_counts():
    watch = calibrate.Stopwatch(mock.Mock(device="here"))
    of_two_ranks = [[Lap(0.0, 0.25), Lap(s, 0.75)] for s in (0.001, 0.002, 0.009, 0.001, 0.003, 0.004)]
    with mock.patch.object(calibrate, "laps", side_effect=of_two_ranks) as once:
        assert watch.typical(None) == (0.003, 0.5)
    assert [call.args[1:3] for call in once.call_args_list] == [("here", calls) for calls in (1, *[30] * 5)]


def test_a_table_ends_before_calls_take_long():
    watch = calibrate.Stopwatch(None)
    with mock.patch.object(watch, "typical", side_effect=lambda size: (0.01 * size, 0.0)):
        rows = watch.table("bytes", [1, 4, 16, 64, 256], 4, lambda size: size)
    assert [row["bytes"] for row in rows] == [1, 4, 16]  # the next would take 0.64 s
    assert rows[-1]["seconds"] == 0.16


def test_a_busy_machine_is_seen():
    """The latency of 4 KiB was ten times the time of 64 times the bytes, and a call's own time was nothing."""
    cluster, computing = Cluster(1, 2, 1e9, 1e9, launch=1e-5), [{"seconds": 0.1, "core": 0.09}]
    sent = [{"kind": "send", "place": "inside", "seconds": each} for each in (0.001, 0.0011, 0.01)]
    quiet = {"cluster": cluster, "made": {"on": "cpu"}, "computing": computing, "messages": sent}
    for change, said in (
        ({}, None),
        ({"messages": [{**sent[0], "seconds": 0.012}, *sent[1:]]}, "the shortest message inside took longer"),
        ({"computing": [{"seconds": 0.1, "core": 0.01}]}, "computing had 10% of a core"),
        ({"cluster": Cluster(1, 2, 1e9, 1e9)}, "longer blocks took less"),
    ):
        found = calibrate.faults({**quiet, **change})
        assert [said in each for each in found] == [True] * bool(said)


SMALL = {"LENGTHS": [16, 32], "BYTES": [256, 1024], "LONG": 100.0, "SHORT": 1e-9, "REPETITIONS": 1}


def small(context, per_host):
    environment = mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(per_host[context.rank])})
    with mock.patch.multiple(calibrate, **SMALL, COPIED={"cpu": 2**16}), environment:
        return calibrate.measured(context, 2, 8, "float32")


@pytest.mark.parametrize(("world_size", "per_host"), [(1, 1), (2, 2), (3, 3), (3, 1), (4, 2)])
def test_a_short_calibration(ranks, world_size, per_host):
    found, *others = ranks(world_size, small, [per_host] * world_size)
    cluster = found["cluster"]
    hosts = world_size // per_host
    assert (cluster.hosts, cluster.per_host) == (hosts, per_host)
    assert {other["cluster"].hosts for other in others} <= {hosts}
    endless = {name for name, there in (("bandwidth", per_host > 1), ("host_bandwidth", hosts > 1)) if not there}
    for name, value in asdict(cluster).items():
        assert value >= 0
        assert math.isfinite(value) == (name not in endless)
    computed = {(row["pass"], row["mask"], row["length"]) for row in found["computing"]}
    assert computed == {(p, m, n) for p in ("forward", "backward") for m in ("none", "causal") for n in (16, 32)}
    for row in found["computing"]:
        n = row["length"]
        pairs = n * n if row["mask"] == "none" else n * (n + 1) / 2
        products = {"forward": 2, "backward": 5}[row["pass"]]  # each of a multiplication and an addition a number
        assert row["flops"] * row["seconds"] == pytest.approx(products * 2 * pairs * 2 * 8)  # 2 heads of 8
    places = {name for name, there in (("inside", per_host > 1), ("between", hosts > 1)) if there}
    sent = {(row["place"], row["bytes"]) for row in found["messages"]}
    assert sent == {(place, size) for place in places for size in (256, 1024)}
    assert all(row["seconds"] > 0 for row in (*found["computing"], *found["messages"]))


def test_hosts_of_unequal_numbers_are_refused(ranks):
    for raised in ranks.outcomes(3, small, [2, 2, 1]):
        assert raised.message == "the hosts have [1, 2] processes; expected equal numbers"
    assert "the hosts have [2] processes" in refusal(ranks.outcomes(3, small, [2, 2, 2]))


def planted(context, nics):
    """A machine of 2 hosts of 2, whose times are known: what `measured` makes of them."""
    rates = {"inside": 1e9, "between": 1e8}  # of a rank while all send
    rows = [
        {"pass": p, "mask": m, "length": n, "flops": 1e9, "seconds": 0.001 + n / speed, "core": 0.0}
        for p, speed in (("forward", 2e4), ("backward", 1e4))
        for m in ("none", "causal")
        for n in (128, 256, 512)
    ]
    for row in rows:  # FLOPs are `length` · 1e6 without a mask; the causal rows must not matter
        row["flops"] = row["length"] * 1e6 / row["seconds"] * (1 if row["mask"] == "none" else 5)
    turn = iter(rates)

    def table(watch, name, sizes, growth, work):
        rate = rates[next(turn)]
        return [{"bytes": size, "seconds": 0.002 + size / rate, "core": 0.0} for size in (0, 10**6, 10**7)]

    def typical(watch, work, after=None):
        return 0.002 + 1e7 / (1e8 * 2 / nics), 0.0  # a device alone has a NIC

    parts = {"computing": lambda *args: rows, "memory": lambda watch: 5e9, "slowdown": lambda *args: 1.25}
    with (
        mock.patch.multiple(calibrate, **parts, cost_of_a_mask=lambda rows: 1.5),
        mock.patch.multiple(calibrate.Stopwatch, table=table, typical=typical),
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}),
    ):
        return calibrate.measured(context, 2, 8, "float32")["cluster"]


@pytest.mark.parametrize("nics", [1, 2])
def test_the_cluster_of_planted_times(ranks, nics):
    right = {"flops": 2e10, "backward_flops": 1e10, "launch": 0.001, "memory_bandwidth": 5e9, "slowdown": 1.25}
    right |= {"bandwidth": 1e9, "latency": 0.002, "host_bandwidth": 2e8 / nics, "host_latency": 0.002}
    right |= {"hosts": 2, "per_host": 2, "nics": nics, "causal": 1.5, "multiprocessors": 0}  # the last: not measured
    for cluster in ranks(4, planted, nics):
        assert asdict(cluster) == pytest.approx(right, rel=1e-9)


def sent_bytes(context):
    """What a rank sends, for 1000 bytes."""
    with mock.patch.object(calibrate, "post", return_value=[]) as call:
        calibrate.message(None, context.device)(1000)()
    return call.call_args.args[0][0].nbytes


def test_messages_are_counted_by_the_bytes_that_a_rank_sends(ranks):
    assert ranks(2, sent_bytes) == [1000, 1000]


def test_cost_of_a_mask_is_of_the_longest_block_with_both():
    def row(which, mask, length, seconds):
        return {"pass": which, "mask": mask, "length": length, "seconds": seconds}

    rows = [row("forward", "none", n, 4.0 * n * n) for n in (128, 256, 512)]
    rows += [row("forward", "causal", n, 5.0 * causal_pairs(n)) for n in (256, 1024)]
    rows += [row("backward", mask, 512, 1.0) for mask in ("none", "causal")]
    assert calibrate.cost_of_a_mask(rows) == pytest.approx(1.25)
    rows[-4:] = [row("forward", "causal", 256, 1.0)]  # a kernel that gains more than its pairs: no machine's
    assert calibrate.cost_of_a_mask(rows) == 1.0


def steps_of_slowdown(context, meanwhile):
    """The slowdown of planted times; the tokens of each block that was computed, and what a rank did around it."""
    seconds = {("forward", "none"): {16: 0.1, 32: 0.4, 64: 0.6}, ("forward", "causal"): {64: 0.4}}
    rows = [
        {"pass": which, "mask": mask, "length": length, "seconds": s}
        for (which, mask), table in {**seconds, ("backward", "none"): {64: 0.4}}.items()
        for length, s in table.items()
    ]
    steps, watch = [], calibrate.Stopwatch(context)

    def typical(work, after=None):
        work()
        if after:
            after()
        return (meanwhile if after else 2.0), 0.0

    parts = {
        "fused_forward": lambda q, *rest, **options: steps.append(q.shape[2]),
        "post": lambda *args: steps.append("post") or [mock.Mock(wait=lambda: steps.append("wait"))],
    }
    travel = {"bytes": 64, "seconds": 1.0, "group": None}
    with mock.patch.multiple(calibrate, **parts), mock.patch.object(watch, "typical", typical):
        return calibrate.slowdown(watch, LAYER, torch.float32, rows, travel), steps


@pytest.mark.parametrize(("meanwhile", "slowdown"), [(3.0, 1.5), (1.0, 1.0)])  # a message makes nothing faster
def test_slowdown_is_of_computing_while_a_message_is_under_way(ranks, meanwhile, slowdown):
    for found in ranks(2, steps_of_slowdown, meanwhile):
        assert found == (slowdown, [32, "post", 32, "wait"])


HOSTS = Cluster(2, 4, 1e12, 4e11, 12.5e9, 2, 2e12, 1e-5, 2e-5, 8e11, 3e-6, 1.1, 1.2)
FOUND = {
    "cluster": HOSTS,
    "layer": {"heads": 8, "head_dim": 64, "dtype": "float32"},
    "made": {"on": "cpu", "backend": "gloo", "seconds": 20.0},
    "computing": [{"seconds": 1.0, "core": 1.0}],
    "messages": [],
}


def test_the_command_writes_what_the_planner_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["calibrate", "--out", f"{tmp_path}/machine.json", "--device", "cpu"])
    with mock.patch.object(calibrate, "launch", return_value=[FOUND]) as launch:
        assert calibrate.main() == 0
    assert launch.call_args.args[2:] == calibrate.LAYERS["cpu"]
    assert read_machine(tmp_path / "machine.json") == FOUND["cluster"]
    printed = capsys.readouterr().out
    assert "8 processes, cpu with gloo, float32, 8 heads of 64: 20 s" in printed
    assert re.search(r"^ +host_latency +2e-05$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "the following arguments are required: --out"),
        (["--out", "no/such/folder/machine.json"], "expected a file in a folder that is there"),
        (["--out", "machine.json", "--processes", "0"], "--processes: '0' given, expected a whole number"),
        (["--out", "machine.json", "--head-dim", "-1"], "--head-dim: '-1' given, expected a whole number"),
        (["--out", "machine.json", "--device", "cuda", "--processes", "999"], "--device cuda needs a GPU"),
    ],
)
def test_wrong_options_measure_nothing(options, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["calibrate", *options])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with mock.patch.object(calibrate, "launch") as launch, pytest.raises(SystemExit) as ended:
        calibrate.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not launch.called


ONE = Cluster(1, 1, 1e12, math.inf)  # no wire at all


@pytest.mark.parametrize("cluster", [HOSTS, ONE], ids=["hosts", "one device"])
def test_what_is_written_is_read(cluster, tmp_path):
    path = tmp_path / "machine.json"
    write_machine(path, replace(cluster, memory_bandwidth=2e12), computing=[{"length": 128}])
    assert read_machine(path) == replace(cluster, memory_bandwidth=2e12)
    assert "Infinity" not in path.read_text()  # which is no JSON
    assert json.loads(path.read_text())["computing"] == [{"length": 128}]


def changed(**numbers):
    """A file's content, with other numbers of the cluster; "gone": without this field."""
    cluster = {name: getattr(HOSTS, name) for name in FIELDS} | numbers
    return {"format": FORMAT, "version": VERSION, "cluster": {k: v for k, v in cluster.items() if v != "gone"}}


REFUSED = {
    "no JSON": ("{", ["cannot be read: Expecting", "ring_planner.calibrate --out"]),
    "nested without end": ("[" * 10**5, ["cannot be read: maximum recursion"]),
    "no object": ([1], ["has format and version list", f"expected ('{FORMAT}', {VERSION})"]),
    "later version": ({**changed(), "version": VERSION + 1}, [f"{VERSION + 1}); expected", "measure again"]),
    "no cluster": ({"format": FORMAT, "version": VERSION}, ["cluster has None; expected the fields ['hosts'"]),
    "a field less": (changed(launch="gone"), ["cluster has {", "expected the fields"]),
    "text": (changed(flops="1e12"), ["flops is '1e12'; expected a number, 0 or 1000 to 1e+20\n"]),
    "not a number": (changed(bandwidth=math.nan), ["bandwidth is nan; expected a number", "or null\n"]),
    "half a host": (changed(hosts=1.5), ["hosts is 1.5; expected a whole number"]),
    "no speed": (changed(flops=0), ["rates above 0"]),
    "slower than a clock": (changed(flops=1e-300), ["flops is 1e-300; expected a number, 0 or 1000 to 1e+20"]),
    "negative": (changed(latency=-1), ["latency is -1; expected a number, 0 or 0 to 1000"]),
    "too many NICs": (changed(nics=5), ["nics is 5; expected 1 to 4"]),
    "faster beside messages": (changed(slowdown=0.5), ["slowdown and causal of 1 or more"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_is_none_is_refused_by_name(what, tmp_path):
    content, words = REFUSED[what]
    path = tmp_path / "machine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=r"machine\.json") as refused:
        read_machine(path)
    for each in words:
        assert each in f"{refused.value}\n"


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=r"calibrate --out FILE") as refused:
            read_machine(path)
        assert str(refused.value).startswith(f"{path} cannot be read: ")
