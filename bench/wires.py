"""Messages over slow wires: what a ring hides of them.

On one machine the cores that compute also copy the messages, so hiding them saves little time. So messages take time on
a wire here, as in a cluster: a loopback that carries a set rate, or hosts (network namespaces, hosts.py) with links.

overlap              the share of the messages' time that the overlapped ring of overlap.py hides, and should hide:
                     a round takes  blocking: computing + messages     overlapped: max(computing, messages)
                     so of the messages  min(1, computing / messages)  should be hidden

overlap_threshold    the share that a ring between two hosts hides, against the chunk. One rank, thread and core each
    flops            4·C²·H·D / seconds of computing on a block
    bandwidth        2·C·H·D·w / seconds of a hop while no rank computes
    predicted        min(1, C / C*), with the knee C* = w/2 · flops / bandwidth of the same run; w = 4 bytes
    measured         1 - wait / hop, where the wait is what is left of the hop when the ring has computed its block

Linux only, as root, with iproute2 and util-linux. Elsewhere it gives the reason and measures nothing.

    $ sudo .venv/bin/python -m bench overlap overlap_threshold
"""

from collections.abc import Callable
from dataclasses import asdict
from statistics import mean, median
from typing import Any

import torch

from bench import record
from bench.hosts import hosts, job, slow_loopback
from bench.record import Results, bench
from ring_planner.hidden_communication import (
    AttentionLayer,
    block_flops,
    hidden_share,
    hop_bytes,
    min_overlap_chunk,
)
from ringlab.basics.ranks import gather, scatter
from ringlab.ring.cases import random_inputs
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.fused_block import fused_forward
from ringlab.ring.overlap import hidden_share as share_hidden
from ringlab.ring.overlap import post, record_both, seconds
from ringlab.support import timeline
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention
from ringlab.support.timeline import Event, laps

Row = dict[str, Any]

# What the overlapped ring hides over a slow loopback ------------------------------------------------------------------

RATE = 125_000_000  # bytes a second
TRACED = 2048  # tokens: at this chunk messages take about as long as computing
Rings = dict[str, list[Event]]  # the events of all ranks of the "blocking" and of the "overlapped" ring


def rings_in_turn(context: RankContext, chunk: int, heads: int, head_dim: int, repetitions: int) -> list[Rings]:
    """Run the blocking ring, the overlapped one, the blocking one, ... in float32, and return the record of each pair.

    Raises RuntimeError when a result differs from full attention by more than rounding explains.
    """
    q, k, v, _ = random_inputs(1, heads, heads, chunk * context.world_size, head_dim)
    right = exact_attention(q, k, v)["out"] if context.rank == 0 else None
    pairs = []
    for _ in range(1 + repetitions):  # the first warms up
        both = record_both(context, q, k, v)
        pairs.append({name: events for name, (_, events) in both.items()})
        for name, (out, _) in both.items():
            if right and not right.accepts(out):
                raise RuntimeError(f"the {name} ring differs from full attention")
    return pairs[1:]


def duration(events: list[Event]) -> float:
    """Seconds from the first start to the last end."""
    return max(event.end for event in events) - min(event.start for event in events)


def summary(pairs: list[Rings], world_size: int) -> dict[str, float]:
    """Medians over the repetitions, in seconds: of a whole ring; of a round's computing; of a hop's messages and wait.

    Also the share of the messages' time that is hidden, and the share that should be.
    """
    seen = {
        "blocking": [duration(pair["blocking"]) for pair in pairs],
        "overlapped": [duration(pair["overlapped"]) for pair in pairs],
        "computing": [seconds(pair["blocking"], "compute") / world_size for pair in pairs],
        "messages": [seconds(pair["blocking"], "send", "receive") / (world_size - 1) for pair in pairs],
        "waiting": [seconds(pair["overlapped"], "wait") / (world_size - 1) for pair in pairs],
        "hidden": [share_hidden(pair["blocking"], pair["overlapped"]) for pair in pairs],
    }
    medians = {name: median(each) for name, each in seen.items()}
    return {**medians, "predicted": min(1.0, medians["computing"] / medians["messages"])}


