"""A schedule for each puzzle that is as good as anybody knows. It runs on the ranks, as a cell of the notebook does."""

import torch

from ringlab.basics.online_softmax import finish, merge, start


def hop(comm, x):
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    if comm.rank % 2 == 0:
        comm.send(right, x)
        return comm.recv(left)
    got = comm.recv(left)
    comm.send(right, x)
    return got


def gather(comm, x):
    blocks = [x] * comm.P
    for t in range(1, comm.P):
        x = comm.exchange((comm.rank + 1) % comm.P, x, (comm.rank - 1) % comm.P)
        blocks[(comm.rank - t) % comm.P] = x
    return blocks


def reduce_scatter(comm, xs):
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    total = xs[left]
    for t in range(1, comm.P):
        total = comm.exchange(right, total, left) + xs[(comm.rank - 1 - t) % comm.P]
    return total


def ring(comm, q, k, v):
    """The goal, and less: K and V are two messages, so only one of them has two buffers at a time."""
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    state = comm.attend(start(q), q, k, v)
    for _ in range(comm.P - 1):
        k = comm.exchange(right, k, left)
        v = comm.exchange(right, v, left)
        state = comm.attend(state, q, k, v)
    return finish(state)[0]


def ring_in_pieces(comm, q, k, v):
    """One token of one head at a time takes the place of the one that has gone."""
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    state = comm.attend(start(q), q, k, v)
    k, v = k.clone(), v.clone()
    for _ in range(comm.P - 1):
        for x in (k, v):
            for head in range(x.shape[1]):
                for token in range(x.shape[2]):
                    x[:, head, token] = comm.exchange(right, x[:, head, token], left)
        state = comm.attend(state, q, k, v)
    return finish(state)[0]


def ring_in_one_message(comm, q, k, v):
    state, block = start(q), torch.stack((k, v))
    for t in range(comm.P):
        state = comm.attend(state, q, *block)
        if t < comm.P - 1:
            block = comm.exchange((comm.rank + 1) % comm.P, block, (comm.rank - 1) % comm.P)
    return finish(state)[0]


def grouped(comm, q, k, v):
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    state, block = start(q), torch.stack((k, v))
    for t in range(comm.P):
        state = comm.attend(state, q, *block.repeat_interleave(2, dim=2))
        if t < comm.P - 1:
            block = comm.exchange(right, block, left)
    return finish(state)[0]


def home(comm, q, k, v, d_out, lse, delta):
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    d_q, own_d_k, own_d_v = comm.gradients(q, k, v, d_out, lse, delta)  # its own block's: they stay at home
    block, travels = torch.stack((k, v)), None
    for t in range(1, comm.P):
        block = comm.exchange(right, block, left)
        if t > 1:
            travels = comm.exchange(right, travels, left)
        d_q_j, d_k_j, d_v_j = comm.gradients(q, *block, d_out, lse, delta)
        d_q = d_q + d_q_j
        new = torch.stack((d_k_j, d_v_j))
        travels = new if travels is None else travels + new
    travels = comm.exchange(right, travels, left)
    return d_q, own_d_k + travels[0], own_d_v + travels[1]


def zigzag(comm, S):
    n, last = S // (2 * comm.P), 2 * comm.P - 1
    return [*range(n * comm.rank, n * (comm.rank + 1)), *range(n * (last - comm.rank), n * (last - comm.rank + 1))]


def stripes(comm, S):
    return torch.arange(comm.rank, S, comm.P)


def window_of(comm, q, k, v, window):
    """Each rank sends each later rank the keys that its window still sees."""
    C = q.shape[2]
    at = torch.arange(C * comm.rank, C * (comm.rank + 1))
    state = comm.attend(start(q), q, k, v, future=(at > at[:, None]) | (at <= at[:, None] - window))
    for away in range(1, comm.P):
        keys = min(C, window - 1 - C * (away - 1))  # the last so many of the chunk `away` ranks before
        to, source = comm.rank + away, comm.rank - away
        if keys <= 0:
            break
        sent = torch.stack((k, v))[:, :, :, C - keys :]
        if to < comm.P and source >= 0:
            block = comm.exchange(to, sent, source)
        elif to < comm.P:
            comm.send(to, sent)
        elif source >= 0:
            block = comm.recv(source)
        if source >= 0:
            key_at = torch.arange(C * (source + 1) - keys, C * (source + 1))
            state = comm.attend(state, q, *block, future=key_at <= at[:, None] - window)
    return finish(state)[0]


def two_rings(comm, q, k, v):
    """Half of the heads turns right, the other half left."""
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    halves = list(torch.stack((k, v)).chunk(2, dim=2))
    queries = q.chunk(2, dim=1)
    states = [start(half) for half in queries]
    for t in range(comm.P):
        states = [comm.attend(s, half, *block) for s, half, block in zip(states, queries, halves, strict=True)]
        if t < comm.P - 1:
            got = comm.exchange_all({right: halves[0], left: halves[1]}, [left, right])
            halves = [got[left], got[right]]
    return torch.cat([finish(state)[0] for state in states], dim=1)


def one_token(comm, q, k, v):
    """A tree: in each round, half of the ranks that are left give their partial result to the other half."""
    out, lse = finish(comm.attend(start(q), q, k, v))
    away = 1
    while away < comm.P:
        if comm.rank % (2 * away):
            comm.send(comm.rank - away, torch.cat((out, lse[..., None]), dim=-1))
            return None
        if comm.rank + away < comm.P:
            got = comm.recv(comm.rank + away)
            out, lse = merge(out, lse, got[..., :-1].contiguous(), got[..., -1].contiguous())
        away *= 2
    return out


def causal_ring(comm, q, k, v, places):
    """The causal ring that puzzle 7 runs with the reader's tokens: places[r] (C) are those of rank r."""
    state, block = start(q), torch.stack((k, v))
    for t in range(comm.P):
        j = (comm.rank - t) % comm.P
        state = comm.attend(state, q, *block, future=places[j] > places[comm.rank][:, None])
        if t < comm.P - 1:
            block = comm.exchange((comm.rank + 1) % comm.P, block, (comm.rank - 1) % comm.P)
    return finish(state)[0]
