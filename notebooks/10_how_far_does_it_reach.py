# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · How far does it reach: memory and the longest sequence
#
# A ring is built for sequences that no device can hold. After this chapter you can
#
# - count the memory that each device needs, in the forward and in the [backward pass](../docs/glossary.md#backward-pass),
# - compare it with [all-gather](../docs/glossary.md#all-gather) and [all-to-all](../docs/glossary.md#all-to-all),
# - plan how long a sequence your own cluster can train.
#
# Track *plan*. Before it: chapters 1 to 9. 20 minutes to read, 10 for the exercises. Next:
# [20 · two speeds of wire](20_two_speeds_of_wire.ipynb).

# %%
# %matplotlib inline
from bench import max_context, record
from figures import max_context as max_context_picture
from figures import ring_memory
from notebooks.checks.how_far_does_it_reach import (
    check_fewer_bytes,
    check_longest_sequence,
    check_peak_memory_backward,
)
from ringlab.planning import cost_model
from ringlab.planning.hidden_communication import AttentionLayer, min_overlap_chunk, sent_bytes
from ringlab.planning.ring_memory import peak_bytes, peak_bytes_backward

# %% [markdown]
# ## The failure
#
# [Blockwise attention](../docs/glossary.md#blockwise-attention) needs no S × S matrix (chapter 2). But the next layer needs
# the output of this one for **all** tokens, because each of its queries meets every key. So one device must keep that
# output. Take a small model of width 1024, in bfloat16, and 100 million tokens:

# %%
tokens, width = 100_000_000, 1024
for layers in (1, 4, 32):
    print(f"outputs of {layers:>2} layer(s): {layers * tokens * width * 2 / 1e9:6,.0f} GB")
assert tokens * width * 2 > 2 * 80e9

# %% [markdown]
# The output of one layer fills more than two devices of 80 GB.
#
# ## The idea
#
# A device of a ring keeps the outputs of its own [chunk](../docs/glossary.md#chunk) of $C = S/P$ tokens. Of all other tokens
# it holds at most two [blocks](../docs/glossary.md#block) of K and V at a time. Here is what GPU 0 of the worked example
# holds while a block travels:

# %%
P, C, D = 4, 2, 2
for t in range(P - 1):
    in_hand, arriving = (0 - t) % P, (0 - t - 1) % P
    held = ["q0", "out0", f"k{in_hand}", f"v{in_hand}", f"k{arriving}", f"v{arriving}"]
    print(f"round {t}:", *held, f"  {len(held)} tensors of {C} x {D} numbers")
    assert len(held) * C * D == peak_bytes("ring", AttentionLayer(heads=1, kv_heads=1, head_dim=D, itemsize=1), C, P)

# %% [markdown]
# Let there be $H$ [heads](../docs/glossary.md#head) of queries on $G$ heads of K and V
# ([grouped queries](../docs/glossary.md#gqa)), and $w$ bytes a number. Then the [peak memory](../docs/glossary.md#peak-memory) of
# a device in attention's forward pass is
#
# $$(2H + 4G) \cdot C D w \text{ bytes.}$$
#
# $P$ does not appear, and $S$ appears only in $C = S/P$. So **P devices hold P times the sequence.** (Pages count 5, 6, 7,
# 8, 13.3, 17, 18 or 22 chunks. [One table](../docs/memory.md) says who counts what.)
#
# Two other ways to share out a sequence send and hold other amounts:
#
# | | what it does | heads of C tokens held | heads of C tokens sent | number of devices |
# | --- | --- | --- | --- | --- |
# | ring | passes blocks on while it computes | $2H + 4G$ | $(P-1) \cdot 2G$ | any |
# | all-gather | collects K and V of all heads, then computes | $2H + 2GP$ | $(P-1) \cdot 2G$ | any |
# | all-to-all (Ulysses) | swaps its tokens for heads, computes, swaps back | $2H + 4G$ | $(1 - 1/P) \cdot 2(H + G)$ | divides $G$ |
#
# [Chapter 19](19_the_other_ways_round.ipynb) runs both. It gathers one head at a time, which holds less, and lifts the last
# limit with copies of K/V heads.

# %%
H, G, D, w, C = 32, 8, 128, 2, 32_768
layer, head = AttentionLayer(H, G, D, w), C * D * w  # bytes of one head of C tokens
print(f"forward pass of a layer, H = {H}, G = {G}, D = {D}, bfloat16, C = {C:,}: GB held (GB sent) by a device")
print("  P           S          ring      all-gather      all-to-all")
for P in (2, 8, 64, 512):
    held = {"ring": 2 * H + 4 * G, "all-gather": 2 * H + 2 * G * P}
    sent = {"ring": (P - 1) * 2 * G, "all-gather": (P - 1) * 2 * G}
    if G % P == 0:
        held["all-to-all"], sent["all-to-all"] = 2 * H + 4 * G, (1 - 1 / P) * 2 * (H + G)
    cells = "".join(f"{held[how] * head / 1e9:>8.2f} ({sent[how] * head / 1e9:.2f})" for how in held)
    print(f"{P:>3}  {P * C:>10,}{cells}" + ("" if G % P == 0 else "   more than G"))
    for how in held:
        assert held[how] * head == peak_bytes(how, layer, C, P)
        assert abs(sent[how] * head - sent_bytes(how, layer, C, P)) < 1

