"""The rotation of the K/V blocks: the worked example's 8 tokens on 4 GPUs, 4 rounds, 3 hops; a still and an animation.

Drawn from the ring of worked_example.py. The blocks in the picture are those that were in hand. The numbers of token 0
are the (m, l, o) that it had. running_softmax shows its weights over the keys seen so far, e^(score - m) / l with the m
and l of a round: when a block is added, the parts of the older blocks shrink.
"""

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Polygon, Rectangle
from PIL import Image

from figures import shapes
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.support import drawing
from ringlab.support.colours import ink_on
from worked_example import P, Step, ring

CARD, GAP = (196, 112), (64, 46)  # pixels: a GPU, and the space between two
SLOT = (8, 40, 180, 64)  # where the block lies on the card: x, y, width, height
FRAME, NARROW = (900, 424), (472, 736)  # pixels: of the animation, and of the one for phones
BAR, STEP, FIRST = (124, 290), 200, (244, 400)  # pixels: a bar of running_softmax, to the next, the foot of the first

Round = list[Step]  # what every GPU computed, by GPU


def token_0(of: Round) -> tuple[float, float, list[float]]:
    """Token 0's m, l and o / l after a round."""
    step = of[0]
    return step.m[0], step.l[0], (step.o[0] / step.l[0]).tolist()


def in_hand(of: Round) -> list[int]:
    """The K/V block of each GPU."""
    return [step.block for step in of]


def pair(values: list[float]) -> str:
    return f"[{values[0]:.4f}, {values[1]:.4f}]"


def _corner(gpu: int) -> tuple[float, float]:
    """Top left of a GPU's card: 0 and 1 above, 2 and 3 below, so that the ring runs clockwise."""
    column, row = ((0, 0), (1, 0), (1, 1), (0, 1))[gpu % P]
    return column * (CARD[0] + GAP[0]), row * (CARD[1] + GAP[1])


def _ring(ax: Axes, x: float, y: float, blocks: list[int], *, arrows: bool, moved: float = 0.0) -> None:
    """The four GPUs with their top left at (x, y), and each block `moved` (0 to 1) of the way to the next GPU."""
    for gpu, block in enumerate(blocks):
        (x0, y0), (x1, y1) = _corner(gpu), _corner(gpu + 1)
        left, top = x + x0, y + y0
        shapes.box(ax, left, top, *CARD, ec=drawing.FAINT, lw=1)
        shapes.box(ax, left + SLOT[0], top + SLOT[1], *SLOT[2:], fc=drawing.PAGE, ec=drawing.FAINT, lw=1)
        drawing.write(ax, left + 12, top + 21, f"GPU {gpu}", weight="bold")
        home = f"Q of tokens {2 * gpu}, {2 * gpu + 1}"
        drawing.write(ax, left + CARD[0] - 12, top + 21, home, color=drawing.MUTED, ha="right")
        if arrows:  # in the gap between this GPU and the next
            middle = np.array([x + (x0 + x1 + CARD[0]) / 2, y + (y0 + y1 + CARD[1]) / 2])
            reach = np.sign([x1 - x0, y1 - y0]) * (np.array(GAP) / 2 - 6)
            look = {"color": drawing.colour(block), "lw": 4, "mutation_scale": 20}
            shapes.arrow(ax, middle - reach, middle + reach, **look)

        left, top = left + SLOT[0] + moved * (x1 - x0), top + SLOT[1] + moved * (y1 - y0)
        ink = ink_on(drawing.colour(block))
        shapes.box(ax, left, top, *SLOT[2:], fc=drawing.colour(block), zorder=4)
        drawing.write(ax, left + 11, top + 32, f"KV{block}", size=17, weight="bold", color=ink, zorder=5)
        for line, token in enumerate((2 * block, 2 * block + 1)):
            values = ", ".join(f"{value:.0f}" for value in TOKENS[token].tolist())
            drawing.write(ax, left + 65, top + 20 + 24 * line, f"token {token}", color=ink, zorder=5)
            drawing.write(ax, left + 172, top + 20 + 24 * line, f"[{values}]", color=ink, ha="right", zorder=5)


