"""A ring of four hosts whose links or devices are not alike: measured, and simulated by ring_planner.unequal.

    a device of F FLOP/s     computes on a block, then sleeps until 4·(pairs)·H·D / F seconds are over
    a slow link              a network card of another rate, or a wire between two hosts (hosts.py)

Four hosts share the machine's cores. If they computed as fast as they can, one that waits would make another faster,
and a slow device would be slow for its neighbour too. So every device has a set speed that leaves the cores idle half
of the time. All numbers of the ring are computed, and compared with full attention in float64 on a short sequence.

Linux only, as root, with iproute2. Elsewhere it gives the reason and measures nothing. It takes about 4 minutes; a run
that was stopped goes on where it was.

    $ sudo .venv/bin/python -m bench.unequal_links
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bench import record
from bench.hosts import command, hosts, row_of
from bench.overlap_threshold import check_ring
from bench.record import in_turn
from ring_planner.hidden_communication import AttentionLayer, block_flops
from ring_planner.unequal import best_order, proportional_chunks, unequal_ring
from ringlab.ring import flash_ring
from ringlab.ring.fused_block import fused_forward
from ringlab.support.agreement import agree, members
from ringlab.support.processes import RankContext
from ringlab.support.timeline import laps

Row = dict[str, Any]

FAST, SLOW = 100_000_000, 2_000_000  # bytes a second of a link
ALIKE = (1.0, 1.0, 1.0, 1.0)  # speeds of the devices, of the fastest one's
# The rates of the slow links, and the speeds of the devices.
CASES: dict[str, tuple[dict[tuple[int, ...], int], tuple[float, ...]]] = {
    "all alike": ({}, ALIKE),
    "one slow wire, between hosts 0 and 1": ({(0, 1): SLOW}, ALIKE),
    "one slow card, of host 2": ({(2,): SLOW}, ALIKE),
    "two slow wires, 0 to 1 and 2 to 3": ({(0, 1): SLOW, (2, 3): SLOW}, ALIKE),
    "two slow wires, hosts in the best order": ({(0, 1): SLOW, (2, 3): SLOW}, ALIKE),
    "device 2 at half speed": ({}, (1.0, 1.0, 0.5, 1.0)),
    "device 2 at half speed, chunks in proportion": ({}, (1.0, 1.0, 0.5, 1.0)),
    "devices 2 and 3 at a third": ({}, (1.0, 1.0, 1 / 3, 1 / 3)),
    "devices 2 and 3 at a third, chunks in proportion": ({}, (1.0, 1.0, 1 / 3, 1 / 3)),
    "devices 1 and 3 at a third": ({}, (1.0, 1 / 3, 1.0, 1 / 3)),
    "devices 1 and 3 at a third, chunks in proportion": ({}, (1.0, 1 / 3, 1.0, 1 / 3)),
}
GAINS = {  # the case with a cure: the case without
    "two slow wires, hosts in the best order": "two slow wires, 0 to 1 and 2 to 3",
    **{name: name.removesuffix(", chunks in proportion") for name in CASES if name.endswith(", chunks in proportion")},
}
SIZE = {"seq_len": 8192, "heads": 2, "head_dim": 64, "flops": 5e9, "repetitions": 2}


@contextmanager
def device_of(flops: float, late: list[float]) -> Iterator[None]:
    """Computing on a block takes as long as a device of these FLOP/s would take. `late`: seconds beyond that."""

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        layer, pairs = AttentionLayer(q.shape[1], k.shape[1], q.shape[3]), q.shape[2] * k.shape[2]
        end = time.perf_counter() + block_flops(layer, pairs) / flops
        result = fused_forward(q, k, v, **options)
        left = end - time.perf_counter()
        late.append(max(0.0, -left))
        time.sleep(max(0.0, left))
        return result

    with mock.patch.object(flash_ring, "fused_forward", forward):
        yield


def link_speeds(context: RankContext, size: int) -> list[float]:
    """Bytes/s of the link from each rank to the next, for one message of so many bytes while nothing else travels."""
    message, seconds = torch.zeros(size, dtype=torch.uint8), []
    rank, P = members()

    def send_from(sender: int) -> None:
        if rank == sender:
            dist.send(message, (rank + 1) % P)
        elif rank == (sender + 1) % P:
            dist.recv(message, sender)

    for sender in [0, *range(P)]:  # the first warms up
        seconds.append(laps(partial(send_from, sender), context.device)[(sender + 1) % P].seconds)
    return [size / each for each in seconds[1:]]


def measured(
    context: RankContext, lengths: list[int], flops: list[float], heads: int, head_dim: int, repetitions: int
) -> Row:
    """Seconds of the ring, bytes/s of each link, and the most that a device needed beyond its time."""
    check_ring(context)
    generator = torch.Generator().manual_seed(context.rank)
    q, k, v = torch.randn(3, 1, heads, lengths[context.rank], head_dim, generator=generator).unbind()
    speeds = link_speeds(context, (k.nbytes + v.nbytes) // lengths[context.rank] * (sum(lengths) // len(lengths)))
    late: list[float] = []
    with device_of(flops[context.rank], late):
        ring = {"ring": (False, lambda: flash_ring.ring_flash_attention(q, k, v))}
        seconds, _ = in_turn(context, ring, repetitions)
    return {"seconds": seconds["ring"], "bandwidths": speeds, "late": max(agree(lambda: max(late)))}


def plan(name: str, seq_len: int, flops: float) -> tuple[list[int], list[int], list[float]]:
    """Of a case: the order of the hosts, the chunk length of each rank, and the FLOP/s of each rank."""
    slow, speeds = CASES[name]
    P, order = len(speeds), list(range(len(speeds)))
    if "best order" in name:
        links = [[slow.get((min(i, j), max(i, j)), FAST) for j in range(P)] for i in range(P)]
        order = list(best_order(links))
    each = [flops * speeds[host] for host in order]
    lengths = proportional_chunks(seq_len, each if name.endswith("in proportion") else [1.0] * P)
    return order, lengths, each


def measure(
    cases: Sequence[str], seq_len: int, heads: int, head_dim: int, flops: float, repetitions: int
) -> record.Results:
    """The whole bench: a row for each case. Raises OSError where it cannot run."""
    made, size = (
        record.made("unequal_links", "float32"),
        {"heads": heads, "head_dim": head_dim, "repetitions": repetitions},
    )

    def step(name: str) -> Row:
        order, lengths, each = plan(name, seq_len, flops)
        with hosts(len(order), FAST, CASES[name][0]) as joined:
            in_order = [joined[host] for host in order]
            row = row_of(in_order, "unequal_links", {"lengths": lengths, "flops": each, **size})
        layer = AttentionLayer(heads, heads, head_dim, itemsize=torch.float32.itemsize)
        simulated = unequal_ring(lengths, each, row["bandwidths"], layer)
        return {"case": name, **row, "lengths": lengths, "simulated": simulated}

    settings = {"seq_len": seq_len, **size, "flops": flops}
    rows = record.in_steps("unequal_links", settings, {name: (name,) for name in cases}, step).values()
    return {**made, **settings, "rows": list(rows)}


def gains(results: record.Results) -> dict[str, tuple[float, float]]:
    """For each case with a cure, how many times as fast it is: (measured, simulated)."""
    rows = {row["case"]: row for row in results["rows"]}
    return {
        cured: (
            median(rows[ill]["seconds"]) / median(rows[cured]["seconds"]),
            rows[ill]["simulated"] / rows[cured]["simulated"],
        )
        for cured, ill in GAINS.items()
        if cured in rows and ill in rows
    }


def table(results: record.Results) -> str:
    """The results as markdown."""
    rows = []
    for row in results["rows"]:
        seconds, chunks = median(row["seconds"]), " ".join(f"{length:,}" for length in row["lengths"])
        numbers = (seconds, row["simulated"], seconds / row["simulated"])
        rows.append([row["case"], chunks, *(f"{x:.2f}" for x in numbers)])
    cured = [[name, f"{ratio:.2f}", f"{expected:.2f}"] for name, (ratio, expected) in gains(results).items()]
    return record.page(
        "Unequal links and devices: a ring of four hosts, measured and simulated",
        results,
        f"B = 1, H = G = {results['heads']}, D = {results['head_dim']}, S = {results['seq_len']:,}, no mask, forward "
        f"pass. Four hosts: network namespaces, one rank each. A link carries {FAST / 1e6:g} MB/s each way, a slow one "
        f"{SLOW / 1e6:g} MB/s. A device of full speed has {results['flops'] / 1e9:g} GFLOP/s: it computes on a block, "
        f"then sleeps until its time is over. Medians of {results['repetitions']} repetitions. Simulated by "
        "ring_planner.unequal from these FLOP/s and the bytes/s of each link in the same job.",
        record.grid("<case | <C of the ranks | seconds | simulated | measured / simulated", rows),
        "How many times as fast a cure makes the ring:",
        record.grid("<cure | measured | simulated", cured),
    )


if __name__ == "__main__":
    command("unequal_links", measured, lambda: measure(list(CASES), **SIZE), table)
