"""Pictures of what was measured, each drawn from one result in bench/results: attention, then whole models.

$ python -m bench memory        # measures again; memory is also the name of the picture
$ python -m figures.draw_all    # draws again
"""

from statistics import median

import torch

from bench import record
from bench.memory import lengths as longest
from bench.speed import TORCH, ZIGZAG, speeds
from bench.speed import TRAIN as TRAINING
from bench.wires import TRAIN, timed
from figures import shapes
from ring_planner.hidden_communication import hidden_share
from ring_planner.ways import WAYS
from ringlab.support import drawing
from ringlab.support.colours import ink_on

ONE, RING, MERGE = "one process", "ring", "merge over ranks"
ROUNDED, BF16 = "one process, weights off by one rounding", "ring of 4, bf16"


def memory() -> drawing.Picture:
    """Peak memory beyond the inputs against sequence length S from 512 to 16,384, both axes logarithmic. Naive
    attention grows with the square of S, from 6 MiB to 6 GiB. Blockwise attention and one rank of a ring of 4 need a
    few MiB of tiles when S is small and then grow in proportion to S, to 16 and 10 MiB. The measured points lie on the
    lines.
    """
    methods = {  # label, colour (not that of a block: these are methods), marker, side of the label
        "naive": ("naive", "#8C1D40", "s", 0),
        "blockwise": ("blockwise", drawing.MUTED, "D", 1),
        "ring": ("ring, one of {P} ranks", drawing.INK, "o", -1),
    }
    results = record.load("memory")
    lengths = results["lengths"]
    title = "Peak memory beyond the inputs: S² becomes S, and S/P on a rank"
    shape = f"B = 1, H = {results['heads']}, D = {results['head_dim']}, {results['dtype']}"
    figure, _ = shapes.headed(600, memory, title, {66: f"lines: counted   points: measured   {shape}"})
    ax = shapes.numbers(figure, (0.08, 0.115, 0.72, 0.75), x="S, tokens")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for name, (label, colour, marker, above) in methods.items():
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
    return figure


def overlap_threshold() -> drawing.Picture:
    """The hidden share of the messages' time against the chunk, tokens a rank, on a logarithmic axis, for a fast and
    for a slow link between two hosts. For each link a modelled line rises with the chunk up to 100% at the predicted
    knee, and stays there. The measured points rise and stay at 100% in the same way, those of the slow link at chunks
    about four times as long. On the fast link the measured knee is left of the predicted one, near a second, dashed
    line, which is for the FLOP/s that computing reaches while messages travel.
    """
    looks = [("#8C1D40", "s"), (drawing.INK, "o")]  # fast link first; not the colour of a block: these are links
    results = record.load("overlap_threshold")
    title = "With chunks longer than the knee C*, a ring hides all its messages"
    key = "points: measured   lines: modelled, min(1, C / C*), C* = 2 · FLOP/s over bytes/s   dashed: FLOP/s meanwhile"
    on = results["machine"]
    shape = f"H = {results['heads']}, D = {results['head_dim']}, {results['dtype']}"
    machine = f"two hosts (network namespaces), a rank and a core each of {on['cores']}, {shape}, {on['date'][:10]}"
    figure, _ = shapes.headed(600, overlap_threshold, title, {64: key, 90: machine})
    place = (0.075, 0.115, 0.895, 0.6)
    ax = shapes.numbers(figure, place, x="C, tokens a rank", y="hidden: 1 - wait / hop")
    ax.set_xscale("log", base=2)
    chunks = sorted({row["chunk"] for row in results["rows"]})
    first, last = chunks[0] / 1.2, chunks[-1] * 1.2
    for knee, (colour, marker) in zip(results["knees"], looks, strict=True):
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
    return figure


