"""The running softmax of one row: token 0 of the worked example meets four K/V blocks, one a round.

A bar shows the weights over the keys seen so far, e^(score - m) / l with the m and l of that round. When a block is
added, the parts of the older blocks shrink. Drawn from the states of the ring in kv_rotation.py.
"""

import math

from matplotlib.patches import Polygon, Rectangle

from figures import shapes
from figures.kv_rotation import pair, token_0
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.support import drawing
from ringlab.support.colours import ink_on
from worked_example import ring

WIDTH, HEIGHT, STEP = 124, 290, 200  # pixels: a bar, and from one to the next
LEFT, BOTTOM = 244, 400


def draw() -> drawing.Picture:
    """Four stacked bars, one a round, each of height 1: the weights of token 0 over the keys seen so far. Block 0
    begins with all of it and ends with 0.095, block 3 takes 0.846 in round 1 and ends with 0.521, block 2 ends with
    0.257, block 1 with 0.127. Below the bars the largest score m, the rescale factor, the sums l and o, and o / l,
    which ends at [2.2688, 1.6500], as full attention does.
    """
    title = "Token 0 meets one K/V block a round, and its weights always add up to 1"
    figure, ax = shapes.headed(668, draw, title)
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
        x, y, shares = LEFT + STEP * t, BOTTOM, []  # of each block: the lower and the upper end of its part of the bar
        for block in order[: t + 1]:
            scores = (TOKENS[2 * block : 2 * block + 2] @ TOKENS[0] / math.sqrt(2)).tolist()
            weight = sum(math.exp(score - m) / l for score in scores)
            fill, ink = drawing.colour(block), ink_on(drawing.colour(block))
            ax.add_patch(Rectangle((x, y), WIDTH, -HEIGHT * weight, fc=fill, ec=drawing.PAGE))
            drawing.write(ax, x + 10, y - HEIGHT * weight / 2, f"KV{block}", weight="bold", color=ink)
            drawing.write(ax, x + WIDTH - 10, y - HEIGHT * weight / 2, f"{weight:.3f}", color=ink, ha="right")
            top = y - HEIGHT * weight
            shares.append((y, top))
            y = top
        for block, old, new in zip(order, before, shares, strict=False):
            corners = [(x - STEP + WIDTH, old[0]), (x - STEP + WIDTH, old[1]), (x, new[1]), (x, new[0])]
            ax.add_patch(Polygon(corners, fc=shapes.tint(block), lw=0, zorder=0))

        middle = x + WIDTH / 2
        drawing.write(ax, middle, 86, f"Round {t}: KV{order[t]}", size=16, weight="bold", ha="center")
        o = now[0].o[0].tolist()
        numbers = [f"{m:.4f}", f"{math.exp(m_before - m):.4f}", f"{l:.4f}", pair(o), pair(result)]
        for row, number in enumerate(numbers):
            drawing.write(ax, middle, 436 + 36 * row, number, ha="center", weight="bold" if row == 4 else "normal")
        m_before, before = m, shares

    exact = naive_attention(*[TOKENS[None, None]] * 3)[0, 0, 0].tolist()
    ax.plot([20, 980], [604, 604], color=drawing.FAINT, lw=1)
    drawing.write(ax, 20, 634, "full attention, all 8 tokens at once", color=drawing.MUTED)
    drawing.write(ax, LEFT + 3 * STEP + WIDTH / 2, 634, pair(exact), ha="center")
    return figure
