"""The cost model: the paper's numbers beside ours, and a plan for your own cluster.

    smallest chunk          w/2 · G/H · flops / bandwidth tokens            hides its messages: hidden_communication.py
    longest context         (P·memory - 16·parameters) / (w·h·(L + 22))     fits the memory: ring_memory.py; bf16, G = H
    hosts of devices        the fastest of five ways to share a sequence    is simulated: two_speeds.py, ranking.py

Without options it prints tables 1 to 3 of the paper and its example of 512 devices. With --model and --gpu it answers
what a person asks: the fastest way to share a training step, its time, what fits, what binds, what to change first.
With numbers only it plans attention: one ring, or, with --hosts, all ways to share the sequence, the fastest first.
Such devices are ideal: rounds cost nothing beside their products, unless --gpu or --machine says what they cost.
--help names the unit of each option.

Shapes: numbers only. P devices, L layers, width h = H·D, G key/value heads, w bytes an element; `flops` is the FLOP/s
of a device, `bandwidth` the bytes/s of a link. All results are modelled, not measured.

    $ python -m ringlab.planning.cost_model
    Table 2 (bf16; K: 1000 tokens): the smallest chunk that hides its messages; a sequence needs six of it
                       TFLOP/s   GB/s    chunk: printed, ours    sequence: printed, ours
    A100 NVLink            312  300.0             1.0K   1.04K              6.2K    6.24K
    ...

    $ python -m ringlab.planning.cost_model --model llama-3.1-8b --gpu h100 --hosts 1 --seq-len 131072 --plot plan.svg

    $ python -m ringlab.planning.cost_model --flops 990e12 --bandwidth 450e9 --memory 80e9 --devices 8 --layers 32 \\
          --hidden 4096 --kv-heads 8 --dtype bf16

    $ python -m ringlab.planning.cost_model --hosts 16 --per-host 8 --flops 990e12 --bandwidth 450e9 \\
          --host-bandwidth 12.5e9 --memory 80e9 --layers 32 --hidden 4096 --kv-heads 8 --dtype bf16 --seq-len 1048576

Before: ranking.py, and the files before it. After: ringlab/training/jax_block.py and jax_ring.py, the ring in the
paper's own language.
Source: Liu et al. 2024, section 3, tables 1 to 3 and appendix A; for --hosts, those of two_speeds.py.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import ceil, inf

from ringlab.planning import hidden_communication, ring_memory
from ringlab.planning.answers import NEAR, SIMULATED, show_answers
from ringlab.planning.hidden_communication import (
    AttentionLayer,
    gradient_bytes,
    hidden_share,
    min_overlap_chunk,
    pass_seconds,
    sent_bytes,
)
from ringlab.planning.presets import GPU
from ringlab.planning.ranking import Row, computing_seconds, digits, rank_ways, show_ranking
from ringlab.planning.ring_memory import STATE, longest_context, min_devices, param_count, peak_bytes, token_bytes
from ringlab.planning.round_costs import realistic
from ringlab.planning.step_options import add_presets, add_step, count, fill_from_presets, gpu_of, machine_of, step_of
from ringlab.planning.ways import Cluster
from ringlab.support.extras import install

ITEMSIZE = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}  # bytes
PASSES = {"forward": False, "backward": True}
NOT_COUNTED = "not counted           logits, 14 bytes for each token and word: --model and --gpu count the whole step"
DEVICES = 10**6  # at most: every ring that divides them is planned


def quantity(least: float, meaning: str) -> Callable[[str], float]:
    """A type for argparse: a number of `least` or more. A smaller number has another unit, as 990 for 990e12."""

    def number(text: str) -> float:
        value = float(text)  # argparse reports its ValueError
        if not least <= value <= 1e18:
            raise argparse.ArgumentTypeError(f"{text} was given; expected {least:g} to 1e+18: {meaning}")
        return value

    return number


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a plan. A wrong option ends the program with status 2 and one message: given and expected."""
    parser = argparse.ArgumentParser(
        prog="python -m ringlab.planning.cost_model",
        description="Plan a ring for a causal model in training. Without options: the paper's tables beside ours.",
    )
    known = set(add_presets(parser, arguments))

    for name, least, meaning in (
        ("flops", 1e8, "FLOP/s that attention reaches on a device, 990e12 for 990 TFLOP/s"),
        (
            "bandwidth",
            1e5,
            "bytes/s of the ring's slowest link, one way, 450e9 for 450 GB/s, 50e9 for 400 Gbit/s; with --hosts, of a "
            "device's link inside its host",
        ),
        ("memory", 1e6, "bytes of memory of a device, 80e9 for 80 GB"),
    ):
        parser.add_argument(
            f"--{name}", metavar="X", required=name not in known, type=quantity(least, meaning), help=meaning
        )
    for name, meaning in (
        ("layers", "layers of the model, L"),
        ("hidden", "width of the model, h; a multiple of its query heads"),
        ("kv-heads", "key/value heads, G"),
    ):
        needed = name.replace("-", "_") not in known
        parser.add_argument(f"--{name}", metavar="N", required=needed, type=count, help=meaning)
    for name, meaning in (
        ("devices", "devices in the ring, P"),
        ("hosts", "hosts, in place of --devices: plan for links of two speeds"),
        ("per-host", "devices of a host"),
        ("nics", "network interface cards (NICs) of a host (default: one for each device)"),
        ("heads", "query heads, H (default: hidden / 128)"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=count, help=meaning)
    meaning = "bytes/s of a NIC, one way, 12.5e9 for 100 Gbit/s"
    parser.add_argument("--host-bandwidth", metavar="X", type=quantity(1e5, meaning), help=meaning)
    parser.add_argument("--fsdp", action="store_true", help="with --hosts: a layer's weights use the same links")
    parser.add_argument("--seq-len", metavar="N", type=count, help="tokens, S (default: the longest context that fits)")
    meaning = "dtype of the model's activations"
    parser.add_argument("--dtype", required="dtype" not in known, choices=ITEMSIZE, help=meaning)
    add_step(parser)

    options = parser.parse_args(arguments)
    try:
        fill_from_presets(options)
        options.step, options.wish = step_of(options)
    except ValueError as reason:
        parser.error(str(reason))
    if options.step:
        return options
    check_hosts(parser, options)
    options.heads = options.heads or max(1, options.hidden // 128)
    if options.hidden % options.heads or options.heads % options.kv_heads:
        given = f"hidden is {options.hidden}, heads {options.heads}, kv-heads {options.kv_heads}"
        parser.error(f"{given}; expected each to be a multiple of the next: give --heads (default: hidden / 128)")
    if options.devices > DEVICES:
        parser.error(f"devices is {options.devices:,}; expected {DEVICES:,} at most")
    if options.seq_len and options.seq_len < options.devices:
        parser.error(f"seq-len is {options.seq_len} on {options.devices} devices; expected at least a token on each")
    return options


def check_hosts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set `devices` of hosts. End the program with status 2 if the options of hosts and devices do not fit together."""
    P, hosts, per_host = options.devices, options.hosts, options.per_host
    if not options.bandwidth and (not hosts or (per_host or 1) > 1):
        parser.error("bandwidth is null in the machine's file; expected --bandwidth too, in bytes/s inside a host")
    if not hosts:
        if per_host or options.nics or options.host_bandwidth or options.fsdp or not P:
            parser.error("hosts was not given; expected --devices only, or --hosts and --per-host")
        return
    if not per_host:
        parser.error(f"hosts is {hosts}; expected --per-host too, the devices of a host")
    if P and hosts * per_host != P:
        parser.error(f"devices is {P}, hosts x per-host {hosts} x {per_host} = {hosts * per_host}; expected one number")
    if hosts * per_host > SIMULATED:
        parser.error(
            f"hosts x per-host is {hosts * per_host:,}; expected {SIMULATED:,} at most, every hop is simulated"
        )
    if hosts > 1 and not options.host_bandwidth:
        parser.error(f"hosts is {hosts}; expected --host-bandwidth too, in bytes/s")
    if options.nics and options.nics > per_host:
        parser.error(f"nics is {options.nics}; expected {per_host} at most, one for each device of a host")
    options.devices = hosts * per_host


def layer_of(options: argparse.Namespace) -> AttentionLayer:
    """The attention of the model's layers."""
    return AttentionLayer(options.heads, options.kv_heads, options.hidden // options.heads, ITEMSIZE[options.dtype])


def model_line(layer: AttentionLayer, options: argparse.Namespace) -> str:
    """What the plan is for: a causal model in training."""
    heads = f"{layer.heads} query heads on {layer.kv_heads}, D = {layer.head_dim}"
    parameters = digits(param_count(layer, options.layers) / 1e9)
    model = f"{options.layers} layers, {heads}, {options.dtype}: {parameters} billion parameters"
    return f"{model} (feedforward 8h², no embeddings); causal, zigzag"


def show_plan(options: argparse.Namespace) -> None:
    """Print the plan of one ring, for a causal model in training: zigzag layout, batch 1."""
    P, L = options.devices, options.layers
    layer, rates = layer_of(options), (options.flops, options.bandwidth)
    device = f"{options.flops / 1e12:g} TFLOP/s, {options.bandwidth / 1e9:g} GB/s, {options.memory / 1e9:g} GB"
    print(f"{P} device{'s' if P > 1 else ''} of {device}; modelled, not measured")
    print(model_line(layer, options))

    unmasked = min_overlap_chunk(*rates, layer)
    chunks = {name: min_overlap_chunk(*rates, layer, visible=1 / 2, backward=PASSES[name]) for name in PASSES}
    each = ", ".join(f"{chunk:,.0f} tokens {name}" for name, chunk in chunks.items())
    print(f"smallest chunk        that hides its messages: {each} ({unmasked:,.0f} forward without a mask)")
    if P > 1:
        sequence = f"from S = {P * max(chunks.values()):,.0f} on"
        print(f"messages hidden       {sequence}, except the last hop of the gradients")
    state, token = STATE * param_count(layer, L) / P / 1e9, token_bytes(layer, L, "training") / 1e3
    print(f"memory of a device    {digits(state)} GB for parameters, gradients and Adam, {digits(token)} kB a token")
    longest = longest_context(options.memory, layer, L, P)
    each = f"{longest // P:,} a device"
    print(f"longest context       {longest:,} tokens at most, {each}; loss and feedforward in pieces")
    S = options.seq_len or longest
    if S:
        print(f"a layer at S = {S:,}")
        show_layer(layer, ceil(S / P), options, chunks)
    print(NOT_COUNTED)
    print(f"advice                {advice(S, longest, layer, options)}")


def show_layer(layer: AttentionLayer, chunk: int, options: argparse.Namespace, min_chunks: dict[str, float]) -> None:
    """Print the time and the bytes of a layer. `min_chunks` are the smallest chunks that hide their messages."""
    P = options.devices
    for name, backward in PASSES.items():
        work = layer, chunk, P, options.flops, options.bandwidth
        overlapped, blocking = (
            digits(1e3 * pass_seconds(*work, visible=1 / 2, backward=backward, overlap=overlap))
            for overlap in (True, False)
        )
        home = digits(1e3 * gradient_bytes(layer, chunk) / options.bandwidth)
        last = f" ({home} of it the last hop)" if backward and P > 1 else ""
        share = f"{hidden_share(chunk, min_chunks[name]):.0%} hidden"
        print(f"    {name:<18}{share}; {overlapped} ms with overlap{last}, {blocking} ms without")
    for method in ("ring", "all-gather", "all-to-all"):
        try:
            sent = sent_bytes(method, layer, chunk, P)
        except ValueError as reason:
            print(f"    {method:<18}{reason}")
        else:
            peak = digits(peak_bytes(method, layer, chunk, P) / 1e9)
            print(f"    {method:<18}forward, a device sends {digits(sent / 1e9)} GB; its peak memory is {peak} GB")


def advice(seq_len: int, longest: int, layer: AttentionLayer, options: argparse.Namespace) -> str:
    """What to do with S tokens (0: not even the model fits), in one line. The P devices hold at most `longest`."""
    P, L = options.devices, options.layers
    if not 0 < seq_len <= longest:
        devices = min_devices(options.memory, layer, L, max(1, seq_len))
        if devices is None:
            token = digits(token_bytes(layer, L, "training") / 1e6)
            return f"fits on no number of such devices: a token takes {token} MB"
        return f"does not fit: it takes {devices:,} such devices"
    if P == 1:
        return "fits on one device: a ring begins at two"

    def milliseconds(ring: int) -> float:
        work = layer, ceil(seq_len / ring), ring, options.flops, options.bandwidth
        return 1e3 * sum(pass_seconds(*work, visible=1 / 2, backward=backward) for backward in PASSES.values())

    # A smaller ring has longer chunks and leaves devices for other sequences. All devices share the parameters.
    rings = [ring for ring in range(1, P + 1) if P % ring == 0 and ceil(seq_len / ring) <= longest // P]
    fastest, smallest = min(rings, key=milliseconds), rings[0]
    best = f"ring of {fastest}, {digits(milliseconds(fastest))} ms a layer"
    if smallest == P:
        return f"one {best}; fewer devices cannot hold the sequence"
    each = digits(milliseconds(smallest) * smallest / P)
    return f"one sequence: a {best}; many: {P // smallest} rings of {smallest}, {each} ms a sequence"


def advice_on_ways(rows: Sequence[Row], memory: float) -> tuple[str, str]:
    """What to do with many sequences ("": share each of them), and with one, each in one line. Rows of `rank_ways`."""
    several, rows = ([row for row in rows if (row.sequences > 1) == many] for many in (True, False))
    seconds = {row.name: row.seconds for row in rows}
    near = [row.name for row in rows[1:] if row.held <= memory and row.seconds <= NEAR * rows[0].seconds]
    others = f" (nearly as fast: {', '.join(near)})" if near else ""
    ring = f"; the ring takes {digits(1e3 * seconds['ring'])} ms" if "ring" not in [rows[0].name, *near] else ""
    many = ""
    for row in several:
        if row.held <= memory and row.each < rows[0].seconds:
            times = f"{digits(1e3 * row.each)} ms a layer for each, {digits(1e3 * row.seconds)} ms until all are done"
            many = f"{row.name}: {times}"
    return many, f"{rows[0].name}: {digits(1e3 * rows[0].seconds)} ms a layer{others}{ring}"


def with_costs(cluster: Cluster, gpu: GPU) -> Cluster:
    """The cluster of a named GPU: with what a round costs."""
    forward, backward = gpu.attention["fused"]
    nominal = replace(cluster, flops=forward, backward_flops=backward, memory_bandwidth=gpu.memory_bandwidth)
    return realistic(replace(nominal, multiprocessors=gpu.multiprocessors), gpu.card_share)


def show_ways(options: argparse.Namespace) -> None:
    """Print the ranking of the ways on hosts, for a causal model in training: a balanced layout, batch 1."""
    rates = options.flops, options.bandwidth or inf, options.host_bandwidth or options.bandwidth or inf
    cluster, layer = Cluster(options.hosts, options.per_host, *rates, options.nics or 0), layer_of(options)
    if measured := machine_of(options):
        sizes = {"hosts": cluster.hosts, "per_host": cluster.per_host, "nics": cluster.nics}
        cluster = replace(measured, **sizes)
    elif options.gpu:
        cluster = with_costs(cluster, gpu_of(options))
    mask = "causal" if measured or options.gpu else None  # an ideal device computes half of the pairs in every round
    inside = f", {rates[1] / 1e9:g} GB/s inside" if rates[1] < inf else ""
    device = f"{options.flops / 1e12:g} TFLOP/s, {options.memory / 1e9:g} GB{inside}"
    between = f", NICs of a host: {cluster.nics} of {rates[2] / 1e9:g} GB/s" if cluster.hosts > 1 else ""
    print(f"hosts of devices: {cluster.hosts} of {cluster.per_host}; {device}{between}; simulated, not measured")
    print(model_line(layer, options))
    longest = longest_context(options.memory, layer, options.layers, cluster.devices)
    print(f"longest context       {longest:,} tokens at most, in a ring of {cluster.devices}")
    print(NOT_COUNTED)
    S = options.seq_len or longest
    if not 0 < S <= longest:
        print(f"advice                {advice(S, longest, layer, options)}")
        return
    chunk = ceil(S / cluster.devices)
    rows = rank_ways(cluster, layer, options.layers, chunk, options.memory, fsdp=options.fsdp, mask=mask)
    weights = ", with the weights of FSDP on the same links" if options.fsdp else ""
    print(f"a layer at S = {S:,}, forward + backward{weights}")
    show_ranking(rows, computing_seconds(cluster, layer, chunk, mask=mask))
    many, best = advice_on_ways(rows, options.memory)
    if many:
        print(f"many sequences        {many}")
    print(f"advice                {best}")


def show_step(options: argparse.Namespace) -> None:
    """Print the answers of a whole step, and draw them if a file is named."""
    show_answers(options.step, options.wish)
    if not options.plot:
        return
    if find_spec("matplotlib") is None:
        print(f"plot                  none: it needs matplotlib: {install('plots')}")
        return
    from ringlab.planning.plan_picture import draw
    from ringlab.support.drawing import svg

    options.plot.write_text(svg(draw(options.step, options.wish)))
    print(f"plot                  {options.plot}")


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments:
        options = read_options(arguments)
        if options.step:
            show_step(options)
        else:
            show_ways(options) if options.hosts else show_plan(options)
        return 0
    return hidden_communication.main() | ring_memory.main()


if __name__ == "__main__":
    sys.exit(main())
