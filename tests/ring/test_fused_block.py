"""One block on a fused kernel against full attention in float64, which kernel is chosen, what cuDNN keeps and gets."""

import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.backends.cuda import cudnn_sdp_enabled
from torch.nn.attention import SDPBackend

from ringlab.basics.online_softmax import merge
from ringlab.ring import flash_ring, fused_block, gpu_kernels
from ringlab.ring.fused_block import choose_kernel, fused_backward, fused_forward
from ringlab.ring.gpu_kernels import torch_choice
from ringlab.support.rounding import exact_attention
from tests import every_way as ways
from tests.attention import (
    DTYPES,
    SEED,
    VIEWS,
    assert_attention,
    assert_four,
    assert_lse,
    assert_right,
    at_element_3,
    expected,
    grouped_inputs,
    rows_of_three_more,
    tokens_first,
)
from tests.every_way import Problem, assert_right_results, results_on_rank
from tests.fake_gpu import on_gpu


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
        pytest.param(2049, torch.float32, 1, (1, 1), marks=pytest.mark.slow),
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


def test_the_gradients_of_a_row_that_is_nan_are_nan():
    q, k, v, d_out = grouped_inputs(1, 2, 1, 6, 4, torch.float64)
    out, lse = fused_forward(q, k, v, scale=0.5)
    lse[0, 1, 2] = torch.nan
    assert all(x.isnan().any() for x in fused_backward(q, k, v, out, lse, d_out, scale=0.5))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [1, 64, "cuda flash", "cuda efficient", "cuda cudnn"])
def test_rows_that_see_no_key(causal, dtype, kernel, monkeypatch):
    """Query 2 of head 1 sees no key. The other queries give what they give without it."""
    if isinstance(kernel, int):  # that of CPUs, by strips of so many tokens
        monkeypatch.setattr(fused_block, "QUERIES", kernel)
        monkeypatch.setattr(fused_block, "KEYS", kernel)
        kernel = None
    q, k, v, d_out = grouped_inputs(1, 2, 1, 6, 4, dtype)
    huge = 1e30 if dtype != torch.float64 else 1e200
    k = torch.cat([k[..., :3], torch.full_like(k[..., 3:], -huge)], dim=-1)
    q = torch.cat([q[..., :3], torch.zeros_like(q[..., 3:])], dim=-1)  # meets the last number of k with zeros ...
    q[0, 1, 2] = torch.tensor([0, 0, 0, huge], dtype=dtype)  # ... but this one
    four = q, k, v, d_out
    if kernel:
        four = [F.pad(x, (0, 4)) for x in four]
    with on_gpu(kernel) if kernel else nullcontext():
        (out, d_q, d_k, d_v), lse = both_ways(*four, scale=0.5, causal=causal)
    out, d_q, d_k, d_v = (x[..., :4] for x in (out, d_q, d_k, d_v))
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


@pytest.mark.parametrize("plain", [0, 1])
def test_the_plain_block_takes_over_where_the_kernel_cannot_tell(plain):
    """The kernel returns lse 0 and out 0 for a row that saw no key. Where both may be right, all is computed again. Lse
    alone may be 0: of the first token, where its query is 0."""
    q, v = torch.zeros(1, 1, 3, 2), torch.randn(1, 1, 3, 2, generator=torch.Generator().manual_seed(SEED))
    v[0, 0, 0] *= 1 - plain
    with mock.patch.object(fused_block, "blockwise_attention", side_effect=fused_block.blockwise_attention) as asked:
        out, lse = fused_forward(q, q, v, scale=0.5, causal=True)
    assert asked.call_count == plain
    assert_attention(out, q, q, v, causal=True, scale=0.5)
    assert lse[0, 0, 0] == 0


# Which kernel ---------------------------------------------------------------------------------------------------------


def stand_in(device, S, D, heads, dtype):
    return SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, shape=(2, heads, S, D))