# %% [markdown]
# Such an all-gather needs more memory with every device; in the end K and V fill it. All-to-all sends less than the ring
# when $PG > H + G$. But bytes are not time: the ring [hides](../docs/glossary.md#hidden-communication) its bytes behind
# computing. Here the other two send before they compute, or after it.
#
# **The backward pass** needs more. A device of the [trainable ring](../docs/glossary.md#trainable-ring) holds
#
# - q, k, v, out and the gradient of out; K and V in two buffers; dq, dk and dv of the block in hand: all in the model's
#   dtype;
# - the sums of the gradients, in float32 at least: dQ once, dK and dV in two buffers.
#
# In bfloat16 with $G = H$ this is as much as 22 chunks, where the forward pass needs 6:

# %%
full = AttentionLayer(heads=32, kv_heads=32, head_dim=128)  # bfloat16
chunk = 32 * 128 * 2  # bytes of one token in one tensor of all heads
print(
    f"forward pass {peak_bytes('ring', full, 1, 8) / chunk:g} chunks, backward pass {peak_bytes_backward(full, 1) / chunk:g}"
)
assert peak_bytes("ring", full, 1, 8) == 6 * chunk
assert peak_bytes_backward(full, 1) == 22 * chunk

# %% [markdown]
# ## The map
#
# A model has one layer at work and keeps the inputs of all layers; it computes the rest again. With 32 layers these are
# 32 chunks more. This is how long a sequence fits:

# %%
ring_memory.draw()

# %% [markdown]
# ## The proof
#
# In `python -m bench.max_context` each device is a process whose memory has a hard limit: an allocation of one byte more
# fails. What is the longest sequence on which one layer of attention completes a training step, with right results?

# %%
max_context_picture.draw()

# %%
results = record.load("max_context")
print(f"{results['budget'] / 2**20:g} MiB a device")
for row in results["rows"]:
    P = row["world_size"]
    print(
        f"{row['method']:<10} P = {P}  longest S: measured {P * row['chunk']:>6,}  modelled {P * row['counted_chunk']:>6,}"
    )
    assert abs(row["chunk"] / row["counted_chunk"] - 1) < 0.05
for times in max_context.linear(results):  # S of P devices / (P · S of one)
    assert abs(times - 1) < 0.05

# %% [markdown]
# P devices of a ring reach P times the sequence of one device of a ring. One device of a ring reaches only half of what
# fused attention reaches without a ring. The model says why. In a training step in float32, fused attention holds 9
# chunks. A ring holds 18: the 17 of the list above, and one copy that this kernel makes.
#
# In a whole model the inputs of $L$ layers are added on both sides, and the difference shrinks. In the forward pass, by
# the count of the [paper](https://arxiv.org/abs/2310.01889), they are 1 chunk and 6:

# %%
C, heads, head_dim = 2**20, 8, 64
alone, ring = (max_context.counted(how, C, heads=heads, head_dim=head_dim) for how in ("blockwise", "ring"))  # bytes
assert (round(alone / (4 * C * heads * head_dim)), round(ring / (4 * C * heads * head_dim))) == (9, 18)
assert peak_bytes_backward(AttentionLayer(heads, heads, head_dim, itemsize=4), C) == 17 * 4 * C * heads * head_dim
print("P devices reach this share of P times the sequence of one device without a ring:")
print("layers   a training step, float32   the paper's count")
for L in (0, 32, 80):
    print(f"{L:>6}{(L + 9) / (L + 18):>27.2f}{(L + 1) / (L + 6):>20.2f}")
assert 0.8 < (32 + 9) / (32 + 18) < (32 + 1) / (32 + 6) < 0.9

# %% [markdown]
# Is the longer sequence computed at the same speed? [These measurements](../bench/results/README.md#utilisation) say yes, as
# the paper does. The paper's own tables of memory and context have a few slips; the [errata](appendix_errata.md) list
# them.
#
# ## Plan your own
#
# The planner, `ring-plan`, puts chapters 9 and 10 together. Eight H100 in one host: 990 TFLOP/s at most, and NVLink with
# 450 GB/s in one direction.

# %%
options = "--layers 32 --hidden 4096 --kv-heads 8 --dtype bf16"
host = f"--flops 990e12 --bandwidth 450e9 --memory 80e9 --devices 8 {options}"
assert cost_model.main(host.split()) == 0

