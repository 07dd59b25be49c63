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

    $ python -m ringlab.models.hugging_face
    Mistral, window 4, one process with sdpa: loss 4.8713. 4 ranks, zigzag, float64, against it:
    off     the ring not called: loss off by 5.4e-04, gradient by 4.0e-01
    off     the window dropped: loss off by 7.7e-04, gradient by 4.0e-01
    refused positions counted on each rank: rank 0: position_ids begin with None
    refused packed, the documents dropped: rank 0: position_ids begin with [0, 1, 2, 3, 4, 5, 6, 7]
    off     the mean over each rank's own labels: loss off by 3.6e-04, gradient by 1.4e-01
    refused padding on the left: rank 0: attention_mask has padding before tokens
    ok      the ring: loss off by 3.6e-16, gradient by 1.9e-16
    ok      with activation checkpointing: loss off by 3.6e-16, gradient by 1.9e-16
    ok      packed into one row: loss off by 1.8e-16, gradient by 1.9e-16

A training loop to copy: examples/fsdp2.py. Beside it are plain, Trainer, accelerate, LoRA and TRL.
In a mesh of dp x cp ranks each ring has its own sequences: give mesh["cp"] to use_ring and shard_batch, and sum the
labels of all rings before the call: dist.all_reduce(shard["num_items_in_batch"], group=mesh["dp"].get_group()).
Dropout outside attention is each rank's own: seed the ranks differently.

It needs transformers: pip install '.[hf]'.

