"""Hugging Face models in the ring: loss and gradients are those of sdpa on one process, or a refusal says why not."""

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial, wraps
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import PrefixStore, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ringlab.models.mesh import ContextParallel, build_mesh
from ringlab.models.transformer import IGNORED
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import NAMED, Layout
from ringlab.ring.schedule import Ring
from ringlab.support.agreement import NEW_GROUP, agree
from ringlab.support.expect import attempt
from ringlab.ways.double_ring import DoubleRing
from ringlab.ways.hybrid import Hybrid
from tests.concepts import MISSING
from tests.every_way import FLAT, ON_MESH, SOME, assert_programs, few_or_many, mesh_of, ranks_of
from tests.mistakes import assert_refused

transformers = pytest.importorskip("transformers", reason=MISSING["transformers"])

from transformers.models.llama.modeling_llama import LlamaMLP  # noqa: E402

from ringlab.hugging_face import attention, forward  # noqa: E402
from ringlab.hugging_face.batch import backward, shard_batch  # noqa: E402
from ringlab.hugging_face.forward import extra_loss  # noqa: E402
from ringlab.hugging_face.generate import spread_generation  # noqa: E402
from ringlab.hugging_face.use import stop_ring, use_ring  # noqa: E402
from tests.hugging_face import hugging_face_models as hf  # noqa: E402
from tests.hugging_face.hugging_face_models import SIZES, S, batch_of, errors, model_of, packed_batch  # noqa: E402


def taken(ring, model, batch, **sharding):
    """The model's loss and every gradient: of one process, or of a model in the ring, summed over the ranks."""
    batch = shard_batch(batch, **sharding) if ring else batch
    loss = model(**batch).loss.mul_(4).div_(4)  # in place: a loop may divide by its micro-batches
    return (hf.summed if ring else hf.results_of)(model, loss)


def autocast(context, ring):
    """A float32 model whose matrix products are in bfloat16: after rotary q and k are float32, and v is bfloat16.

    A module is new, so the model is proved once more, in float32.
    """
    (model, other), batch = (model_of("Llama", {}, torch.float32) for _ in range(2)), batch_of()
    prove, under = forward.prove, []

    def noted(*given):
        under.append(torch.is_autocast_enabled("cpu"))
        return prove(*given)

    if ring:
        use_ring(model)
        model.model.layers[0].mlp = other.model.layers[0].mlp
        batch = shard_batch(batch)
    with torch.autocast("cpu", torch.bfloat16), mock.patch.object(forward, "prove", noted):
        loss = model(**batch).loss
    assert under == [False] * ring
    return (hf.summed if ring else hf.results_of)(model, loss)


def test_autocast(ranks):
    """At most twice the error of transformers' sdpa under autocast, in norm over all gradients."""

    def off(results):
        return [(a.double() - b).norm() / b.norm() for a, b in zip(results, exact, strict=True)]

    exact = hf.one_process("Llama", {})
    allowed = torch.tensor(off(autocast(None, False))[1:]).norm()
    assert allowed > 1e-3  # it is bfloat16
    for results in ranks(3, autocast, True):
        assert torch.tensor(off(results)[1:]).norm() <= 2 * allowed


def in_a_mesh(context):
    """2 x 2: each ring has one of two rows of packed documents, all ranks a slice of the weights."""
    mesh, line = build_mesh(2, 2, "cpu")
    model = model_of("Mistral", {"sliding_window": 4})
    ring = ContextParallel(mesh["cp"], "striped")
    use_ring(model, ring)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=line)
    mine = mesh["dp"].get_local_rank()
    shard = shard_batch({name: x[mine : mine + 1] for name, x in packed_batch(rows=2).items()}, ring)
    dist.all_reduce(shard["num_items_in_batch"], group=mesh["dp"].get_group())
    total = backward(model(**shard).loss)
    return [total, *(weight.grad.full_tensor() for weight in model.parameters())]


def test_a_mesh_of_two_rings_with_fully_shard(ranks):
    for results in ranks(4, in_a_mesh):
        assert max(errors(results, hf.documents_alone("Mistral", {"sliding_window": 4}, rows=2))) <= 1e-10


def by_another_way(context, way, shape):
    """Packed documents under a window; and the ways that the layers took."""
    schedule, taken = (FLAT | ON_MESH)[way], set()

    def noted(*qkv, schedule, **options):
        taken.add(schedule)
        return ring_flash_attention(*qkv, schedule=schedule, **options)

    model, mesh = model_of("Mistral", {"sliding_window": 4}), mesh_of(shape)
    with mock.patch.object(attention, "ring_flash_attention", noted):
        use_ring(model, mesh, way=schedule)
        results = hf.summed(model, model(**shard_batch(packed_batch(), mesh)).loss)
    return results, taken == {schedule}


@pytest.mark.parametrize(("way", "shape"), SOME[1:])
def test_another_way_gives_the_same(ranks, way, shape):
    exact = hf.documents_alone("Mistral", {"sliding_window": 4})
    for results, taken in ranks(ranks_of(shape), by_another_way, way, shape):
        assert max(errors(results, exact)) <= 1e-10
        assert taken


def place_in(context):
    return attempt(lambda: ContextParallel(DeviceMesh("cpu", [[1, 3], [2, 4]])).place)


def test_a_mesh_counts_its_ranks_row_by_row(ranks):
    outside, *inside = ranks(5, place_in)
    assert "is not in the mesh [[1, 3], [2, 4]]" in outside
    assert inside == [(0, 4), (2, 4), (1, 4), (3, 4)]


