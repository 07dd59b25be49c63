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
# In chapter 3 one program played all four GPUs. Now each rank is a process of its own, and the blocks travel as messages. After this chapter
# you can
#
# - say why a ring of blocking sends deadlocks, and how even and odd ranks avoid it,
# - explain every line of `ring_forward` and `hop`, the ring of `ring_attn.py`,
# - **write Ring Attention yourself**. The last exercise runs your ring on real processes, and the doctor examines it.
#
# The road, 4 of 8. You need [3 · the worked example](03_worked_example.ipynb); next comes [5 · the backward
# pass](05_backward.ipynb).
# 17 minutes to read, 10 for the exercises; half an hour more, when you like, for the last one: the ring.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import numpy as np
import torch

import ring_attn
from figures import message_order, timelines
from notebooks.source import workers
from notebooks.source.checks.softmax_and_blocks import check_block_in_hand, check_ring_order
from notebooks.source.show import print_source
from notebooks.your_ring.checks import step
from ringlab.basics.blocking_messages import Recv, Send, ring_programs, simulate_messages
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.basics.online_softmax import finish, start
from ringlab.support.processes import LostRank, Ranks, launch

np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## First in one process
#
# A ring is a list that turns. Each of four [ranks](../docs/glossary.md#rank) has its queries and its running `(m, l, o)`. In each
# [round](../docs/glossary.md#round) every rank adds the [block](../docs/glossary.md#block) in its hands. Then the list of blocks turns by one place: this is a
# [hop](../docs/glossary.md#hop).
#
# Three functions compute. `start(q)` gives the first `(m, l, o)`. `attend(state, q, k, v, scale=...)` computes the scores `scale * q @ k.mT` of one
# block and updates `(m, l, o)` with them. (Chapter 2 builds it.) `finish(state)` returns `o / l` and the
# [lse](../docs/glossary.md#log-sum-exp).

# %%
P = 4  # ranks
chunks = TOKENS[None, None].split(2, dim=2)  # four chunks (B, H, C, D) = (1, 1, 2, 2): queries, keys and values alike
states = [start(chunk) for chunk in chunks]
blocks = list(enumerate(chunks))  # the block in the hands of each rank: its number, and its keys and values
for t in range(P):
    for rank in range(P):
        j, kv = blocks[rank]
        assert j == (rank - t) % P
        states[rank] = attend(states[rank], chunks[rank], kv, kv, scale=2**-0.5)  # 1/√D, D = 2
    print(f"round {t}:", "  ".join(f"rank {rank} has KV{blocks[rank][0]}" for rank in range(P)))
    if t < P - 1:
        blocks = blocks[-1:] + blocks[:-1]  # the hop: rank r gets the block of rank r - 1

out = torch.cat([finish(state)[0] for state in states], dim=2)
x = TOKENS[None, None]
assert torch.allclose(out, naive_attention(x, x, x))
print("after 4 rounds and 3 hops: full attention, row 0 =", out[0, 0, 0].numpy())

# %% [markdown]
# ## Processes and messages
#
# A real ring runs as $P$ processes of the same program. PyTorch connects them to a [process group](../docs/glossary.md#process-group):
#
# ```python
# dist.init_process_group("gloo")  # join the other processes; "gloo" is for CPUs, "nccl" for GPUs
# rank = dist.get_rank()  # the number of this process, 0 ... P - 1
# world_size = dist.get_world_size()  # P
# ...
# dist.destroy_process_group()  # leave
# ```
#
# `init_process_group` waits until all $P$ processes have called it. $P$ is called the [world size](../docs/glossary.md#world-size).
# [`torchrun`](../docs/glossary.md#torchrun) starts the processes and gives each its rank. In this notebook, `launch` and `Ranks` do this.
#
# Two functions move tensors:
#
# - `dist.send(x, to)` sends the numbers of `x` to rank `to`. It is a [blocking send](../docs/glossary.md#blocking-send): with gloo, it returns when
#   the receiver has taken the message.
# - `dist.recv(y, source)` waits for a message from rank `source` and writes its numbers into `y`. The tensor `y` must exist before, with the right
#   shape and dtype: `y = torch.empty(2, 3, dtype=torch.float64)`.
#
# A message has numbers only: no shape, no dtype, no name. So:
#
# **A tensor that is sent must be [contiguous](../docs/glossary.md#contiguous-tensor):** its numbers must lie in memory one after the other. In a model,
# `k` and `v` are usually transposed views: the same memory, read in another order. `.contiguous()` makes a copy in the right order, if necessary.

