"""Hugging Face models in the ring: loss and gradients are those of sdpa on one process, or a refusal says why not."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from ringlab.models.mesh import build_mesh
from ringlab.models.transformer import IGNORED
from tests.extras import MISSING
from tests.refusals import all_of

transformers = pytest.importorskip("transformers", reason=MISSING["transformers"])

from ringlab.models import hugging_face_pass  # noqa: E402
from ringlab.models.hugging_face import stop_ring, use_ring  # noqa: E402
from ringlab.models.hugging_face_batch import ContextParallel, attempt, backward, shard_batch  # noqa: E402
from ringlab.models.hugging_face_pass import extra_loss  # noqa: E402
from tests.hugging_face_models import (  # noqa: E402
    EXPERTS,
    HEAD,
    NO_DROPOUTS,
    SIZES,
    S,
    batch_of,
    errors,
    import_transformers,
    in_the_ring,
    model_of,
    one_process,
    packed_batch,
    summed,
    watched,
)

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}


@pytest.fixture(scope="module", autouse=True)
def imported(ranks):
    """One rank after the other imports transformers: together they might exceed the time limit of a call."""
    for world_size in range(1, 5):
        ranks(world_size, import_transformers)


LONGEST = {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}
CASES = [(1, {}, "zigzag"), (3, LONGEST, "striped"), (4, {}, "zigzag")]  # other models: tests/every_model.py


@pytest.mark.parametrize(("world_size", "options", "layout"), CASES)
def test_loss_and_gradients_are_those_of_one_process(ranks, world_size, options, layout):
    exact, own_loss = one_process("Llama", options)
    for results, layers, asked in ranks(world_size, in_the_ring, "Llama", options, layout, batch_of()):
        assert max(errors(results, exact)) <= 1e-10
        assert (layers, asked) == ([0, 1], 2 * [(None, None)])  # once in each layer, with no window and one document
        assert results[0].item() == pytest.approx(own_loss, rel=1e-6)  # which is float32


def checkpointed(context):
    with watched() as (layers, _):
        model = model_of("Llama", {})
        model.activation_checkpointing_enable()
        use_ring(model)
        layers.clear()  # of the proof
        return summed(model, model(**shard_batch(batch_of())).loss), layers


def test_activation_checkpointing(ranks):
    for results, layers in ranks(3, checkpointed):
        assert max(errors(results, one_process("Llama", {})[0])) <= 1e-10
        assert sorted(layers) == [0, 0, 1, 1]  # once more in the backward pass


def autocast(context, ring):
    """A float32 model whose matrix products are in bfloat16: after rotary q and k are float32, and v is bfloat16."""
    model, batch = model_of("Llama", {}, torch.float32), batch_of()
    if ring:
        use_ring(model)
        batch = shard_batch(batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    if ring:
        return summed(model, loss)
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def test_autocast(ranks):
    """At most twice the error of transformers' sdpa under autocast, in norm over all gradients."""

    def off(results):
        return [(a.double() - b).norm() / b.norm() for a, b in zip(results, exact, strict=True)]

    exact, _ = one_process("Llama", {})
    allowed = torch.tensor(off(autocast(None, False))[1:]).norm()
    assert allowed > 1e-3  # it is bfloat16
    for results in ranks(3, autocast, True):
        assert torch.tensor(off(results)[1:]).norm() <= 2 * allowed


def in_a_mesh(context):
    """2 x 2: each ring has one of the two sequences, all ranks a slice of the weights."""
    mesh, line = build_mesh(2, 2, "cpu")
    model = model_of("Llama", {})
    ring = ContextParallel(mesh["cp"], "striped")
    use_ring(model, ring)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=line)
    mine = mesh["dp"].get_local_rank()
    shard = shard_batch({name: x[mine : mine + 1] for name, x in batch_of().items()}, ring)
    dist.all_reduce(shard["num_items_in_batch"], group=mesh["dp"].get_group())
    total = backward(model(**shard).loss)
    return [total, *(weight.grad.full_tensor() for weight in model.parameters())]


