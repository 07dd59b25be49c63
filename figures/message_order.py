"""All ranks send first, or even ranks first: what blocking messages do in one hop of the ring.

Drawn from the simulation in ringlab/basics/blocking_messages.py: the messages of every phase, who waits for whom, and
the circle if there is one.
"""

import math

from matplotlib.axes import Axes

from figures import shapes
from ringlab.basics.blocking_messages import Outcome, Program, Send, ring_programs, simulate_messages
from ringlab.support import drawing

LANE = 56  # pixels from one rank to the next


def draw(narrow: bool = False) -> drawing.Picture:
    """Top: four ranks all send first; each waits for the next one to receive, rank 0 for 1, 1 for 2, 2 for 3, 3 for 0,
    and no message ever moves. Bottom: even ranks send first and odd ranks receive first. Four ranks finish the hop in
    two phases: 0 to 1 and 2 to 3, then 1 to 2 and 3 to 0. Five ranks need three phases, because the neighbours 4 and 0
    are both even.
    """
    stuck = simulate_messages(ring_programs(4, even_odd=False))
    moved = f"{len(stuck.transfers)} messages move" if stuck.transfers else "no message ever moves"
    order, found = "Even ranks send first, odd ranks receive first: ", "every message finds its receiver"
    if narrow:
        figure, ax = drawing.canvas(498, 1240, shapes.told(draw))
        left, circle, titles = 8, (249, 384), ((552, order[:-2]), (576, found))
        places, size, column, width = ((614, 4), (908, 5)), 16.0, 138, 116
    else:
        figure, ax = drawing.canvas(1000, 732, shapes.told(draw))
        left, circle, titles = 20, (856, 168), ((352, order + found),)
        places, size, column, width = ((394, 4), (394, 5)), drawing.TITLE, 160, 128
    drawing.write(ax, left, 34, f"All ranks send first: {moved}", size=size, weight="bold")
    _stuck(ax, left, 70, stuck, narrow)
    _circle(ax, *circle, stuck)
    border = titles[0][0] - 38
    ax.plot([left, figure.bbox.width - left], [border, border], color=drawing.FAINT, lw=1)
    for y, title in titles:
        drawing.write(ax, left, y, title, size=size, weight="bold")
    for i, (y, world_size) in enumerate(places):
        outcome = simulate_messages(ring_programs(world_size))
        x = left if narrow else 20 + 416 * i
        _phases(ax, x, y, ring_programs(world_size), outcome, column, width)
    return figure


def _stuck(ax: Axes, x: float, y: float, outcome: Outcome, narrow: bool) -> None:
    """A lane for each rank: the send at which it stands, and what it would do next."""
    sends, waits, then, width, words = 310, 430, 516, 172, "receive: never begins"
    if narrow:
        sends, waits, then, width, words = 296, 304, 380, 102, "never begins"
    for rank, peer in outcome.waits_for.items():
        top = y + 54 * rank
        drawing.write(ax, x, top + 18, f"rank {rank}", weight="bold")
        shapes.box(ax, x + 72, top, waits, 36, fc=shapes.tint(rank), ec=drawing.colour(rank), lw=1, hatch="//")
        shapes.block(ax, x + 72, top, sends, 36, rank, f"send KV{rank} to {peer}: waits until {peer} receives")
        shapes.box(ax, x + then, top, width, 36, fc=drawing.PAGE, ec=drawing.MUTED, lw=1, ls=(0, (4, 3)))
        drawing.write(ax, x + then + width / 2, top + 18, words, color=drawing.MUTED, ha="center")


def _circle(ax: Axes, x: float, y: float, outcome: Outcome) -> None:
    """The ranks that wait for each other, on a circle."""
    angles = [2 * math.pi * i / len(outcome.cycle) for i in range(len(outcome.cycle))]
    at = {
        rank: (x + 78 * math.sin(angle), y - 78 * math.cos(angle))
        for rank, angle in zip(outcome.cycle, angles, strict=True)
    }
    for rank, (rank_x, rank_y) in at.items():
        ends = at[rank], at[outcome.waits_for[rank]]
        shapes.arrow(ax, *ends, connectionstyle="arc3,rad=-0.25", shrinkA=17, shrinkB=17, color=drawing.INK)
        shapes.block(ax, rank_x - 19, rank_y - 15, 38, 30, rank, f"{rank}", weight="bold")
    for line, text in enumerate(("each waits", "for the next")):
        drawing.write(ax, x, y - 9 + 20 * line, text, ha="center")


def _phases(
    ax: Axes, x: float, y: float, programs: list[Program], outcome: Outcome, column: float, width: float
) -> None:
    """A lane for each rank, a column for each phase, its boxes `width` wide; a message has one colour at both ends."""
    P, height = len(programs), 34
    why = "" if P % 2 == 0 else f", as {P - 1} and 0 are neighbours and both even"
    drawing.write(ax, x, y, f"P = {P}: {outcome.phases} phases{why}", size=16)
    at = [0] * P  # the step at which each rank stands
    for phase in range(outcome.phases):
        left = x + 72 + column * phase
        drawing.write(ax, left + width / 2, y + 32, f"phase {phase}", color=drawing.MUTED, ha="center")
        tops = [y + 52 + LANE * rank for rank in range(P)]
        waiting = {rank for rank in range(P) if at[rank] < len(programs[rank])}
        for move in outcome.transfers:
            if move.phase != phase:
                continue
            source, to = tops[move.source], tops[move.to]
            shapes.block(ax, left, source, width, height, move.source, f"send KV{move.source} to {move.to}")
            shapes.block(ax, left, to, width, height, move.source, f"receive KV{move.source}")
            look = {"color": drawing.colour(move.source), "lw": 4}
            if move.to == move.source + 1:
                middle = left + width / 2
                shapes.arrow(ax, (middle, source + height), (middle, to), **look, mutation_scale=14)
            else:  # round the side, from the last rank up to the first
                edge, side = left + width, left + width + 16
                ax.plot([edge, side, side], [source + 17, source + 17, to + 17], **look, solid_joinstyle="round")
                shapes.arrow(ax, (side, to + 17), (edge, to + 17), **look, mutation_scale=14)
            for rank in (move.source, move.to):
                at[rank] += 1
                waiting.remove(rank)
        for rank in waiting:
            step = programs[rank][at[rank]]
            peer = step.to if isinstance(step, Send) else step.source
            shapes.box(ax, left, tops[rank], width, height, fc=drawing.PAGE, ec=drawing.MUTED, lw=1, ls=(0, (4, 3)))
            drawing.write(ax, left + width / 2, tops[rank] + 17, f"waits for {peer}", ha="center", color=drawing.MUTED)
    for rank, top in enumerate(tops):
        drawing.write(ax, x, top + 17, f"rank {rank}", weight="bold")
