# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7 · Under a causal mask: who waits, and the cure
#
# A language model looks back only. Under a [causal mask](../docs/glossary.md#causal-mask) a token sees itself and earlier
# tokens. Half of the work is gone, and yet the ring hardly gets faster. After this chapter you can
#
# - say which [ranks](../docs/glossary.md#rank) wait, and for how long,
# - distribute the tokens in such a way that no rank waits,
# - name three things that must follow that [layout](../docs/glossary.md#layout).
#
# The road, 7 of 8. You need [4 · the ring](04_the_ring.ipynb); next comes [8 · the trainable
# ring](08_the_trainable_ring.ipynb). 19 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import torch
from ipywidgets import interact

from figures import causal_layouts
from notebooks.source.checks.gradients_and_balance import check_striped_mask, check_zigzag_positions
from notebooks.source.show import print_source
from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.basics.online_softmax import merge
from ringlab.ring.causal import idle_share, visible_pairs, visible_slice
from ringlab.ring.layouts import LAYOUTS, NAMED, pad, positions, rotary

P = 4
x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2): queries, keys and values
exact = naive_attention(x, x, x, causal=True)

# %% [markdown]
# ## The failure
#
# Rank 0 holds tokens 0 and 1, rank 1 holds tokens 2 and 3, and so on. In [round](../docs/glossary.md#round) $t$, rank $r$
# computes on [block](../docs/glossary.md#block) $(r - t) \bmod P$. How many (query, key) pairs does the mask leave to it? A
# round lasts until its busiest rank is done, because the other ranks wait for its block. The last column is that time,
# counted in pairs. `at[r]` says where the tokens of rank r stand; `idle_share` is the share of the time in which ranks wait.

# %%
print_source(visible_pairs, idle_share)


# %%
def table(pairs: torch.Tensor) -> None:
    print("       " + "".join(f"{f'rank {r}':>8}" for r in range(pairs.shape[1])) + "    lasts")
    for t, row in enumerate(pairs.tolist()):
        print(f"round {t}" + "".join(f"{n:>8}" for n in row) + f"{max(row):>9}")
    print(f"idle: {100 * idle_share(pairs):.1f}% of the time")


contiguous = [torch.tensor([2 * r, 2 * r + 1]) for r in range(P)]
table(visible_pairs(contiguous))
assert abs(idle_share(visible_pairs(contiguous)) - 0.40) < 1e-6

# %% [markdown]
# Rank 0 computes in round 0 and never again. Rank 3 has a full block in every later round.
#
# Do longer sequences help? Let a [chunk](../docs/glossary.md#chunk) have $C$ tokens. Round 0 takes $C(C+1)/2$ pairs on every
# rank, a triangle. Each later round takes $C^2$ pairs, because rank $P - 1$ always has a full block. So all rounds
# together last as long as $C(C+1)/2 + (P-1)C^2$ pairs. There are $PC(PC+1)/2$ pairs of work in all, for $P$ ranks. The
# idle share is therefore
#
# $$1 - \frac{PC(PC+1)/2}{P\,\bigl(C(C+1)/2 + (P-1)\,C^2\bigr)} = \frac{(P-1)\,C}{(2P-1)\,C + 1} \;\longrightarrow\;
# \frac{P-1}{2P-1} \quad \text{for long chunks.}$$

# %%
C = 64
print("     with the mask / without")
print("  P     work     time       idle   its limit")
for world_size in (2, 4, 8):
    pairs = visible_pairs(list(torch.arange(C * world_size).chunk(world_size)))
    work = pairs.sum() / (C * world_size) ** 2
    time = pairs.max(dim=1).values.sum() / (world_size * C**2)
    idle, limit = idle_share(pairs), (world_size - 1) / (2 * world_size - 1)
    print(f"{world_size:>3}{100 * work:>8.1f}%{100 * time:>8.1f}%{100 * idle:>10.1f}%{100 * limit:>9.1f}%")
    assert abs(work - 1 / 2) < 0.01
    assert abs(time - (1 - 1 / (2 * world_size))) < 0.01  # an eighth less with 4 ranks, a sixteenth less with 8
    assert abs(idle - (world_size - 1) * C / ((2 * world_size - 1) * C + 1)) < 1e-6

# %% [markdown]
# The mask removes half of the work. With 4 ranks it removes only an eighth of the time, and with 8 ranks a sixteenth.
#
# ## The idea
#
# Early tokens see few keys, and late tokens see many. **Give every rank some of both.**
#
# - **[zigzag](../docs/glossary.md#zigzag-layout)**: cut the sequence into $2P$ half chunks. Rank $r$ holds the half chunks
#   $r$ and $2P-1-r$, one early and one late.
# - **[striped](../docs/glossary.md#striped-layout)**: distribute the tokens one by one (round-robin). Rank $r$ holds tokens
#   $r, r+P, r+2P, \dots$
#
# The old layout is called **[contiguous](../docs/glossary.md#contiguous-layout)**. Each of the three is a function of a line
# or two, which says where in the sequence the tokens of a rank stand. `positions` calls them by name.

