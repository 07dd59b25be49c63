"""Attention functions for the tests of the doctor's command: right, sick, and not to be examined."""

import torch.nn.functional as F

from ringlab.training.flash_ring import ring_flash_attention


def right(q, k, v, *, causal=False, layout="contiguous", group=None):
    return ring_flash_attention(q, k, v, causal=causal, layout=layout, group=group)


def own_chunk(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def takes_one(q):
    return q


def refuses(q, k, v):
    raise ValueError("not today")


not_a_function = 1


def no_arguments():
    return None
