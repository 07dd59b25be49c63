"""What a person asks of `ring-plan`: options -> a step to share, and what is fixed of it. Wrong ones end in one line.

A reader may skip this file. Before: plan.py. After: command.py, which prints the answer.

words of an answer:
  way            how cp GPUs share a sequence; hybrid of 4: all-to-all among 4, rings join these; no ring: cp is 1;
                 the flat ring: one circle of all GPUs, through one NIC of each host; docs/which_way.md
  seconds        products: of matrices; head: the logits; passes: norms, activations, loss, optimizer; tensor parallel,
                 FSDP, cp: messages that nothing hides; MFU: the model's FLOP/s over the peak
  GiB of a GPU   state: weights and what the optimizer holds; gathered: weights that FSDP brings; activations: what
                 layers keep; loss, a layer at work: what is alive at the peak; reserve: the error of this count
  longest        context that fits by any way; in training with recompute full, unless another is given
  nearest        where no way fits, the one that takes the fewest bytes
  advice         ways tie that differ by less than the planner errs; lines from seconds to evidence are of the first
  sequences      that all GPUs compute in these seconds; one sequence on all: the advice where all of them share one
  evidence       published steps of the same task, kernels and number of hosts, on the same GPU or others too
  not counted    what the seconds lack: before each pass of a layer all ranks agree to go on
  with ...       what one change gains: the fastest way then against the fastest now
"""

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ring_planner.known import fit
from ring_planner.plan import MOST, Wish, candidates, longest
from ring_planner.presets import GPU, GPUS, MODELS, Model, gpu_named, model_named
from ring_planner.step import KERNELS, LOSSES, OPTIMIZERS, RECOMPUTE, TASKS, Step, matmul_share, step_seconds
from ringlab.options import Parser

WORDS = str(__doc__).partition("the answer.\n\n")[2]  # --help ends with them
WIRES = ("bandwidth", "host_bandwidth")  # inside a host, and of a NIC
OPTIMIZER_HOLDS = """what it holds of a parameter. adam: a float32 weight and two moments; adam8bit: its moments have 8
bits; adam-bf16: two moments of 16 bits and no other weight; sgd: a float32 weight; none: nothing (default: adam)"""
KERNELS_ARE = "of attention. fa2: FlashAttention 2; best: 3 or 4; framework: a trainer's (default: what PyTorch takes)"
RECOMPUTED = "what backward computes again. selective: every other product; full: a layer (default: the best that fits)"
KNOWN = """a step that you measured, as "seq_len=4096 tp=8 seconds=0.557", or tokens_s= of a GPU; cp, tp, hosts, batch,
recompute as in this plan unless given; way=ring, double ring, all-gather, all-to-all, hybrid of 8, no ring (default:
the fastest that fits). A second step with other tp, cp or hosts tells messages from computing"""
KNOWN_OF = ("seq_len", "cp", "tp", "hosts", "batch", "recompute", "way", "seconds", "tokens_s")
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
    "bandwidth": ((1e6, 1e13), "bytes/s of a GPU's link inside its host, one way, by data sheet: 450e9 for 450 GB/s"),
    "host-bandwidth": ((1e6, 2e11), "bytes/s of a network card (NIC), one way, by data sheet: 50e9 for 400 Gbit/s"),
    "memory": ((2e9, 1e15), "bytes of a GPU, 80e9 for 80 GB"),
    "trainable": ((1e-6, 1.0), "share of the parameters that is trained, 0.01 for a LoRA of one percent (default: 1)"),
    "hosts": ((), "hosts (default: 1)"),
    "per-host": ((), "GPUs of a host (default: 8)"),
    "nics": ((), "NICs of a host (default: one for each GPU)"),
    "seq-len": ((), "tokens of a sequence, S (default: the longest that fits)"),
    "batch": ((), "sequences that cp x tp GPUs compute at once (default: 1)"),
    "cp": ((), "GPUs that share a sequence, context parallelism (default: the best that fits)"),
    "tp": ((), "GPUs that share heads and feedforward, tensor parallelism (default: the best that fits)"),
    "layers": ((), "layers of the model"),
    "hidden": ((), "width of the model"),
    "heads": ((), "query heads"),
    "kv-heads": ((), "key/value heads"),
    "feedforward": ((), "inner width of the feedforward, of three matrices"),
    "vocab": ((), "tokens of the vocabulary"),
    "task": (TASKS, "a training step, or a prefill (default: train)"),
    "kernels": (tuple(KERNELS), KERNELS_ARE),
    "recompute": (tuple(RECOMPUTE), RECOMPUTED),
    "linear-dtype": (("bf16", "fp8"), "dtype of the layers' matrix products (default: bf16)"),
    "loss": (LOSSES, "the logits of all tokens at once, or in pieces (default: whole)"),
    "optimizer": (tuple(OPTIMIZERS), OPTIMIZER_HOLDS),
}


