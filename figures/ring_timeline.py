"""What each rank of a real ring did, and when: computing, sending, receiving, and waiting for a message's other end.

Drawn from ring_timeline.json, the record of a real run. A message moves when its sender and its receiver have both
begun; the first of the two waits for the other. To record another run, and draw it:

    $ torchrun --nproc_per_node=4 ring_attn.py --seq-len 8192 --trace figures/ring_timeline.json
"""

import json

from matplotlib.patches import Rectangle

from figures import FOLDER, shapes
from ringlab.support import drawing
from ringlab.support.timeline import Event


def events() -> list[Event]:
    """The committed record of a run."""
    return [Event(**event) for event in json.loads((FOLDER / "ring_timeline.json").read_text())]


def waits(record: list[Event]) -> list[tuple[Event, float]]:
    """The messages in which a rank waited, each with the time (seconds) at which the other end began."""
    P = 1 + max(event.rank for event in record)
    begins = {(event.what, event.round, event.rank): event.start for event in record}
    waited = []
    for event in record:
        if event.what == "compute":
            continue
        other = ("receive", event.rank + 1) if event.what == "send" else ("send", event.rank - 1)
        came = begins[other[0], event.round, other[1] % P]
        if came > event.start:
            waited.append((event, min(came, event.end)))
    return waited


def draw() -> drawing.Picture:
    """Four lanes over time, one for each rank. Each rank computes on four K/V blocks, one after the other, in long
    thick bars of the blocks' colours; between two of them it sends its block and receives the next one, in short thin
    bars. Hatched parts are the time in which it waited for the other end of the message.
    """
    record = events()
    P = 1 + max(event.rank for event in record)
    title = f"A ring of {P} processes at work, as it recorded itself"
    what = "thick: computing on a block   thin: sending it, and below receiving the next one"
    figure, _ = shapes.headed(500, draw, title, {68: f"{what}   hatched: waiting for the other end"})
    ax = figure.add_axes((0.075, 0.13, 0.905, 0.69), facecolor=drawing.PAGE)
    drawing.draw_events(record, ax, size=16)
    bars = dict(zip(record, ax.patches, strict=True))
    for event, came in waits(record):
        look = {"fc": drawing.PAGE, "ec": drawing.colour(event.block), "hatch": "//////", "lw": 0}
        corner, height = bars[event].get_xy(), bars[event].get_height()
        ax.add_patch(Rectangle(corner, 1e3 * (came - event.start), height, **look))
    ax.set_xlabel("milliseconds", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    shapes.plain(ax)
    ax.grid(axis="y", visible=False)  # the lanes are lines enough
    return figure
