"""Backward passes of the blocking ring with one mistake each. On each rank: with WRONG["swapped"](): ..."""

import torch
import torch.distributed as dist

from ring_attn import hop
from ringlab.training import backward
from ringlab.training.backward import block_backward
from tests.planted import Mistakes, mistakes_of_blocks

WRONG, NARROW = Mistakes(mistakes_of_blocks(backward, "block_backward")), Mistakes()  # NARROW: in 16 bits only


@WRONG.replaces(backward, "hop")
class one_hop_short:
    """The last hop is left out: the gradients stay one rank from home."""

    hops = 0

    def __call__(self, block, length, group):
        self.hops += 1  # K and V make P - 1, and so do their gradients
        return block if self.hops == 2 * dist.get_world_size(group) - 2 else hop(block, length, group)


@WRONG.replaces(backward, "hop")
class aliased:
    """dk and dv arrive in one buffer, so the second overwrites the first."""

    hops = 0

    def __call__(self, block, length, group):
        self.hops += 1
        received = hop(block, length, group)
        if self.hops % 2 == 0:  # gradients
            received[0] = received[1]
        return received


@WRONG.replaces(backward, "block_backward")
def lse_of_the_block(q, k, v, d_out, lse, delta, scale):
    lse = torch.logsumexp(q.to(lse.dtype) @ k.to(lse.dtype).transpose(-2, -1) * scale, dim=-1)
    return block_backward(q, k, v, d_out, lse, delta, scale)


@WRONG.replaces(backward, "block_backward")
def without_delta(q, k, v, d_out, lse, delta, scale):
    return block_backward(q, k, v, d_out, lse, 0 * delta, scale)


@WRONG.replaces(backward, "block_backward")
def scale_forgotten(*args):
    d_q, d_k, d_v = block_backward(*args)
    return d_q / args[-1], d_k / args[-1], d_v


@WRONG.replaces(backward, "block_backward")
def in_bfloat16(*args):
    return tuple(x.bfloat16().to(x.dtype) for x in block_backward(*args))


@NARROW.replaces(backward, "block_backward")
class DqInTheDtypeOfQ:
    """dQ is summed over the rounds in q's dtype."""

    total = 0.0

    def __call__(self, q, *block):
        d_q, d_k, d_v = block_backward(q, *block)
        before, self.total = self.total, (self.total + d_q).to(q.dtype).to(d_q.dtype)
        return self.total - before, d_k, d_v


@NARROW.replaces(backward, "block_backward")
def delta_in_the_dtype_of_q(q, k, v, d_out, lse, delta, scale):
    return block_backward(q, k, v, d_out, lse, delta.to(q.dtype).to(delta.dtype), scale)