def max_context() -> drawing.Picture:
    """The longest context that trains one attention layer, against the number of devices P, each with the same hard
    memory limit. The ring's points for 1, 2, 4 and 8 devices lie on the modelled line, straight through the origin: 2,
    4 and 8 times the context of one device. Two level lines show what one device reaches without a ring: naive
    attention the least, blockwise attention as much as a ring of two devices.
    """
    colours = {
        "naive": "#8C1D40",
        "blockwise": "#B0568A",
        "ring": drawing.INK,
    }  # not those of blocks: these are methods
    results = record.load("max_context")
    worlds, machine = results["worlds"], results["machine"]
    title = "With the same memory on every device, P devices train P times the context"
    shape = f"B = 1, H = {results['heads']}, D = {results['head_dim']}, {results['dtype']}"
    limit = f"{results['budget'] / 2**20:g} MiB a device, a hard limit"
    limit += f"   one layer's attention, forward and backward, {shape}"
    on = f"points: measured, {machine['cores']} cores, {machine['date'][:10]}   lines: modelled by counting bytes"
    figure, _ = shapes.headed(600, max_context, title, {65: limit, 91: on})
    ax = shapes.numbers(figure, (0.085, 0.115, 0.9, 0.695), x="devices P of the ring", y="longest S, tokens")
    ring, modelled = longest(results, "ring"), longest(results, "ring", "counted_chunk")
    right, look = 1.25 * worlds[-1], {"fontsize": 0.72 * drawing.TEXT, "textcoords": "offset points"}
    for method in ("naive", "blockwise"):
        colour, (S,) = colours[method], longest(results, method)
        ax.plot([0, right], longest(results, method, "counted_chunk") * 2, color=colour, lw=1.8)
        ax.plot([1], [S], "s", color=colour, ms=8, mec=drawing.PAGE, mew=1.2)
        label = f"{method}, one device: {S:,}"
        ax.annotate(label, (right, S), (-4, 8), ha="right", color=colour, weight="bold", **look)
    ax.plot([0, *worlds], [0, *modelled], color=colours["ring"], lw=1.8)
    ax.plot(worlds, ring, "o", color=colours["ring"], ms=9, mec=drawing.PAGE, mew=1.2)
    for P, S in zip(worlds, ring, strict=True):
        times = S / ring[0]
        label = f"{S:,}, {times:.2f} times" if times > 1 else f"ring: {S:,}"
        ax.annotate(label, (P, S), (10, -15), color=colours["ring"], weight="bold", **look)
    ax.set(xlim=(0, right), ylim=(0, 1.1 * max(ring)))
    ax.set_xticks(worlds)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    return figure


def speed() -> drawing.Picture:
    """Two panels, for 2 and for 4 ranks on 2 cores: the speed of a causal forward and backward pass against the
    sequence length from 1,024 to 16,384, as a share of what fused attention reaches in one process with both cores.
    Both lines are near 1 from 8,192 tokens on. On shorter sequences the ring falls to 0.86 with 2 ranks and to 0.59
    with 4, PyTorch's own loop to 0.79 and 0.56.
    """
    looks = {  # colours not those of blocks: these are methods
        ZIGZAG: ("this ring", drawing.INK, "o", "-"),
        TORCH: ("PyTorch's own loop", "#A65E00", "D", (0, (4, 2.5))),
    }
    results = record.load("against_peers")
    lengths = sorted({row["seq_len"] for row in results["rows"]})
    machine = f"{results['machine']['cores']} cores, float32, B = 1, H = {results['heads']}, D = {results['head_dim']}"
    training = {"dtype": "float32", "case": TRAINING}
    long = [S for S in lengths if S >= 8192]
    least = min(share for S in long for share in speeds(results, method=ZIGZAG, seq_len=S, **training))
    title = f"From 8,192 tokens on, this ring trains at {least:.0%} of the speed of one process, or more"
    line = f"causal, forward and backward   one process: fused attention, measured in turn   {machine}"
    figure, page = shapes.headed(470, speed, title, {66: line})
    for column, P in enumerate(results["worlds"]):
        place = 0.08 + 0.475 * column, 0.13, 0.43, 0.56
        y = "speed, one process = 1" if column == 0 else ""
        ax = shapes.numbers(figure, place, x="S, tokens", y=y, title=f"{P} ranks")
        ax.axhline(1, color=drawing.MUTED, lw=1.2)
        for name, (_, colour, marker, style) in looks.items():
            seen = speeds(results, method=name, world_size=P, **training)
            ax.plot(lengths, seen, marker=marker, color=colour, lw=1.8, ls=style, ms=8, mec=drawing.PAGE, mew=1.2)
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{S:,}" for S in lengths])
        ax.minorticks_off()
        ax.set(ylim=(0, 1.25))
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "½", "", "1"] if column == 0 else [""] * 5)
    for x, (label, colour, marker, style) in zip((20, 180), looks.values(), strict=True):
        page.plot([x, x + 40], [98, 98], color=colour, lw=1.8, ls=style)
        page.plot([x + 20], [98], marker, color=colour, ms=8, mec=drawing.PAGE, mew=1.2)
        drawing.write(page, x + 52, 98, label, color=colour)
    return figure


