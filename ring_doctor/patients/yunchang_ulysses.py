"""yunchang (feifeibear/long-context-attention), all-to-all: UlyssesAttention around torch's attention.

Its own functions for the attention of a rank need a GPU, also with AttnType.TORCH_MATH.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from yunchang import UlyssesAttention
from yunchang.kernels import AttnType

ABOUT = "UlyssesAttention of yunchang; its attn_fn is torch's scaled_dot_product_attention"
VERSION = "yunchang 0.6.4"
UNEQUAL = False
LAYOUTS, TENSORS = ("contiguous",), "bshd"
HEADS, WORLDS = 12, (1, 2, 3, 4)  # a head count that every number of ranks divides


def local(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float, **_: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    ulysses = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
    ulysses.attn_fn = local
    return ulysses(q, k, v, causal=causal, softmax_scale=scale)
