# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 9 · Hidden communication, and how far it reaches
#
# Chapter 6 let messages travel while a [rank](../docs/glossary.md#rank) computes. A rank's
# [chunk](../docs/glossary.md#chunk) of $C = S/P$ tokens decides two things: whether the messages are hidden, and whether
# the work fits into memory. After this chapter you can
#
# - compute the shortest chunk that hides its messages, from two numbers of a data sheet,
# - count the memory of a chunk, in the forward and in the [backward pass](../docs/glossary.md#backward-pass),
# - plan how long a sequence your own cluster can train.
#
# Track *plan*. Before it: chapters 1 to 8. 22 minutes to read, 15 for the exercises. Next:
# [18 · two speeds of wire](18_two_speeds_of_wire.ipynb).

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
from itertools import product

from bench import max_context, record
from figures import measured, slow_hop
from notebooks.source.checks.hidden_communication import check_peak_memory_backward, check_smallest_chunk
from ring_planner import command as cost_model
from ring_planner.hidden_communication import AttentionLayer, min_overlap_chunk
from ring_planner.memory import peak_bytes, peak_bytes_backward

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
# The same with letters: $H$ [heads](../docs/glossary.md#head) of queries, $G$ heads of K and V, $w$ bytes a number. `flops`
# is the FLOP/s of a device, `bandwidth` the bytes/s of a link in one direction. A [hop](../docs/glossary.md#hop) is
# [hidden](../docs/glossary.md#hidden-communication) when
#
# $$\underbrace{\frac{4\,C^2 H D}{\text{flops}}}_{\text{computing}} \ge \underbrace{\frac{2\,C G D\,w}{\text{bandwidth}}}_{\text{message}}
# \qquad\Longleftrightarrow\qquad C \;\ge\; \frac w2 \cdot \frac GH \cdot \frac{\text{flops}}{\text{bandwidth}} .$$
#
# Below that length only a part is hidden, the share $C$ / (that length). Drawn over $C$, the hidden share rises and
# then turns flat: we call the turn the *knee*. $D$ cancels out, and so would a batch. The number of ranks $P$ does not
# appear. In bfloat16 with $G = H$ the knee is at flops / bandwidth; the [paper](https://arxiv.org/abs/2310.01889) writes
# $c \ge F/B$. Four things move the knee:
#
# - **float32** has twice the bytes: twice the chunk.
# - **A causal mask**, in a balanced [layout](../docs/glossary.md#layout), hides half of the pairs and none of the bytes:
#   twice the chunk.
# - **Grouped queries** compute as much and send $G/H$ of the bytes.
# - **The backward pass** has five products, so $10\,C^2HD$ FLOPs a block. It sends K and V in $w$ bytes a number and
#   their gradients in 4. So $(w+4)/5$ takes the place of $w/2$.

# %%
a100, infiniband = 312e12, 12.5e9  # FLOP/s in bfloat16; bytes/s in one direction
plain, wide = AttentionLayer(heads=32, kv_heads=32, head_dim=128, itemsize=2), AttentionLayer(32, 32, 128, itemsize=4)
grouped = AttentionLayer(heads=32, kv_heads=8, head_dim=128, itemsize=2)
print("an A100 on InfiniBand                   chunk, tokens   of flops / bandwidth")
for name, factor, layer, options in (
    ("bfloat16", 2 / 2, plain, {}),
    ("float32, at the same FLOP/s", 4 / 2, wide, {}),
    ("bfloat16, causal", 2 * 2 / 2, plain, {"visible": 1 / 2}),
    ("bfloat16, 32 heads on 8", 2 / 2 * 8 / 32, grouped, {}),
    ("bfloat16, backward", (2 + 4) / 5, plain, {"backward": True}),
    ("bfloat16, causal, 32 on 8, backward", 2 * (2 + 4) / 5 * 8 / 32, grouped, {"visible": 1 / 2, "backward": True}),
):
    chunk = factor * a100 / infiniband
    print(f"{name:<36}{chunk:>17,.0f}{factor:>23.2f}")
    assert abs(chunk - min_overlap_chunk(a100, infiniband, layer, **options)) < 1e-6  # what the planner counts