# %%
print_source(*[layout.positions for layout in NAMED.values()])

# %%
at = {layout: [positions(layout, 8, r, P) for r in range(P)] for layout in LAYOUTS}
for layout in ("zigzag", "striped"):
    print(f"{layout}: ranks 0 to 3 hold", *[tokens.tolist() for tokens in at[layout]])
    table(visible_pairs(at[layout]))
    print()
assert idle_share(visible_pairs(at["zigzag"])) == 0

# %% [markdown]
# In zigzag no rank waits. In striped they wait, because our chunks are so short: see below.
#
# In each layout every rank still meets every block. But the mask leaves another part of each block to each rank (the
# picture below shows them):
#
# | layout | $j = r$ | $j < r$ | $j > r$ |
# | --- | --- | --- | --- |
# | contiguous | a triangle | the whole block, $C^2$ pairs | nothing |
# | zigzag | a triangle | all queries, the first half of the keys: $C^2/2$ pairs | the last half of the queries, all keys: $C^2/2$ pairs |
# | striped | a triangle | a triangle with its diagonal: $C(C+1)/2$ pairs | a triangle without its diagonal: $C(C-1)/2$ pairs |
#
# The ring computes only these parts. `visible_slice` writes the table as code: it returns a slice of the rank's queries,
# a slice of the block's keys, and whether a triangle of them is left; or None. `merge` of chapter 1 puts the parts
# together, for the queries that took part:


# %%
def causal_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> torch.Tensor:
    """The causal ring in one process, for tokens (1, 1, S, D) in their order; returns out in that order."""
    S = q.shape[2]
    at = [positions(layout, S, r, P) for r in range(P)]
    result = torch.empty_like(q)
    for r in range(P):
        for t in range(P):
            j = (r - t) % P
            visible = visible_slice(layout, r, j, S // P)
            if visible is None:
                continue
            rows, keys, triangle = visible
            part = q[:, :, at[r]][:, :, rows], k[:, :, at[j]][:, :, keys], v[:, :, at[j]][:, :, keys]
            out_j, lse_j = blockwise_attention(*part, block_size=S, causal=triangle)
            if t == 0:  # its own block: every query sees at least itself
                out, lse = out_j, lse_j
            else:
                out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], out_j, lse_j)
        result[:, :, at[r]] = out
    return result


for layout in LAYOUTS:
    out = causal_ring(x, x, x, layout)
    assert torch.allclose(out, exact, rtol=0, atol=1e-14)
    print(f"{layout:<10} is causal attention; token 7: {out[0, 0, 7].numpy().round(4)}")

# %% [markdown]
# ## The picture
#
# The same with 16 tokens. Colours are blocks. Every layout has the same number of coloured cells. The layouts differ in
# how many of them a rank has in each round.

# %%
causal_layouts.draw()
# %% [markdown]
# How much does zigzag gain? For long chunks all its rounds last $P \cdot C^2/2$ pairs, where those of the contiguous layout last
# $(2P-1) \cdot C^2/2$. **So it is $(2P-1)/P$ times as fast**: 1.75 times on 4 ranks, 1.88 times on 8, never quite twice.
#
# The striped triangles differ by their diagonal. So after round 0 some ranks have $C$ pairs more than others, and the
# idle share is $(P-1)/(P\,(C+1))$. For 16 tokens on 4 ranks that is much. For long chunks it vanishes:

# %%
for C in (4, 64, 256):
    idle = {layout: idle_share(visible_pairs([positions(layout, P * C, r, P) for r in range(P)])) for layout in LAYOUTS}
    print(f"P = 4, C = {C:>3}: idle " + ", ".join(f"{layout} {100 * share:.1f}%" for layout, share in idle.items()))
    assert abs(idle["striped"] - (P - 1) / (P * (C + 1))) < 1e-6
    assert abs(idle["zigzag"]) < 1e-6
    gain = (1 - idle["zigzag"]) / (1 - idle["contiguous"])  # the same work, no idle time
    assert abs(gain - (2 * P - 1) / P) < 1.1 / C


# %% [markdown]
# Try other sizes. (Sliders need a running kernel. S is rounded up to a multiple of 2P, which suits all three layouts.)


# %%
def explore(P: int, S: int, layout: str) -> None:
    S += -S % (2 * P)
    table(visible_pairs([positions(layout, S, r, P) for r in range(P)]))


