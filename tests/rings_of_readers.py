"""Rings as readers of chapter 4 may write them: right ones in several forms, and some that only look right.

This file is the "cell": its functions, imports and constants are run again on each rank.
"""

import math

import torch
import torch.distributed as dist

from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import finish, merge, start

HALF = 2  # a constant of the cell, and a class
FLOAT = torch.float32


class Neighbours:
    def __init__(self):
        self.P, self.rank = dist.get_world_size(), dist.get_rank()
        self.next, self.before = (self.rank + 1) % self.P, (self.rank - 1) % self.P


def scores_of(q, k):
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def full(q, k, v):
    return torch.softmax(scores_of(q, k), dim=-1) @ v


def exchange(block, length, to=1):
    """Pass the block to rank + `to` and return the one that comes, of `length` tokens."""
    rank, P = dist.get_rank(), dist.get_world_size()
    received = block.new_empty(*block.shape[:-2], length, block.shape[-1])
    messages = [
        dist.P2POp(dist.isend, block.contiguous(), (rank + to) % P),
        dist.P2POp(dist.irecv, received, (rank - to) % P),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return received


# Right -------------------------------------------------------------------------------------------------------------


def k_and_v_apart(q, k, v, lengths):
    """Two messages a hop, in blocking order; the sums by hand; returns an array of numpy."""
    at = Neighbours()
    m, l, o = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype), 0, torch.zeros_like(q)
    k, v = k.contiguous(), v.contiguous()
    for t in range(at.P):
        s = scores_of(q, k)
        m_new = torch.maximum(m, s.amax(-1))
        f, p = torch.exp(m - m_new), torch.exp(s - m_new[..., None])
        m, l, o = m_new, f * l + p.sum(-1), f[..., None] * o + p @ v
        if t < at.P - 1:
            new = [x.new_empty(*x.shape[:2], lengths[(at.rank - t - 1) % at.P], x.shape[3]) for x in (k, v)]
            for x, y in zip((k, v), new, strict=True):
                if at.rank % HALF == 0:
                    dist.send(x, at.next), dist.recv(y, at.before)
                else:
                    dist.recv(y, at.before), dist.send(x, at.next)
            k, v = new
    return (o / l[..., None]).numpy()


def overlapped(chunk_q, chunk_k, chunk_v, sizes):
    """The next block comes while this one is computed on; two buffers; messages without a source; in place."""
    at = Neighbours()
    chunk_q *= chunk_q.shape[-1] ** -0.5
    buffers = [chunk_k.new_empty(2, *chunk_k.shape[:2], max(sizes) * chunk_k.shape[3]) for _ in "ab"]
    block = torch.stack((chunk_k, chunk_v))
    state = start(chunk_q)
    for t in range(at.P):
        works = []
        if t < at.P - 1:
            size = sizes[(at.rank - t - 1) % at.P]
            shape = 2, *chunk_k.shape[:2], size, chunk_k.shape[3]
            received = buffers[t % 2].view(-1)[: math.prod(shape)].view(shape)
            works = [dist.isend(block, at.next), dist.irecv(received)]
        state = attend(state, chunk_q, *block, scale=1.0)
        for work in works:
            work.wait()
        block = received if works else block
    dist.barrier()
    return finish(state)[0]


def other_way_round(q, k, v, lengths):
    """Blocks go to rank - 1; the blocks' results are merged."""
    rank, P = dist.get_rank(), dist.get_world_size()
    out, lse, block = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf), torch.stack((k, v))
    for t in range(P):
        s = scores_of(q, block[0])
        out, lse = merge(out, lse, s.softmax(-1) @ block[1], s.logsumexp(-1))
        if t < P - 1:
            block = exchange(block, lengths[(rank + t + 1) % P], to=-1)
    return out


