"""Other forms of right schedules, and wrong schedules."""

import math

import numpy as np
import torch

from ringlab.basics.online_softmax import finish, start


def around(comm):
    return (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P


def ring(comm, q, k, v, hops=0, to=1):
    """Right, but for what it is told."""
    state, block = start(q), torch.stack((k, v))
    for t in range(comm.P + hops):
        state = comm.attend(state, q, *block)
        if t < comm.P + hops - 1:
            block = comm.exchange((comm.rank + to) % comm.P, block, (comm.rank - to) % comm.P)
    return finish(state)[0]


def nothing_yet(comm, x):
    return ...


def a_list_of_nothing(comm, x):
    return [...] * comm.P


def holds_three_chunks(comm, q, k, v):
    kept = [torch.zeros_like(k) for _ in range(3)]
    kept.append(kept[0][:, :1])
    torch.zeros(100, dtype=k.dtype) + 1
    comm.exchange((comm.rank + 1) % comm.P, kept[0], (comm.rank - 1) % comm.P)


# Other forms of right ones

STEP: int = int(torch.tensor(1))  # a constant that calls, with a type


def hop_of_arrays(comm: "Comm", x):  # noqa: F821
    """Ranks that are numbers of numpy and tensors; an array or a list comes back."""
    P = np.int64(comm.P)
    right, left = np.int64(comm.rank + STEP) % P, torch.tensor((comm.rank - 1) % comm.P)
    if comm.rank % 2 == 0:
        comm.send(right, x)
        return comm.recv(left).numpy()
    got = comm.recv(left)
    comm.send(right, x)
    return got.tolist()


def zigzag_of_numpy(comm, S):
    early = np.arange(S).reshape(2 * comm.P, -1)[[comm.rank, -1 - comm.rank]]
    return list(map(torch.tensor, early.flatten().astype(float)))


def ring_by_hand(comm, q, k, v):
    """The other way round, with einsum, and without comm.attend, start and finish."""
    m, l, o = torch.full((*q.shape[:3], 1), -torch.inf, dtype=q.dtype), 0, 0
    for t in range(comm.P):
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        p, f, m = (scores - m_new).exp(), (m - m_new).exp(), m_new
        l, o = f * l + p.sum(-1, keepdim=True), f * o + p @ v
        if t < comm.P - 1:
            k, v = (comm.exchange((comm.rank - 1) % comm.P, x, (comm.rank + 1) % comm.P) for x in (k, v))
    return o / l


# 1: one hop


def odd_ranks_only_wait(comm, x):
    right, left = around(comm)
    if comm.rank % 2 == 0:
        comm.send(right, x)
    return comm.recv(left)


def all_but_rank_0_send_first(comm, x):
    if comm.rank:
        comm.send(comm.rank % (comm.P - 1) + 1, x)
    return x


def at_the_same_time(comm, x):
    right, left = around(comm)
    return comm.exchange(right, x, left)


def loop(comm, x):
    while True:
        math.sqrt(2)


def sends_for_ever(comm, x):
    right, left = around(comm)
    while True:
        if comm.rank % 2:
            x = comm.recv(left)
            comm.send(right, x)
        else:
            comm.send(right, x)
            x = comm.recv(left)


# 2: everybody gets everything


def a_hop_short(comm, x):
    blocks = [x] * comm.P
    for t in range(1, comm.P - 1):
        x = comm.exchange((comm.rank + 1) % comm.P, x, (comm.rank - 1) % comm.P)
        blocks[(comm.rank - t) % comm.P] = x
    return blocks


def two_at_once(comm, x):
    others = [rank for rank in range(comm.P) if rank != comm.rank]
    got = comm.exchange_all({rank: x for rank in others}, others)
    return [got.get(rank, x) for rank in range(comm.P)]


def two_into_one(comm, x):
    return comm.exchange_all({(comm.rank + 1) % comm.P: x}, [rank for rank in range(comm.P) if rank != comm.rank])


def in_float32(comm, x):
    blocks = [x] * comm.P
    x = x.float()
    for t in range(1, comm.P):
        x = comm.exchange((comm.rank + 1) % comm.P, x, (comm.rank - 1) % comm.P)
        blocks[(comm.rank - t) % comm.P] = x.double()
    return blocks


# 3: sums


def all_parts(comm, xs):
    right, left = around(comm)
    total, travels = xs, xs
    for _ in range(1, comm.P):
        travels = comm.exchange(right, travels, left)
        total = total + travels
    return total


# 4, 5: the ring


def into_its_inputs(comm, q, k, v):
    """The version of a tensor does not tell, and after P hops its numbers are its own again."""
    right, left = around(comm)
    state = comm.attend(start(q), q, k, v)
    for t in range(comm.P):
        k.data[:], v.data[:] = comm.exchange(right, k, left), comm.exchange(right, v, left)
        state = comm.attend(state, q, k, v) if t < comm.P - 1 else state
    return finish(state)[0]


def grouped_by_hand(comm, q, k, v):
    return ring_by_hand(comm, *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (q, k, v)))


# 6: gradients


def never_home(comm, q, k, v, d_out, lse, delta):
    right, left = around(comm)
    block = torch.stack((k, v))
    d_q, d_block = torch.zeros_like(q), torch.zeros_like(block)
    for t in range(comm.P):
        d_q_j, d_k_j, d_v_j = comm.gradients(q, *block, d_out, lse, delta)
        d_q, d_block = d_q + d_q_j, d_block + torch.stack((d_k_j, d_v_j))
        if t < comm.P - 1:
            block, d_block = comm.exchange(right, torch.stack((block, d_block)), left)
    return d_q, *d_block


# 8: a window


def sends_what_nobody_takes(comm, q, k, v, window):
    if comm.rank < comm.P - 1:
        comm.send(comm.rank + 1, torch.stack((k, v)))
    return q


# 10: one token


def averages_added(comm, q, k, v):
    out, _ = finish(comm.attend(start(q), q, k, v))
    return comm.send(0, out) if comm.rank else out + sum(comm.recv(source) for source in range(1, comm.P))
