# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 15 · What context is for
#
# A ring trains on longer texts. What does a model gain by that? After this chapter you can
#
# - show in which part of a text a model fails that was trained on shorter texts,
# - train on 4 times as long texts, with the same memory on each [rank](../docs/glossary.md#rank), and count that memory,
# - say when a cheap remedy, squeezed positions, is better than longer training.
#
# Track *use*. Before it: chapters 1 to 8 and 10. 16 minutes to read, 15 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import torch

from bench import record, retrieval
from bench.retrieval import START, accuracy_by_depth, shard_texts, write_texts
from figures import measured_models
from notebooks.source.checks.what_context_is_for import check_longest_text, check_pairs
from notebooks.source.show import print_source
from ringlab.support.processes import launch

# %% [markdown]
# ## The task: find a line
#
# A text has lines, and each line has an id and a number. Then comes the id of one of the lines, and the model must
# say its number. The paper's figure 3 asks this in texts of up to 512,000 tokens. Here an id is one token, and so is
# a number. At the end of a text the model gets many questions, half as many as there are lines, so that it learns faster.

# %%
LINES, IDS = 8, 64
texts, asked = write_texts(LINES, 1, torch.Generator().manual_seed(0), IDS)
pairs = texts[0, 1:].view(-1, 2).tolist()  # without START, the first token
for number, (line, value) in enumerate(pairs):
    answer = f"<{value - retrieval.IDS}>"
    print(f"line {line:>2}: REGISTER_CONTENT is {answer if number < LINES else f'<?>   the right answer: {answer}'}")
assert all(pair in pairs[:LINES] for pair in pairs[LINES:])

# %% [markdown]
# ## The failure
#
# Train a small model, 2 layers and 64 numbers a token, on texts of up to 8 lines. Then let it read new texts of 8,
# 16, 32 and 64 lines. `retrieval.train` takes 200 steps on one process; its parts come below. `accuracy_by_depth`
# asks for lines in each eighth of the text.

