"""Messages over a slow wire: what a ring hides of them.

On one machine the cores that compute also copy the messages, so hiding them saves little time. So messages take time on
a wire here, as in a cluster: hosts (network namespaces, hosts.py) with links of a set rate.

overlap_threshold    the share that a ring between two hosts hides, against the chunk. One rank, thread and core each
    flops            4·C²·H·D / seconds of computing on a block
    bandwidth        2·C·H·D·w / seconds of a hop while no rank computes
    predicted        min(1, C / C*), with the knee C* = w/2 · flops / bandwidth of the same run; w = 4 bytes
    measured         1 - wait / hop, where the wait is what is left of the hop when the ring has computed its block

Linux only, as root, with iproute2 and util-linux. Elsewhere it gives the reason and measures nothing.

    $ sudo .venv/bin/python -m bench overlap_threshold
"""

from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from bench import record
from bench.hosts import hosts, job
from bench.record import Results, bench
from ring_planner.hidden_communication import AttentionLayer, block_flops, hidden_share, hop_bytes, min_overlap_chunk
from ringlab.basics.ranks import gather, scatter
from ringlab.ring.cases import random_inputs
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.fused_block import fused_forward
from ringlab.ring.overlap import post, seconds
from ringlab.support import timeline
from ringlab.support.processes import RankContext
from ringlab.support.rounding import exact_attention
from ringlab.support.timeline import laps

Row = dict[str, Any]

# What a ring hides between two hosts ----------------------------------------------------------------------------------

CHUNKS = {  # link's bytes a second: tokens of a rank, in steps of about √2 from below the knee on
    200_000_000: [256, 362, 512, 724, 1024, 1448, 2048, 2896],
    50_000_000: [1024, 1448, 2048, 2896, 4096, 5793, 8192],
}


def check_ring(context: RankContext) -> None:
    """Raise RuntimeError on rank 0 unless the ring between these hosts is full attention. Its chunks are not equal."""
    whole = random_inputs(1, 2, 2, 100 * context.world_size + 1, 8)[:3]
    out = gather(ring_flash_attention(*(scatter(x if context.rank == 0 else None, context) for x in whole)), context)
    if out is not None and not exact_attention(*whole)["out"].accepts(out):
        raise RuntimeError("the ring between the hosts differs from full attention")


def hop(sent: list[Tensor], received: list[Tensor]) -> None:
    for work in post(sent, received):
        work.wait()


def measure_hop(context: RankContext, chunk: int, *, heads: int, head_dim: int, repetitions: int) -> Row:
    """Mean seconds of the ranks, then the median of the repetitions: of computing on a block; of a hop by itself; of
    the whole overlapped ring; and in this ring, of the wait. A repetition measures all of them in turn. Raises
    RuntimeError on rank 0 when the ring is wrong.
    """
    check_ring(context)
    q, k, v = torch.randn(3, 1, heads, chunk, head_dim, generator=torch.Generator().manual_seed(context.rank)).unbind()
    received = [torch.empty_like(k), torch.empty_like(v)]

    def compute() -> None:
        fused_forward(q, k, v, scale=head_dim**-0.5)

    def ring() -> None:
        ring_flash_attention(q, k, v)

    def time_of(work: Callable[[], None]) -> float:
        return mean(laps(work, context.device))

    seen = []
    for _ in range(1 + repetitions):  # the first warms up
        row = {"computing": time_of(compute), "messages": time_of(partial(hop, [k, v], received))}
        with timeline.record(k) as events:
            row["ring"] = time_of(ring)
        row["waiting"] = seconds(events, "wait")
        seen.append(row)
    return {name: median(row[name] for row in seen[1:]) for name in seen[0]}


def shares(row: Row) -> Row:
    """The share of the hop that is hidden, and the overhead: the ring's time beyond that of its two blocks."""
    return {"hidden": 1 - row["waiting"] / row["messages"], "overhead": row["ring"] / (2 * row["computing"]) - 1}


def knee(rows: list[Row], layer: AttentionLayer) -> Row:
    """FLOP/s, bytes/s and the knee that they predict, for the rows of one link, and the knee measured.

    FLOP/s and bytes/s are medians over the chunks. The measured knee is the one whose line is nearest to the shares:
    the sum of the distances is smallest.
    """

    def distance(min_chunk: float) -> float:
        return sum(abs(row["hidden"] - hidden_share(row["chunk"], min_chunk)) for row in rows)

    flops = median(block_flops(layer, row["chunk"] ** 2) / row["computing"] for row in rows)
    bandwidth = median(hop_bytes(layer, row["chunk"]) / row["messages"] for row in rows)
    candidates = [rows[0]["chunk"] * 1.01**i for i in range(600)]  # up to 390 times the first chunk
    return {
        "flops": flops,
        "bandwidth": bandwidth,
        "predicted": min_overlap_chunk(flops, bandwidth, layer),
        "measured": min(candidates, key=distance),
    }


def overlap_threshold_tables(results: Results) -> list[str]:
    """Times in milliseconds."""
    knees, rows = [], []
    for row in results["knees"]:
        links = [f"{row[name] / 1e6:.0f} MB/s" for name in ("rate", "bandwidth")]
        knees.append(
            [*links, f"{row['flops'] / 1e9:.0f} GFLOP/s", f"{row['predicted']:,.0f}", f"{row['measured']:,.0f}"]
        )
    predicted = {row["rate"]: row["predicted"] for row in results["knees"]}
    for row in results["rows"]:
        times = [row[name] for name in ("computing", "messages", "waiting", "ring")]
        parts = [row["hidden"], hidden_share(row["chunk"], predicted[row["rate"]]), row["overhead"]]
        cells = [f"{row['rate'] / 1e6:g}", f"{row['chunk']:,}", *(f"{1e3 * time:.1f}" for time in times)]
        rows.append([*cells, *(f"{part:.0%}" for part in parts)])
    found = "link | bytes/s | FLOP/s | knee predicted | knee measured"
    heads = "link, MB/s | C | computing | hop | wait | ring | hidden | should be | overhead"
    return [record.grid(found, knees), record.grid(heads, rows)]


@bench(overlap_threshold_tables, chunks=CHUNKS, heads=8, head_dim=64, repetitions=7)
def overlap_threshold(chunks: dict[int, list[int]], **size: int) -> Results:
    """A row for each link, in bytes a second, and chunk; a knee for each link."""

    def measure(rate: int, chunk: int) -> Row:
        with hosts(2, rate) as both:
            row = job(both, measure_hop, {"chunk": chunk, **size})
        return {**row, **shares(row)}

    steps = [{"rate": rate, "chunk": chunk} for rate in chunks for chunk in chunks[rate]]
    rows = record.rows("overlap_threshold", steps, measure)
    layer = AttentionLayer(size["heads"], size["heads"], size["head_dim"], itemsize=torch.float32.itemsize)
    knees = [{"rate": rate, **knee([row for row in rows if row["rate"] == rate], layer)} for rate in chunks]
    return {"rows": rows, "knees": knees}
