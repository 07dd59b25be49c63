# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · Your own model: a Hugging Face model in the ring
#
# You have a model of the `transformers` library and a text that is too long for one device. After this chapter you can
#
# - put the ring into the model without changing its code, and train it,
# - prove that a model may be cut into shards, that every layer calls the ring, and that no mask was dropped,
# - say which models and which batches a ring must refuse.
#
# 30 minutes to read, 25 for the exercises. The code: [`ringlab/models/hugging_face_batch.py`](../ringlab/models/hugging_face_batch.py),
# [`ringlab/models/hugging_face_masks.py`](../ringlab/models/hugging_face_masks.py),
# [`ringlab/models/hugging_face_proof.py`](../ringlab/models/hugging_face_proof.py),
# [`ringlab/models/hugging_face.py`](../ringlab/models/hugging_face.py),
# [`ringlab/models/hugging_face_trainer.py`](../ringlab/models/hugging_face_trainer.py),
# [`ringlab/models/hugging_face_sft.py`](../ringlab/models/hugging_face_sft.py). It needs transformers: `pip install -e '.[hf]'`.
# Before: [12 · a model in the ring](12_a_model_in_the_ring.ipynb), [13 · meshes](13_meshes.ipynb).

# %%
# %matplotlib inline
import tempfile

import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle
from transformers import AttentionInterface

from notebooks import model_workers
from notebooks.checks.your_own_model import check_attention_function, check_shard_by_hand, check_what_is_refused
from notebooks.model_workers import tiny
from notebooks.show import print_source
from ringlab.models import hugging_face, hugging_face_batch, hugging_face_masks, hugging_face_proof
from ringlab.models.hugging_face_batch import BATCH
from ringlab.models.transformer import TEXT
from ringlab.support import drawing
from ringlab.support.processes import launch
from ringlab.training.documents import document_positions

P, S = 4, 32
tokens, labels = TEXT[:, :-1], TEXT[:, 1:]  # the 32 bytes "Keys and values go round a ring.", and those that follow
print_source(tiny)

# %% [markdown]
# `tiny("llama")` is LLaMA as transformers has it, with random weights and small `SIZES`: 2 layers, 4 heads, 2 K/V heads,
# hidden 32. The same call will make other models.
#
# ## The failure
#
# **The ring is not called.** We cut the text into four [chunks](../GLOSSARY.md#chunk) of 8 tokens, one for each
# [rank](../GLOSSARY.md#rank). Each rank gets its tokens, their labels (shifted in the whole text) and their positions.
# All of that is right. But the layers still call their own attention, which knows this chunk only. We play the four
# ranks one after another in this process.


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
# No error, a finite loss, and a loss that falls. Nothing in the right column looks wrong. But each chunk was trained as
# a text of its own, and with the whole text this model fails. The gradients show why. The logits of a token should depend
# on itself and on all earlier tokens, so these must have a gradient.


# %%
def who_is_seen(parts):
    """(S, S): does token j (a column) change the logits of token i (a row)?"""
    model, seen = tiny("llama"), torch.zeros(S, S, dtype=torch.bool)
    for at in parts:
        embedded = model.model.embed_tokens(tokens[:, at]).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, position_ids=at[None]).logits  # (1, C, vocab)
        for i, row in zip(at, logits[0], strict=True):
            (gradient,) = torch.autograd.grad(row.square().sum(), embedded, retain_graph=True)
            seen[i, at] = gradient[0].any(dim=1)  # (C, hidden) -> (C,)
    return seen


should, does = who_is_seen([whole]), who_is_seen(chunks)
print(f"pairs (token, token that it sees): {should.sum()} in the whole text, {does.sum()} with the ring not called")
assert torch.equal(should, torch.ones(S, S).tril().bool())
assert torch.equal(does, torch.block_diag(*[torch.ones(8, 8).tril()] * P).bool())

