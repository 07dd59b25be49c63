"""ring-plan: what a cluster will do with a long sequence, before you rent it. One request, one answer.

    the ways that fit      the fastest first: tokens/s of a GPU, or seconds of a prefill, and GiB of a GPU
    interval               of the seconds, from measured ones of the same kind, and how many there are
    binds                  the largest term
    advice                 the fastest way, and the simplest of those that are as fast, within 2 %

--help names the unit of each option. All results are modelled, not measured.

    $ ring-plan --model llama-3.1-8b --gpu h100 --hosts 1 --seq-len 131072
    $ ring-plan --gpu ideal --flops 990e12 --bandwidth 450e9 --memory 80e9 --hosts 1 --layers 32 --hidden 4096 \\
          --heads 32 --kv-heads 8 --feedforward 14336 --vocab 128256 --seq-len 131072

A reader may skip this file: plan.py answers, and this file reads options and prints.
"""

import argparse
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ring_planner.machine import read_machine
from ring_planner.memory import RESERVE
from ring_planner.plan import HELD, LONGEST, MOST, Plan, Wish, best, candidates, digits, gains, hosts_that_hold, longest
from ring_planner.presets import GIB, GPU, GPUS, MODELS, Model, gpu_named, model_named
from ring_planner.step import KERNELS, LOSSES, OPTIMIZERS, RECOMPUTE, TASKS, WEIGHTS, Step
from ringlab.options import Parser

SHOWN = 5  # rows of the table
NEAR = 1.02  # times as long is as fast
SIMPLE = ("ring", "all-gather", "all-to-all", "double ring", "hybrid")  # the simplest way first
SHORT = 8192  # tokens
OPTIMIZER_HOLDS = """what it holds of a parameter. adam: a float32 weight and two moments; adam8bit: its moments have 8
bits; adam-bf16: two moments of 16 bits and no other weight; sgd: a float32 weight; none: nothing (default: adam)"""
NUMBERS = ("layers", "hidden", "heads", "kv_heads", "feedforward", "vocab")  # of a model