Before: hugging_face_proof.py, which models may be cut. After: hugging_face_trainer.py, Trainer in the ring.
Source: transformers 5.23, AttentionInterface and AttentionMaskInterface; Liu et al. 2024, algorithm 1.
"""

import copy
import inspect
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringlab.models.transformer import IGNORED, summed_loss
from ringlab.support.agreement import agree, members
from ringlab.support.extras import extra
from ringlab.support.processes import RankContext, launch
from ringlab.training.documents import document_positions
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import Layout, layout_of, positions

with extra("hf", __name__):
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        MistralConfig,
        MistralForCausalLM,
        PreTrainedConfig,
        PreTrainedModel,
    )
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from ringlab.models.hugging_face_batch import (
    BATCH,
    PACKED,
    MeshOrGroup,
    attempt,
    checksum_of_weights,
    expect,
    group_of,
    judged,
    loss_part,
    refuse,
    relative,
    shard_batch,
    shifted,
)
from ringlab.models.hugging_face_masks import UNDERSTOOD, Attention, asked_mask
from ringlab.models.hugging_face_proof import check_kind, prove

BY_LENGTH = ("dynamic", "longrope")  # rotary frequencies that depend on the longest position


@dataclass(eq=False)
class Ring(Attention):
    """The attention of a model in a ring, and what runs before and after the model."""

    layers: int = 0  # calls in a forward pass, as proved
    first: int = 0  # the model's number of position 0, as proved
    losses: int = 0  # computed in this forward pass
    part: Tensor | None = None  # of the loss, the last that was computed

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ring":
        return self  # a copy of a model is in the same ring: a process group cannot be copied

    def compute(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        turn = self.stand_in or ring_flash_attention
        return turn(q, k, v, **options, layout=self.layout, group=self.group)

    def loss(self, *args: Any, **passed: Any) -> Tensor:
        self.losses += 1
        self.part = loss_part(*args, **passed)
        return self.part

    def before(self, part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Check what the caller passes to the model, on all ranks together.

        The model gets a mask of ones, else it would take the gaps in the positions of a shard for packed documents.
        Layers get the documents from it, as they get all that a model does not know.
        """
        signature = inspect.signature(part.forward)
        passed = signature.bind_partial(*args, **kwargs).arguments
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                passed |= passed.pop(name, {})
        tokens = passed["inputs_embeds"] if passed.get("input_ids") is None else passed["input_ids"]
        ones = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        alike = len(set(agree(partial(self.check, passed, ones), self.group))) == 1
        expect(alike, "some ranks have labels, and some none", "them on all: each adds to the loss")
        self.calls, self.losses, self.documents = 0, 0, passed.get("documents")
        self.longest = max(self.documents or [ones.shape[1] * self.world_size]) - 1 + self.first
        return (), {**passed, "attention_mask": ones, "use_cache": False}

    def check(self, passed: dict[str, Any], ones: Tensor) -> bool:
        """Whether there are labels. Raises ValueError for what the ring would drop or take for something else."""
        cache = "past_key_values (a cache) were passed, as generate does"
        outside = "none in a ring: stop_ring(model), and call generate inside spread_generation(model)"
        expect(passed.get("past_key_values") is None, cache, outside)
        refuse(passed, UNDERSTOOD)
        both = "both, as shard_batch gives them: TRL would shift the labels inside a shard"  # TRL's own loss
        fused = not passed.get("fused_lm_head") or passed.get("shift_labels") is not None
        expect(fused, "fused_lm_head without shift_labels", both)
        at, mask, documents = (passed.get(name) for name in ("position_ids", "attention_mask", "documents"))
        rank, world_size = members(self.group)
        S = ones.shape[1] * world_size
        lengths = "the lengths of all documents, as shard_batch gives them"
        expect(isinstance(documents, tuple | list | None), "documents are no tuple", lengths)
        documents = documents or (S,)
        expect(sum(documents) == S, f"documents have {sum(documents)} tokens", f"{S}, as shard_batch gives them")
        right = document_positions(documents)[positions(self.layout, S, rank, world_size)].to(ones)
        ours = (
            f"{right[:8].tolist()}, this rank's in the {self.layout} layout: use shard_batch with this layout, which "
            f"takes packed documents too, or RingTrainer. Padding on the left is not supported"
        )
        same = at is not None and at.shape[-1] == len(right) and (at == right).all()
        expect(same, f"position_ids begin with {at if at is None else at.flatten()[:8].tolist()}", ours)
        whole = mask is None or (isinstance(mask, Tensor) and torch.equal(mask.to(ones), ones))
        expect(whole, f"attention_mask is {mask}", "none or all ones: shard_batch takes padding")
        return passed.get("labels") is not None

    def number(self, part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Give the model its own numbers of the positions, of which the first may not be 0."""
        return args, {**kwargs, "position_ids": kwargs["position_ids"] + self.first}

    def after(self, part: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        name, ring = type(part).__name__, "the ring with its documents" if self.documents else "the ring"
        called = f"{self.layers} layers called {ring} {self.calls} time(s)"
        expect(self.calls == self.layers, called, "once each. Was its attention set again?")
        own, self.part = self.part, None
        if kwargs.get("labels") is None or kwargs.get("fused_lm_head") or part.loss_function != self.loss:
            return
        instead = "Pass no labels, and give the logits to loss_part"
        once = f"once: another loss is computed from the labels of a shard. {instead}"
        expect(self.losses == 1, f"{name} called its loss_function {self.losses} time(s)", once)
        more = f"{name} adds to its loss, or changes it, after its loss_function"
        expect(output[0] is own, more, f"the loss as it is: the rest would be that of a shard. {instead}")


def use_ring(model: PreTrainedModel, mesh_or_group: MeshOrGroup = None, layout: str | Layout = "zigzag") -> None:
    """Make every layer of a language model call the ring of `mesh_or_group` (None: the whole job).

    `model` has its weights, and is not in fully_shard yet; a mesh has one dimension. Each layer keeps its window,
    chunks, sinks, softcap and scale. A model with a ring gets the new one. A copy of the model is in the same ring.
    Raises ValueError, with the reason, for a model that cannot be proved to be right in shards (`prove`), and for one
    that computes more from its tokens in training than in the proof; and where the ranks have different weights. What a
    call passes and a ring cannot do is refused with ValueError when the model is called, on every rank.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT wraps a model
    kind = f"model is a {type(model).__name__}"
    expect(isinstance(model, PreTrainedModel), kind, "a model of transformers, before DDP wraps it")
    layout_of(layout)
    stop_ring(model)
    group = group_of(mesh_or_group)
    ring = Ring(layout, group, members(group)[1])
    own_config(model)
    name = registered(ring)
    model.ring = ring, model.config._attn_implementation, model.loss_function
    for part in model.modules():
        if any(kind in str(getattr(part, "rope_type", None)) for kind in BY_LENGTH):
            part.register_forward_pre_hook(ring.stretch, with_kwargs=True)
            part.register_forward_hook(ring.shrink)
    said = agree(partial(attempt, proved, model, ring, name), group)
    if len(set(said)) > 1 or isinstance(said[0], str):
        stop_ring(model)
        different = "the ranks have different weights; expected the same on each of them: set one seed before the model"
        raise ValueError(next((reason for reason in said if isinstance(reason, str)), different))
    model.set_attn_implementation(name)
    model.loss_function = ring.loss
    for part in {model, model.base_model}:
        part.register_forward_pre_hook(ring.before, with_kwargs=True)
        part.register_forward_hook(ring.after, with_kwargs=True)
    model.base_model.register_forward_pre_hook(ring.number, with_kwargs=True)


def registered(attention: Attention) -> str:
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


def proved(model: PreTrainedModel, ring: Ring, name: str) -> int:
    """A number that tells weights apart. Raises ValueError where the model is refused."""
    check_kind(model)
    ring.layers, ring.first = prove(model, ring, name)
    own, base = model.loss_function, type(model.base_model).__name__
    token = f"ForCausalLMLoss or ForMaskedLMLoss, with a label for each token: use the ring in {base}, and compute the "
    token += "loss from the rows of all ranks"  # loss_part can take the place of these two
    expect(own in (ForCausalLMLoss, ForMaskedLMLoss), f"{type(model).__name__} computes {own.__name__}", token)
    return checksum_of_weights(model)


def stop_ring(model: PreTrainedModel) -> None:
    """Give the model its own attention and loss again, as before `use_ring`. Without a ring nothing changes."""
    if not hasattr(model, "ring"):
        return
    ring, implementation, model.loss_function = model.ring
    del model.ring
    model.set_attn_implementation(implementation)
    for part in model.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is ring]:
                del hooks[key]


