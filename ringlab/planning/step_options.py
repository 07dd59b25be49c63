"""The options of a whole step: names of a model, a GPU and a machine's file, and what they stand for.

A reader may skip this file: cost_model.py has the command, whole_step.py what it predicts.

Shapes: numbers only. Before: answers.py. After: cost_model.py.
Source: none.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ringlab.planning.answers import SIMULATED, Wish, longest
from ringlab.planning.machine import read_machine
from ringlab.planning.presets import GPU, GPUS, MODELS, Model, gpu_named, model_named
from ringlab.planning.ways import Cluster
from ringlab.planning.whole_step import RECOMPUTE, Step

SHORT = 8192  # tokens

OF_GPU, OF_MODEL = ("flops", "bandwidth", "memory"), ("layers", "hidden", "kv_heads", "dtype")  # what presets give
OF_STEP = ("vocab", "feedforward", "batch", "cp", "tp", "recompute", "linear_dtype", "plot")  # of a whole step only


def count(text: str) -> int:
    """A type for argparse: a whole number from 1 to 1e12, which may be written as 1e6."""
    value = float(text)
    if not 1 <= value <= 1e12 or not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} was given; expected a whole number, 1 to 1e+12")
    return int(value)


def picture(text: str) -> Path:
    """A type for argparse: the path of a picture to write, in a folder that is there."""
    path = Path(text)
    if path.suffix != ".svg" or path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} was given; expected a name that ends in .svg, in a folder that is there"
        )
    return path


def add_presets(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[str, ...]:
    """Add the options that name a model and a GPU. Returns what the names that were given say: needed no more."""
    names = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for each in (parser, names):
        each.add_argument("--model", metavar="NAME", help=f"a config.json, or one of {', '.join(MODELS)}")
        each.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}")
        each.add_argument("--machine", metavar="FILE", help="what ringlab.planning.calibrate measured on your machine")
    given, _ = names.parse_known_args(arguments)
    measured = ("flops", "bandwidth") if given.machine else ()
    return (*(OF_MODEL if given.model else ()), *(OF_GPU if given.gpu or given.model else ()), *measured)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the options of a whole step, which needs a model with its vocabulary, and a GPU."""
    for name, meaning in (
        ("vocab", "words of the vocabulary; with --feedforward and --gpu: plan the whole step"),
        ("feedforward", "inner width of the feedforward, of three matrices"),
        ("batch", "sequences of a replica (default: 1)"),
        ("cp", "devices that share a sequence (default: the fastest that fits)"),
        ("tp", "devices of a host that share heads and feedforward (default: the fastest that fits)"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=count, help=meaning)
    meaning = "what the backward pass computes again (default: the fastest that fits)"
    parser.add_argument("--recompute", choices=RECOMPUTE, help=meaning)
    meaning = "dtype of the layers' products (default: bf16)"
    parser.add_argument("--linear-dtype", choices=("bf16", "fp8"), help=meaning)
    parser.add_argument(
        "--plot", metavar="FILE.svg", type=picture, help="draw the time against the length and the devices"
    )


def fill_from_presets(options: argparse.Namespace) -> None:
    """Numbers that were not given, from the names and the machine's file. Raises ValueError as their readers do."""
    model = options.model and model_named(options.model)
    gpu = options.gpu and gpu_named(options.gpu)
    known = {} if not model else {name: getattr(model, name) for name in ("layers", "hidden", "kv_heads", "heads")}
    if gpu:
        rates = {"flops": gpu.attention["fused"][0], "bandwidth": gpu.link, "host_bandwidth": gpu.card}
        known |= {**rates, "memory": gpu.memory}
    options.cluster = read_machine(options.machine) if options.machine else None
    if options.cluster:
        sizes = () if options.devices else ("hosts", "per_host", "nics")
        measured = {name: getattr(options.cluster, name) for name in ("flops", "bandwidth", "host_bandwidth", *sizes)}
        known |= {name: number for name, number in measured.items() if number != math.inf}  # inf: no such wire
    if options.devices and not options.hosts:
        known.pop("host_bandwidth", None)  # a ring of devices, as without names
    for name, number in known.items():
        if getattr(options, name) is None:
            setattr(options, name, number)


def model_of(options: argparse.Namespace) -> Model | None:
    """The model with its vocabulary: named, with the numbers that were given; None if no vocabulary is known."""
    numbers = ("layers", "hidden", "heads", "kv_heads", "feedforward", "vocab")
    given = {name: getattr(options, name) for name in numbers if getattr(options, name) is not None}
    if options.model:
        return replace(model_named(options.model), **given)
    if not (options.vocab and options.feedforward):
        return None
    return Model("your model", "your numbers", **{"heads": max(1, options.hidden // 128), **given})


def gpu_of(options: argparse.Namespace) -> GPU:
    """The named GPU, with the numbers that were given. Fewer NICs than devices are shared evenly."""
    gpu = gpu_named(options.gpu)
    if options.flops > 1.01 * gpu.peak["bf16"] and not options.machine:
        given = f"flops is {options.flops:g} on {gpu.name}"
        raise ValueError(f"{given}; expected {gpu.peak['bf16']:g} at most, its peak in bf16: attention reaches less")
    forward, backward = gpu.attention["fused"]
    card = options.host_bandwidth or gpu.card
    return replace(
        gpu,
        attention={**gpu.attention, "fused": (options.flops, options.flops * backward / forward)},
        memory=options.memory,
        link=options.bandwidth,
        card=card * (options.nics or options.per_host) / options.per_host,
    )


def machine_of(options: argparse.Namespace) -> Cluster | None:
    """The measured machine, with the rates that were given; None if no file was."""
    if not options.cluster:
        return None
    rates = {"flops": options.flops, "bandwidth": options.bandwidth, "host_bandwidth": options.host_bandwidth}
    return replace(options.cluster, **{name: rate for name, rate in rates.items() if rate})


def step_of(options: argparse.Namespace) -> tuple[Step | None, Wish]:
    """The whole step that the options ask for, and what the search may not change; None if they plan attention only.

    Raises ValueError for options that do not fit together.
    """
    wish = Wish(options.cp, options.tp, options.recompute)
    model = model_of(options)
    if not (model and options.gpu):
        if model:
            raise ValueError(f"model is {model.name}; expected --gpu too, one of {', '.join(GPUS)}")
        for name in OF_STEP:
            if getattr(options, name) is not None:
                given = f"{name} is {getattr(options, name)}"
                raise ValueError(f"{given}; expected --gpu too, and --model, or --vocab and --feedforward")
        return None, wish
    if options.dtype not in (None, "bf16"):
        raise ValueError(f"dtype is {options.dtype}; expected bf16 for a whole step, or --linear-dtype fp8")
    options.per_host = options.per_host or min(options.devices or 8, 8)
    options.hosts = options.hosts or max(1, (options.devices or 0) // options.per_host)
    devices = options.hosts * options.per_host
    if options.devices and options.devices != devices:
        raise ValueError(f"devices is {options.devices}, hosts x per-host {devices}; expected one number")
    if devices > SIMULATED:
        raise ValueError(f"hosts x per-host is {devices:,}; expected {SIMULATED:,} at most, every hop is simulated")
    if options.nics and options.nics > options.per_host:
        raise ValueError(f"nics is {options.nics}; expected {options.per_host} at most, one for each device of a host")
    step = Step(
        model,
        gpu_of(options),
        options.hosts,
        options.per_host,
        options.seq_len or SHORT,
        options.batch or 1,
        options.cp or 1,
        options.tp or 1,
        options.recompute or "full",
        options.linear_dtype or "bf16",
        machine=machine_of(options),
    )
    return (step if options.seq_len else replace(step, seq_len=longest(step, wish) or SHORT)), wish
