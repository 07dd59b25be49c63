"""The flash ring against full attention in float64, against torch's kernel and torch's own ring; and with mistakes."""

import functools
import itertools
import math
import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from basics.naive_attention import accumulation_dtype, naive_attention
from basics.ranks import neighbours
from bench.against_peers import torch_loop
from tests.attention import DTYPES, random_qkv
from tests.grouped_queries import (
    assert_four,
    expected,
    expected_of_inputs,
    full_attention,
    grouped_inputs,
    torchs_attention,
)
from tests.rings import chunks
from tests.test_backward import NAMES, Replicated, SumOfRanks, gradients
from tests.test_bad_input import all_of
from training import flash_ring, overlap
from training.causal import LAYOUTS, BlockSlice, pad, positions, rotary, shard, unshard, visible_slice
from training.flash_ring import merge_into, ring_flash_attention, scaled_dot_product_attention
from training.fused_block import fused_backward, fused_forward
from training.overlap import arriving_blocks, post, two_buffers

CASES = [(causal, layout) for causal in (False, True) for layout in LAYOUTS]
SHAPE = (1, 8, 2, 720, 64)  # B, H, G, S, D: 720 is a multiple of 2P in every world
# For large inputs: the largest error as a multiple of torch's in the same dtype, and a quarter of an eps.
LARGE = {torch.float32: 1.5, torch.bfloat16: 2, torch.float16: 2.5}


def cut(context, layout, lengths, *tensors):
    """This rank's chunks, of these lengths if they are given (contiguous ones only)."""
    if lengths:
        return chunks(context, lengths, *tensors)
    return [shard(x, layout, context.rank, context.world_size) for x in tensors]


def ring_gradients(context, q, k, v, d_out, options, lengths=None, wrong=None):
    """This rank's chunks of out, dq, dk, dv, after a look at what the ring must leave alone."""
    mine = cut(context, options.get("layout", "contiguous"), lengths, q, k, v, d_out)
    before = [x.clone() for x in mine]
    with WRONG[wrong]() if wrong else nullcontext():
        results = gradients(functools.partial(ring_flash_attention, **options), *mine)
    assert all(torch.equal(x, y) or x.isnan().any() for x, y in zip(mine, before, strict=True)), "the input changed"
    assert all(x.dtype == q.dtype for x in results)
    return results


def whole(per_rank, layout, lengths=None):
    """out, dq, dk, dv of the whole sequence from those of the ranks."""
    return [
        torch.cat(list(parts), dim=2) if lengths else unshard(list(parts), layout)
        for parts in zip(*per_rank, strict=True)
    ]


def assert_flash(ranks, world_size, four, right=None, *, lengths=None, wrong=None, limits=None, **options):
    """out, dq, dk and dv are as near to float64 as those of torch's attention on one device, nearly."""
    per_rank = ranks(world_size, ring_gradients, *four, options, lengths, wrong)
    right = right or expected(*four, causal=options.get("causal", False), scale=options.get("scale"))
    assert_four(whole(per_rank, options.get("layout", "contiguous"), lengths), right, **(limits or {}))


def assert_large(ranks, world_size, causal, layout, shape=SHAPE, dtype=torch.float32, wrong=None):
    right = expected_of_inputs(*shape, dtype, causal=causal)
    limits = (
        {"factor": LARGE[dtype], "floor": 0.25, "noise": 0} if dtype in LARGE else {"floor": 16}
    )  # so is the oracle
    four = grouped_inputs(*shape, dtype)
    assert_flash(ranks, world_size, four, right, wrong=wrong, limits=limits, causal=causal, layout=layout)


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
    out = unshard(ranks(2, forward_in_zigzag, q, k, v), "zigzag").double()
    exact = naive_attention(q.double(), k.double(), v.double(), causal=True)
    of_torch = (torchs_attention(q, k, v, causal=True).double() - exact).abs().max()
    assert (out - exact).abs().max() < 1.5 * of_torch


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
    """Form all the groups, as every rank must, and run the ring of the one that this rank is in, if any."""
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


