"""What the layers of a Hugging Face model call in place of their own attention.

    query, key, value, scaling, sliding_window, ...     what a layer passes, and its mask from masks.py
    ring_flash_attention(q, k, v, window=..., ...)      the same as options of the ring; the rest is refused by name
    own_token, full_attention                           what stands in for the ring while a model is proved

Shapes: in a layer q is (B, H, C, D), k and v (B, G, C, D), and the result (B, C, H, D).

`python examples/compare.py` runs it: a first reader may skip this file.
Before: masks.py, the mask of a layer. After: proof.py, which models may be cut.
Source: transformers 5.23, AttentionInterface and modeling_llama4.py, for the temperature of `tuned`.
"""

import inspect
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ringlab.models.mesh import ContextParallel
from ringlab.ring.documents import document_positions
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.latent_ring import LatentRing
from ringlab.ring.layouts import positions
from ringlab.ring.masks import Mask
from ringlab.support.expect import expect
from ringlab.support.extras import extra

with extra("hf", __name__):
    from ringlab.hugging_face.batch import refuse
    from ringlab.hugging_face.latents import attend_to_latents
    from ringlab.hugging_face.masks import Asked, BothWays, ChunkedAttention, PlainCausal, asked_mask, window_of

BY_LENGTH = ("dynamic", "longrope")  # rotary frequencies that depend on the longest position
UNDERSTOOD = {"input_ids", "inputs_embeds", "position_ids", "documents", "attention_mask", "labels", "shift_labels"}
UNDERSTOOD |= {"num_items_in_batch", "is_causal", "output_hidden_states", "return_dict", "fused_lm_head", "causal"}


@dataclass(frozen=True)
class Proved:
    """What the proof found in a model."""

    layers: int = 0  # calls of its attention in a forward pass
    first: int = 0  # its number of position 0
    packs: bool = False  # whether all layers are told the documents


@dataclass(eq=False)
class Pass:
    """A forward pass, made before it: what its layers must know beside what they are told, and what was counted."""

    documents: tuple[int, ...] | None = None
    longest: int | None = None  # position in the whole sequence; None before the first pass
    changed: bool = False  # whether a rank has a model whose code is not the one that was proved
    stand_in: Any = None  # a function of q, k and v in place of the ring: in the proof, and in generation
    proof: bool = False
    at: Tensor | None = None  # in the proof: where the tokens of a shard stand in the row
    calls: int = 0  # of its layers, with its documents
    losses: int = 0  # computed
    part: Any = None  # of the loss, a weakref: the last that was computed
    value: Any = None  # of the loss
    more: Tensor | None = None  # of extra_loss


