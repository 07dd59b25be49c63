"""A ring in which rank 1 raises, or kills itself, in its second hop: torchrun tests/failing_ring.py raise|kill

With a third word, `backwards`, the hop is one of gradients in the backward pass of the flash ring.
"""

import os
import signal
import sys
from unittest import mock

import torch

import ring_attn
from support.processes import join_ring
from training import flash_ring


def end(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OverflowError("rank 1 gives up")


def fail(context, how, where="forwards"):
    if where == "backwards":
        fail_backwards(context, how)

    hops = []

    def hop(*args):
        hops.append(args)
        if context.rank == 1 and len(hops) == 2:
            end(how)
        return real_hop(*args)

    real_hop = ring_attn.hop
    x = torch.ones(1, 1, 2, 2)
    with mock.patch.object(ring_attn, "hop", hop):
        ring_attn.ring_attention(x, x, x)


def fail_backwards(context, how):
    hops = []

    def post(*args):
        hops.append(args)
        if context.rank == 1 and len(hops) == 2:
            end(how)
        return real_post(*args)

    real_post = flash_ring.post
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    out = flash_ring.ring_flash_attention(x, x, x, causal=True, layout="zigzag")
    assert not hops  # nothing has failed forwards
    with mock.patch.object(flash_ring, "post", post):
        out.sum().backward()


if __name__ == "__main__":
    with join_ring("cpu") as context:
        fail(context, *sys.argv[1:])
