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
# The ring of chapter 8 computes its blocks with plain tensor code. A [fused kernel](../docs/glossary.md#fused-kernel) computes each
# [block](../docs/glossary.md#block) without writing its scores to memory. After this chapter you can
#
# - build a ring on any kernel that returns its [log-sum-exp](../docs/glossary.md#log-sum-exp),
# - say what to ask such a kernel first.
#
# Track *train*. Before it: chapters 1 to 8. 11 minutes to read, 10 for the exercises. Next: [8b · on a GPU](08b_on_a_gpu.ipynb).

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import math
import time

import numpy as np
import torch

from bench import against_peers, record
from figures import measured
from notebooks.source.checks.fused_kernels import check_merging_share, check_natural_lse
from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.basics.online_softmax import merge
from ringlab.ring.causal import visible_slice
from ringlab.ring.layouts import positions

np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## The failure
#
# `blockwise_attention` of chapter 2 needs little memory, but it is slow beside a fused kernel. Each
# [tile](../docs/glossary.md#tile) of [scores](../docs/glossary.md#score) is written and read again several times.
# PyTorch's own attention runs one fused kernel, which keeps its tiles in registers and cache:

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
# A ring asks one thing of a kernel: it must return the log-sum-exp (lse) of each row beside the output. Then the
# results of two blocks [merge](../docs/glossary.md#merge), whatever the kernel does inside. `scaled_dot_product_attention`
# keeps its lse to itself. The kernel behind it returns it. This is the one for CPUs:

# %%
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
scale = 2**-0.5


def kernel(q, k, v, causal=False):  # -> out (B, H, Sq, D) and lse (B, H, Sq); the 0.0 is for dropout
    return flash(q, k, v, 0.0, causal, scale=q.shape[-1] ** -0.5)


parts = [kernel(x, block, block) for block in x.chunk(4, dim=2)]
out, lse = parts[0]
for part in parts[1:]:
    out, lse = merge(out, lse, *part)
assert torch.allclose(out, naive_attention(x, x, x), rtol=0, atol=1e-14)
print("four blocks, merged: row 0 =", out[0, 0, 0].numpy())

# %% [markdown]
# **The [backward pass](../docs/glossary.md#backward-pass)** takes one block at a time, too. The kernel's backward function
# computes the weights again, as $e^{s - \mathrm{lse}}$ (chapter 5). Give it `out` and `lse` of the **whole** row. Then
# the weights are the true ones, and the gradients of the blocks simply add up. Nothing is merged. We use it below.
#
# ## What to ask a kernel first
#
# **Is its lse natural?** `merge` needs $\log \sum e^s$. Some kernels return $\log_2 \sum e^s$, the logarithm in base 2
# of the same sum, because a GPU computes $2^x$ faster than $e^x$. The two differ by a factor of
# 1.44 only, so a wrong merge looks plausible. Here are two halves of our 8 tokens, merged with each:

# %%
halves = [kernel(x, half, half) for half in x.chunk(2, dim=2)]
for name, factor in (("natural", 1.0), ("in base 2", 1 / math.log(2))):  # log2(a) = log(a) / log(2)
    merged, _ = merge(halves[0][0], factor * halves[0][1], halves[1][0], factor * halves[1][1])
    off = (merged - naive_attention(x, x, x)).abs().max()
    print(f"lse {name:<10} off by {off:.4f}")
    assert (off < 1e-14) == (name == "natural")

# %% [markdown]
# One call tells which it is. Give the kernel one query and one key, with the score 1. Then the sum is $e^1$. Its
# natural logarithm is 1; in base 2 it is 1.4427. Multiply a lse in base 2 by $\log 2$, and it is natural.

# %%
one = torch.ones(1, 1, 1, 1)  # q, k and v; the score is 1 · 1 / √1
print(f"one key of score 1: this kernel's lse is {kernel(one, one, one)[1].item():.4f}")
print(f"in base 2 it would be {1 / math.log(2):.4f}")
assert kernel(one, one, one)[1].item() == 1

# %% [markdown]
# **What does the kernel not check?** It stands behind a public function and trusts its caller. Called by its own name, it
# checks nothing:

# %%
gaps = x.repeat_interleave(2, dim=3)[..., ::2]  # the same numbers, in every second place of the memory
off = (kernel(gaps, x, x)[0] - naive_attention(x, x, x)).abs().max()
print(f"rows whose numbers are not side by side: off by {off:.2f}")
assert torch.equal(gaps, x)
assert off > 0.1

