# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8 · The fused ring and its speed
#
# All that came before, put together on fused kernels: exact, differentiable, causal and balanced, with grouped queries,
# overlapped, and as fast as the machine's own attention. After this chapter you can build a ring on any kernel that returns
# its log-sum-exp, know what to ask of such a kernel first, and put the ring into a model.
#
# 20 minutes. The code: [`training/grouped_query.py`](../training/grouped_query.py),
# [`training/fused_block.py`](../training/fused_block.py), [`training/flash_ring.py`](../training/flash_ring.py).
# Before: [7 · causal balance](07_causal_balance.ipynb).

# %%
# %matplotlib inline
import time

import numpy as np
import torch

from basics.blockwise_attention import blockwise_attention
from basics.naive_attention import TOKENS, naive_attention
from basics.online_softmax import merge
from bench import against_peers, record
from figures import errors, speed
from notebooks import workers
from notebooks.checks.the_fused_ring import check_attention_on_a_kernel, check_bytes_of_training, check_merging_share
from support.processes import launch
from training.causal import shard, unshard, visible_slice
from training.flash_ring import merge_into
from training.fused_block import choose_kernel, fused_backward, fused_forward
from training.grouped_query import fold, unfold

np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## The failure
#
# The ring of chapter 4 loses little to its messages: on this project's machine it is as fast as blockwise attention on one
# process. But blockwise attention in Python is slow. Its tiles of scores are written to memory and read again, three times
# over; a fused kernel keeps them in registers and cache.

# %%
q, k, v = torch.randn(3, 1, 8, 2048, 64, generator=torch.Generator().manual_seed(0)).unbind()
scale = 64**-0.5


def seconds(work) -> float:
    work()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


print(f"blockwise in PyTorch: {seconds(lambda: blockwise_attention(q, k, v, block_size=256)):.4f} s")
print(f"fused kernel:         {seconds(lambda: fused_forward(q, k, v, scale=scale)):.4f} s")

# %% [markdown]
# ## The idea
#
# A ring asks one thing of a kernel: that it returns the log-sum-exp of each row beside the output. Then blocks merge, whatever
# happened inside. PyTorch's `scaled_dot_product_attention` keeps the lse to itself; the kernel behind it gives it away.

# %%
x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
print("here:", *choose_kernel(x, x, scale), sep="  ")
parts = [fused_forward(x, block, block, scale=2**-0.5) for block in x.chunk(4, dim=2)]
out, lse = parts[0]
for part in parts[1:]:
    out, lse = merge(out, lse, *part)
assert torch.allclose(out, naive_attention(x, x, x), rtol=0, atol=1e-14)
print("four blocks, merged: row 0 =", out[0, 0, 0].numpy())

# %% [markdown]
# **Backwards** the same kernel's backward takes one block at a time, too. It computes the weights anew, as
# $e^{score - lse}$. Give it the `out` and `lse` of the **whole** row, and the weights are the true ones: the gradients of the
# blocks simply add up, nothing is merged.

# %%
leaves = [x.clone().requires_grad_() for _ in "qkv"]
d_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
exact = torch.autograd.grad(naive_attention(*leaves), leaves, d_out)

d_blocks = [fused_backward(x, block, block, out, lse, d_out, scale=2**-0.5) for block in x.chunk(4, dim=2)]
d_q = sum(d[0] for d in d_blocks)
d_k, d_v = (torch.cat([d[i] for d in d_blocks], dim=2) for i in (1, 2))
for name, mine, right in zip(("dq", "dk", "dv"), (d_q, d_k, d_v), exact, strict=True):
    assert torch.allclose(mine, right, rtol=0, atol=1e-14)
    print(f"{name} of four blocks: off by less than 1e-14")

# %% [markdown]
# ## What to ask a kernel first
#
# A kernel behind a public function trusts its caller. Called by its own name, it checks nothing:

# %%
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
gaps = x.repeat_interleave(2, dim=3)[..., ::2]  # the same numbers, in every second place of the memory
assert torch.equal(gaps, x)
right = naive_attention(x, x, x)
print(f"rows whose numbers are not side by side: off by {(flash(gaps, x, x)[0] - right).abs().max():.2f}")

huge = torch.full_like(x, 1e200)
print(f"a row whose scores are all -inf:         lse = {flash(huge, -huge, x)[1][0, 0, 0]:.1f} and not -inf")
print(f"causal, with a negative scale:           {flash(x, x, x, 0.0, True, scale=-1.0)[0][0, 0, 0, 0]:.1f}")

