# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1 · From attention to online softmax
#
# You know [attention](../docs/glossary.md#attention): $\mathrm{softmax}(QK^\top/\sqrt D)\,V$. A softmax needs all scores of a row, and Ring Attention
# never has them in one place. So it computes a softmax piece by piece. After this chapter you can
#
# - compute the attention of a row from a few keys at a time,
# - merge two results over different keys into one,
# - say why partial results must be rescaled.
#
# The road, 1 of 8. You need softmax attention only; next comes [2 · blockwise attention and
# memory](02_blockwise_attention.ipynb). 16 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import math

import numpy as np
import torch
from ipywidgets import interact

from figures import kv_rotation
from notebooks.source.checks.softmax_and_blocks import check_merge_two, check_running_update, check_safe_softmax
from notebooks.source.show import print_source
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.basics.online_softmax import finish, merge, start, update

np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## The failure
#
# A textbook defines softmax as $e^{s_i} / \sum_j e^{s_j}$. Computed like this, it fails for large [scores](../docs/glossary.md#score): $e^{1000}$ is
# larger than any float32 or float64, so it becomes `inf`, and `inf / inf` is `nan`.

# %%
scores = torch.tensor([1000.0, 1001.0, 1002.0])
weights = scores.exp() / scores.exp().sum()
print("as in the textbook:           ", weights)

m = scores.max()
shifted = (scores - m).exp() / (scores - m).exp().sum()
print("after subtracting the largest:", shifted)

assert weights.isnan().all()
assert torch.allclose(shifted, torch.softmax(scores, 0))

# %% [markdown]
# The cure is to subtract the largest score $m$ first. This multiplies the numerator and the denominator by the same $e^{-m}$, so the
# result does not change. Now no exponent is above 0.
#
# But to know the largest score, we need **all** scores of the row first. Attention has $S$ rows (one for each query) of $S$ scores (one for each
# key). For all rows at once, as a GPU computes them, these are $S^2$ numbers, which soon fill any memory:

# %%
for S in (8, 1024, 32 * 1024, 1024 * 1024):
    print(f"S = {S:>9,} tokens: {4 * S * S:>17,} bytes for the scores of one head in float32")

# %% [markdown]
# ## The idea
#
# Read the scores of a row in pieces, and keep three running values. This is [online softmax](../docs/glossary.md#online-softmax).
#
# | | what it is | update with new scores $s$ and their values $v$ |
# |---|---|---|
# | $m$ | the largest score so far | $m' = \max(m, \max s)$ |
# | $l$ | the sum of $e^{s-m}$ so far | $l' = f\,l + \sum e^{s-m'}$ |
# | $o$ | the sum of $e^{s-m}\,v$ so far | $o' = f\,o + \sum e^{s-m'}\,v$ |
#
# The [rescaling factor](../docs/glossary.md#rescaling-factor) is $f = e^{m-m'}$. Why is it needed? The old $l$ and $o$ were computed with the old
# maximum: every term in them has the factor $e^{-m}$. The new terms have the factor $e^{-m'}$. Terms can be added only when they have the same factor.
# Multiplying the old sums by $f$ gives them the new one, because $e^{-m} \cdot e^{m-m'} = e^{-m'}$.
#
# After the last key, $o/l$ is the attention of the row. Here is all of it for one row.
#
# Most chapters use the same tiny example: 8 tokens of 2 numbers. Each token is its own query, key and value, so $Q = K = V$
# and $D = 2$. Token 0 reads the 8 keys two at a time:

# %%
q = TOKENS[0]  # (D,) = (2,)
m, l, o = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(2)
print("tokens      m       l      o              o / l so far")
for i in range(0, 8, 2):
    k = v = TOKENS[i : i + 2]  # (2, D): two keys and their values
    s = k @ q / math.sqrt(2)  # (2,): their scores
    m_new = torch.maximum(m, s.max())
    f = torch.exp(m - m_new)  # the rescaling factor; 0 at first, because m is -inf
    p = torch.exp(s - m_new)  # (2,): their weights, not yet divided by l
    m, l, o = m_new, f * l + p.sum(), f * o + p @ v
    print(f"{i} and {i + 1}  {m:.4f}  {l:.4f}  {o[0]:.4f} {o[1]:.4f}  {o[0] / l:.4f} {o[1] / l:.4f}")

