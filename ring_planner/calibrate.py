"""Calibrate: measure the machine that this runs on, in a minute or two, and write a file that the planner reads.

    computing      seconds of the kernel = launch + FLOPs / flops; causal: a pair with a mask / without one
    memory         bytes / seconds of a copy that no cache holds
    messages       latency = seconds of the shortest;   bytes/s = bytes / (seconds - latency) of the longest
    NICs           bytes/s of all devices of a host together / of one alone, rounded
    slowdown       computing while messages travel / computing alone

All ranks do each of these at the same time, because they share memory, links and cores. A repetition ends with its last
rank; the median counts. Lengths and bytes grow until a call takes long enough. On NCCL it was never run.

    $ python -m ring_planner.calibrate --out machine.json
    2 processes, cpu with gloo, float32, 8 heads of 64: 42 s
        flops             4.45e+10
    ...
    $ torchrun --nnodes=2 --nproc_per_node=8 ... -m ring_planner.calibrate --out machine.json

A reader of the ring may skip this file. `Cluster` in ways.py says what each number means.
Source: Hockney 1994, the latency and bytes/s of a message.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from ring_planner.hidden_communication import AttentionLayer, block_flops
from ring_planner.machine import FIELDS, write_machine
from ring_planner.round_costs import causal_pairs
from ring_planner.ways import Cluster
from ringlab.options import Parser, positive
from ringlab.ring.fused_block import fused_backward, fused_forward
from ringlab.ring.overlap import post
from ringlab.support.agreement import agree
from ringlab.support.devices import choose_device, cpu_cores
from ringlab.support.processes import RankContext, join_ring, launch
from ringlab.support.timeline import Timed, laps

LONG = 0.5  # seconds: lengths and bytes grow as long as a call will take less
SHORT = 0.03  # seconds: shorter calls are repeated, because a clock begins when its rank gets a core
REPETITIONS = 5
LENGTHS = [2**i for i in range(7, 18)]  # tokens of a block
BYTES = [4**i for i in range(6, 16)]  # that a rank sends: 4 KiB to 1 GiB
COPIED = {"cpu": 2**26, "cuda": 2**29}  # bytes, more than a cache holds
QUIET = 0.5  # of a core, at least, while a rank computes
LAYERS = {"cpu": (8, 64, "float32"), "cuda": (32, 128, "bfloat16")}  # heads, head dim and dtype unless given
PASSES, MASKS = ("forward", "backward"), ("none", "causal")

Row = dict[str, Any]


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(fixed, rate) of seconds = fixed + size / rate, from the first and the last; where none fits, fixed is 0."""
    rise, run = seconds[-1] - seconds[0], sizes[-1] - sizes[0]
    fixed = seconds[0] - sizes[0] * rise / run if run and rise > 0 else -1.0
    return (fixed, run / rise) if fixed >= 0 else (0.0, sizes[-1] / seconds[-1])


def wire(rows: Sequence[Row]) -> tuple[float, float]:
    """(latency, bytes/s) of a table of messages, the shortest first."""
    latency, longest = rows[0]["seconds"], rows[-1]
    return latency, longest["bytes"] / max(longest["seconds"] - latency, longest["seconds"] / 2)


@dataclass
class Stopwatch:
    """Times what all ranks do at once."""

    context: RankContext

    def typical(self, work: Timed, after: Timed | None = None) -> tuple[float, float]:
        """Medians of some repetitions, after a call to warm up: seconds until the last rank is done, and of a core.

        With `after`, each repetition is one call and `after`.
        """
        seconds = max(laps(work, self.context.device, 1, after)).seconds
        calls = 1 if after else max(1, round(SHORT / seconds))
        seen = [laps(work, self.context.device, calls, after) for _ in range(REPETITIONS)]
        return median(max(lap).seconds for lap in seen), median(mean(it.core for it in lap) for lap in seen)

    def table(self, name: str, sizes: Sequence[int], growth: int, work: Callable[[int], Timed]) -> list[Row]:
        """A row for each size, until the next call, with `growth` times the work, would take longer than LONG."""
        rows: list[Row] = []
        for size in sizes:
            seconds, core = self.typical(work(size))
            rows.append({name: size, "seconds": seconds, "core": core})
            if growth * seconds > LONG:
                break
        return rows