# %% [markdown]
# No error anywhere. So `ringlab.ring_flash_attention` calls its kernels through `ringlab.ring.fused_block`. It checks these things,
# chooses a kernel for the device, and takes the plain block of chapter 2 where no kernel can be trusted.
#
# ## The ring, in one process
#
# The ring of chapter 8 with this kernel, in the [zigzag layout](../docs/glossary.md#zigzag-layout) and with grouped queries, which this
# kernel knows:

# %%
P, H, G = 4, 8, 2
q = torch.randn(1, H, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
k, v = torch.randn(2, 1, G, 8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
at = [positions("zigzag", 8, r, P) for r in range(P)]
result = torch.empty_like(q)
for r in range(P):
    for t in range(P):
        j = (r - t) % P
        rows, keys, triangle = visible_slice("zigzag", r, j, 2)
        part = q[:, :, at[r]][:, :, rows], k[:, :, at[j]][:, :, keys], v[:, :, at[j]][:, :, keys]
        out_j, lse_j = kernel(*part, causal=triangle)
        if t == 0:  # its own block: every query sees at least itself
            out, lse = out_j, lse_j
        else:
            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], out_j, lse_j)
    result[:, :, at[r]] = out
whole = naive_attention(q, *(x.repeat_interleave(H // G, dim=1) for x in (k, v)), causal=True)
assert torch.allclose(result, whole, rtol=0, atol=1e-14)
print("zigzag, causal, grouped, on the fused kernel: exact")

# %% [markdown]
# The kernel's backward function takes a block with `out` and `lse` of the whole row. Here is the ring's backward pass in one process, without a
# mask, in the order of chapter 8: the own block last.

# %%
leaves = [x.clone().requires_grad_() for _ in "qkv"]
d_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
exact = torch.autograd.grad(naive_attention(*leaves), leaves, d_out)

out, lse = kernel(x, x, x)  # what the forward pass has saved, of whole rows
of_ranks = [tensor.chunk(P, dim=2) for tensor in (d_out, x, out, lse)]
dq, sums = [0] * P, [(0, 0)] * P  # dq[r] stays on rank r; sums[r] is the dK and dV that rank r has now
for t in (*range(1, P), 0):
    shares = []
    for r in range(P):
        my_d_out, my_q, my_out, my_lse = (tensors[r] for tensors in of_ranks)
        block = x.chunk(P, dim=2)[(r - t) % P]  # while a rank computes on it, its sums arrive
        shares.append(flash_backward(my_d_out, my_q, block, block, my_out, my_lse, 0.0, False, scale=scale))
    dq = [total + share[0] for total, share in zip(dq, shares, strict=True)]
    sums = [(dk + share[1], dv + share[2]) for (dk, dv), share in zip(sums, shares, strict=True)]
    if t > 0:
        sums = sums[-1:] + sums[:-1]  # the hop of the sums: they reach rank r + 1 while it computes on the same block

for name, mine, right in zip(("dq", "dk", "dv"), (dq, *zip(*sums, strict=True)), exact, strict=True):
    assert torch.allclose(torch.cat(mine, dim=2), right, rtol=0, atol=1e-14)
    print(f"{name} of the four ranks is autograd's")

# %% [markdown]
# `ringlab.ring_flash_attention` is this ring, industrial. Its [schedule](../docs/glossary.md#schedule) says which block is where and where the sums
# are. Of each block it computes what the mask leaves, in [pieces](../docs/glossary.md#piece): rectangles and triangles.
#
# ## How fast?
#
# The limit is one process that runs the fused kernel on all cores. Messages, merges and waiting ranks cost a share of
# that. Each point is measured in turn with the limit, on one machine; [the table](../bench/results/README.md#against_peers)
# names it. The black line needs no messages: blocks stay in memory that all ranks of a host can read (chapter 17).

# %%
measured.speed()

# %%
results = record.load("against_peers")
slowest = min(
    min(against_peers.speeds(results, dtype="float32", world_size=2, seq_len=seq_len, case=case, method=methods[0]))
    for case, methods in against_peers.CASES.items()
    for seq_len in (8192, 16_384)
)
print(f"black, two ranks on two cores, 8192 tokens or more: {slowest:.2f} of the limit, or faster")
assert slowest > 0.9

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
# Each block's output is rounded before it is merged, so the error grows with the number of blocks. The lse must stay in float32.
# </details>
#
# <details><summary>Zigzag and striped give (nearly) the same work to every rank. Why is striped slower in the picture?</summary>
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