ours, _ = fused_forward(gaps, x, x, scale=2**-0.5)
_, fully_masked = fused_forward(huge, -huge, x, scale=2**-0.5)
assert torch.allclose(ours, right)
assert (fully_masked == -torch.inf).all()

# %% [markdown]
# No error anywhere. [`fused_block.py`](../training/fused_block.py) makes rows dense, looks for such an lse, and takes the plain
# block of chapter 2 where the kernel cannot be trusted. One more question has a file of its own: is the lse natural, or in
# base 2? [`log2_lse.py`](../training/log2_lse.py) shows what a wrong guess does, and how two calls tell.
#
# ## Grouped queries
#
# With G < H heads of K and V, several query heads use the same K and V. A ring needs no change: to the shared head, the queries
# of its group are just more rows. K and V travel with their G heads, and a hop costs G/H of the bytes.

# %%
heads, kv_heads = 8, 2
q = torch.randn(1, heads, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
k, v = torch.randn(2, 1, kv_heads, 8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
rows = fold(q, kv_heads)
print("q:", tuple(q.shape), " folded:", tuple(rows.shape), " k:", tuple(k.shape))
grouped = unfold(naive_attention(rows, k, v), heads)
repeated = naive_attention(q, *(x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v)))
assert torch.allclose(grouped, repeated, rtol=0, atol=1e-14)

# %% [markdown]
# ## The ring, in one process
#
# What chapter 7 found (`visible_slice`: what a rank computes of a block), on fused blocks, merged in place:

# %%
P, layout = 4, "zigzag"
mine, keys, values = ([shard(x, layout, rank, P) for rank in range(P)] for x in (q, k, v))
outs = []
for rank in range(P):
    for t in range(P):
        j = (rank - t) % P
        visible = visible_slice(layout, rank, j, [2] * P)
        block = mine[rank][:, :, visible.queries], keys[j][:, :, visible.keys], values[j][:, :, visible.keys]
        out_j, lse_j = fused_forward(*block, scale=0.5, causal=visible.triangle)
        if t == 0:  # its own block: each of its queries sees at least itself
            out, lse = out_j, lse_j
        else:
            merge_into(out[:, :, visible.queries], lse[:, :, visible.queries], out_j, lse_j)
    outs.append(out)
whole = naive_attention(q, *(x.repeat_interleave(4, dim=1) for x in (k, v)), causal=True)
assert torch.allclose(unshard(outs, layout), whole, rtol=0, atol=1e-14)
print("zigzag, causal, grouped, on fused blocks: exact")

# %% [markdown]
# ## In a model
#
# [`flash_ring.scaled_dot_product_attention`](../training/flash_ring.py) has the signature of PyTorch's own. A model that calls
# it needs three more things: its tokens and targets in the layout, rotary positions of the same layout (nothing can check that),
# and a sum of the weights' gradients over the ranks. For that sum to be right each rank's loss is a share of the whole one.
#
# ```python
# attention = partial(flash_ring.scaled_dot_product_attention, layout="zigzag")
# at = positions("zigzag", seq_len, rank, world_size)          # where this rank's tokens stand
# tokens, targets = text[:, :-1][:, at], text[:, 1:][:, at]    # shifted first
# ...
# q, k = rotary(q, at), rotary(k, at)
# out = attention(q, k, v, is_causal=True, enable_gqa=True)
# ...
# loss = F.cross_entropy(logits, targets, reduction="sum") / tokens_of_the_whole_batch
# loss.backward()
# for weight in model.parameters():
#     dist.all_reduce(weight.grad)
# ```
#
# A decoder layer with 4 query heads on 2, on four real processes, and the same layer in one:

# %%
alone = launch(workers.training_step, 1)[0]
ring = launch(workers.training_step, 4)[0]
print(f"loss alone {alone['loss']:.6f}, on the ring {ring['loss']:.6f}")
assert abs(alone["loss"] - ring["loss"]) < 1e-12
for name, gradient in alone["gradients"].items():
    assert torch.allclose(ring["gradients"][name], gradient, rtol=0, atol=1e-12)
    print(f"gradient of {name:<10}  {tuple(gradient.shape)!s:<10} the same")

# %% [markdown]
# What a ring cannot do it refuses, on every rank, before anything travels: a mask of your own, dropout, ranks that disagree.

# %%
try:
    launch(workers.disagreeing_ring, 2)
except ValueError as error:
    print(error)

# %% [markdown]
# ## How fast?
#
# The limit is one process with fused attention on all cores. Everything a ring adds, messages, merges, ranks that wait, shows
# as a share of the limit lost. Measured in turn, on the machine named in
# [the table](../bench/results/against_peers.md); `python -m bench.against_peers` measures yours.

# %%
results = record.load("against_peers")
speed.draw()

# %% [markdown]
# The project set itself targets before it measured. Not all are reached: short sequences pay for what every call costs, however
# little it computes (the ranks' agreement, messages), and two ranks on a core share it with their messages too.

# %%
for reached, line in against_peers.verdicts(results):
    print("reached" if reached else "missed ", line)
two_ranks = [
    against_peers.speeds(results, dtype="float32", world_size=2, seq_len=seq_len, case=case, method=rings[0])
    for case, rings in against_peers.CASES.items()
    for seq_len in (8192, 16_384)
]
assert round(min(min(each) for each in two_ranks), 2) == 0.93

# %% [markdown]
# ## How exact?

# %%
errors.draw()

# %% [markdown]
# In 16 bits the gradients of K and V are even better than one device's: each block's part is rounded, but the parts are added
# up in float32.
#
# > **One number to remember: 1.** Two ranks on two cores, with 8192 tokens or more in float32, compute at the speed of one process with both
# > (0.93 of it or more). A ring costs no speed if its chunks are long; what it shares out is memory.
#
# ## Questions
#
# <details><summary>Why must the backward pass of a block get the lse of the whole row, when its forward pass needs only its own?</summary>
#
# Forward results can be corrected afterwards: merging rescales them. Gradients cannot: δ and the weights enter them as a
# product, and a block's own lse makes its weights add up to 1, whatever share of the row it has.
# </details>
#
# <details><summary>Zigzag and striped leave (nearly) the same work to every rank. Why is striped slower?</summary>
#
# A kernel works in tiles. A tile on the edge of a triangle is computed whole, and half of it thrown away. Zigzag has a
# triangle in the first round only, striped in every round.
# </details>
#
# <details><summary>With four ranks on two cores, contiguous chunks lose less than their idle share says. Why?</summary>
#
# A rank that has nothing to compute leaves its core to the other rank on it. On four devices it would just wait.
# </details>
#
# ## Your turn


# %%
# A block with out_j (Sq, D) and lse_j (Sq,) is merged into out and lse by out.lerp(out_j, share[:, None]),
# which is out + share · (out_j - out). What is the share (Sq,)? Beware of overflow.
def my_share(lse, lse_j):
    return ...


print(check_merging_share(my_share))


# %%
# Attention on any kernel(q, k, v) -> (out, lse): q, k, v (S, D) in one process, K and V in `blocks` blocks
def my_attention(kernel, q, k, v, blocks):
    return ...


print(check_attention_on_a_kernel(my_attention))

# %%
# P = 8 ranks, C = 16,384 tokens each, H = 32 query heads on G = 8, D = 128, bfloat16:
# the bytes that a rank sends in one forward and one backward pass (gradients travel in float32)
my_bytes = ...

print(check_bytes_of_training(my_bytes))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_share(lse, lse_j):
#     return torch.sigmoid(lse_j - lse)
#
# def my_attention(kernel, q, k, v, blocks):
#     out, lse = kernel(q, *(x.chunk(blocks)[0] for x in (k, v)))
#     for k_j, v_j in list(zip(k.chunk(blocks), v.chunk(blocks)))[1:]:
#         out_j, lse_j = kernel(q, k_j, v_j)
#         share = torch.sigmoid(lse_j - lse)
#         out, lse = out.lerp(out_j, share[:, None]), torch.logaddexp(lse, lse_j)
#     return out
#
# block = 2 * 8 * 16_384 * 128  # numbers of K and V
# my_bytes = 7 * block * 2 + 7 * block * 2 + 8 * block * 4
# ```
# </details>
#
# You have come from softmax(QKᵀ/√D)V to a ring that trains. Read [`flash_ring.py`](../training/flash_ring.py) now, and take it home.
# Next: [9 · when is the ring free](09_hidden_communication.ipynb).
