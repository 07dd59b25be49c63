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
from tests.refusals import all_of, refusal

transformers = pytest.importorskip("transformers", reason=MISSING["transformers"])

from ringlab.models import hugging_face  # noqa: E402
from ringlab.models.hugging_face import shard_batch, stop_ring, use_ring  # noqa: E402
from tests.hugging_face_models import (  # noqa: E402
    EXPERTS,
    HEAD,
    NO_DROPOUTS,
    SIZES,
    S,
    batch_of,
    call,
    errors,
    import_transformers,
    in_the_ring,
    model_of,
    one_process,
    summed,
    unchanged,
    watched,
)

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
OPTIONS = {  # the other models are in the sweep, tests/every_model.py
    "Llama": {},
    "Granite": {"attention_multiplier": 0.5},  # its own scale
    "Llama, dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
}


@pytest.fixture(scope="module", autouse=True)
def imported(ranks):
    """One rank after the other imports transformers: together they might exceed the time limit of a call."""
    for world_size in range(1, 5):
        ranks(world_size, import_transformers)


CASES = [(3, "Granite", "zigzag"), (3, "Llama, dynamic", "zigzag"), (1, "Llama", "zigzag"), (4, "Llama", "zigzag")]
CASES += [(3, "Llama", "striped"), (3, "Llama", "contiguous")]


@pytest.mark.parametrize(("world_size", "name", "layout"), CASES)
def test_loss_and_gradients_are_those_of_one_process(ranks, world_size, name, layout):
    name, options = name.partition(",")[0], OPTIONS[name]
    exact, own_loss = one_process(name, options)
    for results, layers, asked in ranks(world_size, in_the_ring, name, options, layout, batch_of()):
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
    use_ring(model, mesh["cp"])
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=line)
    mine = mesh["dp"].get_local_rank()
    shard = shard_batch({name: x[mine : mine + 1] for name, x in batch_of().items()}, mesh["cp"])
    dist.all_reduce(shard["num_items_in_batch"], group=mesh["dp"].get_group())
    loss = model(**shard).loss
    (loss * context.world_size).backward()
    dist.all_reduce(total := loss.detach())
    return [total, *(weight.grad.full_tensor() for weight in model.parameters())]


def test_a_mesh_of_two_rings_with_fully_shard(ranks):
    for results in ranks(4, in_a_mesh):
        assert max(errors(results, one_process("Llama", {})[0])) <= 1e-10


# Refusals -----------------------------------------------------------------------------------------------------------


BOTH_WAYS = {**HEAD, "sliding_window": 8, "use_bidirectional_attention": True}
REFUSED_MODELS = {
    "both directions in a window": ("Gemma3Text", BOTH_WAYS, ["attention_mask is or_masks(", "_window_overlay("]),
    "dropout": ("Llama", {"attention_dropout": 0.1}, ["dropout is 0.1"]),
    "both directions": ("Llama", {"is_causal": False}, ["LlamaAttention attends in both directions"]),
    "a loss of the router": ("Mixtral", {**EXPERTS, "output_router_logits": True}, ["output_router_logits is True"]),
    "layers left out": ("OPT", {"layerdrop": 0.1, "word_embed_proj_dim": 32}, ["layerdrop is 0.1", "different layers"]),
}


@pytest.mark.parametrize(("name", "options", "words"), REFUSED_MODELS.values(), ids=REFUSED_MODELS)
def test_a_model_that_the_ring_cannot_run_is_refused_by_name(ranks, name, options, words):
    assert re.search(all_of(words), refusal(ranks.outcomes(3, call, name, options, unchanged)))


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


INPUT = {  # how a shard is changed, and what is said
    "a cache": (
        lambda shard, rank: {**shard, "past_key_values": transformers.DynamicCache()},
        ["rank 0: past_key_values (a cache) were passed", "stop_ring(model)"],
    ),
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
    "square mask": (with_(attention_mask=torch.ones(2, 1, 8, 8)), ["attention_mask is"]),
    "unshifted": (without("shift_labels"), ["labels without shift_labels"]),
    "uncounted": (without("num_items_in_batch"), ["num_items_in_batch"]),
    "TRL's loss": (
        lambda *given: {**without("shift_labels")(*given), "fused_lm_head": True},
        ["fused_lm_head without"],
    ),
    "weights": (with_(output_attentions=True), ["output_attentions is True"]),
}


def input_refused(context, name):
    call(context, "Llama", {}, INPUT[name][0])


@pytest.mark.parametrize("name", INPUT)
def test_input_that_the_ring_would_drop_is_refused_by_name(ranks, name):
    assert re.search(all_of(INPUT[name][1]), refusal(ranks.outcomes(3, input_refused, name)))


def unmasked(batch, rank):
    labels = batch["labels"].clone()
    return {**batch, "labels": labels.fill_diagonal_(IGNORED)}


