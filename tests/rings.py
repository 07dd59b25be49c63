"""What the tests run on every rank: rings with eyes on them. Whole tensors go in, each rank takes its own chunk."""

from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist

import ring_attn
from ring_attn import ring_attention
from ringlab.basics import blockwise_attention
from ringlab.basics.blocking_messages import Recv, Send
from ringlab.support import timeline
from tests.attention import assert_attention
from tests.wrong_rings import WRONG


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


def ring_lse(context, q, k, v, lengths, scale):
    """The lse (B, H, C) of this rank's chunk, which merges it with other keys and which a backward pass needs."""
    return ring_attn.ring_forward(*chunks(context, lengths, q, k, v), scale=scale, lengths=lengths)[1]


def ring_twice(context, q, k, v, lengths):
    """Whether the same ring gives the same bits again."""
    return torch.equal(ring(context, q, k, v, lengths), ring(context, q, k, v, lengths))


def ring_without_gradients(context, q, k, v, lengths):
    """The ring on parameters, as in the evaluation of a model."""
    with torch.no_grad():
        return ring_attention(*(x.requires_grad_() for x in chunks(context, lengths, q, k, v)))


def ring_in_part_of_the_job(context, members, inputs):
    """Form all the groups, as every rank must, and run the ring of the one that this rank is in, if any."""
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, group, qkv in zip(members, groups, inputs, strict=True):
        if context.rank in ranks:
            mine = [x.tensor_split(len(ranks), dim=2)[ranks.index(context.rank)] for x in qkv]
            return ring_attention(*mine, group=group)
    return None


def ring_and_events(context, q, k, v, lengths, wrong=None):
    """This rank's chunk of the result, and the recorded events of all ranks. `wrong` names a broken ring."""
    q, k, v = chunks(context, lengths, q, k, v)
    with WRONG[wrong]() if wrong else nullcontext(), timeline.record(k, ring=ring_attention) as events:
        out = ring_attention(q, k, v)
    return out, events


def ring_and_messages(context, q, k, v, lengths):
    """The messages that this rank really sent and received, in order: (step, bytes)."""
    messages = []
    real_send, real_recv = dist.send, dist.recv

    def send(x, *, group_dst, group):
        messages.append((Send(group_dst), x.nbytes))
        real_send(x, group_dst=group_dst, group=group)

    def recv(x, *, group_src, group):
        messages.append((Recv(group_src), x.nbytes))
        real_recv(x, group_src=group_src, group=group)

    with mock.patch.object(dist, "send", send), mock.patch.object(dist, "recv", recv):
        ring_attention(*chunks(context, lengths, q, k, v))
    return messages


def assert_ring(ranks, world_size, q, k, v, *, wrong=None):
    """The check of every whole ring: the right numbers, from block (r - t) mod P on rank r in round t."""
    lengths = even_lengths(q.shape[2], world_size)
    outs, events = zip(*ranks(world_size, ring_and_events, q, k, v, lengths, wrong), strict=True)
    used = {(it.rank, it.round): it.block for it in events[0] if it.what == "compute"}
    expected = {(r, t): (r - t) % world_size for r in range(world_size) for t in range(world_size)}
    assert_attention(torch.cat(outs, dim=2), q, k, v)
    assert used == expected, f"blocks in use, by (rank, round): {used}; expected {expected}"
