"""One block on a fused kernel, forward and backward, against full attention in float64; and which kernel is chosen."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.ring import fused_block
from ringlab.ring.backward import block_backward
from ringlab.ring.fused_block import choose_kernel, fused_backward, fused_forward
from ringlab.support.rounding import exact_attention
from tests.attention import (
    DTYPES,
    SEED,
    VIEWS,
    assert_attention,
    assert_four,
    assert_lse,
    assert_right,
    expected,
    grouped_inputs,
)


def both_ways(q, k, v, d_out, *, scale, causal):
    """([out, dq, dk, dv], lse) of attention over one block."""
    out, lse = fused_forward(q, k, v, scale=scale, causal=causal)
    return [out, *fused_backward(q, k, v, out, lse, d_out, scale=scale, causal=causal)], lse


def assert_block(four, *, scale=0.5, causal=False, view=None):
    q, k, *_ = four
    results, lse = both_ways(*(view(x) if view else x for x in four), scale=scale, causal=causal)
    assert results[0].dtype == q.dtype
    mine = [x.to(q.dtype) for x in results]
    assert_four(mine, expected(*four, causal=causal, scale=scale))
    assert_lse(lse, q, k, causal=causal, scale=scale, fused_blocks=1)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(data=st.data())
def test_any_shape_dtype_and_scale(data):
    G, repeat = (data.draw(st.integers(1, 3), label=name) for name in ("G", "H/G"))
    B, D, S = (data.draw(st.integers(1, most), label=name) for name, most in (("B", 2), ("D", 9), ("S", 40)))
    four = grouped_inputs(B, G * repeat, G, S, D, data.draw(st.sampled_from(DTYPES), label="dtype"))
    scale = data.draw(st.sampled_from([1.0, 0.2, -0.5, 0.0]), label="scale")
    strips = {name: data.draw(st.sampled_from([1, 6, 64]), label=name) for name in ("QUERIES", "KEYS")}
    with mock.patch.multiple(fused_block, **strips):
        assert_block(four, scale=scale, causal=data.draw(st.booleans(), label="causal"))


@pytest.mark.parametrize(
    ("length", "dtype", "threads", "calls"),
    [
        (64, torch.float32, 1, (1, 1)),
        (65, torch.float32, 1, (2, 1)),
        (128, torch.bfloat16, 1, (2, 1)),
        (129, torch.float32, 2, (3, 2)),
        (129, torch.float32, 3, (1, 2)),  # with two heads a strip would leave a thread idle
        (300, torch.float64, 1, (5, 3)),
        (1024, torch.float32, 1, (16, 8)),
        (1025, torch.float32, 1, (1, 9)),
        (2049, torch.float32, 1, (1, 1)),
    ],
)
def test_a_short_triangle_is_computed_in_strips(length, dtype, threads, calls):
    """So the kernel computes few tiles above the diagonal. In 16 bits the backward pass computes it whole."""
    counted = SimpleNamespace()
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"):
        setattr(counted, name, mock.Mock(side_effect=getattr(fused_block.aten, name)))
    many = mock.patch.object(torch, "get_num_threads", return_value=threads)
    with many, mock.patch.object(fused_block, "aten", counted):
        assert_block(grouped_inputs(1, 2, 1, length, 4, dtype), causal=True)
    assert tuple(each.call_count for each in vars(counted).values()) == calls


@pytest.mark.parametrize(("dtype", "causal"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True)])
def test_a_softcap_sums_in_float32(dtype, causal):
    """Its tiles are plain code, which is held to the sharper bound: no sum in 16 bits fits."""
    four = q, k, v, d_out = grouped_inputs(1, 2, 1, 600, 5, dtype)
    options = {"scale": 1.0, "softcap": 2.0, "causal": causal}
    out, lse = fused_forward(q, k, v, **options)
    gradients = fused_backward(q, k, v, out, lse, d_out, **options)
    assert {x.dtype for x in (lse, *gradients)} == {torch.float32}
    right = exact_attention(*four, **options)
    for name, x in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True):
        assert_right(x.to(right[name].dtype), right[name], name)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("causal", "scale"), [(True, 0.5), (True, -0.5), (False, 0.5)])
def test_views(view, causal, scale):
    q, k, v, d_out = four = grouped_inputs(2, 4, 2, 20, 6)
    assert not view(q).is_contiguous()
    assert_block(four, view=view, causal=causal, scale=scale)
    for D, D_v in ((4, 6), (6, 4)):  # rows of one length: padded
        four = q[..., :D], k[..., :D], v[..., :D_v], d_out[..., :D_v]
        assert_block([x.contiguous() for x in four], view=view, causal=causal, scale=scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strip", [1, 64])
def test_rows_that_see_no_key(causal, dtype, strip, monkeypatch):
    """Query 2 of head 1 sees no key. The other queries give what they give without it."""
    monkeypatch.setattr(fused_block, "QUERIES", strip)
    monkeypatch.setattr(fused_block, "KEYS", strip)
    q, k, v, d_out = grouped_inputs(1, 2, 1, 6, 4, dtype)
    huge = 1e30 if dtype != torch.float64 else 1e200
    k = torch.cat([k[..., :3], torch.full_like(k[..., 3:], -huge)], dim=-1)
    q = torch.cat([q[..., :3], torch.zeros_like(q[..., 3:])], dim=-1)  # meets the last number of k with zeros ...
    q[0, 1, 2] = torch.tensor([0, 0, 0, huge], dtype=dtype)  # ... but this one
    (out, d_q, d_k, d_v), lse = both_ways(q, k, v, d_out, scale=0.5, causal=causal)
    fully_masked = lse == -torch.inf
    assert fully_masked.nonzero().tolist() == [[0, 1, 2]]
    assert out[fully_masked].count_nonzero() == d_q[fully_masked].count_nonzero() == 0

    small = k.index_fill(3, torch.tensor([3]), 0.0)
    without = [x.clone() for x in (q, small, v, d_out)]
    without[0][fully_masked] = without[3][fully_masked] = 0
    right = exact_attention(*without, visible=~fully_masked[..., None], causal=causal, scale=0.5, fused_blocks=1)
    for name, x in (("out", out), ("dq", d_q), ("dk", d_k), ("dv", d_v)):
        seen = slice(3) if name in ("dq", "dk") else slice(None)  # the last number of q and k is not part of this check
        part = replace(right[name], exact=right[name].exact[..., seen], sums=right[name].sums[..., seen])
        assert_right(x[..., seen], part, name)


def test_the_plain_block_takes_over_where_the_kernel_cannot_tell():
    """The kernel returns lse 0 for a row that saw no key. A row whose lse really is 0 must come out right too."""
    q, v = torch.zeros(1, 1, 3, 2), torch.randn(1, 1, 3, 2, generator=torch.Generator().manual_seed(SEED))
    out, lse = fused_forward(q, q, v, scale=0.5, causal=True)
    assert_attention(out, q, q, v, causal=True, scale=0.5)
    assert lse[0, 0, 0] == 0


# Which kernel ---------------------------------------------------------------------------------------------------------


def stand_in(device, dtype, head_dim):
    return SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, shape=(1, 2, 8, head_dim))


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "head_dim", "scale", "kernel"),
    [
        ("cpu", None, torch.float32, 64, 0.1, "cpu flash"),
        ("cpu", None, torch.float64, 7, 0.1, "cpu flash"),
        ("cpu", None, torch.float32, 64, 0.0, "plain"),
        ("cpu", None, torch.float32, 64, -0.1, "plain"),
        ("mps", None, torch.float16, 64, 0.1, "plain"),
        ("cuda", (8, 0), torch.bfloat16, 64, 0.1, "cuda flash"),
        ("cuda", (9, 0), torch.float16, 256, 0.1, "cuda flash"),
        ("cuda", (9, 0), torch.float16, 264, 0.1, "cuda efficient"),
        ("cuda", (7, 5), torch.float16, 64, 0.1, "cuda efficient"),
        ("cuda", (9, 0), torch.float32, 64, 0.1, "cuda efficient"),
        ("cuda", (9, 0), torch.float32, 60, 0.1, "plain"),
        ("cuda", (9, 0), torch.float64, 64, 0.1, "plain"),
        ("cuda", (9, 0), torch.bfloat16, 64, -0.1, "plain"),
    ],
)
def test_the_kernel_that_fits(device, capability, dtype, head_dim, scale, kernel):
    q = stand_in(device, dtype, head_dim)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        chosen, why = choose_kernel(q, q, scale)
    assert chosen == kernel
    assert why


# On meta tensors a kernel computes shapes and dtypes, but no values. So these tests show that the arguments fit the two
# CUDA kernels, and that the results have the shapes that the ring adds up. bench/gpu.py checks the values, on a GPU.
@pytest.mark.parametrize(("kernel", "dtype"), [("cuda flash", torch.bfloat16), ("cuda efficient", torch.float32)])
@pytest.mark.parametrize(("Sq", "Sk", "causal"), [(40, 40, True), (20, 40, False), (40, 20, False), (39, 39, True)])
def test_shapes_and_dtypes_on_cuda(kernel, dtype, Sq, Sk, causal):
    B, H, G, D = 2, 8, 2, 64
    q, out, d_out = torch.empty(3, B, H, Sq, D, dtype=dtype, device="meta").unbind()
    k, v = torch.empty(2, B, G, Sk, D, dtype=dtype, device="meta").unbind()
    with mock.patch.object(fused_block, "choose_kernel", return_value=(kernel, "")):
        out_j, lse = fused_forward(q, k, v, scale=0.1, causal=causal)
        results = fused_backward(q, k, v, out, lse, d_out, scale=0.1, causal=causal)
    assert (out_j.shape, out_j.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert [x.shape for x in results] == [q.shape, k.shape, v.shape]
    assert all(x.dtype == dtype for x in results)


def efficient(q, k, v, bias, needs_lse, dropout=0.0, causal=False, *, scale):
    """What the kernel for CUDA returns: its lse is longer, with numbers that mean nothing."""
    out, lse = blockwise_attention(q, k, v, block_size=64, causal=causal, scale=scale)
    return out, F.pad(lse, (0, -lse.shape[2] % 32), value=torch.nan), torch.tensor(0), torch.tensor(0)


def efficient_backward(d_out, q, k, v, bias, out, lse, seed, offset, dropout, needed, causal, *, scale):
    S = q.shape[2]
    assert lse.shape[2] == S + -S % 32
    assert (lse[:, :, S:] == torch.inf).all()  # so that what stands there has no weight
    return *block_backward(q, k, v, d_out, lse[:, :, :S], (d_out * out).sum(dim=-1), scale, causal=causal), None


@pytest.mark.parametrize("length", [32, 39])
def test_lse_is_padded_with_infinity_for_the_efficient_kernel(length):
    """On a CPU, with the same numbers by plain code in the place of the kernel."""
    name = "_scaled_dot_product_efficient_attention"
    kernels = SimpleNamespace(**{name: efficient, f"{name}_backward": efficient_backward})
    chosen = mock.patch.object(fused_block, "choose_kernel", return_value=("cuda efficient", ""))
    with chosen, mock.patch.object(fused_block, "aten", kernels):
        assert_block(grouped_inputs(1, 4, 2, length, 8), causal=True)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_autocast_does_not_round_the_scores_of_a_plain_block(softcap):
    q, k, v, d_out = grouped_inputs(1, 2, 1, 9, 4)
    results, options = [], {"scale": -0.5, "softcap": softcap, "causal": True}
    for enabled in (False, True):
        with torch.autocast("cpu", enabled=enabled):
            out, lse = fused_forward(q, k, v, **options)
            results.append((out, lse, *fused_backward(q, k, v, out, lse, d_out, **options)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
