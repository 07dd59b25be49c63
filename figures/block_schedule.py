"""Which K/V block each rank computed on in each round, and the hops between the rounds.

Drawn from the record of a real run, ring_timeline.json: every cell is a "compute" event, every arrow a "send" event.
The record identifies a block by its content.
"""

import numpy as np

from figures import shapes
from figures.ring_timeline import events
from ringlab.support import drawing

CELL, STEP = (142, 64), (174, 116)  # pixels: a cell, and from one to the next
LEFT, TOP = 168, 104


def draw() -> drawing.Picture:
    """A grid of four rounds by four ranks, coloured by K/V block. In round 0 rank r holds block r; in each later round
    every block stands one rank further to the right, and that of rank 3 comes in again at rank 0. There is a hop
    between any two rounds, three in all, and none after the last one.
    """
    record = events()
    sent = [event for event in record if event.what == "send"]
    P = 1 + max(event.rank for event in record)
    hops = 1 + max(event.round for event in sent)
    title = f"The K/V block on which each rank computed: {P} rounds, {hops} hops"
    figure, ax = shapes.headed(580, draw, title)
    for rank in range(P):
        drawing.write(ax, LEFT + STEP[0] * rank + CELL[0] / 2, 82, f"rank {rank}", weight="bold", ha="center")
    for t in range(P):
        middle = TOP + STEP[1] * t + CELL[1] / 2
        drawing.write(ax, 20, middle - 10, f"round {t}", weight="bold")
        drawing.write(ax, 20, middle + 11, f"j = (r − {t}) mod {P}", color=drawing.MUTED)

    for event in record:
        x, y = LEFT + STEP[0] * event.rank, TOP + STEP[1] * event.round
        if event.what == "compute":
            shapes.block(ax, x, y, *CELL, event.block, f"KV{event.block}", size=19, weight="bold")
        if event.what == "send":
            start = np.array([x + CELL[0] / 2, y + CELL[1] + 4])
            way = np.array([STEP[0], STEP[1] - CELL[1] - 8])
            look = {"color": drawing.colour(event.block), "lw": 4, "mutation_scale": 18}
            if event.rank < P - 1:
                shapes.arrow(ax, start, start + way, **look)
            else:  # out on the right, in again on the left
                shapes.arrow(ax, start, start + way / 2, **{**look, "arrowstyle": "-"})
                shapes.arrow(ax, start + way / 2 - (P * STEP[0], 0), start + way - (P * STEP[0], 0), **look)
    for hop in range(hops):
        y = TOP + STEP[1] * hop + (STEP[1] + CELL[1]) / 2
        size = max(event.bytes for event in sent if event.round == hop)
        drawing.write(ax, 886, y - 10, f"hop {hop + 1}", weight="bold")
        drawing.write(ax, 886, y + 11, f"{size / 1e6:.1f} MB a rank", color=drawing.MUTED)
    middle, under = LEFT + (STEP[0] * (P - 1) + CELL[0]) / 2, TOP + STEP[1] * (P - 1) + CELL[1] + 28
    text = "No hop after the last round: nobody needs another block"
    drawing.write(ax, middle, under, text, color=drawing.MUTED, ha="center")
    return figure
