"""lucidrains/ring-attention-pytorch.

attention    `ring_flash_attn`, its ring for CPUs; CUDA tensors take another file
zigzag       `zig_zag_attn`: K and V of all ranks by its AllGather, zigzag layout
tree         `tree_attn_decode`: queries that all ranks have, keys and values of each rank
"""

from typing import Any

import torch
import torch.distributed as dist
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn
from ring_attention_pytorch.tree_attn_decoding import tree_attn_decode
from ring_attention_pytorch.zig_zag_attention import zig_zag_attn
from torch import Tensor

from ring_doctor.asking.case import positions

ABOUT = "ring_flash_attn of ring-attention-pytorch, unmodified"
VERSION = "ring-attention-pytorch 0.5.20"
UNEQUAL = False
GROUPED = False  # its query head h uses K/V head h mod G, an order of its own
LAYOUTS, TENSORS, DTYPES = ("contiguous", "striped"), "bshd", ("float32",)
WORLDS = (2, 3, 4)  # on one rank its backward pass sends to itself, which gloo refuses


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, layout: str = "contiguous") -> Tensor:
    return ring_flash_attn(q, k, v, causal=causal, ring_reduce_col=True, striped_ring_attn=layout == "striped")


def zigzag(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    P, C = dist.get_world_size(), q.shape[2]
    of_ranks = [positions("zigzag", C * P, rank, P) for rank in range(P)]
    mask = of_ranks[dist.get_rank()].unsqueeze(-1) >= torch.cat(of_ranks)
    return zig_zag_attn(q, k, v, attn_mask=mask)


def tree(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    P, r = dist.get_world_size(), dist.get_rank()
    qs = [torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(P)]
    dist.all_gather(qs, q.contiguous())
    return tree_attn_decode(torch.cat(qs, dim=2), k, v, shard_kv_seq=False).chunk(P, dim=2)[r]


ANY: dict[str, Any] = {"tensors": "bhsd", "dtypes": ("float64", "float32", "bfloat16"), "worlds": (1, 2, 3, 4, 5)}
CLAIMS: dict[str, dict[str, Any]] = {
    "zigzag": ANY
    | {
        "about": "zig_zag_attn of ring-attention-pytorch, unmodified, with the mask that its RingAttention makes",
        "layouts": ("zigzag",),
        "causal": (True,),
    },
    "tree": ANY
    | {
        "about": "tree_attn_decode of ring-attention-pytorch, unmodified; the queries are gathered for it",
        "layouts": ("contiguous",),
        "causal": (False,),
        "gradients": False,  # it decodes
    },
}
