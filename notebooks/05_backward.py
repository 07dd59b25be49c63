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
# To train, the ring must also go backwards. After this chapter you can compute the gradients of one block from what the
# forward pass saved, say why dK and dV travel and dQ does not, and count hops and bytes.
#
# 20 minutes. The code: [`training/backward.py`](../training/backward.py). Before: [4 · the ring](04_the_ring.ipynb).

# %%
# %matplotlib inline
import numpy as np
import torch

from basics.naive_attention import TOKENS, naive_attention
from figures import gradients_home
from notebooks import workers
from notebooks.checks.backward import check_added_so_far, check_bytes_sent_back, check_softmax_backward
from support.processes import launch
from training.backward import tile_backward

np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## The setting
#
# The 8 tokens on 4 ranks, as before. The queries, keys and values have the same numbers, but are three tensors, so each has a
# gradient of its own. From above comes `d_out`, the gradient of the loss by the output. Autograd on the whole, in float64, is
# our oracle; it also tells us the gradients by the weights and by the scores.

# %%
P, scale = 4, 2**-0.5
q, k, v = (TOKENS.clone().requires_grad_() for _ in "qkv")  # (S, D) = (8, 2) each
scores = q @ k.T * scale  # (8, 8)
weights = torch.softmax(scores, dim=-1)
out = weights @ v
d_out = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

scores.retain_grad()
weights.retain_grad()
out.backward(d_out, retain_graph=True)
exact = {"dq": q.grad, "dk": k.grad, "dv": v.grad}
lse = scores.detach().logsumexp(dim=-1)  # (8,): the forward pass saves it, and out, and no weights


def rows(rank: int) -> slice:
    """The two tokens of a rank."""
    return slice(2 * rank, 2 * rank + 2)


# %% [markdown]
# ## The failure
#
# In the forward pass block 0 was used on **every** rank. Let each rank compute dK and dV of its own block from what it has at
# home: its own queries. The shapes are right, and the numbers are not.


# %%
def tile(rank: int, j: int, lse: torch.Tensor, delta: torch.Tensor) -> list[torch.Tensor]:
    """What the queries of `rank` and block j add to dq, dk and dv: (2, 2) each."""
    parts = [x[None, None] for x in (TOKENS[rows(rank)], TOKENS[rows(j)], TOKENS[rows(j)], d_out[rows(rank)])]
    return [x[0, 0] for x in tile_backward(*parts, lse[None, None], delta[None, None], scale)]


delta = (d_out * out.detach()).sum(dim=-1)  # (8,): what it is for comes below
for j in range(P):
    _, own_dk, own_dv = tile(j, j, lse[rows(j)], delta[rows(j)])
    off = [(mine - exact[name][rows(j)]).abs().max() for name, mine in (("dk", own_dk), ("dv", own_dv))]
    print(f"block {j}, queries of rank {j} only: dk is off by {off[0]:.3f}, dv by {off[1]:.3f}")
    assert min(off) > 0.01

# %% [markdown]
# Another way to fail: all four ranks add their part, but each takes the log-sum-exp of the scores **in the block** instead of
# that of the whole row. Then the weights of a query add up to 1 in each block, so to 4 in all.

# %%
wrong = {name: torch.zeros(8, 2, dtype=torch.float64) for name in exact}
for rank in range(P):
    for j in range(P):
        lse_of_block = scores.detach()[rows(rank), rows(j)].logsumexp(dim=-1)
        d_q, d_k, d_v = tile(rank, j, lse_of_block, delta[rows(rank)])
        wrong["dq"][rows(rank)] += d_q
        wrong["dk"][rows(j)] += d_k
        wrong["dv"][rows(j)] += d_v
for name in exact:
    off, largest = (wrong[name] - exact[name]).abs().max(), exact[name].abs().max()
    print(f"with the lse of the block {name} is off by {off:.3f}; its largest number is {largest:.3f}")
    assert off > 0.1

# %% [markdown]
# ## The idea
#
# The forward pass keeps `q, k, v, out, lse` of the chunk. A weight is $e^{s - \mathrm{lse}}$, so every rank can compute the
# weights of any block anew, with the **true** sum of the whole row in it, and then go back through that block alone. The
# backward pass of softmax seems to need whole rows, because of its sum over all keys:
#
# $$dS_{ij} = W_{ij}\,\bigl(dW_{ij} - \textstyle\sum_{j'} W_{ij'}\,dW_{ij'}\bigr), \qquad dW_{ij} = dO_i \cdot V_j$$
#
# But that sum is $\sum_{j'} W_{ij'}\,(dO_i \cdot V_{j'}) = dO_i \cdot O_i$, as $\sum_{j'} W_{ij'} V_{j'}$ is the output itself.
# Call it $\delta_i$. A rank has its own `d_out` and `out`, so it knows $\delta$ before any block arrives.

