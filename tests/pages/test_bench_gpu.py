"""The GPU bench without a GPU: what it computes on, when it reads clocks, what it divides by, what it calls wrong."""

import math
import re
import time
from dataclasses import replace
from itertools import cycle
from unittest import mock

import pytest
import torch

from bench import gpu, peers, record
from ringlab.ring import flash_ring
from ringlab.ring.fused_block import fused_backward
from ringlab.support.processes import LostRank, RankContext

SMALL = replace(gpu.ON["cpu"], head_dims=(8,), dtypes=("float32",))


def test_without_a_gpu_nothing_is_claimed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out.startswith("no CUDA GPU here: nothing measured, nothing claimed")


def test_parts_run_on_the_ranks_of_the_device_and_a_failure_ends_no_other(monkeypatch, capsys):
    made, called = set(), []
    answers = {"kernels": [("D 8", False, "off")], "memory": LostRank("rank 1 died", {}), "ring": ValueError("x")}
    answers["overlap"] = LostRank("no answer", {}, [2])

    class Pool:
        """Stands for `Ranks`: notes how it was made and called, and answers as the test says."""

        def __init__(self, size, seconds, device):
            made.add((size, device))

        def __call__(self, world_size, work, part, sizes):
            called.append((world_size, part))
            assert work is gpu.rows_of_rank
            assert 0 < self.seconds <= gpu.SECONDS
            if isinstance(answer := answers.get(part, [("it", True, "fine")]), BaseException):
                raise answer
            return [answer, "of another rank"]

        def stop(self):
            called.append("stop")

    monkeypatch.setattr(gpu, "Ranks", Pool)
    found = list(gpu.examined("cuda", 3, SMALL))
    assert made == {(1, "cuda"), (3, "cuda")}
    parts = {1: ("kernels", "ring", "model"), 3: ("memory", "overlap")}
    in_order = [(ranks, part) for ranks in parts for part in parts[ranks]]
    assert called == [*in_order, (1, "machine"), "stop", "stop"]
    assert [part for part, (_, right, _) in found if right is False] == ["kernels", "ring", "memory"]
    printed = capsys.readouterr().out
    assert "WRONG memory: all of it: it failed: rank 1 died" in printed
    assert "LATE  overlap: all of it: not done in time: no answer" in printed
    monkeypatch.setattr(gpu, "SECONDS", -1.0)
    late = {row[1:] for _, row in gpu.examined("cuda", 3, SMALL)}
    assert late == {(None, "not done in time: not begun, because -1 s are over")}


class Seen(Exception):
    """Raised where a part begins to compute, with the device of what it was given."""


def shows_device(*given, **options):
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    raise Seen(tensors[0].device.type if tensors else given[0].device.type)


COMPUTES = {  # what each part computes with; for the model, the model
    "kernels": "bench.gpu.exact_attention",
    "ring": "bench.gpu.with_gradients",
    "model": "bench.gpu.deepcopy",
    "memory": "bench.gpu.ring_flash_attention",
    "overlap": "bench.gpu.arriving_blocks",
}


@pytest.mark.parametrize("part", COMPUTES)
def test_each_part_computes_on_the_device_of_its_rank(monkeypatch, alone, part):
    """A device without numbers: what stays on the CPU is seen."""
    there = replace(alone, device=torch.device("meta"))
    monkeypatch.setattr(gpu, "typical", lambda context, work: work() if part != "model" else 1.0)
    monkeypatch.setattr(gpu, "peak", lambda context, work: work() if part != "model" else 1)
    if part == "model":
        pytest.importorskip("transformers")
        monkeypatch.setattr(COMPUTES[part], lambda model: shows_device(next(model.parameters())))
    elif part == "overlap":
        monkeypatch.setattr(gpu, "with_gradients", lambda attention, *x: [each.device for each in x])
        monkeypatch.setattr(gpu, "typical", lambda context, work: shows_work(work))
        assert gpu.measured_ring(there, SMALL)["ring"] == "meta"
        return
    else:
        monkeypatch.setattr(COMPUTES[part], shows_device)
    with pytest.raises(Seen, match="meta"):
        list(gpu.PARTS[part](there, SMALL))


