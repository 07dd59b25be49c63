"""An unchanged Hugging Face model in the ring: its layers ask transformers for an attention, and get the ring.

    attention   a layer passes q, k, v and all that it knows of them      the ring, or a refusal by name
    mask        a model asks for the mask that its layers need            the window of the ring, or a refusal
    inputs      a hook before the model sees what the caller passes       positions of this shard, or a refusal
    calls       a hook after the model counts the calls of the ring       one for each layer, or a refusal

Rings in use got these wrong without an error: layers did not call the ring, windows and documents were dropped,
positions were counted inside a shard. Here the ring does it right, or raises ValueError.

Shapes: a rank has input_ids (B, C), C = S/P, at position_ids (1, C). In a layer q is (B, H, C, D), k and v
(B, G, C, D), and the result (B, C, H, D).

    $ python -m ringlab.models.hugging_face
    Mistral, window 4, one process with sdpa: loss 4.8713. 4 ranks, zigzag, float64, against it:
    off     the ring not called: loss off by 5.4e-04, gradient by 4.0e-01
    off     the window dropped: loss off by 7.7e-04, gradient by 4.0e-01
    refused positions counted on each rank: rank 0: position_ids begin with None
    refused packed, the documents dropped: rank 0: position_ids begin with [0, 1, 2, 3, 4, 5, 6, 7]
    ok      the ring: loss off by 3.6e-16, gradient by 1.9e-16
    ok      with activation checkpointing: loss off by 3.6e-16, gradient by 1.9e-16
    ok      packed into one row: loss off by 1.8e-16, gradient by 1.9e-16

A training loop, one process per device (torchrun --nproc_per_node=4 loop.py):

    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.utils import clip_grad_norm_
    from transformers import AutoModelForCausalLM

    from ringlab.models.hugging_face import shard_batch, use_ring
    from ringlab.support.processes import join_ring

    with join_ring() as context:
        model = AutoModelForCausalLM.from_pretrained(NAME).to(context.device).train()
        model.activation_checkpointing_enable()
        use_ring(model, layout="zigzag")
        for module in (*model.model.layers, model):
            fully_shard(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for batch in loader:  # the same batch on every rank; S a multiple of 2P: pad_to_multiple_of
            shard = shard_batch(batch, layout="zigzag").to(context.device)
            loss = model(**shard).loss  # this rank's part of the loss of the batch
            (loss * dist.get_world_size()).backward()  # fully_shard averages the gradients; parts must be summed
            norm = clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total := loss.detach())  # the sum of the parts, the same on every rank
            print(total.item(), norm.item())

In a mesh of dp x cp ranks each ring has its own sequences: give mesh["cp"] to use_ring and shard_batch, and sum
shard["num_items_in_batch"] over mesh["dp"] before the model is called. Dropout outside attention is each rank's own:
seed the ranks differently.

Trainer and accelerate 1.15.0 have no place for another ring. With cp_size > 1 Trainer raises ValueError, "Context
parallelism is supported only with SDPA attention". On CPUs accelerate refuses before that, with any attention: "got
DistributedType.MULTI_CPU". With cp_size = 1 they give each rank another batch, without position_ids, and the hook
refuses it.

It needs transformers: pip install '.[hf]'.

Before: hugging_face_masks.py, what a layer asks for. After: your own model.
Source: transformers 5.23, AttentionInterface and AttentionMaskInterface; Liu et al. 2024, algorithm 1.
"""

import inspect
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ringlab.models.transformer import IGNORED, summed_loss
from ringlab.support.agreement import agree, members
from ringlab.support.extras import extra
from ringlab.support.processes import RankContext, launch
from ringlab.training.documents import document_positions
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import positions

with extra("hf", __name__):
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        MistralConfig,
        MistralForCausalLM,
        PreTrainedModel,
    )

from ringlab.models.hugging_face_batch import (
    BATCH,
    PACKED,
    MeshOrGroup,
    group_of,
    loss_part,
    refuse,
    shard_batch,
    shifted,
)
from ringlab.models.hugging_face_masks import asked_mask, window_of

UNDERSTOOD = {"input_ids", "inputs_embeds", "position_ids", "documents", "attention_mask", "labels", "shift_labels"}
UNDERSTOOD |= {"num_items_in_batch", "is_causal", "output_hidden_states", "return_dict", "fused_lm_head"}


