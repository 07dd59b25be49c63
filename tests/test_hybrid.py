"""The hybrid against full attention in float64 on every mesh; its masks of rows, bytes, input, mistakes."""

import functools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from ringlab.training.hybrid import hybrid_attention, joined_rows
from ringlab.training.layouts import LAYOUTS, shard, unshard
from ringlab.training.masks import Mask, covered
from ringlab.training.split_heads import heads_of_ranks
from tests.attention import DTYPES, SEED
from tests.exchanges import Case, assert_cases
from tests.flash_rings import CASES
from tests.gradients import gradcheck_on_ranks, gradients
from tests.grouped_queries import assert_four, expected, grouped_inputs
from tests.masked import dense
from tests.refusals import all_of, refusal

ZIGZAG = {"causal": True, "layout": "zigzag"}
MESHES = [(1, 1), (2, 1), (1, 3), (2, 2), (5, 1), (3, 2), (2, 3), (4, 2), (2, 4), (1, 8)]  # rows x ranks of a row
HEADS = [(8, 2), (10, 2)]  # 10 on 2 for 3 ranks: in runs


@pytest.mark.parametrize(("rows", "inside"), MESHES)
def test_any_mesh_in_every_layout(ranks, rows, inside):
    P = rows * inside
    some = [(heads, dict(zip(("causal", "layout"), case, strict=True))) for heads in HEADS for case in CASES[2:]]
    assert_cases(ranks, P, [Case(*heads, 4 * P, options) for heads, options in some], rows)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_other_dtypes_and_scales(ranks, dtype):
    striped = {**ZIGZAG, "layout": "striped"}
    some = [{}, ZIGZAG, striped, {**striped, "scale": -0.4}, {**ZIGZAG, "scale": 0.0}]
    assert_cases(ranks, 4, [Case(4, 1, 48, options, dtype=dtype, batch=2, head_dim=16) for options in some], 2)


