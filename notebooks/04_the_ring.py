# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 · The ring: rotation, deadlock, real processes
#
# Now the blocks travel between processes. After this chapter you can write the ring: why blocking sends deadlock, how
# even and odd ranks cure it, why P rounds need P − 1 hops, and what a real run looks like on a clock.
#
# 20 minutes. The code: [`basics/blocking_messages.py`](../basics/blocking_messages.py),
# [`basics/ranks.py`](../basics/ranks.py), [`ring_attn.py`](../ring_attn.py).

# %%
# %matplotlib inline
import subprocess
import sys

import numpy as np
import torch
from IPython.display import HTML
from ipywidgets import interact

from basics.blocking_messages import Recv, Send, ring_programs, simulate_messages
from basics.blockwise_attention import attend
from basics.naive_attention import TOKENS, naive_attention
from basics.online_softmax import finish, start
from figures import block_schedule, kv_rotation, message_order, ring_timeline
from notebooks import workers
from notebooks.checks.the_ring import check_block_in_hand, check_bytes_sent, check_ring_order
from support.processes import launch

np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## First in one process
#
# A ring is a list that turns. Four "ranks", each with its queries and its running `(m, l, o)`; in every round each rank
# folds in the block it holds, and then the list of blocks turns by one.

# %%
P = 4
chunks = TOKENS[None, None].split(2, dim=2)  # four chunks (1, 1, 2, 2): queries, keys and values alike
states = [start(chunk) for chunk in chunks]
blocks = list(enumerate(chunks))  # (number, K/V) in the hand of each rank
for t in range(P):
    for rank in range(P):
        j, kv = blocks[rank]
        assert j == (rank - t) % P
        states[rank] = attend(states[rank], chunks[rank], kv, kv, scale=2**-0.5)
    print(f"round {t}:", "  ".join(f"rank {rank} has KV{blocks[rank][0]}" for rank in range(P)))
    if t < P - 1:
        blocks = blocks[-1:] + blocks[:-1]  # the hop

out = torch.cat([finish(state)[0] for state in states], dim=2)
x = TOKENS[None, None]
assert torch.allclose(out, naive_attention(x, x, x))
print("after 4 rounds and 3 hops: full attention, row 0 =", out[0, 0, 0].numpy())

# %%
block_schedule.draw()
# %% [markdown]
# The same as a film. Press play, or step through it. (Where a page runs no scripts:
# [the film as a GIF](../figures/kv_rotation.gif).)

# %%
HTML(kv_rotation.animate().to_jshtml())

# %% [markdown]
# ## The failure
#
# With real messages the hop is harder than `blocks[-1:] + blocks[:-1]`. A **blocking** send returns when its message has
# been taken; if every rank sends first, nobody is there to take anything. Four real processes, with two seconds to try:

# %%
for line in launch(workers.everyone_sends_first, P, 2.0):
    print(line)
    assert "has still not taken my block" in line

# %% [markdown]
# The simulator in `basics/blocking_messages.py` says why: the ranks wait for each other in a circle.

# %%
stuck = simulate_messages(ring_programs(P, even_odd=False))
print("messages that moved:", len(stuck.transfers))
print("who waits for whom: ", stuck.waits_for)
print("the circle:         ", stuck.cycle)
assert stuck.cycle == [0, 1, 2, 3]

# %% [markdown]
# ## The idea
#
# Break the symmetry: **even ranks send first, odd ranks receive first.** Every sender finds its receiver waiting.

# %%
for world_size in (4, 5):
    hop = simulate_messages(ring_programs(world_size))
    assert not hop.waits_for
    print(f"{world_size} ranks: one hop in {hop.phases} phases")
    for phase in range(hop.phases):
        moves = [f"{move.source} -> {move.to}" for move in hop.transfers if move.phase == phase]
        print("   ", ", ".join(moves))

# %%
message_order.draw()

# %% [markdown]
# With an odd number of ranks the last and the first are both even, and both want to send first: that costs one phase
# more, and no deadlock. Try other sizes:


# %%
def phases(world_size: int, even_odd: bool) -> None:
    outcome = simulate_messages(ring_programs(world_size, even_odd=even_odd))
    for move in outcome.transfers:
        print(f"phase {move.phase}: rank {move.source} -> rank {move.to}")
    print("waiting for ever:", outcome.cycle or "nobody")


