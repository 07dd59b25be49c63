"""Rings that fail; as a script the command `ring_attn.py`, with a wrong result."""

import os
import runpy
import signal
import sys
from unittest import mock

import torch

import ring_attn
from ringlab.basics import blockwise_attention
from ringlab.ring import flash_ring, schedule


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

    def post(*args, **options):
        hops.append(args)
        if context.rank == 1 and len(hops) == 2:
            end(how)
        return real_post(*args, **options)

    real_post = schedule.post
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    out = flash_ring.ring_flash_attention(x, x, x, causal=True, layout="zigzag")
    assert not hops  # nothing has failed forwards
    with mock.patch.object(schedule, "post", post):
        out.sum().backward()


def attend(state, q, k, v, *, scale, right=blockwise_attention.attend):
    return right(state, q, k, v, scale=1.1 * scale)


if __name__ == "__main__":
    blockwise_attention.attend = attend
    sys.argv[1:] = ["--seq-len", "16"]
    runpy.run_path(ring_attn.__file__, run_name="__main__")
