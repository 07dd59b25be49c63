# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Puzzles: design the schedule
#
# A ring is one schedule of messages. There are others, and some are better. Here are ten puzzles. In each, you write what **one rank** does. Your function
# then runs on 3, 4 and 5 ranks, all at the same time. You see whether the result is right, what it cost, and a film of what your ranks did.
#
# Puzzles 1, 2, 3, 7 and 10 can also be solved [in the page of the book](../../book/pages/solve.md), with nothing installed.
#
# You need chapters [1](../01_attention_to_online_softmax.ipynb) to [4](../04_the_ring.ipynb). Puzzle 6 needs [5](../05_backward.ipynb), and puzzle 7 needs
# [7](../07_causal_balance.ipynb). A puzzle takes 5 to 20 minutes. They become harder.
#
# ## What a rank can do
#
# Your function gets `comm` and the tensors of its own rank. Whatever else it needs must come by a message: a list that all ranks know is cheating.
#
# | | |
# |---|---|
# | `comm.rank`, `comm.P` | the number of this rank, and of all ranks |
# | `comm.send(to, x)` | returns when rank `to` has received the tensor `x` |
# | `comm.recv(source)` | returns the next tensor that rank `source` sends to this rank |
# | `comm.exchange(to, x, source)` | sends and receives at the same time; returns what came |
# | `comm.attend(state, q, k, v, future=None)` | adds a block to `(m, l, o)`, as `attend` of chapter 4; `future` is True where a query may not look |
# | `start(q)`, `finish(state)`, `merge(out_a, lse_a, out_b, lse_b)` | as in chapter 1; `finish` returns `(out, lse)` |
#
# All messages *block*: a send waits for its receiver. A rank has one wire out and one wire in.
#
# **Nothing hangs.** A referee sees each message before it moves. When all ranks wait, it ends the run and says who waits for whom.
#
# **Time** is counted, not measured: a message begins when its two ranks are ready, and takes the time that the puzzle says. So your score is the same on each machine.
#
# **Stars.** ★☆☆ the result is right · ★★☆ the goal is reached · ★★★ as good as the best that we know. Some of these best are *proved*: no schedule can do with less, and the
# proof is two lines. For the others we have no proof. Perhaps you find a better one.
#
# Each cell below has a first try, so that you see a film at once. It is poor or wrong. Make it better.

# %%
import torch

from notebooks.puzzles.checks import score_card, solve
from ringlab.basics.online_softmax import finish, merge, start

# %% [markdown]
# ## Puzzle 1 · one hop, blocking
#
# Each rank has a tensor `x`. Return the `x` of the rank before. Only `comm.send` and `comm.recv` are allowed here. A message takes one unit of time.
#
# **Goal:** 2 units of time when P is even, 3 when P is odd.


# %%
def my_hop(comm, x):
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    comm.send(right, x)
    return comm.recv(left)


solve(1, my_hop)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Somebody must receive first. Chapter 4 says who. With an odd P two neighbours do the same: why is this no deadlock?
# </details>
#
# ## Puzzle 2 · everybody gets everything
#
# This is called an *all-gather*. Return a list: the `x` of rank 0, of rank 1, … A message takes one unit of time for each block in it: two blocks in one message take two.
#
# **Goal:** P − 1 units of time.


# %%
def my_gather(comm, x):
    if comm.rank == 0:
        blocks = [x] + [comm.recv(source) for source in range(1, comm.P)]
        for to in range(1, comm.P):
            comm.send(to, torch.stack(blocks))
        return blocks
    comm.send(0, x)
    return comm.recv(0)


solve(2, my_gather)

# %% [markdown]
# <details><summary>Hint</summary>
#
# In the film, most ranks do nothing most of the time. Each rank should receive a block in each unit of time. Use `comm.exchange`.
# </details>
#
# ## Puzzle 3 · sums, a part for each rank
#
# This is called a *reduce-scatter*. Each rank has `xs` with P rows: `xs[j]` is its share of part j. Return the sum over all ranks of `xs[comm.rank]`. A row takes one unit
# of time.
#
# **Goal:** P − 1 units of time. (The colour of an arrow is its part.)


