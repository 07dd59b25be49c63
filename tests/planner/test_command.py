"""ring-plan: what fits, what is fastest, what to change first; its options and its refusals."""

import contextlib
import io
import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest

from ring_planner import command, memory
from ring_planner.hidden_communication import AttentionLayer
from ring_planner.machine import MAKE, write_machine
from ring_planner.memory import CONTEXT, RESERVE, step_bytes
from ring_planner.plan import ERRORS, Plan, Wish, best, candidates, changes, gains, longest
from ring_planner.presets import GPU, GPUS, MODELS, Model, gpu_named, model_named
from ring_planner.step import Step, collective_seconds, step_seconds
from ring_planner.ways import Cluster, traffic
from tests.commands import ROOT

HOST = Step(model_named("llama-3.1-8b"), gpu_named("h100"), 1, 8, 32768, eager=False)
FREE = Wish()
LLAMA = "--model llama-3.1-8b --gpu h100 --hosts 1 --seq-len 131072"


@cache
def plan(words):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert command.main(words.split()) == 0
    return printed.getvalue()


def refused(words):
    with contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(SystemExit) as end:
        command.main(words.split())
    assert end.value.code == 2
    (line,) = printed.getvalue().splitlines()
    return line


def test_every_way_to_share_a_host_is_tried():
    tried = [(each.step.cp, each.step.tp, each.step.recompute) for each in candidates(HOST, FREE)]
    pairs = [(cp, tp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if cp * tp <= 8]
    assert set(tried) == {(cp, tp, again) for cp, tp in pairs for again in ("none", "selective", "full")}
    ways = {(each.step.way, each.step.split) for each in candidates(HOST, Wish(cp=8, tp=1, recompute="full"))}
    assert ways == {("ring", None), ("all-gather", None), ("all-to-all", None), ("hybrid", 2), ("hybrid", 4)}
    two = candidates(replace(HOST, hosts=2), Wish(cp=16, tp=1, recompute="full"))
    assert ("double ring", None) in {(each.step.way, each.step.split) for each in two}
    assert {each.step.tp for each in candidates(HOST, Wish(cp=2))} == {1, 2, 4}


def test_the_best_fits_and_none_that_fits_is_faster():
    ranked, everything = best(HOST, FREE), list(candidates(HOST, FREE))
    assert all((1 + RESERVE) * sum(step_bytes(each.step).values()) + CONTEXT <= HOST.gpu.memory for each in ranked)
    fastest = max(each.step.tokens / sum(step_seconds(each.step).values()) for each in everything if each.fits)
    assert ranked[0].speed == fastest
    S = longest(HOST, FREE)
    assert S % 1024 == 0
    assert best(replace(HOST, seq_len=S), FREE)
    assert not best(replace(HOST, seq_len=S + 1024), FREE)
    for of_loss, peak in ((1e9, "a layer at work"), (3e9, "loss")):  # beside a layer 0.9 GB more are gathered
        with mock.patch.multiple(memory, loss_bytes=lambda _, size=of_loss: size, layer_at_work=lambda _: 0.7e9):
            assert peak in step_bytes(HOST)


def test_a_change_is_asked_and_its_gain_is_the_planners():
    ranked = gains(HOST, FREE)
    assert {name for _, name, _ in ranked} == set(changes(HOST))
    by_hand = best(replace(HOST, linear_dtype="fp8"), FREE)[0].speed / best(HOST, FREE)[0].speed
    assert dict((name, gain) for gain, name, _ in ranked)["FP8 products"] == by_hand > 1.05
    machine = Cluster(1, 8, 1e12, 4e11, 1e10, memory_bandwidth=1e12)
    assert changes(replace(HOST, hosts=2, machine=machine))["NICs twice as fast"].machine.host_bandwidth == 2e10


def test_a_prefill_by_hand():
    """2 of 4 experts, h = 8, 2 heads of 4 on 1, F = 6, 3 layers; 64 tokens on cp 2 x tp 2: a group has 32 rows."""
    model = Model("tiny", "", 3, 8, 2, 1, 6, 10, experts=4, active=2)
    step = Step(model, HOST.gpu, 1, 4, 64, cp=2, tp=2, way="ring", task="prefill", eager=False)
    attention, experts, router = 8 * (2 * 2 + 2 * 1) * 4, 2 * 3 * 8 * 6, 8 * 4
    seconds, rows = step_seconds(step), 32
    assert seconds["products"] == pytest.approx(3 * 2 * rows / 2 * (attention + experts + router) / (0.65 * 989e12))
    inside = 2 * (2 + 1) * 4 + 3 * 2 * 6  # rotary of q and k; silu of two experts: shared by tp, the rest is not
    assert seconds["passes"] == pytest.approx(3 * 2 * rows * (9 * 8 + inside / 2) / (0.81 * 3.35e12))
    assert step_seconds(replace(step, eager=True))["passes"] == pytest.approx(3.2 * seconds["passes"])
    # two all-reduces in a layer: each gathers and scatters half of all rows of h numbers, from link to link
    hop = 2 * rows * 8 / 2 / (0.8 * 450e9) + 5e-6
    assert seconds["tensor parallel"] == pytest.approx(3 * 2 * 2 * hop)


AGAIN = {"none": 0, "selective": 0.5, "full": 1}  # the share of its products that a layer computes once more


@pytest.mark.parametrize("recompute", AGAIN)
def test_what_fsdp_exposes_by_hand(recompute):
    """h = 8, 3 layers of 352 weights, 336 of them in products of 64 tokens, 100 s; 4 GPUs, 1 byte a second.

    3/4 of a layer's weights in 2 bytes arrive in 528 s, their gradients leave in 4 bytes, in 1056 s. The forward pass
    hides 100 s of the first, the backward pass 200 to 300 s of both. The first gather has nothing beside it.
    """
    fast = (1e30, 1e30)
    gpu = GPU("tiny", "", {"bf16": 430.08}, {"fa2": fast}, 1e9, math.inf, 1.0, 0.25, 0, 1.0, 1.0)
    step = Step(Model("tiny", "", 3, 8, 2, 1, 6, 10), gpu, 1, 4, 64, recompute=recompute)
    hidden = 100 * (2 + AGAIN[recompute])
    assert step_seconds(step)["FSDP"] == pytest.approx(528 + 3 * (528 - 100 + 528 + 1056 - hidden))
    assert step_seconds(replace(step, trainable=0.5))["FSDP"] == pytest.approx(
        528 + 3 * (528 - 100 + 528 + 528 - hidden + 50)
    )
    for card, gather in ((0.25, 1056), (4.0, 528)):  # of two hosts the cards may be the slowest wire, or the links
        two = step_seconds(replace(step, gpu=replace(gpu, card=card), hosts=2, per_host=2))
        assert two["FSDP"] == pytest.approx(gather + 3 * (gather - 100 + 3 * gather - hidden))
    # tp = 2, 4 tokens, 3.125 s: the messages of tp hide 128 s more in each pass, and where all is computed again twice
    of_tp = step_seconds(replace(step, tp=2, seq_len=4))["FSDP"]
    hidden = hidden / 32 + 128 * (1 + (recompute == "full"))
    assert of_tp == pytest.approx(176 + 3 * (176 - 3.125 - 128 + 528 - hidden))


IDEAL = GPU("ideal", "", {"bf16": 1e3}, {"fa2": (64.0, 40.0)}, 1e9, math.inf, 64.0, 4.0, 0, 1.0, 1.0)
TINY = Model("tiny", "", 3, 8, 2, 1, 6, 10)  # h = 8, 2 heads of 4 on 1, F = 6, a vocabulary of 10


def test_a_step_by_hand():
    """3 sequences of 1,024 tokens on cp 2 x tp 2: a GPU has 512 · 3 of them for one head of 4, and 768 rows."""
    step = Step(TINY, IDEAL, 1, 4, 1024, batch=3, cp=2, tp=2, way="ring", optimizer="none")
    seconds, rows = step_seconds(step), 768
    weights = 8 * (2 * 2 + 2 * 1) * 4 + 3 * 8 * 6
    assert seconds["products"] == pytest.approx(3 * (3 + 1) * 2 * rows * weights / 1e3)
    assert seconds["head"] == pytest.approx(3 * 2 * rows * 8 * 10 / 1e3)
    pairs = 512 * (512 + 128) / 2 + 512 * 256  # of the causal call, and of half of the other block
    kv, sums = 2 * 512 * 4 * 2 / 64, 2 * 512 * 4 * 4 / 64  # seconds of a hop, less than computing
    assert 3 * max(kv, sums) < 3 * 4 * 4 * 512 * 256 / 64
    forward, backward = 3 * 4 * 4 * pairs / 64, 3 * (10 * 4 * pairs / 40 + kv)  # nothing hides the first hop
    assert seconds["attention"] == pytest.approx(3 * (2 * forward + backward))
    # an exchange of the layer's rows: gather and scatter, for attention and the feedforward; forward, again, backward
    assert seconds["tensor parallel"] == pytest.approx(3 * 3 * 4 * 2 * 2 * rows * 8 / 2 / 64)
    assert step_seconds(replace(step, batch=1))["attention"] == pytest.approx(seconds["attention"] / 3)
    model_flops = 3 * 2 * (3 * weights + 8 * 10) + 3 * 3 * 4 * 512 * 8  # half of 1,024 keys, on average
    used = Plan(step).utilisation * 1e3
    assert used == pytest.approx(rows / sum(seconds.values()) * model_flops)


def test_collectives_by_hand():
    """Seconds of 96 bytes among 6 ranks: 80 travel. Links of 64 bytes/s, cards of 4; latencies of 1 and 10 s."""
    machine = Cluster(2, 3, 1.0, 64.0, 4.0, latency=1.0, host_latency=10.0)
    step = replace(Step(TINY, IDEAL, 2, 3, 1024), machine=machine)
    for ranks, inside, seconds in (
        (1, 3, 0.0),
        (2, 3, 48 / 64 + 1),  # on one host: a step of a ring of 2
        (3, 3, 64 / 64 + 2),
        (6, 3, 80 / (3 * 4) + 4 + 10),  # each of 2 hosts sends through 3 cards: 2 steps in each, and one between
        (2, 1, 48 / 4 + 10),  # one rank of each host: nothing travels inside
    ):
        assert collective_seconds(step, 96.0, ranks, inside) == pytest.approx(seconds), (ranks, inside)


def test_what_lora_spares_by_hand():
    """The step by hand with a quarter of the parameters trained: the head and its moments, in the memory's time."""
    gpu = replace(IDEAL, memory_bandwidth=100 / 0.81)
    step = Step(TINY, gpu, 1, 4, 1024, batch=3, cp=2, tp=2, way="ring", optimizer="adam", eager=False)
    whole, few = step_seconds(step), step_seconds(replace(step, trainable=0.25))
    assert (whole["head"], few["head"]) == pytest.approx(
        [each * 768 * 80 / 700 for each in (6, 4.5)]
    )  # 0.7 of the peak
    assert whole["passes"] - few["passes"] == pytest.approx(0.75 * 40 * TINY.parameters() / 4 / 100)


def test_utilisation_of_lora_and_of_a_prefill_by_hand():
    """FLOPs of a token: 2 a weight, and 4 · 512 · 8 a layer of attention; three passes, 2.25 of the weights, or one."""
    step, weights, mixing = Step(TINY, IDEAL, 1, 4, 1024, batch=3, cp=2), TINY.matrices, 3 * 4 * 512 * 8
    for change, flops in (
        ({"trainable": 0.25}, 2 * 2.25 * (weights + 80) + 3 * mixing),
        ({"task": "prefill", "recompute": "none"}, 2 * weights + mixing),
    ):
        made = Plan(replace(step, **change))
        assert made.utilisation * 1e3 == pytest.approx(3 * 512 / made.seconds * flops)
        assert made.speed == pytest.approx(3 * 512 / made.seconds)
        assert made.merit == (made.speed if "trainable" in change else 1 / made.seconds)


def test_the_hops_of_a_step_by_hand():
    """cp 4 x tp 4 on 8 hosts of 2 GPUs: each hop of a ring of 4 hosts takes the NIC. Computing takes no time."""
    fast = replace(IDEAL, attention={"fa2": (1e30, 1e30)}, peak={"bf16": 1e30})
    step = Step(replace(TINY, heads=4, head_dim=2), fast, 8, 2, 1024, batch=3, cp=4, tp=4, way="ring", recompute="none")
    assert (step.ring.hosts, step.ring.per_host) == (4, 1)
    kv, sums = 3 * 2 * 256 * 2 * 2 / 4, 3 * 2 * 256 * 2 * 4 / 4
    assert step_seconds(step)["attention"] == pytest.approx(3 * (3 * kv + 3 * (kv + sums)))
    inside = replace(step, per_host=16, hosts=1)
    assert step_seconds(inside)["attention"] == pytest.approx(3 * (3 * kv + 3 * (kv + sums)) * 4 / 64)
    few = command.request_of(command.parser().parse_args(f"{LLAMA} --nics 2".split()))[0]
    assert few.gpu.card == gpu_named("h100").card * 2 / 8


def test_the_memory_of_a_step_by_hand():
    """The same step. At the loss there are no gradients yet; the first layer's work is beside all of them."""
    step = Step(TINY, IDEAL, 1, 4, 1024, batch=3, cp=2, tp=2, way="ring", optimizer="none")
    rows, layer, words = 768, 8 * 6 * 4 + 3 * 8 * 6 + 2 * 8 + 8 * 0, 2 * 10 * 8 + 8
    parameters = 3 * layer + words
    assert parameters == TINY.parameters()
    counted = step_bytes(step)
    gathered = 2 * (words + 8 * 10) / 2 + 2 * 3 * layer / 2  # outside, the head's gradient; two layers and a gradient
    attention = 3 * 512 * 4 * ((3 * 1 + 2 * 1 + 4 * 1 + 1 + 2 * 1) * 2 + (1 + 4 * 1) * 4)  # of 3 sequences, one head
    kept = (2 * 8 + 2 * 8 + 2 * 1 * 4 + 2 * 4 + 8 + 2) + (2 * 8 + 4 * 6) + 4 * 8  # n, q, k, v, cos, sin; F; float32
    work = 2 * rows * 3 * 2 * 8 + max(2 * rows * (kept + 3 * 6 + 8), 2 * rows * kept + attention)
    expected = {"state": 2 * parameters / 4, "gradients": 0, "gathered": gathered, "activations": 2 * rows * 3 * 8}
    assert counted == pytest.approx({**expected, "a layer at work": work})
    many = replace(step, model=replace(TINY, layers=10**5))
    assert step_bytes(many)["gradients"] == 0  # they would be 2 bytes a weight, but each layer keeps more
    few = replace(many, seq_len=8, batch=1)
    assert step_bytes(few)["gradients"] == 2 * few.model.parameters() / 4 > step_bytes(few)["activations"]
    one = replace(step, hosts=1, per_host=1, cp=1, tp=1)
    assert step_bytes(one)["gathered"] == 2 * (8 * 10 + layer)  # one GPU gathers nothing
    lora = replace(step, trainable=0.1, optimizer="adam", weights="4bit")
    gather = (
        step_seconds(replace(lora, cp=1, tp=1))["FSDP"],
        step_seconds(replace(lora, cp=1, tp=1, weights="bf16"))["FSDP"],
    )
    assert gather[0] < gather[1]
    states = 2 * words + 0.5625 * 3 * layer + 0.1 * 12 * parameters
    assert step_bytes(lora)["state"] == pytest.approx(states / 4)


HAND = Model("by hand", "", 16, 2048, 32, 8, 8192, 32000)


@pytest.mark.parametrize(("S", "seconds", "gib"), [(16384, 0.518, 10.21), (65536, 4.229, 34.48)])
def test_a_llama_on_one_h100(S, seconds, gib):
    """Measured by hand: torch 2.11, bf16, recomputation, no optimizer. use_ring asks for the kernel that ran here."""
    words = f"{LLAMA} --per-host 1 --seq-len {S} --optimizer none --recompute full"
    step = replace(command.request_of(command.parser().parse_args(words.split()))[0], model=HAND)
    assert step.kernels == "cudnn"
    assert sum(step_seconds(step).values()) == pytest.approx(seconds, rel=0.06)
    assert sum(step_bytes(step).values()) / 2**30 == pytest.approx(gib, rel=0.01)


def test_the_rings_of_a_measured_host_share_its_nics():
    """8 GPUs and 4 NICs of 1e10 bytes/s: one ring has them all, two or four have half the rate each; none has more."""
    machine = Cluster(2, 8, 1e12, 4e11, 1e10, 4, 1e12)
    for per_host, cp, tp, *right in ((8, 16, 1, 4, 1e10), (8, 8, 2, 4, 5e9), (8, 4, 4, 2, 5e9), (16, 32, 1, 4, 1e10)):
        ring = replace(HOST, hosts=2, per_host=per_host, cp=cp, tp=tp, machine=machine).ring
        assert [ring.devices, ring.nics, ring.host_bandwidth] == [cp, *right]


def test_ideal_numbers_are_a_gpu():
    words = "--gpu ideal --flops 990e12 --bandwidth 450e9 --memory 80e9 --hosts 1 --layers 32 --hidden 4096 --heads 32"
    printed = plan(f"{words} --kv-heads 8 --feedforward 14336 --vocab 128256 --seq-len 32768")
    assert "8.03 billion parameters" in printed
    assert "passes" not in printed.split("binds")[0].split("seconds  ")[1]


def test_an_interval_is_of_rows_like_the_question():
    assert "s, from 12 measured ones; such intervals hold for" in plan(LLAMA)
    assert "not known: no measured times" in plan(f"{LLAMA} --kernels best")
    answer, known = Plan(replace(HOST, kernels="framework")), json.loads(ERRORS.read_text())
    ours = known["step, framework, one host"]
    assert answer.interval == (ours["low"] * answer.seconds, ours["high"] * answer.seconds, 12)
    assert Plan(replace(HOST, kernels="framework", gpu=gpu_named("b200"))).interval is None  # of another chip
    assert Plan(replace(HOST, kernels="framework", per_host=16)).interval is None  # larger hosts than were measured
    short = "--model qwen3-0.6b --gpu l40s --per-host 2 --seq-len 8192 --task prefill"
    assert "not known: a layer is so short that GPUs wait for their hosts" in plan(short)


def test_only_a_framework_is_not_ours():
    for kernels, own in (("framework", False), ("best", True), ("cudnn", True)):
        options = command.parser().parse_args([*LLAMA.split(), "--kernels", kernels])
        step, _ = command.request_of(options)
        assert (step.ours, step.eager) == (own, own)


def test_a_tie_is_called_one():
    """The first three are within 2 %: the advice is the fastest, and the simplest of them."""
    one, two, three, four = (
        Plan(replace(HOST, cp=8, seq_len=S, way=way, split=split))
        for S, way, split in (
            (32768, "hybrid", 2),
            (32768, "all-to-all", None),
            (32768, "ring", None),
            (8192, "ring", None),
        )
    )
    for each, seconds in ((one, 1.0), (two, 1.01), (three, 1.019), (four, 1.0)):
        vars(each)["terms"] = {"attention": seconds * each.step.tokens}
    vars(four)["terms"] = {"attention": 1.03 * four.step.tokens}
    for ranked, *said in (
        ([one, two, three, four], "fastest: hybrid of 2, cp 8", "simplest of 3 within 2%: ring, cp 8"),
        ([one, two, four], "fastest: hybrid of 2, cp 8", "simplest of 2 within 2%: all-to-all, cp 8"),
        ([two, one], "fastest, and simplest of 2 within 2%: all-to-all, cp 8"),
        ([one, four], "fastest: hybrid of 2, cp 8"),
        ([],),
    ):
        told = command.advice(ranked)
        assert [line[: len(words)] for line, words in zip(told, said, strict=True)] == said
    assert told == []
    assert command.told(replace(one, step=replace(one.step, hosts=4, batch=3))).endswith("GiB, 12 sequences at once")
    assert "at once" not in command.told(one)


def test_a_sequence_is_padded_to_two_chunks_a_gpu():
    """72 GPUs and 1,048,576 tokens: cp 36 needs a multiple of 72."""
    rack = Step(HOST.model, gpu_named("gb200"), 1, 72, 2**20)
    tried = {each.step.cp: each for each in candidates(rack, Wish(tp=1, recompute="full"))}
    assert all(each.step.seq_len % (2 * cp) == 0 for cp, each in tried.items() if cp > 1)
    assert (tried[36].padded, tried[8].padded) == (32, 0)
    assert tried[36].name.endswith(", 32 tokens padded")


def test_sources_and_experts_are_told():
    words = "--model qwen3-30b-a3b --gpu h100 --seq-len 131072 --optimizer adam-bf16"
    assert "FSDP gathers all 128 of a layer; expert parallelism is not planned" in plan(words)
    assert gpu_named("h100").source in plan(f"{words} --sources")
    assert gpu_named("h100").source not in plan(words)


@pytest.mark.parametrize("words", [f"{LLAMA}", "--help"])
def test_a_closed_pipe_is_no_traceback(words):
    command = f"{sys.executable} -m ring_planner {words} | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""


REFUSED = {
    "--model llama-3.1-8b": "no --gpu was given; expected one of h100",
    "--gpu h100": "no --model was given, nor --layers",
    "--model llama-9 --gpu h100": "model is 'llama-9'; expected a config.json, its folder, or one of",
    f"{LLAMA} --cp 3": "cp x tp is 3 x 1; expected a divisor of 8 GPUs",
    f"{LLAMA} --tp 3": "tp is 3, GPUs of a host 8",
    f"{LLAMA} --nics 9": "nics is 9; expected 8 at most",
    f"{LLAMA} --seq-len 128K": "128K was given; type 131072; expected",
    f"{LLAMA} --host-bandwidth 400e9": "400e9 was given; expected 1e+06 to 2e+11: bytes/s of a NIC, one way, 50e9 for",
    f"{LLAMA} --weights 4bit": "trainable is 1.0 with weights in 4bit; expected",
    f"{LLAMA} --gpu a100 --kernels cudnn": "kernels is 'cudnn' on a100-80; expected one of fa2, framework, best",
    f"{LLAMA} --flops 990": "990 was given; expected 1e+09 to 1e+18",
    f"{LLAMA} --flops 2e15": "expected 9.89e+14 at most",
    f"{LLAMA} --linear-dtype fp4": "invalid choice: 'fp4'",
    f"{LLAMA} --loss pieces --task prefill": "loss is pieces for a prefill; expected --task train",
    f"{LLAMA} --trainable 2": "2 was given; expected 1e-06 to 1: share",
    "--model llama-3.1-8b --gpu h100 --hosts 9999": "expected 16,384 at most",
    "--model llama-3.1-8b --gpu a100 --linear-dtype fp8": "linear_dtype is 'fp8' on a100-80; expected one of bf16",
    "--model llama-3.1-8b --gpu ideal": "gpu is ideal without flops, bandwidth, memory",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_refusal_is_one_line(words):
    assert REFUSED[words] in refused(words)


VALUES = {  # most of them fit together; every option, and for each what it must refuse
    **{"hosts": (1, 1, 2, 3, 16, 0), "per-host": (1, 4, 8, 8, 1.5), "batch": (1, 3, "many"), "nics": (1, 4, 99)},
    **{"seq-len": (1, 8192, 131072, 1e6, 1e13), "cp": (1, 2, 4, 5), "tp": (1, 2, 8, 16), "heads": (3, 64, 2**20)},
    **{"kv-heads": (1, 8, 7), "vocab": (7, -7), "layers": (2, 0), "hidden": (64, 1e12), "feedforward": (96,)},
    **{"task": ("train", "prefill", "serve"), "loss": ("whole", "pieces"), "optimizer": ("adam", "none", "lion")},
    **{"recompute": ("none", "full"), "linear-dtype": ("bf16", "fp8", "fp4"), "trainable": (0.01, 2)},
    **{"weights": ("4bit", "2bit")},
    **{"kernels": ("best", "framework", "fa2", "cudnn", "torch"), "flops": (4e14, 990), "memory": (8e10, 3e9, 1e8)},
    **{"bandwidth": (5e9, "nan"), "host-bandwidth": (1e9, "inf"), "machine": ("MACHINE", "none.json")},
    **{"gpu": ("h9", ""), "model": ("none.json", "gpt-9"), "colour": ("red",)},
}


def any_options(pick):
    """Options at random: a model and a GPU that are known, some more, and one time in three one that is refused."""
    words = ["--model", pick.choice([*MODELS]), "--gpu", pick.choice([*GPUS, "ideal"])]
    for name in pick.sample(sorted(VALUES), pick.randint(1, 9)):
        words += [f"--{name}", str(pick.choice(VALUES[name][:1] if pick.random() < 0.7 else VALUES[name]))]
    return words[: len(words) - (pick.random() < 0.02)]  # the last one without its value


@pytest.mark.parametrize("seed", [pytest.param(range(80)), pytest.param(range(80, 2000), marks=pytest.mark.exhaustive)])
def test_no_options_end_in_a_traceback(seed, tmp_path):
    """Every set of options is answered, or refused in one line that says what was expected."""
    write_machine(tmp_path / "machine.json", Cluster(2, 4, 1e12, 4e11, 12.5e9, 2, 2e12, 1e-5, 2e-5, 8e11, 3e-6, 1.1))
    planned = 0
    for number in seed:
        words = [
            f"{tmp_path}/machine.json" if word == "MACHINE" else word for word in any_options(random.Random(number))
        ]
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                status = command.main(words)
            except SystemExit as end:
                status = end.code
        planned += status == 0
        lines = said.getvalue().splitlines()
        assert (status, len(lines)) in ((0, 0), (2, 1)), words
        assert ("advice" in printed.getvalue()) == (status == 0), words
        assert all("expected" in line or MAKE in line for line in lines), (words, lines)
    assert len(seed) / 8 < planned < 7 / 8 * len(seed)


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"--{name} " in printed for name in command.OPTIONS)


def test_the_command_needs_no_torch_and_no_scoreboard():
    script = "import sys, ring_planner.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "bench.scoreboard"} & {*done.stdout.split()}


WHICH_WAY = (ROOT / "docs/which_way.md").read_text()
SHOWN = {
    command: block
    for page in (WHICH_WAY, (ROOT / "docs/use.md").read_text())
    for command, block in re.findall(r"^\$ ring-plan (.*)\n([^`]*)```", page, re.MULTILINE)
}


@pytest.mark.parametrize("command", SHOWN)
def test_a_page_says_what_the_planner_says(command):
    """docs/which_way.md: five users, and what an expert would tell them."""
    said = plan(command).splitlines()
    for line in SHOWN[command].splitlines():
        assert line in ("...", *said)


def test_the_best_ring_is_always_shown():
    """It is not among the five fastest here."""
    said = plan("--model llama-3.1-8b --gpu h100 --hosts 1 --seq-len 131072").splitlines()
    rows = [line for line in said if line.startswith("    ") and ", cp " in line]
    assert ["  ring, cp" in row for row in rows] == [False] * 5 + [True]


RULE = {  # of docs/which_way.md, by the anchor of a case, its ways in bold: the simplest, and the fastest if another
    anchor: re.findall(r"\*\*(.*?)\*\*", said)
    for anchor, said in re.findall(r"^- \[.*?\]\(#(.*?)\)(.*?)(?=\n-|\n\n)", WHICH_WAY, re.M | re.S)
}
QUESTIONS = {
    re.sub(r"[^\w ]", "", heading.lower()).replace(" ", "-"): command
    for heading, command in re.findall(r"^## (.*)\n[^#]*?\$ ring-plan (.*)", WHICH_WAY, re.M)
}


def test_every_question_is_in_the_rule():
    assert QUESTIONS.keys() == RULE.keys()
    assert len(RULE) == 6


@pytest.mark.parametrize("anchor", RULE)
def test_the_rule_is_what_the_planner_says(anchor):
    """Of 16 hosts with many NICs and with one, and of many sequences as of one."""
    many = anchor == "16-hosts-of-8"
    for change in ("", " --nics 1")[: 1 + many]:
        of_all, *of_one = re.split("one sequence on all ", plan(QUESTIONS[anchor] + change).partition("\nadvice ")[2])
        for said in (of_all, *of_one[:many]):
            lines = said.splitlines()
            for line, way in ((lines[0], RULE[anchor][-1]), (lines[-1], RULE[anchor][0])):
                assert set(way.split(", ")) <= set(re.split(", |: ", line)), (line, way)


def test_how_far_a_ring_is_behind_on_one_host():
    rows = re.findall(r"(\S+) +\S+  (\S+), cp 8, tp 1, recompute full\n", plan(f"{LLAMA} --cp 8 --tp 1"))
    seconds = {way: float(s) for s, way in rows}
    longer = f"{100 * (seconds['ring'] / seconds['all-gather'] - 1):.1f} %"
    assert f"A step with a ring of 8 takes {longer} longer" in WHICH_WAY.replace("\n", " ")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "P"), [(32, 8, 4), (32, 8, 8), (8, 8, 2), (8, 8, 4), (64, 8, 8), (64, 8, 16)]
)
def test_who_sends_the_fewest_bytes(heads, kv_heads, P):
    assert "An exchange sends the fewest if P is above H/G + 1" in WHICH_WAY
    host, layer = Cluster(1, P, 1e15, 1e11), AttentionLayer(heads, kv_heads, 128)
    exchange, ring = (traffic(way, layer, 1024, host)[0] for way in ("all-to-all", "ring"))
    assert (exchange < ring) == (heads / kv_heads + 1 < P)


@pytest.mark.parametrize("nics", [8, 1])
def test_the_seconds_of_16_hosts(nics):
    """One sequence of a million tokens on all of them, as in chapter 18."""
    one = plan(f"{QUESTIONS['16-hosts-of-8']} --nics {nics}").partition("one sequence on all ")[2]
    fastest, simplest = re.findall(r"tokens/s a GPU, (\S+) s,", one)
    assert nics > 1 or f"one sequence takes {fastest} or {simplest} s" in WHICH_WAY
    assert f"{fastest} s" in (ROOT / "notebooks/source/18_two_speeds_of_wire.py").read_text()
