# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · A model in the ring
#
# A [transformer](../ringlab/models/transformer.py) trains with the ring of chapter 8. What must each [rank](../docs/glossary.md#rank) be
# given, what does it compute alone, and what does it keep? After this chapter you can
#
# - find two mistakes in the loss of each token that raise no error,
# - say why the ring changes only one function of a transformer,
# - choose between memory and time, and count how often K and V go round.
#
# Tracks *train* and *use*. You need chapters 1 to 8; next comes [11 · meshes](11_meshes.ipynb) (*train*) or [13 ·
# documents and windows](13_documents_and_windows.ipynb) (*use*). 18 minutes to read, 15 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
from dataclasses import replace

import torch
import torch.nn.functional as F

from figures import token_loss
from figures.token_loss import TEXT, on_each_rank, token_losses, trained_model
from notebooks.source import workers
from notebooks.source.checks.models import check_batch_loss, check_rank_input
from notebooks.source.show import print_source
from ringlab.models.transformer import Config, Layer, Transformer, shard_text, summed_loss
from ringlab.ring.layouts import positions
from ringlab.support.processes import launch

P, S = 4, TEXT.shape[1] - 1

# %% [markdown]
# ## The failure
#
# First a small transformer learns one sentence by heart, so that any loss you see later is a mistake: 80 steps of
# Adam in one process (`trained_model`). It reads bytes, so each letter is a token. You call it as
# `model(tokens, at)`, where `at` says where the tokens stand in the sequence, for the
# [rotary embedding](../docs/glossary.md#rotary-embedding). The loss of a token is −log of the probability that the
# model gives to its label, the token that follows:

# %%
print_source(token_losses)

# %%
model = trained_model()
tokens, labels, everywhere = TEXT[0, :-1], TEXT[0, 1:], torch.arange(S)
right = token_losses(model, labels, everywhere)
print(f"{S} tokens of {bytes(TEXT[0].tolist()).decode()!r}: mean loss {right.mean():.4f}, largest {right.max():.4f}")
assert right.max() < 0.05

# %% [markdown]
# The model knows the sentence. Now four ranks divide its tokens in the
# [zigzag layout](../docs/glossary.md#zigzag-layout): each holds two pieces of 4 tokens. A data loader that knows only its own
# rank makes the labels from its own tokens:

# %%
for rank in range(P):
    mine = tokens[positions("zigzag", S, rank, P)]
    shifted = mine.roll(-1)  # the label of a token: the next token that this rank holds
    print(f"rank {rank}: tokens {bytes(mine.tolist()).decode()!r}, labels {bytes(shifted.tolist()).decode()!r}")

# %% [markdown]
# On rank 0, the token after "Shif" is not the space of " out". That space is the first token of another piece. We give
# these labels to the model in one process, so that nothing else can go wrong. `on_each_rank` makes the labels as four ranks
# would, and puts them back in the order of the sequence:

# %%
print_source(on_each_rank)

# %%
shifted = on_each_rank(lambda mine: mine.roll(-1))
losses = token_losses(model, shifted, everywhere)
print(f"labels shifted on each rank: mean loss {losses.mean():.4f}; tokens with a loss above 1:")
for i in torch.nonzero(losses > 1).flatten().tolist():
    what = f"token {i:>2} {chr(tokens[i])!r}: label {chr(shifted[i])!r}, should be {chr(labels[i])!r}"
    print(f"    {what}, loss {losses[i]:.2f}")
assert torch.equal(losses > 1, shifted != labels)  # the wrong labels, and no others
assert (shifted != labels).sum() == 2 * P - 1

# %% [markdown]
# Zigzag cuts the sequence into $2P$ pieces, and the last token of a piece gets a wrong label, because the next token
# lies on another rank. One piece is an exception: rank $P - 1$ holds the two pieces in the middle, which follow each
# other. So there are $2P - 1$ wrong labels.
#
# Our sentence is short, so the mean shows it. In a sequence of 131,072 tokens on 8 ranks, 15 wrong labels are 0.011 %, and
# the mean hides them.
#
# The second mistake: each rank counts the positions of its tokens from 0. Labels are right this time.

# %%
counted = on_each_rank(lambda mine: torch.arange(len(mine)))
torch.manual_seed(0)
untrained = Transformer(Config(layers=1, tied=True)).double()
print("mean loss             right positions   counted on each rank")
for name, each in (("before training", untrained), ("after training", model)):
    means = [token_losses(each, labels, at).mean().item() for at in (everywhere, counted)]
    print(f"{name:<22}{means[0]:>15.4f}{means[1]:>23.4f}")
    assert abs(means[1] - means[0]) < 1e-3 if each is untrained else means[1] > means[0] + 1