BATCHES = {  # how a batch is changed, and what is said
    "short labels": (lambda b, rank: {**b, "labels": b["labels"][:, 1:]}, ["labels is (2, 23)", "(2, 24)"]),
    "labels of a rank": (of_rank(2, unmasked), ["the ranks have different batches"]),
    "tokens of a rank": (lambda batch, rank: batch_of(rank), ["the ranks have different batches"]),
    "no tokens": (lambda b, rank: {name: x[:0] for name, x in b.items()}, ["input_ids are (0, 24)"]),
    "no input": (of_rank(1, without("input_ids")), ["rank 1: input_ids are None"]),
    "three kinds of positions": (
        with_(position_ids=torch.arange(S).expand(3, 2, S)),
        ["position_ids are (3, 2, 24)"],
    ),
    "padding on the left": (
        lambda b, rank: {**b, "attention_mask": b["attention_mask"].flip(1)},
        ["attention_mask has padding before tokens", "padding on the right only"],
    ),
    "short mask": (
        lambda b, rank: {**b, "attention_mask": b["attention_mask"][:, 1:]},
        ["attention_mask is (2, 23)", "(2, 24)"],
    ),
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
}


def batch_refused(context, name):
    shard_batch(BATCHES[name][0](batch_of(), context.rank), causal=name != "unequal padding")


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_cannot_be_shared_out_is_refused(ranks, name):
    assert re.search(all_of(BATCHES[name][1]), refusal(ranks.outcomes(3, batch_refused, name)))


KINDS = [  # the head of a model, the model, and why it is refused
    ("SequenceClassification", "Llama", ["returns (1, 2) for (1, 16) tokens", "use the ring in its base model"]),
    ("TokenClassification", "Llama", ["computes ForTokenClassification; expected ForCausalLMLoss", "LlamaModel"]),
    ("QuestionAnswering", "Llama", ["returns (1, 16) for (1, 16) tokens"]),
    ("MaskedLM", "ModernBert", ["attention_mask is and_masks(sliding_window_bidirectional_overlay("]),
    ("Seq2SeqLM", "Bart", ["BartForConditionalGeneration is an encoder with a decoder"]),
]


def other_head(context, kind, name):
    config = getattr(transformers, f"{name}Config")(**SIZES)
    use_ring(getattr(transformers, f"AutoModelFor{kind}").from_config(config))


@pytest.mark.parametrize(("kind", "name", "words"), KINDS)
def test_a_model_with_another_head_is_refused(ranks, kind, name, words):
    assert re.search(all_of(words), refusal(ranks.outcomes(3, other_head, kind, name)))


def on_meta():
    with torch.device("meta"):
        return model_of("Llama", {})


def another_attention_in_a_layer():
    model = model_of("Llama", {})
    use_ring(model)
    model.model.layers[1].self_attn.config = model_of("Llama", {}).config
    model(**shard_batch(batch_of()))


def in_use():
    model = model_of("Llama", {})
    use_ring(model)
    return model


def learned_scale(shape):
    model = model_of("Llama", {"attn_implementation": "eager"})
    for layer in model.model.layers:
        del layer.self_attn.scaling
        layer.self_attn.scaling = torch.nn.Parameter(torch.full(shape, 0.3, dtype=torch.float64))
    use_ring(model)


def weights_of_rank(broken):
    model = model_of("Llama", {})
    if dist.get_rank() == 1:
        model.lm_head.weight.data[3, 4] = torch.nan if broken else 1.0
    use_ring(model)


class WithMore(transformers.LlamaForCausalLM):
    """A loss of two parts. The second is the mean over the logits of a shard."""

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, labels=None, **more):
        same = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
        out = super().forward(**same, labels=labels, **more)
        if labels is not None:
            out.loss = out.loss + out.logits.logsumexp(dim=-1).square().mean()
        return out


def more_of_a_loss():
    torch.manual_seed(0)
    model = WithMore(transformers.LlamaConfig(**SIZES))
    use_ring(model)
    model(**shard_batch(batch_of()))


def loss_of_its_own_code():
    """BertForMaskedLM divides by the labels of its shard."""
    model = transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig(**SIZES, **NO_DROPOUTS)).double()
    use_ring(model)
    model(**shard_batch(padded_alike(), causal=False))


