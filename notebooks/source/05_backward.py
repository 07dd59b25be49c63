# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5 · The backward pass: gradients that travel
#
# To train a model, the ring must also compute gradients. After this chapter you can
#
# - compute the gradients of one [block](../docs/glossary.md#block) from what the forward pass saved,
# - say why dK and dV travel and dQ does not,
# - count the [hops](../docs/glossary.md#hop) and the bytes of the [backward pass](../docs/glossary.md#backward-pass).
#
# The road, 5 of 8. You need [4 · the ring](04_the_ring.ipynb); next comes [6 · overlap](06_overlap.ipynb).
# 19 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import numpy as np
import torch

from figures import gradients_home
from notebooks.source import workers
from notebooks.source.checks.gradients_and_balance import check_added_so_far, check_softmax_backward
from notebooks.source.show import print_source
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.ring.backward import ring_backward
from ringlab.support.processes import launch

np.set_printoptions(precision=4, floatmode="fixed", suppress=True)

# %% [markdown]
# ## The setting
#
# The 8 tokens on 4 [ranks](../docs/glossary.md#rank), as before: rank $r$ holds tokens $2r$ and $2r + 1$. Q, K and V have
# the same numbers, but they are three tensors, so each has a gradient of its own. The gradient of the loss with respect
# to the output is given; it is called `d_out`. (In a model it comes from the next layer.)
#
# Autograd on [full attention](../docs/glossary.md#full-attention), in float64, tells us the right dQ, dK and dV. Here dX
# always means the gradient of the loss with respect to X.

# %%
P, scale = 4, 2**-0.5
d_out = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

q, k, v = (TOKENS.clone().requires_grad_() for _ in "qkv")  # (S, D) = (8, 2) each
p = torch.softmax(q @ k.T * scale, dim=-1)  # (8, 8), the softmax weights
out = p @ v
out.backward(d_out)
exact = {"dq": q.grad, "dk": k.grad, "dv": v.grad}


def rows(rank: int) -> slice:
    """The two tokens of a rank."""
    return slice(2 * rank, 2 * rank + 2)


# %% [markdown]
# ## The failure
#
# Let each rank call autograd on its own part of the forward pass. A rank has its own queries. All other blocks of K and
# V came to it as messages. A message carries numbers; it does not carry the computation behind them. So for autograd a
# block that arrived is a new input.


# %%
def autograd_on(rank: int) -> tuple[torch.Tensor, ...]:
    """What autograd finds on this rank alone: dq (2, 2) of its own queries, dk and dv (8, 2) of all blocks."""
    my_q, all_k, all_v = (x.clone().requires_grad_() for x in (TOKENS[rows(rank)], TOKENS, TOKENS))
    my_out = torch.softmax(my_q @ all_k.T * scale, dim=-1) @ all_v
    return torch.autograd.grad(my_out, (my_q, all_k, all_v), d_out[rows(rank)])


alone = [autograd_on(rank) for rank in range(P)]
print("largest error      dq       dk       dv   of the rank's own tokens")
for rank, (dq, dk, dv) in enumerate(alone):
    mine = {"dq": dq, "dk": dk[rows(rank)], "dv": dv[rows(rank)]}
    off = {name: (mine[name] - exact[name][rows(rank)]).abs().max() for name in exact}
    print(f"rank {rank}        " + "".join(f"{value:9.4f}" for value in off.values()))
    assert off["dq"] < 1e-14
    assert min(off["dk"], off["dv"]) > 0.01

# %% [markdown]
# dQ is right. dK and dV are not, and no error was raised: each rank knows only its own share. The four shares add up to the right gradient:

# %%
assert torch.allclose(sum(dk for _, dk, _ in alone), exact["dk"], rtol=0, atol=1e-14)
assert torch.allclose(sum(dv for _, _, dv in alone), exact["dv"], rtol=0, atol=1e-14)
print("the sum of the four shares of dk, and of dv, is right")

# %% [markdown]
# So something must add up shares that lie on four ranks. And autograd kept the weights of all
# keys on each rank, $C \times S$ numbers, where $C = S/P$ is the length of a [chunk](../docs/glossary.md#chunk). A ring is
# built to avoid just that.
#
# ## The idea
#
# **1. Compute the weights again.** A [weight](../docs/glossary.md#weights) is $p = e^{s - \mathrm{lse}}$, where $s$ is the
# [score](../docs/glossary.md#score) and lse the [log-sum-exp](../docs/glossary.md#log-sum-exp) of the whole row: one number for
# each query. The forward pass saves q, k, v, out and lse of its own chunk, and no weights. The backward pass computes
# the weights of one block at a time.
#
# **2. Take [δ](../docs/glossary.md#delta) from the output.** With $\circ$ for the product element by element, the backward
# pass of softmax is
#
# $$dp = dO\,V^\top, \qquad ds = p \circ (dp - \delta), \qquad \delta = \textstyle\sum_{\text{keys}} p \circ dp .$$
#
# The sum runs over all keys, also over those that have not arrived yet. But
# $\sum p\,(dO \cdot V) = dO \cdot \sum p\,V = dO \cdot O$, because $\sum p\,V$ is the output. So
# $\delta = \sum_D dO \circ O$. A rank has its own $dO$ and $O$: it knows $\delta$ before any block arrives.

