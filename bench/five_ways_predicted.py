"""Five ways to share a sequence: the times that the planner predicts, from a calibration of the same hosts.

    predicted    ring_planner.seconds.pass_of, with
        FLOP/s       of the pieces that the way computes: table "computing" of the calibration
        bytes/s, latency    of the way's own kind of message: table "messages"
    + the time in which the core copies messages that travel while ranks compute: "core" of this table
    + an agreement of all ranks, in the forward pass: the shortest all-to-all; on a mesh, two

A host here has one core for all its ranks, unlike the planner's devices. Its core copies all messages, so the seconds
of the core are counted by bytes, in place of the planner's `slowdown`. gloo's reduce-scatter is an all-reduce, which
sends everything twice.

Shapes: a row is what wires.py measured on one mesh, link and S: seconds by way and pass.

Below: predictions and measurements compared, in a table.

Before: wires.py.
"""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import geometric_mean, mean, median
from typing import Any

import torch

from bench import record
from ring_planner.calibrate import wire
from ring_planner.hidden_communication import AttentionLayer, block_flops
from ring_planner.round_costs import MERGE_CALLS
from ring_planner.seconds import Pass, pass_of
from ring_planner.ways import WAYS, Cluster, traffic
from ringlab.ring.masks import Mask
from ringlab.ring.partition import BlockSlice, Partition
from ringlab.ways.all_gather import pieces_of_all

Row = dict[str, Any]

NEAR = 0.15  # a good prediction is so near
NOISE = 0.05  # two ways whose times differ by a smaller share are equally fast
ROTATIONS = ("all-to-all", "all-gather")  # of PyTorch's own loop
FORWARD, BACKWARD, TRAIN = "forward", "backward", "training"


def peer(rotation: str) -> str:
    """The name of PyTorch's own loop with this rotation."""
    return f"PyTorch's loop, {rotation}"


def layer_of(results: record.Results) -> AttentionLayer:
    """The attention of the bench."""
    return AttentionLayer(results["heads"], results["kv_heads"], results["head_dim"], itemsize=torch.float32.itemsize)


def machine_of(results: record.Results, row: Row) -> dict[str, Any]:
    """The calibration of a row's hosts: the content of a file of ring_planner/machine.py."""
    (machine,) = [
        each["machine"]
        for each in results["machines"]
        if all(each[name] == row[name] for name in ("hosts", "per_host", "rate"))
    ]
    return machine


def rows_of(results: record.Results, count: int, per_host: int, seq_len: int) -> list[Row]:
    """The rows of a mesh and an S: a row for each rate."""
    wanted = {"hosts": count, "per_host": per_host, "seq_len": seq_len}
    return [row for row in results["rows"] if wanted.items() <= row.items()]


def flops_at(table: list[Row], length: float) -> float:
    """FLOP/s of a block of this length: between two rows in proportion to the logarithm, beyond the ends as there."""
    if length <= table[0]["length"]:
        return table[0]["flops"]
    for a, b in pairwise(table):
        if length <= b["length"]:
            share = math.log(length / a["length"]) / math.log(b["length"] / a["length"])
            return (1 - share) * a["flops"] + share * b["flops"]
    return table[-1]["flops"]


def piece_seconds(machine: dict[str, Any], share: AttentionLayer, piece: BlockSlice, rows: int, which: str) -> float:
    """Seconds of a piece of a block, of whose queries and keys there are `rows`, for the heads of `share`.

    A triangle that is longer than any in the table is triangles of the longest, and a rectangle for the rest.
    """
    kinds = {
        mask: [each for each in machine["computing"] if (each["pass"], each["mask"]) == (which, mask)]
        for mask in ("none", "causal")
    }
    queries, keys = (len(range(*part.indices(rows))) for part in (piece.queries, piece.keys))

    def seconds(pairs: float, mask: str, length: float) -> float:
        return block_flops(share, pairs, backward=which == BACKWARD) / flops_at(kinds[mask], length)

    if not piece.triangle:
        return seconds(queries * keys, "none", math.sqrt(queries * keys))
    tile = min(queries, kinds["causal"][-1]["length"])
    triangles = queries * (tile + 1) / 2
    return seconds(triangles, "causal", tile) + seconds(queries * (queries + 1) / 2 - triangles, "none", queries)


