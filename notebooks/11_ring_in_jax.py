# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · The same ring in JAX, side by side with PyTorch
#
# The paper's own code is in JAX. After this chapter you can read a ring in `shard_map`, `ppermute` and `scan`, say which line of
# the PyTorch ring each of them is, give it a backward pass of your own, and find the hops in the compiled program.
#
# 20 minutes. The code: [`training/jax_ring.py`](../training/jax_ring.py). It needs JAX, on Python 3.11 or newer:
# `pip install -r requirements-jax.txt`. Before: [10 · how far does it reach](10_how_far_does_it_reach.ipynb).

# %%
# %matplotlib inline
from functools import partial
from itertools import pairwise
from unittest import mock

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
from jax import lax
from jax.sharding import PartitionSpec

from basics.naive_attention import TOKENS, naive_attention
from figures import style
from notebooks import workers
from notebooks.checks.ring_in_jax import check_arrays_passed_on, check_pairs_of_a_hop, check_scan_in_python
from support.processes import launch
from training import jax_ring
from training.jax_ring import gradients, on_mesh, ring_forward, virtual_devices

P = 4
mesh = virtual_devices(P)  # they share this machine's CPU; to be said before JAX begins to work
jax.config.update("jax_enable_x64", True)  # else JAX makes float32 of every float64
np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## The failure
#
# JAX can differentiate anything, a ring too: it goes through the rounds backwards. For that it must keep what each round
# computed on the way, and that is its weights. Here the ring without a backward pass of its own, and with it. We only ask
# what would be saved (`eval_shape` computes nothing), with one head of D = 64 in float32 on 4 devices:


# %%
def saved(ring, seq_len: int) -> int:
    """The bytes that one device keeps from the forward pass for the backward pass."""
    x = jax.ShapeDtypeStruct((1, 1, seq_len, 64), jnp.float32)
    kept = jax.tree.leaves(jax.eval_shape(lambda q, k, v: jax.vjp(ring, q, k, v)[1], x, x, x))
    return sum(array.size * array.dtype.itemsize for array in kept) // P


lengths = [1024, 2048, 4096, 8192, 16384]
ours = [saved(on_mesh(mesh), seq_len) for seq_len in lengths]
without_ours = mock.patch.object(jax_ring, "_ring", lambda *chunks: ring_forward(*chunks)[0])
with without_ours:
    jaxs = [saved(on_mesh(mesh), seq_len) for seq_len in lengths]

print(" tokens   JAX's own        ours")
for seq_len, with_jax, with_ours in zip(lengths, jaxs, ours, strict=True):
    print(f"{seq_len:>7} {with_jax / 2**20:>7.1f} MiB {with_ours / 2**20:>7.1f} MiB")
assert all(3.9 < after / before < 4.1 for before, after in pairwise(jaxs))  # 4 times
assert all(1.9 < after / before < 2.1 for before, after in pairwise(ours))  # 2 times

# %% [markdown]
# The tiles kept the square away within a round; kept for all rounds, they are the square again. On each device there are three arrays
# of S · C numbers, weights and what led to them, then a mask, and the running sums after every tile. With twice the tokens it is
# four times as much.

# %%
figure, ax = plt.subplots(figsize=(7, 3.4), facecolor=style.PAGE)
ax.set_facecolor(style.PAGE)
for name, values, colour in (("JAX's own", jaxs, "#B0568A"), ("ours: q, k, v, out, lse", ours, style.INK)):
    mebibytes = [value / 2**20 for value in values]
    ax.loglog(lengths, mebibytes, "o-", color=colour, base=2)
    label = {"xytext": (0, 12), "textcoords": "offset points", "ha": "right", "color": colour}
    ax.annotate(name, (lengths[2], mebibytes[2]), **label)
ax.set_xticks(lengths, [f"{seq_len:,}" for seq_len in lengths])
ax.set_yticks([1, 16, 256, 1024], ["1 MiB", "16 MiB", "256 MiB", "1 GiB"])
ax.set_ylim(0.12, 2500)
ax.set(xlabel="tokens", title="what one of 4 devices keeps for the backward pass")
ax.spines[["top", "right"]].set_visible(False)
ax.grid(color=style.FAINT)

