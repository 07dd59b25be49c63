# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Appendix: a ring of states
#
# In several of the newest open models three of four layers have no softmax: gated delta nets, Kimi delta attention, lightning
# attention. In place of a list of keys they keep a **state**, a small matrix. So what moves in a ring, when there are no keys? After
# this page you can
#
# - write linear attention as a recurrence, as a matrix product, and in chunks,
# - say what a rank's tokens do to the state, in one line, and hand the state on in three ways,
# - send its gradient back, and name the mistake that only the last rank does not see.
#
# You need chapters 1 to 8; no chapter needs it. 20 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import torch

from figures import state_ring as picture
from notebooks.source import workers
from notebooks.source.checks.masks_and_ways import check_state_gradient, check_two_maps
from notebooks.source.show import print_source
from ringlab.basics.naive_attention import TOKENS
from ringlab.states.linear_attention import Map, linear_attention, recurrence
from ringlab.states.state_ring import by_hops
from ringlab.support.processes import launch

P = 4
torch.set_printoptions(precision=3, sci_mode=False)

# %% [markdown]
# ## Attention without the softmax
#
# Take the softmax away, and the output of token $t$ is $o_t = \sum_{j \le t} (q_t \cdot k_j)\, v_j$. Now you may choose the order of
# the products. Do $k_j v_j^\top$ first: the sum over $j$ no longer needs $q_t$, so it can be kept from token to token.
#
# $$h_t = h_{t-1} + k_t v_t^\top \qquad o_t = h_t^\top q_t$$
#
# The state $h$ has $D \times D_v$ numbers, however long the sequence is. Here are our 8 tokens as queries, keys and values:

# %%
x = TOKENS  # (S, D) = (8, 2)
h, out = torch.zeros(2, 2, dtype=x.dtype), []
for t in range(8):
    h = h + torch.outer(x[t], x[t])  # k_t v_tᵀ
    out.append(h.T @ x[t])
out = torch.stack(out)

product = (x @ x.T).tril() @ x  # all tokens at once: S x S scores, as in attention, but no softmax
assert torch.allclose(out, product)
print("the state after 8 tokens:", h.tolist(), " output of token 7:", out[7].tolist())

# %% [markdown]
# Plain sums never forget. So layers multiply the state by a **decay** $a_t$ between 0 and 1 before each token. Many also use the
# **delta rule**: ask the state first what it answers to this key, and write only what is missing,
# $u_t = \beta_t (v_t - a_t h_{t-1}^\top k_t)$ in place of $v_t$. $\beta_t$ between 0 and 1 says how much of it is written.
#
# ## A chunk is one affine map
#
# What do many tokens do to the state? Each step multiplies it and adds to it. Many steps together do the same:
#
# $$h_{out} = keep \cdot h_{in} + add$$
#
# Without a decay $keep$ is 1, with one it is the product of the decays, and with the delta rule a $D \times D$ matrix. Two maps in a
# row are again one map, so a rank can compute the map of its own tokens without any other rank.
#
# Its outputs are such a map too: what the tokens read of their own chunk, by the matrix product above, plus what they read of
# $h_{in}$. So a long sequence is computed **in chunks**: all products at once, and only the state goes from chunk to chunk. The maps
# of our four ranks:


# %%
def map_of(tokens: torch.Tensor, decay: float) -> Map:
    """What these tokens do to the state, when each is their own key and value."""
    keep, add = torch.ones(1, 1, dtype=x.dtype), torch.zeros(2, 2, dtype=x.dtype)
    for token in tokens:
        keep, add = decay * keep, decay * add + torch.outer(token, token)
    return Map(keep, add)


decay = 0.5
maps = [map_of(chunk, decay) for chunk in x.chunk(P)]
whole = map_of(x, decay)
together = maps[3].after(maps[2].after(maps[1].after(maps[0])))
assert torch.allclose(together.add, whole.add)
for rank, each in enumerate(maps):
    print(f"rank {rank}: keep {each.keep.item():.4f}, add {each.add.flatten().tolist()}")

# %% [markdown]
# ## The failure
#
# What if each rank begins with an empty state? Only rank 0 is right. It happened in MaxText's pull request 4348, where each shard
# began with its own $h_0$ and the tests ran with one shard. The error of the output, on each rank:

# %%
q, k, v = (x[None, None] for _ in "qkv")  # (B, H, S, D) = (1, 1, 8, 2)
log_decay = torch.full((1, 1, 8), decay, dtype=x.dtype).log()
exact, _ = recurrence(q, k, v, log_decay, scale=1.0)
for rank in range(P):
    at = slice(2 * rank, 2 * rank + 2)
    alone, _ = linear_attention(q[:, :, at], k[:, :, at], v[:, :, at], log_decay[:, :, at], scale=1.0)
    print(f"rank {rank}: off by {(alone - exact[:, :, at]).abs().max():.3f}")

# %% [markdown]
# ## The idea
#
# The state travels. Rank $r$ needs the state before its first token: the maps of ranks $0 … r-1$, applied one after the other to the
# first state. Three ways to get it:
#
# | way | messages of a rank | steps that wait for each other |
# |---|---|---|
# | hops | 1 state | $P - 1$ |
# | scan | up to $\lceil \log_2 P \rceil$ maps | $\lceil \log_2 P \rceil$ |
# | gather | $P - 1$ maps | 1 |
#
# By **hops** a rank waits for the state, maps it and sends it on. Here is this ring, as it is in
# [state_ring](../ringlab/states/state_ring.py). `chain` lists the ranks in the order of the sequence, `maps` are those of this rank's
# runs of tokens. Contiguous chunks have one run a rank.

