"""The proof that a model may be cut into shards: planted mixtures are found and named, right models are accepted.

The masks that its layers ask for. And the seam.
"""

import copy
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.concepts import MISSING
from tests.mistakes import all_of

transformers = pytest.importorskip("transformers", reason=MISSING["transformers"])

from transformers import masking_utils  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

from ringlab.hugging_face import proof as hugging_face_proof  # noqa: E402
from ringlab.hugging_face import seam  # noqa: E402
from ringlab.hugging_face import states as hugging_face_states  # noqa: E402
from ringlab.hugging_face.attention import LayerAttention  # noqa: E402
from ringlab.hugging_face.batch import refuse, themselves  # noqa: E402
from ringlab.hugging_face.masks import BothWays, ChunkedAttention, asked_mask, rule_in_words, window_of  # noqa: E402
from ringlab.hugging_face.proof import prove  # noqa: E402
from ringlab.models.mesh import ContextParallel  # noqa: E402
from ringlab.models.transformer import Linear  # noqa: E402
from ringlab.ring.masks import Mask  # noqa: E402
from tests.attention import dense  # noqa: E402
from tests.hugging_face.hugging_face_models import SIZES, model_of  # noqa: E402


def proved(model):
    noted = LayerAttention(ContextParallel())
    transformers.AttentionInterface.register("noted", noted.attend)
    transformers.AttentionMaskInterface.register("noted", asked_mask)
    found = prove(model, noted, "noted")
    return found.layers, found.first, found.packs


def llama(dtype=torch.float64, **options):
    return model_of("Llama", options, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("Llama", {}, (2, 0, True)),
        ("GPT2", {}, (2, 0, True)),
        ("Roberta", {"is_decoder": True, "pad_token_id": 3}, (2, 4, True)),
        ("OPT", {"word_embed_proj_dim": 32, "ffn_dim": 40}, (2, 0, True)),
        ("StableLm", {}, (2, 0, False)),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, (1, 0, True)),
    ],
)
def test_right_models_are_proved_in_any_dtype(name, options, expected, dtype):
    """Packed documents are for a model whose layers are all told of them."""
    model = model_of(name, options, dtype)
    assert proved(model) == expected
    for layer in (layers := seam.linear_layers(model)):
        layer.register_forward_pre_hook(
            lambda part, args, passed: (args, passed | {"documents": None}), with_kwargs=True
        )
    assert not layers or proved(model) == (*expected[:2], False)


# What mixes tokens --------------------------------------------------------------------------------------------------


def wrap(part, change):
    """`change` of what the forward pass of a part returns."""
    forward = part.forward
    part.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))


def from_before(places, weight=0.1):
    """A token of x (B, S, ·) gets something of the token so many places before it."""
    return lambda x: x + weight * F.pad(x, (0, 0, places, 0))[:, : x.shape[1]]


def later(x):
    return x + 0.1 * F.pad(x, (0, 0, 0, 1))[:, 1:]


def mean_of_all(x):
    return x - x.mean(dim=1, keepdim=True)


def of_the_batch(x):
    return x - x.mean(dim=0, keepdim=True)


def mixed(name, change):
    """What the part of this name returns is changed."""
    return lambda model: wrap(model.get_submodule(name), change)


def between_parts(model):
    """Mixed between the parts of an attention: named by their parent."""
    attention = model.model.layers[1].self_attn
    q_proj, project = attention.q_proj.forward, attention.forward
    attention.q_proj.forward = lambda x: q_proj(x)
    attention.forward = lambda hidden_states, **kwargs: project(hidden_states=from_before(1)(hidden_states), **kwargs)


def positions_from_5(model):
    forward = model.model.forward

    def from_five(*args, position_ids=None, **kwargs):
        at = torch.arange(16)[None] + 5 if position_ids is None else position_ids
        return forward(*args, position_ids=at, **kwargs)

    model.model.forward = from_five


def no_attention(model):
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


def known_attention_only(model):
    """As where a layer takes another way when it does not know the name of the attention."""
    attention, forward = model.model.layers[1].self_attn, model.model.layers[1].self_attn.forward

    def known_only(hidden_states, **passed):
        known = attention.config._attn_implementation == "sdpa"
        return forward(hidden_states, **passed) if known else (hidden_states, 0)

    attention.forward = known_only


def fails(model):
    model.model.norm.forward = lambda x: x["no such key"]


def broken(value):
    return lambda model: model.model.norm.weight.data[:1].fill_(value)


def one_row(model):
    dtype = model.lm_head.weight.dtype
    model.lm_head = nn.Sequential(nn.Flatten(1), nn.Linear(16 * 32, 2, dtype=dtype))


