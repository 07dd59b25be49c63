# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 19 · The other ways round
#
# A [ring](../GLOSSARY.md#ring) is one of several exact ways to share a sequence. Others
# [gather](../GLOSSARY.md#all-gather) all keys, [exchange](../GLOSSARY.md#all-to-all) tokens for
# [heads](../GLOSSARY.md#head), or do [both](../GLOSSARY.md#hybrid). After this chapter you can
#
# - gather K and V, and bring their gradients home,
# - exchange tokens for heads, also when the heads do not divide,
# - say which tokens a row of a hybrid holds, in each [layout](../GLOSSARY.md#layout),
# - say what each way sends, holds and needs.
#
# 20 minutes to read, 20 for the exercises. The code: [`training/all_gather.py`](../training/all_gather.py),
# [`training/split_heads.py`](../training/split_heads.py), [`training/all_to_all.py`](../training/all_to_all.py),
# [`training/hybrid.py`](../training/hybrid.py). Before: [8 · the trainable ring](08_the_fused_ring.ipynb) and
# [15 · documents and windows](15_documents_and_windows.ipynb).

# %%
# %matplotlib inline
import math

import torch

from basics.blockwise_attention import blockwise_attention
from basics.naive_attention import TOKENS
from basics.online_softmax import merge
from figures import tokens_to_heads
from notebooks import ways_workers
from notebooks.checks.the_other_ways_round import check_copies, check_kv_head, check_meshes, check_sent
from notebooks.show import print_source
from planning.hidden_communication import Layer
from planning.ways import Cluster, traffic, training_bytes
from support.processes import launch
from training import all_gather, all_to_all, hybrid, split_heads
from training.causal import LAYOUTS, positions, unshard
from training.masks import Mask

P = 4

# %% [markdown]
# ## The failure
#
# In a ring the keys travel to the queries. There seems to be a simpler way. Heads never meet in
# [attention](../GLOSSARY.md#attention). So let each rank compute some of the heads, for **all** tokens. While it computes,
# nothing travels.
#
# Here are our 8 tokens on 4 GPUs, with $H = 6$ query heads on $G = 2$ K/V heads
# ([grouped queries](../GLOSSARY.md#gqa)). Query head $h$ is the tokens, turned by $h \cdot 60°$. K/V head $g$ is the
# tokens, turned by $g \cdot 90°$. Query head $h$ uses K/V head ⌊h / (H/G)⌋ = ⌊h/3⌋.

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
k, v = (torch.stack([turned(90 * g) for g in range(G)])[None].requires_grad_() for _ in "kv")  # (1, 2, 8, 2)
causal = torch.ones(8, 8, dtype=torch.bool).tril()
right = attention(q, k, v, causal)
d_out = torch.randn(right.shape, generator=torch.Generator().manual_seed(0), dtype=right.dtype)
d_q, d_k, d_v = torch.autograd.grad(right, (q, k, v), d_out)
right, q, k, v = (x.detach() for x in (right, q, k, v))

# %% [markdown]
# Which heads does a rank take? 6 is not a multiple of 4. Code for equal parts gives $H // P = 1$ head to each rank, or
# it asks `torch.chunk` for 4 parts. And each rank needs a K/V head, but there are only 2 of them for 4 ranks. So a K/V
# head must be copied, and code often takes the head number `rank % G`:


# %%
def computed(shares: list[list[int]], kv_head) -> torch.Tensor:
    """out, when rank r computes the query heads shares[r], each with the K/V head kv_head(r, h)."""
    out = torch.zeros_like(q)
    for r, mine in enumerate(shares):
        for h in mine:
            g = kv_head(r, h)
            out[:, h] = attention(q[:, [h]], k[:, [g]], v[:, [g]], causal)[:, 0]
    return out


