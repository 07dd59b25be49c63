"""Rings with one mistake each. The check that the right ring passes must reject every one of them.

A mistake takes the place of one piece of the real ring. On each rank: with WRONG["stale_block"](): ...
"""

import torch
import torch.distributed as dist

import ring_attn
from ring_attn import hop
from ringlab.basics import blockwise_attention
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import finish, start, update
from tests.planted import Mistakes, patch

WRONG = Mistakes()


@WRONG.replaces(blockwise_attention, "update")
def no_rescale(state, scores, v):
    """Sums made with an older, smaller max are added to those made with the new one."""
    m, l, o = state
    m, l_block, o_block = update((m, torch.zeros_like(l), torch.zeros_like(o)), scores, v)
    return m, l + l_block, o + o_block


@WRONG.replaces(ring_attn, "attend")
def sum_of_averages(state, q, k, v, *, scale):
    """Each block's own softmax, added up: the weights of a row add up to P (the published mistake)."""
    m, _, o = state
    out, _ = finish(attend(start(q), q, k, v, scale=scale))
    return m, torch.ones_like(m), o + out


@WRONG.replaces(ring_attn, "attend")
def mean_of_averages(state, q, k, v, *, scale):
    """Each block's own softmax, averaged as if every block had the same share of the whole sum."""
    m, l, o = state
    out, _ = finish(attend(start(q), q, k, v, scale=scale))
    return m, l + 1, o + out


@WRONG.replaces(ring_attn, "hop")
def two_seats(block, length, group=None):
    """The neighbour is off by one: each block comes from rank r - 2, so that with an even P half of them never come."""
    return hop(hop(block, length, group), length, group)


class Backwards:
    """torch.distributed, with the next rank and the previous rank exchanged."""

    def __getattr__(self, name):
        return getattr(dist, name)

    def send(self, block, *, group_dst, group):
        dist.send(block, group_dst=(group_dst - 2) % dist.get_world_size(group), group=group)

    def recv(self, block, *, group_src, group):
        dist.recv(block, group_src=(group_src + 2) % dist.get_world_size(group), group=group)


# Blocks come from rank r + 1 and go to rank r - 1: every block is seen, but not the one that was expected.
WRONG["backwards"] = patch(ring_attn, "dist", Backwards)


@WRONG.replaces(ring_attn, "hop")
class stale_block:
    """The first block received is thrown away, and the one in hand is used again."""

    hops = 0

    def __call__(self, block, length, group):
        self.hops += 1
        received = hop(block, length, group)
        return block if self.hops == 1 else received


@WRONG.replaces(ring_attn, "attend")
class one_hop_short:
    """'Count = 1 to N - 1' read as the rounds: the last block is never used."""

    rounds = 0

    def __call__(self, state, q, k, v, *, scale):
        self.rounds += 1
        return state if self.rounds == dist.get_world_size() else attend(state, q, k, v, scale=scale)


@WRONG.replaces(ring_attn, "hop")
def keys_without_values(block, length, group):
    """Only the keys go round: they meet the values of another block."""
    return torch.stack((hop(block, length, group)[0], block[1]))


@WRONG.replaces(ring_attn, "attend")
def output_in_bfloat16(state, q, k, v, *, scale):
    """The running output is rounded to bfloat16 after every block; m and l are kept as they should be."""
    m, l, o = attend(state, q, k, v, scale=scale)
    return m, l, o.bfloat16().to(o.dtype)


@WRONG.replaces(ring_attn, "start")
def state_in_q_dtype(q):
    """m, l and o in q's dtype, as in the published code: with bfloat16 a sum of 256 no longer grows by 1."""
    return tuple(x.to(q.dtype) for x in start(q))
