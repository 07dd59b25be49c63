"""yunchang 0.6.4, ring_flash_attn_func with AttnType.TORCH_MATH: out is wrong on two ranks or more.

$ torchrun --nproc_per_node=3 yunchang.py      (CPU, gloo; exit status 1 while the bug is there)
"""

import os
import sys

sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # this file has the name of the library

import torch
import torch.distributed as dist
from yunchang import ring_flash_attn_func
from yunchang.kernels import AttnType

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
q, k, v = (torch.randn(1, 8 * world_size, 2, 4) for _ in range(3))  # (B, S, H, D), the same everywhere
scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 2
right = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())  # full attention, in one process, in float64
averages = sum(  # the mean of the chunks' own averages: each chunk of keys counts alike
    torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), c.double())
    for s, c in zip(scores.chunk(world_size, dim=3), v.chunk(world_size, dim=1), strict=True)
)

out = ring_flash_attn_func(*(x.chunk(world_size, dim=1)[rank] for x in (q, k, v)), attn_type=AttnType.TORCH_MATH)
parts = [torch.empty_like(out, memory_format=torch.contiguous_format) for _ in range(world_size)]
dist.all_gather(parts, out.contiguous())
out = torch.cat(parts, dim=1)
error, alike = (float((out - x).norm() / right.norm()) for x in (right, averages / world_size))
if rank == 0:
    print(f"out: relative error {error:.2g} (Frobenius norm, float32, {world_size} ranks)")
    print(f"out against the mean of the chunks' own averages: {alike:.2g}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(error > 1e-5)
