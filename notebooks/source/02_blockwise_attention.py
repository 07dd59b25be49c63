# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2 · Blockwise attention and memory
#
# Chapter 1 computed one row of attention from a few keys at a time. This chapter does so for all rows. After it you can
#
# - write exact attention that never stores the $S \times S$ scores,
# - say how much memory it needs,
# - say why the blocks may come in any order.
#
# The road, 2 of 8. You need [1 · online softmax](01_attention_to_online_softmax.ipynb); next comes [3 · the worked
# example](03_worked_example.ipynb). 12 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import math

import torch
from ipywidgets import interact
from torch.utils._python_dispatch import TorchDispatchMode

from figures import measured
from notebooks.source.checks.softmax_and_blocks import check_blockwise, check_visible_tiles
from notebooks.source.show import print_source
from ringlab.basics.blockwise_attention import TILE, attend, attend_tile, blockwise_attention
from ringlab.basics.naive_attention import naive_attention
from ringlab.basics.online_softmax import finish, start
from ringlab.support.rounding import exact_attention

_ = torch.manual_seed(0)

# %% [markdown]
# ## The failure
#
# How much memory does attention need when it is computed as it is defined? PyTorch can report every tensor that it makes.


# %%
class LargestTensor(TorchDispatchMode):
    """Inside `with LargestTensor() as seen:`, seen.bytes is the size of the largest tensor made so far."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.nbytes)
        return result


def largest(attention) -> float:
    """The size of the largest tensor made on the way, in MiB."""
    with LargestTensor() as seen:
        attention()
    return seen.bytes / 2**20


for S in (256, 512, 1024, 2048):
    q, k, v = (torch.randn(1, 1, S, 64) for _ in "qkv")  # (B, H, S, D), float32
    made = largest(lambda: naive_attention(q, k, v))
    print(f"S = {S:>4}: the output has {q.nbytes / 2**20:6.4f} MiB, the largest tensor on the way {made:5.2f} MiB")

assert largest(lambda: naive_attention(q, k, v)) == 4 * 2048**2 / 2**20

# %% [markdown]
# Twice the tokens need four times the bytes. The large tensor is the matrix of [scores](../docs/glossary.md#score), $S \times S$ for each
# [head](../docs/glossary.md#head). For a million tokens it has 4 TB.
#
# ## The idea
#
# Take some queries. Read the keys [block](../docs/glossary.md#block) by block, update `(m, l, o)` with each block, and divide at
# the end. One step of this is `attend_tile`. It computes one [tile](../docs/glossary.md#tile) of scores, some queries by some keys, in the dtype of `m`.
# Where `future` is True, a causal mask hides the key (see below), and the score becomes −inf. Then the `update` of chapter 1 follows.

# %%
print_source(attend_tile)

# %% [markdown]
# The whole algorithm has ten lines. How do we know that it is right? `exact_attention` computes full attention in float64. `accepts` says
# whether a result differs from it by rounding only.


# %%
def blockwise(q, k, v, block_size):
    outs = []
    for q_tile in q.split(block_size, dim=2):
        state = start(q_tile)  # m = -inf, l = 0, o = 0
        for i in range(0, k.shape[2], block_size):
            k_block, v_block = k[:, :, i : i + block_size], v[:, :, i : i + block_size]
            state = attend_tile(state, q_tile, k_block, v_block, scale=1 / math.sqrt(q.shape[-1]))
        out, lse = finish(state)
        outs.append(out)
    return torch.cat(outs, dim=2)


right = exact_attention(q, k, v)["out"]
for block_size in (256, 500, 2048):
    assert right.accepts(blockwise(q, k, v, block_size))
    made = largest(lambda: blockwise(q, k, v, block_size))
    print(f"blocks of {block_size:>4}: equal to full attention; the largest tensor has {made:5.2f} MiB")

assert largest(lambda: blockwise(q, k, v, 256)) == q.nbytes / 2**20

# %% [markdown]
# With blocks of 256 the largest tensor is the output itself. A tile of scores has $256^2$ numbers for each head, whatever $S$ is.
#
# ## The order is free
#
# Each order of the blocks gives the same result, up to rounding. The ring will use this: rank 0 gets the blocks in the order 0, 3, 2, 1, and rank 1 in
# the order 1, 0, 3, 2.
#
# `attend` adds a whole block to all queries. The outer loop cuts the queries and their `(m, l, o)` into tiles of 256 tokens. The inner loop cuts the
# keys and values, and calls `attend_tile` for each pair. `torch.cat` joins the `(m, l, o)` of all queries again.

# %%
print(f"TILE = {TILE}\n")
print_source(attend)

# %%
blocks = list(zip(k.split(512, dim=2), v.split(512, dim=2), strict=True))  # four blocks of 512 keys
for _ in range(3):
    order = torch.randperm(len(blocks)).tolist()
    state = start(q)
    for j in order:
        state = attend(state, q, *blocks[j], scale=1 / 8)  # 1 / sqrt(64)
    assert right.accepts(finish(state)[0])
    print("equal to full attention, in the order", order)

# %% [markdown]
# ## The picture
#
# Lines are counted from the shapes. Points are measured in a real run. The memory of naive attention grows with $S^2$, that of blockwise attention
# with $S$, and that of a rank with $S/P$. But a rank of a ring holds [six chunks](../docs/memory.md) (the picture has the five besides q), so it
# gains little on 4 ranks, and more with every rank that you add.

# %%
measured.memory()
# %% [markdown]
# ## A causal mask skips tiles
#
# Under a [causal mask](../docs/glossary.md#causal-mask), key $j$ is hidden from query $i$ when $j > i$. Some tiles lie above the diagonal: all their keys come
# after all their queries. `blockwise_attention` does not compute them.

# %%
x = torch.randn(1, 2, 300, 16)
out, _ = blockwise_attention(x, x, x, block_size=64, causal=True)
assert exact_attention(x, x, x, causal=True)["out"].accepts(out)
print("causal, 300 tokens in blocks of 64 (the last block has 44): equal to full attention")


def tiles(n: int) -> None:
    for i in range(n):
        print(" ".join("#" if j <= i else "." for j in range(n)))
    print(f"{n} x {n} tiles, {n * (n + 1) // 2} computed: {100 * (n + 1) / (2 * n):.1f}%")


tiles(4)

# %%
_ = interact(tiles, n=(1, 16))

# %% [markdown]
# > **One number to remember: $256^2$.** A tile has that many scores for each head, whatever $S$ is. The whole matrix has $S^2$.
# > In float32 a tile has 256 KiB. It fits into a processor's cache.
#
# ## Questions
#
# <details><summary>Blockwise attention computes the same scores as naive attention. What did it save?</summary>
#
# Memory, and the reading and writing of it. The arithmetic is the same: $4 S^2 D$ floating-point operations for each head.
# </details>
#
# <details><summary>Why does <code>blockwise_attention</code> return the lse as well?</summary>
#
# A result with its lse can be merged with a result over other keys (chapter 1). Without the lse this is impossible. The backward pass also needs the
# lse, to compute the softmax weights again (chapter 5).
# </details>
#
# <details><summary>Why can each row of queries be computed on a different device?</summary>
#
# No row of the softmax needs another row. But every query needs all keys. So in a ring Q stays, and K and V travel.
# </details>
#
# ## Your turn


# %%
# Keep the scores of one block of keys at a time, never all of them. Large scores must not overflow.
def my_blockwise(q, k, v, block_size):  # q, k, v (S, D), no batch and no heads -> (S, D)
    return ...


print(check_blockwise(my_blockwise))


# %%
def my_visible_tiles(n):  # of n x n tiles, how many are not hidden completely by a causal mask?
    return ...


print(check_visible_tiles(my_visible_tiles))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_blockwise(q, k, v, block_size):
#     m, l, o = torch.full((len(q),), -math.inf), torch.zeros(len(q)), torch.zeros_like(q)
#     for i in range(0, len(k), block_size):
#         s = q @ k[i : i + block_size].T / math.sqrt(q.shape[1])
#         m_new = torch.maximum(m, s.amax(1))
#         f, p = torch.exp(m - m_new), torch.exp(s - m_new[:, None])
#         m, l, o = m_new, f * l + p.sum(1), f[:, None] * o + p @ v[i : i + block_size]
#     return o / l[:, None]
#
# def my_visible_tiles(n):
#     return n * (n + 1) // 2
# ```
# </details>
#
# Open [`blockwise_attention.py`](../ringlab/basics/blockwise_attention.py) now: `attend` and the causal mask, in one file.
# Next: [3 · the worked example](03_worked_example.ipynb): the blocks are on four GPUs.
