# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7 · Under a causal mask: who idles, and the cure
#
# A language model looks only back: key $j$ is hidden from query $i$ when $j > i$. Half of the work is gone, and yet the ring
# hardly gets faster. After this chapter you can say who waits and how long, and give the tokens to the ranks so that nobody
# does.
#
# 20 minutes. The code: [`training/causal.py`](../training/causal.py). Before: [4 · the ring](04_the_ring.ipynb).

# %%
# %matplotlib inline
import torch
from ipywidgets import interact

from basics.naive_attention import TOKENS, naive_attention
from figures import causal_layouts
from figures import visible_pairs as visible_pairs_picture
from notebooks.checks.causal_balance import check_idle_limit, check_striped_mask, check_zigzag_positions
from training.causal import (
    LAYOUTS,
    idle_share,
    pad,
    positions,
    rotary,
    shard,
    simulate_causal_ring,
    unshard,
    visible_pairs,
    visible_slice,
)

P = 4
x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2): queries, keys and values
exact = naive_attention(x, x, x, causal=True)

# %% [markdown]
# ## The failure
#
# Rank 0 holds tokens 0 and 1, rank 1 holds 2 and 3, and so on. In round $t$ rank $r$ computes on block $j = (r - t) \bmod P$. How
# many (query, key) pairs does the mask leave it? The last column is the time of the round, in pairs.


# %%
def table(layout: str, seq_len: int, world_size: int) -> None:
    pairs = visible_pairs(layout, seq_len, world_size)
    print("       " + "".join(f"{f'rank {rank}':>8}" for rank in range(world_size)) + "    lasts")
    for t, row in enumerate(pairs.tolist()):
        print(f"round {t}" + "".join(f"{n:>8}" for n in row) + f"{max(row):>9}")
    print(f"{layout}, S = {seq_len}, P = {world_size}: idle {100 * idle_share(pairs):.1f}% of the time")


table("contiguous", 8, P)
assert abs(idle_share(visible_pairs("contiguous", 8, P)) - 0.40) < 1e-12

# %% [markdown]
# Rank 0 works in round 0 and never again: all other blocks lie in its future. Rank 3 has a full block in all later rounds. A round
# lasts until its busiest rank is done, because the next block has to come from a neighbour.
#
# Longer sequences do not help. Round 0 is a triangle of $C(C+1)/2$ pairs everywhere; each later round takes the $C^2$ pairs of a
# full block, on rank $P-1$ at least. There are $S(S+1)/2$ pairs in all, on $P$ ranks, so the idle share is
#
# $$1 - \frac{PC(PC+1)/2}{P\,\bigl(C(C+1)/2 + (P-1)\,C^2\bigr)} = \frac{(P-1)\,C}{(2P-1)\,C + 1} \;\longrightarrow\;
# \frac{P-1}{2P-1} \quad \text{for long chunks } C.$$

# %%
for world_size in (2, 4, 8, 16):
    for C in (2, 16, 256):
        idle = idle_share(visible_pairs("contiguous", C * world_size, world_size))
        assert abs(idle - (world_size - 1) * C / ((2 * world_size - 1) * C + 1)) < 1e-12
    limit = (world_size - 1) / (2 * world_size - 1)
    print(f"P = {world_size:>2}: {100 * idle:.1f}% idle with C = {C}, the limit is {100 * limit:.1f}%")

# %% [markdown]
# So 3/7 of the time with 4 ranks, and one half in the limit of many. Without a mask the $P$ rounds would take the time of
# $P C^2$ pairs; with it they take that of about $(P - \tfrac12)\,C^2$. With 4 ranks the mask removed about half of the pairs
# and an eighth of the time.
#
# ## The idea
#
# Early tokens see little and late tokens see much. **Give every rank some of both.**
#
# - **zigzag**: cut the sequence into $2P$ half chunks; rank $r$ holds the halves $r$ and $2P-1-r$, an early one and a late one.
# - **striped**: deal the tokens out like cards; rank $r$ holds $r, r+P, r+2P, \dots$

# %%
for layout in ("zigzag", "striped"):
    print("held by ranks 0 to 3:", *[positions(layout, 8, rank, P).tolist() for rank in range(P)])
    table(layout, 8, P)
    print()
assert idle_share(visible_pairs("zigzag", 8, P)) == 0

