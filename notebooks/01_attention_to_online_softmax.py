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
# You know $\mathrm{softmax}(QK^\top/\sqrt D)\,V$. After this chapter you can compute it **without ever having all the
# scores of a row at once**, which is the one trick that Ring Attention stands on.
#
# 15 minutes. The code: [`basics/naive_attention.py`](../basics/naive_attention.py),
# [`basics/online_softmax.py`](../basics/online_softmax.py). Next: [2 · blockwise attention and memory](02_blockwise_attention.ipynb).

# %%
# %matplotlib inline
import math

import numpy as np
import torch
from ipywidgets import interact

from basics.naive_attention import TOKENS, naive_attention
from basics.online_softmax import finish, merge, start, update
from figures import running_softmax
from notebooks.checks.attention_to_online_softmax import check_merge_two, check_running_update, check_safe_softmax

np.set_printoptions(precision=4, floatmode="fixed")

# %% [markdown]
# ## The failure
#
# Softmax, as it is written in books, dies of large scores: $e^{1000}$ is no float.

# %%
scores = torch.tensor([1000.0, 1001.0, 1002.0])
weights = scores.exp() / scores.exp().sum()
print("as written:     ", weights)

m = scores.max()
shifted = (scores - m).exp() / (scores - m).exp().sum()
print("minus the max:  ", shifted)

assert weights.isnan().all()
assert torch.allclose(shifted, torch.softmax(scores, 0))

# %% [markdown]
# Subtracting the largest score cures it: top and bottom are both multiplied by $e^{-m}$, so the result stays the same.
#
# But the cure has a price. To know the largest score we must have seen **all** scores of the row, and attention has $S$
# rows of $S$ scores. That square does not scale:

# %%
for S in (8, 1024, 32 * 1024, 1024 * 1024):
    print(f"S = {S:>9,}: {4 * S * S:>17,} bytes for one head's scores in float32")

# %% [markdown]
# ## The idea
#
# Keep a **running** max `m`. When a larger score comes, everything summed so far was scaled by $e^{-m_\text{old}}$ and
# should have been scaled by $e^{-m_\text{new}}$: multiply it by $e^{m_\text{old}-m_\text{new}}$ and go on.
#
# | | is | when the max grows from $m$ to $m'$ |
# |---|---|---|
# | $m$ | the largest score so far | $m' = \max(m, \max s)$ |
# | $l$ | the sum of $e^{s-m}$ so far | $l' = e^{m-m'}\,l + \sum e^{s-m'}$ |
# | $o$ | the sum of $e^{s-m}\,v$ so far | $o' = e^{m-m'}\,o + \sum e^{s-m'}\,v$ |
#
# At the end $o/l$ is the attention of that row. Here is the whole of it for token 0 of our example: 8 tokens that are
# their own queries, keys and values, met two at a time.

# %%
q = TOKENS[0]  # (D,) = (2,)
m, l, o = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(2)
print("tokens      m       l      o              o / l so far")
for i in range(0, 8, 2):
    k = v = TOKENS[i : i + 2]  # two keys and their values
    s = k @ q / math.sqrt(2)
    m_new = torch.maximum(m, s.max())
    rescale = torch.exp(m - m_new)
    p = torch.exp(s - m_new)
    m, l, o = m_new, rescale * l + p.sum(), rescale * o + p @ v
    print(f"{i} and {i + 1}  {m:.4f}  {l:.4f}  {o[0]:.4f} {o[1]:.4f}  {o[0] / l:.4f} {o[1] / l:.4f}")

x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
assert torch.allclose(o / l, naive_attention(x, x, x)[0, 0, 0])

# %% [markdown]
# The last line is row 0 of full attention, and at no time were there more than two scores.
#
# **What if we forget to rescale?** Then early keys count with the wrong weight, and nothing warns you: no NaN, no error.

# %%
l, o, m = torch.tensor(0.0), torch.zeros(2), torch.tensor(-math.inf)
for i in range(0, 8, 2):
    k = v = TOKENS[i : i + 2]
    s = k @ q / math.sqrt(2)
    m = torch.maximum(m, s.max())
    l, o = l + torch.exp(s - m).sum(), o + torch.exp(s - m) @ v
exact = naive_attention(x, x, x)[0, 0, 0]
print("without the rescale:", (o / l).numpy(), "  exact:", exact.numpy())
assert not torch.allclose(o / l, exact, atol=0.1)