# %% [markdown]
# Before training you cannot see this mistake: an untrained model gives all keys about the same weight. The trained model finds the keys it
# needs by their distance, and the distances are wrong now.
#
# Here are both mistakes, token by token:

# %%
token_loss.draw()

# %% [markdown]
# ## The idea
#
# **In a transformer, tokens meet only in attention.** Here is the attention half of a layer: norm, queries, keys and
# values, rotary embedding, attention, output. `self.attention` was given to the model as an argument. Then a layer has a
# [feedforward](../docs/glossary.md#feedforward), which works on each token:

# %%
print_source(Layer.attend, Layer.feed)

# %% [markdown]
# Everything except the line with `self.attention` works on each token by itself. So only attention on the
# [chunk](../docs/glossary.md#chunk) alone is wrong:

# %%
layer, x = model.layers[0], model.embedding(TEXT[:, :-1]).detach()  # x (1, S, hidden)
for name, half in (
    ("norm", lambda x, at: layer.norm1(x)),
    ("feedforward", lambda x, at: layer.feed(x)),
    ("head", lambda x, at: model.head(x)),
    ("attention", layer.attend),
):
    whole, equal = half(x, everywhere), True
    for rank in range(P):
        at = positions("zigzag", S, rank, P)
        equal &= torch.allclose(half(x[:, at], at), whole[:, at], rtol=0, atol=1e-12)
    print(
        f"{name:<12} on chunks: {'the rows of the whole' if equal else 'not the rows of the whole: it needs the ring'}"
    )
    assert equal == (name != "attention")

# %% [markdown]
# So a model on $P$ ranks needs these four things, and nothing else changes:
#
# | | one process | a rank of the ring |
# | --- | --- | --- |
# | attention | `F.scaled_dot_product_attention` | `ringlab.scaled_dot_product_attention` |
# | positions | $0, 1, \dots, S-1$ | those of its tokens **in the whole sequence** |
# | labels | shifted by one | shifted by one **first**, then cut |
# | loss | a mean | a **sum**, divided by the number of labels **of the whole batch** |
#
# Positions and labels take two lines:

# %%
print_source(shard_text)

# %% [markdown]
# **The loss is a sum.** Some tokens have no label: padding, or a prompt that is not to be learned. Then the ranks hold
# different numbers of labels. A mean of the ranks' means gives the labels of a rank with few of them too much weight, and
# it is 0/0 when one rank has no label. Chapter 11 shows the numbers.
#
# ## Memory: what a layer keeps
#
# With the ring, attention needs little memory. The largest tensors of a layer are now inside the feedforward,
# because its inner width is several times `hidden`. No token needs another token there, so a layer can take a piece of
# the tokens at a time: the *blockwise* transformer. In inference that is enough, but in training autograd keeps all
# pieces for the [backward pass](../docs/glossary.md#backward-pass). So pieces need one more idea.
#
# **[Activation checkpointing](../docs/glossary.md#activation-checkpointing)**: the forward pass keeps the input of a function
# and forgets what is inside. The backward pass calls the function again, and then has everything it needs. A layer does
# this with the attention half and with each piece of the feedforward, so it keeps only their inputs, `x` and `h`.
# `kept_bytes` counts the bytes of the tensors that autograd keeps:

# %%
unit = S * model.head.in_features * 8  # bytes of a tensor (1, S, hidden) in float64, as x is
x = model.embedding(TEXT[:, :-1])
small = replace(layer.config, checkpointing=True, piece=4)
checkpointed = Layer(small, F.scaled_dot_product_attention).double()
for name, each in (("keeps everything", layer), ("checkpointing", checkpointed)):
    kept = workers.kept_bytes(each, lambda: each(x, everywhere))
    print(f"{name:<17} {kept:>8,} bytes, as {kept / unit:5.2f} tensors of the size of x")
assert kept == 2 * unit + S * 8  # x, h, and the positions, which are 8 bytes a token

