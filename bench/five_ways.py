"""Five ways to share a sequence, and PyTorch's own loop, on hosts with a slow link: measured and predicted.

    measured     seconds of the forward pass, and of forward and backward, of a causal layer in the zigzag layout
    computing    the same pieces on the same ranks, without a message
    predicted    ringlab.planning.two_speeds.simulate, from FLOP/s and bytes/s of the same run

The hosts are network namespaces (hosts.py), a core each. The ranks of a host share this core, so the machine has more
ranks than cores, and what computes also copies the messages. In a job all ways are measured in turn, so that a
disturbance affects all of them. Before that, each way is compared with full attention in float64 on a short sequence.

Linux only, as root, with iproute2. Elsewhere it gives the reason and measures nothing. It takes about 18 minutes; a run
that was stopped goes on where it was.

    $ sudo .venv/bin/python -m bench.five_ways
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench import record
from bench.against_peers import torch_backward, torch_forward
from bench.hosts import hosts, torchrun, why_not
from bench.turns import Method, in_turn
from ringlab.basics.ranks import gather
from ringlab.planning.hidden_communication import AttentionLayer, block_flops
from ringlab.planning.two_speeds import simulate
from ringlab.planning.ways import WAYS, Cluster, traffic
from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext, join_ring
from ringlab.support.rounding import exact_attention
from ringlab.training.all_gather import all_gather_attention, pieces_of_all
from ringlab.training.all_to_all import all_to_all_attention
from ringlab.training.causal import BlockSlice
from ringlab.training.double_ring import double_ring_attention
from ringlab.training.flash_ring import FlashRing, ring_flash_attention
from ringlab.training.hybrid import hybrid_attention
from ringlab.training.layouts import shard, unshard
from ringlab.training.masks import Mask
from ringlab.training.overlap import post
from ringlab.training.partition import Partition
from ringlab.training.schedule import Round, Schedule

Row = dict[str, Any]
Pass = tuple[Callable[[], Any], Callable[[Any], tuple[Tensor, ...]]]  # forward, and backward from what forward gave


ROTATIONS = ("all-to-all", "all-gather")  # of PyTorch's own loop
FORWARD, BACKWARD, TRAIN = "forward", "backward", "training"
MESHES = [(2, 2), (2, 4)]  # hosts x ranks of a host
RATES = [125_000_000, 50_000_000, 20_000_000]  # bytes a second of a host's link, each way
REPETITIONS = {4096: 4, 16384: 2}  # by S
SIZE = {"heads": 8, "kv_heads": 8, "head_dim": 32}
COMPUTING = ("ring", "all-gather", "all-to-all", "hybrid")  # the double ring computes what the ring does
CHECKED = 16  # tokens a rank of the sequence on which each way is compared with full attention
NOISE = 0.05  # two ways whose times differ less are equally fast
HOPS = 3  # how often a message is timed


def peer(rotation: str) -> str:
    """The name of PyTorch's own loop with this rotation."""
    return f"PyTorch's loop, {rotation}"


def attentions(mesh: DeviceMesh) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The five ways, each a function of this rank's chunks q, k and v."""
    options = {"causal": True, "layout": "zigzag"}
    on_mesh = {"double ring": double_ring_attention, "hybrid": hybrid_attention}
    flat = {"ring": ring_flash_attention, "all-gather": all_gather_attention, "all-to-all": all_to_all_attention}
    both = {name: partial(way, **options) for name, way in flat.items()}
    both |= {name: partial(way, group=mesh, **options) for name, way in on_mesh.items()}
    return {name: both[name] for name in WAYS}