def of_a_part(context):
    parts, weight = [dist.new_group(part) for part in ([0, 2], [1, 3, 4])], torch.ones((), requires_grad=True)
    mine = (context.rank + 1) * weight
    whole = backward(mine, parts[context.rank not in (0, 2)])
    return whole.item(), weight.grad.item(), mine.item()


def test_the_backward_pass_of_a_part_of_the_job(ranks):
    assert ranks(5, of_a_part) == [(4, 2, 1), (11, 6, 2), (4, 6, 3), (11, 12, 4), (11, 15, 5)]


BOUNDARIES = (
    {name: x for name, x in hf.boundaries(packed_batch()).items() if name != "attention_mask"},
    {**hf.boundaries(packed_batch()), "position_ids": packed_batch()["position_ids"]},
)


def shards(context):
    """Of documents that are told by their positions, and by cumulative lengths."""
    return [dict(shard_batch(batch)) for batch in (packed_batch(), *BOUNDARIES)]


def test_documents_are_told_by_cumulative_lengths_too(ranks):
    for right, *others in ranks(3, shards):
        assert right["documents"] == (*hf.DOCUMENTS, hf.PADDING)
        for shard in others:
            torch.testing.assert_close(shard, right, rtol=0, atol=0)


def boundaries_of_one_document(context):
    tokens = packed_batch()["input_ids"]
    return [
        shard_batch({"input_ids": tokens, name: torch.tensor([0, 10])}, causal=causal, pad_to=25).get("documents")
        for name, causal in (("cu_seq_lens_q", False), ("cu_seq_lens_k", False), ("cu_seq_lens_q", True))
    ]


def test_a_document_ends_where_its_boundary_says(ranks):
    """For an encoder; under a causal mask no token of it sees what follows. 25 tokens are padded to 30 on 3 ranks."""
    assert ranks(3, boundaries_of_one_document) == [[(10, 20), (10, 20), None]] * 3


# Refusals: each row is something to do on a rank, and what must be said on all of them --------------------------------


def without(name, **more):
    return lambda given, rank: {**{each: x for each, x in given.items() if each != name}, **more}


def with_(**more):
    return lambda given, rank: {**given, **more}


def of_rank(rank, change):
    return lambda given, mine: change(given, mine) if mine == rank else given


def padding(shard, rank):
    mask = torch.ones_like(shard["input_ids"])
    mask[1, -1] = rank != 2
    return {**shard, "attention_mask": mask}


def unshifted(shard, rank):
    return {**shard, **dict.fromkeys(("labels", "shift_labels"), shard["input_ids"])}


def packed(**more):
    return lambda shard, rank: {**shard_batch(packed_batch()), **more}


CALLS = {  # how the shard that a model gets is changed
    "a cache": (with_(past_key_values=[]), "past_key_values (a cache"),
    "documents in a tensor": (with_(documents=torch.tensor([S])), "documents are no tuple"),
    "labels on one rank": (of_rank(1, with_(labels=None)), "the ranks disagree about labels; expected"),
    "cumulative lengths": (with_(cu_seq_lens_q=torch.tensor([0, 8])), "cu_seq_lens_q (packed documents: for shard"),
    "no positions": (without("position_ids"), "expected [0, 1, 2, 3, 20, 21, 22, 23] and end with 23, this rank's"),
    "no tokens": (without("input_ids"), "embeddings in place of input_ids, as a vision model"),
    "tokens of one row": (lambda it, rank: {**it, "input_ids": it["input_ids"][0]}, "input_ids are (8,)"),
    "whole rows": (lambda *_: {**batch_of(), "position_ids": ROW}, "5, 6, 7] and end with 71, this rank's of 72 in"),
    "other masks": (with_(attention_mask={"full_attention": torch.ones(1)}), "attention_mask is no tensor"),
    "lists of tensors": (with_(deepstack=[torch.ones(9)]), "deepstack is a list; expected none"),
    "another layout": (lambda *_: shard_batch(batch_of(), layout="striped"), "position_ids begin with [0, 3, 6,"),
    "labels not shifted": (unshifted, "the label of each token is the token itself; expected the next one"),
    "padding": (padding, "rank 2: attention_mask is"),
    "uncounted": (without("num_items_in_batch"), "num_items_in_batch"),
    "TRL's loss": (without("shift_labels", fused_lm_head=True), "fused_lm_head without"),
    "weights": (with_(output_attentions=True), "output_attentions is True"),
    "other lengths": (packed(documents=hf.DOCUMENTS), "documents have 21 tokens; expected 24, as shard_batch gives"),
    "documents of a rank": (of_rank(1, with_(documents=(24,))), "the ranks disagree"),
}


def unmasked(batch, rank):
    return {**batch, "labels": batch["labels"].clone().fill_diagonal_(IGNORED)}


def masked(columns):
    def change(batch, rank):
        mask = batch["attention_mask"].clone()
        mask[:, columns] = 0
        return {**batch, "attention_mask": mask}

    return change


