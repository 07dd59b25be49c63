"""Rings with eyes on them, on every rank: whole tensors go in, each rank takes its own chunk. And rings in turn."""

from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from bench.peers import dealt, ring_in_turn
from ring_attn import ring_attention
from ringlab.basics import blockwise_attention
from ringlab.ring.layouts import unshard
from ringlab.support import timeline
from ringlab.support.messages import Watch
from tests.attention import assert_attention, assert_four, expected_of_inputs, gradients, grouped_inputs


def even_lengths(seq_len, world_size):
    """The chunk lengths of `scatter`: the first S mod P ranks have a token more."""
    return [len(chunk) for chunk in torch.arange(seq_len).tensor_split(world_size)]


def chunks(context, lengths, *tensors):
    """This rank's views of tensors (B, H, S, D): not contiguous, but where B·H is 1."""
    return [x.split(lengths, dim=2)[context.rank] for x in tensors]


def ring(context, q, k, v, lengths, scale=None, tile=blockwise_attention.TILE):
    """This rank's chunk of the result, after a look at what the ring must leave alone."""
    q, k, v = chunks(context, lengths, q, k, v)
    before = [x.clone() for x in (q, k, v)]
    with mock.patch.object(blockwise_attention, "TILE", tile):
        out = ring_attention(q, k, v, scale=scale)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True)), "the ring changed its input"
    return out


def ring_and_events(context, q, k, v, lengths, ring=ring_attention):
    """This rank's chunk of the result, and the recorded events of all ranks."""
    q, k, v = chunks(context, lengths, q, k, v)
    before = [x.clone() for x in (q, k, v)]
    with timeline.record(k, ring=ring) as events:
        out = ring(q, k, v)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True)), "the ring changed its input"
    return out, events


def messages_of_ring(context, ring, lengths, q, k, v, *d_out):
    """What this rank really sends and receives in the forward pass, and in the backward pass, in order.

    The agreement before the first block is a collective, and left out.
    """
    q, k, v, *d_out = chunks(context, lengths, q, k, v, *d_out)
    with Watch() as forwards:
        out = ring(*(x.requires_grad_(bool(d_out)) for x in (q, k, v)))
    with Watch() as backwards:
        for each in d_out:
            out.backward(each)
    return tuple([it for it in watch.messages if it.peer is not None] for watch in (forwards, backwards))


def assert_ring(ranks, world_size, q, k, v, *, ring=ring_attention, lengths=None):
    """The check of every whole ring: the right numbers, from block (r - t) mod P on rank r in round t; what it sent."""
    lengths = lengths or even_lengths(q.shape[2], world_size)
    outs, events = zip(*ranks(world_size, ring_and_events, q, k, v, lengths, ring), strict=True)
    used = {(it.rank, it.round): it.block for it in events[0] if it.what == "compute"}
    expected = {(r, t): (r - t) % world_size for r in range(world_size) for t in range(world_size)}
    assert_attention(torch.cat(outs, dim=2), q, k, v)
    assert used == expected, f"blocks in use, by (rank, round): {used}; expected {expected}"
    for r in range(world_size):
        sent = sum(it.bytes for it in events[0] if (it.rank, it.what) == (r, "send"))
        assert sent == 2 * k[:, :, lengths[(r + 1) % world_size] :].nbytes  # K and V of all blocks but the last one


def ring_gradients(context, ring, q, k, v, d_out, lengths):
    """This rank's chunks of out, dq, dk, dv."""
    return gradients(ring, *chunks(context, lengths, q, k, v, d_out))


def assert_gradients(ranks, world_size, *sizes_and_dtype, ring, lengths=None):
    """out, dq, dk, dv of `grouped_inputs` of these sizes are as near to float64 as rounding allows."""
    four = grouped_inputs(*sizes_and_dtype)
    lengths = lengths or even_lengths(four[0].shape[2], world_size)
    per_rank = ranks(world_size, ring_gradients, ring, *four, lengths)
    mine = [torch.cat(parts, dim=2) for parts in zip(*per_rank, strict=True)]
    assert_four(mine, expected_of_inputs(*sizes_and_dtype, causal=False, fused_blocks=0))


def whole_in_turn(whole: Sequence[Tensor], layout: str, world_size: int, *, causal: bool) -> list[Tensor]:
    """out, dq, dk and dv (B, H, S, D), of q, k, v and d_out."""
    of_ranks = ring_in_turn(dealt(whole, layout, world_size), layout, causal)
    return [unshard(list(parts), layout) for parts in zip(*of_ranks, strict=True)]
