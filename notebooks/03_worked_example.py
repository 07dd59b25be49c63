# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3 · The worked example: 4 GPUs, 8 tokens
#
# Every number of a small ring. After this chapter you can say who holds which block in which round, do one round with a
# pocket calculator, and tell why a published version of this very example ends in 3.731 where 2.269 is right.
#
# 20 minutes. The code: [`worked_example.py`](../worked_example.py), plain numpy, one file to take away.
# Next: [4 · the ring](04_the_ring.ipynb).

# %%
# %matplotlib inline
import math

import numpy as np
import torch
from ipywidgets import interact

import published_example as published
import worked_example as example
from basics.online_softmax import merge
from figures import kv_rotation
from notebooks.checks.worked_example import check_blocks_of_gpu, check_mended_sum, check_token_two_after_round_two

np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## The setting
#
# The tokens are their own queries, keys and values. Each GPU keeps its two queries for good. Its keys and values form a
# block, and the blocks go round: to GPU $r+1$, from GPU $r-1$.

# %%
example.print_setup()

# %% [markdown]
# ## The failure
#
# A published walk through this example handles one block a round, as it should, and then writes `Output += block output`.
# For token 0 it arrives at **3.731** after two rounds. No value in the example is larger than 3!

# %%
block_outputs = []
for j in (0, 3):  # the blocks that GPU 0 meets in rounds 0 and 1
    s = example.rows(j) @ example.TOKENS[0] / math.sqrt(2)
    weights = example.softmax(s)
    block_outputs.append(weights @ example.rows(j))
    print(f"token 0 and KV{j}: weights {weights}, which add to 1; output {block_outputs[-1]}")

total = sum(block_outputs)
print(f"their sum {total} has weights that add to 2")
print("(the page has [3.731 2.269], as it left out the 1/sqrt(2) in round 0: another mistake)")
assert total[0] > example.TOKENS.max()  # so it is no average of the values

# %% [markdown]
# An average of averages is no better: it gives every block the same say. Token 0 does not.

# %%
shares = published.block_shares()
print("token 0 gives KV0 ... KV3", shares, "of its attention")
assert not np.allclose(shares, 0.25, atol=0.1)

# %% [markdown]
# ## The idea
#
# Carry `m`, `l` and `o` along ([chapter 1](01_attention_to_online_softmax.ipynb)), and divide once, after the last round.
# GPU 0, all four rounds:

# %%
q = example.rows(0)  # (2, 2): tokens 0 and 1 stay on GPU 0
m, l, o = np.full(2, -np.inf), np.zeros(2), np.zeros((2, 2))
for t in range(4):
    k = v = example.rows((0 - t) % 4)  # round t brings block (r - t) mod 4
    s = q @ k.T / math.sqrt(2)
    m_new = np.maximum(m, s.max(axis=1))
    f, p = np.exp(m - m_new), np.exp(s - m_new[:, None])
    m, l, o = m_new, f * l + p.sum(axis=1), f[:, None] * o + p @ v
    print(f"round {t}, KV{-t % 4}: token 0 has m = {m[0]:.3f}, l = {l[0]:.3f}, o = {o[0]}, o / l = {o[0] / l[0]}")

assert np.allclose(o / l[:, None], example.full_attention()[:2])
print("tokens 0 and 1 of full attention:", *example.full_attention()[:2])

# %% [markdown]
# ## The picture
#
# Four rounds, three hops. The colours are the blocks; the queries never move.

# %%
kv_rotation.draw()
# %% [markdown]
# ## Every number
#
# All four GPUs, two of the four rounds. (`python worked_example.py` prints them all.)

# %%
steps = example.ring()
for t in (0, 1):
    example.print_round(t, steps[t], range(4), causal=False)

# %% [markdown]
# Scrub through all rounds and GPUs, with and without a causal mask. Which GPUs have nothing to do in round 3 of the causal
# one? (0, 1 and 2: all their keys would lie in the future.)

# %%
_ = interact(
    lambda round, gpu, causal: example.print_round(round, example.ring(causal)[round], [gpu], causal),
    round=(0, 3),
    gpu=(0, 3),
    causal=False,
)
# %% [markdown]
# After the last round:

# %%
assert example.print_result(steps, range(4), causal=False)

# %% [markdown]
# ## The same by merging
#
# Instead of carrying `(m, l, o)` a GPU may compute each block's own output and lse and `merge` them. Compare with the failure
# above: the same block outputs go in, the right result comes out.

# %%
scores = torch.tensor(example.TOKENS[0] @ example.TOKENS.T / math.sqrt(2))  # of token 0, (8,)
values = torch.tensor(example.TOKENS)
out, lse = torch.zeros(1, 2, dtype=torch.float64), torch.full((1,), -math.inf, dtype=torch.float64)
for j in (0, 3, 2, 1):
    s, v = scores[2 * j : 2 * j + 2], values[2 * j : 2 * j + 2]
    out, lse = merge(out, lse, (torch.softmax(s, 0) @ v)[None], s.logsumexp(0)[None])
    print(f"KV{j} merged: out = {out[0].numpy()}, lse = {lse[0]:.4f}")

assert np.allclose(out[0], example.full_attention()[0])

# %% [markdown]
# ## The published page, line by line
#
# Half of its rows of numbers are wrong, and so is some of its prose. Every mistake is recomputed.

# %%
_ = published.main()

# %%
letters = [letter for *_, pair in published.PUBLISHED for letter in pair]
print(f"{len(letters)} rows of numbers, {letters.count('')} of them right")
assert (len(letters), letters.count("")) == (36, 18)

# %% [markdown]
# > **One number to remember: 2.269**, not 3.731. A partial result is an average; averages do not add, they merge by $e^{\mathrm{lse}}$.
#
# ## Questions
#
# <details><summary>What moves, and what stays?</summary>
#
# K and V move. Q, the output and its statistics `m`, `l`, `o` stay on their GPU.
# </details>
#
# <details><summary>4 GPUs, 4 rounds: why only 3 hops?</summary>
#
# In round 0 everyone already has a block, its own. After round 3 everyone has met all four, so a fourth hop would bring each
# block home for nobody to use.
# </details>
#
# <details><summary>What does a GPU hold at the most, in chunks?</summary>
#
# By the paper's count six: its Q, the K and V in hand, the K and V that are arriving, and the output. `ring_attn.py` holds
# eight, as the caller keeps its own K and V. The published page counts one, and says that no block is ever on two GPUs; during a
# hop it is.
# </details>
#
# ## Your turn

# %%
# On which blocks does GPU 2 compute in rounds 0, 1, 2 and 3?
my_blocks = ...  # a list of four numbers

print(check_blocks_of_gpu(my_blocks))

# %%
# Token 2 = [1 1] is on GPU 1. After round 1 it has m = 2.121 and l = 1.979. In round 2 GPU 1 holds KV3: keys [3 1] and [3 3].
# Compute the rescale factor f = e^(m before - m), the new m and the new l, to three decimals.
my_f_m_l = ...  # three numbers

print(check_token_two_after_round_two(my_f_m_l))


# %%
# For one query: the output (P, D) and the lse (P,) of each block -> its attention (D,)
def my_mended_sum(outs, lses):
    return ...


print(check_mended_sum(my_mended_sum))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# my_blocks = [2, 1, 0, 3]
#
# my_f_m_l = (0.120, 4.243, 1.480)
#
# def my_mended_sum(outs, lses):
#     return torch.softmax(lses, 0) @ outs
# ```
# </details>
#
# Next: [4 · the ring](04_the_ring.ipynb), on real processes.