def parser() -> Parser:
    """The options of a plan. Counts are whole numbers up to 1e12, and may be written as 1e6."""
    kinds: dict[str, Any] = {"epilog": WORDS, "formatter_class": argparse.RawDescriptionHelpFormatter}
    it = Parser(prog="ring-plan", description="Plan a training step or a prefill.", allow_abbrev=False, **kinds)
    it.add_argument("--model", metavar="NAME", help=f"a config.json, or one of {', '.join(MODELS)}")
    it.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}; ideal: of --flops, --bandwidth, --memory")
    it.add_argument("--known", metavar="STEP", action="append", default=[], help=KNOWN)
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
        if known.latents:
            if options.kv_heads:
                raise ValueError(f"{known.name} makes K and V of all heads from latents; expected no --kv-heads")
            sized["kv_heads"] = given.get("heads", known.heads)
        return replace(known, **sized, **given)
    if missing := [f"--{name.replace('_', '-')}" for name in NUMBERS if name not in given]:
        raise ValueError(f"no --model was given, nor {', '.join(missing)}; expected --model NAME, or all six numbers")
    return Model("your model", "your numbers", **given)


def gpu_of(options: argparse.Namespace, per_host: int) -> GPU:
    """The GPU that is named, with the numbers that were given. Fewer NICs than GPUs are shared evenly."""
    if options.gpu == "ideal":
        if missing := [name for name in ("flops", "bandwidth", "memory") if not getattr(options, name)]:
            raise ValueError(f"gpu is ideal without {', '.join(missing)}; expected --flops, --bandwidth and --memory")
        flops, bandwidth = options.flops, options.bandwidth
        rates, about = {"fa2": (flops, flops)}, "your numbers, all of which are reached"
        # Rounds cost nothing beside their products.
        numbers = options.memory, math.inf, bandwidth, options.host_bandwidth or bandwidth
        gpu = GPU("ideal", about, {"bf16": flops}, rates, *numbers, own=True)
    else:
        gpu = gpu_named(options.gpu)
        changed: dict[str, Any] = {name: rate for name in WIRES if (rate := getattr(options, name))}
        if flops := options.flops:
            if flops > 1.01 * (peak := gpu.peak["bf16"]):
                given = f"flops is {flops:g} on {gpu.name}"
                raise ValueError(f"{given}; expected {peak:g} at most, its peak in bf16: attention reaches less")
            changed |= {"own": True, "attention": {n: (flops, flops * b / f) for n, (f, b) in gpu.attention.items()}}
        if changed:  # no measured step is of such a GPU
            changed["name"] = f"{gpu.name} (your numbers)"
        gpu = replace(gpu, memory=options.memory or gpu.memory, **changed)
    nics = options.nics or per_host
    return replace(gpu, host_bandwidth=gpu.host_bandwidth * nics / per_host, nics=options.nics or 0)


