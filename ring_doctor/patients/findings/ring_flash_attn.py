"""ring-flash-attn 0.1.8, ring_flash_attn_func in float16: dQ is rounded to bfloat16.

flash_attn's two kernels are replaced by plain math, because they need a GPU; the library's own code is unmodified.

    $ torchrun --nproc_per_node=3 ring_flash_attn.py      (CPU, gloo; exit status 1 while the bug is there)
"""

import importlib
import importlib.util
import os
import sys
import types

sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # this file has the name of the library

import torch
import torch.distributed as dist


def scores(q, k, scale):  # (B, S, H, D), no mask
    return scale * torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    s = scores(q, k, softmax_scale)
    out = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v.double())
    return out.to(q.dtype), s.logsumexp(-1).float(), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    p = torch.exp(scores(q, k, softmax_scale) - softmax_lse.double().unsqueeze(-1))
    delta = (dout.double() * out.double()).sum(-1).mT.unsqueeze(-1)
    d_s = softmax_scale * p * (scores(dout, v, 1.0) - delta)
    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", d_s, k.double()))
    dk.copy_(torch.einsum("bhqk,bqhd->bkhd", d_s, q.double()))
    dv.copy_(torch.einsum("bhqk,bqhd->bkhd", p, dout.double()))


for name in ("flash_attn", "flash_attn.flash_attn_interface", "ring_flash_attn"):
    sys.modules[name] = types.ModuleType(name)
interface = sys.modules["flash_attn.flash_attn_interface"]
interface._flash_attn_forward, interface._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
del sys.modules["ring_flash_attn"]
package = types.ModuleType("ring_flash_attn")  # without its __init__, which imports triton and transformers
package.__path__ = importlib.util.find_spec("ring_flash_attn").submodule_search_locations
sys.modules["ring_flash_attn"] = package
library = importlib.import_module("ring_flash_attn.ring_flash_attn")

dtype = torch.float16
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
whole = [torch.randn(1, 8 * world_size, 2, 4).to(dtype) for _ in range(4)]  # q, k, v, dO: the same everywhere
q, k, v = (x.double().requires_grad_() for x in whole[:3])
out = torch.einsum("bhqk,bkhd->bqhd", scores(q, k, 0.5).softmax(-1), v)
right = [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3].double())]

q, k, v, d_out = (x.chunk(world_size, dim=1)[rank].clone() for x in whole)
inputs = [x.requires_grad_() for x in (q, k, v)]
out = library.ring_flash_attn_func(*inputs, causal=False)
mine = [out.detach(), *torch.autograd.grad(out, inputs, d_out)]
for name, x, exact in zip(("out", "dQ", "dK", "dV"), mine, right, strict=True):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world_size)]
    dist.all_gather(parts, x.contiguous())
    error = float((torch.cat(parts, dim=1) - exact).norm() / exact.norm())
    if rank == 0:
        print(f"{name}: relative error {error:.2g} (Frobenius norm, float16, {world_size} ranks)", flush=True)
in_bfloat16 = torch.equal(mine[1], mine[1].to(torch.bfloat16).to(dtype))
print(f"rank {rank}: every number of dQ is a number of bfloat16: {in_bfloat16}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(in_bfloat16)