# %% [markdown]
# Every rank still meets every block, but the mask cuts a different part out of each meeting. `visible_slice` says which: some queries, some
# keys, and whether the rest is a triangle. Here is the whole mask, rows and columns in the order in which the ranks hold the
# tokens:


# %%
def show(layout: str) -> None:
    at = [positions(layout, 8, rank, P) for rank in range(P)]
    print(f"{layout}" + " " * (21 - len(layout)) + "  ".join(f"KV{j}" for j in range(P)))
    for rank in range(P):
        tiles = []
        for j in range(P):
            computed = torch.zeros(2, 2, dtype=torch.bool)
            if (visible := visible_slice(layout, rank, j, [2] * P)) is not None:
                square = computed[visible.queries, visible.keys]  # a view
                square |= torch.ones_like(square).tril() if visible.triangle else True
            assert torch.equal(computed, at[j] <= at[rank][:, None])  # the mask, no more and no less
            tiles.append(computed)
        for i, token in enumerate(at[rank].tolist()):
            marks = "   ".join("".join(".#"[seen] for seen in tile[i].tolist()) for tile in tiles)
            print(f"rank {rank}, query {token}:    {marks}")


for layout in LAYOUTS:
    show(layout)
    print()

# %% [markdown]
# With its own block ($j = r$) each rank has the usual triangle. With another:
#
# - **contiguous**: all of the block ($j < r$) or nothing ($j > r$).
# - **zigzag**: for $j < r$ all queries see the first half of the block. For $j > r$ the last half of the queries sees all of
#   it. Both are rectangles of $C^2/2$ pairs, on each rank in each round.
# - **striped**: a triangle, for $j < r$ with its diagonal and for $j > r$ without it: $C(C+1)/2$ pairs or $C(C-1)/2$.
#
# Computing only these parts gives causal attention, in each layout. `simulate_causal_ring` runs the ring in one process:

# %%
for layout in LAYOUTS:
    out = simulate_causal_ring(x, x, x, layout, P)
    assert torch.allclose(out, exact, rtol=0, atol=1e-14)
    print(f"{layout:<10} is causal attention; token 7: {out[0, 0, 7].numpy().round(4)}")

# %% [markdown]
# ## The picture
#
# The same with 16 tokens. Colours are blocks. Every layout has the same number of coloured cells; what differs is how many are in a
# rank's row of tiles, round by round.

# %%
causal_layouts.draw()
# %% [markdown]
# The striped triangles differ by their diagonal, so after round 0 some ranks have $C$ pairs more than the others. That costs 15% of
# the time for $C = 4$, and next to nothing for a real chunk: the idle share is $(P-1)/(P\,(C+1))$. All numbers of a short and of a
# longer sequence:

# %%
for world_size in (2, 4, 8):
    for C in (2, 16, 256):
        idle = idle_share(visible_pairs("striped", C * world_size, world_size))
        assert abs(idle - (world_size - 1) / (world_size * (C + 1))) < 1e-12
        assert idle_share(visible_pairs("zigzag", C * world_size, world_size)) == 0

visible_pairs_picture.draw()


# %% [markdown]
# Try other sizes (sliders need a running kernel). S is rounded up to a multiple of 2P, which suits all three layouts.


# %%
def explore(P: int, S: int, layout: str) -> None:
    table(layout, S + -S % (2 * P), P)


_ = interact(explore, P=(1, 8), S=(8, 512, 8), layout=list(LAYOUTS))
# %% [markdown]
# ## What must follow the layout
#
# The ring itself does not know which tokens it holds. Whatever depends on a token's **place in the sequence** has to be told.
# Rotary embeddings, for one: they turn queries and keys by an angle that grows with the position. A rank that counts its tokens
# from $rC$ on, as if chunks were contiguous, turns them by the wrong angles.

# %%
turned = rotary(x, torch.arange(8))
right_answer = naive_attention(turned, turned, x, causal=True)
for name, place in {
    "positions of the layout": lambda rank: positions("zigzag", 8, rank, P),
    "positions rC, rC + 1, ...": lambda rank: torch.arange(2 * rank, 2 * rank + 2),
}.items():
    chunks = [rotary(shard(x, "zigzag", rank, P), place(rank)) for rank in range(P)]
    turned = unshard(chunks, "zigzag")
    off = (simulate_causal_ring(turned, turned, x, "zigzag", P) - right_answer).abs().max()
    print(f"zigzag, {name:<25} off by {off:.4f}")
    assert (off < 1e-14) == (name == "positions of the layout")