BATCHES = {  # how a batch is changed
    "short labels": (lambda b, rank: {**b, "labels": b["labels"][:, 1:]}, "labels is (2, 23); expected the shape of"),
    "labels of a rank": (of_rank(2, unmasked), "the ranks disagree about the batch"),
    "no input": (of_rank(1, without("input_ids")), "rank 1: input_ids are None"),
    "three kinds of positions": (with_(position_ids=torch.arange(S).expand(3, 2, S)), "position_ids are (3, 2, 24)"),
    "padding on the left": (masked(slice(4)), "attention_mask has padding before tokens; expected padding on"),
    "a hole": (masked(5), "attention_mask has a hole between tokens; expected ones, then zeros"),
    "labels of padding": (lambda b, rank: {**b, "labels": b["input_ids"]}, "labels where attention_mask is 0"),
    "segments": (with_(token_type_ids=torch.zeros(2, S)), "token_type_ids is a tensor"),
    "too short": (lambda b, rank: {name: x[:, 1:] for name, x in b.items()}, "expected a multiple of 6: pad_to=1 adds"),
}


def ends(*tokens, **more):
    """cu_seq_lens in place of position_ids."""
    both = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(tokens))
    return lambda batch, rank: {**hf.boundaries(batch), **both, **more}


def labels_of_padding(batch, rank):
    return without("attention_mask")(hf.boundaries({**batch, "labels": batch["input_ids"]}), rank)


ROW = torch.arange(24)[None]
ROWS = torch.cat([packed_batch()["position_ids"], ROW])
PACKED = {  # how a packed batch of two rows is changed
    "rows packed differently": (with_(position_ids=ROWS), "not 0, 1, 2, ... in each document, the same in all rows"),
    "two kinds of boundaries": (ends(0, 24, cu_seq_lens_k=torch.tensor([0, 12, 24])), "and cu_seq_lens_k [0, 12, 24]"),
    "an empty document": (ends(0, 5, 5, 24), "cu_seq_lens_q is [0, 5, 5, 24]"),
    "tokens before the first": (ends(5, 24), "cu_seq_lens_q is [5, 24]"),
    "no document": (ends(0), "cu_seq_lens_q is [0]"),
    "of both rows": (ends(0, 24, 48), "cu_seq_lens_q is [0, 24, 48]"),
    "labels of padding": (labels_of_padding, "labels where attention_mask is 0, or after the last document"),
    "boundaries of a rank": (of_rank(0, with_(position_ids=ROW)), "the ranks disagree about documents"),
    "no whole numbers": (ends(0.0, 24.0), "cu_seq_lens_q is [0.0, 24.0]"),
}


def in_use(name="Llama", change=None, where=None, layout="zigzag", **options):
    """A model in a ring, changed before it gets there."""
    model = model_of(name, options)
    model = model if change is None else change(model) or model
    with nullcontext() if change or options else hf.proved_sometimes():
        use_ring(model, where, layout)
    return model


def other_head(kind, name):
    config = getattr(transformers, f"{name}Config")(**SIZES)
    return lambda rank: use_ring(getattr(transformers, f"AutoModelFor{kind}").from_config(config))


def on_meta(rank):
    with torch.device("meta"):
        return in_use()


CONV = {"layer_types": ["conv", "full_attention"]}


def states_in_a_mesh(rank):
    return in_use("Lfm2", where=ContextParallel(mesh_of((3, 1)), way=DoubleRing), **CONV)


def a_forward_by_hand(rank):
    model = model_of("Lfm2", CONV)
    layer = model.model.layers[0].conv
    layer.forward = by_hand = partial(type(layer).forward, layer)
    try:
        use_ring(model)
    finally:
        assert layer.forward is by_hand


def with_pictures(rank):
    """Each rank has its tokens, and the pictures of all: in Llava itself this is an error on some ranks only."""
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=8)
    text = transformers.LlamaConfig(**SIZES)
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=60)
    model = transformers.LlavaForConditionalGeneration(config)
    use_ring(model.model.language_model)
    return model(**shard_batch({"input_ids": ROW.clone()}), pixel_values=torch.zeros(1, 3, 16, 16))


def any_arguments(model):
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def scaled_by(scale):
    def change(model):
        model.set_attn_implementation("eager")
        for layer in model.model.layers:
            del layer.self_attn.scaling
            layer.self_attn.scaling = scale

    return change


LEARNED = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
OF_HEADS = torch.linspace(0.2, 0.4, 4, dtype=torch.float64)[:, None, None]


def weights_of_rank(x):
    def change(model):
        model.lm_head.weight.data[3, 4] = x

    return lambda rank: in_use(change=change if rank == 1 else None)


def used(**options):
    """A step of a model that is right but for its options."""
    return lambda rank: in_use(**options)(**shard_batch(batch_of()))