# %%
print_source(by_hops)

# %% [markdown]
# In a **scan** all ranks work at once: rank $r$ gets a map from rank $r - 1$, then from $r - 2$, then from $r - 4$. So it has the map of
# 2 ranks, then of 4, then of 8. **Gather** gives everyone all maps. It is the default of `ringlab.ring_linear_attention`: one step, and
# the maps are small. The picture is drawn from the messages of two runs on 8 ranks.

# %%
picture.draw()

# %% [markdown]
# **When is this less than a ring of keys?** A ring hands on $2 \cdot C \cdot D$ numbers per head in each hop. A state has
# $D \cdot D_v$ numbers, and a map of the delta rule twice as many. So with more than $C = D$ tokens on a rank the map is smaller, and it does not
# grow. With $D = 128$ and 8,192 tokens a rank, a hop of keys is 64 times the map. (This counts as many heads of keys as of states, in one
# dtype. With grouped queries and 16-bit keys it begins later: some 1,000 to 2,000 tokens a rank.)
#
# ## The gradient goes the other way
#
# The state before rank $r$ counts twice: rank $r$ reads it, and it is kept for all later ranks. So its gradient is
#
# $$dh_{in} = keep^\top dh_{out} + d_{read}$$
#
# where $d_{read}$ comes from the rank's own outputs. This is an affine map again, with the ranks in reverse order, so the function
# that hands on states hands on these gradients too. A ring that sends the state and forgets its gradient has a **right forward
# pass, and wrong gradients on all ranks but the last**, which nothing follows. (In flash-linear-attention, issue 1115, the gradient
# travelled with the decays of another head.) Now on four processes, with the delta rule:

# %%
generator = torch.Generator().manual_seed(0)
q, k, v, d_out = torch.randn(4, 1, 2, 64, 8, generator=generator, dtype=torch.float64)
beta, uniform = torch.rand(2, 1, 2, 64, generator=generator, dtype=torch.float64)
whole = [y.requires_grad_() for y in (q, k / k.norm(dim=-1, keepdim=True), v, (0.5 + 0.5 * uniform).log(), beta)]
exact, _ = recurrence(*whole)
exact = [exact, *torch.autograd.grad(exact, whole, d_out)]
inputs = [x.detach() for x in (*whole, d_out)]
names = ("out", "dq", "dk", "dv", "d log_decay", "d beta")
print("off by, on ranks 0 to 3")
for title, forgets in (("the gradient of the state forgotten", True), ("the ring of states", False)):
    of_ranks = launch(workers.ring_of_states, P, inputs, forgets)
    print(title)
    for i, name in enumerate(names):
        parts = zip(of_ranks, exact[i].chunk(P, dim=2), strict=True)
        print(f"  {name:<12}", *(f"{(mine[i] - right).abs().max().item():9.1e}" for mine, right in parts))

# %% [markdown]
# `dq` is right in both: the state that rank $r$ reads is right, and $q$ adds nothing to it.
#
# ## What else crosses the border
#
# Such layers also mix each token with the three before it, by a short convolution. At the first tokens of a rank these lie on the rank
# before, or on several when chunks are short. But the last three tokens are a state too, which each new token moves along by one
# place. So the same ring hands it on: [short_convolution](../ringlab/states/short_convolution.py).
#
# Three cases need a word more. A new document begins with an empty state, so its first token has a decay of 0. In the zigzag layout a
# rank has two runs of tokens, so the state passes it twice. Kimi delta attention has a decay for each row of the state, so $keep$ is
# a number for each row.
#
# A model that generates needs no keys in these layers. Every rank gets the state after the prompt, and goes on alone.
#
# **One number to remember:** a state is $D \cdot D_v$ numbers. It does not grow with the sequence.
#
# ## Check yourself
#
# <details><summary>Why may a scan put maps together in any grouping, but not in any order?</summary>
#
# The composition of maps is associative: (c after b) after a = c after (b after a). It is not commutative. Matrices are not, and even
# with plain numbers $keep_b \cdot add_a + add_b$ is not $keep_a \cdot add_b + add_a$.
# </details>
#
# <details><summary>A ring of softmax attention needs no order of the ranks. Why does this one?</summary>
#
# A softmax merges m, l and o: each block adds to them, after rescaling, whenever it comes. A state is multiplied by every decay
# after it, so each rank must know what came before its own tokens.
# </details>
#
# ## Your turn


# %%
# The map of some tokens is h -> keep_a @ h + add_a, that of the tokens behind them h -> keep_b @ h + add_b.
# Give keep and add of both together.
def my_two_maps(keep_a, add_a, keep_b, add_b):
    return ...


print(check_two_maps(my_two_maps))


# %%
# A rank's map is h -> keep @ h + add. `d_after` is the gradient of the state after it, as later ranks found it, `d_read` what
# the rank's own outputs give to the state before it. Give the whole gradient of the state before the rank.
def my_state_gradient(keep, d_after, d_read):
    return ...


print(check_state_gradient(my_state_gradient))


# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_two_maps(keep_a, add_a, keep_b, add_b):
#     return keep_b @ keep_a, keep_b @ add_a + add_b
#
# def my_state_gradient(keep, d_after, d_read):
#     return keep.T @ d_after + d_read
# ```
# </details>
#
# Next: [linear_attention](../ringlab/states/linear_attention.py), [state_ring](../ringlab/states/state_ring.py), and a
# hybrid model in [transformer](../ringlab/models/transformer.py).
