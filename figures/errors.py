"""The errors of the flash ring in every dtype, beside those of one device's fused attention on the same inputs.

Drawn from bench/results/accuracy.json.

    $ python -m bench.accuracy        # measures again
    $ python -m figures.errors
"""

from pathlib import Path

from bench import record
from bench.accuracy import RESULTS
from figures import FOLDER
from ringlab.support import drawing

ALT = (
    "Pairs of bars on a logarithmic axis of errors, for out, dq, dk and dv in float64, float32, float16 and bfloat16. "
    "From dtype to dtype the errors grow from 1e-15 to 1e-2. The ring's are as large as those of fused attention on "
    "one device, and for dk and dv in 16 bits about half."
)
RING, ALONE = drawing.INK, "#B0568A"  # not those of blocks: these are methods


def draw() -> drawing.Picture:
    """A panel for each dtype; in it out, dq, dk and dv, two bars each."""
    results = record.load("accuracy")
    figure, page = drawing.canvas(1000, 480, ALT)
    drawing.write(page, 20, 34, "The ring is as exact as one device", size=drawing.TITLE, weight="bold")
    sizes = f"S = {results['seq_len']:,}, H = {results['heads']}, D = {results['head_dim']}"
    line = f"largest error against full attention in float64   causal, zigzag, P = {results['world_size']}, {sizes}"
    drawing.write(page, 20, 66, line, color=drawing.MUTED)
    ax = figure.add_axes((0.085, 0.16, 0.895, 0.66), facecolor=drawing.PAGE)
    ax.set_yscale("log")
    floor, ticks, labels = 1e-17, [], []
    for group, row in enumerate(results["rows"]):
        for i, name in enumerate(RESULTS):
            x = 5 * group + i
            for shift, of, colour in ((-0.38, "ring", RING), (0, "sdpa", ALONE)):
                ax.bar(x + shift, row[of][name] - floor, 0.36, floor, align="edge", color=colour)
            ratio = row["ring"][name] / row["sdpa"][name]
            top = max(row["ring"][name], row["sdpa"][name])
            ax.text(x, top * 1.6, f"{ratio:.2f}", ha="center", fontsize=0.72 * drawing.SMALL, color=drawing.INK)
            ticks.append(x)
            labels.append(name)
        ax.text(5 * group + 1.5, 0.9, row["dtype"], ha="center", fontsize=0.72 * drawing.TEXT, weight="bold")
    drawing.plain(ax)
    ax.grid(axis="x", visible=False)
    ax.set_xticks(ticks, labels)
    ax.set_ylim(floor, 5)
    ax.minorticks_off()
    for x, colour, label in ((85, RING, "flash ring"), (230, ALONE, "fused attention in one process")):
        drawing.box(page, x, 445, 22, 16, fc=colour)
        drawing.write(page, x + 32, 453, label)
    drawing.write(page, 500, 453, "numbers: the ring's error / the other's", color=drawing.MUTED)
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write errors.svg."""
    drawing.save(draw(), "errors", folder)


if __name__ == "__main__":
    save()