# %% [markdown]
# One message cannot be hidden. In published rings it is the last hop of the gradients, which comes after all computing.
# Our ring computes on the own block last. So the gradients come home meanwhile, and the first hop of K and V is exposed,
# which has fewer bytes.
#
# **The map.** Two numbers place a machine: its FLOP/s and the bytes/s of its link ([drawn](../figures/hidden_communication.svg),
# with table 2 of the paper; `python -m ring_planner.calibrate` measures yours). NVLink, inside a host, needs chunks of
# about 1,000 tokens. InfiniBand, between hosts, needs about 25,000.
#
# ## The proof
#
# The bench of the first cell measured more: two links, seven or eight chunks each. Flops, bandwidth and the hidden
# share come from the same run. The line is the model, min(1, C / knee). The measured knee is that of the line which
# fits the points best.

# %%
measured.overlap_threshold()

# %%
print("     link   knee, tokens: predicted   measured")
for knee in bench["knees"]:
    print(f"{knee['rate'] / 1e6:>4g} MB/s{knee['predicted']:>26,.0f}{knee['measured']:>11,.0f}")
    assert abs(knee["predicted"] - 4 / 2 * knee["flops"] / knee["bandwidth"]) < 1e-6  # w = 4 bytes
    assert 2 / 3 < knee["measured"] / knee["predicted"] < 3 / 2

# %% [markdown]
# The model gives the right place, not the last digit. The rate of computing depends on the chunk. And a message takes
# some time of the core that computes: hence the dashed lines.
#
# ## One slow link
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
# A second slow link costs nothing more. So what counts is flops / bandwidth of the slowest link. A slow *rank* is another
# matter: no chunk hides its computing, and all ranks wait for it. `python -m ring_planner.unequal` prints these
# cases for 8 ranks.
#
# ## How far does it reach?
#
# So chunks should be long. Memory says how long they can be. Without a ring one device must keep the output of a layer
# for **all** tokens, because each query of the next layer meets every key. For 100 million tokens of width 1024, in
# bfloat16, that is 205 GB.
#
# A device of a ring keeps its own chunk, and holds at most two blocks of K and V at a time. Here is GPU 0 of the
# worked example while a block travels:

# %%
assert round(100_000_000 * 1024 * 2 / 1e9) == 205
P, C, D = 4, 2, 2
for t in range(P - 1):
    in_hand, arriving = (0 - t) % P, (0 - t - 1) % P
    held = ["q0", "out0", f"k{in_hand}", f"v{in_hand}", f"k{arriving}", f"v{arriving}"]
    print(f"round {t}:", *held, f"  {len(held)} tensors of {C} x {D} numbers")
    assert len(held) * C * D == peak_bytes("ring", AttentionLayer(heads=1, kv_heads=1, head_dim=D, itemsize=1), C, P)

# %% [markdown]
# With all heads, the [peak memory](../docs/glossary.md#peak-memory) of a device in attention's forward pass is
# $(2H + 4G) \cdot C D w$ bytes. $P$ does not appear, and $S$ appears only in $C = S/P$. So **P devices hold P times the
# sequence.** The [backward pass](../docs/glossary.md#backward-pass) of the
# [trainable ring](../docs/glossary.md#trainable-ring) needs more:
#
# - q, k, v, out and the gradient of out; K and V in two buffers; dq, dk and dv of the block in hand: all in the model's
#   dtype;
# - the sums of the gradients, in float32 at least: dQ once, dK and dV in two buffers.
#
# In bfloat16 with $G = H$ this is as much as 22 chunks, where the forward pass needs 6. (Pages count 5, 6, 7, 8, 13.3, 17,
# 18 or 22 chunks. [One table](../docs/memory.md) says who counts what.)

