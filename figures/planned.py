"""What the planner says: how long a flat ring waits, and how far its predictions lie from what others measured.

flat_ring: a layer's forward pass of Llama 8B under a causal mask, 1M tokens on 16 hosts of 8 H100s, with a NIC of
50 GB/s a GPU. scoreboard: all of bench/published.json, graded by bench/scoreboard.py.
"""

import numpy as np

from bench.scoreboard import Grade, grades, summary, times
from figures import shapes
from ring_planner.hidden_communication import block_flops, hop_bytes, ring_seconds
from ring_planner.presets import gpu_named, model_named
from ring_planner.round_costs import HOST_SHARE
from ringlab.support import drawing

P, GPU, LAYER = 128, gpu_named("h100"), model_named("llama-3.1-8b").attention()
CHUNK, REACHED = 2**20 // P, GPU.attention["cudnn"][0]
POINTS = {"the planner's": (REACHED, HOST_SHARE), "one machine's": (REACHED, 0.566)}
POINTS["data sheet"] = GPU.peak["bf16"], 1.0
COLOUR = "#A33B75"  # not that of a block
LABEL = {"facecolor": drawing.PAGE, "edgecolor": "none", "pad": 2}  # behind words that stand on lines


def waiting(flops: float, share: float) -> float:
    """The share of a layer's forward pass in which a rank of the flat ring waits."""
    computing = block_flops(LAYER, CHUNK**2 / 2) / flops  # causal: half of the pairs
    return 1 - P * computing / ring_seconds(P, computing, hop_bytes(LAYER, CHUNK) / (share * GPU.host_bandwidth))


def flat_ring(yours: tuple[float, float] | None = None) -> drawing.Picture:
    """Axes: the share of a NIC that messages reach, 0.4 to 1, and the FLOP/s that attention reaches, 300 to 1,000
    TFLOP/s. Below a line through the origin, 0 %, nothing waits; above it the flat ring waits, for half of its time in
    the upper left. At the planner's 652 TFLOP/s and 0.7 it waits for 12 %, at the 0.566 of a NIC that one machine
    reached for 29 %, and with the data sheet's 989 TFLOP/s and a whole NIC for 17 %.
    """
    title = "The same flat ring waits not at all, or for half of its time"
    lines = {66: "1M tokens on 16 hosts of 8 H100s, Llama 8B, forward: the share of the time in which a rank waits"}
    figure, _ = shapes.headed(620, flat_ring, title, lines)
    axes = "share of a NIC's 50 GB/s that messages reach", "TFLOP/s that attention reaches"
    ax = shapes.numbers(figure, (0.09, 0.13, 0.86, 0.71), x=axes[0], y=axes[1])
    levels = [0.01, 10, 20, 30, 40, 50]
    for level, part in zip(levels, np.linspace(0.06, 0.45, len(levels)), strict=True):
        ratio = next(rate for rate in range(300, 4000) if 100 * waiting(1e12 * rate, 1.0) >= level)  # at a whole NIC
        ax.fill_between([0.4, 1.0], [0.4 * ratio, ratio], 4000, color=shapes.mixed(COLOUR, part), lw=0)
        ax.plot([300 / ratio, 1000 / ratio], [300, 1000], color=drawing.MUTED, lw=1)
        at = min(1000 / ratio, 1.0) - 0.08
        look = {"ha": "center", "va": "center", "fontsize": 0.72 * drawing.TEXT, "color": drawing.INK}
        ax.text(at, at * ratio, f"{level:.0f} %", bbox=LABEL, **look)
    for name, (rate, share) in (POINTS | ({"yours": yours} if yours else {})).items():
        ax.plot([share], [rate / 1e12], "o", color=COLOUR, ms=10, clip_on=False)
        look = {"weight": "bold", "fontsize": 0.72 * drawing.TEXT, "color": drawing.INK, "ha": "center", "va": "top"}
        text = f"{name}: {waiting(rate, share):.0%}"
        ax.annotate(text, (min(share, 0.94), rate / 1e12), (0, -11), textcoords="offset points", bbox=LABEL, **look)
    ax.set(xlim=(0.4, 1), ylim=(300, 1000), yticks=range(400, 1001, 100))
    return figure


ROWS = {  # a name, and the kinds of bench/scoreboard.py in it
    "attention, one host": ("attention, best kernels, one host", "attention, framework, one host"),
    "attention, hosts": ("attention, best kernels, hosts",),
    "step, one host": ("step, framework, one host",),
    "step, hosts": ("step, framework, hosts",),
    "prefill": ("prefill, best kernels, one host", "prefill, best kernels, hosts"),
    "message": ("message",),
}
HEIGHTS = (92, 56, 56, 56, 50, 50)  # pixels of the rows
LEFT, TOP, WIDE, LOW, HIGH = 190, 95, 780, -52, 32  # pixels, and percent shown
POINT = 10  # pixels, with the space around it


def rows() -> dict[str, list[Grade]]:
    """All graded times, in the rows of the picture."""
    marked = times(grades())
    return {name: [each for each in marked if each.kind in kinds] for name, kinds in ROWS.items()}


def lanes(errors: list[float]) -> list[int]:
    """The lane of each error, in percent: the nearest to 0 in which no other point is in the way."""
    taken: list[tuple[float, int]] = []
    for error in errors:
        near = {lane for other, lane in taken if abs(other - error) * WIDE < POINT * (HIGH - LOW)}
        taken.append((error, next(lane for i in range(99) for lane in (i, -i) if lane not in near)))
    return [lane for _, lane in taken]


def scoreboard() -> drawing.Picture:
    """Six rows of points, all 105 graded times: attention inside a host, attention between hosts, steps inside a host,
    steps between hosts, prefills, single messages. A point's place is the error of its prediction, from -50 to +30
    percent. Nine in ten lie within a band of 13 percent to both sides of 0. Five are below -25 percent: three of 8 L20
    without NVLink, a ring of 8 A100, and a step.
    """
    by_row = rows()
    errors = [each.error for marked in by_row.values() for each in marked]
    found = summary(errors)
    title = f"The planner is {found['median']:.1%} off or less for half of {len(errors)} published times"
    band = (
        f"band: nine in ten of them, {found['nine in ten']:.1%} off or less   a point: a time, or a speed in tokens/s"
    )
    figure, page = shapes.headed(520, scoreboard, title, {65: band})
    place = LEFT / 1000, 1 - (TOP + sum(HEIGHTS)) / 520, WIDE / 1000, sum(HEIGHTS) / 520
    ax = shapes.numbers(figure, place, x="predicted / measured - 1")
    ax.axvspan(-100 * found["nine in ten"], 100 * found["nine in ten"], color=drawing.CARD, zorder=0)
    ax.axvline(0, color=drawing.MUTED, lw=1.2)
    for i, (name, marked) in enumerate(by_row.items()):
        middle = sum(HEIGHTS[:i]) + HEIGHTS[i] / 2
        shown = sorted(100 * each.error for each in marked)
        ax.plot(shown, [middle + POINT * lane for lane in lanes(shown)], "o", color=drawing.INK, ms=6)
        drawing.write(page, LEFT - 15, TOP + middle - 9, name, ha="right", weight="bold")
        drawing.write(page, LEFT - 15, TOP + middle + 10, f"{len(marked)} measured", ha="right", color=drawing.MUTED)
    ax.set(xlim=(LOW, HIGH), ylim=(sum(HEIGHTS), 0))
    ax.set_xticks(range(-50, 40, 10), [f"{error:+d} %" if error else "0" for error in range(-50, 40, 10)])
    ax.set_yticks([])
    return figure