def both_ways(q, k, v, lengths):
    """The first head goes round one way, the others the other way."""
    rank, P = dist.get_rank(), dist.get_world_size()
    outs = []
    for heads, to in ((slice(0, 1), 1), (slice(1, None), -1)):
        state, block = start(q[:, heads]), torch.stack((k, v))[:, :, heads]
        for t in range(P):
            state = attend(state, q[:, heads], *block, scale=q.shape[-1] ** -0.5)
            if t < P - 1:
                block = exchange(block, lengths[(rank - to * (t + 1)) % P], to)
        outs.append(finish(state)[0])
    return torch.cat(outs, dim=1)


RIGHT_RINGS = [k_and_v_apart, overlapped, other_way_round, both_ways]


# They only look right ----------------------------------------------------------------------------------------------


def ring(q, k, v, lengths, hops=None, **kinds):
    """Right, with P - 1 hops."""
    rank, P = dist.get_rank(), dist.get_world_size()
    state, block = start(q), torch.stack((k, v))
    for t in range(P):
        state = attend(state, q, *block, scale=q.shape[-1] ** -0.5)
        if t < (P - 1 if hops is None or P == 1 else hops):
            block = exchange(block, lengths[(rank - t - 1) % P])
    return finish(state)[0]


def p_hops(q, k, v, lengths):
    return ring(q, k, v, lengths, hops=len(lengths))


def all_gathers(q, k, v, lengths):
    blocks = [k.new_empty(2, *k.shape[:2], length, k.shape[3]) for length in lengths]
    dist.all_gather(blocks, torch.stack((k, v)))
    return full(q, *torch.cat(blocks, dim=3))


def all_gathers_objects(q, k, v, lengths):
    blocks = [None] * len(lengths)
    dist.all_gather_object(blocks, (k, v))
    return full(q, torch.cat([k for k, _ in blocks], dim=2), torch.cat([v for _, v in blocks], dim=2))


def broadcasts(q, k, v, lengths):
    blocks = [k.new_empty(2, *k.shape[:2], length, k.shape[3]) for length in lengths]
    blocks[dist.get_rank()] = torch.stack((k, v))
    for rank, block in enumerate(blocks):
        dist.broadcast(block, rank)
    return full(q, *torch.cat(blocks, dim=3))


def all_to_all(q, k, v, lengths):
    block = torch.stack((k, v))
    blocks = block.new_empty(len(lengths), *block.shape)
    dist.all_to_all_single(blocks, block.expand_as(blocks).contiguous())
    return full(q, *torch.cat(list(blocks), dim=3))


def sums_of_all(q, k, v, lengths):
    """An all-reduce of a tensor that is 0 but for the own chunk."""
    rank, S = dist.get_rank(), sum(lengths)
    blocks = k.new_zeros(2, *k.shape[:2], S, k.shape[3])
    blocks[:, :, :, sum(lengths[:rank]) : sum(lengths[: rank + 1])] = torch.stack((k, v))
    dist.all_reduce(blocks)
    return full(q, *blocks)


def all_on_rank_0(q, k, v, lengths):
    """Rank 0 computes all of it."""
    rank, P = dist.get_rank(), dist.get_world_size()
    mine = torch.stack((q, k, v))
    if rank:
        dist.send(mine, 0)
        dist.recv(out := torch.empty(q.shape, dtype=q.dtype), 0)
        return out
    chunks = [mine]
    for other in range(1, P):
        chunks.append(q.new_empty(3, *q.shape[:2], lengths[other], q.shape[3]))
        dist.recv(chunks[-1], other)
    outs = full(*torch.cat(chunks, dim=3)).split(lengths, dim=2)
    for other in range(1, P):
        dist.send(outs[other].contiguous(), other)
    return outs[0]


def straight_to_each(q, k, v, lengths):
    """Each rank sends its own block to every other rank."""
    rank, P = dist.get_rank(), dist.get_world_size()
    state, block = start(q), torch.stack((k, v))
    for t in range(P):
        other = block if t == 0 else exchange(block, lengths[(rank - t) % P], to=t)
        state = attend(state, q, *other, scale=q.shape[-1] ** -0.5)
    return finish(state)[0]


