"""The trainable ring's out, dq, dk and dv against full attention in float64 and against torch's own ring; its bytes."""

import functools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.against_peers import torch_loop
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.support.rounding import exact_attention
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import LAYOUTS, pad, positions, shard, unshard
from tests.attention import DTYPES, assert_attention, random_qkv
from tests.flash_rings import CASES, assert_flash, assert_large, cut, ring_gradients, whole
from tests.gradients import NAMES, gradients
from tests.grouped_queries import assert_four, expected, grouped_inputs


@pytest.mark.parametrize(("causal", "layout"), CASES)
def test_as_exact_as_torch_on_one_device(ranks, world_size, causal, layout):
    assert_large(ranks, world_size, causal, layout)


@pytest.mark.parametrize("kv_heads", [8, 4, 1])
@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "zigzag")])
def test_any_number_of_kv_heads(ranks, world_size, kv_heads, causal, layout):
    assert_large(ranks, world_size, causal, layout, (1, 8, kv_heads, 480, 32))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "zigzag")])
def test_other_dtypes(ranks, world_size, dtype, causal, layout):
    assert_large(ranks, world_size, causal, layout, dtype=dtype)


def forward_in_zigzag(context, q, k, v):
    return ring_flash_attention(*cut(context, "zigzag", None, q, k, v), causal=True, layout="zigzag")


def test_4096_tokens(ranks):
    q, k, v = random_qkv((1, 1, 4096, 64))
    out = unshard(ranks(2, forward_in_zigzag, q, k, v), "zigzag")
    assert_attention(out, q, k, v, causal=True, fused_blocks=2)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(data=st.data())
def test_any_shape_layout_dtype_and_scale(ranks, world_size, data):
    causal, layout = data.draw(st.sampled_from(CASES), label="causal, layout")
    G, repeat = (data.draw(st.integers(1, 3), label=name) for name in ("G", "H/G"))
    B, D = data.draw(st.integers(1, 2), label="B"), data.draw(st.integers(1, 7), label="D")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    scale = data.draw(st.sampled_from([None, 1.0, 0.2, -0.5, 0.0]), label="scale")
    lengths, S = None, data.draw(st.integers(1, 4), label="tokens") * world_size
    if layout == "zigzag":
        S *= 2
    elif layout == "contiguous":
        lengths = data.draw(st.lists(st.integers(1, 9), min_size=world_size, max_size=world_size), label="lengths")
        S = sum(lengths)
    q, *rest = grouped_inputs(B, G * repeat, G, S, D, dtype, seed=data.draw(st.integers(0, 999), label="seed"))
    four = [q * data.draw(st.sampled_from([1, 100]), label="times q"), *rest]  # weights spread out, or one of 1
    assert_flash(ranks, world_size, four, lengths=lengths, causal=causal, layout=layout, scale=scale)


def flash_in_parts(context, members, inputs, options):
    """Form all the groups, as every rank must, and run the ring of this rank's group, if it is in one."""
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, group, four in zip(members, groups, inputs, strict=True):
        if context.rank in ranks:
            mine = [shard(x, options["layout"], ranks.index(context.rank), len(ranks)) for x in four]
            return gradients(functools.partial(ring_flash_attention, group=group, **options), *mine)
    return None


@pytest.mark.parametrize(
    ("world_size", "members"), [(4, [[1, 3]]), (4, [[0, 2], [1, 3]]), (5, [[0, 1, 4], [2, 3]]), (3, [[2]])], ids=str
)
def test_rings_in_parts_of_a_job_at_the_same_time(ranks, world_size, members):
    inputs = [grouped_inputs(1, 4, 2, 24, 8, seed=seed) for seed in range(len(members))]
    per_rank = ranks(world_size, flash_in_parts, members, inputs, {"causal": True, "layout": "zigzag"})
    for group, four in zip(members, inputs, strict=True):
        mine = whole([per_rank[rank] for rank in group], "zigzag")
        assert_four(mine, expected(*four, causal=True))


# Against torch's own ring ---------------------------------------------------------------------------------------------


def torchs_ring(context, q, k, v, d_out, causal, layout):
    """This rank's out, dq, dk, dv by torch's context parallelism, with its CPU kernel; None where torch lacks it."""
    try:
        return torch_loop(*cut(context, layout, None, q, k, v, d_out), causal=causal, layout=layout)
    except (ImportError, AttributeError):  # a private module: it may move
        return None


# All its modes run on a CPU. It has no striped layout, and zigzag under a causal mask only.
@pytest.mark.parametrize(
    ("causal", "layout", "kv_heads"),
    [(False, "contiguous", 4), (True, "contiguous", 4), (True, "zigzag", 4), (True, "zigzag", 2)],
)
def test_against_the_ring_of_torch(ranks, world_size, causal, layout, kv_heads):
    four = grouped_inputs(1, 4, kv_heads, 240, 32)
    theirs = ranks(world_size, torchs_ring, *four, causal, layout)
    if theirs[0] is None:
        pytest.skip("this torch has no _templated_ring_attention")
    mine = ranks(world_size, ring_gradients, *four, {"causal": causal, "layout": layout})
    assert_four(whole(theirs, layout), expected(*four, causal=causal))  # so it is a right one
    assert_four(whole(mine, layout), expected(*four, causal=causal))