ROUTER = {**hf.EXPERTS, "output_router_logits": True}
MODELS = {  # what is given to use_ring
    "dropout": (used(attention_dropout=0.1), "dropout is 0.1"),
    "both directions": (used(is_causal=False), "LlamaAttention attends in both directions"),
    "a loss of the router": (lambda rank: in_use("Mixtral", **ROUTER), "has output_router_logits=True in its config"),
    "layers left out": (lambda rank: in_use("OPT", layerdrop=0.1, word_embed_proj_dim=32), "has layerdrop=0.1"),
    "classes of tokens": (other_head("TokenClassification", "Llama"), "computes ForTokenClassification; expected ForC"),
    "windows of an encoder": (other_head("MaskedLM", "ModernBert"), "and_masks(sliding_window_bidirectional_overlay("),
    "two stacks": (other_head("Seq2SeqLM", "Bart"), "BartForConditionalGeneration is an encoder with a decoder"),
    "a wrapped model": (lambda rank: in_use(change=torch.nn.Sequential), "model is a Sequential; expected a model of"),
    "compiled in place": (lambda rank: in_use(change=lambda model: model.compile()), "is compiled; expected use_ring"),
    "any arguments": (lambda rank: in_use(change=any_arguments), "has a forward(*args); expected its arguments by"),
    "a layout without states": (lambda rank: in_use("Lfm2", layout="striped", **CONV), "layout is striped; expected"),
    "a misspelt layout": (lambda rank: in_use(layout="zig-zag"), "zig-zag"),
    "two layouts": (lambda rank: in_use(where=ContextParallel(layout="contiguous"), layout="striped"), "in one place"),
    "two ways": (lambda rank: use_ring(model_of("Llama", {}), ContextParallel(), way=Hybrid), "in one place"),
    "a way that is none": (lambda rank: in_use(where=ContextParallel(way="ring")), "way is 'ring'; expected the class"),
    "a way of a mesh": (lambda rank: in_use(where=ContextParallel(way=Hybrid)), "mesh is None; expected 2 dimensions"),
    "a mesh of two": (lambda rank: in_use(where=ContextParallel(mesh_of((3, 1)))), "a mesh of one dimension: a double"),
    "states in a mesh": (states_in_a_mesh, "has linear layers; expected no mesh"),
    "a forward by hand": (a_forward_by_hand, "Lfm2ShortConv has a forward that was set by hand; expected that of its"),
    "the language model of a vision model": (with_pictures, "embeddings in place of input_ids, as a vision model"),
    "weights on the meta device": (on_meta, "weights on the meta device"),
    "weights of a rank": (weights_of_rank(1.0), "the ranks disagree about weights"),
    "broken weights": (weights_of_rank(torch.nan), "returns NaN"),
    "a learned scale": (lambda rank: in_use(change=scaled_by(LEARNED)), "passes a tensor () as scaling"),
    "a scale of each head": (lambda rank: in_use(change=scaled_by(OF_HEADS)), "passes a tensor (4, 1, 1) as scaling"),
}


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


def trained_unsummed(mode, passes=2):
    """Each rank has weights of its own since a pass that compares none: a change of mode compares them; passes 4, 8."""

    def work(rank):
        model = in_use()
        for _ in range(passes):
            model(**shard_batch(batch_of()))
        a_head_of_rank(model, rank)
        model(**shard_batch(batch_of()))
        model.train(mode)
        model(**shard_batch(batch_of()))

    return work


def a_second_time(rank):
    model = in_use()
    a_mixer(model, rank)
    shard = shard_batch(batch_of())
    assert "mixes tokens" in attempt(model, **shard)
    mixer, model.model.layers[0].mlp = model.model.layers[0].mlp, model.model.layers[0].mlp[0]
    model(**shard)  # without it, it is in the ring as before
    model.model.layers[0].mlp = mixer
    model(**shard)


def evaluated(model, rank):
    """As many passes as there are comparisons of weights, none of which is due then."""
    model.eval()
    with torch.no_grad():
        for _ in range(8):
            model(**shard_batch(batch_of()))
    model.train()


def another_attention_in_a_layer(model, rank):
    model.model.layers[1].self_attn.config = model_of("Llama", {}).config


def another_loss(model, rank):
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()


def layers_that_drop_documents(model, rank):
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, documents=None, forward=forward, **passed: forward(*args, **passed)


def a_mixer(model, rank):
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, Sums())


def a_forward_that_mixes(model, rank):
    """On one rank: the proof is of all."""
    mlp = model.model.layers[0].mlp
    if rank == 1:
        mlp.forward = lambda x: type(mlp).forward(mlp, x.cumsum(dim=1))


def a_base_model_that_mixes(model, rank):
    forward = model.model.forward

    @wraps(forward)
    def mixed(*args, **passed):
        out = forward(*args, **passed)
        out.last_hidden_state = out.last_hidden_state.cumsum(dim=1)
        return out

    model.model.forward = mixed


def a_class_in_functions(rank):
    """Its forward is patched as functools.wraps does it, and names the old one."""
    model, own = in_use(), LlamaMLP.forward
    with mock.patch.object(LlamaMLP, "forward", wraps(own)(lambda part, x: own(part, x.cumsum(dim=1)))):
        model(**shard_batch(batch_of()))


def of_one_class(rank):
    """A module takes the place of another of its class, which has other numbers."""
    model = in_use(change=lambda model: setattr(model.model.layers[0], "mlp", torch.nn.AvgPool2d(1)))
    model.model.layers[0].mlp = torch.nn.AvgPool2d((3, 1), 1, (1, 0))
    model(**shard_batch(batch_of()))


def a_head_of_rank(model, rank):
    model.lm_head.weight.data += rank
    model.lm_head.requires_grad_(False)  # what is frozen must be the same too


def adapted(model, kind, **options):
    import peft

    torch.manual_seed(0)
    return peft.get_peft_model(model, getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **options))


def with_adapter(kind, **options):
    return lambda rank: in_use(change=lambda model: adapted(model, kind, **options))


Q = {"target_modules": ["q_proj"]}
ADALORA = {**Q, "total_step": 9}


class Sums(torch.nn.Module):
    def forward(self, x):
        return x.cumsum(dim=1)


class Doubled(torch.nn.Module):
    def forward(self, hidden_states, **_):
        return 2 * hidden_states


class WithMore(transformers.LlamaForCausalLM):
    """A loss of two parts. The second is of the logits of a shard, or of all tokens."""

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, labels=None, **more):
        same = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
        out, how = super().forward(**same, labels=labels, **more), self.how if labels is not None else ""
        of_tokens, of_weights = out.logits.square().sum() / (2 * S), self.lm_head.weight.square().sum()
        if how == "in place":
            out.loss += of_tokens
        if how == "without a value":
            out.loss = out.loss + of_tokens - of_tokens.detach()
        if how in ("told", "told in part"):
            out.loss = out.loss + extra_loss(self, of_tokens, of_weights / 2) + extra_loss(self, 0.0, of_weights / 2)
        if how == "told in part":
            out.loss = out.loss + 1e-3 * of_tokens
        return out