EMBEDDINGS, K = "model.embed_tokens", "model.layers.0.self_attn.k_proj"
EMBEDDINGS_MIX, K_MIXES = ["the input embeddings of LlamaForCausalLM mix tokens"], [f"{K} (", "without AttentionInterf"]
REFUSED = {  # what is done to a Llama, and what is said of it
    "embeddings": (mixed(EMBEDDINGS, later), EMBEDDINGS_MIX),
    "embeddings of a batch": (mixed(EMBEDDINGS, of_the_batch), EMBEDDINGS_MIX),
    "k, distant": (mixed(K, from_before(8)), K_MIXES),
    "k of a batch": (mixed(K, of_the_batch), K_MIXES),
    "a norm over tokens": (mixed("model.norm", mean_of_all), ["model.norm (LlamaRMSNorm) of LlamaForCausalLM mixes"]),
    "a little": (mixed("model.norm", from_before(1, 1e-2)), ["model.norm (LlamaRMSNorm)"]),
    "between parts": (between_parts, ["model.layers.1.self_attn (LlamaAttention)"]),
    "positions from 5": (positions_from_5, ["neither from 0 nor from pad_token_id + 1 = 1"]),
    "no attention": (no_attention, ["LlamaForCausalLM does not ask AttentionInterface"]),
    "known attention only": (known_attention_only, ["2 time(s) for its own attention, and 1 time(s) for another"]),
    "an error": (fails, ["LlamaForCausalLM raises IndexError in test_hugging_face_proof.py, line", "token ids"]),
    "NaN": (broken(torch.nan), ["LlamaForCausalLM returns NaN or infinity"]),
    "infinity": (broken(torch.inf), ["LlamaForCausalLM returns NaN or infinity"]),
    "one row": (one_row, ["LlamaForCausalLM returns (1, 2) for (1, 16) tokens", "a row for each token"]),
}


class Hidden(nn.Module):
    """Mixes tokens behind a weight that is 0 until it is trained: a gate, a convolution, the rise of an adapter."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        mixed = x.cumsum(dim=1) * self.weight if self.weight.dim() < 2 else from_before(1)(x) @ self.weight
        return x + mixed


@pytest.mark.parametrize("shape", [(), (32,), (32, 32)])
@pytest.mark.parametrize("seen", [0, 1])
def test_a_part_that_is_zero_when_it_is_asked_is_named(shape, seen):
    model, weight = llama(), -torch.zeros(shape, dtype=torch.float64)
    weight.view(-1)[:seen] = 0.1  # or all but one of its numbers
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, Hidden(weight.clone()))
    with pytest.raises(ValueError, match=re.escape("model.layers.0.mlp.1 (Hidden)")):
        proved(model)
    kept = model.model.layers[0].mlp[1].weight
    assert torch.equal(kept, weight)
    assert torch.equal(kept.signbit(), weight.signbit())


def test_random_numbers_are_no_mixture_and_are_given_back():
    """Dropout is left out of the values that are compared; a model that draws others is not compared in training."""
    model = model_of("GPT2", dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.5))
    mlp, before = model.transformer.h[0].mlp, torch.get_rng_state()
    wrap(mlp, lambda x: x * (1 + torch.rand(x.shape[:2])[..., None]) if mlp.training else x)
    assert proved(model)[:2] == (2, 0)
    assert torch.equal(torch.get_rng_state(), before)


class BatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


# Without a gradient between tokens ------------------------------------------------------------------------------------


def of_mlp(change):
    return lambda model: wrap(model.model.layers[0].mlp, change)


def choose(x):
    """The token with the largest first number is scaled, as by an expert's choice."""
    return x * (1 + (x[:, :, :1] == x[:, :, :1].amax(dim=1, keepdim=True)))


def only(training, model):
    mlp = model.model.layers[0].mlp
    wrap(mlp, lambda x: x / x.detach().abs().amax() if mlp.training == training else x)


def of_full_experts(x):
    """Two experts take 20 tokens each. The others get nothing."""
    expert = F.one_hot((x[:, :, 0] > x[:, :, 0].median()).long(), 2)  # (B, S, 2)
    return x * ((expert.cumsum(dim=1) * expert).sum(dim=2, keepdim=True) <= 20)


def embedded(factor):
    """The embeddings are multiplied by a factor of the token ids and the positions."""

    def before(part, args, kwargs):
        rows = part.embed_tokens(kwargs["input_ids"]) * factor(kwargs["input_ids"], kwargs["position_ids"])
        return args, {**kwargs, "input_ids": None, "inputs_embeds": rows}

    return lambda model: model.model.register_forward_pre_hook(before, with_kwargs=True)


