"""How long five ways take over a slow link between two hosts, against the link's rate: measured, and predicted.

A panel for each way and S, two meshes in each. Drawn from bench/results/five_ways.json. Points are measured. Lines are
modelled by ringlab/planning/seconds.py, from the calibration at the middle rate. A time is divided by that of the
ring's computing alone, which is one number for all ways. To measure again (as root, on Linux):

    $ python -m bench.five_ways
    $ python -m figures.crossover
"""

from pathlib import Path
from statistics import median

from matplotlib.ticker import MultipleLocator

from bench import record
from bench.five_ways_predicted import TRAIN, Row, predicted, rows_of, timed
from figures import FOLDER
from ringlab.planning.ways import WAYS
from ringlab.support import drawing

ALT = (
    "Ten panels: five ways side by side, a short sequence above and a long one below. Each shows the time of training "
    "step of attention over that of the ring's computing alone, against the rate of the link between two hosts: 20, 50 "
    "and 125 MB/s. Filled points and solid lines are 2 hosts of 2 ranks, hollow points and dashed lines 2 hosts of 4. "
    "A star marks the fastest way at each rate. On the short sequence all times fall as the link gets faster, and "
    "all-to-all is the fastest everywhere. On the long sequence the ring is the fastest at 20 MB/s; at 125 MB/s all "
    "ways are near 1, some below."
)
# Colours not those of blocks: these are meshes.
LOOK = {(2, 2): ("#5B4B8A", "-", "#5B4B8A"), (2, 4): ("#A65E00", (0, (4, 2.5)), drawing.PAGE)}  # colour, line, fill
HEIGHT = 730
STEPS = 24  # of a line
BESIDE = 1.1  # points of the two meshes lie beside each other


def computing(row: Row) -> float:
    """Seconds of the ring's computing alone."""
    return median(timed(row, "ring, computing", TRAIN))


def fastest(row: Row) -> str:
    """The way with the shortest time of training."""
    return min(WAYS, key=lambda way: median(timed(row, way, TRAIN)))


def draw() -> drawing.Picture:
    """A panel for each way and S, with a line and points for each mesh."""
    results = record.load("five_ways")
    figure, page = drawing.canvas(1000, HEIGHT, ALT)
    title = "Which way is fastest depends on the slow link and on the sequence"
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    what = "forward and backward, over the time of the ring's computing alone   points: measured   lines: simulated"
    drawing.write(page, 20, 65, what, color=drawing.MUTED)
    on = f"two hosts (network namespaces) on {results['machine']['cores']} cores, {results['dtype']}"
    shape = f"causal, H = {results['heads']}, D = {results['head_dim']}, {results['machine']['date'][:10]}"
    drawing.write(page, 20, 91, f"{on}   {shape}", color=drawing.MUTED)
    for line, S in enumerate(sorted({row["seq_len"] for row in results["rows"]})):
        top = 140 + 270 * line
        drawing.write(page, 20, top, f"S = {S:,}", weight="bold")
        highest, panels = 0.0, []
        for column, way in enumerate(WAYS):
            ax = figure.add_axes(
                (0.05 + 0.19 * column, 1 - (top + 225) / HEIGHT, 0.165, 175 / HEIGHT), facecolor=drawing.PAGE
            )
            panels.append(ax)
            for side, ((hosts, per_host), (colour, style, fill)) in zip((-1, 1), LOOK.items(), strict=True):
                rows = sorted(rows_of(results, hosts, per_host, S), key=lambda row: row["rate"])
                rates = [row["rate"] for row in rows]
                first, last = rates[0] / 1.3, rates[-1] * 1.3
                ends = [first * (last / first) ** (i / STEPS) for i in range(STEPS + 1)]
                unit = median(computing(row) for row in rows)
                middle = rows[len(rows) // 2]
                times = [predicted(results, middle, way, TRAIN, rate) / unit for rate in ends]
                ax.plot(ends, times, color=colour, lw=1.8, ls=style)
                points = [median(timed(row, way, TRAIN)) / computing(row) for row in rows]
                highest = max(highest, *times, *points)
                for row, rate, point in zip(rows, rates, points, strict=True):
                    marker, size = ("*", 17) if fastest(row) == way else ("o", 8)
                    ax.plot([rate * BESIDE**side], [point], marker, color=colour, ms=size, mfc=fill, mew=1.5)
            drawing.plain(ax)
            ax.set_xscale("log")
            ax.set_xticks(rates, [f"{rate / 1e6:g}" for rate in rates])
            ax.minorticks_off()
            ax.set_title(way, fontsize=0.72 * drawing.TEXT, color=drawing.INK, loc="left", weight="bold")
        for ax in panels:
            ax.axhline(1, color=drawing.MUTED, lw=1)
            ax.set(xlim=(first, last), ylim=(0, 1.08 * highest))
            ax.yaxis.set_major_locator(MultipleLocator(1 if highest > 2 else 0.5))
        for ax in panels[1:]:
            ax.tick_params(labelleft=False)
    drawing.write(page, 500, 667, "MB/s of the link between the hosts", ha="center", color=drawing.MUTED)
    for x, ((hosts, per_host), (colour, style, fill)) in zip((50, 320), LOOK.items(), strict=True):
        page.plot([x, x + 36], [704, 704], color=colour, lw=1.8, ls=style)
        page.plot([x + 18], [704], "o", color=colour, ms=8, mfc=fill, mew=1.5)
        drawing.write(page, x + 48, 704, f"{hosts} hosts of {per_host} ranks")
    page.plot([600], [704], "*", color=drawing.INK, ms=17, mfc=drawing.PAGE, mew=1.5)
    drawing.write(page, 618, 704, "the fastest of the five ways")
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write crossover.svg."""
    drawing.save(draw(), "crossover", folder)


if __name__ == "__main__":
    save()