def crossover() -> drawing.Picture:
    """A grid of twelve columns: two sequences, two meshes of hosts, three rates of the link between the hosts. Each of
    five rows is a way, each cell its time of a training step of attention over that of the fastest way in the column.
    The hybrid has 1 to 1.02 in ten columns, and 1.21 and 1.30 on the slowest link with the short sequence, where
    all-to-all is the fastest. All-gather takes up to 2.3 times as long, the ring 1.77 times.
    """
    results = record.load("five_ways")
    cells = sorted(results["rows"], key=lambda row: (row["seq_len"], row["per_host"], row["rate"]))
    taken = [{way: median(timed(row, way, TRAIN)) for way in WAYS} for row in cells]
    over = [{way: seconds / min(times.values()) for way, seconds in times.items()} for times in taken]
    near = sum(round(each["hybrid"], 2) <= 1.02 for each in over)
    title = f"The hybrid is the fastest of five ways, or at most 2 % slower, in {near} of {len(over)} cases"
    what = "numbers: forward and backward, over the time of the column's fastest way   columns: MB/s between the hosts"
    on = f"measured on two hosts (network namespaces) on {results['machine']['cores']} cores, {results['dtype']}"
    shape = f"causal, H = {results['heads']}, D = {results['head_dim']}, {results['machine']['date'][:10]}"
    figure, page = shapes.headed(460, crossover, title, {65: what, 91: f"{on}   {shape}"})
    for i, way in enumerate(WAYS):
        drawing.write(page, 20, 220 + 46 * i, way, weight="bold")
    for i, (row, each) in enumerate(zip(cells, over, strict=True)):
        left = 140 + 67 * i + 8 * (i // 3) + 12 * (i // 6)
        if i % 6 == 0:
            drawing.write(page, left, 130, f"S = {row['seq_len']:,}", weight="bold")
        if i % 3 == 0:
            drawing.write(page, left, 156, f"{row['hosts']} hosts of {row['per_host']} ranks")
        drawing.write(page, left + 31, 182, f"{row['rate'] / 1e6:g}", ha="center", color=drawing.MUTED)
        for line, way in enumerate(WAYS):
            fill = shapes.mixed("#6B1231", min(1.0, each[way] - 1), "#F3E9EC")  # the darker, the slower
            shapes.box(page, left, 200 + 46 * line, 62, 40, fc=fill)
            look = {"ha": "center", "color": ink_on(fill), "weight": "bold" if each[way] == 1 else "normal"}
            drawing.write(page, left + 31, 220 + 46 * line, f"{each[way]:.2f}" if each[way] > 1 else "1", **look)
    return figure


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
    curves = {row["run"]: torch.tensor(row["losses"], dtype=torch.float64) for row in results["rows"]}
    for name, losses in curves.items():
        colour, dashes, width = looks[name]
        if name != ROUNDED:
            above.plot(steps, losses, color=colour, ls=dashes, lw=width)
        if name == ONE:
            continue
        largest = (losses / curves[ONE] - 1).abs().cummax(dim=0).values.tolist()
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
        "milliseconds": {way: [1e3 * median(row["seconds"][way]) for row in rows] for way in colours},
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
