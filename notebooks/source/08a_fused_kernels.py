# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8a · The ring on fused kernels
#
# The ring of chapter 8 writes the scores of every [block](../docs/glossary.md#block) to memory. A [fused kernel](../docs/glossary.md#fused-kernel) never does.
# After this chapter you can
#
# - put a kernel into the file that you copied, and say what to ask it first,
# - cut any mask into the rectangles and triangles that a kernel computes.
#
# Track *train*. You need chapters 1 to 8; next comes [8b · on a GPU](08b_on_a_gpu.ipynb).
# 14 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import inspect
import math
import time

import numpy as np
import torch

from bench import record, speed
from notebooks.source import workers
from notebooks.source.checks.kernels_and_wires import check_merging_share, check_natural_lse
from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.basics.online_softmax import merge
from ringlab.ring import partition
from ringlab.support.processes import launch

np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## The failure
#
# `blockwise_attention` of chapter 2 saves memory, not time: it writes and reads each [tile](../docs/glossary.md#tile) of
# [scores](../docs/glossary.md#score) several times. PyTorch's own attention is one fused kernel, which keeps its tiles in registers and cache:

# %%
q, k, v = torch.randn(3, 1, 8, 1024, 64, generator=torch.Generator().manual_seed(0)).unbind()


def seconds(work) -> float:
    work()  # the first call warms up
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


attention = torch.nn.functional.scaled_dot_product_attention
print(f"blockwise_attention: {seconds(lambda: blockwise_attention(q, k, v, block_size=256)):.4f} s")
print(f"fused kernel:        {seconds(lambda: attention(q, k, v)):.4f} s")

# %% [markdown]
# ## The idea
#
# A kernel fits into a ring if it returns the [log-sum-exp](../docs/glossary.md#log-sum-exp) (lse) of each row beside the output. Then the
# results of two blocks [merge](../docs/glossary.md#merge), whatever the kernel does inside. `scaled_dot_product_attention`
# hides its lse; the function behind it returns it. This is the one for CPUs:

# %%
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)


def kernel(q, k, v, causal=False):  # -> out (B, H, Sq, D) and lse (B, H, Sq); the 0.0 is for dropout
    return flash(q, k, v, 0.0, causal, scale=q.shape[-1] ** -0.5)


parts = [kernel(x, block, block) for block in x.chunk(4, dim=2)]
out, lse = parts[0]
for part in parts[1:]:
    out, lse = merge(out, lse, *part)
assert torch.allclose(out, naive_attention(x, x, x), rtol=0, atol=1e-14)
print("four blocks, merged: row 0 =", out[0, 0, 0].numpy())

# %% [markdown]
# ## What to ask a kernel first
#
# **Is its lse natural?** `merge` needs $\log \sum e^s$. Some kernels return $\log_2 \sum e^s$, because a GPU computes $2^x$ faster
# than $e^x$. The two differ by a factor of 1.44 only, so a wrong merge looks plausible. Here are two halves of our 8 tokens:

# %%
halves = [kernel(x, half, half) for half in x.chunk(2, dim=2)]
for name, factor in (("natural", 1.0), ("in base 2", 1 / math.log(2))):  # log2(a) = log(a) / log(2)
    merged, _ = merge(halves[0][0], factor * halves[0][1], halves[1][0], factor * halves[1][1])
    off = (merged - naive_attention(x, x, x)).abs().max()
    print(f"lse {name:<10} off by {off:.4f}")
    assert (off < 1e-14) == (name == "natural")

# %% [markdown]
# One call tells which it is. Give the kernel one query and one key, with the score 1. The natural lse is 1; in base 2 it is 1.4427.
# Multiply that by $\log 2$.

# %%
one = torch.ones(1, 1, 1, 1)  # q, k and v; the score is 1 · 1 / √1
print(f"one key of score 1: this kernel's lse is {kernel(one, one, one)[1].item():.4f}")
print(f"in base 2 it would be {1 / math.log(2):.4f}")
assert kernel(one, one, one)[1].item() == 1

