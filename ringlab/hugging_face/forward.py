"""A forward pass of a Hugging Face model in the ring: what is checked before it and after it, on all ranks together.

    before   what the caller passes       this shard's positions and documents, labels on all ranks or on none
             in passes 1, 2, 4 and 8      with gradients, and after a change of mode: the weights, the same on all ranks
             a module or forward is new   the model is proved once more
    after    the calls of the ring        as many as proved
             the loss                     the one that the ring computed, not changed by a line that knows no ranks
    backward the loss                     nothing was added to it in place
             the model                    it is in the same ring

A loss of its own, beside that of the labels, goes through `extra_loss`: what all ranks have counts once.

Shapes: a rank has input_ids (B, C), C = S/P, at position_ids (1, C).
`python examples/compare.py` runs it: a first reader may skip this file.
Before: proof.py, which models may be cut. After: use.py, the model in the ring.
Source: transformers 5.23, PreTrainedModel.loss_function; PyTorch, Tensor.register_hook.
"""

import inspect
import weakref
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringlab.ring.documents import document_positions
from ringlab.ring.latent_ring import LatentRing
from ringlab.ring.layouts import positions
from ringlab.ring.schedule import Ring
from ringlab.states.state_ring import check_layout_of_states
from ringlab.support.agreement import agree, agree_same
from ringlab.support.extras import extra

with extra("hf", __name__):
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from ringlab.hugging_face import seam
from ringlab.hugging_face.attention import UNDERSTOOD, LayerAttention, Pass, Proved
from ringlab.hugging_face.batch import checksum_of_weights, loss_part, refuse, shape_of, themselves
from ringlab.hugging_face.latents import check_latents
from ringlab.hugging_face.proof import prove
from ringlab.hugging_face.states import in_ring
from ringlab.support.expect import attempt, expect

# After so many passes with gradients the weights are compared: a forgotten sum of gradients shows in the second.
DUE = (0, 1, 3, 7)
EMBEDDINGS = (
    "embeddings in place of input_ids, as a vision model gives them to its language model; expected input_ids of this "
    "rank: the ring cannot tell which tokens embeddings are. For texts alone use_ring(the vision model)"
)
LOSS_BESIDE = "the loss as it is, or extra_loss in the model's forward: what is added here would count on each rank"


def check_kind(model: PreTrainedModel) -> None:
    """Raise ValueError for what the proof cannot see, or would not name by its reason."""
    config, name = model.config.get_text_config(), type(model).__name__
    takes = inspect.signature(model.forward).parameters
    if any(x.is_meta for x in model.parameters()):
        raise ValueError(f"{name} has weights on the meta device; expected loaded ones, to compute with")
    if model._compiled_call_impl:
        raise ValueError(f"{name} is compiled; expected use_ring first, then compile: see docs/your_model.md, line 21")
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder with a decoder; expected a decoder alone: the ring shares out one text")
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in takes.values()):
        raise ValueError(f"{name} has a forward(*args); expected its arguments by name, as functools.wraps leaves them")
    if "position_ids" not in takes:
        state = "keeps a state over tokens and takes no position_ids; expected a model with layers of attention too"
        none = "takes no position_ids; expected it to: a shard's are not 0, 1, 2, ..."
        raise ValueError(f"{name} {state if model._is_stateful else none}")
    for part in model.modules():
        if "Indexer" in (kind := type(part).__name__) and part not in seam.indexers(model):
            why = "expected one that asks its cache for index keys, by update_indexer"
            raise ValueError(f"{name} has a {kind}, which chooses keys by a rule of its own; {why}")
    if drops := getattr(config, "layerdrop", None):
        why = "expected 0: the ranks would leave out different layers"
        raise ValueError(f"{name} has layerdrop={drops} in its config; {why}")
    if routes := getattr(config, "output_router_logits", None):
        why = "its loss of the router would be that of a shard (in an SFTConfig: router_aux_loss_coef=0.0)"
        raise ValueError(f"{name} has output_router_logits={routes} in its config; expected False: {why}")