# %%
alt = (
    "Two squares of 32 rows, the tokens, and 32 columns, the tokens that they see, coloured by the rank that holds them. "
    "Left, the whole text: a full triangle below the diagonal. Right, four chunks with the ring not called: only four "
    "small triangles on the diagonal; no token sees a token of another rank."
)
figure, page = drawing.canvas(1000, 560, alt)
drawing.write(page, 20, 34, "Which tokens change the logits of a token?", size=drawing.TITLE, weight="bold")
drawing.write(
    page, 20, 66, "found by gradients; colours: the rank that holds the token that is seen", color=drawing.MUTED
)
for x, name, seen in ((70, "the whole text", should), (570, "four chunks, ring not called", does)):
    drawing.write(page, x, 104, name, weight="bold")
    for i, j in seen.nonzero().tolist():
        page.add_patch(
            Rectangle((x + 12 * j, 130 + 12 * i), 12, 12, fc=drawing.colour(j // 8), ec=drawing.PAGE, lw=0.6)
        )
    page.add_patch(Rectangle((x, 130), 12 * S, 12 * S, fill=False, ec=drawing.MUTED, lw=1))
    drawing.write(page, x - 12, 130 + 6 * S, "tokens", ha="center", rotation=90, color=drawing.MUTED)
    drawing.write(page, x + 6 * S, 532, "tokens that they see", ha="center", color=drawing.MUTED)
figure

# %% [markdown]
# **A mask is dropped.** Now somebody gives the layers another attention. transformers has a place for that: a function
# registered under a name. A layer calls it with q, k and v, with a mask, and with more arguments by name. This one
# looks right. It does what plain causal attention needs:

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
# With a window the loss is that of a model without one. With padding on the left the tokens see the padding.
# The second of two packed documents sees the first. (transformers knows documents by positions that restart at 0, and
# only without a mask and with `use_cache=False`.) In all cases the function was given the mask `None`, the window went into
# `**others`, and no warning came.
#
# Rings in use have done all of this, as their issues and pull requests say. accelerate dropped the windows of Mistral,
# Gemma and gpt-oss (huggingface/accelerate, number 4177). axolotl dropped the boundaries of packed documents, so each
# document saw the others (axolotl-ai-cloud/axolotl, number 3608). prime-rl dropped the [learned sinks](../GLOSSARY.md#learned-sink) of gpt-oss
# (PrimeIntellect-ai/prime-rl, number 3397). sglang accepted a ring in layers that never passed K and V on
# (sgl-project/sglang, number 33353).
#
# ## The idea
#
# transformers asks two registers by the same name, and neither checks the other:
#
# | who asks | which register | the question |
# | --- | --- | --- |
# | each layer | `AttentionInterface` | here are q, k, v and all I know: what is the output? |
# | the model, once for each kind of layer | `AttentionMaskInterface` | here is the rule of my mask: what shall I hand to the layers? |
#
# If the name is missing in the second register, the model hands on `None`. So **register both, prove that the model may be
# cut, refuse what you cannot do, and count the calls**:

# %%
print_source(hugging_face.use_ring)

# %% [markdown]
# The proof. A ring exchanges K and V, and nothing else. So all the rest of the model must be a function of a token and its
# position alone. A convolution over the sequence is not, nor are positions that are counted in a shard. `prove` asks the
# model itself, on one process. It puts `cut` in the place of the attention: each token sees itself only. Then the
# logits of token i must not depend on the embedding of any other token. You saw the picture of this above. Now it must
# be a diagonal, and exactly so. `mixes` puts a token of each of 16 sequences to this test at once:

# %%
print_source(hugging_face_proof.cut, hugging_face_proof.mixes)

# %% [markdown]
# Two more questions follow. Does a shard get the same logits as the same tokens in the whole sequence, at the same
# positions? And is the attention of the model what its layers say it is?
# [EVERY_MODEL.md](../ringlab/models/EVERY_MODEL.md) shows what becomes of every causal language model of transformers.
#
# The mask. A ring needs none when the rule is plain causal and no token is hidden. For a sliding window it needs one
# number. But transformers has one argument, `local_size`, for windows and for the chunks of Llama 4. In a window, a
# token sees the tokens just before it. In chunks, it sees those of its own chunk only. So `asked_mask` reads the rule
# itself: `written` tells from its closure which functions of transformers made it. The layers get the number of tokens
# in a window, or `Chunks`. To the ring a chunk is a document. For any other rule they get its text in place of a mask.

# %%
print_source(hugging_face_masks.asked_mask, hugging_face_masks.written)

# %% [markdown]
# The attention. It refuses the text, a window that is not that of the mask, and every argument that it does not
# understand. A list of what is known to be wrong would miss what the next model brings. So `refuse` has a list of what is understood, and takes None, False and 0
# for "nothing asked".

# %%
print_source(hugging_face.Ring.attend, hugging_face_masks.window_of, hugging_face_batch.refuse)

# %% [markdown]
# `ring_flash_attention` is the ring of chapter 8. It takes `window` and `documents`, and computes only what they show.
#
# Two hooks go around the model. `before` checks on all ranks together what the caller passes: the positions must be
# those of this rank. `after` counts: as many calls of the ring as proved, and one of the loss, or a ValueError.

# %%
print_source(hugging_face.Ring.before, hugging_face.Ring.after)

# %% [markdown]
# `before` gives the model a mask of ones. Without a mask, transformers looks for jumps in the positions, and takes each
# for the beginning of another document. In the [zigzag](../GLOSSARY.md#zigzag-layout) layout there is one in every
# shard.
#
# **The batch.** `shard_batch` does what chapter 12 found: labels are shifted in the whole sequence, and each rank takes
# its part then. It counts the labels of the whole batch too. A row may hold packed documents, told by positions that
# restart at 0 or by `cu_seq_lens_q`. Then the positions of the shard restart too, the first token of a document is no
# label, and the layers get the lengths of all documents. `loss_part` takes the place of the model's own loss, which
# would shift again.

# %%
print_source(
    hugging_face_batch.shard_batch, hugging_face_batch.shifted, document_positions, hugging_face_batch.loss_part
)

# %% [markdown]
# ## On four processes
#
# Now for real: one launch of 4 processes. The batch has two sequences of 32 tokens; the second ends in padding. First
# we note what one process gets with its own attention: the loss and the gradient of all weights. (`labels` are as a
# tokenizer gives them; the model shifts them itself.) For each model the ranks take the same step in the ring. The models
# differ: Qwen 3 has norms on q and k, GPT-2 has learned positions, and RoBERTa's begin with 2. Mistral has a window in
# each layer, Gemma 3 in the first only, Llama 4 has chunks. gpt-oss has learned sinks, Gemma 2 caps its scores. In the
# last two rows both sequences are packed into one row of 64 tokens, and the loss and the gradient must not change.

# %%
print_source(model_workers.step, model_workers.in_the_ring)

# %%
window = {"sliding_window": 4}
no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
no_dropout_either = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
chunks = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 4}
chunks |= {**experts, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
both = {"layer_types": ["sliding_attention", "full_attention"], **window}
same = {
    "Llama": ("llama", {}),
    "Llama, checkpointing": ("llama", {}, True),
    "Qwen 3": ("qwen3", {}),
    "Mistral, window 4": ("mistral", window),
    "Gemma 3, window 4": ("gemma3_text", both),
    "GPT-2": ("gpt2", no_dropout),
    "RoBERTa": ("roberta", {"is_decoder": True, "pad_token_id": 1, **no_dropout_either}),
    "Llama 4, chunks of 4": ("llama4_text", chunks),
    "gpt-oss, window 4": ("gpt_oss", {**experts, **both}),
    "Gemma 2": ("gemma2", {"layer_types": ["full_attention"] * 2}),
    "Llama, packed": ("llama", {}, False, True),
    "Mistral, packed": ("mistral", window, False, True),
}
refused = {
    "LFM 2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "ZAYA": ("zaya", {}),
    "Llama in both directions": ("llama", {"is_causal": False}),
    "Llama with dropout": ("llama", {"attention_dropout": 0.1}),
}
with tempfile.TemporaryDirectory() as folder:
    tiny("llama").save_pretrained(folder)  # for the training loop below
    shards, steps, said, printed = zip(
        *launch(model_workers.chapter, P, {**same, **refused}, folder, [BATCH] * 4, device="cpu"), strict=True
    )

print("                         loss   calls   against one process")
for case, (name, options, *_) in same.items():
    exact, ring = model_workers.step(tiny(name, **options), BATCH), steps[0][case]
    assert abs(ring.loss / exact.loss - 1) < 1e-6
    assert (ring.gradient - exact.gradient).norm() < 1e-6 * exact.gradient.norm()
    assert ring.calls == (4 if "checkpointing" in case else 2)
    print(f"{case:<22}{ring.loss:>7.4f}{ring.calls:>8}   loss and gradient are the same to 1e-6")

# %% [markdown]
# Two layers, two calls on each rank. With [activation checkpointing](../GLOSSARY.md#activation-checkpointing) there are
# four: the backward pass computes each layer again, and the ring with it. The weights are float64, but transformers
# computes the loss of one process in float32: that is why the numbers agree to 1e-6 only. Against a loss in float64 the
# tests ask for 1e-10.
#
# What must be refused is refused on every rank, with the name of what would be dropped. First models, then input:

# %%
for case in refused:
    assert len({of_rank[case] for of_rank in steps}) == 1  # every rank says the same
    print(f"{case}: {steps[0][case].partition('; ')[0]}")
print()
for case, reason in said[0].items():
    print(f"{case}: {reason.splitlines()[0].partition('; ')[0]}")

# %% [markdown]
# Look at a shard, too. These are the tokens of rank 0 in the zigzag layout, and what each must predict:


# %%
def text(row):
    return "".join(chr(byte) if byte > 0 else "·" for byte in row.tolist())


at, mine, target = shards[0]["position_ids"][0], shards[0]["input_ids"][0], shards[0]["shift_labels"][0]
here = hugging_face_batch.shifted(mine[None])[0]
print("rank 0 holds the tokens at", at.tolist())
print(f"  tokens                   {text(mine)!r}")
print(f"  labels of shard_batch    {text(target)!r}   (·: no label, at the end of the text)")
print(f"  shifted in the shard     {text(here)!r}   (the fourth is wrong: after 'Keys' comes a space)")
assert text(target) == "eys ng.·"

# %% [markdown]
# ## The training loop
#
# This loop stands in the first lines of [`hugging_face.py`](../ringlab/models/hugging_face.py), and the four processes have run
# its text. It uses [fully_shard](../GLOSSARY.md#fsdp) and activation checkpointing. Put your model's `NAME` and your
# `loader` into it, and start it with `torchrun --nproc_per_node=4 loop.py`.

# %%
print(model_workers.LOOP)

# %%
model = tiny("llama")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print("step   one process, sdpa   4 processes, ring")
for step, (loss, norm) in enumerate(printed[0]):
    exact = model(**BATCH).loss
    exact.backward()
    exact_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step:>4}{exact.item():>20.4f}{loss:>20.4f}")
    assert abs(loss / exact.item() - 1) < 1e-5
    assert abs(norm / exact_norm.item() - 1) < 1e-5
assert printed[0][-1][0] < printed[0][0][0]

# %% [markdown]
# **Trainer, accelerate, TRL and PEFT** work with this ring: [examples](../examples/README.md) has a script of each to
# copy, with its error beside one process. `RingTrainer` changes three things of a Trainer: all ranks of a ring get the
# same batch, each rank gets its shard of it, and an evaluation counts rings in the place of ranks. The options `cp_size`
# of Trainer and accelerate ask for another ring, that of PyTorch. This is what they say on two processes, with
# transformers 5.23.0 and accelerate 1.15.0:
#
# | you ask for | what happens |
# | --- | --- |
# | `cp_size=2` on CPUs, with any attention | accelerate refuses: "ParallelismConfig is only compatible DistributedType.FSDP (version 2) or DistributedType.Multi{Device} or DistributedType.DEEPSPEED, but got DistributedType.MULTI_CPU." |
# | `cp_size=2` with our ring | Trainer refuses: "Context parallelism is supported only with SDPA attention, you are using ring_zigzag_…" |
# | `cp_size=2` with sdpa and a window | accelerate refuses: "Context parallelism does not support attention layers of type ['sliding_attention']" |
# | `Trainer` with `use_ring`, in the place of `RingTrainer` | each process gets a batch of its own, without positions, and our hook refuses: "position_ids begin with None" |
# | `Trainer` alone | no error: each process trains on batches of its own, and each holds whole sequences. Use `RingTrainer` |
#
# The first and the last row are runs. On CPUs accelerate refuses before the other two checks are reached, so we called
# these two by themselves. With `cp_size=2` and sdpa on GPUs they use a ring of PyTorch; we have not run that.
#
# > **One number to remember: 2.** Two registers must know the ring: `AttentionInterface` for the attention,
# > `AttentionMaskInterface` for the mask. With the first alone, every window, every document and every padding is
# > dropped without a word.
#
# ## Questions
#
# <details><summary>Your loss is finite and falls. How do you find out whether the ring is called?</summary>
#
# Count the calls: one for each layer in a forward pass. Or compare the loss of one batch with that of one process: they
# must agree to rounding, not roughly. Or change token 0 and look at the logits of the last token: they must change. A
# loss curve alone cannot tell.
# </details>
#
# <details><summary>Mistral and Llama 4 both hand <code>local_size=3</code> to the mask, for 8 tokens. How many pairs
# (query, key) does each show?</summary>
#
# Mistral has a window: token i sees the tokens i-2, i-1 and i. That is 1 + 2 + 6 · 3 = 21 pairs. Llama 4 has chunks of
# 3, 3 and 2 tokens, each with a causal mask of its own: 6 + 6 + 3 = 15 pairs. A ring that took chunks for windows would
# let token 3 see tokens 1 and 2.
# </details>
#
# <details><summary>Why does <code>loss_part</code> divide by the labels of the whole batch, and the loop multiply by the number of
# ranks?</summary>
#
# The parts of all ranks must sum to the mean over the batch (chapter 13). `fully_shard` averages the gradients over the
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
# shard_batch by hand, in the zigzag layout: tokens and labels are (B, S), labels are not shifted, -100 is no label.
# Return what `rank` of P ranks gets: tokens (B, C), shifted labels (B, C), position_ids (1, C),
# and the number of labels by which its sum is divided. (`positions` of chapter 7 is in ringlab.training.layouts.)
def my_shard(tokens, labels, rank, P):
    return ...


print(check_shard_by_hand(my_shard))


# %%
# passed: what a layer passes besides q, k and v, by name, such as {"scaling": 0.125, "sliding_window": 4}.
# Which of these names must a ring refuse that is causal and knows no windows and no documents? A list.
# It uses scaling; position_ids were used before it
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
# def my_shard(tokens, labels, rank, P):
#     from ringlab.training.layouts import positions
#
#     at = positions("zigzag", tokens.shape[1], rank, P)
#     labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)  # in the whole sequence
#     return tokens[:, at], labels[:, at], at[None], (labels != -100).sum()
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
# Read [`ringlab/models/hugging_face_batch.py`](../ringlab/models/hugging_face_batch.py),
# [`ringlab/models/hugging_face_masks.py`](../ringlab/models/hugging_face_masks.py),
# [`ringlab/models/hugging_face_proof.py`](../ringlab/models/hugging_face_proof.py) and
# [`ringlab/models/hugging_face.py`](../ringlab/models/hugging_face.py) now. Then run the loop with a model of your own.
# Next: [15 · documents and windows](15_documents_and_windows.ipynb).
