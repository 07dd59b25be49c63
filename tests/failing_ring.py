"""A ring in which rank 1 raises, or kills itself, in its second hop: torchrun tests/failing_ring.py raise|kill"""

import os
import signal
import sys
from unittest import mock

import torch

import ring_attn
from basics.processes import join_ring


def fail(place, how):
    def hop(k, v, t, **options):
        if place.rank == 1 and t == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OverflowError("rank 1 gives up")
        return real_hop(k, v, t, **options)

    real_hop = ring_attn.hop
    x = torch.ones(1, 1, 2, 2)
    with mock.patch.object(ring_attn, "hop", hop):
        ring_attn.ring_attention(x, x, x)


if __name__ == "__main__":
    with join_ring("cpu") as place:
        fail(place, sys.argv[1])