# %% [markdown]
# ## The idea
#
# The same ring, and the same reasons. Only who does what has other names:
#
# | | PyTorch, in this project | JAX, in `training/jax_ring.py` |
# |---|---|---|
# | who computes | P processes, each runs the program | one process; `shard_map` runs the function on each device of a `Mesh` |
# | my number, and how many | `rank`, `world_size` | `lax.axis_index("ring")`, `lax.axis_size("ring")` |
# | my tokens | `scatter`, or your data loader | `PartitionSpec(None, None, "ring")`: the third axis is cut |
# | a hop | `isend` and `irecv` in one batch | `lax.ppermute` with the pairs (from, to) |
# | even ranks send first | needed, if sends block | not needed: one operation for all devices |
# | the rounds | `for t in range(P)` | `lax.scan`: the body is compiled once |
# | overlap | two buffers, wait after computing | the hop does not depend on the computing; XLA may run both |
# | m, l, o | tensors, updated | the carry of the scan |
# | an own backward pass | `torch.autograd.Function` | `jax.custom_vjp` |
# | kept for it | `ctx.save_for_backward(...)` | the second result of the forward function |
# | skip what is hidden | `if`, known in advance | `lax.cond`, decided on the device |
# | ranks that disagree | a small message first, then ValueError | cannot: there is one program; shapes are checked while it is traced |
#
# **A hop** is a permutation. Let each device begin with its own number, as if it were the block, and pass it on three times:


# %%
def devices_say(_):
    own = lax.axis_index("ring")

    def one_round(block, t):
        coming = lax.ppermute(block, "ring", [(i, (i + 1) % P) for i in range(P)])
        return coming, block  # what goes on to the next round, and what this round leaves behind

    last, before = lax.scan(one_round, own, jnp.arange(P - 1))
    return jnp.append(before, last)[:, None]


columns = PartitionSpec(None, "ring")
say = jax.shard_map(devices_say, mesh=mesh, in_specs=columns, out_specs=columns)
held = np.array(say(jnp.zeros((1, P))))
print("round" + "".join(f"  device {r}" for r in range(P)))
for t in range(P):
    print(f"{t:>5}" + "".join(f"{f'KV{held[t, r]}':>10}" for r in range(P)))
assert all(held[t, r] == (r - t) % P for t in range(P) for r in range(P))

# %% [markdown]
# The schedule of chapter 4. `scan` runs the body P − 1 times, hop included, and the last block is left over: the ring computes on
# it after the scan, where there is no hop. (The paper's listing scans P rounds, so that its K and V take a P-th hop, home, for nothing: all
# rounds of a scan are alike.)
#
# **The worked example.** The 8 tokens on 4 devices; `on_mesh` cuts them up, runs the ring, and puts the result together:

# %%
x = jnp.asarray(TOKENS.numpy())[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
ring = on_mesh(mesh)
out = np.array(ring(x, x, x))[0, 0]
for token, row in ((0, [2.2688, 1.6500]), (1, [1.9678, 1.9311]), (7, [2.9806, 2.9527])):
    print(f"token {token}: {out[token]}")
    assert np.abs(out[token] - row).max() < 5e-5
assert np.abs(out - naive_attention(*[TOKENS[None, None]] * 3)[0, 0].numpy()).max() < 1e-14

# %% [markdown]
# **The backward pass** is that of chapter 5: weights anew from lse, dQ at home, dK and dV with their block. Forwards and backwards
# are one walk around the ring with different work on a tile; what stays and what travels is said in its arguments:
#
# ```python
# # the rows of queries and their results stay; the block and its results travel
# (m, l, o), _ = go_round(ring, tile_forward, (q,), (m, l, o), (k, v), ())
# d_q, d_kv = go_round(ring, tile_backward, (q, d_out, lse, delta), d_q, (k, v), (d_k, d_v))
# ```
#
# `custom_vjp` ties the two together: one function gives the result and what is to be kept, the other takes what was kept and the
# gradient from above. We compare with PyTorch: autograd on full attention, and the ring of chapter 5 on four processes.

# %%
tokens = TOKENS[None, None]
d_out = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0), dtype=tokens.dtype)
in_jax = gradients(ring, x, x, x, jnp.asarray(d_out.numpy()))
in_torch = [launch(workers.whole_ring, P, tokens)[0]]
in_torch += launch(workers.whole_ring_backward, P, tokens, d_out)[0][0]
leaves = [tokens.clone().requires_grad_() for _ in "qkv"]
exact = naive_attention(*leaves)
autograd = [exact.detach(), *torch.autograd.grad(exact, leaves, d_out)]
for name, mine, of_ranks, right in zip(("out", "dq", "dk", "dv"), in_jax, in_torch, autograd, strict=True):
    mine = torch.tensor(np.array(mine))
    assert torch.allclose(mine, right, rtol=0, atol=1e-14)
    assert torch.allclose(mine, of_ranks, rtol=0, atol=1e-14)
    print(f"{name:<3} of 4 devices in JAX, of 4 processes in PyTorch, of autograd: the same to 1e-14")

