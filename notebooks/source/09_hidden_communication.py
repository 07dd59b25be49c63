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
# Chapter 6 let messages travel while a [rank](../docs/glossary.md#rank) computes. Whether that hides them depends on one
# number, the tokens of a rank's [chunk](../docs/glossary.md#chunk), $C = S/P$. The example of this chapter, and of chapters 16 and 17, is
# Llama 8B on H100s, with 131,072 tokens (128K) and with 1,048,576 (1M). After this chapter you can
#
# - compute the shortest chunk that hides its messages, from the FLOP/s and the bytes/s that are reached,
# - count the memory of a chunk, in the forward and in the [backward pass](../docs/glossary.md#backward-pass),
# - say how long a sequence P devices reach.
#
# Tracks *plan* and *other ways*. You need chapters 1 to 8; next comes [13 · documents and
# windows](13_documents_and_windows.ipynb). 21 minutes to read, 15 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
from itertools import product

from bench import memory, record
from figures import measured, timelines
from notebooks.source.checks.kernels_and_wires import check_peak_memory_backward, check_smallest_chunk
from ring_planner.hidden_communication import AttentionLayer, min_overlap_chunk
from ring_planner.memory import peak_bytes, peak_bytes_backward
from ring_planner.presets import gpu_named, model_named
from ring_planner.step import Step
from ring_planner.ways import Cluster

# %% [markdown]
# ## The failure
#
# Overlap alone hides nothing. Here the overlapping ring of chapter 6 ran in two network namespaces of one machine. They
# played two hosts, which had one core each and a link of 50 MB/s between them
# ([the numbers](../bench/results/README.md#overlap_threshold)):

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
# With short chunks the ring waits most of the time, and with long ones it hardly waits at all. Where is the limit?
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
hop = 2 * C * D * itemsize  # a K and a V
print(f"a block: {flops} FLOPs; its hop: {hop} bytes")
assert (flops, hop) == (32, 16)

# %% [markdown]
# Each query meets each key, so twice the tokens are four times the work, and only twice the bytes. So on every device and every
# link there is a length from which on computing takes longer.
#
# ## One block of Llama 8B
#
# Now the same count for a real model. A layer has $H = 32$ query [heads](../docs/glossary.md#head) and $G = 8$ heads of K and V,
# of $D = 128$ numbers, each of $w = 2$ bytes. All $H$ heads compute, but only $G$ of them travel. And the model is causal: in a
# balanced [layout](../docs/glossary.md#layout) the mask hides half of the pairs, and none of the bytes. So
#
# $$\text{computing} = \frac{4\,C^2 H D}{2 \cdot \text{flops}}, \qquad \text{message} = \frac{2\,C G D\,w}{\text{bandwidth}} .$$
#
# What counts is what a kernel and a wire **reach**. In attention an H100 reaches 652 TFLOP/s with cuDNN's [fused kernel](../docs/glossary.md#fused-kernel), and 590 in the backward
# pass. Messages reach some 360 GB/s over a link inside a host, NVLink, and 35 GB/s through a [NIC](../docs/glossary.md#nic), which leaves
# the host. (Data sheets say 989, 450 and 50; the shares of the wires are the planner's assumption, and yours may differ: chapter 17.)


# %%
def reached(gpu: str) -> Cluster:
    """What attention and messages reach on hosts of this GPU, as the planner takes it."""
    step = Step(model_named("llama-3.1-8b"), gpu_named(gpu), hosts=2, per_host=8, seq_len=2**17, cp=16, kernels="cudnn")
    return step.ring


h100, llama = reached("h100"), model_named("llama-3.1-8b").attention()
flops, nvlink, nic = h100.flops, h100.bandwidth, h100.host_bandwidth
H, G, D, w = llama.heads, llama.kv_heads, llama.head_dim, llama.itemsize
assert (H, G, D, w, flops, h100.backward_flops, nvlink, nic) == (32, 8, 128, 2, 652e12, 590e12, 360e9, 35e9)
print("                C   block, ms   hop, MiB   NVLink, ms   NIC, ms")
for name, S, P in (("128K on 8", 2**17, 8), ("1M on 8", 2**20, 8), ("1M on 128", 2**20, 128)):
    C = S // P
    block, hop = 4 * C**2 * H * D / 2 / flops, 2 * C * G * D * w
    print(
        f"{name:<10}{C:>7,}{1e3 * block:>12.3g}{hop / 2**20:>11.0f}{1e3 * hop / nvlink:>13.3g}{1e3 * hop / nic:>10.3g}"
    )
    assert block > 9 * hop / nvlink
