# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Appendix: the same ring in JAX, side by side with PyTorch
#
# The [paper](https://arxiv.org/abs/2310.01889)'s own code is in JAX. After this page you can
#
# - read a ring made of `shard_map`, `ppermute` and `scan`, and say which line of the PyTorch ring each of them is,
# - say what JAX keeps for the [backward pass](../docs/glossary.md#backward-pass), and give the ring a better one,
# - find the [hops](../docs/glossary.md#hop) in the compiled program.
#
# You need chapters 1 to 8, and JAX on Python 3.11 or newer (`pip install -e '.[jax]'`); no chapter needs it.
# 20 minutes to read.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import PartitionSpec

from notebooks.source import workers
from ringlab.basics.naive_attention import TOKENS
from ringlab.support.processes import launch
from ringlab.ways.jax.ring import gradients, on_mesh, virtual_devices

P = 4
mesh = virtual_devices(P)  # they share this machine's CPU; call this before JAX computes anything
jax.config.update("jax_enable_x64", True)  # otherwise JAX turns float64 into float32
np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## The same ring, in other words
#
# | | PyTorch, in this project | JAX |
# |---|---|---|
# | who computes | P processes; each runs the program | one process; `shard_map` runs the function on each device of a `Mesh` |
# | my number, and how many | `rank`, `world_size` | `lax.axis_index("ring")`, `lax.axis_size("ring")` |
# | my tokens | `scatter`, or your data loader | `PartitionSpec("ring")`: this axis is cut |
# | a hop | `send` and `recv` | `lax.ppermute`, with the pairs (from, to) |
# | even ranks send first | needed where a send blocks | not needed: it is one operation for all devices |
# | the [rounds](../docs/glossary.md#round) | `for t in range(P)` | `lax.scan`: the body is compiled once |
# | m, l, o | tensors, replaced in each round | the carry of the scan |
# | an own backward pass | `torch.autograd.Function` | `jax.custom_vjp` |
#
# **A hop** is a permutation: a list of pairs (from, to). **A `scan`** is the loop: it runs a body of the form
# `body(carry, x) -> (carry, output)` and returns the last carry and all outputs. Here each device begins with its own
# number, as if that were its [block](../docs/glossary.md#block), and passes it on three times:


# %%
def hop(block):
    return lax.ppermute(block, "ring", [(i, (i + 1) % P) for i in range(P)])


def block_numbers(_):
    def one_round(block, t):
        return hop(block), block  # the carry of the next round; the output of this one

    last, before = lax.scan(one_round, lax.axis_index("ring"), jnp.arange(P - 1))
    return jnp.append(before, last)[:, None]


columns = PartitionSpec(None, "ring")  # the second axis is cut
in_hand = np.array(jax.shard_map(block_numbers, mesh=mesh, in_specs=columns, out_specs=columns)(jnp.zeros((1, P))))
print("round" + "".join(f"  device {r}" for r in range(P)))
for t in range(P):
    print(f"{t:>5}" + "".join(f"{f'KV{in_hand[t, r]}':>10}" for r in range(P)))
assert all(in_hand[t, r] == (r - t) % P for t in range(P) for r in range(P))

# %% [markdown]
# This is the schedule of chapter 4. The scan runs its body $P - 1$ times, hop included. So when it ends, each device has one more
# block in hand, and computes on it while nothing travels. (The
# listing in the paper's appendix A scans $P$ rounds. All rounds of a scan are alike, so its K and V make one hop more than needed.)
#
# **The ring**, for our 8 tokens. `fold` is the update of chapter 1:


# %%
def fold(state, q, k, v):
    """Fold keys k and values v (C, D) into the (m, l, o) of queries q (C, D)."""
    m, l, o = state
    scores = q @ k.T / q.shape[1] ** 0.5
    m_new = jnp.maximum(m, scores.max(axis=1))
    p, f = jnp.exp(scores - m_new[:, None]), jnp.exp(m - m_new)
    return m_new, f * l + p.sum(axis=1), f[:, None] * o + p @ v


def plain_ring(q, k, v):
    """What each device runs: its chunks (C, D) of q, k and v -> its chunk of the output."""

    def one_round(carry, t):
        state, k, v = carry
        return (fold(state, q, k, v), hop(k), hop(v)), None  # no output

    l, o = 0 * q[:, 0], 0 * q
    (state, k, v), _ = lax.scan(one_round, ((l - jnp.inf, l, o), k, v), jnp.arange(P - 1))
    m, l, o = fold(state, q, k, v)  # the last block
    return o / l[:, None]