# %% [markdown]
# In float32 they differ in the last digits, as sums do that are added up in another order:

# %%
generator = torch.Generator().manual_seed(1)
q, k, v, d_out32 = torch.randn(4, 1, 2, 64, 16, generator=generator).unbind()
in_jax = gradients(ring, *(jnp.asarray(y.numpy()) for y in (q, k, v, d_out32)))
leaves = [y.clone().requires_grad_() for y in (q, k, v)]
full = torch.nn.functional.scaled_dot_product_attention(*leaves)
full.backward(d_out32)
for name, mine, right in zip(
    ("out", "dq", "dk", "dv"), in_jax, (full.detach(), *(y.grad for y in leaves)), strict=True
):
    assert mine.dtype == jnp.float32
    off = (torch.tensor(np.array(mine)) - right).abs().max().item()
    assert off < 5e-6
    print(f"{name:<3} JAX's ring less torch's full attention: {off:.1e}")

# %% [markdown]
# ## Read the program
#
# JAX first traces a function into a *jaxpr*, a list of operations on arrays of known shape. It is the whole program, of every
# device: nothing can hide in it. Here is its outline, for 2048 tokens, with the shapes of what is sent and of what products make:


# %%
def inside(equation):
    for parameter in equation.params.values():
        for inner in parameter if isinstance(parameter, tuple) else (parameter,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def outline(jaxpr, depth=0) -> None:
    for equation in jaxpr.eqns:
        name, line = equation.primitive.name, ""
        if name in ("ppermute", "dot_general"):
            line = f"{name:<12} {equation.outvars[0].aval.shape}"
        elif name == "scan":
            line = f"scan, {equation.params['length']} times"
        elif name in ("cond", "shard_map"):
            line = name
        if line:
            print("    " * depth + line)
        for inner in inside(equation):
            outline(inner, depth + bool(line))


long = jnp.zeros((1, 1, 2048, 64), jnp.float32)
outline(jax.make_jaxpr(ring)(long, long, long).jaxpr)

# %% [markdown]
# In the scan of 3 rounds come the hops of K and V first; what follows in the round does not wait for them. Then tiles of queries, tiles
# of keys, and in a tile that is not hidden two products, of 256 × 256 scores. After the scan the same for the last block, with no
# hop. No array is as large as the square of a chunk, 512 × 512; the tests walk through this list and check it.
#
# XLA compiles that list for the devices. What has become of the hops, forwards and backwards?

# %%
compiled = jax.jit(partial(gradients, ring)).lower(long, long, long, long).compile().as_text()
hops = [line for line in compiled.splitlines() if " collective-permute(" in line]
in_loops = sum("/while/" in line for line in hops)
print("collective-permutes in the program:", len(hops))
print(f"    in the loops {in_loops}, each run {P - 1} times; outside {len(hops) - in_loops}, run once")
print(f"    hops of an array on each device: {in_loops * (P - 1) + len(hops) - in_loops}")
assert all("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}" in line for line in hops)
assert "collective-permute-start" not in compiled

# %% [markdown]
# K and V forwards, K, V, dK and dV backwards; and outside the loops dK and dV, home. On this CPU a hop is one operation, which
# takes what time it takes: no overlap is to be seen here. On GPUs and TPUs XLA can split it into
# `collective-permute-start` and `collective-permute-done` and place computing between them, where the program permits it (we
# have not run this there). Ours does for K and V: their hop needs nothing of its round. (dK and dV go on when the round's part is in them; the gradients of
# [`flash_ring.py`](../training/flash_ring.py) travel a round behind, to be hidden too.)
#
# ## In a model
#
# Call `ring_attention` inside the `shard_map` that your model has already, on local chunks. Another axis of the mesh, such as
# `data` for the batch, does not disturb it. Positions follow the layout, as in chapter 7.
#
# ```python
# from training.jax_ring import ring_attention
#
# cut = PartitionSpec("data", "ring")
#
# @partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), cut), out_specs=...)
# def loss(weights, tokens):  # tokens (batch / data, C), dealt in the layout
#     ...
#     out = ring_attention(q, k, v, axis_name="ring", causal=True, layout="zigzag")
# ```
#
# What does not fit is refused while JAX traces, before anything runs:

# %%
three, two = jnp.zeros((1, 3, 8, 2)), jnp.zeros((1, 2, 8, 2))
for whole, options in (((three, two, two), {}), ((x, x, x), {"layout": "spiral"})):
    try:
        on_mesh(mesh, **options)(*whole)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError("it was accepted")

# %% [markdown]
# > **One number to remember: 4.** With its own backward pass a device keeps 4 chunks, q, k, v and out, and one number for each row,
# > lse, however many devices there are. With JAX's it keeps the weights: S · C of them.
#
# ## Questions
#
# <details><summary>PyTorch's autograd on a ring of plain operations: would it fail in the same way?</summary>
#
# Yes, it would keep the weights of each round too. And worse: autograd does not see through `isend` and `irecv`, so dK and dV
# would be those of one rank only (the failure of chapter 5), without an error. JAX knows the transpose of `ppermute`: the
# same pairs the other way.
# </details>
#
# <details><summary>The mask comes from an array of positions, and hidden tiles are skipped by <code>cond</code>. Why not by
# <code>if</code>, as in PyTorch?</summary>
#
# There is one program for all devices, traced once. Which block a device holds depends on its number, which is known only
# when it runs. An `if` is decided while tracing, a `cond` on the device.
# </details>
#
# <details><summary>Contiguous chunks and a causal mask: device 0 skips three of its four blocks. Is it done earlier?</summary>
#
# No. It waits in the next hop for the others; that is chapter 7, and `layout="zigzag"` is the cure here as well.
# </details>
#
# ## Your turn


# %%
# The pairs (from, to) that make ppermute a hop of the ring, for P devices: a list
def my_pairs(P):
    return ...


print(check_pairs_of_a_hop(my_pairs))


# %%
# lax.scan in Python: body(carry, x) -> (carry, y); returns the last carry and the list of all y
def my_scan(body, carry, xs):
    return ...


print(check_scan_in_python(my_scan))


# %%
# How many arrays does each of P devices pass on in one forward and one backward pass?
# K and V of one hop are two.
def my_hops(P):
    return ...


print(check_arrays_passed_on(my_hops))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_pairs(P):
#     return [(i, (i + 1) % P) for i in range(P)]
#
# def my_scan(body, carry, xs):
#     ys = []
#     for x in xs:
#         carry, y = body(carry, x)
#         ys.append(y)
#     return carry, ys
#
# def my_hops(P):
#     return 2 * (P - 1) + 2 * (P - 1) + 2 * P  # K, V forwards; K, V backwards; dK, dV
# ```
# </details>
#
# Read [`training/jax_ring.py`](../training/jax_ring.py) now, `go_round` first. Then take home the one that speaks your framework:
# this one, or [`training/flash_ring.py`](../training/flash_ring.py).
