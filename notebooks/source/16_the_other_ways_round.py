# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16 · The other ways round
#
# A [ring](../docs/glossary.md#ring) is one of several exact ways to share a sequence. Other ways
# [gather](../docs/glossary.md#all-gather) all keys, [exchange](../docs/glossary.md#all-to-all) tokens for
# [heads](../docs/glossary.md#head) (Ulysses), or [join such an exchange with a ring](../docs/glossary.md#hybrid) (USP). After this chapter you can
#
# - gather K and V, and bring their gradients home,
# - exchange tokens for heads, also when the heads do not divide,
# - say which tokens a row of a hybrid holds, in each [layout](../docs/glossary.md#layout),
# - say what each way sends, holds and needs, and which is the fastest inside a host.
#
# Tracks *plan* and *other ways*. You need chapters 1 to 9 and 13; next comes [17 · two speeds of
# wire](17_two_speeds_of_wire.ipynb) (*plan*). 26 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import math

import torch

from figures import tokens_to_heads
from notebooks.source.checks.masks_and_ways import check_copies, check_meshes
from ring_planner.hidden_communication import block_flops
from ring_planner.presets import gpu_named, model_named
from ring_planner.seconds import Pass, pass_of
from ring_planner.step import Step
from ring_planner.ways import Cluster
from ringlab.basics.naive_attention import TOKENS
from ringlab.ring.layouts import positions, unshard
from ringlab.ways import all_to_all

P = 4

# %% [markdown]
# ## The failure
#
# Heads never meet in [attention](../docs/glossary.md#attention), so let each rank
# compute some of the heads, for **all** tokens. Meanwhile nothing travels.
#
# Here are our 8 tokens on 4 GPUs, with $H = 6$ query heads on $G = 2$ K/V heads
# ([grouped queries](../docs/glossary.md#gqa)). Query head $h$ is the tokens, turned by $h \cdot 60°$. K/V head 0 is the tokens
# themselves, K/V head 1 the tokens turned by $90°$. Query head $h$ uses K/V head ⌊h / (H/G)⌋ = ⌊h/3⌋.

# %%
H, G = 6, 2


def turned(degrees: float) -> torch.Tensor:
    """The 8 tokens, turned: (S, D) = (8, 2)."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return TOKENS @ torch.tensor([[cos, sin], [-sin, cos]], dtype=TOKENS.dtype)


def attention(q, k, v, visible):
    """q (B, H, Sq, D), k and v (B, G, Sk, D), visible (Sq, Sk) -> out (B, H, Sq, D)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT / 2**0.5).masked_fill(~visible, -torch.inf)  # D = 2
    return scores.softmax(dim=-1) @ v


def off(x: torch.Tensor, exact: torch.Tensor) -> str:
    return f"{(x - exact).abs().max().item():.4f}"


q = torch.stack([turned(60 * h) for h in range(H)])[None].requires_grad_()  # (B, H, S, D) = (1, 6, 8, 2)
k, v = (torch.stack([turned(0), turned(90)])[None].requires_grad_() for _ in "kv")  # (1, G, S, D) = (1, 2, 8, 2)
causal = torch.ones(8, 8, dtype=torch.bool).tril()
right = attention(q, k, v, causal)
d_out = torch.randn(right.shape, generator=torch.Generator().manual_seed(0), dtype=right.dtype)
d_q, d_k, d_v = torch.autograd.grad(right, (q, k, v), d_out)
right, q, k, v = (x.detach() for x in (right, q, k, v))

# %% [markdown]
# Which heads does a rank take, when 6 is not a multiple of 4? Code for equal parts gives `H // P` = 1 head to each rank, or
# it asks `torch.chunk` for 4 parts. And which K/V head does a rank need? A common guess is `r % G`:


# %%
def computed(shares: list[list[int]], kv_head) -> torch.Tensor:
    """out, when rank r computes the query heads shares[r], each with the K/V head kv_head(r, h)."""
    out = torch.zeros_like(q)
    for r, mine in enumerate(shares):
        for h in mine:
            used = kv_head(r, h)
            out[:, h] = attention(q[:, [h]], k[:, [used]], v[:, [used]], causal)[:, 0]
    return out


