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

    $ python -m ringlab.models.hugging_face_generate
    prompts of 13 and 6 tokens, 9 new ones. 4 ranks, zigzag, float64, against one process with sdpa:
    ok      Granite, scale 0.6: the same tokens
    ok      Granite, sampled, with another seed on each rank: the same tokens
    off     Mistral, the window dropped: other tokens
    off     Granite, the scale dropped: other tokens
    refused Granite, beams: rank 0: generate was asked for beam_search
    refused Granite, padding on the right: rank 0: attention_mask has padding at its end or between tokens

On every rank, with the same prompts (torchrun --nproc_per_node=4 write.py):

    with join_ring() as context:
        model = AutoModelForCausalLM.from_pretrained(NAME).to(context.device)
        prompts = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt").to(context.device)
        with spread_generation(model):
            tokens = model.generate(**prompts, max_new_tokens=100)

A model that was trained in a ring leaves it first: stop_ring(model), then model.eval(). That of a RingTrainer is
trainer.model.

It needs transformers: pip install '.[hf]'.

Before: generate.py, the cache; hugging_face.py, the model. After: your own prompts.
Source: transformers 5.23, GenerationMixin.generate; Shyam et al. 2024 (Tree Attention), algorithm 3.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ringlab.models.generate import EMPTY, SpreadCache, agree_on_facts
from ringlab.support.agreement import members, of_every_rank
from ringlab.support.extras import extra
from ringlab.support.processes import RankContext, launch
from ringlab.training.layouts import Layout, layout_of, positions

with extra("hf", __name__):
    from transformers import (
        Cache,
        GraniteConfig,
        GraniteForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        PreTrainedModel,
    )
    from transformers.generation import StoppingCriteriaList

from ringlab.models.hugging_face import BY_LENGTH, registered
from ringlab.models.hugging_face_batch import (
    MeshOrGroup,
    arguments,
    attempt,
    expect,
    group_of,
    judged,
)
from ringlab.models.hugging_face_masks import Asked, Attention, BothWays, Chunks
from ringlab.models.hugging_face_proof import check_kind, prove


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
        said = torch.stack([input_ids[:, -1], ended.to(input_ids)]).to(self.device)
        input_ids[:, -1], ended = of_every_rank(said, self.group)[0].to(input_ids.device)
        return ended.bool()