def texts_before(ids, at):
    """Texts are numbered by the token with which they end."""
    return 1 + (ids == 2).cumsum(dim=1)[:, :, None]


def twice_where_positions_fall(ids, at):
    """Only the last quarter of the proof has falling positions, as a rank of a layout of a user's own may."""
    return 2 if at is not None and at[0, 0] > at[0, -1] else 1


def positions_of_the_shard(model):
    rotary = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: rotary(x, torch.arange(x.shape[1])[None])


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}  # nothing shows the longest position; the ring does
OTHER_VALUES = ["computes other values for tokens in a shard"]
REFUSED |= {
    "a choice": (of_mlp(choose), OTHER_VALUES),
    **{f"in training: {it}": (partial(only, it), OTHER_VALUES) for it in (True, False)},
    "16 tokens behind": (of_mlp(from_before(16)), OTHER_VALUES),
    "full experts": (of_mlp(of_full_experts), OTHER_VALUES),
    "numbered texts": (embedded(texts_before), OTHER_VALUES),
    "texts with two ends": (embedded(texts_before), OTHER_VALUES),
    "the order of a shard": (embedded(twice_where_positions_fall), OTHER_VALUES),
    "shards in the middle": (embedded(lambda ids, at: 1 + (at is not None and 0 < at[0, 0] < at[0, -1])), OTHER_VALUES),
    "positions of the shard": (positions_of_the_shard, OTHER_VALUES),
    "the longest position": (lambda model: None, OTHER_VALUES),
}
OPTIONS = {"the longest position": {"rope_parameters": LONGROPE}, "numbered texts": {"eos_token_id": 2}}
OPTIONS["texts with two ends"] = {"eos_token_id": [3, 2]}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proved_is_named(name):
    change, words = REFUSED[name]
    dtype = torch.bfloat16 if name in ("embeddings of a batch", "k, distant", "a little") else torch.float64
    model = llama(dtype, **OPTIONS.get(name, {}))
    change(model)
    with pytest.raises(ValueError, match=all_of(words)):
        proved(model)


# The attention ------------------------------------------------------------------------------------------------------


DISTANCE = torch.arange(16)[:, None] - torch.arange(16)
ATTENTIONS = {  # k, v, the mask and the scale of an attention that does more than its layer says
    "twice the scale": lambda k, v, mask, scale: (k, v, mask, 2 * scale),
    "a bias": lambda k, v, mask, scale: (k, v, mask - 0.1 * DISTANCE.to(mask), scale),
    "no mask": lambda k, v, mask, scale: (k, v, None, scale),
    "other heads": lambda k, v, mask, scale: (k.flip(1), v.flip(1), mask, scale),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_that_does_more_than_its_layer_says_is_found(name):
    """Scores are all near 0 here, as after an initialisation."""

    def own(module, q, k, v, mask, scaling=None, **kwargs):
        k, v, mask, scaling = ATTENTIONS[name](k, v, mask, scaling)
        return modeling_llama.eager_attention_forward(module, q, k, v, mask, scaling=scaling, **kwargs)

    model = llama(torch.float32)
    for part, weight in model.named_parameters():
        if "q_proj" in part or "k_proj" in part:
            weight.data.mul_(1e-3)
    transformers.AttentionInterface.register("own", own)
    transformers.AttentionMaskInterface.register("own", transformers.masking_utils.eager_mask)
    model.set_attn_implementation("own")
    with pytest.raises(ValueError, match="computes another attention than its layers tell AttentionInterface"):
        proved(model)
    assert model.config._attn_implementation == "own"


def test_experts_that_take_no_float64_are_named():
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    with pytest.raises(
        ValueError, match=r"MixtralForCausalLM raises .* \(for float64, experts_implementation='eager'\)"
    ):
        proved(transformers.MixtralForCausalLM(config).double())


# The masks that layers ask for ----------------------------------------------------------------------------------------

CAUSAL = masking_utils.causal_mask_function
WINDOW = masking_utils.sliding_window_causal_mask_function(3)
CHUNKS = masking_utils.chunked_causal_mask_function(3, torch.zeros(1))


def causal_mask_function(batch_idx, head_idx, q_idx, kv_idx):
    """Its name is known, its rule is not."""
    return kv_idx < q_idx


def test_the_rules_that_a_ring_knows():
    """The pairs that each shows: below."""
    assert asked_mask(mask_function=WINDOW, local_size=3, attention_mask=torch.ones(2, 8)) == 3
    assert asked_mask(mask_function=CAUSAL, attention_mask=torch.ones(2, 8).tril(5)) == "a mask of padding"
    assert asked_mask(mask_function=CHUNKS, local_size=3) == ChunkedAttention(3)
    assert asked_mask(mask_function=WINDOW, local_size=3)[:, :, slice(-0, None), :] == 3  # all rows of it
    with pytest.raises(TypeError, match="no rows"):
        asked_mask(mask_function=WINDOW, local_size=3)[:, :, -1:, :]


@pytest.mark.parametrize("rule", [CAUSAL, WINDOW, CHUNKS, masking_utils.bidirectional_mask_function])
def test_a_rule_shows_the_pairs_that_the_ring_computes(rule):
    """8 tokens; the CHUNKS of 3 count their padding in a tensor of whole numbers."""
    at, counted = torch.arange(8), masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64))
    function, whole = counted if rule is CHUNKS else rule, {"local_size": 3, "allow_is_causal_skip": False}
    shown = masking_utils.sdpa_mask(1, 8, 8, mask_function=function, **whole)[0, 0]
    asked = asked_mask(mask_function=rule, local_size=3)
    documents = asked.documents((8,)) if isinstance(asked, ChunkedAttention) else None
    window = int(asked) if isinstance(asked, int) else None
    assert torch.equal(shown, dense(Mask(not isinstance(asked, BothWays), documents, window), at, at))