def number(least: float, most: float, meaning: str, whole: bool = False) -> Callable[[str], float]:
    """A type for argparse. A smaller number than `least` has another unit, as 990 for 990e12."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (whole and not value.is_integer()):
            times, digits = {"k": 2**10, "m": 2**20}.get(text[-1:].lower(), 0), text[:-1]
            typed = f"type {int(digits) * times}; " if whole and times and digits.isdecimal() else ""
            raise argparse.ArgumentTypeError(f"{text} was given; {typed}expected {least:g} to {most:g}: {meaning}")
        return int(value) if whole else value

    return read


OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {  # name: its choices, or the least and the most; its meaning
    "flops": ((1e9, 1e18), "FLOP/s that attention reaches on a GPU, 680e12 for 680 TFLOP/s"),
    "bandwidth": ((1e6, 1e13), "bytes/s of a GPU's link inside its host, one way, 450e9 for 450 GB/s"),
    "host-bandwidth": ((1e6, 2e11), "bytes/s of a NIC, one way, 50e9 for 400 Gbit/s"),
    "memory": ((2e9, 1e15), "bytes of a GPU, 80e9 for 80 GB"),
    "trainable": ((1e-6, 1.0), "share of the parameters that is trained, 0.01 for a LoRA of one percent (default: 1)"),
    "hosts": ((), "hosts (default: 1)"),
    "per-host": ((), "GPUs of a host (default: 8)"),
    "nics": ((), "NICs of a host (default: one for each GPU)"),
    "seq-len": ((), "tokens of a sequence, S (default: the longest that fits)"),
    "batch": ((), "sequences of a replica (default: 1)"),
    "cp": ((), "GPUs that share a sequence (default: the best that fits)"),
    "tp": ((), "GPUs that share heads and feedforward (default: the best that fits)"),
    "layers": ((), "layers of the model"),
    "hidden": ((), "width of the model"),
    "heads": ((), "query heads"),
    "kv-heads": ((), "key/value heads"),
    "feedforward": ((), "inner width of the feedforward, of three matrices"),
    "vocab": ((), "words of the vocabulary"),
    "task": (TASKS, "a training step, or a prefill (default: train)"),
    "kernels": (tuple(KERNELS), "of attention; best: FlashAttention 3 or 4 (default: what PyTorch takes on the GPU)"),
    "recompute": (tuple(RECOMPUTE), "what the backward pass computes again (default: the best that fits)"),
    "linear-dtype": (("bf16", "fp8"), "dtype of the layers' products (default: bf16)"),
    "loss": (LOSSES, "the logits of all tokens at once, or in pieces (default: whole)"),
    "optimizer": (tuple(OPTIMIZERS), OPTIMIZER_HOLDS),
    "weights": (tuple(WEIGHTS), "of the frozen layers; 4bit: QLoRA, with --trainable (default: bf16)"),
}


def parser() -> Parser:
    """The options of a plan. Counts are whole numbers up to 1e12, and may be written as 1e6."""
    it = Parser(prog="ring-plan", description="Plan training or a prefill of a long sequence.", allow_abbrev=False)
    it.add_argument("--model", metavar="NAME", help=f"a config.json, or one of {', '.join(MODELS)}")
    it.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}, or ideal: with the next three numbers")
    it.add_argument("--machine", metavar="FILE", help="what ring_planner.calibrate measured on your machine")
    it.add_argument("--sources", action="store_true", help="say where the numbers of the model and the GPU come from")
    for name, (known, meaning) in OPTIONS.items():
        if known and isinstance(known[0], str):
            it.add_argument(f"--{name}", choices=known, help=meaning)
        else:
            kind = number(known[0], known[1], meaning) if known else number(1, 1e12, "a whole number", whole=True)
            it.add_argument(f"--{name}", metavar="X" if known else "N", type=kind, help=meaning)
    return it


def model_of(options: argparse.Namespace) -> Model:
    """The model that is named, with the numbers that were given, or a model of numbers. Raises ValueError."""
    given: dict[str, Any] = {name: getattr(options, name) for name in NUMBERS if getattr(options, name)}
    if options.model:
        known = model_named(options.model)
        sized: dict[str, Any] = {"head_dim": 0} if {"hidden", "heads"} & given.keys() else {}
        return replace(known, **sized, **given)
    if missing := [f"--{name.replace('_', '-')}" for name in NUMBERS if name not in given]:
        raise ValueError(f"no --model was given, nor {', '.join(missing)}; expected --model NAME, or all six numbers")
    return Model("your model", "your numbers", **given)


def gpu_of(options: argparse.Namespace, per_host: int) -> GPU:
    """The GPU that is named, with the numbers that were given. Fewer NICs than GPUs are shared evenly."""
    card = options.host_bandwidth
    if options.gpu == "ideal":
        if missing := [name for name in ("flops", "bandwidth", "memory") if not getattr(options, name)]:
            raise ValueError(f"gpu is ideal without {', '.join(missing)}; expected --flops, --bandwidth and --memory")
        flops, link = options.flops, options.bandwidth
        rates, about = {"fa2": (flops, flops)}, "your numbers, all of which are reached"
        numbers = options.memory, math.inf, link, card or link  # rounds cost nothing beside their products
        gpu = GPU("ideal", about, {"bf16": flops}, rates, *numbers, card_share=1.0, link_share=1.0)
    else:
        gpu = gpu_named(options.gpu)
        changed: dict[str, Any] = {"link": options.bandwidth, "memory": options.memory, "card": card}
        if flops := options.flops:
            if flops > 1.01 * (peak := gpu.peak["bf16"]):
                given = f"flops is {flops:g} on {gpu.name}"
                raise ValueError(f"{given}; expected {peak:g} at most, its peak in bf16: attention reaches less")
            changed["attention"] = {name: (flops, flops * b / f) for name, (f, b) in gpu.attention.items()}
        gpu = replace(gpu, **{name: value for name, value in changed.items() if value})
    return replace(gpu, card=gpu.card * (options.nics or per_host) / per_host)


def request_of(options: argparse.Namespace) -> tuple[Step, Wish]:
    """A step to share, and what is fixed of it. Raises ValueError for options that do not fit together."""
    if not options.gpu:
        raise ValueError(f"no --gpu was given; expected one of {', '.join(GPUS)}, ideal")
    machine = read_machine(options.machine) if options.machine else None
    hosts = options.hosts or (machine.hosts if machine else 1)
    per_host = options.per_host or (machine.per_host if machine else 8)
    if hosts * per_host > MOST:
        raise ValueError(f"hosts x per-host is {hosts * per_host:,}; expected {MOST:,} at most: give fewer hosts")
    if options.nics and options.nics > per_host:
        raise ValueError(f"nics is {options.nics}; expected {per_host} at most, one for each GPU of a host")
    if options.task == "prefill":
        for name in ("recompute", "loss", "optimizer", "trainable", "weights"):
            if getattr(options, name):
                given = f"{name} is {getattr(options, name)} for a prefill"
                raise ValueError(f"{given}; expected --task train, or leave it out")
    gpu = gpu_of(options, per_host)
    if machine:
        wires: dict[str, Any] = {"link": machine.bandwidth, "card": machine.host_bandwidth}
        gpu = replace(gpu, **{name: rate for name, rate in wires.items() if rate < math.inf})
        rates = {"flops": options.flops, "bandwidth": options.bandwidth, "host_bandwidth": options.host_bandwidth}
        machine = replace(machine, **{name: rate for name, rate in rates.items() if rate})
        if hosts > 1 and math.isinf(machine.host_bandwidth):
            raise ValueError(f"{options.machine} is of one host, hosts is {hosts}; expected --host-bandwidth too")
    names = ("task", "kernels", "linear_dtype", "loss", "optimizer", "trainable", "weights", "batch")
    known: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name)}
    known.setdefault("kernels", gpu.kernel)
    known |= dict.fromkeys(("ours", "eager"), known["kernels"] != "framework")
    wish = Wish(options.cp, options.tp, options.recompute)
    fixed = {name: value for name, value in vars(wish).items() if value}
    seq_len = options.seq_len or max(SHORT, (wish.cp or 1) * (wish.tp or 1))
    step = Step(model_of(options), gpu, hosts, per_host, seq_len, machine=machine, **known, **fixed)
    return step if options.seq_len else replace(step, seq_len=longest(step, wish) or step.seq_len), wish


def show(step: Step, wish: Wish, *, sources: bool = False) -> None:
    """Print the answers, the advice last."""
    gpu, model = step.gpu, step.model
    active = f" ({digits(model.parameters(active=True) / 1e9)} active)" if model.experts else ""
    print(f"{model.name}: {digits(model.parameters() / 1e9)} billion parameters{active}; modelled, not measured")
    print(f"{step.hosts} x {step.per_host} {gpu.name} of {digits(gpu.memory / GIB)} GiB")
    if sources:
        print(f"sources               {model.name}: {model.source}\n{' ' * 22}{gpu.name}: {gpu.source}")
    most = longest(step, wish)
    print(f"longest context       {most:,} tokens{' or more' if most == LONGEST else ''}{wish.words()}")
    how = f"{step.linear_dtype} products, {step.kernels} kernels"
    if step.task == "train":
        trained = f"{step.trainable:.2%} trained, " if step.trainable < 1 else ""
        base = ", base of 4 bits" if step.weights == "4bit" else ""
        how = f"{how}, loss {step.loss}, {trained}{step.optimizer}{base}"
    what = "a step" if step.task == "train" else "a prefill"
    print(f"{what} at S = {step.seq_len:,}, batch {step.batch} of each replica: {how}")
    ranked = best(step, wish)
    if not ranked:
        show_what_is_missing(step, wish)
        return
    print(f"    tokens/s a GPU        s     GiB  way; GiB, {RESERVE:.1%} kept free")
    rings, shown = [plan for plan in ranked if plan.name.startswith("ring")], list(ranked[:SHOWN])
    if rings and rings[0] not in shown:  # the best ring is always shown
        shown.append(rings[0])
    for plan in shown:
        print(f"    {digits(plan.speed):>14} {digits(plan.seconds):>8} {digits(plan.held / GIB):>7}  {plan.name}")
    first, known = ranked[0], ranked[0].interval
    name, seconds = max(first.terms.items(), key=lambda term: term[1])
    shares = ", ".join(f"{term} {digits(s)}" for term, s in first.terms.items() if s > 0.005 * first.seconds)
    print(f"seconds               {shares}: {first.utilisation:.0%} of the bf16 peak")
    print(f"binds                 {name}, {seconds / first.seconds:.0%} of the time\n{memory_of(first)}")
    text = "not known: no measured times of this kind"
    if first.waits_for_the_host:
        text = "not known: a layer is so short that GPUs wait for their hosts, so the times are the least that it takes"
    elif known:
        text = f"{digits(known[0])} to {digits(known[1])} s, from {known[2]} measured ones; {HELD}"
    print(f"interval              {text}")
    if model.experts:
        print(f"experts               FSDP gathers all {model.experts} of a layer; expert parallelism is not planned")
    for gain, name, answer in [better for better in gains(step, wish) if better[0] > 1.005][:3]:
        print(f"with {name:<34} {gain - 1:+.0%} {'tokens/s' if step.task == 'train' else 'speed'}: {answer.name}")
    on_all = [plan for plan in ranked if plan.at_once == step.batch]
    for name, plans in (("advice", ranked), ("one sequence on all", on_all if first not in on_all else [])):
        for line in advice(plans):
            print(f"{name:<22}{line}")
            name = ""


def memory_of(answer: Plan) -> str:
    """A line: what the memory of a GPU holds at the peak."""
    sizes = [f"{name} {digits(size / GIB)}" for name, size in answer.memory.items() if size]
    return f"GiB of a GPU          {', '.join(sizes)}"


def show_what_is_missing(step: Step, wish: Wish) -> None:
    """Print how much memory the nearest candidate takes, what would make it fit, and how many hosts would."""
    nearest = min(candidates(step, wish), key=lambda plan: plan.held, default=None)
    if nearest is None:
        print(f"advice                no way to share it{wish.words()}: give another --cp or --tp, or leave them out")
        return
    print(f"nearest               {nearest.name}: {digits(nearest.held / GIB)} GiB\n{memory_of(nearest)}")
    free = [(name, plan) for _, name, plan in gains(step, wish) if name not in ("twice the memory", "twice the batch")]
    for name, plan in free[:2]:
        print(f"with {name:<34} fits: {plan.name}, {digits(plan.held / GIB)} GiB")
    hosts = hosts_that_hold(step, wish)
    more = f"it fits on {hosts} hosts of {step.per_host}" if hosts else f"nor on {MOST:,} GPUs{wish.words()}"
    first = f"change first: {free[0][0]}; or " if free else ""
    print(f"advice                does not fit; {first}{more}")


def advice(ranked: Sequence[Plan]) -> list[str]:
    """The fastest way, and the simplest of those that are as fast, within 2 %. They may be one."""
    tied = [plan for plan in ranked if NEAR * plan.merit >= ranked[0].merit]
    if len(tied) < 2:
        return [f"fastest: {told(plan)}" for plan in tied]
    simplest = min(tied, key=lambda plan: (plan.step.cp > 1, SIMPLE.index(plan.step.way)))
    words = f"simplest of {len(tied)} within {NEAR - 1:.0%}: {told(simplest)}"
    return [f"fastest, and {words}"] if simplest is tied[0] else [f"fastest: {told(tied[0])}", words]


def told(plan: Plan) -> str:
    """The way in words, its speed and its memory."""
    many = f", {plan.at_once} sequences at once" if plan.at_once > 1 else ""
    speed = f"{digits(plan.speed)} tokens/s a GPU, {digits(plan.seconds)} s"
    return f"{plan.name}: {speed}, {digits(plan.held / GIB)} GiB{many}"


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is None:  # a command: where nobody reads on, as after `| head`, it ends
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    it = parser()
    options = it.parse_args(arguments)
    try:
        step, wish = request_of(options)
    except ValueError as reason:
        it.error(str(reason))
    show(step, wish, sources=options.sources)
    return 0


if __name__ == "__main__":
    sys.exit(main())