# A ring that nobody here wrote --------------------------------------------------------------------------------------


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
    assert_four(whole(theirs, layout), expected(*four, causal=causal))  # it is one that can be trusted
    for x, y in zip(itertools.chain(*mine), itertools.chain(*theirs), strict=True):  # rank by rank
        torch.testing.assert_close(x, y, rtol=0, atol=4e-6)


# Views, repeats, and what autograd may ask for ----------------------------------------------------------------------


def columns(x):
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def tokens_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_second(x):
    return torch.stack([x, x.new_full((), 9.0).expand_as(x)], dim=-1)[..., 0]


def slices(x):
    return F.pad(x, (1, 2, 3, 4), value=9.0)[:, :, 3:-4, 1:-2]


VIEWS = [columns, tokens_first, every_second, slices]


def ring_on_views(context, q, k, v, d_out, options):
    """This rank's results with each kind of view, and with d_out expanded from one number."""
    attention = functools.partial(ring_flash_attention, **options)
    mine = cut(context, options["layout"], None, q, k, v, d_out)
    results = []
    for view in VIEWS:
        inputs = [view(x).detach().requires_grad_() for x in mine[:3]]
        before = [x.detach().clone() for x in inputs]
        assert not inputs[0].is_contiguous()
        out = attention(*inputs)
        results.append((out.detach(), *torch.autograd.grad(out, inputs, view(mine[3]))))
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "the ring changed its input"
    inputs = [x.clone().requires_grad_() for x in mine[:3]]
    out = attention(*inputs)
    out.sum().backward()
    return [*results, (out.detach(), *(x.grad for x in inputs))]


@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "zigzag"), (True, "striped")])
@pytest.mark.parametrize("scale", [0.3, -0.3])  # a fused kernel, and the plain one
def test_views_are_as_good_as_contiguous_tensors(ranks, causal, layout, scale):
    four = grouped_inputs(2, 4, 2, 24, 6)
    options = {"causal": causal, "layout": layout, "scale": scale}
    *views, summed = zip(*ranks(3, ring_on_views, *four, options), strict=True)
    assert len(views) == len(VIEWS)
    for per_rank in views:
        assert_four(whole(per_rank, layout), expected(*four, causal=causal, scale=scale))
    ones = [*four[:3], torch.ones_like(four[3])]
    assert_four(whole(summed, layout), expected(*ones, causal=causal, scale=scale))


def repeated_calls(context, q, k, v, d_out, options):
    """Whether all that is asked twice gives the same bits."""
    q, k, v, d_out = cut(context, options["layout"], None, q, k, v, d_out)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    outs = [ring_flash_attention(*inputs, **options) for _ in range(2)]
    first = torch.autograd.grad(outs[0], inputs, d_out, retain_graph=True)
    again = torch.autograd.grad(outs[0], inputs, d_out)
    other = torch.autograd.grad(outs[1], inputs, d_out)
    same = [torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(first, again, other, strict=True)]
    return torch.equal(*outs) and all(same)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_again_gives_the_same_bits(ranks, world_size, layout):
    four = grouped_inputs(1, 4, 2, 12 * world_size, 16)
    assert ranks(world_size, repeated_calls, *four, {"causal": True, "layout": layout}) == [True] * world_size


def what_autograd_may_ask(context, q, k, v, d_out):
    """dk alone, whether there is a graph under no_grad, and what a second derivative ends in."""
    q, k, v, d_out = cut(context, "zigzag", None, q, k, v, d_out)
    ring = functools.partial(ring_flash_attention, causal=True, layout="zigzag")
    k.requires_grad_()
    with torch.no_grad():
        graph = ring(q, k, v).requires_grad
    out = ring(q, k, v)
    out.backward(d_out, retain_graph=True)
    d_k = torch.autograd.grad(out, k, d_out.requires_grad_(), create_graph=True)[0]
    try:
        d_k.sum().backward()
    except RuntimeError as error:
        return k.grad, q.grad, graph, str(error)


