"""An unchanged Hugging Face model in the ring: its layers ask transformers for an attention, and get the ring.

    model       use_ring proves that only attention mixes its tokens       or refuses, with the reason
    attention   a layer passes q, k, v and all that it knows of them      the ring, or a refusal by name
    mask        a model asks for the mask that its layers need            the window of the ring, or a refusal
    inputs      a hook before the model sees what the caller passes       positions of this shard, or a refusal
    calls       a hook after the model counts the calls of the ring       as many as proved, or a refusal

Rings in use got these wrong without an error: layers did not call the ring, windows and documents were dropped,
positions were counted inside a shard. Here the ring does it right, or raises ValueError. EVERY_MODEL.md lists what
becomes of every causal language model of transformers.

Shapes: a rank has input_ids (B, C), C = S/P, at position_ids (1, C). In a layer q is (B, H, C, D), k and v
(B, G, C, D), and the result (B, C, H, D).

`python examples/compare.py` trains in it beside one process, with loops to copy: a first reader may skip this file.
In a mesh of dp x cp ranks each ring has its own sequences: give mesh["cp"] to use_ring and shard_batch, and sum the
labels of all rings before the call: dist.all_reduce(shard["num_items_in_batch"], group=mesh["dp"].get_group()).

Before: hugging_face/forward.py, what is checked in each pass. After: hugging_face/trainer.py, Trainer in the ring.
Source: transformers 5.23, AttentionInterface and AttentionMaskInterface; Liu et al. 2024, algorithm 1.
"""

import copy
from typing import Any

from ringlab.support.agreement import members
from ringlab.support.extras import extra

with extra("hf", __name__):
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from ringlab.hugging_face.batch import AnyLayout, MeshOrGroup, placed
from ringlab.hugging_face.forward import ModelInRing
from ringlab.hugging_face.masks import LayerAttention, asked_mask
from ringlab.hugging_face.states import spread
from ringlab.models import expect

WEIGHTS_ONLY = "an adapter of weights alone, such as LoRA"
BY_LENGTH = ("dynamic", "longrope")  # rotary frequencies that depend on the longest position


def use_ring(model: PreTrainedModel, mesh_or_group: MeshOrGroup = None, layout: AnyLayout = "zigzag") -> None:
    """Make every layer of a language model call the ring of `mesh_or_group` (None: the whole job).

    `model` has its weights, and is not in fully_shard yet; a mesh has one dimension. A ContextParallel stands for both
    arguments. Each layer keeps its window, chunks, sinks, softcap and scale. A model with a ring gets the new one. A
    copy of the model is in the same ring. Modules that are added later are proved in the next forward pass.
    Raises ValueError, with the reason, for a model that cannot be proved to be right in shards (`prove`), and for one
    that computes more from its tokens in training than in the proof; and where the ranks have different weights. What a
    call passes and a ring cannot do is refused with ValueError when the model is called, on every rank.
    """
    outer, model = model, unwrapped(model)
    group, layout = placed(mesh_or_group, layout)
    stop_ring(outer)
    ring = ModelInRing(layout, group, members(group)[1], own=model.config._attn_implementation)
    own_config(model)
    ring.name = registered(ring)
    for part in model.modules():
        if any(kind in str(getattr(part, "rope_type", None)) for kind in BY_LENGTH):
            part.register_forward_pre_hook(ring.stretch, with_kwargs=True)
            part.register_forward_hook(ring.shrink)
    model.ring = ring, ring.own, model.loss_function
    try:
        ring.prove(model)
    except ValueError:
        stop_ring(model)
        raise
    model.loss_function = ring.loss
    for part in {outer, model, model.base_model}:
        part.register_forward_pre_hook(ring.before, with_kwargs=True)
        part.register_forward_hook(ring.after, with_kwargs=True)
    model.base_model.register_forward_pre_hook(ring.enter, with_kwargs=True)


def unwrapped(model: Any) -> PreTrainedModel:
    """The model of transformers in `model`, which may have adapters of PEFT. Raises ValueError where there is none."""
    for adapter in getattr(model, "peft_config", {}).values() if hasattr(model, "get_base_model") else ():
        kind, forward = str(getattr(adapter.peft_type, "value", adapter.peft_type)), type(model.base_model).forward
        expect(not adapter.is_prompt_learning, f"{kind} puts virtual tokens before each text", WEIGHTS_ONLY)
        looks = getattr(adapter, "alora_invocation_tokens", None)
        expect(not looks, f"{kind} looks for its invocation tokens, in a shard", WEIGHTS_ONLY)
        plain = forward.__qualname__ == "BaseTuner.forward"
        expect(plain, f"{kind} does more than its layers, such as adding to the loss of each rank", WEIGHTS_ONLY)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = f"model is a {type(model).__name__}"
    expect(isinstance(model, PreTrainedModel), kind, "a model of transformers, before DDP or torch.compile wraps it")
    return model


def registered(attention: LayerAttention) -> str:
    """The name by which layers find an attention, and models their masks: else transformers would drop every mask."""
    name = f"ring_{id(attention)}"
    AttentionInterface.register(name, attention.attend)
    AttentionMaskInterface.register(name, asked_mask)
    return name


def own_config(model: PreTrainedModel) -> None:
    """Give the model a copy of its config. Another model with the same config would call the ring too."""
    memo: dict[int, Any] = {}
    for part in model.modules():
        for name, x in list(vars(part).items()):
            if isinstance(x, PreTrainedConfig):
                setattr(part, name, copy.deepcopy(x, memo))


def stop_ring(model: PreTrainedModel) -> None:
    """Give the model its own attention and loss again, as before `use_ring`. Without a ring nothing changes."""
    outer, model = model, model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(model, "ring"):
        return
    ring, implementation, model.loss_function = model.ring
    del model.ring
    model.set_attn_implementation(implementation)
    spread(model, None)
    for part in outer.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is ring]:
                del hooks[key]
