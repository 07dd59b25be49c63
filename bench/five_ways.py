"""Five ways to share a sequence, and PyTorch's own loop, on hosts with a slow link: measured and predicted.

    measured     seconds of the forward pass, and of forward and backward, of a causal layer in the zigzag layout
    computing    the same pieces on the same ranks, without a message
    predicted    five_ways_predicted.py: the planner's times, from FLOP/s and bytes/s of the same run

The hosts are network namespaces (hosts.py) with one core each. The ranks of a host share this core, so the machine has
more ranks than cores, and the core that computes also copies the messages. In a job all ways are measured in turn, so
that a disturbance affects all of them. Before that, each way is compared with full attention in float64 on a short
sequence.

Linux only, as root, with iproute2. Elsewhere it gives the reason and measures nothing. It takes about 18 minutes; a run
that was stopped goes on where it was.

    $ sudo .venv/bin/python -m bench.five_ways

After: five_ways_predicted.py and five_ways_table.py.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench import record
from bench.against_peers import torch_backward, torch_forward
from bench.five_ways_predicted import BACKWARD, FORWARD, ROTATIONS, Row, peer
from bench.five_ways_table import table
from bench.hosts import hosts, torchrun, why_not
from bench.turns import Method, in_turn
from ringlab.basics.ranks import gather
from ringlab.planning.ways import WAYS
from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext, join_ring
from ringlab.support.rounding import exact_attention
from ringlab.training.all_gather import AllGather, pieces_of_all
from ringlab.training.all_to_all import AllToAll, Alone
from ringlab.training.causal import BlockSlice
from ringlab.training.double_ring import DoubleRing
from ringlab.training.flash_ring import FlashRing, ring_flash_attention
from ringlab.training.hybrid import Hybrid
from ringlab.training.layouts import shard, unshard
from ringlab.training.masks import Mask
from ringlab.training.overlap import post
from ringlab.training.partition import Partition
from ringlab.training.schedule import Ring, Round

Pass = tuple[Callable[[], Any], Callable[[Any], tuple[Tensor, ...]]]  # forward; backward, from the result of forward

SCHEDULES = {
    "ring": Ring,
    "double ring": DoubleRing,
    "all-gather": AllGather,
    "all-to-all": AllToAll,
    "hybrid": Hybrid,
}
MESHES = [(2, 2), (2, 4)]  # hosts x ranks of a host
RATES = [125_000_000, 50_000_000, 20_000_000]  # bytes a second of a host's link, each way
REPETITIONS = {4096: 4, 16384: 2}  # by S
SIZE = {"heads": 8, "kv_heads": 8, "head_dim": 32}
COMPUTING = ("ring", "all-gather", "all-to-all", "hybrid")  # the double ring computes what the ring does
CHECKED = 16  # tokens a rank of the sequence on which each way is compared with full attention
HOPS = 3  # how often a message is timed


def attentions(mesh: DeviceMesh) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The five ways, each a function of this rank's chunks q, k and v."""
    groups = {"double ring": mesh, "hybrid": mesh}
    ring = partial(ring_flash_attention, causal=True, layout="zigzag")
    return {way: partial(ring, schedule=SCHEDULES[way], group=groups.get(way)) for way in WAYS}


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
class Unmoved(Alone):
    """Each round computes its pieces on the rank's own K and V: a way's computing, without its messages."""

    pieces: tuple[tuple[BlockSlice, ...], ...] = ()  # of each round

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        """The rounds, as in `ringlab.training.flash_ring`."""
        for t, pieces in enumerate(self.pieces):
            yield t, k, v, pieces


def inputs(seq_len: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """The whole q, k, v and d_out, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, seq_len, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]


def computing(way: str, mesh: DeviceMesh, seq_len: int, heads: int, kv_heads: int, head_dim: int) -> Pass:
    """The computing of this rank in a way, without messages; for all-gather, the part of one K/V head only.

    All-to-all: this rank's heads over the whole sequence. Hybrid: this rank's heads over its host's part, in a ring of
    hosts.
    """
    P, rank = mesh.size(), mesh.get_rank()
    rings = {"all-to-all": 1, "hybrid": mesh.size(0)}.get(way, P)  # ranks of the ring
    split = kv_heads if way == "all-gather" else P // rings  # the number of parts that heads are split into
    partition, here = Partition(Mask(causal=True), "zigzag", (seq_len // rings,) * rings), rank * rings // P
    q, k, v, d_out = inputs(seq_len // rings, heads // split, max(1, kv_heads // split), head_dim)
    pieces = tuple(partition.pieces(here, (here - t) % rings) for t in range(rings))
    if way == "all-gather":
        _, k, v, _ = inputs(seq_len, 1, 1, head_dim)
        pieces = (pieces_of_all(partition, rank),)
    schedule = Unmoved(partition, head_dim**-0.5, pieces=pieces)
    return differentiable(lambda q, k, v: FlashRing.apply(q, k, v, schedule), q, k, v, d_out)


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
    """A message of `elements` float32 numbers from each rank to the next: its seconds, and seconds of the core."""
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
    """Seconds of each way in both passes, of its computing alone, and of messages inside a host and between hosts."""
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
    unmoved = {f"{name}, computing": computing(name, mesh, seq_len, *sizes) for name in COMPUTING}
    states: dict[str, Any] = {}
    methods: dict[str, Method] = {}

    def forward(name: str, work: Callable[[], Any]) -> None:
        states[name] = work()

    for name, (forwards, backwards) in {**unmoved, **every}.items():
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