# %% [markdown]
# The price is time: a backward pass is about as much work as two forward passes, so a step takes 4 units of work instead of 3.
#
# ## How often do K and V go round?
#
# Attention is computed again, so its [blocks](../docs/glossary.md#block) of K and V must go round again. A
# [hop](../docs/glossary.md#hop) moves all blocks by one rank. In one layer and one step:
#
# | | what goes round | hops | with 4 ranks |
# | --- | --- | --- | --- |
# | forward pass | K and V | $P - 1$ | 3 |
# | forward pass, computed again | K and V | $P - 1$ | 3 |
# | backward pass | K and V | $P - 1$ | 3 |
# | backward pass | dK and dV, the last time home | $P - 1$ | 3 |
#
# Only checkpointing needs the second line: $4P - 4$ hops instead of $3P - 3$.
#
# ## Four real processes
#
# Each process gets the weights that we trained, and runs one training step on its own tokens. Then `all_reduce` sums
# the gradients over the ranks. We count the hops of a layer and the bytes that it keeps.

# %%
CASES = {"keeps everything": model.layers[0].config, "checkpointing": small}
of_ranks = launch(workers.model_steps, P, TEXT, model.state_dict(), list(CASES.values()), device="cpu")

model.zero_grad()
exact = summed_loss(model(TEXT[:, :-1], everywhere), TEXT[:, 1:]) / S
exact.backward()
print(f"one process: loss {exact:.6f}")
for name, (loss, gradients, kept, hops) in zip(CASES, of_ranks[0], strict=True):
    print(f"{name:<17} loss {loss:.6f}, gradients of one process, {hops} hops, layer keeps {kept:>6,} bytes")
    assert abs(loss - exact) < 1e-12
    for weight, parameter in model.named_parameters():
        assert torch.allclose(gradients[weight], parameter.grad, rtol=0, atol=1e-12)
    assert hops == (4 * P - 4 if name == "checkpointing" else 3 * P - 3)
assert kept == 2 * (S // P) * Config().hidden * 8 + S // P * 8  # x and h of C tokens, and their positions

# %% [markdown]
# A rank of 4 keeps a quarter of the bytes of one process. Checkpointing changes the bytes and the hops, and no result.
#
# ## One weight with two names
#
# With [tied embeddings](../docs/glossary.md#tied-embeddings), the embedding and the
# head are one weight. A model uses it twice, and autograd adds up the two gradients, so the ranks must sum `weight.grad`
# **once**. `model.parameters()` gives the weight once. But a loop over all *names* sums its gradient twice, and makes it $P$ times
# too large.
#
# > **One number to remember: $2P - 1$.** So many tokens of a zigzag sequence get a wrong label when each rank shifts its
# > own labels. The mean hides them; the loss of each token shows them. Shift first, then cut.
#
# ## Questions
#
# <details><summary>Which parts of a model would need messages of their own, beside attention?</summary>
#
# All parts in which tokens meet. A convolution over the sequence, or a state-space layer, needs the tokens before the
# chunk. A mixture of experts with a loss for the balance of its experts needs the counts of all ranks. RMSNorm needs
# nothing: its mean is over `hidden`, inside one token.
# </details>
#
# <details><summary>Can the third turn of K and V be saved, and memory too?</summary>
#
# Yes. Keep q, k, v, the output of attention and its [log-sum-exp](../docs/glossary.md#log-sum-exp), and compute only the
# feedforward again. Then there are as many hops as without checkpointing, $3P - 3$. A layer keeps more tensors
# than `x` and `h`, but none of the inner width. (Li et al. 2023, DistFlashAttn, do it in this way.)
# </details>
#
# ## Your turn


# %%
# What does a rank of a ring get of a text (S + 1,), in the zigzag layout? Its tokens, its labels and their
# positions, each (S / P,). You may use positions(layout, seq_len, rank, world_size)
def my_input(text, rank, P):
    return ...


print(check_rank_input(my_input))


# %%
# The loss of the batch, from all ranks: logits[r] (C, vocab) and labels[r] (C,) are those of rank r.
# A label of -100 has no loss. The same number as in one process, please
def my_loss(logits, labels):
    return ...


print(check_batch_loss(my_loss))


# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# from ringlab.ring.layouts import positions
#
# def my_input(text, rank, P):
#     at = positions("zigzag", len(text) - 1, rank, P)
#     return text[:-1][at], text[1:][at], at
#
# def my_loss(logits, labels):
#     total, count = 0, 0
#     for of_rank, wanted in zip(logits, labels):
#         total += torch.nn.functional.cross_entropy(of_rank, wanted, ignore_index=-100, reduction="sum")
#         count += (wanted != -100).sum()
#     return total / count
# ```
# </details>
#
# Open [`transformer.py`](../ringlab/models/transformer.py) now: the model of this page, whose attention is its only part that sends
# messages. Next: [11 · meshes](11_meshes.ipynb), or on the track *use* [13 · documents and windows](13_documents_and_windows.ipynb).
