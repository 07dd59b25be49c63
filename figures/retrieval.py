"""Which lines two models find: one trained on texts that fit one rank, one on 4 times as long texts in a ring of 4.

Drawn from bench/results/retrieval.json.

    $ python -m bench.retrieval        # trains again
    $ python -m figures.retrieval
"""

from pathlib import Path

from matplotlib.colors import LinearSegmentedColormap, to_hex

from bench import record
from bench.retrieval import RUNS, SQUEEZED, accuracies, lengths
from figures import FOLDER
from ringlab.support import drawing
from ringlab.support.colours import ink_on

ALT = (
    "Three heat maps and a line chart: the share of right answers by the length of the text, 32 to 256 lines, and by "
    "the depth of the line. The model trained on 32 lines in one process finds nearly all lines of such texts. "
    "In longer texts it fails, first at the top of the text: with 256 lines it finds about 1 in 10 of the first lines "
    "and about half of the last. The model that a ring of 4 trained on 128 lines finds nearly all lines of texts up to "
    "128 lines at every depth. With 256 lines it fails at the top as well. The first model, when its positions are "
    "squeezed into those of 32 lines, still finds about 9 in 10 lines of texts of 256."
)
SHADES = LinearSegmentedColormap.from_list(
    "accuracy", [drawing.PAGE, "#D79BBB", "#8C1D40"]
)  # no block: no block's colour
LOOK = dict(zip(RUNS, (("#D79BBB", "s", "-"), ("#8C1D40", "o", "-"), ("#D79BBB", "D", (0, (1, 1.4)))), strict=True))


def draw() -> drawing.Picture:
    """A heat map of each model, and under them the accuracy by length, a point for each seed."""
    results = record.load("retrieval")
    figure, page = drawing.canvas(1000, 840, ALT)
    drawing.write(
        page, 20, 34, "Line retrieval: a ring of 4 trains on 4 times the context", size=drawing.TITLE, weight="bold"
    )
    on, kept = results["machine"], results["rows"][0]["kept_bytes"][0] / 2**20
    said = f"right answers in %, mean of {len(results['seeds'])} seeds, {results['steps']} steps"
    said += f"   {kept:.0f} MiB kept for the backward pass on each rank"
    drawing.write(page, 20, 65, f"{said}   {on['cores']} cores, {on['date'][:10]}", color=drawing.MUTED)

    lines = lengths(results["lines"])
    below = figure.add_axes((0.075, 0.09, 0.905, 0.3), facecolor=drawing.PAGE)
    for i, (name, ranks) in enumerate(RUNS.items()):
        seen = accuracies(results, name)  # (seeds, lengths, depths)
        mean = 100 * seen.mean(dim=0)
        ax = figure.add_axes((0.075 + 0.313 * i, 0.505, 0.279, 0.34), facecolor=drawing.PAGE)
        ax.imshow(mean.T.numpy(), cmap=SHADES, vmin=0, vmax=100, aspect="auto")
        for x, column in enumerate(mean):
            for y, share in enumerate(column.tolist()):
                ink = ink_on(to_hex(SHADES(share / 100)).upper())
                ax.text(x, y, f"{share:.0f}", fontsize=0.72 * drawing.TEXT, color=ink, ha="center", va="center")
        trained = lines.index(ranks * results["lines"])
        ax.axvline(trained + 0.5, color=drawing.INK, lw=2.5)
        ax.set_title(name, fontsize=0.72 * drawing.TEXT, color=drawing.INK, loc="left", weight="bold")
        drawing.plain(ax)
        ax.grid(visible=False)
        ax.set_xticks(range(len(lines)), lines)
        ax.set_yticks([0, mean.shape[1] - 1], ["first", "last"] if i == 0 else ["", ""])
        ax.set_ylabel("depth of the line" if i == 0 else "", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
        ax.set_xlabel("lines; right of the bar: never seen", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
        colour, marker, dashes = LOOK[name]
        below.plot(lines, mean.mean(dim=1), color=colour, ls=dashes, lw=2.5)
        for one in 100 * seen.mean(dim=2):
            below.plot(lines, one, color=colour, marker=marker, ls="", ms=7, mec=drawing.INK, mew=0.6)
        look = {"color": colour, "ls": dashes, "marker": marker, "ms": 7, "mec": drawing.INK, "mew": 0.6}
        below.plot([], [], lw=2.5, label=name, **look)
        if name != SQUEEZED:
            below.axvline(lines[trained], color=colour, lw=1.5, ls=(0, (4, 3)))
    drawing.plain(below)
    below.set_xscale("log", base=2)
    below.set_xticks(lines, lines)
    below.minorticks_off()
    below.set_ylim(0, 104)
    below.set_xlabel("lines in the text; dashed: the longest texts of the training", fontsize=0.72 * drawing.TEXT)
    below.set_ylabel("right answers, %", fontsize=0.72 * drawing.TEXT)
    below.legend(
        loc="lower left", bbox_to_anchor=(0.06, 0), fontsize=0.72 * drawing.TEXT, frameon=False, labelcolor=drawing.INK
    )
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write retrieval.svg."""
    drawing.save(draw(), "retrieval", folder)


if __name__ == "__main__":
    save()