assert block < hop / nic

# %% [markdown]
# Inside a host a block takes 9 times as long as its [hop](../docs/glossary.md#hop), or more. But share 1M tokens among 16 hosts, and chunks
# are short: a block then takes 0.84 ms, its hop through a NIC 0.96 ms, and the ring waits.
#
# ## The condition
#
# A hop is [hidden](../docs/glossary.md#hidden-communication) when computing takes at least as long as the message. One $C$ cancels
# out, and what stays is a length:
#
# $$C \;\ge\; \frac w2 \cdot \frac GH \cdot \frac{\text{flops}}{\text{bandwidth}} \quad \text{without a mask, twice that with a
# causal one.}$$
#
# In bfloat16 with $G = H$ and no mask this length is flops / bandwidth: the [paper](https://arxiv.org/abs/2310.01889) writes
# $c \ge F/B$. $D$ cancels out too, and so would a batch. The paper calls it the minimal block size. In a shorter chunk only the share $C$ / (that
# length) of a hop is hidden. Drawn over $C$ this share rises and then turns flat, so we call it the *knee*.
#
# **The backward pass** has five products in place of two, so 2.5 times the FLOPs. The gradients of K and V travel with K and V, in
# float32, so a hop has three times the bytes. At the same FLOP/s the knee is $3/2.5 = 1.2$ times as long.

# %%
equal = AttentionLayer(heads=32, kv_heads=32, head_dim=128)
print("                                  of flops / bandwidth   NVLink      NIC")
for name, factor, layer, options in (
    ("bfloat16, G = H, no mask", w / 2, equal, {}),
    ("Llama 8B, no mask", w / 2 * G / H, llama, {}),
    ("Llama 8B, causal", w * G / H, llama, {"visible": 1 / 2}),
    ("Llama 8B, causal, backward", w * G / H * 3 / 2.5, llama, {"visible": 1 / 2, "backward": True}),
):
    rate = h100.rate("backward" in options)
    knees = [min_overlap_chunk(rate, wire, layer, **options) for wire in (nvlink, nic)]  # what the planner counts
    print(f"{name:<34}{factor:>20.2f}{knees[0]:>9,.0f}{knees[1]:>9,.0f}")
    assert abs(knees[1] - factor * rate / nic) < 1e-6

# %% [markdown]
# The mask doubles the knee and grouped queries divide it by four, so for Llama 8B half of flops / bandwidth remains. In the backward pass
# one message stays exposed in every *flat* ring, a ring of one circle: in ours the first hop of K and V (chapter 8), in published rings
# the last hop of the gradients, which in bfloat16 has twice the bytes.
#
# On your GPU, `python -m bench.gpu` measures flops.
#
# ## The proof
#
# Is the condition right? The bench of the first cell measured two links, with seven or eight chunks each; flops and bandwidth come
# from the same run. The line is the model, min(1, C / knee). The measured knee is the knee of the line that fits best:

# %%
for knee in bench["knees"]:
    assert abs(knee["predicted"] - 4 / 2 * knee["flops"] / knee["bandwidth"]) < 1e-6  # w = 4 bytes
    assert 2 / 3 < knee["measured"] / knee["predicted"] < 3 / 2
measured.overlap_threshold()

# %% [markdown]
# The model gives the right place and not the last digit: the rate of computing depends on the chunk, and a
# message takes some time of the core that computes. The two shortest chunks of the
# fast link hide more than the line says. We do not know why.
#
# ## One slow link
#
# What does one slow link among fast ones cost? Here is a simulation of 4 ranks:

# %%
timelines.slow_hop()