NONE = {"device": "cpu", "choice": None}  # PyTorch is not asked
TAKEN, AGAIN = "fused, PyTorch's choice for this GPU", "PyTorch's choice without cuDNN"
UNTRIED, NO_KERNEL = "no fused CUDA kernel was tried", "PyTorch takes no fused CUDA kernel"


@pytest.mark.parametrize(
    ("options", "kernel", "why"),
    [  # `choice` is PyTorch's, and `without` what it takes where cuDNN is switched off
        (NONE, "cpu flash", "any head dim"),
        ({**NONE, "D": 7, "dtype": torch.float64}, "cpu flash", "any floating dtype"),
        ({**NONE, "scale": 0.0}, "plain", "scale is 0; "),
        ({**NONE, "scale": -0.1}, "plain", "scale is -0.1; "),
        ({**NONE, "softcap": 2.0}, "plain", "caps scores"),
        ({**NONE, "device": "mps"}, "plain", "no fused kernel for mps"),
        ({**NONE, "device": "cuda", "scale": -0.1}, "plain", "scale is -0.1; "),
        ({**NONE, "device": "cuda", "softcap": 2.0}, "plain", "caps scores"),
        *(({"choice": choice}, "plain", NO_KERNEL) for choice in (-1, 0, 4)),  # none, math, of another maker
        ({"choice": 1, "D": 8}, "cuda flash", TAKEN),
        ({"choice": 1, "D": 256}, "cuda flash", TAKEN),
        ({"choice": 1, "D": 264}, "plain", UNTRIED),
        ({"choice": 1, "D": 60}, "plain", UNTRIED),
        ({"choice": 2, "D": 8, "dtype": torch.float32}, "cuda efficient", TAKEN),
        ({"choice": 2, "D": 128}, "cuda efficient", TAKEN),
        ({"choice": 2, "D": 136}, "plain", UNTRIED),
        ({"choice": 2, "S": (2**16, 2**16)}, "cuda efficient", TAKEN),
        *(({"choice": 2, "S": S}, "plain", "beyond 65,536 tokens") for S in ((8, 2**16 + 8), (2**16 + 8, 8))),
        ({"choice": 1, "S": (2**16 + 8, 2**16 + 8)}, "cuda flash", TAKEN),
        ({"choice": 2, "D": 124}, "plain", UNTRIED),
        ({}, "cuda cudnn", TAKEN),
        ({"D": 256, "S": (2048, 4096)}, "cuda cudnn", TAKEN),
        ({"D": 264}, "plain", UNTRIED),
        ({"D": 68}, "plain", UNTRIED),
        ({"heads": 2**15 - 1}, "cuda cudnn", TAKEN),
        ({"heads": 2**15}, "plain", UNTRIED),  # of two sequences
        ({"S": (4096, 4096), "D": 56}, "cuda flash", AGAIN),
        ({"S": (1, 4096)}, "cuda flash", AGAIN),  # a new token
        ({"S": (128, 1)}, "cuda flash", AGAIN),
        ({"S": (576, 1152)}, "cuda flash", AGAIN),  # S = 9,216 on 8 ranks: 64 mod 128
        ({"S": (1152, 576)}, "cuda flash", AGAIN),
        ({"S": (4095, 4095)}, "cuda flash", AGAIN),  # striped
        ({"S": (768, 511)}, "cuda flash", AGAIN),  # of a window
        ({"S": (4095, 4095), "without": 2}, "cuda efficient", AGAIN),  # a PyTorch without flash
        ({"S": (4095, 4095), "without": 2, "D": 192}, "plain", UNTRIED),
        ({"S": (4095, 4095), "without": 0}, "plain", NO_KERNEL),  # flash is switched off
    ],
)
def test_the_kernel_that_fits(options, kernel, why):
    given = {"device": "cuda", "choice": 3, "without": 1, "S": (128, 128), "D": 64, "heads": 2, "scale": 0.1, **options}
    sizes = given["D"], given["heads"], given.get("dtype", torch.bfloat16)
    q, k = (stand_in(given["device"], S, *sizes) for S in given["S"])
    with mock.patch.object(gpu_kernels, "torch_choice") as asked:
        asked.side_effect = lambda *_: given["choice"] if cudnn_sdp_enabled() else given["without"]
        chosen, reason = choose_kernel(q, k, given["scale"], given.get("softcap"), True)
    assert chosen == kernel
    assert why in reason
    assert asked.mock_calls[:1] == ([] if given["choice"] is None else [mock.call(q, k, given["scale"], True)])


