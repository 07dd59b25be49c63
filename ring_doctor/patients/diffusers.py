"""Hugging Face diffusers: TemplatedRingAttention, which takes its kernels as arguments: they are float64 math here."""

from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import TemplatedRingAttention
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_doctor.patients.flash_attn_by_hand import flash_attn_backward, flash_attn_forward
from ringlab.support.processes import RankContext

ABOUT = "TemplatedRingAttention of diffusers, unmodified; its forward_op and backward_op are float64 math"
VERSION = "diffusers 0.42.1"
UNEQUAL = False
LAYOUTS, CAUSAL, TENSORS, GROUPED, WORLDS = ("contiguous",), (False,), "bshd", False, (2, 3, 4)
CONFIGS: dict[bool, ParallelConfig] = {}  # by whether sums are in float32


def setup(context: RankContext) -> None:
    mesh = init_device_mesh("cpu", (context.world_size, 1), mesh_dim_names=("ring", "ulysses"))
    for in_float32 in (False, True):
        ring = ContextParallelConfig(ring_degree=context.world_size, convert_to_fp32=in_float32)
        ring.setup(context.rank, context.world_size, context.device, mesh)
        CONFIGS[in_float32] = ParallelConfig(context_parallel_config=ring)


def forward_op(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any, _save_ctx: bool, **more: Any) -> tuple:
    _mask, _dropout, causal, ctx.scale, *_rest = options
    out, lse, *_ = flash_attn_forward(q, k, v, 0.0, ctx.scale, causal)
    if _save_ctx:
        ctx.save_for_backward(q, k, v)
    return out, lse.mT


def backward_op(ctx: Any, d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> list:
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    flash_attn_backward(d_out, query, key, value, out, lse.mT, dq, dk, dv, 0.0, ctx.scale, False)
    return [dq, dk, dv]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    config = CONFIGS[q.dtype != torch.float64]
    return TemplatedRingAttention.apply(q, k, v, None, 0.0, False, scale, False, False, forward_op, backward_op, config)
