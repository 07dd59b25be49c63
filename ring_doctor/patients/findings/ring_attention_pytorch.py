"""ring-attention-pytorch 0.5.20, ring_flash_attn on CPU tensors: dK and dV are wrong on two ranks or more.

$ torchrun --nproc_per_node=3 ring_attention_pytorch.py      (CPU, gloo; exit status 1 while the bug is there)
"""

import os
import sys

sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # this file has the name of the library

import torch
import torch.distributed as dist
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
whole = [torch.randn(1, 8 * world_size, 2, 4) for _ in range(4)]  # q, k, v, dO: (B, S, H, D), the same everywhere
q, k, v = (x.double().requires_grad_() for x in whole[:3])  # full attention, in one process, in float64
out = torch.einsum("bhqk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", q, k) / 2).softmax(-1), v)
right = [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3].double())]

q, k, v, d_out = (x.chunk(world_size, dim=1)[rank].clone() for x in whole)
inputs = [x.requires_grad_() for x in (q, k, v)]
out = ring_flash_attn(*inputs, ring_reduce_col=True)
mine = [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

wrong = False
for name, x, exact in zip(("out", "dQ", "dK", "dV"), mine, right, strict=True):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world_size)]
    dist.all_gather(parts, x.contiguous())
    error = float((torch.cat(parts, dim=1) - exact).norm() / exact.norm())
    wrong |= error > 1e-5
    if rank == 0:
        print(f"{name}: relative error {error:.2g} (Frobenius norm, float32, {world_size} ranks)", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(wrong)