def test_a_mesh_of_two_rings_with_fully_shard(ranks):
    for results in ranks(4, in_a_mesh):
        assert max(errors(results, one_process("Llama", {})[0])) <= 1e-10


# Refusals: each row is something to do on a rank, and what must be said on all of them --------------------------------


def without(name):
    return lambda given, rank: {each: x for each, x in given.items() if each != name}


def with_(**more):
    return lambda given, rank: {**given, **more}


def of_rank(rank, change):
    return lambda given, mine: change(given, mine) if mine == rank else given


def padding(shard, rank):
    mask = torch.ones_like(shard["input_ids"])
    mask[1, -1] = rank != 2
    return {**shard, "attention_mask": mask}


CALLS = {  # how the shard that a model gets is changed
    "a cache": (with_(past_key_values=[]), ["rank 0: past_key_values (a cache", "stop_ring(model)"]),
    "use_cache": (with_(use_cache=True), ["use_cache is True"]),
    "positions that restart": (
        lambda shard, rank: {**shard, "position_ids": shard["position_ids"] % 5},
        ["position_ids begin with", "takes packed documents"],
    ),
    "documents in a tensor": (with_(documents=torch.tensor([S])), ["documents are no tuple"]),
    "labels on one rank": (
        lambda shard, rank: shard if rank == 1 else {**shard, "labels": None, "shift_labels": None},
        ["some ranks have labels, and some none"],
    ),
    "cumulative lengths": (
        with_(cu_seq_lens_q=torch.tensor([0, 8])),
        ["cu_seq_lens_q (packed documents: for shard_batch) is a tensor"],
    ),
    "no positions": (
        without("position_ids"),
        ["position_ids begin with None; expected [0, 1, 2, 3, 20, 21, 22, 23]", "use shard_batch"],
    ),
    "another layout": (
        lambda shard, rank: shard_batch(batch_of(), layout="striped"),
        ["position_ids begin with [0, 3, 6,", "zigzag layout"],
    ),
    "padding": (padding, ["rank 2: attention_mask is", "shard_batch takes padding"]),
    "uncounted": (without("num_items_in_batch"), ["num_items_in_batch"]),
    "TRL's loss": (
        lambda *given: {**without("shift_labels")(*given), "fused_lm_head": True},
        ["fused_lm_head without"],
    ),
    "weights": (with_(output_attentions=True), ["output_attentions is True"]),
}


def of_call(change):
    return lambda rank: in_use()(**change(shard_batch(batch_of()), rank))


def unmasked(batch, rank):
    labels = batch["labels"].clone()
    return {**batch, "labels": labels.fill_diagonal_(IGNORED)}


def masked(columns, batch):
    mask = batch["attention_mask"].clone()
    mask[:, columns] = 0
    return {**batch, "attention_mask": mask}


BATCHES = {  # how a batch is changed
    "short labels": (lambda b, rank: {**b, "labels": b["labels"][:, 1:]}, ["labels is (2, 23)", "(2, 24)"]),
    "labels of a rank": (of_rank(2, unmasked), ["the ranks have different batches"]),
    "no tokens": (lambda b, rank: {name: x[:0] for name, x in b.items()}, ["input_ids are (0, 24)"]),
    "no input": (of_rank(1, without("input_ids")), ["rank 1: input_ids are None"]),
    "three kinds of positions": (with_(position_ids=torch.arange(S).expand(3, 2, S)), ["position_ids are (3, 2, 24)"]),
    "padding on the left": (
        lambda b, rank: masked(slice(4), b),
        ["attention_mask has padding before tokens", "padding on the right only"],
    ),
    "a hole": (lambda b, rank: masked(5, b), ["attention_mask has a hole between tokens", "ones, then zeros"]),
    "unequal padding": (lambda b, rank: b, ["the rows have padding of unequal lengths", "causal=False"]),
    "labels of padding": (
        lambda b, rank: {**b, "labels": b["input_ids"]},
        ["labels where attention_mask is 0", "-100"],
    ),
    "positions from 1": (with_(position_ids=torch.arange(1, S + 1)[None]), ["position_ids are not 0, 1, 2, ..."]),
    "segments": (with_(token_type_ids=torch.zeros(2, S)), ["token_type_ids is a tensor"]),
    "too short": (
        lambda b, rank: {name: x[:, :-1] for name, x in b.items()},
        ["23 tokens in the zigzag layout on 3 ranks"],
    ),
    "padded to nothing": (lambda b, rank: b, ["pad_to is 0", "a number of tokens"]),
}


