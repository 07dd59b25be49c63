# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · Meshes: FSDP × ring
#
# A ring divides the tokens of a sequence among ranks, but a large model must shard its weights too. A
# [mesh](../docs/glossary.md#mesh) of [ranks](../docs/glossary.md#rank) does both. After this chapter you can
#
# - say why and by which factor the gradients of a ring are too small under [DDP](../docs/glossary.md#ddp) or
#   [FSDP](../docs/glossary.md#fsdp), and cure it in one line,
# - say which sequences, which tokens and which slice of each weight a rank of a mesh holds,
# - take the norm of a gradient whose slices lie on many ranks, and clip by it,
# - train on one mesh, stop, and continue on another.
#
# Track *train*. You need chapters 1 to 8 and 10; next comes [12 · your own model](12_your_own_model.ipynb).
# 20 minutes to read, 15 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import torch
import torch.nn.functional as F

from figures import mesh as picture
from notebooks.source.checks.models import check_gradient_norm, check_rank_loss
from notebooks.source.show import print_source
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.models import mesh
from ringlab.support.processes import launch

P = 4

# %% [markdown]
# ## The failure
#
# With DDP or FSDP, multiply the loss by $P$ (chapter 8). To see why, take a model of one weight, a 2 × 2
# matrix $W$. It multiplies our 8 tokens by $W$, they attend to each other, and each token guesses the next one. The
# loss is the mean over 7 labels.
#
# In a ring, each rank has a copy of $W$ for its own [chunk](../docs/glossary.md#chunk). We do the same in one process:
# `copies[r]` is the copy of rank $r$. What is the gradient of each copy?


