"""The paper's table 2 as a map: a device's FLOP/s against its link's bytes/s, and the smallest chunk that hides a hop.

Drawn from ring_planner.hidden_communication.TABLE_2, as printed, with our quotients, and from
bench/results/overlap_threshold.json: the FLOP/s and bytes/s that this project measured on two hosts of its own.
Notebook 9 adds the reader's machine.

    $ python -m bench.overlap_threshold        # measures again, as root, on Linux
"""

from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.text import Text

from bench import record
from figures import shapes
from ring_planner.hidden_communication import LLAMA_7B, TABLE_2, min_overlap_chunk
from ringlab.support import drawing

ALT = (
    "A map with both axes logarithmic: FLOP/s of a device upwards, bytes/s of its link to the right. Slanted lines are "
    "equal quotients, from 10 to 100,000 tokens: the smallest chunk in bf16 that hides its messages. A100 with NVLink "
    "and three TPUs lie close together, near the line of 1,000 tokens; A100 with InfiniBand lies far to their left, at "
    "25,000. This project's machine and its two links are far slower. They were measured in float32, where the "
    "smallest chunk is twice the quotient: 1,600 and 6,000 tokens."
)
PRINTED, MEASURED, OWN = "o", "D", "*"
COLOURS = {PRINTED: drawing.INK, MEASURED: "#4D5D6E", OWN: "#A33B75"}  # not those of blocks: these are machines
X, Y = (2e7, 4e12), (5e9, 4e15)  # bytes/s and FLOP/s shown
LABELS = {  # the place of each row's name, in points from its mark
    "A100 NVLink": (-6, 15, "right"),
    "A100 InfiniBand": (-10, 2, "right"),
    "TPU v3": (11, -10, "left"),
    "TPU v4": (13, 2, "left"),
    "TPU v5e": (11, -6, "left"),
}


def tokens(chunk: float) -> str:
    """A number of tokens: 24,960 -> 24.96K."""
    return f"{chunk / 1000:.2f}".rstrip("0").rstrip(".") + "K" if chunk >= 1000 else f"{chunk:.0f}"


def in_float32(flops: float, bandwidth: float) -> str:
    """The smallest chunk of a machine in float32. Its mark stands at its quotient, which is the chunk in bf16."""
    return f"{tokens(min_overlap_chunk(flops, bandwidth, replace(LLAMA_7B, itemsize=4)))} in float32"


def _mark(ax: Axes, flops: float, bandwidth: float, text: str, at: tuple[float, float, str], mark: str) -> None:
    """A point of the map with its name, `at` points beside it."""
    size = 13 if mark == OWN else 8
    ax.plot([bandwidth], [flops], ls="", marker=mark, ms=size, color=COLOURS[mark], mec=drawing.PAGE, mew=1, zorder=3)
    x, y, side = at
    look = {"ha": side, "va": "center", "color": COLOURS[mark], "fontsize": 0.72 * drawing.TEXT, "zorder": 2}
    _on_page(ax.annotate(text, (bandwidth, flops), (x, y), textcoords="offset points", **look))


def _on_page(label: Text) -> None:
    """Clear the lines behind a label."""
    label.set_bbox({"fc": drawing.PAGE, "ec": "none", "pad": 1.5})


def draw(own: tuple[float, float] | None = None) -> drawing.Picture:
    """The map. `own` adds a machine of (FLOP/s, bytes/s), measured in float32."""
    results = record.load("overlap_threshold")
    on = results["machine"]
    title = "FLOP/s over bytes/s: the smallest chunk that hides its messages"
    line = "slanted lines: the smallest chunk in bf16, without a mask; in float32 it is twice as long"
    figure, page = shapes.headed(660, ALT, title, {66: line})
    key = {
        PRINTED: "bf16, as printed in Liu et al. 2024, table 2",
        MEASURED: f"measured by us: {on['cores']} cores, float32, {on['date'][:10]}",
    }
    for mark, x in ((PRINTED, 28), (MEASURED, 420), (OWN, 810)):
        if mark in key or own:
            page.plot([x], [94], ls="", marker=mark, ms=13 if mark == OWN else 8, color=COLOURS[mark], mew=0)
            drawing.write(page, x + 14, 94, key.get(mark, "yours, float32"), color=COLOURS[mark])

    place = (0.085, 0.11, 0.895, 0.71)
    ax = shapes.numbers(figure, place, x="bytes/s of a link, one way", y="FLOP/s of a device")
    ax.set(xscale="log", yscale="log", xlim=X, ylim=Y)
    ax.minorticks_off()
    ax.set_xticks([1e8, 1e9, 1e10, 1e11, 1e12], ["100 MB/s", "1 GB/s", "10 GB/s", "100 GB/s", "1 TB/s"])
    ax.set_yticks([1e10, 1e11, 1e12, 1e13, 1e14, 1e15], ["10 G", "100 G", "1 T", "10 T", "100 T", "1000 T"])
    for quotient in (10, 100, 1000, 10_000, 100_000):
        ax.plot(X, [quotient * x for x in X], color="#9AA4AE", lw=1.2, zorder=1)
        flops = 4.4e12  # where no machine is
        look = {"ha": "center", "va": "center", "color": drawing.MUTED, "fontsize": 0.72 * drawing.TEXT}
        _on_page(ax.text(flops / quotient, flops, f"{tokens(quotient)} tokens", **look))

    for hardware, flops, bandwidth, *_ in TABLE_2:
        chunk = min_overlap_chunk(flops, bandwidth, LLAMA_7B)
        _mark(ax, flops, bandwidth, f"{hardware}: {tokens(chunk)}", LABELS[hardware], PRINTED)
    for row, at in zip(results["knees"], ((0, 17, "left"), (0, -17, "left")), strict=True):
        flops, bandwidth = row["flops"], row["bandwidth"]
        name = f"a link of {row['rate'] / 1e6:g} MB/s: {in_float32(flops, bandwidth)}"
        _mark(ax, flops, bandwidth, name, at, MEASURED)
    if own:
        flops, bandwidth = own
        _mark(ax, flops, bandwidth, f"yours: {in_float32(flops, bandwidth)}", (11, 0, "left"), OWN)
    return figure
