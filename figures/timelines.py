"""Rings over time: what each rank did in a real run, and what it would do with one slow link.

    ring_timeline       ring_timeline.json, the record of a real run
    overlap_timeline    bench/results/overlap.json, also the record of one
    slow_hop            `arriving_blocks` of ringlab/ring/overlap.py, run by threads as ranks: simulated.py

To record another run: torchrun --nproc_per_node=4 ring_attn.py --seq-len 8192 --trace figures/ring_timeline.json
A message moves when its sender and its receiver have both begun; the first of the two waits for the other. The record
identifies a block by its content. The FLOP/s and the links of slow_hop are those of the paper's table 2.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from bench import record
from figures import FOLDER, shapes
from figures.simulated import Simulation
from ring_planner.hidden_communication import LLAMA_7B, TABLE_2, block_flops, hop_bytes
from ringlab.ring.overlap import arriving_blocks, hidden_share
from ringlab.support import drawing
from ringlab.support.timeline import Event

FLOPS, FAST = TABLE_2[0][1:3]  # FLOP/s of an A100, and bytes/s inside a host
SLOW = TABLE_2[1][2]  # bytes/s between hosts
TRACED, CHUNK = (
    2048,
    8192,
)  # tokens of a rank: of overlap_timeline, messages take about as long as computing; of slow_hop
BOTH = "thick: computing on a block   thin: sending it"


def lanes(
    figure: drawing.Picture, top: float, height: float, events: list[Event], size: int = 16, last: bool = True
) -> Axes:
    """A lane for each rank, over milliseconds; top and height are shares of the picture."""
    ax = figure.add_axes((0.075, 1 - top - height, 0.905, height), facecolor=drawing.PAGE)
    drawing.draw_events(events, ax, size=size)
    ax.tick_params(labelbottom=last)
    ax.set_xlabel("milliseconds" if last else "", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    shapes.plain(ax)
    ax.grid(axis="y", visible=False)  # the lanes are lines enough
    return ax


def two_rings(
    figure: drawing.Picture, page: Axes, rings: Mapping[str, list[Event]], tops: Sequence[int], height: int, **look: Any
) -> list[Axes]:
    """Two rings below each other on one time axis, and where each ends; tops and height of their lanes are pixels."""
    found, last = [], 1e3 * max(map(duration, rings.values()))
    for (name, events), top in zip(rings.items(), tops, strict=True):
        drawing.write(page, 20, top - 14, name, size=16, weight="bold")
        ax = lanes(figure, top / figure.bbox.height, height / figure.bbox.height, events, look["size"], top == tops[-1])
        ax.set_xlim(0, look["right"] * last)
        end, text = 1e3 * duration(events), {"va": "center", "weight": "bold", "fontsize": 0.72 * 16}
        ax.axvline(end, color=drawing.INK, lw=1.5)
        said = f"{end:{look['form']}} ms"
        ax.annotate(said, (end, 0.5), (6, 0), textcoords="offset points", color=drawing.INK, **text)
        found.append(ax)
    return found


def events() -> list[Event]:
    """The committed record of a run."""
    return [Event(**event) for event in json.loads((FOLDER / "ring_timeline.json").read_text())]


def waits(known: list[Event]) -> list[tuple[Event, float]]:
    """The messages in which a rank waited, each with the time (seconds) at which the other end began."""
    P = 1 + max(event.rank for event in known)
    begins = {(event.what, event.round, event.rank): event.start for event in known}
    waited = []
    for event in known:
        if event.what == "compute":
            continue
        other = ("receive", event.rank + 1) if event.what == "send" else ("send", event.rank - 1)
        came = begins[other[0], event.round, other[1] % P]
        if came > event.start:
            waited.append((event, min(came, event.end)))
    return waited


def ring_timeline() -> drawing.Picture:
    """Four lanes over time, one for each rank. Each rank computes on four K/V blocks, one after the other, in long
    thick bars of the blocks' colours; between two of them it sends its block and receives the next one, in short thin
    bars. Hatched parts are the time in which it waited for the other end of the message.
    """
    known = events()
    P = 1 + max(event.rank for event in known)
    title = f"A ring of {P} processes at work, as it recorded itself"
    what = f"{BOTH}, and below receiving the next one"
    figure, _ = shapes.headed(500, ring_timeline, title, {68: f"{what}   hatched: waiting for the other end"})
    ax = lanes(figure, 0.18, 0.69, known)
    bars = dict(zip(known, ax.patches, strict=True))
    for event, came in waits(known):
        look = {"fc": drawing.PAGE, "ec": drawing.colour(event.block), "hatch": "//////", "lw": 0}
        corner, height = bars[event].get_xy(), bars[event].get_height()
        ax.add_patch(Rectangle(corner, 1e3 * (came - event.start), height, **look))
    return figure


def _say_what(ax: Axes, events: list[Event]) -> None:
    """Name the thin and the hatched bars of rank 0."""
    at = {event.what: event for event in events if event.rank == 0 and event.round == 0}
    sent, received = at["send"], at["receive"]

    def say(text: str, x: float, y: float, **look: Any) -> None:
        """At x seconds and lane y."""
        look = {"textcoords": "offset points", "xytext": (0, 0), "fontsize": 0.72 * drawing.SMALL, **look}
        ax.annotate(text, (1e3 * x, y), color=drawing.INK, va="center", **look)

    messages = f"sends KV{sent.block}, receives KV{received.block}"
    if "wait" in at:
        waits = f"waits {1e3 * (at['wait'].end - at['wait'].start):.0f} ms"
        say(waits, (at["wait"].start + at["wait"].end) / 2, -0.36, ha="center", xytext=(0, 8))
        say(messages, received.end, 0.24, xytext=(6, 0))
    else:
        say(f"{messages}\nand computes nothing", (sent.start + received.end) / 2, -0.14, ha="center")


def overlap_timeline() -> drawing.Picture:
    """Two timelines of two ranks on one time axis, measured. Blocking: each rank computes on its own K/V block, then a
    gap in which it only sends its block and receives the other one, then it computes on that. Overlapped: the messages,
    thin bars, travel beneath the first block's computing; of the gap only a hatched rest remains, in which the rank
    waits, and the ring ends earlier.
    """
    results = record.load("overlap")
    rings = {name: [Event(**event) for event in results["traced"][name]] for name in ("blocking", "overlapped")}
    share = hidden_share(rings["blocking"], rings["overlapped"])
    title = f"Overlap hides {share:.0%} of the messages' time behind the computing"
    ranks = len({event.rank for event in rings["blocking"]})
    link = f"a link of {results['rate'] / 1e6:g} MB/s, which all messages share"
    what = f"Measured: {ranks} ranks, chunks of {TRACED:,} tokens, {link}"
    key = f"{BOTH}, and below receiving the next one   hatched: waiting for it"
    figure, page = shapes.headed(620, overlap_timeline, title, {64: what, 90: key})
    for name, events in rings.items():
        zero = min(event.start for event in events)
        rings[name] = [replace(event, start=event.start - zero, end=event.end - zero) for event in events]
    drawn = two_rings(figure, page, rings, (138, 370), 196, size=16, right=1.08, form=".0f")
    for ax, events in zip(drawn, rings.values(), strict=True):
        _say_what(ax, events)
    return figure


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
    return sorted(events, key=lambda event: (event.round, ("compute", "send", "wait").index(event.what), event.rank))


def duration(events: list[Event]) -> float:
    """Seconds from 0 to the last end; 0 without events."""
    return max((event.end for event in events), default=0.0)


def slow_hop() -> drawing.Picture:
    """Two simulated timelines of four ranks on one time axis. All links fast: each rank computes on four K/V blocks
    without a gap, its messages end early. The link from rank 0 to 1 slow: in the first round ranks 0 and 1 wait,
    hatched, for that message; in the second round ranks 2 and 3 wait too, because their neighbours are late; the ring
    takes 2.5 times as long.
    """
    P, computing = 4, block_flops(LLAMA_7B, CHUNK**2) / FLOPS
    fast, slow = (hop_bytes(LLAMA_7B, CHUNK) / bandwidth for bandwidth in (FAST, SLOW))
    links = {"all links fast": [fast] * P, "the link from rank 0 to rank 1 slow": [slow] + [fast] * (P - 1)}
    rings = {name: simulate_timeline([[computing] * P] * P, hops) for name, hops in links.items()}
    ends = [duration(events) for events in rings.values()]
    title = f"One slow link of {P}: every rank waits, and the ring takes {ends[1] / ends[0]:.1f} times as long"
    rates = f"links of {FAST / 1e9:g} GB/s, the slow one {SLOW / 1e9:g}"
    what = f"Simulated: {FLOPS / 1e12:g} TFLOP/s, C = {CHUNK:,}, {rates}"
    key = f"{BOTH}   hatched: waiting, to send or to receive"
    figure, page = shapes.headed(700, slow_hop, title, {64: what, 90: key})
    two_rings(figure, page, rings, (138, 412), 236, size=14, right=1.12, form=".1f")
    return figure