# %%
def my_reduce_scatter(comm, xs):
    if comm.rank == 0:
        total = xs
        for source in range(1, comm.P):
            total = total + comm.recv(source)
        for to in range(1, comm.P):
            comm.send(to, total[to])
        return total[0]
    comm.send(0, xs)
    return comm.recv(0)


solve(3, my_reduce_scatter)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Let a sum go round the ring, and let each rank add its share. Which part must rank r send first, so that part r ends on rank r?
# </details>
#
# ## Puzzle 4 · the ring
#
# Full attention over all tokens: return the rows of this rank. Its chunks `q`, `k`, `v` are (1, 2, 4, 16) in float64. K and V of a chunk travel in one unit of time, and to
# compute on them takes another. *Chunks held* counts all tensors of your function that are alive while a message travels, beyond its inputs: a chunk is the size of `k`.
#
# **Goal:** a rank sends 2 (P − 1) chunks and holds 5.125 at the most, however many ranks there are. **Best known:** 3.25.


# %%
def my_ring(comm, q, k, v):
    blocks = [torch.stack((k, v))]
    for t in range(1, comm.P):
        blocks.append(comm.exchange((comm.rank + 1) % comm.P, blocks[-1], (comm.rank - 1) % comm.P))
    state = start(q)
    for block in blocks:
        state = comm.attend(state, q, *block)
    return finish(state)[0]


solve(4, my_ring)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Compute on a block before the next one comes, and do not keep it. For the third star: while a message travels, what you send and what you receive both take memory. Must a message
# be all of K and V? (The smaller the pieces, the less: 3.125 in the limit. A real wire pays for each message, so nobody goes that far.)
# </details>
#
# ## Puzzle 5 · grouped queries
#
# Now `q` has four heads, and `k` and `v` have two: heads 0 and 1 of `q` use head 0 of `k` and `v`, and heads 2 and 3 use head 1. `comm.attend` wants as many heads of
# `k` and `v` as of `q`, and `k.repeat_interleave(2, dim=1)` makes them.
#
# **Goal:** a rank sends 2 (P − 1) chunks, half of what the first try sends, and no rank computes more than its share. The referee sees the work in `comm.attend` only, so
# compute with it.


# %%
def my_grouped_ring(comm, q, k, v):
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    state, block = start(q), torch.stack((k, v))
    for t in range(comm.P):
        state = comm.attend(state, q, *block)
        if t < comm.P - 1:
            block = comm.exchange((comm.rank + 1) % comm.P, block, (comm.rank - 1) % comm.P)
    return finish(state)[0]


solve(5, my_grouped_ring)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A copy of a head can be made where it is needed. `block` is (2, B, heads, C, D), so its heads are dimension 2.
# </details>
#
# ## Puzzle 6 · the gradients' trip home
#
# The backward pass. `comm.gradients(q, k, v, d_out, lse, delta)` returns what the queries of this rank and one block add to `d_q`, `d_k` and `d_v`. Return all three for the
# chunks of this rank. K and V travel; the sums d_k and d_v travel with them, and must come home.
#
# The first try sends all four, P times. **Goal:** a rank sends 4 P − 2 chunks, and no rank computes more than its share, all with `comm.gradients`. **Best known:** 4 P − 4.


# %%
def my_backward(comm, q, k, v, d_out, lse, delta):
    right, left = (comm.rank + 1) % comm.P, (comm.rank - 1) % comm.P
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for t in range(comm.P):
        more = comm.gradients(q, k, v, d_out, lse, delta)
        d_q, d_k, d_v = d_q + more[0], d_k + more[1], d_v + more[2]
        k, v, d_k, d_v = comm.exchange(right, torch.stack((k, v, d_k, d_v)), left)
    return d_q, d_k, d_v


solve(6, my_backward)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For the goal: who needs K and V after the last round? For the best known: a rank computes its own block first. Must these gradients travel at all?
# </details>
#
# ## Puzzle 7 · a fair share of a causal mask
#
# A query sees the keys up to its own position. There are `S` tokens, and each rank takes S / P of them. Return the list of the tokens of this rank. Then a causal ring runs
# with your tokens. Nobody can go on before its neighbours: a rank with few pairs waits.
#
# **Goal:** the busiest rank has at most 1.25 times its fair share of the pairs. **Best known:** exactly its share, and no rank is ever idle.


