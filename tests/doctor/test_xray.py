"""The X-ray of right rings is right, and the tiles of wrong ones say what was planted."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from ring_doctor.asking.case import SIZES, Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining.grids import TITLES
from ring_doctor.explaining.tiles import Sheet, likeliest
from ring_doctor.explaining.xray import cases, on_paper, xray_of
from ring_doctor.explaining.xray_picture import picture, svg
from ring_doctor.mistakes.paper_ring import RIGHT, compute
from ringlab.support import drawing
from tests.attention import NAMES, gradients
from tests.commands import assert_legible
from tests.every_way import CASES

W = ("W forward", "W backward")
KEYS = "the last half of the keys instead of the first half of the keys"
QUERIES = "the first half of the queries instead of the last half of the queries"


def xray(case, counts=None, change=lambda results: results):
    """Of full attention that counts pair (i, j) counts[i, j] times; the results of both runs are changed."""

    def attention(q, k, v):
        scale = q.shape[3] ** -0.5 if case.scale is None else case.scale
        weights = (case.visible() if counts is None else counts) * (scale * q @ k.mT).exp()
        sums = weights.sum(dim=-1, keepdim=True)
        return weights / (sums + (sums == 0)) @ v

    runs = [dict(zip(NAMES, gradients(attention, *run.whole()), strict=True)) for run in cases(case)]
    return xray_of(*map(change, runs), case)


def kinds(xray, name, what="kind"):
    """The tiles of a matrix, a list for each rank."""
    tiles = next(matrix.tiles for matrix in xray.matrices if matrix.name == name)
    P = xray.case.world_size
    return [[getattr(tile, what) for tile in tiles[rank * P : rank * P + P]] for rank in range(P)]


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


RIGHT_CASES = [
    Case(3, 12, causal=True, layout="zigzag"),
    Case(1, 4, causal=True),
    Case(3, 13, causal=True),  # 5, 4 and 4 tokens
    Case(4, 4, causal=True, layout="striped"),
    Case(3, 12, documents=(5, 1, 6), layout="zigzag"),
    Case(3, 12, head_dim=16, scale=0.7),
]


@pytest.mark.parametrize("case", RIGHT_CASES, ids=str)
def test_a_right_ring_shows_right_matrices_though_a_patient_may_compute_in_float32(case):
    single = xray(case, change=lambda results: {name: x.float() for name, x in results.items()})
    for x in (on_paper(case), single):
        assert [matrix.name for matrix in x.matrices] == list(TITLES)
        assert x.right, x.text()
        assert all(tile.kind == "ok" for matrix in x.matrices for tile in matrix.tiles)


@pytest.mark.parametrize(("size", "causal", "layout"), [(3, *CASES[0]), (3, True, "zigzag"), (2, *CASES[0])])
@pytest.mark.parametrize(("times", "kind"), [(0, "missing"), (2, "twice")])
def test_a_block_that_counts_no_or_two_times(size, causal, layout, times, kind):
    """The softmax changes all weights of the row; no other tile may look wrong for it."""
    case = Case(size, 4 * size, causal, layout)
    for t in range(size):
        counts = case.visible().double()
        for rank in range(size):
            counts[case.positions(rank)[:, None], case.positions((rank - t) % size)] *= times
        x = xray(case, counts)
        for name in TITLES:
            for rank, row in enumerate(kinds(x, name)):
                seen = case.visible()[case.positions(rank)]
                of_tiles = [seen[:, case.positions(block)].sum(dim=1) for block in range(size)]
                for block, found in enumerate(row):
                    changes = (rank - block) % size == t and bool(of_tiles[block].any())
                    only = torch.equal(of_tiles[block], seen.sum(dim=1))
                    if times == 2 and only:
                        changes = False  # twice all weights of a row: the softmax is the same
                    assert found == (kind if changes else "ok"), (name, rank, block, x.text())


def local(case, rank, block, shape):
    """A mask (S, S) that is right but in one tile, where it is `shape` of the tile's (query, key) numbers."""
    seen = case.visible().clone()
    rows, columns = case.positions(rank), case.positions(block)
    query, key = torch.arange(len(rows))[:, None], torch.arange(len(columns))
    seen[rows[:, None], columns] = shape(query, key).expand(len(rows), len(columns))
    return seen