def draw(narrow: bool = False) -> drawing.Picture:
    """Four GPUs in a ring, in four rounds. The queries of tokens 0 and 1 stay on GPU 0, those of 2 and 3 on GPU 1,
    those of 4 and 5 on GPU 2, those of 6 and 7 on GPU 3. After each of the first three rounds every K/V block moves on
    to the next GPU, so GPU 0 computes on blocks 0, 3, 2 and 1. Token 0's result goes from [0.6698, 0.3302] over
    [2.6420, 1.7435] and [2.4530, 1.6718] to [2.2688, 1.6500].
    """
    width, height, columns = (NARROW[0], 1528, 1) if narrow else (1000, 800, 2)
    figure, ax = drawing.canvas(width, height, shapes.told(draw))
    left, size, count = (8, 16, "") if narrow else (20, drawing.TITLE, ": 4 rounds, 3 hops")
    drawing.write(ax, left, 34, f"K/V blocks travel, queries stay{count}", size=size, weight="bold")
    for t, now in enumerate(ring()):
        x, y = left + 504 * (t % columns), 122 + 364 * (t // columns)
        drawing.write(ax, x, y - 26, f"Round {t}", size=16, weight="bold")
        *_, so_far = token_0(now)
        drawing.write(ax, x + 456, y - 26, f"token 0 so far: {pair(so_far)}", ha="right")
        _ring(ax, x, y, in_hand(now), arrows=t < P - 1)
        hop = "then each block moves on to the next GPU" if t < P - 1 else "no hop: every query has met every key"
        drawing.write(ax, x + 228, y + 292, hop, color=drawing.MUTED, ha="center")
    return figure


def _frame(ax: Axes, record: list[Round], t: int, moved: float, narrow: bool) -> None:
    """One frame: round t, its blocks `moved` (0 to 1) of the way to the next GPU, and token 0's numbers so far."""
    last, x = t == P - 1, 8 if narrow else 20
    caption, rest = f"Round {t}: each GPU computes", " on the block that it holds"
    if moved:
        caption, rest = f"Hop {t + 1} of {P - 1}: every K/V block moves on", " to the next GPU, queries stay"
    caption += "" if narrow else rest
    drawing.write(ax, x, 34, caption, size=16 if narrow else drawing.TITLE, weight="bold")
    _ring(ax, x, 76, in_hand(record[t]), arrows=not (last or moved), moved=moved)
    if last:
        drawing.write(ax, x + 228, 386, "No hop after the last round: every query has met every key.", ha="center")

    left, top = (x + 8, 336) if narrow else (516, 0)  # token 0 stands below the ring, or beside it
    columns = (116, 194, 364)  # pixels; the right edges of m, l and o / l
    drawing.write(ax, left, top + 97, "Token 0 on GPU 0", weight="bold")
    drawing.write(ax, left, top + 130, "block", color=drawing.MUTED)
    for x, head in zip(columns, ("m", "l", "o / l"), strict=True):
        drawing.write(ax, left + x, top + 130, head, color=drawing.MUTED, ha="right")
    for row in range(t + 1):
        y, block = top + 164 + 40 * row, record[row][0].block
        if row == t and not moved:
            shapes.box(ax, left - 8, y - 19, 380, 38)
        shapes.block(ax, left, y - 13, 48, 26, block, f"KV{block}", weight="bold")
        m, l, result = token_0(record[row])
        for x, number in zip(columns, (f"{m:.3f}", f"{l:.3f}", pair(result)), strict=True):
            drawing.write(ax, left + x, y, number, ha="right")
    if last:
        exact = naive_attention(*[TOKENS[None, None]] * 3)[0, 0, 0].tolist()
        drawing.write(ax, left, top + 334, "full attention", color=drawing.MUTED)
        drawing.write(ax, left + columns[-1], top + 334, pair(exact), ha="right", weight="bold")
    size = drawing.TEXT if narrow else drawing.SMALL
    drawing.write(
        ax, left, top + 386, "m: largest score, l: sum of e^(score − m), so far", size=size, color=drawing.MUTED
    )


def frames(steps: int) -> list[tuple[int, float]]:
    """(round, how far its blocks have moved) of every frame, with `steps` - 1 frames on the way between two rounds."""
    ways = [0.5 - 0.5 * math.cos(math.pi * step / steps) for step in range(steps)]  # starts and ends gently
    return [(t, way) for t in range(P - 1) for way in ways] + [(P - 1, 0.0)]


def save_gif(folder: Path, narrow: bool = False) -> None:
    """Write the animation as kv_rotation.gif or kv_rotation-narrow.gif. It stays a while on every round."""
    record, images, milliseconds = ring(), [], []
    for t, moved in frames(steps=10):
        figure, ax = drawing.canvas(*(NARROW if narrow else FRAME), shapes.told(draw))
        _frame(ax, record, t, moved, narrow)
        shown = FigureCanvasAgg(figure)
        shown.draw()
        images.append(Image.fromarray(np.asarray(shown.buffer_rgba())[..., :3].copy()))
        stays = 4500 if t == P - 1 else 2000
        milliseconds.append(70 if moved else stays)
    palette = images[-1].quantize(128)  # it shows all the colours; one palette for all frames, so nothing flickers
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    name = f"kv_rotation{'-narrow' if narrow else ''}.gif"
    images[0].save(folder / name, save_all=True, append_images=images[1:], duration=milliseconds, loop=0)


def running_softmax() -> drawing.Picture:
    """Four stacked bars, one a round, each of height 1: the weights of token 0 over the keys seen so far. Block 0
    begins with all of it and ends with 0.095, block 3 takes 0.846 in round 1 and ends with 0.521, block 2 ends with
    0.257, block 1 with 0.127. Below the bars the largest score m, the rescale factor, the sums l and o, and o / l,
    which ends at [2.2688, 1.6500], as full attention does.
    """
    title = "Token 0 meets one K/V block a round, and its weights always add up to 1"
    figure, ax = shapes.headed(668, running_softmax, title)
    drawing.write(ax, 20, 124, "weights so far", weight="bold")
    drawing.write(ax, 20, 148, "e^(score − m) / l", color=drawing.MUTED)
    drawing.write(ax, 20, 172, "summed over each block", color=drawing.MUTED)
    names = ("m: largest score", "rescale: e^(m before − m)", "l: sum of e^(score − m)", "o: sum of e^(score − m) v")
    for row, name in enumerate((*names, "o / l: result so far")):
        drawing.write(ax, 20, 436 + 36 * row, name, weight="bold" if row == len(names) else "normal")

    record = ring()
    order = [now[0].block for now in record]  # the blocks in the order in which GPU 0 held them
    m_before, before = -math.inf, []
    for t, now in enumerate(record):
        m, l, result = token_0(now)
        x, y, shares = (
            FIRST[0] + STEP * t,
            FIRST[1],
            [],
        )  # shares: the ends of each block's part of the bar
        for block in order[: t + 1]:
            scores = (TOKENS[2 * block : 2 * block + 2] @ TOKENS[0] / math.sqrt(2)).tolist()
            weight = sum(math.exp(score - m) / l for score in scores)
            fill, ink = drawing.colour(block), ink_on(drawing.colour(block))
            ax.add_patch(Rectangle((x, y), BAR[0], -BAR[1] * weight, fc=fill, ec=drawing.PAGE))
            drawing.write(ax, x + 10, y - BAR[1] * weight / 2, f"KV{block}", weight="bold", color=ink)
            drawing.write(ax, x + BAR[0] - 10, y - BAR[1] * weight / 2, f"{weight:.3f}", color=ink, ha="right")
            top = y - BAR[1] * weight
            shares.append((y, top))
            y = top
        for block, old, new in zip(order, before, shares, strict=False):
            corners = [(x - STEP + BAR[0], old[0]), (x - STEP + BAR[0], old[1]), (x, new[1]), (x, new[0])]
            ax.add_patch(Polygon(corners, fc=shapes.tint(block), lw=0, zorder=0))

        middle = x + BAR[0] / 2
        drawing.write(ax, middle, 86, f"Round {t}: KV{order[t]}", size=16, weight="bold", ha="center")
        o = now[0].o[0].tolist()
        numbers = [f"{m:.4f}", f"{math.exp(m_before - m):.4f}", f"{l:.4f}", pair(o), pair(result)]
        for row, number in enumerate(numbers):
            drawing.write(ax, middle, 436 + 36 * row, number, ha="center", weight="bold" if row == 4 else "normal")
        m_before, before = m, shares

    exact = naive_attention(*[TOKENS[None, None]] * 3)[0, 0, 0].tolist()
    ax.plot([20, 980], [604, 604], color=drawing.FAINT, lw=1)
    drawing.write(ax, 20, 634, "full attention, all 8 tokens at once", color=drawing.MUTED)
    drawing.write(ax, FIRST[0] + 3 * STEP + BAR[0] / 2, 634, pair(exact), ha="center")
    return figure
