"""The benches run and count what they should, and their committed tables show their numbers. Nothing is timed."""

import contextlib
import math
import os
import re
import resource
import sys
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import __main__ as command
from bench import memory, pages, record, speed
from bench.pages import BENCHES
from bench.peers import with_gradients
from ringlab.support import timeline
from ringlab.support.processes import RankContext
from ringlab.support.timeline import laps

RESULTS = (record.FOLDER / "README.md").read_text()
MiB = 2**20


def by_length(context, work, *args):
    """`work` on a rank that other tests use too: turns follow at once, and the allocator stays as it is.

    A call's peak is its number of tokens, more on a later rank, and 100 more where freed memory is not given back.
    """

    def peak(work):
        out = work()
        return (out if isinstance(out, torch.Tensor) else out[0]).shape[2] + context.rank + 100 * (not freed.called)

    with (
        mock.patch.multiple(record, PAUSE=0.0, peak_extra=peak),
        mock.patch.object(record, "return_freed_memory") as freed,
    ):
        return work(context, *args)


def test_committed_results_name_their_machine_and_their_page_shows_them():
    assert pages.of_results(RESULTS) == RESULTS, "python -m bench.pages writes them"
    shown = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RESULTS, re.M | re.S))
    assert shown.keys() >= {*BENCHES} | {path.stem for path in record.FOLDER.glob("*.json")}
    for name, section in shown.items():
        assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC\.\n", section)
        if name in BENCHES:
            results = record.load(name)
            assert results["command"] == f"python -m bench {name}"
            assert record.heading(results) in section
        else:
            assert f"{name}`, which is in the history (`git log " in section
    new = pages.of_results(RESULTS.replace("<!-- memory 0 -->", "<!-- gone -->"))
    assert new.endswith(f"<!-- memory 1 -->\n{BENCHES['memory'].tables(record.load('memory'))[0]}\n<!-- / -->\n")


def test_counted_memory():
    """That of the committed results, whose points lie on these lines; a chunk is rounded up."""
    results = record.load("memory")
    sizes = {name: results[name] for name in ("heads", "head_dim", "world_size")}
    for name, counted in results["counted"].items():
        assert counted == [memory.counted(name, S, **sizes) for S in results["lengths"]]
    assert memory.counted("ring", 16381, **sizes) == counted[-1]


def test_counted_memory_of_training():
    """The longest chunks of the committed results. One or two ranks need fewer buffers."""
    results = record.load("max_context")
    for row in results["rows"]:
        sizes = {"heads": 8, "head_dim": 64, "world_size": row["world_size"]}
        count = partial(memory.counted_training, row["method"], **sizes)
        assert count(row["counted_chunk"]) <= results["budget"] < count(row["counted_chunk"] + results["grain"])


@pytest.mark.skipif(sys.platform != "linux", reason="a process can reset its peak on Linux only")
def test_peak_extra_sees_what_was_freed_again():
    kept = torch.ones(8 * MiB)  # 32 MiB before the start do not count
    torch.ones(64 * MiB)  # nor does a higher peak before it

    def work():
        torch.ones(16 * MiB)
        torch.ones(8 * MiB)

    assert 63 * MiB <= record.peak_extra(work) <= 66 * MiB
    assert kept.sum() == 8 * MiB


