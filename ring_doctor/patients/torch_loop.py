"""PyTorch's own context-parallel loop, blocks rotated by all-gather (its default): private functions, forward and back.

Its dispatcher refuses a causal mask on CPUs. Here the two functions are called with the CPU's kernels.
"""

from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as loop

ABOUT = "torch's _templated_ring_attention and its backward pass, unmodified, rotation by all-gather"
VERSION = f"torch {torch.__version__}"
UNEQUAL = False
LAYOUTS, GROUPED = ("contiguous", "zigzag"), False
kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def switched(q, layout, rotation):
    """torch's switches: the layout, the rotation, and float32 sums unless the input is float64."""
    return mock.patch.multiple(
        loop._cp_options,
        enable_load_balance=layout == "zigzag",
        rotate_method=loop._RotateMethod[rotation],
        convert_to_f32=q.dtype != torch.float64,
    )


class Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, *where):
        *ctx.where, ctx.group, scale = where
        ctx.options = {"is_causal": causal, "dropout_p": 0.0, "scale": scale}
        with switched(q, *ctx.where):
            out, lse = loop._templated_ring_attention(ctx.group, 2, kernel, q, k, v, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, _):
        options = dict(zip(("query", "key", "value", "out", "logsumexp"), ctx.saved_tensors, strict=True)) | ctx.options
        options |= {"grad_out": d_out, "grad_out_name": "grad_out"}
        with switched(d_out, *ctx.where):
            gradients = loop._templated_ring_attention_backward(ctx.group, 2, kernel_backward, **options)
        return *gradients[:3], None, None, None, None, None


def attention(q, k, v, causal=False, scale=None, layout="contiguous", group=None, rotation="ALL_GATHER"):
    return Loop.apply(q, k, v, causal, layout, rotation, group or dist.group.WORLD, scale)


all_to_all = partial(attention, rotation="ALL_TO_ALL")
CLAIMS = {"all_to_all": {"about": ABOUT.replace("all-gather", "all-to-all")}}