def with_more(how):
    torch.manual_seed(0)
    model = WithMore(transformers.LlamaConfig(**SIZES)).double()
    model.how = how
    return model


def more_of_a_loss(how):
    return lambda rank: in_use(change=lambda model: with_more(how))(**shard_batch(batch_of()))


def bert(causal):
    """BertForMaskedLM divides by the labels of its shard."""
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig(**SIZES, **hf.NO_DROPOUTS)).double()
    use_ring(model)
    model(**shard_batch(padded_alike(), causal=causal))


def in_two_layouts(rank):
    own = Layout("zigzag", NAMED["striped" if rank else "contiguous"].positions)
    shard_batch({"input_ids": ROW}, layout=own)


def without_gradients(rank):
    with torch.set_grad_enabled(rank == 0):
        llama()(**shard_batch(batch_of()))


def a_document_with_padding(rank):
    batch = without("position_ids")(packed_batch(), rank)
    shard_batch({**without("labels")(batch, rank), "cu_seq_lens_q": torch.tensor([0, 5, 24])}, causal=False)


WEIGHTS = "the ranks disagree about weights; expected the same on each of them: one seed"
NOT_TOLD = "a row has 5 documents, of which the layers of StableLmForCausalLM are not told"
BEFORE_ONLY = "LlamaAttention attends to the tokens before only; expected a batch of shard_batch(..., causal=True)"
OTHERS, NAMES = ("zigzag", "zigzag", "contiguous"), ("zigzag", "zig-zag", "zigzag")  # layouts of the three ranks
STEPS = {  # what is done with a model after use_ring, or with its loss
    "another attention in a layer": (after(another_attention_in_a_layer), "2 layers called the ring 1 time(s)"),
    "another loss function": (after(another_loss), "LlamaForCausalLM was given a loss_function"),
    "a forward that mixes": (after(a_forward_that_mixes), "layers.0.mlp (LlamaMLP) of LlamaModel mixes tokens"),
    "a base model that mixes": (after(a_base_model_that_mixes), "the model itself (LlamaModel) of LlamaModel mixes"),
    "a class in functions": (a_class_in_functions, "layers.0.mlp (LlamaMLP) of LlamaModel mixes tokens"),
    "a module of the same class": (of_one_class, "layers.0.mlp (AvgPool2d) of LlamaModel mixes tokens"),
    "pickled": (lambda rank: pickle.dumps(llama()), "a model in a ring was pickled, as torch.save(model) does; expect"),
    "a mixer, a second time": (a_second_time, "layers.0.mlp.1 (Sums) of LlamaModel mixes tokens"),
    "a head of each rank": (after(a_head_of_rank), WEIGHTS),
    "gradients that nobody sums": (after(lambda *_: None, steps=2), WEIGHTS),
    "gradients that nobody sums, after an evaluation": (after(evaluated, steps=2), WEIGHTS),
    "gradients that nobody sums, before an evaluation": (trained_unsummed(False), WEIGHTS),
    "gradients that nobody sums, later": (trained_unsummed(True), WEIGHTS),
    "gradients that nobody sums, much later": (trained_unsummed(True, 6), WEIGHTS),
    "packed for layers that are not told": (after(lambda *_: None, packed_batch, name="StableLm"), NOT_TOLD),
    "dropped documents": (after(layers_that_drop_documents, packed_batch), "the ring with its documents 0 time(s)"),
    "the base model": (lambda rank: llama().model(input_ids=ROW[:, :8]), "position_ids begin with None"),
    "generation": (lambda rank: llama().generate(ROW[:, :4], max_new_tokens=2), "expected none"),
    "a document with padding": (a_document_with_padding, "documents of cu_seq_lens_q end behind"),
    "unequal padding": (lambda rank: shard_batch(batch_of(), causal=False), "the rows have padding of unequal lengths"),
    "unequal shards": (
        lambda rank: shard_batch({"input_ids": ROW[:, :23]}, None, "contiguous"),
        "a multiple of 3: pad",
    ),
    "no gradients on a rank": (without_gradients, "the ranks disagree about gradients"),
    "no batch": (lambda rank: shard_batch({"input_ids": torch.tensor(5)}, pad_to=1), "input_ids are (); expected"),
    "padded to nothing": (lambda rank: shard_batch(batch_of(), pad_to=0), "pad_to is 0; expected a number of tokens"),
    "causal on some ranks": (lambda rank: shard_batch({"input_ids": ROW}, causal=rank > 1), "disagree about causal"),
    "other layouts": (lambda rank: shard_batch({"input_ids": ROW}, None, OTHERS[rank]), "disagree about layout"),
    "a wrong layout": (lambda rank: shard_batch({"input_ids": ROW}, None, NAMES[rank]), "rank 1: layout is 'zig-zag'"),
    "two layouts of one name": (in_two_layouts, "the ranks disagree about the positions of the layout; expected one"),
    "a batch for an encoder": (lambda rank: in_use()(**shard_batch(padded_alike(), causal=False)), BEFORE_ONLY),
    "a causal batch for an encoder": (lambda rank: bert(True), "BertSelfAttention attends in both directions"),
    "a loss of its own code": (lambda rank: bert(False), "BertForMaskedLM called its loss_function 0 time(s)"),
    "more of a loss, in place": (more_of_a_loss("in place"), "WithMore adds to its loss"),
    "more of a loss, without a value": (more_of_a_loss("without a value"), "WithMore adds to its loss"),
    "more of a loss, told in part": (more_of_a_loss("told in part"), "WithMore adds to its loss"),
}
ADAPTERS = {
    "LoRA of a rank": (after(lambda model, rank: rank and adapted(model, "Lora", **Q)), "ranks disagree about modules"),
    "AdaLoRA, later": (after(lambda model, rank: adapted(model, "AdaLora", **ADALORA)), "to the model's loss in place"),
    "AdaLoRA": (with_adapter("AdaLora", **ADALORA), "ADALORA does more than its layers"),
    "aLoRA": (
        with_adapter("Lora", alora_invocation_tokens=[1], **Q),
        "LORA looks for its invocation tokens, in a shard",
    ),
    "virtual tokens": (with_adapter("PromptTuning", num_virtual_tokens=4), "PROMPT_TUNING puts virtual tokens before"),
}