def of_batch(name, change):
    options = {"unequal padding": {"causal": False}, "padded to nothing": {"pad_to": 0}}.get(name, {})
    return lambda rank: shard_batch(change(batch_of(), rank), **options)


def given_to_the_ring(name, **options):
    return lambda rank: use_ring(model_of(name, options))


def other_head(kind, name):
    config = getattr(transformers, f"{name}Config")(**SIZES)
    return lambda rank: use_ring(getattr(transformers, f"AutoModelFor{kind}").from_config(config))


def on_meta(rank):
    with torch.device("meta"):
        return use_ring(model_of("Llama", {}))


def compiled_in_place(rank):
    model = model_of("Llama", {})
    model.compile()
    use_ring(model)


def any_arguments(rank):
    model = model_of("Llama", {})
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    use_ring(model)


def learned_scale(shape):
    def work(rank):
        model = model_of("Llama", {"attn_implementation": "eager"})
        for layer in model.model.layers:
            del layer.self_attn.scaling
            layer.self_attn.scaling = torch.nn.Parameter(torch.full(shape, 0.3, dtype=torch.float64))
        use_ring(model)

    return work


def weights_of_rank(x):
    def work(rank):
        model = model_of("Llama", {})
        if rank == 1:
            model.lm_head.weight.data[3, 4] = x
        use_ring(model)

    return work


BOTH_WAYS = {**HEAD, "sliding_window": 8, "use_bidirectional_attention": True}
ROUTER = {**EXPERTS, "output_router_logits": True}
MODELS = {  # what is given to use_ring
    "both directions in a window": (
        lambda rank: in_use("Gemma3Text", **BOTH_WAYS),
        ["attention_mask is or_masks(", "_window_overlay("],
    ),
    "dropout": (lambda rank: in_use(attention_dropout=0.1)(**shard_batch(batch_of())), ["dropout is 0.1"]),
    "both directions": (
        lambda rank: in_use(is_causal=False)(**shard_batch(batch_of())),
        ["LlamaAttention attends in both directions"],
    ),
    "a loss of the router": (given_to_the_ring("Mixtral", **ROUTER), ["output_router_logits=True", "aux_loss_coef"]),
    "layers left out": (
        given_to_the_ring("OPT", layerdrop=0.1, word_embed_proj_dim=32),
        ["layerdrop=0.1", "different layers"],
    ),
    "two classes": (
        other_head("SequenceClassification", "Llama"),
        ["returns (1, 2) for (1, 16) tokens", "use the ring in its base model"],
    ),
    "classes of tokens": (
        other_head("TokenClassification", "Llama"),
        ["computes ForTokenClassification; expected ForCausalLMLoss", "LlamaModel"],
    ),
    "windows of an encoder": (
        other_head("MaskedLM", "ModernBert"),
        ["attention_mask is and_masks(sliding_window_bidirectional_overlay("],
    ),
    "two stacks": (other_head("Seq2SeqLM", "Bart"), ["BartForConditionalGeneration is an encoder with a decoder"]),
    "a wrapped model": (
        lambda rank: use_ring(torch.nn.Sequential(model_of("Llama", {}))),
        ["model is a Sequential", "before DDP or torch.compile wraps it"],
    ),
    "compiled in place": (compiled_in_place, ["LlamaForCausalLM is compiled; expected use_ring first"]),
    "any arguments": (any_arguments, ["has a forward(*args); expected its arguments by name"]),
    "a misspelt layout": (lambda rank: use_ring(model_of("Llama", {}), layout="zig-zag"), ["zig-zag"]),
    "two layouts": (
        lambda rank: use_ring(model_of("Llama", {}), ContextParallel(layout="contiguous"), "striped"),
        ["layout is striped, and ContextParallel(", "the layout in one place"],
    ),
    "weights on the meta device": (on_meta, ["weights on the meta device"]),
    "weights of a rank": (weights_of_rank(1.0), ["the ranks have different weights"]),
    "broken weights": (weights_of_rank(torch.nan), ["returns NaN"]),
    "a learned scale": (learned_scale(()), ["passes a tensor () as scaling"]),
    "learned scales": (learned_scale((4, 1, 1)), ["passes a tensor (4, 1, 1) as scaling"]),
}


