"""The share of the machine's peak that attention reaches: one device, and a ring with P times its context.

Drawn from bench/results/utilisation.json.

    $ python -m bench.utilisation        # measures again
    $ python -m figures.utilisation
"""

from pathlib import Path

from bench import record
from bench.utilisation import PASSES, utilisations
from figures import FOLDER
from ringlab.support import drawing

ALT = (
    "Four panels, forward and forward with backward for 2 and for 4 ranks: the share of the machine's measured peak "
    "that attention reaches, against the tokens on one device. Each panel has a line for one device with that many "
    "tokens and a line for the ring with P times as many, on the same cores. Both rise with the length. With 2 ranks "
    "the lines lie on one another; with 4, whose ring is four times as long, the ring's lies a little above."
)
COLOURS = {"one device": "#B0568A", "ring": drawing.INK}  # not those of blocks: these are methods


def draw() -> drawing.Picture:
    """A panel for each pass and P, with a line for one device and one for the ring."""
    results = record.load("utilisation")
    worlds, chunks, machine = results["worlds"], results["chunks"], results["machine"]
    figure, page = drawing.canvas(1000, 760, ALT)
    title = "P times the context at the utilisation of one device"
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    on = f"measured, {machine['cores']} cores, {results['dtype']}, {machine['date'][:10]}"
    shape = f"causal, B = 1, H = {results['heads']}, D = {results['head_dim']}"
    drawing.write(page, 20, 65, f"model FLOP/s as a share of the fastest matrix product   {on}", color=drawing.MUTED)
    drawing.write(page, 20, 91, f"the ranks share the cores of the one device   {shape}", color=drawing.MUTED)
    highest = max(max(row["utilisation"].values()) for row in results["rows"])
    for row, which in enumerate(PASSES):
        for column, P in enumerate(worlds):
            ax = figure.add_axes((0.07 + 0.485 * column, 0.525 - 0.375 * row, 0.43, 0.285), facecolor=drawing.PAGE)
            for of, colour in COLOURS.items():
                seen = utilisations(results, of, which, P)
                ax.plot(range(len(chunks)), seen, "o-", color=colour, lw=1.8, ms=8, mec=drawing.PAGE, mew=1.2)
            drawing.plain(ax)
            ax.set_xticks(range(len(chunks)), [f"{C:,}\n{P * C:,}" for C in chunks])
            ax.set(xlim=(-0.3, len(chunks) - 0.7), ylim=(0, max(0.8, 1.1 * highest)))
            ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
            ax.set_title(
                f"{which}, P = {P}", fontsize=0.72 * drawing.TEXT, color=drawing.INK, loc="left", weight="bold"
            )
    legend = {
        "one device": (70, "one device: S, the upper number"),
        "ring": (430, "ring of P ranks: P times as many tokens, the lower number"),
    }
    for of, (x, label) in legend.items():
        drawing.box(page, x, 714, 22, 16, fc=COLOURS[of])
        drawing.write(page, x + 32, 722, label)
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write utilisation.svg."""
    drawing.save(draw(), "utilisation", folder)


if __name__ == "__main__":
    save()