# %%
projected = torch.arange(12.0).view(1, 3, 2, 2)  # (B, C, H, D): 3 tokens, 2 heads, as it comes out of a linear layer
k = projected.transpose(1, 2)  # (B, H, C, D), as attention wants it
for name, tensor in (("transposed", k), ("after .contiguous()", k.contiguous())):
    print(f"{name:<20} contiguous: {tensor.is_contiguous()!s:<7} steps in memory along (B, H, C, D): {tensor.stride()}")
assert not k.is_contiguous() and torch.stack((k, k)).is_contiguous()  # torch.stack makes a new, contiguous tensor

# %% [markdown]
# **The receiver must know the length before the message comes.** When $P$ does not divide $S$, the [chunks](../docs/glossary.md#chunk) are uneven: the first
# ranks have one token more. So each rank needs the list of all lengths. In round $t$ rank $r$ has block $(r - t) \bmod P$. The next hop brings
# block $(r - t - 1) \bmod P$, with `lengths[(rank - t - 1) % P]` tokens.

# %%
lengths = [len(chunk) for chunk in TOKENS.tensor_split(3)]  # 8 tokens on 3 ranks
for rank in range(3):
    print(f"rank {rank} of 3 computes on blocks of", [lengths[(rank - t) % 3] for t in range(3)], "tokens")

# %% [markdown]
# ## The failure
#
# Now the hop. Each rank sends its block to the next rank, and then receives the block of the previous rank:

# %%
print_source(workers.all_ranks_send_first)

# %% [markdown]
# `Ranks(4, seconds=2)` has 4 real processes. Called, it runs the function on 4 ranks, and gives up after 2 seconds:

# %%
try:
    Ranks(4, seconds=2)(4, workers.all_ranks_send_first, chunks[0])
except LostRank as lost:
    waiting = lost.silent
    print(lost)
assert waiting == [0, 1, 2, 3]

# %% [markdown]
# This is a [deadlock](../docs/glossary.md#deadlock): no rank receives, because each rank still sends.
# A simulator of blocking messages shows who waits for whom. A program is a list of `Send(to)` and `Recv(source)` for each rank:

# %%
print("programs:           ", ring_programs(P, even_odd=False))
stuck = simulate_messages(ring_programs(P, even_odd=False))
print("messages that moved:", len(stuck.transfers))
print("who waits for whom: ", stuck.waits_for)
print("the circle:         ", stuck.cycle)
assert stuck.cycle == [0, 1, 2, 3]

# %% [markdown]
# ## The idea
#
# **Even ranks send first, odd ranks receive first** ([even/odd order](../docs/glossary.md#evenodd-order)). Then each sender has a receiver that
# waits for its message. A *phase* below is all messages that can move at the same time.

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
# When $P$ is odd, the last rank and rank 0 are both even, so both send first. This costs one more phase, but there is no deadlock.
#
# ## The ring
#
# This is the hop of `ring_attn.py`. A rank finds its two neighbours, and makes an empty tensor like `block`, but with
# `length` tokens. (A job can have several rings. `group` says which ranks form this one, `None` all ranks;
# `group_dst` and `group_src` are ranks within the group.)

# %%
print_source(ring_attn.hop)

# %% [markdown]
# And this is the ring. `q`, `k` and `v` are the chunks of this rank, (B, H, C, D). `block` is K and V as one tensor, so that they travel as one message;
# `*block` takes it apart again. In the list above, `blocks[-1:] + blocks[:-1]` was the hop.

# %%
print_source(ring_attn.ring_forward)

# %% [markdown]
# Here it runs on four real processes with our 8 tokens. `launch(work, P, x)` starts $P$ processes, calls `work(context, x)` on each and returns what each
# returned. `whole_ring` cuts the tokens into chunks (`scatter`), runs the ring, and collects the result on rank 0 (`gather`). `context` knows the rank:

# %%
print_source(workers.whole_ring)

out = launch(workers.whole_ring, P, x)[0]
assert torch.allclose(out, naive_attention(x, x, x))
print(out[0, 0].numpy())