# %% [markdown]
# Messages are hidden from a short sequence on, and far longer ones fit. So memory sets the limit here, not the link.
# "At most" counts parameters, activations and attention, with all recomputed. Two measurements show what it leaves out:
#
# - torchtitan filled eight H100s of 96 GB with 32,768 tokens on each (8 sequences, FP8 products, no ring): a sixth of "at
#   most". Llama 3.1 8B knows 128,256 words, and the loss keeps 14 bytes for each word of each token: 1.8 MB a token.
# - ALST (arXiv 2506.13996) reached 2.3 times "at most". It computes loss and feedforward in pieces, as counted above, and it
#   moves the layers' inputs to the memory of the host.
#
# So name the model and the GPU. Then the planner counts a whole step, logits included, and compares all ways to share:

# %%
named = "--model llama-3.1-8b --gpu h100 --hosts 1 --seq-len 131072"
assert cost_model.main(named.split()) == 0

# %% [markdown]
# *Products* are the matrix products of a layer, *head* the logits, *passes* what only reads and writes memory; *gathered*
# are the parameters of a layer in use, *state* all parameters, gradients and moments. *Hybrid of 4* exchanges heads among
# 4 GPUs. Times within a few per cent are a tie. Inside one host a ring is not the fastest: each round rewrites the running
# output in memory ([chapter 20](20_two_speeds_of_wire.ipynb)). Published times grade attention. The rate of the products
# was fitted on that step of torchtitan and on five prefills, so the step is no independent test.
#
# > **One number to remember: P.** What a device holds depends on its own chunk only. So P devices train P times the
# > sequence of one device of the ring, and 0.8 to 0.9 of P times that of one device without a ring, in a model of 32
# > layers.
#
# ## Questions
#
# <details><summary>The paper says that the ring's memory does not depend on the length of the sequence. Then why is there a longest sequence?</summary>
#
# It does not depend on it for a chunk of fixed length: a longer sequence then takes more devices. With $P$ devices
# given, $C = S/P$ grows with $S$, and so does all that a device holds.
# </details>
#
# <details><summary>Eight devices can reach more than eight times the sequence of one. How?</summary>
#
# Parameters, gradients and Adam's moments are shared out too, 16 bytes a parameter. The model above needs 90 GB for
# them. One device of 80 GB cannot train a single token; each of eight gives up 11 GB.
# </details>
#
# <details><summary>64 of these GPUs in 8 hosts, on a network of 12.5 GB/s, and a sequence of 131,072 tokens: one ring of 64?</summary>
#
# No. It fits easily, but the chunks have 2,048 tokens, and that network needs 39,600. The messages take nearly all the
# time. Use shorter rings, and many sequences at once. Inside one host the link is faster. Or share a sequence in
# another way: `ring-plan --hosts 8 --per-host 8 ...` ranks five of them
# ([chapter 20](20_two_speeds_of_wire.ipynb)).
# </details>

# %%
gqa = AttentionLayer(heads=32, kv_heads=8, head_dim=128)
state = 16 * 32 * (10 * 4096**2 + 2 * 4096 * 8 * 128)  # bytes: 16 a parameter, 32 layers
assert (round(state / 1e9), round(state / 8 / 1e9)) == (90, 11)
assert (131_072 // 64, round(min_overlap_chunk(990e12, 12.5e9, gqa, visible=1 / 2))) == (2048, 39_600)

# %% [markdown]
# ## Your turn


# %%
# The peak memory of a device in the backward pass, in bytes: the list above, for H heads of queries on G of K and V,
# chunks of C tokens, head dim D and itemsize bytes a number (8, 4 or 2)
def my_peak_backward(H, G, C, D, itemsize):
    return ...


print(check_peak_memory_backward(my_peak_backward))


# %%
# The longest sequence, in tokens, of P devices of `memory` bytes. `state`: bytes of all parameters, gradients and
# moments, shared out; `token`: bytes of activations for one token. All devices hold equally many tokens
def my_longest(memory, state, token, P):
    return ...


print(check_longest_sequence(my_longest))


# %%
# For later.
# "ring" or "all-to-all": with which does a device send fewer bytes, on P devices, with H heads of queries on G?
# "ring" where both send as many, and where P does not divide G
def my_choice(P, H, G):
    return ...


print(check_fewer_bytes(my_choice))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_peak_backward(H, G, C, D, itemsize):
#     in_the_dtype = (3 * H + 2 * G) + 4 * G + (H + 2 * G)
#     sums = H + 4 * G
#     return (in_the_dtype * itemsize + sums * max(itemsize, 4)) * C * D
#
# def my_longest(memory, state, token, P):
#     return P * max(0, int((memory - state / P) / token))
#
# def my_choice(P, H, G):
#     return "all-to-all" if G % P == 0 and P * G > H + G else "ring"
# ```
# </details>
#
# Open [`ring_memory.py`](../ringlab/planning/ring_memory.py) now: the counts of this page, and tables 1 and 3 of the paper,
# recomputed. Next on this track: [20 · two speeds of wire](20_two_speeds_of_wire.ipynb).