def alone(results: record.Results, row: Row, way: str, which: str) -> float:
    """Seconds of a way's kernels in one pass, without messages: all pieces of the rank that has most."""
    layer, machine, P, S = layer_of(results), machine_of(results, row), row["hosts"] * row["per_host"], row["seq_len"]
    rings = {"all-to-all": 1, "hybrid": row["hosts"]}.get(way, P)  # ranks of the ring
    share = replace(layer, heads=layer.heads * rings // P)
    partition = Partition(Mask(causal=True), "zigzag" if rings > 1 else "contiguous", (S // rings,) * rings)
    seconds = []
    for rank in range(rings):
        if way == "all-gather":
            pieces = pieces_of_all(partition, rank)
        else:
            pieces = tuple(piece for block in range(rings) for piece in partition.pieces(rank, block))
        keys = S if way == "all-gather" else S // rings
        seconds.append(sum(piece_seconds(machine, share, piece, keys, which) for piece in pieces))
    return max(seconds)


def messages(machine: dict[str, Any], kind: str, place: str) -> list[Row]:
    """The table of a kind of message, "inside" a host or "between" hosts, the shortest first."""
    return [row for row in machine["messages"] if (row["kind"], row["place"]) == (kind, place)]


def wires(machine: dict[str, Any], cluster: Cluster, way: str) -> Cluster:
    """The cluster with bytes/s and latency of the messages that a way sends."""
    P, per_host = cluster.devices, cluster.per_host
    if way == "all-gather":  # a ring of all ranks: each link carries what a rank sends
        latency, rate = wire(messages(machine, way, "between"))
        step = latency / (P - 1)
        return replace(cluster, host_bandwidth=rate, latency=step, host_latency=step)
    if way == "hybrid":  # its rows exchange heads inside a host
        latency, rate = wire(messages(machine, "all-to-all", "inside"))
        return replace(cluster, bandwidth=rate, latency=latency)
    if way == "all-to-all":
        latency, rate = wire(messages(machine, way, "between"))
        leaves = (P - per_host) / (P - 1)  # this share of a rank's bytes
        _, inside = wire(messages(machine, way, "inside"))
        host = {"host_bandwidth": per_host * leaves * rate / cluster.nics, "host_latency": latency}
        return replace(cluster, bandwidth=inside, latency=latency, **host)
    return cluster


def agreement(machine: dict[str, Any], way: str) -> float:
    """Seconds in which all ranks agree: the shortest all-to-all. On a mesh, inside each host first, then between."""
    places = ("inside", "between") if way in ("double ring", "hybrid") else ("between",)
    return sum(messages(machine, "all-to-all", place)[0]["seconds"] for place in places)


def predicted_pass(results: record.Results, row: Row, way: str, which: str, rate: float | None) -> float:
    """Seconds of one pass: the planner's, with the time in which the core copies the hidden messages."""
    layer, per_host, machine = layer_of(results), row["per_host"], machine_of(results, row)
    backward, options = which == BACKWARD, {"split": per_host} if way == "hybrid" else {}
    cluster = wires(machine, Cluster(**machine["cluster"]), way)
    if way == "all-gather" and backward:  # three times a head's bytes travel, where the planner counts two
        rates = {name: getattr(cluster, name) / 1.5 for name in ("bandwidth", "host_bandwidth")}
        cluster = replace(cluster, **rates, latency=1.5 * cluster.latency, host_latency=1.5 * cluster.host_latency)
    if rate is not None:
        cluster = replace(cluster, host_bandwidth=cluster.host_bandwidth * rate / row["rate"])
    chunk = row["seq_len"] / cluster.devices
    device, nic = traffic(way, layer, chunk, cluster, backward=backward, ours=False, **options)
    copying = nic * copy_seconds(machine, "between")
    if way != "hybrid":
        copying += per_host * device * copy_seconds(machine, "inside")
    hidden, merges = 1.0, cluster.devices  # the share of the messages that is hidden; partial results to merge
    if way == "all-gather":
        hidden, merges = 1 - 1 / layer.kv_heads, 0
    elif way == "all-to-all":
        hidden, merges = 0.0, 0
    elif way == "hybrid":
        merges = row["hosts"]
    launches = merges * MERGE_CALLS[backward] * cluster.launch  # those of the kernel are in its own FLOP/s
    seconds = alone(results, row, way, which) + launches + hidden * copying
    flops = block_flops(layer, row["seq_len"] * chunk / 2, backward=backward) / seconds
    computing = replace(cluster, flops=flops, backward_flops=flops, launch=0.0, slowdown=1.0)
    modelled = pass_of(way, Pass(computing, layer, chunk, backward, ours=way == "all-gather"), **options)
    return modelled if backward else modelled + agreement(machine, way)


def copy_seconds(machine: dict[str, Any], place: str) -> float:
    """Seconds of a core for each byte of a message, of the longest one."""
    longest = messages(machine, "send", place)[-1]
    return longest["core"] / longest["bytes"]


def predicted(results: record.Results, row: Row, way: str, which: str, rate: float | None = None) -> float:
    """Seconds of the forward pass, or of training: forward and backward. `rate`: of another link than the row's."""
    passes = [FORWARD] if which == FORWARD else [FORWARD, BACKWARD]
    return sum(predicted_pass(results, row, way, each, rate) for each in passes)


def timed(row: Row, name: str, which: str) -> list[float]:
    """Seconds of each repetition of a way, of a peer or of "..., computing": forward, or forward and backward."""
    forward, backward = (row["seconds"][f"{name}, {each}"] for each in (FORWARD, BACKWARD))
    return forward if which == FORWARD else [a + b for a, b in zip(forward, backward, strict=True)]


def cells(results: record.Results) -> list[tuple[Row, str]]:
    """(row, forward or training) of every cell. All ways are measured in each cell."""
    return [(row, which) for which in (FORWARD, TRAIN) for row in results["rows"]]


def errors(results: record.Results) -> list[float]:
    """Measured / predicted - 1, for each way in each cell."""
    return [
        median(timed(row, way, which)) / predicted(results, row, way, which) - 1
        for row, which in cells(results)
        for way in WAYS
    ]


def excess(results: record.Results, row: Row, which: str) -> float:
    """The measured time of the way with the smallest predicted time, over that of the fastest way, less 1."""
    measured = {way: median(timed(row, way, which)) for way in WAYS}
    advised = min(WAYS, key=lambda way: predicted(results, row, way, which))
    return measured[advised] / min(measured.values()) - 1


def over_peers(results: record.Results) -> dict[str, list[float]]:
    """In every cell: the speed of each way, and of the fastest way, over the faster rotation of PyTorch's loop."""
    ratios: dict[str, list[float]] = {name: [] for name in (*WAYS, "fastest")}
    for row, which in cells(results):
        peers = min(median(timed(row, peer(rotation), which)) for rotation in ROTATIONS)
        mine = {way: median(timed(row, way, which)) for way in WAYS}
        for name, seconds in {**mine, "fastest": min(mine.values())}.items():
            ratios[name].append(peers / seconds)
    return ratios


def tables(results: record.Results) -> list[str]:
    """Median seconds; in brackets measured over predicted."""
    wrong, late = errors(results), [excess(results, row, which) for row, which in cells(results)]
    names, of_passes = [*WAYS, *(peer(rotation) for rotation in ROTATIONS)], []
    for which in (FORWARD, TRAIN):
        rows = []
        for row in results["rows"]:
            here = [f"{row['hosts']} x {row['per_host']}", f"{row['seq_len']:,}", f"{row['rate'] / 1e6:g}"]
            for name in names:
                seconds = median(timed(row, name, which))
                ratio = f" ({seconds / predicted(results, row, name, which):.2f})" if name in WAYS else ""
                here.append(f"{seconds:.3f}{ratio}")
            rows.append(here)
        of_passes += [f"{which.capitalize()}{' (forward and backward)' if which == TRAIN else ''}:"]
        of_passes += [record.grid(" | ".join(["hosts x ranks | S | MB/s", *names]), rows)]
    speeds = [[name, f"{min(x):.2f}", f"{geometric_mean(x):.2f}"] for name, x in over_peers(results).items()]
    said = (
        f"- Ways in cells: {len(wrong)}. Measured is within 15 % of predicted in "
        f"{mean(abs(error) <= NEAR for error in wrong):.0%} of them; half are within {median(map(abs, wrong)):.0%}.\n"
        "- The way that is predicted to be the fastest is the fastest one, or takes at most 5 % longer, in "
        f"{sum(share <= NOISE for share in late)} of {len(late)} cells (a mesh, a link, an S and a pass)."
    )
    return [said, "\n\n".join(of_passes), record.grid("<way | slowest cell | geometric mean", speeds)]
