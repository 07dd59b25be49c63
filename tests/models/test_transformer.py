"""The transformer: the same logits as LLaMA's, the same loss and gradients on any ring, memory and hops as it says."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringlab.models.transformer import (
    IGNORED,
    Config,
    Layer,
    Linear,
    Transformer,
    ring_of_states,
    shard_text,
    summed_loss,
)
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.ring.layouts import LAYOUTS
from ringlab.states.linear_attention import recurrence
from ringlab.states.short_convolution import short_convolution
from tests.attention import SEED
from tests.concepts import MISSING

SMALL = Config(vocab=31, layers=2, hidden=24, heads=6, kv_heads=2, feedforward=40, piece=5)
TIED = replace(SMALL, layers=1, tied=True)
CHECKPOINTED = replace(SMALL, checkpointing=True)
HYBRID = replace(SMALL, layers=2, linear=1)
S = 24  # a multiple of 2P for P = 1, 2, 3, 4
LABELLED = 17  # of the labels of the first sequence; the ranks have different numbers of them


def text():
    return torch.randint(SMALL.vocab, (2, S + 1), generator=torch.Generator().manual_seed(1 + SEED))


BY_TOKEN = Linear(short_convolution, recurrence)


def model_of(config, dtype=torch.float64, attention=F.scaled_dot_product_attention, linear=BY_TOKEN):
    torch.manual_seed(SEED)
    model = Transformer(config, attention, linear)
    for weight in model.parameters():  # scores of size 1, so that positions matter
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
        else:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.to(dtype)


def hide_labels(labels, at):
    """Labels (2, C) of the tokens at positions `at`, without those at the end of the first sequence."""
    labels = labels.clone()
    labels[0, at >= LABELLED] = IGNORED
    return labels


def one_process(config, dtype=torch.float64):
    """The loss and every gradient, by torch's attention, and by states from token to token."""
    model, at = model_of(config, dtype), torch.arange(S)
    labels = hide_labels(text()[:, 1:], at)
    loss = summed_loss(model(text()[:, :-1], at), labels) / (labels != IGNORED).sum()
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def in_a_ring(context, config, layout, dtype=torch.float64):
    """The same from the ranks of a ring."""
    attention = partial(scaled_dot_product_attention, layout=layout)
    model = model_of(config, dtype, attention, ring_of_states(layout=layout))
    tokens, labels, at = shard_text(text(), layout, context.rank, context.world_size)
    labels = hide_labels(labels, at)
    count = (labels != IGNORED).sum()
    dist.all_reduce(count)
    loss = summed_loss(model(tokens, at), labels) / count
    loss.backward()
    results = [loss.detach(), *(weight.grad for weight in model.parameters())]
    for result in results:
        dist.all_reduce(result)
    return results


def errors(results, exact):
    """Of the loss and of each gradient, as a share of its norm."""
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]


CASES = (
    (TIED, "striped", torch.float64),
    (CHECKPOINTED, "zigzag", torch.float64),
    (CHECKPOINTED, "zigzag", torch.float32),
    (HYBRID, "zigzag", torch.float64),
    (replace(HYBRID, checkpointing=True), "contiguous", torch.float64),
)


def every_case(context):
    return [in_a_ring(context, *case) for case in CASES]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_loss_and_every_gradient_are_those_of_one_process(ranks, world_size):
    exact = {config: one_process(config) for config in (SMALL, TIED, HYBRID)}
    for results in ranks(world_size, every_case):
        for (config, layout, dtype), result in zip(CASES, results, strict=True):
            assert all(x.dtype == dtype for x in result)
            allowed = 1e-10 if dtype == torch.float64 else 1e-5
            assert max(errors(result, exact[replace(config, checkpointing=False)])) <= allowed, (config, layout, dtype)


def test_a_new_model_by_hand():
    """Its weights have the spread 0.02. Heads of linear layers forget to 1/e after 79 tokens, ... after 1.4."""
    torch.manual_seed(SEED)
    model = Transformer(Config(layers=2, linear=1, hidden=128, feedforward=384))
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
        elif "norm" in name:
            assert (weight == 1).all(), name
    decay = -model.layers[0].log_rate.exp() * F.softplus(model.layers[0].bias)  # of a token, where the gate says 0
    assert (-1 / decay).tolist() == pytest.approx([78.77, 20.76, 5.473, 1.443], rel=1e-3)
    x = torch.full((1, 2, 128), 1e-2)  # 0.01 / sqrt(0.0001 + 0.00001)
    for norm in (model.norm, model.layers[0].norm1, model.layers[1].norm2):
        assert norm(x).mean().item() == pytest.approx(0.9535, rel=1e-3)


