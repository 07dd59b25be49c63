"""The transformer: the same logits as LLaMA's, the same loss and gradients on any ring, memory and hops as it says."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringlab.models.transformer import IGNORED, Config, Transformer, shard_text, summed_loss
from ringlab.training.flash_ring import scaled_dot_product_attention
from ringlab.training.layouts import LAYOUTS
from tests.attention import SEED
from tests.extras import MISSING

SMALL = Config(vocab=31, layers=2, hidden=24, heads=6, kv_heads=2, feedforward=40, piece=5)
TIED = replace(SMALL, layers=1, tied=True)
CHECKPOINTED = replace(SMALL, checkpointing=True)
S = 24  # a multiple of 2P for P = 1, 2, 3, 4
LABELLED = 17  # of the labels of the first sequence; the ranks have different numbers of them


def text():
    return torch.randint(SMALL.vocab, (2, S + 1), generator=torch.Generator().manual_seed(1 + SEED))


def model_of(config, dtype=torch.float64, attention=F.scaled_dot_product_attention):
    torch.manual_seed(SEED)
    model = Transformer(config, attention)
    for weight in model.parameters():  # scores of size 1, so that positions matter
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() == 2 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.to(dtype)


def hide_labels(labels, at):
    """Labels (2, C) of the tokens at positions `at`, without those at the end of the first sequence."""
    labels = labels.clone()
    labels[0, at >= LABELLED] = IGNORED
    return labels


def one_process(config, dtype=torch.float64):
    """The loss and every gradient, by torch's attention."""
    model, at = model_of(config, dtype), torch.arange(S)
    labels = hide_labels(text()[:, 1:], at)
    loss = summed_loss(model(text()[:, :-1], at), labels) / (labels != IGNORED).sum()
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def in_a_ring(context, config, layout, dtype=torch.float64, mistake=None):
    """The same from the ranks of a ring, or with one of the mistakes that were found in the wild."""
    attention = partial(scaled_dot_product_attention, layout=layout)
    model = model_of(config, dtype, F.scaled_dot_product_attention if mistake == "ring not called" else attention)
    tokens, labels, at = shard_text(text(), layout, context.rank, context.world_size)
    if mistake == "labels shifted on each rank":
        labels = tokens.roll(-1, dims=1)
    if mistake == "labels shifted on each rank, the last one ignored":
        labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    labels = hide_labels(labels, at)
    if mistake == "positions counted on each rank":
        at = torch.arange(len(at))
    if mistake == "positions of another layout":
        at = shard_text(text(), "striped", context.rank, context.world_size)[2]
    count = (labels != IGNORED).sum()
    if mistake == "mean of means":
        count = count * context.world_size
    else:
        dist.all_reduce(count)
    loss = summed_loss(model(tokens, at), labels) / count
    loss.backward()
    results = [loss.detach(), *(weight.grad for weight in model.parameters())]
    reduced = [loss.detach(), *(w.grad for _, w in model.named_parameters(remove_duplicate=mistake != "tied twice"))]
    for result in reduced:
        dist.all_reduce(result)
    return results


def errors(results, exact):
    """Of the loss and of each gradient, as a share of its norm."""
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]


CASES = (
    (SMALL, "contiguous", torch.float64),
    (SMALL, "zigzag", torch.float64),
    (TIED, "striped", torch.float64),
    (CHECKPOINTED, "zigzag", torch.float64),
    (CHECKPOINTED, "zigzag", torch.float32),
)


def every_case(context):
    return [in_a_ring(context, *case) for case in CASES]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_loss_and_every_gradient_are_those_of_one_process(ranks, world_size):
    exact = {config: one_process(config) for config in (SMALL, TIED, CHECKPOINTED)}
    for results in ranks(world_size, every_case):
        for (config, layout, dtype), result in zip(CASES, results, strict=True):
            assert all(x.dtype == dtype for x in result)
            allowed = 1e-10 if dtype == torch.float64 else 1e-5
            assert max(errors(result, exact[config])) <= allowed, (config, layout, dtype)


MISTAKES = (
    "ring not called",
    "labels shifted on each rank",
    "labels shifted on each rank, the last one ignored",
    "positions counted on each rank",
    "positions of another layout",
    "mean of means",
    "tied twice",
)