def request_of(options: argparse.Namespace) -> tuple[Step, Wish]:
    """A step to share, and what is fixed of it. Raises ValueError for options that do not fit together."""
    if not options.gpu:
        raise ValueError(f"no --gpu was given; expected one of {', '.join(GPUS)}, ideal")
    hosts, per_host = options.hosts or 1, options.per_host or 8
    if hosts * per_host > MOST:
        raise ValueError(f"hosts x per-host is {hosts * per_host:,}; expected {MOST:,} at most: give fewer hosts")
    if options.nics and options.nics > per_host:
        raise ValueError(f"nics is {options.nics}; expected {per_host} at most, one for each GPU of a host")
    if options.task == "prefill":
        for name in ("recompute", "loss", "optimizer", "trainable"):
            if getattr(options, name):
                given = f"{name} is {getattr(options, name)} for a prefill"
                raise ValueError(f"{given}; expected --task train, or leave it out")
    gpu = gpu_of(options, per_host)
    names = ("task", "kernels", "linear_dtype", "loss", "optimizer", "trainable", "batch")
    named: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name)}
    named.setdefault("kernels", gpu.kernel)
    named |= dict.fromkeys(("ours", "eager"), named["kernels"] != "framework")
    wish = Wish(options.cp, options.tp, options.recompute)
    fixed = {name: value for name, value in vars(wish).items() if value}
    seq_len = options.seq_len or max(8192, (wish.cp or 1) * (wish.tp or 1))
    step = Step(model_of(options), gpu, hosts, per_host, seq_len, **named, **fixed)
    if options.known:
        steps, seconds = zip(*(measured_step(text, step, wish) for text in options.known), strict=True)
        step = replace(step, known=fit([step_seconds(each) for each in steps], seconds))
    return step if options.seq_len else replace(step, seq_len=longest(step, wish) or step.seq_len), wish


def measured_step(text: str, step: Step, wish: Wish) -> tuple[Step, float]:
    """A step of --known and its seconds. Raises ValueError for one that cannot be read, shared, or so fast."""
    pairs = [word.partition("=")[::2] for word in re.split(r"\s+(?=\S+=)", text.strip())]  # a way may have blanks
    words, names = dict(pairs), [name for name, _ in pairs]
    if wrong := [name for name in names if name not in KNOWN_OF or names.count(name) > 1]:
        raise ValueError(f"known has {', '.join(wrong)}; expected each of {', '.join(KNOWN_OF)} once at most")
    if "seq_len" not in words or ("seconds" in words) == ("tokens_s" in words):
        raise ValueError(f"known is {text!r}; expected seq_len=, and either seconds= or tokens_s=")
    numbers: dict[str, Any] = {}
    for name in words.keys() - {"recompute", "way"}:
        whole = name not in ("seconds", "tokens_s")
        numbers[name] = number(1 if whole else 1e-9, 1e12, f"{name} of a known step", whole)(words[name])
    wish = replace(wish, **{name: (words | numbers)[name] for name in ("cp", "tp", "recompute") if name in words})
    sized = {name: numbers[name] for name in ("seq_len", "hosts", "batch") if name in words}
    asked = replace(step, cp=1, tp=1, **sized)
    possible = [*candidates(asked, wish)]
    plans = [plan for plan in possible if words.get("way", plan.way) == plan.way]
    if not plans:
        ways = ", ".join({plan.way: 0 for plan in possible})
        shared = f"cp and tp by which {asked.gpus} GPUs share {asked.model.heads} heads and {asked.seq_len} tokens"
        raise ValueError(f"known is {text!r}; expected {f'a way of {ways}' if ways else shared}")
    plan = max(plans, key=lambda plan: (plan.fits, plan.merit))
    seconds = numbers.get("seconds") or plan.step.tokens / numbers["tokens_s"]
    attention, products = plan.terms["attention"], plan.terms["products"] + plan.terms.get("head", 0.0)
    least = attention + matmul_share(step.gpu, step.linear_dtype) * products
    given = f"known is {text!r}: {seconds:.3g} s, planned are {plan.seconds:.3g} s as {plan.name}"
    if seconds < least:
        raise ValueError(f"{given}; expected {least:.3g} s or more: attention, and products at their peak; or --flops")
    return plan.step, seconds
