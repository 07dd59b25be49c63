"""Pictures of what was measured, each drawn from one result in bench/results.

$ python -m bench memory        # measures again; memory is also the name of the picture
$ make notebooks                # draws again, in its chapter
"""

from bench import record
from bench.memory import lengths as longest
from figures import shapes
from ring_planner.hidden_communication import hidden_share
from ringlab.support import drawing


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
    about four times as long. On either link the measured knee is about a tenth left of the predicted one.
    """
    looks = [("#8C1D40", "s"), (drawing.INK, "o")]  # fast link first; not the colour of a block: these are links
    results = record.load("overlap_threshold")
    title = "With chunks longer than the knee C*, a ring hides all its messages"
    key = "points: measured   lines: modelled, min(1, C / C*), C* = 2 · FLOP/s over bytes/s"
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
        c = knee["predicted"]
        line = [first * (c / first) ** (i / 60) for i in range(61)] + [last]
        ax.plot(line, [hidden_share(C, c) for C in line], color=colour, lw=1.8)
        ax.plot(c, 1, marker="|", color=colour, ms=22, mew=1.8)
        seen = [(row["chunk"], row["hidden"]) for row in results["rows"] if row["rate"] == knee["rate"]]
        ax.plot(*zip(*seen, strict=True), marker, color=colour, ms=9, mec=drawing.PAGE, mew=1.2)
        text = f"{knee['rate'] / 1e6:g} MB/s\nC* predicted: {c:,.0f}\nmeasured: {knee['measured']:,.0f}"
        look = {"ha": "center", "va": "bottom", "color": colour, "weight": "bold", "fontsize": 0.72 * drawing.TEXT}
        ax.annotate(text, (c, 1), xytext=(0, 12), textcoords="offset points", **look)

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
    memory limit. The ring's points for 1, 2, 4 and 8 devices lie on the modelled line. Eight devices train twice the
    context of four; with one or two, a device holds more tokens, because a short ring needs fewer buffers. Two level
    lines show what one device reaches without a ring: naive attention the least, blockwise attention nearly as much as
    a ring of two devices.
    """
    colours = {
        "naive": "#8C1D40",
        "blockwise": "#B0568A",
        "ring": drawing.INK,
    }  # not those of blocks: these are methods
    results = record.load("max_context")
    worlds, machine = results["worlds"], results["machine"]
    title = "With the same memory on every device, eight devices train twice the context of four"
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
        label = f"ring of {P}: {S:,}"
        ax.annotate(label, (P, S), (9, -20), color=colours["ring"], weight="bold", **look)
    ax.set(xlim=(0, right), ylim=(0, 1.1 * max(ring)))
    ax.set_xticks(worlds)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    return figure