# %% [markdown]
# **What does it not check?** It stands behind a public function and trusts its caller:

# %%
gaps = x.repeat_interleave(2, dim=3)[..., ::2]  # the same numbers, in every second place of the memory
off = (kernel(gaps, x, x)[0] - naive_attention(x, x, x)).abs().max()
print(f"rows whose numbers are not side by side: off by {off:.2f}")
assert torch.equal(gaps, x)

# %% [markdown]
# No error is raised. This is torch 2.13, which takes the gaps for numbers. Torch 2.14.1 is right here (off by 0.00), but its backward call
# still misreads an `out` with gaps. Tensors often come with such strides, so call `.contiguous()` first: where there are no gaps, it copies nothing.
#
# ## In the file that you copied
#
# Chapter 8 left a place for a kernel: `block_forward` and `block_backward`. These lines replace both, here for CPUs:


# %%
def block_forward(q, k, v, triangle):  # q (B, G, N, Sq, D), k and v (B, G, Sk, D)
    if q.shape[-2] == 0:  # no query sees this block
        return q, q[..., 0]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q.flatten(1, 2).contiguous(), k, v, 0.0, triangle)
    return out.view_as(q), lse.view_as(q[..., 0])


def block_backward(q, k, v, triangle, d_out, out, lse):  # out and lse of whole rows
    if q.shape[-2] == 0:
        return q, torch.zeros_like(k), torch.zeros_like(v)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    d_out, rows, out, lse = (x.flatten(1, 2).contiguous() for x in (d_out, q, out, lse))
    dq, dk, dv = flash(d_out, rows, k, v, out, lse, 0.0, triangle)
    return dq.view_as(q), dk, dv


replaced = inspect.getsource(block_forward) + inspect.getsource(block_backward) + "class Ring("
for layout in ("contiguous", "zigzag"):
    off = torch.tensor(launch(workers.changed_rings, 4, [("class Ring(", replaced)], layout, device="cpu"))
    assert off.max() < 1e-14
    print(f"{layout:<11} causal, 4 heads on 2, 4 processes: out, dQ, dK, dV are those of full attention")

# %% [markdown]
# Five things can go wrong here, and only the first stops the program:
#
# - An empty `q` can end the process.
# - `out` and `lse` of the block, in place of those of whole rows, give wrong gradients. With those of whole rows the blocks' gradients add up.
# - A lse in base 2 must be made natural for the merge, and base 2 again for the backward call.
# - Tensors with gaps may give wrong numbers: which ones, depends on the version.
# - A GPU's flash kernel knows 16 bits only. Each block's output is then rounded before it is merged; the lse stays in float32.
#   [gpu_blocks.py](../examples/gpu_blocks.py) has these two functions for GPUs. It casts, and widens what comes back.
#
# [`fused_block.py`](../ringlab/ring/fused_block.py) does this for CPUs and GPUs, and takes plain tiles where no kernel can be trusted.
#
# ## Any mask, in pieces
#
# Zigzag needs halves and one triangle. What of other masks, such as documents and windows (chapter 13)? Under all of them a query sees one run of
# keys, `first` to `end`, and neither number falls from a query to the next. So the visible pairs of a block are a staircase. Cut it into
# [pieces](../docs/glossary.md#piece) that a kernel knows:
#
# - a rectangle: all queries see all keys,
# - a triangle: query $i$ sees keys $0 \dots i$, because the end moves by one key a query,
# - an upper triangle: query $i$ sees keys $i$ … to the last, because the first key moves. With queries and keys in reverse order it is a triangle.
#
# This toy finds the first two shapes: where the end moves, all queries see what the first one sees without its last key, a rectangle. The
# rest is a triangle. The example is the causal mask over documents of 3 and 5 tokens:


# %%
def toy_cut(first, end):
    """Query i sees keys first[i] ... end[i] - 1. Pieces: (queries, keys, is it a triangle?)."""
    pieces, i = [], 0
    while i < len(first):
        stop = i + 1
        while stop < len(first) and first[stop] == first[i] and end[stop] == end[i] + stop - i:
            stop += 1
        triangle = stop > i + 1
        right = end[i] - triangle  # all queries of the stretch see the keys first[i] ... right - 1
        if right > first[i]:
            pieces.append((range(i, stop), range(first[i], right), False))
        if triangle:
            pieces.append((range(i, stop), range(right, end[stop - 1]), True))
        i = stop
    return pieces


first, end = [0, 0, 3, 3, 3], [2, 3, 4, 5, 6]  # queries 1 to 5 of our 8 tokens
for queries, keys, triangle in toy_cut(first, end):
    print(f"{'triangle' if triangle else 'rectangle':<10} queries {[1 + i for i in queries]}, keys {list(keys)}")
ours = [
    (range(5)[piece.queries], range(8)[piece.keys], piece.triangle)
    for piece in partition.cut(*map(torch.tensor, (first, end)))
]
assert ours == toy_cut(first, end)

# %% [markdown]
# `ringlab.ring_flash_attention` is the ring of chapter 8 on such pieces; a [schedule](../docs/glossary.md#schedule) says which block is where.
#
# ## How fast?
#
# The limit is one process that runs the fused kernel on all cores. Each point is measured in turn with it, on [one
# machine](../bench/results/README.md#against_peers). These are causal forward and backward passes in float32:

# %%
results = record.load("against_peers")
print("tokens   this ring, two ranks   PyTorch's own loop")
for seq_len in (1024, 2048, 4096, 8192, 16_384):
    training = {"case": speed.TRAIN, "dtype": "float32", "world_size": 2, "seq_len": seq_len}
    ours, theirs = (speed.speeds(results, method=name, **training)[0] for name in (speed.ZIGZAG, speed.TORCH))
    print(f"{seq_len:>6,}{ours:>23.2f}{theirs:>21.2f}")
assert ours > 0.9

# %% [markdown]
# Short sequences reach less: every call and every message has a fixed cost.
#
# > **One number to remember: 1.** One query and one key of score 1: the lse must be 1. If a kernel says 1.4427, its lse
# > is in base 2. Ask that before you build a ring on it.
#
# ## Questions
#
# <details><summary>A kernel returns its output in 16 bits. What does the ring lose?</summary>
#
# Each block's output is rounded before it is merged, so the error grows with the number of blocks.
# </details>
#
# <details><summary>Zigzag and striped give (nearly) the same work to every rank. Why is striped slower?</summary>
#
# A kernel works in tiles. It computes a tile on the edge of a triangle whole and throws half of it away. Zigzag has a
# triangle in the first round only, striped in every round.
# </details>
#
# ## Your turn


# %%
# A block's out_j (Sq, D) and lse_j (Sq,) are merged into out and lse by out.lerp(out_j, share[:, None]),
# which is out + share · (out_j - out). What is the share (Sq,)? Beware of overflow
def my_share(lse, lse_j):
    return ...


print(check_merging_share(my_share))


# %%
# Somebody gives you kernel(q, k, v) -> (out, lse), with scores q·k/√D. Its lse is natural or in base 2; nobody knows.
# Find out (you may call it as often as you like), and return out and the natural lse of these q, k and v (S, D)
def my_natural_kernel(kernel, q, k, v):
    return ...


print(check_natural_lse(my_natural_kernel))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_share(lse, lse_j):
#     return torch.sigmoid(lse_j - lse)  # e^lse_j / (e^lse + e^lse_j)
#
# def my_natural_kernel(kernel, q, k, v):
#     one = torch.ones(1, 1)
#     natural = kernel(one, one, one)[1].item() < 1.2  # 1, or 1.4427
#     out, lse = kernel(q, k, v)
#     return out, lse if natural else lse * math.log(2)
# ```
# </details>
#
# Open [`flash_ring.py`](../ringlab/ring/flash_ring.py) now: the ring that you train with, in two loops. Next: [8b · on a GPU](08b_on_a_gpu.ipynb).
