# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8 · The trainable ring, line by line
#
# [`trainable_ring.py`](../trainable_ring.py) puts the last chapters into one file of 150 lines. You can copy it into any project: it needs PyTorch
# alone. After this chapter you can
#
# - say what each line of the ring is for, and what goes wrong without it,
# - say where a [fused kernel](../docs/glossary.md#fused-kernel) goes, and what it needs there,
# - put the ring into a model, and combine its gradients in the right way.
#
# The road, 8 of 8. You need [5 · the backward pass](05_backward.ipynb), [6 · overlap](06_overlap.ipynb) and [7 · causal
# balance](07_causal_balance.ipynb); next comes a [track](README.md#the-road-and-the-tracks).
# 20 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import inspect

import numpy as np
import torch

import trainable_ring as ring
from figures import backward_timeline
from notebooks.source import workers
from notebooks.source.checks.gradients_and_balance import check_attention_on_a_kernel, check_group_gradient
from notebooks.source.show import print_source
from ringlab.basics.naive_attention import naive_attention
from ringlab.models.transformer import TEXT, Config, Transformer, summed_loss
from ringlab.support.processes import launch

P = 4
np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## The failure
#
# The rings of chapters 4 to 7 are right, but each lacks a part: a mask, gradients or overlap. Mistakes appear where the parts meet.
# So here is the whole file on 4 processes, seven times: as it is, and with one line changed. The table shows
# the error of the output and of each gradient, as a share of its norm.

# %%
CHANGES = {
    "as it is": ("", ""),
    "1  the other half of the keys": ("(slice(C), slice(C // 2), False)", "(slice(C), slice(C // 2, C), False)"),
    "2  results averaged, not merged": ("out_j, weight)", "out_j, 0.5)"),
    "3  the lse of the block": (
        "- lse[..., None])  # (B, G, N, Sq, Sk): the",
        "- scores(q, k, triangle).logsumexp(-1)[..., None])  #",
    ),
    "4  no δ": (" - (d_out * out).sum(-1, True)", ""),
    "5  dK and dV stay where they are": ("arrive = hop(dkv, group) if j != r else None", "pass"),
    "6  the own block first, backward too": ("own_last=True", "own_last=False"),
}
first = ring.__doc__.splitlines()[0]
CHANGES["as it is"] = (first, first)
of_ranks = launch(workers.changed_rings, P, list(CHANGES.values()), device="cpu")
errors = torch.tensor(of_ranks).amax(dim=0)  # of the rank that is furthest off
print(f"{'largest error of a rank':<38}" + "".join(f"{name:>8}" for name in ("out", "dQ", "dK", "dV")))
for change, row in zip(CHANGES, errors.tolist(), strict=True):
    print(f"{change:<38}" + "".join(f"{off:8.3f}" for off in row))
    assert (max(row) < 1e-14) == (change == "as it is")

# %% [markdown]
# No change raises an error. Mistakes 3 to 6 leave the output exact: a test of the forward pass alone lets all four through.
#
# ## The idea
#
# The file answers four questions, in this order. What does a rank see of block j? What does it compute? What travels, and when? What is kept?
# Shapes are in the comments: B sequences, H query heads on G key/value heads, C tokens of a rank, D numbers a head.
#
# ## What is seen
#
# `positions` says which tokens a rank has. You cut the sequence with it, and [rotary](../docs/glossary.md#rotary-embedding) angles need it. In zigzag a
# rank has two half [chunks](../docs/glossary.md#chunk), one early and one late. `visible` says what a [causal
# mask](../docs/glossary.md#causal-mask) leaves of a block: some queries, some keys, and of the own block a triangle (chapter 7). The rest is never computed.
# A dense mask would compute it and throw it away, and zigzag would gain nothing.

# %%
print_source(ring.positions, ring.visible)

# %% [markdown]
# Mistake 1 takes the half that lies in the future. In the contiguous layout a later block leaves `slice(0)`, no query. Empty tensors run
# through all lines below and change nothing, so no line asks for that case.
#
# ## What is computed
#
# Two functions compute a block, forward and backward. **A fused kernel goes here**: [8a](08a_fused_kernels.ipynb) replaces both. The letters of `einsum` are
# the shapes: $N = H/G$ query heads `n` share a K/V head `g` ([grouped queries](../docs/glossary.md#gqa)). To `g`, the queries of its heads are just more rows.
# So K and V are never repeated, a hop sends $G/H$ of their bytes, and dK and dV are summed over `n`.

# %%
print_source(ring.scores, ring.block_forward, ring.block_backward)

