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
# A ring trains on longer texts. What does a model gain by that, and what must travel for it? After this chapter you can
#
# - show in which part of a text a model fails that was trained on shorter texts, even on as many tokens,
# - choose a query's few keys among those of all [ranks](../docs/glossary.md#rank), and say why the best of each rank are not the best,
# - count what the layers of this year's models send a token: keys and values, latents, index keys, states.
#
# Track *use*. Before it: chapters 1 to 8 and 10. 15 minutes to read, 15 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import torch

from bench import record, retrieval
from bench.retrieval import accuracy_by_depth, write_texts
from figures import chosen_keys as topics
from figures import measured
from notebooks.source import workers
from notebooks.source.checks.masks_and_ways import check_merge, check_sent
from notebooks.source.show import print_source
from ringlab.ring import chosen_keys, latent_ring
from ringlab.support.processes import launch

# %% [markdown]
# ## The task: find a line
#
# A text has lines, and each line has an id and a number. Then comes the id of one of the lines, and the model must
# say its number. The paper's figure 3 asks this in texts of up to 512,000 tokens. Here an id is one token, and so is
# a number. At the end of a text come many questions, half as many as there are lines.

# %%
LINES, IDS = 8, 64
texts, asked = write_texts(LINES, 1, torch.Generator().manual_seed(0), IDS)
pairs = texts[0, 1:].view(-1, 2).tolist()  # without START, the first token
for number, (line, value) in enumerate(pairs[4:9], start=4):
    answer = f"<{value - retrieval.IDS}>"
    print(f"line {line:>2}: REGISTER_CONTENT is {answer if number < LINES else f'<?>   the right answer: {answer}'}")
assert all(pair in pairs[:LINES] for pair in pairs[LINES:])

# %% [markdown]
# ## The failure
#
# Train a small model, 2 layers and 64 numbers a token, on texts of up to 8 lines. Then let it read new texts, also longer ones.

