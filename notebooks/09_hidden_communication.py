# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 9 · Hidden communication: how long must a chunk be?
#
# Chapter 6 let messages travel while a [rank](../docs/glossary.md#rank) computes. They are hidden if the
# [chunks](../docs/glossary.md#chunk) are long enough. After this chapter you can
#
# - compute from two numbers of a data sheet how long that is,
# - say what a [causal mask](../docs/glossary.md#causal-mask), [grouped queries](../docs/glossary.md#gqa), the dtype and the
#   [backward pass](../docs/glossary.md#backward-pass) change,
# - say which link counts when links differ.
#
# Track *plan*. Before it: chapters 1 to 8. 20 minutes to read, 10 for the exercises. Next:
# [10 · how far does it reach](10_how_far_does_it_reach.ipynb).

# %%
# %matplotlib inline
from itertools import product

from bench import record
from figures import hidden_communication, overlap_threshold, slow_hop
from notebooks import workers
from notebooks.checks.hidden_communication import check_smallest_chunk, check_training_chunk, check_unlike_links
from notebooks.show import print_source
from ringlab.planning.hidden_communication import AttentionLayer, min_overlap_chunk
from ringlab.support.processes import launch

# %% [markdown]
# ## The failure
#
# Two hosts, one rank and one core each, on a link of 50 MB/s. The ring overlaps computing and messages. `python -m
# bench.overlap_threshold` measured how long it takes:

# %%
bench = record.load("overlap_threshold")
print("chunk, tokens   computing, ms   the ring, ms   ring / computing")
ratios = []
for row in bench["rows"]:
    if row["rate"] == 50_000_000:
        computing = 2 * row["computing"]  # two rounds
        ratios.append(row["ring"] / computing)
        print(f"{row['chunk']:>13,}{1e3 * computing:>16.0f}{1e3 * row['ring']:>15.0f}{ratios[-1]:>19.2f}")
assert ratios[0] > 3
assert ratios[-1] < 1.1

# %% [markdown]
# With short chunks the ring waits most of the time, although it overlaps. With long chunks it hardly waits. Where is
# the limit, and why?
#
# ## The idea
#
# Count the work and the bytes of one [round](../docs/glossary.md#round). A FLOP is one multiplication or one addition. First
# our 8 tokens on 4 GPUs: a chunk of $C = 2$ queries, a [block](../docs/glossary.md#block) of 2 keys and values, one head of
# $D = 2$, in bfloat16.

# %%
C, D, itemsize = 2, 2, 2
flops = 0
for _ in product(range(C), range(C)):  # each query with each key
    flops += 2 * D  # the score: D multiplications and D additions
    flops += 2 * D  # the weight times the value, added to the output: as many
hop_bytes = 2 * C * D * itemsize  # a K and a V
print(f"a block: {flops} FLOPs; its hop: {hop_bytes} bytes")
assert (flops, hop_bytes) == (32, 16)

# %% [markdown]
# Now think of a device of 8 FLOP/s with a link of 2 bytes/s. With twice the tokens, the work is four times as much, but
# the bytes only double:

# %%
for C in (2, 4, 8):
    computing, message = 4 * C**2 * D / 8, 2 * C * D * itemsize / 2
    print(
        f"C = {C}: computing {computing:>2.0f} s, the message {message:>2.0f} s, hidden: {min(1, computing / message):.0%}"
    )