PACKED = masking_utils.packed_sequence_mask_function(torch.zeros(1, 8))
PREFIX = masking_utils.or_masks(CAUSAL, lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx < 2)
OTHER_RULES = {
    "and_masks(chunked_overlay(3, a tensor), causal_mask_function)": CHUNKS,  # with another local_size
    "and_masks(sliding_window_overlay(3), causal_mask_function)": WINDOW,  # with another local_size
    "and_masks(sliding_window_bidirectional_overlay(3), bidirectional_mask_function)": (
        masking_utils.sliding_window_bidirectional_mask_function(3)
    ),
    "and_masks(packed_sequence_mask_function(a tensor), causal_mask_function)": masking_utils.and_masks(PACKED, CAUSAL),
    f"or_masks(causal_mask_function, {__name__}.<lambda>)": PREFIX,
    f"{__name__}.causal_mask_function": causal_mask_function,
    "None": None,
}


@pytest.mark.parametrize("text", OTHER_RULES)
@pytest.mark.parametrize("local_size", [None, 4])
def test_other_rules_are_told_in_words(text, local_size):
    rule = OTHER_RULES[text]
    assert rule_in_words(rule) == asked_mask(mask_function=rule, local_size=local_size) == text


def test_the_window_of_a_layer_is_that_of_its_mask():
    assert window_of("Layer", None, None) is None
    assert window_of("Layer", 4, 4) == 4
    own = asked_mask(mask_function=WINDOW, local_size=3)  # of a layer that passes no window itself
    assert type(window_of("Layer", own, own)) is int
    assert window_of("Layer", ChunkedAttention(4), None) is window_of("Layer", BothWays(), None) is None
    for mask, said, words in (
        (None, 4, "plain causal"),
        (ChunkedAttention(4), 4, re.escape("ChunkedAttention(size=4)")),
        (4, None, "a window of 4"),
        (4, 5, "a window of 4"),
    ):
        with pytest.raises(ValueError, match=f"Layer passes sliding_window={said}, and its mask is {words}; expected"):
            window_of("Layer", mask, said)
    for mask, words in (("or_masks(a, b)", "or_masks"), (torch.ones(1, 1, 2, 2), "a tensor")):
        with pytest.raises(ValueError, match=f"attention_mask is {words}"):
            window_of("Layer", mask, None)


def test_what_is_nothing_may_be_passed_and_a_tensor_of_zeros_is_something():
    refuse({"a": None, "b": False, "c": 0, "d": 0.0, "known": 5}, {"known"})
    for x, words in ((0.5, "0.5"), ("", ""), (torch.zeros(1), "a tensor"), ([], "a list")):
        with pytest.raises(ValueError, match=f"^x is {words}; expected none"):
            refuse({"x": x}, {"known"})


@pytest.mark.parametrize(("row", "same"), [([1, 1, 2, 2], False), ([1, 2, 3, 3], True), ([1, 2, 3, 4], True)])
def test_labels_that_are_their_own_tokens_are_seen_in_a_row_of_three(row, same):
    """Two runs of one token, in two chunks of a rank, have these labels when they are shifted."""
    tokens = torch.tensor([row])
    for labels, found in ((tokens, same), (tokens.roll(1), False), (torch.full_like(tokens, -100), False)):
        assert themselves(tokens, labels) is found
    assert themselves(tokens, tokens.masked_fill(tokens == 1, -100)) is same