@lru_cache
def llama():
    """A model that every call of a table may have: they are refused before it computes."""
    return in_use()


def of_call(change):
    return lambda rank: llama()(**change(shard_batch(batch_of()), rank))


def of_batch(change):
    return lambda rank: shard_batch(change(batch_of(), rank))


def of_packed(change):
    return lambda rank: shard_batch(change(packed_batch(rows=2), rank))


TABLES = {
    "calls": {name: (of_call(change), words) for name, (change, words) in CALLS.items()},
    "batches": {name: (of_batch(change), words) for name, (change, words) in BATCHES.items()},
    "packed": {name: (of_packed(change), words) for name, (change, words) in PACKED.items()},
    "models": MODELS,
    "steps": STEPS,
    "adapters": ADAPTERS,
}


def refused(context, table, name):
    TABLES[table][name][0](context.rank)


@pytest.mark.parametrize("table", TABLES)
def test_what_would_be_wrong_in_a_ring_is_refused_on_every_rank(ranks, table):
    if table == "adapters":
        pytest.importorskip("peft", reason=MISSING["trl"])
    for name, (_, words) in TABLES[table].items():
        assert_refused(ranks, 3, words, refused, table, name)


# Other losses, other heads, a copy, another ring, none: each on one process, and in the ring --------------------------


def lora_later(context, ring):
    """Adapters that are added after use_ring: the model is proved once more. stop_ring takes the hooks of all."""
    pytest.importorskip("peft", reason=MISSING["trl"])
    model = adapted(in_use() if ring else model_of("Llama", {}), "Lora", **Q)
    results = taken(ring, model, batch_of())
    if ring:
        use_ring(model)
        stop_ring(model)
        assert hooks_of(model) == 0
    return results


def more_that_is_told(context, ring):
    """And each label of rank 0 of 3 is its token, which comes twice: the labels of the others are not."""
    model, tokens = with_more("told"), torch.arange(S).expand(2, S) // 2
    if ring:
        use_ring(model)
    labels = tokens.index_fill(1, torch.tensor([2, 4, 22]), IGNORED)
    counted = {} if ring else {"num_items_in_batch": 2 * (S - 4)}
    return taken(ring, model, {"input_ids": tokens, "labels": labels} | counted)


def replaced_layer(context, ring):
    """A linear layer takes the place of another after use_ring, and one is of another class: what it had ends."""
    model, other = (
        model_of("Lfm2", {"num_hidden_layers": 3, "layer_types": ["conv"] * 2 + ["full_attention"]}) for _ in range(2)
    )
    if ring:
        use_ring(model, layout="contiguous")
    model.model.layers[0], changed = other.model.layers[0], model.model.layers[1].conv
    changed.__class__ = Doubled
    results = taken(ring, model, batch_of(), layout="contiguous")
    stop_ring(model)
    assert not any("forward" in vars(layer.conv) for layer in model.model.layers[:2])
    return results


def replaced_frequencies(context, ring):
    """The frequencies of a new rotary part depend on the longest position, which one rank of three has."""
    short, dynamic = {"max_position_embeddings": 8}, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model, other = model_of("Llama", short), model_of("Llama", {**short, "rope_parameters": dynamic})
    if ring:
        use_ring(model)
    model.model.rotary_emb = other.model.rotary_emb
    return taken(ring, model, batch_of())


def classified(context, ring):
    """The loss and gradients of a classification, from the row of the last token of each sequence."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.AutoModelForSequenceClassification.from_config(config).double()
    batch, classes = without("labels")(batch_of(), 0), torch.tensor([0, 1])
    if not ring:
        return hf.results_of(model, model(**batch, labels=classes).loss)
    use_ring(model.model)
    shard = shard_batch(batch)
    rows = model.model(**shard).last_hidden_state
    last = batch["attention_mask"].sum(dim=1, keepdim=True) - 1
    sequence, token = (shard["position_ids"] == last).nonzero().T  # of the last tokens that this rank has
    logits = model.score(rows[sequence, token])
    return hf.summed(model, F.cross_entropy(logits, classes[sequence], reduction="sum") / len(classes))


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
    config = transformers.RobertaConfig(**SIZES, **hf.NO_DROPOUTS)
    model, batch = transformers.AutoModelForMaskedLM.from_config(config).double(), padded_alike()
    count = (batch["labels"] != IGNORED).sum()
    if ring:
        use_ring(model)
        batch = shard_batch(batch, causal=False)
    labels = batch.pop("labels")
    loss = F.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
    return (hf.summed if ring else hf.results_of)(model, loss)


@pytest.mark.parametrize(
    "step", [lora_later, more_that_is_told, replaced_layer, replaced_frequencies, classified, encoded]
)
def test_other_losses_and_other_heads(ranks, step):
    """As on one process, where transformers' own losses are float32."""
    loss, *gradients = step(None, False)
    for of_ring, *results in ranks(3, step, True):
        both = [torch.cat([x.flatten() for x in each if x is not None]) for each in (results, gradients)]
        assert max(errors([of_ring, both[0]], [loss, both[1]])) <= (1e-10 if step is encoded else 1e-6)