def shows_work(work):
    """The device of what is timed."""
    found = work()
    return found[0].type if found else None


@pytest.mark.parametrize("timer", ["bench.gpu", "record.in_turn"])
def test_a_clock_is_read_when_the_device_is_done(monkeypatch, alone, timer):
    """Work is launched at once; its seconds pass when somebody waits for the device."""
    clock, queued = [0.0], []

    def wait():
        clock[0] += sum(queued)
        queued.clear()

    stream = mock.Mock(synchronize=wait)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(record, "PAUSE", 0.0)
    there = replace(alone, device=torch.device("cuda"))
    if timer == "bench.gpu":
        assert gpu.typical(there, lambda: queued.append(0.01)) == pytest.approx(0.01)  # of one call of three
    else:
        assert record.in_turn(there, {"it": (False, lambda: queued.append(2.0))}, 3)[0] == {"it": [2.0] * 3}


def test_a_speed_is_divided_by_the_ranks(monkeypatch):
    """Two ranks that are as fast as one together: half of twice. And half of the messages' time is hidden."""
    seen = {"one device": 8.0, "ring": 8.0, "computing": 6.0, "messages": 4.0}
    monkeypatch.setattr(gpu, "measured_ring", lambda context, sizes: seen)
    [(what, _, says)] = gpu.overlap(RankContext(0, 2, torch.device("cpu"), ""), SMALL)
    assert what == "the ring on 2"
    assert says.startswith("50% of the messages' time is hidden; 0.50 of 2 times SDPA; one device")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    [(_, _, says)] = gpu.overlap(RankContext(0, 2, torch.device("cuda"), ""), SMALL)
    assert says.startswith("not measured: ranks that share a GPU")


def told_of(rows):
    """Whether it is right and what is said, without how far it is from SDPA's results."""
    return {(right, re.sub(r"[\d.]+e-\d\d from", "off", says)) for _, right, says in rows}


def test_a_ring_in_turn_is_beside_sdpa_and_pytorchs_loop(monkeypatch, alone):
    """By their seconds: SDPA 3, ours 4, PyTorch's loop 6; and where the loop fails, the line says so."""
    seconds = {"with_gradients": 3.0, "ring_in_turn": 4.0, "loop_in_turn": 6.0}

    def typical(context, work):
        work()  # it runs
        return seconds[work.func.__name__]

    monkeypatch.setattr(gpu, "typical", typical)
    assert told_of(gpu.ring(alone, SMALL)) == {(True, "0.750 of SDPA's speed, off its results; PyTorch's loop 0.500")}
    monkeypatch.setattr(peers, "KERNELS", {})
    [(right, says)] = told_of(gpu.ring(alone, SMALL))
    assert (right, says.partition("; ")[2]) == (True, "PyTorch's loop fails: KeyError")