def differentiable(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Pass:
    """Forward and backward pass of a way."""

    def forward() -> tuple[Tensor, list[Tensor]]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return attention(*inputs), inputs

    def backward(state: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, ...]:
        out, inputs = state
        return out.detach(), *torch.autograd.grad(out, inputs, d_out)

    return forward, backward


def of_torch(rotation: str, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Pass:
    """Forward and backward pass of PyTorch's own loop."""
    options = {"causal": True, "layout": "zigzag", "rotation": rotation}

    def backward(state: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return state[0], *torch_backward(q, k, v, *state, d_out, **options)

    return lambda: torch_forward(q, k, v, **options), backward


@dataclass(frozen=True)
class Still(Schedule):
    """A schedule in which nothing travels: each round computes its pieces on the same K and V instead."""

    pieces: tuple[tuple[BlockSlice, ...], ...] = ()  # of each round

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        """The rounds, as in `ringlab.training.flash_ring`."""
        for t, pieces in enumerate(self.pieces):
            yield t, k, v, pieces

    def sums(self, k: Tensor, dtype: torch.dtype) -> "StillSums":
        """Gradients that do not travel either."""
        return StillSums(torch.zeros(2, *k.shape, dtype=dtype))


@dataclass(frozen=True)
class StillSums:
    """One sum for the gradients of all rounds."""

    sum: Tensor

    def of_round(self, t: int) -> Tensor:
        return self.sum

    def send_on(self, t: int) -> None:
        pass

    def home(self) -> Tensor:
        return self.sum


def inputs(seq_len: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """The whole q, k, v and d_out, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, seq_len, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]


def computing(way: str, mesh: DeviceMesh, seq_len: int, heads: int, kv_heads: int, head_dim: int) -> Pass:
    """What this rank computes in a way, without messages; of all-gather, only the part of one K/V head.

    All-to-all: its heads over the whole sequence. Hybrid: those of its host, in a ring of hosts.
    """
    P, rank = mesh.size(), mesh.get_rank()
    rings = {"all-to-all": 1, "hybrid": mesh.size(0)}.get(way, P)  # ranks of the ring
    split = kv_heads if way == "all-gather" else P // rings  # into so many parts heads are split
    partition, here = Partition(Mask(causal=True), "zigzag", (seq_len // rings,) * rings), rank * rings // P
    q, k, v, d_out = inputs(seq_len // rings, heads // split, max(1, kv_heads // split), head_dim)
    pieces = tuple(partition.pieces(here, (here - t) % rings) for t in range(rings))
    if way == "all-gather":
        _, k, v, _ = inputs(seq_len, 1, 1, head_dim)
        pieces = (pieces_of_all(partition, rank),)
    still = Still(partition, head_dim**-0.5, pieces=pieces)
    return differentiable(lambda q, k, v: FlashRing.apply(q, k, v, still), q, k, v, d_out)


def check(context: RankContext, ways: dict[str, Pass], whole: list[Tensor]) -> None:
    """Raise RuntimeError on every rank unless every way gives full attention's out, dq, dk and dv."""
    right = exact_attention(*whole, causal=True, fused_blocks=context.world_size)
    wrong = []
    for name, (forward, backward) in ways.items():
        for what, chunk in zip(("out", "dq", "dk", "dv"), backward(forward()), strict=True):
            x = gather(chunk, context)
            if x is not None:
                x = unshard(list(x.chunk(context.world_size, dim=2)), "zigzag")
                if not right[what].accepts(x):
                    wrong.append(f"{name}: {what} is off by {right[what].error(x).max():.1e}")
    if reason := "; ".join(agree(lambda: wrong)[0]):
        raise RuntimeError(reason)


def hop(group: ProcessGroup, elements: int) -> dict[str, float]:
    """Seconds, and seconds of a process's core, of one message of float32 numbers from each rank to the next one."""
    sent, received = torch.zeros(elements), torch.empty(elements)
    seen = []
    for _ in range(1 + HOPS):  # the first warms up
        dist.barrier()
        begin, busy = time.perf_counter(), time.process_time()
        for work in post([sent], [received], group):
            work.wait()
        mine = time.perf_counter() - begin, time.process_time() - busy
        everyone = agree(lambda mine=mine: mine)
        seen.append((max(seconds for seconds, _ in everyone), mean(core for _, core in everyone)))
    seconds, core = (median(each) for each in zip(*seen[1:], strict=True))
    return {"seconds": seconds, "core": core}


def agreement() -> float:
    """Seconds in which all ranks agree once, as each way does in its forward pass before it sends a block."""
    begin = time.perf_counter()
    for _ in range(HOPS):
        agree(lambda: None)
    return (time.perf_counter() - begin) / HOPS


def measured(
    context: RankContext, mesh: DeviceMesh, seq_len: int, repetitions: int, heads: int, kv_heads: int, head_dim: int
) -> Row:
    """Seconds of every way, in both passes; of its computing alone; of messages inside a host and between hosts."""
    P, sizes = context.world_size, (heads, kv_heads, head_dim)

    def passes(whole: list[Tensor]) -> dict[str, Pass]:
        chunks = [shard(x, "zigzag", context.rank, P) for x in whole]
        mine = {name: differentiable(attention, *chunks) for name, attention in attentions(mesh).items()}
        return mine | {peer(rotation): of_torch(rotation, *chunks) for rotation in ROTATIONS}

    short = inputs(CHECKED * P, *sizes)
    check(context, passes(short), short)  # this opens the connections as well
    elements = 2 * kv_heads * head_dim * seq_len // P  # of a block
    messages = {"bytes": 4 * elements, "agreement": agreement()}
    messages |= {name: hop(mesh.get_group(axis), elements) for axis, name in enumerate(("between", "inside"))}
    every = passes(inputs(seq_len, *sizes))
    still = {f"{name}, computing": computing(name, mesh, seq_len, *sizes) for name in COMPUTING}
    states: dict[str, Any] = {}
    methods: dict[str, Method] = {}

    def forward(name: str, work: Callable[[], Any]) -> None:
        states[name] = work()

    for name, (forwards, backwards) in {**still, **every}.items():
        methods[f"{name}, {FORWARD}"] = False, partial(forward, name, forwards)
        methods[f"{name}, {BACKWARD}"] = False, lambda name=name, backwards=backwards: backwards(states.pop(name))
    fewer = repetitions // 2  # computing alone differs less: half of the turns are without it
    seconds, _ = in_turn(context, methods, repetitions - fewer, warm_up=0)
    again = {name: work for name, work in methods.items() if "computing" not in name}
    more, _ = in_turn(context, again, fewer, warm_up=0)
    seconds = {name: each + more.get(name, []) for name, each in seconds.items()}
    return {"seconds": seconds, "messages": messages}


def work(per_host: int, **size: int) -> None:
    """The work of a rank that torchrun started: measure, and print the row on rank 0."""
    with join_ring("cpu") as context:
        shape = (context.world_size // per_host, per_host)
        row = measured(context, init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "devices")), **size)
        if context.rank == 0:
            print(json.dumps(row))


def measure(
    meshes: list[tuple[int, int]],
    rates: list[int],
    repetitions: dict[int, int],
    folder: Path = record.FOLDER,
    **size: int,
) -> record.Results:
    """The whole bench: a row for each mesh, rate and S. Raises OSError where it cannot run."""
    machine = record.machine()
    cells = [(mesh, rate, S) for S in repetitions for mesh in meshes for rate in rates]
    steps = {f"{h} x {g}, {rate / 1e6:g} MB/s, S = {S}": ((h, g), rate, S) for (h, g), rate, S in cells}

    def step(name: str) -> Row:
        (count, per_host), rate, seq_len = steps[name]
        job = {"per_host": per_host, "seq_len": seq_len, "repetitions": repetitions[seq_len], **size}
        with hosts(count, rate) as joined:
            return json.loads(torchrun(joined, "-m", "bench.five_ways", json.dumps(job), processes=[per_host] * count))

    settings = {"machine": {name: machine[name] for name in ("cores", "torch")}, "repetitions": repetitions, **size}
    seen = record.in_steps("five_ways", settings, list(steps), step, folder)
    rows = [
        {"hosts": h, "per_host": g, "rate": rate, "seq_len": S, **seen[name]}
        for name, ((h, g), rate, S) in steps.items()
    ]
    return {"command": "python -m bench.five_ways", "machine": machine, "dtype": "float32", **size, "rows": rows}


@dataclass(frozen=True)
class Speeds:
    """What a job measured of its machine: FLOP/s of a rank by way and pass, bytes/s, and what messages cost a core."""

    flops: dict[tuple[str, str], float]  # while all ranks compute
    inside: float  # bytes/s of a rank inside its host while all ranks send; the core copies all that time
    between: float  # bytes/s of a host's link while all its ranks send
    copying: float  # seconds of the core for each byte of a message between hosts
    agreement: float  # seconds


def layer_of(results: record.Results) -> AttentionLayer:
    """The attention of the bench."""
    return AttentionLayer(results["heads"], results["kv_heads"], results["head_dim"], itemsize=torch.float32.itemsize)


def alone(results: record.Results, row: Row, way: str, which: str) -> float:
    """Seconds of a way's computing without messages, in one pass; the median."""
    if way == "double ring":
        return alone(results, row, "ring", which)
    seconds = median(row["seconds"][f"{way}, computing, {which}"])
    return results["kv_heads"] * seconds if way == "all-gather" else seconds


def speeds(results: record.Results, row: Row) -> Speeds:
    """The speeds of a row's job."""
    pairs, messages = row["seq_len"] ** 2 / 2 / (row["hosts"] * row["per_host"]), row["messages"]
    flops = {
        (way, which): block_flops(layer_of(results), pairs, backward=which == BACKWARD)
        / alone(results, row, way, which)
        for way in WAYS
        for which in (FORWARD, BACKWARD)
    }
    inside, between = messages["inside"], messages["between"]
    of_host = row["per_host"] * messages["bytes"] / between["seconds"]
    return Speeds(
        flops,
        messages["bytes"] / inside["seconds"],
        of_host,
        between["core"] / messages["bytes"],
        messages["agreement"],
    )


def rows_of(results: record.Results, count: int, per_host: int, seq_len: int) -> list[Row]:
    """The rows of a mesh and an S, one for each rate."""
    wanted = {"hosts": count, "per_host": per_host, "seq_len": seq_len}
    return [row for row in results["rows"] if wanted.items() <= row.items()]


def at_rate(results: record.Results, rows: list[Row], rate: float) -> Speeds:
    """The speeds that rows of one mesh and S would have over a link of another rate: medians, and their share of it."""
    each = [speeds(results, row) for row in rows]
    share = median(seen.between / row["rate"] for seen, row in zip(each, rows, strict=True))
    flops = {key: median(seen.flops[key] for seen in each) for key in each[0].flops}
    inside, copying, agree = (
        median(getattr(seen, name) for seen in each) for name in ("inside", "copying", "agreement")
    )
    return Speeds(flops, inside, share * rate, copying, agree)


def predicted_pass(results: record.Results, row: Row, seen: Speeds, way: str, which: str) -> float:
    """Seconds of one pass by the planner, plus the time that the core needs to copy the messages it hides.

    The planner knows devices whose messages cost no computing. Here the core of a host copies all messages of its
    ranks. So the messages that travel behind computing make this computing longer.
    """
    layer, per_host, chunk = layer_of(results), row["per_host"], row["seq_len"] / (row["hosts"] * row["per_host"])
    backward, options = which == BACKWARD, {"inside": per_host} if way == "hybrid" else {}
    flops = block_flops(layer, row["seq_len"] * chunk / 2, backward=backward)
    cluster = partial(Cluster, row["hosts"], per_host, bandwidth=seen.inside, host_bandwidth=seen.between, nics=1)
    device, nic = traffic(way, layer, chunk, cluster(flops=1.0), backward=backward, **options)
    hidden = {"all-gather": 1 - 1 / layer.kv_heads, "all-to-all": 0.0}.get(way, 1.0)
    copying = nic * seen.copying + (0.0 if way == "hybrid" else device / seen.inside)
    slower = flops / (flops / seen.flops[way, which] + hidden * copying)
    simulated = simulate(way, cluster(flops=slower), layer, chunk, backward=backward, **options)
    return simulated + (0.0 if backward else seen.agreement)


def predicted(results: record.Results, row: Row, way: str, which: str, seen: Speeds | None = None) -> float:
    """Seconds of the forward pass, or of training: forward and backward. `seen` are the row's own speeds, or others."""
    seen = seen or speeds(results, row)
    passes = [FORWARD] if which == FORWARD else [FORWARD, BACKWARD]
    return sum(predicted_pass(results, row, seen, way, each) for each in passes)


def timed(row: Row, name: str, which: str) -> list[float]:
    """Seconds of every repetition of a way, of a peer or of "..., computing": forward, or forward and backward."""
    forward, backward = (row["seconds"][f"{name}, {each}"] for each in (FORWARD, BACKWARD))
    return forward if which == FORWARD else [a + b for a, b in zip(forward, backward, strict=True)]


def cells(results: record.Results) -> list[tuple[Row, str]]:
    """Every row in both passes: a cell is one, with all ways in it."""
    return [(row, which) for which in (FORWARD, TRAIN) for row in results["rows"]]


def errors_where_computing_dominates(results: record.Results) -> list[float]:
    """Measured / predicted - 1, for ways of which computing alone is two thirds of the predicted time or more."""
    errors = []
    for row, which in cells(results):
        for way in WAYS:
            expected = predicted(results, row, way, which)
            passes = (FORWARD,) if which == FORWARD else (FORWARD, BACKWARD)
            if sum(alone(results, row, way, each) for each in passes) >= 2 / 3 * expected:
                errors.append(median(timed(row, way, which)) / expected - 1)
    return errors


def excess(results: record.Results, row: Row, which: str) -> float:
    """How much longer the way that the planner advises takes than the fastest one, both measured: 0 if it is that."""
    measured = {way: median(timed(row, way, which)) for way in WAYS}
    advised = min(WAYS, key=lambda way: predicted(results, row, way, which))
    return measured[advised] / min(measured.values()) - 1


def pairs_in_order(results: record.Results) -> tuple[int, int]:
    """(pairs of ways predicted in the right order, pairs), for pairs whose order is beyond noise.

    That is, one way was faster in all repetitions, and its median by more than NOISE.
    """
    right = of = 0
    for row, which in cells(results):
        for a, b in combinations(WAYS, 2):
            one, other = timed(row, a, which), timed(row, b, which)
            apart = max(one) < min(other) or max(other) < min(one)
            if apart and abs(median(one) - median(other)) > NOISE * min(median(one), median(other)):
                of += 1
                right += (predicted(results, row, a, which) < predicted(results, row, b, which)) == (
                    max(one) < min(other)
                )
    return right, of


def over_peers(results: record.Results) -> dict[str, list[float]]:
    """The speed of each way, and of the fastest of them, over the faster rotation of PyTorch's loop, in every cell."""
    ratios: dict[str, list[float]] = {name: [] for name in (*WAYS, "fastest")}
    for row, which in cells(results):
        peers = min(median(timed(row, peer(rotation), which)) for rotation in ROTATIONS)
        mine = {way: median(timed(row, way, which)) for way in WAYS}
        for name, seconds in {**mine, "fastest": min(mine.values())}.items():
            ratios[name].append(peers / seconds)
    return ratios


def table(results: record.Results) -> str:
    """The results as tables in markdown."""
    shape = f"H = {results['heads']}, G = {results['kv_heads']}, D = {results['head_dim']}"
    errors, (right, pairs) = errors_where_computing_dominates(results), pairs_in_order(results)
    late = [excess(results, row, which) for row, which in cells(results)]
    lines = [
        "# Five ways to share a sequence, on two hosts with a slow link between them",
        "",
        record.heading(results),
        f"B = 1, {shape}, causal, zigzag. Two hosts: network namespaces, each with one core and one link. The ranks of "
        "a host share the core, so 2 or 4 ranks compute on each core at a time: the machine is oversubscribed. MB/s: "
        "what the link carries each way. Median seconds of 2 (S = 16,384) or more repetitions, in turn; in brackets "
        "measured over predicted. Predicted: simulated by ringlab.planning.two_speeds from FLOP/s and bytes/s of the "
        "same job, "
        "plus the time in which the core copies the messages that travel meanwhile, plus one agreement of the ranks.",
        "",
        f"- Ways of which computing alone is two thirds of the predicted time or more: {len(errors)}. Measured is "
        f"within 15 % of predicted in {mean(abs(error) <= 0.15 for error in errors or [0.0]):.0%} of them.",
        "- The way that is predicted to be the fastest is the fastest one, or takes at most 5 % longer, in "
        f"{sum(it <= NOISE for it in late)} of {len(late)} cells (a mesh, a link, an S and a pass).",
        f"- Pairs of ways of which one was faster in all repetitions, and by more than 5 %: {right} of {pairs} are "
        "predicted in this order.",
    ]
    names = [*WAYS, *(peer(rotation) for rotation in ROTATIONS)]
    for which in (FORWARD, TRAIN):
        lines += ["", f"{which.capitalize()}{' (forward and backward)' * (which == TRAIN)}:", ""]
        lines += [
            f"| hosts x ranks | S | MB/s | {' | '.join(names)} |",
            f"| ---: | ---: | ---: |{' ---: |' * len(names)}",
        ]
        for row in results["rows"]:
            here = [f"{row['hosts']} x {row['per_host']}", f"{row['seq_len']:,}", f"{row['rate'] / 1e6:g}"]
            for name in names:
                seconds = median(timed(row, name, which))
                ratio = f" ({seconds / predicted(results, row, name, which):.2f})" if name in WAYS else ""
                here.append(f"{seconds:.3f}{ratio}")
            lines.append(f"| {' | '.join(here)} |")
    lines += ["", "Speed over the faster rotation of PyTorch's loop, in the same job, over all cells:", ""]
    lines += ["| | slowest cell | geometric mean |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {min(it):.2f} | {geometric_mean(it):.2f} |" for name, it in over_peers(results).items()]
    lines += ["", "Speeds that the predictions are made from:", ""]
    lines += ["| hosts x ranks | S | MB/s | GFLOP/s of a rank, ring | inside, MB/s | between, MB/s | agreement, ms |"]
    lines += ["| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in results["rows"]:
        seen = speeds(results, row)
        flops = " / ".join(f"{seen.flops['ring', which] / 1e9:.1f}" for which in (FORWARD, BACKWARD))
        here = [f"{row['hosts']} x {row['per_host']}", f"{row['seq_len']:,}", f"{row['rate'] / 1e6:g}", flops]
        here += [f"{seen.inside / 1e6:.0f}", f"{seen.between / 1e6:.1f}", f"{1e3 * seen.agreement:.1f}"]
        lines.append(f"| {' | '.join(here)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        work(**json.loads(sys.argv[1]))
    elif reason := why_not():
        print(f"nothing measured: {reason}")
    else:
        record.save("five_ways", measure(MESHES, RATES, REPETITIONS, **SIZE), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