floor = [[r * (H // P)] for r in range(P)]
chunk = [part.tolist() for part in torch.arange(H).chunk(P)]
chunk += [[]] * (P - len(chunk))
even = [[0, 1], [2], [3, 4], [5]]
print("query heads of ranks 0 to 3         K/V head   out is off by")
for name, shares, rule, kv_head in (
    ("H // P", floor, "h // 3", lambda r, h: h // 3),
    ("chunk", chunk, "h // 3", lambda r, h: h // 3),
    ("2 or 1", even, "r % G", lambda r, h: r % G),
    ("2 or 1", even, "h // 3", lambda r, h: h // 3),
):
    print(f"{name:<8}{' '.join(map(str, shares)):<28}{rule:<11}{off(computed(shares, kv_head), right):>10}")
assert torch.equal(computed(even, lambda r, h: h // 3), right)

# %% [markdown]
# In the first line nobody computes heads 4 and 5. In the second rank 3 has nothing to do, and in the third ranks 1 and 2
# use the wrong keys. No error is raised.
#
# The last line is right. But ranks 0 and 1 each have a copy of K/V head 0, and ranks 2 and 3 of K/V head 1, so every copy gets a
# gradient of its own:

# %%
owner = [0, 0, 1, 1]  # the K/V head that rank r has a copy of
copies = k[:, owner].clone().requires_grad_()  # (1, P, 8, 2)
outs = [attention(q[:, mine], copies[:, [r]], v[:, [owner[r]]], causal) for r, mine in enumerate(even)]
(of_copies,) = torch.autograd.grad(torch.cat(outs, dim=1), copies, d_out)
of_heads = of_copies.unflatten(1, (G, P // G))  # (1, G, P/G, 8, 2)
print("dk is off by")
print(f"    {off(of_heads[:, :, 0], d_k)} from the first copy of each head")
print(f"    {off(of_heads.mean(dim=2), d_k)} with the mean of the copies")
print(f"    {off(of_heads.sum(dim=2), d_k)} with their sum")
assert torch.allclose(of_heads.sum(dim=2), d_k, rtol=0, atol=1e-14)

# %% [markdown]
# A key's gradient has a part from every query head that reads the key, and these heads are on several ranks. So the gradients of the
# copies must be **added**.
#
# ## The idea
#
# **A query needs all keys, and no other query.** So you can divide the tokens among the ranks and let K and V travel, one block after the
# other (ring) or all at once (all-gather). But also **a head needs no other head**, so you can divide the heads and let
# tokens travel: the all-to-all.
#
# **All ways begin and end with the same chunks.** Rank $r$ has all heads of the tokens `positions(layout, S, r, P)`. So a model
# can take another way with the same data loader. From here on we use the zigzag layout and the causal mask:

# %%
at = [positions("zigzag", 8, r, P) for r in range(P)]  # the tokens of rank r
order = torch.cat(at)  # all tokens, in order of rank
print("tokens of ranks 0 to 3:", *(tokens.tolist() for tokens in at))

# %% [markdown]
# ## 1 · All-gather
#
# Each rank sends its K and V to all other ranks, and then computes its own rows. The blocks arrive in order of rank, so
# the mask compares **positions**:

# %%
gathered = [  # K and V of all ranks, as each rank r has them
    [torch.cat([x[:, :, at[j]] for j in range(P)], dim=2).requires_grad_() for x in (k, v)] for r in range(P)
]
outs = [attention(q[:, :, at[r]], *gathered[r], visible=at[r][:, None] >= order) for r in range(P)]
assert torch.allclose(unshard(outs, "zigzag"), right, rtol=0, atol=1e-14)
print("all-gather: out is off by", off(unshard(outs, "zigzag"), right))

# %% [markdown]
# In the backward pass each rank finds a gradient of **its copy** of K: what its own queries add, for all 8 keys.

# %%
grads = [torch.autograd.grad(outs[r], gathered[r], d_out[:, :, at[r]]) for r in range(P)]  # dk, dv
parts = torch.stack([of_k for of_k, _ in grads])  # (P, 1, G, 8, 2): dk of each rank's copy, in order of rank
mine = [slice(2 * r, 2 * r + 2) for r in range(P)]  # where the block of rank r stands
own = [parts[r][:, :, mine[r]] for r in range(P)]  # each rank keeps what it found for its own block
total = [parts.sum(dim=0)[:, :, mine[r]] for r in range(P)]  # reduce-scatter
print(f"dk is off by {off(unshard(own, 'zigzag'), d_k)} when each rank keeps its own part")
print(f"dk is off by {off(unshard(total, 'zigzag'), d_k)} after a reduce-scatter")
assert torch.allclose(unshard(total, "zigzag"), d_k, rtol=0, atol=1e-13)

# %% [markdown]
# The gradient of a gather is a [reduce-scatter](../docs/glossary.md#reduce-scatter): **add** the parts of all ranks, and give
# each rank the sum for its own block.
#
# The price is memory: a rank holds the blocks of all ranks. So [`all_gather.py`](../ringlab/ways/all_gather.py) gathers one K/V head at a
# time, and computes with one head while the next arrives.
#
# ## 2 · All-to-all
#
# Now tokens travel. Each rank cuts its q, k and v by heads, and sends rank $r$ the heads that rank $r$ computes. So rank $r$ gets
# its heads for all tokens:


# %%
def to_heads(x: torch.Tensor, shares: list[list[int]]) -> list[torch.Tensor]:
    """What each rank has after the exchange: its heads of all 8 tokens, in order of rank."""
    return [torch.cat([x[:, :, at[s]][:, shares[r]] for s in range(P)], dim=2) for r in range(P)]


keys = [[head] for head in owner]
received = list(zip(to_heads(q, even), to_heads(k, keys), to_heads(v, keys), strict=True))  # by rank: q, k, v
print("rank 1 now has tokens", order.tolist(), "of query head ", *even[1])

# %% [markdown]
# The tokens arrive **in order of rank**, which does no harm without a mask. But a causal mask must hide what comes later
# in the sequence, and `causal`, the triangle, hides what comes later in the tensor. So first put the tokens in order:

# %%
for name, index in (("order of rank", torch.arange(8)), ("order of the sequence", order.argsort())):
    tokens, out = order[index], torch.zeros_like(q)  # row i is token tokens[i]
    for mine, three in zip(even, received, strict=True):
        of_heads = attention(*(x[:, :, index] for x in three), causal)  # (1, n, 8, 2)
        out[:, mine] = of_heads[:, :, tokens.argsort()]  # back: each row to its token
    print(f"{name:<21} {tokens.tolist()}: out is off by {off(out, right)}")
assert torch.allclose(out, right, rtol=0, atol=1e-14)

# %% [markdown]
# Then the rows of `out` travel back to the ranks of their tokens. In the picture a cell is one head of one token, and its
# colour is the rank that holds it:

# %%
tokens_to_heads.draw()

# %% [markdown]
# Each rank also gets the K/V heads that its query heads use. Here that is one head, number ⌊r·G/P⌋
# ([`heads.py`](../ringlab/ways/heads.py)). In the backward pass a second exchange brings dq, dk and dv home, and adds the gradients
# of the copies of a head ([`all_to_all.py`](../ringlab/ways/all_to_all.py)). More ranks than heads are refused:

# %%
try:
    all_to_all.heads_of_ranks(6, 2, 8)
except ValueError as error:
    print(error)

# %% [markdown]
# ## 3 · Hybrid
#
# The message names the cure: a [mesh](../docs/glossary.md#mesh) of $n$ rows with $g$ ranks each, $P = n \cdot g$. Rank
# $\text{row} \cdot g + i$ is number $i$ of its row.
#
# Inside a row the ranks exchange tokens for heads. Then the ranks number $i$ of all rows form a ring, in which K and V of their heads go
# round in $n - 1$ hops ([Fang & Zhao 2024](https://arxiv.org/abs/2405.07719)).
#
# Which tokens does a row hold? Those of its ranks, in order. Here are rows of 2 ranks, beside the chunks of a ring of 2:

# %%
for layout in ("contiguous", "zigzag", "striped"):
    rows = [torch.cat([positions(layout, 8, 2 * row + i, P) for i in (0, 1)]).sort().values.tolist() for row in (0, 1)]
    ring = [positions(layout, 8, r, 2).tolist() for r in (0, 1)]
    print(f"{layout:<11} rows {rows[0]} {rows[1]}   a ring of 2 {ring[0]} {ring[1]}")
    assert (rows == ring) == (layout != "striped")

# %% [markdown]
# Rows of contiguous or zigzag chunks are a ring in the same layout. Rows of striped chunks are not, so
# [`hybrid.py`](../ringlab/ways/hybrid.py) cuts pieces of its own there (chapter 13).
#
# Each way is `ring_flash_attention` with another `schedule=`: a [schedule](../docs/glossary.md#schedule) says which block is in hand
# when, and where the sums of its gradients go. So each way takes every mask and layout.
#
# ## What each way costs
#
# **How much does a rank send?** K and V of a chunk are $2G \cdot CD$ numbers, and q, k, v and out are $2(H+G) \cdot CD$. In a
# forward pass, if $P$ divides $G$ (in the hybrid: if $g$ does):
#
# | way | sends | needs | holds of K and V |
# | --- | --- | --- | --- |
# | ring | $(P-1) \cdot 2G \cdot CD$ | | two blocks |
# | all-gather | $(P-1) \cdot 2G \cdot CD$ | | one head of all $S$ tokens, three times: in hand, arriving, put in order |
# | all-to-all | $\frac{P-1}{P} \cdot 2(H+G) \cdot CD$ | $P \le H$ | $G/P$ heads of all $S$ tokens: as much as one block |
# | hybrid, $n$ rows of $g$ | $\frac{g-1}{g} \cdot 2(H+G) \cdot CD + (n-1) \cdot 2G \cdot CD$ | $g \le H$ | two blocks of $gC$ tokens, $G/g$ heads |
#
# **How long does a rank wait?** Take Llama 8B of chapter 9, with 128K tokens on the 8 H100s of a host. K and V of a chunk are
# 64 MiB, and q, k, v and out 320 MiB. Each way computes as much as eight blocks of 3.37 ms: 27.0 ms, and in the backward pass 74.5 ms.
# So the ways differ only in the messages that no computing hides. In the forward pass these are
#
# - in a ring, none,
# - in a gather, the first of 8 K/V heads: $7 \cdot 64 / 8 = 56$ MiB,
# - in an all-to-all, every message, because nobody computes during an exchange: $\frac{7}{8} \cdot 320 = 280$ MiB,
# - in a hybrid, its exchange.
#
# Divide by the 360 GB/s that NVLink reaches. In the backward pass a ring waits for its first hop, a gather for the first head, and at the
# end for the last head's gradients, in float32. The table has forward + backward; *without costs* is the sum of computing and waits:

# %%
h100, llama = gpu_named("h100"), model_named("llama-3.1-8b")
layer, C = llama.attention(), 2**17 / 8
real = Step(llama, h100, 1, 8, 2**17, cp=8, kernels="cudnn").ring  # what the planner takes for these GPUs
ideal = Cluster(1, 8, flops=real.flops, backward_flops=real.backward_flops, bandwidth=real.bandwidth)  # no other costs


def milliseconds(way, g, cluster, mask=None):
    """Of a layer, forward and backward."""
    return [1e3 * pass_of(way, Pass(cluster, layer, C, backward, mask), g) for backward in (False, True)]


waits = {("ring", None): 0, ("all-gather", None): 7 * 64 / 8, ("all-to-all", None): 7 / 8 * 320}  # for so many MiB
waits |= {("hybrid", g): (g - 1) / g * 320 for g in (2, 4)}
both = {}
print("way           waits forward, ms   without costs, ms   with costs, ms")
for way, size in waits.items():
    forward, backward = milliseconds(*way, ideal)
    waited, paid = 1e3 * size * 2**20 / real.bandwidth, sum(milliseconds(*way, real, "causal"))
    assert abs(forward - waited - 8e3 * block_flops(layer, C**2 / 2) / real.flops) < 1e-9  # the planner agrees
    name = f"hybrid {8 // way[1]} x {way[1]}" if way[1] else way[0]
    print(f"{name:<14}{waited:>17.2f}{forward + backward:>20.1f}{paid:>17.1f}")
    both[name] = [round(forward + backward, 1), round(paid, 1)]
assert (both["ring"], both["all-gather"]) == ([101.7, 114.9], [102.2, 107.4])

# %% [markdown]
# **Why does the ring win without costs, and lose with them?** It waits the least. But in each of its
# eight rounds it also rewrites its output, leaves a part of the GPU idle at the end of a kernel, and computes beside messages
# ([`round_costs.py`](../ring_planner/round_costs.py)). So the ring takes 114.9 ms, and the gather 107.4.
#
# **Which way do you take?** These times differ by less than the model's error. But six measured pairs of one publisher agree: the
# gather was 1.43 and 1.19 times as fast as the ring on 8 H100s, and 1.04 to 1.08 times on 8 to 64 B200s
# ([published.json](../bench/published.json)). So inside one host with NVLink take a gather or an all-to-all, the latter
# only where $P$ divides the heads: of our 4 ranks with 6 heads, the two with one head would wait for the others.
# [Which way for which wires](../docs/which_way.md#which-way-for-which-wires) has the rule for whole steps.
#
# Between hosts the hybrid has an advantage. A hop of its ring carries $gC$ tokens of $G/g$ heads, as many bytes as a hop of the flat
# ring. But a round computes $g$ times the work. So **$g$ times shorter chunks hide the
# hop** ([chapter 17](17_two_speeds_of_wire.ipynb)).
#
# > **One number to remember: $H$.** Tokens can be exchanged for heads among $H$ ranks at most, because each rank needs a
# > query head; Llama 8B has 32.
#
# ## Questions
#
# <details><summary>With all-to-all, does the causal mask still need the zigzag layout?</summary>
#
# No. Between the exchanges each rank has all tokens of its heads, so the work is balanced in every layout. A
# hybrid needs zigzag or striped chunks, because its rows form rings.
# </details>
#
# <details><summary>A gather and a ring send as much. What makes the ring wait less, and the gather need more memory?</summary>
#
# A ring computes on a block while the next one travels, and then drops it. A gather waits for the first head of all blocks, and holds that head of
# all tokens.
# </details>
#
# ## Your turn


# %%
# Each of P ranks has a copy of the K/V head that it needs. copies (P, B, S, D): copies[r] is dk of rank r's copy.
# Return dk of the G heads, (B, G, S, D). (G divides P.)
def my_dk(copies, G):
    return ...


print(check_copies(my_dk))


# %%
# A hybrid on P ranks, with H query heads on G. On which meshes do all ranks compute equally many query heads, while no
# K/V head is copied? A list of pairs (rows, ranks of a row). Rows of one rank are allowed, and so is a single row.
def my_meshes(P, H, G):
    return ...


print(check_meshes(my_meshes))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_dk(copies, G):
#     return copies.unflatten(0, (G, -1)).sum(dim=1).transpose(0, 1)
#
# def my_meshes(P, H, G):
#     return [(P // g, g) for g in range(1, P + 1) if P % g == 0 and G % g == 0]
# ```
# </details>
#
# Open [`all_to_all.py`](../ringlab/ways/all_to_all.py) now: heads for tokens, and back. Next: [17 · two speeds of wire](17_two_speeds_of_wire.ipynb).