# %%
def my_tokens(comm, S):
    n = S // comm.P
    return list(range(n * comm.rank, n * (comm.rank + 1)))


solve(7, my_tokens)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Token i has i + 1 pairs. Which two tokens have as many together as token 0 and token S − 1? No messages are needed in your function.
# </details>
#
# ## Puzzle 8 · a window
#
# A query at position i sees the keys i − window + 1 … i. Rank r has the tokens C r … C (r + 1) − 1. The first try is a ring with the mask of the window. `window` is 3,
# then 7, then 4; a chunk has 4 tokens.
#
# **Goal:** no rank receives a block that it does not need. **Best known:** no rank receives a *key* that it does not need: window − 1 of them.


# %%
def my_window(comm, q, k, v, window):
    C = q.shape[2]
    at = torch.arange(C * comm.rank, C * (comm.rank + 1))[:, None]
    state, block = start(q), torch.stack((k, v))
    for t in range(comm.P):
        j = (comm.rank - t) % comm.P
        key_at = torch.arange(C * j, C * (j + 1))
        hidden = (key_at > at) | (key_at <= at - window)
        state = comm.attend(state, q, *block, future=hidden)
        if t < comm.P - 1:
            block = comm.exchange((comm.rank + 1) % comm.P, block, (comm.rank - 1) % comm.P)
    return finish(state)[0]


solve(8, my_window)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A rank may send to any rank, not only to the next. Rank 0 receives nothing, and the last rank sends nothing: they use `comm.send` and `comm.recv`. Send a part of `k` and `v`:
# `k[:, :, -3:]` has the last three tokens.
# </details>
#
# ## Puzzle 9 · two directions at once
#
# Now the wires are those of a real ring: each rank has a wire to each of its two neighbours, and no other. Both directions of both wires work at the same time, with
# `comm.exchange_all({to: x, …}, [source, …])`. It returns a dictionary: what came from each source. Computing takes as long as in puzzle 4.
#
# The first try needs 2 P − 1 units of time. **Goal:** P + (P − 1) / 2, rounded up. **Best known:** the same, not rounded.


# %%
def my_two_directions(comm, q, k, v):
    state, block = start(q), torch.stack((k, v))
    for t in range(comm.P):
        state = comm.attend(state, q, *block)
        if t < comm.P - 1:
            block = comm.exchange((comm.rank + 1) % comm.P, block, (comm.rank - 1) % comm.P)
    return finish(state)[0]


solve(9, my_two_directions)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For the goal, each block travels both ways, half round the ring. With P = 4 one block is then left, and one direction is idle. For the best known, cut something in two halves: one
# half for each direction.
# </details>
#
# ## Puzzle 10 · one new token
#
# Generation: each rank has the keys and values of its tokens, and all have the same `q`, one new token (1, 2, 1, 16). Rank 0 returns the output (1, 2, 1, 16); what the others
# return does not matter. A message takes one unit of time, whatever its size.
#
# **Goal:** P − 1 messages of 34 numbers, and no keys travel. **Best known:** the same in log₂ P rounds.


# %%
def my_token(comm, q, k, v):
    if comm.rank:
        comm.send(0, torch.stack((k, v)))
        return None
    state = comm.attend(start(q), q, k, v)
    for source in range(1, comm.P):
        state = comm.attend(state, q, *comm.recv(source))
    return finish(state)[0]


solve(10, my_token)

# %% [markdown]
# <details><summary>Hint</summary>
#
# 34 is 2 heads times (16 + 1): `out` and `lse` of one query. `merge` joins two of them. For the best known, draw a tournament: in each round half of the ranks give their result away.
# </details>
#
# ## Your score

# %%
score_card()

# %% [markdown]
# A schedule for each puzzle with three stars: [solutions.py](solutions.py). Before you look: the film of your own schedule shows who waits.