# %% [markdown]
# ## The picture
#
# Each colour is one block of two keys, here and in all chapters. Token 0 meets the blocks in the order in which the ring
# will bring them, 0, 3, 2, 1, so the numbers on the way differ from the table above, and the last column does not. A bar
# is a block's share of the whole, $\sum e^{s-m}/l$: it shrinks as `l` grows.

# %%
running_softmax.draw()

# %% [markdown]
# Run the next cell (sliders need a running kernel) and scrub: how do `m`, `l` and `o / l` of a row move as the keys come
# in? Which token is won over most by the last two keys? (Token 7: they get 98% of its attention.)


# %%
def show(token: int, keys_seen: int) -> None:
    scores = TOKENS[token] @ TOKENS[:keys_seen].T / math.sqrt(2)
    m = scores.max()
    l = (scores - m).exp().sum()
    out = torch.softmax(scores, 0) @ TOKENS[:keys_seen]
    print(f"token {token} after {keys_seen} keys: m = {m:.3f}, l = {l:.3f}, o / l = {out.numpy()}")


_ = interact(show, token=(0, 7), keys_seen=(1, 8))
# %% [markdown]
# ## Two results into one
#
# Say one machine did keys 0–1 and another keys 2–7. Each has its normalised result and one more number, the
# **log-sum-exp** $\mathrm{lse} = m + \log l = \log\sum e^s$. That is enough to put them together: a part weighs $e^{\mathrm{lse}}$.

# %%
scores = x @ x.transpose(-2, -1) / math.sqrt(2)  # (1, 1, 8, 8)


def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
    return finish(update(start(x), scores[..., keys], x[:, :, keys]))


a, b, c = part(slice(0, 2)), part(slice(2, 5)), part(slice(5, 8))
exact = naive_attention(x, x, x)
for name, (out, lse) in {
    "(a + b) + c": merge(*merge(*a, *b), *c),
    "a + (b + c)": merge(*a, *merge(*b, *c)),
    "c + (b + a)": merge(*c, *merge(*b, *a)),
}.items():
    assert torch.allclose(out, exact) and torch.allclose(lse, scores.logsumexp(-1))
    print(name, "is full attention; its row 0:", out[0, 0, 0].numpy())

# The part that saw no key:
nothing = torch.zeros_like(exact), torch.full_like(scores[..., 0], -math.inf)
assert torch.equal(merge(*nothing, *nothing)[0], nothing[0])  # not NaN
assert torch.allclose(merge(*a, *nothing)[0], a[0])

# %% [markdown]
# Any order, any grouping, and "no key" is a harmless part. Hold on to this: it is why a ring of machines may meet the
# keys in whatever order the network brings them.
#
# > **One number to remember: $D + 2$.** A query carries $D$ numbers of `o`, one `m` and one `l`, however many keys it
# > has met. For $D = 64$ that is 66 numbers instead of a row of $S$.
#
# ## Questions
#
# <details><summary>Why is <code>l</code> at least 1 as soon as a row has seen a key?</summary>
#
# The largest score contributes $e^{m-m} = 1$, and the others add something positive. So the division at the end is safe.
# Only a row that has seen no key has $l = 0$; it gets 0 as its result and $-\infty$ as its lse.
# </details>
#
# <details><summary>Two parts each return a normalised output. Why may you not add them?</summary>
#
# Each is an average whose weights add up to 1; their sum has weights that add up to 2. A worked example in circulation
# does just that and gets 3.731, more than any value in it. Chapter 3 takes it apart.
# </details>
#
# <details><summary>Must <code>m</code> be the exact maximum?</summary>
#
# No. Any number near it gives the same result, as top and bottom are scaled alike; it only has to keep $e^{s-m}$ from
# overflowing, and some term from vanishing.
# </details>
#
# ## Your turn
#
# Replace each `...`, run the cell, and read what the check says.


# %%
def my_softmax(scores):  # (n,) -> (n,), for scores of any size
    return ...


print(check_safe_softmax(my_softmax))


# %%
def my_update(m, l, o, scores, v):  # one query: m, l are numbers, o is (D,); scores (n,), v (n, D)
    return ...  # m, l, o


print(check_running_update(my_update))


# %%
def my_merge(out_a, lse_a, out_b, lse_b):  # out (n, D), lse (n,)
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
#     a, b = torch.exp(lse_a - lse), torch.exp(lse_b - lse)
#     return a[:, None] * out_a + b[:, None] * out_b, lse
# ```
# </details>
#
# Next: [2 · blockwise attention and memory](02_blockwise_attention.ipynb), where the square disappears.
