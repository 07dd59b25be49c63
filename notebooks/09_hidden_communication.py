# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 9 · When is the ring free
#
# Chapter 6 hid messages behind computing. From which chunk on are they hidden, on which machine? After this chapter you can tell
# from a data sheet how long your chunks must be, and what a mask, grouped queries, the backward pass and one slow link change.
#
# 20 minutes. The code: [`planning/hidden_communication.py`](../planning/hidden_communication.py), [`planning/simulated_ring.py`](../planning/simulated_ring.py),
# [`bench/overlap_threshold.py`](../bench/overlap_threshold.py). Before: [8 · the fused ring](08_the_fused_ring.ipynb).

# %%
# %matplotlib inline
from itertools import product
from math import isclose

import torch
from torch.utils.flop_counter import FlopCounterMode

from basics.naive_attention import TOKENS, naive_attention
from bench import record
from figures import hidden_communication, overlap_threshold, slow_hop
from notebooks import workers
from notebooks.checks.hidden_communication import check_fewer_bytes, check_training_chunk, check_unlike_links
from planning.hidden_communication import (
    LLAMA_7B,
    TABLE_2,
    Layer,
    block_flops,
    hidden_share,
    hop_bytes,
    min_overlap_chunk,
    ring_seconds,
    sent_bytes,
)
from planning.simulated_ring import duration, simulate_timeline
from support.processes import launch
from training.backward import block_backward

# %% [markdown]
# ## The failure
#
# Eight A100s of 312 TFLOP/s on InfiniBand, 12.5 GB/s; 32 heads of 128, bf16. The ring overlaps. How long does it take, as a
# multiple of its computing? (All modelled, from the data sheets' numbers.)

# %%
P, F, B = 8, 312e12, 12.5e9
print("      C   computing, ms   a hop, ms   ring / computing")
slowdown = {}
for C in (1024, 4096, 16_384, 65_536):
    computing, message = block_flops(LLAMA_7B, C**2) / F, hop_bytes(LLAMA_7B, C) / B
    slowdown[C] = ring_seconds(P, computing, message, overlap=True) / (P * computing)
    print(f"{C:>7,}{1e3 * computing:>16.2f}{1e3 * message:>12.2f}{slowdown[C]:>19.1f}")
assert slowdown[1024] > 20
assert slowdown[65_536] == 1

# %% [markdown]
# With chunks of 1,024 tokens these GPUs wait most of the time, overlap or not. With 65,536 the messages cost nothing.
#
# ## The idea
#
# Count. Work grows with the square of the chunk, bytes with the chunk: from some length on computing takes longer. First our 8 tokens
# on 4 GPUs: $C = 2$ queries on a rank, a block of 2 keys and values, one head of $D = 2$, two bytes a number.

# %%
C, D = 2, 2
flops = 0
for _ in product(range(C), repeat=2):  # each query with each key
    flops += 2 * D  # the score: D multiplications, D additions
    flops += 2 * D  # the weight times the value, added to the output: as many
k, v = TOKENS[None, None].bfloat16().chunk(4, dim=2)[:2]  # the size of a block's K and of its V
print(f"a block: {flops} FLOPs; its hop: {k.nbytes + v.nbytes} bytes")

with FlopCounterMode(display=False) as torchs:
    naive_attention(k, k, v)
tiny = Layer(heads=1, kv_heads=1, head_dim=2, itemsize=2)
assert flops == 32 == torchs.get_total_flops() == block_flops(tiny, C**2)
assert k.nbytes + v.nbytes == 16 == hop_bytes(tiny, C)

# %% [markdown]
# A machine of 8 FLOP/s with a link of 2 bytes/s would wait for it. Twice the chunk, and it just does not:

# %%
for C in (2, 4, 8):
    computing, message = block_flops(tiny, C**2) / 8, hop_bytes(tiny, C) / 2
    hidden = min(1, computing / message)
    print(f"C = {C}: computing {computing:>2.0f} seconds, the message {message:>2.0f}: hidden {hidden:.0%}")
    assert hidden == hidden_share(C, 4)
assert min_overlap_chunk(8, 2, tiny) == 4 == 8 / 2

# %% [markdown]
# The same with letters: $H$ query heads, $G$ of K and V, $w$ bytes a number, $F$ FLOP/s of a device, $B$ bytes/s of a link, one way
# (as in chapter 6). A hop is free when
#
# $$\underbrace{\frac{4\,C^2 H D}{F}}_{\text{computing}} \ge \underbrace{\frac{2\,C G D\,w}{B}}_{\text{message}}
# \qquad\Longleftrightarrow\qquad C \;\ge\; \frac w2 \cdot \frac GH \cdot \frac FB$$
#
# $D$ cancels out. So does the batch, which multiplies both sides, and $P$ never came in: only your own device and your own link count.

