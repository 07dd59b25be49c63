"""The activations of a device against S, for four ways to compute attention, and where they no longer fit. Modelled.

Drawn from ringlab/planning/memory.py: a 7B model in bf16. A device stores the inputs of all layers and what one
layer's forward pass needs. Parameters are left out.
"""

from bisect import bisect_right

from figures import shapes
from ringlab.planning.hidden_communication import LLAMA_7B
from ringlab.planning.memory import peak_bytes
from ringlab.support import drawing

LAYERS, DEVICES, MEMORY = 32, 64, 80e9
METHODS = {  # label, colour (not that of a block: these are methods)
    "vanilla": ("naive,\none device", "#8C1D40"),
    "blockwise": ("blockwise,\none device", "#B0568A"),
    "all-gather": (f"all-gather,\n{DEVICES} devices", drawing.MUTED),
    "ring": (f"ring,\n{DEVICES} devices", drawing.INK),
}


def activations(method: str, seq_len: float) -> float:
    """Bytes of a device: the inputs of all layers for its tokens, and one layer's attention at work."""
    alone = method in ("vanilla", "blockwise")
    chunk = seq_len if alone else seq_len / DEVICES
    if alone:
        row = LLAMA_7B.heads * seq_len if method == "vanilla" else LLAMA_7B.hidden  # the scores, or the output
        at_work = LLAMA_7B.itemsize * row * seq_len
    else:
        at_work = peak_bytes(method, LLAMA_7B, chunk, DEVICES)
    return LAYERS * LLAMA_7B.itemsize * LLAMA_7B.hidden * chunk + at_work


def full_at(method: str) -> int:
    """The longest S, in tokens, whose activations fit."""
    return bisect_right(range(2**40), MEMORY, key=lambda seq_len: activations(method, seq_len)) - 1


def tokens(number: float) -> str:
    """A number of tokens, in thousands or millions."""
    return f"{number / 1e6:.1f} million" if number >= 1e6 else f"{number / 1e3:.0f},000"


ALT = (
    "Modelled bytes of activations on a device against the sequence length S, both axes logarithmic, with a line at "
    "80 GB, for a 7B model. Naive attention grows with the square of S and reaches the line at "
    f"{tokens(full_at('vanilla'))} tokens; blockwise attention on one device, in proportion to S, at "
    f"{tokens(full_at('blockwise'))}. On {DEVICES} devices all-gather, which brings every K and V to every device, "
    f"reaches it at {tokens(full_at('all-gather'))} and the ring at {tokens(full_at('ring'))}."
)


def draw() -> drawing.Picture:
    """A line for each method, and a point where it meets 80 GB."""
    figure, page = drawing.canvas(1000, 600, ALT)
    title = "How long a sequence fits depends on what each device stores"
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    model = f"7B model, L = {LAYERS}, h = {LLAMA_7B.hidden:,}, bf16, B = 1"
    line = f"modelled: all layers' inputs and one layer's forward pass, no parameters   {model}"
    drawing.write(page, 20, 66, line, color=drawing.MUTED)

    ax = figure.add_axes((0.085, 0.12, 0.89, 0.74), facecolor=drawing.PAGE)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    first, last = 2**12, 2**26
    look = {"fontsize": 0.72 * drawing.TEXT, "textcoords": "offset points", "weight": "bold"}
    ax.axhline(MEMORY, color=drawing.INK, lw=1.2, ls=(0, (5, 3)))
    note = {"fontsize": 0.72 * drawing.TEXT, "textcoords": "offset points", "color": drawing.INK}
    ax.annotate("80 GB, a device", (first, MEMORY), (6, 6), **note)
    for method, (label, colour) in METHODS.items():
        lengths = [first * (last / first) ** (i / 200) for i in range(201)]
        ax.plot(lengths, [activations(method, S) for S in lengths], color=colour, lw=2)
        S = full_at(method)
        ax.plot([S], [MEMORY], "o", color=colour, ms=8, mec=drawing.PAGE, mew=1.2)
        side = {"xytext": (-10, 8), "ha": "right"} if method == "all-gather" else {"xytext": (10, -42)}
        ax.annotate(f"{label}:\n{tokens(S)}", (S, MEMORY), **side, color=colour, **look)

    powers = range(12, 26, 2)
    ax.set_xticks([2**n for n in powers], [f"{2**n:,}" for n in powers])
    ax.set_yticks([10.0**n for n in range(7, 14)], ["10 MB", "100 MB", "1 GB", "10 GB", "100 GB", "1 TB", "10 TB"])
    ax.set(xlim=(first, last), ylim=(1.2e8, 2e12))
    ax.minorticks_off()
    ax.set_xlabel("S, tokens", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    shapes.plain(ax)
    return figure