def computing(watch: Stopwatch, layer: AttentionLayer, dtype: torch.dtype) -> list[Row]:
    """FLOP/s of the kernel by pass, mask and block length. FLOPs are counted of the pairs that a mask shows."""
    device, rows = watch.context.device, []

    def work(length: int, which: str, mask: str) -> Timed:
        q, k, v, d_out = torch.randn(4, 1, layer.heads, length, layer.head_dim, device=device).to(dtype)
        options = {"scale": layer.head_dim**-0.5, "causal": mask == "causal"}
        out, lse = fused_forward(q, k, v, **options)
        if which == "forward":
            return lambda: fused_forward(q, k, v, **options)
        return lambda: fused_backward(q, k, v, out, lse, d_out, **options)

    for which, mask in product(PASSES, MASKS):
        for row in watch.table("length", LENGTHS, 4, partial(work, which=which, mask=mask)):
            pairs = row["length"] * (row["length"] + 1) / 2 if mask == "causal" else row["length"] ** 2
            flops = block_flops(layer, pairs, backward=which == "backward")
            rows.append({"pass": which, "mask": mask, **row, "flops": flops / row["seconds"]})
    return rows


def memory(watch: Stopwatch) -> float:
    """Bytes/s of a copy: each byte is read and written."""
    x, y = torch.zeros(2, COPIED[watch.context.device.type] // 4, device=watch.context.device)
    return 2 * x.nbytes / watch.typical(lambda: y.copy_(x))[0]


def exchange(size: int, group: ProcessGroup | None, device: torch.device) -> Callable[[], list[dist.Work]]:
    """Begin to send `size` bytes to the next rank of the group."""
    sent, received = torch.zeros(2, size, dtype=torch.uint8, device=device).unbind()
    return lambda: post([sent], [received], group)


def message(group: ProcessGroup, device: torch.device) -> Callable[[int], Timed]:
    """A function of the bytes that a rank sends: it gives what sends them to the next rank."""

    def work(size: int) -> Timed:
        begin = exchange(size, group, device)
        return lambda: [work.wait() for work in begin()]

    return work


def slowdown(watch: Stopwatch, layer: AttentionLayer, dtype: torch.dtype, rows: list[Row], travel: Row) -> float:
    """How many times longer computing takes while messages travel: those of `travel`, the longest of a table.

    `rows` is the table of computing. The block takes half of the message's time at most, so a message lasts.
    """
    device = watch.context.device
    first, *longer = (row for row in rows if (row["pass"], row["mask"]) == ("forward", "none"))
    length = max([first["length"], *(row["length"] for row in longer if row["seconds"] <= travel["seconds"] / 2)])
    q, k, v = torch.randn(3, 1, layer.heads, length, layer.head_dim, device=device).to(dtype)
    begin, works = exchange(travel["bytes"], travel["group"], device), list[dist.Work]()

    def compute() -> None:
        fused_forward(q, k, v, scale=layer.head_dim**-0.5)

    def compute_meanwhile() -> None:
        works[:] = begin()
        compute()

    alone, _ = watch.typical(compute)
    meanwhile, _ = watch.typical(compute_meanwhile, lambda: [work.wait() for work in works])
    return max(1.0, meanwhile / alone)


def cost_of_a_mask(rows: list[Row]) -> float:
    """How many times longer the kernel takes for a pair under a causal mask, where the planner counts its pairs.

    It is that of the longest block that was measured with and without the mask, forward.
    """
    seconds = {(row["mask"], row["length"]): row["seconds"] for row in rows if row["pass"] == "forward"}
    length = max(length for mask, length in seconds if mask == "none" and ("causal", length) in seconds)
    share = causal_pairs(length) / length**2
    return max(1.0, seconds["causal", length] / seconds["none", length] / share)


def messages(watch: Stopwatch, hosts: int, per_host: int) -> tuple[dict[str, Any], list[Row], Row]:
    """What a cluster says of its wires, the tables of all messages, and the longest message between two ranks."""
    device, rank = watch.context.device, watch.context.rank
    mesh = init_device_mesh(device.type, (hosts, per_host), mesh_dim_names=("between", "inside"))
    numbers: dict[str, Any] = {}
    tables: list[Row] = []
    longest: Row = {}
    for place, sharing in (("inside", per_host), ("between", hosts)):
        if sharing == 1:
            continue
        group = mesh.get_group(place)
        rows = watch.table("bytes", BYTES, 4, message(group, device))
        tables += [{"kind": "send", "place": place, **row} for row in rows]
        latency, bandwidth = wire(rows)
        longest = {**rows[-1], "group": group}
        if place == "inside":
            numbers |= {"bandwidth": bandwidth, "latency": latency}
        else:
            alone = message(group, device)(longest["bytes"])
            seconds, _ = watch.typical(alone if rank % per_host == 0 else lambda: None)
            nics = min(per_host, max(1, round(per_host * seconds / longest["seconds"])))
            numbers |= {"host_bandwidth": per_host * bandwidth / nics, "host_latency": latency, "nics": nics}
    return numbers, tables, longest


def measured(context: RankContext, heads: int, head_dim: int, dtype: str) -> dict[str, Any]:
    """Everything: the cluster, and the tables. Raises ValueError on every rank where hosts have not equal numbers."""
    begin, watch, P = time.perf_counter(), Stopwatch(context), context.world_size
    here = agree(lambda: int(os.environ.get("LOCAL_WORLD_SIZE", P)))
    if len(set(here)) > 1 or P % here[0]:
        raise ValueError(f"the hosts have {sorted(set(here))} processes; expected equal numbers")
    hosts, per_host, number = P // here[0], here[0], getattr(torch, dtype)
    layer = AttentionLayer(heads, heads, head_dim, number.itemsize)
    rows = computing(watch, layer, number)
    numbers: dict[str, Any] = {"memory_bandwidth": memory(watch), "bandwidth": math.inf}
    for which, name in zip(PASSES, ("flops", "backward_flops"), strict=True):
        table = [row for row in rows if (row["pass"], row["mask"]) == (which, "none")]
        launch, numbers[name] = fit([row["flops"] * row["seconds"] for row in table], [row["seconds"] for row in table])
        numbers.setdefault("launch", launch)  # of the forward pass
    numbers["causal"] = cost_of_a_mask(rows)
    of_wires, tables, longest = messages(watch, hosts, per_host)
    numbers |= of_wires
    if P > 1:
        numbers["slowdown"] = slowdown(watch, layer, number, rows, longest)
    made = {
        "on": torch.cuda.get_device_name() if context.device.type == "cuda" else "cpu",
        "backend": dist.get_backend(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": time.perf_counter() - begin,
    }
    about = {"layer": {"heads": heads, "head_dim": head_dim, "dtype": dtype}, "made": made}
    return {"cluster": Cluster(hosts, per_host, **numbers), **about, "computing": rows, "messages": tables}


def faults(results: dict[str, Any]) -> list[str]:
    """What a quiet machine would not measure: others used it meanwhile. Empty: nothing was seen."""
    cluster, signs = results["cluster"], []
    busy = [row["core"] / row["seconds"] for row in results["computing"] if results["made"]["on"] == "cpu"]
    if busy and median(busy) < QUIET:
        signs.append(f"computing had {median(busy):.0%} of a core")
    if cluster.launch == 0:
        signs.append("longer blocks took less than their share of the time")
    for place in ("inside", "between"):
        sent = [row["seconds"] for row in results["messages"] if (row["kind"], row["place"]) == ("send", place)]
        if sent and sent[0] > 1.5 * min(sent):
            signs.append(f"the shortest message {place} took longer than a longer one")
    return signs


def show(results: dict[str, Any]) -> None:
    """Print the numbers that the planner takes."""
    layer, made = results["layer"], results["made"]
    on = f"{made['on']} with {made['backend']}, {layer['dtype']}, {layer['heads']} heads of {layer['head_dim']}"
    print(f"{results['cluster'].devices} processes, {on}: {made['seconds']:.0f} s")
    for name in FIELDS:
        print(f"    {name:<18}{getattr(results['cluster'], name):.4g}")


def read_options() -> argparse.Namespace:
    parser = Parser(prog="python -m ring_planner.calibrate", description="Measure this machine.")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="the file to write, for the planner")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--processes", metavar="N", type=positive, help="on this host (default: GPUs, or else cores)")
    parser.add_argument("--heads", metavar="N", type=positive, help="query heads of a layer, H")
    parser.add_argument("--head-dim", metavar="N", type=positive, help="numbers in a head, D")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of q, k and v")
    options = parser.parse_args()
    if options.out.is_dir() or not options.out.parent.is_dir():
        parser.error(f"out is {options.out}; expected a file in a folder that is there")
    if not options.processes:
        gpus = torch.cuda.device_count() if options.device != "cpu" else 0
        options.processes = gpus or cpu_cores()
    try:
        device, _, _ = choose_device(options.device, int(os.environ.get("LOCAL_WORLD_SIZE", options.processes)))
    except ValueError as error:
        parser.error(str(error))
    layer = (options.heads, options.head_dim, options.dtype)
    options.layer = tuple(given or usual for given, usual in zip(layer, LAYERS[device], strict=True))
    return options


def main() -> int:
    options = read_options()
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        with join_ring(options.device) as context:
            results = measured(context, *options.layer)
            if context.rank > 0:
                return 0
    else:
        results = launch(measured, options.processes, *options.layer, device=options.device)[0]
    show(results)
    if signs := faults(results):
        print(f"BUSY: {'; '.join(signs)}. Expected a quiet machine: stop other programs and measure again")
    write_machine(options.out, **results)
    print(f"wrote {options.out}: plan with `ring-plan --gpu NAME --machine {options.out}`: the GPU gives the memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
