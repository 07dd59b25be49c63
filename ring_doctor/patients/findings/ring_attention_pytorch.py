"""ring-attention-pytorch 0.5.20: dK and dV of two rings are wrong on two ranks or more, and a third is imprecise.

$ torchrun --nproc_per_node=3 ring_attention_pytorch.py      (CPU, gloo; exit status 1 while the bugs are there)
"""

import os
import sys

sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # this file has the name of the library

import torch
import torch.distributed as dist
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn
from ring_attention_pytorch.tree_attn_decoding import tree_attn_decode
from ring_attention_pytorch.zig_zag_attention import zig_zag_attn
from torch.nn.functional import scaled_dot_product_attention

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
S = 8 * world_size


def right(whole, causal):
    """Full attention, in one process, in float64: out and the gradients, (B, H, S, D)."""
    q, k, v = (x.double().requires_grad_() for x in whole[:3])
    out = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3].double())]


def is_wrong(name, attention, positions, dtype, causal, most):
    torch.manual_seed(0)
    whole = [torch.randn(1, 2, S, 4, dtype=dtype) for _ in range(4)]  # q, k, v, dO, alike on all ranks
    q, k, v, d_out = (x[:, :, positions[rank]].clone() for x in whole)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*inputs)
    wrong = False
    for result, x, exact in zip(
        ("out", "dQ", "dK", "dV"),
        (out.detach(), *torch.autograd.grad(out, inputs, d_out)),
        right(whole, causal),
        strict=True,
    ):
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world_size)]
        dist.all_gather(parts, x.contiguous())
        exact = exact[:, :, torch.cat(positions)]
        error = float((torch.cat(parts, dim=2) - exact).norm() / exact.norm())
        wrong |= error > most
        if rank == 0:
            print(f"{name}, {result}: relative error {error:.2g} (Frobenius norm, {dtype}, {world_size} ranks)")
    return wrong


def ring(q, k, v):  # it takes (B, S, H, D)
    return ring_flash_attn(*(x.transpose(1, 2) for x in (q, k, v)), ring_reduce_col=True).transpose(1, 2)


halves = torch.arange(S).chunk(2 * world_size)  # rank r has chunks r and 2 * world_size - 1 - r
zigzag = [torch.cat((halves[r], halves[-1 - r])) for r in range(world_size)]
wrong = is_wrong("ring_flash_attn", ring, torch.arange(S).chunk(world_size), torch.float32, False, 1e-5)
mask = zigzag[rank][:, None] >= torch.cat(zigzag)[None, :]
wrong |= is_wrong(
    "zig_zag_attn", lambda q, k, v: zig_zag_attn(q, k, v, attn_mask=mask), zigzag, torch.float64, True, 1e-12
)

for common in (0, 16, 32):  # in one dimension, in all queries and keys: it adds common**2 / 4 to every score
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, n, 16) for n in (1, S, S))  # the same on every rank
    q[..., 0], k[..., 0] = common, common
    q, k, v = (x.bfloat16() for x in (q, k, v))
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
    mine = tree_attn_decode(q, k.chunk(world_size, dim=2)[rank], v.chunk(world_size, dim=2)[rank], shard_kv_seq=False)
    one_process = scaled_dot_product_attention(q, k, v)
    error, usual = (float((x - exact).norm() / exact.norm()) for x in (mine, one_process))
    wrong |= error > 4 * usual
    if rank == 0:
        print(f"tree_attn_decode, scores of some {common**2 // 4}: relative error {error:.2g}, torch alone {usual:.2g}")
sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
sys.exit(wrong)
