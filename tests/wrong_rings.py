"""Rings with one mistake each. The check that the right ring passes must reject every one of them.

A mistake is a function that takes the place of one piece of the real ring. On each rank: with WRONG["stale_block"]: ...
"""

from unittest import mock

import torch

import ring_attn
from basics import blockwise_attention
from basics.blockwise_attention import attend
from basics.online_softmax import finish, start, update
from basics.ranks import neighbours
from ring_attn import hop

WRONG = {}  # name of the mistake -> the patch that makes it


def replaces(module, name):
    def note(mistake):
        WRONG[mistake.__name__] = mock.patch.object(module, name, mistake)
        return mistake

    return note


@replaces(blockwise_attention, "update")
def no_rescale(state, scores, v):
    """Sums made with an older, smaller max are added to those made with the new one."""
    m, l, o = state
    m, l_block, o_block = update((m, torch.zeros_like(l), torch.zeros_like(o)), scores, v)
    return m, l + l_block, o + o_block


@replaces(ring_attn, "attend")
def sum_of_averages(state, q, k, v, *, scale):
    """Each block's own softmax, added up: the weights of a row add up to P (the published mistake)."""
    m, _, o = state
    out, _ = finish(attend(start(q), q, k, v, scale=scale))
    return m, torch.ones_like(m), o + out


@replaces(ring_attn, "attend")
def mean_of_averages(state, q, k, v, *, scale):
    """Each block's own softmax, averaged as if every block had the same share of the whole sum."""
    m, l, o = state
    out, _ = finish(attend(start(q), q, k, v, scale=scale))
    return m, l + 1, o + out


@replaces(ring_attn, "hop")
def two_seats(k, v, t, **options):
    """The neighbour is off by one: each block comes from rank r - 2, so that with an even P half of them never come."""
    return hop(*hop(k, v, t, **options), t, **options)


@replaces(ring_attn, "neighbours")
def backwards(group=None):
    """Blocks come from rank r + 1 and go to rank r - 1: every block is seen, but not the one that was expected."""
    rank, world_size, next_rank, prev_rank = neighbours(group)
    return rank, world_size, prev_rank, next_rank


@replaces(ring_attn, "hop")
def stale_block(k, v, t, **options):
    """The first block received is thrown away, and the one in hand is used again."""
    received = hop(k, v, t, **options)
    return (k, v) if t == 0 else received


@replaces(ring_attn, "neighbours")
def one_hop_short(group=None):
    """'Count = 1 to N - 1' read as the rounds: the last block never comes."""
    rank, world_size, next_rank, prev_rank = neighbours(group)
    return rank, world_size - 1, next_rank, prev_rank


@replaces(ring_attn, "hop")
def keys_without_values(k, v, t, **options):
    """Only the keys go round: they meet the values of another block."""
    return hop(k, v, t, **options)[0], v


@replaces(ring_attn, "attend")
def output_in_bfloat16(state, q, k, v, *, scale):
    """The running output is rounded to bfloat16 after every block; m and l are kept as they should be."""
    m, l, o = attend(state, q, k, v, scale=scale)
    return m, l, o.bfloat16().to(o.dtype)


@replaces(ring_attn, "start")
def state_in_q_dtype(q):
    """m, l and o in q's dtype, as in the published code: with bfloat16 a sum of 256 no longer grows by 1."""
    return tuple(x.to(q.dtype) for x in start(q))
