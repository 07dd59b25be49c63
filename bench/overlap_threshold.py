"""Hidden communication, measured: the share of the messages that a ring between two hosts hides, against the chunk.

    flops        4·C²·H·D / seconds of computing on a block
    bandwidth    2·C·H·D·w / seconds of a hop while no rank computes
    predicted    min(1, C / C*), with the knee C* = w/2 · flops / bandwidth of the same run
    measured     1 - wait / hop, where the wait is the part of the hop that is left when the ring has computed its block

The ring is ringlab.ring.flash_ring's, in float32 (w = 4), forward pass, without a mask. The two hosts are network
namespaces joined by links of a set rate (hosts.py). Each has one rank, one thread and one core. Two ranks make one
hop. Times of one host are never compared with times of the other.

Linux only, as root, with iproute2 and util-linux. Elsewhere it gives the reason and measures nothing. It takes about 3
minutes; a run that was stopped goes on where it was.

    $ sudo .venv/bin/python -m bench.overlap_threshold
"""

from collections.abc import Callable
from statistics import mean, median

import torch

from bench import record
from bench.hosts import command, hosts, row_of
from ring_planner.hidden_communication import (
    AttentionLayer,
    block_flops,
    hidden_share,
    hop_bytes,
    min_overlap_chunk,
)
from ringlab.basics.ranks import gather, scatter
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.fused_block import fused_forward
from ringlab.ring.overlap import post, seconds
from ringlab.support import timeline
from ringlab.support.processes import RankContext
from ringlab.support.rounding import exact_attention
from ringlab.support.timeline import laps

Row = dict[str, float]

CHUNKS = {  # link's bytes a second: tokens of a rank, in steps of about √2, from well below the knee to above it
    200_000_000: [256, 362, 512, 724, 1024, 1448, 2048, 2896],
    50_000_000: [1024, 1448, 2048, 2896, 4096, 5793, 8192],
}
PREDICTIONS = {"flops": "predicted", "flops_meanwhile": "predicted_meanwhile"}  # the knee that each one predicts
SIZE = {"heads": 8, "head_dim": 64, "repetitions": 7}


def check_ring(context: RankContext) -> None:
    """Raise RuntimeError on rank 0 unless the ring between these hosts is full attention. Its chunks are not equal."""
    whole = torch.randn(3, 1, 2, 100 * context.world_size + 1, 8, generator=torch.Generator().manual_seed(0)).unbind()
    out = gather(ring_flash_attention(*(scatter(x if context.rank == 0 else None, context) for x in whole)), context)
    if out is not None and not exact_attention(*whole)["out"].accepts(out):
        raise RuntimeError("the ring between the hosts differs from full attention")


def measure_hop(context: RankContext, chunk: int, *, heads: int, head_dim: int, repetitions: int) -> Row:
    """Mean seconds of the ranks, then the median of the repetitions: of computing on a block; of a hop by itself; of
    the whole overlapped ring; and in this ring, of the wait and of computing on the block that travels. A repetition
    measures all of them in turn. Raises RuntimeError on rank 0 when the ring is wrong.
    """
    check_ring(context)
    q, k, v = torch.randn(3, 1, heads, chunk, head_dim, generator=torch.Generator().manual_seed(context.rank)).unbind()
    received = [torch.empty_like(k), torch.empty_like(v)]

    def compute() -> None:
        fused_forward(q, k, v, scale=head_dim**-0.5)

    def hop() -> None:
        for work in post([k, v], received):
            work.wait()

    def ring() -> None:
        ring_flash_attention(q, k, v)

    def time_of(work: Callable[[], None]) -> float:
        return mean(lap.seconds for lap in laps(work, context.device))

    seen = []
    for _ in range(1 + repetitions):  # the first warms up
        row = {"computing": time_of(compute), "messages": time_of(hop)}
        with timeline.record(k) as events:
            row["ring"] = time_of(ring)
        row["waiting"] = seconds(events, "wait")
        row["computing_meanwhile"] = seconds([event for event in events if event.round == 0], "compute")
        seen.append(row)
    return {name: median(row[name] for row in seen[1:]) for name in seen[0]}


def shares(row: Row) -> Row:
    """The share of the hop that is hidden, and the overhead: the ring's time beyond that of its two blocks."""
    return {"hidden": 1 - row["waiting"] / row["messages"], "overhead": row["ring"] / (2 * row["computing"]) - 1}