def stopped(context):
    """The loss and gradients, the hooks in a ring and without one, and if another model of its config has changed."""
    model, tokens = model_of("Llama", {}), batch_of()["input_ids"]
    other = type(model)(model.config).double()
    before = other(tokens, use_cache=False).logits
    use_ring(model)
    use_ring(model, layout="striped")
    same, hooks = torch.equal(other(tokens, use_cache=False).logits, before), hooks_of(model)
    stop_ring(model)
    stop_ring(model)
    pickle.dumps(model)  # refused while a part of it has the ring
    loss = model(**batch_of()).loss / context.world_size
    return hf.summed(model, loss), hooks, hooks_of(model), same


def hooks_of(model):
    return sum(len(part._forward_hooks) for part in model.modules())


def test_a_stopped_ring_leaves_nothing(ranks):
    """Transformers' own loss is float32."""
    exact = hf.one_process("Llama", {})
    for results, *rest in ranks(3, stopped):
        assert max(errors(results, exact)) <= 1e-6
        assert rest == [2, 0, True]


def refused_model(context):
    """What a model has kept that use_ring has refused, although its rotary frequencies already had hooks."""
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = model_of("Phi3", {"rope_parameters": longrope, "original_max_position_embeddings": 20})
    a_mixer(model, context.rank)
    said, hooks = attempt(use_ring, model), [part._forward_pre_hooks for part in model.modules()]
    return "mixes tokens" in str(said), hasattr(model, "ring"), sum(map(len, hooks)), model.config._attn_implementation


def test_a_refused_model_keeps_no_ring(ranks):
    assert ranks(2, refused_model) == [(True, False, 0, "sdpa")] * 2


def after_its_model(context, stopped):
    """What is left of a layer, the ring, its group, which is destroyed, and its name."""
    model, group = model_of("Lfm2", CONV), dist.new_group([0])
    use_ring(model, group, layout="contiguous")
    left, name = [weakref.ref(x) for x in (model.model.layers[0].conv, model.ring[0], group)], model.ring[0].name
    if stopped:
        stop_ring(model)
    dist.destroy_process_group(group)
    del model, group
    gc.collect()
    return [x() for x in left], name in transformers.AttentionInterface()


@pytest.mark.parametrize("stopped", [True, False])
def test_nothing_is_kept_of_a_model_that_is_gone(ranks, stopped):
    assert ranks(1, after_its_model, stopped) == [([None] * 3, False)]


# Sequences of passes --------------------------------------------------------------------------------------------------

KINDS = {"Llama": {}, "Mistral": {"sliding_window": 4}, "Lfm2": CONV}
KINDS["Lfm2 in fully_shard"] = KINDS["Lfm2"]
PACKINGS = ((24,), (12, 12), (7, 17), (5, 9, 1, 9))
KEPT = weakref.WeakKeyDictionary()  # by the group of the job: models that are in a ring, whose proof takes long


@dataclass(frozen=True)
class Pass:
    """A forward pass of a model over packed documents of random tokens."""

    kind: str
    lengths: tuple
    seed: int
    labels: bool = True
    how: str = "train"  # or "checkpointed", "no_grad", "eval"
    before: str = ""  # what is done with the model: "copy", "reload", "generate", "refused" (a call with a mistake)
    layout: str = "zigzag"
    error: type | None = None  # of rank 1 in mid pass


@dataclass(frozen=True)
class Back:
    """The backward pass of pass number `of`, which is refused if its model is in another ring by then."""

    of: int
    error: type | None = None


CHOICES = {
    "lengths": PACKINGS,
    "seed": range(3),
    "labels": [True, True, True, False],
    "how": ["train", "train", "checkpointed", "checkpointed", "checkpointed", "no_grad", "eval"],
}


def any_pass(kind, program, random):
    """Add a pass of a model of this kind to a program, or the backward pass of an earlier one."""
    error = random.choice([None] * 18 + [MemoryError, KeyboardInterrupt]) if "fully_shard" not in kind else None
    if program.graphs and random.random() < 0.4:
        program.add(Back(program.graphs.pop(random.choice([0, -1])), error))
        return
    befores = ["", "refused", "reload"]
    layouts = ["zigzag"] * 5
    if "fully_shard" not in kind:  # else it is not copied, and stays in its ring
        befores, layouts = [*befores, "copy", "generate"], [*layouts, "contiguous" if kind == "Lfm2" else "striped"]
    it = Pass(kind, **program.chosen(random, before=[""] * 8 + befores, layout=layouts, **CHOICES), error=error)
    program.add(it, it.how in ("train", "checkpointed") and not error)


def model_for(kind):
    return model_of(kind.partition(" ")[0], KINDS[kind])