@pytest.mark.parametrize(
    ("layout", "rank", "block", "shape", "kind", "words"),
    [
        ("contiguous", 1, 1, lambda i, j: j < i, "mask", "a triangle without its diagonal instead of a triangle"),
        ("contiguous", 1, 1, lambda i, j: j <= i + 1, "mask", "a triangle and the next key instead of a triangle"),
        ("contiguous", 2, 2, lambda i, j: j >= i, "mask", "a triangle of later keys instead of a triangle"),
        ("contiguous", 2, 1, lambda i, j: j <= i, "mask", "a triangle instead of all pairs"),
        ("contiguous", 1, 2, lambda i, j: j <= i, "foreign", "10 pairs behind the mask, a triangle"),
        ("contiguous", 2, 1, lambda i, j: (j != 0) | (i != 3), "mask", "1 pair too few"),
        ("zigzag", 2, 1, lambda i, j: j > 1, "mask", KEYS),
        ("zigzag", 1, 2, lambda i, j: i < 2, "mask", QUERIES),
        ("striped", 1, 2, lambda i, j: j <= i, "mask", "a triangle instead of a triangle without its diagonal"),
    ],
)
def test_masks_are_named_and_the_other_tiles_are_right(layout, rank, block, shape, kind, words):
    case = Case(4, 16, causal=True, layout=layout)
    x = xray(case, local(case, rank, block, shape))
    for name in W:
        wrong = [tile for matrix in x.matrices if matrix.name == name for tile in matrix.wrong]
        assert [(tile.rank, tile.block, tile.kind, tile.words) for tile in wrong] == [(rank, block, kind, words)]


def test_a_document_that_leaks():
    case = Case(3, 12, causal=True, documents=(5, 7))
    counts = case.visible().clone()
    counts[6, 3] = counts[5, :5] = True
    x = xray(case, counts)
    for name in TITLES:
        assert kinds(x, name, "label") == [["ok", "-", "-"], ["leak 5", "leak 1", "-"], ["-", "ok", "ok"]]


def test_weights_that_do_not_sum_to_one():
    """Each block's softmax by itself, all added: each query has a factor of its own in each tile."""
    case = Case(3, 12)
    x = xray(Case(3, 12, causal=True), change=lambda results: results | {"out": 3 * results["out"]})
    assert kinds(x, "W forward", "label") == [["x 3", "-", "-"], ["x 3", "x 3", "-"], ["x 3"] * 3]
    x = xray(case, change=lambda results: results | {"out": 3 * results["out"]})
    assert kinds(x, "W forward", "label") == [["x 3"] * 3] * 3
    assert torch.allclose(x.matrices[0].sums, torch.full((12,), 3.0).double())

    x = on_paper(case, CATALOGUE["averages_added"].variants[0](RIGHT))
    assert {kind for row in kinds(x, "W forward") for kind in row} == {"scaled"}
    assert "the weights of 12 of 12 queries sum to 3, not to 1" in x.matrices[0].shown
    averaged = on_paper(case, CATALOGUE["averages_averaged"].variants[0](RIGHT))
    assert {kind for row in kinds(averaged, "W forward") for kind in row} == {"scaled"}
    assert averaged.matrices[0].sums is None


@pytest.mark.parametrize("case", [Case(3, 12), Case(3, 12, True), Case(4, 16, True, "zigzag")], ids=str)
@pytest.mark.parametrize(("keys", "times"), [([0, 4, 8], 3), ([3, 4], 2), ([3, 4], 0.5)])
def test_keys_that_count_more_often(case, keys, times):
    """As a text that joins in every round, or chunks that overlap. No tile without such a key looks wrong for it."""
    counts = case.visible().double()
    counts[:, keys] *= times
    for matrix in xray(case, counts).matrices:
        assert {tile.kind for tile in matrix.tiles} <= {"ok", "keys"}, matrix.shown
        there = {tile.block for tile in matrix.tiles if tile.kind == "keys"}
        assert there == {b for b in range(case.world_size) if set(case.positions(b).tolist()) & set(keys)}
        assert all(tile.words.endswith(f" {times:g} times") for tile in matrix.wrong)