def test_one_gradient_none_or_a_second_derivative(ranks):
    four = grouped_inputs(1, 4, 2, 24, 8)
    d_k, d_q, graph, refusal = zip(*ranks(3, what_autograd_may_ask, *four), strict=True)
    both = whole(ranks(3, ring_gradients, *four, {"causal": True, "layout": "zigzag"}), "zigzag")
    assert torch.equal(unshard(list(d_k), "zigzag"), both[2])
    assert d_q == (None,) * 3
    assert graph == (False,) * 3
    assert all("once_differentiable" in message for message in refusal)


def gradcheck_on_ranks(context, q, k, v):
    """gradcheck of whole attention as a function of whole q, k, v; all ranks move the same number at once."""
    at = positions("zigzag", q.shape[2], context.rank, context.world_size)

    def attention(*qkv):
        mine = (Replicated.apply(x)[:, :, at] for x in qkv)
        out = ring_flash_attention(*mine, causal=True, layout="zigzag")
        return SumOfRanks.apply(torch.zeros_like(q).index_copy(2, at, out))

    return torch.autograd.gradcheck(attention, tuple(x.requires_grad_() for x in (q, k, v)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradcheck(ranks, size):
    inputs = grouped_inputs(1, 2, 1, 2 * size, 2, torch.float64)[:3]
    assert ranks(size, gradcheck_on_ranks, *inputs) == [True] * size


# What no key answers, and what is no number -------------------------------------------------------------------------


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
    """All scores of one rank's keys are -inf in float32; in float64 their weights are 0 too, where others are seen."""
    q, k, v, d_out = grouped_inputs(1, 4, 2, 24, 4)
    k[:, :, positions(layout, 24, rank, 3)] = -3e38
    q = q.abs() + 1
    per_rank = ranks(3, ring_gradients, q, k, v, d_out, {"causal": causal, "layout": layout})
    mine = whole(per_rank, layout)
    hidden = set(positions(layout, 24, rank, 3).tolist())
    fully_masked = torch.tensor([i for i in range(24) if causal and hidden.issuperset(range(i + 1))], dtype=torch.int64)
    wide = [x.double() for x in (q, k, v, d_out.index_fill(2, fully_masked, 0.0))]
    out, *rest = gradients(functools.partial(full_attention, causal=causal), *wide)
    for x, y in zip(mine, (out.index_fill(2, fully_masked, 0.0), *rest), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


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
    """The sizes of the messages that this rank gives to torch.distributed, forwards and backwards."""
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


# In a model -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A causal transformer block with 4 query heads on 2 and rotary positions."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.RMSNorm(16), nn.Linear(16, (4 + 2 + 2) * 4), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x, at, attention):
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (8, 4)).transpose(1, 2).split([4, 2, 2], dim=1)
        out = attention(rotary(q, at), rotary(k, at), v, is_causal=True, enable_gqa=True)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def model_and_gradients(x, d_out, at, attention):
    """The output (B, C, 16) of two blocks, and the gradients of all their weights."""
    torch.manual_seed(0)
    blocks = [Block().double() for _ in range(2)]
    y = x
    for block in blocks:
        y = block(y, at, attention)
    y.backward(d_out)
    return y.detach(), [weight.grad for block in blocks for weight in block.parameters()]


def model_on_ranks(context, x, d_out, layout, where):
    """The same on this rank's tokens, with rotary positions of the layout `where`."""
    at, turned = (positions(it, x.shape[1], context.rank, context.world_size) for it in (layout, where))
    attention = functools.partial(scaled_dot_product_attention, layout=layout)
    return model_and_gradients(x[:, at], d_out[:, at], turned, attention)


def assert_model(ranks, world_size, layout, where):
    S = 8 * world_size
    x, d_out = torch.randn(2, 2, S, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64).unbind()
    outs, gradients_of_ranks = zip(*ranks(world_size, model_on_ranks, x, d_out, layout, where), strict=True)
    exact, exact_gradients = model_and_gradients(x, d_out, torch.arange(S), F.scaled_dot_product_attention)
    mine = unshard([out[:, None] for out in outs], layout)[:, 0]
    torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)
    for of_ranks, of_whole in zip(zip(*gradients_of_ranks, strict=True), exact_gradients, strict=True):
        torch.testing.assert_close(sum(of_ranks), of_whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_model_on_ranks_is_the_model_on_one_device(ranks, size, layout):
    assert_model(ranks, size, layout, layout)
    if size > 1:
        with pytest.raises(AssertionError, match="not close"):
            assert_model(ranks, size, layout, "contiguous")


X = torch.ones(1, 2, 4, 3)


@pytest.mark.parametrize(
    ("qkv", "options", "words"),
    [
        ((X, X, X), {"attn_mask": X}, ["attn_mask was given", "expected None", "is_causal=True only"]),
        ((X, X, X), {"dropout_p": 0.1}, ["dropout_p is 0.1", "expected 0.0", "no dropout"]),
        ((X, X[:, :1], X[:, :1]), {}, ["query has 2 heads and key 1", "expected enable_gqa=True"]),
    ],
    ids=["mask", "dropout", "heads"],
)
def test_what_a_ring_does_not_do_is_refused_on_every_rank(ranks, qkv, options, words):
    """Also when only one rank asks for it: the others do not wait for it."""
    outcomes = ranks.outcomes(3, drop_in, [((X, X, X), {}), (qkv, options), ((X, X, X), {})])
    assert [outcome.kind for outcome in outcomes] == ["ValueError"] * 3
    assert all(re.search(all_of(["rank 1: ", *words]), outcome.message) for outcome in outcomes)


def drop_in(context, calls):
    qkv, options = calls[context.rank]
    return scaled_dot_product_attention(*qkv, **options)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_padding_on_the_right_changes_no_real_token(ranks, layout):
    real = grouped_inputs(1, 4, 2, 13, 8)
    padded = [pad(x, 6) for x in real]  # 18 tokens; the padding has no gradient to give
    mine = whole(ranks(3, ring_gradients, *padded, {"causal": True, "layout": layout}), layout)
    assert all(x.shape[2] == 18 for x in mine)
    assert all(x[:, :, 13:].count_nonzero() == 0 for x in mine[1:])
    assert_four([x[:, :, :13] for x in mine], expected(*real, causal=True))


# Bad input ------------------------------------------------------------------------------------------------------------


def refused(context, inputs):
    """The ring on this rank's own q, k, v and options; a block that travels all the same is an error."""
    qkv, options = inputs[context.rank]
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("a block travels")):
        ring_flash_attention(*qkv, **options)


def refusal(ranks, inputs):
    """The message of the ValueError, the same one on every rank. Then the same processes must run a right ring."""
    outcomes = ranks.outcomes(len(inputs), refused, inputs)
    assert [outcome.kind for outcome in outcomes] == ["ValueError"] * len(inputs), outcomes
    assert len({outcome.message for outcome in outcomes}) == 1
    assert_flash(ranks, len(inputs), grouped_inputs(1, 2, 1, 12, 2))
    return outcomes[0].message


BAD = {  # what is wrong: (q, k, v on each of two ranks, options, words of the message)
    "layout": ([(X, X, X)] * 2, {"layout": "spiral"}, ["layout is 'spiral'", "expected one of contiguous, zigzag"]),
    "no layout": ([(X, X, X)] * 2, {"layout": None}, ["layout is None", "expected one of contiguous, zigzag"]),
    "zigzag of 6": (
        [(X[:, :, :3],) * 3] * 2,
        {"causal": True, "layout": "zigzag"},
        ["6 tokens in the zigzag layout on 2 ranks", "multiple of 4", "pad(x, 4)"],
    ),
    "striped of 7": (
        [(X,) * 3, (X[:, :, :3],) * 3],
        {"layout": "striped"},
        ["7 tokens in the striped layout on 2 ranks", "multiple of 2", "pad(x, 2)"],
    ),
    "uneven zigzag": (
        [(X[:, :, :3],) * 3, (torch.ones(1, 2, 5, 3),) * 3],
        {"causal": True, "layout": "zigzag"},
        ["the ranks have [3, 5] tokens in the zigzag layout", "expected as many on each", "use shard"],
    ),
    "uneven striped": (
        [(X[:, :, :3],) * 3, (X[:, :, :1],) * 3],
        {"layout": "striped"},
        ["the ranks have [3, 1] tokens in the striped layout", "expected as many on each", "use shard"],
    ),
    "heads": (
        [(torch.ones(1, 3, 4, 3), X, X)] * 2,
        {},
        ["rank 0: q has 3 heads and k 2; expected a multiple", "rank 1: q has 3 heads"],
    ),
    "fewer queries": (
        [(X, X, X), (X[:, :, :2], X, X)],
        {},
        ["rank 1: q has 2 tokens and k 4; expected chunks of the same tokens"],
    ),
    "k and v": ([(X, X, X), (X, X, X[:, :1])], {}, ["rank 1: k has shape (1, 2, 4, 3) and v (1, 1, 4, 3)"]),
    "three dimensions": ([(X[0], X, X), (X, X, X)], {}, ["rank 0: q has shape (2, 4, 3)", "expected (B, H, S, D)"]),
    "nothing": ([(X, X, X), (X[:, :0], X, X)], {}, ["rank 1: q has shape (1, 0, 4, 3)", "1 or more"]),
    "scale": ([(X, X, X)] * 2, {"scale": math.inf}, ["rank 0: scale is inf", "finite"]),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_before_a_block_travels(ranks, bad):
    qkvs, options, words = BAD[bad]
    message = refusal(ranks, [(qkv, options) for qkv in qkvs])
    assert re.match(all_of(words), message), message


OTHER = {  # what one rank has that the others have not: (q, k, v, options, words)
    "causal": ((X, X, X), {"causal": True}, ["causal=False", "causal=True"]),
    "layout": ((X, X, X), {"layout": "zigzag"}, ["layout=contiguous", "layout=zigzag"]),
    "scale": ((X, X, X), {"scale": 0.25}, ["scale=0.577", "scale=0.25"]),
    "dtype": ((X.bfloat16(),) * 3, {}, ["dtype=torch.float32", "dtype=torch.bfloat16"]),
    "G": ((X, X[:, :1], X[:, :1]), {}, ["G=2", "G=1"]),
    "gradients": ((X, X, X.clone().requires_grad_()), {}, ["gradients=False", "gradients=True"]),
}


@pytest.mark.parametrize("other", OTHER)
def test_ranks_that_disagree(ranks, other):
    qkv, options, words = OTHER[other]
    right = ((X, X, X), {})
    message = refusal(ranks, [right, (qkv, options), right])
    pattern = all_of(
        ["the ranks disagree; expected the same of all this", f"rank 0: {''}", words[0], "rank 1", words[1]]
    )
    assert re.match(pattern, message), message


# Rings with one mistake each ------------------------------------------------------------------------------------------

WRONG = {}  # name of the mistake -> a function that makes the patch


def replaces(module, name):
    """Note a mistake that takes the place of a piece of the ring; a class makes a new one for each ring."""

    def note(mistake):
        WRONG[mistake.__name__] = lambda: mock.patch.object(
            module, name, mistake() if isinstance(mistake, type) else mistake
        )
        return mistake

    return note


@replaces(flash_ring, "fused_backward")
def swapped(*block, **options):
    d_q, d_k, d_v = fused_backward(*block, **options)
    return d_q, d_v, d_k


@replaces(flash_ring, "fused_backward")
def summed(*block, **options):
    d_q, d_k, d_v = fused_backward(*block, **options)
    return d_q, d_k + d_v, d_k + d_v


@replaces(flash_ring, "fused_backward")
class OwnQueriesOnly:
    """Each rank keeps what its own queries add to its own block; what other ranks find is lost."""

    calls = 0

    def __call__(self, *block, **options):
        self.calls += 1
        d_q, d_k, d_v = fused_backward(*block, **options)
        return (d_q, d_k, d_v) if self.calls == 1 else (d_q, 0 * d_k, 0 * d_v)


@replaces(flash_ring, "fused_backward")
def lse_of_the_block(q, k, v, out, lse, d_out, **options):
    return fused_backward(q, k, v, *fused_forward(q, k, v, **options), d_out, **options)


@replaces(flash_ring, "fused_backward")
def backward_without_a_mask(*block, scale, causal):
    return fused_backward(*block, scale=scale)


@replaces(flash_ring, "post")
class OneHopShort:
    """The gradients of a block stay where its last round left them, one rank from home."""

    calls = 0

    def __call__(self, sent, received, group):
        self.calls += 1
        if self.calls < neighbours(group)[1]:
            return post(sent, received, group)
        received[0].copy_(sent[0])
        return []


@replaces(flash_ring, "post")
class GradientsNotWaitedFor:
    """What a rank adds before the others' sums have come is overwritten when they do: here, with the next message."""

    late = None

    def __call__(self, sent, received, group):
        if self.late:
            self.late[0].copy_(self.late[1])
        coming = torch.empty_like(received[0])
        for work in post(sent, [coming], group):
            work.wait()
        self.late = received[0], coming
        return []


@replaces(flash_ring, "post")
def aliased_gradients(sent, received, group):
    """dk and dv arrive in one place: the second overwrites the first."""
    for work in post(sent, received, group):
        work.wait()
    d_kv = received[0]
    d_kv[0].copy_(d_kv[1])
    return []


def off_by_one(diagonal):
    def forward(q, k, v, *, scale, causal=False):
        if not causal:
            return fused_forward(q, k, v, scale=scale)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-2, -1) * scale
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal), -torch.inf)
        return scores.softmax(dim=-1).nan_to_num() @ v, scores.logsumexp(dim=-1)

    return forward


