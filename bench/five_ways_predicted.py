"""Five ways to share a sequence: the times that the planner predicts, from speeds measured in the same job.

    predicted    ringlab.planning.two_speeds.simulate
                 + the time in which the core copies the messages that travel while ranks compute
                 + the time of one agreement of all ranks, in the forward pass

Shapes: a row is what five_ways.py measured on one mesh, link and S: seconds by way and pass, and seconds of messages.

Before: five_ways.py. After: five_ways_table.py, predictions and measurements compared.
"""

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from bench import record
from ringlab.planning.hidden_communication import AttentionLayer, block_flops
from ringlab.planning.two_speeds import simulate
from ringlab.planning.ways import WAYS, Cluster, traffic

Row = dict[str, Any]

ROTATIONS = ("all-to-all", "all-gather")  # of PyTorch's own loop
FORWARD, BACKWARD, TRAIN = "forward", "backward", "training"


def peer(rotation: str) -> str:
    """The name of PyTorch's own loop with this rotation."""
    return f"PyTorch's loop, {rotation}"


@dataclass(frozen=True)
class Speeds:
    """The speeds of a machine, measured in a job."""

    flops: dict[tuple[str, str], float]  # FLOP/s of a rank by way and pass, while all ranks compute
    in_host: float  # bytes/s of a rank inside its host while all ranks send; the core copies all that time
    between_hosts: float  # bytes/s of a host's link while all its ranks send
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
    return Speeds(
        flops,
        in_host=messages["bytes"] / messages["inside"]["seconds"],
        between_hosts=row["per_host"] * messages["bytes"] / messages["between"]["seconds"],
        copying=messages["between"]["core"] / messages["bytes"],
        agreement=messages["agreement"],
    )


def rows_of(results: record.Results, count: int, per_host: int, seq_len: int) -> list[Row]:
    """The rows of a mesh and an S: a row for each rate."""
    wanted = {"hosts": count, "per_host": per_host, "seq_len": seq_len}
    return [row for row in results["rows"] if wanted.items() <= row.items()]


def at_rate(results: record.Results, rows: list[Row], rate: float) -> Speeds:
    """The speeds to expect over a link of another rate, from the rows of one mesh and S.

    Each is the median of the rows. For bytes/s between hosts, the rows' share of their link's rate is taken.
    """
    each = [speeds(results, row) for row in rows]
    share = median(seen.between_hosts / row["rate"] for seen, row in zip(each, rows, strict=True))
    flops = {key: median(seen.flops[key] for seen in each) for key in each[0].flops}
    return Speeds(
        flops,
        in_host=median(seen.in_host for seen in each),
        between_hosts=share * rate,
        copying=median(seen.copying for seen in each),
        agreement=median(seen.agreement for seen in each),
    )


def predicted_pass(results: record.Results, row: Row, seen: Speeds, way: str, which: str) -> float:
    """Seconds of one pass: the planner's, with the time in which the core copies the hidden messages.

    In the planner's devices a message costs no computing. Here the core of a host copies all messages of its ranks. So
    messages that travel while ranks compute make this computing longer.
    """
    layer, per_host, chunk = layer_of(results), row["per_host"], row["seq_len"] / (row["hosts"] * row["per_host"])
    backward, options = which == BACKWARD, {"split": per_host} if way == "hybrid" else {}
    flops = block_flops(layer, row["seq_len"] * chunk / 2, backward=backward)
    rates = {"bandwidth": seen.in_host, "host_bandwidth": seen.between_hosts}
    cluster = partial(Cluster, row["hosts"], per_host, nics=1, **rates)
    device, nic = traffic(way, layer, chunk, cluster(flops=1.0), backward=backward, **options)
    hidden = {"all-gather": 1 - 1 / layer.kv_heads, "all-to-all": 0.0}.get(way, 1.0)
    copying = nic * seen.copying + (0.0 if way == "hybrid" else device / seen.in_host)
    slower = flops / (flops / seen.flops[way, which] + hidden * copying)
    simulated = simulate(way, cluster(flops=slower), layer, chunk, backward=backward, **options)
    return simulated + (0.0 if backward else seen.agreement)


def predicted(results: record.Results, row: Row, way: str, which: str, seen: Speeds | None = None) -> float:
    """Seconds of the forward pass, or of training: forward and backward. `seen`: speeds (None: those of the row)."""
    seen = seen or speeds(results, row)
    passes = [FORWARD] if which == FORWARD else [FORWARD, BACKWARD]
    return sum(predicted_pass(results, row, seen, way, each) for each in passes)


def timed(row: Row, name: str, which: str) -> list[float]:
    """Seconds of each repetition of a way, of a peer or of "..., computing": forward, or forward and backward."""
    forward, backward = (row["seconds"][f"{name}, {each}"] for each in (FORWARD, BACKWARD))
    return forward if which == FORWARD else [a + b for a, b in zip(forward, backward, strict=True)]