def every_mistake(context):
    return [in_a_ring(context, TIED, "zigzag", mistake=mistake) for mistake in MISTAKES]


def test_mistakes_of_the_wild_are_rejected(ranks):
    exact = one_process(TIED)
    for mistake, result in zip(MISTAKES, ranks(3, every_mistake)[0], strict=True):
        assert max(errors(result, exact)) > 1e-3, mistake


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


@pytest.mark.parametrize("piece", [1, 7, S, 10 * S])
def test_pieces_of_the_feedforward_change_nothing(piece):
    assert max(errors(one_process(replace(SMALL, piece=piece)), one_process(SMALL))) <= 1e-13


class Alive(TorchDispatchMode):
    """The bytes of all tensors made inside that are still alive: now, and at the worst moment."""

    def __init__(self, model):
        super().__init__()
        self.before = {x.untyped_storage().data_ptr() for w in model.parameters() for x in (w, w.grad)}
        self.sizes, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.before:
                self.sizes[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        self.most = max(self.most, self.now())
        return out

    def now(self):
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        return sum(self.sizes.values())


C, HIDDEN, WIDE = 64, 16, 512  # tokens, and the widths: most of a layer is the inside of its feedforward


def bytes_of_a_step(layers, piece, checkpointing):
    """(kept for the backward pass, at most alive in it) of a model of float32."""
    sizes = {"hidden": HIDDEN, "heads": 2, "kv_heads": 1, "feedforward": WIDE}
    model = Transformer(Config(vocab=8, layers=layers, piece=piece, checkpointing=checkpointing, **sizes))
    tokens = torch.zeros(1, C, dtype=torch.int64)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    with Alive(model) as alive:
        loss = summed_loss(model(tokens, torch.arange(C)), tokens)
        kept = alive.now()
        loss.backward()
    return kept, alive.most


def test_a_checkpointed_layer_keeps_two_tensors():
    kept = {flag: [bytes_of_a_step(n, C, flag)[0] for n in (1, 3)] for flag in (False, True)}
    a_layer = {flag: (three - one) // 2 for flag, (one, three) in kept.items()}
    assert a_layer[True] == 2 * C * HIDDEN * 4  # x and h
    assert a_layer[False] > 3 * C * WIDE * 4  # the inside of the feedforward: w1, silu, w3 and their product


def test_checkpointed_pieces_bound_the_wide_layer():
    whole, pieces = (bytes_of_a_step(2, piece, True)[1] for piece in (C, C // 4))
    inside = 3 * C * WIDE * 4  # at least these are alive at once when a whole chunk goes through the feedforward
    assert whole > inside
    assert pieces < whole - inside / 2
    assert bytes_of_a_step(2, C // 4, False)[1] > inside  # without checkpointing all pieces are kept


def hops(context, checkpointing):
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=dist.batch_isend_irecv) as hop:
        in_a_ring(context, CHECKPOINTED if checkpointing else SMALL, "zigzag")
    return hop.call_count


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_checkpointing_turns_the_ring_once_more(ranks, world_size):
    P, layers = world_size, SMALL.layers
    assert set(ranks(P, hops, False)) == {layers * 3 * (P - 1)}  # K and V twice, and their gradients
    assert set(ranks(P, hops, True)) == {layers * 4 * (P - 1)}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden": 20, "heads": 4}, "hidden is 20, heads 4; expected hidden to be a multiple of 2 x heads, 8"),
        ({"heads": 4, "kv_heads": 3}, "heads is 4, kv_heads 3; expected kv_heads to divide heads"),
    ],
)
def test_sizes_that_do_not_fit(sizes, said):
    with pytest.raises(ValueError, match=said):
        Config(**sizes)


def test_text_that_the_layout_cannot_share_out():
    with pytest.raises(ValueError, match="24 tokens in the zigzag layout on 5 ranks; expected a multiple of 10"):
        shard_text(text(), "zigzag", 0, 5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_has_the_label_after_it(layout):
    whole = torch.arange(S + 1)[None]  # the token is its own position
    for rank in range(3):
        tokens, labels, at = shard_text(whole, layout, rank, 3)
        assert torch.equal(tokens[0], at)
        assert torch.equal(labels[0], at + 1)
