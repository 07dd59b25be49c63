"""zhuzilin/ring-flash-attention in bfloat16, the input that flash_attn's kernels take; `in_float32` for other kernels.

attention    contiguous chunks      zigzag, stripe    these layouts
llama3       packed documents as for Llama 3: K and V of all ranks
"""

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_doctor.patients.flash_attn_by_hand import module_of

CONTIGUOUS, ZIGZAG, STRIPE, LLAMA3 = (
    module_of("ring_flash_attn", name)
    for name in ("ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn", "llama3_flash_attn_varlen")
)
REPLACED = "flash_attn's kernels replaced by float64 math"
ABOUT = f"ring_flash_attn_func of ring-flash-attn; {REPLACED}"
VERSION = "ring-flash-attn 0.1.8"
UNEQUAL = False
LAYOUTS, TENSORS, DTYPES = ("contiguous",), "bshd", ("bfloat16",)
WORLDS = (2, 3, 4)  # on one rank it sends to itself, which gloo refuses


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    return CONTIGUOUS.ring_flash_attn_func(q, k, v, causal=causal, softmax_scale=scale, group=group)


in_float32 = attention


def zigzag(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    return ZIGZAG.zigzag_ring_flash_attn_func(q, k, v, causal=causal, softmax_scale=scale, group=group)


def stripe(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    return STRIPE.stripe_flash_attn_func(q, k, v, causal=causal, softmax_scale=scale, group=group)


def llama3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    documents: tuple[int, ...] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    r, P = dist.get_rank(group), dist.get_world_size(group)
    bounds = torch.tensor([0, *accumulate(documents or (q.shape[1] * P,))], dtype=torch.int32)
    where = LLAMA3.llama3_flash_attn_prepare_cu_seqlens(bounds, causal, r, P)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    options = dict(zip(names, where, strict=True)) | {"causal": causal, "softmax_scale": scale, "group": group}
    rows = zip(q, k, v, strict=True)  # it takes no batch
    return torch.stack([LLAMA3.llama3_flash_attn_varlen_func(*row, heads_k_stride=1, **options) for row in rows])


CLAIMS: dict[str, dict[str, Any]] = {
    "in_float32": {"about": f"ring_flash_attn_func of ring-flash-attn in float32; {REPLACED}", "dtypes": ("float32",)},
    "zigzag": {
        "about": f"zigzag_ring_flash_attn_func of ring-flash-attn; {REPLACED}",
        "layouts": ("zigzag",),
        "causal": (True,),
    },
    "stripe": {
        "about": f"stripe_flash_attn_func of ring-flash-attn; {REPLACED}",
        "layouts": ("striped",),
        "causal": (True,),
    },
    "llama3": {"about": f"llama3_flash_attn_varlen_func of ring-flash-attn; {REPLACED}", "worlds": (1, 2, 3, 4, 5)},
}
