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


def gather_directly(comm, x):
    blocks = [x] * comm.P
    for t in range(1, comm.P):
        blocks[(comm.rank - t) % comm.P] = comm.exchange((comm.rank + t) % comm.P, x, (comm.rank - t) % comm.P)
    return torch.stack(blocks)


def reduce_scatter(comm, xs):
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    total = xs[left]
    for t in range(1, comm.P):
        total = comm.exchange(right, total, left) + xs[(comm.rank - 1 - t) % comm.P]
    return total


def reduce_scatter_directly(comm, xs):
    total = xs[comm.rank]
    for t in range(1, comm.P):
        to = (comm.rank + t) % comm.P
        total = total + comm.exchange(to, xs[to], (comm.rank - t) % comm.P)
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


def home_with_a_last_hop(comm, q, k, v, d_out, lse, delta):
    """The goal: K and V stay where they are in the last hop."""
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    block = torch.stack((k, v))
    d_q, d_block = torch.zeros_like(q), torch.zeros_like(block)
    for t in range(comm.P):
        d_q_j, d_k_j, d_v_j = comm.gradients(q, *block, d_out, lse, delta)
        d_q, d_block = d_q + d_q_j, d_block + torch.stack((d_k_j, d_v_j))
        if t < comm.P - 1:
            block = comm.exchange(right, block, left)
        d_block = comm.exchange(right, d_block, left)
    return d_q, *d_block


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


def slow_link(comm, x, hosts):
    """Partners of two hosts swap their blocks, then each host's ring takes them round."""
    near = [rank for rank in range(comm.P) if hosts[rank] == hosts[comm.rank]]
    far = [rank for rank in range(comm.P) if hosts[rank] != hosts[comm.rank]]
    blocks = {comm.rank: x}
    for i in range(
        max(len(near), len(far))
    ):  # rank i of a host meets rank i of the other; the shorter list begins again
        a, b = near[i % len(near)], far[i % len(far)]
        if a != comm.rank:
            continue
        sends, takes = i < len(near), i < len(far)  # a block crosses once
        if sends and takes:
            blocks[b] = comm.exchange(b, x, b)
        elif sends:
            comm.send(b, x)
        else:
            blocks[b] = comm.recv(b)
    for rank in range(comm.P):  # the rank of this host that has a block gives it to the others
        owner = rank if rank in near else near[far.index(rank) % len(near)]
        if owner == comm.rank:
            for other in near:
                if other != comm.rank:
                    comm.send(other, blocks[rank])
        else:
            blocks[rank] = comm.recv(owner)
    return [blocks[rank] for rank in range(comm.P)]


def slow_link_ring(comm, x, hosts):
    """The goal: the ring goes through one host, then through the other."""
    order = sorted(range(comm.P), key=lambda rank: hosts[rank])
    at = order.index(comm.rank)
    right, left = order[(at + 1) % comm.P], order[at - 1]
    blocks = [x] * comm.P
    for t in range(1, comm.P):
        x = comm.exchange(right, x, left)
        blocks[order[at - t]] = x
    return blocks


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


def two_directions(comm, q, k, v):
    """The goal: whole blocks, from both sides."""
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    a = b = torch.stack((k, v))
    state = comm.attend(start(q), q, k, v)
    for t in range(1, comm.P // 2 + 1):
        if 2 * t == comm.P:  # one block is left, half a ring away
            a = comm.exchange(right, a, left)
            state = comm.attend(state, q, *a)
            break
        got = comm.exchange_all({right: a, left: b}, [left, right])
        a, b = got[left], got[right]
        state = comm.attend(comm.attend(state, q, *a), q, *b)
    return finish(state)[0]


def documents_of(comm, q, k, v, documents):
    """A rank hands on all keys of the document that goes on behind its last token."""
    C = q.shape[2]
    number = torch.repeat_interleave(torch.tensor(documents))
    first = C * comm.rank
    begin = int((number == number[first]).nonzero()[0])
    if begin < first:
        k, v = (torch.cat(pair, dim=2) for pair in zip(comm.recv(comm.rank - 1), (k, v), strict=True))
    end = first + C
    keys_from = min(begin, first)
    if comm.rank < comm.P - 1 and number[end] == number[end - 1]:
        goes_on = int((number == number[end]).nonzero()[0])
        comm.send(comm.rank + 1, torch.stack((k, v))[:, :, :, goes_on - keys_from :])
    at, key_at = torch.arange(first, end), torch.arange(keys_from, end)
    hidden = (key_at > at[:, None]) | (number[key_at] != number[at][:, None])
    return finish(comm.attend(start(q), q, k, v, future=hidden))[0]


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


def one_token_in_a_row(comm, q, k, v):
    """The goal: rank 0 takes the partial results one after the other."""
    out, lse = finish(comm.attend(start(q), q, k, v))
    if comm.rank:
        return comm.send(0, torch.cat((out, lse[..., None]), dim=-1))
    for source in range(1, comm.P):
        got = comm.recv(source)
        out, lse = merge(out, lse, got[..., :-1].contiguous(), got[..., -1].contiguous())
    return out


def state_doubling(comm, q, k, v):
    """Running sums of the states: after round t, a rank has the sum of 2^t ranks."""
    own = k.mT @ v
    total, away = own, 1
    while away < comm.P:
        to, source = comm.rank + away, comm.rank - away
        if to < comm.P and source >= 0:
            total = total + comm.exchange(to, total, source)
        elif to < comm.P:
            comm.send(to, total)
        elif source >= 0:
            total = total + comm.recv(source)
        away *= 2
    return (q @ k.mT).tril() @ v + q @ (total - own)


def state_chain(comm, q, k, v):
    """The goal: from rank to rank."""
    before = comm.recv(comm.rank - 1) if comm.rank else torch.zeros_like(k.mT @ v)
    if comm.rank < comm.P - 1:
        comm.send(comm.rank + 1, before + k.mT @ v)
    return (q @ k.mT).tril() @ v + q @ before


def causal_ring(comm, q, k, v, places):
    """The causal ring that puzzle 7 runs with the reader's tokens: places[r] (C) are those of rank r."""
    state, block = start(q), torch.stack((k, v))
    for t in range(comm.P):
        j = (comm.rank - t) % comm.P
        state = comm.attend(state, q, *block, future=places[j] > places[comm.rank][:, None])
        if t < comm.P - 1:
            block = comm.exchange((comm.rank + 1) % comm.P, block, (comm.rank - 1) % comm.P)
    return finish(state)[0]
