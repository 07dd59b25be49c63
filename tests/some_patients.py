"""Attention functions for the tests of the doctor's command: right, sick, and not to be examined."""

import time

import torch.distributed as dist
import torch.nn.functional as F

from training.flash_ring import ring_flash_attention


def right(q, k, v, *, causal=False, layout="contiguous", group=None):
    return ring_flash_attention(q, k, v, causal=causal, layout=layout, group=group)


def scale_missing(q, k, v, *, causal=False, layout="contiguous"):
    return ring_flash_attention(q, k, v, causal=causal, layout=layout, scale=1.0)


def own_chunk(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def waits_on_three(q, k, v):
    if dist.get_world_size() == 3 and dist.get_rank() == 1:
        time.sleep(60)
    return ring_flash_attention(q, k, v)


def returns_half(q, k, v):
    return ring_flash_attention(q, k, v)[..., ::2]


def takes_one(q):
    return q


def refuses(q, k, v):
    raise ValueError("not today")


not_a_function = 1


def no_arguments():
    return None