# %%
assert torch.allclose(delta, (weights * weights.grad).sum(dim=-1))
print("delta =", delta.numpy())

# %% [markdown]
# Now one block in six steps: the queries of rank 0 (tokens 0 and 1), and block 3 (tokens 6 and 7). Each step is compared with
# autograd on the same part of the graph. (`W'` is the transpose of `W`, and `*` multiplies element by element.)

# %%
here, there = rows(0), rows(3)
Q, K, V, dO = (x.detach()[at] for x, at in ((q, here), (k, there), (v, there), (d_out, here)))


def step(name: str, mine: torch.Tensor, autograd: torch.Tensor) -> None:
    print(f"{name:<34} {mine.numpy().round(4).tolist()}")
    assert torch.allclose(mine, autograd)


def share(result: torch.Tensor, by: torch.Tensor, gradient: torch.Tensor, at: slice) -> torch.Tensor:
    """Autograd's gradient of a part of the graph, at some tokens."""
    return torch.autograd.grad(result, by, gradient, retain_graph=True)[0][at]


W = torch.exp(Q @ K.T * scale - lse[here, None])
step("1  W  = exp(Q K' scale - lse)", W, weights[here, there])
dV = W.T @ dO
step("2  dV = W' dO", dV, share(out[here], v, dO, there))
dW = dO @ V.T
step("3  dW = dO V'", dW, weights.grad[here, there])
dS = W * (dW - delta[here, None])
step("4  dS = W * (dW - delta)", dS, scores.grad[here, there])
dQ = scale * dS @ K
step("5  dQ = scale dS K", dQ, share(scores[here, there], q, dS, here))
dK = scale * dS.T @ Q
step("6  dK = scale dS' Q", dK, share(out[here], k, dO, there))

# %% [markdown]
# dQ of step 5 belongs to the queries at home: add it up there. dK and dV belong to the block, and every rank has a part of them.
# So **they travel with the block**: each rank adds its part and passes all four on. Again the ring is a list that turns.

# %%
hands = [(j, torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)) for j in range(P)]
d_q = torch.zeros(8, 2, dtype=torch.float64)  # stays
for t in range(P):
    for rank in range(P):
        j, d_k, d_v = hands[rank]
        assert j == (rank - t) % P
        parts = tile(rank, j, lse[rows(rank)], delta[rows(rank)])
        d_q[rows(rank)] += parts[0]
        hands[rank] = (j, d_k + parts[1], d_v + parts[2])
    one_hop_short = hands
    hands = hands[-1:] + hands[:-1]  # a hop after every round, also after the last

assert [j for j, _, _ in hands] == [0, 1, 2, 3]  # home
d_k, d_v = (torch.cat([hand[i] for hand in hands]) for i in (1, 2))
for name, mine in (("dq", d_q), ("dk", d_k), ("dv", d_v)):
    assert torch.allclose(mine, exact[name], rtol=0, atol=1e-14)
    print(name, "is autograd's; its last row:", mine[7].numpy())

# %% [markdown]
# ## The picture
#
# K and V need $P - 1$ hops, as in the forward pass. Their gradients need $P$: after the last round the gradients of block $j$
# are complete, but on rank $j - 1$. The last hop carries only them.

# %%
gradients_home.draw()
# %% [markdown]
# ## Traps
#
# Seen in published code, or easy to make. The shapes fit, so nothing warns you.

# %%
short = torch.cat([hand[1] for hand in one_hop_short]), torch.cat([hand[2] for hand in one_hop_short])
traps = {"one hop short": short, "dk and dv swapped": (d_v, d_k), "dk + dv for both": (d_k + d_v, d_k + d_v)}
for name, (dk, dv) in traps.items():
    off = [(dk - exact["dk"]).abs().max(), (dv - exact["dv"]).abs().max()]
    print(f"{name:<18} dk is off by {off[0]:.3f}, dv by {off[1]:.3f}")
    assert min(off) > 0.1

# Does a test see it? Not one that compares only the gradient of x, where x is q, k and v in one:
x = TOKENS[None, None].clone().requires_grad_()
naive_attention(x, x, x).backward(d_out[None, None])
assert torch.allclose(x.grad[0, 0], d_q + d_k + d_v)
assert torch.allclose(x.grad[0, 0], d_q + d_v + d_k)  # swapped: the same sum
print("one x for q, k and v: the swap of dk and dv changes nothing")

# %% [markdown]
# So test with three tensors, and compare each gradient by itself.
#
# The next trap depends on the dtype. Sums are kept in float32, so one writes `total = first.float()` and adds in place. Where
# `first` is already float32, `.float()` makes no copy:

