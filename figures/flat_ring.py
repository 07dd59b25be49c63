"""How long a flat ring waits, by what the kernel and the NICs reach: chapter 18. Drawn from the planner's formulas.

A layer's forward pass of Llama 8B under a causal mask: 1M tokens on 16 hosts of 8 H100s, with a NIC of 50 GB/s a GPU.
"""

import numpy as np

from figures import shapes
from ring_planner.hidden_communication import block_flops, hop_bytes, ring_seconds
from ring_planner.presets import gpu_named, model_named
from ring_planner.round_costs import HOST_SHARE
from ringlab.support import drawing

P, GPU, LAYER = 128, gpu_named("h100"), model_named("llama-3.1-8b").attention()
CHUNK, REACHED = 2**20 // P, GPU.attention["cudnn"][0]
POINTS = {"the planner's": (REACHED, HOST_SHARE), "one machine's": (REACHED, 0.566)}
POINTS["data sheet"] = GPU.peak["bf16"], 1.0
COLOUR = "#A33B75"  # not that of a block


def waiting(flops: float, share: float) -> float:
    """The share of a layer's forward pass in which a rank of the flat ring waits."""
    computing = block_flops(LAYER, CHUNK**2 / 2) / flops  # causal: half of the pairs
    return 1 - P * computing / ring_seconds(P, computing, hop_bytes(LAYER, CHUNK) / (share * GPU.host_bandwidth))


def draw(yours: tuple[float, float] | None = None) -> drawing.Picture:
    """Axes: the share of a NIC that messages reach, 0.4 to 1, and the FLOP/s that attention reaches, 300 to 1,000
    TFLOP/s. Below a line through the origin, 0 %, nothing waits; above it the flat ring waits, for half of its time in
    the upper left. At the planner's 652 TFLOP/s and 0.7 it waits for 12 %, at the 0.566 of a NIC that one machine
    reached for 29 %, and with the data sheet's 989 TFLOP/s and a whole NIC for 17 %.
    """
    title = "The same flat ring waits not at all, or for half of its time"
    lines = {66: "1M tokens on 16 hosts of 8 H100s, Llama 8B, forward: the share of the time in which a rank waits"}
    figure, _ = shapes.headed(620, draw, title, lines)
    axes = "share of a NIC's 50 GB/s that messages reach", "TFLOP/s that attention reaches"
    ax = shapes.numbers(figure, (0.09, 0.13, 0.86, 0.71), x=axes[0], y=axes[1])
    shares, flops = np.linspace(0.4, 1, 61), np.linspace(300, 1000, 71)
    waits = [[100 * waiting(1e12 * rate, share) for share in shares] for rate in flops]
    levels = [0.01, 10, 20, 30, 40, 50]
    ax.contourf(shares, flops, waits, levels=[*levels, 100], colors=[(*rgb, 1.0) for rgb in shades(len(levels))])
    for level in levels:
        ratio = next(rate for rate in range(300, 4000) if 100 * waiting(1e12 * rate, 1.0) >= level)  # at a whole NIC
        ax.plot([300 / ratio, 1000 / ratio], [300, 1000], color=drawing.MUTED, lw=1)
        at = min(1000 / ratio, 1.0) - 0.08
        look = {"ha": "right", "va": "bottom", "fontsize": 0.72 * drawing.TEXT, "color": drawing.INK}
        ax.annotate(f"{level:.0f} %", (at, at * ratio), (-6, 0), textcoords="offset points", **look)
    for name, (rate, share) in (POINTS | ({"yours": yours} if yours else {})).items():
        ax.plot([share], [rate / 1e12], "o", color=COLOUR, ms=10, clip_on=False)
        look = {"weight": "bold", "fontsize": 0.72 * drawing.TEXT, "color": drawing.INK, "ha": "center", "va": "top"}
        text = f"{name}: {waiting(rate, share):.0%}"
        ax.annotate(text, (min(share, 0.94), rate / 1e12), (0, -9), textcoords="offset points", **look)
    ax.set(xlim=(0.4, 1), ylim=(300, 1000), yticks=range(400, 1001, 100))
    return figure


def shades(n: int) -> list[tuple[float, float, float]]:
    """From nearly the page to a pale tone of COLOUR."""
    page, full = (np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]) for colour in (drawing.PAGE, COLOUR))
    return [tuple((1 - part) * page + part * full) for part in np.linspace(0.06, 0.45, n)]
