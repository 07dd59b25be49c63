# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · Generation: the query goes to the keys
#
# A model has read a long prompt in a ring. Now it writes, one token at a time. After this chapter you can
#
# - count what a new token costs in a ring, and say why a ring is wrong here,
# - merge what the [ranks](../docs/glossary.md#rank) computed over different keys, with one message a layer,
# - say which rank stores which token, also for prompts of unequal lengths.
#
# Track *use*. You need chapters 1 to 8 and 10; the track ends here. 16 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import torch
import torch.nn.functional as F

from notebooks.source.checks.models import check_bytes_of_a_token, check_caches
from notebooks.source.show import print_source
from ringlab.basics.naive_attention import TOKENS
from ringlab.models import generate
from ringlab.support.processes import launch

P = 4

# %% [markdown]
# ## The failure
#
# A model generates in two phases:
#
# - **[Prefill](../docs/glossary.md#prefill)**: it reads the whole prompt at once. The logits of the last token say which
#   token follows.
# - **[Decode](../docs/glossary.md#decode)**: it computes that new token alone, to find the next one, and so on.
#
# A new token attends to all earlier tokens, so it needs their K and V. These do not change any more, so the model keeps
# them: the **[KV cache](../docs/glossary.md#kv-cache)**. After a prefill in a ring, each rank has K and V of its own
# [chunk](../docs/glossary.md#chunk).
#
# Could the ring go on with the new tokens? For one new token, it would move the whole cache past every rank. Count
# that for Llama 8B: 32 layers, H = 32 query heads, G = 8 K/V heads, D = 128. The context has 131,072
# tokens on 8 ranks, and each number of K and V has 2 bytes. Messages reach 35 GB/s through a NIC, and reading reaches 2.7 TB/s of an H100's memory:

# %%
layers, H, G, D, ranks = 32, 32, 8, 128, 8
C = 131_072 // ranks
ring_bytes = layers * (ranks - 1) * 2 * G * C * D * 2
cache_bytes = layers * 2 * G * C * D * 2  # of a rank: its K and V, which it reads once for each token
print(f"a rank sends {ring_bytes / 1e9:.1f} GB for one token: {ring_bytes / 35e9:.2f} s")
print(f"its attention reads {cache_bytes / 1e9:.1f} GB of cache on each rank: {cache_bytes / 2.7e12:.4f} s")
assert ring_bytes / 35e9 > 500 * cache_bytes / 2.7e12

# %% [markdown]
# In the prefill, each [block](../docs/glossary.md#block) that arrives meets C queries, which hide
# the message (chapter 6). A new token is **one** query, and nothing hides the message.
#
# So let the keys stay and the query travel. The query need not even travel: each rank knows the new token, computes its
# query by itself, and attends to the keys that it has. That gives one result a rank. **How do these become one
# result?**
#
# Here are our 8 tokens on 4 ranks, two on each, as in chapter 3. The new token is $(2, 3)$. It sees itself, too; let
# rank 0 store it. (The K, the V and the query of a token are the token itself here.)

# %%
new = torch.tensor([[2.0, 3.0]], dtype=torch.float64)  # (1, D)
cache = list(TOKENS.split(2))  # K and V on each rank, (2, D)
cache[0] = torch.cat([cache[0], new])


def attend(keys):
    """The new token over these keys: its output (1, D)."""
    return F.softmax(new @ keys.T / 2**0.5, dim=-1) @ keys


def digits(x):
    return " ".join(f"{number:.4f}" for number in x.flatten().tolist())


right = attend(torch.cat(cache))
outs = torch.cat([attend(keys) for keys in cache])  # (P, D)
for r in range(P):
    print(f"rank {r} has {len(cache[r])} keys: output {digits(outs[r])}")
print(f"the mean of the 4 outputs:  {digits(outs.mean(dim=0))}")
print(f"attention to all 9 tokens:  {digits(right)}")
assert (outs.mean(dim=0) - right[0]).abs().max() > 0.3

