"""The cost model: the paper's numbers beside ours, and a plan for your own cluster.

    smallest chunk          w/2 · G/H · F/B tokens                      hides its messages: hidden_communication.py
    longest context         (P·memory - 16·weights) / (w·h·(L + 22))    fits the memory: ring_memory.py; bf16, G = H

Without options it prints tables 1 to 3 of the paper and its example of 512 devices. With them it plans; --help has the
units.

Shapes: numbers only; P devices, L layers, h = H·D, G key/value heads, w bytes a number. Modelled, not measured.

    $ python -m planning.cost_model
    Table 2: the smallest free chunk, F/B tokens in bf16, and the shortest sequence, six of it (K: 1000 tokens)
                       TFLOP/s   GB/s    chunk: printed, ours    sequence: printed, ours
    A100 NVLink            312  300.0             1.0K   1.04K              6.2K    6.24K
    A100 InfiniBand        312   12.5            24.5K  24.96K            149.5K  149.76K  not the quotient of its row
    TPU v3                 123  112.0             1.1K   1.10K              6.6K    6.59K
    TPU v4                 275  268.0             1.0K   1.03K              6.2K    6.16K
    ...

    $ python -m planning.cost_model --flops 990e12 --bandwidth 450e9 --memory 80e9 --devices 8 --layers 32 \\
          --hidden 4096 --kv-heads 8 --dtype bf16

Before: hidden_communication.py, simulated_ring.py, ring_memory.py. After: training/jax_ring.py,
the ring in the paper's own language.
Source: Liu et al. 2024, section 3, tables 1 to 3 and appendix A.
"""

import argparse
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

from planning import hidden_communication, ring_memory
from planning.hidden_communication import (
    Layer,
    gradient_bytes,
    hidden_share,
    min_overlap_chunk,
    pass_seconds,
    sent_bytes,
)
from planning.ring_memory import STATE, longest_context, param_count, peak_bytes, token_bytes

ITEMSIZE = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}  # bytes
WHOLE = (1, 1e6, int)
OPTIONS = {  # smallest and largest value, type, and what it is, in which unit
    "flops": (1e8, 1e17, float, "FLOP/s that attention reaches on a device: 990e12 for 990 TFLOP/s"),
    "bandwidth": (
        1e5,
        1e14,
        float,
        "bytes/s from a device to the next, one way, on the slowest link of the ring: 450e9 for 450 GB/s, 50e9 for "
        "400 Gbit/s",
    ),
    "memory": (1e6, 1e14, float, "bytes of a device: 80e9 for 80 GB"),
    "devices": (*WHOLE, "devices in the ring, P"),
    "layers": (*WHOLE, "layers of the model, L"),
    "hidden": (*WHOLE, "width of the model, h; must be heads · head dim"),
    "kv-heads": (*WHOLE, "key/value heads, G"),
    "heads": (*WHOLE, "query heads, H (default: hidden / 128)"),
    "seq-len": (1, 1e12, int, "tokens in all, S (default: the longest context that fits)"),
}
OPTIONAL = ("heads", "seq-len")


def number(low: float, high: float, kind: Callable[[str], float], what: str) -> Callable[[str], float]:
    """What argparse calls to read a number. Outside low ... high it was meant in another unit."""

    def read(text: str) -> float:
        try:
            value = kind(float(text)) if kind is int and float(text).is_integer() else kind(text)  # 1e6 is whole
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            expected = f"a whole number, {low:,.0f} to {high:,.0f}" if kind is int else f"a number, {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text!r} was given; expected {expected}: {what}")
        return value

    return read


