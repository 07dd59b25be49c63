"""The effect of one slow link on a ring: at first its two ranks wait, a round later their neighbours, then all.

The FLOP/s and the links are those of the paper's table 2: A100s, NVLink, InfiniBand. The timeline is that of
`arriving_blocks` of ringlab/ring/overlap.py, which threads run here as ranks (simulated.py).
"""

from collections.abc import Sequence

import torch

from figures import shapes
from figures.simulated import Simulation
from ring_planner.hidden_communication import LLAMA_7B, TABLE_2, block_flops, hop_bytes
from ringlab.ring.overlap import arriving_blocks
from ringlab.support import drawing
from ringlab.support.timeline import Event

FLOPS, FAST = TABLE_2[0][1:3]  # FLOP/s of an A100, and bytes/s inside a host
SLOW = TABLE_2[1][2]  # bytes/s between hosts
P, CHUNK = 4, 8192
ORDER = ("compute", "send", "wait")
HEIGHT, LANES = 700, 236  # pixels: the page, and the lanes of one ring
TOPS = {"all links fast": 138, "the link from rank 0 to rank 1 slow": 412}  # of the lanes, from the top of the page


def simulate_timeline(computing: Sequence[Sequence[float]], hops: Sequence[float]) -> list[Event]:
    """The "compute", "send" and "wait" events of every rank of an overlapped ring; times in seconds.

    In round t rank r computes for computing[t][r] seconds; a block travels from rank r to rank r+1 in hops[r] seconds.
    The ring ends with the last of these rounds.
    """
    rounds, P = len(computing), len(hops)
    ranks, block = Simulation(P, lambda link, sent: hops[link[0]]), torch.zeros(1, 1, 1, 1)

    def on_rank(rank: int) -> list[tuple[float, float]]:
        blocks = arriving_blocks(block, block, lengths=[1] * P, hops=rounds - 1)
        return [ranks.compute(computing[t][rank]) for t, _ in enumerate(blocks)]

    spans, events = ranks.run(on_rank), []
    for r, (of_rank, messages) in enumerate(zip(spans, (ranks.moved[r, (r + 1) % P] for r in range(P)), strict=True)):
        begins = [begin for begin, _ in of_rank[1:]]
        events += [Event(r, "compute", t, (r - t) % P, *span, bytes=0) for t, span in enumerate(of_rank)]
        events += [Event(r, "send", t, (r - t) % P, it.begin, it.end, bytes=0) for t, it in enumerate(messages)]
        waits = zip(of_rank, begins, strict=False)
        events += [
            Event(r, "wait", t, (r - t - 1) % P, done, begin, bytes=0) for t, ((_, done), begin) in enumerate(waits)
        ]
    events = [event for event in events if event.end > event.start or event.what == "send"]
    return sorted(events, key=lambda event: (event.round, ORDER.index(event.what), event.rank))


def duration(events: list[Event]) -> float:
    """Seconds from 0 to the last end; 0 without events."""
    return max((event.end for event in events), default=0.0)


def runs() -> dict[str, list[Event]]:
    """The events of both rings, by the title of each."""
    computing = block_flops(LLAMA_7B, CHUNK**2) / FLOPS
    fast, slow = (hop_bytes(LLAMA_7B, CHUNK) / bandwidth for bandwidth in (FAST, SLOW))
    hops = [fast] * P, [slow] + [fast] * (P - 1)
    return {name: simulate_timeline([[computing] * P] * P, each) for name, each in zip(TOPS, hops, strict=True)}


def draw() -> drawing.Picture:
    """Two simulated timelines of four ranks on one time axis. All links fast: each rank computes on four K/V blocks
    without a gap, its messages end early. The link from rank 0 to 1 slow: in the first round ranks 0 and 1 wait,
    hatched, for that message; in the second round ranks 2 and 3 wait too, because their neighbours are late; the ring
    takes 2.5 times as long.
    """
    rings = runs()
    ends = [duration(events) for events in rings.values()]
    title = f"One slow link of {P}: every rank waits, and the ring takes {ends[1] / ends[0]:.1f} times as long"
    rates = f"links of {FAST / 1e9:g} GB/s, the slow one {SLOW / 1e9:g}"
    key = "thick: computing on a block   thin: sending it   hatched: waiting, to send or to receive"
    what = f"Simulated: {FLOPS / 1e12:g} TFLOP/s, C = {CHUNK:,}, {rates}"
    figure, page = shapes.headed(HEIGHT, draw, title, {64: what, 90: key})
    for (name, events), top in zip(rings.items(), TOPS.values(), strict=True):
        drawing.write(page, 20, top - 14, name, size=16, weight="bold")
        ax = figure.add_axes((0.075, 1 - (top + LANES) / HEIGHT, 0.905, LANES / HEIGHT), facecolor=drawing.PAGE)
        drawing.draw_events(events, ax, size=14)
        shapes.plain(ax)
        ax.grid(axis="y", visible=False)  # the lanes are lines enough
        ax.set_xlim(0, 1.12e3 * max(ends))  # one time axis for both
        end = 1e3 * duration(events)
        ax.axvline(end, color=drawing.INK, lw=1.5)
        look = {"textcoords": "offset points", "va": "center", "weight": "bold", "fontsize": 0.72 * 16}
        ax.annotate(f"{end:.1f} ms", (end, 0.5), (6, 0), color=drawing.INK, **look)
        last = name == list(rings)[-1]
        ax.tick_params(labelbottom=last)
        ax.set_xlabel("milliseconds" if last else "", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    return figure
