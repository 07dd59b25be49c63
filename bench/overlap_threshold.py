"""Zero overhead, measured: the share of the messages that a ring hides, against the chunk, between two hosts.

    F = 4·C²·H·D / seconds of computing on a block        B = 2·C·H·D·w / seconds of a hop, while nobody computes
    predicted    min(1, C / C*), with the knee C* = w/2 · F/B, from the same run's F and B
    measured     1 - wait / hop, where the wait is what is left of the hop when the ring has computed on its block

The ring is training.flash_ring's, in float32 (w = 4), forwards, without a mask; the two hosts are network namespaces
joined by a link of a set rate (two_hosts.py), a torchrun node in each: one rank, one thread, one core. Two ranks make
one hop. No time of one host is compared with one of the other.

Linux only, as root, with iproute2 and util-linux; elsewhere it says so and measures nothing. About 3 minutes; when
stopped, it goes on where it was.

    $ sudo .venv/bin/python -m bench.overlap_threshold
"""

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from basics.ranks import gather, scatter
from bench import record
from bench.two_hosts import torchrun, two_hosts, why_not
from planning.hidden_communication import Layer, block_flops, hidden_share, hop_bytes, min_overlap_chunk
from support import timeline
from support.agreement import agree
from support.processes import RankContext, join_ring
from support.rounding import exact_attention
from training.flash_ring import ring_flash_attention
from training.fused_block import fused_forward
from training.overlap import post, seconds

Row = dict[str, float]

CHUNKS = {  # by the link's bytes a second: tokens a rank, in steps of about √2, from well below the knee to above it
    200_000_000: [256, 362, 512, 724, 1024, 1448, 2048, 2896],
    50_000_000: [1024, 1448, 2048, 2896, 4096, 5793, 8192],
}
PREDICTIONS = {"F": "predicted", "F_meanwhile": "predicted_meanwhile"}  # the knee that each F predicts
SIZE = {"heads": 8, "head_dim": 64, "repetitions": 7}


def check_ring(context: RankContext) -> None:
    """Raise RuntimeError on rank 0 unless the ring between these hosts is full attention; the chunks are not equal."""
    whole = torch.randn(3, 1, 2, 100 * context.world_size + 1, 8, generator=torch.Generator().manual_seed(0)).unbind()
    out = gather(ring_flash_attention(*(scatter(x if context.rank == 0 else None, context) for x in whole)), context)
    if out is not None and not exact_attention(*whole)["out"].accepts(out):
        raise RuntimeError("the ring between the hosts differs from full attention")


def measure_hop(context: RankContext, chunk: int, *, heads: int, head_dim: int, repetitions: int) -> Row:
    """Seconds, the mean of the ranks and of these the median of the repetitions, which take all of it in turn.

    Of computing on a block; of a hop by itself; of the whole overlapped ring, and in it, of the wait and of computing
    on the block that travels.
    """
    q, k, v = torch.randn(3, 1, heads, chunk, head_dim, generator=torch.Generator().manual_seed(context.rank)).unbind()
    received = [torch.empty_like(k), torch.empty_like(v)]

    def compute() -> None:
        fused_forward(q, k, v, scale=head_dim**-0.5)

    def hop() -> None:
        for work in post([k, v], received):
            work.wait()

    def ring() -> None:
        ring_flash_attention(q, k, v)

    seen = []
    for _ in range(1 + repetitions):  # the first warms up
        row = {"computing": _time(compute), "messages": _time(hop)}
        with timeline.record(k) as events:
            row["ring"] = _time(ring)
        row["waiting"] = seconds(events, "wait")
        row["computing_meanwhile"] = seconds([event for event in events if event.round == 0], "compute")
        seen.append(row)
    return {name: median(row[name] for row in seen[1:]) for name in seen[0]}