# %%
((weights, _),) = launch(retrieval.train, 1, LINES, 200, 16, 0, IDS, device="cpu")
print("        the first eighth of the text ... the last eighth. #: most answers are right, .: most are wrong")
found = {}
for lines in (8, 16, 32, 64):
    shares = accuracy_by_depth(weights, lines, 2048 // lines, 0, IDS)
    found[lines] = sum(shares) / len(shares)
    if lines in (8, 64):
        ends = ["#" if share > 0.5 else "." for share in (shares[0], shares[-1])]
        of_all = "more than 90 %" if found[lines] > 0.9 else "less than half"
        print(f"{lines:>2} lines  {ends[0]} ... {ends[1]}   {of_all} of all answers are right")
assert found[8] > 0.9 > 0.5 > found[64]
assert found[8] > found[32] > found[64]

# %% [markdown]
# The model has learned the task: in texts as long as those of its training it finds nearly every line. In a text that
# is 8 times as long it does not find the first lines.
#
# **Why? The distance.** The first lines are farther from the question than any line was in the training, so [rotary
# embeddings](../docs/glossary.md#rotary-embedding) turn their keys by angles that the queries never met. If that is the reason, smaller
# distances must help. So the same model reads the same texts with all positions divided by 8, and a text of 64 lines spans the
# positions of 8:

# %%
squeezed = accuracy_by_depth(weights, 64, 2048 // 64, 0, IDS, squeeze=8 / 64)
helps = sum(squeezed) / len(squeezed) > 0.8
print(f"64 lines, positions divided by 8: {'more' if helps else 'less'} than 80 % of all answers are right")
assert helps

# %% [markdown]
# So most lines were lost by their distance, and not by their number. Squeezed positions are a known remedy
# (*position interpolation*, Chen et al. 2023), and the picture below shows how good this remedy is.
#
# ## The idea
#
# **Train on texts as long as those that the model will read.** Texts that do not fit one rank go into a ring. $P$ ranks
# with $C$ tokens each train on
#
# $$S = P \cdot C$$
#
# tokens, and a rank keeps as much for the [backward pass](../docs/glossary.md#backward-pass) as one process keeps for $C$
# tokens. `kept_by_a_step` counts the bytes that autograd keeps for a step on 16 texts (the `kept_bytes` of chapter 10):

# %%
((tokens, one),) = launch(retrieval.kept_by_a_step, 1, LINES, 16, device="cpu")
((_, whole),) = launch(retrieval.kept_by_a_step, 1, 4 * LINES, 16, device="cpu")
ring = launch(retrieval.kept_by_a_step, 4, 4 * LINES, 16, device="cpu")
print(f"one process, {LINES:>2} lines: {tokens:>5,} tokens, {one:>10,} bytes kept")
print(f"one process, {4 * LINES:>2} lines: {4 * tokens:>5,} tokens, {whole:>10,} bytes kept")
for rank, (tokens_of_rank, kept) in enumerate(ring):
    print(f"rank {rank} of 4,   {4 * LINES:>2} lines: {tokens_of_rank:>5,} tokens, {kept:>10,} bytes kept")
    assert tokens_of_rank == tokens
    assert abs(kept / one - 1) < 0.01

# %% [markdown]
# ## What crosses the borders of chunks
#
# We take the model of chapter 10, with one change. To find a value by its id, a layer must know which id stood before a
# value. Large models learn that. To spare the small model this work, half of the numbers of an embedding are of the
# token, and half are of the token before it:

# %%
print_source(retrieval.PairEmbedding)

# %% [markdown]
# In a ring the token before is often on another rank. So a rank takes this token from the text, as it takes its labels
# (chapter 10: shift first, then share out). Here are the ids of the first line and of the first question, on two
# ranks (number n is token 256 + n, and START is 288):

# %%
print_source(shard_texts)
for rank in range(2):
    tokens, labels, at = shard_texts(texts, rank, 2)
    print(f"rank {rank}: positions {at.tolist()}")
    for place in (0, 2 * LINES):
        if place in at:
            i = at.tolist().index(place)
            own, before = tokens[0, i].tolist()
            label = labels[0, i].item()
            print(f"  position {place:>2}: token {own:>3}, before it {before:>3}, label {label}")
assert shard_texts(texts, 0, 2)[0][0, 0, 1] == START

# %% [markdown]
# IGNORED is −100: only the id of a question has a label, its answer. Everything else is a common training loop, `retrieval.train`.
# `DistributedDataParallel` averages the gradients of the ranks, so the loss is multiplied by P.
#
# ## The picture
#
# The committed run (`python -m bench.retrieval`, some minutes) trains one process on texts of up to 32 lines, and a ring of 4 on texts
# of up to 128, in the same number of steps, with three seeds. So the ring's model also reads more tokens: we did not separate
# longer texts from more training. The columns are lengths of the text, the rows are the depths.
# The third map is the first model again, which reads with squeezed positions:

# %%
measured_models.retrieval()

# %% [markdown]
# In numbers: the right answers over all depths, in percent, mean of three seeds.

# %%
results = record.load("retrieval")
lengths = retrieval.lengths(results["lines"])
print("lines of a text           " + "".join(f"{lines:>8}" for lines in lengths))
right = {}
for name in ("1 x, one process", "4 x, ring of 4", "1 x, positions squeezed"):
    right[name] = 100 * retrieval.accuracies(results, name).mean(dim=(0, 2))  # over seeds and depths
    print(f"{name:<26}" + "".join(f"{share:>8.1f}" for share in right[name].tolist()))
at_128, at_256 = lengths.index(128), lengths.index(256)
assert right["4 x, ring of 4"][at_128] > right["1 x, positions squeezed"][at_128]
assert right["4 x, ring of 4"][at_256] < right["1 x, positions squeezed"][at_256]

# %% [markdown]
# Each model finds the lines of texts as long as those of its training. In longer texts each fails in the same way, from the top of
# the text on. So the ring's model fails too, but at 4 times the length. The paper's figure 3
# ([Liu et al. 2023](https://arxiv.org/abs/2310.01889)) shows the same, by length only, for GPT-3.5-turbo-16K, Vicuna-13B-16K and
# Claude-2-100K.
#
# **And squeezed positions?** They need no training. At 128 lines, the length of the ring's training, the ring's model is better: 99.6
# to 96.5. **At 256 lines squeezed positions win**: 92.0 to 74.9. There the ring's model reads with positions that it has never met, and
# the first model does not. So take the ring up to the length of its training, and beyond that squeeze, which is cheap.
#
# **More tries, too.** An agent that sees its earlier tries needs them in its [context](../docs/glossary.md#context): the
# [appendix](appendix_bandit.md) measures what 4 times the context gains there, on a small bandit.
#
# > **One number to remember: 4 × the context in 1 × the memory of a rank**, on a ring of 4. The model finds lines at
# > every depth of texts as long as its training, and fails from the top of longer ones.
#
# ## Questions
#
# <details><summary>A model was trained on 4K tokens and must read 16K. Does a ring help when it reads?</summary>
#
# A ring makes it possible to read 16K tokens in the memory of 4K. But it does not make the model good at them: the model of the
# first map failed without any limit of memory. Train on 16K tokens, in the ring, or squeeze the positions first.
# </details>
#
# <details><summary>Why does the model fail at the first lines, and not at the last ones?</summary>
#
# The questions are at the end. The last lines are at distances that the training had. The first lines are farther away
# than any line of the training was.
# </details>
#
# ## Your turn


# %%
# This rank's tokens with the token before each, (B, C, 2): [..., 0] the token, [..., 1] the one before it.
# texts (B, 1 + S): START and the S tokens of the sequence, the same on every rank; at (C,): this rank's positions, 0 ... S-1
def my_pairs(texts, at):
    return ...


print(check_pairs(my_pairs))


# %%
# The longest text (tokens) that a ring of P ranks trains on. Each rank has `memory` bytes. It holds all the weights with
# their gradients and moments (`weights` bytes), and keeps `kept` bytes for each token that it has. All are whole numbers.
def my_longest_text(memory, weights, kept, P):
    return ...


print(check_longest_text(my_longest_text))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_pairs(texts, at):
#     return torch.stack([texts[:, at + 1], texts[:, at]], dim=2)
#
# def my_longest_text(memory, weights, kept, P):
#     return P * ((memory - weights) // kept)
# ```
# </details>
#
# Open [`retrieval.py`](../bench/retrieval.py) now: the lines of this page, and a model that finds them.
# Next: [16 · rings that were wrong](16_rings_that_were_wrong.ipynb).