@pytest.mark.parametrize(("name", "preset"), [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L40S", "l40s"), ("X", "")])
def test_the_preset_beside_a_machine_is_that_of_its_gpu(monkeypatch, name, preset):
    """4 heads of 8 numbers, 48² pairs, in 2 s: two products forward, five backward; a copy reads and writes q."""
    inputs = gpu.random_inputs
    monkeypatch.setattr(gpu, "random_inputs", lambda device, *sizes: inputs("cpu", *sizes))
    monkeypatch.setattr(gpu, "typical", lambda context, work: work() is not None and 2.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    rows = list(gpu.machine(RankContext(0, 1, torch.device("cuda"), ""), gpu.ON["cpu"]))
    measured, told = zip(*(says.partition("; the preset has ")[::2] for _, _, says in rows), strict=True)
    pairs, numbers = 4 * 48 * 48, 4 * 48 * 8
    assert measured == tuple(f"{each / 2:.3g}" for each in (2 * 2 * pairs * 8, 5 * 2 * pairs * 8, 2 * 2 * numbers))
    known = gpu.GPUS.get(preset)
    rates = (*known.rates(known.kernel, 8), known.memory_bandwidth) if known else ()
    assert told == (tuple(f"{each:.3g}" for each in rates) or ("",) * 3)


@pytest.mark.parametrize("kernel", ["cuda flash", "cuda cudnn"])
def test_pytorchs_loop_fits_the_kernels_of_gpus(monkeypatch, alone, kernel):
    """On meta tensors, which compute shapes."""
    monkeypatch.setattr(peers, "choose_kernel", lambda *given, causal: (kernel, ""))
    chunks = [torch.empty(4, 1, 2, 64, 64, dtype=torch.bfloat16, device="meta").unbind() for _ in range(3)]
    gpu.loop_in_turn(chunks)


# What is wrong is called wrong ----------------------------------------------------------------------------------------


def swapped(*given, **options):
    d_q, d_k, d_v = gpu_backward(*given, **options)
    return d_q, d_v, d_k


def sees_the_blind(q, k, v, out, lse, d_out, **options):
    """A kernel for which a row without keys has a weight."""
    return gpu_backward(q, k, v, out, lse.masked_fill(lse == -torch.inf, 0.0), d_out, **options)


gpu_backward, apart = gpu.fused_backward, gpu.apart


@pytest.mark.parametrize("mistake", [None, swapped, sees_the_blind])
def test_a_wrong_kernel_is_seen(monkeypatch, alone, mistake):
    monkeypatch.setattr(gpu, "fused_backward", mistake or gpu_backward)
    [(what, right, says)] = gpu.kernels(alone, SMALL)
    assert (what, right) == ("float32, cpu flash", mistake is None)
    assert re.match(rf"{len(gpu.SHAPES)} blocks, errors up to", says)
    assert ("WRONG: D 8, " in says) == (mistake is not None)


def half_of_dk(*given, **options):
    d_q, d_k, d_v = fused_backward(*given, **options)
    return d_q, d_k / 2, d_v


@pytest.mark.parametrize("part", ["ring", "model"])
def test_wrong_gradients_of_a_ring_are_seen(monkeypatch, alone, part):
    """Those of k. The loss of a model that was never trained would be the same without any attention."""
    if part == "model":
        pytest.importorskip("transformers")
    monkeypatch.setattr(gpu, "typical", mock.Mock(side_effect=cycle([2.0, 5.0])))  # sdpa's, and the ring's
    monkeypatch.setattr(gpu, "peak", mock.Mock(side_effect=cycle([2**30, 3 * 2**30])))
    told = [*gpu.PARTS[part](alone, SMALL)]
    assert {right for _, right, _ in told} == {True}
    assert part == "ring" or told[0][2].startswith("2.500 times as long as sdpa; peak 3.00 GiB, sdpa 1.00; ")
    most, sdpa = (2**-6, []) if part == "ring" else (2.0, [1.0])  # twice as far as sdpa is
    for off, right in ((most, True), (1.001 * most, False), (math.nan, False)):
        monkeypatch.setattr(gpu, "apart", mock.Mock(side_effect=[*sdpa, off] * 2))
        assert {right for _, right, _ in gpu.PARTS[part](alone, SMALL)} == {right}
    monkeypatch.setattr(gpu, "apart", apart)
    monkeypatch.setattr(flash_ring, "fused_backward", half_of_dk)
    assert {right for _, right, _ in gpu.PARTS[part](alone, SMALL)} == {False}


def test_nan_is_not_close():
    assert gpu.apart([torch.ones(3), torch.tensor([1.0, torch.nan])], [torch.ones(3), torch.ones(2)]) == torch.inf


# The whole command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "status", "words", "gpus", "ranks"),
    [(True, 0, [], 1, 3), (False, 1, [], 5, 5), (None, 1, ["--ranks", "2"], 8, 2)],
)
def test_what_is_wrong_or_late_is_told_by_the_status(monkeypatch, right, status, words, gpus, ranks):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    examined = mock.Mock(return_value=[("machine", ("it", True, "")), ("overlap", ("hops", right, ""))])
    monkeypatch.setattr(gpu, "examined", examined)
    assert gpu.main(words) == status
    assert examined.call_args.args == ("cuda", ranks, gpu.ON["cuda"])
    with pytest.raises(SystemExit):  # one rank is no ring
        gpu.main(["--ranks", "1"])
