# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6 · Overlap: messages that cost nothing
#
# The ring of chapter 4 stops computing whenever a block travels. It need not. After this chapter you can let messages travel while
# a rank computes, say why that takes two buffers and no even/odd order, and tell from two numbers whether the messages of a
# cluster can be hidden at all.
#
# 15 minutes. The code: [`training/overlap.py`](../training/overlap.py), [`bench/overlap.py`](../bench/overlap.py). Before:
# [4 · the ring](04_the_ring.ipynb).

# %%
# %matplotlib inline
from itertools import pairwise

import torch

from basics.blockwise_attention import attend
from basics.naive_attention import TOKENS, naive_attention
from basics.online_softmax import finish, start
from bench import record
from bench.overlap import rings_in_turn, summary
from figures import overlap_timeline
from notebooks.checks.overlap import check_hidden_by_overlap, check_overlap_order, check_smallest_chunk
from planning.hidden_communication import LLAMA_7B, TABLE_2, Layer, block_flops, min_overlap_chunk
from support.processes import launch
from training.overlap import record_both

P = 4
x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2): queries, keys and values
exact = naive_attention(x, x, x)

# %% [markdown]
# ## The failure
#
# Both rings of this chapter, on four real processes, our 8 tokens, with a record of who did what when. First the blocking one. What
# does rank 0 do, and does it ever do two things at once?

# %%
runs = launch(record_both, P, x, x, x, device="cpu")[0]


def diary(name: str, rank: int) -> list:
    """What the rank did, in the order in which it began."""
    return sorted((event for event in runs[name][1] if event.rank == rank), key=lambda event: event.start)


for event in diary("blocking", 0):
    print(f"round {event.round}: {event.what:<8} KV{event.block}")
for rank in range(P):
    assert all(this.end <= following.start for this, following in pairwise(diary("blocking", rank)))

# %% [markdown]
# One thing after the other, on every rank. So a round takes **computing + messages**. Over a slow link that is bad. These are
# two ranks on a link of 125 MB/s, measured by [`bench/overlap.py`](../bench/overlap.py) with chunks of $C$ tokens:

# %%
bench = record.load("overlap")
print("     C   blocking ring, ms   of it computing")
for row in bench["rows"]:
    computing = bench["world_size"] * row["computing"]
    print(f"{row['chunk']:>6}{1e3 * row['blocking']:>20.1f}{computing / row['blocking']:>18.0%}")

# %% [markdown]
# ## The idea
#
# The block that a rank computes on now is the block that it must pass on, and passing it on only reads it. So do both at once:
#
# 1. **post**: tell the network to send the block in hand and to receive the next one. This returns at once.
# 2. **compute** on the block in hand. The messages travel meanwhile.
# 3. **wait** until they are through. If computing took longer than the messages, there is nothing to wait for.
#
# A round takes **max(computing, messages)**.
#
# ### Why two buffers
#
# The next block arrives while the block in hand is still read. Where does it land? Let us give it the same room, and let it arrive
# in the worst moment: each rank has computed on the first token of the block, not yet on the second.


# %%
def ring_in_one_process(buffers: int) -> torch.Tensor:
    """The ring of 8 tokens; in each round the next block arrives between the two tokens of the block in hand."""
    chunks = x.split(2, dim=2)
    outs = []
    for rank in range(P):
        room = [torch.empty_like(chunks[rank]) for _ in range(buffers)]
        room[0].copy_(chunks[rank])
        state = start(chunks[rank])
        for t in range(P):
            here, coming = room[t % buffers], room[(t + 1) % buffers]
            state = attend(state, chunks[rank], here[:, :, :1], here[:, :, :1], scale=2**-0.5)
            if t < P - 1:
                coming.copy_(chunks[(rank - t - 1) % P])  # the message arrives
            state = attend(state, chunks[rank], here[:, :, 1:], here[:, :, 1:], scale=2**-0.5)
        outs.append(finish(state)[0])
    return torch.cat(outs, dim=2)


for buffers in (1, 2):
    off = (ring_in_one_process(buffers) - exact).abs().max()
    print(f"{buffers} buffer(s): off by {off:.4f}")
    assert (off < 1e-14) == (buffers == 2)