@pytest.mark.parametrize("causal", [False, True])
def test_pytorch_is_asked_as_its_own_attention_asks(causal):
    """About gradients too, also where autograd is off: both passes must take one kernel."""
    q, k, *_ = grouped_inputs(1, 4, 2, 9, 8)
    with mock.patch.object(torch, "_fused_sdp_choice", side_effect=torch._fused_sdp_choice) as asked, torch.no_grad():
        choice = torch_choice(q, k, 0.3, causal)
    assert choice == SDPBackend.FLASH_ATTENTION.value  # that of the CPU
    (heads, *others), options = asked.call_args
    assert torch.equal(heads, q[:, :2])
    assert (heads.requires_grad, q.requires_grad) == (True, False)
    assert (others, options) == ([k, k, None, 0.0, causal], {"scale": 0.3})
    with torch.inference_mode():
        q, k = q.clone(), k.clone()
    assert torch_choice(q, k, 0.3, causal) == choice


def test_the_numbers_of_the_kernels_are_those_of_pytorch():
    names = {backend.value: backend.name for backend in map(SDPBackend, gpu_kernels.CHOICES)}
    assert names == {1: "FLASH_ATTENTION", 2: "EFFICIENT_ATTENTION", 3: "CUDNN_ATTENTION"}
    assert gpu_kernels.CHOICES == {1: "cuda flash", 2: "cuda efficient", 3: "cuda cudnn"}


CUDA = pytest.mark.parametrize("kernel", gpu_kernels.CHOICES.values())


class OnOneDevice:
    """torch.ops.aten, for tensors of one device."""

    def __getattr__(self, name):
        def call(*args, **options):
            assert {x.device.type for x in args if isinstance(x, torch.Tensor)} == {"meta"}
            return getattr(torch.ops.aten, name)(*args, **options)

        return call


