"""The benches run and count what they should, and their committed tables show their numbers. Nothing is timed."""

import re
import sys

import pytest
import torch

from bench import memory, overlap, record, ring_vs_full
from beyond.overlap import hidden_share

BENCHES = {"memory": memory, "ring_vs_full": ring_vs_full, "overlap": overlap}
MiB = 2**20


@pytest.mark.parametrize("name", BENCHES)
def test_committed_results_name_their_machine_and_their_table_shows_them(name):
    results = record.load(name)
    assert results["command"] == f"python -m bench.{name}"
    assert results["dtype"] == "float32"
    machine = results["machine"]
    assert machine["cores"] >= 1
    assert machine["torch"].startswith("2.")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", machine["date"])
    table = (record.FOLDER / f"{name}.md").read_text()
    assert table == BENCHES[name].table(results)
    for fact in (results["command"], f"{machine['cores']} cores", results["dtype"], machine["torch"], machine["date"]):
        assert fact in table


@pytest.mark.parametrize(
    ("method", "seq_len", "world_size", "expected"),
    [
        ("naive", 256, 1, 3 * MiB // 4),  # three squares of 256 KiB
        ("naive", 32, 1, 2 * 4 * 32 * 32 + 4 * 32 * 64),  # two squares and the output, larger than a square
        ("blockwise", 4096, 1, 2 * MiB),  # the output twice, 1 MiB each
        ("blockwise", 1024, 1, MiB),  # the output, 256 KiB, and three tiles of 256 KiB
        ("ring", 4096, 1, 3 * MiB),  # o and the output twice
        ("ring", 16384, 4, 5 * MiB),  # and a K and a V
        ("ring", 16382, 4, 5 * MiB),  # chunks round up
        ("ring", 4096, 4, 3 * MiB // 2),  # K, V and o, and three tiles, 256 KiB each
        ("ring", 256, 4, 4 * (3 * 64 * 64 + 3 * 64 * 64)),  # tiles no larger than the chunk
    ],
)
def test_counted_memory(method, seq_len, world_size, expected):
    assert memory.counted(method, seq_len, heads=1, head_dim=64, world_size=world_size) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="a process can reset its peak on Linux only")
def test_peak_extra_sees_what_was_freed_again():
    kept = torch.ones(8 * MiB)  # 32 MiB before the start do not count

    def work():
        torch.ones(16 * MiB)
        torch.ones(8 * MiB)

    assert 63 * MiB <= record.peak_extra(work) <= 66 * MiB
    assert kept.sum() == 8 * MiB


def test_memory_bench_runs():
    size = {"heads": 1, "head_dim": 64, "world_size": 2, "naive_limit": 1024}
    results = memory.measure([256, 1024, 2048], **size)
    assert results["measured"]["naive"][2] is None
    assert "\n| 2,048 | 48.0 / not measured |" in memory.table(results)
    if sys.platform == "linux":
        for name, counted in results["counted"].items():
            for seen, expected in zip(results["measured"][name][1:], counted[1:], strict=True):
                assert seen is None or abs(seen - expected) <= 0.05 * expected + MiB


def test_ring_bench_runs():
    speed = {"worlds": [2], "seq_len": 64, "heads": 2, "head_dim": 8, "repetitions": 2}
    results = ring_vs_full.measure(speed, {"worlds": [3], "chunk": 64, "heads": 1, "head_dim": 8})
    ring, blockwise, sdpa = results["speed"]["runs"][0]["rows"]
    assert [len(row["seconds"]) for row in (ring, blockwise, sdpa)] == [2, 2, 2]
    assert blockwise["ratio"] == 1.0
    assert ring["ratio"] == blockwise["median_seconds"] / ring["median_seconds"]
    assert "| P = 2 | ring_attention, 2 ranks |" in ring_vs_full.table(results)


def test_committed_ring_needs_six_chunks_and_a_tile_at_most_however_many_ranks():
    results = record.load("ring_vs_full")["memory"]
    assert [row["world_size"] for row in results["rows"]] == [1, 2, 4, 8]
    peaks = [row["peak_bytes"] for row in results["rows"]]
    assert max(peaks) <= 6 * results["chunk_bytes"] + results["tile_bytes"]
    assert peaks[3] <= 1.02 * peaks[1]  # one rank alone has no received block; from 2 on nothing grows


def test_overlap_bench_runs():
    size = {"heads": 1, "head_dim": 8, "world_size": 3, "repetitions": 3}
    results, middles = overlap.measure([16, 32], **size, rate=None)
    assert [row["chunk"] for row in results["rows"]] == [16, 32]
    for row in results["rows"]:
        assert row["predicted"] == min(1.0, row["computing"] / row["messages"])
        both = middles[row["chunk"]]
        assert hidden_share(both["blocking"], both["overlapped"]) == row["hidden"]
        assert [sum(it.what == "wait" for it in both[name]) for name in both] == [0, 3 * 2]  # ranks x hops
    assert "loopback, as fast as it can be" in overlap.table(results)


@pytest.mark.parametrize(("root", "tool", "reason"), [(False, "/sbin/tc", "only root"), (True, None, "iproute2")])
def test_overlap_bench_measures_nothing_without_a_slow_link(root, tool, reason, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(overlap.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(overlap.shutil, "which", lambda name: tool)
    monkeypatch.setattr(overlap, "measure", None)  # calling it would fail
    assert overlap.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("nothing measured: ")
    assert reason in said
