# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Workshop: write the ring yourself
#
# Make an empty file, `my_ring.py`, in the folder of this notebook, and begin. After six steps it is a ring that trains: with gradients, a causal mask, balanced ranks, grouped queries
# and 16 bits. Each step adds one idea to the same file. The [doctor](../15_rings_that_were_wrong.ipynb) examines your ring after each step, on 3 and 4 real processes, in some
# ten seconds. If it is wrong, the doctor says which mistake it is.
#
# You need chapters [1](../01_attention_to_online_softmax.ipynb) to [8](../08_the_trainable_ring.ipynb). It takes two hours or three.
#
# Your file has one function that is called: `attention`. Use `torch` and `torch.distributed`, and nothing of `ringlab`. Keep functions small: a later step changes few lines then.
#
# Each step below shows a first try of somebody else, and what the doctor says of it. Then it is your turn.

# %%
from notebooks.your_ring.checks import first_try, step

# %% [markdown]
# ## Step 1 · one block
#
# `attention(q, k, v)` returns `(out, lse)`: attention of the queries `q` (B, H, Sq, D) to one block of keys (B, H, Sk, D), and the log-sum-exp (B, H, Sq) of each row. One process, no
# mask, scale $1/\sqrt D$. A part of somebody's first try:
#
# ```python
# lse = torch.logsumexp(scores, dim=-1) / 0.6931472  # log 2, because the kernel that I know counts in base 2
# ```

# %%
first_try(1)

# %% [markdown]
# Your turn:

# %%
step(1, "my_ring.py")

# %% [markdown]
# ## Step 2 · a ring of messages
#
# Now each rank calls `attention(q, k, v)` with its own chunks. Return `out` of its queries over the whole sequence, or `(out, lse)`. K and V of a rank travel round the ring, and each
# rank merges the result of a new block into its own:
#
# $$\mathrm{lse} = \log(e^{\mathrm{lse}_a} + e^{\mathrm{lse}_b}) \qquad \mathrm{out} = e^{\mathrm{lse}_a - \mathrm{lse}}\, \mathrm{out}_a + e^{\mathrm{lse}_b - \mathrm{lse}}\, \mathrm{out}_b$$
#
# Use `dist.send` and `dist.recv`, P − 1 hops, and the even/odd order of chapter 4. This first try gives a new block the weight of all blocks before it:
#
# ```python
# weight = 1.0 if j == r else 0.5  # of the new block; the own one, j == r, is the first
# out = torch.lerp(out, out_j, weight)
# lse = torch.logaddexp(lse, lse_j)
# ```

# %%
first_try(2)

# %% [markdown]
# The X-ray at the end is the matrix of softmax weights that the ring has really used, a tile for each rank and block. Your turn:

# %%
step(2, "my_ring.py")

# %% [markdown]
# ## Step 3 · gradients
#
# `dist.send` has no gradient. So write a `torch.autograd.Function`: `forward` is step 2 and saves q, k, v, out and lse; `backward` is a second ring (chapter 5). With
# $\delta = \sum_D dO \circ O$, a block adds
#
# $$p = e^{\mathrm{scores} - \mathrm{lse}} \quad dV = p^\top dO \quad dS = p \circ (dO\, V^\top - \delta) \quad dQ = \mathrm{scale}\; dS\, K \quad dK = \mathrm{scale}\; dS^\top Q$$
#
# dQ stays. dK and dV travel with their block, P − 1 hops (chapter 5). In the first try only K and V travel, and each rank returns what it has found for its own block:
#
# ```python
# dkv[..., keys, :] += torch.stack(dkv_j)
# if j != r:
#     pass
# ```

# %%
first_try(3)

# %% [markdown]
# Your turn:

# %%
step(3, "my_ring.py")

# %% [markdown]
# ## Step 4 · a causal mask
#
# `attention(q, k, v, causal=False)`: with `causal=True` a query sees no later key. Rank r has the tokens C r … C (r + 1) − 1. In round t it has block j = (r − t) mod P: compare the *positions* of
# its queries with those of the keys in hand. A row of a block may see no key at all: then out is 0 and lse is −inf, and no NaN may come of it. The first try hides the same
# triangle of every block:
#
# ```python
# return slice(C), slice(C), causal  # all queries, all keys, and query i sees keys 0 to i
# ```

# %%
first_try(4)

# %% [markdown]
# Your turn:

# %%
step(4, "my_ring.py")

# %% [markdown]
# ## Step 5 · zigzag
#
# `attention(q, k, v, causal=False, layout="contiguous")`. With `layout="zigzag"` the sequence is cut into 2 P half chunks, and rank r has numbers r and 2 P − 1 − r (chapter 7). Only the positions change. (A fast ring
# also leaves out the blocks that are wholly hidden. The doctor does not measure that.) The first try compares the numbers of chunks, as if the layout were contiguous:
#
# ```python
# return slice(C if j < r else 0), slice(C), False  # an earlier block is seen whole, a later one not at all
# ```

# %%
first_try(5)

# %% [markdown]
# Your turn:

# %%
step(5, "my_ring.py")

# %% [markdown]
# ## Step 6 · grouped queries and 16 bits
#
# `k` and `v` may have G heads, where `q` has H, a multiple of G: query head h uses K/V head h // (H/G). Send the G heads, not copies. The gradient of a K/V head is the sum over its query heads.
#
# The doctor now asks in bfloat16 too. Tensors that travel may be bfloat16, but all sums (out, lse, dQ, dK, dV) must be float32 until the end. The first try:
#
# ```python
# k, v = (x.repeat(1, H // G, 1, 1) for x in (k, v))
# ```

# %%
first_try(6)

# %% [markdown]
# Your turn:

# %%
step(6, "my_ring.py")

# %% [markdown]
# You have a ring that trains. Compare it with [one solution](../../trainable_ring.py), and with [`flash_ring.py`](../../ringlab/ring/flash_ring.py), which adds a fused kernel, documents and
# windows. The whole examination is often done in a minute: `ring-doctor my_ring.py:attention --layout zigzag --equal-chunks`. To send and compute at the same time: [chapter 6](../06_overlap.ipynb).
