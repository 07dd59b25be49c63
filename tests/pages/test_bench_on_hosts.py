"""Benches on hosts of network namespaces: what is measured and left behind. Nothing is timed; root only."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from bench import __main__ as command
from bench import hosts, record, wires
from bench.wires import knee, shares
from ring_planner.hidden_communication import AttentionLayer, hidden_share
from tests.commands import LIMIT, ROOT, ends_soon, wait_for


@pytest.fixture(scope="module")
def _allowed():
    if reason := hosts.why_not():
        pytest.skip(f"no hosts here: {reason}")


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


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_allowed")
def test_a_ring_over_two_nodes_is_full_attention():
    with hosts.hosts(2, RATE) as both:
        printed = hosts.torchrun(both, "ring_attn.py", "--seq-len", "37")
    assert "P = 2 ranks, S = 37 tokens" in printed
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
        hosts.torchrun(both, "--no-python", "sh", "-c", 'test "$GROUP_RANK" = 0 && sleep 600')


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


@pytest.mark.parametrize(("root", "tool", "reason"), [(False, "/sbin/tc", "only root"), (True, None, "iproute2")])
def test_no_bench_without_a_slow_link(root, tool, reason, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(shutil, "which", lambda name: tool)
    with pytest.raises(OSError, match=reason):
        hosts.hosts(2, RATE).__enter__()


def test_a_bench_that_cannot_run_says_why_and_keeps_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(hosts, "why_no_network", lambda: "only root")
    monkeypatch.setattr(sys, "argv", ["bench", "overlap_threshold"])
    assert command.main() == 0
    assert capsys.readouterr().out == "overlap_threshold: nothing measured: only root\n"
    assert list(tmp_path.iterdir()) == []


def test_a_rank_of_the_bench(ranks):
    """Without two hosts: the ranks are processes of this one."""
    row = ranks(2, one_hop)[0]
    assert set(row) == {"computing", "messages", "ring", "waiting"}
    assert all(seconds > 0 for seconds in row.values())
    assert row["waiting"] < row["ring"]


def one_hop(context):
    return wires.measure_hop(context, 32, heads=2, head_dim=8, repetitions=1)


@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_knee_of_a_machine_by_hand(slower):
    """A machine of 1e11 FLOP/s, slower while messages travel, and a link of 1e8 bytes/s: 4/2 · 1e11 / 1e8 is 2,000."""
    layer, rows = AttentionLayer(8, 8, 64, itemsize=4), []
    for C in (256, 512, 1024, 2048, 4096):
        row = {"chunk": C, "computing": 4 * C**2 * 512 / 1e11, "messages": 2 * C * 512 * 4 / 1e8}
        meanwhile = slower * row["computing"]
        row["waiting"] = max(0.0, row["messages"] - meanwhile)
        row["ring"] = meanwhile + row["waiting"] + row["computing"]
        rows.append({**row, **shares(row)})
        assert rows[-1]["hidden"] == pytest.approx(hidden_share(C, 2000 / slower))
    assert rows[-1]["overhead"] == pytest.approx((slower - 1) / 2)  # nobody waits, but one of two blocks takes longer
    found = knee(rows, layer)
    rows[1]["hidden"] = -1.0  # a repetition disturbed
    for measured in (found.pop("measured"), knee(rows, layer)["measured"]):
        assert measured == pytest.approx(2000 / slower, rel=0.01)
    assert found == pytest.approx({"flops": 1e11, "bandwidth": 1e8, "predicted": 2000})
