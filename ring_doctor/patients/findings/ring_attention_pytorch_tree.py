"""ring-attention-pytorch 0.5.20, tree_attn_decode in bfloat16: with large scores the output is wrong.

$ torchrun --nproc_per_node=3 ring_attention_pytorch_tree.py      (CPU, gloo; exit status 1 while the bug is there)
"""

import os
import sys

sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # a file there has the name of the library

import torch
import torch.distributed as dist
from ring_attention_pytorch.tree_attn_decoding import tree_attn_decode

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
wrong = False
for common in (0, 16, 32):  # in one dimension, in all queries and keys: it adds common**2 / 4 to every score
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, n, 16) for n in (1, 8 * world_size, 8 * world_size))  # the same on every rank
    q[..., 0], k[..., 0] = common, common
    q, k, v = (x.bfloat16() for x in (q, k, v))
    right = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    one_process = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    mine = tree_attn_decode(q, k.chunk(world_size, dim=2)[rank], v.chunk(world_size, dim=2)[rank], shard_kv_seq=False)
    error, usual = (float((x - right).norm() / right.norm()) for x in (mine, one_process))
    wrong |= error > 4 * usual
    if rank == 0:
        print(
            f"scores of some {common**2 // 4}: relative error {error:.2g}, torch in one process {usual:.2g}", flush=True
        )
dist.barrier()
dist.destroy_process_group()
sys.exit(wrong)
