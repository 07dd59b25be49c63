"""The limit on a device's memory is hard, the search finds the longest S, and only a spent budget ends it."""

import resource
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import max_context, record
from bench.against_peers import with_gradients
from bench.max_context import at_most, counted, longest, within
from ringlab.support.processes import RankContext
from ringlab.training.flash_ring import ring_flash_attention

MiB = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA holds a process on Linux only")


def ask_for_too_much(context: RankContext) -> None:
    torch.set_num_threads(1)  # a thread that starts within the limit takes its stack from it
    record.return_freed_memory()
    with at_most(16 * MiB):
        torch.ones(17 * MiB, dtype=torch.uint8)


def ask_again(context: RankContext) -> None:
    """What is alive counts, freed memory does not, and after the limit everything is allowed again."""
    torch.set_num_threads(1)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    record.return_freed_memory()
    with at_most(16 * MiB):
        for _ in range(4):
            torch.ones(15 * MiB, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    for sizes in ((20 * MiB,), (9 * MiB, 9 * MiB)):
        with pytest.raises(MemoryError, match="the budget, 16,777,216 bytes, is spent"), at_most(16 * MiB):
            [torch.ones(size, dtype=torch.uint8) for size in sizes]
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.ones(20 * MiB, dtype=torch.uint8)


def fail(context: RankContext, error: type[Exception]) -> None:
    """Rank 1 fails within its budget."""
    with at_most(16 * MiB):
        if context.rank == 1:
            raise error("the network is down")


def too_much_on_one_rank(context: RankContext) -> None:
    """Rank 1 asks for too much while the others wait for a message."""
    with at_most(16 * MiB):
        if context.rank == 1:
            torch.empty(17 * MiB, dtype=torch.uint8)
        torch.distributed.barrier()


@linux
def test_the_limit_is_hard():
    assert not within(ask_for_too_much, 1)


@linux
def test_the_limit_counts_what_is_alive_and_ends():
    assert within(ask_again, 1)


@linux
@pytest.mark.slow
def test_one_rank_over_its_budget_ends_the_probe_at_once():
    assert not within(too_much_on_one_rank, 3)


@linux
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_another_failure_is_not_a_spent_budget(error):
    with pytest.raises(RuntimeError, match=f"{error.__name__}: the network is down"):
        within(fail, 2, error)


@given(threshold=st.integers(0, 10_000), guess=st.integers(1, 10_000))
def test_the_search_finds_the_threshold_from_any_guess(threshold, guess):
    asked = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= threshold

    assert longest(fits, guess) == threshold
    assert len(set(asked)) == len(asked)  # no length is tried twice
    assert min(asked) >= 1


def test_the_search_asks_twice_when_the_guess_is_right():
    asked = []
    assert longest(lambda n: asked.append(n) or n <= 111, 111) == 111
    assert asked == [111, 112]


@pytest.mark.parametrize(
    ("method", "chunk", "expected"),
    [
        ("naive", 256, 3 * MiB // 4 + 6 * MiB // 16),  # three squares of 256 KiB, six times 64 KiB
        ("blockwise", 4096, 9 * MiB + MiB // 64 + MiB),  # chunks of 1 MiB, an lse is a 64th, the kernel's tiles 1 MiB
        ("ring", 4096, 18 * MiB + MiB // 32 + MiB),
    ],
)
def test_counted_bytes(method, chunk, expected):
    assert counted(method, chunk, heads=1, head_dim=64) == expected


@linux
@pytest.mark.slow
def test_bench_runs(tmp_path):
    results = max_context.measure([2], budget=12 * MiB, heads=4, head_dim=64, folder=tmp_path)
    for row in results["rows"]:
        probes = dict(row["probes"])
        assert probes[row["chunk"]]
        assert not probes[row["chunk"] + results["grain"]]
        assert abs(row["chunk"] - row["counted_chunk"]) <= 0.1 * row["counted_chunk"], row
    assert max_context.lengths(results, "naive")[0] < max_context.lengths(results, "blockwise")[0]
    assert list(tmp_path.iterdir()) == []
    assert "| ring | 2 |" in max_context.table(results)


def checked(context: RankContext, wrong: str | None) -> None:
    """The check of a ring whose result `wrong` is off by a thousandth on the last rank."""
    inputs = [torch.randn(1, 2, 32, 16, generator=torch.Generator().manual_seed(context.rank)) for _ in range(4)]
    results = dict(zip(("out", "dq", "dk", "dv"), with_gradients(ring_flash_attention, *inputs), strict=True))
    if wrong and context.rank == context.world_size - 1:
        results[wrong] = results[wrong] * 1.001 + 1e-4
    max_context.check(*inputs, *results.values())


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_wrong_numbers_are_found_on_every_rank(name, ranks):
    assert ranks(3, checked, None) == [None] * 3
    for raised in ranks.outcomes(3, checked, name):
        assert raised.kind == "RuntimeError"
        assert raised.message.startswith(f"{name} is wrong: off by")


def wrong_step(context: RankContext) -> None:
    """A step whose output is off by a thousandth."""
    right = max_context.with_gradients

    def off(*args: object) -> list[torch.Tensor]:
        out, *gradients = right(*args)
        return [1.001 * out, *gradients]

    with mock.patch.object(max_context, "with_gradients", off):
        max_context.training_step(context, "ring", 32, 16 * MiB, 2, 16)


@linux
def test_a_wrong_step_does_not_count_as_a_length_that_fits():
    with pytest.raises(RuntimeError, match="out is wrong: off by"):
        within(wrong_step, 1)


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_nothing_is_measured_where_the_limit_does_not_hold(platform, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(max_context, "within", lambda *args: True)  # as under a kernel that ignores the limit
    monkeypatch.setattr(max_context, "measure", None)  # calling it would fail
    assert max_context.main() == 0
    assert capsys.readouterr().out.startswith("nothing measured: ")


def test_committed_context_is_linear_in_the_number_of_devices():
    results = record.load("max_context")
    assert results["worlds"] == [1, 2, 4, 8]
    resolution = results["grain"] / max_context.lengths(results, "ring")[0]
    assert resolution < 0.01
    assert all(abs(share - 1) <= resolution for share in max_context.linear(results))
    for method in max_context.METHODS:
        both = (max_context.lengths(results, method, of) for of in ("chunk", "counted_chunk"))
        assert all(abs(seen / modelled - 1) < 0.025 for seen, modelled in zip(*both, strict=True))