# Rows that see no key, and numbers that are NaN -----------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "layout"), CASES)
def test_queries_that_see_no_key_give_zeros(ranks, world_size, causal, layout):
    q, k, v, d_out = grouped_inputs(1, 4, 2, 4 * world_size, 3)
    fully_masked = [
        torch.full_like(q, 1e30),
        torch.full_like(k, -1e30),
        v,
        d_out,
    ]  # scores of -1e60 are -inf in float32
    for results in ranks(world_size, ring_gradients, *fully_masked, {"causal": causal, "layout": layout}):
        for x in results:
            assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_block_that_nobody_sees(ranks, rank, causal, layout):
    """The scores of one rank's keys are -inf in float32. In float64 their weights are 0 beside those of other keys."""
    q, k, v, d_out = grouped_inputs(1, 4, 2, 24, 4)
    k[:, :, positions(layout, 24, rank, 3)] = -3e38
    q = q.abs() + 1
    per_rank = ranks(3, ring_gradients, q, k, v, d_out, {"causal": causal, "layout": layout})
    mine = whole(per_rank, layout)
    visible = torch.ones(24, 24, dtype=torch.bool).index_fill(1, positions(layout, 24, rank, 3), False)
    right = exact_attention(q, k, v, d_out, causal=causal, visible=visible, fused_blocks=3)
    assert_four(mine, [right[name] for name in NAMES])


SEEN, HEAD, TOKEN = slice(0, 11), 1, 10  # keys that query 10 sees; query head 1 uses K/V head 0, K/V head 1 serves 2, 3
LATER = (0, slice(2, 4), slice(10, None))  # the queries that see key 10 of K/V head 1
HAS_NAN = {  # where the NaN is: where out, dq, dk and dv must have one
    "q": [(0, HEAD, TOKEN), (0, HEAD, TOKEN), (0, 0, SEEN), (0, 0, SEEN)],
    "k": [LATER, LATER, (0, 1), (0, 1)],
    "v": [LATER, LATER, (0, 1), None],
    "d_out": [None, (0, HEAD, TOKEN), (0, 0, SEEN), (0, 0, SEEN)],
}


@pytest.mark.parametrize("where", HAS_NAN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_no_number_stays_visible(ranks, where, layout):
    q, k, v, d_out = grouped_inputs(2, 4, 2, 24, 4)
    {"q": q, "k": k, "v": v, "d_out": d_out}[where][0, HEAD, TOKEN] = math.nan
    mine = whole(ranks(3, ring_gradients, q, k, v, d_out, {"causal": True, "layout": layout}), layout)
    for name, x, must in zip(NAMES, mine, HAS_NAN[where], strict=True):
        assert not x[1].isnan().any(), f"{name}: a NaN in a sequence that has none"
        assert must is None or x[must].isnan().all(), f"{name} hides a NaN"


# Bytes ----------------------------------------------------------------------------------------------------------------


def bytes_sent(context, q, k, v, d_out, options):
    """The bytes of each message that this rank sends in the forward pass, and in the backward pass."""
    q, k, v, d_out = cut(context, options["layout"], None, q, k, v, d_out)
    sent, real = [], dist.batch_isend_irecv

    def batch(operations):
        sent.append([it.tensor.nbytes for it in operations if it.op is dist.isend])
        return real(operations)

    with mock.patch.object(dist, "batch_isend_irecv", batch):
        out = ring_flash_attention(*(x.requires_grad_() for x in (q, k, v)), **options)
        forwards = list(sent)
        out.backward(d_out)
    return forwards, sent[len(forwards) :]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "layout"), [(4, "contiguous"), (1, "zigzag")])
def test_bytes_are_those_of_the_formula(ranks, world_size, dtype, kv_heads, layout):
    P, B, C, D = world_size, 2, 6, 5
    four = grouped_inputs(B, 4, kv_heads, C * P, D, dtype)
    numbers = 2 * B * kv_heads * C * D
    for forwards, backwards in ranks(P, bytes_sent, *four, {"causal": True, "layout": layout}):
        kv = [numbers // 2 * dtype.itemsize] * 2
        d_kv = [numbers * accumulation_dtype(dtype).itemsize]
        assert forwards == [kv] * (P - 1)
        expected_backwards = [kv] * (P - 1) + [d_kv] * P if P > 1 else []
        assert sorted(backwards) == sorted(expected_backwards)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_padding_on_the_right_changes_no_real_token(ranks, layout):
    real = grouped_inputs(1, 4, 2, 13, 8)
    padded = [pad(x, 6) for x in real]  # 18 tokens; the padding has no gradient to give
    mine = whole(ranks(3, ring_gradients, *padded, {"causal": True, "layout": layout}), layout)
    assert all(x.shape[2] == 18 for x in mine)
    assert all(x[:, :, 13:].count_nonzero() == 0 for x in mine[1:])
    assert_four([x[:, :, :13] for x in mine], expected(*real, causal=True))