x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
exact = naive_attention(x, x, x)[0, 0, 0]  # row 0 of full attention, computed by its definition
assert torch.allclose(o / l, exact)
print("full attention, row 0:          ", " ".join(f"{value:.4f}" for value in exact.tolist()))

# %% [markdown]
# The last `o / l` equals [full attention](../docs/glossary.md#full-attention). At no time did we have more than two scores.
#
# **What happens without the rescaling factor?** Keys that came early get a wrong weight. There is no error and no `nan`, only a wrong
# result. With only `l` rescaled, `o` is too large: the weights add up to more than 1. With only `o`, to less than 1:

# %%
for rescaled in ("nothing", "only l", "only o"):
    m, l, o = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(2)
    for i in range(0, 8, 2):
        k = v = TOKENS[i : i + 2]
        s = k @ q / math.sqrt(2)
        m, old = torch.maximum(m, s.max()), m
        l = l * torch.exp(old - m) if rescaled == "only l" else l
        o = o * torch.exp(old - m) if rescaled == "only o" else o
        l, o = l + torch.exp(s - m).sum(), o + torch.exp(s - m) @ v
    print(f"{rescaled} rescaled:", (o / l).numpy(), "  exact:", exact.numpy())
    assert not torch.allclose(o / l, exact, atol=0.1)

# %% [markdown]
# ## The picture
#
# Each colour is one [block](../docs/glossary.md#block): two keys and their values. A block keeps its colour in all chapters. Here token 0 reads the
# blocks in the order 0, 3, 2, 1, in which the ring will bring them. The result is the same. Each part of a bar is the weight of one block,
# $\sum e^{s-m}/l$. When a new block arrives, $l$ grows and the older parts shrink.

# %%
kv_rotation.running_softmax()

# %% [markdown]
# The next cell has two sliders, for one token and the keys it has seen. (Sliders need a running kernel.)
#
# <details><summary>Which token gives the largest share of its attention to the last two keys?</summary>
#
# Token 7: 98%.
# </details>


# %%
def show(token: int, keys_seen: int) -> None:
    scores = TOKENS[token] @ TOKENS[:keys_seen].T / math.sqrt(2)
    m = scores.max()
    l = (scores - m).exp().sum()
    out = torch.softmax(scores, 0) @ TOKENS[:keys_seen]
    print(f"token {token} after {keys_seen} keys: m = {m:.3f}, l = {l:.3f}, o / l = {out.numpy()}")


_ = interact(show, token=(0, 7), keys_seen=(1, 8))
shares = torch.softmax(TOKENS @ TOKENS.T / math.sqrt(2), dim=1)[:, 6:].sum(dim=1)
assert shares.argmax() == 7 and f"{shares[7]:.0%}" == "98%"

# %% [markdown]
# ## The same for all rows
#
# Three functions do the same for all rows, heads and sequences at once. A `State` is `(m, l, o)`. `start` makes the first one: m = −inf,
# l = 0 and o = 0, in float32 at least (`accumulation_dtype`).

# %%
print_source(start)

# %% [markdown]
# `update` is the loop body above, line for line: `rescale` is f, and `weights` is p. `_finite(m)` is m, with 0 in place of −inf: in a row
# without keys, `-inf - (-inf)` would be `nan`.

# %%
print_source(update)

# %% [markdown]
# `finish` divides. It returns two values: the output, and the [log-sum-exp](../docs/glossary.md#log-sum-exp)
# $\mathrm{lse} = m + \log l = \log \sum e^s$. The lse is the logarithm of the softmax's denominator. It says how much this result counts
# beside another one.

# %%
print_source(finish)

# %% [markdown]
# ## Merge two results
#
# One machine computes attention over keys 0 and 1, another one over keys 2 to 7. Each output is already divided by its own
# $l$, so it is a weighted average of values. In the average over all keys, part $a$ has the share
# $e^{\mathrm{lse}_a}$ of the whole sum $e^{\mathrm{lse}}$. So:
#
# $$\mathrm{lse} = \log\left(e^{\mathrm{lse}_a} + e^{\mathrm{lse}_b}\right) \qquad
# \mathrm{out} = e^{\mathrm{lse}_a - \mathrm{lse}}\,\mathrm{out}_a + e^{\mathrm{lse}_b - \mathrm{lse}}\,\mathrm{out}_b$$
#
# This is [`merge`](../docs/glossary.md#merge). These are its last five lines; the others check the input. The first line takes the larger lse, and the second
# subtracts it before `exp`.