rows = PartitionSpec("ring")  # the first axis, that of the tokens, is cut
plain = jax.jit(jax.shard_map(plain_ring, mesh=mesh, in_specs=rows, out_specs=rows))
x = jnp.asarray(TOKENS.numpy())  # (S, D) = (8, 2)
out = np.array(plain(x, x, x))
for token, row in ((0, [2.2688, 1.6500]), (1, [1.9678, 1.9311]), (7, [2.9806, 2.9527])):
    print(f"token {token}: {out[token]}")
    assert np.abs(out[token] - row).max() < 5e-5

# %% [markdown]
# ## The failure
#
# JAX can differentiate this ring: it goes through the rounds in reverse. For that it must keep what each round
# computed, above all the [weights](../docs/glossary.md#weights) `p` of each block. How many bytes does one device keep?
# `eval_shape` answers without computing anything. Take one [head](../docs/glossary.md#head) of D = 64 in float32, and 4 devices.
# `on_mesh` is the ring of [`ringlab/ways/jax/ring.py`](../ringlab/ways/jax/ring.py), which has a backward pass of its own.


# %%
def saved(ring, shape) -> int:
    """The bytes that one device keeps from the forward pass for the backward pass; q, k and v have this shape."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    kept = jax.tree.leaves(jax.eval_shape(lambda q, k, v: jax.vjp(ring, q, k, v)[1], x, x, x))
    return sum(array.size * array.dtype.itemsize for array in kept) // P


lengths = [1024, 2048, 4096, 8192, 16384]
of_jax = [saved(plain, (S, 64)) for S in lengths]
ours = [saved(on_mesh(mesh), (1, 1, S, 64)) for S in lengths]
print(" tokens    JAX's own    with a backward pass of its own")
for S, theirs, mine in zip(lengths, of_jax, ours, strict=True):
    print(f"{S:>7}{theirs / 2**20:>9.1f} MiB{mine / 2**20:>16.1f} MiB")
assert all(3.3 < after / before < 4.1 for before, after in pairwise(of_jax))  # 4 times in the end
for S, theirs, mine in zip(lengths, of_jax, ours, strict=True):
    C = S // P
    assert abs(mine - 4 * (4 * C * 64 + C)) < 100  # q, k, v, out and lse, 4 bytes a number
    assert 1 < theirs / (4 * 2 * S * C) < 1.5  # two arrays of S · C numbers, and smaller ones

# %% [markdown]
# JAX keeps two arrays of $S \cdot C$ numbers on each device, where $C = S/P$ is its [chunk](../docs/glossary.md#chunk). With
# twice the tokens that is four times as much: the S × S matrix is back, in P parts.
#
# ## The idea
#
# The cure is that of chapter 5. Keep q, k, v, out and the [log-sum-exp](../docs/glossary.md#log-sum-exp) of each row.
# Compute the weights again in the backward pass, let dQ stay, and let dK and dV travel with their block. `custom_vjp`
# ties the two passes together: one function returns the result and what is to be kept; the other takes what was kept
# and the gradient from above, and returns the gradients.
#
# The forward pass is `plain_ring`, which then returns the lse, too. Here is the backward pass for our tokens. `add_block` adds
# what the block in hand gives to dQ, dK and dV, in the six steps of chapter 5. In a round K and V hop on, and dK and dV follow
# them with what this round added. The last line is the hop that brings them home:


# %%
def plain_backward(saved, d_out):
    """What each device runs: q, k, v, out (C, D) and lse (C,) -> its chunks of dQ, dK and dV."""
    q, k, v, out, lse = saved
    scale, delta = q.shape[1] ** -0.5, (d_out * out).sum(axis=1, keepdims=True)

    def add_block(sums, k, v):
        p = jnp.exp(scale * q @ k.T - lse[:, None])  # the weights, computed again
        ds = p * (d_out @ v.T - delta)
        return sums[0] + scale * ds @ k, sums[1] + scale * ds.T @ q, sums[2] + p.T @ d_out

    def one_round(carry, t):
        sums, k, v = carry
        d_q, d_k, d_v = add_block(sums, k, v)
        return ((d_q, hop(d_k), hop(d_v)), hop(k), hop(v)), None

    zeros = 0 * q, 0 * k, 0 * v
    (sums, k, v), _ = lax.scan(one_round, (zeros, k, v), jnp.arange(P - 1))
    d_q, d_k, d_v = add_block(sums, k, v)
    return d_q, hop(d_k), hop(d_v)


def with_lse(q, k, v):
    scores = q @ k.T * q.shape[1] ** -0.5
    return jax.nn.softmax(scores) @ v, jax.nn.logsumexp(scores, axis=1)


(exact, lse), pull = jax.vjp(with_lse, x, x, x)
d_exact = jnp.sin(jnp.arange(16.0)).reshape(8, 2)
ours = jax.shard_map(plain_backward, mesh=mesh, in_specs=((rows,) * 5, rows), out_specs=(rows,) * 3)
for mine, right in zip(ours((x, x, x, exact, lse), d_exact), pull((d_exact, 0 * lse)), strict=True):
    assert jnp.abs(mine - right).max() < 1e-13
print("dQ, dK and dV are those of one device")

# %% [markdown]
# [`jax/ring.py`](../ringlab/ways/jax/ring.py) has both passes for tensors (B, H, C, D), in tiles, with masks and
# layouts. We use it from here on.
#
# On our 8 tokens, against the ring of chapter 5 on four PyTorch processes. `gradients` returns out, dQ, dK and dV. We
# compile it once and keep the compiled program, to look into it below.

# %%
tokens = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
d_out = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0), dtype=tokens.dtype)
x, d_out_jax = jnp.asarray(tokens.numpy()), jnp.asarray(d_out.numpy())
program = jax.jit(partial(gradients, on_mesh(mesh))).lower(x, x, x, d_out_jax).compile()
in_jax = program(x, x, x, d_out_jax)
(in_torch,) = launch(workers.ring_gradients, P, tokens, d_out, [torch.float64])[0]
for name, mine in zip(("out", "dq", "dk", "dv"), in_jax, strict=True):
    assert torch.allclose(torch.tensor(np.array(mine)), in_torch[name], rtol=0, atol=1e-14)
    print(f"{name:<3} of 4 devices in JAX and of 4 processes in PyTorch: the same to 1e-14")

# %% [markdown]
# ## Read the program
#
# XLA has compiled the ring for its devices, as one program. A hop is a `collective-permute` in it. How many are there,
# and how often does each run?

# %%
hops = [line for line in program.as_text().splitlines() if " collective-permute(" in line]
in_loops = sum("/while/" in line for line in hops)
print("collective-permutes in the program:", len(hops))
print(f"    in the loops: 2 forward, run {P - 1} times, and {in_loops - 2} backward, run {P - 2} times")
print(f"    outside: {len(hops) - in_loops}, run once")
print(f"    hops of an array on each device: {2 * (P - 1) + (in_loops - 2) * (P - 2) + len(hops) - in_loops}")
assert all("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}" in line for line in hops)
assert (in_loops, len(hops)) == (6, 10)

# %% [markdown]
# In the loops: K and V in the forward pass; K, V, dK and dV in the backward pass. Outside the loops: the first hop of K and
# V in the backward pass, and the last hop of dK and dV, which go home.
#
# On this CPU a hop is one operation, and nothing is hidden. On GPUs and TPUs, XLA can split a hop into a start and a
# done, and put computing between them that does not need its result. In our ring the hops of K and V need nothing that
# their round computes, so they can be hidden. We have not run this on an accelerator.
#
# ## In a model
#
# Call `ring_attention` inside the `shard_map` that your model has already, on local chunks. Another axis of the mesh,
# for example `data` for the batch, does not disturb it. Positions follow the [layout](../docs/glossary.md#layout), as in
# chapter 7.
#
# ```python
# from ringlab.ways.jax.ring import ring_attention
#
# cut = PartitionSpec("data", "ring")
#
# @partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), cut), out_specs=...)
# def loss(weights, tokens):  # tokens (batch / data, C), in the order of the layout
#     ...
#     out = ring_attention(q, k, v, axis_name="ring", causal=True, layout="zigzag")
# ```
#
# > **One number to remember: 4.** With a backward pass of its own, a device keeps 4 chunks for it: q, k, v and out (and
# > one number for each row, its lse). JAX's own keeps $2 \cdot S \cdot C$ numbers, the weights among them.
#
# ## Questions
#
# <details><summary>Would PyTorch's autograd on a ring of plain operations fail in the same way?</summary>
#
# It would also keep the weights of each round. And it would fail worse: autograd does not see messages, so dK and dV
# would be the share of one rank only, without an error (the failure of chapter 5). JAX knows how to go back through
# `ppermute`: the same pairs, turned round.
# </details>
#
# <details><summary>Under a causal mask the ring of <code>jax/ring.py</code> skips hidden tiles with <code>lax.cond</code>. Why not with <code>if</code>,
# as in PyTorch?</summary>
#
# There is one program for all devices, and it is traced once. Which block a device holds depends on its number, and
# that is known only when the program runs. An `if` is decided while JAX traces, a `cond` on the device.
# </details>
#
# Open [`jax/ring.py`](../ringlab/ways/jax/ring.py) now: the program of this page. Each device runs the tiles of [`jax/block.py`](../ringlab/ways/jax/block.py) between two hops.
# Then use the ring that speaks your framework: this one, or [`flash_ring.py`](../ringlab/ring/flash_ring.py).
