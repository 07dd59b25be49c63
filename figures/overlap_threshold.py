"""The share of its messages that a ring between two hosts hides, against its chunk, and the knee that is predicted.

Drawn from bench/results/overlap_threshold.json. Points are measured. Lines are modelled by
ringlab/planning/hidden_communication.py from the FLOP/s and bytes/s of the same run. To measure again (as root, on
Linux):

    $ python -m bench.overlap_threshold
    $ python -m figures.overlap_threshold
"""

from pathlib import Path

from bench import record
from figures import FOLDER
from ringlab.planning.hidden_communication import hidden_share
from ringlab.support import drawing

ALT = (
    "The hidden share of the messages' time against the chunk, tokens a rank, on a logarithmic axis, for a fast and "
    "for a slow link between two hosts. For each link a modelled line rises with the chunk up to 100% at the predicted "
    "knee, and stays there. The measured points rise and stay at 100% in the same way, those of the slow link at "
    "chunks about four times as long. On the fast link the measured knee is left of the predicted one, near a second, "
    "dashed line, which is for the FLOP/s that computing reaches while messages travel."
)
LOOK = [
    ("#8C1D40", "s"),
    (drawing.INK, "o"),
]  # colour (not that of a block: these are links) and marker, fast link first


def draw() -> drawing.Picture:
    """For each link its measured points, its two modelled lines, and the knees written above them."""
    results = record.load("overlap_threshold")
    figure, page = drawing.canvas(1000, 600, ALT)
    title = "With chunks longer than the knee C*, a ring hides all its messages"
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    key = "points: measured   lines: modelled, min(1, C / C*), C* = 2 · FLOP/s over bytes/s   dashed: FLOP/s meanwhile"
    drawing.write(page, 20, 64, key, color=drawing.MUTED)
    on = results["machine"]
    shape = f"H = {results['heads']}, D = {results['head_dim']}, {results['dtype']}"
    machine = f"two hosts (network namespaces), a rank and a core each of {on['cores']}, {shape}, {on['date'][:10]}"
    drawing.write(page, 20, 90, machine, color=drawing.MUTED)

    ax = figure.add_axes((0.075, 0.115, 0.895, 0.6), facecolor=drawing.PAGE)
    ax.set_xscale("log", base=2)
    chunks = sorted({row["chunk"] for row in results["rows"]})
    first, last = chunks[0] / 1.2, chunks[-1] * 1.2
    for knee, (colour, marker) in zip(results["knees"], LOOK, strict=True):
        for name, dashes in (("predicted", "-"), ("predicted_meanwhile", (0, (4, 3)))):
            c = knee[name]
            line = [first * (c / first) ** (i / 60) for i in range(61)] + [last]
            ax.plot(line, [hidden_share(C, c) for C in line], color=colour, lw=1.8, ls=dashes)
        ax.plot(knee["predicted"], 1, marker="|", color=colour, ms=22, mew=1.8)
        seen = [(row["chunk"], row["hidden"]) for row in results["rows"] if row["rate"] == knee["rate"]]
        ax.plot(*zip(*seen, strict=True), marker, color=colour, ms=9, mec=drawing.PAGE, mew=1.2)
        text = f"{knee['rate'] / 1e6:g} MB/s\nC* predicted: {knee['predicted']:,.0f}\nmeasured: {knee['measured']:,.0f}"
        look = {"ha": "center", "va": "bottom", "color": colour, "weight": "bold", "fontsize": 0.72 * drawing.TEXT}
        ax.annotate(text, (knee["predicted"], 1), xytext=(0, 12), textcoords="offset points", **look)

    names = [C for C in (2**i for i in range(40)) if first <= C <= last]
    ax.set_xticks(names, [f"{C:,}" for C in names])
    ax.minorticks_off()
    ax.set_xlim(first, last)
    lowest = min(0.0, *(row["hidden"] for row in results["rows"]))
    ax.set_ylim(lowest - 0.04, 1.06)
    shares = [0, 0.25, 0.5, 0.75, 1]
    ax.set_yticks(shares, [f"{share:.0%}" for share in shares])
    drawing.plain(ax)
    ax.set_xlabel("C, tokens a rank", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    ax.set_ylabel("hidden: 1 - wait / hop", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write overlap_threshold.svg."""
    drawing.save(draw(), "overlap_threshold", folder)


if __name__ == "__main__":
    save()
