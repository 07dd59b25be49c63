"""Pictures of models that were trained or wrote a token, each drawn from the results of one bench in bench/results.

$ python -m bench retrieval     # trains again; retrieval is also the name of the picture
$ python -m figures.draw_all    # draws again
"""

import torch
from matplotlib.colors import LinearSegmentedColormap, to_hex

from bench import record
from bench.models import BF16, MERGE, ONE, RING, ROUNDED, curves, differences, milliseconds
from bench.retrieval import LONGER, RUNS, SQUEEZED, accuracies, lengths
from figures import shapes
from ringlab.support import drawing
from ringlab.support.colours import ink_on


def loss_curves() -> drawing.Picture:
    """Two panels over 100 training steps. Above, the losses of one process, of a ring of 4, of a mesh of 2 x 2 and of a
    ring of 4 in bfloat16 fall from 5.6 to 2.8 and lie on each other. Below, on a logarithmic axis, the largest
    difference so far of each run from one process, as a share of the loss. The ring and the mesh stay below 3e-7, as
    does a run on one process whose first weights are off by one rounding error. Bfloat16 reaches 3e-3.
    """
    looks = {  # colour (not that of a block: these are runs), line style and width: each lies inside the one before it
        ONE: (drawing.FAINT, "-", 11.0),
        "ring of 4": ("#8C1D40", "-", 7.0),
        "2 x 2, dp x cp": ("#D79BBB", "-", 3.6),
        BF16: (drawing.INK, (0, (1, 1.6)), 1.8),
        ROUNDED: (drawing.MUTED, (0, (5, 2)), 1.8),
    }
    results = record.load("loss_curves")
    on, dtype = results["machine"], "float32, one run in bfloat16"
    model = f"{results['layers']} layers, hidden {results['hidden']}"
    batch = f"{results['batch']} x {results['seq_len']} tokens a step"
    said = f"ringlab.models.train, {model}, {batch}, {dtype}   measured, {on['cores']} cores, {on['date'][:10]}"
    figure, page = shapes.headed(800, loss_curves, "The same losses on every mesh", {65: said})
    what = "difference from one process, the largest so far"
    above = shapes.numbers(figure, (0.075, 0.5, 0.905, 0.37), y="loss, nats a byte", title="loss")
    below = shapes.numbers(figure, (0.075, 0.14, 0.905, 0.29), x="step", y="share of the loss", title=what)
    steps = range(1, results["steps"] + 1)
    for name, losses in curves(results).items():
        colour, dashes, width = looks[name]
        if name != ROUNDED:
            above.plot(steps, losses, color=colour, ls=dashes, lw=width)
    for name, off in differences(results).items():
        colour, dashes, width = looks[name]
        largest = off.cummax(dim=0).values.tolist()
        below.plot(steps, [x or None for x in largest], color=colour, ls=dashes, lw=min(width, 4))  # 0 has no logarithm
    below.set_yscale("log")
    for ax in (above, below):
        ax.set_xlim(0, results["steps"] + 1)
    below.minorticks_off()
    for i, (name, (colour, dashes, width)) in enumerate(looks.items()):
        x, y = 75 + 225 * (i % 4), 744 + 28 * (i // 4)
        page.plot([x, x + 50], [y, y], color=colour, ls=dashes, lw=width, solid_capstyle="butt")
        drawing.write(page, x + 60, y, name + (" (below only)" if name == ROUNDED else ""))
    return figure


def size(count: float) -> str:
    """A number of bytes in words, such as 2 kB."""
    return f"{count / 1e6:g} MB" if count >= 1e6 else f"{count / 1e3:g} kB"


def generation() -> drawing.Picture:
    """Two panels against the length of the context, on logarithmic axes, for the attention of one layer and one new
    token on 4 ranks. Left, the time: a ring that moves the cache takes longest, and its line rises with the context;
    the merge over ranks is far below it; one process with the whole cache is the fastest, because its cores have no
    messages to wait for, but with long contexts the merge is near it. Right, the bytes that a rank sends: the ring's
    line rises with the context to tens of megabytes, the merge's line is level at two kilobytes.
    """
    colours = {RING: "#8C1D40", MERGE: drawing.INK, ONE: "#B0568A"}  # not those of blocks: these are ways
    key = {
        RING: "ring: K and V of all ranks go round for each token",
        MERGE: "merge over ranks: each rank attends to its own keys",
        ONE: "one process: all the cores, the whole cache, no messages",
    }
    results = record.load("generation")
    P, contexts, machine = results["worlds"][-1], results["contexts"], results["machine"]
    title = "A new token: its query goes to the keys, and the keys stay where they are"
    on = f"measured, {machine['cores']} cores, {results['dtype']}, {machine['date'][:10]}"
    shape = f"B = 1, H = {results['heads']}, G = {results['kv_heads']}, D = {results['head_dim']}"
    what = f"attention of one layer for one token, {P} ranks   {shape}   {on}"
    figure, page = shapes.headed(620, generation, title, {65: what})
    rows = [row for row in results["rows"] if row["world_size"] == P]
    panels = {
        "milliseconds": {way: milliseconds(results, way, P) for way in colours},
        "bytes that a rank sends": {way: [row["bytes"][way] for row in rows] for way in (RING, MERGE)},
    }
    for left, (name, lines) in zip((0.07, 0.575), panels.items(), strict=True):
        ax = shapes.numbers(figure, (left, 0.285, 0.405, 0.52), x="tokens in the context", title=name)
        for way, values in lines.items():
            ax.plot(contexts, values, "o-", color=colours[way], lw=1.8, ms=8, mec=drawing.PAGE, mew=1.2)
        ax.set(xscale="log", yscale="log")
        ax.minorticks_off()
        ax.set_xticks(contexts, [f"{S:,}" for S in contexts])
        ax.yaxis.set_major_formatter(lambda x, _, name=name: f"{x:g}" if name == "milliseconds" else size(x))
    for i, (way, label) in enumerate(key.items()):
        shapes.box(page, 70, 518 + 30 * i, 22, 16, fc=colours[way])
        drawing.write(page, 102, 526 + 30 * i, label)
    return figure


def retrieval() -> drawing.Picture:
    """Three heat maps and a line chart: the share of right answers by the length of the text, 32 to 256 lines, and by
    the depth of the line. The model trained on 32 lines in one process finds nearly all lines of such texts. In longer
    texts it fails, first at the top of the text: with 256 lines it finds about 1 in 10 of the first lines and about
    half of the last. The model that a ring of 4 trained on 128 lines finds nearly all lines of texts up to 128 lines at
    every depth. With 256 lines it fails at the top as well. The first model, when its positions are squeezed into those
    of 32 lines, still finds about 9 in 10 lines of texts of 256.
    """
    pale, dark = "#D79BBB", "#8C1D40"  # no block: no block's colour
    shades = LinearSegmentedColormap.from_list("accuracy", [drawing.PAGE, pale, dark])
    drawn = {name: ranks for name, ranks in RUNS.items() if name != LONGER}
    looks = dict(zip(drawn, ((pale, "s", "-"), (dark, "o", "-"), (pale, "D", (0, (1, 1.4)))), strict=True))
    results = record.load("retrieval")
    on, kept = results["machine"], results["rows"][0]["kept_bytes"][0] / 2**20
    said = f"right answers in %, mean of {len(results['seeds'])} seeds, {results['steps']} steps"
    said += f"   {kept:.0f} MiB kept for the backward pass on each rank"
    said += f"   {on['cores']} cores, {on['date'][:10]}"
    title = "Line retrieval: a ring of 4 trains on 4 times the context"
    figure, _ = shapes.headed(840, retrieval, title, {65: said})
    lines, what = lengths(results["lines"]), "lines in the text; dashed: the longest texts of the training"
    below = shapes.numbers(figure, (0.075, 0.09, 0.905, 0.3), x=what, y="right answers, %")
    for i, (name, ranks) in enumerate(drawn.items()):
        seen = accuracies(results, name)  # (seeds, lengths, depths)
        mean = 100 * seen.mean(dim=0)
        place, depth = (0.075 + 0.313 * i, 0.505, 0.279, 0.34), "" if i else "depth of the line"
        ax = shapes.numbers(figure, place, x="lines; right of the bar: never seen", y=depth, title=name)
        ax.imshow(mean.T.numpy(), cmap=shades, vmin=0, vmax=100, aspect="auto")
        for x, column in enumerate(mean):
            for y, share in enumerate(column.tolist()):
                ink = ink_on(to_hex(shades(share / 100)).upper())
                ax.text(x, y, f"{share:.0f}", fontsize=0.72 * drawing.TEXT, color=ink, ha="center", va="center")
        trained = lines.index(ranks * results["lines"])
        ax.axvline(trained + 0.5, color=drawing.INK, lw=2.5)
        ax.grid(visible=False)
        ax.set_xticks(range(len(lines)), lines)
        ax.set_yticks([0, mean.shape[1] - 1], ["first", "last"] if i == 0 else ["", ""])
        colour, marker, dashes = looks[name]
        below.plot(lines, mean.mean(dim=1), color=colour, ls=dashes, lw=2.5)
        for one in 100 * seen.mean(dim=2):
            below.plot(lines, one, color=colour, marker=marker, ls="", ms=7, mec=drawing.INK, mew=0.6)
        look = {"color": colour, "ls": dashes, "marker": marker, "ms": 7, "mec": drawing.INK, "mew": 0.6}
        below.plot([], [], lw=2.5, label=name, **look)
        if name != SQUEEZED:
            below.axvline(lines[trained], color=colour, lw=1.5, ls=(0, (4, 3)))
    below.set_xscale("log", base=2)
    below.set_xticks(lines, lines)
    below.minorticks_off()
    below.set_ylim(0, 104)
    look = {"fontsize": 0.72 * drawing.TEXT, "frameon": False, "labelcolor": drawing.INK}
    below.legend(loc="lower left", bbox_to_anchor=(0.06, 0), **look)
    return figure


def in_context_rl() -> drawing.Picture:
    """A chart of the mean reward of a pull in each of 16 trajectories on new tasks. Behaviour cloning stays at 0.5. The
    other three begin at about 0.55. The models with a context of n = 4 and of 16 trajectories are level up to
    trajectory 4. Then the shorter context falls behind: it ends at 0.79. The longer one, from a ring of 4, ends at
    0.84, and Thompson sampling, from which both learned, at 0.86. The best arm gives 0.91.
    """
    looks = {  # colour (not that of a block: these are players), line style, marker
        "the best arm": (drawing.MUTED, (0, (1, 1.6)), ""),
        "Thompson sampling": (drawing.INK, (0, (5, 2)), ""),
        "4n, ring of 4": ("#8C1D40", "-", "o"),
        "n, one process": ("#D79BBB", "-", "s"),
        "behaviour cloning": (drawing.MUTED, "-", "^"),
    }
    results = record.load("in_context_rl")
    n, seeds = results["trajectories"], len(results["seeds"])
    on, what = results["machine"], f"10-armed bandits, 8 pulls in a trajectory, n = {n}"
    said = f"{what}, {results['tasks']} new tasks, {seeds} seeds   {on['cores']} cores, {on['date'][:10]}"
    title = "In-context reinforcement learning: n and 4n trajectories"
    figure, page = shapes.headed(620, in_context_rl, title, {65: said})
    ax = shapes.numbers(figure, (0.075, 0.235, 0.905, 0.62), x="trajectory", y="mean reward of a pull")
    for i, (player, (colour, dashes, marker)) in enumerate(looks.items()):
        of_seeds = [row["reward"] for row in results["rows"] if row["player"] == player]
        seen = torch.tensor(of_seeds, dtype=torch.float64)  # (seeds, trajectories)
        at = range(1, seen.shape[1] + 1)
        bars = {"capsize": 3, "elinewidth": 1.2} if marker in ("o", "s") else {"elinewidth": 0}
        spread = seen.std(dim=0, correction=0)
        ax.errorbar(at, seen.mean(dim=0), spread, color=colour, ls=dashes, marker=marker, lw=2.2, ms=6, **bars)
        x, y = 75 + 320 * (i % 3), 556 + 30 * (i // 3)
        page.plot([x, x + 50], [y, y], color=colour, ls=dashes, marker=marker, lw=2.2, ms=6)
        drawing.write(page, x + 60, y, player)
    ax.axvline(n + 0.5, color=drawing.MUTED, lw=1.2)
    ax.text(n + 0.65, 0.47, "from here on the shorter context loses the first pulls", fontsize=0.72 * drawing.TEXT)
    ax.set_ylim(0.44, 0.95)
    ax.set_xticks(range(1, 4 * n + 1))
    return figure
