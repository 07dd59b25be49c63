"""How long five ways take over a slow link between two hosts, against the link's rate: measured, and predicted.

Drawn from bench/results/five_ways.json. Points are measured. Lines are simulated by ringlab/planning/two_speeds.py,
from the FLOP/s and bytes/s of the same runs. To measure again (as root, on Linux):

    $ python -m bench.five_ways
    $ python -m figures.crossover
"""

from pathlib import Path
from statistics import median

from bench import record
from bench.five_ways_predicted import TRAIN, at_rate, predicted, rows_of, timed
from figures import FOLDER
from ringlab.planning.ways import WAYS
from ringlab.support import drawing

ALT = (
    "Four panels, for 2 hosts of 2 and of 4 ranks and for a short and a long sequence: the time of a training step of "
    "attention, over that of its computing alone, against the rate of the link between the hosts, on a logarithmic "
    "axis. Each panel has a simulated line and measured points for each of five ways: ring, double ring, all-gather, "
    "all-to-all and hybrid. All lines fall as the link gets faster. They cross: where the link is slow, a way is fast "
    "that sends few bytes between the hosts; where it is fast, a way whose messages are hidden or few. On the long "
    "sequence all ways are nearer to 1."
)
# Colours not those of blocks: these are methods. Each has a marker of its own too.
LOOK = dict(
    zip(WAYS, [("#5B4B8A", "o"), ("#8C1D40", "s"), ("#A65E00", "^"), ("#2E7D32", "D"), ("#00707A", "v")], strict=True)
)
STEPS = 24  # of a line
BESIDE = 1.03  # points of the five ways lie beside each other


def draw() -> drawing.Picture:
    """A panel for each mesh and S, with a line and points for each way."""
    results = record.load("five_ways")
    figure, page = drawing.canvas(1000, 850, ALT)
    title = "Which way is fastest depends on the slow link and on the sequence"
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    on = f"two hosts (network namespaces) on {results['machine']['cores']} cores, {results['dtype']}"
    shape = f"causal, H = {results['heads']}, D = {results['head_dim']}, {results['machine']['date'][:10]}"
    what = "seconds of forward and backward, over those of computing alone   points: measured   lines: simulated"
    drawing.write(page, 20, 65, what, color=drawing.MUTED)
    drawing.write(page, 20, 91, f"{on}   {shape}", color=drawing.MUTED)
    meshes = sorted({(row["hosts"], row["per_host"]) for row in results["rows"]})
    for line, S in enumerate(sorted({row["seq_len"] for row in results["rows"]})):
        for column, (hosts, per_host) in enumerate(meshes):
            ax = figure.add_axes((0.06 + 0.49 * column, 0.525 - 0.395 * line, 0.435, 0.3), facecolor=drawing.PAGE)
            rows = rows_of(results, hosts, per_host, S)
            rates = sorted(row["rate"] for row in rows)
            first, last = rates[0] / 1.2, rates[-1] * 1.2
            ends = [first * (last / first) ** (i / STEPS) for i in range(STEPS + 1)]
            computing = [median(timed(row, "ring, computing", TRAIN)) for row in rows]
            highest = 0.0
            for i, (way, (colour, marker)) in enumerate(LOOK.items()):
                lines = [
                    predicted(results, rows[0], way, TRAIN, at_rate(results, rows, rate)) / median(computing)
                    for rate in ends
                ]
                points = [median(timed(row, way, TRAIN)) / alone for row, alone in zip(rows, computing, strict=True)]
                ax.plot(ends, lines, color=colour, lw=1.8)
                seen = [row["rate"] * BESIDE ** (i - 2) for row in rows]
                ax.plot(seen, points, marker, color=colour, ms=8, mec=drawing.PAGE, mew=1.2)
                highest = max(highest, *lines, *points)
            drawing.plain(ax)
            ax.set_xscale("log")
            ax.set_xticks(rates, [f"{rate / 1e6:g} MB/s" for rate in rates])
            ax.minorticks_off()
            ax.set(xlim=(first, last), ylim=(0, 1.08 * highest))
            name = f"{hosts} hosts of {per_host} ranks, S = {S:,}"
            ax.set_title(name, fontsize=0.72 * drawing.TEXT, color=drawing.INK, loc="left", weight="bold")
    for i, (way, (colour, marker)) in enumerate(LOOK.items()):
        x = 60 + 185 * i
        page.plot([x - 14, x + 14], [808, 808], color=colour, lw=1.8)
        page.plot([x], [808], marker, color=colour, ms=8, mec=drawing.PAGE, mew=1.2)
        drawing.write(page, x + 24, 808, way)
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write crossover.svg."""
    drawing.save(draw(), "crossover", folder)


if __name__ == "__main__":
    save()
