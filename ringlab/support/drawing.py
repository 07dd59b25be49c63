"""The look of every picture: its own light page, dark text, one colour for each K/V block, the same file in every run.

A picture is drawn on a `canvas`. Its coordinates are pixels from the top left, and text sizes are pixels too. The SVG
and a notebook's output carry a description, for readers who do not see the picture.
"""

from io import BytesIO, StringIO
from typing import Any
from xml.sax.saxutils import escape

from ringlab.support.colours import BLOCK_COLOURS
from ringlab.support.extras import extra

with extra("plots", __name__):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE, INK, MUTED, FAINT, CARD = "#FCFCFA", "#1B1F24", "#57606A", "#D5D9DE", "#F0F1F0"
TEXT, SMALL, TITLE = 14.5, 12.75, 18.0  # pixels on a page 1000 wide; SMALL is still 11 when it is shown 865 wide

REPEATABLE = {"svg.hashsalt": "ring", "svg.fonttype": "path"}  # the same ids in every run, the same letters everywhere


class Picture(Figure):
    """A figure with a description. A notebook shows it as a cell's last value, sharp on a fine screen too."""

    alt: str

    def _repr_png_(self) -> tuple[bytes, dict[str, int | str]]:
        self.savefig(data := BytesIO(), format="png", dpi=2 * self.dpi)
        return data.getvalue(), {"width": round(self.bbox.width), "alt": self.alt}

    def _ipython_display_(self) -> None:
        """Show it in a notebook, with its description as the text that stands for it.

        Sliders load code that shows every other figure in its own way, at half the size and without a description.
        """
        from IPython.display import display

        data, metadata = self._repr_png_()
        display({"image/png": data, "text/plain": self.alt}, metadata={"image/png": metadata}, raw=True)


def canvas(width: int, height: int, alt: str) -> tuple[Picture, Axes]:
    """An empty picture of width x height pixels, and axes that cover it in pixels from the top left.

    `alt` says in words what the picture shows.
    """
    figure = Picture(figsize=(width / 100, height / 100), dpi=100, facecolor=PAGE)
    figure.alt = alt
    ax = figure.add_axes((0, 0, 1, 1))
    clear(ax, width, height)
    return figure, ax


def clear(ax: Axes, width: int, height: int) -> None:
    """Empty the axes of a canvas, for the next frame."""
    ax.clear()
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")


def colour(block: int) -> str:
    """The colour of K/V block `block`."""
    return BLOCK_COLOURS[block % len(BLOCK_COLOURS)]


def write(ax: Axes, x: float, y: float, text: str, size: float = TEXT, **options: Any) -> None:
    """Text of `size` pixels at (x, y), centred on its middle line; `options` go to matplotlib."""
    ax.text(x, y, text, **{"fontsize": 0.72 * size, "color": INK, "va": "center_baseline", **options})


def svg(figure: Picture) -> str:
    """The picture and its description as SVG, the same text in every run."""
    with matplotlib.rc_context(REPEATABLE):
        figure.savefig(drawn := StringIO(), format="svg", metadata={"Date": None})
    before, tag, rest = drawn.getvalue().partition("<svg ")
    attributes, _, rest = rest.partition(">")
    described = f'{attributes} role="img" aria-labelledby="alt">\n <desc id="alt">{escape(figure.alt)}</desc>'
    return before + tag + described + rest
