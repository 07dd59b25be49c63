"""yunchang (feifeibear/long-context-attention) with its attention type TORCH_MATH, which has a forward pass only.

`ulysses` is UlyssesAttention around torch's attention, because its own functions need a GPU.
"""

from typing import Any

import torch.distributed as dist
import yunchang
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from yunchang.kernels import AttnType

ABOUT = "ring_flash_attn_func of yunchang with AttnType.TORCH_MATH, unmodified"
VERSION = "yunchang 0.6.4"
UNEQUAL, GROUPED = False, False
LAYOUTS, TENSORS, DTYPES, GRADIENTS = ("contiguous",), "bshd", ("float32",), False


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    options = {"causal": causal, "softmax_scale": scale, "group": group}
    return yunchang.ring_flash_attn_func(q, k, v, attn_type=AttnType.TORCH_MATH, **options)


def local(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float, **_: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def ulysses(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    layer = yunchang.UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
    layer.attn_fn = local
    return layer(q, k, v, causal=causal, softmax_scale=scale)


CLAIMS: dict[str, dict[str, Any]] = {
    "ulysses": {
        "about": "UlyssesAttention of yunchang; its attn_fn is torch's scaled_dot_product_attention",
        "grouped": True,
        "dtypes": ("float64", "float32", "bfloat16"),
        "gradients": True,
        "heads": 12,  # a head count that every number of ranks divides
        "worlds": (1, 2, 3, 4),
    }
}
