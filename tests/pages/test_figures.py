"""Every committed picture is what its script draws now, is legible, and keeps the colours of the K/V blocks."""

import base64
import functools
import io
import itertools
import re
from unittest import mock
from xml.etree import ElementTree

import nbformat
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from figures import FOLDER, kv_rotation, token_loss
from figures.draw_all import CHAPTERS, NARROW, PAGES
from figures.timelines import duration, simulate_timeline
from notebooks.source import build
from ring_planner.hidden_communication import ring_seconds
from ringlab.support import drawing
from ringlab.support.colours import BLOCK_COLOURS, ink_on
from tests.commands import ROOT, assert_legible

PICTURES = PAGES | CHAPTERS
TOLERANCE = 0.05  # of a number in an SVG: a fifteenth of a pixel, more than another CPU's last digit
SHOWS_BLOCKS = {  # and how many of their colours; the others are measured, or of machines
    **dict.fromkeys(("kv_rotation", "message_order", "running_softmax", "ring_timeline"), 4),
    **dict.fromkeys(("gradients_home", "causal_layouts", "backward_timeline", "slow_hop", "token_loss", "mesh"), 4),
    **dict.fromkeys(("masked_ring", "tokens_to_heads", "double_ring", "state_ring"), 4),
    "overlap_timeline": 2,
}


def svg_tokens(text: str) -> list[str | float]:
    """The text cut into numbers and what is between them, labels and colours whole; hashed ids become 0, 1, 2, ..."""
    ids: dict[str, str] = {}
    text = re.sub(r"\b[a-z][0-9a-f]{10}\b", lambda found: ids.setdefault(found[0], str(len(ids))), text)
    parts = re.split(r"(<desc.*?</desc>|<!--.*?-->|#[0-9a-fA-F]{6}\b|-?\d+(?:\.\d+)?(?:e-?\d+)?)", text)
    return [float(part) if re.match(r"-?\d", part) else part for part in parts]


def same_svg(one: str, other: str) -> bool:
    pairs = list(itertools.zip_longest(svg_tokens(one), svg_tokens(other)))
    return all(abs(a - b) <= TOLERANCE if isinstance(a, float) and isinstance(b, float) else a == b for a, b in pairs)


def frames_of(file) -> tuple[np.ndarray, list[int]]:
    """The frames (frame, y, x, colour) of an image, and how many milliseconds each is shown."""
    with Image.open(file) as image:
        frames, durations = [], []
        for i in range(getattr(image, "n_frames", 1)):
            image.seek(i)
            frames.append(np.asarray(image.convert("RGB"), dtype=np.int16))
            durations.append(image.info.get("duration", 0))
    return np.stack(frames), durations