WRONG["the_diagonal_hidden"] = lambda: mock.patch.object(flash_ring, "fused_forward", off_by_one(0))
WRONG["the_next_token_seen"] = lambda: mock.patch.object(flash_ring, "fused_forward", off_by_one(2))


@replaces(flash_ring, "visible_slice")
def last_half_of_the_keys(layout, rank, block, lengths, *, causal):
    mine, half = visible_slice(layout, rank, block, lengths, causal=causal), lengths[rank] // 2
    return BlockSlice(mine.queries, slice(half, None), False) if block < rank else mine


@replaces(flash_ring, "visible_slice")
def first_half_of_the_queries(layout, rank, block, lengths, *, causal):
    mine, half = visible_slice(layout, rank, block, lengths, causal=causal), lengths[rank] // 2
    return BlockSlice(slice(0, half), mine.keys, False) if block > rank else mine


@replaces(flash_ring, "visible_slice")
def first_query_kept(layout, rank, block, lengths, *, causal):
    return BlockSlice(slice(None), slice(None), triangle=True)


@replaces(flash_ring, "visible_slice")
def contiguous_slices(layout, rank, block, lengths, *, causal):
    return visible_slice("contiguous", rank, block, lengths, causal=causal)


@replaces(overlap, "post")
class StaleBlock:
    """The first block to arrive is overwritten by the one in hand."""

    calls = 0

    def __call__(self, sent, received, group):
        self.calls += 1
        for work in post(sent, received, group):
            work.wait()
        if self.calls == 1:
            for x, y in zip(sent, received, strict=True):
                y.copy_(x)
        return []


