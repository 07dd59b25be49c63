"""What cuDNN keeps from call to call, and which blocks it gets: rings on real ranks, with the kernels of fake_gpu."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.backends.cuda import cudnn_sdp_enabled

from ringlab.ring import gpu_kernels
from tests import every_way as ways
from tests.attention import assert_four, at_element_3, expected, grouped_inputs, tokens_first
from tests.every_way import Problem, assert_right_results, results_on_rank
from tests.fake_gpu import on_gpu

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


OTHERS = [("ring", 2), ("ring", 4), ("all-gather", 3), ("all-to-all", 3)]


@pytest.mark.parametrize(("way", "P"), [("ring", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)])
def test_a_plan_fits_every_later_call(ranks, way, P):
    """Layers of two masks, whose pieces have the same shapes; sinks, head dims of v, and orders in memory."""
    S, H = 16 * P, 2 * P
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


def test_a_plan_reads_by_the_strides_that_it_was_made_for():
    """Else the test above could not fail."""
    q, k, v, d_out = grouped_inputs(1, 4, 2, 8, 8)
    rest = torch.tensor(0), torch.tensor(0), None, None, None, 8, 8, 0.0, False
    with on_gpu("cuda cudnn") as kernels:
        out, lse, *_ = kernels._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=0.5)
        backward = kernels._scaled_dot_product_cudnn_attention_backward
        first, second = (
            backward(order(d_out), q, k, v, order(out), lse, *rest, scale=0.5) for order in (as_it_is, tokens_first)
        )
    assert_four([out, *first], expected(q, k, v, d_out, scale=0.5))
    assert kernels.misread == 1
    assert not any(torch.allclose(x, y, atol=0.1) for x, y in zip(first, second, strict=True))


# Which blocks cuDNN gets ----------------------------------------------------------------------------------------------

AGAIN = "PyTorch's choice without cuDNN"


@pytest.mark.parametrize(
    ("Sq", "Sk", "D", "without", "kernel", "why"),
    [  # `without`: what PyTorch takes where cuDNN is switched off
        (128, 128, 64, 1, "cuda cudnn", "PyTorch's choice for this GPU"),
        (4096, 2048, 128, 1, "cuda cudnn", "PyTorch's choice for this GPU"),
        (2048, 4096, 256, 1, "cuda cudnn", "PyTorch's choice for this GPU"),
        (1, 4096, 128, 1, "cuda flash", AGAIN),  # a new token
        (1, 1, 128, 1, "cuda flash", AGAIN),
        (128, 1, 128, 1, "cuda flash", AGAIN),
        (576, 1152, 128, 1, "cuda flash", AGAIN),  # S = 9,216 on 8 ranks: 64 mod 128
        (1152, 576, 128, 1, "cuda flash", AGAIN),
        (4095, 4095, 128, 1, "cuda flash", AGAIN),  # striped
        (768, 511, 128, 1, "cuda flash", AGAIN),  # of a window
        (4096, 4096, 56, 1, "cuda flash", AGAIN),
        (4095, 4095, 128, 2, "cuda efficient", AGAIN),  # a PyTorch without flash
        (4095, 4095, 192, 2, "plain", "no fused CUDA kernel was tried"),
        (4095, 4095, 128, 0, "plain", "PyTorch takes no fused CUDA kernel"),  # flash is switched off
    ],
)
def test_the_kernel_of_a_shape(Sq, Sk, D, without, kernel, why):
    q, k = (torch.empty(1, 8, S, D, dtype=torch.bfloat16, device="meta") for S in (Sq, Sk))
    with mock.patch.object(gpu_kernels, "torch_choice", side_effect=lambda *_: 3 if cudnn_sdp_enabled() else without):
        chosen, reason = gpu_kernels.gpu_kernel(q, k, 0.1, Sq == Sk)
    assert chosen == kernel
    assert why in reason


def test_pytorch_is_asked_about_aligned_memory_and_may_take_nothing():
    q, k, *_ = (at_element_3(x) for x in grouped_inputs(1, 4, 2, 9, 8))
    with mock.patch.object(torch, "_fused_sdp_choice", side_effect=RuntimeError("No viable backend")) as asked:
        assert gpu_kernels.torch_choice(q, k, 0.3, True) == 0
    assert all(x.data_ptr() % 16 == 0 for x in asked.call_args.args[:3])
    assert torch.equal(asked.call_args.args[1], k)


def taken(context, problems):
    """The results, which kernels were taken for each problem, and for how many shapes cuDNN made plans."""
    results, by_kernel = [], []
    for problem in problems:
        with on_gpu() as kernels:
            results += results_on_rank(context, "ring", context.world_size, [problem])
        by_kernel.append((kernels.taken["cudnn"], kernels.taken["flash"]))
    return results, by_kernel, cudnn_sdp_enabled()


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
        assert (whole, documents[0], switch) == ((2 * P, 0), 0, True)
        assert striped[0] == 2 * (rank + 1)  # the blocks of later ranks are smaller by a row and a key
        assert all(by_cudnn <= 2 for by_cudnn, _ in halves)
