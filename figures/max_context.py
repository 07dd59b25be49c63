"""The longest context that fits into a fixed memory per device, against the number of devices. Table 3 in small.

Drawn from bench/results/max_context.json. Points are measured under a hard limit, lines modelled by counting bytes.

    $ python -m bench.max_context        # measures again
    $ python -m figures.max_context
"""

from pathlib import Path

from bench import record
from bench.max_context import lengths
from figures import FOLDER
from ringlab.support import drawing

ALT = (
    "The longest context that trains one attention layer, against the number of devices P, each with the same hard "
    "memory limit. The ring's points for 1, 2, 4 and 8 devices lie on the modelled line, straight through the origin: "
    "2, 4 and 8 times the context of one device. Two level lines show what one device reaches without a ring: naive "
    "attention the least, blockwise attention as much as a ring of two devices."
)
COLOURS = {"naive": "#8C1D40", "blockwise": "#B0568A", "ring": drawing.INK}  # not those of blocks: these are methods


def draw() -> drawing.Picture:
    """A line through the origin and points for the ring; a level line and a point for a method on one device."""
    results = record.load("max_context")
    worlds, machine = results["worlds"], results["machine"]
    figure, page = drawing.canvas(1000, 600, ALT)
    title = "With the same memory on every device, P devices train P times the context"
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    shape = f"B = 1, H = {results['heads']}, D = {results['head_dim']}, {results['dtype']}"
    limit = f"{results['budget'] / 2**20:g} MiB a device, a hard limit"
    drawing.write(page, 20, 65, f"{limit}   one layer's attention, forward and backward, {shape}", color=drawing.MUTED)
    on = f"{machine['cores']} cores, {machine['date'][:10]}"
    drawing.write(page, 20, 91, f"points: measured, {on}   lines: modelled by counting bytes", color=drawing.MUTED)

    ax = figure.add_axes((0.085, 0.115, 0.9, 0.695), facecolor=drawing.PAGE)
    ring, modelled = lengths(results, "ring"), lengths(results, "ring", "counted_chunk")
    right, look = 1.25 * worlds[-1], {"fontsize": 0.72 * drawing.TEXT, "textcoords": "offset points"}
    for method in ("naive", "blockwise"):
        colour, (S,) = COLOURS[method], lengths(results, method)
        ax.plot([0, right], lengths(results, method, "counted_chunk") * 2, color=colour, lw=1.8)
        ax.plot([1], [S], "s", color=colour, ms=8, mec=drawing.PAGE, mew=1.2)
        label = f"{method}, one device: {S:,}"
        ax.annotate(label, (right, S), (-4, 8), ha="right", color=colour, weight="bold", **look)
    ax.plot([0, *worlds], [0, *modelled], color=COLOURS["ring"], lw=1.8)
    ax.plot(worlds, ring, "o", color=COLOURS["ring"], ms=9, mec=drawing.PAGE, mew=1.2)
    for P, S in zip(worlds, ring, strict=True):
        times = S / ring[0]
        label = f"{S:,}, {times:.2f} times" if times > 1 else f"ring: {S:,}"
        ax.annotate(label, (P, S), (10, -15), color=COLOURS["ring"], weight="bold", **look)
    drawing.plain(ax)
    ax.set(xlim=(0, right), ylim=(0, 1.1 * max(ring)))
    ax.set_xticks(worlds)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("devices P of the ring", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    ax.set_ylabel("longest S, tokens", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write max_context.svg."""
    drawing.save(draw(), "max_context", folder)


if __name__ == "__main__":
    save()
