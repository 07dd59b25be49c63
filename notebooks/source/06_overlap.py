# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6 · Overlap: messages that travel while a rank computes
#
# The ring of chapter 4 stops computing while its [block](../docs/glossary.md#block) travels. It need not stop. After this
# chapter you can
#
# - let a [rank](../docs/glossary.md#rank) send and receive while it computes ([overlap](../docs/glossary.md#overlap)),
# - say why that takes two buffers, and why it needs no [even/odd order](../docs/glossary.md#evenodd-order),
# - tell from two times which part of the messages is hidden.
#
# The road, 6 of 8. You need [4 · the ring](04_the_ring.ipynb); next comes [7 · causal
# balance](07_causal_balance.ipynb). 15 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
from itertools import pairwise

import torch

from bench import record
from figures import timelines
from notebooks.source.checks.gradients_and_balance import check_hidden_by_overlap, check_overlap_order
from notebooks.source.show import print_source
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.basics.online_softmax import finish, start
from ringlab.ring import overlap
from ringlab.support.processes import launch

P = 4
x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2): queries, keys and values
exact = naive_attention(x, x, x)

# %% [markdown]
# ## The failure
#
# Four real processes run our 8 tokens twice: with the blocking ring of chapter 4, and with the overlapped ring of this
# chapter. `record_both` returns the result and the [trace](../docs/glossary.md#trace) of each: who did what, when, on which
# block. What does rank 0 of the blocking ring do, in the order in which it began?

# %%
runs = launch(overlap.record_both, P, x, x, x, device="cpu")[0]


def what_it_did(name: str, rank: int) -> list:
    """The events of this rank, in the order in which they began."""
    return sorted((event for event in runs[name][1] if event.rank == rank), key=lambda event: event.start)


def show(name: str, rank: int) -> None:
    for t in range(P):
        print(f"round {t}:", ", ".join(f"{e.what} KV{e.block}" for e in what_it_did(name, rank) if e.round == t))


show("blocking", rank=0)
for rank in range(P):  # no two things at once
    assert all(this.end <= following.start for this, following in pairwise(what_it_did("blocking", rank)))

# %% [markdown]
# Rank 0 does one thing after the other. So a [round](../docs/glossary.md#round) takes **computing + messages**.
# Here are two ranks on a link of 125 MB/s, with [chunks](../docs/glossary.md#chunk) of $C$ tokens ([measured](../bench/results/README.md#overlap)):

# %%
bench = record.load("overlap")
print("     C   blocking ring, ms   of that computing")
for row in bench["rows"]:
    computing = bench["world_size"] * row["computing"]  # of all rounds
    print(f"{row['chunk']:>6}{1e3 * row['blocking']:>20.1f}{computing / row['blocking']:>18.0%}")
assert bench["world_size"] * bench["rows"][0]["computing"] < bench["rows"][0]["blocking"] / 2

# %% [markdown]
# ## The idea
#
# Sending only reads the block, and so does computing. So a rank can do both at once. A round has three steps:
#
# 1. **post**: tell the network to send the block in hand and to receive the next one. This call returns at once.
# 2. **compute** on the block in hand. The messages travel meanwhile.
# 3. **wait** until both messages are through. If computing took longer than they did, there is nothing to wait for.
#
# A round then takes **max(computing, messages)**, the longer of the two.
#
# ### Why two buffers
#
# The next block arrives while the block in hand is still read. Where is it stored? Let us use the same memory for both,
# and let the next block arrive at the worst moment: each rank has computed on the first token of the block in hand, and
# not yet on the second.


# %%
def ring_in_one_process(buffers: int) -> torch.Tensor:
    """The ring of 8 tokens; in each round the next block arrives between the two tokens of the block in hand."""
    chunks = x.split(2, dim=2)
    outs = []
    for rank in range(P):
        buffer = [torch.empty_like(chunks[rank]) for _ in range(buffers)]
        buffer[0].copy_(chunks[rank])
        state = start(chunks[rank])
        for t in range(P):
            in_hand, arriving = buffer[t % buffers], buffer[(t + 1) % buffers]
            state = attend(state, chunks[rank], in_hand[:, :, :1], in_hand[:, :, :1], scale=2**-0.5)
            if t < P - 1:
                arriving.copy_(chunks[(rank - t - 1) % P])  # the message
            state = attend(state, chunks[rank], in_hand[:, :, 1:], in_hand[:, :, 1:], scale=2**-0.5)
        outs.append(finish(state)[0])
    return torch.cat(outs, dim=2)


for buffers in (1, 2):
    off = (ring_in_one_process(buffers) - exact).abs().max()
    print(f"{buffers} buffer(s): off by {off:.4f}")
    assert (off < 1e-14) == (buffers == 2)

# %% [markdown]
# With one buffer, rank 0 reads token 0 of its own block. Then block 3 arrives, and rank 0 reads token 7 where token 1
# was. No shape is wrong and no error is raised. Real messages arrive at any moment, so the result may be right today
# and wrong under load.
#
# With two buffers the rank **reads** one (it computes on it and sends it) while the network **fills** the other. After
# the wait they change roles.
#
# ### Why no even/odd order
#
# In chapter 4, four ranks that all send first wait for each other in a circle, because a blocking send waits for its
# receiver. A post does not wait. When a rank waits, its send and its receive are both under way, and so are those of
# all other ranks. [`every_order.py`](../tests/orders/every_order.py) checks all orders in which their steps can come.
#
# ## The code
#
# `post` starts one send and one receive of each tensor, `isend` and `irecv`, which do not wait. `to` and `source` are the neighbours of this
# rank (`distance` is 1 in a ring). Each returns a `Work`, and `work.wait()` waits until it is done. Receives come first in the list: gloo sends what the
# receiver has asked for. Otherwise two ranks that send to each other take turns: twice the time.