def in_use(name="Llama", **options):
    model = model_of(name, options)
    use_ring(model)
    return model


def after(change, batch=batch_of, steps=1, name="Llama"):
    """A step in the ring, of a model that is changed after use_ring."""

    def work(rank):
        model = in_use(name)
        model = change(model, rank) or model
        for _ in range(steps):
            model(**shard_batch(batch())).loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.1 * (0 if weight.grad is None else weight.grad)

    return work


def another_attention_in_a_layer(model, rank):
    model.model.layers[1].self_attn.config = model_of("Llama", {}).config


def another_loss(model, rank):
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()


def a_mixer(model, rank):
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, SumsOfZero())


def a_head_of_rank(model, rank):
    model.lm_head.weight.data += rank


def lora_of_rank(model, rank):
    import peft

    torch.manual_seed(rank)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))


def adalora(model, rank):
    import peft

    torch.manual_seed(0)
    config = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9)
    return peft.get_peft_model(model, config)


def virtual_tokens(rank):
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    use_ring(peft.get_peft_model(model_of("Llama", {}), config))


class SumsOfZero(torch.nn.Module):
    """A mixer behind a gate that is closed until it is trained."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return x + self.gate * x.cumsum(dim=1)


class WithMore(transformers.LlamaForCausalLM):
    """A loss of two parts. The second is of the logits of a shard, or of all tokens."""

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, labels=None, **more):
        same = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
        out, how = super().forward(**same, labels=labels, **more), self.how if labels is not None else ""
        of_tokens, of_weights = out.logits.square().sum() / (2 * S), self.lm_head.weight.square().sum()
        if how == "beside":
            out.loss = out.loss + of_tokens
        if how == "in place":
            out.loss += of_tokens
        if how == "without a value":
            out.loss = out.loss + of_tokens - of_tokens.detach()
        if how == "told":
            out.loss = out.loss + extra_loss(self, of_tokens, of_weights)
        return out


def with_more(how):
    torch.manual_seed(0)
    model = WithMore(transformers.LlamaConfig(**SIZES)).double()
    model.how = how
    return model


def more_of_a_loss(how):
    def work(rank):
        model = with_more(how)
        use_ring(model)
        model(**shard_batch(batch_of()))

    return work


def bert(causal):
    """BertForMaskedLM divides by the labels of its shard."""
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig(**SIZES, **NO_DROPOUTS)).double()
    use_ring(model)
    model(**shard_batch(padded_alike(), causal=causal))


DIFFERENT = [
    "the ranks have different weights; expected the same on each of them: one seed",
    "the sum of all gradients",
]
STEPS = {  # what is done with a model after use_ring, or with its loss
    "another attention in a layer": (after(another_attention_in_a_layer), ["2 layers called the ring 1 time(s)"]),
    "another loss function": (after(another_loss), ["LlamaForCausalLM was given a loss_function"]),
    "a mixer that is closed": (after(a_mixer), ["layers.0.mlp.1 (SumsOfZero) of LlamaModel mixes tokens"]),
    "a head of each rank": (after(a_head_of_rank), DIFFERENT),
    "gradients that nobody sums": (after(lambda *_: None, steps=2), DIFFERENT),
    "packed for layers that are not told": (
        after(lambda *_: None, packed_batch, name="StableLm"),
        ["a row has 5 documents, of which the layers of StableLmForCausalLM are not told"],
    ),
    "the base model": (
        lambda rank: in_use().model(input_ids=shard_batch(batch_of())["input_ids"]),
        ["position_ids begin with None"],
    ),
    "generation": (
        lambda rank: in_use().generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2),
        ["expected none"],
    ),
    "a batch for an encoder": (
        lambda rank: in_use()(**shard_batch(padded_alike(), causal=False)),
        ["LlamaAttention attends to the tokens before only; expected a batch of shard_batch(..., causal=True)"],
    ),
    "a causal batch for an encoder": (
        lambda rank: bert(True),
        ["BertSelfAttention attends in both directions; expected a batch of shard_batch(..., causal=False)"],
    ),
    "a loss of its own code": (lambda rank: bert(False), ["BertForMaskedLM called its loss_function 0 time(s)"]),
    **{
        f"more of a loss, {how}": (more_of_a_loss(how), ["WithMore adds to its loss", "extra_loss"])
        for how in ("beside", "in place", "without a value")
    },
}
ADAPTERS = {
    "LoRA of each rank": (after(lora_of_rank), DIFFERENT),
    "AdaLoRA, added later": (after(adalora), ["something was added to the model's loss in place", "extra_loss"]),
    "AdaLoRA": (lambda rank: use_ring(adalora(model_of("Llama", {}), rank)), ["ADALORA does more than its layers"]),
    "virtual tokens": (virtual_tokens, ["PROMPT_TUNING puts virtual tokens before each text", "such as LoRA"]),
}
TABLES = {
    "calls": {name: (of_call(change), words) for name, (change, words) in CALLS.items()},
    "batches": {name: (of_batch(name, change), words) for name, (change, words) in BATCHES.items()},
    "models": MODELS,
    "steps": STEPS,
    "adapters": ADAPTERS,
}


def refused(context, table, name):
    return attempt(TABLES[table][name][0], context.rank)


@pytest.mark.parametrize("table", TABLES)
def test_what_would_be_wrong_in_a_ring_is_refused_on_every_rank(ranks, table):
    if table == "adapters":
        pytest.importorskip("peft", reason=MISSING["trl"])
    for name, (_, words) in TABLES[table].items():
        said = ranks(3, refused, table, name)
        assert re.search(all_of(words), str(said[0])), (name, said[0])
        assert said == said[:1] * 3, name


def test_a_layer_that_is_not_causal_is_refused():
    """Whatever mask its model asks for, or none."""
    layer = torch.nn.Module()
    layer.is_causal = False
    with pytest.raises(ValueError, match="is_causal=False"):
        hugging_face_pass.Ring("zigzag", None, 1).attend(layer, *torch.zeros(3, 1, 1, 2, 4))


def lora_later(context):
    """Adapters that are added after use_ring: the model is proved once more."""
    model = in_use()
    loss = lora_of_rank(model, 0)(**shard_batch(batch_of())).loss.detach()
    dist.all_reduce(loss)
    return loss


def test_adapters_may_come_after_the_ring(ranks):
    pytest.importorskip("peft", reason=MISSING["trl"])
    for loss in ranks(3, lora_later):
        assert errors([loss], one_process("Llama", {})[0][:1])[0] <= 1e-10  # a fresh adapter changes nothing


def more_that_is_told(context, ring):
    model, batch = with_more("told"), batch_of()
    batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    if ring:
        use_ring(model)
        return summed(model, model(**shard_batch(batch)).loss)
    loss = model(**batch, num_items_in_batch=2 * (S - 1)).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def test_a_loss_beside_that_of_the_labels(ranks):
    exact = more_that_is_told(None, False)
    for results in ranks(3, more_that_is_told, True):
        assert max(errors(results, exact)) <= 1e-6  # transformers' own loss is float32


# A sequence's class, a copy, another ring, none ---------------------------------------------------------------------


def classified(context, ring):
    """The loss and gradients of a classification, from the row of the last token of each sequence."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.AutoModelForSequenceClassification.from_config(config).double()
    batch, classes = batch_of(), torch.tensor([0, 1])
    if not ring:
        loss = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}, labels=classes).loss
        loss.backward()
        return [loss.detach(), *(weight.grad for weight in model.parameters())]
    use_ring(model.model)
    del batch["labels"]
    shard = shard_batch(batch)
    rows = model.model(**shard).last_hidden_state
    last = batch["attention_mask"].sum(dim=1, keepdim=True) - 1
    sequence, token = (shard["position_ids"] == last).nonzero().T  # of the last tokens that this rank has
    logits = model.score(rows[sequence, token])
    return summed(model, F.cross_entropy(logits, classes[sequence], reduction="sum") / len(classes))