CASES = {  # what should come of it
    "the ring not called": "off",
    "the window dropped": "off",
    "positions counted on each rank": "refused",
    "packed, the documents dropped": "refused",
    "the mean over each rank's own labels": "off",
    "padding on the left": "refused",
    "the ring": "ok",
    "with activation checkpointing": "ok",
    "packed into one row": "ok",
}


def _model(case: str = "") -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    window = None if "window" in case else 4
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=window)).double().train()


def _results(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    loss.backward()
    return [loss.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])]


def _step(context: RankContext, case: str) -> list[Tensor]:
    """The loss of the batch and its gradient, summed over the ranks."""
    model, batch = _model(case), dict(PACKED if "packed" in case else BATCH)
    if "left" in case:
        batch["attention_mask"] = batch["attention_mask"].flip(1)
    shard = shard_batch(batch)
    if "mean" in case:
        shard["num_items_in_batch"] = (shard["shift_labels"] != IGNORED).sum() * context.world_size
    if "positions" in case:
        del shard["position_ids"]
    if "documents" in case:
        del shard["documents"]
    if "checkpointing" in case:
        model.activation_checkpointing_enable()
    if "not called" in case:
        model.loss_function = loss_part
    else:
        use_ring(model)
    results = _results(model, model(**shard).loss)
    for result in results:
        dist.all_reduce(result)
    return results


def _demo(context: RankContext) -> list[list[Tensor] | str]:
    return [attempt(_step, context, case) for case in CASES]


def main() -> int:
    model, labels = _model(), shifted(BATCH["labels"])
    exact = _results(model, summed_loss(model(**BATCH).logits, labels) / (labels != IGNORED).sum())
    print(f"Mistral, window 4, one process with sdpa: loss {exact[0]:.4f}. 4 ranks, zigzag, float64, against it:")

    def judge(case: str, results: list[Tensor]) -> tuple[str, str]:
        loss, gradient = relative(results, exact)
        said = f"loss off by {loss:.1e}, gradient by {gradient:.1e}"
        return "ok" if max(loss, gradient) < 1e-10 else "off", said

    return judged(CASES, launch(_demo, 4)[0], judge)


if __name__ == "__main__":
    sys.exit(main())
