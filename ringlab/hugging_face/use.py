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

Before: forward.py, what is checked in each pass. After: trainer.py, Trainer in the ring.
Source: transformers 5.23, AttentionInterface and AttentionMaskInterface; Liu et al. 2024, algorithm 1.
"""

from typing import Any

from ringlab.ring.schedule import Ring
from ringlab.support.extras import extra

with extra("hf", __name__):
    from transformers import PreTrainedModel

from ringlab.hugging_face.forward import ModelInRing
from ringlab.hugging_face.seam import indexers, own_config, registered, stop_ring
from ringlab.models.mesh import AnyLayout, MeshOrGroup, Way, placed
from ringlab.support.expect import expect

WEIGHTS_ONLY = "an adapter of weights alone, such as LoRA"


def use_ring(
    model: PreTrainedModel, mesh_or_group: MeshOrGroup = None, layout: AnyLayout = "zigzag", way: Way = Ring
) -> None:
    """Make every layer of a language model call the ring of `mesh_or_group` (None: the whole job).

    `model` has its weights, and is not in fully_shard yet. Each layer keeps its window, chunks, sinks, softcap and
    scale. `way` is another way to share the sequence, a class of ringlab/ways: AllGather or AllToAll; or DoubleRing and
    Hybrid with a mesh of two dimensions. Other ways take a mesh of one. With LatentRing, of
    ringlab/ring/latent_ring.py, layers of latent attention send latents: latents.py. A ContextParallel stands for the
    three arguments. States of linear layers travel in a ring, whatever the way. A model with a ring gets the new one. A
    copy of the model is in the same ring. What is changed later in the base model is proved in the next pass: modules
    that are new or in another place, the forward of a class, and one that a module is given. Not proved are hooks that
    are added later, new values of attributes, methods but forward, and a new head: they must be functions of each token
    alone. Where the model is its own base model, a forward that it is given is not proved either.
    Raises ValueError, with the reason, for a model that cannot be proved to be right in shards (`prove`), and for one
    that computes more from its tokens in training than in the proof; and where the ranks have different weights. What a
    call passes and a ring cannot do is refused with ValueError when the model is called, on every rank.
    """
    outer, model = model, unwrapped(model)
    where = placed(mesh_or_group, layout, way)
    where.way.checked_group(where.mesh_or_group, getattr(model.config.get_text_config(), "num_attention_heads", 1))
    stop_ring(outer)
    ring = ModelInRing(where, *where.place, bool(indexers(model)), own=model.config._attn_implementation)
    own_config(model)
    ring.name = registered(ring)
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
    model.get_input_embeddings().register_forward_pre_hook(ring.embed)


def unwrapped(model: Any) -> PreTrainedModel:
    """The model of transformers in `model`, which may have adapters of PEFT. Raises ValueError where there is none."""
    if hasattr(model, "get_base_model"):
        for adapter in getattr(model, "peft_config", {}).values():
            kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
            expect(not adapter.is_prompt_learning, f"{kind} puts virtual tokens before each text", WEIGHTS_ONLY)
            looks = getattr(adapter, "alora_invocation_tokens", None)
            expect(not looks, f"{kind} looks for its invocation tokens, in a shard", WEIGHTS_ONLY)
            more = f"{kind} does more than its layers, such as adding to the loss of each rank"
            expect(type(model.base_model).forward.__qualname__ == "BaseTuner.forward", more, WEIGHTS_ONLY)
        model = model.get_base_model()
    wanted = "a model of transformers, before DDP or torch.compile wraps it"
    expect(isinstance(model, PreTrainedModel), f"model is a {type(model).__name__}", wanted)
    return model