# %%
def token_losses(copies: torch.Tensor) -> torch.Tensor:
    """The losses of the 7 labels, (7,); copies (P, D, D): the chunk of rank r is multiplied by copies[r]."""
    chunks = TOKENS.unflatten(0, (P, -1))  # (P, C, D) = (4, 2, 2)
    x = (chunks @ copies).flatten(0, 1)[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
    out = naive_attention(x, x, x, causal=True)[0, 0]
    logits = out[:-1] @ TOKENS.T  # (7, 8): how well each of the 8 tokens would follow
    return F.cross_entropy(logits, torch.arange(1, 8), reduction="none")


def line(gradient: torch.Tensor) -> str:
    return " ".join(f"{x:>8.4f}" for x in gradient.flatten().tolist()) + f"    norm {gradient.norm():.4f}"


weight = torch.eye(2, dtype=torch.float64, requires_grad=True)  # one weight for all tokens: no ranks
(token_losses(weight.expand(P, 2, 2)).sum() / 7).backward()
exact = weight.grad

copies = torch.eye(2, dtype=torch.float64).repeat(P, 1, 1).requires_grad_()
(token_losses(copies).sum() / 7).backward()
for r in range(P):
    print(f"gradient on rank {r} ", line(copies.grad[r]))
print("their average      ", line(copies.grad.mean(dim=0)))
print("their sum          ", line(copies.grad.sum(dim=0)))
print("the right gradient ", line(exact))
assert torch.allclose(copies.grad.sum(dim=0), exact)
assert torch.allclose(copies.grad.mean(dim=0), exact / P)

# %% [markdown]
# A copy's gradient comes from the losses of its own rank, and through its K and V also from the losses of later ranks.
# (In the ring, dK and dV travel home: chapter 5.) So the four gradients are **parts of one gradient**, and their sum
# is right.
#
# DDP and `fully_shard`, which is PyTorch's FSDP, take the **average** instead, because they are made for ranks that
# have a batch each. With a ring they return $1/P$ of the right gradient, without an error or a warning.
#
# Now four real processes, with the transformer of chapter 10, in two rings of two ranks. The loss of a rank is
# *sum / count*: the sum over its own labels, divided by the number of labels of the whole batch. `mesh.every_case` wraps
# the model in each way of this chapter, computes one backward pass and gathers the gradient. It returns two numbers for
# each way: the norm of the gradient as a multiple of the right norm, and the error, which is the norm of the difference
# divided by the right norm.

# %%
results = launch(mesh.every_case, P, device="cpu")
cases = {name: (ratio, error) for name, ratio, error in results[0]}


def show(*names: str) -> None:
    for name in names:
        ratio, error = cases[name]
        print(f"{name:<50} norm x {ratio:.4f}, error {error:.4f}")


summed = ("DDP: sum / count", "fully_shard: sum / count")
show(*summed)
assert all(abs(cases[name][0] - 1 / P) < 1e-12 for name in summed)

# %% [markdown]
# **Why nobody notices.** AdamW divides each gradient by its usual size, so a factor that is the same in every step
# drops out, and the losses are equal. The factor shows where a gradient meets another number: the limit of clipping,
# eps, the weight decay of Adam, or the learning rate of SGD. So look for the gradient norm in your log, and compare it with
# the norm of one process.
#
# ## A second failure: a mean on each rank
#
# `F.cross_entropy` returns the mean over the labels that it is given. If each rank takes the mean over its own labels, the
# average over the ranks is no longer too small. But our ranks have 2, 2, 2 and 1 labels:

# %%
copies.grad = None
own_means = torch.stack([part.mean() for part in token_losses(copies).split(2)])
own_means.mean().backward()
gradient = copies.grad.sum(dim=0)
weights = [f"{1 / P / count:.4f}" for count in (2, 2, 2, 1)]
print(f"what a label counts, rank by rank: {' '.join(weights)}; right: {1 / 7:.4f}")
print(f"the loss: {own_means.mean():.4f}; right: {token_losses(copies).mean():.4f}")
ratio, error = gradient.norm() / exact.norm(), (gradient - exact).norm() / exact.norm()
print(f"the gradient: norm x {ratio:.4f}, error {error:.4f}")
print(f"the mean of a rank that holds only padding: {torch.empty(0).mean()}")
assert error > 0.1

# %% [markdown]
# The label of rank 3 counts twice as much as any other. On the four real processes one of the two sequences is short and
# padded, so the numbers of labels differ more:

# %%
own = "fully_shard: mean over the rank's own labels"
show(own)
assert abs(cases[own][0] - 1) < 0.1 < 0.4 < cases[own][1]

# %% [markdown]
# The norm is nearly right, but the error is half as large as the gradient.
#
# ## The idea
#
# Every label of the batch must count the same, and the average over ranks must be undone. **One rule does both:**
#
# $$\text{loss of a rank} = \frac{\text{sum over its labels}}{\text{number of labels on all ranks}} \cdot
# \text{number of ranks averaged over}$$
#
# For that, the ranks send each other one number: how many labels they have. In `batch_loss`, `summed_loss` is the
# cross-entropy, summed over the labels that are not padding (IGNORED); `clamp` is for a batch without labels, and the
# number of ranks comes last:

# %%
print_source(mesh.batch_loss)

# %% [markdown]
# The last factor depends on what combines the gradients of the ranks:
#
# | combined by | which | loss of a rank |
# | --- | --- | --- |
# | `all_reduce` of each gradient | adds up | sum / count |
# | `DDP` | averages over its P ranks | sum / count · P |
# | `fully_shard` over a line of all ranks | averages over dp · cp ranks | sum / count · dp · cp |
# | `fully_shard` over a mesh of two dimensions (HSDP: slices along one, copies along the other) | averages over dp · cp ranks | sum / count · dp · cp |
# | `fully_shard` with `set_gradient_divide_factor(1.0)` | adds up | sum / count |
# | `fully_shard` over cp, beside tensor parallelism (below) | averages over cp ranks | sum / count · cp |
#
# The count is the number of labels of the whole batch, also when several rings divide the batch. Here are the small model with the factor $P$, and two lines of the table on the four real processes:

# %%
copies.grad = None
(token_losses(copies).sum() / 7 * P).backward()
print("average of the 4 gradients ", line(copies.grad.mean(dim=0)))
print("the right gradient         ", line(exact))
assert torch.allclose(copies.grad.mean(dim=0), exact)
right = ("fully_shard: sum / count · 4", mesh.TENSOR_PARALLEL)
show(*right)
assert all(cases[name][1] < 1e-12 for name in right)

# %% [markdown]
# ## The mesh
#
# The ranks form a table of dp rows and cp columns: rank = dp index · cp + cp index.
#
# - **A row is a ring.** Its cp ranks divide the tokens of their sequences (*cp*:
#   [context parallel](../docs/glossary.md#context-parallelism)). K and V travel inside the row.
# - **The rows divide the batch** (*dp*: data parallel). A ring has B / dp of its B sequences.
# - **All ranks shard the weights.** For them the table is one line of dp · cp ranks, and each rank keeps
#   1 / (dp · cp) of every weight.
#
# The picture of 2 × 2. Each ring has one sequence of 8 tokens, and a weight has 8 rows:

# %%
picture.draw()

# %% [markdown]
# PyTorch makes the table with `init_device_mesh`. `mesh["cp"]` is the row of this rank, and `mesh["cp"].get_group()` is
# the [process group](../docs/glossary.md#process-group) of its ring, which the attention gets:
#
# ```python
# mesh = init_device_mesh("cuda", (dp, cp), mesh_dim_names=("dp", "cp"))
# line = init_device_mesh("cuda", (dp * cp,))  # the same ranks, for the weights
# mine = text.chunk(dp)[mesh["dp"].get_local_rank()]  # the sequences of this ring
# tokens, labels, at = shard_text(mine, "zigzag", mesh["cp"].get_local_rank(), cp)  # chapter 10
# ```
#
# Then each layer, and last the whole model, is sliced over the line:

# %%
print_source(mesh.shard_weights)

# %% [markdown]
# `fully_shard` gathers the weights of a layer before it computes, and frees them after it. So two kinds of messages
# travel in a layer, in different groups: slices of weights between all ranks, K and V inside a ring.
#
# Over dp only, `fully_shard` would never add up the parts that the ranks of a ring hold: each column would train weights of its own.
#
# ## The norm of a gradient in slices
#
# Under `fully_shard` a rank has its own slice of each gradient. Weights and gradients are `DTensor`s: tensors of which
# each process holds a part, `to_local()`. But gradients must be clipped by the norm of the whole gradient. Squares
# add up, so $\text{norm} = \sqrt{\sum_r \|\text{slices of rank } r\|^2}$.
#
# PyTorch's `clip_grad_norm_` knows DTensors, and clips by the norm of the whole gradient. Code that takes the norm of what a rank holds
# scales the slices by different factors, and the clipped gradient points in another direction.
#
# ## Tensor parallelism beside the ring
#
# [Tensor parallelism](../docs/glossary.md#tensor-parallelism) (tp) divides the
# [heads](../docs/glossary.md#head) and the inner width of the feedforward. **The ring does not change:** heads never meet in
# attention, so a ring sends the K/V heads that its ranks have. With tp 8, a rank of Llama 8B has 4 of 32 query heads and 1 of 8 K/V
# heads, for all tokens of its chunk. The tp ranks have the *same* tokens and compute the same loss, so the factor is cp, and not
# the number of all ranks.
#
# ## A run: train, stop, resume on another mesh
#
# [`ringlab/models/train.py`](../ringlab/models/train.py) trains with these parts, by one command. With a
# checkpoint, a job that was stopped goes on with `--resume`, also on another mesh. Every rank writes its slices into a
# file of its own:
#
# ```bash
# torchrun --nproc_per_node=4 -m ringlab.models.train --dp 2 --cp 2 --steps 8 --save-every 5 --out run
# torchrun --nproc_per_node=2 -m ringlab.models.train --cp 2 --steps 16 --out run --resume  # a ring of 2
# ```
#
# A rank of the second job has slices twice as large, so it reads two slices of the first job for each, of weights and of moments.
# In float32 the losses of every mesh are those of one process, but for rounding ([the test](../tests/models/test_train.py)).
#
# **What is the ring for?** Not for speed but for length. In processes of 64 MiB each, weights and optimizer included, a ring of 4
# trains on 15,936 tokens, where one process with blockwise attention reaches 5,360
# ([measured](../bench/README.md#training-a-whole-model), with activation checkpointing).
#
# > **One number to remember: 1/P = 0.2500** on 4 ranks. That is what a ring's gradients are multiplied by under DDP or
# > `fully_shard`, if the loss is sum / count. AdamW hides it, and the gradient norm shows it.
#
# ## Questions
#
# <details><summary>My loss curve on 4 ranks lies on that of one process. Are the gradients right?</summary>
#
# Not necessarily. AdamW takes the same steps with a quarter of each gradient. Compare the gradients of the first step with those of one
# process; the norm alone does not show a mean over each rank's own labels.
# </details>
#
# <details><summary>Why are the ranks of a ring neighbours, and not the ranks of a column?</summary>
#
# The ranks of a host have neighbouring numbers and the fastest links, and each hop of a ring must hide
# behind the work on one [block](../docs/glossary.md#block). PyTorch numbers the
# ranks of a mesh row by row. So write `("dp", "cp")`, with cp last.
#
# Tensor parallelism needs the fast links even more, because nothing hides its messages. So beside a ring it takes the last place,
# `("cp", "tp")`: with tp 8 on hosts of 8 GPUs, the ring goes from host to host.
# </details>
#
# ## Your turn


# %%
# The loss of a rank on a mesh of dp x cp x tp ranks. fully_shard averages over dp · cp ranks.
# total: the sum of the losses of the rank's labels; labels_here: how many they are;
# labels_of_batch: how many labels all sequences have together (at least 1)
def my_loss(total, labels_here, labels_of_batch, dp, cp, tp):
    return ...


print(check_rank_loss(my_loss))


# %%
# The norm of the gradient. slices[r] is a list of tensors: the slices of all gradients that rank r holds.
# (A weight with few rows leaves nothing to some ranks: then their slice is empty.)
def my_norm(slices):
    return ...


print(check_gradient_norm(my_norm))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_loss(total, labels_here, labels_of_batch, dp, cp, tp):
#     return total / labels_of_batch * dp * cp
#
# def my_norm(slices):
#     return sum(part.square().sum() for mine in slices for part in mine) ** 0.5
# ```
# </details>
#
# Open [`mesh.py`](../ringlab/models/mesh.py) now: rings, weights in slices, and the loss of a rank. [`train.py`](../ringlab/models/train.py) trains with them. Next: [12 · your own model](12_your_own_model.ipynb).