# %%
((weights, _),) = launch(retrieval.train, 1, LINES, 200, 16, 0, IDS, device="cpu")
print("         the first eighth of the text ... the last. #: most answers are right, .: most are wrong")
for lines, squeeze in ((8, 1), (64, 1), (64, 8)):
    shares = accuracy_by_depth(weights, lines, 2048 // lines, 0, IDS, squeeze=1 / squeeze)
    marks = " ... ".join("#" if share > 0.5 else "." for share in (shares[0], shares[-1]))
    print(f"{lines:>2} lines  {marks}{'   positions divided by 8' if squeeze > 1 else ''}")
    assert (shares[0] > 0.5) == (lines / squeeze == LINES)

# %% [markdown]
# In a text that is 8 times as long it loses the first lines. They are farther from the question than any line of the training was, so
# [rotary embeddings](../docs/glossary.md#rotary-embedding) turn their keys by angles that the queries never met. A cheap remedy is to divide
# the positions (*position interpolation*, Chen et al. 2023). The other is to train on longer texts, in a ring: $P$ ranks with $C$ tokens
# each train on $S = P \cdot C$, with the memory of $C$ tokens on each. The committed run (`python -m bench retrieval`, three seeds):

# %%
measured.retrieval()

# %% [markdown]
# Each model fails from the top of texts that are longer than its training's. But the ring's model read 4 times as many tokens. Is it the
# length, or the number? So another model took 4 times as many steps with short texts:

# %%
results = record.load("retrieval")
at_128 = retrieval.lengths(results["lines"]).index(128)
right = {name: 100 * retrieval.accuracies(results, name).mean(dim=(0, 2))[at_128].item() for name in retrieval.RUNS}
for name, share in right.items():
    print(f"{name:<26}{share:>6.1f} % right in texts of 128 lines")
assert right["4 x, ring of 4"] > right[retrieval.SQUEEZED] > right[retrieval.LONGER]

# %% [markdown]
# It is the length. Beyond the ring's training squeezed positions win, but at its lengths they lose a little: 96.5 % here, the ring's 99.6.
#
# ## The idea: a question needs few keys
#
# The newest open models let each query choose 2,048 **keys** (DeepSeek-V3.2, GLM 5). A small *index* gives key $t$ a score for query $s$, from $J$
# index heads of $E$ numbers, each with a weight $w$, and one index key a token:
#
# $$I_{s,t} = \sum_j w_{s,j} \cdot \mathrm{relu}(q_{s,j} \cdot k_t)$$
#
# Who knows which keys are the best? **First the wrong way:** each rank chooses among the keys that it has. Here a text has three
# topics, on 8 ranks of 8 tokens, and each query chooses 4 keys.

# %%
q, w, k = topics.index()
S, P, count = topics.S, topics.P, topics.COUNT
scores = (w[..., None] * torch.relu(q @ k[:, None].mT)).sum(dim=1)[0]  # (S, S)
past = torch.ones(S, S, dtype=torch.bool).tril()
own = torch.arange(S)[:, None] // topics.C == torch.arange(S) // topics.C
of_all = scores.masked_fill(~past, -torch.inf).topk(count)
of_own = scores.masked_fill(~(past & own), -torch.inf).topk(count)
weights = of_own.values.softmax(dim=-1)
missed = (of_own.values.sum(dim=1) < of_all.values.sum(dim=1)).sum().item()
print(f"the best of its own shard: {missed} of {S} queries miss a key that they should have chosen")
print(f"all rows are finite, and their weights sum to 1: {bool((weights.sum(dim=-1) - 1).abs().max() < 1e-6)}")
assert missed > S // 2

# %% [markdown]
# The result is wrong, and looks right. So the index keys go round first. A rank keeps the best 4 *so far* of each query, and merges
# every block that arrives into them: it never has a row of $S$ scores. `better` sorts by position first, and then, stably, by score.
# So of equal scores the smaller position wins, in whatever order the blocks came.

# %%
print_source(chosen_keys.better)
chosen = topics.chosen()  # choose_keys, on 8 processes
assert [set(row.tolist()) - {-1} for row in chosen] == [
    set(keys[values > -torch.inf].tolist()) for keys, values in zip(of_all.indices, of_all.values, strict=True)
]
print("on 8 processes: the keys of torch.topk of the whole row, for every query")

# %% [markdown]
# A rank then skips a block in which none of its queries chose a key, and a block stops at the last rank that needs it:

# %%
topics.draw()

# %% [markdown]
# The choice has no gradient. So the index learns from a loss of its own: how far the softmax of its scores is from the weights of attention.

# %% [markdown]
# ## Latents: what travels in place of K and V
#
# These models keep no keys and values. A layer keeps a **latent** of $L = 512$ numbers a token, and $R = 64$ rotated numbers for all
# heads. So the latent can travel, and every rank makes K and V of all heads itself. `block` is latents beside rotated numbers, `w` the
# weights of all heads. The small ring below has 16 heads of 32 + 8 numbers and latents of 32:

# %%
print_source(latent_ring.heads_of)
for name, sent in launch(workers.latents_sent, 4, device="cpu")[0].items():
    print(f"{name:<24}{sent:>10,} bytes sent by a rank, forward")

# %% [markdown]
# | a layer of | numbers a token that travel | messages of a rank, forward |
# |---|---:|---|
# | MHA, 128 heads of 128 | 32,768 | P − 1 of a block |
# | GQA, 8 K/V heads of 128 | 2,048 | P − 1 of a block |
# | MLA as 128 expanded heads | 40,960 | P − 1 of a block |
# | MLA as latents | **576** | P − 1 of a block |
# | DSA: index keys, latents | 128 + 576 | twice P − 1 |
# | a state (linear attention) | 0 | ⌈log₂ P⌉ of a state |
#
# **Which is faster?** With latents a rank makes K and V again in each round. This costs as much as attention to 410 more keys. Computing
# hides expanded heads in blocks of (FLOP/s) / (bytes/s) keys or more: 10,000 at 400 TFLOP/s and 40 GB/s. Below 10,000 − 410 = 9,590 keys
# latents are faster.

# %%
heads, D, R, L = 128, 128, 64, 512
expanded = heads * (D + R + D)
print(f"expanded: {expanded:,} numbers a token; latents: {L + R}, {expanded // (L + R)} times fewer")
assert (expanded, round(L * (D + D) / (D + R + D))) == (40_960, 410)

# %% [markdown]
# > **One number to remember: 576.** So many numbers a token and layer travel for 128 heads: a latent of 512, and 64 that are rotated.
#
# ## Questions
#
# <details><summary>A model was trained on 4K tokens and must read 16K. Does a ring help when it reads?</summary>
#
# It finds the memory. It does not make the model good at them: the first model failed without any limit of memory. Train on 16K tokens,
# in the ring, or squeeze the positions.
# </details>
#
# <details><summary>Each rank sends the best 2,048 keys of its shard, with their scores. Is that enough to choose?</summary>
#
# Yes: the best of all are among them. But 2,048 candidates of each rank for each of S queries are far more numbers than S index keys.
# </details>
#
# ## Your turn


# %%
# The positions of the best `count` keys of one query, a list in any order. `blocks` come in the order of the ring: a list of
# (scores, positions), two lists each. Of equal scores the smaller position is chosen.
def my_merge(blocks, count):
    return ...


print(check_merge(my_merge))


# %%
# The numbers that a rank sends in the forward pass of a layer with chosen keys: index keys of E numbers first, then latents
# of L and R rotated numbers, for 128 heads. P ranks have C tokens each.
def my_sent(C, L, R, E, P):
    return ...


print(check_sent(my_sent))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_merge(blocks, count):
#     best = sorted((-score, at) for scores, positions in blocks for score, at in zip(scores, positions))
#     return [at for _, at in best[:count]]
#
# def my_sent(C, L, R, E, P):
#     return (P - 1) * C * (L + R + E)
# ```
# </details>
#
# Open [`chosen_keys.py`](../ringlab/ring/chosen_keys.py) now: the ring of index keys; `latent_ring.py` beside it is the ring of latents.
# Next: [16 · rings that were wrong](16_rings_that_were_wrong.ipynb).