# On meta tensors a kernel computes shapes and dtypes, but no values. So these tests show that the arguments fit the
# CUDA kernels of this release of torch, and that the results have the shapes that the ring adds up.
@CUDA
@pytest.mark.parametrize(("Sq", "Sk", "causal"), [(40, 40, True), (20, 40, False), (40, 20, False), (39, 39, True)])
def test_shapes_and_dtypes_on_cuda(kernel, Sq, Sk, causal):
    B, H, G, D = 2, 8, 2, 64
    dtype = torch.float32 if kernel == "cuda efficient" else torch.bfloat16
    q, out, d_out = torch.empty(3, B, H, Sq, D, dtype=dtype, device="meta").unbind()
    k, v = torch.empty(2, B, G, Sk, D, dtype=dtype, device="meta").unbind()
    chosen = mock.patch.object(fused_block, "choose_kernel", return_value=(kernel, ""))
    with chosen, mock.patch.object(gpu_kernels, "aten", OnOneDevice()):
        out_j, lse = fused_forward(q, k, v, scale=0.1, causal=causal)
        results = fused_backward(q, k, v, out, lse, d_out, scale=0.1, causal=causal)
    assert (out_j.shape, out_j.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert [x.shape for x in results] == [q.shape, k.shape, v.shape]
    assert all(x.dtype == dtype for x in results)


def expanded(x):
    return x[:1, :1, :1].expand_as(x)


@CUDA
@pytest.mark.parametrize(("Sq", "lengths"), [(5, (9, 40)), (40, (3, 1)), (1, (37, 2))])
def test_two_blocks_on_a_gpu(kernel, Sq, lengths):
    """The second block gets out and lse of all keys. Sq, and the keys of each block, differ."""
    q, _, _, d_out = grouped_inputs(2, 4, 2, Sq, 8)
    _, k, v, _ = grouped_inputs(2, 4, 2, sum(lengths), 8)
    blocks = list(zip(k.split(lengths, dim=2), v.split(lengths, dim=2), strict=True))
    with on_gpu(kernel, 0.5) as kernels:
        out, lse = merge(*(x for block in blocks for x in fused_forward(q, *block, scale=0.5)))
        whole = F.pad(lse, (0, 3))[..., :-3]  # a slice of rows
        parts = [fused_backward(q, *block, out, whole, d_out, scale=0.5) for block in blocks]
    d_q, d_k, d_v = zip(*parts, strict=True)
    assert_four((out, sum(d_q), torch.cat(d_k, dim=2), torch.cat(d_v, dim=2)), expected(q, k, v, d_out, scale=0.5))
    for each in (False, True):
        sizes = [size for backward, _, *size in kernels.calls if backward == each and size != [1, 1]]
        assert sizes == [[Sq, length] for length in lengths]


@CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", [*VIEWS, at_element_3, rows_of_three_more, expanded])
def test_views_on_a_gpu(kernel, dtype, view):
    """Of memory that begins anywhere, with rows any number of bytes apart: they would end the process."""
    four = [x if view is not expanded else x[:1, :1, :1].expand_as(x) for x in grouped_inputs(2, 4, 2, 20, 8, dtype)]
    with on_gpu(kernel):
        assert_block(four, view=view)
        for D, D_v in ((8, 16), (16, 8)):  # rows of one length: padded
            q, k, v, d_out = (x.repeat(1, 1, 1, 2) for x in four)
            assert_block([q[..., :D], k[..., :D], v[..., :D_v], d_out[..., :D_v]], view=view, causal=True)
        q, k, v, d_out = four
        out, lse = fused_forward(q, k, v, scale=0.5)
        d_q, *_ = fused_backward(q, k, v, out if view is expanded else view(out), lse, d_out, scale=0.5)
        assert torch.equal(d_q, fused_backward(q, k, v, out, lse, d_out, scale=0.5)[0])


def test_the_steps_of_a_single_row_count_too():
    """PyTorch's efficient kernel refuses them, though nobody takes such a step."""
    (x,) = gpu_kernels.aligned(rows_of_three_more(torch.ones(1, 1, 1, 8)))
    assert x.stride() == (8, 8, 8, 1)


@CUDA
def test_what_lies_well_on_a_gpu_is_not_copied(kernel):
    q, k, v, d_out = (tokens_first(x)[:, :, 3:] for x in grouped_inputs(2, 4, 4, 20, 8))
    with on_gpu(kernel), mock.patch.object(torch.Tensor, "clone", side_effect=AssertionError):
        assert [x.data_ptr() for x in gpu_kernels.aligned(q, k, v)] == [x.data_ptr() for x in (q, k, v)]
        both_ways(q, k, v, d_out, scale=0.5, causal=False)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_autocast_does_not_round_the_scores_of_a_plain_block(softcap):
    q, k, v, d_out = grouped_inputs(1, 2, 1, 9, 4)
    results, options = [], {"scale": -0.5, "softcap": softcap, "causal": True}
    for enabled in (False, True):
        with torch.autocast("cpu", enabled=enabled):
            out, lse = fused_forward(q, k, v, **options)
            results.append((out, lse, *fused_backward(q, k, v, out, lse, d_out, **options)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# Who merges in one pass -----------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(
    ("kind", "dtype", "found", "taken"),
    [
        (OnGpu, torch.float32, True, True),
        (OnGpu, torch.float32, False, False),
        (OnGpu, torch.float64, True, False),
        (torch.Tensor, torch.float32, True, False),
    ],
)
def test_who_merges_in_one_pass(kind, dtype, found, taken):
    out, _, _, out_j = (x.to(dtype).as_subclass(kind) for x in grouped_inputs(2, 3, 3, 5, 4))
    four = out, out[..., 0].clone(), out_j, out_j[..., 1].clone()
    right, rows = [x.clone() for x in four[:2]] if taken else merge(*four), mock.Mock()
    with mock.patch.object(flash_ring, "one_pass_merge", return_value=rows if found else None):
        flash_ring.merge_into(*four)
    assert rows.mock_calls == ([mock.call(*four)] if taken else [])
    torch.testing.assert_close(list(four[:2]), list(right))  # nor is it merged twice


@pytest.fixture
def merge_rows(monkeypatch):
    """In place of fused_merge.py, on a CPU that is taken for a GPU."""
    zeros, rows = torch.zeros, mock.Mock()
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    monkeypatch.setitem(sys.modules, "ringlab.ring.fused_merge", SimpleNamespace(merge_rows=rows))
    flash_ring.one_pass_merge.cache_clear()
    yield rows
    flash_ring.one_pass_merge.cache_clear()


def test_triton_is_tried_once(merge_rows):
    assert flash_ring.one_pass_merge() is merge_rows
    assert flash_ring.one_pass_merge() is merge_rows
    ((tried, _),) = ((call.args, call.kwargs) for call in merge_rows.call_args_list)
    assert [x.shape for x in tried] == [(1, 1, 1, 1), (1, 1, 1)] * 2


@pytest.mark.usefixtures("merge_rows")
def test_without_triton_nothing_is_said(monkeypatch):
    monkeypatch.delitem(sys.modules, "ringlab.ring.fused_merge")
    monkeypatch.setitem(sys.modules, "triton", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flash_ring.one_pass_merge() is None


def test_a_triton_that_does_not_work_is_named(merge_rows):
    merge_rows.side_effect = RuntimeError("no C compiler")
    with pytest.warns(UserWarning, match="merges in five passes: Triton does not work here, .*no C compiler"):
        assert flash_ring.one_pass_merge() is None


# Plans that were made for other tensors -------------------------------------------------------------------------------


def as_it_is(x):
    return x


def packed(x):
    """As the queries of one projection for q, k and v."""
    rows = x.transpose(1, 2)
    return torch.cat([rows, rows, rows], dim=2)[:, :, : x.shape[1]].transpose(1, 2)


ORDERS = [  # in memory, of q and of the gradient of out
    (as_it_is, as_it_is),
    (as_it_is, tokens_first),
    (tokens_first, as_it_is),
    (packed, tokens_first),
    (at_element_3, tokens_first),
]


def ordered(attention, of_q, of_d_out):
    def call(q, k, v, **options):
        out = attention(of_q(q), k, v, **options)
        out.register_hook(of_d_out)
        return out

    return call


def in_every_order(context, way, problems):
    """What each rank finds, by order, and how often a plan was read wrongly: all in one process."""
    found = []
    with on_gpu("cuda cudnn") as kernels:
        for order in ORDERS:
            with mock.patch.dict(ways.WAYS, {way: ordered(ways.WAYS[way], *order)}):
                found.append(results_on_rank(context, way, context.world_size, problems))
    return found, kernels.misread


def test_a_plan_fits_every_later_call(ranks):
    """Layers of two masks, whose pieces have the same shapes; sinks, head dims of v, and orders in memory. Other ways
    and numbers of ranks are drawn: tests/ways/test_schedules.py."""
    way, P, S, H = "ring", 3, 48, 6
    full, window = ({"causal": True, "layout": "zigzag", "window": w} for w in (None, S // 2))
    few = [Problem(H, P, S, options, head_dim=8) for options in (full, window)]
    few += [Problem(H, 1, S, window, head_dim=8), replace(few[0], sinks=torch.float32)]
    few += [replace(few[1], sinks=torch.float32), *(replace(few[0], head_dim=D, value_dim=24 - D) for D in (8, 16))]
    of_ranks = ranks(P, in_every_order, way, few)
    assert [misread for _, misread in of_ranks] == [0] * P
    for order, per_rank in zip(ORDERS, zip(*(found for found, _ in of_ranks), strict=True), strict=True):
        try:
            assert_right_results(lambda *given, results=per_rank: results, way, P, few)
        except AssertionError as error:
            raise AssertionError(f"{[each.__name__ for each in order]}: {error}") from None


# Which blocks cuDNN gets ----------------------------------------------------------------------------------------------


def test_pytorch_is_asked_about_aligned_memory_and_may_take_nothing():
    q, k, *_ = (at_element_3(x) for x in grouped_inputs(1, 4, 2, 9, 8))
    with mock.patch.object(torch, "_fused_sdp_choice", side_effect=RuntimeError("No viable backend")) as asked:
        assert gpu_kernels.torch_choice(q, k, 0.3, True) == 0
    assert all(x.data_ptr() % 16 == 0 for x in asked.call_args.args[:3])
    assert torch.equal(asked.call_args.args[1], k)


def taken(context, problems):
    """The results; which kernels each problem took; if cuDNN is on, and how often it is taken where it is off."""
    results, by_kernel = [], []
    for problem in problems:
        with on_gpu() as kernels:
            results += results_on_rank(context, "ring", context.world_size, [problem])
        by_kernel.append((kernels.taken["cudnn"], kernels.taken["flash"]))
    with gpu_kernels.without_cudnn(), on_gpu() as kernels:
        results_on_rank(context, "ring", context.world_size, problems[:1])
    return results, by_kernel, (cudnn_sdp_enabled(), kernels.taken["cudnn"])


def near(score, four):
    """The same tensors, with a number of q and k that adds so much to each score."""
    q, k, *rest = four
    scale = q.shape[-1] ** -0.5
    q, k = q.clone(), k.clone()
    q[..., 0], k[..., 0] = 16.0, score / scale / 16
    return q, k, *rest


class Near(Problem):
    """All scores lie near -100."""

    def inputs(self):
        return near(-100.0, super().inputs())


@pytest.mark.parametrize("P", [2, *(pytest.param(P, marks=pytest.mark.slow) for P in (1, 3))])
def test_cudnn_gets_shapes_that_come_back(ranks, P):
    """Not those of documents, of windows, nor of 64 mod 128 tokens, for which it has faults."""
    few = [
        Problem(2, 1, 256 * P, {"causal": True, "layout": "zigzag"}, head_dim=64),
        Problem(2, 1, 256 * P, {"causal": True, "layout": "zigzag", "documents": [256 * P - 128, 128]}, head_dim=64),
        Problem(2, 1, 128 * P, {"causal": True, "layout": "striped"}, head_dim=64),
        Near(2, 1, 128 * P, {"causal": True, "layout": "zigzag"}, head_dim=64),
        Near(2, 1, 384 * P, {"causal": True, "layout": "zigzag"}, head_dim=64),
    ]
    of_ranks = ranks(P, taken, few)
    assert_right_results(lambda *_: [results for results, *_ in of_ranks], "ring", P, few)
    for rank, (_, (whole, documents, striped, *halves), switch) in enumerate(of_ranks):
        assert (whole, documents[0], switch) == ((2 * P, 0), 0, (True, 0))
        assert striped[0] == 2 * (rank + 1)  # the blocks of later ranks are smaller by a row and a key
        assert all(by_cudnn <= 2 for by_cudnn, _ in halves)
