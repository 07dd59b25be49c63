"""What the tests of memory run on a rank: the bytes alive at the worst moment, in every tensor that Python can see."""

import gc
from unittest import mock

import torch
from torch._subclasses import FakeTensor

import ring_attn
from ring_attn import hop, ring_attention
from ringlab.training import flash_ring
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.fused_block import fused_backward


def alive():
    """Bytes of the memory behind all tensors, each part of it counted once."""
    tensors = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not isinstance(x, FakeTensor))
    parts = (x.untyped_storage() for x in tensors)  # a compiler's fake tensors have no memory
    return sum({part.data_ptr(): part.nbytes() for part in parts}.values())


def most_alive(module, name, real, work):
    """How many more bytes than now are alive at most when `real`, which `module` knows by `name`, returns in `work`."""
    gc.collect()
    before, seen = alive(), []

    def watched(*args, **options):
        results = real(*args, **options)
        seen.append(alive() - before)
        return results

    with mock.patch.object(module, name, watched):
        work()
    return max(seen)


def ones(heads, chunk, head_dim, dtype):
    return torch.ones(1, heads, chunk, head_dim, dtype=dtype)


def peak_in_a_hop(context, layer, chunk):
    """Bytes that the ring of ring_attn.py holds in a hop, in float32: its statistics and its own K and V left out."""
    H, D = layer.heads, layer.head_dim
    most = most_alive(ring_attn, "hop", hop, lambda: ring_attention(*(ones(H, chunk, D, None) for _ in "qkv")))
    return most - 4 * (2 * H * chunk + 2 * H * chunk * D)


def peak_in_training(context, layer, chunk, dtype):
    """Bytes that the flash ring holds in its backward pass when a block is computed, but for the lse of the chunk."""

    def step():
        q, d_out = (ones(layer.heads, chunk, layer.head_dim, dtype).requires_grad_() for _ in "qd")
        k, v = (ones(layer.kv_heads, chunk, layer.head_dim, dtype).requires_grad_() for _ in "kv")
        ring_flash_attention(q, k, v).backward(d_out.detach())

    return most_alive(flash_ring, "fused_backward", fused_backward, step) - 4 * layer.heads * chunk