# %%
for head_dim in (2, 64, 128, 256):
    assert isclose(min_overlap_chunk(F, B, Layer(32, 32, head_dim)), F / B)
for batch in (1, 16):
    k = torch.zeros(batch, 1, 4, 2, dtype=torch.bfloat16)  # and a v as large
    with FlopCounterMode(display=False) as torchs:
        naive_attention(k, k, k)
    assert torchs.get_total_flops() / 8 == 2 * k.nbytes / 2  # seconds: C = 4 is free on the machine above

# %% [markdown]
# ## The paper's table 2
#
# In bf16 with $G = H$ the condition is the paper's $c \ge F/B$. Its table, recomputed. The paper asks for a sequence of six
# smallest chunks, as many as the blocks that a rank holds. (K: 1000 tokens. Its own runs were in full precision, where $w$ = 4 doubles the
# chunk, and $F$ is smaller.)

# %%
print("                  chunk: printed   F/B    sequence: printed   6·F/B")
for hardware, flops, bandwidth, chunk, sequence in TABLE_2:
    ours = min_overlap_chunk(flops, bandwidth, LLAMA_7B) / 1000
    print(f"{hardware:<17}{chunk:>15.1f}K{ours:>6.2f}K{sequence:>18.1f}K{6 * ours:>8.2f}K")
    same = (round(ours, 1), round(6 * ours, 1)) == (chunk, sequence)
    assert same == (hardware != "A100 InfiniBand")
assert round(312 / 12.5, 2) == 24.96
assert round(149.5 / 6, 2) == 24.92

# %% [markdown]
# One row is off: 312/12.5 is 24.96, not 24.5. The printed sequence tells that the chunk is misprinted: 149.5 is 6 · 24.92.
#
# ## Your machine
#
# Two numbers place a machine on the map. Here are yours, from two processes of this machine at once, as a ring would run: $F$ from the
# fused kernel on one block, $B$ from one hop, in float32.

# %%
C, layer = 2048, Layer(heads=8, kv_heads=8, head_dim=64, itemsize=4)
computing, hop = launch(workers.block_and_hop, 2, C, layer.heads, layer.head_dim, 5, device="cpu")[0]
print(f"C = {C:,}: computing on a block {computing:.4f} s, a hop {hop:.4f} s")
hidden_communication.draw(own=(block_flops(layer, C**2) / computing, hop_bytes(layer, C) / hop))

# %% [markdown]
# Between processes of one machine a hop is a copy in memory: a short chunk is enough, on paper. What the model leaves out is the
# fixed cost of a call and of a message, which rules there; so measure.
#
# ## Does the knee come where it should?
#
# Two hosts (network namespaces, a core each) on a link of a set rate, in [`bench/overlap_threshold.py`](../bench/overlap_threshold.py).
# $F$, $B$ and the hidden share come from the same run. Predicted: $w/2 \cdot F/B$, with $w = 4$. Measured: the knee whose line
# $\min(1, C/c)$ is nearest to the measured shares: the *knee* is where the curve turns flat. Expect the right place, not the last digit:
# $F$ varies with the chunk, and messages take time of the core that computes (dashed). So a ring that waits for nothing still takes 4 to
# 17 % longer than its computing alone (the table's last column); and the shortest chunks, whose hops of 10 ms reach no steady rate,
# hide more or less than the line says.

# %%
bench = record.load("overlap_threshold")
print("     link   predicted   measured")
for knee in bench["knees"]:
    print(f"{knee['rate'] / 1e6:>4g} MB/s{knee['predicted']:>12,.0f}{knee['measured']:>11,.0f}")
    assert isclose(knee["predicted"], 4 / 2 * knee["F"] / knee["B"])
    assert 2 / 3 < knee["measured"] / knee["predicted"] < 3 / 2
    hidden = [row["hidden"] for row in bench["rows"] if row["rate"] == knee["rate"]]  # short chunks first
    assert hidden[0] < 0.5
    assert hidden[-1] > 0.9
overheads = [row["overhead"] for row in bench["rows"] if row["hidden"] > 0.99]  # of rings that wait for nothing
assert (f"{min(overheads):.0%}", f"{max(overheads):.0%}") == ("4%", "17%")

overlap_threshold.draw()
# %% [markdown]
# ## What moves the knee
#
# - **A causal mask** in a balanced layout (chapter 7) hides half of the pairs and no bytes: twice the chunk.
# - **Grouped queries** compute as much and send $G/H$ of it: a quarter of the chunk with 32 heads on 8.
# - **Backwards** a block costs five products, $10\,C^2HD$ FLOPs. K and V travel in $w$ bytes a number, their gradients in 4:
#   $C \ge (w+4)/5 \cdot G/H \cdot F/B$. That is more than forwards in bf16, and less in float32. (The last hop of the gradients,
#   home, comes after all computing: it always shows.)