@dataclass(eq=False)
class LayerAttention:
    """What the layers of a model call in the place of their own attention."""

    where: ContextParallel
    rank: int = 0
    world_size: int = 1
    rows: bool = False  # whether layers take rows of their mask, for an indexer
    proved: Proved = Proved()
    now: Pass = field(default_factory=Pass)  # in hand, or the last one

    def mask(self, **asked: Any) -> Asked:
        """`asked_mask`, in this forward pass."""
        mask = asked_mask(**asked)
        return PlainCausal(self.now.documents) if mask is None and self.rows else mask

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Asked = None, **passed: Any
    ) -> tuple[Tensor, None]:
        """query (B, H, C, D), key (B, G, C, D), value (B, G, C, Dv) -> out (B, C, H, Dv), and no weights.

        `attention_mask` is from `asked_mask`. What a layer passes is the same on every rank, so each rank refuses it
        before anything is sent.
        """
        attention_mask = None if isinstance(attention_mask, PlainCausal) else attention_mask
        now, name, both_ways = self.now, type(module).__name__, isinstance(attention_mask, BothWays)
        named = ("scaling", "is_causal", "documents", "s_aux", "softcap")
        scale, causal, documents, sinks, softcap = (passed.pop(option, None) for option in named)
        window = attention_mask if isinstance(attention_mask, int) else None
        window = window_of(name, attention_mask, passed.pop("sliding_window", window))
        self.check_direction(module, causal, passed.pop("causal", True), both_ways)
        if isinstance(scale, Tensor):
            passes = f"{name} passes a tensor {tuple(scale.shape)} as scaling, learned or of several numbers"
            one = "one number that is not learned: multiply q by it, and pass scaling=1.0"
            expect(not scale.requires_grad and scale.numel() == 1, passes, one)
        dropout = passed.pop("dropout", 0.0)
        none = "0 in training: set attention_dropout (GPT-2: attn_pdrop) to 0 in the config. Dropout elsewhere is fine"
        expect(not dropout or now.stand_in, f"dropout is {dropout} in {name}", none)  # the proof in training has none
        chosen, index = passed.pop("indices", None), getattr(module, "indexer", None)
        told = index is None or chosen is not None
        expect(told, f"{name} has a {type(index).__name__}, and passes no indices", "them")
        chosen = None if chosen is None else chosen.long()
        refuse(passed, UNDERSTOOD)
        now.calls += int(documents == now.documents)
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            query = self.tuned(module, query, documents)
        if isinstance(attention_mask, ChunkedAttention):
            documents = attention_mask.documents(documents or (query.shape[2] * self.world_size,))
        seen: dict[str, Any] = {"causal": not both_ways, "window": window, "documents": documents}
        seen |= {"scale": scale, "sinks": sinks, "softcap": softcap, "layout": self.where.layout}
        seen |= {"group": self.where.mesh_or_group, "schedule": self.where.way, "chosen": chosen}
        # with LatentRing key and value are latents and rotated keys
        attention = partial(attend_to_latents, module) if self.where.way is LatentRing else ring_flash_attention
        out = (now.stand_in or attention)(query, key, value, **seen)
        return out.transpose(1, 2).contiguous(), None

    def check_direction(self, module: nn.Module, causal: bool | None, batch_is_causal: bool, both_ways: bool) -> None:
        """Raise ValueError unless the layer, the mask of its model and the batch agree on who sees whom."""
        name = type(module).__name__
        causal = getattr(module, "is_causal", not both_ways) if causal is None else causal
        asked = "both directions" if both_ways else "the tokens before"
        expect(both_ways != causal, f"{name} has is_causal={both_ways}, and its mask shows {asked}", "the same of both")
        direction = "in both directions" if both_ways else "to the tokens before only"
        fits = both_ways != batch_is_causal or self.now.stand_in
        expect(fits, f"{name} attends {direction}", f"a batch of shard_batch(..., causal={not both_ways})")

    def tuned(self, module: Any, q: Tensor, documents: tuple[int, ...] | None) -> Tensor:
        """q (B, H, C, D) of Llama 4, which grows with the place of a token in its document, and not in the shard."""
        here, at = torch.arange(q.shape[2]), self.now.at
        if at is None:
            S = q.shape[2] * self.world_size
            at = document_positions(documents or (S,))[positions(self.where.layout, S, self.rank, self.world_size)]
        factor, wanted = (
            torch.log1p((x + 1.0).div(module.floor_scale).floor()) * module.attn_scale + 1 for x in (here, at)
        )
        return q * (wanted / factor).to(q)[:, None]

    def show_longest(self, model: nn.Module) -> None:
        """Give its hooks to each part with rotary frequencies that depend on the longest position, if it is new."""
        for part in model.modules():
            by_length = any(kind in str(getattr(part, "rope_type", None)) for kind in BY_LENGTH)
            if by_length and self.shrink not in part._forward_hooks.values():
                part.register_forward_pre_hook(self.stretch, with_kwargs=True)
                part.register_forward_hook(self.shrink)

    def stretch(self, part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Before the rotary frequencies: show the longest position too. Some models choose frequencies by it."""
        if self.now.longest is None:
            return args, kwargs
        passed = inspect.signature(part.forward).bind(*args, **kwargs).arguments
        at = passed["position_ids"]
        passed["position_ids"] = torch.cat([at, at.new_full((*at.shape[:-1], 1), self.now.longest)], dim=-1)
        return (), passed

    def shrink(self, part: nn.Module, args: tuple, result: Any) -> Any:
        """After them: leave out the row of that position."""
        if self.now.longest is None:
            return result
        return tuple(x[:, :-1] for x in result) if isinstance(result, tuple) else result[:, :-1]


# What stands in for the ring in the proof ---------------------------------------------------------------------------


def own_token(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """No attention: what a token gets comes from its own q, k and v, (B, H, S, Dv)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    unequal = torch.arange(1, q.shape[3] + 1).to(q).cos()  # a rotation of q or k changes this sum, unlike q·k
    return v + ((q + 2 * k) * unequal).mean(dim=3, keepdim=True).to(v.dtype)


def full_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """What the ring would compute with these options, on one process, by the definition: (B, H, S, Dv)."""
    scale, sinks, softcap = (options.get(name) for name in ("scale", "sinks", "softcap"))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)  # (B, H, S, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(q.shape[2])
    seen = Mask(options["causal"], options["documents"], options["window"]).dense(keys, len(keys))
    if options.get("chosen") is not None:
        seen = seen & picked(options["chosen"].cpu(), len(keys))[:, None]
    scores = scores.masked_fill(~seen.to(q.device), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], dim=3)
    return scores.softmax(dim=3)[..., : len(keys)] @ v


def picked(chosen: Tensor, keys: int) -> Tensor:
    """Whether a query chose each of so many keys: (B, C, keys), of chosen (B, C, n). -1 stands for none."""
    places = chosen.long().masked_fill(chosen < 0, keys)
    shape = (*places.shape[:2], keys + 1)
    return torch.zeros(shape, dtype=torch.bool, device=chosen.device).scatter_(2, places, True)[..., :keys]
