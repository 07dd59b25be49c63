"""Draw what a schedule did: a lane for each rank, time from left to right, messages as arrows from lane to lane."""

from collections.abc import Callable

from matplotlib.axes import Axes

from figures import shapes
from notebooks.puzzles.engine import Run
from ringlab.support import drawing
from ringlab.support.colours import ink_on

LEFT, RIGHT, TOP, LANE, BAR = 92, 966, 78, 74, 26  # pixels: where the lanes are, from lane to lane, height of a bar
FAULT = "#B3261E"
Label = Callable[[float | None], int | None]  # the first number of a tensor -> the number of its block


def draw(run: Run, title: str, label: Label, name: str = "KV") -> drawing.Picture:
    """The film of a run, up to its fault. `label` tells the block from a number; `name` is what blocks are called."""
    P = run.world_size
    end = max([*run.clocks, *(message.end for message in run.messages)])
    length = max(end, 1.0) * (1.18 if any(wait.end is None for wait in run.waits) else 1.0)
    scale = (RIGHT - LEFT) / length
    figure, ax = drawing.canvas(1000, TOP + LANE * (P - 1) + 104, _words(run, title, end))
    drawing.write(ax, 20, 30, title, size=16, weight="bold", color=FAULT if run.fault else drawing.INK)

    def x(time: float) -> float:
        return LEFT + scale * time

    def y(rank: int) -> float:
        return TOP + LANE * rank

    for rank in range(P):
        drawing.write(ax, 20, y(rank), f"rank {rank}", weight="bold")
        ax.plot([LEFT, RIGHT], [y(rank)] * 2, color=drawing.FAINT, lw=1, zorder=0)
    for wait in run.waits:
        right, look = (RIGHT, FAULT) if wait.end is None else (x(wait.end), drawing.MUTED)
        left = x(wait.begin)
        pale = drawing.PAGE
        shapes.box(ax, left, y(wait.rank) - BAR / 2, right - left, BAR, fc=pale, ec=look, lw=1, hatch="////", alpha=0.5)
        if wait.end is None:
            peers = ", ".join(map(str, sorted(set(wait.peers))))
            _note(ax, (left + right) / 2, y(wait.rank), f"waits for {peers}", FAULT)
    for work in run.works:
        width = x(work.end) - x(work.begin)
        block = label(work.number)
        colour = drawing.MUTED if block is None else drawing.colour(block)
        if width < 1:  # computing takes no time in this puzzle: a mark
            ax.plot([x(work.begin)], [y(work.rank)], "s", ms=6, color=colour, zorder=3)
            continue
        shapes.box(ax, x(work.begin) + 1, y(work.rank) - BAR / 2, width - 2, BAR, fc=colour)
        if width > 34:
            text = name if block is None else f"{name}{block}"
            drawing.write(ax, x(work.begin) + width / 2, y(work.rank), text, ha="center", color=ink_on(colour))
    for message in run.messages:
        block = label(message.number)
        colour = drawing.MUTED if block is None else drawing.colour(block)
        below = 1 if message.to > message.source else -1
        edges = y(message.source) + below * 5, y(message.to) - below * 5
        shapes.arrow(ax, (x(message.begin), edges[0]), (x(message.end), edges[1]), color=colour, lw=3, zorder=2)
        for rank in (message.source, message.to):
            ax.plot(
                [x(message.begin), x(message.end)], [y(rank)] * 2, color=colour, lw=5, solid_capstyle="butt", zorder=1
            )
    if run.where is not None:
        _note(ax, min(x(run.clocks[run.where]) + 24, RIGHT - 30), y(run.where), "stops", FAULT)
    bottom = TOP + LANE * (P - 1) + 44
    for tick in _ticks(end):
        ax.plot([x(tick)] * 2, [bottom - 6, bottom], color=drawing.MUTED, lw=1)
        drawing.write(ax, x(tick), bottom + 12, f"{tick:g}", size=drawing.SMALL, ha="center", color=drawing.MUTED)
    words = "units of time; an arrow is a message, a box is computing, a hatched box is waiting"
    if any(label(message.number) is None for message in run.messages):
        words += "; grey: computed numbers, nobody's block"
    drawing.write(ax, LEFT, bottom + 36, words, size=drawing.SMALL, color=drawing.MUTED)
    return figure


def _note(ax: Axes, x: float, y: float, text: str, colour: str) -> None:
    look = {"boxstyle": "round,pad=0.15", "fc": drawing.PAGE, "ec": "none"}
    drawing.write(ax, x, y, text, ha="center", color=colour, bbox=look, zorder=4)


def _ticks(end: float) -> list[float]:
    step = next(step for step in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if end / step <= 9)
    return [step * i for i in range(int(end / step + 1e-9) + 1)]


def _words(run: Run, title: str, end: float) -> str:
    """The picture in words."""
    moves = [f"{move.source} to {move.to} from {move.begin:g} to {move.end:g}" for move in run.messages[:12]]
    more = f", and {len(run.messages) - 12} more" if len(run.messages) > 12 else ""
    said = f"A film of {run.world_size} ranks on {end:g} units of time: {title}. "
    said += f"Messages, from rank to rank: {'; '.join(moves) or 'none moved'}{more}. "
    stuck = [f"{wait.rank} waits for {wait.peers[0]}" for wait in run.waits if wait.end is None]
    return said + (
        f"At the end rank {', '.join(stuck)}."
        if stuck
        else f"Each rank computes {len(run.works) // run.world_size} times."
    )
