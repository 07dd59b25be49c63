"""The seam: the one file of this folder that reaches into transformers and swaps a class, an attribute or a global.

    registered      layers ask transformers for an attention by name, models for a mask      and find ours
    watched         every attention that a layer asks for, while it is open                  goes through a function
    own_config      a model reads its attention from its config                              which no other model shares
    give, take      a name in an object, before that of its class                            until it is taken away
    meanwhile       an attribute of an object                                                has another value
    spread          a forward pass of a linear layer, of the same code                       in which names mean ours
                    and of an indexer                                                        which asks all ranks
    send_latents                         a layer makes K and V of its latents         and passes the latents on
    other_methods   while it is open, methods looked up in the class of a model              are ours
    as_it_was       modes, checkpointing, buffers and attention of a model                   are put back at the end
    stop_ring       attention, loss and hooks of a model in a ring                           are its own again

All else here uses what transformers documents: hooks, set_attn_implementation, loss_function, arguments. So a new
version of transformers breaks the ring in this file, and its tests say where.

transformers has no interface for linear layers, as it has for attention. But all that mixes tokens in these layers is
in functions of the model's file, and the forward pass of a layer finds them by name: the names below.

A first reader may skip this file. Before: ../models/mesh.py. After: batch.py, a batch in the ring.
Source: transformers 5.23, AttentionInterface, AttentionMaskInterface, PreTrainedModel, models/qwen3_next.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, cast

from torch import nn

from ringlab.support.extras import extra

with extra("hf", __name__):
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

CONVOLUTION, RULE, KDA = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"
SCAN, ALL_IN_ONE = "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"
MIXERS = (CONVOLUTION, RULE, KDA, SCAN, ALL_IN_ONE)
INDEXER = "update_indexer"  # of its cache: with this an indexer asks for the keys of other tokens
EXPAND = "expand_kv"  # with this a layer makes K and V of all heads from latents
OURS = "ring_forward"  # the name in a layer of the forward pass that `spread` gave it
PROVED = "ring_proved"  # the name in a part of the ring and the place that it was proved for: a new part has none
WRAPPERS = ("torch._dynamo.eval_frame", "transformers.modeling_layers")  # compile, and checkpoint: the code is the same
Mixers = dict[str, Callable[..., Any]]  # what these names mean


def registered(attention: Any) -> str:
    """The name by which layers find `attention.attend`, and models `attention.mask`: else these would drop every mask.

    transformers keeps what has a name for ever. It does not keep the attention here, whose process group has threads:
    the name ends with it.
    """
    name, alive = f"ring_{id(attention)}", cast(Callable[[], Any], weakref.ref(attention))  # a layer's model keeps it
    AttentionInterface.register(name, lambda *args, **passed: alive().attend(*args, **passed))
    AttentionMaskInterface.register(name, lambda **asked: alive().mask(**asked))
    for interface in (AttentionInterface, AttentionMaskInterface):
        weakref.finalize(attention, interface._global_mapping.pop, name)
    return name


@contextmanager
def watched(watch: Callable[[Callable], Callable]) -> Iterator[None]:
    """While this is open, a layer that asks for an attention gets `watch` of it."""
    own = AttentionInterface.get_interface

    def get_interface(*asked: Any, **named: Any) -> Callable:
        return watch(own(*asked, **named))

    AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        AttentionInterface.get_interface = own


def own_config(model: nn.Module) -> None:
    """Give the model a copy of its config. Another model with the same config would call the ring too."""
    copies: dict[int, Any] = {}
    for part in model.modules():
        for name, config in list(vars(part).items()):
            if isinstance(config, PreTrainedConfig):
                setattr(part, name, copy.deepcopy(config, copies))


def give(thing: Any, **values: Any) -> None:
    """Let these names of `thing` mean these values, whatever its class says."""
    vars(thing).update(values)


def take(thing: Any, *names: str) -> None:
    """Undo `give`: the names mean what the class says."""
    for name in names:
        vars(thing).pop(name, None)


@contextmanager
def meanwhile(thing: Any, **values: Any) -> Iterator[None]:
    """While this is open, these names of `thing` mean these values."""
    before = {name: vars(thing)[name] for name in values}
    give(thing, **values)
    try:
        yield
    finally:
        give(thing, **before)


def own_forward(part: nn.Module) -> Any:
    """The forward pass of its class, without decorators."""
    return inspect.unwrap(type(part).forward)


def parts_with(model: nn.Module, *names: str) -> list[nn.Module]:
    """The parts of a model whose forward pass uses one of these names."""
    codes = [(part, getattr(own_forward(part), "__code__", None)) for part in model.modules()]
    return [part for part, code in codes if code and {*names} & {*code.co_names}]


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """The parts of a model whose forward pass calls one of the MIXERS."""
    return parts_with(model, *MIXERS)


def indexers(model: nn.Module) -> list[nn.Module]:
    """The parts of a model whose forward pass asks a cache for index keys."""
    return parts_with(model, INDEXER)


def latent_layers(model: nn.Module) -> list[nn.Module]:
    """The parts of a model whose forward pass makes K and V from latents."""
    return parts_with(model, EXPAND)


def latents_alone(*latents: Any) -> tuple[Any, ...]:
    """What EXPAND means in a layer that passes its latents on."""
    return latents


def passes_latents(layer: nn.Module) -> bool:
    """Whether EXPAND means `latents_alone` in this layer: a new layer, or one that was changed, has its own."""
    return vars(layer).get(EXPAND) is latents_alone


def send_latents(model: nn.Module, wanted: bool) -> None:
    """Let these layers pass latents and rotated keys to their attention, or K and V again.

    A layer that was given an EXPAND of its own keeps it: with `wanted`, check_latents refuses it.
    """
    for layer in latent_layers(model):
        if passes_latents(layer):
            take(layer, EXPAND)
        if wanted:
            vars(layer).setdefault(EXPAND, latents_alone)


def mixing_layers(model: nn.Module) -> list[nn.Module]:
    """What `spread` takes: linear layers and indexers."""
    return linear_layers(model) + indexers(model)


def functions_of(forward: Any) -> list[Any]:
    """The functions that a forward pass goes through, from the outermost, without those of WRAPPERS."""
    function = getattr(forward, "__func__", forward)
    inner = functions_of(function.__wrapped__) if hasattr(function, "__wrapped__") else []
    return inner if getattr(function, "__globals__", {}).get("__name__") in WRAPPERS else [function, *inner]


def code_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """Of its parts: the name, for what it was proved, and the functions of its class and of its own forward pass.

    accelerate gives the model itself a forward pass: that one is no part, and only its class counts.
    """
    found = []
    for name, part in model.named_modules():
        own = type(part) if "ring" in vars(part) else part
        found.append((name, vars(part).get(PROVED), functions_of(type(part).forward), functions_of(own.forward)))
    return found


def own_forwards(model: nn.Module) -> None:
    """Take back what `spread` gave, whatever class a layer is of by now. A forward pass set by hand stays."""
    for part in model.modules():
        if OURS in vars(part):
            take(part, *(["forward"] if vars(part).get("forward") == vars(part)[OURS] else []), OURS)


def spread(layers: list[nn.Module], mixers: Mixers) -> None:
    """Let the names mean these functions in linear layers.

    A layer gets the forward pass of its class with other globals: its file and other models keep theirs. An indexer
    gets a function of itself and its arguments in place of its forward pass. A layer that was given a forward pass by
    hand keeps it: ModelInRing refuses it.
    """
    for layer in layers:
        if vars(layer).get("forward") not in (None, vars(layer).get(OURS)):
            continue
        own = own_forward(layer)
        forward = mixers.get(INDEXER) if INDEXER in own.__code__.co_names else None
        if forward is None:
            names = {**own.__globals__, **mixers}
            forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
            forward.__kwdefaults__ = own.__kwdefaults__
        ours = MethodType(forward, layer)  # a copy of the model gets one of its own
        give(layer, **{"forward": ours, OURS: ours})


@contextmanager
def other_methods(model: PreTrainedModel, **methods: Callable[..., Any]) -> Iterator[type[PreTrainedModel]]:
    """While this is open, the model is of a class with these methods. Yields its own class."""
    own = type(model)
    model.__class__ = type(own.__name__, (own,), methods)
    try:
        yield own
    finally:
        model.__class__ = own


@contextmanager
def as_it_was(model: PreTrainedModel) -> Iterator[list[Any]]:
    """After this, modes, checkpointing, buffers and attention are as before. Yields the parts with checkpointing."""
    own = model.config._attn_implementation
    modes = [(part, part.training) for part in model.modules()]
    checkpointed = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # statistics of a batch norm
    try:
        yield checkpointed
    finally:
        model.set_attn_implementation(own)
        for part, mode in modes:
            part.training = mode
        for part in checkpointed:
            part.gradient_checkpointing = True
        for buffer, before in buffers:
            buffer.copy_(before)


def stop_ring(model: PreTrainedModel) -> None:
    """Give the model its own attention and loss again, as before `use_ring`. Without a ring nothing changes."""
    outer, model = model, model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(model, "ring"):
        return
    ring, implementation, model.loss_function = model.ring
    del model.ring
    model.set_attn_implementation(implementation)
    own_forwards(model)
    send_latents(model, False)
    for part in outer.modules():
        take(part, PROVED)
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is ring]:
                del hooks[key]