def _time(work: Callable[[], None]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    work()
    mine = time.perf_counter() - begin
    return mean(agree(lambda: mine))


def shares(row: Row) -> Row:
    """The share of the hop that is hidden, and the overhead: the ring's time beyond that of its two blocks."""
    return {
        "hidden": 1 - row["waiting"] / row["messages"],
        "overhead": row["ring"] / (2 * row["computing"]) - 1,
    }


def knee(rows: list[Row], layer: Layer) -> Row:
    """F, B and the knee that they predict, for the rows of one link, beside the knee measured.

    F and B are medians over the chunks; F also as it is while messages travel, with the knee that this predicts. The
    knee measured is the one whose line is nearest to the shares: the sum of the distances is smallest.
    """

    def flops(computing: str) -> float:
        return median(block_flops(layer, row["chunk"] ** 2) / row[computing] for row in rows)

    def distance(free_chunk: float) -> float:
        return sum(abs(row["hidden"] - hidden_share(row["chunk"], free_chunk)) for row in rows)

    F, meanwhile = flops("computing"), flops("computing_meanwhile")
    B = median(hop_bytes(layer, row["chunk"]) / row["messages"] for row in rows)
    candidates = [rows[0]["chunk"] * 1.01**i for i in range(600)]  # up to 390 times the first chunk
    return {
        "F": F,
        "F_meanwhile": meanwhile,
        "B": B,
        "predicted": min_overlap_chunk(F, B, layer),
        "predicted_meanwhile": min_overlap_chunk(meanwhile, B, layer),
        "measured": min(candidates, key=distance),
    }


def measure(chunks: dict[int, list[int]], **size: int) -> record.Results:
    """The whole bench: a row for each link and chunk, a knee for each link. Raises OSError where it cannot be."""
    machine = record.machine()
    steps = {f"{rate / 1e6:g} MB/s, C = {chunk}": (rate, chunk) for rate in chunks for chunk in chunks[rate]}

    def step(name: str) -> Row:
        rate, chunk = steps[name]
        with two_hosts(rate) as hosts:
            return json.loads(torchrun(hosts, "-m", "bench.overlap_threshold", json.dumps({"chunk": chunk, **size})))

    settings = {"machine": {name: machine[name] for name in ("cores", "torch")}, **size}
    seen = record.in_steps("overlap_threshold", settings, list(steps), step)
    rows = [{"rate": steps[name][0], "chunk": steps[name][1], **row, **shares(row)} for name, row in seen.items()]
    layer = Layer(size["heads"], size["heads"], size["head_dim"], itemsize=torch.float32.itemsize)
    knees = [{"rate": rate, **knee([row for row in rows if row["rate"] == rate], layer)} for rate in chunks]
    command = "python -m bench.overlap_threshold"
    return {"command": command, "machine": machine, "dtype": "float32", **size, "rows": rows, "knees": knees}


def table(results: record.Results) -> str:
    """The results as markdown, times in milliseconds."""
    lines = [
        "# Zero overhead: what a ring between two hosts hides, against the chunk",
        "",
        record.heading(results),
        f"B = 1, H = {results['heads']}, D = {results['head_dim']}, no mask, forwards; two ranks, so one hop, each on "
        "a host of its own: a network namespace, one core, one thread. The link carries the rate each way, both at "
        f"once. Means of the two ranks, medians of {results['repetitions']}.",
        "",
        "F and B: measured, medians over the chunks below; F also while messages travel, which the same core copies. "
        "The knee, in tokens. Predicted: modelled from F and B, w/2 · F/B with w = 4 bytes. Measured: the c whose line "
        "min(1, C/c) is nearest to the shares below.",
        "",
        "| link | B | F | knee predicted | F meanwhile | knee predicted from it | knee measured |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in results["knees"]:
        speeds = [f"{row[name] / 1e9:.0f} GFLOP/s | {row[knee]:,.0f}" for name, knee in PREDICTIONS.items()]
        cells = [f"{row['rate'] / 1e6:g} MB/s", f"{row['B'] / 1e6:.0f} MB/s", *speeds, f"{row['measured']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Times in ms: of computing on a block, alone and while messages travel; of a hop alone; of the wait for it in "
        "the ring; of the ring. Hidden: 1 - wait / hop; it should be min(1, C / knee predicted). Overhead: the ring's "
        "time beyond that of computing on two blocks; its other small parts, as agreeing on the lengths and the "
        "buffers, count too.",
        "",
        "| link, MB/s | C | computing | meanwhile | hop | wait | ring | hidden | should be | overhead |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    predicted = {row["rate"]: row["predicted"] for row in results["knees"]}
    for row in results["rows"]:
        times = [row[name] for name in ("computing", "computing_meanwhile", "messages", "waiting", "ring")]
        parts = [row["hidden"], hidden_share(row["chunk"], predicted[row["rate"]]), row["overhead"]]
        cells = [f"{row['rate'] / 1e6:g}", f"{row['chunk']:,}", *(f"{1e3 * time:.1f}" for time in times)]
        lines.append(f"| {' | '.join(cells + [f'{part:.0%}' for part in parts])} |")
    return "\n".join(lines) + "\n"


def work(size: dict[str, Any]) -> None:
    """What a rank does that torchrun started: check the ring, measure, and print the row on rank 0."""
    with join_ring("cpu") as context:
        check_ring(context)
        row = measure_hop(context, **size)
        if context.rank == 0:
            print(json.dumps(row))


def main() -> int:
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        work(json.loads(sys.argv[1]))
    elif reason := why_not():
        print(f"nothing measured: {reason}")
    else:
        record.save("overlap_threshold", measure(CHUNKS, **SIZE), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