def digits(number: float) -> str:
    """Three digits of a number, or all before the point: 0.0179, 5.89, 3,804."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a plan. What is wrong ends the program with status 2, and says what was given and expected."""
    parser = argparse.ArgumentParser(
        prog="python -m planning.cost_model",
        description="Plan a ring for a causal model in training. Without options: the paper's tables beside ours.",
    )
    for name, (low, high, kind, what) in OPTIONS.items():
        needed = name not in OPTIONAL
        parser.add_argument(f"--{name}", metavar="X", required=needed, type=number(low, high, kind, what), help=what)
    parser.add_argument("--dtype", required=True, choices=ITEMSIZE, help="of the model's activations")
    words: list[str] = []
    for word in arguments:
        if words and words[-1].startswith("--") and word[:1] == "-" != word[1:2]:
            words[-1] += f"={word}"  # argparse takes -80e9 for an option
        else:
            words.append(word)
    options = parser.parse_args(words)
    default = "" if options.heads else " (hidden / 128)"
    options.heads = options.heads or max(1, options.hidden // 128)
    if options.hidden % options.heads:
        parser.error(
            f"hidden is {options.hidden}, heads {options.heads}{default}; expected a multiple of heads: give --heads"
        )
    if options.heads % options.kv_heads:
        parser.error(
            f"heads is {options.heads}{default}, kv-heads {options.kv_heads}; expected a multiple of kv-heads: "
            "give --heads"
        )
    if options.seq_len is not None and options.seq_len < options.devices:
        parser.error(f"seq-len is {options.seq_len} on {options.devices} devices; expected a token for each of them")
    return options


def show_plan(options: argparse.Namespace) -> None:
    """Print what the model says of the reader's cluster: a causal model in zigzag, in training, a batch of 1."""
    P, F, B, L = options.devices, options.flops, options.bandwidth, options.layers
    layer = Layer(options.heads, options.kv_heads, options.hidden // options.heads, ITEMSIZE[options.dtype])
    heads = f"{L} layers, {layer.heads} heads on {layer.kv_heads}, D = {layer.head_dim}, {options.dtype}"
    devices = f"{P} device{'s' if P > 1 else ''}"
    print(f"{devices} of {F / 1e12:g} TFLOP/s, {B / 1e9:g} GB/s, {options.memory / 1e9:g} GB; modelled, not measured")
    billions = digits(param_count(layer, L) / 1e9)
    print(f"{heads}: {billions} billion weights (feedforward 8h², no embeddings); causal, zigzag")

    whole, forwards, backwards = (
        min_overlap_chunk(F, B, layer, visible=visible, backward=back)
        for visible, back in ((1, False), (1 / 2, False), (1 / 2, True))
    )
    chunks = f"{forwards:,.0f} tokens forwards, {backwards:,.0f} backwards ({whole:,.0f} without a mask)"
    print(f"smallest free chunk   {chunks}")
    if P > 1:
        print(f"messages hidden       from S = {P * max(forwards, backwards):,.0f} on, but the gradients' last hop")
    state, token = STATE * param_count(layer, L) / P / 1e9, token_bytes(layer, L, "training") / 1e3
    print(f"memory of a device    {digits(state)} GB for weights and Adam, {digits(token)} kB a token")
    longest = longest_context(options.memory, layer, L, P)
    print(
        f"longest context       at most {longest:,} tokens, {longest // P:,} a device: loss and feedforward in pieces"
    )
    S = options.seq_len or longest
    if S:
        print(f"a layer at S = {S:,}")
        show_layer(layer, S / P, options, (forwards, backwards))
    print(f"advice                {advice(S, longest, layer, options)}")


def show_layer(layer: Layer, chunk: float, options: argparse.Namespace, free: tuple[float, float]) -> None:
    """Print the time and bytes of a layer; `free` is the smallest free chunk forwards and backwards."""
    P = options.devices
    for backward, free_chunk in enumerate(free):
        work = layer, chunk, P, options.flops, options.bandwidth
        overlapped, one_by_one = (
            digits(1e3 * pass_seconds(*work, visible=1 / 2, backward=bool(backward), overlap=overlap))
            for overlap in (True, False)
        )
        home = digits(1e3 * gradient_bytes(layer, chunk) / options.bandwidth)
        last = f" ({home} the last hop)" if backward and P > 1 else ""
        share = f"{hidden_share(chunk, free_chunk):.0%} hidden"
        name = "backwards" if backward else "forwards"
        print(f"    {name:<18}{share}; {overlapped} ms overlapped{last}, {one_by_one} ms one after the other")
    for method in ("ring", "all-gather", "all-to-all"):
        try:
            sent = sent_bytes(method, layer, chunk, P)
        except ValueError as reason:
            print(f"    {method:<18}{reason}")
        else:
            held = peak_bytes(method, layer, chunk, P)
            print(f"    {method:<18}a device sends {digits(sent / 1e9)} GB forwards and holds {digits(held / 1e9)} GB")


def advice(seq_len: int, longest: int, layer: Layer, options: argparse.Namespace) -> str:
    """What to do, in one line, for S tokens (0: nothing fits), of which P devices hold `longest`."""
    P, L = options.devices, options.layers
    if not 0 < seq_len <= longest:
        tokens, state, token = max(1, seq_len), STATE * param_count(layer, L), token_bytes(layer, L, "training")
        if options.memory <= token:
            return f"fits on no number of such devices: a token takes {digits(token / 1e6)} MB"
        surely = tokens + ceil(state / (options.memory - token))  # one token each
        reached = partial(longest_context, options.memory, layer, L)
        return f"does not fit: it takes {bisect_left(range(surely), tokens, lo=P, key=reached):,} such devices"
    if P == 1:
        return "fits on one device: a ring begins at two"

    def milliseconds(ring: int) -> float:
        work = layer, seq_len / ring, ring, options.flops, options.bandwidth
        return 1e3 * sum(pass_seconds(*work, visible=1 / 2, backward=backward) for backward in (False, True))

    # A smaller ring has longer chunks, and leaves devices for other sequences; all of them share the weights.
    rings = [ring for ring in range(1, P + 1) if P % ring == 0 and ceil(seq_len / ring) <= longest // P]
    fastest, smallest = min(rings, key=milliseconds), rings[0]
    one = f"ring of {fastest}, {digits(milliseconds(fastest))} ms a layer"
    if smallest == P:
        return f"one {one}; it takes all of them to hold the sequence"
    each = digits(milliseconds(smallest) * smallest / P)
    return f"one sequence: {one}; many: {P // smallest} rings of {smallest}, {each} ms a sequence"


def main(arguments: Sequence[str] = ()) -> int:
    if arguments:
        show_plan(read_options(arguments))
        return 0
    return hidden_communication.main() | ring_memory.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