# %%
q, k, v, d_out = torch.randn(4, 1, 1, 2, 2)
with FlopCounterMode(display=False) as torchs:
    block_backward(q, k, v, d_out, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), scale=1.0)
assert torchs.get_total_flops() == 10 * 2**2 * 2 == block_flops(tiny, 2**2, backward=True)

grouped = Layer(heads=32, kv_heads=8, head_dim=128)
full = Layer(heads=32, kv_heads=32, head_dim=128, itemsize=4)
print("A100, InfiniBand                        tokens   of F/B")
for name, layer, options, factor in (
    ("bf16", LLAMA_7B, {}, 1),
    ("float32", full, {}, 2),
    ("bf16, causal", LLAMA_7B, {"visible": 1 / 2}, 2),
    ("bf16, 32 heads on 8", grouped, {}, 1 / 4),
    ("bf16, backward", LLAMA_7B, {"backward": True}, 6 / 5),
    ("float32, backward", full, {"backward": True}, 8 / 5),
    ("bf16, causal, 32 on 8, backward", grouped, {"visible": 1 / 2, "backward": True}, 2 * 1 / 4 * 6 / 5),
):
    chunk = min_overlap_chunk(F, B, layer, **options)
    print(f"{name:<35}{chunk:>11,.0f}{chunk / (F / B):>9.2f}")
    assert isclose(chunk, factor * F / B)

# %% [markdown]
# ## The ring beside all-gather and all-to-all
#
# Two other ways to share out a sequence. **All-gather**: everyone first collects all K and V, then computes. **All-to-all** (Ulysses): swap,
# so that a rank has *all* tokens of a *few* heads; compute; swap back. What does rank 0 of 4 send of our 8 tokens, here with 4 heads?

# %%
P, C = 4, 2
q, k, v = torch.randn(3, 1, 4, 8, 2, dtype=torch.float64).unbind()
exact = naive_attention(q, k, v)
mine = [x[:, :, :C] for x in (q, k, v)]  # 2 tokens, all heads
ring = sum(x.nbytes for x in mine[1:]) * (P - 1)  # a K and a V in each hop

there = [part for x in mine for part in x.chunk(P, dim=1)[1:]]  # of q, k and v, the heads that others compute
head = naive_attention(q[:, :1], k[:, :1], v[:, :1])  # all tokens of its own head
back = head.chunk(P, dim=2)[1:]  # the tokens that others hold
assert torch.allclose(head, exact[:, :1], rtol=0, atol=1e-14)
swapped = sum(part.nbytes for part in (*there, *back))
assert k[:, :1].nbytes == mine[1].nbytes  # all tokens of one head are as many numbers as 2 tokens of all

eight = Layer(heads=4, kv_heads=4, head_dim=2, itemsize=8)
assert ring == sent_bytes("ring", eight, C, P) == sent_bytes("all-gather", eight, C, P)
assert swapped == sent_bytes("all-to-all", eight, C, P)
print(f"ring, and all-gather: {ring} bytes; all-to-all: {swapped} bytes")

# %% [markdown]
# The ring sends $(P-1) \cdot 2\,CGDw$ bytes, all-to-all $(1 - 1/P) \cdot 2\,C(H+G)Dw$. The quotient is $P \cdot G/(H+G)$: **all-to-all sends less
# when $P\,G > H + G$**, without grouped queries from 3 ranks on. With 32 heads on 8:

# %%
print("  P   ring / all-to-all, in bytes")
for P in (2, 4, 8, 16):
    try:
        ratio = sent_bytes("ring", grouped, 4096, P) / sent_bytes("all-to-all", grouped, 4096, P)
    except ValueError as error:
        print(f"{P:>3}   {error}")
        continue
    print(f"{P:>3}   {ratio:.1f}")
    assert isclose(ratio, P * 8 / (32 + 8))

# %% [markdown]
# Bytes are not time. The ring's hide behind computing. All-gather's and all-to-all's come before it can begin, or after it.
#
# | | K and V held at once, in multiples of a rank's own | ranks |
# | --- | --- | --- |
# | ring | 2: the block in hand and the next | any number |
# | all-gather | $P$ | any number |
# | all-to-all | 1: all tokens, $1/P$ of the heads | must divide $G$, or heads are copied |
#
# ## One slow link
#
# Inside a host links are fast, between hosts slow. A ring over two hosts has a slow hop or two. How much does one cost?

# %%
slow_hop.draw()
# %% [markdown]
# At first only the two ranks of that link wait. They begin the next round late: rank 1 passes its block on late, and rank 3's message
# waits until rank 0 has room for it. A round later everyone waits. The simulator again, for 8 ranks, as multiples of their computing:

# %%
P, C, fast, slow = 8, 8192, 300e9, 12.5e9


