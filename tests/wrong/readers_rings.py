"""Rings as readers of chapter 4 may write them: right ones in several forms, and wrong ones.

This file is the "cell": its functions, imports and constants are run again on each rank.
"""

import math

import torch
import torch.distributed as dist

from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import finish, start

LAST = 1  # round has no hop: a constant of the cell; and a class


class Neighbours:
    def __init__(self):
        self.P, self.rank = dist.get_world_size(), dist.get_rank()
        self.next, self.before = (self.rank + 1) % self.P, (self.rank - 1) % self.P


def scores_of(q, k):
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def full(q, k, v):
    return torch.softmax(scores_of(q, k), dim=-1) @ v


def exchange(block, length, to=1, all_send_first=False):
    """Pass the block to rank + `to` and return the one that comes, of `length` tokens."""
    rank, P = dist.get_rank(), dist.get_world_size()
    received = block.new_empty(*block.shape[:-2], length, block.shape[-1])
    if all_send_first:
        dist.send(block, (rank + to) % P)
    messages = [
        dist.P2POp(dist.isend, block.contiguous(), (rank + to) % P),
        dist.P2POp(dist.irecv, received, (rank - to) % P),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return received


# Right -------------------------------------------------------------------------------------------------------------


def overlapped(chunk_q, chunk_k, chunk_v, sizes):
    """A block leaves while it is computed on; two buffers; a message without a source; in place; an array of numpy."""
    at = Neighbours()
    chunk_q *= chunk_q.shape[-1] ** -0.5
    buffers = [chunk_k.new_empty(2, *chunk_k.shape[:2], max(sizes) * chunk_k.shape[3]) for _ in "ab"]
    block = torch.stack((chunk_k, chunk_v))
    state = start(chunk_q)
    for t in range(at.P):
        if t < at.P - LAST:
            size = sizes[(at.rank - t - 1) % at.P]
            shape = 2, *chunk_k.shape[:2], size, chunk_k.shape[3]
            received = buffers[t % 2].view(-1)[: math.prod(shape)].view(shape)
            work = dist.isend(block, at.next)
        state = attend(state, chunk_q, *block, scale=1.0)
        if t < at.P - LAST:
            dist.recv(received)
            work.wait()
            block = received
    dist.barrier()
    return finish(state)[0].numpy()


RIGHT_RINGS = [overlapped]


# Wrong, or they only look right ------------------------------------------------------------------------------------


def ring(q, k, v, lengths, rounds=0, more_hops=0, seen=None, **kinds):
    """The right ring, but for what it is told: rounds or hops more or less, how to hop."""
    rank, P = dist.get_rank(), dist.get_world_size()
    state, block = start(q), torch.stack((k, v))
    for t in range(P + rounds):
        if seen:
            seen(block)
        state = attend(state, q, *block, scale=q.shape[-1] ** -0.5)
        if t < P + rounds - 1 + more_hops:
            block = exchange(block, lengths[(rank - t - 1) % P], **kinds)
    return finish(state)[0]


def deadlock(q, k, v, lengths):
    return ring(q, k, v, lengths, all_send_first=True)


def backwards(q, k, v, lengths):
    return ring(q, k, v, lengths, to=-1)


def a_rank_that_never_sends(q, k, v, lengths):
    return q if dist.get_rank() == 2 else ring(q, k, v, lengths)


def a_hop_short(q, k, v, lengths):
    return ring(q, k, v, lengths, rounds=-1 if len(lengths) > 1 else 0)


def p_hops(q, k, v, lengths):
    return ring(q, k, v, lengths, more_hops=int(len(lengths) > 1))


def no_remainder(q, k, v, lengths):
    """The last rank sends to rank P."""
    if dist.get_rank() == len(lengths) - 1 > 0:
        dist.isend(torch.stack((k, v)), dist.get_rank() + 1)
    return ring(q, k, v, lengths)


def equal_lengths_only(q, k, v, lengths):
    return ring(q, k, v, [q.shape[2]] * len(lengths))


def four_ranks_only(q, k, v, lengths):
    """On 5 ranks, the last chunk is left out."""
    return ring(q, k, v, lengths, rounds=-1 if len(lengths) == 5 else 0)


def all_gathers(q, k, v, lengths):
    blocks = [k.new_empty(2, *k.shape[:2], length, k.shape[3]) for length in lengths]
    dist.all_gather(blocks, torch.stack((k, v)))
    return full(q, *torch.cat(blocks, dim=3))


def straight_to_each(q, k, v, lengths):
    """Each rank sends its own block to every other rank."""
    rank, P = dist.get_rank(), dist.get_world_size()
    state, block = start(q), torch.stack((k, v))
    for t in range(P):
        other = block if t == 0 else exchange(block, lengths[(rank - t) % P], to=t)
        state = attend(state, q, *other, scale=q.shape[-1] ** -0.5)
    return finish(state)[0]


def keeps(kept, back, q, k, v, lengths):
    """Copies of all blocks, as `kept` makes them; `back` makes tensors of them."""
    blocks = []
    ring(q, k, v, lengths, seen=lambda block: blocks.append(kept(block)))
    return full(q, *torch.cat([back(block) for block in blocks], dim=3))


def keeps_all_blocks(q, k, v, lengths):
    return keeps(torch.clone, lambda block: block, q, k, v, lengths)


def keeps_arrays(q, k, v, lengths):
    return keeps(lambda block: block.numpy().copy(), torch.from_numpy, q, k, v, lengths)


def keeps_lists(q, k, v, lengths):
    return keeps(torch.Tensor.tolist, lambda block: torch.tensor(block, dtype=torch.float64), q, k, v, lengths)


def irecv_without_wait(q, k, v, lengths):
    """The last message need not be there when the ranks end."""
    at, block, new = Neighbours(), k.contiguous(), torch.empty(k.shape, dtype=k.dtype)
    for _ in lengths[1:]:
        dist.irecv(new, at.before)
    for _ in lengths[1:]:
        dist.send(block, at.next)
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


def float32_on_the_way(q, k, v, lengths):
    return in_float32(q, k, v, lengths).double()


def three_arguments(q, k, v):
    return q


LINE = "in: dist.send(block, (rank + to) % P). Every rank must send to rank + 1 as often as it receives"
WRONG_RINGS = [
    (a_hop_short, "The last block that arrives is never used. Look at the loop over the rounds"),
    (no_remainder, "rank 3 ends in ValueError: there is no rank 4; rank 3 has rank 0 as its next"),
    (backwards, "a rank sends to rank + 1, so the hop after round t brings"),
    (equal_lengths_only, "the length of the block that comes"),
    (four_ranks_only, "chunks of [3, 3, 3, 2, 2] tokens, rank 0"),
    (lambda q, k, v, lengths: q, "define it with def at the left margin"),
    (
        p_hops,
        "It received 2,048 bytes in 4 message(s) and sent 2,048 in 4; expected 1,536 bytes received: K and V of "
        "3 block(s), 6 tokens of 256 bytes. One hop is too many, it brings the rank's own block home: P rounds, but P ",
    ),
    (all_gathers, "it called a collective, allgather"),
    (straight_to_each, "it exchanged a message with rank 2"),
    (keeps_all_blocks, "the memory grows with the sequence"),
    (q_travels_too, "nothing else travels"),
    (in_float32, "right, but in torch.float32"),
    (float32_on_the_way, "as float32 rounds"),
    (three_arguments, "rank 0 ends in TypeError: three_arguments() takes 3 positional arguments but 4 were given"),
]
WAITING_RINGS = [  # they wait for ever
    (deadlock, f"still waiting after 1 s; rank 0, 1, 2, 3 {LINE}"),
    (a_rank_that_never_sends, "rank 2 in: its end"),
    (irecv_without_wait, "in: its end: its messages are still under way. Every rank must send"),
]
QUICK = (deadlock, p_hops, all_gathers, in_float32)  # some, for `make test`
