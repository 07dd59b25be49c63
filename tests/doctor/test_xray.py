"""The X-ray of right rings is right, and the tiles of wrong ones say what was planted."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from ring_doctor.asking.case import SIZES, Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining.tiles import Sheet, likeliest
from ring_doctor.explaining.xray import cases, on_paper, xray_of
from ring_doctor.explaining.xray_picture import picture, svg
from ring_doctor.mistakes.paper_ring import RIGHT, compute
from ringlab.support import drawing
from tests.attention import NAMES, gradients
from tests.commands import assert_legible


def xray(case, counts=None, change=lambda results: results):
    """Of full attention that counts pair (i, j) counts[i, j] times; the results of both runs are changed."""

    def attention(q, k, v):
        scale = q.shape[3] ** -0.5 if case.scale is None else case.scale
        weights = (case.visible() if counts is None else counts) * (scale * q @ k.mT).exp()
        sums = weights.sum(dim=-1, keepdim=True)
        return weights / (sums + (sums == 0)) @ v

    runs = [dict(zip(NAMES, gradients(attention, *run.whole()), strict=True)) for run in cases(case)]
    return xray_of(*map(change, runs), case)


@pytest.mark.parametrize("seq_len", [8, 20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probes_are_stored_exactly_and_no_weight_is_tiny(seq_len, dtype):
    exact, stored = ([run.whole() for run in cases(Case(1, seq_len, dtype=of))] for of in (torch.float64, dtype))
    for run in (0, 1):
        assert all(torch.equal(x, y.double()) for x, y in zip(exact[run], stored[run], strict=True))
    (q, k, v, d_out), (other_q, other_k, other_v, other_d_out) = exact
    weights = (q @ k.mT / seq_len**0.5).softmax(dim=-1)
    assert weights.min() > 0.1 / seq_len
    assert (weights.sort(dim=-1).values.diff() > 0).all(), "two weights of a row are alike"
    assert torch.equal(q @ k.mT, other_q @ other_k.mT)
    assert torch.equal(d_out @ v.mT, other_d_out @ other_v.mT)


def local(case, rank, block, shape):
    """A mask (S, S) that is right but in one tile, where it is `shape` of the tile's (query, key) numbers."""
    seen = case.visible().clone()
    rows, columns = case.positions(rank), case.positions(block)
    query, key = torch.arange(len(rows))[:, None], torch.arange(len(columns))
    seen[rows[:, None], columns] = shape(query, key).expand(len(rows), len(columns))
    return seen


def times(case, t, n):
    """The block of round t counts n times, on each rank."""
    counts = case.visible().double()
    for rank in range(case.world_size):
        counts[case.positions(rank)[:, None], case.positions((rank - t) % case.world_size)] *= n
    return xray(case, counts)


def keys_times(case, keys, n):
    """As a text that joins in every round, or chunks that overlap."""
    counts = case.visible().double()
    counts[:, keys] *= n
    return xray(case, counts)


def where(case, *at, to):
    """The pairs in these places are seen, or not, or so often."""
    counts = case.visible().double()
    for rows, columns in at:
        counts[rows, columns] = to
    return xray(case, counts)


def masked(layout, *tile):
    case = Case(4, 16, causal=True, layout=layout)
    return xray(case, local(case, *tile))


def scaled(case, c):
    return on_paper(case, replace(RIGHT, scale=lambda case: c * RIGHT.scale(case)))


def only_far(case, *at):
    return RIGHT.sees(case, *at) & torch.tensor(at[0] != at[1])


def changed(case, result, change):
    return xray(case, change=lambda results: results | {result: change(results[result])})


def a_run(case, first, second, change=lambda results: results):
    """Of two runs what both passes, or one of them, gave."""
    runs = [compute(run) for run in cases(case)]
    return xray_of({name: change(runs[0][name]) for name in first}, {name: runs[1][name] for name in second}, case)


def sized(layout, change=lambda x, sizes: x):
    """The values of rank r are 4^r times larger, and come back as `change` says."""
    case = Case(3, 12, True, layout)
    sizes = case.sizes()
    weights = compute(replace(cases(case)[1], inputs=SIZES))["out"] / sizes
    return xray_of({}, {"out": change(weights, sizes)}, replace(case, inputs=SIZES))