@pytest.mark.parametrize("case", [Case(3, 12), Case(4, 16, True, "zigzag"), Case(3, 12, True, scale=0.3)], ids=str)
@pytest.mark.parametrize("c", [0.82, 3.0, -1.0])
def test_scores_times_a_factor(case, c):
    x = on_paper(case, replace(RIGHT, scale=lambda case: c * RIGHT.scale(case)))
    assert [matrix.shown for matrix in x.matrices[:2]] == [[f"the scores are {c:.4g} times the right scores"]] * 2
    soft = on_paper(case, replace(RIGHT, sees=lambda case, *at: RIGHT.sees(case, *at) & torch.tensor(at[0] != at[1])))
    assert not any("scores" in line for matrix in soft.matrices for line in matrix.shown)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda dk: dk.roll(4, dims=2), ["is KV3", "is KV0", "is KV1", "is KV2"]),
        (lambda dk: dk.roll(1, dims=3), ["wrong"] * 4),
        (lambda dk: dk * torch.nan, ["NaN"] * 4),
        (lambda dk: 2 * dk, ["twice"] * 4),
        (lambda dk: 2.02 * dk, ["x 2.02"] * 4),
        (lambda dk: 1.98 * dk, ["x 1.98"] * 4),
        (lambda dk: 1e-3 * dk, ["x 0.001"] * 4),
        (lambda dk: 1e-9 * dk, ["missing"] * 4),
    ],
)
@pytest.mark.parametrize("name", ["W backward", "dS in dK"])
def test_gradients_that_are_wrong_by_themselves(name, change, expected):
    result = {"W backward": "dv", "dS in dK": "dk"}[name]
    x = xray(Case(4, 16), change=lambda results: results | {result: change(results[result])})
    assert kinds(x, name, "label") == [expected] * 4
    assert "wrong as a whole" not in x.text()
    assert all(not matrix.wrong for matrix in x.matrices if matrix.name != name)
    held = {tile.words for matrix in x.matrices for tile in matrix.wrong if tile.label.startswith("is KV")}
    assert held <= {"what belongs to KV(j + 3)"}


def test_a_tile_that_counts_twice_for_some_queries_is_not_twice():
    counts = torch.ones(12, 12)
    counts[4:6, :4] = 2
    assert kinds(xray(Case(3, 12), counts), "W forward", "label")[1] == ["x 1-2", "ok", "ok"]


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


def test_text():
    case = Case(3, 12, causal=True)
    counts = case.visible().clone()
    counts[8:, 4:8] = False
    right_weights = xray(case).text().splitlines()[0]
    assert right_weights == "W forward, weights of the forward pass (out): right."
    assert xray(case, counts).text().splitlines()[:7] == [
        "W forward, weights of the forward pass (out): 1 of 9 tiles are wrong.",
        "             KV0      KV1      KV2",
        "    rank 0   ok       -        -",
        "    rank 1   ok       ok       -",
        "    rank 2   ok       missing  ok",
        "    round 1 on rank 2: missing",
        "W backward, weights of the backward pass (dV): wrong in the same tiles in the same way as W forward.",
    ]
    after = on_paper(Case(3, 12), CATALOGUE["running_half"].variants[0](RIGHT)).text().splitlines()[-2:]
    follows = "wrong as a whole, as follows from these weights or this out."
    assert after == [f"dS in {name}, gradients of the scores ({name}): {follows}" for name in ("dQ", "dK")]


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


def test_a_forward_pass_alone_and_numbers_that_are_not_finite():
    case = Case(1, 4)
    run_1, run_2 = (compute(run) for run in cases(case))
    alone = xray_of({}, {"out": run_2["out"]}, case)
    assert [matrix.name for matrix in alone.matrices] == ["W forward"]
    assert [matrix.name for matrix in xray_of(run_1, {}, case).matrices] == ["W backward", "dS in dQ"]
    assert "read from dQ: right" not in words(picture(alone))
    assert len(picture(alone).axes[0].images) == 2
    broken = xray_of(run_1 | {"dv": run_1["dv"] * torch.nan}, run_2, case)
    assert "NaN" in words(picture(broken))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_another_size_of_v_on_each_rank_shows_a_block_that_two_ranks_scale(layout):
    """A block of keys and values of one size is right, however it is divided and multiplied by its largest number."""
    case = Case(3, 12, True, layout)
    second, sized = cases(case)[1], replace(cases(case)[1], inputs=SIZES)
    sizes = case.sizes()
    weights = compute(sized)["out"] / sizes
    assert torch.equal(weights, compute(second)["out"])
    assert all((sizes[case.positions(rank)] == 4**rank).all() for rank in range(3))
    assert xray_of({}, {"out": weights}, replace(case, inputs=SIZES)).right
    scaled = xray_of({}, {"out": weights * sizes[:, None] / sizes}, replace(case, inputs=SIZES))
    assert [tile.label for tile in scaled.matrices[0].tiles][3:5] == ["x 4", "ok"]
    assert "the numbers of two ranks" in str(scaled.facts()[0])