# %% [markdown]
# In round 0 only the two ranks of the slow link wait. But then they begin the next round late, so rank 1 passes on its
# block late, and rank 3 waits until rank 0 can receive. Soon every rank waits, and **the slowest hop rules**. The ring takes
#
# $$\text{computing} + (P-1) \cdot \max(\text{computing},\ \text{slowest hop}) .$$
#
# A second slow link costs nothing more. So 1M tokens on 128 H100s pay 0.96 ms for every hop, although seven of eight stay inside
# a host.
#
# ## How far does it reach?
#
# So chunks should be long, and memory says how long they can be. On GPU 0 of the worked example there are q0, out0, k0, v0 and the arriving
# k3, v3: six tensors, as in every later round. With all heads, the [peak memory](../docs/glossary.md#peak-memory) of a device in
# attention's forward pass is $(2H + 4G) \cdot C D w$ bytes. $P$ does not appear, and $S$ appears only in $C = S/P$. So **P devices hold P
# times the sequence.** The [backward pass](../docs/glossary.md#backward-pass) of the [`ring_flash_attention`](../ringlab/ring/flash_ring.py)
# needs more:
#
# - q, k, v, out and the gradient of out; K and V in two buffers; dq, dk and dv of the block in hand: all in the model's
#   dtype;
# - the sums of the gradients, in float32 at least: dQ once, dK and dV in two buffers.
#
# In bfloat16 with $G = H$ this is as much as 22 chunks, where the forward pass needs 6 ([one count](../docs/memory.md) for all pages). With
# Llama's 8 of 32 heads it is 10 chunks of q:

# %%
C = 2**17 // 8  # 128K tokens on 8
q = C * H * D * w
assert peak_bytes(equal, C) == 6 * q and peak_bytes_backward(equal, C) == 22 * q
assert peak_bytes(llama, C) == 3 * q and peak_bytes_backward(llama, C) == 10 * q
print(f"a layer of 128K tokens on 8: {3 * q / 2**20:.0f} MiB forward, {10 * q / 2**20:,.0f} MiB backward")

# %% [markdown]
# **Measured.** In `python -m bench max_context` each device is a process whose memory has a hard limit: an allocation of
# one byte more fails. What is the longest sequence on which one layer of attention completes a training step, with right
# results?

# %%
results = record.load("max_context")
for row in results["rows"]:
    assert abs(row["chunk"] / row["counted_chunk"] - 1) < 0.05  # measured and modelled
_, _, of_4, of_8 = memory.lengths(results, "ring")
assert abs(of_8 / (2 * of_4) - 1) < 0.05
measured.max_context()

# %% [markdown]
# Eight devices of a ring reach twice the sequence of four. A device of a ring reaches only half of what fused attention reaches alone
# (*blockwise* in the picture): in float32 it holds 18 chunks, with a copy that the kernel makes, and fused attention without a ring 9. A
# ring of two needs fewer buffers, 16 chunks, and a ring of one 11: in both a device holds more tokens than in a longer ring. A
# whole model of 32 layers also keeps a chunk for each layer, so there P devices reach
# $(32 + 9)/(32 + 18) = 0.82$ of P times the sequence of one device.
#
# > **One number to remember: half of flops / bandwidth, both as reached, of the slowest link.** A chunk of Llama 8B must have so many
# > tokens: 910 on an H100's NVLink, 9,310 through its NIC, and a tenth more in the backward pass.
#
# ## Questions
#
# <details><summary>A B200 reaches 1,275 TFLOP/s in attention, and twice the bytes/s of NVLink. Its NIC is that of an H100. Does a ring of
# Llama 8B still hide its messages?</summary>
#
# Inside a host yes: 890 tokens are enough. Between hosts the knee grows with the FLOP/s, to
# 18,200. A chunk of 8,192 tokens hides only 45 % of its messages there, so the new GPUs are hardly faster than the old ones.
# </details>
#
# <details><summary>Llama 70B has 64 query heads on 8. You have 1M tokens and 64 H100s, in 8 hosts. Is a flat ring fast enough?</summary>
#
# For attention, yes. The factor $2 \cdot G/H$ is a quarter, so the knee of the NIC is $18{,}629/4 = 4{,}657$ tokens, and 5,057
# backward. A chunk has 16,384.
# </details>
#

# %%
b200, large = reached("b200"), model_named("llama-3.1-70b").attention()
wires = b200.bandwidth, b200.host_bandwidth
knees = [min_overlap_chunk(b200.flops, wire, llama, visible=1 / 2) for wire in wires]
assert [*map(round, knees)] == [885, 18214] and round(8192 / knees[1], 2) == 0.45
knees = [min_overlap_chunk(h100.rate(each), nic, large, visible=1 / 2, backward=each) for each in (False, True)]
assert [*map(round, knees)] == [4657, 5057] and knees[1] < 2**20 / 64

# %% [markdown]
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
# paper, recomputed. Next: [13 · documents and windows](13_documents_and_windows.ipynb).