@pytest.mark.skipif(find_spec("transformers") is None, reason=MISSING["transformers"])
def test_logits_and_loss_are_those_of_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": SMALL.vocab, "num_hidden_layers": SMALL.layers, "hidden_size": SMALL.hidden}
    sizes |= {"num_attention_heads": SMALL.heads, "num_key_value_heads": SMALL.kv_heads}
    sizes |= {"intermediate_size": SMALL.feedforward, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes))
    ours = model_of(SMALL, torch.float32)
    weights = {name: weight.clone() for name, weight in ours.state_dict().items()}
    for name in weights:
        if name.endswith(("wq.weight", "wk.weight")):  # they turn dimension i with i + D/2, we turn 2i with 2i + 1
            pairs = weights[name].unflatten(0, (-1, SMALL.hidden // SMALL.heads // 2, 2))  # (heads, D/2, 2, hidden)
            weights[name] = pairs.transpose(1, 2).flatten(0, 2)
    theirs.load_state_dict({_name_in_llama(name): weight for name, weight in weights.items()})
    at = torch.arange(S) + 7
    with torch.no_grad():
        logits = ours(text()[:, :-1], at)
        right = theirs(text()[:, :-1], position_ids=at[None], labels=text()[:, :-1])
    torch.testing.assert_close(logits, right.logits, rtol=1e-5, atol=1e-5)
    loss = summed_loss(logits[:, :-1], text()[:, 1:-1]) / text()[:, 1:-1].numel()
    torch.testing.assert_close(loss, right.loss, rtol=1e-5, atol=0)


def _name_in_llama(name):
    name = name.replace("embedding", "embed_tokens").replace("head.", "lm_head.")
    for ours, theirs in (("norm1", "input_layernorm"), ("norm2", "post_attention_layernorm")):
        name = name.replace(ours, theirs)
    for ours in "qkvo":
        name = name.replace(f"w{ours}.", f"self_attn.{ours}_proj.")
    for ours, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
        name = name.replace(f"{ours}.", f"mlp.{theirs}_proj.")
    return name if name.startswith("lm_head") else f"model.{name}"


@pytest.mark.skipif(find_spec("transformers") is None, reason=MISSING["transformers"])
def test_a_linear_layer_is_that_of_qwen():
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = replace(HYBRID, kv_heads=HYBRID.heads)  # theirs has as many heads of q as of k
    layer = model_of(config, torch.float32).layers[0]
    sizes = {f"linear_num_{of}_heads": config.heads for of in ("key", "value")}
    sizes |= {f"linear_{of}_head_dim": layer.D for of in ("key", "value")}
    theirs = Qwen3_5GatedDeltaNet(
        Qwen3_5TextConfig(hidden_size=config.hidden, linear_conv_kernel_dim=4, rms_norm_eps=1e-5, **sizes), layer_idx=0
    )
    ours = {name: weight.detach() for name, weight in layer.named_parameters()}
    beta, forget = ours["gates.weight"].chunk(2)
    weights = {"in_proj_qkv.weight": torch.cat([ours[f"w{x}.weight"] for x in "qkv"]), "conv1d.weight": ours["taps"]}
    weights |= {"in_proj_z.weight": ours["wz.weight"], "in_proj_b.weight": beta, "in_proj_a.weight": forget}
    weights |= {"out_proj.weight": ours["wo.weight"], "norm.weight": ours["norm3.weight"]}
    theirs.load_state_dict({**weights, "A_log": ours["log_rate"], "dt_bias": ours["bias"]})
    x = torch.randn(2, S, config.hidden, generator=torch.Generator().manual_seed(2 + SEED))
    with torch.no_grad():
        right = theirs(layer.norm1(x))
        torch.testing.assert_close(layer.attend(x, torch.arange(S)), right, rtol=1e-4, atol=1e-5)


def test_a_linear_layer_of_a_bfloat16_model_forgets_in_float32():
    """A state is kept for many tokens: 8 bits of a decay are too few."""
    given = []

    def rule(q, k, v, log_decay, beta):
        given.extend((log_decay, beta))
        return q, None

    layer = model_of(HYBRID, torch.bfloat16, linear=Linear(short_convolution, rule)).layers[0]
    x = torch.randn(2, S, HYBRID.hidden, generator=torch.Generator().manual_seed(3 + SEED)).bfloat16()
    layer.attend(x, torch.arange(S))
    beta, forget = layer.gates(layer.norm1(x)).mT.double().chunk(2, dim=1)
    right = -layer.log_rate.double().exp()[:, None] * F.softplus(forget + layer.bias.double()[:, None])
    for found, exact in zip(given, (right, beta.sigmoid()), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


def test_logits_after_one_token_of_each_text():
    model, tokens, at = model_of(SMALL), text()[:, :-1], torch.arange(S)
    model.head.bias = torch.nn.Parameter(torch.ones(SMALL.vocab, dtype=torch.float64))
    found = model(tokens, at, at == torch.tensor([[3], [S]]))  # of the second text it is on another rank
    torch.testing.assert_close(found[0], model(tokens, at)[0, 3])
    assert not found[1].any()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_feedforward_takes_a_piece_at_a_time(checkpointing):
    """So only a piece is as wide as its inside. The backward pass computes pieces again, the last one first."""
    seen, feed = [], Layer.feed

    def noted(layer, h):
        seen.append(h.shape[1])
        return feed(layer, h)

    with mock.patch.object(Layer, "feed", noted):
        one_process(replace(SMALL, layers=1, piece=10, checkpointing=checkpointing))
    assert seen == [10, 10, 4] + [4, 10, 10] * checkpointing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_has_the_label_after_it(layout):
    whole = torch.arange(S + 1)[None]  # the token is its own position
    for rank in range(3):
        tokens, labels, at = shard_text(whole, layout, rank, 3)
        assert torch.equal(tokens[0], at)
        assert torch.equal(labels[0], at + 1)
