"""Shapes that the pictures of this folder and of the puzzles share: boxes, blocks, arrows, plain axes."""

from collections.abc import Callable, Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from ringlab.support import drawing
from ringlab.support.colours import ink_on


def tint(block: int) -> str:
    """A pale tone of the block's colour, for what is not the block itself: its shadow, its way."""
    dark, page = to_rgb(drawing.colour(block)), to_rgb(drawing.PAGE)
    red, green, blue = (0.3 * a + 0.7 * b for a, b in zip(dark, page, strict=True))
    return to_hex((red, green, blue))


def lines(ax: Axes, x: float, y: float, texts: Iterable[str], **options: Any) -> None:
    """Lines of text, one below the other; `options` go to matplotlib."""
    for i, text in enumerate(texts):
        drawing.write(ax, x, y + 24 * i, text, **options)


def box(ax: Axes, x: float, y: float, width: float, height: float, **options: Any) -> None:
    """A box with round corners whose top left is (x, y)."""
    shape = "round,pad=0,rounding_size=6"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **{"lw": 0, "fc": drawing.CARD, **options}))


def block(ax: Axes, x: float, y: float, width: float, height: float, number: int, text: str, **options: Any) -> None:
    """A box of K/V block `number`, with `text` in its middle; `options` go to matplotlib, for the text."""
    box(ax, x, y, width, height, fc=drawing.colour(number))
    look = {"ha": "center", "color": ink_on(drawing.colour(number)), **options}
    drawing.write(ax, x + width / 2, y + height / 2, text, **look)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], **options: Any) -> None:
    """An arrow from `start` to `end`."""
    look = {"arrowstyle": "-|>", "mutation_scale": 13, "lw": 2, "color": drawing.MUTED, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, **{**look, **options}))


def told(draw: Callable[..., drawing.Picture]) -> str:
    """What a picture shows, in words: the docstring of the function that draws it."""
    return " ".join((draw.__doc__ or "").split())


def headed(
    height: int, draw: Callable[..., drawing.Picture], title: str, lines: dict[int, str] | None = None
) -> tuple[drawing.Picture, Axes]:
    """A picture 1000 pixels wide with its title; below it, muted lines by their height. Returns it and its axes.

    `draw` is the function that draws it, whose docstring says what it shows."""
    figure, page = drawing.canvas(1000, height, told(draw))
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    for y, line in (lines or {}).items():
        drawing.write(page, 20, y, line, color=drawing.MUTED)
    return figure, page


def numbers(figure: drawing.Picture, place: tuple[float, float, float, float], *, x: str, y: str = "") -> Axes:
    """Axes with numbers at `place` (left, bottom, width, height, as shares of the picture), named x and y."""
    ax = figure.add_axes(place, facecolor=drawing.PAGE)
    plain(ax)
    look: dict[str, Any] = {"fontsize": 0.72 * drawing.TEXT, "color": drawing.INK}
    ax.set_xlabel(x, **look)
    ax.set_ylabel(y, **look)
    return ax


def plain(ax: Axes) -> None:
    """The look of axes with numbers: readable labels, a pale grid behind the data, no frame."""
    ax.tick_params(labelsize=0.72 * drawing.TEXT, colors=drawing.INK, length=0)
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.grid(color=drawing.FAINT, lw=0.8)
    ax.set_axisbelow(True)