# %%
print_source(overlap.post, last=5)

# %% [markdown]
# `arriving_blocks` is a generator. These are its last lines. In each round it takes the buffer that is free (`coming`),
# posts the messages, and yields the block in hand (`here`). The caller computes. When it asks for the next block,
# the generator waits. So use a block before you ask for the next one. (`hops` is None here. `span` records the trace.)

# %%
print_source(overlap.arriving_blocks, last=10)

# %% [markdown]
# The ring itself is then a loop over blocks:
#
# ```python
# state = start(q)
# for k, v in arriving_blocks(k, v, lengths=lengths, group=group):
#     state = attend(state, q, k, v, scale=scale)
# ```
#
# Here is what rank 0 of the four processes did with it:

# %%
out, _ = runs["overlapped"]
assert torch.allclose(out, exact, rtol=0, atol=1e-14)
print("full attention, row 0 =", out[0, 0, 0].numpy().round(4))

show("overlapped", rank=0)
for rank in range(P):
    for t in range(P - 1):
        at = {event.what: event for event in what_it_did("overlapped", rank) if event.round == t}
        for message in (at["send"], at["receive"]):  # it begins before the computing and ends after the wait
            assert message.start <= at["compute"].start <= at["compute"].end <= at["wait"].start <= message.end

# %% [markdown]
# The order is that in which they *began*. `send` and `receive` end after the `wait`, as the assertion checks.
#
# ## What it saves
#
# On one machine a message is a copy in memory, made by the cores that also compute. In a cluster the network carries the bytes. The bench
# imitates a cluster: it limits the rate of the machine's loopback, so a message takes time and hardly any
# work. Two ranks recorded themselves there:

# %%
timelines.overlap_timeline()
# %% [markdown]
# How much can be hidden? In a round, computing covers as much of the messages as it lasts: the share min(1, computing /
# messages). Here is that share, from the times of the blocking ring, beside the share that the overlapped ring really
# hid:

# %%
print("     C   computing, ms   messages, ms   share: predicted   measured")
for row in bench["rows"]:
    predicted = min(1.0, row["computing"] / row["messages"])
    times = f"{1e3 * row['computing']:>16.1f}{1e3 * row['messages']:>15.1f}"
    print(f"{row['chunk']:>6}{times}{predicted:>19.0%}{row['hidden']:>11.0%}")
    assert abs(row["hidden"] - predicted) < 0.2
hidden = [row["hidden"] for row in bench["rows"]]
assert hidden[0] < 0.5
assert hidden[-1] > 0.99

# %% [markdown]
# Long chunks hide everything; short ones hide little. The reason: with twice the tokens a block has twice the bytes,
# but four times the work. Chapter 9 computes the length from which on all messages are hidden.
#
# > **One number to remember: 2.** Two buffers, one read and one filled, turn a round of computing + messages into one
# > of max(computing, messages).
#
# ## Questions
#
# <details><summary>Over a link that is too slow, would a third buffer help, so that two blocks are under way?</summary>
#
# No. A rank can pass on a block only after it has received it, and the link is busy all the time. A third buffer can
# smooth out delays that come and go, but the bytes stay the same. Longer chunks help, and so do fewer heads of K and V,
# or fewer bytes a number.
# </details>
#
# <details><summary>Does a slower kernel make messages easier or harder to hide?</summary>
#
# Easier: it computes longer on each block. But the ring is not faster for it. A share of hidden messages says nothing
# about speed, so give the time too.
# </details>
#
# <details><summary>Why does nothing travel in the last round?</summary>
#
# A rank needs $P$ blocks and begins with one of them. In round $P - 1$ it computes on the last one, and no rank needs
# that block after it.
# </details>
#
# ## Your turn


# %%
# What a rank of the overlapped ring does, in order: a list of ("post", t), ("compute", t), ("wait", t).
# Block t is the one of round t. ("post", t) begins to send block t and to receive block t + 1;
# ("wait", t) ends when both are through. There are two buffers.
def my_order_of_steps(P):
    return ...


print(check_overlap_order(my_order_of_steps))


# %%
# A round computes for `computing` seconds, and its messages take `messages` seconds (more than 0).
# Which share of the messages' time is hidden? A number from 0 to 1
def my_hidden(computing, messages):
    return ...


print(check_hidden_by_overlap(my_hidden))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_order_of_steps(P):
#     steps = []
#     for t in range(P - 1):
#         steps += [("post", t), ("compute", t), ("wait", t)]
#     return steps + [("compute", P - 1)]
#
# def my_hidden(computing, messages):
#     return min(1.0, computing / messages)
# ```
# </details>
#
# Open [`overlap.py`](../ringlab/ring/overlap.py) now: it has the two buffers, and compares both rings. Next:
# [7 · causal balance](07_causal_balance.ipynb).