floor = [[r * (H // P)] for r in range(P)]
chunk = [part.tolist() for part in torch.arange(H).chunk(P)]
chunk += [[]] * (P - len(chunk))
even = [[0, 1], [2], [3, 4], [5]]
print("query heads of ranks 0 to 3       K/V head       out is off by")
for name, shares, rule, kv_head in (
    ("H // P", floor, "h // 3", lambda r, h: h // 3),
    ("chunk", chunk, "h // 3", lambda r, h: h // 3),
    ("2 or 1", even, "rank % G", lambda r, h: r % G),
    ("2 or 1", even, "h // 3", lambda r, h: h // 3),
):
    print(f"{name:<8}{' '.join(map(str, shares)):<26}{rule:<15}{off(computed(shares, kv_head), right):>10}")
print(f"\n40 heads on 16 ranks: H // P leaves out {40 - 16 * (40 // 16)} heads,", end=" ")
print(f"chunk gives heads to {len(torch.arange(40).chunk(16))} of 16 ranks")
assert torch.equal(computed(even, lambda r, h: h // 3), right)

# %% [markdown]
# In the first line nobody computes heads 4 and 5. In the second line rank 3 has nothing to do, and rank 1 needs two K/V
# heads. In the third line ranks 1 and 2 use the wrong keys. All results have the right shape, and no error is raised.
#
# The last line is right. Now the gradient. Ranks 0 and 1 have a copy of K/V head 0 each, and ranks 2 and 3 a copy of K/V
# head 1. Every copy gets a gradient of its own:

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
# The queries of all ranks add to the gradient of a key. So the gradients of copies must be **added**.
#
# ## The idea
#
# Two facts allow every way of this chapter:
#
# - **A query needs all keys, and no other query.** So share out the tokens, and let K and V travel: one block after the
#   other (ring) or all at once (all-gather).
# - **A head needs no other head.** So share out the heads, and let tokens travel: the all-to-all.
#
# **All ways begin and end with the same chunks.** Rank $r$ has all heads of the tokens
# `positions(layout, S, r, P)`, before and after. So a model can change its way, and its data loader stays as it is. From
# here on we use the zigzag layout and the causal mask:

# %%
at = [positions("zigzag", 8, r, P) for r in range(P)]  # the tokens of rank r
order = torch.cat(at)  # all tokens, in order of rank
print("tokens of ranks 0 to 3:", *(tokens.tolist() for tokens in at))

# %% [markdown]
# ## 1 · All-gather
#
# Each rank sends its K and V to all other ranks. Then it computes its own rows. The blocks arrive in order of rank, so
# the mask compares **positions**, as in chapter 7:

# %%
gathered = [
    [torch.cat([x[:, :, at[j]] for j in range(P)], dim=2).requires_grad_() for x in (k, v)]  # K and V of all ranks
    for r in range(P)  # as rank r has them
]
outs = [attention(q[:, :, at[r]], *gathered[r], visible=at[r][:, None] >= order) for r in range(P)]
assert torch.allclose(unshard(outs, "zigzag"), right, rtol=0, atol=1e-14)
print("all-gather: out is off by", off(unshard(outs, "zigzag"), right))

# %% [markdown]
# In the backward pass each rank finds a gradient of **its copy** of K. It holds what the rank's own queries add, for all
# 8 tokens. How large is it on each rank? Here for the block of rank 1, which holds tokens 1 and 6:

# %%
grads = [torch.autograd.grad(outs[r], gathered[r], d_out[:, :, at[r]]) for r in range(P)]  # dk, dv of the copies
parts = torch.stack([of_k for of_k, _ in grads])  # (P, 1, G, 8, 2): on each rank, for the tokens in order of rank
for r in range(P):
    print(f"rank {r} adds to dk of block 1: norm {parts[r][:, :, 2:4].norm():.4f}")

own = [parts[r][:, :, 2 * r : 2 * r + 2] for r in range(P)]  # each rank keeps what it found for its own block
total = [parts.sum(dim=0)[:, :, 2 * r : 2 * r + 2] for r in range(P)]  # reduce-scatter
print(f"dk is off by {off(unshard(own, 'zigzag'), d_k)} when each rank keeps its own part")
print(f"dk is off by {off(unshard(total, 'zigzag'), d_k)} after a reduce-scatter")
assert torch.allclose(unshard(total, "zigzag"), d_k, rtol=0, atol=1e-13)

# %% [markdown]
# The gradient of a gather is a [reduce-scatter](../GLOSSARY.md#reduce-scatter): **add** the parts of all ranks, and give
# each rank the sum for its own block. A gather whose backward pass does not add is a common mistake. Its `out` and dq are
# right.
#
# The price is memory. A rank of a ring holds two blocks at a time. Here it holds the blocks of all ranks: all $S$ tokens,
# on any number of ranks. So `training/all_gather.py` gathers one K/V head at a time, into two buffers. While it computes
# with one head, the next one arrives:

# %%
print_source(all_gather.arriving_heads, all_gather.AllGather.forward)

# %% [markdown]
# `ring_forward` is that of chapter 8. It asks a *schedule*: which block is next? `GatheredHead` is such a schedule. Its
# first block is the rank's own, which needs no message. All others come together.
#
# ## 2 · All-to-all
#
# Now the tokens travel. Rank $s$ sends to each rank $r$ the heads of rank $r$, of its own tokens. After that, rank $r$
# has few heads of all tokens:


# %%
def to_heads(x: torch.Tensor, shares: list[list[int]]) -> list[torch.Tensor]:
    """What each rank has after the exchange: its heads of all 8 tokens, in order of rank."""
    return [torch.cat([x[:, :, at[s]][:, shares[r]] for s in range(P)], dim=2) for r in range(P)]


keys = [[g] for g in owner]
received = list(zip(to_heads(q, even), to_heads(k, keys), to_heads(v, keys), strict=True))  # q, k, v of each rank
print("before:  rank 1 has tokens", at[1].tolist(), "of query heads", list(range(H)))
print("between: rank 1 has tokens", order.tolist(), "of query head ", *even[1])

# %% [markdown]
# The tokens arrive **in order of rank**. Without a mask that does no harm. With a causal mask, the layout must be undone
# first: put the tokens in order of the sequence. On the way back, each rank gets its own tokens, in its own order.

# %%
for name, index in (("order of rank", torch.arange(8)), ("order of the sequence", order.argsort())):
    tokens, out = order[index], torch.zeros_like(q)  # row i is token tokens[i]
    for mine, three in zip(even, received, strict=True):
        of_heads = attention(*(x[:, :, index] for x in three), causal)  # (1, n, 8, 2)
        out[:, mine] = of_heads[:, :, tokens.argsort()]  # back: each row to its token
    print(f"{name:<21} {tokens.tolist()}: out is off by {off(out, right)}")
assert torch.allclose(out, right, rtol=0, atol=1e-14)

# %% [markdown]
# The same in a picture. A colour is a rank. A cell is one head of one token:

# %%
tokens_to_heads.draw()

# %% [markdown]
# Every rank has all 8 tokens of its heads, so the work of the causal mask is balanced in any layout.
#
# Which heads does rank $r$ get? `heads_of_ranks` cuts the query heads so that no rank has more than ⌈H/P⌉. Where $G$
# divides $P$, it cuts each K/V head's group of query heads by itself. Then a rank needs one K/V head only: ⌊r·G/P⌋.

# %%
print_source(split_heads.heads_of_ranks)
shares = list(zip(*split_heads.heads_of_ranks(H, G, P), strict=True))
for r, (mine, its_keys) in enumerate(shares):
    print(f"rank {r}: query heads {list(range(H))[mine]}, K/V heads {list(range(G))[its_keys]}")
assert [list(range(H))[mine] for mine, _ in shares] == even
assert [its_keys.start for _, its_keys in shares] == owner == [r * G // P for r in range(P)]

# %% [markdown]
# The way back, `Exchange.to_tokens`, brings `out` home. In the backward pass it brings dq, dk and dv home. Its `+=` adds
# what comes for copies of a head:

# %%
print_source(all_to_all.Exchange.to_tokens, all_to_all.exchanged_attention)

# %% [markdown]
# In the middle stands `FlashRing` of chapter 8. Its schedule is that of a rank that is alone: one block, its own, of all
# tokens. More ranks than heads are refused:

# %%
try:
    split_heads.heads_of_ranks(6, 2, 8)
except ValueError as error:
    print(error)

# %% [markdown]
# ## 3 · Hybrid
#
# The message names the cure: a [mesh](../GLOSSARY.md#mesh) of $b$ rows with $a$ ranks each, $P = a \cdot b$. Rank
# $h \cdot a + i$ is number $i$ of row $h$.
#
# - **Inside a row**, the ranks exchange tokens for heads. Number $i$ then has its heads, of all tokens of its row.
# - **Across the rows**, the numbers $i$ of all rows form a ring. K and V of these heads go round, in $b - 1$ hops.
#
# In our example, 2 rows of 2: each rank has 3 query heads on 1 K/V head. No head needs a copy.
#
# In what order are the tokens of a row? A row joins the chunks of its ranks, and sorts them. Is the result again a
# layout, that of a ring of $b$?

# %%
rows, inside = 2, 2
for layout in LAYOUTS:
    joined = [torch.cat([positions(layout, 8, row * inside + i, P) for i in range(inside)]) for row in range(rows)]
    joined = [tokens.sort().values.tolist() for tokens in joined]
    of_rows = [positions(layout, 8, row, rows).tolist() for row in range(rows)]
    print(f"{layout:<10} a row holds {joined[0]} and {joined[1]}; the layout of 2: {of_rows[0]} and {of_rows[1]}")
    assert (joined == of_rows) == (layout != "striped")

# %% [markdown]
# Contiguous and zigzag are. **Striped is not**: the stripes of a row lie side by side. Its mask needs pieces of its own.
# Take the queries 2, 3, 6, 7 of row 1 and the keys 0, 1, 4, 5 of row 0's block. Queries 2 and 3 see keys 0 and 1,
# queries 6 and 7 see all four keys. Such a staircase has steps of $a$ tokens. But each **stripe** of queries, such as 2
# and 6, sees a triangle of each stripe of keys, such as 0 and 4. So $a \cdot a$ triangles are the whole mask:

# %%
print_source(hybrid.joined_rows, hybrid.Stripes.pieces)


# %%
def hybrid_in_one_process(mask: Mask, tokens: list[torch.Tensor]) -> torch.Tensor:
    """Rings of rows, where row number `row` holds `tokens[row]`. `mask` says what a row computes of a block."""
    result = torch.zeros_like(q)
    for i, heads in enumerate([slice(0, 3), slice(3, 6)]):  # number i of each row; it has K/V head i
        for row in range(rows):
            mine = q[:, heads, tokens[row]]
            out, lse = torch.zeros_like(mine), torch.full(mine.shape[:3], -torch.inf, dtype=q.dtype)
            for t in range(rows):
                block = tokens[(row - t) % rows]
                for piece in mask.pieces(row, (row - t) % rows):
                    seen = (x[:, [i] * 3][:, :, block[piece.keys]] for x in (k, v))
                    part = blockwise_attention(mine[:, :, piece.queries], *seen, block_size=8, causal=piece.triangle)
                    whole = out[:, :, piece.queries], lse[:, :, piece.queries]
                    out[:, :, piece.queries], lse[:, :, piece.queries] = merge(*whole, *part)
            result[:, heads, tokens[row]] = out
    return result


print("out is off by              joined rows   as if it were the layout of 2")
for layout in LAYOUTS:
    mask = hybrid.joined_rows(Mask(layout, (2,) * P, causal=True), rows)
    tokens = [mask.place(row) for row in range(rows)]
    outs = [hybrid_in_one_process(each, tokens) for each in (mask, Mask(layout, (4,) * rows, causal=True))]
    print(f"{layout:<20}" + "".join(f"{off(out, right):>18}" for out in outs))
    assert torch.allclose(outs[0], right, rtol=0, atol=1e-14)

# %% [markdown]
# ## On four processes
#
# Every way, on the same chunks, in float64, forward and backward. The worker tries each way in each layout:

# %%
print_source(ways_workers.every_way)

# %%
ranks = launch(ways_workers.every_way, P, list(LAYOUTS), [q, k, v, d_out], device="cpu")
for way, layout in ranks[0]:
    four = zip(*(mine[way, layout] for mine in ranks), strict=True)
    for chunks, exact in zip(four, (right, d_q, d_k, d_v), strict=True):
        assert torch.allclose(unshard(list(chunks), layout), exact, rtol=0, atol=1e-13)
    if layout == LAYOUTS[-1]:
        print(f"{way:<10} out, dq, dk and dv are those of full attention, in {len(LAYOUTS)} layouts")

# %% [markdown]
# ## What each way costs
#
# What a rank sends in a forward pass, in numbers, where $a$ divides $H$ and $G$ (all-to-all: $a = P$):
#
# | way | sends | needs | holds of K and V |
# | --- | --- | --- | --- |
# | ring | $(P-1) \cdot 2G \cdot CD$ | | two blocks of $C$ tokens |
# | all-gather | $(P-1) \cdot 2G \cdot CD$ | | two buffers for one head of all $S$ tokens |
# | all-to-all | $\frac{P-1}{P} \cdot 2(H+G) \cdot CD$ | $P \le H$ | $G/P$ heads of all $S$ tokens: as much as one block |
# | hybrid, $b$ rows of $a$ | $\frac{a-1}{a} \cdot 2(H+G) \cdot CD + (b-1) \cdot 2G \cdot CD$ | $a \le H$ | two blocks of $aC$ tokens, $G/a$ heads |
#
# - **Ring and gather** send more with every rank. **All-to-all** sends less than $2(H+G)$ heads of the rank's tokens, on any
#   number of ranks.
# - **What is hidden?** The hops of a ring travel while the rank computes. The gather of the first head does not, and
#   nothing of an exchange does.
# - **The ring of a hybrid** sends as many bytes in a hop as the flat ring: $aC$ tokens of $G/a$ heads. But it computes $a$
#   times as long between two hops. So its hops are hidden with shorter chunks.
#
# In numbers: 16 GPUs, $S$ = 131,072, $D$ = 128, bfloat16. `traffic` and `training_bytes` count what the code of each way
# sends and holds. The formulas of the table agree with them where $a$ divides $H$ and $G$:

# %%
cluster = Cluster(hosts=1, per_host=16, flops=990e12, bandwidth=450e9)
C, D, w = 131_072 // 16, 128, 2
for heads, kv_heads in ((64, 16), (40, 8)):
    layer = Layer(heads, kv_heads, D, w)
    print(f"{heads} query heads on {kv_heads}     sent forward   sent backward   held in training")
    for way, inside in (("ring", None), ("all-gather", None), ("all-to-all", None), ("hybrid", 8), ("hybrid", 4)):
        sent = [traffic(way, layer, C, cluster, backward=back, inside=inside)[0] for back in (False, True)]
        held = training_bytes(way, layer, C, cluster, inside=inside)
        name = f"{way} {16 // inside} x {inside}" if inside else way
        print(f"    {name:<17}" + "".join(f"{x / 1e6:>13,.0f} MB" for x in (*sent, held)))
        a = {"hybrid": inside, "all-to-all": 16}.get(way, 1)
        if kv_heads % a == 0:
            assert sent[0] == ((a - 1) / a * 2 * (heads + kv_heads) + (16 // a - 1) * 2 * kv_heads) * C * D * w

# %% [markdown]
# With 40 heads, all-to-all gives 3 heads to the busiest rank, where the average is 2.5. So it takes 1.2 times as long.
# The hybrid of 2 x 8 gives 5 heads to every rank, and no K/V head is copied.
#
# **When which?** If the chunks are long enough to hide the hops (chapter 9), take the ring: it needs no heads to divide,
# and the least memory grows with nothing but $C$. If chunks are short and $P \le H$, take all-to-all: it sends the fewest
# bytes. If there are more ranks than heads, take the hybrid. All-gather is the simplest, and any mask fits it, because
# each rank has whole rows of keys. It is good where K and V are small: few K/V heads, and a moderate $S$. All of this
# holds when all links are equally fast. Between hosts they are slower: that is chapter 20.
#
# > **One number to remember: $H$**, the number of query heads. Heads can be exchanged among $H$ ranks at most. More ranks
# > than that must share the tokens: by a ring, by a gather, or by a hybrid.
#
# ## Questions
#
# <details><summary>With all-to-all, does the causal mask still need the zigzag layout?</summary>
#
# No. Between the exchanges a rank has all tokens of its heads, so every layout is balanced. Contiguous chunks are
# simplest then: they arrive in order. A hybrid needs zigzag or striped again, because its rows form a ring.
# </details>
#
# <details><summary>I have 40 heads and 16 GPUs. Shall I pad with 8 heads of zeros, so that they divide?</summary>
#
# The result is right. But each rank then computes 3 heads, as the busiest rank does without padding. So it is no faster,
# and the zeros are sent too. 2 rows of 8 are better: 5 heads on each rank, and nothing to pad.
# </details>
#
# <details><summary>Llama 3 was trained with an all-gather of K and V. Why not with a ring?</summary>
#
# Its report (section 3.3.2) names two reasons. Masks of packed documents are easier, because a rank has all keys. And
# with grouped queries K and V are much smaller than Q, so the gather takes little time beside the computing, which
# grows with $S^2$.
# </details>
#
# ## Your turn


# %%
# All-to-all on P ranks, where G divides P and each K/V head's query heads stay together. Which K/V head does rank r need?
def my_kv_head(r, G, P):
    return ...


print(check_kv_head(my_kv_head))


# %%
# The gradients of the copies: copies (P, B, S, D), where copies[r] is dk of the K/V head that rank r has a copy of.
# Return dk of the G K/V heads: (B, G, S, D). (G divides P.)
def my_dk(copies, G):
    return ...


print(check_copies(my_dk))


# %%
# How many bytes does a rank send in the forward pass of an all-to-all? P divides G. A number has `itemsize` bytes.
def my_sent(P, H, G, C, D, itemsize):
    return ...


print(check_sent(my_sent))


# %%
# A hybrid on P ranks. On which meshes does every rank compute as many query heads as any other, without a copy of a K/V
# head? A list of (rows, ranks of a row). Rows of 1 rank, and a single row, count too.
def my_meshes(P, H, G):
    return ...


print(check_meshes(my_meshes))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_kv_head(r, G, P):
#     return r * G // P
#
# def my_dk(copies, G):
#     return copies.unflatten(0, (G, -1)).sum(dim=1).transpose(0, 1)
#
# def my_sent(P, H, G, C, D, itemsize):
#     return (P - 1) * (2 * H + 2 * G) // P * C * D * itemsize
#
# def my_meshes(P, H, G):
#     return [(P // a, a) for a in range(1, P + 1) if P % a == 0 and G % a == 0]
# ```
# </details>
#
# Read [`training/all_gather.py`](../training/all_gather.py), [`training/all_to_all.py`](../training/all_to_all.py) and
# [`training/hybrid.py`](../training/hybrid.py) now. Next: [20 · two speeds of wire](20_two_speeds_of_wire.ipynb).