_ = interact(explore, P=(1, 8), S=(8, 512, 8), layout=list(LAYOUTS))
# %% [markdown]
# ## What must follow the layout
#
# The ring does not know which tokens it holds. Three things depend on a token's **place in the sequence**, so you must
# give them the layout.
#
# **1. Positions.** A [rotary embedding](../docs/glossary.md#rotary-embedding), `rotary(x, position)`, turns each query and key
# by an angle that grows with its position. A rank that counts its tokens from $rC$ on, as if chunks were contiguous,
# takes the wrong angles. No error is raised.

# %%
in_place = rotary(x, torch.arange(8))
right = naive_attention(in_place, in_place, x, causal=True)
for name, place in {
    "positions of the layout": at["zigzag"],
    "positions rC, rC + 1, ...": at["contiguous"],
}.items():
    turned = torch.empty_like(x)
    for r in range(P):
        turned[:, :, at["zigzag"][r]] = rotary(x[:, :, at["zigzag"][r]], place[r])
    off = (causal_ring(turned, turned, x, "zigzag") - right).abs().max()
    print(f"zigzag, {name:<25} off by {off:.4f}")
    assert (off < 1e-14) == (name == "positions of the layout")

# %% [markdown]
# **2. Labels.** The label of token $i$ is token $i + 1$ of the *sequence*. So shift first, and distribute the labels
# after that. In a zigzag chunk the next token may be far away.
#
# **3. Padding.** Zigzag needs a multiple of $2P$ tokens, so short sequences are padded with zeros. Put them on the
# **right**, and use a causal mask: then they lie in the future of all real tokens. On the left, or without a mask,
# every query sees them, because a key of zeros has the [score](../docs/glossary.md#score) 0, not $-\infty$.

# %%
seven = x[:, :, :7]
exact_seven = naive_attention(seven, seven, seven, causal=True)
padded = pad(seven, 2 * P)  # 8 tokens, the last one zero
on_the_left = torch.nn.functional.pad(seven, (0, 0, 1, 0))
for name, out, wanted in (
    ("on the right, causal", causal_ring(padded, padded, padded, "zigzag")[:, :, :7], exact_seven),
    ("on the left, causal", causal_ring(on_the_left, on_the_left, on_the_left, "zigzag")[:, :, 1:], exact_seven),
    ("on the right, no mask", naive_attention(padded, padded, padded)[:, :, :7], naive_attention(seven, seven, seven)),
):
    off = (out - wanted).abs().max()
    print(f"7 tokens and a zero {name:<22} off by {off:.4f}")
    assert off < 1e-14 if name == "on the right, causal" else off > 0.01

# %% [markdown]
# > **One number to remember: $(P-1)/(2P-1)$.** For this share of the time contiguous chunks wait under a causal mask: a
# > third with 2 ranks, nearly half with many. With zigzag it is 0.
#
# ## Questions
#
# <details><summary>Could contiguous chunks catch up if the ranks did not wait for each other in every round?</summary>
#
# No. Rank $P-1$ has a triangle and $P-1$ full blocks to compute. That takes as long as all rounds together: it never
# waits. Only giving a part of its work to other ranks helps.
# </details>
#
# <details><summary>Zigzag or striped?</summary>
#
# Both are good. In zigzag all ranks have exactly the same work, and after round 0 their parts are rectangles, which
# need no mask. It needs a multiple of $2P$ tokens. Striped needs a multiple of $P$. All its parts are triangles, so the
# kernel must mask in every round.
# </details>
#
# <details><summary>In the striped layout the first query of rank 0 sees nothing of blocks 1, 2 and 3. What must the code take care of?</summary>
#
# A softmax over no keys is $0/0$. `visible_slice` leaves that query out. Code that masks instead must return 0 for a
# [fully masked row](../docs/glossary.md#fully-masked-row), and $-\infty$ as its log-sum-exp. Then merging leaves the row as
# it was.
# </details>
#
# ## Your turn


# %%
# The zigzag layout: where in the sequence do the tokens of `rank` stand? A rising list.
# (seq_len is a multiple of 2 * P.)
def my_zigzag(rank, seq_len, P):
    return ...


print(check_zigzag_positions(my_zigzag))


# %%
# The striped layout: which pairs does the mask leave to `rank` when it computes on `block`?
# A (C, C) tensor of bool, a row for each query, True where the query sees the key
def my_striped_mask(rank, block, C):
    return ...


print(check_striped_mask(my_striped_mask))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_zigzag(rank, seq_len, P):
#     half = seq_len // (2 * P)
#     late = 2 * P - 1 - rank
#     return [*range(rank * half, (rank + 1) * half), *range(late * half, (late + 1) * half)]
#
# def my_striped_mask(rank, block, C):
#     return torch.ones(C, C, dtype=torch.bool).tril(0 if block <= rank else -1)
# ```
# </details>
#
# Open [`causal.py`](../ringlab/ring/causal.py) now: it has `visible_slice`, and counts the pairs of this page.
# Next: [8 · the trainable ring](08_the_trainable_ring.ipynb).
