"""The losses of 100 steps on one process, in a ring, on a mesh and in bfloat16, and how far each is from one process.

Drawn from bench/results/loss_curves.json.

    $ python -m bench.loss_curves        # measures again
    $ python -m figures.loss_curves
"""

from pathlib import Path

from bench import record
from bench.loss_curves import BF16, ONE, ROUNDED, curves, differences
from figures import FOLDER
from ringlab.support import drawing

ALT = (
    "Two panels over 100 training steps. Above, the losses of one process, of a ring of 4, of a mesh of 2 x 2 and of a "
    "ring of 4 in bfloat16 fall from 5.6 to 2.8 and lie on each other. Below, on a logarithmic axis, the largest "
    "difference so far of each run from one process, as a share of the loss. The ring and the mesh stay below 3e-7, as "
    "does a run on one process whose first weights are off by one rounding error. Bfloat16 reaches 3e-3."
)
LOOK = {  # colour (not that of a block: these are runs), line style and width: each lies inside the one before it
    ONE: (drawing.FAINT, "-", 11.0),
    "ring of 4": ("#8C1D40", "-", 7.0),
    "2 x 2, dp x cp": ("#D79BBB", "-", 3.6),
    BF16: (drawing.INK, (0, (1, 1.6)), 1.8),
    ROUNDED: (drawing.MUTED, (0, (5, 2)), 1.8),
}


def draw() -> drawing.Picture:
    """The losses, and under them the differences."""
    results = record.load("loss_curves")
    figure, page = drawing.canvas(1000, 800, ALT)
    drawing.write(page, 20, 34, "The same losses on every mesh", size=drawing.TITLE, weight="bold")
    on, dtype = results["machine"], "float32, one run in bfloat16"
    model = f"{results['layers']} layers, hidden {results['hidden']}"
    batch = f"{results['batch']} x {results['seq_len']} tokens a step"
    said = f"ringlab.models.train, {model}, {batch}, {dtype}   measured, {on['cores']} cores, {on['date'][:10]}"
    drawing.write(page, 20, 65, said, color=drawing.MUTED)

    above = figure.add_axes((0.075, 0.5, 0.905, 0.37), facecolor=drawing.PAGE)
    below = figure.add_axes((0.075, 0.14, 0.905, 0.29), facecolor=drawing.PAGE)
    steps = range(1, results["steps"] + 1)
    for name, losses in curves(results).items():
        colour, dashes, width = LOOK[name]
        if name != ROUNDED:
            above.plot(steps, losses, color=colour, ls=dashes, lw=width)
    for name, off in differences(results).items():
        colour, dashes, width = LOOK[name]
        largest = off.cummax(dim=0).values.tolist()
        below.plot(steps, [x or None for x in largest], color=colour, ls=dashes, lw=min(width, 4))  # 0 has no logarithm
    below.set_yscale("log")
    for ax, label in ((above, "loss, nats a byte"), (below, "share of the loss")):
        drawing.plain(ax)
        ax.set_xlim(0, results["steps"] + 1)
        ax.set_ylabel(label, fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    below.minorticks_off()
    below.set_xlabel("step", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    title = {"fontsize": 0.72 * drawing.TEXT, "color": drawing.INK, "loc": "left", "weight": "bold"}
    above.set_title("loss", **title)
    below.set_title("difference from one process, the largest so far", **title)
    for i, (name, (colour, dashes, width)) in enumerate(LOOK.items()):
        x, y = 75 + 225 * (i % 4), 744 + 28 * (i // 4)
        page.plot([x, x + 50], [y, y], color=colour, ls=dashes, lw=width, solid_capstyle="butt")
        drawing.write(page, x + 60, y, name + (" (below only)" if name == ROUNDED else ""))
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write loss_curves.svg."""
    drawing.save(draw(), "loss_curves", folder)


if __name__ == "__main__":
    save()