# %% [markdown]
# ## The knee
#
# The same with letters: $H$ [heads](../docs/glossary.md#head) of queries, $G$ heads of K and V, $w$ bytes a number. `flops`
# is the FLOP/s of a device, `bandwidth` the bytes/s of a link in one direction. A [hop](../docs/glossary.md#hop) is
# [hidden](../docs/glossary.md#hidden-communication) when
#
# $$\underbrace{\frac{4\,C^2 H D}{\text{flops}}}_{\text{computing}} \ge \underbrace{\frac{2\,C G D\,w}{\text{bandwidth}}}_{\text{message}}
# \qquad\Longleftrightarrow\qquad C \;\ge\; \frac w2 \cdot \frac GH \cdot \frac{\text{flops}}{\text{bandwidth}} .$$
#
# Below that length only a part is hidden, the share $C$ / (that length). Drawn over $C$, the hidden share rises and
# then turns flat: we call the turn the *knee*. $D$ cancels out. A batch would multiply both sides, so it cancels out
# too. The number of ranks $P$ does not appear: each rank computes on one block and uses one link. In bfloat16 with
# $G = H$ the knee is at flops / bandwidth; the [paper](https://arxiv.org/abs/2310.01889) writes $c \ge F/B$.
#
# Four things move the knee:
#
# - **float32** has twice the bytes: twice the chunk.
# - **A causal mask**, in a balanced [layout](../docs/glossary.md#layout), hides half of the pairs and none of the bytes:
#   twice the chunk.
# - **Grouped queries** compute as much and send $G/H$ of the bytes.
# - **The backward pass** has five products, so $10\,C^2HD$ FLOPs a block. It sends K and V in $w$ bytes a number and
#   their gradients in 4. So $(w+4)/5$ takes the place of $w/2$.
#
# `min_overlap_chunk` counts in the same way. Its first line is the time to compute a block of one query and one key. Its
# second is the time of the hop of one token, divided by that. Computing grows with $C^2$ and a hop with $C$, so this ratio
# is the length at which they are equal:

# %%
print_source(min_overlap_chunk)

# %%
a100, infiniband = 312e12, 12.5e9  # FLOP/s in bfloat16; bytes/s in one direction
plain, wide = AttentionLayer(heads=32, kv_heads=32, head_dim=128, itemsize=2), AttentionLayer(32, 32, 128, itemsize=4)
grouped = AttentionLayer(heads=32, kv_heads=8, head_dim=128, itemsize=2)
print("an A100 on InfiniBand                   chunk, tokens   of flops / bandwidth")
for name, layer, options, factor in (
    ("bfloat16", plain, {}, 1),
    ("float32, at the same FLOP/s", wide, {}, 2),
    ("bfloat16, causal", plain, {"visible": 1 / 2}, 2),
    ("bfloat16, 32 heads on 8", grouped, {}, 1 / 4),
    ("bfloat16, backward", plain, {"backward": True}, 6 / 5),
    ("float32, backward", wide, {"backward": True}, 8 / 5),
    ("bfloat16, causal, 32 on 8, backward", grouped, {"visible": 1 / 2, "backward": True}, 3 / 5),
):
    chunk = min_overlap_chunk(a100, infiniband, layer, **options)
    print(f"{name:<36}{chunk:>17,.0f}{factor:>23.2f}")
    assert abs(chunk - factor * a100 / infiniband) < 1e-6

# %% [markdown]
# One message cannot be hidden: the last hop of the gradients comes after all computing.
#
# ## The map
#
# Two numbers place a machine on the map. The star is yours: two processes of this machine each ran the
# [fused kernel](../docs/glossary.md#fused-kernel) on one block of float32, and one hop, at the same time. Between processes
# of one machine a hop is a copy in memory.

# %%
C, layer = 1024, AttentionLayer(heads=8, kv_heads=8, head_dim=64, itemsize=4)
computing, hop = launch(workers.block_and_hop, 2, C, layer.heads, layer.head_dim, 3, device="cpu")[0]
print(f"C = {C:,}: computing on a block {computing:.4f} s, a hop {hop:.4f} s")
yours = 4 * C**2 * layer.heads * layer.head_dim / computing, 2 * C * layer.heads * layer.head_dim * 4 / hop
assert round(min_overlap_chunk(a100, 300e9, plain)) == 1040  # NVLink
hidden_communication.draw(own=yours)

# %% [markdown]
# NVLink, inside a host, needs chunks of about 1,000 tokens. InfiniBand, between hosts, needs about 25,000. (The dots
# are table 2 of the paper. It has one misprint: see the [errata](appendix_errata.md).)
#
# ## The proof
#
# The bench of the first cell measured more: two links, seven or eight chunks each. Flops, bandwidth and the hidden
# share come from the same run. The line is the model, min(1, C / knee). The measured knee is that of the line which
# fits the points best.

# %%
overlap_threshold.draw()

# %%
print("     link   knee, tokens: predicted   measured")
for knee in bench["knees"]:
    print(f"{knee['rate'] / 1e6:>4g} MB/s{knee['predicted']:>26,.0f}{knee['measured']:>11,.0f}")
    assert abs(knee["predicted"] - 4 / 2 * knee["flops"] / knee["bandwidth"]) < 1e-6  # w = 4 bytes
    assert 2 / 3 < knee["measured"] / knee["predicted"] < 3 / 2

