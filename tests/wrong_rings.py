"""Rings of this project with one mistake each: a step of the real ring is replaced, on each rank, for a while.

By ring: BLOCKING, OVERLAPPED, BACKWARD and GROUPED, which the checks of tests/rings.py must reject; and some steps of
flash_ring.py and of other schedules, of which tests/sick makes rings for the doctor.
"""

from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

import ring_attn
from ring_attn import hop
from ringlab.basics import blockwise_attention
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import start, update
from ringlab.basics.ranks import neighbours
from ringlab.training import backward, flash_ring, grouped_query, overlap
from ringlab.training.all_to_all import Exchange
from ringlab.training.backward import block_backward
from ringlab.training.overlap import post, two_buffers
from ringlab.training.partition import Partition
from tests.planted import Mistakes, mistakes_of_blocks, patch

# ring_attn.py --------------------------------------------------------------------------------------------------------

BLOCKING = Mistakes()


@BLOCKING.replaces(blockwise_attention, "update")
def no_rescale(state, scores, v):
    """Sums made with an older, smaller max are added to those made with the new one."""
    m, l, o = state
    m, l_block, o_block = update((m, torch.zeros_like(l), torch.zeros_like(o)), scores, v)
    return m, l + l_block, o + o_block


@BLOCKING.replaces(ring_attn, "hop")
def two_seats(block, length, group=None):
    """The neighbour is off by one: each block comes from rank r - 2, so that with an even P half of them never come."""
    return hop(hop(block, length, group), length, group)


@BLOCKING.replaces(ring_attn, "attend")
class one_hop_short:
    """'Count = 1 to N - 1' read as the rounds: the last block is never used."""

    rounds = 0

    def __call__(self, state, q, k, v, *, scale):
        self.rounds += 1
        return state if self.rounds == dist.get_world_size() else attend(state, q, k, v, scale=scale)


@BLOCKING.replaces(ring_attn, "attend")
def output_in_bfloat16(state, q, k, v, *, scale):
    """The running output is rounded to bfloat16 after every block; m and l are kept as they should be."""
    m, l, o = attend(state, q, k, v, scale=scale)
    return m, l, o.bfloat16().to(o.dtype)


@BLOCKING.replaces(ring_attn, "start")
def state_in_q_dtype(q):
    """m, l and o in q's dtype, as in the published code: with bfloat16 a sum of 256 no longer grows by 1."""
    return tuple(x.to(q.dtype) for x in start(q))


# overlap.py ----------------------------------------------------------------------------------------------------------

OVERLAPPED = Mistakes()


def at_once(sent, received, group, **distance):
    """`post`, and wait at once: so a mistake about buffers shows in every run and not in some."""
    for work in post(sent, received, group, **distance):
        work.wait()
    return []


@OVERLAPPED.replaces(overlap, "post")
def nothing_received(sent, received, group):
    """A ring that does not wait reads what was there before. Here that is a copy of the block in hand."""
    for x, y in zip(sent, received, strict=True):
        y.copy_(x)
    return []


@OVERLAPPED.replaces(overlap, "post")
def backwards(sent, received, group):
    return post(sent, received, group, distance=-1)


def one_block_forever(k, v, lengths, rank):
    """One buffer only: the next block overwrites the block in hand before the rank computes on it."""
    block = two_buffers(k, v, lengths, rank)
    return lambda t: block(0)


OVERLAPPED["one_block_forever"] = lambda: mock.patch.multiple(overlap, two_buffers=one_block_forever, post=at_once)

# backward.py and grouped_query.py ------------------------------------------------------------------------------------

BACKWARD, NARROW = Mistakes(mistakes_of_blocks(backward, "block_backward")), Mistakes()  # NARROW: in 16 bits only


@BACKWARD.replaces(backward, "hop")
class gradients_one_rank_from_home:
    """The last hop is left out."""

    hops = 0

    def __call__(self, block, length, group):
        self.hops += 1  # K and V make P - 1, and so do their gradients
        return block if self.hops == 2 * dist.get_world_size(group) - 2 else hop(block, length, group)


@NARROW.replaces(backward, "block_backward")
class DqInTheDtypeOfQ:
    """dQ is summed over the rounds in q's dtype."""

    total = 0.0

    def __call__(self, q, *block):
        d_q, d_k, d_v = block_backward(q, *block)
        before, self.total = self.total, (self.total + d_q).to(q.dtype).to(d_q.dtype)
        return self.total - before, d_k, d_v


def interleaved_fold(q, kv_heads):
    return q.unflatten(1, (-1, kv_heads)).transpose(1, 2).flatten(2, 3)


def interleaved_unfold(x, heads):
    return x.unflatten(2, (heads // x.shape[1], -1)).transpose(1, 2).flatten(1, 2)


GROUPED = {
    "head h uses K/V head h mod G": lambda: mock.patch.multiple(
        grouped_query, fold=interleaved_fold, unfold=interleaved_unfold
    ),
}

# flash_ring.py -------------------------------------------------------------------------------------------------------

FLASH, right_pieces = Mistakes(mistakes_of_blocks(flash_ring, "fused_backward")), Partition.pieces
FLASH["contiguous_slices"] = patch(
    Partition, "pieces", lambda it, rank, block: right_pieces(replace(it, layout="contiguous"), rank, block)
)

# The other ways ------------------------------------------------------------------------------------------------------

right_to_tokens = Exchange.to_tokens


def back_as_they_came(exchange, wholes):
    """Out goes back as if its tokens were in order of rank."""
    if len(wholes) == 3:
        return right_to_tokens(exchange, wholes)
    lengths = [len(at) for at in exchange.order]
    return right_to_tokens(replace(exchange, order=torch.arange(sum(lengths)).split(lengths)), wholes)


def not_added(total, parts, *, group, async_op):
    """Each rank keeps what its own queries found for its block."""
    rank, world_size, _, _ = neighbours(group)
    total.copy_(parts.view(world_size, -1)[rank])
    return mock.Mock()