def whole_of(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def in_its_ring(kind, model):
    """A model that was just made, in a ring or not yet."""
    if "fully_shard" in kind:
        use_ring(model)
        for part in (*model.model.layers, model):
            fully_shard(part)
    return model


def reloaded(kind, model):
    """A new model with the weights that one in a ring has saved: rank 0 writes them."""
    weights = {name: whole_of(x) for name, x in model.state_dict().items()}
    with TemporaryDirectory() as mine:
        folder = agree(lambda: mine)[0]
        model.save_pretrained(folder, state_dict=weights)
        dist.barrier()
        new = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        dist.barrier()
    return in_its_ring(kind, new)


def texts_of(it):
    tokens = torch.randint(1, SIZES["vocab_size"], (1, S), generator=torch.Generator().manual_seed(it.seed))
    labels = tokens.clone() if it.labels else torch.full_like(tokens, IGNORED)
    places = torch.cat([torch.arange(n) for n in it.lengths])[None]
    return {"input_ids": tokens, "labels": labels, "position_ids": places}


def with_an_error(run, error, rank):
    """An error of rank 1 between two layers ends `run` on every rank, and the job. All form a new one."""
    broken, told = mock.patch.object(Ring, "to_tokens", side_effect=error) if rank == 1 else nullcontext(), ""
    try:
        with broken:
            run()
    except (MemoryError, KeyboardInterrupt):
        assert rank == 1
    except ValueError as refused:
        told = str(refused)
    assert NEW_GROUP in (told or str(attempt(agree, str)))
    models, store = KEPT[dist.group.WORLD], PrefixStore("again", distributed_c10d._get_default_store())
    place = {"rank": rank, "world_size": dist.get_world_size()}
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, **place)
    dist.barrier()
    KEPT[dist.group.WORLD] = models


@hf.proved_sometimes()
def passes_on_rank(context, steps):
    """Of each step this rank's part of the loss, or of all gradients in one row."""
    models, graphs, results = KEPT.setdefault(dist.group.WORLD, {}), {}, [None] * len(steps)
    for number, step in enumerate(steps):
        if isinstance(step, Back):
            loss, model, ring = graphs.pop(step.of)
            if model.ring[0] is not ring:
                assert "has left the ring" in str(attempt(loss.backward))
            elif step.error:
                with_an_error(loss.backward, step.error, context.rank)
            else:
                loss.backward()
                parts = [torch.zeros_like(w) if w.grad is None else w.grad for w in model.parameters()]
                results[number] = torch.cat([whole_of(x).flatten() for x in parts])  # DTensors: a mean over the ranks
            model.zero_grad()
            continue
        if step.kind not in models:
            models[step.kind] = in_its_ring(step.kind, model_for(step.kind))
        if step.before == "reload":
            models[step.kind] = reloaded(step.kind, models[step.kind])
        model, shard = models[step.kind], shard_batch(texts_of(step), layout=step.layout)
        if step.before == "generate":
            stop_ring(model)
            alone = step.kind == "Lfm2"  # states are not spread
            with nullcontext() if alone else spread_generation(model.eval()):
                assert written(model) == written(model_for(step.kind))
        if not hasattr(model, "ring") or model.ring[0].where.layout != step.layout:
            use_ring(model, layout=step.layout)
        if step.before == "copy":
            model = models[step.kind] = copy.deepcopy(model)
        if step.before == "refused":
            assert "position_ids begin with" in str(
                attempt(model, **{**shard, "position_ids": shard["position_ids"] + 1})
            )
        model.train(step.how != "eval")
        model.gradient_checkpointing_disable()
        if step.how == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.no_grad() if step.how in ("no_grad", "eval") else nullcontext():
            if step.error:
                with_an_error(partial(model, **shard), step.error, context.rank)
                continue
            loss = model(**shard).loss
        graphs[number] = loss, model, model.ring[0]
        results[number] = loss.detach()
    return results


def written(model):
    return model.eval().generate(texts_of(Pass("", (S,), 3))["input_ids"], max_new_tokens=3, do_sample=False).tolist()


@cache
def right_pass(kind, lengths, seed, labels):
    """The loss and the gradients of each document alone, by sdpa on one process."""
    model, tokens = model_for(kind), texts_of(Pass(kind, lengths, seed))["input_ids"]
    documents = [document for document in tokens.split(lengths, dim=1) if document.shape[1] > 1]
    rows = [model(document, use_cache=False).logits[0, :-1] for document in documents]
    parts = [F.cross_entropy(x, y[0, 1:], reduction="sum") for x, y in zip(rows, documents, strict=True)]
    loss, *gradients = hf.results_of(model, sum(parts) / (S - len(lengths)) * labels)
    return loss, torch.cat([x.flatten() for x in gradients])


def run_passes(ranks, P, steps):
    """Transformers computes norms in float32: two ways to sum round to numbers beside each other."""
    for step, parts in zip(steps, zip(*ranks(P, passes_on_rank, steps), strict=True), strict=True):
        it, back = (steps[step.of], True) if isinstance(step, Back) else (step, False)
        right = right_pass(it.kind, it.lengths, it.seed, it.labels)[back]
        if parts[0] is not None:
            assert (sum(parts) - right).norm() <= 1e-5 * right.norm(), step


@pytest.mark.parametrize(("P", "kind"), [(2, "Llama"), (3, "Mistral"), (3, "Lfm2"), (2, "Lfm2 in fully_shard")])
@few_or_many(4, 240)
def test_no_pass_remembers_another(ranks, P, kind, programs):
    assert_programs(partial(any_pass, kind), programs, partial(run_passes, ranks, P))