def test_the_rank_of_the_last_token_classifies(ranks):
    exact = classified(None, False)
    for results in ranks(3, classified, True):
        assert max(errors(results, exact)) <= 1e-6  # transformers' loss is float32


def padded_alike():
    """Two rows with four tokens of padding each. The labels are of every third token, and not of the token after it."""
    batch = {name: x[:1].repeat(2, 1) for name, x in batch_of().items()}
    batch["input_ids"][1] = batch["input_ids"][1].flip(0)
    batch["labels"] = batch["input_ids"].masked_fill(torch.arange(S) % 3 != 0, IGNORED)
    for name, padding in (("input_ids", 0), ("attention_mask", 0), ("labels", IGNORED)):
        batch[name][:, -4:] = padding
    return batch


def encoded(context, ring):
    """The loss and gradients of a masked language model, which attends in both directions."""
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**SIZES, **NO_DROPOUTS)
    model, batch = transformers.AutoModelForMaskedLM.from_config(config).double(), padded_alike()
    labels = batch.pop("labels")
    count = (labels != IGNORED).sum()
    if ring:
        use_ring(model)
        shard = shard_batch({**batch, "labels": labels}, causal=False)
        labels, batch = shard.pop("labels"), shard
    loss = F.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
    if ring:
        return summed(model, loss)
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def test_an_encoder(ranks):
    exact, *gradients = encoded(None, False)
    for loss, *results in ranks(3, encoded, True):
        both = [torch.cat([x.flatten() for x in each]) for each in (results, gradients)]  # a bias of keys has none
        assert max(errors([loss, both[0]], [exact, both[1]])) <= 1e-10


