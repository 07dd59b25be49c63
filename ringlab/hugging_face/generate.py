"""`model.generate` over a spread cache: a Hugging Face model reads its prompts in the ring and writes with the merge.

    prompt       padding on its left is moved to its right, where no token sees it; each rank reads its chunk
    new token    each rank computes it over its own keys; `merge_over_ranks` in each layer
    its choice   is rank 0's, greedy or sampled; the others take it, and rank 0 says when a text ends

transformers' own loop of greedy search and sampling runs on every rank. It calls the model, and it asks its criteria
whether a text ends. At these two places the ranks meet. So the arguments of `generate` work unchanged. Beams,
assistants and other caches need another loop or another cache: they are refused.

Shapes: input_ids (B, S), padding on the left. The longest prompt, rounded up to what the layout needs, is dealt out: a
rank reads (B, C). It has C slots and its part of those for new tokens, k and v (B, G, slots, D) in each layer. For a
new token a rank gives 1 message a layer, of B·H·(D + 2) numbers, float32 at least, and 1 of 2·B int64. After the
prompt it gives 1 all_reduce of B·vocab logits. A window hides keys, and frees no slots.

A first reader may skip this file. Its tests compare the tokens with those of one process.
On every rank, with the same prompts (torchrun --nproc_per_node=4 write.py):

    with join_ring() as context:
        model = AutoModelForCausalLM.from_pretrained(NAME).to(context.device)
        prompts = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt").to(context.device)
        with spread_generation(model):
            tokens = model.generate(**prompts, max_new_tokens=100)

A model that was trained in a ring leaves it first: stop_ring(model), then model.eval(). That of a RingTrainer is
trainer.model.

Before: ../models/generate.py, the cache; use.py, the model. After: your own prompts.
Source: transformers 5.23, GenerationMixin.generate; Shyam et al. 2024 (Tree Attention), algorithm 3.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ringlab.models.generate import EMPTY, SpreadCache
from ringlab.ring.layouts import Layout, LayoutName, layout_of, positions
from ringlab.support.agreement import agree_same, flat_group, members, of_every_rank
from ringlab.support.extras import extra

with extra("hf", __name__):
    from transformers import Cache, PreTrainedModel
    from transformers.generation import StoppingCriteriaList
    from transformers.generation.configuration_utils import GenerationMode

from ringlab.hugging_face.attention import BY_LENGTH, LayerAttention, Pass
from ringlab.hugging_face.batch import checksum_of_weights
from ringlab.hugging_face.forward import check_kind
from ringlab.hugging_face.masks import Asked, BothWays, ChunkedAttention
from ringlab.hugging_face.proof import prove
from ringlab.hugging_face.seam import give, indexers, linear_layers, other_methods, registered, take
from ringlab.hugging_face.use import unwrapped
from ringlab.models.mesh import MeshOrGroup, placed
from ringlab.support.expect import expect


class Elsewhere(Cache):
    """What transformers takes for its cache: it knows how many tokens there are. K and V are in the SpreadCache."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.length = 0

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return k, v

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


class Together(StoppingCriteriaList):
    """The criteria by which texts end. The tokens that rank 0 chose, and the ends that it found, hold on every rank.

    Ranks may round differently, and have other seeds or clocks. Alone, each would go on with a text of its own.
    """

    def __init__(self, criteria: StoppingCriteriaList, device: torch.device, group: ProcessGroup | None) -> None:
        super().__init__(criteria)
        self.device, self.group = device, group

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """Put rank 0's tokens into the last column of input_ids (B, S) -> whether each text has ended, (B,)."""
        ended = super().__call__(input_ids, scores, **options)
        chosen = torch.stack([input_ids[:, -1], ended.to(input_ids)]).to(self.device)  # (2, B)
        input_ids[:, -1], ended = of_every_rank(chosen, self.group)[0].to(input_ids.device)
        return ended.bool()


