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
# The running softmax of [chapter 1](01_attention_to_online_softmax.ipynb), applied to whole blocks of keys. After this
# chapter you know what exact attention needs in memory (hardly anything), and why the order of the blocks is free.
#
# 15 minutes. The code: [`basics/blockwise_attention.py`](../basics/blockwise_attention.py).
# Next: [3 · the worked example](03_worked_example.ipynb).

# %%
# %matplotlib inline
import math

import torch
from ipywidgets import interact
from torch.utils._python_dispatch import TorchDispatchMode

from basics.blockwise_attention import attend, blockwise_attention
from basics.naive_attention import naive_attention
from basics.online_softmax import finish, start
from figures import memory
from notebooks.checks.blockwise_attention import check_blockwise, check_largest_tensor, check_visible_tiles
from support.rounding import exact_attention

_ = torch.manual_seed(0)

# %% [markdown]
# ## The failure
#
# We let torch tell us every tensor it makes, and keep the size of the largest.


# %%
class LargestTensor(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.nbytes)
        return result


def largest(attention) -> float:
    """The largest tensor made on the way, in MiB."""
    with LargestTensor() as seen:
        attention()
    return seen.bytes / 2**20


for S in (512, 1024, 2048, 4096):
    q, k, v = (torch.randn(1, 1, S, 64) for _ in "qkv")
    made = largest(lambda: naive_attention(q, k, v))
    print(f"S = {S:>4}: out has {q.nbytes / 2**20:5.3f} MiB, naive attention makes one of {made:5.1f} MiB")

assert largest(lambda: naive_attention(q, k, v)) == 4 * 4096**2 / 2**20

# %% [markdown]
# Twice the tokens, four times the bytes. At a million tokens the scores of a single head would fill 4 TiB.
#
# ## The idea
#
# Nobody needs the square. Take a tile of queries; let the blocks of keys come by one after the other; update
# `(m, l, o)`; divide once at the end. Ten lines:


# %%
def blockwise(q, k, v, block_size):
    outs = []
    for q_tile in q.split(block_size, dim=2):
        state = start(q_tile)  # m = -inf, l = 0, o = 0
        for i in range(0, k.shape[2], block_size):
            k_block, v_block = k[:, :, i : i + block_size], v[:, :, i : i + block_size]
            state = attend(state, q_tile, k_block, v_block, scale=1 / math.sqrt(q.shape[-1]))
        out, lse = finish(state)
        outs.append(out)
    return torch.cat(outs, dim=2)


right = exact_attention(q, k, v)["out"]  # the exact numbers, and how far from them rounding may move ours
for block_size in (256, 1000, 4096):
    out = blockwise(q, k, v, block_size)
    assert right.accepts(out)
    made = largest(lambda: blockwise(q, k, v, block_size))
    print(f"blocks of {block_size:>4}: exact, and the largest tensor has {made:6.3f} MiB")

# %% [markdown]
# With blocks of 256 the largest tensor is `out` itself: a tile of scores has only $256^2$ numbers, whatever $S$ is.
#
# ## The order is free
#
# Shuffle the blocks: every order gives the same result, up to rounding. The ring will use this: rank 0 meets the blocks as
# 0, 3, 2, 1 and rank 1 as 1, 0, 3, 2.

# %%
blocks = list(zip(k.split(512, dim=2), v.split(512, dim=2), strict=True))
for _ in range(3):
    order = torch.randperm(len(blocks)).tolist()
    state = start(q)
    for j in order:
        state = attend(state, q, *blocks[j], scale=1 / 8)
    assert right.accepts(finish(state)[0])
    print("exact in the order", order)

# %% [markdown]
# ## The picture
#
# Lines are counted from the shapes, marks are measured on a real run. Naive grows with $S^2$, blockwise with $S$, and the
# ring, which is still to come, shares even that among its ranks.

# %%
memory.draw()
# %% [markdown]
# ## A causal mask skips blocks
#
# Key $j$ is hidden from query $i$ when $j > i$. A tile that lies wholly above the diagonal need not be computed at all.

# %%
x = torch.randn(1, 2, 300, 16)
out, _ = blockwise_attention(x, x, x, block_size=64, causal=True)
assert exact_attention(x, x, x, causal=True)["out"].accepts(out)
print("causal, 300 tokens in blocks of 64 (the last one has 44): exact")


def tiles(n: int) -> None:
    for i in range(n):
        print(" ".join("#" if j <= i else "." for j in range(n)))
    print(f"{n} x {n} tiles, {n * (n + 1) // 2} computed: {100 * (n + 1) / (2 * n):.0f}%")


tiles(4)

# %%
_ = interact(tiles, n=(1, 16))

# %% [markdown]
# > **One number to remember: $256^2$.** A tile has that many scores a head, here, whatever $S$ is; the square would have
# > $S^2$. In float32 it is 256 KiB and fits into a processor's cache, which also makes it fast.
#
# ## Questions
#
# <details><summary>Blockwise attention computes the same scores as naive attention. What did it save?</summary>
#
# Memory, and the traffic to and from memory. The arithmetic is the same, $4 S^2 D$ FLOPs a head.
# </details>
#
# <details><summary>Why does <code>blockwise_attention</code> return the lse as well?</summary>
#
# Because a result with its lse can still be merged with a result over other keys; without it the result is final. The
# backward pass needs the lse too, to compute the weights anew.
# </details>
#
# <details><summary>Why is each row of queries free to be computed anywhere?</summary>
#
# No row of the softmax looks at another row. So queries can be shared out among devices. Keys cannot: every query needs
# all of them. That is why in the ring Q stays and K and V travel.
# </details>
#
# ## Your turn


# %%
def my_blockwise(q, k, v, block_size):  # q, k, v (S, D), no batch and no heads -> (S, D)
    return ...


print(check_blockwise(my_blockwise))


# %%
def my_visible_tiles(n):  # of n x n tiles, how many does a causal mask leave to compute?
    return ...


print(check_visible_tiles(my_visible_tiles))

# %%
# S = 1,000,000 tokens, B = 1, H = 8, D = 64, float32, blocks of 256: how many bytes has the largest tensor of all?
my_largest = ...

print(check_largest_tensor(my_largest))

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
#
# my_largest = 1 * 8 * 1_000_000 * 64 * 4
# ```
# </details>
#
# Next: [3 · the worked example](03_worked_example.ipynb), where the blocks sit on four GPUs.
