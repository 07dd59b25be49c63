"""Pictures of attention that was measured, each drawn from the results of one bench in bench/results.

$ python -m bench.memory        # measures again; memory is also the name of the picture
$ python -m figures.draw_all    # draws again
"""

from statistics import median

from matplotlib.ticker import MultipleLocator

from bench import against_peers, record
from bench.against_peers import CONTIGUOUS, FULL, MEMORY, OWN, PIP, STRIPED_MEMORY, TORCH, ZIGZAG, ZIGZAG_MEMORY
from bench.five_ways_predicted import TRAIN, Row, predicted, rows_of, timed
from bench.max_context import lengths as max_context_lengths
from figures import shapes
from ring_planner.hidden_communication import hidden_share
from ring_planner.ways import WAYS
from ringlab.support import drawing


def memory() -> drawing.Picture:
    """Peak memory beyond the inputs against S: lines are counted by bench/memory.py, points are peaks of processes."""
    alt = (
        "Peak memory beyond the inputs against sequence length S from 512 to 16,384, both axes logarithmic. Naive "
        "attention grows with the square of S, from 6 MiB to 6 GiB. Blockwise attention and one rank of a ring of 4 "
        "need a few MiB of tiles when S is small and then grow in proportion to S, to 16 and 10 MiB. The measured "
        "points lie on the lines."
    )
    methods = {  # label, colour (not that of a block: these are methods), marker, side of the label
        "naive": ("naive", "#8C1D40", "s", 0),
        "blockwise": ("blockwise", drawing.MUTED, "D", 1),
        "ring": ("ring, one of {P} ranks", drawing.INK, "o", -1),
    }
    results = record.load("memory")
    lengths = results["lengths"]
    title = "Peak memory beyond the inputs: S² becomes S, and a ring divides it"
    shape = f"B = 1, H = {results['heads']}, D = {results['head_dim']}, {results['dtype']}"
    figure, _ = shapes.headed(600, alt, title, {66: f"lines: counted   points: measured   {shape}"})
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
    """The share of its messages that a ring between two hosts hides, against its chunk.

    Lines are modelled by ring_planner/hidden_communication.py from the FLOP/s and bytes/s of the same run.
    """
    alt = (
        "The hidden share of the messages' time against the chunk, tokens a rank, on a logarithmic axis, for a fast "
        "and for a slow link between two hosts. For each link a modelled line rises with the chunk up to 100% at the "
        "predicted knee, and stays there. The measured points rise and stay at 100% in the same way, those of the "
        "slow link at chunks about four times as long. On the fast link the measured knee is left of the predicted "
        "one, near a second, dashed line, which is for the FLOP/s that computing reaches while messages travel."
    )
    looks = [("#8C1D40", "s"), (drawing.INK, "o")]  # fast link first; not the colour of a block: these are links
    results = record.load("overlap_threshold")
    title = "With chunks longer than the knee C*, a ring hides all its messages"
    key = "points: measured   lines: modelled, min(1, C / C*), C* = 2 · FLOP/s over bytes/s   dashed: FLOP/s meanwhile"
    on = results["machine"]
    shape = f"H = {results['heads']}, D = {results['head_dim']}, {results['dtype']}"
    machine = f"two hosts (network namespaces), a rank and a core each of {on['cores']}, {shape}, {on['date'][:10]}"
    figure, _ = shapes.headed(600, alt, title, {64: key, 90: machine})
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
    """The longest context that fits into a fixed memory per device, against the number of devices. Table 3 in small."""
    alt = (
        "The longest context that trains one attention layer, against the number of devices P, each with the same "
        "hard memory limit. The ring's points for 1, 2, 4 and 8 devices lie on the modelled line, straight through "
        "the origin: 2, 4 and 8 times the context of one device. Two level lines show what one device reaches without "
        "a ring: naive attention the least, blockwise attention as much as a ring of two devices."
    )
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
    figure, _ = shapes.headed(600, alt, title, {65: limit, 91: on})
    ax = shapes.numbers(figure, (0.085, 0.115, 0.9, 0.695), x="devices P of the ring", y="longest S, tokens")
    ring, modelled = max_context_lengths(results, "ring"), max_context_lengths(results, "ring", "counted_chunk")
    right, look = 1.25 * worlds[-1], {"fontsize": 0.72 * drawing.TEXT, "textcoords": "offset points"}
    for method in ("naive", "blockwise"):
        colour, (S,) = colours[method], max_context_lengths(results, method)
        ax.plot([0, right], max_context_lengths(results, method, "counted_chunk") * 2, color=colour, lw=1.8)
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
    """The speed of the flash ring and of other rings, as a share of what one process reaches with fused attention."""
    alt = (
        "Bars in two rows, for 2 and for 4 ranks on 2 cores, and three columns: forward, causal forward, causal "
        "forward and backward, each for five sequence lengths. A line at 1 is fused attention in one process with "
        "both cores. The flash ring and torch's context-parallel loop come near the line as the sequence grows, the "
        "ring in shared memory first; ring_attn.py stays at half of it or somewhat more, and ring-attention-pytorch "
        "at a quarter to a third."
    )
    colours = {  # not those of blocks: these are methods. What is not here is in the table only
        MEMORY: drawing.INK,
        ZIGZAG_MEMORY: drawing.INK,
        STRIPED_MEMORY: "#4D5D6E",
        FULL: "#7A8998",
        ZIGZAG: "#7A8998",
        CONTIGUOUS: "#A5B1BD",
        TORCH: "#B0568A",
        OWN: "#CBD2D9",
        PIP: "#DDC3D2",
    }
    names = {
        MEMORY: "flash ring in shared memory (causal: zigzag)",
        STRIPED_MEMORY: "in shared memory, striped",
        FULL: "flash ring, messages (causal: zigzag)",
        CONTIGUOUS: "messages, contiguous",
        **{name: name for name in (TORCH, OWN, PIP)},
    }
    results = record.load("against_peers")
    lengths = sorted({row["seq_len"] for row in results["rows"]})
    machine = f"{results['machine']['cores']} cores, float32, B = 1, H = {results['heads']}, D = {results['head_dim']}"
    line = f"limit: fused attention in one process with all cores, measured in turn; {machine}"
    figure, page = shapes.headed(820, alt, "Speed as a share of the limit", {66: line})
    for row, P in enumerate(results["worlds"]):
        for column, (case, rings) in enumerate(against_peers.CASES.items()):
            place = 0.06 + 0.315 * column, 0.57 - 0.345 * row, 0.295, 0.28
            ax = shapes.numbers(figure, place, x="S, tokens" * row, title=f"{case}, P = {P}")
            drawn = [name for name in rings if name in colours]
            width = 0.84 / len(drawn)
            for i, name in enumerate(drawn):
                seen = against_peers.speeds(results, dtype="float32", world_size=P, case=case, method=name)
                left = [group + (i - len(drawn) / 2) * width for group in range(len(seen))]
                ax.bar(left, seen, width * 0.92, align="edge", color=colours[name])
            ax.axhline(1, color=drawing.INK, lw=1.2)
            ax.grid(axis="x", visible=False)
            ax.set_xticks(range(len(lengths)), [f"{S:,}" for S in lengths])
            ax.set_xlim(-0.5, len(lengths) - 0.5)
            ax.set_ylim(0, 1.25)
            ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "½", "", "1"] if column == 0 else [""] * 5)

    for i, (name, label) in enumerate(names.items()):
        x, y = 60 + 430 * (i % 2), 700 + 28 * (i // 2)
        shapes.box(page, x, y - 8, 22, 16, fc=colours[name])
        drawing.write(page, x + 32, y, label)
    return figure


def computing(row: Row) -> float:
    """Seconds of the ring's computing alone."""
    return median(timed(row, "ring, computing", TRAIN))


def fastest(row: Row) -> str:
    """The way with the shortest time of training."""
    return min(WAYS, key=lambda way: median(timed(row, way, TRAIN)))


def crossover() -> drawing.Picture:
    """How long five ways take over a slow link between two hosts, against the link's rate, over the ring's computing.

    Lines are modelled by ring_planner/seconds.py, from the calibration at the middle rate.
    """
    alt = (
        "Ten panels: five ways side by side, a short sequence above and a long one below. Each shows the time of "
        "training step of attention over that of the ring's computing alone, against the rate of the link between two "
        "hosts: 20, 50 and 125 MB/s. Filled points and solid lines are 2 hosts of 2 ranks, hollow points and dashed "
        "lines 2 hosts of 4. A star marks the fastest way at each rate. On the short sequence all times fall as the "
        "link gets faster, and all-to-all is the fastest everywhere. On the long sequence the ring is the fastest at "
        "20 MB/s; at 125 MB/s all ways are near 1, some below."
    )
    # Colours not those of blocks: these are meshes.
    looks = {
        (2, 2): ("#5B4B8A", "-", "#5B4B8A"),
        (2, 4): ("#A65E00", (0, (4, 2.5)), drawing.PAGE),
    }  # colour, line, fill
    steps = 24  # of a line
    beside = 1.1  # points of the two meshes lie beside each other
    results = record.load("five_ways")
    title = "Which way is fastest depends on the slow link and on the sequence"
    what = "forward and backward, over the time of the ring's computing alone   points: measured   lines: simulated"
    on = f"two hosts (network namespaces) on {results['machine']['cores']} cores, {results['dtype']}"
    shape = f"causal, H = {results['heads']}, D = {results['head_dim']}, {results['machine']['date'][:10]}"
    figure, page = shapes.headed(730, alt, title, {65: what, 91: f"{on}   {shape}"})
    for line, S in enumerate(sorted({row["seq_len"] for row in results["rows"]})):
        top = 140 + 270 * line
        drawing.write(page, 20, top, f"S = {S:,}", weight="bold")
        highest, panels = 0.0, []
        for column, way in enumerate(WAYS):
            ax = shapes.numbers(figure, (0.05 + 0.19 * column, 1 - (top + 225) / 730, 0.165, 175 / 730), title=way)
            panels.append(ax)
            for side, ((hosts, per_host), (colour, style, fill)) in zip((-1, 1), looks.items(), strict=True):
                rows = sorted(rows_of(results, hosts, per_host, S), key=lambda row: row["rate"])
                rates = [row["rate"] for row in rows]
                first, last = rates[0] / 1.3, rates[-1] * 1.3
                ends = [first * (last / first) ** (i / steps) for i in range(steps + 1)]
                unit = median(computing(row) for row in rows)
                middle = rows[len(rows) // 2]
                times = [predicted(results, middle, way, TRAIN, rate) / unit for rate in ends]
                ax.plot(ends, times, color=colour, lw=1.8, ls=style)
                points = [median(timed(row, way, TRAIN)) / computing(row) for row in rows]
                highest = max(highest, *times, *points)
                for row, rate, point in zip(rows, rates, points, strict=True):
                    marker, size = ("*", 17) if fastest(row) == way else ("o", 8)
                    ax.plot([rate * beside**side], [point], marker, color=colour, ms=size, mfc=fill, mew=1.5)
            ax.set_xscale("log")
            ax.set_xticks(rates, [f"{rate / 1e6:g}" for rate in rates])
            ax.minorticks_off()
        for ax in panels:
            ax.axhline(1, color=drawing.MUTED, lw=1)
            ax.set(xlim=(first, last), ylim=(0, 1.08 * highest))
            ax.yaxis.set_major_locator(MultipleLocator(1 if highest > 2 else 0.5))
        for ax in panels[1:]:
            ax.tick_params(labelleft=False)
    drawing.write(page, 500, 667, "MB/s of the link between the hosts", ha="center", color=drawing.MUTED)
    for x, ((hosts, per_host), (colour, style, fill)) in zip((50, 320), looks.items(), strict=True):
        page.plot([x, x + 36], [704, 704], color=colour, lw=1.8, ls=style)
        page.plot([x + 18], [704], "o", color=colour, ms=8, mfc=fill, mew=1.5)
        drawing.write(page, x + 48, 704, f"{hosts} hosts of {per_host} ranks")
    page.plot([600], [704], "*", color=drawing.INK, ms=17, mfc=drawing.PAGE, mew=1.5)
    drawing.write(page, 618, 704, "the fastest of the five ways")
    return figure
