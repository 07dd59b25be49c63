# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 13 · Documents and windows
#
# Several short documents share one sequence ([packed documents](../docs/glossary.md#packed-documents)), and many models look back only over
# a [sliding window](../docs/glossary.md#sliding-window). Both are masks, and a ring that forgets them raises
# no error. After this chapter you can
#
# - find a ring that forgets the boundaries of documents,
# - give a ring the documents and windows of your data,
# - say how many [hops](../docs/glossary.md#hop) a window needs, in each [layout](../docs/glossary.md#layout).
#
# Tracks *plan*, *use* and *other ways*. You need chapters 1 to 8; next comes [14 · generation](14_generation.ipynb)
# (*use*) or [16 · the other ways round](16_the_other_ways_round.ipynb) (*plan*, *other ways*).
# 16 minutes to read, 15 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
from functools import partial

import torch

from figures import masked_ring
from notebooks.source.checks.masks_and_ways import check_first_key, check_hops
from notebooks.source.show import print_source
from ringlab.ring import documents
from ringlab.ring.cases import chunks_of_rank
from ringlab.ring.documents import letters, lookup, mean_loss, pack
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import LAYOUTS
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.support.processes import launch

P = 4

# %% [markdown]
# ## The failure
#
# Here is a model that needs no training. It reads letters, and guesses the letter that followed the present one earlier in the
# text. So a query is the present token. At each place the value is the token there, and the key is the token before it.
# The first token of a document has no token before it, so its key is 0.

# %%
print_source(lookup, mean_loss)

# %% [markdown]
# In the first document b follows a. In the second c follows b, and in the third a follows c. The loss of each token is
# −log of the probability of the next token of its document, its label:

# %%
texts = [letters(text) for text in documents.DOCUMENTS]


def loss_of(tokens, labels, positions, visible):
    """The mean loss, with full attention under the causal mask and `visible` (S, S)."""
    q, k, v = lookup(tokens, positions)
    scores = (q @ k.mT / 2).masked_fill(~visible.tril(), -torch.inf)  # 1/√D = 1/2
    return mean_loss(documents.SHARP * (scores.softmax(dim=-1) @ v)[0, 0], labels).item()


def everything(n):
    return torch.ones(n, n, dtype=torch.bool)


losses, counts = [], []
for name, text in zip(documents.DOCUMENTS, texts, strict=True):
    labels = torch.tensor([*text[1:].tolist(), documents.IGNORED])  # the last token has none
    losses.append(loss_of(text, labels, torch.arange(len(text)), everything(len(text))))
    counts.append(len(text) - 1)
    print(f"{name:<10} alone: loss {losses[-1]:.4f}")
right = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
print(f"the mean over all labels: {right:.4f}")

# %% [markdown]
# Now the three documents are one sequence, and the attention is causal, as always:

# %%
tokens = torch.cat(texts)
labels = torch.cat([torch.tensor([*text[1:].tolist(), documents.IGNORED]) for text in texts])
positions = torch.cat([torch.arange(len(text)) for text in texts])
leaked = loss_of(tokens, labels, positions, everything(len(tokens)))
print(f"the pack, causal: loss {leaked:.4f}, x {leaked / right:.2f}")
assert leaked > 1.2 * right

first = texts[0]
labels_of_first = labels[: len(first)]
assert loss_of(first, labels_of_first, torch.arange(len(first)), everything(len(first))) == losses[0]
print("a pack of one document: the loss of that document, to the last bit")

# %% [markdown]
# The later documents see the earlier ones, and guess by their rules. A test with a single document
# proves nothing. A training program with a ring had this mistake: its loss was 5.81 and not 3.17
# ([axolotl, issue 3608](https://github.com/axolotl-ai-cloud/axolotl/issues/3608)).
#
# ## The idea
#
# **Four things restart with each document:** the keys that a query sees, the positions, the labels, and what counts in
# the loss. The cell above has made the last three, for the whole sequence. `pack` does the same, and fills up the
# sequence with zeros, which are one more document, without labels. Then the ranks get their tokens as in chapter 7.

