# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · Your own model: a Hugging Face model in the ring
#
# You have a model of the `transformers` library and a text that is too long for one device. After this chapter you can
#
# - find out whether a model calls the ring, and whether it dropped a mask,
# - put the ring into the model without changing its code, and train it.
#
# Track *train*. You need chapters 10 and 11, and transformers (`pip install -e '.[hf]'`); the track ends here.
# 19 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import tempfile

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from notebooks.source import model_workers
from notebooks.source.checks.models import check_attention_function, check_what_is_refused
from notebooks.source.model_workers import tiny
from ringlab.hugging_face.batch import BATCH, shifted
from ringlab.models.transformer import TEXT
from ringlab.support.processes import launch

P, S = 4, 32
tokens, labels = TEXT[:, :-1], TEXT[:, 1:]  # the 32 bytes "Keys and values go round a ring.", and those that follow

# %% [markdown]
# In this chapter `tiny("llama")` is LLaMA as transformers has it, with random weights in float64 and small sizes: 2
# layers, 4 heads, 2 K/V heads, hidden 32. `tiny` makes other models in the same way.
#
# ## The failure
#
# **The ring is not called.** We cut the text into four [chunks](../docs/glossary.md#chunk) of 8 tokens, one for each
# [rank](../docs/glossary.md#rank), with the right labels and positions. But the layers still call their own attention, which knows this chunk
# only. This process plays the four ranks one after another.


# %%
def loss_of(model, at):
    """The mean loss of the tokens at positions `at`, when the model is given these tokens only."""
    logits = model(input_ids=tokens[:, at], position_ids=at[None]).logits  # (1, C, vocab)
    return F.cross_entropy(logits[0], labels[0, at])


