"""The longest sequence that trains a whole model in a fixed memory a rank: predicted and measured.

Drawn from bench/results/longest_training.json.

    $ python -m bench.longest_training        # measures again
    $ python -m figures.longest_training
"""

from pathlib import Path

from bench import record
from bench.longest_training import lengths
from figures import FOLDER
from ringlab.support import drawing

ALT = (
    "Bars for the longest sequence that trains a whole transformer with the same hard memory limit on every rank, in "
    "two groups: all activations kept, and activation checkpointing. In each group naive attention reaches least, "
    "blockwise attention on one process more, a ring of 2 more, and a ring of 4 most. With all activations kept the "
    "rings reach a little more than 2 and 4 times the sequence of blockwise attention, with checkpointing less. A line "
    "across each bar, the prediction, lies near its end."
)
COLOURS = {"naive": "#8C1D40", "blockwise": "#B0568A", "ring": drawing.INK}  # not those of blocks: these are methods


def draw() -> drawing.Picture:
    """A bar for each method, P and way to keep activations; the predictions as lines across."""
    results = record.load("longest_training")
    figure, page = drawing.canvas(1000, 640, ALT)
    title = "The longest sequence that trains a whole model with the same memory on every rank"
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    model = f"{results['layers']} layers, hidden {results['hidden']}, {results['dtype']}"
    limit = f"{results['budget'] / 2**20:g} MiB a rank, a hard limit, weights and optimizer included"
    drawing.write(page, 20, 65, f"{limit}   {model}", color=drawing.MUTED)
    on = f"{results['machine']['cores']} cores, {results['machine']['date'][:10]}"
    key = f"bars: measured, {on}   pale lines: predicted, bench/longest_training.py"
    drawing.write(page, 20, 91, key, color=drawing.MUTED)

    ax = figure.add_axes((0.15, 0.1, 0.83, 0.73), facecolor=drawing.PAGE)
    rows, look = results["rows"], {"fontsize": 0.72 * drawing.TEXT, "va": "center"}
    places = [i + (0.9 if row["checkpointing"] else 0) for i, row in enumerate(rows)]
    for y, row in zip(places, rows, strict=True):
        S, predicted = (row["world_size"] * row[of] for of in ("chunk", "predicted_chunk"))
        ax.barh(y, S, height=0.72, color=COLOURS[row["method"]])
        ax.plot([predicted] * 2, [y - 0.36, y + 0.36], color=drawing.FAINT, lw=3)
        (one,) = lengths(results, "blockwise", row["checkpointing"])
        times = f", {S / one:.2f} times blockwise" if row["method"] == "ring" else ""
        ax.text(max(S, predicted) + 150, y, f"{S:,}{times}", color=drawing.INK, **look)
    names = [f"ring of {row['world_size']}" if row["method"] == "ring" else row["method"] for row in rows]
    drawing.plain(ax)
    ax.grid(axis="y", visible=False)
    ax.set_yticks(places, names)
    ax.set(xlim=(0, 1.4 * max(row["world_size"] * row["chunk"] for row in rows)), ylim=(places[-1] + 0.6, -1.1))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("longest S, tokens", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    half = len(rows) // 2
    for y, name in ((places[0], "all activations kept"), (places[half], "activation checkpointing")):
        ax.text(0, y - 0.7, name, color=drawing.INK, weight="bold", **look)
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write longest_training.svg."""
    drawing.save(draw(), "longest_training", folder)


if __name__ == "__main__":
    save()