@dataclass(eq=False)
class ModelInRing(LayerAttention):
    """The attention of a model in a ring, and what runs before and after the model."""

    name: str = ""  # by which layers find it
    own: str = ""  # the attention that the model had
    passes: int = 0  # with gradients
    mode: bool | None = None  # of the last pass: whether in training
    code: list[tuple[Any, ...]] = field(default_factory=list)  # of the model that was proved

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelInRing":
        return self  # a copy of a model is in the same ring: a process group cannot be copied

    def __getstate__(self) -> Any:
        instead = "stop_ring(model) first, or model.save_pretrained: a process group lives in this job only"
        raise ValueError(f"a model in a ring was pickled, as torch.save(model) does; expected {instead}")

    @torch.compiler.disable
    def prove(self, model: PreTrainedModel) -> None:
        """Prove `model`, and put it in the ring. Raises ValueError on every rank, also where their weights differ."""
        seam.own_forwards(model)
        self.show_longest(model)
        linear = seam.mixing_layers(model)
        model.set_attn_implementation(self.own)
        seam.send_latents(model, False)
        try:
            outcomes = agree(partial(attempt, self.checked, model), self.where.mesh_or_group)  # else why not
        finally:
            model.set_attn_implementation(self.name)
            seam.spread(linear, in_ring(self))
            seam.send_latents(model, self.where.way is LatentRing)
        different = "the ranks disagree about weights; expected the same on each of them: set one seed before the model"
        if len(set(outcomes)) > 1 or isinstance(outcomes[0], str):
            raise ValueError(next((reason for reason in outcomes if isinstance(reason, str)), different))
        for name, part in model.base_model.named_modules():
            seam.give(part, **{seam.PROVED: (self, name)})  # a copy of the model has it too
        self.proved, self.code = outcomes[0][0], seam.code_of(model.base_model)

    def checked(self, model: PreTrainedModel) -> tuple[Proved, int]:
        """What was proved, and a checksum of the weights."""
        check_kind(model)
        for kind in (type(layer).__name__ for layer in seam.mixing_layers(model) if "forward" in vars(layer)):
            expect(False, f"{kind} has a forward that was set by hand", "that of its class, whose code the ring takes")
        if seam.linear_layers(model):
            check_layout_of_states(str(self.where.layout))
            has = f"{type(model).__name__} has linear layers"
            expect(not isinstance(self.where.mesh_or_group, DeviceMesh), has, "no mesh: their states go round a ring")
        if seam.indexers(model):
            has = f"{type(model).__name__} has an indexer, and the way is {self.where.way.__name__}"
            expect(issubclass(self.where.way, Ring), has, "way=Ring or LatentRing: other ways know no chosen keys")
        with torch.autocast(model.device.type, enabled=False):  # a step may run under it when a module is new
            if self.where.way is LatentRing:
                check_latents(model)
            proved = prove(model, self, self.name)
        its_loss, base = model.loss_function, type(model.base_model).__name__
        known = its_loss in (ForCausalLMLoss, ForMaskedLMLoss, self.loss)  # loss_part can take the place of these
        wanted = "ForCausalLMLoss or ForMaskedLMLoss, with a label for each token"
        instead = f"use the ring in {base}, and compute the loss from the rows of all ranks"
        expect(known, f"{type(model).__name__} computes {its_loss.__name__}", f"{wanted}: {instead}")
        return proved, checksum_of_weights(model)

    def loss(self, *args: Any, **passed: Any) -> Tensor:
        self.now.losses += 1
        part = loss_part(*args, **passed)
        self.note(part)
        return part

    @torch.compiler.disable
    def note(self, part: Tensor) -> None:
        self.now.part, self.now.value = weakref.ref(part), part.detach().clone()
        if part.requires_grad:
            part.register_hook(partial(only_multiplied, self.now.part, part._version))

    @torch.compiler.disable  # a check has nothing to compile, and a traced method is equal to no other
    def before(self, part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Check what the caller passes to the model, on all ranks together; layers get the documents from it.

        With no mask of ones the model would take the gaps in the positions of a shard for packed documents.
        """
        if self.now.proof:
            return None
        signature = inspect.signature(part.forward)
        passed = signature.bind_partial(*args, **kwargs).arguments
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                passed |= passed.pop(name, {})
        one = "the same on each of them: one seed before what was added, and the sum of all gradients in each step"
        found = agree_same(partial(self.check, part, passed), self.where.mesh_or_group, expected=one)
        given = "the label of each token is the token itself"
        expect(not all(unshifted for unshifted, _ in found), given, "the next one, as shard_batch gives it")
        ones, documents = ones_of(**passed), passed.get("documents")
        longest = max(documents or [ones.shape[1] * self.world_size]) - 1 + self.proved.first
        self.now = Pass(documents, longest, any(changed for _, changed in found))
        return (), {**passed, "attention_mask": ones, "use_cache": False}

    def check(self, part: Any, passed: dict[str, Any]) -> tuple[tuple[bool, bool], dict[str, int]]:
        """Whether labels are not shifted, and the code is not the one that was proved; and what ranks have in common.

        Raises ValueError for what the ring would drop or take for something else.
        """
        if passed.get("past_key_values") is not None:
            raise ValueError("past_key_values (a cache) were passed; expected none: generate inside spread_generation")
        refuse(passed, UNDERSTOOD)
        if passed.get("fused_lm_head") and passed.get("shift_labels") is None:  # TRL's own loss would shift the labels
            raise ValueError("fused_lm_head without shift_labels; expected both, as shard_batch gives them")
        if "ring" in vars(part) and passed.get("input_ids") is None:
            raise ValueError(EMBEDDINGS)
        labels, name = passed.get("labels") is not None, type(part).__name__
        if labels and "ring" in vars(part) and part.loss_function != self.loss:
            raise ValueError(f"{name} was given a loss_function; expected none: give the logits to loss_part")
        self.check_tokens(name, **passed)
        due = part.base_model.training != self.mode or (torch.is_grad_enabled() and self.passes in DUE)
        weights = checksum_of_weights(part) if due else 0
        unshifted = due and passed.get("causal", True) and themselves(**passed)
        modules = zlib.crc32(" ".join(name for name, _ in part.named_modules()).encode())
        same = {"labels": labels, "modules": modules, "weights": weights, "gradients": torch.is_grad_enabled()}
        return (unshifted, seam.code_of(part) != self.code), {**same, "training": part.training}

    def check_tokens(
        self, name: str, position_ids: Any = None, attention_mask: Any = None, documents: Any = None, **passed: Any
    ) -> None:
        """Raise ValueError unless these are positions of this rank's tokens, in whole documents, without padding."""
        ones = ones_of(**passed)
        S = ones.shape[1] * self.world_size
        if not isinstance(documents, tuple | list | None):
            raise ValueError("documents are no tuple; expected the lengths of all documents, as shard_batch gives them")
        documents = tuple(documents or (S,))
        if sum(documents) != S:
            raise ValueError(f"documents have {sum(documents)} tokens; expected {S}, as shard_batch gives them")
        if (n := len(documents)) > 1 and not self.proved.packs:
            raise ValueError(f"a row has {n} documents, of which the layers of {name} are not told; expected one")
        at = document_positions(documents)[positions(self.where.layout, S, self.rank, self.world_size)].to(ones)  # (C,)
        if position_ids is None or position_ids.shape[-1] != len(at) or (position_ids != at).any():
            ours = (
                f"{ends_of(at)}, this rank's of {S} in the {self.where.layout} layout: use shard_batch, or RingTrainer"
            )
            left = "Padding on the left is not supported"
            raise ValueError(f"position_ids begin with {ends_of(position_ids)}; expected {ours}. {left}")
        whole = isinstance(attention_mask, Tensor) and torch.equal(attention_mask.to(ones), ones)
        if attention_mask is not None and not whole:
            given = "a tensor with zeros" if isinstance(attention_mask, Tensor) else "no tensor"
            raise ValueError(f"attention_mask is {given}; expected none or all ones: shard_batch takes padding")

    def embed(self, part: nn.Module, args: tuple) -> None:
        """Before the input embeddings: a vision model asks for them outside the language model that is in the ring."""
        inside = self.now.longest is not None and self.now.calls < self.proved.layers  # a pass of the model
        if not (inside or self.now.proof or torch.compiler.is_compiling()):
            raise ValueError(EMBEDDINGS)

    @torch.compiler.disable
    def enter(self, part: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Before the base model: prove it again if it is another one, and give it its own numbers of the positions."""
        if self.now.proof:
            return None
        self.passes += torch.is_grad_enabled()
        self.mode = part.training
        if self.now.changed:
            self.prove(part)
        return args, {**kwargs, "position_ids": kwargs["position_ids"] + self.proved.first}

    def after(self, part: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if self.now.proof:
            return
        name, now, layers = type(part).__name__, self.now, self.proved.layers
        ring = "the ring with its documents" if now.documents else "the ring"
        called = f"{layers} layers called {ring} {now.calls} time(s)"
        expect(now.calls == layers, called, "once each. Was its attention set again?")
        inner = isinstance(part, PreTrainedModel) and "ring" not in vars(part)  # the base model computes no loss
        if part is part.base_model and output[0].requires_grad:
            self.stays(part, output[0])
        if kwargs.get("labels") is None or kwargs.get("fused_lm_head") or inner:
            return
        instead = "Pass no labels, and give the logits to loss_part"
        called = f"{name} called its loss_function {now.losses} time(s)"
        expect(now.losses == 1, called, f"once: another loss is computed from the labels of a shard. {instead}")
        part_of_loss, value, loss = now.part(), now.value, output[0]
        if now.more is None:
            same = loss is part_of_loss and torch.equal(loss.detach(), value)
        else:
            same = bool(torch.isclose(loss.detach(), value + now.more, rtol=1e-6, atol=0))
        expect(same, f"{name} adds to its loss, or changes it, after its loss_function", f"{LOSS_BESIDE}. {instead}")
        now.value = loss.detach().clone()

    @torch.compiler.disable
    def stays(self, part: nn.Module, rows: Tensor) -> None:
        """Let the backward pass of `rows` raise ValueError if the model is in this ring no more."""

        def check(_: Tensor) -> None:
            left = f"{type(part).__name__} has left the ring of this forward pass, or is in another ring"
            # activation checkpointing would compute layers in the other ring
            later = "stop_ring and use_ring after the backward pass, and zero_grad now: some gradients may be there"
            expect(self.after in part._forward_hooks.values(), left, later)

        rows.register_hook(check)


def ones_of(input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **_: Any) -> Tensor:
    """A one for each token, (B, C). Raises ValueError for tokens of another shape."""
    tokens = inputs_embeds if input_ids is None else input_ids
    if tokens is None or tokens.dim() != (3 if input_ids is None else 2):
        raise ValueError(f"input_ids are {shape_of(input_ids)}; expected a tensor (B, C) with this rank's tokens")
    return torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)


def ends_of(at: Tensor | None) -> str:
    """The first positions and the last one, in words."""
    return "None" if at is None else f"{at.flatten()[:8].tolist()} and end with {int(at.flatten()[-1])}"


def only_multiplied(part: weakref.ref, version: int, _: Tensor) -> None:
    """In the backward pass: raise ValueError unless all that was done to the loss in place is a multiplication."""
    loss = part()
    step: Any = None if loss is None else loss.grad_fn
    for _step in range(0 if loss is None else loss._version - version):
        multiplied = step and step.name()[:3] in ("Mul", "Div")
        expect(multiplied, "something was added to the model's loss in place", LOSS_BESIDE)
        step = step.next_functions[0][0]


def extra_loss(model: nn.Module, of_tokens: Any = 0.0, of_weights: Any = 0.0) -> Any:
    """This rank's part of a loss beside that of the labels, to be added to out.loss in the forward of a model.

    `of_tokens` is a sum over the tokens of this shard, divided by the number in the whole batch. `of_weights` is a
    number that all ranks have, such as a regulariser: it counts once. Without a ring it is the sum of both.
    """
    ring = vars(model).get("ring", [None])[0]
    if ring is None:
        return of_tokens + of_weights
    part = of_tokens + of_weights / ring.world_size
    ring.now.more = part.detach() + (0.0 if ring.now.more is None else ring.now.more)
    return part