def train(parts, steps=61):
    """Train on these parts of the text together; return the model and the loss of each step."""
    model, losses = tiny("llama"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = sum(loss_of(model, at) for at in parts) / len(parts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


whole, chunks = torch.arange(S), torch.arange(S).chunk(P)
_, right = train([whole])
cut_off, wrong = train(chunks)
print("step   the whole text   four chunks, ring not called")
for step in (0, 10, 20, 40, 60):
    print(f"{step:>4}{right[step]:>17.4f}{wrong[step]:>31.4f}")
with torch.no_grad():
    used = loss_of(cut_off, whole).item()
print(f"the last model, given the whole text: {used:.4f}")
assert wrong[60] < wrong[40] < wrong[20] < wrong[0]  # it falls, as it should
assert used > 10 * wrong[60]

# %% [markdown]
# The loss falls. But the model learned each chunk as a text of its own, so with the whole text it
# fails. The gradients show why: the logits of a token should depend on this token and on all earlier ones.


# %%
def who_is_seen(model, parts):
    """(S, S): does token j (a column) change the logits of token i (a row)?"""
    seen = torch.zeros(S, S, dtype=torch.bool)
    for at in parts:
        embedded = model.model.embed_tokens(tokens[:, at]).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, position_ids=at[None]).logits  # (1, C, vocab)
        for i, row in zip(at, logits[0], strict=True):
            (gradient,) = torch.autograd.grad(row.square().sum(), embedded, retain_graph=True)
            seen[i, at] = gradient[0].any(dim=1)  # (C, hidden) -> (C,)
    return seen


should, does = (who_is_seen(tiny("llama"), parts) for parts in ([whole], chunks))
print(f"pairs (token, token that it sees): {should.sum()} in the whole text, {does.sum()} with the ring not called")
assert torch.equal(should, torch.ones(S, S).tril().bool())
assert torch.equal(does, torch.block_diag(*[torch.ones(8, 8).tril()] * P).bool())

# %%
model_workers.picture_of_seen({"the whole text": should, "four chunks, ring not called": does})

# %% [markdown]
# **A mask is dropped.** To call the ring, you give the layers another attention. transformers has a place for that: a function
# registered under a name, which a layer calls with q, k and v, with a mask, and with more arguments by name. This function
# looks right, because it does what plain causal attention needs:

# %%
masks = []


def causal_only(module, query, key, value, attention_mask, scaling=None, **others):
    masks.append(attention_mask)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None  # (B, H, C, D) -> (B, C, H, D); no weights


AttentionInterface.register("causal_only", causal_only)


def loss_with(attention, padding=0, documents=1, **options):
    """The loss of Mistral on the text, after `padding` tokens that its mask hides, or cut into packed documents."""
    model = tiny("mistral", **options)
    model.set_attn_implementation(attention)
    padded = F.pad(tokens, (padding, 0))
    place = torch.arange(S + padding) - padding
    mask = (place >= 0)[None] if padding else None
    at = place.clamp(min=0) % (S // documents)  # restarts at each document
    logits = model(padded, attention_mask=mask, position_ids=at[None], use_cache=False).logits
    return F.cross_entropy(logits[0, padding:], labels[0]).item()


print("                               sdpa   causal_only")
cases = {"no window": {}, "a window of 4 tokens": {"sliding_window": 4}, "4 tokens of padding": {"padding": 4}}
cases["two packed documents"] = {"documents": 2}
lost = {}
for case, options in cases.items():
    options = {"sliding_window": None, **options}
    lost[case] = loss_with("sdpa", **options), loss_with("causal_only", **options)
    print(f"{case:<25}{lost[case][0]:>10.4f}{lost[case][1]:>14.4f}")
print(f"causal_only was called {len(masks)} times, and given a mask {sum(x is not None for x in masks)} times")
assert len(masks) == 8
assert abs(lost["no window"][0] - lost["no window"][1]) < 1e-12
assert lost["a window of 4 tokens"][1] == lost["no window"][1]  # as if there were no window
assert abs(lost["4 tokens of padding"][0] - lost["4 tokens of padding"][1]) > 1e-3
assert abs(lost["two packed documents"][0] - lost["two packed documents"][1]) > 1e-3

# %% [markdown]
# With a window the loss is the same as without a window. With padding on the left the tokens see the padding, and the
# second of two packed documents sees the first. (transformers knows documents by positions that restart at 0, and
# only without a mask and with `use_cache=False`.) Nobody warned you: the mask that the function
# was given is `None`, and the window went into `**others`. [Rings in use](../docs/symptoms.md) have dropped masks in this way.
#
# ## The idea
#
# transformers looks up one name in two registers, and neither checks the other. In the first failure no register knew the ring.
# In the second failure only the first register knew `causal_only`:
#
# | who asks | which register | the question |
# | --- | --- | --- |
# | each layer | `AttentionInterface` | here are q, k, v and all I know: what is the output? |
# | the model, once for each kind of layer | `AttentionMaskInterface` | here is the rule of my mask: what shall I hand to the layers? |
#
# If the name is missing in the second register, the model hands on `None`. So `use_ring(model)` does four things:
#
# - It **registers both**. For a sliding window the ring takes `window=`, its length. For the chunks of Llama 4 the ring takes
#   `documents=`, because to a ring such a chunk is a document.
# - It **refuses** every argument that it does not understand, unless its value asks for nothing (None, 0, False). A list of what is
#   known to be wrong would miss what the next model brings, so there is only a list of what is understood.
# - It **proves that the model may be cut.** A ring exchanges K and V, and nothing else. So with an attention in which each
#   token sees only itself, the picture above must be a diagonal. Another part that mixes tokens is refused by name, unless the
#   ring can do its work: it can for the convolution of lfm2, and cannot for the indexer of axk2, which picks keys from all
#   tokens ([`hugging_face/proof.py`](../ringlab/hugging_face/proof.py)).
# - It **counts the calls**. Each layer must call the ring once, and the loss must be called once.
#
# [EVERY_MODEL.md](../ringlab/hugging_face/EVERY_MODEL.md) shows what becomes of every causal language model of transformers.
#
# **The batch.** `shard_batch` does what chapter 10 found. It shifts the labels in the whole sequence, and gives each rank
# its part, with the positions of its tokens and the number of labels of the whole batch. A row may hold packed documents,
# whose positions restart at 0 or whose lengths are in `cu_seq_lens_q`. Then the first token of a document is no label, and the
# layers get the lengths of all documents. The model's own loss would shift the labels again, so another loss takes its place: the
# sum over the rank's labels, divided by the labels of the batch.
#
# The next cell starts four processes. Each cuts the batch into `shards`, and runs the training loop of the next section, whose losses are
# `printed`. Rank 0 gets these tokens in the zigzag layout:


# %%
def text(row):
    return "".join(chr(byte) if byte > 0 else "·" for byte in row.tolist())


with tempfile.TemporaryDirectory() as folder:
    tiny("llama").save_pretrained(folder)
    shards, printed = zip(*launch(model_workers.chapter, P, folder, [BATCH] * 4, device="cpu"), strict=True)
at, mine, target = (shards[0][name][0] for name in ("position_ids", "input_ids", "shift_labels"))
print("rank 0 holds the tokens at", at.tolist())
print(f"  tokens                   {text(mine)!r}")
print(f"  labels of shard_batch    {text(target)!r}   (·: no label, at the end of the text)")
wrong = text(shifted(mine[None])[0])
print(f"  shifted in the shard     {wrong!r}   (the fourth is wrong: after 'Keys' comes a space)")
assert text(target) == "eys ng.·"

# %% [markdown]
# ## The call
#
# The loop is the script [`fsdp2.py`](../examples/fsdp2.py). It calls `use_ring(model)`, then `fully_shard`
# on each layer and on the model. Two lines of its loop are new. `shard_batch` makes this rank's shard of a batch that is the
# same on every rank. `backward` multiplies this rank's part of the loss by the number of ranks, because `fully_shard`
# averages, and returns the loss of the whole batch:

# %%
start = model_workers.LOOP.index("    for step, batch in")
print(model_workers.LOOP[start : model_workers.LOOP.index("    tiny.keep", start)])

# %%
model = tiny("llama")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print("step   one process, sdpa   4 processes, ring")
for step, loss in enumerate(printed[0]):
    exact = model(**BATCH).loss
    exact.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step:>4}{exact.item():>20.4f}{loss:>20.4f}")
    assert abs(loss / exact.item() - 1) < 1e-5
assert printed[0][-1] < printed[0][0]

# %% [markdown]
# **Trainer, accelerate, TRL and PEFT** work with this ring: [examples](../examples/README.md) has a script to copy for
# each, with its error beside one process. Two mistakes are easy to make:
#
# - `Trainer` alone raises no error: each process trains on batches of its own, and each holds whole sequences. Use
#   `RingTrainer`. It gives all ranks of a ring the same batch and each rank its shard, and counts rings, not ranks.
# - The option `cp_size` of Trainer and accelerate asks for PyTorch's own ring. On CPUs and with our ring it is refused.
#
# > **One number to remember: 2.** Two registers must know the ring: `AttentionInterface` for the attention,
# > `AttentionMaskInterface` for the mask. With the first alone, every window, every document and every padding is
# > dropped without a word.
#
# ## Questions
#
# <details><summary>Your loss is finite and falls. How do you find out whether the ring is called?</summary>
#
# Count the calls: one for each layer in a forward pass. Or compare the loss of one batch with the loss of one process, which
# must agree to rounding, not roughly. Or change token 0 and see whether the logits of the last token change, as they must.
# </details>
#
# <details><summary>Why is a rank's part of the loss divided by the labels of the whole batch, and why does <code>backward</code>
# multiply it by the number of ranks?</summary>
#
# The parts of all ranks must sum to the mean over the batch (chapter 11). `fully_shard` averages the gradients over the
# ranks, so the sum would come out at 1/P.
# </details>
#
# ## Your turn


# %%
# What transformers calls in place of its attention. query is (B, H, C, D), key and value are (B, G, C, D).
# ring(q, k, v, scale=...) takes and returns tensors of such shapes; scale may be None.
# Return what a layer expects: out and weights
def my_attention(ring, query, key, value, scaling):
    return ...


print(check_attention_function(my_attention))


# %%
# passed: what a layer passes besides q, k and v, by name, such as {"scaling": 0.125, "sliding_window": 4}.
# Which of these names must a ring refuse that is causal and knows no windows and no documents? A list.
# It uses scaling; position_ids were used before it. is_causal=True asks for what it does, False for what it cannot do.
# A tensor always asks for something
def my_refused(passed):
    return ...


print(check_what_is_refused(my_refused))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_attention(ring, query, key, value, scaling):
#     return ring(query, key, value, scale=scaling).transpose(1, 2), None
#
# def my_refused(passed):
#     refused = []
#     for name, x in passed.items():
#         nothing = x is None or (not isinstance(x, torch.Tensor) and x == 0)
#         if name == "is_causal":
#             nothing = x is None or x
#         if name not in ("scaling", "position_ids") and not nothing:
#             refused.append(name)
#     return refused
# ```
# </details>
#
# Open [`hugging_face/use.py`](../ringlab/hugging_face/use.py) now: how the ring takes the place of a model's attention. [The
# checklist](../docs/your_model.md) has, on one page, all that a model needs in a ring, and the symptom of what is forgotten.