overheads = [row["overhead"] for row in bench["rows"] if row["hidden"] > 0.99]
print(
    f"rings that wait for nothing take {min(overheads):.0%} to {max(overheads):.0%} longer than their computing alone"
)

# %% [markdown]
# The model gives the right place, not the last digit. The rate of computing depends on the chunk. And a message takes
# some time of the core that computes: that is the overhead in the last line, and the reason for the dashed lines.
#
# ## Unlike links
#
# Inside a host links are fast, between hosts they are slow. What does one slow link cost? Here is a simulation of 4
# ranks:

# %%
slow_hop.draw()
# %% [markdown]
# In round 0 only the two ranks of the slow link wait. But then they begin the next round late: rank 1 passes on its
# block late, and rank 3 waits until rank 0 can receive. Soon every rank waits. In the end **the slowest hop rules**.
# With `computing` for the time of a block, the ring takes
#
# $$\text{computing} + (P-1) \cdot \max(\text{computing},\ \text{slowest hop}) .$$
#
# A second slow link costs nothing more. So what counts is flops / bandwidth of the slowest link. If your chunks are as
# long as it needs, it costs nothing at all. A slow *rank* is another matter: no chunk hides its computing, and all
# ranks wait for it. `python -m ringlab.planning.simulated_ring` prints these cases for 8 ranks.
#
# [Chapter 20](20_two_speeds_of_wire.ipynb) shows a ring in which a slow link has more time for each block.
#
# > **One number to remember: flops / bandwidth, of the slowest link.** 24,960 tokens for an A100 on InfiniBand, in
# > bfloat16.
#
# ## Questions
#
# <details><summary>A new GPU computes twice as fast, over the same link. What becomes of the smallest chunk that hides its messages?</summary>
#
# It doubles. If your chunks were just long enough, the new ring is hardly faster: all rounds but the last take as long
# as their message.
# </details>
#
# <details><summary>Your chunks are too short. Does a larger batch help?</summary>
#
# No. It multiplies computing and bytes alike. Fewer ranks for the same sequence help, and so do fewer heads of K and V.
# </details>
#
# <details><summary>Eight GPUs on two hosts. Does the order in which the ring visits them matter?</summary>
#
# In the simulation it does not, because each hop has a wire of its own there: one crossing costs as much as eight. But
# crossings that share a [NIC](../docs/glossary.md#nic) share its bandwidth. So let the ring cross once there and once back.
# </details>
#
# ## Your turn


# %%
# From how many tokens a chunk on are all messages of the forward pass hidden, without a mask?
# flops in FLOP/s, bandwidth in bytes/s, H heads of queries on G of K and V, itemsize: bytes of a number
def my_smallest_chunk(flops, bandwidth, H, G, itemsize):
    return ...


print(check_smallest_chunk(my_smallest_chunk))


# %%
# The same for training under a causal mask in the zigzag layout: one length for the forward pass and the backward
# pass. Gradients travel in float32. (Leave out their last hop.) `ratio` is flops / bandwidth
def my_training_chunk(ratio, H, G, itemsize):
    return ...


print(check_training_chunk(my_training_chunk))


# %%
# For later.
# Seconds of an overlapped ring. A block takes `computing` seconds on every rank,
# and hops[r] seconds from rank r to the next one. There are as many hops as ranks
def my_ring_seconds(computing, hops):
    return ...


print(check_unlike_links(my_ring_seconds))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_smallest_chunk(flops, bandwidth, H, G, itemsize):
#     return itemsize / 2 * G / H * flops / bandwidth
#
# def my_training_chunk(ratio, H, G, itemsize):
#     forward, backward = itemsize / 2, (itemsize + 4) / 5
#     return 2 * max(forward, backward) * G / H * ratio
#
# def my_ring_seconds(computing, hops):
#     return computing + (len(hops) - 1) * max(computing, *hops)
# ```
# </details>
#
# Open [`hidden_communication.py`](../ringlab/planning/hidden_communication.py) now: the counts of this page, and table 2 of the
# paper, recomputed. Next: [10 · how far does it reach](10_how_far_does_it_reach.ipynb).
