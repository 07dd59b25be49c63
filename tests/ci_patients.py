"""Rings that are wrong in the ways in which a test must not pass. Beside those of odd_patients.py."""

import torch

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


def rounds_weights(q, k, v, causal=False):
    """In 16 bits it rounds the scaled queries once more than needed: right in float64, imprecise in bfloat16."""
    out = ring_flash_attention(q, k, v, causal=causal)
    return out if out.dtype != torch.bfloat16 else (out * 64 + 1).to(torch.bfloat16).sub(1) / 64


def other_numbers_in_16_bits(q, k, v, causal=False):
    """In bfloat16 another function altogether."""
    out = ring_flash_attention(q, k, v, causal=causal)
    return -out if out.dtype == torch.bfloat16 else out