_ = interact(phases, world_size=(2, 8), even_odd=True)
# %% [markdown]
# Each `Send` of the simulator stands for one block. Real code sends its K and then its V, in the same order.
#
# ## The heart of the ring
#
# The rest of [`ring_attn.py`](../ring_attn.py) is tiles, checks and a stopwatch:
#
# ```python
# state = start(q)                                         # m, l, o: these stay
# for t in range(world_size):
#     state = attend(state, q, k, v, scale=scale)          # block j = (rank - t) mod P
#     if t < world_size - 1:                               # after the last round nobody needs another block
#         k_next, v_next = torch.empty_like(k), torch.empty_like(v)  # new ones: odd ranks receive before they send
#         if rank % 2 == 0:
#             dist.send(k, next_rank); dist.send(v, next_rank)
#             dist.recv(k_next, prev_rank); dist.recv(v_next, prev_rank)
#         else:
#             dist.recv(k_next, prev_rank); dist.recv(v_next, prev_rank)
#             dist.send(k, next_rank); dist.send(v, next_rank)
#         k, v = k_next, v_next
# out, lse = finish(state)                                 # o / l, once
# ```
#
# On four real processes, with our 8 tokens:

# %%
out = launch(workers.whole_ring, P, x)[0]
assert torch.allclose(out, naive_attention(x, x, x), rtol=0, atol=1e-14)
print(out[0, 0].numpy())

# %% [markdown]
# And as everyone runs it. `torchrun` starts the processes and tells each its rank.

# %%
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4"]
command = [*torchrun, "../ring_attn.py", "--device", "cpu"]
done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
print(done.stdout)
assert done.returncode == 0

# %% [markdown]
# The table is no theory: each rank records which block it really computed on. The record also has the times. This is a
# recorded run; make your own with `python ring_attn.py --trace ring.json`:

# %%
ring_timeline.draw()

# %% [markdown]
# While its messages travel, a rank does not compute: blocking is simple, and it costs. A ring for speed posts the transfer
# of the next block before it computes on this one: chapter 6.
#
# > **One number to remember: $P - 1$.** P ranks, P rounds, $P - 1$ hops, each of one K and one V block: a rank sends
# > $(P-1) \cdot 2 \cdot B H C D$ numbers in all, which is almost the whole K and V of the sequence, once.
#
# ## Questions
#
# <details><summary>Why P − 1 hops, and not P?</summary>
#
# A rank needs P blocks and begins with one of them. A P-th hop would carry every block home, unused.
# </details>
#
# <details><summary>Why does even/odd not deadlock with an odd P, where ranks P − 1 and 0 both send first?</summary>
#
# Rank P − 1 waits for rank 0 to receive. But rank 0 sends to rank 1, which is odd and receives first, so rank 0 finishes
# its send, comes to its receive, and takes the block. A deadlock needs a closed circle of waiting, and one odd rank opens it.
# </details>
#
# <details><summary>What moves, what stays, and why not the other way round?</summary>
#
# K and V move; Q, `m`, `l` and `o` stay. One could move Q instead, but then its running `(m, l, o)` would have to travel
# with it, in float32, and with grouped queries K and V are smaller than Q.
# </details>
#
# ## Your turn


# %%
# The number of the block on which `rank` computes in round t
def my_block_in_hand(rank, t, world_size):
    return ...


print(check_block_in_hand(my_block_in_hand))


# %%
# One hop of this rank: a list of Send(to) and Recv(source), in an order that does not deadlock
def my_order(rank, world_size):
    return ...


print(check_ring_order(my_order))

# %%
# P = 8 ranks, S = 1,048,576 tokens, B = 1, H = 32, D = 128, bfloat16 (2 bytes): how many bytes does each rank send?
my_bytes = ...

print(check_bytes_sent(my_bytes))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_block_in_hand(rank, t, world_size):
#     return (rank - t) % world_size
#
# def my_order(rank, world_size):
#     hop = [Send((rank + 1) % world_size), Recv((rank - 1) % world_size)]
#     return hop if rank % 2 == 0 else hop[::-1]
#
# my_bytes = (8 - 1) * 2 * 1 * 32 * (1_048_576 // 8) * 128 * 2
# ```
# </details>
#
# You have the ring. Read [`ring_attn.py`](../ring_attn.py) from top to bottom now: its heart you know, and what it
# imports is in `basics/`. Next: [5 · the backward pass](05_backward.ipynb), the ring that trains.
