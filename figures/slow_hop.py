"""The effect of one slow link on a ring: at first its two ranks wait, a round later their neighbours, then all.

Drawn from the events of ring_planner.unequal, with the FLOP/s and the links of its table: A100s, NVLink,
InfiniBand.
"""

from figures import shapes
from ring_planner.hidden_communication import LLAMA_7B, block_flops, hop_bytes
from ring_planner.unequal import FAST, FLOPS, SLOW, duration, simulate_timeline
from ringlab.support import drawing
from ringlab.support.timeline import Event

ALT = (
    "Two simulated timelines of four ranks on one time axis. All links fast: each rank computes on four K/V blocks "
    "without a gap, its messages end early. The link from rank 0 to 1 slow: in the first round ranks 0 and 1 wait, "
    "hatched, for that message; in the second round ranks 2 and 3 wait too, because their neighbours are late; the "
    "ring takes 2.5 times as long."
)
P, CHUNK = 4, 8192
HEIGHT, LANES = 700, 236  # pixels: the page, and the lanes of one ring
TOPS = {"all links fast": 138, "the link from rank 0 to rank 1 slow": 412}  # of the lanes, from the top of the page


def runs() -> dict[str, list[Event]]:
    """The events of both rings, by the title of each."""
    computing = block_flops(LLAMA_7B, CHUNK**2) / FLOPS
    fast, slow = (hop_bytes(LLAMA_7B, CHUNK) / bandwidth for bandwidth in (FAST, SLOW))
    hops = [fast] * P, [slow] + [fast] * (P - 1)
    return {
        name: simulate_timeline([[computing] * P] * P, [each] * (P - 1)) for name, each in zip(TOPS, hops, strict=True)
    }


def draw() -> drawing.Picture:
    """The timelines of ringlab/support/drawing.py below each other, each with its end marked."""
    rings = runs()
    ends = [duration(events) for events in rings.values()]
    title = f"One slow link of {P}: every rank waits, and the ring takes {ends[1] / ends[0]:.1f} times as long"
    rates = f"links of {FAST / 1e9:g} GB/s, the slow one {SLOW / 1e9:g}"
    key = "thick: computing on a block   thin: sending it   hatched: waiting, to send or to receive"
    what = f"Simulated: {FLOPS / 1e12:g} TFLOP/s, C = {CHUNK:,}, {rates}"
    figure, page = shapes.headed(HEIGHT, ALT, title, {64: what, 90: key})
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
