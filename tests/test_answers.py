"""The answers of a plan: the fastest that fits, what fits at all, what binds, what to change first; and its picture."""

import contextlib
import io
import math
import re
from dataclasses import replace

import pytest

from ringlab.planning import answers, cost_model
from ringlab.planning.answers import CONTEXT, Answer, Wish, best, candidates, changes, gains, longest
from ringlab.planning.presets import GIB, gpu_named, model_named
from ringlab.planning.scoreboard import interval
from ringlab.planning.ways import Cluster
from ringlab.planning.whole_step import Step, published, step_bytes, step_of, step_seconds

HOST = Step(model_named("llama-3.1-8b"), gpu_named("h100"), 1, 8, 32768)
FREE = Wish()
TITAN = "--model llama-3.1-8b --gpu h100-500w --hosts 1 --seq-len 32768 --recompute full --linear-dtype fp8"


def plan(words):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cost_model.main(words.split()) == 0
    return printed.getvalue()


def test_every_way_to_share_a_host_is_tried():
    tried = [(each.step.cp, each.step.tp, each.step.recompute) for each in candidates(HOST, FREE)]
    pairs = [(cp, tp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if cp * tp <= 8]
    assert set(tried) == {(cp, tp, again) for cp, tp in pairs for again in ("none", "selective", "full")}
    ways = {(each.step.way, each.step.split) for each in candidates(HOST, Wish(cp=8, tp=1, recompute="full"))}
    assert ways == {("ring", None), ("all-gather", None), ("all-to-all", None), ("hybrid", 2), ("hybrid", 4)}
    two = candidates(replace(HOST, hosts=2), Wish(cp=16, tp=1, recompute="full"))
    assert ("double ring", None) in {(each.step.way, each.step.split) for each in two}


def test_the_best_fits_and_none_that_fits_is_faster():
    ranked, everything = best(HOST, FREE), list(candidates(HOST, FREE))
    assert all(sum(step_bytes(each.step).values()) + CONTEXT <= HOST.gpu.memory for each in ranked)
    assert any(not each.fits for each in everything)
    fastest = max(each.step.tokens / sum(step_seconds(each.step).values()) for each in everything if each.fits)
    assert ranked[0].speed == fastest
    assert [each.speed for each in ranked] == sorted((each.speed for each in ranked), reverse=True)


def test_the_longest_context_fits_and_the_next_does_not():
    S = longest(HOST, FREE)
    assert S % 1024 == 0
    assert best(replace(HOST, seq_len=S), FREE)
    assert not best(replace(HOST, seq_len=S + 1024), FREE)
    assert longest(replace(HOST, model=model_named("llama-3.1-405b")), FREE) == 0


def test_eight_gpus_that_were_full_are_full():
    """torchtitan: 83.9 GiB of 95 with 32,768 tokens on each GPU. A plan without logits said 22.5 GB."""
    titan = step_of(published("steps")[0])
    alone = Wish(cp=1, tp=1, recompute="full")
    assert 75.5 < sum(step_bytes(titan).values()) / GIB < 92.3
    assert best(titan, alone)
    assert not best(replace(titan, seq_len=2 * titan.seq_len), alone)
    assert not best(replace(titan, gpu=gpu_named("h100")), alone)  # 79 GiB
    assert longest(titan, alone) < 36 * 1024
    printed = plan(f"{TITAN} --cp 1 --tp 1")
    (parts,) = re.findall(r"^GiB of a GPU +(.*)$", printed, re.MULTILINE)
    each = dict(re.findall(r"([A-Za-z ]+?) ([\d.]+)(?:, |$)", parts))
    assert float(each["loss"]) > 50  # of 128,256 words
    assert sum(map(float, each.values())) == pytest.approx(83.9 + 1.5, rel=0.1)
    assert printed.endswith("no ring, cp 1, tp 1, recompute full: " + printed.split("recompute full: ")[-1])


def test_a_change_is_asked_and_its_gain_is_the_planners():
    ranked = gains(HOST, FREE)
    assert [gain for gain, _, _ in ranked] == sorted((gain for gain, _, _ in ranked), reverse=True)
    assert {name for _, name, _ in ranked} == set(changes(HOST))
    now = best(HOST, FREE)[0].speed
    by_hand = max(best(replace(HOST, linear_dtype="fp8"), FREE), key=lambda each: each.speed).speed / now
    assert dict((name, gain) for gain, name, _ in ranked)["FP8 products"] == by_hand > 1.05
    assert "NICs twice as fast" in changes(replace(HOST, hosts=2))
    assert "NICs twice as fast" not in changes(HOST)
    assert "FP8 products" not in changes(replace(HOST, gpu=gpu_named("a100")))
    assert "FP8 products" not in changes(replace(HOST, linear_dtype="fp8"))
    machine = Cluster(1, 8, 1e12, 4e11, 1e10, memory_bandwidth=1e12)
    faster = changes(replace(HOST, hosts=2, machine=machine))
    for name, of_gpu, measured in (
        ("links inside a host", "link", "bandwidth"),
        ("memory", "memory_bandwidth", "memory_bandwidth"),
        ("NICs", "card", "host_bandwidth"),
    ):
        step = faster[f"{name} twice as fast"]
        assert getattr(step.gpu, of_gpu) == 2 * getattr(HOST.gpu, of_gpu)
        assert step.machine == replace(machine, **{measured: 2 * getattr(machine, measured)})


def test_a_tie_is_said():
    """A sequence of a token: what is computed again takes no time."""
    last = plan("--model llama-3.1-8b --gpu h100 --hosts 1 --seq-len 1").splitlines()[-1]
    assert last.startswith("advice                no ring, cp 1, tp 1, recompute none: ")
    assert last.endswith("GiB (2 more nearly as fast: within 2%)")


def test_utilisation_by_hand():
    """6 FLOPs for each weight and token, and three times the forward pass of half of the pairs: 2 · S · h."""
    answer = Answer(replace(HOST, recompute="none"))
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    of_a_token = 6 * weights + 32 * 3 * 2 * 32768 * 4096
    assert answer.utilisation == pytest.approx(answer.speed * of_a_token / 989e12)


def test_what_is_printed():
    printed = plan("--model llama-3.1-8b --gpu h100 --hosts 1 --seq-len 32768")
    first = best(HOST, FREE)[0]
    assert printed.splitlines()[0] == "llama-3.1-8b: 8.03 billion parameters; modelled, not measured"
    assert printed.splitlines()[1].startswith("1 x 8 h100 of 79.1 GiB; NVIDIA data sheet")
    assert f"longest context       {longest(HOST, FREE):,} tokens\n" in printed
    assert len(re.findall(r"^ +[\d,]+ +[\d.]+ +[\d.]+  \S.*recompute", printed, re.MULTILINE)) == answers.SHOWN
    term, seconds = max(first.terms.items(), key=lambda each: each[1])
    assert f"binds                 {term}, {seconds / first.seconds:.0%} of the step\n" in printed
    low, high = interval(first.seconds)
    assert f"interval              {low:.3g} to {high:.3g} s" in printed
    gain, name, _ = gains(HOST, FREE)[0]
    assert f"with {name:<34} {gain - 1:+.0%} tokens/s" in printed
    assert f"advice                {first.name}: {first.speed:,.0f} tokens/s a GPU" in printed.splitlines()[-1]


def test_experts_are_counted():
    printed = plan("--model qwen3-30b-a3b --gpu h200 --hosts 2 --seq-len 8192 --cp 1 --tp 1 --recompute full")
    assert printed.startswith("qwen3-30b-a3b: 30.5 billion parameters (3.35 active); modelled")


def test_what_does_not_fit_is_said():
    printed = plan("--model llama-3.1-70b --gpu h100 --hosts 1 --seq-len 131072")
    assert printed.splitlines()[-1] == "advice                does not fit; it fits on 4 hosts of 8"
    step = replace(HOST, model=model_named("llama-3.1-70b"), seq_len=131072)
    assert not best(replace(step, hosts=2), FREE)
    assert any(each.fits for each in candidates(replace(step, hosts=4), FREE))
    nearest = min(sum(step_bytes(each.step).values()) for each in candidates(step, FREE)) + CONTEXT
    assert f": {nearest / GIB:,.0f} GiB\n" in printed
    assert "advice                does not fit; nor on 1,024 GPUs with cp 1, tp 1\n" in plan(
        "--model llama-3.1-405b --gpu a100-40 --hosts 64 --seq-len 8192 --batch 64 --cp 1 --tp 1"
    )
    none = plan("--model llama-2-7b --gpu h100 --per-host 7 --seq-len 8192 --memory 1e9")
    assert none.endswith("nor on 896 GPUs\n"), "7 x 128 were tried, and no more"


def test_a_search_that_ends_before_the_memory_does_says_so():
    printed = plan("--model llama-3.2-1b --gpu h100 --per-host 1 --memory 1e18 --recompute full")
    assert "longest context       1,073,740,800 tokens or more\n" in printed


def test_attention_of_a_named_gpu_pays_for_its_rounds():
    """On a host of H100, all-to-all and all-gather were measured faster than a ring: published.json."""
    size = "--hosts 1 --per-host 8 --layers 32 --hidden 8192 --kv-heads 8 --dtype bf16 --seq-len 65536"
    assert "; the ring takes " in plan(f"--gpu h100 {size}").splitlines()[-1]
    ideal = plan(f"--flops 680e12 --bandwidth 450e9 --memory 80e9 {size}")
    assert ideal.splitlines()[-1].startswith("advice                ring: ")
    queries, keys = 64 * 8192 / 128 / 132, 64 * 65536 / 128 / 132  # waves: 64 heads, a device's queries, all keys
    kernel = 4 / 680e12 * (queries + 1 / 2) / queries + 10 / 586e12 * (keys + 1 / 2) / keys
    kernel *= 65536**2 / 2 * 8192 / 8
    assert f"computing alone: {1e3 * kernel:.3g} ms" in plan(f"--gpu h100 {size}")


OVERRIDES = {  # an option of a whole step: what of the step it moves
    "--flops 500e12": lambda step: step.gpu.attention["fused"] == (5e14, pytest.approx(5e14 * 586 / 680)),
    "--bandwidth 100e9": lambda step: step.gpu.link == 1e11,
    "--memory 60e9": lambda step: step.gpu.memory == 6e10,
    "--host-bandwidth 25e9": lambda step: step.gpu.card == 2.5e10,
    "--nics 2": lambda step: step.gpu.card == 50e9 * 2 / 8,
    "--layers 16": lambda step: step.model.layers == 16,
    "--hidden 8192": lambda step: step.model.hidden == 8192,
    "--heads 64": lambda step: step.model.heads == 64,
    "--kv-heads 4": lambda step: step.model.kv_heads == 4,
    "--vocab 32000": lambda step: step.model.vocab == 32000,
    "--feedforward 8192": lambda step: step.model.feedforward == 8192,
    "--per-host 4": lambda step: (step.hosts, step.per_host) == (1, 4),
    "--devices 4": lambda step: (step.hosts, step.per_host) == (1, 4),
    "--devices 32": lambda step: (step.hosts, step.per_host) == (4, 8),
    "--batch 2": lambda step: step.batch == 2,
    "--linear-dtype fp8": lambda step: step.linear_dtype == "fp8",
    "--seq-len 4096": lambda step: step.seq_len == 4096,
}


@pytest.mark.parametrize("words", OVERRIDES)
def test_a_number_goes_before_the_name(words):
    names = "--model llama-3.1-8b --gpu h100"
    before = cost_model.read_options(f"{names} --seq-len 8192".split()).step
    after = cost_model.read_options(
        f"{names} {words if 'seq-len' in words else words + ' --seq-len 8192'}".split()
    ).step
    assert OVERRIDES[words](after)
    assert not OVERRIDES[words](before)


def test_what_is_fixed_is_not_searched():
    words = "--model mistral-7b --gpu h100 --cp 2 --tp 4 --recompute full --seq-len 9"
    options = cost_model.read_options(words.split())
    assert options.wish == Wish(2, 4, "full")
    free = cost_model.read_options(["--model", "mistral-7b", "--gpu", "h100"])
    assert free.wish == FREE
    assert free.step.seq_len == longest(free.step, FREE)
    own = "--layers 2 --hidden 256 --kv-heads 1 --dtype bf16 --vocab 100 --feedforward 512 --gpu h100"
    assert cost_model.read_options(own.split()).step.model.parameters() == 2 * (
        256 * (2 * 256 + 2 * 128) + 3 * 256 * 512 + 2 * 256
    ) + (2 * 100 * 256 + 256)


def test_without_a_vocabulary_attention_is_planned_and_the_logits_are_named():
    printed = plan("--gpu h100 --devices 8 --layers 32 --hidden 4096 --kv-heads 8 --dtype bf16")
    assert printed.startswith("8 devices of 680 TFLOP/s, 450 GB/s")
    assert "not counted           logits, 14 bytes for each token and word" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model gpt-9 --gpu h100", "model is 'gpt-9'; expected one of llama-3.1-8b, "),
        ("--model llama-2-7b --gpu h9", "gpu is 'h9'; expected one of h100, "),
        ("--model llama-2-7b", "model is llama-2-7b; expected --gpu too, one of h100, "),
        ("--gpu h100", "required: --layers, --hidden, --kv-heads, --dtype"),
        ("--model llama-2-7b --gpu a100 --linear-dtype fp8", "linear_dtype is 'fp8' on a100-80; expected bf16"),
        ("--model llama-2-7b --gpu h100 --dtype fp32", "dtype is fp32; expected bf16 for a whole step"),
        ("--model llama-2-7b --gpu h100 --cp 3", "cp x tp is 3 x 1; expected a divisor of 8 GPUs"),
        ("--model llama-2-7b --gpu h100 --tp 16", "cp x tp is 1 x 16; expected a divisor of 8 GPUs"),
        ("--model llama-2-7b --gpu h100 --hosts 200", "hosts x per-host is 1,600; expected 1,024 at most"),
        ("--model llama-2-7b --gpu h100 --hosts 2 --devices 8", "devices is 8, hosts x per-host 16; expected one"),
        ("--model llama-2-7b --gpu h100 --nics 9", "nics is 9; expected 8 at most"),
        ("--model llama-2-7b --gpu h100 --kv-heads 5", "heads is 32, kv_heads 5; expected heads to be a multiple"),
        ("--model none.json --gpu h100", "none.json cannot be read"),
        ("--model llama-2-7b --gpu h100 --plot plan.png", "plan.png was given; expected a name that ends in .svg"),
        ("--model llama-2-7b --gpu h100 --plot nowhere/plan.svg", "in a folder that is there"),
        ("--model llama-2-7b --gpu h100 --plot {folder}", "in a folder that is there"),
        ("--gpu h100 --devices 8 --layers 2 --hidden 256 --kv-heads 1 --dtype bf16 --vocab 9", "vocab is 9; expected"),
        ("--model llama-2-7b --gpu h100 --flops 1e18", "flops is 1e+18 on h100; expected 9.89e+14 at most"),
        ("--gpu h100 --devices 1e12 --layers 2 --hidden 256 --kv-heads 1 --dtype bf16", "expected 1,000,000 at most"),
        ("--model llama-2-7b --gpu h100 --machine none.json", "none.json: No such file"),
    ],
)
def test_wrong_words_end_with_2(words, said, capsys, tmp_path):
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    with pytest.raises(SystemExit) as ended:
        cost_model.main(words.format(folder=folder).split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_measured_machine_takes_the_place_of_the_data_sheet(tmp_path, capsys):
    from ringlab.planning.machine import write_machine

    path, costs = tmp_path / "machine.json", {"backward_flops": 8e10, "latency": 1e-3, "launch": 1e-4}
    write_machine(path, Cluster(2, 4, 1e11, 1e9, 2e8, 2, memory_bandwidth=1e12, **costs))
    step = cost_model.read_options(f"--model llama-3.2-1b --gpu h100 --seq-len 8192 --machine {path}".split()).step
    assert (step.hosts, step.per_host, step.gpu.link) == (2, 4, 1e9)
    ring = replace(step, cp=8).ring
    assert (ring.hosts, ring.per_host, ring.nics, ring.flops, ring.backward_flops) == (2, 4, 2, 1e11, 8e10)
    assert (ring.host_bandwidth, ring.latency, ring.launch) == (2e8, 1e-3, 1e-4)
    assert replace(step, cp=4, tp=2).ring.host_bandwidth == 1e8  # two rings share a host's NICs: 2 of one NIC each
    assert replace(step, cp=4, tp=2).ring.nics == 2
    faster = cost_model.read_options(
        f"--model llama-3.2-1b --gpu h100 --seq-len 8192 --machine {path} --flops 2e11".split()
    ).step
    assert faster.ring.flops == 2e11
    of_attention = f"--machine {path} --memory 8e9 --layers 2 --hidden 512 --kv-heads 4 --dtype fp32 --seq-len 8192"
    slow = plan(of_attention)
    assert slow.startswith("hosts of devices: 2 of 4; 0.1 TFLOP/s, 8 GB, 1 GB/s inside, NICs of a host: 2 of 0.2 GB/s")
    write_machine(path, Cluster(1, 1, 1e11, math.inf, memory_bandwidth=1e12))
    assert "1 of 1; 0.1 TFLOP/s, 8 GB; simulated" in plan(of_attention)
    for size in ("--devices 4", "--hosts 1 --per-host 4"):
        with pytest.raises(SystemExit, match="2"):
            plan(f"{of_attention} {size}")
    assert "bandwidth is null in the machine's file; expected --bandwidth" in capsys.readouterr().err
    write_machine(path, Cluster(2, 4, 1e11, 1e9, 2e8, 2, memory_bandwidth=1e12))
    assert plan(of_attention).splitlines()[-1] != slow.splitlines()[-1]  # latency, launch and backward_flops count


@pytest.mark.slow
def test_the_picture_is_the_same_in_every_run(tmp_path):
    from ringlab.planning.plan_picture import clusters, draw, each_seconds, line

    words = f"--model llama-3.2-1b --gpu h100 --per-host 2 --seq-len 8192 --recompute full --plot {tmp_path}"
    for name in ("a.svg", "b.svg"):
        assert f"plot                  {tmp_path}/{name}\n" in plan(f"{words}/{name}")
    first, second = ((tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    step = cost_model.read_options(f"{words}/a.svg".split()).step
    assert [each.gpus for each in clusters(step)] == [1, 2]
    assert [each.gpus for each in clusters(HOST)] == [1, 2, 4, 8]
    assert [each.gpus for each in clusters(replace(HOST, hosts=4))] == [4, 8, 16, 32]
    points = line(step, Wish(recompute="full"))
    S, answer = points[-1]
    assert best(replace(step, seq_len=S), Wish(recompute="full"))
    assert not best(replace(step, seq_len=2 * S), Wish(recompute="full"))
    sequences = step.gpus / (answer.step.cp * answer.step.tp)
    assert each_seconds(answer) == pytest.approx(answer.seconds / sequences)
    assert f"2 GPUs reach {S // 1024}K tokens" in draw(step, Wish(recompute="full")).alt