@replaces(flash_ring, "arriving_blocks")
def last_block_skipped(k, v, *, lengths, group):
    """Hops counted as rounds: the last block comes and is not looked at."""
    blocks = list(enumerate((x.clone(), y.clone()) for x, y in arriving_blocks(k, v, lengths=lengths, group=group)))
    return (block for t, block in blocks if t < len(lengths) - 1)


@replaces(flash_ring, "arriving_blocks")
def keys_without_values(k, v, *, lengths, group):
    return ((k_j, v) for k_j, _ in arriving_blocks(k, v, lengths=lengths, group=group))


@replaces(flash_ring, "merge_into")
def average(out, lse, out_j, lse_j):
    out.lerp_(out_j.to(out.dtype), 0.5)
    torch.logaddexp(lse, lse_j, out=lse)


@replaces(flash_ring, "merge_into")
def merge_in_base_2(out, lse, out_j, lse_j):
    share = torch.sigmoid((lse_j - lse) * math.log(2))
    out.lerp_(out_j.to(out.dtype), share[..., None])
    torch.logaddexp2(lse, lse_j, out=lse)


@replaces(flash_ring, "merge_into")
def lse_left_behind(out, lse, out_j, lse_j):
    out.lerp_(out_j.to(out.dtype), torch.sigmoid(lse_j - lse)[..., None])


