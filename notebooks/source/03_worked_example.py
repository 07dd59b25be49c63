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
# This chapter shows every number of a small ring. After this chapter you can
#
# - say which GPU holds which block in which round,
# - compute one round with a pocket calculator,
# - say what is wrong when block outputs are added.
#
# The road, 3 of 8. You need [1 · online softmax](01_attention_to_online_softmax.ipynb); next comes [4 · the
# ring](04_the_ring.ipynb). 12 minutes to read, 15 for the exercises.
#
# The numbers are those of a worked example in a course on the paper. It adds averages: after two rounds
# it has 3.731 for token 0, and 2.269 is right.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import math

import numpy as np
import torch
from ipywidgets import interact

import worked_example as example
from figures import kv_rotation
from notebooks.source.checks.softmax_and_blocks import (
    check_blocks_of_gpu,
    check_mended_sum,
    check_token_two_in_round_two,
)
from ringlab.basics.online_softmax import merge

np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## The setting
#
# Each token is its own query, key and value. A GPU is one [rank](../docs/glossary.md#rank) of the ring; there are $P = 4$ of them. Each GPU has one
# [chunk](../docs/glossary.md#chunk) of the sequence: two tokens. It keeps the queries of these tokens. Their keys and values are a
# [block](../docs/glossary.md#block), and the blocks travel: GPU $r$ sends to GPU $r+1$ and receives from GPU $r-1$.

# %%
example.print_setup()

# %% [markdown]
# ## The failure
#
# The published page computes the attention of token 0 over each block alone, and then adds the outputs: `Output += block output`. Here are
# its first two rounds.

# %%
block_outputs = []
for j in (0, 3):  # the blocks on GPU 0 in rounds 0 and 1
    s = example.rows(j) @ example.TOKENS[0] / math.sqrt(2)
    weights = example.softmax(s)
    block_outputs.append(weights @ example.rows(j))
    print(f"token 0 and KV{j}: the weights {weights} add up to 1, the output is {block_outputs[-1]}")

total = sum(block_outputs)
shares = example.softmax(example.TOKENS[0] @ example.TOKENS.T / math.sqrt(2)).reshape(4, 2).sum(axis=1)
print(f"\nthe sum of both outputs is {total}")
print(f"in full attention, token 0 gives {shares} of its attention to KV0, KV1, KV2, KV3")
assert total[0] > example.TOKENS.max()  # so the sum is no average of the values
assert not np.allclose(shares, 0.25, atol=0.1)  # so the blocks do not count equally

# %% [markdown]
# The first number, 3.67, is larger than every value in the example, which no average can be: the weights of each output add up to
# 1, so those of the sum add up to 2. (The page also forgot to divide by
# $\sqrt 2$ in round 0, so its sum is 3.73.)
#
# Dividing the sum by the number of blocks does not help: then each block counts equally, and the last line shows that it must not.
#
# ## The idea
#
# Keep `m`, `l` and `o` from [chapter 1](01_attention_to_online_softmax.ipynb), update them with each block, and divide once, after the last
# [round](../docs/glossary.md#round). In round $t$, GPU $r$ computes on block $j = (r - t) \bmod 4$. Here is GPU 0:

# %%
q = example.rows(0)  # (2, 2): tokens 0 and 1 stay on GPU 0
m, l, o = np.full(2, -np.inf), np.zeros(2), np.zeros((2, 2))
for t in range(4):
    j = (0 - t) % 4  # the block in round t
    k = v = example.rows(j)
    s = q @ k.T / math.sqrt(2)  # (2, 2)
    m_new = np.maximum(m, s.max(axis=1))
    f, p = np.exp(m - m_new), np.exp(s - m_new[:, None])
    m, l, o = m_new, f * l + p.sum(axis=1), f[:, None] * o + p @ v
    print(f"round {t}, KV{j}: token 0 has m = {m[0]:.3f}, l = {l[0]:.3f}, o = {o[0]}, o / l = {o[0] / l[0]}")

