"""ring-attention-pytorch 0.5.20, zig_zag_attn: dK and dV are wrong on two ranks or more.

$ torchrun --nproc_per_node=3 ring_attention_pytorch_zigzag.py      (CPU, gloo; exit status 1 while the bug is there)
"""

import os
import sys

sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # a file there has the name of the library

import torch
import torch.distributed as dist
from ring_attention_pytorch.zig_zag_attention import zig_zag_attn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
S = 8 * world_size
whole = [
    torch.randn(1, 2, S, 4, dtype=torch.float64) for _ in range(4)
]  # q, k, v, dO: (B, H, S, D), alike on all ranks
q, k, v = (x.clone().requires_grad_() for x in whole[:3])
out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # full attention, in one process
right = [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3])]

halves = torch.arange(S).chunk(2 * world_size)  # rank r has chunks r and 2 * world_size - 1 - r
positions = [torch.cat((halves[r], halves[-1 - r])) for r in range(world_size)]
q, k, v, d_out = (x[:, :, positions[rank]].clone() for x in whole)
inputs = [x.requires_grad_() for x in (q, k, v)]
out = zig_zag_attn(*inputs, attn_mask=positions[rank][:, None] >= torch.cat(positions)[None, :])
mine = [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

wrong = False
for name, x, exact in zip(("out", "dQ", "dK", "dV"), mine, right, strict=True):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world_size)]
    dist.all_gather(parts, x.contiguous())
    exact = exact[:, :, torch.cat(positions)]
    error = float((torch.cat(parts, dim=2) - exact).norm() / exact.norm())
    wrong |= error > 1e-12
    if rank == 0:
        print(f"{name}: relative error {error:.2g} (Frobenius norm, float64, {world_size} ranks)", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(wrong)