FULL, CAUSAL, ZIGZAG = Case(3, 12), Case(3, 12, True), Case(4, 16, True, "zigzag")
DOCUMENTS = Case(3, 12, causal=True, documents=(5, 7))
RIGHT_CASES = [replace(CAUSAL, layout="zigzag"), Case(1, 4, causal=True), Case(3, 13, causal=True)]
RIGHT_CASES += [Case(4, 4, causal=True, layout="striped"), Case(3, 12, documents=(5, 1, 6), layout="zigzag")]
RIGHT_CASES += [Case(3, 12, head_dim=16, scale=0.7)]
MASKS = [  # a tile, of a rank and a block, and the pairs in it that are seen
    ("contiguous", 1, 1, lambda i, j: j < i),
    ("contiguous", 1, 1, lambda i, j: j <= i + 1),
    ("contiguous", 2, 2, lambda i, j: j >= i),
    ("contiguous", 2, 1, lambda i, j: j <= i),
    ("contiguous", 1, 2, lambda i, j: j <= i),
    ("contiguous", 2, 1, lambda i, j: (j != 0) | (i != 3)),
    ("zigzag", 2, 1, lambda i, j: j > 1),
    ("zigzag", 1, 2, lambda i, j: i < 2),
    ("striped", 1, 2, lambda i, j: j <= i),
]
GRADIENTS = {  # of dk or dv
    "rolled by a block": lambda x: x.roll(4, dims=2),
    "rolled in each row": lambda x: x.roll(1, dims=3),
    "NaN": lambda x: x * torch.nan,
    **{f"times {n}": lambda x, n=n: n * x for n in (2, 2.02, 1.98, 1e-3, 1e-9)},
}
XRAYS = {
    **{f"right: {case.words()}, {case.head_dim}": lambda case=case: on_paper(case) for case in RIGHT_CASES},
    **{
        f"right in float32: {case.words()}, {case.head_dim}": lambda case=case: xray(
            case, change=lambda results: {name: x.float() for name, x in results.items()}
        )
        for case in RIGHT_CASES
    },
    **{
        f"round {t} counts {n} times: {case.words()}": lambda case=case, t=t, n=n: times(case, t, n)
        for case in (FULL, CAUSAL)
        for t in range(case.world_size)
        for n in (0, 2)
    },
    **{f"mask {i}: {mask[:3]}": lambda mask=mask: masked(*mask) for i, mask in enumerate(MASKS)},
    "a document leaks": lambda: where(DOCUMENTS, (6, 3), (5, slice(5)), (slice(6, 8), 4), to=1),
    "out times 3": lambda: changed(FULL, "out", lambda x: 3 * x),
    "out times 3, causal": lambda: changed(CAUSAL, "out", lambda x: 3 * x),
    **{
        name: lambda name=name: on_paper(FULL, CATALOGUE[name].variants[0](RIGHT))
        for name in ("averages_added", "averages_averaged", "running_half")
    },
    **{
        f"keys {keys} count {n} times: {case.words()}": lambda case=case, keys=keys, n=n: keys_times(case, keys, n)
        for case in (FULL, ZIGZAG)
        for keys, n in (([0, 4, 8], 3), ([3, 4], 2), ([3, 4], 0.5))
    },
    **{
        f"scores times {c}: {case.words()}": lambda case=case, c=c: scaled(case, c)
        for case in (ZIGZAG, replace(CAUSAL, scale=0.3))
        for c in (0.82, -1.0)
    },
    "no own block": lambda: on_paper(FULL, replace(RIGHT, sees=only_far)),
    **{
        f"{result} {name}": lambda result=result, change=change: changed(Case(4, 16), result, change)
        for result in ("dk", "dv")
        for name, change in GRADIENTS.items()
    },
    "twice for some queries": lambda: where(FULL, (slice(4, 6), slice(4)), to=2),
    "a tile is missing": lambda: where(CAUSAL, (slice(8, 12), slice(4, 8)), to=0),
    "out alone": lambda: a_run(Case(1, 4), (), ("out",)),
    "the first run alone": lambda: a_run(Case(1, 4), ("out", "dq", "dk", "dv"), ()),
    "a run that is NaN": lambda: a_run(Case(1, 4), ("dq", "dv"), ("out", "dk"), lambda x: x * torch.nan),
    **{f"sizes: {layout}": lambda layout=layout: sized(layout) for layout in ("contiguous", "zigzag")},
    **{
        f"two ranks scale a block: {layout}": lambda layout=layout: sized(layout, lambda x, n: x * n[:, None] / n)
        for layout in ("contiguous", "zigzag")
    },
}
SHOWN = Path(__file__).with_name("xrays.txt")  # python -m tests.doctor.test_xray writes it