assert np.allclose(o / l[:, None], example.full_attention()[:2])
print("full attention, token 0:", example.full_attention()[0])

# %% [markdown]
# ## The picture
#
# Four rounds. Between two rounds all blocks move to the next GPU; this is a [hop](../docs/glossary.md#hop). There are three hops. Colours are blocks. The
# queries never move.

# %%
kv_rotation.draw()
# %% [markdown]
# ## Every number
#
# Here are rounds 0 and 1 of all four GPUs. `python worked_example.py` prints all four rounds.

# %%
steps = example.ring()
for t in (0, 1):
    example.print_round(t, steps[t], range(4), causal=False)

# %% [markdown]
# The next cell has sliders for all rounds and GPUs, with and without a [causal mask](../docs/glossary.md#causal-mask).
#
# <details><summary>Which GPUs have nothing to compute in round 3 of the causal ring?</summary>
#
# GPUs 0, 1 and 2. All keys of their block come after their tokens.
# </details>

# %%
_ = interact(
    lambda round, gpu, causal: example.print_round(round, example.ring(causal)[round], [gpu], causal),
    round=(0, 3),
    gpu=(0, 3),
    causal=False,
)
assert [step.block > gpu for gpu, step in enumerate(example.ring(causal=True)[3])] == [True, True, True, False]

# %% [markdown]
# After the last round each GPU divides `o` by `l`:

# %%
assert example.print_result(steps, range(4), causal=False)

# %% [markdown]
# ## The same by merging
#
# There is a second right way. A GPU computes the output and the [lse](../docs/glossary.md#log-sum-exp) of each block alone, as in the failure, and combines
# them with `merge` from chapter 1.

# %%
scores = torch.tensor(example.TOKENS[0] @ example.TOKENS.T / math.sqrt(2))  # of token 0, (8,)
values = torch.tensor(example.TOKENS)
out, lse = torch.zeros(1, 2, dtype=torch.float64), torch.full((1,), -math.inf, dtype=torch.float64)
for j in (0, 3, 2, 1):
    s, v = scores[2 * j : 2 * j + 2], values[2 * j : 2 * j + 2]
    out, lse = merge(out, lse, (torch.softmax(s, 0) @ v)[None], s.logsumexp(0)[None])
    print(f"after KV{j}: out = {out[0].numpy()}, lse = {lse[0]:.4f}")

assert np.allclose(out[0], example.full_attention()[0])

# %% [markdown]
# > **One number to remember: 2.269.** This is the first output of token 0. A partial result is an average. Averages cannot be added; they are merged with
# > the weights $e^{\mathrm{lse}}$.
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
# In round 0 each GPU already has a block, its own. After round 3 each GPU has computed on all four blocks. A fourth hop would bring each block back
# to its first GPU, where nobody needs it.
# </details>
#
# <details><summary>How much does a GPU hold at most, counted in chunks?</summary>
#
# Six: Q, the K and V in use, the K and V that arrive, and the output ([all pages count like this](../docs/memory.md)). The published page says
# that no block is ever on two GPUs. During a hop it is: the sender and the receiver both hold it.
# </details>
#
# ## Your turn

# %%
# On which blocks does GPU 2 compute in rounds 0, 1, 2 and 3?
my_blocks = ...  # a list of four numbers

print(check_blocks_of_gpu(my_blocks))

# %%
# Token 2 = [1 1] is on GPU 1. After round 1 it has m = 2.121 and l = 1.979. In round 2 GPU 1 holds KV3: keys [3 1] and [3 3].
# Compute the rescaling factor f = e^(old m - new m), the new m and the new l, to three decimals.
my_f_m_l = ...  # three numbers: f, m, l

print(check_token_two_in_round_two(my_f_m_l))


# %%
# For one query: the output and the lse of each block, outs (P, D) and lses (P,) -> its attention (D,)
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
# Open [`worked_example.py`](../worked_example.py) now: all four rounds in one file that needs only numpy. Next: [4 · the ring](04_the_ring.ipynb), on real
# processes.
