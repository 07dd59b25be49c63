"""Rings that are wrong in the ways in which a test must not pass. Beside those of odd_patients.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringlab.training.flash_ring import ring_flash_attention


def raises_on_all(q, k, v):
    raise IndexError("list index out of range")


def nan_everywhere(q, k, v):
    return ring_flash_attention(q, k, v) * float("nan")


def no_gradient(q, k, v):
    return ring_flash_attention(q.detach(), k.detach(), v.detach()) + 0 * q


def wrong_in_float32(q, k, v):
    out = ring_flash_attention(q, k, v)
    return out * 2 if q.dtype == torch.float32 else out


def other_numbers_in_16_bits(q, k, v, causal=False):
    """In bfloat16 another function altogether."""
    out = ring_flash_attention(q, k, v, causal=causal)
    return -out if out.dtype == torch.bfloat16 else out


def rank_of_the_job(q, k, v, causal=False, group=None):
    """Its mask takes the rank in the whole job for the rank in the group."""
    size, world_size = q.shape[2], dist.get_world_size(group)
    whole = [[torch.empty_like(x) for _ in range(world_size)] for x in (k, v)]
    for parts, x in zip(whole, (k, v), strict=True):
        dist.all_gather(parts, x.contiguous(), group=group)
    k, v = (torch.cat(parts, dim=2) for parts in whole)
    seen = torch.arange(k.shape[2]) <= dist.get_rank() * size + torch.arange(size)[:, None] if causal else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
