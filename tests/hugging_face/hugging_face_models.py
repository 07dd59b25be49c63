"""What the tests of Hugging Face models share: small models, batches, and a step on one process and in the ring."""

from contextlib import contextmanager
from itertools import count
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

from ringlab.hugging_face import forward, generate
from ringlab.hugging_face.proof import prove
from ringlab.models.transformer import IGNORED
from tests.attention import SEED

S, LENGTHS = 24, torch.tensor([[24], [10]])  # the second sequence is padded: on rank 1 of 3, zigzag, from its middle on
DOCUMENTS, PADDING = (5, 9, 1, 6), 3  # of a packed row
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
HEAD = {"head_dim": 16}  # not hidden / heads
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
NO_DROPOUTS = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)  # of BERT
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # of GPT-2


def model_of(name, options, dtype=torch.float64):
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")  # others: no float64
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
        else:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.to(dtype).train()


PROVED, ASKED = {}, count()


@contextmanager
def proved_sometimes():
    """Inside, what was proved of a model holds for the next of its kind, but for every fifth: programs make many."""

    def known(model, attention, name):
        kind = f"{type(attention).__name__} {model}"
        if next(ASKED) % 5 == 0 or kind not in PROVED:
            PROVED[kind] = prove(model, attention, name)
        return PROVED[kind]

    with mock.patch.object(forward, "prove", known), mock.patch.object(generate, "prove", known):
        yield


def batch_of(seed=0):
    """Two sequences of 24 and 10 tokens, the second with padding."""
    tokens = torch.randint(1, SIZES["vocab_size"], (2, S), generator=torch.Generator().manual_seed(seed + SEED))
    real = torch.arange(S) < LENGTHS
    labels = tokens.masked_fill(~real, IGNORED)
    return {"input_ids": tokens.masked_fill(~real, 0), "attention_mask": real.long(), "labels": labels}


def packed_batch(rows=1):
    """Four documents in each row, then padding. The first token of a document has a label, as its tokenizer gave it."""
    tokens = batch_of()["input_ids"][:1].expand(rows, S).clone()
    tokens[1:] = tokens[1:].flip(1)
    real = torch.arange(S).expand(rows, S) < sum(DOCUMENTS)
    places = torch.cat([torch.arange(n) for n in (*DOCUMENTS, PADDING)]).expand(rows, S)
    labels = tokens.masked_fill(~real, IGNORED)
    return {"input_ids": tokens, "attention_mask": real.long(), "labels": labels, "position_ids": places}


def boundaries(batch):
    """The same batch with cu_seq_lens in place of position_ids; they end before the padding."""
    ends = torch.tensor([0, *DOCUMENTS], dtype=torch.int32).cumsum(0)
    rest = {name: x for name, x in batch.items() if name != "position_ids"}
    return {**rest, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}


def one_process(name, options):
    """The loss of `batch_of` and every gradient by sdpa."""
    model, batch = model_of(name, options), batch_of()
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    return results_of(model, F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=IGNORED))


def documents_alone(name, options, rows=1):
    """The loss of `packed_batch` and every gradient by sdpa, with each document in a batch of its own."""
    model, parts = model_of(name, options), []
    for tokens in packed_batch(rows)["input_ids"]:
        for document in tokens.split([*DOCUMENTS, PADDING])[:-1]:
            logits = model(document[None]).logits[0, :-1]
            parts.append(F.cross_entropy(logits, document[1:], reduction="sum"))
    return results_of(model, sum(parts) / (rows * (sum(DOCUMENTS) - len(DOCUMENTS))))


def errors(results, exact):
    return [((a - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]


def results_of(model, loss):
    """The loss and every gradient."""
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def summed(model, loss):
    """The same of all ranks together."""
    results = results_of(model, loss)
    for result in results:
        if result is not None:
            dist.all_reduce(result)
    return results