def takes(layer, C, *bandwidths) -> float:
    """How long a ring over these links takes, as a multiple of its computing."""
    computing = block_flops(layer, C**2) / F
    hops = [hop_bytes(layer, C) / bandwidth for bandwidth in bandwidths]
    seconds = duration(simulate_timeline([[computing] * P] * P, hops))
    as_if_all_were_slow = ring_seconds(P, computing, max(hops), overlap=True)
    assert isclose(seconds, as_if_all_were_slow)
    return seconds / (P * computing)


for name, bandwidths in (
    ("all links fast", [fast] * 8),
    ("one slow", [slow] + [fast] * 7),
    ("two slow (2 hosts of 4)", ([slow] + [fast] * 3) * 2),
    ("all slow", [slow] * 8),
):
    print(f"{name:<25}{takes(LLAMA_7B, C, *bandwidths):>5.2f}")
slow_round = F / slow / C  # of a round's computing
assert isclose(takes(LLAMA_7B, C, slow, *[fast] * 7), (1 + 7 * slow_round) / 8)

# %% [markdown]
# **The slowest hop rules**, and a second one costs nothing more. So what counts is $F/B$ of the slowest link, and its cures are those above:
# longer chunks, fewer heads of K and V, fewer bytes a number.

# %%
one_slow = slow, *[fast] * 7
for name, layer, C in (
    ("C =  8,192", LLAMA_7B, 8192),
    ("C = 24,960 = F/B of the slow link", LLAMA_7B, 24_960),
    ("C =  8,192, 32 heads on 8", grouped, 8192),
):
    print(f"{name:<36}{takes(layer, C, *one_slow):.2f}")
assert isclose(takes(LLAMA_7B, 24_960, *one_slow), 1)
assert isclose(takes(grouped, 8192, *one_slow), 1)

# %% [markdown]
# A slow *rank* is another matter: no chunk hides its computing, and everyone waits for it.

# %%
alike = duration(simulate_timeline([[1.0] * 8] * 8, [0.0] * 8))
assert duration(simulate_timeline([[2.0] + [1.0] * 7] * 8, [0.0] * 8)) == 2 * alike  # one rank at half speed

# %% [markdown]
# > **One number to remember: $F/B$ of the slowest link.** 24,960 tokens for an A100 on InfiniBand, in bf16. Times $w/2$, times $G/H$, times 2
# > under a causal mask; backwards $(w+4)/5$ in place of $w/2$. One slow link in the ring costs as much as if all were slow.
#
# ## Questions
#
# <details><summary>Next year's GPU computes twice as fast, over the same link. What becomes of the smallest free chunk?</summary>
#
# It doubles. A ring whose chunks were just long enough is hardly faster: all rounds but the last take as long as their message.
# </details>
#
# <details><summary>Your chunks are too short. Does a larger batch help?</summary>
#
# No: it multiplies computing and bytes alike. Fewer ranks for the same sequence do, and so do fewer K/V heads.
# </details>
#
# <details><summary>Eight GPUs on two hosts. Does the order in which the ring visits them matter?</summary>
#
# Not in the simulator, where each hop has a wire of its own: one crossing is as bad as eight. But crossings that share a network card
# share its bandwidth: eight of them, four each way, leave each a quarter. So let the ring cross once there and once back.
# </details>
#
# ## Your turn


# %%
# A100 on InfiniBand, F/B = 24,960; bfloat16, 32 heads on 8, causal, zigzag.
# From how many tokens a chunk on are the hops free, forwards and backwards?
# (Leave out the last hop of the gradients, home.)
my_training_chunk = ...

print(check_training_chunk(my_training_chunk))


# %%
# "ring" or "all-to-all": with which does a rank send fewer bytes, on P ranks, with H query heads on G?
# "ring" where both send as many, and where all-to-all cannot be
def my_choice(P, H, G):
    return ...


print(check_fewer_bytes(my_choice))


# %%
# Seconds of an overlapped ring in which a block takes `computing` on every rank,
# and hops[r] from rank r to the next one; there are as many hops as ranks
def my_ring_seconds(computing, hops):
    return ...


print(check_unlike_links(my_ring_seconds))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# forwards = 2 * 2 / 2 * 8 / 32 * 24_960
# backwards = 2 * (2 + 4) / 5 * 8 / 32 * 24_960
# my_training_chunk = max(forwards, backwards)
#
# def my_choice(P, H, G):
#     return "all-to-all" if G % P == 0 and P * G > H + G else "ring"
#
# def my_ring_seconds(computing, hops):
#     return computing + (len(hops) - 1) * max(computing, *hops)
# ```
# </details>
#
# Read [`planning/hidden_communication.py`](../planning/hidden_communication.py) and [`planning/simulated_ring.py`](../planning/simulated_ring.py) now.
# Next: [10 · how far does it reach](10_how_far_does_it_reach.ipynb).