@dataclass(eq=False)
class SpreadGeneration(Attention):
    """The attention of a SpreadCache, and what runs before and after each forward pass."""

    layers: int = 0  # calls in a forward pass, as proved

    @torch.no_grad()
    def generate(self, model: PreTrainedModel, name: str, *args: Any, **kwargs: Any) -> Any:
        """As the model's own. `name` is that of `attend`. The cache is not returned."""
        loop: dict[str, Any] = {}
        agree_on_facts(lambda: arguments(model, self.layout, loop, args, kwargs, self.group), self.group)
        self.lengths = loop.pop("lengths").to(model.device)  # (B, 1)
        self.room = -(-loop.pop("stored") // self.world_size)
        self.cache, self.elsewhere = SpreadCache(self.layout, group=self.group), Elsewhere()
        loop["past_key_values"] = self.elsewhere
        loop["stopping_criteria"] = Together(loop["stopping_criteria"], model.device, self.group)
        own = model.config._attn_implementation
        hooks = [
            model.register_forward_pre_hook(self.feed, with_kwargs=True),
            model.register_forward_hook(self.answer),
        ]
        try:
            model.set_attn_implementation(name)
            result = type(model)._sample(model, **loop)
        finally:
            model.set_attn_implementation(own)
            for hook in hooks:
                hook.remove()
            del self.cache
        if not isinstance(result, Tensor):
            result.past_key_values = None
        return result

    def feed(self, model: nn.Module, args: tuple, passed: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Give the model this rank's chunk of the prompts, or the new token of each."""
        own = passed.get("past_key_values") is self.elsewhere
        expect(own, "the model was called with another cache", "only the calls of generate itself")
        tokens, self.calls = passed["input_ids"], 0
        if self.elsewhere.length == 0:
            passed = {**passed, **self.chunk(tokens)}
        else:
            self.cache.store(self.lengths + self.cache.stored)
        ones = torch.ones_like(passed["input_ids"])
        return args, {**passed, "attention_mask": ones}

    def chunk(self, tokens: Tensor) -> dict[str, Tensor]:
        """This rank's chunk of prompts (B, S), at positions (B, C), and where in it the prompts end, (B, 1)."""
        rank, _ = members(self.group)
        multiple = max(1, layout_of(self.layout).multiple) * self.world_size
        longest = int(self.lengths.max())
        seq_len = -(-longest // multiple) * multiple
        at = positions(self.layout, seq_len, rank, self.world_size).to(tokens.device)  # (C,)
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
        known = not tuned and not isinstance(attention_mask, Chunks | BothWays)
        expect(known, has, "none: a spread cache has causal attention and windows")
        rest = {name: x for name, x in passed.items() if name not in ("use_cache", "logits_to_keep")}  # of the model
        return super().attend(module, query, key, value, attention_mask, **rest)

    def over_cache(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """What stands in for the ring, with the options that a SpreadCache has."""
        known = {name: options[name] for name in ("window", "scale", "sinks", "softcap")}  # the rest is the cache's own
        return self.cache.attend(q, k, v, **known)

    def answer(self, model: nn.Module, args: tuple, output: Any) -> Any:
        """Give every rank the logits after each prompt, (B, 1, vocab)."""
        called = f"{self.layers} layers called the spread cache {self.calls} time(s)"
        expect(self.calls == self.layers, called, "once each")
        if self.elsewhere.length == 0:
            output.logits = output.logits.masked_fill(~self.ends.any(dim=1)[:, None, None], 0.0)
            dist.all_reduce(output.logits, group=self.group)
            self.elsewhere.length = int(self.lengths.max())
        else:
            self.elsewhere.length += 1
        return output


@contextmanager
def spread_generation(
    model: PreTrainedModel, mesh_or_group: MeshOrGroup = None, layout: str | Layout = "zigzag"
) -> Iterator[None]:
    """While this is open, `model.generate` runs on all ranks of `mesh_or_group` (None: the whole job) together.

    Every rank calls it with the same weights, prompts and arguments, and gets the tokens of rank 0. Raises ValueError,
    with the reason, for a model that cannot be proved to be right in shards (`prove`), and for chunks, a temperature by
    position, and frequencies that depend on the longest position. The rest that a spread cache cannot do is refused
    with ValueError when `generate` is called, on every rank.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT wraps a model
    name = type(model).__name__
    free = not hasattr(model, "ring") and "generate" not in vars(model)
    expect(free, f"{name} is in a ring, or generates by another function", "neither: stop_ring(model) first")
    expect(model.can_generate(), f"{name} has no `generate`", "a causal language model")
    rope = str(getattr(model.config.get_text_config(), "rope_parameters", None))
    stay = not any(kind in rope for kind in BY_LENGTH)
    expect(stay, f"{name} chooses its frequencies by the longest position", "frequencies that stay")
    check_kind(model)
    group = group_of(mesh_or_group)
    spread = SpreadGeneration(layout, group, members(group)[1])
    name = registered(spread)
    spread.layers, _ = prove(model, spread, name)
    spread.stand_in = spread.over_cache
    model.generate = partial(spread.generate, model, name)
    try:
        yield
    finally:
        del model.generate


NEW = 9
PROMPTS = torch.randint(1, 128, (2, 13), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(PROMPTS)
MASK[1, :7] = 0  # padding on the left
CASES = {  # what should come of it
    "Granite, scale 0.6": "ok",
    "Granite, sampled, with another seed on each rank": "ok",
    "Mistral, the window dropped": "off",
    "Granite, the scale dropped": "off",
    "Granite, beams": "refused",
    "Granite, padding on the right": "refused",
}


def _model(name: str, own: bool = True) -> PreTrainedModel:
    """With its own window or scale, or without; with large random weights, so that the tokens depend on the prompt."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    if "Mistral" in name:
        model: PreTrainedModel = MistralForCausalLM(MistralConfig(**sizes, sliding_window=4 if own else None))
    else:
        model = GraniteForCausalLM(GraniteConfig(**sizes, attention_multiplier=0.6 if own else 8**-0.5))
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.3)
    return model.double().eval()


def _asked(case: str) -> dict[str, Any]:
    prompts = {"input_ids": PROMPTS, "attention_mask": MASK.flip(1) if "right" in case else MASK}
    return {**prompts, "max_new_tokens": NEW, "do_sample": "sampled" in case, "num_beams": 2 if "beams" in case else 1}


def _generated(context: RankContext, case: str) -> Tensor:
    model = _model(case, own="dropped" not in case)
    torch.manual_seed(context.rank)
    with spread_generation(model):
        return model.generate(**_asked(case))


def _demo(context: RankContext) -> list[Tensor | str]:
    return [attempt(_generated, context, case) for case in CASES]


def main() -> int:
    counts = " and ".join(map(str, MASK.sum(dim=1).tolist()))
    said = "4 ranks, zigzag, float64, against one process with sdpa"
    print(f"prompts of {counts} tokens, {NEW} new ones. {said}:")

    def judge(case: str, results: list[Tensor]) -> tuple[str, str]:
        model = _model(case)
        torch.manual_seed(0)  # that of rank 0
        right = model.generate(**_asked(case))
        same = all(torch.equal(result, right) for result in results)
        return ("ok", "the same tokens") if same else ("off", "other tokens")

    of_cases = zip(*launch(_demo, 4), strict=True)
    return judged(CASES, [each[0] if isinstance(each[0], str) else list(each) for each in of_cases], judge)


if __name__ == "__main__":
    sys.exit(main())