WORK = {  # what is done, and what is said
    "a wrapped model": (
        lambda: use_ring(torch.nn.Sequential(model_of("Llama", {}))),
        ["model is a Sequential", "before DDP wraps it"],
    ),
    "a misspelt layout": (lambda: use_ring(model_of("Llama", {}), layout="zig-zag"), ["zig-zag"]),
    "weights on the meta device": (lambda: use_ring(on_meta()), ["weights on the meta device"]),
    "another attention in a layer": (another_attention_in_a_layer, ["2 layers called the ring 1 time(s)"]),
    "the base model": (
        lambda: in_use().model(input_ids=shard_batch(batch_of())["input_ids"]),
        ["position_ids begin with None"],
    ),
    "generation": (
        lambda: in_use().generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2),
        ["expected none"],
    ),
    "a batch for an encoder": (
        lambda: in_use()(**shard_batch(padded_alike(), causal=False)),
        ["LlamaAttention attends to the tokens before only; expected a batch of shard_batch(..., causal=True)"],
    ),
    "a loss of its own code": (loss_of_its_own_code, ["BertForMaskedLM called its loss_function 0 time(s)"]),
    "more of a loss": (more_of_a_loss, ["WithMore adds to its loss"]),
    "weights of a rank": (lambda: weights_of_rank(False), ["the ranks have different weights"]),
    "broken weights": (lambda: weights_of_rank(True), ["returns NaN"]),
    "a learned scale": (lambda: learned_scale(()), ["passes a tensor () as scaling"]),
    "learned scales": (lambda: learned_scale((4, 1, 1)), ["passes a tensor (4, 1, 1) as scaling"]),
}


def work_refused(context, name):
    WORK[name][0]()


@pytest.mark.parametrize("name", WORK)
def test_what_would_be_wrong_in_a_ring_is_refused_on_every_rank(ranks, name):
    assert re.search(all_of(WORK[name][1]), refusal(ranks.outcomes(3, work_refused, name)))


def test_a_layer_that_is_not_causal_is_refused():
    """Whatever mask its model asks for, or none."""
    layer = torch.nn.Module()
    layer.is_causal = False
    with pytest.raises(ValueError, match="is_causal=False"):
        hugging_face.Ring("zigzag", None, 1).attend(layer, *torch.zeros(3, 1, 1, 2, 4))


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


def encoded(context, name, ring, causal=False):
    """The loss and gradients of a masked language model, which attends in both directions."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **NO_DROPOUTS)
    model, batch = transformers.AutoModelForMaskedLM.from_config(config).double(), padded_alike()
    labels = batch.pop("labels")
    count = (labels != IGNORED).sum()
    if ring:
        use_ring(model)
        shard = shard_batch({**batch, "labels": labels}, causal=causal)
        labels, batch = shard.pop("labels"), shard
    loss = F.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
    if ring:
        return summed(model, loss)
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize(("world_size", "name"), [(1, "Bert"), (3, "Bert"), (3, "Roberta")])
def test_an_encoder(ranks, name, world_size):
    exact, *gradients = encoded(None, name, False)
    for loss, *results in ranks(world_size, encoded, name, True):
        both = [torch.cat([x.flatten() for x in each]) for each in (results, gradients)]  # a bias of keys has none
        assert max(errors([loss, both[0]], [exact, both[1]])) <= 1e-10


def test_an_encoder_refuses_a_batch_for_a_causal_model(ranks):
    said = refusal(ranks.outcomes(3, encoded, "Bert", True, True))
    assert "BertSelfAttention attends in both directions; expected a batch of shard_batch(..., causal=False)" in said


def beside_a_model_with_its_config(context):
    model, other = (transformers.LlamaForCausalLM(config) for config in [transformers.LlamaConfig(**SIZES)] * 2)
    before = other(batch_of()["input_ids"], use_cache=False).logits
    use_ring(model_of_rank_0(model))
    return torch.equal(other(batch_of()["input_ids"], use_cache=False).logits, before)


def model_of_rank_0(model):
    for weight in model.parameters():
        dist.broadcast(weight.data, 0)
    return model


def test_another_model_with_the_same_config_keeps_its_attention(ranks):
    assert all(ranks(3, beside_a_model_with_its_config))


def used_again(context, how):
    model = model_of("Llama", {})
    use_ring(model)
    if how == "twice":
        use_ring(model, layout="striped")
    if how == "copied":
        model = copy.deepcopy(model)
    if how == "copied, then another ring":
        model = copy.deepcopy(model)
        use_ring(model, layout="striped")
    if how == "stopped":
        stop_ring(model)
        stop_ring(model)
        loss = model(**batch_of()).loss / context.world_size
    else:
        layout = "zigzag" if how == "copied" else "striped"
        loss = model(**shard_batch(batch_of(), layout=layout)).loss
    return summed(model, loss), sum(len(part._forward_hooks) for part in model.modules())


@pytest.mark.parametrize("how", ["twice", "copied", "copied, then another ring", "stopped"])
def test_a_ring_can_be_changed_copied_and_stopped(ranks, how):
    exact, _ = one_process("Llama", {})
    for results, hooks in ranks(3, used_again, how):
        assert max(errors(results, exact)) <= (1e-6 if how == "stopped" else 1e-10)  # transformers' own loss is float32
        assert hooks == (0 if how == "stopped" else 2)