@dataclass(eq=False)
class SpreadGeneration(LayerAttention):
    """The attention of a SpreadCache, and what runs before and after each forward pass."""

    @torch.no_grad()
    def generate(self, model: PreTrainedModel, name: str, *args: Any, **kwargs: Any) -> Any:
        """As the model's own. `name` is that of `attend`. The cache is not returned."""
        loop: dict[str, Any] = {}
        group: Any = self.where.mesh_or_group  # flat
        agree_same(lambda: (None, arguments(model, self.where.layout, loop, args, kwargs, group)), group)
        self.lengths = loop.pop("lengths").to(model.device)  # (B, 1)
        self.room = -(-loop.pop("stored") // self.world_size)
        self.cache, self.elsewhere = SpreadCache(self.where.layout, group=group), Elsewhere()
        loop["past_key_values"] = self.elsewhere
        loop["stopping_criteria"] = Together(loop["stopping_criteria"], model.device, group)
        implementation = model.config._attn_implementation
        hooks = [model.register_forward_pre_hook(self.feed, with_kwargs=True), model.register_forward_hook(self.answer)]
        try:
            model.set_attn_implementation(name)
            result = type(model)._sample(model, **loop)
        finally:
            model.set_attn_implementation(implementation)
            for hook in hooks:
                hook.remove()
            del self.cache
        if not isinstance(result, Tensor):
            result.past_key_values = None
        return result

    def feed(self, model: nn.Module, args: tuple, passed: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Give the model this rank's chunk of the prompts, or the new token of each."""
        known = passed.get("past_key_values") is self.elsewhere
        expect(known, "the model was called with another cache", "only the calls of generate itself")
        tokens, self.now = passed["input_ids"], Pass(stand_in=self.over_cache)
        if self.elsewhere.length == 0:
            passed = {**passed, **self.chunk(tokens)}
        else:
            self.cache.store(self.lengths + self.cache.stored)
        ones = torch.ones_like(passed["input_ids"])
        return args, {**passed, "attention_mask": ones}

    def chunk(self, tokens: Tensor) -> dict[str, Tensor]:
        """This rank's chunk of prompts (B, S), at positions (B, C), and where in it the prompts end, (B, 1)."""
        multiple = max(1, layout_of(self.where.layout).multiple) * self.world_size
        longest = int(self.lengths.max())
        seq_len = -(-longest // multiple) * multiple
        at = positions(self.where.layout, seq_len, self.rank, self.world_size).to(tokens.device)  # (C,)
        self.cache.begin(torch.where(at < self.lengths, at, EMPTY), self.room)
        self.ends = at == self.lengths - 1  # (B, C): the logits of these tokens say what follows
        last = tokens.shape[1] - 1
        places = (at + tokens.shape[1] - self.lengths).clamp(max=last)  # (B, C), in rows with padding on the left
        return {
            "input_ids": tokens.gather(1, places),
            "position_ids": at.clamp(max=longest - 1).expand_as(places),
            "logits_to_keep": self.ends.int().argmax(dim=1, keepdim=True),
        }

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Asked = None, **passed: Any
    ) -> tuple[Tensor, None]:
        """As that of a ring; but chunks, both directions, and queries that grow with their place, are refused."""
        tuned = getattr(module, "attn_temperature_tuning", False)
        has = f"{type(module).__name__} has {'a temperature by position' if tuned else attention_mask}"
        known = not tuned and not isinstance(attention_mask, ChunkedAttention | BothWays)
        expect(known, has, "none: a spread cache has causal attention and windows")
        rest = {name: x for name, x in passed.items() if name not in ("use_cache", "logits_to_keep")}  # of the model
        return super().attend(module, query, key, value, attention_mask, **rest)

    def over_cache(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """What stands in for the ring, with the options that a SpreadCache has."""
        return self.cache.attend(q, k, v, **{name: options[name] for name in ("window", "scale", "sinks", "softcap")})

    def answer(self, model: nn.Module, args: tuple, output: Any) -> Any:
        """Give every rank the logits after each prompt, (B, 1, vocab)."""
        layers, calls = self.proved.layers, self.now.calls
        expect(calls == layers, f"{layers} layers called the spread cache {calls} time(s)", "once each")
        if self.elsewhere.length == 0:
            output.logits = output.logits.masked_fill(~self.ends.any(dim=1)[:, None, None], 0.0)
            dist.all_reduce(output.logits, group=self.where.mesh_or_group)
            self.elsewhere.length = int(self.lengths.max())
        else:
            self.elsewhere.length += 1
        return output


@contextmanager
def spread_generation(
    model: PreTrainedModel, mesh_or_group: MeshOrGroup = None, layout: LayoutName | Layout = "zigzag"
) -> Iterator[None]:
    """While this is open, `model.generate` runs on all ranks of `mesh_or_group` (None: the whole job) together.

    Every rank calls it with the same weights, prompts and arguments, and gets the tokens of rank 0. Raises ValueError,
    with the reason, for a model that cannot be proved to be right in shards (`prove`), and for chunks, a temperature by
    position, and frequencies that depend on the longest position. The rest that a spread cache cannot do is refused
    with ValueError when `generate` is called, on every rank.
    """
    model = unwrapped(model)
    name = type(model).__name__
    if hasattr(model, "ring") or "generate" in vars(model):
        raise ValueError(f"{name} is in a ring, or generates by another function; expected stop_ring(model) first")
    expect(model.can_generate(), f"{name} has no `generate`", "a causal language model")
    rope = str(getattr(model.config.get_text_config(), "rope_parameters", None))
    if any(kind in rope for kind in BY_LENGTH):
        raise ValueError(f"{name} chooses its frequencies by the longest position; expected frequencies that stay")
    check_kind(model)
    expect(not indexers(model), f"{name} has an indexer", "none: its keys are not in a spread cache")
    expect(not linear_layers(model), f"{name} has linear layers", "attention in every layer: states are not spread")
    where = placed(mesh_or_group, layout)
    where = replace(where, mesh_or_group=flat_group(where.mesh_or_group))
    spread = SpreadGeneration(where, *where.place)
    name = registered(spread)
    spread.proved = prove(model, spread, name)
    give(model, generate=partial(spread.generate, model, name))
    try:
        yield
    finally:
        take(model, "generate")


LOOP = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
LOOP |= {"generation_config", "logits_processor", "stopping_criteria", "streamer", "synced_gpus"}
NOT_HERE = ("output_attentions", "output_hidden_states", "prefill_chunk_size", "token_healing", "cache_config")


def arguments(
    model: PreTrainedModel, layout: str | Layout, loop: dict[str, Any], args: tuple, kwargs: dict[str, Any], group: Any
) -> dict[str, Any]:
    """Fill `loop` with the arguments of transformers' loop, lengths (B, 1) and how many new tokens are stored at most.

    Returns what must be the same on all ranks. Raises ValueError for what a spread cache cannot do.
    """
    expect(not model.training, "the model is in training mode", "model.eval(): dropout would differ from rank to rank")
    loop |= prepared(model, args, kwargs)
    tokens, config = loop["input_ids"], loop["generation_config"]
    unknown = [name for name, x in loop.items() if name not in LOOP and x is not None and x != {}]  # of pictures
    unknown += [name for name in NOT_HERE if getattr(config, name, None)]
    expect(not unknown, f"generate got {', '.join(dict.fromkeys(unknown))}", "none: a rank has its own tokens only")
    guided = config.guidance_scale not in (None, 1)
    expect(not guided, f"guidance_scale is {config.guidance_scale}", "None: it needs a second cache")
    uses, kind = config.use_cache, config.cache_implementation
    usual = uses is not False and kind in (None, "dynamic")
    expect(usual, f"use_cache is {uses} and the cache {kind}", "the defaults: it is the only cache here")
    if getattr(loop.get("past_key_values"), "_is_user_defined", False):
        raise ValueError("past_key_values were given; expected none: each call of generate fills a cache of its own")
    if loop.get("streamer") is not None and members(group)[0] > 0:
        raise ValueError("a streamer was given; expected one on rank 0 only, whose tokens hold on every rank")
    loop |= {"lengths": lengths_of(model, **loop), "stored": max(config.max_length - tokens.shape[1] - 1, 0)}
    return {
        "prompts": (tuple(tokens.shape), *(zlib.crc32(x.cpu().numpy().tobytes()) for x in (tokens, loop["lengths"]))),
        "arguments": zlib.crc32(repr(sorted(config.to_diff_dict().items())).encode()),
        "layout": str(layout),
        "weights": checksum_of_weights(model),
    }


def lengths_of(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> Tensor:
    """How many tokens the prompts (B, S) have, (B, 1). Raises ValueError for other padding, tokens or positions."""
    vocab = model.get_input_embeddings().weight.shape[0]
    if input_ids.numel() == 0 or input_ids.min() < 0 or input_ids.max() >= vocab:
        raise ValueError(f"input_ids are {tuple(input_ids.shape)}; expected tokens in each row, from 0 to {vocab - 1}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids)
    if mask.shape != input_ids.shape or (mask[:, -1] != 1).any() or (mask.diff(dim=1) < 0).any():
        raise ValueError("attention_mask has padding at its end or between tokens; expected padding on the left only")
    counted = mask.cumsum(dim=1) - 1
    if position_ids.shape[-1:] != counted.shape[-1:] or ((position_ids - counted) * mask).any():
        raise ValueError("position_ids were given; expected none, or 0, 1, 2, ... in each prompt")
    lengths, text = mask.sum(dim=1, keepdim=True), model.config.get_text_config()
    longest, limit = int(lengths.max()), getattr(text, "max_position_embeddings", None)
    if limit and longest > limit and not getattr(text, "rope_parameters", None):  # learned positions
        raise ValueError(f"a prompt has {longest} tokens; expected {limit} at most, max_position_embeddings")
    return lengths


def prepared(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that `generate` prepares for its loop of greedy search and sampling. Nothing is generated."""
    loop: dict[str, Any] = {}

    def keep(model: PreTrainedModel, input_ids: Tensor, **given: Any) -> Tensor:
        loop.update(given, input_ids=input_ids)
        return input_ids

    def known(model: PreTrainedModel, mode: GenerationMode, *_: Any) -> None:
        one = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        expect(one, f"generate was asked for {mode.value}", "greedy search or sampling, num_beams=1")

    for name in ("custom_generate", "cache_implementation"):  # they would leave this path before the loop
        given = kwargs.get(name)
        expect(given is None, f"{name} is {given}", "None: the spread cache has transformers' own loop")
    with other_methods(model, _sample=keep, _get_deprecated_gen_repo=known) as own:
        try:
            own.generate(model, *args, **kwargs)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"generate raises {type(error).__name__}: {error}") from error  # on every rank
    expect(loop, f"generate of {own.__name__} did not reach its loop", "transformers' own generate")
    return loop