@settings(max_examples=10)
@given(data=st.data())
def test_any_mesh_heads_lengths_layout_and_scale(ranks, data):
    rows, inside = data.draw(st.sampled_from(MESHES), label="mesh")
    G = data.draw(st.integers(1, 5), label="G")
    H = G * data.draw(st.integers(-(-inside // G), 5 + inside), label="H/G")
    causal, layout = data.draw(st.sampled_from(CASES), label="causal, layout")
    P, lengths = rows * inside, None
    if layout == "contiguous":
        lengths = data.draw(st.lists(st.integers(1, 9), min_size=P, max_size=P), label="lengths")
    S = sum(lengths) if lengths else (1 + (layout == "zigzag")) * P * data.draw(st.integers(1, 4), label="tokens")
    options = {
        "causal": causal,
        "layout": layout,
        "scale": data.draw(st.sampled_from([None, 1.0, -0.5]), label="scale"),
    }
    assert_cases(ranks, P, [Case(H, G, S, options, lengths, seed=data.draw(st.integers(0, 99)) + SEED)], rows)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "inside"), MESHES)
def test_the_pieces_of_rows_are_the_mask(rows, inside, layout, causal):
    P = rows * inside
    lengths = [3, 1, 4, 1, 5, 9, 2, 6][:P] if layout == "contiguous" else [2] * P
    flat = Mask(layout, tuple(lengths), causal)
    joined, everywhere = joined_rows(flat, rows), torch.arange(flat.seq_len)
    for row in range(rows):
        held = torch.cat([flat.place(rank) for rank in range(row * inside, (row + 1) * inside)])
        assert torch.equal(joined.place(row), held.sort().values)
    assert torch.equal(covered(joined), dense(flat, everywhere, everywhere).long())
    assert joined.hops == rows - 1


def test_stripes_of_one_token_have_no_empty_piece():
    joined = joined_rows(Mask("striped", (1,) * 6, causal=True), 3)
    assert joined.pieces(0, 1) == ()
    assert len(joined.pieces(1, 0)) == 4


def of_a_part(context, four):
    """Two meshes of 2 x 2 in a job of 8: the ranks with an even number, and the others."""
    mesh = init_device_mesh(context.device.type, (2, 2, 2), mesh_dim_names=("across", "inside", "other"))
    rank = context.rank // 2
    mine = [shard(x, "striped", rank, 4) for x in four[context.rank % 2]]
    attention = functools.partial(hybrid_attention, mesh=mesh["across", "inside"], causal=True, layout="striped")
    return gradients(attention, *mine)


def test_two_meshes_of_a_job_at_the_same_time(ranks):
    inputs = [grouped_inputs(1, 4, 2, 24, 8, seed=seed) for seed in range(2)]
    per_rank = ranks(8, of_a_part, inputs)
    for part, four in enumerate(inputs):
        mine = [unshard(list(chunks), "striped") for chunks in zip(*per_rank[part::2], strict=True)]
        assert_four(mine, expected(*four, causal=True))


def gradcheck(context, q, k, v):
    attention = functools.partial(hybrid_attention, mesh=init_device_mesh("cpu", (2, 2)), causal=True, layout="striped")
    return gradcheck_on_ranks(context, attention, "striped", q, k, v)


def test_gradcheck(ranks):
    assert ranks(4, gradcheck, *grouped_inputs(1, 2, 1, 4, 1, torch.float64)[:3]) == [True] * 4


# Bytes ----------------------------------------------------------------------------------------------------------------


def ring_bytes(context, rows, four):
    """The bytes that this rank sends to the next row in the forward pass, and in both passes."""
    q, k, v, d_out = (shard(x, "zigzag", context.rank, context.world_size) for x in four)
    sent, batch = [], dist.batch_isend_irecv

    def counted(operations):
        sent.extend(it.tensor.nbytes for it in operations if it.op is dist.isend)
        return batch(operations)

    mesh = init_device_mesh(context.device.type, (rows, context.world_size // rows))
    with mock.patch.object(dist, "batch_isend_irecv", counted):
        out = hybrid_attention(*(x.requires_grad_() for x in (q, k, v)), mesh=mesh, **ZIGZAG)
        forward = sum(sent)
        out.backward(d_out)
    return forward, sum(sent)


@pytest.mark.parametrize(("rows", "inside", "heads", "kv_heads"), [(2, 2, 4, 2), (3, 2, 6, 1), (2, 3, 10, 2)])
def test_bytes_between_rows_are_those_of_the_formula(ranks, rows, inside, heads, kv_heads):
    P, C, D = rows * inside, 4, 3
    four = grouped_inputs(1, heads, kv_heads, C * P, D, torch.bfloat16)
    _, keys = heads_of_ranks(heads, kv_heads, inside)
    for rank, sent in enumerate(ranks(P, ring_bytes, rows, four)):
        need = keys[rank % inside]
        block = 2 * (need.stop - need.start) * inside * C * D  # numbers
        hops = (rows - 1) * block
        assert sent == (2 * hops, 2 * hops + 2 * hops + 4 * rows * block)  # K and V twice; their gradients in float32


# Mistakes and bad input -----------------------------------------------------------------------------------------------

STRIPED = {**ZIGZAG, "layout": "striped"}
SHOWS = {  # the mistake: heads of q, heads of k and v, rows, ranks, and options with which it shows
    "heads of out transposed": (4, 2, 2, 4, {}),
    "K/V head r mod G": (8, 2, 2, 8, {}),
    "a copy's gradient counted twice": (4, 1, 2, 4, {}),
    "gradients of copies not added": (4, 1, 2, 4, {}),
    "the layout is not undone": (4, 2, 2, 4, ZIGZAG),
    "back to the wrong ranks": (4, 2, 2, 4, {}),
    "rows taken for ranks": (4, 2, 2, 4, STRIPED),
    "the mask of contiguous rows": (4, 2, 2, 4, ZIGZAG),
}


@pytest.mark.parametrize("wrong", SHOWS)
def test_a_wrong_hybrid_is_rejected(ranks, wrong):
    heads, kv_heads, rows, size, options = SHOWS[wrong]
    assert_cases(ranks, size, [Case(heads, kv_heads, 48, options)], rows)
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_cases(ranks, size, [Case(heads, kv_heads, 48, options, wrong=wrong)], rows)


def refused(context, shape, heads, options_of_ranks):
    mesh = init_device_mesh(context.device.type, shape) if shape else None
    x = torch.ones(1, heads, 4, 2)
    with mock.patch("ringlab.training.all_to_all.swap", side_effect=AssertionError("heads travel")):
        hybrid_attention(x, x, x, mesh=mesh, **options_of_ranks[context.rank])


@pytest.mark.parametrize(
    ("shape", "heads", "options", "words"),
    [
        ((1, 4), 2, {}, ["among 4 ranks, and 2 query heads", "of 2 x 2, 4 x 1"]),
        ((4,), 4, {}, ["mesh is a mesh of shape (4,)", "2 dimensions", "all-to-all inside: 1 x 4, 2 x 2, 4 x 1"]),
        ((2, 2, 1), 2, {}, ["mesh is a mesh of shape (2, 2, 1)", "2 dimensions", "inside: 2 x 2, 4 x 1"]),
        (None, 4, {}, ["mesh is None", "2 dimensions"]),
        ((2, 2), 4, {"layout": "spiral"}, ["layout is 'spiral'"]),
        ((2, 2), 4, {"scale": float("nan")}, ["scale is nan"]),
    ],
    ids=["heads", "one dimension", "three", "no mesh", "layout", "scale"],
)
def test_what_does_not_fit_is_refused_on_every_rank(ranks, shape, heads, options, words):
    assert re.search(all_of(words), refusal(ranks.outcomes(4, refused, shape, heads, [options] * 4)))


@pytest.mark.parametrize("other", [{"causal": True}, {"layout": "striped"}, {"scale": 0.5}])
def test_ranks_that_disagree_are_refused(ranks, other):
    message = refusal(ranks.outcomes(4, refused, (2, 2), 4, [{}, {}, {}, other]))
    (name,) = other
    assert re.match(
        all_of(["the ranks disagree", "rank 0: ", f"{name}=", "rank 3: ", f"{name}={other[name]}"]), message
    )
