"""The smallest chunk that hides a ring's messages, by device and link: the paper's table 2, and chapter 9's H100s.

Drawn from ring_planner.hidden_communication.TABLE_2 and the planner's preset of an H100.
"""

from figures import shapes
from ring_planner.hidden_communication import LLAMA_7B, TABLE_2, min_overlap_chunk
from ring_planner.presets import GPUS
from ringlab.support import drawing

FASTEST_NIC = 60e9  # bytes/s
FAST, NIC = drawing.INK, "#A33B75"  # not those of blocks: these are links


def tokens(chunk: float) -> str:
    """A number of tokens: 24,960 -> 24.96K."""
    return f"{chunk / 1000:.2f}".rstrip("0").rstrip(".") + "K" if chunk >= 1000 else f"{chunk:.0f}"


def machines() -> list[tuple[str, float, float, float]]:
    """Name, FLOP/s, bytes/s and smallest chunk of each, the shortest chunk first."""
    h100 = GPUS["h100"]
    known = [("H100 NVLink", h100.peak["bf16"], h100.link), ("H100 NIC", h100.peak["bf16"], h100.card)]
    known += [row[:3] for row in TABLE_2]
    rated = [(*each, min_overlap_chunk(each[1], each[2], LLAMA_7B)) for each in known]
    return sorted(rated, key=lambda each: each[3])


def draw() -> drawing.Picture:
    """A row for each of seven pairs of a device and a link, with its FLOP/s and bytes/s, and a point at the smallest
    chunk that hides its messages, on a logarithmic axis of tokens. The five fast links stand close together: TPU v3,
    v4, v5e and A100 with NVLink near 1,000 tokens, H100 with NVLink at 2,200. The two links between hosts are far to
    the right: H100 with a NIC at 19,780 and A100 with InfiniBand at 24,960 tokens.
    """
    title = "Over a NIC, chunks must be ten times as long to hide their messages"
    lines = {
        66: "FLOP/s over bytes/s: bf16, no mask, as many K/V heads as query heads. Llama 8B, causal, needs half of it"
    }
    rows, top, row = machines(), 140, 40
    height = top + row * len(rows) + 70
    figure, page = shapes.headed(height, draw, title, lines)
    for x, colour, name in ((20, FAST, "NVLink, or a link of TPUs"), (260, NIC, "a NIC, between hosts")):
        page.plot([x + 8], [98], "o", color=colour, ms=8)
        drawing.write(page, x + 22, 98, name, color=colour)
    place = 0.4, 1 - (top + row * len(rows)) / height, 0.57, row * len(rows) / height
    ax = shapes.numbers(figure, place, x="C, tokens a rank")
    for i, (name, flops, bandwidth, chunk) in enumerate(rows):
        y, colour = row * (i + 0.5), NIC if bandwidth < FASTEST_NIC else FAST
        drawing.write(page, 20, top + y, name, weight="bold", color=colour)
        rates = f"{flops / 1e12:,.0f} TFLOP/s, {bandwidth / 1e9:g} GB/s"
        drawing.write(page, 380, top + y, rates, ha="right", color=drawing.MUTED)
        ax.plot([chunk], [y], "o", color=colour, ms=9)
        look = {"color": colour, "va": "center", "weight": "bold", "fontsize": 0.72 * drawing.TEXT}
        ax.annotate(tokens(chunk), (chunk, y), (11, 0), textcoords="offset points", **look)
    ax.set(xscale="log", xlim=(800, 45_000), ylim=(row * len(rows), 0))
    ax.set_xticks([1000, 2000, 5000, 10_000, 20_000], ["1,000", "2,000", "5,000", "10,000", "20,000"])
    ax.minorticks_off()
    ax.set_yticks([])
    return figure
