"""How far the planner lies from what others measured: bench/published.json, graded by bench/scoreboard.py."""

from bench.scoreboard import Grade, grades, summary, times
from figures import shapes
from ringlab.support import drawing

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


def draw() -> drawing.Picture:
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
    figure, page = shapes.headed(520, draw, title, {65: band})
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