# %%
tokens, labels, positions, lengths = pack(texts, 2 * P)
print("tokens   ", "".join(".abc"[token] for token in tokens))
print("labels   ", "".join(".abc"[label] if label >= 0 else "-" for label in labels))
print("positions", "".join(str(position.item()) for position in positions))
print("documents", lengths)
own = documents.same_document(lengths)
assert abs(loss_of(tokens, labels, positions, own) - right) < 1e-12
print(f"the pack: loss {loss_of(tokens, labels, positions, own):.4f}")

# %% [markdown]
# What does the ring need of all this? Only `lengths`, because under a causal mask a query sees one **run of keys**: from
# the first token of its document to itself. So two numbers for each query describe the whole mask:
#
# $$\text{query } p \text{ sees the keys } \text{first}(p) \le \text{position} < \text{end}(p).$$
#
# Neither number ever falls when $p$ rises.

# %%
mask = Mask(causal=True, documents=(3, 5))
((first, end),) = mask.visible_keys(torch.arange(8), 8)
print("query", *range(8))
print("first", *first.tolist())
print("end  ", *end.tolist())

# %% [markdown]
# ## The ring
#
# A mask knows nothing of ranks. So a [partition](../docs/glossary.md#partition), made from a mask, a layout and the
# length of each chunk, says what each rank computes of each block: the [pieces](../docs/glossary.md#piece) of its staircase
# ([chapter 8a](08a_fused_kernels.ipynb); `cut` of [`partition.py`](../ringlab/ring/partition.py)). The rest stays as in chapter 8: a rank merges
# each piece into the rows of its queries, and skips a block without pieces.
#
# Here the ring runs on four real processes, on the pack of letters, without documents and with `documents=lengths`.
# `chunks_of_rank` calls an attention on the chunks of its rank:

# %%
print_source(chunks_of_rank)

# %%
q, k, v = lookup(tokens, positions)
for what in (None, lengths):
    ring = partial(ring_flash_attention, causal=True, documents=what)
    outs = [four[0] for four in launch(chunks_of_rank, P, [q, k, v, q], ring, "contiguous", device="cpu")]
    loss = mean_loss(documents.SHARP * torch.cat(outs, dim=2)[0, 0], labels).item()
    print(f"documents={what}: loss {loss:.4f}, x {loss / right:.2f}")
assert abs(loss - right) < 1e-12

# %% [markdown]
# ## The picture
#
# Here are 32 tokens on 4 ranks. The left picture has four documents. The right picture is for the last two sections: a window, and
# two tokens that all queries see.

# %%
masked_ring.draw()

# %% [markdown]
# ## Work, and hops
#
# No rank computes a piece that the mask hides; on the edge of a triangle the kernel computes whole tiles. And
# the blocks move on only as long as some rank needs one of them.
# When no document crosses two borders between ranks, one hop is enough. The price is balance: the ranks' work
# differs, and a ring is as slow as its busiest rank. Here are 65,536 tokens on 8 ranks:

# %%
S = 65_536
print("                              hops, and the pairs of the busiest rank over the average")
for name, packed in (("8 of 8,192 tokens", (8192,) * 8), ("1 long, 18 shorter", (32_768, *(8192,) * 2, *(1024,) * 16))):
    cells = []
    for layout in LAYOUTS:
        parts = Partition(Mask(causal=True, documents=packed), layout, (S // 8,) * 8)
        pairs = [parts.pairs(rank) for rank in range(8)]
        cells.append(f"{layout} {parts.hops}, {8 * max(pairs) / sum(pairs):.2f}")
    print(f"{name:<20}" + "".join(f"{cell:>20}" for cell in cells))
for layout, calls in (("contiguous", 8), ("striped", 152)):
    parts = Partition(Mask(causal=True, documents=packed), layout, (S // 8,) * 8)
    assert max(sum(len(parts.pieces(rank, j)) for j in range(8)) for rank in range(8)) == calls

# %% [markdown]
# Which layout do you take? Take contiguous chunks when every document lies on one rank, because they need no message at all.
# Take the striped layout when one document is long, because it spreads each document evenly. Zigzag balances one
# document that fills the sequence, not a pack.
#
# With the long document a rank calls the kernel 152 times in the striped layout, and 8 times at most in the contiguous one.
#
# ## A window
#
# With a window of $w$ tokens query $i$ sees the keys $i-w+1 \dots i$. In the contiguous layout these keys are on the query's own rank
# and on the ranks just before it. The farthest key is $w - 1$ tokens back, so
#
# $$\text{hops} = \left\lceil \frac{w-1}{C} \right\rceil, \text{ at most } P - 1.$$

# %%
C = 1024
print("window" + "".join(f"{layout:>12}" for layout in LAYOUTS))
for w in (1, 2, 3, C + 1, C + 2, 4 * C + 1, 8 * C):
    hops = [Partition(Mask(causal=True, window=w), layout, (C,) * 8).hops for layout in LAYOUTS]
    print(f"{w:>6}" + "".join(f"{count:>12}" for count in hops))
    assert hops[0] == documents.window_hops(w, C, 8) == min(-(-(w - 1) // C), 7)

# %% [markdown]
# In the striped layout the token $n$ places back is $n$ hops away. In zigzag the late half chunks run the other way
# round: the chunk just before is on rank $r + 1$, and from there the way is $P - 1$ hops long. So take contiguous chunks. They
# are balanced here anyway, because every query after the first $w - 1$ sees $w$ keys.
#
# ## Tokens that all see
#
# With a window nobody sees the beginning of a long text. The cure is
# [global tokens](../docs/glossary.md#global-tokens) (Longformer), for example a question: every query sees the first
# $g$ keys too. (StreamingLLM keeps the first tokens of any text and calls them attention sinks. Today a
# [sink](../docs/glossary.md#learned-sink) usually is a learned number, not a token.) These keys are a second run,
# from 0 to $g$ but not into the window, which is cut like the first run. The work stays small, but the hops are
# $P - 1$ again, because the block with the first tokens must visit all ranks.
#
# Without a mask the queries may even come from another sequence (*cross-attention*): `ring_flash_attention` takes any number of queries on
# each rank.
#
# > **One number to remember: $\lceil (w-1)/C \rceil$ hops** for a window of $w$ tokens, in the contiguous layout.
#
# ## Questions
#
# <details><summary>Rotary positions that run on from document to document: is the result wrong?</summary>
#
# No, apart from rounding. A rotary score depends on the difference of two positions, and within a document the differences stay
# the same. But with learned positions, or with scaling that depends on the length, the result is wrong. And some
# libraries see a border where the position is 0, so restart positions in each document.
# </details>
#
# <details><summary>Eight ranks, and a document that begins 10 tokens before the border of ranks 2 and 3. What does it cost?</summary>
#
# One hop for all ranks, in contiguous chunks: rank 3 needs 10 keys of block 2, and the ring moves whole blocks. If the
# document ended at the border, there would be no hop. Order the documents so that few of them cross a border.
# </details>
#
# ## Your turn


# %%
# A causal mask over packed documents, `lengths` their lengths in order; and a window, or None.
# Which is the first key that the query at this position of the sequence sees?
def my_first_key(position, lengths, window):
    return ...


print(check_first_key(my_first_key))


# %%
# A window of w tokens, C tokens on each of P ranks, contiguous: how many hops?
def my_hops(w, C, P):
    return ...


print(check_hops(my_hops))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_first_key(position, lengths, window):
#     start = 0
#     for length in lengths:
#         if position < start + length:
#             break
#         start += length
#     return start if window is None else max(start, position + 1 - window)
#
# import math
#
# def my_hops(w, C, P):
#     return min(math.ceil((w - 1) / C), P - 1)
# ```
# </details>
#
# Open [`documents.py`](../ringlab/ring/documents.py) now: packed documents and windows, on processes. [How
# fast they are](../bench/results/README.md#masked_rings). Next, on the track *use*:
# [14 · generation](14_generation.ipynb), and on *plan* and *other ways*: [16 · the other ways round](16_the_other_ways_round.ipynb).
