"""Rings that fail."""

import os
import signal
from unittest import mock

import torch
import torch.distributed as dist

from ringlab.ring import flash_ring


def end(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OverflowError("rank 1 gives up")


def fail(context, how, backwards):
    """Rank 1 ends in the second round of a pass."""
    posts, real_post = [], dist.batch_isend_irecv

    def post(messages):
        posts.append(messages)
        if context.rank == 1 and len(posts) == 2:
            end(how)
        return real_post(messages)

    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    if backwards:
        out = flash_ring.ring_flash_attention(x, x, x, causal=True, layout="zigzag")
    with mock.patch.object(dist, "batch_isend_irecv", post):
        if backwards:
            out.sum().backward()
        flash_ring.ring_flash_attention(x, x, x)