def shown(name):
    """An X-ray as text, what is told of it, and the sums of its weights where they are told."""
    x = XRAYS[name]()
    sums = [f"sums: {', '.join(f'{n:.3g}' for n in it.sums)}" for it in x.matrices if it.sums is not None]
    return "\n".join([f"== {name}", x.text(), *sums]) + "\n\n"


@pytest.mark.parametrize("name", XRAYS)
def test_an_xray_shows_what_was_planted_and_all_else_as_right(name):
    found = shown(name)
    assert found in SHOWN.read_text()
    assert not name.startswith(("right", "sizes")) or all(line.endswith(": right.") for line in found.split("\n")[1:-2])


@pytest.mark.parametrize(
    ("size", "words"), [(1.9, "a triangle of later keys instead of all pairs"), (2.1, "2 pairs too few")]
)
def test_a_number_near_0_says_nothing_of_its_pair(size, words):
    """Rounding allows 1e-6. A right number of up to twice as much may be seen as 0 though its pair is visible."""
    full = torch.tensor([[1.0, size * 1e-6], [1.0, 1.0]], dtype=torch.float64)
    seen = torch.tensor([[1.0, (size - 0.95) * 1e-6], [0.0, 1.0]], dtype=torch.float64)
    seen[0, 1] = seen[0, 1].clamp(max=1e-6)
    allowed = torch.full((2, 2), 1e-6, dtype=torch.float64)
    [tile] = likeliest([Sheet((2,), seen, full, torch.ones(2, 2, dtype=torch.bool), allowed)])
    assert tile.words == words


SICK = {
    "last_block_skipped": Case(4, 16),
    "gradients_travel_other_way": Case(4, 16),
    "running_half": Case(5, 20),
    "dk_dv_exchanged": Case(3, 13, causal=True),
}


@functools.cache
def sick(name):
    return on_paper(SICK[name], CATALOGUE[name].variants[0](RIGHT))


def words(figure):
    return [label.get_text() for label in figure.findobj(Text) if label.get_text()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["last_block_skipped", "running_half", "dk_dv_exchanged"])
def test_every_label_is_legible_and_every_wrong_tile_has_one(name):
    xray = sick(name)
    figure = picture(xray, name)
    FigureCanvasAgg(figure).draw()
    assert_legible(figure, [label for label in figure.findobj(Text) if label.get_text()])
    wrong = [tile for matrix in xray.matrices for tile in matrix.wrong]
    assert all({tile.kind, tile.label} & set(words(figure)) for tile in wrong)
    titles, heads, of_ranks = 2, 4 * 2 + 2, 6 + 2
    assert len(words(figure)) - len(wrong) == titles + heads + xray.case.world_size * of_ranks


def test_words_say_which_matrix_is_right_and_the_svg_is_the_same_in_every_run():
    shown = words(picture(sick("gradients_travel_other_way")))
    assert {"read from out: right", "read from dV: 8 of 16 tiles wrong"} <= set(shown)
    assert "read from dK: follows from these weights" in words(picture(sick("running_half")))
    text = svg(sick("last_block_skipped"))
    assert text == svg(sick("last_block_skipped"))
    assert "<desc" in text
    assert "W forward, weights of the forward pass (out): round 3 on every rank: missing." in text


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


def test_a_picture_of_a_forward_pass_alone_and_of_numbers_that_are_not_finite():
    alone = picture(XRAYS["out alone"]())
    assert "read from dQ: right" not in words(alone)
    assert len(alone.axes[0].images) == 2
    assert "NaN" in words(picture(XRAYS["a run that is NaN"]()))
    matrix = on_paper(FULL).matrices[0]
    assert matrix.ok
    matrix.sheet.seen[0, 1] = torch.nan
    assert not matrix.ok
    assert "the numbers of two ranks" in str(XRAYS["two ranks scale a block: zigzag"]().facts()[0])


if __name__ == "__main__":
    SHOWN.write_text("".join(map(shown, XRAYS)))