# %%
chunk = 32 * 128 * 2  # bytes of one token in one tensor of all heads
assert peak_bytes("ring", plain, 1, 8) == 6 * chunk
assert peak_bytes_backward(plain, 1) == 22 * chunk

# %% [markdown]
# **Measured.** In `python -m bench.max_context` each device is a process whose memory has a hard limit: an allocation of
# one byte more fails. What is the longest sequence on which one layer of attention completes a training step, with right
# results?

# %%
results = record.load("max_context")
for row in results["rows"]:
    assert abs(row["chunk"] / row["counted_chunk"] - 1) < 0.05  # measured and modelled
for times in max_context.linear(results):  # S of P devices / (P · S of one)
    assert abs(times - 1) < 0.05
measured.max_context()

# %% [markdown]
# P devices of a ring reach P times the sequence of one device of a ring. One device of a ring reaches only half of what
# fused attention reaches without a ring: in a training step in float32, fused attention holds 9 chunks and a ring 18. In
# a whole model the inputs of $L$ layers are added on both sides, and the difference shrinks. With 32 layers, P devices
# reach $(32 + 9)/(32 + 18) = 0.82$ of P times the sequence of one device without a ring. And at the same speed, as
# [measured](../bench/README.md#how-fast) and as the paper says.
#
# ## Plan your own
#
# The planner, `ring-plan`, asks both questions. Name the model and the GPU, and it counts a whole step and compares all
# ways to share a sequence:

# %%
named = "--model llama-3.1-8b --gpu h100 --hosts 1 --seq-len 131072"
assert cost_model.main(named.split()) == 0

# %% [markdown]
# *Products* are the matrix products of a layer, *head* the logits, *passes* what only reads and writes memory; *gathered*
# are the parameters of a layer in use, *state* all parameters, gradients and moments, *reserve* what ten published peaks were
# above their counts at most. *No ring*: tp GPUs share the heads and all weights of a sequence. *Hybrid of 4* exchanges heads
# among 4 GPUs ([chapter 17](17_the_other_ways_round.ipynb)). Times within a few per cent are a tie. Inside one host a ring is
# not the fastest: each round rewrites the running output in memory. Published times grade attention. The rate of the products
# was fitted on a step of torchtitan and on five prefills, so that step is no independent test.
#
# > **One number to remember: flops / bandwidth, of the slowest link.** 24,960 tokens for an A100 on InfiniBand, in
# > bfloat16. The memory of a chunk does not depend on P, so P devices reach P times as far.
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
# ## Your turn


# %%
# From how many tokens a chunk on are all messages of the forward pass hidden, without a mask?
# flops in FLOP/s, bandwidth in bytes/s, H heads of queries on G of K and V, itemsize: bytes of a number
def my_smallest_chunk(flops, bandwidth, H, G, itemsize):
    return ...


print(check_smallest_chunk(my_smallest_chunk))


# %%
# The peak memory of a device in the backward pass, in bytes: the list above, for H heads of queries on G of K and V,
# chunks of C tokens, head dim D and itemsize bytes a number (8, 4 or 2)
def my_peak_backward(H, G, C, D, itemsize):
    return ...


print(check_peak_memory_backward(my_peak_backward))


# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_smallest_chunk(flops, bandwidth, H, G, itemsize):
#     return itemsize / 2 * G / H * flops / bandwidth
#
# def my_peak_backward(H, G, C, D, itemsize):
#     in_the_dtype = (3 * H + 2 * G) + 4 * G + (H + 2 * G)
#     sums = H + 4 * G
#     return (in_the_dtype * itemsize + sums * max(itemsize, 4)) * C * D
# ```
# </details>
#
# Open [`hidden_communication.py`](../ring_planner/hidden_communication.py) now: the counts of this page, and table 2 of the
# paper, recomputed. Beside it is [`memory.py`](../ring_planner/memory.py), all counts of memory. Next on this
# track: [18 · two speeds of wire](18_two_speeds_of_wire.ipynb).
