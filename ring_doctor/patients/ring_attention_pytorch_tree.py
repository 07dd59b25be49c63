"""lucidrains/ring-attention-pytorch, `tree_attn_decode`: queries that all ranks have, keys and values of each rank."""

import torch
import torch.distributed as dist
from ring_attention_pytorch.tree_attn_decoding import tree_attn_decode
from torch import Tensor

ABOUT = "tree_attn_decode of ring-attention-pytorch, unmodified; the queries are gathered for it"
VERSION = "ring-attention-pytorch 0.5.20"
UNEQUAL, GROUPED = False, False
LAYOUTS, CAUSAL, GRADIENTS = ("contiguous",), (False,), False  # it decodes


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    P, r = dist.get_world_size(), dist.get_rank()
    qs = [torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(P)]
    dist.all_gather(qs, q.contiguous())
    return tree_attn_decode(torch.cat(qs, dim=2), k, v, shard_kv_seq=False).chunk(P, dim=2)[r]