# %% [markdown]
# **The mean is wrong.** The weights of a softmax add up to 1 on each rank, also where all scores are small, so the
# mean counts each rank as a quarter. But rank 1 has no key that the token looks at, and rank 3 has the best key.
#
# ## The idea
#
# Chapter 1 has the cure: partial results **merge**. First bring all of them to one maximum, $M$, then add up:
#
# $$M = \max_r m_r \qquad l = \sum_r e^{m_r - M}\, l_r \qquad o = \sum_r e^{m_r - M}\, o_r \qquad
# \text{out} = \frac{o}{l}$$

# %%
scores = [new @ keys.T / 2**0.5 for keys in cache]  # (1, keys of the rank)
m = torch.stack([s.max() for s in scores])  # (P,)
l = torch.stack([(s - s.max()).exp().sum() for s in scores])  # (P,)
o = torch.cat([(s - s.max()).exp() @ keys for s, keys in zip(scores, cache, strict=True)])  # (P, D)
share = torch.exp(m - m.max())
out = (share[:, None] * o).sum(dim=0) / (share * l).sum()
print(f"e^(m - M) of each rank:     {digits(share)}")
print(f"each counts in the result:  {digits(share * l / (share * l).sum())}")
print(f"merged:                     {digits(out)}")
assert torch.allclose(out, right[0], rtol=0, atol=1e-14)

# %% [markdown]
# Over real ranks, each rank gives its part to all others, an **[all-gather](../docs/glossary.md#all-gather)** of few numbers, and then
# merges all parts itself (*decode context parallelism*, DCP):

# %%
print_source(generate.merge_over_ranks)

# %% [markdown]
# What did a rank send? In a layer, for each head of each prompt, 1 number for $m$, 1 for $l$, and $D$ for
# $o$. So a rank gives $B \cdot H \cdot (D + 2)$ numbers in float32, and **the length of the context does not appear**.
# In the model above:

# %%
merge_bytes = layers * H * (D + 2) * 4
print(f"merge over ranks: {merge_bytes / 1e6:.2f} MB for a new token")
print(f"ring:             {ring_bytes / 1e6:,.0f} MB, {ring_bytes / merge_bytes:,.0f} times as much")
assert merge_bytes == 532_480

# %% [markdown]
# ## Which rank stores the new token?
#
# The next token needs K and V of this one, and every rank has computed them.
# If no rank stores it, the model forgets it. If all ranks store it, it counts four times. **Exactly one rank must
# store it, and any rank will do:** a merge does not ask where a key is. To use the memory of all, the ranks take turns: rank $n \bmod P$
# stores new token number $n$.
#
# A cache has slots: some for the tokens of the prompt, some for new tokens. `at` has the position of the token in each
# slot. `store` is called before a new token is computed:

# %%
print_source(generate.SpreadCache.store)

# %% [markdown]
# ## Prompts of unequal lengths
#
# Prompts of 13 and 6 tokens go through the model together, both padded on the right to 16 tokens. Then they go on at
# positions 13 and 6. Slots of padding and empty slots get the position $2^{62}$, which no token reaches. Then
# one rule hides all of them, the causal mask: **a token sees the slots whose position is not larger than its
# own.**
#
# Now the whole model, on four real processes. `seeded` is a small transformer with large random weights. `answers` lets
# it write 12 tokens after each prompt:

# %%
print_source(generate.answers)
results = launch(generate.answers, P, device="cpu")


def shown(at):
    return " ".join(f"{x:>2}" if x < generate.EMPTY else " ·" for x in at.tolist())


print("positions in the slots     prompt of 13 tokens      prompt of 6 tokens")
for r, (_, at) in enumerate(results):
    print(f"rank {r:<20} {shown(at[0])}     {shown(at[1])}")
lengths = {at.shape[1] for _, at in results}
assert lengths == {7}

# %% [markdown]
# A dot is padding, or an empty slot. Each rank has 7 slots: 4 for the prompt, in the
# [zigzag layout](../docs/glossary.md#zigzag-layout), and 3 for new tokens: 13, 14, 15 and 16 are on ranks 0, 1, 2 and 3. The
# twelfth new token, 24, is returned and never computed, so it has no K and V.
#
# Are the tokens right? One process without a cache reads the whole text again for each token:

# %%
print_source(generate.alone)
model = generate.seeded(F.scaled_dot_product_attention)
for i, prompt in enumerate(generate.PROMPTS):
    alone = generate.alone(model, prompt, generate.NEW)
    print(f"{prompt.decode()!r:<16} one process {alone[:6]} ...   rank 0 {results[0][0][i].tolist()[:6]} ...")
    assert all(tokens[i].tolist() == alone for tokens, _ in results)

# %% [markdown]
# All 12 tokens of both prompts are equal, on all four ranks. (The weights are random, so the text has no meaning.)
#
# ## A Hugging Face model
#
# The `generate` of a Hugging Face model can do the same: write `with spread_generation(model): tokens = model.generate(...)` on every
# rank, with the same prompts, padded on the left as transformers wants them. Sampling, penalties and stop words are transformers'
# own, and all ranks take the token that rank 0 chose. A model that was trained in a ring leaves the ring first: `stop_ring(model)`,
# then `model.eval()`. The tokens are those of one process, which tests check.
#
# ## What it costs
#
# The attention of one layer for one new token, on the CPU, with 65,536 tokens in the context of 4 ranks
# ([more lengths](../bench/results/README.md#generation)):
#
# | | bytes that a rank sends | time over one process |
# |---|---:|---:|
# | one process | 0 | 1 |
# | merge | 2,112 | 1.7 |
# | ring | 50,331,648 | 26 |
#
# The merge sends equally many bytes for every context; its time grows, because each rank reads its own keys. One process is faster
# here, because it sends nothing and has the cores of all ranks. On real devices each rank has its own memory bandwidth,
# and a long context does not fit on one device at all.
#
# A third case lies between a prompt and a single token: 1,000 new tokens over a cache of 100,000. In *pass-Q* the few queries go round,
# and partial results come home.
#
# Of $S$ tokens let $T$ be new. Queries and results are about $2T \cdot HD$ numbers, K and V $2S \cdot GD$. So pass-Q sends less while
# $T/S$ is below $G/H$: a sixteenth for Llama 3 405B with 8 of 128 heads. Nothing hides the results on their way home, and Meta measured a
# border of about 5 % ([Yang et al. 2024](https://arxiv.org/abs/2411.01783), table 4).
# [`pass_q.py`](../ringlab/models/pass_q.py) also reads texts in parts.
#
# > **One number to remember: D + 2** numbers a head. That is what a rank sends in a layer for a new token, whether the
# > context has a thousand tokens or a million.
#
# ## Questions
#
# <details><summary>Why is the prompt read in a ring, and not with the merge?</summary>
#
# A prompt has as many queries as keys. Every rank would have to compute the queries of all tokens, and the sums would be as large as the
# output of the whole sequence. The ring sends K and V, which have G heads and not H, and hides the messages.
# </details>
#
# <details><summary>Each rank computes the same new token. Why does rank 0 send its choice to the others?</summary>
#
# Two ranks may round differently. If two tokens are nearly equally probable, the ranks would choose different tokens and continue
# different texts, and no error would tell. One number a token prevents that.
# </details>
#
# ## Your turn


# %%
# Each of P ranks holds C tokens of a prompt. Then the model returns N new tokens (N >= 1).
# The ranks store in turn. How many tokens does each rank hold at the end? A list of P numbers
def my_caches(C, N, P):
    return ...


print(check_caches(my_caches))


# %%
# How many bytes does a rank give to the merge for one new token of each of B prompts, in all layers?
# m, l and o are float32. C is the number of tokens in its cache
def my_bytes(layers, B, H, G, D, C, P):
    return ...


print(check_bytes_of_a_token(my_bytes))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_caches(C, N, P):
#     return [C + len(range(rank, N - 1, P)) for rank in range(P)]
#
# def my_bytes(layers, B, H, G, D, C, P):
#     return layers * B * H * (D + 2) * 4
# ```
# </details>
#
# Open [`generate.py`](../ringlab/models/generate.py) now: the spread cache and its one merge. Run it: `python -m ringlab.models.generate`.