# %% [markdown]
# The labels of a language model are another: the next token is `tokens[i + 1]` of the *sequence*, so shift first and share out
# then. The neighbour in a zigzag chunk may be far away.
#
# And padding. Zigzag wants a multiple of $2P$ tokens. Under a causal mask zeros on the **right** are free: they lie in the future of
# all real tokens. On the left, or without a mask, every query would see them, and a zero key has the score 0, not
# $-\infty$.

# %%
seven = x[:, :, :7]
exact_seven = naive_attention(seven, seven, seven, causal=True)
padded = pad(seven, 2 * P)  # 8 tokens, the last one zero
off = (simulate_causal_ring(padded, padded, padded, "zigzag", P)[:, :, :7] - exact_seven).abs().max()
print(f"7 tokens and a zero on the right, causal: off by {off:.4f}")
assert off < 1e-14

on_the_left = torch.nn.functional.pad(seven, (0, 0, 1, 0))
off = (simulate_causal_ring(on_the_left, on_the_left, on_the_left, "zigzag", P)[:, :, 1:] - exact_seven).abs().max()
print(f"a zero on the left, causal:               off by {off:.4f}")
assert off > 0.1

off = (naive_attention(padded, padded, padded)[:, :, :7] - naive_attention(seven, seven, seven)).abs().max()
print(f"a zero on the right, no mask:             off by {off:.4f}")
assert off > 0.01

# %% [markdown]
# > **One number to remember: $(P-1)/(2P-1)$.** That is the share of the time for which contiguous chunks idle under a causal mask: a third
# > for 2 ranks, 43% for 4, a half for many. With zigzag it is 0, so the ring is up to $(2P-1)/P$ times as fast.
#
# ## Questions
#
# <details><summary>Could contiguous chunks catch up if ranks did not wait for each other, round by round?</summary>
#
# No. Rank $P-1$ has a triangle and $P-1$ full blocks to compute, which is just as long as all rounds together. It never waits.
# The only cure is to give some of its work to others.
# </details>
#
# <details><summary>Zigzag or striped?</summary>
#
# Both are good. Zigzag is even to the pair, and after round 0 its parts are rectangles, which need no mask; it wants a multiple of
# $2P$ tokens. Striped wants a multiple of $P$, and every part is a triangle, with or without its diagonal, so its kernel must mask
# in all rounds.
# </details>
#
# <details><summary>In the striped layout rank 0's first query sees nothing of blocks 1, 2 and 3. What must the code take care
# of?</summary>
#
# A softmax over no keys is $0/0$. `visible_slice` leaves that query out. Code that masks instead must give a fully masked row 0 as its result and
# $-\infty$ as its lse, so that merging leaves the row as it was.
# </details>
#
# ## Your turn


# %%
# The zigzag layout: where in the sequence stand the tokens that `rank` holds? A list, rising.
# (seq_len is a multiple of 2 * world_size.)
def my_zigzag(rank, seq_len, world_size):
    return ...


print(check_zigzag_positions(my_zigzag))


# %%
# The striped layout: which pairs does the mask leave to `rank` when it computes on `block`?
# (C, C) bool, a row for each query, True where it sees the key.
def my_striped_mask(rank, block, C):
    return ...


print(check_striped_mask(my_striped_mask))

# %%
# 8 ranks, contiguous chunks, a very long sequence: which share of the time is idle? A number from 0 to 1
my_idle = ...

print(check_idle_limit(my_idle))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_zigzag(rank, seq_len, world_size):
#     half = seq_len // (2 * world_size)
#     late = 2 * world_size - 1 - rank
#     return [*range(rank * half, (rank + 1) * half), *range(late * half, (late + 1) * half)]
#
# def my_striped_mask(rank, block, C):
#     return torch.ones(C, C, dtype=torch.bool).tril(0 if block <= rank else -1)
#
# my_idle = (8 - 1) / (2 * 8 - 1)
# ```
# </details>
#
# Read [`training/causal.py`](../training/causal.py) now: `positions` is the layouts, `visible_slice` what each rank computes.
# Next: [8 · the fused ring](08_the_fused_ring.ipynb).
