"""Times of attention that others measured, and how far the planner's predictions lie from them.

Drawn from bench/published.json by bench/scoreboard.py.
"""

from bench.scoreboard import Grade, grades, interval, summary
from figures import shapes
from ringlab.support import drawing

ALT = (
    "64 points: the measured milliseconds of attention on 8 to 64 GPUs, from 1.3 to 2,600, against the error of the "
    "predicted time in percent. A shape for each of five sources, a colour for each way. Four in five points lie "
    "between -10 and +10 percent. The worst are rings and an all-to-all of 8 L20 without NVLink, -29 to -47 percent. "
    "A band shows where nine in ten measured times lie around a prediction."
)
COLOURS = {"ring": drawing.INK, "hybrid": "#5B4B8A", "all-to-all": "#A65E00", "all-gather": "#8C1D40"}  # not of blocks
MARKERS = {
    "zhuzilin": "o",
    "feifeibear": "s",
    "MayDomine": "^",
    "SandAI-org": "D",
    "ifromeast": "v",
}  # by the source's first word
NAMES = {"zhuzilin": "ring-flash-attention", "feifeibear": "long-context-attention", "MayDomine": "Burst-Attention"}
NAMES |= {"SandAI-org": "MagiAttention", "ifromeast": "AI_analysis (L20)"}


def source(grade: Grade) -> str:
    """The key of MARKERS."""
    return grade.row["source"].partition("/")[0]


def draw() -> drawing.Picture:
    """A point for each measured time of attention."""
    rows = [each for each in grades() if each.kind.startswith("attention, best")]
    errors = summary([each.error for each in rows])
    title = "Attention on 8 to 64 GPUs, measured by others: how far is the planner off?"
    words = (
        f"median {errors['median']:.1%}, nine in ten within {errors['nine in ten']:.1%}, worst {errors['worst']:.1%}"
    )
    what = f"{len(rows)} times   error: {words}"
    band = "band: where nine in ten further times lie"
    figure, _ = shapes.headed(560, ALT, title, {65: what, 91: band})

    place = (0.085, 0.12, 0.655, 0.68)
    ax = shapes.numbers(figure, place, x="measured ms of a layer", y="predicted / measured - 1")
    low, high = interval([each.ratio() for each in rows])
    ax.axhspan(100 / high - 100, 100 / low - 100, color=drawing.CARD, zorder=0)
    ax.axhline(0, color=drawing.MUTED, lw=1.2)
    for each in rows:
        look = {"s": 62, "color": COLOURS[each.row["way"]], "marker": MARKERS[source(each)], "lw": 0, "alpha": 0.85}
        ax.scatter(each.measured, 100 * each.error, **look)
    ax.set(xscale="log", ylim=(-52, 32))
    ticks = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_yticks(range(-50, 40, 10), [f"{error:+d} %" if error else "0" for error in range(-50, 40, 10)])

    key = figure.add_axes((0.76, 0.12, 0.23, 0.68), facecolor=drawing.PAGE)
    key.set(xlim=(0, 230), ylim=(380, 0))
    key.axis("off")
    for i, (way, colour) in enumerate(COLOURS.items()):
        key.scatter(16, 30 + 28 * i, s=62, color=colour, marker="o", lw=0)
        drawing.write(key, 34, 30 + 28 * i, way)
    for i, (name, marker) in enumerate(MARKERS.items()):
        key.scatter(16, 180 + 28 * i, s=62, color=drawing.MUTED, marker=marker, lw=0)
        drawing.write(key, 34, 180 + 28 * i, NAMES[name])
    return figure
