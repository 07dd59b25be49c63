"""The look of every picture: its own light page, dark text, one colour for each K/V block, the same file in every run.

A picture is drawn on a `canvas`. Its coordinates are pixels from the top left, and text sizes are pixels too. The SVG
and a notebook's output carry a description, for readers who do not see the picture.
"""

from io import BytesIO, StringIO
from typing import Any
from xml.sax.saxutils import escape

from ringlab.support.colours import colour as colour
from ringlab.support.colours import ink_on
from ringlab.support.extras import extra
from ringlab.support.timeline import Event

with extra("plots", __name__):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image

PAGE, INK, MUTED, FAINT, CARD = "#FCFCFA", "#1B1F24", "#57606A", "#D5D9DE", "#F0F1F0"
TEXT, SMALL, TITLE = 14.5, 12.75, 18.0  # pixels on a page 1000 wide; SMALL is still 11 when it is shown 865 wide

REPEATABLE = {"svg.hashsalt": "ring", "svg.fonttype": "path"}  # the same ids in every run, the same letters everywhere


class Picture(Figure):
    """A figure with a description. A notebook shows it as a cell's last value, sharp on a fine screen too."""

    alt: str

    def _ipython_display_(self) -> None:
        """Show it in a notebook, with its description as the text that stands for it.

        Sliders load code that shows every other figure in its own way, at half the size and without a description.
        """
        from IPython.display import display

        self.savefig(drawn := BytesIO(), format="png", dpi=2 * self.dpi)
        few_colours = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)  # a third of the bytes
        few_colours.save(data := BytesIO(), format="png", optimize=True)
        look = {"width": round(self.bbox.width), "alt": self.alt}
        shown = {"image/png": data.getvalue(), "text/plain": self.alt}
        display(shown, metadata={"image/png": look}, raw=True)


def canvas(width: int, height: int, alt: str) -> tuple[Picture, Axes]:
    """An empty picture of width x height pixels, and axes that cover it in pixels from the top left.

    `alt` says in words what the picture shows.
    """
    figure = Picture(figsize=(width / 100, height / 100), dpi=100, facecolor=PAGE)
    figure.alt = alt
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    return figure, ax


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


def draw_events(events: list[Event], ax: Axes, size: float = TEXT) -> None:
    """Draw the record of a run, one lane for each rank. `size` is that of the blocks' names, in pixels.

    Computing is a thick bar in the block's colour, with messages as thin bars below it. The "wait" of an overlapped
    ring is hatched, in place of computing.
    """
    ranks = 1 + max(event.rank for event in events)
    for event in events:
        top, height = {"send": (0.1, 0.13), "receive": (0.25, 0.13)}.get(event.what, (-0.36, 0.44))
        fill = colour(event.block) if event.block >= 0 else "#A0A0A0"
        start, width = 1e3 * event.start, 1e3 * (event.end - event.start)
        look = {"fc": "none", "ec": fill, "hatch": "//////"} if event.what == "wait" else {"color": fill}
        ax.barh(event.rank + top, width, left=start, height=height, align="edge", linewidth=0, **look)
        if event.what == "compute":
            middle = (start + width / 2, event.rank + top + height / 2)
            write(ax, *middle, f"KV{event.block}", size, ha="center", va="center", color=ink_on(fill), weight="bold")
    ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    ax.set(ylim=(ranks - 0.5, -0.5), xlim=(0, None))
    ax.set_xlabel("milliseconds   (thick: computing on a block; thin: sending it, and below receiving the next one)")