# %%
for dtype in (torch.bfloat16, torch.float32):
    first = torch.ones(2, dtype=dtype)
    total = first.float()
    total += 1
    print(f"{dtype}: after the sum the input is {first.tolist()}")
    assert (first == 1).all() == (dtype == torch.bfloat16)

# %% [markdown]
# In bfloat16 all is well, and in float32 the input is overwritten. Begin with `torch.zeros(...)` of the right dtype, as
# [`training/backward.py`](../training/backward.py) does, or say `.clone()`.
#
# ## On real processes
#
# `training.backward.ring_attention` is the ring as one operation of autograd: its forward pass saves chunks, and its backward
# pass is the ring above with real messages.

# %%
inputs = TOKENS[None, None], d_out[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
gradients, _, _ = launch(workers.whole_ring_backward, P, *inputs)[0]
for (name, right), mine in zip(exact.items(), gradients, strict=True):
    assert torch.allclose(mine[0, 0], right, rtol=0, atol=1e-14)
    print(f"{name} of 4 processes is autograd's")

# %% [markdown]
# What does it cost? The same in bfloat16, where K and V travel in 2 bytes a number, and their gradients, which are sums, in the
# 4 of float32. The bytes are recorded as they are sent:

# %%
_, forward, backward = launch(workers.whole_ring_backward, P, *(x.bfloat16() for x in inputs))[0]
print("forward, bytes of rank 0 by hop: ", forward)
print("backward, bytes of rank 0 by hop:", backward)

numbers = 1 * 1 * 2 * 2  # B H C D of one chunk
assert sum(forward) == (P - 1) * 2 * numbers * 2
assert sum(backward) == (P - 1) * 2 * numbers * 2 + P * 2 * numbers * 4
assert backward[0] == 3 * forward[0]

# %% [markdown]
# > **One number to remember: 3.** In bfloat16 a hop of the backward pass carries 3 times the bytes of a forward one: K and V
# > with 2 bytes a number, dK and dV with 4. In all a rank sends $(P-1) \cdot 2 \cdot BHCD \cdot 2 + P \cdot 2 \cdot BHCD \cdot 4$
# > bytes.
#
# ## Questions
#
# <details><summary>Why do dK and dV need P hops when K and V need P − 1?</summary>
#
# K and V must get to each rank, and begin on one of them: $P - 1$ hops. dK and dV must also come back to where they began,
# since their optimizer, or the layer below, is there: a closed circle of $P$ hops.
# </details>
#
# <details><summary>Each rank could also keep its parts of all dK and dV, and one reduce-scatter at the end would add them
# up. Why not?</summary>
#
# Those parts have the length of the whole sequence, $2 \cdot BHSD$ numbers in float32 on every rank. A ring is there so that a
# rank's memory grows with $C = S/P$, not with $S$.
# </details>
#
# <details><summary>The backward pass has 5 products of matrices a block, the forward pass 2. Is it easier or harder to hide
# the messages behind the computing?</summary>
#
# Harder, in bfloat16: 2.5 times the work and 3 times the bytes, so $3/2.5 = 1.2$ times the bytes for the same work. In float32 it
# is easier: 2 times the bytes.
# </details>
#
# ## Your turn


# %%
# Step 4, for n queries and a block of c keys.
# weights and d_weights are (n, c), out and d_out (n, D) -> d_scores (n, c)
def my_d_scores(weights, d_weights, out, d_out):
    return ...


print(check_softmax_backward(my_d_scores))


# %%
# `rank` has just computed in round t. Which ranks have added to the dK and dV that it holds now?
# A set of numbers.
def my_added(rank, t, world_size):
    return ...


print(check_added_so_far(my_added))

# %%
# P = 8, S = 1,048,576 tokens, B = 1, H = 32, D = 128, bfloat16:
# how many bytes does a rank send in the backward pass?
my_bytes_back = ...

print(check_bytes_sent_back(my_bytes_back))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_d_scores(weights, d_weights, out, d_out):
#     delta = (d_out * out).sum(dim=-1, keepdim=True)
#     return weights * (d_weights - delta)
#
# def my_added(rank, t, world_size):
#     return {(rank - i) % world_size for i in range(t + 1)}
#
# my_bytes_back = (8 - 1) * 2 * (32 * 131_072 * 128) * 2 + 8 * 2 * (32 * 131_072 * 128) * 4
# ```
# </details>
#
# Read [`training/backward.py`](../training/backward.py) now: `tile_backward` is the six steps, `ring_backward` the list that turns.
# Next: [6 · overlap](06_overlap.ipynb).
