"""Five ways to share a sequence, and PyTorch's own loop, on hosts with a slow link: measured and predicted.

    calibrated   the hosts, before the ways: ring_planner.calibrate
    measured     seconds of the forward pass, and of forward and backward, of a causal layer in the zigzag layout
    computing    the ring's pieces on the same ranks, without a message
    predicted    five_ways_predicted.py: the planner's times, from the calibration alone

The hosts are network namespaces (hosts.py) with one core each. The ranks of a host share this core, so the machine has
more ranks than cores, and the core that computes also copies the messages. In a job all ways are measured in turn, so
that a disturbance affects all of them. Before that, each way is compared with full attention in float64 on a short
sequence.

Linux only, as root, with iproute2. Elsewhere it gives the reason and measures nothing. It takes about half an hour; a
run that was stopped goes on where it was.

    $ sudo .venv/bin/python -m bench.five_ways

After: five_ways_predicted.py.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench import record
from bench.against_peers import Pass, passes, torch_loop
from bench.five_ways_predicted import BACKWARD, FORWARD, ROTATIONS, Row, peer, table
from bench.hosts import command, hosts, row_of, torchrun
from bench.record import Method, in_turn
from ring_planner.ways import WAYS
from ringlab.basics.ranks import gather
from ringlab.ring.flash_ring import FlashRing, ring_flash_attention
from ringlab.ring.layouts import shard, unshard
from ringlab.ring.masks import Mask
from ringlab.ring.partition import BlockSlice, Partition
from ringlab.ring.schedule import Ring, Round, Schedule
from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext
from ringlab.support.rounding import exact_attention
from ringlab.ways.all_gather import AllGather
from ringlab.ways.all_to_all import AllToAll, OwnSums
from ringlab.ways.double_ring import DoubleRing
from ringlab.ways.hybrid import Hybrid

SCHEDULES: dict[str, type[Schedule]] = {  # of WAYS
    "ring": Ring,
    "double ring": DoubleRing,
    "all-gather": AllGather,
    "all-to-all": AllToAll,
    "hybrid": Hybrid,
}
MESHES = [(2, 2), (2, 4)]  # hosts x ranks of a host
RATES = [125_000_000, 50_000_000, 20_000_000]  # bytes a second of a host's link, each way
REPETITIONS = {4096: 6, 16384: 3}  # by S
SIZE = {"heads": 8, "kv_heads": 8, "head_dim": 32}
COMPUTING = "ring, computing"
CHECKED = 16  # tokens a rank of the sequence on which each way is compared with full attention


def attentions(mesh: DeviceMesh) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The five ways and PyTorch's own loop, each a function of this rank's chunks q, k and v."""
    groups = {"double ring": mesh, "hybrid": mesh}
    options: dict[str, Any] = {"causal": True, "layout": "zigzag"}
    ring, loop = partial(ring_flash_attention, **options), partial(torch_loop, **options)
    ours = {way: partial(ring, schedule=SCHEDULES[way], group=groups.get(way)) for way in WAYS}
    return ours | {peer(rotation): partial(loop, rotation=rotation) for rotation in ROTATIONS}


@dataclass(frozen=True)
class Unmoved(Schedule):
    """Each round computes its pieces on the rank's own K and V: a way's computing, without its messages."""

    pieces: tuple[tuple[BlockSlice, ...], ...] = ()  # of each round

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        """The rounds, as in `ringlab.ring.flash_ring`."""
        for t, pieces in enumerate(self.pieces):
            yield t, k, v, pieces

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> OwnSums:
        return OwnSums(k, v, dtype)


def inputs(seq_len: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """The whole q, k, v and d_out, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, seq_len, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]


def computing(mesh: DeviceMesh, seq_len: int, heads: int, kv_heads: int, head_dim: int) -> Pass:
    """The computing of this rank in the ring, without messages."""
    P, rank = mesh.size(), mesh.get_rank()
    partition = Partition(Mask(causal=True), "zigzag", (seq_len // P,) * P)
    pieces = tuple(partition.pieces(rank, (rank - t) % P) for t in range(P))
    schedule = Unmoved(partition, head_dim**-0.5, pieces=pieces)
    whole = inputs(seq_len // P, heads, kv_heads, head_dim)
    return passes(lambda q, k, v: FlashRing.apply(q, k, v, schedule), *whole)


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


def measured(
    context: RankContext, per_host: int, seq_len: int, repetitions: int, heads: int, kv_heads: int, head_dim: int
) -> Row:
    """Seconds of each way in both passes, and of the ring's computing alone."""
    P, sizes = context.world_size, (heads, kv_heads, head_dim)
    mesh = init_device_mesh("cpu", (P // per_host, per_host), mesh_dim_names=("hosts", "devices"))

    def of_ways(whole: list[Tensor]) -> dict[str, Pass]:
        chunks = [shard(x, "zigzag", context.rank, P) for x in whole]
        return {name: passes(attention, *chunks) for name, attention in attentions(mesh).items()}

    short = inputs(CHECKED * P, *sizes)
    check(context, of_ways(short), short)  # this opens the connections as well
    every = of_ways(inputs(seq_len, *sizes))
    unmoved = {COMPUTING: computing(mesh, seq_len, *sizes)}
    states: dict[str, Any] = {}
    methods: dict[str, Method] = {}

    def forward(name: str, work: Callable[[], Any]) -> None:
        states[name] = work()

    for name, (forwards, backwards) in {**unmoved, **every}.items():
        methods[f"{name}, {FORWARD}"] = False, partial(forward, name, forwards)
        methods[f"{name}, {BACKWARD}"] = False, lambda name=name, backwards=backwards: backwards(states.pop(name))
    seconds, _ = in_turn(context, methods, repetitions, warm_up=0)
    return {"seconds": seconds}


def measure(
    meshes: list[tuple[int, int]], rates: list[int], repetitions: dict[int, int], **size: int
) -> record.Results:
    """The whole bench: a row for each mesh, rate and S. Raises OSError where it cannot run."""
    made = record.made("five_ways", "float32")

    def step(count: int, per_host: int, rate: int, seq_len: int | None) -> Row:
        place = {"hosts": count, "per_host": per_host, "rate": rate}
        with hosts(count, rate) as joined, TemporaryDirectory() as folder:
            processes = [per_host] * count
            if seq_len is None:
                layer = f"--heads {size['heads']} --head-dim {size['head_dim']} --dtype float32".split()
                words = "-m", "ring_planner.calibrate", "--device", "cpu", *layer, "--out", f"{folder}/machine.json"
                torchrun(joined, *words, processes=processes)
                return {**place, "machine": json.loads(Path(folder, "machine.json").read_text())}
            sizes = {"per_host": per_host, "seq_len": seq_len, "repetitions": repetitions[seq_len], **size}
            return {**place, "seq_len": seq_len, **row_of(joined, "five_ways", sizes, processes)}

    steps = {
        f"{h} x {g}, {rate / 1e6:g} MB/s, {f'S = {S}' if S else 'calibration'}": (h, g, rate, S)
        for h, g in meshes
        for rate in rates
        for S in (None, *repetitions)  # None: the calibration, just before the ways
    }
    found = record.in_steps("five_ways", {"repetitions": repetitions, **size}, steps, step).values()
    machines, rows = ([row for row in found if ("machine" in row) == calibrated] for calibrated in (True, False))
    return {**made, "reference": f"{COMPUTING}, {FORWARD}", **size, "machines": machines, "rows": rows}


if __name__ == "__main__":
    command("five_ways", measured, lambda: measure(MESHES, RATES, REPETITIONS, **SIZE), table)
