"""Hugging Face diffusers: its rings take their kernels as arguments, which are float64 math here.

attention            TemplatedRingAttention
ring_anything        a ring for chunks of any length, forward pass
ulysses              all-to-all, by `dispatch_attention_fn` with its native backend, which a CPU runs as it is
ulysses_anything     the same for any number of heads and tokens, forward pass
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import (
    TemplatedRingAnythingAttention,
    TemplatedRingAttention,
    dispatch_attention_fn,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_doctor.patients.flash_attn_by_hand import flash_attn_backward, flash_attn_forward
from ringlab.support.processes import RankContext

ABOUT = "TemplatedRingAttention of diffusers, unmodified; its forward_op and backward_op are float64 math"
VERSION = "diffusers 0.42.1"
UNEQUAL = False
LAYOUTS, CAUSAL, TENSORS, GROUPED, WORLDS = ("contiguous",), (False,), "bshd", False, (2, 3, 4)
CONFIGS: dict[str, ParallelConfig] = {}  # of this rank
OPTIONS = {  # by configuration
    "float64": {"convert_to_fp32": False},
    "float32": {"convert_to_fp32": True},
    "ring_anything": {"convert_to_fp32": False, "ring_anything": True},
    "ulysses": {},
    "ulysses_anything": {"ulysses_anything": True},
}


def configure(names: Sequence[str], context: RankContext) -> None:
    for name in names:
        sizes = (1, context.world_size) if "ulysses" in name else (context.world_size, 1)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("ring", "ulysses"))
        degree = {("ulysses_degree" if "ulysses" in name else "ring_degree"): context.world_size}
        config = ContextParallelConfig(**degree, **OPTIONS[name])
        config.setup(context.rank, context.world_size, context.device, mesh)
        CONFIGS[name] = ParallelConfig(context_parallel_config=config)


setup = partial(configure, ("float64", "float32"))


def forward_op(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any, _save_ctx: bool, **more: Any) -> tuple:
    _mask, _dropout, causal, ctx.scale, *_rest = options
    out, lse, *_ = flash_attn_forward(q, k, v, softmax_scale=ctx.scale, causal=causal)
    if _save_ctx:
        ctx.save_for_backward(q, k, v)
    return out, lse.mT


def backward_op(ctx: Any, d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> list:
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    inputs = d_out, query, key, value, out, lse.mT
    flash_attn_backward(*inputs, dq, dk, dv, softmax_scale=ctx.scale, causal=False)
    return [dq, dk, dv]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    config = CONFIGS["float64" if q.dtype == torch.float64 else "float32"]
    return TemplatedRingAttention.apply(q, k, v, None, 0.0, False, scale, False, False, forward_op, backward_op, config)


def ring_anything(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    options = (None, 0.0, False, q.shape[-1] ** -0.5 if scale is None else scale, False, False)
    return TemplatedRingAnythingAttention.apply(q, k, v, *options, forward_op, backward_op, CONFIGS["ring_anything"])


def ulysses(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return dispatch_attention_fn(q, k, v, scale=scale, backend="native", parallel_config=CONFIGS["ulysses"])


def ulysses_anything(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return dispatch_attention_fn(q, k, v, scale=scale, backend="native", parallel_config=CONFIGS["ulysses_anything"])


CLAIMS: dict[str, dict[str, Any]] = {
    "ring_anything": {
        "about": "TemplatedRingAnythingAttention of diffusers, unmodified; its forward_op is float64 math",
        "gradients": False,  # its backward pass says that it is not implemented
        "unequal": True,
    },
    "ulysses": {
        "about": "dispatch_attention_fn of diffusers with ulysses_degree, backend native, unmodified",
        "heads": 12,  # a head count that every number of ranks divides
    },
    "ulysses_anything": {
        "about": "dispatch_attention_fn of diffusers with ulysses_anything, backend native, unmodified",
        "gradients": False,  # its backward pass says that it is not implemented
        "unequal": True,
        "heads": 7,  # heads that no number of ranks divides
    },
}
for name, claims in CLAIMS.items():
    claims["setup"] = partial(configure, [name])