SHORT = {"heads": 2, "head_dim": 8, "repetitions": 1}
BESIDE = {"worlds": [1, 3], "chunk": 8, "heads": 4, "head_dim": 8}
RUNS = {  # a small run of a bench: a part of its table, its sizes
    "memory": ("| 12 | ", {"lengths": [8, 12], "heads": 1, "head_dim": 4, "naive_limit": 8}),
    "ring_vs_full": ("| P = 2 | ring_attention", {**SHORT, "worlds": [2], "seq_len": 16, "memory": BESIDE}),
    "against_peers": (
        "| causal forward | flash ring, contiguous |",
        {**SHORT, "worlds": [2], "lengths": [64], "heads": 4, "beside": BESIDE},
    ),
    "max_context": ("| ring | 2 |", {"worlds": [2], "budget": 12 * MiB, "heads": 4}),
}
PEAKS = {  # by `by_length`, on the last rank
    "memory": {"naive": [8, None], "blockwise": [8, 12], "ring": [2 + 3, 3 + 3]},
    "ring_vs_full": [{"world_size": P, "peak_bytes": 7 + P, "peak_bytes_as_it_comes": 107 + P} for P in (1, 3)],
    "against_peers": [{"world_size": P, "peak_bytes": [7 + P] * 2} for P in (1, 3)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_small_run(ranks, monkeypatch, name):
    """On the ranks that stay alive between tests."""
    if name == "max_context" and not hasattr(os, "memfd_create"):
        pytest.skip("needs Linux")
    for module in (speed, *[memory] * (name == "memory")):
        monkeypatch.setattr(module, "launch", lambda work, P, *args: ranks(P, by_length, work, *args))
    monkeypatch.setattr(speed, "pin", lambda cores: None)  # it would pin this process too
    shown, sizes = RUNS[name]
    results = BENCHES[name].run(**sizes)
    beside = results.get("memory", {})
    assert results.get("measured", beside.get("rows")) == PEAKS.get(name)
    assert beside.get("chunk_bytes") in (None, 4 * 4 * 8 * 8)
    for row in results["rows"] if name == "max_context" else ():
        assert row["chunk"] == max(n for n, fits in row["probes"] if fits)
    assert shown in "\n\n".join(BENCHES[name].tables(results))


def seconds_of_ranks(context):
    with mock.patch.object(timeline, "time", mock.Mock(**{"perf_counter.side_effect": [1.0, 7.0 + 3 * context.rank]})):
        return laps(lambda: None, context.device, 3)


def test_the_time_of_a_call_is_its_share_of_all_and_known_of_each_rank(ranks):
    assert ranks(3, seconds_of_ranks) == [[2.0, 3.0, 4.0]] * 3


def test_results_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    record.save("b", {"x": 1, "y": [[1, 2], [3]]})
    assert record.load("b") == {"x": 1, "y": [[1, 2], [3]]}
    assert (record.most([1, 3, 2]), record.most([3, None])) == (3, None)


def test_only_so_many_cores_are_taken(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {9, 3, 5}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", taken := mock.Mock(), raising=False)
    record.pin(2)
    taken.assert_called_once_with(0, [3, 5])


@pytest.mark.parametrize(("times", "right"), [(1 + 30 * 2**-23, True), (1 + 34 * 2**-23, False), (math.nan, False)])
def test_a_bench_does_not_measure_what_is_wrong(monkeypatch, alone, times, right):
    """32 ulp are rounding; and NaN is not."""
    full, dtypes = torch.nn.functional.scaled_dot_product_attention, {"float32": torch.float32}
    monkeypatch.setattr(speed, "torch_loop", lambda *x, causal, layout: times * full(*x, is_causal=causal))
    monkeypatch.setattr(speed, "CASES", {speed.FORWARD: [speed.TORCH]})
    monkeypatch.setattr(speed, "DTYPES", dtypes)
    monkeypatch.setattr(record, "PAUSE", 0.0)
    refused = pytest.raises(RuntimeError, match=r"forward, float32.*off by")
    with contextlib.nullcontext() if right else refused:
        assert len(speed.measured_speed(alone, [16], 2, 8, 1)) == 1
    monkeypatch.setattr(speed, "ring_attention", lambda *x: times * full(*x))
    if not right:
        with pytest.raises(RuntimeError, match="ring_attention, P ranks differs from full attention"):
            speed.seconds_of_ring(alone, 16, 2, 8, 1)


def test_the_rows_and_sums_of_a_layer_are_judged(alone):
    """32 ulp of the largest number; each result with one that is a little more off, and with a NaN."""
    four = torch.randn(4, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0)).unbind()
    results = with_gradients(torch.nn.functional.scaled_dot_product_attention, *four)
    memory.check(*four, *results)
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        for more in (36 * 2**-23, math.nan):
            wrong = [x.clone() for x in results]
            size = wrong[i].abs()  # dk and dv are judged by their sums
            wrong[i][..., -1, 0] += more * (size.sum(dim=2) if name in ("dk", "dv") else size).max()  # in the last row
            with pytest.raises(RuntimeError, match=f"^{name} is wrong: off by"):
                memory.check(*four, *wrong)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_alone_takes_all_cores_and_the_others_wait(monkeypatch, alone, rank):
    monkeypatch.setattr(record, "PAUSE", 0.0)
    monkeypatch.setattr(record, "cpu_cores", lambda: 3)
    monkeypatch.setattr(record, "laps", lambda work, device: work() or [2.0, 5.0, 3.0])  # of three ranks
    together, works = torch.get_num_threads(), dict.fromkeys(("all", "one"), torch.get_num_threads)
    methods = {name: (name == "one", work) for name, work in works.items()}
    seconds, results = record.in_turn(replace(alone, rank=rank), methods, 2)
    assert results == {"all": together, **({"one": 3} if rank == 0 else {})}
    assert seconds == {"all": [5.0] * 2, "one": [5.0] * 2}
    assert torch.get_num_threads() == together


def test_several_benches_are_processes_and_one_that_fails_is_told(monkeypatch, capsys):
    codes = {"memory": 0, "max_context": 3, "ring_vs_full": 1}
    ended = mock.Mock(side_effect=lambda words: mock.Mock(returncode=codes[words[-1]]))
    monkeypatch.setattr(command.subprocess, "run", ended)
    monkeypatch.setattr(sys, "argv", ["bench", *codes])
    assert command.main() == 3
    assert [call.args[0][1:] for call in ended.call_args_list] == [["-m", "bench", name] for name in codes]
    monkeypatch.setattr(sys, "argv", ["bench", "memory", "speed"])
    with pytest.raises(SystemExit):
        command.main()
    assert f"speed is no bench; expected one of {', '.join(BENCHES)}" in capsys.readouterr().err
    alone = mock.Mock(**{"heading.return_value": "when", "tables.return_value": ["table"]})
    monkeypatch.setitem(BENCHES, "memory", alone)
    monkeypatch.setattr(sys, "argv", ["bench", "memory"])
    with mock.patch.multiple(command, record=alone, pages=alone):
        assert command.main() == 0
    assert alone.mock_calls[-2:] == [mock.call.save("memory", alone.run.return_value), mock.call.write()]
    assert capsys.readouterr().out == "# memory\n\nwhen\n\ntable\n"


def test_a_bench_that_cannot_run_says_why_and_keeps_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["bench", "max_context"])
    assert command.main() == 0
    assert capsys.readouterr().out.startswith("max_context: nothing measured: a hard limit")
    assert list(tmp_path.iterdir()) == []


# The longest context in a fixed memory --------------------------------------------------------------------------------

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA holds a process on Linux only")


def ask_again(context: RankContext) -> None:
    """What is alive counts, freed memory does not, and after the limit everything is allowed again."""
    torch.set_num_threads(1)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    record.return_freed_memory()
    with memory.at_most(16 * MiB):
        for _ in range(4):
            torch.ones(15 * MiB, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    for sizes in ((20 * MiB,), (9 * MiB, 9 * MiB)):
        with pytest.raises(MemoryError, match="the budget, 16,777,216 bytes, is spent"), memory.at_most(16 * MiB):
            _ = [torch.ones(size, dtype=torch.uint8) for size in sizes]
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.ones(20 * MiB, dtype=torch.uint8)


def fail(context: RankContext) -> None:
    """Rank 1 fails within its budget."""
    with memory.at_most(16 * MiB):
        if context.rank == 1:
            raise MemoryError("the network is down")


@linux
def test_no_length_fits_whose_result_is_wrong(monkeypatch, alone):
    monkeypatch.setattr(record, "return_freed_memory", lambda: None)
    monkeypatch.setitem(memory.METHODS, "naive", lambda q, k, v: 1.01 * memory.naive_attention(q, k, v))
    with pytest.raises(RuntimeError, match="out is wrong: off by"):
        memory.step_of_a_layer(alone, "naive", 16, 64 * MiB, 2, 8)


@linux
def test_the_limit_counts_what_is_alive_and_ends():
    assert memory.within(ask_again, 1)


@linux
def test_another_failure_is_not_a_spent_budget_and_a_system_without_a_limit_is_named(monkeypatch):
    with pytest.raises(RuntimeError, match="MemoryError: the network is down"):
        memory.within(fail, 2)
    monkeypatch.setattr(memory, "within", lambda *args: True)
    with pytest.raises(OSError, match="does not hold a process to RLIMIT_DATA"):
        memory.no_limit_here()


@given(threshold=st.integers(0, 10_000), guess=st.integers(1, 10_000))
def test_the_search_finds_the_threshold_from_any_guess(threshold, guess):
    asked = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= threshold

    assert memory.longest(fits, guess) == threshold
    assert threshold != guess or asked == [guess, guess + 1]
    assert len(set(asked)) == len(asked)  # no length is tried twice
    assert min(asked) >= 1
