"""The same ring twice, as its ranks recorded themselves over a slow link: blocking above, overlapped below.

Drawn from bench/results/overlap.json.
"""

from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes

from bench import record
from figures import shapes
from ringlab.ring.overlap import hidden_share
from ringlab.support import drawing
from ringlab.support.timeline import Event

HEIGHT, LANES = 620, 196  # pixels: the page, and the lanes of one ring
TRACED = 2048  # tokens: at this chunk messages take about as long as computing
TOPS = {"blocking": 138, "overlapped": 370}  # of the lanes, from the top of the page


def runs() -> tuple[dict[str, list[Event]], int, int]:
    """The committed records of "blocking" and "overlapped", the chunk length, and the link's bytes a second."""
    results = record.load("overlap")
    return {name: [Event(**event) for event in results["traced"][name]] for name in TOPS}, TRACED, results["rate"]


def duration(events: list[Event]) -> float:
    """Seconds from the first start to the last end."""
    return max(event.end for event in events) - min(event.start for event in events)


def _say_what(ax: Axes, events: list[Event]) -> None:
    """Name the thin and the hatched bars of rank 0, and mark the end of all."""
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
    end = duration(events)
    ax.axvline(1e3 * end, color=drawing.INK, lw=1.5)
    say(f"{1e3 * end:.0f} ms", end, 0.5, xytext=(6, 0), weight="bold", fontsize=0.72 * 16)


def draw() -> drawing.Picture:
    """Two timelines of two ranks on one time axis, measured. Blocking: each rank computes on its own K/V block, then a
    gap in which it only sends its block and receives the other one, then it computes on that. Overlapped: the messages,
    thin bars, travel beneath the first block's computing; of the gap only a hatched rest remains, in which the rank
    waits, and the ring ends earlier.
    """
    rings, chunk, rate = runs()
    share = hidden_share(rings["blocking"], rings["overlapped"])
    title = f"Overlap hides {share:.0%} of the messages' time behind the computing"
    ranks = len({event.rank for event in rings["blocking"]})
    link = f"a link of {rate / 1e6:g} MB/s, which all messages share"
    what = f"Measured: {ranks} ranks, chunks of {chunk:,} tokens, {link}"
    key = "thick: computing on a block   thin: sending it, and below receiving the next one   hatched: waiting for it"
    figure, page = shapes.headed(HEIGHT, draw, title, {64: what, 90: key})
    last = 1e3 * max(duration(events) for events in rings.values())
    for name, top in TOPS.items():
        zero = min(event.start for event in rings[name])
        events = [replace(event, start=event.start - zero, end=event.end - zero) for event in rings[name]]
        drawing.write(page, 20, top - 14, name, size=16, weight="bold")
        ax = figure.add_axes((0.075, 1 - (top + LANES) / HEIGHT, 0.905, LANES / HEIGHT), facecolor=drawing.PAGE)
        drawing.draw_events(events, ax, size=16)
        _say_what(ax, events)
        shapes.plain(ax)
        ax.grid(axis="y", visible=False)  # the lanes are lines enough
        ax.set_xlim(0, 1.08 * last)  # one time axis for both
        ax.tick_params(labelbottom=name == "overlapped")
        ax.set_xlabel("milliseconds" if name == "overlapped" else "", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    return figure