# %% [markdown]
# With one buffer rank 0 takes the second token of the *next* block for that of the block in hand. Its own token 1 is never seen, token 3
# is seen twice, no shape is wrong, and no error is raised. (And the next rank would be sent the same mixture.) In real life it depends on
# the timing, which is worse: right today, wrong under load.
#
# With two buffers, taken by turns, one is **read** (computed on and sent) while the other is **filled**. After the wait they change
# roles. More are not needed: block $t+2$ goes where block $t$ was, and that one has been computed on and sent by then.
#
# ### Why no even/odd order
#
# In chapter 4 four ranks that all send first waited for each other in a circle. Now nobody waits while posting. When a rank does
# wait, its send and its receive are both on the way, and so are everyone else's: each message has found its other end.
#
# ## The heart of it
#
# A generator hands out the blocks. Whoever takes a block computes on it between two `yield`s, while the next one travels:
#
# ```python
# def arriving_blocks(k, v):
#     room = [torch.empty(2, *k.shape) for _ in range(2)]     # two buffers, each for a K and a V
#     here = k, v                                             # the own block is sent from where it is
#     for t in range(world_size - 1):
#         coming = room[t % 2].unbind()
#         works = post(here, coming)                          # send and receive, one batch; returns at once
#         yield here                                          # the caller computes on it
#         for work in works:
#             work.wait()                                     # the rest, if any
#         here = coming
#     yield here                                              # nobody needs it after us
#
# state = start(q)
# for k, v in arriving_blocks(k, v):
#     state = attend(state, q, k, v, scale=scale)
# ```
#
# [`training/overlap.py`](../training/overlap.py) adds uneven chunks and the record. Here is what the four processes did with it:

# %%
out, _ = runs["overlapped"]
assert torch.allclose(out, exact, rtol=0, atol=1e-14)
print("full attention, row 0 =", out[0, 0, 0].numpy().round(4))

for event in diary("overlapped", 0):
    print(f"round {event.round}: {event.what:<8} KV{event.block}")
for rank in range(P):
    for t in range(P - 1):
        at = {event.what: event for event in diary("overlapped", rank) if event.round == t}
        for message in (at["send"], at["receive"]):  # it is on its way before the computing begins, and may be after it
            assert message.start <= at["compute"].start <= at["compute"].end <= at["wait"].start <= message.end

# %% [markdown]
# The order is that in which they *began*: `send` and `receive` end after the `wait`. An odd number of ranks is no special case:

# %%
five = launch(record_both, 5, x, x, x, device="cpu")[0]  # chunks of 2, 2, 2, 1 and 1 tokens
assert torch.allclose(five["overlapped"][0], exact, rtol=0, atol=1e-14)
print("5 ranks: full attention too")

# %% [markdown]
# ## What it saves
#
# Longer chunks now, 1024 tokens on each of two ranks of this machine, the two rings by turns, medians of five runs:

# %%
pairs = launch(rings_in_turn, 2, 1024, 8, 64, 5, device="cpu")[0]  # C, H, D, repetitions
here = summary(pairs, 2)
print(f"blocking   {here['blocking']:.4f} s, of it messages {here['messages']:.4f} s")
print(f"overlapped {here['overlapped']:.4f} s, of it waiting for messages {here['waiting']:.4f} s")
print(f"hidden: {here['hidden']:.0%} of the messages' time")

# %% [markdown]
# Do not expect much here, even with all messages hidden. On one machine a message is a copy in memory, which is quick, and it is made by
# the same cores that compute: overlap saves the **waiting**, not the **copying**. In a cluster the network carries the bytes, and the cores
# (or the GPUs) are nearly free. The bench imitates that on one machine: it limits the rate of the loopback, so that a message takes
# time and hardly any work. There the rings recorded themselves:

# %%
overlap_timeline.draw()
# %% [markdown]
# ## When messages cost nothing
#
# Computing on a block must take at least as long as its messages. Count both for one round, with $H$ heads for the queries, $G$ for keys
# and values (here $G = H$; fewer with grouped queries), and $w$ bytes a number:
#
# - The scores are $C \times C$ numbers for each head, each a product of $D$ pairs: $2C^2D$ FLOPs. Scores times V are as many. In all
#   $4\,C^2 H D$ FLOPs, at $F$ FLOP/s.
# - A rank sends K and V, $2\,C G D$ numbers, so $2\,C G D\,w$ bytes, at $B$ bytes/s. It receives as many meanwhile, the other way. (The blocking
#   ring sends first and receives then, or the other way round, and leaves one direction of such a link unused.)
#
# $$\frac{4\,C^2 H D}{F} \;\ge\; \frac{2\,C G D\,w}{B} \qquad\Longleftrightarrow\qquad
# C \;\ge\; \frac{w}{2} \cdot \frac{G}{H} \cdot \frac{F}{B}$$
#
# Work grows with $C^2$ and bytes with $C$, so **longer chunks always win**. $D$ drops out, and so would a batch. In bfloat16 ($w = 2$) with
# $G = H$ it is the condition of the paper, $c \ge F/B$. [`planning/hidden_communication.py`](../planning/hidden_communication.py), which chapter 9 is about, has it as
# `min_overlap_chunk`. Two links of the paper's table 2, and the bench:

# %%
print("link                       F, TFLOP/s   B, GB/s   smallest C")
for link, F, B, *_ in TABLE_2[:2]:
    chunk = min_overlap_chunk(F, B, LLAMA_7B)  # in bfloat16
    print(f"{link:<25}{F / 1e12:>12.0f}{B / 1e9:>10.1f}{chunk:>13,.0f}")

layer = Layer(bench["heads"], bench["heads"], bench["head_dim"], itemsize=4)  # float32
longest = bench["rows"][-1]
F = block_flops(layer, longest["chunk"] ** 2) / longest["computing"]  # what a core of the bench really did
B = bench["rate"] / bench["world_size"]  # the ranks share that link
enough = min_overlap_chunk(F, B, layer)
print(f"{'the bench, float32':<25}{F / 1e12:>12.3f}{B / 1e9:>10.4f}{enough:>13,.0f}")

# %% [markdown]
# Below that length only a part is hidden: of messages that take longer than the computing, $C / C_\text{smallest}$. Here is the bench,
# first against the formula with the $F$ of its longest chunk, then against computing / messages of the same chunk, as its blocking ring
# took them:

# %%
print("     C   formula   computing / messages   hidden")
for row in bench["rows"]:
    formula = min(1.0, row["chunk"] / enough)
    print(f"{row['chunk']:>6}{formula:>10.0%}{row['predicted']:>23.0%}{row['hidden']:>9.0%}")
    assert abs(row["hidden"] - row["predicted"]) < 0.2
hidden = [row["hidden"] for row in bench["rows"]]
assert hidden[0] < 0.5
assert hidden[-1] > 0.9

# %% [markdown]
# The formula asks too much of short chunks: they compute at a lower rate than long ones, as each call has its fixed costs. And a bit more
# is hidden than computing / messages says, because computing beside messages is a bit slower (see the picture): the core takes
# part in the transfer.
#
# > **One number to remember: $F/B$**, the FLOP/s of a rank over the bytes/s of its link. In bfloat16, chunks of $c \ge F/B$ tokens hide
# > the ring's messages: about 1000 tokens over NVLink, 25,000 over InfiniBand of 12.5 GB/s. That holds for any number of
# > ranks, because each talks to its neighbours only.
#
# ## Questions
#
# <details><summary>With a causal mask and the zigzag layout, how long must a chunk be?</summary>
#
# Twice as long: a rank computes half of the pairs of each block, $C^2/2$, and the block travels whole. $C \ge 2F/B$ in bfloat16.
# </details>
#
# <details><summary>F is what the GPU really does, not what its data sheet says. Does a slow kernel make the messages easier or
# harder to hide?</summary>
#
# Easier: at half of the peak half the chunk is enough. That is no merit. The ring then takes the time of the slow kernel, with all messages
# hidden; so quote the time too, not only the share.
# </details>
#
# <details><summary>Over a link that is too slow, would a third buffer help, so that two blocks are on their way?</summary>
#
# No. A rank can pass on a block only when it has it, and the link is busy all the time already. More buffers smooth out delays that come and
# go; the bytes stay the same. Longer chunks, fewer K/V heads or fewer bytes a number do help.
# </details>
#
# ## Your turn


# %%
# What a rank of the overlapped ring does, in order: a list of ("post", t), ("compute", t), ("wait", t).
# Block t is the one of round t. ("post", t) begins to send block t and to receive block t + 1;
# ("wait", t) ends when both are through. There are two buffers.
def my_order_of_steps(world_size):
    return ...


print(check_overlap_order(my_order_of_steps))


# %%
# A round computes for `computing` seconds, and its messages take `messages` seconds.
# Which share of the messages' time is hidden? A number from 0 to 1
def my_hidden(computing, messages):
    return ...


print(check_hidden_by_overlap(my_hidden))

# %%
# F = 312e12 FLOP/s, a link of 25e9 bytes/s, bfloat16, H = 32 heads for queries on G = 8 for keys
# and values: from how many tokens a chunk on are all messages hidden?
my_smallest_chunk = ...

print(check_smallest_chunk(my_smallest_chunk))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_order_of_steps(world_size):
#     steps = []
#     for t in range(world_size - 1):
#         steps += [("post", t), ("compute", t), ("wait", t)]
#     return steps + [("compute", world_size - 1)]
#
# def my_hidden(computing, messages):
#     return min(1.0, computing / messages)
#
# my_smallest_chunk = (2 / 2) * (8 / 32) * 312e12 / 25e9
# ```
# </details>
#
# Read [`training/overlap.py`](../training/overlap.py) now: `arriving_blocks` is the generator, with chunks of any length.
# Next: [7 · causal balance](07_causal_balance.ipynb).