def knee(rows: list[Row], layer: AttentionLayer) -> Row:
    """FLOP/s, bytes/s and the knee that they predict, for the rows of one link, and the knee measured.

    FLOP/s and bytes/s are medians over the chunks. The FLOP/s reached while messages travel predict a second knee. The
    measured knee is the one whose line is nearest to the shares: the sum of the distances is smallest.
    """

    def reached(computing: str) -> float:
        return median(block_flops(layer, row["chunk"] ** 2) / row[computing] for row in rows)

    def distance(min_chunk: float) -> float:
        return sum(abs(row["hidden"] - hidden_share(row["chunk"], min_chunk)) for row in rows)

    flops, flops_meanwhile = reached("computing"), reached("computing_meanwhile")
    bandwidth = median(hop_bytes(layer, row["chunk"]) / row["messages"] for row in rows)
    candidates = [rows[0]["chunk"] * 1.01**i for i in range(600)]  # up to 390 times the first chunk
    return {
        "flops": flops,
        "flops_meanwhile": flops_meanwhile,
        "bandwidth": bandwidth,
        "predicted": min_overlap_chunk(flops, bandwidth, layer),
        "predicted_meanwhile": min_overlap_chunk(flops_meanwhile, bandwidth, layer),
        "measured": min(candidates, key=distance),
    }


def measure(chunks: dict[int, list[int]], **size: int) -> record.Results:
    """The whole bench: a row for each link and chunk, a knee for each link. Raises OSError where it cannot run."""
    made = record.made("overlap_threshold", "float32")

    def step(rate: int, chunk: int) -> Row:
        with hosts(2, rate) as both:
            row = row_of(both, "overlap_threshold", {"chunk": chunk, **size})
        return {"rate": rate, "chunk": chunk, **row, **shares(row)}

    steps = {f"{rate / 1e6:g} MB/s, C = {chunk}": (rate, chunk) for rate in chunks for chunk in chunks[rate]}
    rows = list(record.in_steps("overlap_threshold", size, steps, step).values())
    layer = AttentionLayer(size["heads"], size["heads"], size["head_dim"], itemsize=torch.float32.itemsize)
    knees = [{"rate": rate, **knee([row for row in rows if row["rate"] == rate], layer)} for rate in chunks]
    return {**made, **size, "rows": rows, "knees": knees}


def table(results: record.Results) -> str:
    """The results as markdown, times in milliseconds."""
    knees, rows = [], []
    for row in results["knees"]:
        speeds = [x for name, c in PREDICTIONS.items() for x in (f"{row[name] / 1e9:.0f} GFLOP/s", f"{row[c]:,.0f}")]
        links = [f"{row[name] / 1e6:.0f} MB/s" for name in ("rate", "bandwidth")]
        knees.append([*links, *speeds, f"{row['measured']:,.0f}"])
    predicted = {row["rate"]: row["predicted"] for row in results["knees"]}
    for row in results["rows"]:
        times = [row[name] for name in ("computing", "computing_meanwhile", "messages", "waiting", "ring")]
        parts = [row["hidden"], hidden_share(row["chunk"], predicted[row["rate"]]), row["overhead"]]
        cells = [f"{row['rate'] / 1e6:g}", f"{row['chunk']:,}", *(f"{1e3 * time:.1f}" for time in times)]
        rows.append([*cells, *(f"{part:.0%}" for part in parts)])
    return record.page(
        "Hidden communication: the share that a ring between two hosts hides, against the chunk",
        results,
        f"B = 1, H = {results['heads']}, D = {results['head_dim']}, no mask, forward pass. Two ranks, so one hop; each "
        "on a host of its own: a network namespace, one core, one thread. The link carries the rate in each direction "
        f"at the same time. Means of the two ranks, medians of {results['repetitions']} repetitions.",
        "FLOP/s and bytes/s are measured: medians over the chunks below. FLOP/s meanwhile: while messages travel; the "
        "same core copies them. The knee is in tokens. Predicted: modelled from FLOP/s and bytes/s of the same run, "
        "w/2 · flops / bandwidth with w = 4 bytes. Measured: the c whose line min(1, C/c) is nearest to the shares "
        "below.",
        record.grid(
            "link | bytes/s | FLOP/s | knee predicted | FLOP/s meanwhile | knee predicted from it | knee measured",
            knees,
        ),
        "Times in ms: of computing on a block, alone and while messages travel; of a hop alone; of the wait for it in "
        "the ring; of the ring. Hidden: 1 - wait / hop. It should be min(1, C / knee predicted). Overhead: the ring's "
        "time beyond that of computing on two blocks. It includes small parts such as agreeing on the lengths.",
        record.grid("link, MB/s | C | computing | meanwhile | hop | wait | ring | hidden | should be | overhead", rows),
    )


if __name__ == "__main__":
    command("overlap_threshold", measure_hop, lambda: measure(CHUNKS, **SIZE), table)