def keeps_all_blocks(q, k, v, lengths):
    rank, P = dist.get_rank(), dist.get_world_size()
    blocks = [torch.stack((k, v))]
    for t in range(P - 1):
        blocks.append(exchange(blocks[-1], lengths[(rank - t - 1) % P]))
    return full(q, *torch.cat(blocks, dim=3))


def keeps_arrays(q, k, v, lengths):
    """Copies of all blocks, in arrays of numpy."""
    rank, P = dist.get_rank(), dist.get_world_size()
    block = torch.stack((k, v))
    kept = [block.numpy().copy()]
    for t in range(P - 1):
        block = exchange(block, lengths[(rank - t - 1) % P])
        kept.append(block.numpy().copy())
    return full(q, *torch.cat([torch.from_numpy(x) for x in kept], dim=3))


def keeps_lists(q, k, v, lengths):
    rank, P = dist.get_rank(), dist.get_world_size()
    block = torch.stack((k, v))
    kept = [block.tolist()]
    for t in range(P - 1):
        block = exchange(block, lengths[(rank - t - 1) % P])
        kept.append(block.tolist())
    return full(q, *torch.cat([torch.tensor(x, dtype=q.dtype) for x in kept], dim=3))


def exp_without_max(q, k, v, lengths):
    rank, P = dist.get_rank(), dist.get_world_size()
    l, o, block = 0, 0, torch.stack((k, v))
    for t in range(P):
        p = torch.exp(scores_of(q, block[0]))
        l, o = l + p.sum(-1, keepdim=True), o + p @ block[1]
        if t < P - 1:
            block = exchange(block, lengths[(rank - t - 1) % P])
    return o / l


def isend_without_wait(q, k, v, lengths):
    at, block, new = Neighbours(), k.contiguous(), torch.empty(k.shape, dtype=k.dtype)
    for _ in lengths[1:]:
        dist.isend(block, at.next)
        dist.recv(new, at.before)
    return full(q, k, v)


def irecv_without_wait(q, k, v, lengths):
    """The last message need not be there when the ranks end."""
    at, block, new = Neighbours(), k.contiguous(), torch.empty(k.shape, dtype=k.dtype)
    for _ in lengths[1:]:
        dist.irecv(new, at.before)
    for _ in lengths[1:]:
        dist.send(block, at.next)
    return full(q, k, v)


def sends_to_itself(q, k, v, lengths):
    if len(lengths) > 1:
        dist.send(k.contiguous(), dist.get_rank())
    return full(q, k, v)


def q_travels_too(q, k, v, lengths):
    rank, P = dist.get_rank(), dist.get_world_size()
    state, block = start(q), torch.stack((k, v, q))
    for t in range(P):
        state = attend(state, q, *block[:2], scale=q.shape[-1] ** -0.5)
        if t < P - 1:
            block = exchange(block, lengths[(rank - t - 1) % P])
    return finish(state)[0]


def in_float32(q, k, v, lengths):
    return ring(q.float(), k.float(), v.float(), lengths)


def in_float32_within(q, k, v, lengths):
    return in_float32(q, k, v, lengths).double()


def float32_on_the_wire(q, k, v, lengths):
    rank, P = dist.get_rank(), dist.get_world_size()
    state, block = start(q), torch.stack((k, v))
    for t in range(P):
        state = attend(state, q, *block, scale=q.shape[-1] ** -0.5)
        if t < P - 1:
            block = exchange(block.to(FLOAT), lengths[(rank - t - 1) % P]).double()
    return finish(state)[0]


def knows_the_input(q, k, v, lengths):
    from notebooks.trial import whole_input

    q, k, v = whole_input(sum(lengths))
    return full(q, k, v).split(lengths, dim=2)[dist.get_rank()]


def three_worlds_only(q, k, v, lengths):
    return ring(q, k, v, lengths) if len(lengths) in (1, 4, 5) else q