# %% [markdown]
# From the command line, `torchrun --nproc_per_node=4 ring_attn.py` runs it with 2,048 tokens. With `--trace ring.json` each rank notes what it does,
# and when. This is the record of a real run: 8,192 tokens, 8 heads and D = 64 in float32. A rank sends 8.4 MB in each hop:

# %%
timelines.ring_timeline()

# %% [markdown]
# While a message travels, the ranks do not compute. A faster ring starts to send before it computes: [chapter 6](06_overlap.ipynb).
#
# > **One number to remember: $P - 1$.** $P$ ranks, $P$ rounds, $P - 1$ hops. In each hop a rank sends one block of K and V, so it sends
# > $(P-1) \cdot 2 \cdot B H C D$ numbers in all. This is nearly the K and V of the whole sequence, once.
#
# ## Questions
#
# <details><summary>Why P − 1 hops, and not P?</summary>
#
# A rank needs all P blocks and starts with one of them, its own. Hop P would bring each block back to its first rank, where nobody needs it.
# </details>
#
# <details><summary>Why is there no deadlock when P is odd, and ranks P − 1 and 0 both send first?</summary>
#
# A deadlock needs a closed circle of ranks that wait for each other. One odd rank opens the circle: rank 1 receives first, so rank 0 finishes its
# send, and then receives. (The tests check [every order](../tests/orders/every_order.py) of the steps that real ranks may take.)
# </details>
#
# <details><summary>What moves, what stays, and why not the other way round?</summary>
#
# K and V move; Q, `m`, `l` and `o` stay. If Q moved, its `(m, l, o)` would have to move too, in float32. In models with grouped queries, K and V are also smaller
# than Q (chapter 8).
# </details>
#
# ## Your turn


# %%
# The number of the block on which `rank` computes in round t
def my_block_in_hand(rank, t, world_size):
    return ...


print(check_block_in_hand(my_block_in_hand))


# %%
# One hop of this rank: a list of one Send(to) and one Recv(source), in an order that does not deadlock
def my_order(rank, world_size):
    return ...


print(check_ring_order(my_order))

# %% [markdown]
# **The ring itself.** Write Ring Attention. Your function runs on every rank, and all ranks run it at the same time:
#
# - `q`, `k` and `v` are the chunks of this rank, (B, H, C, D), in float64. All chunks have the same length.
# - Return the rows of full attention for the queries of this rank: (B, H, C, D), in float64. No causal mask; the scale is $1/\sqrt D$.
# - Q stays. K and V go from neighbour to neighbour, in $P - 1$ hops. No rank keeps all blocks.
#
# You may use what the cell imports: this chapter and chapter 1 show all of it. Write one function, its helper functions inside of it. The
# [doctor](15_rings_that_were_wrong.ipynb) examines your ring on 3 and 4 processes, in some ten seconds, a deadlock in half a minute. It compares with full
# attention in float64, and says which mistake it finds, or in which line each rank waits.


# %%
import math

import torch
import torch.distributed as dist

from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import finish, merge, start, update


# The goal of this chapter: your own ring. Take half an hour.
def my_ring(q, k, v):
    return ...


step(2, my_ring)

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
# def my_ring(q, k, v):
#     rank, world_size = dist.get_rank(), dist.get_world_size()
#     next_rank, prev_rank = (rank + 1) % world_size, (rank - 1) % world_size
#     state = start(q)  # m, l, o: these stay
#     block = torch.stack((k, v))  # this moves, (2, B, H, C, D); a new tensor, so it is contiguous
#     for t in range(world_size):
#         state = attend(state, q, block[0], block[1], scale=q.shape[-1] ** -0.5)
#         if t < world_size - 1:  # after the last round nobody needs another block
#             received = torch.empty_like(block)
#             if rank % 2 == 0:
#                 dist.send(block, next_rank)
#                 dist.recv(received, prev_rank)
#             else:
#                 dist.recv(received, prev_rank)
#                 dist.send(block, next_rank)
#             block = received
#     out, lse = finish(state)
#     return out
# ```
# </details>
#
# This is step 2 of the [workshop](your_ring/your_ring.ipynb): its other steps make your ring one that trains. Open [`ring_attn.py`](../ring_attn.py) now: you know every line of `ring_forward` and `hop`. Next:
# [5 · the backward pass](05_backward.ipynb), for a ring that trains.
