"""The bound: its exact values are those of autograd; right answers are within it, and need much of it."""

import functools
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.basics.naive_attention import naive_attention
from ringlab.ring.backward import block_backward
from ringlab.support import rounding
from ringlab.support.rounding import Right, exact_attention, half_step, report
from tests.attention import DTYPES, SEED, assert_right, random_qkv
from tests.rings import whole_in_turn

NAMES = ("out", "dq", "dk", "dv")
SEEDS = st.integers(0, 2**32)


def inputs(B, H, G, S, D, dtype, seed, kind="normal"):
    """q, k, v and d_out, normal; "huge": scores of some hundreds; "positive"; "shifted": keys around 10."""
    q, d_out, _ = random_qkv((B, H, S, D), torch.float64, seed=seed)
    k, v, _ = random_qkv((B, G, S, D), torch.float64, seed=seed + 1000)
    four = {
        "normal": (q, k, v, d_out),
        "huge": (100 * q, k, v, d_out),
        "positive": (q.abs(), k.abs(), v.abs(), d_out.abs()),
        "shifted": (q, k + 10, v, d_out),
    }[kind]
    return [x.to(dtype) for x in four]


def plain(q, k, v, d_out, *, causal):
    """Out, the gradients and lse by plain code, in float32 at least until they are stored."""
    G, scale = k.shape[1], q.shape[3] ** -0.5
    k, v = (x.repeat_interleave(q.shape[1] // G, dim=1) for x in (k, v))
    out, lse = blockwise_attention(q, k, v, block_size=3, causal=causal)
    delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
    d_q, *d_kv = block_backward(q, k, v, d_out, lse, delta, scale, causal=causal)
    d_k, d_v = (x.unflatten(1, (G, -1)).sum(dim=2) for x in d_kv)
    results = (out, *(x.to(q.dtype) for x in (d_q, d_k, d_v)))
    return dict(zip(NAMES, results, strict=True)) | {"lse": lse}


def fused_ring(q, k, v, d_out, *, causal, P):
    """The same of P chunks on fused kernels, merged: the blocks and sums of flash_ring.py in one process."""
    results = whole_in_turn((q, k, v, d_out), "striped" if causal else "contiguous", P, causal=causal)
    return dict(zip(NAMES, results, strict=True))


def assert_all_right(results, rights):
    for name, x in results.items():
        assert_right(x, rights[name], name)


def with_gradients(attention, q, k, v, d_out):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    out.backward(d_out)
    return dict(zip(NAMES, (out.detach(), *(x.grad for x in leaves)), strict=True))


def torchs(q, k, v, d_out, *, causal=False, scale=None):
    """The same by torch's fused attention on one device."""
    attention = functools.partial(F.scaled_dot_product_attention, is_causal=causal, scale=scale, enable_gqa=True)
    return with_gradients(attention, q, k, v, d_out)


# The exact values -----------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(data=st.data())
def test_exact_values_are_those_of_autograd(data):
    """Any shape, mask and scale, computed in slices of any size, against the formula and torch's own derivatives."""
    G, repeat, B = (data.draw(st.integers(1, 3), label=name) for name in ("G", "H/G", "B"))
    Sq, Sk, D = (data.draw(st.integers(1, most), label=name) for name, most in (("Sq", 9), ("Sk", 9), ("D", 5)))
    seed, H = data.draw(SEEDS, label="seed"), G * repeat
    scale = data.draw(st.sampled_from([None, 1.0, 0.0, -0.7]), label="scale")
    causal, masked = data.draw(st.booleans(), label="causal"), data.draw(st.booleans(), label="masked")
    q, d_out, _ = random_qkv((B, H, Sq, D), torch.float64, seed=seed)
    k, v, _ = random_qkv((B, G, Sk, D), torch.float64, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed + SEED)
    shape = data.draw(st.sampled_from([(Sq, Sk), (B, 1, Sq, Sk), (B, H, Sq, Sk)]), label="mask")
    visible = torch.rand(shape, generator=generator) < 0.7 if masked else None
    with mock.patch.object(rounding, "SLICE", data.draw(st.sampled_from([1, 20, 2**20]), label="slice")):
        rights = exact_attention(q, k, v, d_out, causal=causal, visible=visible, scale=scale)

    seen = torch.ones(B, H, Sq, Sk, dtype=torch.bool) if visible is None else visible.expand(B, H, Sq, Sk)
    seen = seen.tril() if causal else seen
    blind = ~seen.any(dim=-1)

    def attention(q, k, v):
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
        scores = (D**-0.5 if scale is None else scale) * q @ k.mT
        lse = scores.masked_fill(~seen, -math.inf).logsumexp(dim=-1)
        assert torch.equal(rights["lse"].exact.isinf(), blind)
        assert_right(lse.detach(), rights["lse"], "lse")
        weights = scores.masked_fill(~seen, -1e9).softmax(dim=-1).masked_fill(blind[..., None], 0.0)
        return weights @ v

    results = with_gradients(attention, q, k, v, d_out)
    assert_all_right(results, rights)
    assert rights["out"].exact[blind].count_nonzero() == rights["dq"].exact[blind].count_nonzero() == 0
    for name in ("out", "dq"):
        assert (rights[name].allowed[blind] < 1e-300).all(), f"{name} of a query that sees no key may not be off"


# Right answers --------------------------------------------------------------------------------------------------------

KINDS = st.sampled_from(["normal", "huge", "positive", "shifted"])


@settings(max_examples=30)
@given(data=st.data())
def test_right_answers_are_within_the_bound(data):
    """Rings of any size and torch's attention, in any dtype; plain code is held to the sharper bound."""
    G, repeat, B = (data.draw(st.integers(1, 2), label=name) for name in ("G", "H/G", "B"))
    D, P = data.draw(st.integers(1, 20), label="D"), data.draw(st.sampled_from([1, 2, 3, 5, 8]), label="P")
    S = P * data.draw(st.integers(1, 9), label="C")
    dtype, causal = data.draw(st.sampled_from(DTYPES), label="dtype"), data.draw(st.booleans(), label="causal")
    four = inputs(B, G * repeat, G, S, D, dtype, data.draw(SEEDS, label="seed"), data.draw(KINDS, label="kind"))
    rights = exact_attention(*four, causal=causal)
    assert_all_right(plain(*four, causal=causal), rights)
    q, k, v, _ = four
    k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    assert_all_right({"out": naive_attention(q, k, v, causal=causal)}, rights)
    assert_all_right(torchs(*four, causal=causal), exact_attention(*four, causal=causal, fused_blocks=1))
    assert_all_right(fused_ring(*four, causal=causal, P=P), exact_attention(*four, causal=causal, fused_blocks=P))


# Not too wide ---------------------------------------------------------------------------------------------------------


def used(right, x):
    """Which share of what sums are allowed each number of x needs, after half a step for storage."""
    beyond = right.error(x) - half_step(right.exact.abs() + right.sums, right.dtype)
    return beyond.clamp(min=0) / right.sums


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)  # in float64 the exact result has the same errors
def test_right_answers_need_more_than_an_eighth_of_what_is_allowed(dtype):
    """In the worst of 4000 small problems: a bound four times as wide would not pass."""
    four = inputs(4000, 1, 1, 3, 2, dtype, seed=0)
    four[0] *= 4
    wide = dtype == torch.float32
    rights = exact_attention(*four, fused_blocks=0 if wide else 1)
    results = plain(*four, causal=False) if wide else torchs(*four)
    for name, x in results.items():
        assert 0.125 < used(rights[name], x).max() <= 1, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_storage_is_allowed_half_a_step_and_no_more(dtype):
    """The exact result, rounded to its dtype, needs nothing of what sums are allowed. Others near it need it."""
    four = [x.requires_grad_() for x in inputs(1, 2, 2, 16, 8, dtype, seed=0)]
    for name, right in exact_attention(*four).items():
        assert not right.sums.requires_grad  # else the graph of every slice stays in memory
        stored = right.exact.to(right.dtype)
        twice = half_step(right.exact, torch.float32)  # torch rounds float64 to float32 first
        assert (used(right, stored) * right.sums <= twice).all(), name
        step = half_step(right.exact.abs() + right.sums, right.dtype)  # just below a power of two it is that above
        beyond = stored.double() + 6 * torch.maximum(step, right.sums)
        assert (used(right, beyond.to(right.dtype)) > 1).all(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_a_step_is_half_the_distance_to_the_next_number(dtype):
    limits = torch.finfo(dtype)
    x = torch.tensor([0.0, limits.smallest_normal, 1.0, 1.5, 3.0, 1000.0, limits.max / 4], dtype=dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    following = (x.view(bits) + 1).view(dtype)
    assert torch.equal(half_step(-x.double(), dtype), (following.double() - x.double()) / 2)


def test_what_a_fused_kernel_and_merges_may_be_off_by_hand():
    """Each term of the derivation in rounding.py that plain code does not have, on numbers that leave it alone."""
    one = torch.ones(1, 1, 1, 1)
    lse, out = (
        [exact_attention(3 * one, one, 5 * one, fused_blocks=n)[name].sums.item() for n in (1, 4)]
        for name in ("lse", "out")
    )
    u = torch.finfo(torch.float32).eps / 2 + torch.finfo(torch.float64).eps / 2
    assert lse[1] - lse[0] == pytest.approx(3 * u * 3, rel=1e-9)  # √(3 · 3 merges) roundings of an lse of 3
    assert out[1] - out[0] == pytest.approx(u * 5, rel=1e-9)  # one rounding of the largest value
    # A key of weight 1: the score is √D, and so is the lse; it is rounded 2 + √D times, e^s 4 times. The longest
    # sum, of dk, has a term of each of the n queries of n heads.
    for D, n in ((1, 1), (64, 1), (1, 4)):
        (plain,) = exact_attention(torch.ones(1, n, n, D), *torch.ones(2, 1, 1, 1, D))["lse"].sums.unique().tolist()
        assert plain == pytest.approx(u * ((2 + D**0.5) * D**0.5 + 3 * D**0.5 + 4 + n), rel=1e-9)
    assert exact_attention(3 * one, one, 5 * one)["out"].sums.item() == out[0]  # float32 operands are not rounded
    flushed = exact_attention(one, one, 0 * one)["out"].sums.item()  # a value of 0: what is smaller may become 0
    assert flushed == torch.finfo(torch.float32).smallest_normal

    q, k, v, d_out = (
        torch.ones(1, 1, 1, 1),
        torch.zeros(1, 1, 2, 1),
        torch.tensor([[[[1.0], [-1.0]]]]),
        torch.ones(1, 1, 1, 1),
    )
    fused, plain = (
        exact_attention(*(x.bfloat16() for x in (q, k, v, d_out)), scale=1.0, fused_blocks=n) for n in (1, 0)
    )
    u_16 = torch.finfo(torch.bfloat16).eps / 2
    # Two weights of 1/2, dP = 1 and -1, dS = 1/2 and -1/2. dk: four roundings of dS, and those of the lse and of delta.
    for name, roundings in (("out", 3.0), ("lse", 1.0), ("dk", 4 * 0.5 + 0.5 + 3 * 0.5), ("dv", 4 * 0.5 + 0.5)):
        assert (fused[name].sums - plain[name].sums).max().item() == pytest.approx(roundings * u_16, rel=0.02), name
    fused, plain = (
        exact_attention(*(x.bfloat16() for x in (0 * q, v, v, d_out)), scale=1.0, fused_blocks=n) for n in (1, 0)
    )
    assert (fused["dq"].sums - plain["dq"].sums).item() == pytest.approx((4 + 1) * u_16, rel=0.02)


def test_what_a_saturated_softcap_may_be_off_by_hand():
    """tanh is 1 and its slope 0: exact gradients are 0, and what is left is the rounding of the slope, 10 u a key."""
    q, k, v = torch.full((1, 1, 1, 1), 100.0), torch.tensor([[[[1.0], [-0.5]]]]), torch.tensor([[[[1.0], [-1.0]]]])
    rights = exact_attention(q, k, v, torch.ones(1, 1, 1, 1), scale=1.0, softcap=2.0)
    u, p = torch.finfo(torch.float32).eps / 2 + torch.finfo(torch.float64).eps / 2, 1 / (1 + math.exp(-4))
    assert rights["dq"].exact.item() == 0
    each = 10 * u * 2 * p * (1 - p)  # weights p and 1 - p; dP - delta = 1 - (2p - 1) and -1 - (2p - 1)
    assert rights["dq"].sums.item() == pytest.approx(each * (1 + 0.5), rel=1e-3)
    assert rights["dk"].sums.flatten().tolist() == pytest.approx([each * 100] * 2, rel=1e-3)


# The check ------------------------------------------------------------------------------------------------------------


def rights_of(*numbers):
    exact = torch.tensor(numbers, dtype=torch.float64)
    return Right(exact, torch.full_like(exact, 0.125), torch.float64, "float64 sums")


def test_report_prints_the_worst_number_and_what_is_allowed_there(capsys):
    right = rights_of(0.0, 0.0)
    assert report("near", torch.tensor([0.0, 0.125], dtype=torch.float64), right)
    assert not report("far", torch.tensor([0.0, 0.2], dtype=torch.float64), right)
    assert not report("nan", torch.tensor([0.0, math.nan], dtype=torch.float64), right)
    assert capsys.readouterr().out.splitlines() == [
        "ok    near: largest error 1.2e-01, rounding allows 1.2e-01 (float64 sums)",
        "WRONG far: largest error 2.0e-01, rounding allows 1.2e-01 (float64 sums)",
        "WRONG nan: largest error nan, rounding allows 1.2e-01 (float64 sums)",
    ]


def test_each_number_has_an_allowance_of_its_own(capsys):
    """The error of the second number is below what the first one may be off."""
    right = Right(torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, 1e-3]).double(), torch.float64, "two sums")
    for x, ok in (([0.9, 9e-4], True), ([0.9, 2e-3], False), ([1.1, 0.0], False)):
        assert right.accepts(torch.tensor(x, dtype=torch.float64)) == ok
        assert report("x", torch.tensor(x, dtype=torch.float64), right) == ok
    assert "WRONG x: largest error 2.0e-03, rounding allows 1.0e-03 (two sums)" in capsys.readouterr().out


@pytest.mark.parametrize("x", [torch.zeros(2), torch.zeros(1, 2, dtype=torch.float64)])
def test_another_dtype_or_shape_is_an_error(x):
    with pytest.raises(ValueError, match=r"the result is torch\.float.*expected torch\.float64 of shape \(2,\)"):
        rights_of(0.0, 0.0).error(x)