def overlap_tables(results: Results) -> list[str]:
    """Times in milliseconds."""
    rows = []
    for row in results["rows"]:
        times = [row[name] for name in ("blocking", "overlapped", "computing", "messages", "waiting")]
        shares = [f"{row[name]:.0%}" for name in ("hidden", "predicted")]
        rows.append([f"{row['chunk']:,}", *(f"{1e3 * time:.1f}" for time in times), *shares])
    return [record.grid("C | blocking | overlapped | computing | messages | wait | hidden | should be", rows)]


@bench(
    overlap_tables,
    chunks=[256, 512, 1024, 2048, 4096],
    traced=TRACED,
    heads=8,
    head_dim=64,
    world_size=2,
    repetitions=7,
    rate=RATE,
)
def overlap(
    chunks: list[int], traced: int, heads: int, head_dim: int, world_size: int, repetitions: int, rate: int | None
) -> Results:
    """A row for each chunk length, and for the length `traced` the events of its median repetition. `rate` is that of
    the loopback, None without a limit. It is a test that has none.
    """
    if rate:
        slow_loopback(rate)
    rows, events = [], {}
    for chunk in chunks:
        pairs = launch(rings_in_turn, world_size, chunk, heads, head_dim, repetitions)[0]
        rows.append({"chunk": chunk, **summary(pairs, world_size)})
        if chunk == traced:
            by_share = sorted(pairs, key=lambda pair: share_hidden(pair["blocking"], pair["overlapped"]))
            events = {name: [asdict(each) for each in ring] for name, ring in by_share[len(pairs) // 2].items()}
    return {"rows": rows, "traced": events}


# What a ring hides between two hosts ----------------------------------------------------------------------------------

CHUNKS = {  # link's bytes a second: tokens of a rank, in steps of about √2 from below the knee on
    200_000_000: [256, 362, 512, 724, 1024, 1448, 2048, 2896],
    50_000_000: [1024, 1448, 2048, 2896, 4096, 5793, 8192],
}
PREDICTIONS = {"flops": "predicted", "flops_meanwhile": "predicted_meanwhile"}  # the knee that each one predicts


def check_ring(context: RankContext) -> None:
    """Raise RuntimeError on rank 0 unless the ring between these hosts is full attention. Its chunks are not equal."""
    whole = random_inputs(1, 2, 2, 100 * context.world_size + 1, 8)[:3]
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


def overlap_threshold_tables(results: Results) -> list[str]:
    """Times in milliseconds."""
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
    found = "link | bytes/s | FLOP/s | knee predicted | FLOP/s meanwhile | knee predicted from it | knee measured"
    heads = "link, MB/s | C | computing | meanwhile | hop | wait | ring | hidden | should be | overhead"
    return [record.grid(found, knees), record.grid(heads, rows)]


@bench(overlap_threshold_tables, chunks=CHUNKS, heads=8, head_dim=64, repetitions=7)
def overlap_threshold(chunks: dict[int, list[int]], **size: int) -> Results:
    """A row for each link, in bytes a second, and chunk; a knee for each link."""

    def measure(rate: int, chunk: int) -> Row:
        with hosts(2, rate) as both:
            row = job(both, measure_hop, {"chunk": chunk, **size})
        return {**row, **shares(row)}

    steps = [{"rate": rate, "chunk": chunk} for rate in chunks for chunk in chunks[rate]]
    rows = record.rows("overlap_threshold", size, steps, measure)
    layer = AttentionLayer(size["heads"], size["heads"], size["head_dim"], itemsize=torch.float32.itemsize)
    knees = [{"rate": rate, **knee([row for row in rows if row["rate"] == rate], layer)} for rate in chunks]
    return {"rows": rows, "knees": knees}


# Five ways, which were measured once --------------------------------------------------------------------------------

FORWARD, BACKWARD, TRAIN = "forward", "backward", "training"


def timed(row: Row, name: str, which: str) -> list[float]:
    """Seconds of each repetition of a way or of a peer: forward, or forward and backward."""
    forward, backward = (row["seconds"][f"{name}, {each}"] for each in (FORWARD, BACKWARD))
    return forward if which == FORWARD else [a + b for a, b in zip(forward, backward, strict=True)]
