"""What a new token costs against the length of the context: a merge over ranks, a ring, and one process.

Drawn from bench/results/generation.json.

    $ python -m bench.generation        # measures again
    $ python -m figures.generation
"""

from pathlib import Path

from bench import record
from bench.generation import MERGE, ONE, RING, milliseconds
from figures import FOLDER
from ringlab.support import drawing

ALT = (
    "Two panels against the length of the context, on logarithmic axes, for the attention of one layer and one new "
    "token on 4 ranks. Left, the time: a ring that moves the cache takes longest, and its line rises with the "
    "context; the merge over ranks is far below it; one process with the whole cache is the fastest, because its "
    "cores have no messages to wait for, but with long contexts the merge is near it. Right, the bytes that a rank "
    "sends: the ring's line rises with the context to tens of megabytes, the merge's line is level at two kilobytes."
)
COLOURS = {RING: "#8C1D40", MERGE: drawing.INK, ONE: "#B0568A"}  # not those of blocks: these are ways
KEY = {
    RING: "ring: K and V of all ranks go round for each token",
    MERGE: "merge over ranks: each rank attends to its own keys",
    ONE: "one process: all the cores, the whole cache, no messages",
}


def size(count: float) -> str:
    """A number of bytes in words, such as 2 kB."""
    return f"{count / 1e6:g} MB" if count >= 1e6 else f"{count / 1e3:g} kB"


def draw() -> drawing.Picture:
    """A panel for the time and one for the bytes, with a line for each way."""
    results = record.load("generation")
    P, contexts, machine = results["worlds"][-1], results["contexts"], results["machine"]
    figure, page = drawing.canvas(1000, 620, ALT)
    title = "A new token: its query goes to the keys, and the keys stay where they are"
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    on = f"measured, {machine['cores']} cores, {results['dtype']}, {machine['date'][:10]}"
    shape = f"B = 1, H = {results['heads']}, G = {results['kv_heads']}, D = {results['head_dim']}"
    drawing.write(
        page, 20, 65, f"attention of one layer for one token, {P} ranks   {shape}   {on}", color=drawing.MUTED
    )

    rows = [row for row in results["rows"] if row["world_size"] == P]
    panels = {
        "milliseconds": {way: milliseconds(results, way, P) for way in COLOURS},
        "bytes that a rank sends": {way: [row["bytes"][way] for row in rows] for way in (RING, MERGE)},
    }
    for left, (name, lines) in zip((0.07, 0.575), panels.items(), strict=True):
        ax = figure.add_axes((left, 0.285, 0.405, 0.52), facecolor=drawing.PAGE)
        for way, values in lines.items():
            ax.plot(contexts, values, "o-", color=COLOURS[way], lw=1.8, ms=8, mec=drawing.PAGE, mew=1.2)
        drawing.plain(ax)
        ax.set(xscale="log", yscale="log")
        ax.minorticks_off()
        ax.set_xticks(contexts, [f"{S:,}" for S in contexts])
        ax.yaxis.set_major_formatter(lambda x, _, name=name: f"{x:g}" if name == "milliseconds" else size(x))
        ax.set_xlabel("tokens in the context", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
        ax.set_title(name, fontsize=0.72 * drawing.TEXT, color=drawing.INK, loc="left", weight="bold")
    for i, (way, label) in enumerate(KEY.items()):
        drawing.box(page, 70, 518 + 30 * i, 22, 16, fc=COLOURS[way])
        drawing.write(page, 102, 526 + 30 * i, label)
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write generation.svg."""
    drawing.save(draw(), "generation", folder)


if __name__ == "__main__":
    save()