@replaces(flash_ring, "merge_into")
def output_in_the_dtype_of_q(out, lse, out_j, lse_j):
    merge_into(out, lse, out_j, lse_j)
    out.copy_(out.to(out_j.dtype))


@replaces(flash_ring, "two_buffers")
def gradients_in_float32(k, lengths, rank, dtype):
    """In float64 too. (In bfloat16, torch's own error hides what a sum in bfloat16 adds; see the bytes.)"""
    return two_buffers(k, lengths, rank, torch.float32)


ZIGZAG, STRIPED, FULL = (True, "zigzag"), (True, "striped"), (False, "contiguous")
SHOWS = {  # the mistake: the cases in which it shows, where not in all
    "backward_without_a_mask": [ZIGZAG, STRIPED],
    "the_diagonal_hidden": [ZIGZAG, STRIPED],
    "the_next_token_seen": [ZIGZAG, STRIPED],
    "last_half_of_the_keys": [ZIGZAG],
    "first_half_of_the_queries": [ZIGZAG],
    "first_query_kept": [STRIPED],
    "contiguous_slices": [ZIGZAG, STRIPED],
    "output_in_the_dtype_of_q": [],  # these two below, in other dtypes
    "gradients_in_float32": [],
}
SMALL = (1, 4, 2, 48, 16)


@pytest.mark.parametrize(
    ("size", "wrong", "causal", "layout"),
    [(P, wrong, *case) for P in (2, 4) for wrong in WRONG for case in SHOWS.get(wrong, [ZIGZAG, STRIPED, FULL])],
)
def test_a_wrong_ring_is_rejected(ranks, size, wrong, causal, layout):
    four, right = grouped_inputs(*SMALL, torch.float32), expected_of_inputs(*SMALL, torch.float32, causal=causal)
    assert_flash(ranks, size, four, right, causal=causal, layout=layout)
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_flash(ranks, size, four, right, wrong=wrong, causal=causal, layout=layout)


@pytest.mark.parametrize(
    ("wrong", "dtype"), [("output_in_the_dtype_of_q", torch.bfloat16), ("gradients_in_float32", torch.float64)]
)
def test_a_ring_that_rounds_too_early_is_rejected(ranks, wrong, dtype):
    assert_large(ranks, 8, *FULL, dtype=dtype)
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_large(ranks, 8, *FULL, dtype=dtype, wrong=wrong)
