"""What is swapped inside transformers: ours while it is open, theirs before and after, and theirs in other models."""

import ast
import copy
from contextlib import nullcontext

import pytest
import torch

from tests.commands import ROOT
from tests.concepts import MISSING

transformers = pytest.importorskip("transformers", reason=MISSING["transformers"])

from ringlab.hugging_face import seam  # noqa: E402
from tests.hugging_face.hugging_face_models import model_of  # noqa: E402

IDS = torch.arange(1, 9)[None]


def rows(model):
    with torch.no_grad():
        return model(IDS).logits


def test_layers_find_an_attention_and_models_its_mask():
    seen = []

    def attend(module, q, k, v, mask, **_):
        seen.append(mask)
        return v.repeat_interleave(2, dim=1).transpose(1, 2), None

    model = model_of("Llama", {})
    model.set_attn_implementation(seam.registered(attend, lambda **_: "our mask"))
    own = rows(model_of("Llama", {}))
    assert not torch.equal(rows(model), own)
    assert seen == ["our mask"] * 2
    assert torch.equal(rows(model_of("Llama", {})), own)  # another model keeps its own


@pytest.mark.parametrize("fails", [False, True])
def test_every_attention_is_watched_while_it_is_open(fails):
    calls, own = [], transformers.AttentionInterface.get_interface
    end = pytest.raises(KeyError) if fails else nullcontext()
    with end, seam.watched(lambda attention: calls.append(attention) or attention):
        rows(model_of("Llama", {}))
        if fails:
            raise KeyError
    assert len(calls) == 2
    assert transformers.AttentionInterface.get_interface is own


def test_a_model_gets_a_config_of_its_own():
    model = model_of("Llama", {})
    other = type(model)(model.config)
    seam.own_config(model)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert other.config._attn_implementation == "sdpa"
    assert model.model.layers[1].self_attn.config is model.config is model.model.config


class Thing:
    def name(self):
        return "of the class"


def test_a_name_is_given_and_taken():
    one, other = Thing(), Thing()
    seam.give(one, name=lambda: "ours")
    assert (one.name(), other.name()) == ("ours", "of the class")
    seam.take(one, "name", "no such name")
    assert one.name() == "of the class"


def test_names_in_a_forward_pass_mean_ours_in_these_layers_only():
    options = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
    model, other = model_of("Lfm2", options), model_of("Lfm2", options)
    own, layers = rows(model), seam.linear_layers(model)
    assert layers == [model.model.layers[0].conv]
    seam.spread(layers, {seam.CONVOLUTION: lambda x, weight, *_, **__: x})
    assert not torch.equal(rows(model), own)
    assert torch.equal(rows(other), own)
    twin = copy.deepcopy(model)
    twin.model.layers[0].conv.out_proj.weight.data.zero_()
    assert not torch.equal(rows(twin), rows(model))  # it calls its own weights
    seam.spread(layers, None)
    assert torch.equal(rows(model), own)


@pytest.mark.parametrize("fails", [False, True])
def test_methods_of_a_class_are_ours_while_it_is_open(fails):
    model, other, own = model_of("Llama", {}), model_of("Llama", {}), transformers.LlamaForCausalLM
    end = pytest.raises(KeyError) if fails else nullcontext()
    with end, seam.other_methods(model, can_generate=lambda model: "ours") as kind:
        assert kind is own
        assert isinstance(model, own)
        assert type(model).can_generate(model) == "ours"
        assert other.can_generate() is True
        if fails:
            raise KeyError
    assert type(model) is own


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_as_it_was(fails):
    model = model_of("Llama", {})
    model.model.layers[1].eval()
    model.model.layers[0].gradient_checkpointing = True
    model.register_buffer("count", torch.ones(2))
    with pytest.raises(KeyError) if fails else nullcontext(), seam.as_it_was(model) as checkpointed:
        assert checkpointed == [model.model.layers[0]]
        model.set_attn_implementation("eager")
        model.eval()
        model.model.layers[0].gradient_checkpointing = False
        model.count += 1
        if fails:
            raise KeyError
    assert [layer.training for layer in model.model.layers] == [True, False]
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False]
    assert model.count.tolist() == [1, 1]
    assert model.config._attn_implementation == "sdpa"


REACHES = {"__class__", "__dict__", "__globals__", "__code__", "get_interface", "register", "setattr", "globals"}
THEIRS = {"model", "part", "layer", "module", "accelerator", "config"}  # what we call a thing of transformers
KNOWN = {"ring", "loss_function", "training", "gradient_checkpointing"}  # attributes that may be set


def reaching(tree):
    """Where code swaps what is not its own: a name of REACHES, or an attribute of a thing of THEIRS."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in REACHES:
            yield node.lineno, name
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in (x for each in targets for x in ast.walk(each) if isinstance(x, ast.Attribute)):
            owner = target.value
            owner = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if owner in THEIRS and target.attr not in KNOWN:
                yield node.lineno, f"{owner}.{target.attr}"


def test_only_the_seam_reaches_into_transformers():
    folder = ROOT / "ringlab/hugging_face"
    found = {path.name: list(reaching(ast.parse(path.read_text()))) for path in folder.glob("*.py")}
    assert len(found.pop("seam.py")) >= 6
    assert {name: places for name, places in found.items() if places} == {}
