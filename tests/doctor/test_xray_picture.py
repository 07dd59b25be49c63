"""The picture of an X-ray: legible, described, the same in every run, and wrong tiles framed with a word."""

import functools
import runpy
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from ring_doctor.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.paper_ring import RIGHT, compute
from ring_doctor.xray import cases, on_paper, xray_of
from ring_doctor.xray_picture import picture, svg
from ringlab.support import drawing
from tests.pictures import assert_legible

SICK = {
    "a right ring": Case(4, 16),
    "last_block_skipped": Case(4, 16),
    "own_block_twice": Case(3, 12, causal=True, layout="zigzag"),
    "gradients_travel_other_way": Case(4, 16),
    "documents_ignored": Case(3, 12, causal=True, documents=(5, 7)),
    "running_half": Case(5, 20),
    "dk_dv_exchanged": Case(3, 13, causal=True),
}


@functools.cache
def sick(name):
    return on_paper(SICK[name], CATALOGUE[name].variants[0](RIGHT) if name in CATALOGUE else RIGHT)


def texts(figure):
    return [label for label in figure.findobj(Text) if label.get_text()]


def words(figure):
    return [label.get_text() for label in texts(figure)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_every_label_is_legible_and_every_wrong_tile_has_one(name):
    xray = sick(name)
    figure = picture(xray, name)
    FigureCanvasAgg(figure).draw()
    assert_legible(figure, texts(figure))
    wrong = [tile for matrix in xray.matrices for tile in matrix.wrong]
    assert all({tile.kind, tile.label} & set(words(figure)) for tile in wrong)
    assert len(words(figure)) - len(wrong) == 2 + 4 * 2 + 2 + xray.case.world_size * (
        6 + 2
    )  # titles, heads, KV and rank


def test_words_say_which_matrix_is_right():
    shown = words(picture(sick("gradients_travel_other_way")))
    assert "read from out: right" in shown
    assert "read from dV: 8 of 16 tiles wrong" in shown
    assert "read from dK: follows from these weights" in words(picture(sick("running_half")))


def test_svg_is_the_same_in_every_run_and_is_described():
    xray = sick("last_block_skipped")
    text = svg(xray)
    assert text == svg(xray)
    assert "<desc" in text
    assert "4 of 16 tiles are wrong: 4 missing. First in round 3 on every rank." in text


def image(figure, at):
    """One panel's cells (S, S, 3), from the middle of each."""
    cells = np.asarray(figure.axes[0].images[at].get_array())
    return cells[8::16, 8::16]


def test_cells_have_the_colour_of_their_block_or_of_the_block_whose_content_they_hold():
    figure = picture(sick("gradients_travel_other_way"))
    forward, right, backward = (image(figure, at) for at in (0, 2, 1))
    assert np.allclose(forward, right, atol=1e-6)
    strongest = np.array([to_rgb(drawing.colour(block)) for block in range(4)])
    held = [[0, 3, 2, 1], [2, 1, 0, 3], [0, 3, 2, 1], [2, 1, 0, 3]]
    for rank in range(4):
        for block in range(4):
            tile = (slice(4 * rank, 4 * rank + 4), slice(4 * block, 4 * block + 4))
            page, full = np.array(to_rgb(drawing.CARD)), strongest[held[rank][block]]
            share = (backward[tile] - page) / (full - page)  # the same for red, green and blue
            assert np.allclose(share, share[:, :, :1], atol=1e-6), (rank, block)
            assert share.min() > 0.1
            assert share.max() <= 1 + 1e-6


def test_what_is_missing_is_empty_and_what_leaks_is_not():
    figure, card = picture(sick("last_block_skipped")), to_rgb(drawing.CARD)
    empty = (image(figure, 0) == card).all(axis=2)
    rank, block = np.arange(16)[:, None] // 4, np.arange(16) // 4
    assert np.array_equal(empty, (rank - block) % 4 == 3)
    leaking = (image(picture(sick("documents_ignored")), 0) != card).any(axis=2)
    assert np.array_equal(leaking, np.tri(12, dtype=bool))


def test_a_forward_pass_alone_and_numbers_that_are_not_finite():
    case = Case(1, 4)
    run_1, run_2 = (compute(run) for run in cases(case))
    alone = xray_of({}, {"out": run_2["out"]}, case)
    assert "read from dQ: right" not in words(picture(alone))
    assert len(picture(alone).axes[0].images) == 2
    broken = xray_of(run_1 | {"dv": run_1["dv"] * torch.nan}, run_2, case)
    assert "NaN" in words(picture(broken))


def test_pictures_need_no_ipython():
    with mock.patch.dict(sys.modules, {"IPython": None, "IPython.display": None}):
        names = runpy.run_path(Path(drawing.__file__))
    assert names["canvas"](100, 100, "nothing")[0].alt == "nothing"
