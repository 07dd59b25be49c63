"""Peak memory of attention beyond its inputs against S: naive, blockwise, and one rank of a ring, counted and measured.

Drawn from bench/results/memory.json: lines are counted by bench/memory.py, points are the measured peaks of processes.

    $ python -m bench.memory        # measures again
    $ python -m figures.memory
"""

import json
from pathlib import Path

from figures import FOLDER
from ringlab.support import drawing

ALT = (
    "Peak memory beyond the inputs against sequence length S from 512 to 16,384, both axes logarithmic. Naive "
    "attention grows with the square of S, from 6 MiB to 6 GiB. Blockwise attention and one rank of a ring of 4 need "
    "a few MiB of tiles when S is small and then grow in proportion to S, to 16 and 10 MiB. The measured points lie "
    "on the lines."
)
METHODS = {  # label, colour (not that of a block: these are methods), marker, side of the label
    "naive": ("naive", "#8C1D40", "s", 0),
    "blockwise": ("blockwise", drawing.MUTED, "D", 1),
    "ring": ("ring, one of {P} ranks", drawing.INK, "o", -1),
}


def draw() -> drawing.Picture:
    """One line of counted and one row of measured bytes for each method."""
    results = json.loads((FOLDER.parent / "bench" / "results" / "memory.json").read_text())
    lengths = results["lengths"]
    figure, page = drawing.canvas(1000, 600, ALT)
    title = "Peak memory beyond the inputs: S² becomes S, and a ring divides it"
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    shape = f"B = 1, H = {results['heads']}, D = {results['head_dim']}, {results['dtype']}"
    drawing.write(page, 20, 66, f"lines: counted   points: measured   {shape}", color=drawing.MUTED)

    ax = figure.add_axes((0.08, 0.115, 0.72, 0.75), facecolor=drawing.PAGE)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for name, (label, colour, marker, above) in METHODS.items():
        counted, measured = results["counted"][name], results["measured"][name]
        ax.plot(lengths, counted, color=colour, lw=1.8)
        seen = [(S, peak) for S, peak in zip(lengths, measured, strict=True) if peak is not None]
        ax.plot(*zip(*seen, strict=True), marker, color=colour, ms=8, mec=drawing.PAGE, mew=1.2)
        label = label.format(P=results["world_size"])
        at = {"xytext": (13, 9 * above), "textcoords": "offset points", "va": "center", "color": colour}
        ax.annotate(label, (lengths[-1], counted[-1]), **at, fontsize=0.72 * drawing.TEXT, weight="bold")
    note = "a short sequence: most of it is\ntiles of scores, 3 at a time"
    ax.text(lengths[1], 0.42 * 2**20, note, fontsize=0.72 * drawing.TEXT, color=drawing.MUTED, va="center")

    ax.set_xticks(lengths, [f"{S:,}" for S in lengths])
    powers = range(18, 34, 2)
    names = [f"{2 ** (power - 20):g} MiB" if power < 30 else f"{2 ** (power - 30)} GiB" for power in powers]
    ax.set_yticks([2**power for power in powers], names)
    ax.set_ylim(2**17.6, 2**33.4)
    ax.minorticks_off()
    ax.set_xlabel("S, tokens", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    drawing.plain(ax)
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write memory.svg."""
    drawing.save(draw(), "memory", folder)


if __name__ == "__main__":
    save()