# What stays as it was -----------------------------------------------------------------------------------------------


def state_of(model):
    modes = [(part.training, getattr(part, "gradient_checkpointing", None)) for part in model.modules()]
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
    wanted = [(weight.requires_grad, weight.grad) for weight in model.parameters()]
    return modes, hooks, wanted, model.config._attn_implementation, torch.get_rng_state().tolist()


def interrupt_in_training(part, args, result):
    """`part` is in training in the proof only."""
    if part.training:
        raise KeyboardInterrupt


@pytest.mark.parametrize("mistake", [None, "mixes", "Ctrl-C"])
def test_the_model_stays_as_it_was(mistake):
    """A right one; one that mixes tokens in training only, which is named; and after Ctrl-C in mid proof."""
    model = llama()
    model.gradient_checkpointing_enable()
    if mistake == "Ctrl-C":
        model.model.layers[1].mlp.register_forward_hook(interrupt_in_training)
    if mistake == "mixes":
        model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, BatchNorm(32).double())
    model.model.layers[1].eval()
    model.requires_grad_(mistake is not None)
    before, register = state_of(model), transformers.AttentionInterface.get_interface
    weights = copy.deepcopy(model.state_dict())
    named = pytest.raises(ValueError, match=re.escape("model.layers.0.mlp.1 (BatchNorm)"))
    with {None: nullcontext(), "mixes": named, "Ctrl-C": pytest.raises(KeyboardInterrupt)}[mistake]:
        proved(model)
    assert state_of(model) == before
    assert transformers.AttentionInterface.get_interface is register
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())


# Mistakes in the proof ----------------------------------------------------------------------------------------------


def test_what_stands_in_for_a_layer_sees_its_own_token_only_and_all_of_it():
    """Each number of q, k and v, and of a linear layer's decay and beta; and nothing of another token."""
    q, k, v = (torch.randn(1, heads, 4, 6, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    of_head, of_number = (torch.randn(1, 2, 4, *more, dtype=torch.float64, requires_grad=True) for more in ((), (6,)))
    linear = hugging_face_states.attention_cut
    for cut, inputs in (
        (hugging_face_proof.own_token, (q, k, v)),
        (linear, (k, k.detach().requires_grad_(), v, of_head, of_head.detach().requires_grad_())),
        (linear, (k, k.detach().requires_grad_(), v, of_number, of_head)),
    ):
        out = cut(*inputs)[0] if cut is linear else cut(*inputs)
        for token in range(4):
            for x in torch.autograd.grad(out[:, :, token].sum(), inputs, retain_graph=True):
                assert (x[:, :, token] != 0).all()
                assert x[:, :, torch.arange(4) != token].abs().max() == 0


def test_linear_layers_of_a_bfloat16_model_forget_in_float32():
    """transformers passes float32 decays to them."""
    q, k, v = torch.randn(3, 1, 4, 2, 6).bfloat16()
    beta, g, rate, given = torch.rand(1, 4, 2).bfloat16(), -torch.rand(1, 4, 2), -torch.rand(2), []

    def linear_of(documents):
        return Linear(None, lambda q, k, v, *rest, **_: (given.append(rest) or v, None))

    out, _ = hugging_face_states.rule(linear_of, q, k, v, g=g, beta=beta)
    of_scan = hugging_face_states.scan(linear_of, v, beta, rate, k, q)
    assert (out.dtype, of_scan.dtype) == (torch.bfloat16, torch.float32)
    for (decay, _), right in zip(given, (g, rate * beta.float()), strict=True):
        torch.testing.assert_close(decay, right.transpose(1, 2))


# The seam: what is swapped inside transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_attention_and_methods_are_ours_while_they_are_open(fails):
    model, other, own = model_of("Llama", {}), model_of("Llama", {}), transformers.LlamaForCausalLM
    calls, theirs = [], transformers.AttentionInterface.get_interface
    watched = seam.watched(lambda attention: calls.append(attention) or attention)
    end = pytest.raises(KeyError) if fails else nullcontext()
    with end, watched, seam.other_methods(model, can_generate=lambda model: "ours") as kind:
        assert kind is own
        assert isinstance(model, own)
        assert type(model).can_generate(model) == "ours"
        assert other.can_generate() is True
        other(torch.arange(1, 9)[None])
        if fails:
            raise KeyError
    assert type(model) is own
    assert len(calls) == 2
    assert transformers.AttentionInterface.get_interface is theirs