def four_numbers_only(q, k, v, lengths):
    return ring(q * 0.5 * q.shape[-1] ** 0.5, k, v, lengths)  # the scale is 1/2


def rescales(q, k, v, lengths, l_too, o_too):
    rank, P = dist.get_rank(), dist.get_world_size()
    m, l, o, block = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype), 0, 0, torch.stack((k, v))
    for t in range(P):
        s = scores_of(q, block[0])
        m_new = torch.maximum(m, s.amax(-1))
        f, p = torch.exp(m - m_new), torch.exp(s - m_new[..., None])
        l = (f if l_too else 1) * l + p.sum(-1)
        m, o = m_new, (f[..., None] if o_too else 1) * o + p @ block[1]
        if t < P - 1:
            block = exchange(block, lengths[(rank - t - 1) % P])
    return o / l[..., None]


def rescales_l_only(q, k, v, lengths):
    return rescales(q, k, v, lengths, True, False)


def rescales_o_only(q, k, v, lengths):
    return rescales(q, k, v, lengths, False, True)


def send_and_recv_on_one_line(q, k, v, lengths):
    at, block, new = Neighbours(), k.contiguous(), torch.empty(k.shape, dtype=k.dtype)
    for _ in lengths[1:]:
        dist.send(block, at.next), dist.recv(new, at.before)
    return full(q, k, v)


def all_receive_on_one_line(q, k, v, lengths):
    at, block, new = Neighbours(), k.contiguous(), torch.empty(k.shape, dtype=k.dtype)
    for _ in lengths[1:]:
        dist.recv(new, at.before), dist.send(block, at.next)
    return full(q, k, v)


def three_arguments(q, k, v):
    return q


def returns_nothing(q, k, v, lengths):
    ring(q, k, v, lengths)


def returns_a_list_of_words(q, k, v, lengths):
    return ["out"]


WRONG_RINGS = [
    (
        p_hops,
        "It received 2,048 bytes in 4 message(s) and sent 2,048 in 4; expected 1,536 bytes received: K and V of "
        "3 block(s), 6 tokens of 256 bytes. One hop is too many, it brings the rank's own block home: P rounds, but P ",
    ),
    (all_gathers, "it called a collective, allgather"),
    (all_gathers_objects, "it called a collective, allgather"),
    (broadcasts, "it called a collective, broadcast"),
    (all_to_all, "it called a collective, all_to_all_single"),
    (sums_of_all, "it called a collective, allreduce"),
    (all_on_rank_0, "it exchanged a message with rank 2"),
    (straight_to_each, "it exchanged a message with rank 2"),
    (keeps_all_blocks, "the memory grows with the sequence"),
    (exp_without_max, "right where scores are small, wrong where they are some thousands"),
    (sends_to_itself, "A rank has no message with itself"),
    (q_travels_too, "nothing else travels"),
    (in_float32, "right, but in torch.float32"),
    (in_float32_within, "as float32 rounds"),
    (float32_on_the_wire, "as float32 rounds"),
    (knows_the_input, "off by up to"),
    (three_worlds_only, "off by up to"),
    (four_numbers_only, "off by up to"),
    (rescales_l_only, "l is rescaled, o is not"),
    (rescales_o_only, "o is rescaled, l is not"),
    (three_arguments, "called with 4 argument(s); yours takes 3 (q, k, v)"),
    (returns_nothing, "expected a tensor of shape (2, 2, 4, 4), got NoneType"),
    (returns_a_list_of_words, "expected a tensor of shape (2, 2, 4, 4), got list"),
]
WAITING_RINGS = [
    (send_and_recv_on_one_line, "This is a deadlock: a send returns when"),
    (all_receive_on_one_line, "each of these ranks waits for a message, and none sends"),
    (isend_without_wait, "Rank 0, 1, 2, 3 sent with isend and has not called wait()"),
    (irecv_without_wait, "the ranks have ended, and their messages have not: wait() for each isend and irecv"),
]
