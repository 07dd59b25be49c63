"""diffusers 0.42.1, TemplatedRingAttention: dK and dV are wrong on three ranks or more, and exact on two.

$ torchrun --nproc_per_node=3 diffusers.py      (CPU, gloo; exit status 1 while the bug is there)
"""

import os
import sys

sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # this file has the name of the library

import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import TemplatedRingAttention
from torch.distributed.device_mesh import init_device_mesh

SCALE = 0.5


def scores(q, k):  # model layout: (B, S, H, D)
    return SCALE * torch.einsum("bqhd,bkhd->bhqk", q, k)


def forward_op(ctx, q, k, v, *options, _save_ctx, **_):  # attention of q to one chunk of K and V: (out, lse)
    if _save_ctx:
        ctx.save_for_backward(q, k, v)
    return torch.einsum("bhqk,bkhd->bqhd", scores(q, k).softmax(-1), v), scores(q, k).logsumexp(-1).mT


def backward_op(ctx, d_out, query, key, value, out, lse):  # its gradients, with the out and the lse of whole rows
    p = torch.exp(scores(query, key) - lse.mT.unsqueeze(-1))
    delta = (d_out * out).sum(-1).mT.unsqueeze(-1)
    d_s = SCALE * p * (torch.einsum("bqhd,bkhd->bhqk", d_out, value) - delta)
    dq, dk = torch.einsum("bhqk,bkhd->bqhd", d_s, key), torch.einsum("bhqk,bqhd->bkhd", d_s, query)
    return dq, dk, torch.einsum("bhqk,bqhd->bkhd", p, d_out)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
ring = ContextParallelConfig(ring_degree=world_size, convert_to_fp32=False)
mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("ring", "ulysses"))
ring.setup(rank, world_size, torch.device("cpu"), mesh)
config = ParallelConfig(context_parallel_config=ring)

torch.manual_seed(0)
whole = [torch.randn(1, 8 * world_size, 2, 4, dtype=torch.float64) for _ in range(4)]  # q, k, v, dO
q, k, v = (x.clone().requires_grad_() for x in whole[:3])
out, _ = forward_op(None, q, k, v, _save_ctx=False)  # full attention, in one process
right = [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3])]

q, k, v, d_out = (x.chunk(world_size, dim=1)[rank].clone() for x in whole)
inputs = [x.requires_grad_() for x in (q, k, v)]
out = TemplatedRingAttention.apply(*inputs, None, 0.0, False, SCALE, False, False, forward_op, backward_op, config)
mine = [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

wrong = False
for name, x, exact in zip(("out", "dQ", "dK", "dV"), mine, right, strict=True):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world_size)]
    dist.all_gather(parts, x.contiguous())
    error = float((torch.cat(parts, dim=1) - exact).norm() / exact.norm())
    wrong |= error > 1e-12
    if rank == 0:
        print(f"{name}: relative error {error:.2g} (Frobenius norm, float64, {world_size} ranks)", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(wrong)