# %%
print_source(merge, last=5)

# %% [markdown]
# Three parts `a`, `b` and `c`, merged in three different orders:

# %%
scores = x @ x.transpose(-2, -1) / math.sqrt(2)  # (1, 1, 8, 8)


def attend_to(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of all 8 queries over some of the keys."""
    return finish(update(start(x), scores[..., keys], x[:, :, keys]))


a, b, c = attend_to(slice(0, 2)), attend_to(slice(2, 5)), attend_to(slice(5, 8))
exact = naive_attention(x, x, x)
for name, (out, lse) in {
    "(a + b) + c": merge(*merge(*a, *b), *c),
    "a + (b + c)": merge(*a, *merge(*b, *c)),
    "c + (b + a)": merge(*c, *merge(*b, *a)),
}.items():
    assert torch.allclose(out, exact) and torch.allclose(lse, scores.logsumexp(-1))
    print(name, "is full attention; its row 0:", out[0, 0, 0].numpy())

# a part that saw no key has out = 0 and lse = -inf
nothing = torch.zeros_like(exact), torch.full_like(scores[..., 0], -math.inf)
assert torch.equal(merge(*a, *nothing)[0], a[0])  # it changes nothing
assert torch.equal(merge(*nothing, *nothing)[0], nothing[0])  # and two of them give 0, not nan
print("a part without keys changes nothing")

# %% [markdown]
# The order does not matter, and a part without keys does no harm. In a ring, each machine gets the keys in another order.
#
# > **One number to remember: $D + 2$.** A query keeps $D$ numbers of `o`, one `m` and one `l`, however many keys it has read.
# > For $D = 64$ these are 66 numbers. A row of scores has $S$ of them.
#
# ## Questions
#
# <details><summary>Why is <code>l</code> at least 1 after the first key?</summary>
#
# The largest score contributes $e^{m-m} = 1$. All other terms are positive. So the division by $l$ is safe. Only a row that has seen no key has
# $l = 0$. Its output is 0 and its lse is $-\infty$.
# </details>
#
# <details><summary>Two parts each have a normalised output. Why is their sum wrong?</summary>
#
# Each output is an average: its weights add up to 1. The weights of the sum add up to 2. [Chapter 3](03_worked_example.ipynb) shows a page that
# does this: it gets 3.731, although no value in it is above 3.
# </details>
#
# <details><summary>Must <code>m</code> be the exact maximum?</summary>
#
# No. Numerator and denominator contain the same $e^{-m}$, so any number near the maximum gives the same result. It must only be large enough that
# $e^{s-m}$ does not overflow, and small enough that not all terms become 0.
# </details>
#
# ## Your turn
#
# Replace each `...`, run the cell, and read what the check prints.


# %%
def my_softmax(scores):  # (n,) -> (n,), for scores of any size
    return ...


print(check_safe_softmax(my_softmax))


# %%
def my_update(m, l, o, scores, v):  # one query: m, l are numbers, o is (D,); scores (n,), v (n, D)
    return ...  # m, l, o


print(check_running_update(my_update))


# %%
# For later: no chapter needs it.
# For outputs (n, D) and lses (n,) of any size. A part without keys has out = 0 and lse = -inf.
def my_merge(out_a, lse_a, out_b, lse_b):
    return ...  # out, lse


print(check_merge_two(my_merge))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_softmax(scores):
#     p = torch.exp(scores - scores.max())
#     return p / p.sum()
#
# def my_update(m, l, o, scores, v):
#     m_new = torch.maximum(m, scores.max())
#     f, p = torch.exp(m - m_new), torch.exp(scores - m_new)
#     return m_new, f * l + p.sum(), f * o + p @ v
#
# def my_merge(out_a, lse_a, out_b, lse_b):
#     lse = torch.logaddexp(lse_a, lse_b)
#     finite = lse.clamp(min=-1e30)  # -inf - (-inf) would be nan
#     a, b = torch.exp(lse_a - finite), torch.exp(lse_b - finite)
#     return a[:, None] * out_a + b[:, None] * out_b, lse
# ```
# </details>
#
# Open [`online_softmax.py`](../ringlab/basics/online_softmax.py) now: it has the running values and the merge.
# Next: [2 · blockwise attention and memory](02_blockwise_attention.ipynb), or on the shortest road [3 · the worked
# example](03_worked_example.ipynb).