# %%
lse = (q @ k.T * scale).detach().logsumexp(dim=-1)  # (8,), from the forward pass
delta = (d_out * out.detach()).sum(dim=-1)  # (8,), without any key
assert torch.allclose(delta, (p * (d_out @ v.T)).sum(dim=-1))
print("delta =", delta.numpy())

# %% [markdown]
# Now the gradients of one block take six lines. We compare them with what autograd found on rank 0 for block 3 (tokens
# 6 and 7).


# %%
def block_gradients(q, k, v, d_out, lse, delta):
    """What the queries of one rank and the keys of one block add to dq, dk and dv: (2, 2) each."""
    p = torch.exp(q @ k.T * scale - lse[:, None])  # 1  the weights, from the lse of the whole row
    dv = p.T @ d_out  #                              2
    dp = d_out @ v.T  #                              3
    ds = p * (dp - delta[:, None])  #                4  the backward pass of softmax
    dq = scale * ds @ k  #                           5
    dk = scale * ds.T @ q  #                         6
    return dq, dk, dv


def of(rank: int, j: int, lse: torch.Tensor = lse) -> tuple[torch.Tensor, ...]:
    """The same for the queries of this rank and block j."""
    block = TOKENS[rows(j)]
    return block_gradients(TOKENS[rows(rank)], block, block, d_out[rows(rank)], lse[rows(rank)], delta[rows(rank)])


dq, dk, dv = of(rank=0, j=3)
assert torch.allclose(dk, alone[0][1][rows(3)])
assert torch.allclose(dv, alone[0][2][rows(3)])
assert torch.allclose(sum(of(0, j)[0] for j in range(P)), exact["dq"][rows(0)])
print(f"what rank 0 adds to dk of block 3: {dk.numpy().round(4).tolist()}")

# %% [markdown]
# **3. Let dK and dV travel with their block.** dQ belongs to the queries, and they stay: a rank adds up its dQ where it
# is. dK and dV belong to the block. What rank $j$ finds for its own block in [round](../docs/glossary.md#round) 0 is at home already. From round 1 on
# each rank adds its share and then passes on all four: K, V, dK and dV. After the last round the sums of block $j$ are on rank $j - 1$, and one
# more hop brings them home. As in chapter 4, the ring in one process is a list that turns.

# %%
nothing = torch.zeros(2, 2, dtype=torch.float64)
block_in_hand = [(j, nothing, nothing) for j in range(P)]
dq, own = torch.zeros(8, 2, dtype=torch.float64), []  # these stay
for t in range(P):
    for rank in range(P):
        j, dk, dv = block_in_hand[rank]
        assert j == (rank - t) % P
        share = of(rank, j)
        dq[rows(rank)] += share[0]
        if t == 0:
            own.append(share)
        else:
            block_in_hand[rank] = j, dk + share[1], dv + share[2]
    one_hop_short = block_in_hand
    block_in_hand = block_in_hand[-1:] + block_in_hand[:-1]  # a hop: of K and V, and of dK and dV from round 1 on

assert [j for j, _, _ in block_in_hand] == [0, 1, 2, 3]  # each block is back on its rank
dk, dv = (torch.cat([block[i] + mine[i] for block, mine in zip(block_in_hand, own, strict=True)]) for i in (1, 2))
for name, mine in (("dq", dq), ("dk", dk), ("dv", dv)):
    assert torch.allclose(mine, exact[name], rtol=0, atol=1e-14)
    print(f"{name} is autograd's; its last row: {mine[7].numpy()}")

# %% [markdown]
# ## The picture
#
# K and V hop after all rounds but the last, dK and dV after all rounds but the first: $P - 1$ hops each. In the paper, and in most public rings, the own
# share travels too, and comes back to the same rank: $P$ hops. With 2 ranks that is twice the bytes.

# %%
gradients_home.draw()

# %% [markdown]
# ## Four mistakes
#
# All of them keep every shape, so nothing warns you. The first takes the log-sum-exp of the scores **in the block**
# instead of that of the whole row. The weights of a query then add up to 1 in each block, so to 4 in all.

# %%
s = (q @ k.T * scale).detach()
lse_of_block = [torch.cat([s[rows(r), rows(j)].logsumexp(dim=-1) for r in range(P)]) for j in range(P)]
wrong_lse = [torch.cat([sum(of(r, j, lse_of_block[j])[i] for r in range(P)) for j in range(P)]) for i in (1, 2)]
short = [torch.cat([block[i] for block in one_hop_short]) for i in (1, 2)]
print("largest error          dk       dv")
for name, (wrong_dk, wrong_dv) in {
    "lse of the block": wrong_lse,
    "one hop too few": short,
    "dk, dv swapped": (dv, dk),
}.items():
    off = [(wrong_dk - exact["dk"]).abs().max(), (wrong_dv - exact["dv"]).abs().max()]
    print(f"{name:<16}{off[0]:9.4f}{off[1]:9.4f}")
    assert min(off) > 0.1