@dataclass
class Ring:
    """The attention of a model, and what runs before and after the model."""

    layout: str
    group: ProcessGroup | None
    layers: int
    documents: tuple[int, ...] | None = None  # of this forward pass
    calls: int = 0  # in this forward pass, with its documents

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: int | str | None, **passed: Any
    ) -> tuple[Tensor, None]:
        """q (B, H, C, D), k and v (B, G, C, D) -> out (B, C, H, D), and no weights. `mask` is from `asked_mask`.

        What a layer passes is the same on every rank, so each rank refuses it before anything is sent.
        """
        scale, causal, documents = (passed.pop(name, None) for name in ("scaling", "is_causal", "documents"))
        window = window_of(type(module).__name__, mask, passed.pop("sliding_window", mask))
        refuse(passed, UNDERSTOOD)
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise ValueError(f"{type(module).__name__} has is_causal=False; expected a causal language model")
        self.calls += int(documents == self.documents)
        shown = {"causal": True, "window": window, "documents": documents}
        out = ring_flash_attention(q, k, v, **shown, layout=self.layout, scale=scale, group=self.group)
        return out.transpose(1, 2).contiguous(), None

    def before(self, part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Check what the caller passes to the model, on all ranks together.

        The model gets a mask of ones, else it would take the gaps in the positions of a shard for packed documents.
        Layers get the documents from it, as they get all that a model does not know.
        """
        passed = inspect.signature(part.forward).bind_partial(*args, **kwargs).arguments
        passed |= passed.pop("kwargs", {})
        tokens = passed["inputs_embeds"] if passed.get("input_ids") is None else passed["input_ids"]
        ones = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        agree(partial(self.check, passed, ones), self.group)
        self.calls, self.documents = 0, passed.get("documents")
        return (), {**passed, "attention_mask": ones, "use_cache": False}

    def check(self, passed: dict[str, Any], ones: Tensor) -> None:
        refuse(passed, UNDERSTOOD)
        if passed.get("fused_lm_head") and passed.get("shift_labels") is None:
            raise ValueError(
                "fused_lm_head (of TRL) without shift_labels would shift the labels inside a shard; expected "
                "shift_labels, as shard_batch gives them"
            )
        at, mask = passed.get("position_ids"), passed.get("attention_mask")
        rank, world_size = members(self.group)
        S = ones.shape[1] * world_size
        documents = passed.get("documents") or (S,)
        if sum(documents) != S:
            raise ValueError(f"documents have {sum(documents)} tokens; expected {S}, as shard_batch gives them")
        right = document_positions(documents)[positions(self.layout, S, rank, world_size)].to(ones)
        if at is None or at.shape[-1] != len(right) or (at != right).any():
            raise ValueError(
                f"position_ids begin with {at if at is None else at.flatten()[:8].tolist()}; expected "
                f"{right[:8].tolist()}, this rank's in the {self.layout} layout: use shard_batch, which takes packed "
                f"documents too. Padding on the left is not supported"
            )
        if mask is not None and not (isinstance(mask, Tensor) and torch.equal(mask.to(ones), ones)):
            raise ValueError(f"attention_mask is {mask}; expected none or all ones: shard_batch takes padding")

    def after(self, part: nn.Module, args: tuple, output: Any) -> None:
        if self.calls != self.layers:
            ring = "the ring with its documents" if self.documents else "the ring"
            raise ValueError(f"{self.layers} layers called {ring} {self.calls} time(s); expected once each")


def use_ring(model: PreTrainedModel, mesh_or_group: MeshOrGroup = None, layout: str = "zigzag") -> None:
    """Make every layer of a causal language model call the ring of `mesh_or_group` (None: the whole job), for good.

    `model` is as transformers made it, before fully_shard; a mesh has one dimension. Each layer keeps its sliding
    window. Raises ValueError for a model that does not pass on all it gets to AttentionInterface, takes no positions,
    adds a loss of its router, or scales by the longest position that it sees. The rest that a ring cannot do is refused
    with ValueError when the model is called, on every rank.
    """
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()  # PEFT's layers are inside the model, and its wrapper passes on all that it gets
    config = model.config.get_text_config()
    if not model._supports_attention_backend or "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} does not tell AttentionInterface all; expected a model that does")
    rope = str(getattr(config, "rope_parameters", None))
    by_shard = {name: getattr(config, name, None) for name in ("output_router_logits", "attn_temperature_tuning")}
    by_shard["rope_type"] = next((kind for kind in ("dynamic", "longrope") if kind in rope), None)
    refuse(by_shard, set())  # a model would compute them from the tokens or the positions of a shard
    ring, name = Ring(layout, group_of(mesh_or_group), config.num_hidden_layers), f"ring_{layout}_{id(model)}"
    AttentionInterface.register(name, ring.attend)
    AttentionMaskInterface.register(name, asked_mask)  # without it transformers would drop every mask
    model.set_attn_implementation(name)
    model.loss_function = loss_part
    for part in {model, model.base_model}:
        part.register_forward_pre_hook(ring.before, with_kwargs=True)
        part.register_forward_hook(ring.after)


CASES = {  # what should come of it
    "the ring not called": "off",
    "the window dropped": "off",
    "positions counted on each rank": "refused",
    "packed, the documents dropped": "refused",
    "the ring": "ok",
    "with activation checkpointing": "ok",
    "packed into one row": "ok",
}


def _model(window: int | None = 4) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": window}
    return MistralForCausalLM(MistralConfig(**sizes, **heads)).double().train()


def _results(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    loss.backward()
    return [loss.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])]


def _step(context: RankContext, case: str) -> list[Tensor] | str:
    """The loss of the batch and its gradient, summed over the ranks; or why the ring refused."""
    model = _model(None if "window" in case else 4)
    shard = shard_batch(PACKED if "packed" in case else BATCH)
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
    try:
        results = _results(model, model(**shard).loss)
    except ValueError as error:
        return str(error)
    for result in results:
        dist.all_reduce(result)
    return results


def _demo(context: RankContext) -> list[list[Tensor] | str]:
    return [_step(context, case) for case in CASES]


def main() -> int:
    model, labels = _model(), shifted(BATCH["labels"])
    exact = _results(model, summed_loss(model(**BATCH).logits, labels) / (labels != IGNORED).sum())
    print(f"Mistral, window 4, one process with sdpa: loss {exact[0]:.4f}. 4 ranks, zigzag, float64, against it:")
    ok = True
    for (case, expected), results in zip(CASES.items(), launch(_demo, 4)[0], strict=True):
        if isinstance(results, str):
            seen, said = "refused", results.partition("; ")[0]
        else:
            loss, gradient = [((a - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]
            seen, said = (
                "ok" if max(loss, gradient) < 1e-10 else "off",
                f"loss off by {loss:.1e}, gradient by {gradient:.1e}",
            )
        print(f"{seen:8}{case}: {said}")
        ok &= seen == expected
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
