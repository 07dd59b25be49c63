"""lucidrains/ring-attention-pytorch, `zig_zag_attn`: K and V of all ranks by its AllGather, zigzag layout."""

import torch
import torch.distributed as dist
from ring_attention_pytorch.zig_zag_attention import zig_zag_attn
from torch import Tensor

from ring_doctor.case import positions

ABOUT = "zig_zag_attn of ring-attention-pytorch, unmodified, with the causal mask that its RingAttention makes"
VERSION = "ring-attention-pytorch 0.5.20"
UNEQUAL = False
GROUPED = False  # its query head h uses K/V head h mod G, an order of its own
LAYOUTS, CAUSAL = ("zigzag",), (True,)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    P, C = dist.get_world_size(), q.shape[2]
    of_ranks = [positions("zigzag", C * P, rank, P) for rank in range(P)]
    mask = of_ranks[dist.get_rank()].unsqueeze(-1) >= torch.cat(of_ranks)
    return zig_zag_attn(q, k, v, attn_mask=mask)