# %% [markdown]
# `block_forward` returns the [log-sum-exp](../docs/glossary.md#log-sum-exp) (lse) of each row, with which the results of two blocks merge. `block_backward` gets
# `out` and `lse` of the **whole** row: only then is `p` the true weight. Mistake 3 takes the lse of the block. The sum of `d_out * out` is the
# $\delta$ of chapter 5, computed again for each block, because fused kernels ask for `out`; mistake 4 forgets it.
#
# ## What travels
#
# Only `hop` sends. It posts the send and the receive together, so no order of ranks can block. It returns at once, with a function that waits for the
# block. `group_peer` is a rank *of the group*, so a ring works in a part of a larger job.
# In `blocks` the [hop](../docs/glossary.md#hop) of the next block begins **before** `yield`, so it runs while the caller computes (chapter 6).

# %%
print_source(ring.hop, ring.blocks)

# %% [markdown]
# `kv` is K and V in one message, a copy of both (`overlap.py` sends two messages and copies nothing). It travels in the model's dtype and is
# widened where it is used: 16 bits on the wire, float32 in the sums. `own_last` moves the own block from the first
# [round](../docs/glossary.md#round) to the last, for the backward pass.
#
# ## What is kept: the forward pass
#
# `Ring` is one operation of autograd. Each block changes its output and lse: `lerp` moves `out` towards the block's result by the weight
# $e^{\mathrm{lse}_j} / (e^{\mathrm{lse}} + e^{\mathrm{lse}_j})$, and `logaddexp` adds up the sums. Mistake 2 takes the mean instead. The own block comes first,
# because in it every query sees itself: no row is empty, and nothing becomes NaN.

# %%
print_source(ring.Ring.forward)

# %% [markdown]
# It saves q, k, v, out and lse: no weights, and no block of another rank.
#
# ## What is kept: the backward pass
#
# The blocks go round a second time, and dQ stays. A rank can send dK and dV on only after it has added its share, so they travel
# one [round](../docs/glossary.md#round) after their block. The own block comes last: what it adds need not travel, and meanwhile the other shares come home:

# %%
backward_timeline.draw()

# %% [markdown]
# While rank 2 computes on block 0, the gradients of block 0 arrive from rank 1. Then rank 2 adds its share
# and sends the sum on. `arrive()` waits only after the block is computed:

# %%
print_source(ring.Ring.backward)

# %% [markdown]
# So dK and dV make P − 1 hops, as K and V do. Mistake 5 sends nothing: each rank returns what its own queries give to its own keys. Mistake 6 takes
# the own block first: a rank then returns the sums of another one. (Chapter 5 kept the share of its own block apart. This file has no
# place for it, so the own block comes last.) A second derivative is refused, because messages have no gradient.
#
# ## The door
#
# A wrong shape must not reach the messages: gloo would fill half a buffer and go on. So each rank makes one number of its shapes, dtypes, gradients or none, mask and
# layout: a hash of bytes, for Python's hash of a text differs between processes. One `all_reduce` finds the largest and the smallest. If
# they differ, every rank raises the error. A GPU waits for the `all_reduce`. When your calls cannot differ, leave out its line, the line before, and
# `or sum(both)`. The sums are float32 at least, also under autocast. There, give q, k and v in one dtype: rotary angles in float32 make q and k float32.
# `group` is a process group; of a device mesh, `mesh.get_group()`. `torch.compile` computes the ring as it is, between two graphs; `fullgraph=True` raises.

# %%
print_source(ring.ring_attention)

# %% [markdown]
# How many bits do the sums need? Here is bfloat16, with float32 sums as in the file, and with sums of 16 bits:

# %%
x = torch.randn(3, 1, 2, 2048, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
exact = naive_attention(*x.double())
off = {}
for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
    q, k, v = x.to(dtype)
    out, lse = torch.zeros_like(q)[:, :, None], torch.full(q[:, :, None].shape[:-1], -torch.inf, dtype=dtype)
    for k_j, v_j in zip(k.chunk(16, dim=2), v.chunk(16, dim=2), strict=True):  # 16 blocks in one process
        out_j, lse_j = ring.block_forward(q[:, :, None], k_j, v_j, False)
        out = torch.lerp(out, out_j, torch.sigmoid(lse_j - lse)[..., None])
        lse = torch.logaddexp(lse, lse_j)
    off[name] = (out[:, :, 0].bfloat16() - exact).norm() / exact.norm()
    print(f"sums in {name}: off by {off[name]:.3f} of the norm")
assert off["bfloat16"] > 5 * off["float32"]

# %% [markdown]
# ## In a model
#
# In a transformer, tokens meet in attention only. So a model that calls the ring runs on $P$ ranks, each with its own tokens. The file ends with
# such a loop. `at` is where this rank's tokens stand. The task needs attention: every token has to name the first token of its sequence. (Where the labels are the next
# tokens, shift the whole text first, then take `[:, at]` of both.)

# %%
print_source(ring.train)

# %% [markdown]
# A rank's loss is a **share** of the loss: the mean over its own tokens, times `len(at) / S`. So its gradients are shares too, and must be
# **added up**, as `all_reduce` does. The last lines train twice, in the ring and on one process with PyTorch's attention. The losses must agree. They run on GPUs
# where each rank has one:

# %%
print("if __name__" + inspect.getsource(ring).partition("if __name__")[2])

# %% [markdown]
# [DDP](../docs/glossary.md#ddp) and [`fully_shard`](../docs/glossary.md#fsdp) take the average instead. What does that change?
# Four processes run a small transformer ([chapter 10](10_a_model_in_the_ring.ipynb)). Each returns the loss and the
# gradients of its own tokens:

# %%
shares = launch(workers.training_step, P, device="cpu")
loss_of_the_ring = sum(loss for loss, _ in shares)

torch.manual_seed(0)
model = Transformer(Config(layers=1)).double()  # the same weights, all tokens, PyTorch's attention
tokens, labels = TEXT[:, :-1], TEXT[:, 1:]
loss = summed_loss(model(tokens, torch.arange(tokens.shape[1])), labels) / tokens.numel()
loss.backward()
exact = {name: weight.grad for name, weight in model.named_parameters()}
print(f"loss of one process {loss:.6f}, of the ring {loss_of_the_ring:.6f}")
assert abs(loss - loss_of_the_ring) < 1e-12

# %%
print("gradients of the ring, divided by those of one process:")
for name, factor in (
    ("all_reduce, which adds up", 1.0),
    ("DDP and fully_shard, which take the average", 1 / P),
    ("DDP and fully_shard, with the loss times P", P / P),
):
    combined = {weight: factor * sum(gradients[weight] for _, gradients in shares) for weight in exact}
    ratio = combined["head.weight"].norm() / exact["head.weight"].norm()
    print(f"    {name:<45}{ratio:.4f}")
    for weight, right in exact.items():
        assert torch.allclose(combined[weight], right * (factor if factor < 1 else 1), rtol=0, atol=1e-12)

# %% [markdown]
# So with DDP or `fully_shard`, multiply the loss by the number of ranks that they average over, here $P$, before `backward()`. Else every
# gradient is $1/P$ of its value. Adam hides that, because it divides by the size of the gradients; gradient clipping does not.
#
# > **One number to remember: 150.** A ring that trains is 150 lines. Four of the six mistakes above leave its output exact: check each gradient.
#
# ## Questions
#
# <details><summary>Which line makes the messages hidden, and which hop is not hidden?</summary>
#
# `arrive = hop(kv, group)` stands before `yield`. In the backward pass the first hop is not hidden: it begins and ends before any block is computed, for the own block comes last.
# </details>
#
# <details><summary>The forward pass of a block needs no lse but its own. Why must the backward pass get the lse of the whole row?</summary>
#
# Merging rescales a result of the forward pass. Nothing rescales a gradient. With its own
# lse, the weights of every block add up to 1, so those of a row would add up to the number of blocks.
# </details>
#
# ## Your turn


# %%
# Attention on any kernel(q, k, v) -> (out, lse): q, k, v (S, D) in one process, with K and V in `blocks` blocks
def my_attention(kernel, q, k, v, blocks):
    return ...


print(check_attention_on_a_kernel(my_attention))


# %%
# A kernel that knows no groups got K and V repeated: query head h used head h // (H/G). It returns dk (B, H, S, D).
# Return the gradient of the G heads that travel, (B, G, S, D)
def my_group_gradient(dk, G):
    return ...


print(check_group_gradient(my_group_gradient))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_attention(kernel, q, k, v, blocks):
#     out, lse = torch.zeros_like(q), torch.full_like(q[:, 0], -torch.inf)
#     for k_j, v_j in zip(k.chunk(blocks), v.chunk(blocks)):
#         out_j, lse_j = kernel(q, k_j, v_j)
#         out = out.lerp(out_j, torch.sigmoid(lse_j - lse)[:, None])
#         lse = torch.logaddexp(lse, lse_j)
#     return out
#
# def my_group_gradient(dk, G):
#     return dk.unflatten(1, (G, -1)).sum(dim=2)
# ```
# </details>
#
# Open [`trainable_ring.py`](../trainable_ring.py) now, copy it, and train. Then write it from an empty file in
# [the workshop](your_ring/your_ring.ipynb), design schedules in [the puzzles](puzzles/puzzles.ipynb), or make it fast in [8a](08a_fused_kernels.ipynb).
# Then take the [track](README.md#the-road-and-the-tracks) that you need.