# %% [markdown]
# Does a test notice the swap? Not if one tensor `x` is q, k and v at once. Its gradient is the sum of all three:

# %%
x = TOKENS[None, None].clone().requires_grad_()
naive_attention(x, x, x).backward(d_out[None, None])
assert torch.allclose(x.grad[0, 0], dq + dk + dv)
assert torch.allclose(x.grad[0, 0], dq + dv + dk)  # swapped: the same sum
print("one x for q, k and v: the test passes with dk and dv swapped")

# %% [markdown]
# So test with three tensors, and compare each gradient by itself.
#
# The fourth mistake depends on the dtype. Sums are kept in float32. If a sum begins with `total = first.float()` and
# `first` is float32 already, this makes no copy: the sum overwrites `first`. Begin with `torch.zeros(...)`.
#
# ## On real processes
#
# `ringlab.ring.backward` makes the ring one operation of autograd. Its backward pass, `ring_backward`, computes the six lines in each round.
# dQ and `d_own`, the dK and dV of round 0, stay; `d_block` has dK and dV of the block in hand. `hop`, that of chapter 4, passes on K and V after
# each round but the last, and `d_block` after each but the first:

# %%
print_source(ring_backward, last=12)

# %% [markdown]
# Four processes run it on our 8 tokens, first in float64 and then in bfloat16. The bytes that rank 0 sends are
# recorded.

# %%
inputs = TOKENS[None, None], d_out[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
in_float64, in_bfloat16 = launch(workers.ring_gradients, P, *inputs, [torch.float64, torch.bfloat16])[0]
for name, right in exact.items():
    assert torch.allclose(in_float64[name][0, 0], right, rtol=0, atol=1e-14)
    print(f"{name} of 4 processes is autograd's")

forward, backward = in_bfloat16["sent forward"], in_bfloat16["sent backward"]
print("bfloat16, bytes that rank 0 sends in each hop, forward: ", forward)
print("bfloat16, bytes that rank 0 sends in each hop, backward:", backward)
numbers = 1 * 1 * 2 * 2  # B H C D, the numbers of one chunk of K
assert sum(forward) == (P - 1) * 2 * numbers * 2
assert sum(backward) == (P - 1) * 2 * numbers * 2 + (P - 1) * 2 * numbers * 4
assert sum(backward) == 3 * sum(forward)

# %% [markdown]
# > **One number to remember: 3.** In bfloat16 a rank sends 3 times as many bytes in the backward pass as in the forward
# > pass: K and V with 2 bytes a number, dK and dV with 4.
#
# ## Questions
#
# <details><summary>K and V leave rank j and need P − 1 hops. Why do the sums of dK and dV need as many, and not one more?</summary>
#
# K and V begin on rank $j$ and must reach the other $P - 1$. The sums begin one hop later, on rank $j + 1$, and go one
# hop further, home to rank $j$. They would need $P$ hops if they began on rank $j$: a closed circle.
# </details>
#
# <details><summary>Each rank could keep its shares of all dK and dV, and add them up over the ranks at the end. Why does the ring not do this?</summary>
#
# The shares of all blocks are as long as the whole sequence: $2 \cdot BHSD$ numbers in float32 on every rank. The
# memory of a ring must grow with $C = S/P$, not with $S$.
# </details>
#
# <details><summary>A block costs two matrix products in the forward pass and five in the backward pass. Are messages easier or harder to hide
# behind the computing in the backward pass?</summary>
#
# In bfloat16 harder: there is 2.5 times the work, but there are 3 times the bytes. In float32 easier: 2.5 times the
# work and 2 times the bytes. Chapter 6 hides them.
# </details>
#
# ## Your turn


# %%
# Step 4 of the six, for n queries and a block of c keys.
# p and dp are (n, c), out and d_out (n, D); return ds (n, c)
def my_ds(p, dp, out, d_out):
    return ...


print(check_softmax_backward(my_ds))


# %%
# `rank` has just computed in round t. Which ranks have added to the dK and dV of this block that it holds now?
# What a rank adds to its own block in round 0 does not travel. Return a set of numbers
def my_added(rank, t, P):
    return ...


print(check_added_so_far(my_added))


# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_ds(p, dp, out, d_out):
#     delta = (d_out * out).sum(dim=-1, keepdim=True)
#     return p * (dp - delta)
#
# def my_added(rank, t, P):
#     return {(rank - i) % P for i in range(max(t, 1))}
# ```
# </details>
#
# Open [`backward.py`](../ringlab/ring/backward.py) now: it has the six steps, tile by tile, and makes the ring an
# operation of autograd. Next: [6 · overlap](06_overlap.ipynb).