def same_frames(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal but for a few pixels at the edge of a letter."""
    few = max(10, one[0, ..., 0].size // 10_000)
    return one.shape == other.shape and bool(((np.abs(one - other).max(axis=-1) > 48).sum(axis=(1, 2)) <= few).all())


@functools.cache
def drawn(name):
    return PICTURES[name]()


@functools.cache
def in_notebooks():
    """The pictures that are outputs of the notebooks, by their description."""
    cells = [cell for path in build.FOLDER.rglob("*.ipynb") for cell in nbformat.read(path, as_version=4).cells]
    outputs = [output for cell in cells for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})]
    return {out.metadata["image/png"]["alt"]: io.BytesIO(base64.b64decode(out.data["image/png"])) for out in outputs}


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_committed_picture_is_current_and_legible(name):
    figure = drawn(name)
    svg = drawing.svg(figure)
    if name in PAGES:
        is_current = same_svg(FOLDER.joinpath(f"{name}.svg").read_text(), svg)
        assert is_current, f"figures/{name}.svg is not what its script draws: run make figures"
    else:
        figure.savefig(now := io.BytesIO(), dpi=2 * figure.dpi)
        now, committed = (frames_of(it)[0] for it in (now, in_notebooks()[figure.alt]))
        assert same_frames(now, committed), f"a chapter does not show what {name} draws: run make notebooks"
    FigureCanvasAgg(figure).draw()
    shown = set(re.findall(r"<!-- (.*?) -->", svg, re.DOTALL))  # not the labels of ticks beyond the axis
    labels = [label for label in figure.findobj(Text) if label.get_text() in shown and label.get_visible()]
    assert len(labels) > 10
    assert_legible(figure, labels)
    colours = [colour in svg.upper() for colour in BLOCK_COLOURS]
    assert all(colours[: SHOWS_BLOCKS[name]]) if name in SHOWS_BLOCKS else not any(colours)
    root = ElementTree.fromstring(svg)  # its description, for a reader who opens or embeds it
    (description,) = root.findall("{http://www.w3.org/2000/svg}desc")
    assert description.text == figure.alt
    assert len(figure.alt) > 100
    assert (root.get("role"), root.get("aria-labelledby")) == ("img", description.get("id"))


@pytest.mark.slow
def test_the_committed_animation_is_what_its_script_draws(tmp_path):
    kv_rotation.save_gif(tmp_path)
    (now, times), (committed, shown) = (frames_of(folder / "kv_rotation.gif") for folder in (tmp_path, FOLDER))
    assert times == shown
    assert same_frames(now, committed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_picture_is_legible_on_a_phone(name):
    figure = NARROW[name].draw(narrow=True)
    FigureCanvasAgg(figure).draw()
    assert_legible(figure, [label for label in figure.findobj(Text) if label.get_text() and label.get_visible()])
    assert figure.bbox.width <= 500  # shown 358 pixels wide: letters of 14.5 pixels are 10 or more


def test_comparison_sees_a_colour_a_number_and_a_word_change():
    svg = FOLDER.joinpath("message_order.svg").read_text()
    assert same_svg(svg, re.sub(r"(\d+\.\d\d)\d{3,}", r"\1", svg))  # coordinates cut to hundredths
    changes = [(BLOCK_COLOURS[2].lower(), BLOCK_COLOURS[3].lower()), ("<!-- rank 0 -->", "<!-- rank 1 -->")]
    glyphs = re.findall(r"#DejaVuSans-\w+", svg)  # what is drawn, whatever the comment says
    for old, new in (*changes, (glyphs[-1], "#DejaVuSans-31")):
        assert old in svg
        assert not same_svg(svg, svg.replace(old, new, 1))
    frames, _ = frames_of(FOLDER / "kv_rotation.gif")
    wrong = frames.copy()
    wrong[3, 60:68, 60:66] = 0  # about one digit, in one frame
    assert same_frames(frames, np.clip(frames + 3, 0, 255))
    assert not same_frames(frames, wrong)


def test_a_notebook_shows_a_picture_sharp_and_with_its_words():
    with mock.patch("IPython.display.display") as shown:
        drawing.canvas(120, 50, "words")[0]._ipython_display_()
    (data,), options = shown.call_args
    assert options == {"metadata": {"image/png": {"width": 120, "alt": "words"}}, "raw": True}
    assert (Image.open(io.BytesIO(data["image/png"])).size, data["text/plain"]) == ((240, 100), "words")


def test_every_picture_is_shown_and_every_shown_picture_is_there():
    """A page shows an SVG, or a chapter draws the picture."""
    assert {path.name for path in FOLDER.glob("*.svg")} == {f"{name}.svg" for name in PAGES}
    pages = [
        path for folder in ("", "docs", "bench", "book/pages", "notebooks") for path in (ROOT / folder).glob("*.md")
    ]
    text = "".join(path.read_text() for path in [*pages, *build.chapters()])
    shown = set(re.findall(r"figures/(\w+)\.(?:svg|gif)", text))
    assert shown == PAGES.keys()
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "draw_all", "shapes", "simulated"}
    assert {draw.__module__.removeprefix("figures.") for draw in PICTURES.values()} == scripts
    assert ink_on(BLOCK_COLOURS[0]) == "#FFFFFF"  # blue
    assert ink_on(BLOCK_COLOURS[1]) == drawing.INK  # orange
    assert drawing.colour(len(BLOCK_COLOURS) + 1) == BLOCK_COLOURS[1]


def test_the_losses_are_those_that_the_description_tells():
    right, shifted, counted = [
        token_loss.token_losses(token_loss.trained_model(), labels, at) for labels, at in token_loss.runs().values()
    ]
    assert right.max() < 0.1
    large = torch.nonzero(shifted > 1).flatten().tolist()
    assert large == [3, 7, 11, 19, 23, 27, 31]  # the ends of all pieces but the fourth, which goes on on its rank
    assert (round(shifted[large].min().item()), round(shifted.max().item())) == (6, 11)
    assert round(counted.max().item()) == 10
    assert [bool(piece.max() > 1) for piece in counted.chunk(8)] == [False, True, True, False, False, True, True, True]


# The timeline of a ring whose ranks or links differ, from the ring's own code -----------------------------------------


def even(P, computing):
    return [[computing] * P] * P


def test_a_timeline_by_hand():
    """3 ranks, computing 2 s; the hops take 1 s, 5 s (from rank 1 to 2) and 1 s. Rank 0 has no end of the slow one.

    Round 1 begins after 2 s on rank 0, 5 s on ranks 1 and 2. The hops 0 -> 1 and 2 -> 0 wait for those until 5 s, and
    end at 6 s: rank 0 begins round 2 then, ranks 1 and 2 after 10 s.
    """
    events = simulate_timeline(even(3, 2), [1, 5, 1])
    begins = {(it.round, it.rank): it.start for it in events if it.what == "compute"}
    assert [[begins[t, r] for r in range(3)] for t in range(3)] == [[0, 0, 0], [2, 5, 5], [6, 10, 10]]
    waits = {(it.round, it.rank): (it.start, it.end) for it in events if it.what == "wait"}
    assert waits == {(0, 1): (2, 5), (0, 2): (2, 5), (1, 0): (4, 6), (1, 1): (7, 10), (1, 2): (7, 10)}
    assert duration(events) == 12


@given(st.integers(0, 20), st.lists(st.integers(0, 20), min_size=1, max_size=9))  # whole seconds: no rounding
def test_the_slowest_hop_rules_ranks_that_are_alike(computing, hops):
    P = len(hops)
    assert duration(simulate_timeline(even(P, computing), hops)) == ring_seconds(P, computing, max(hops))


def test_a_block_that_takes_no_time_leaves_no_event_but_travels_on():
    """Contiguous and causal: rank 0 computes nothing of block 1."""
    events = simulate_timeline([[1, 1], [0, 2]], [3, 3])
    assert [(it.rank, it.round, it.block) for it in events if it.what == "compute"] == [(0, 0, 0), (1, 0, 1), (1, 1, 0)]
    assert [(it.rank, it.end) for it in events if it.what == "send"] == [(0, 3), (1, 3)]
    assert duration(events) == 5
    assert duration(simulate_timeline([[0]], [7])) == 0