def used_again(context, how):
    """The loss and gradients, the hooks, and whether another model of the same config has kept its attention."""
    model, other = (model_of("Llama", {}) for _ in range(2))
    model.config = other.config
    tokens = batch_of()["input_ids"]
    before = other(tokens, use_cache=False).logits
    use_ring(model)
    same = torch.equal(other(tokens, use_cache=False).logits, before)
    if how != "stopped":
        model = copy.deepcopy(model) if how.startswith("copied") else model
        loss = model(**shard_batch(batch_of())).loss.detach()
        dist.all_reduce(loss)
        assert errors([loss], one_process("Llama", {})[0][:1])[0] <= 1e-10
        use_ring(model, layout="striped")
        loss = model(**shard_batch(batch_of(), layout="striped")).loss
    else:
        stop_ring(model)
        stop_ring(model)
        loss = model(**batch_of()).loss / context.world_size
    return summed(model, loss), sum(len(part._forward_hooks) for part in model.modules()), same


def test_a_ring_can_be_changed_copied_and_stopped(ranks):
    exact, _ = one_process("Llama", {})
    for how in ("twice", "copied, then another ring", "stopped"):
        for results, hooks, same in ranks(3, used_again, how):
            assert max(errors(results, exact)) <= (1e-6 if how == "stopped" else 1e-10)  # transformers' loss is float32
            assert (hooks, same) == (0 if how == "stopped" else 2, True)
