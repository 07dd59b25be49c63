"""An indexer of transformers over ranks: a query's keys are chosen among those of all ranks, by the model's own code.

    a layer     indices = indexer(hidden states, ..., mask, cache)      the positions of the best `index_topk` keys
    here        every rank's index keys go round, one head of E numbers a token
                the same forward pass, some queries at a time: their mask over all S tokens, and a cache with all keys

A cache is where an indexer of transformers looks for the keys of other tokens. So its scores, their dtype and its
choice between equal ones stay its own, and it gives positions in the whole sequence. The layer passes them to
AttentionInterface as `indices`, and the ring attends to them. A rank keeps S index keys, and the scores of few queries.

Shapes: hidden states (B, C, ·), index keys (B, C, E), mask (C, S), indices (B, C, n), -1 for a key that is hidden.

A first reader may skip this file. Before: attention.py. After: states.py, layers without keys.
Source: transformers 5.23, DeepseekV32Indexer and Cache.update_indexer; DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1.
"""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ringlab.ring.layouts import positions
from ringlab.ring.masks import Mask
from ringlab.ring.overlap import arriving_blocks
from ringlab.support.agreement import flat_group, one_pass
from ringlab.support.expect import expect
from ringlab.support.extras import extra

with extra("hf", __name__):
    from ringlab.hugging_face.attention import LayerAttention, picked
    from ringlab.hugging_face.seam import indexers, meanwhile, own_forward

QUERIES = 64  # of which a rank has scores at a time: J·S numbers for each, where an indexer has J heads


class Keys:
    """A cache for an indexer. It notes the index keys that it is given, and returns `whole` in their place."""

    def __init__(self, whole: Tensor | None = None) -> None:
        self.own, self.whole = torch.empty(0), whole

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        self.own = keys
        return keys if self.whole is None else self.whole


@torch.no_grad()
def choose(
    gather: Callable[[Tensor], Tensor],
    seen: Callable[[Tensor, Any], Tensor],
    queries: int,
    part: nn.Module,
    *args: Any,
    **kw: Any,
) -> Tensor:
    """The forward pass of the indexer `part` of this rank's tokens: indices (B, C, n) in the whole sequence.

    `gather` makes the keys of the whole sequence (B, S, E) of those of this rank, `seen` a mask (n, S) of
    n tokens and the mask that the layer was given.
    """
    own = own_forward(part)
    passed = inspect.signature(own).bind(part, *args, **kw).arguments
    (_, itself), *rest = passed.items()
    C = passed["hidden_states"].shape[1]

    def of(x: Any, at: Tensor) -> Any:
        if isinstance(x, tuple):
            return tuple(of(y, at) for y in x)
        return x[:, at] if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == C else x

    def run(at: Tensor, mask: Tensor, cache: Keys) -> Tensor:
        named = {**{name: of(x, at) for name, x in rest}, "attention_mask": mask[None], "past_key_values": cache}
        return own(itself, **named)

    parts, keys, chosen = torch.arange(C, device=passed["hidden_states"].device).split(queries), [], []
    for at in parts:
        cache = Keys()
        run(at, torch.ones(len(at), len(at), dtype=torch.bool, device=at.device), cache)
        keys.append(cache.own)
    whole = gather(torch.cat(keys, dim=1))
    for at in parts:
        mask = seen(at, passed["attention_mask"])
        indices = run(at, mask, Keys(whole)).long()
        hidden = ~mask.expand(len(indices), -1, -1).gather(2, indices)
        chosen.append(indices.masked_fill(hidden, -1))
    return torch.cat(chosen, dim=1)


def in_ring(attention: LayerAttention, part: nn.Module, hidden_states: Tensor, *args: Any, **kw: Any) -> Tensor:
    """`choose` over the ranks of a ring, in the documents of the pass."""
    P, rank, layout = attention.world_size, attention.rank, attention.where.layout
    group = flat_group(attention.where.mesh_or_group)

    def gather(keys: Tensor) -> Tensor:
        B, C, E = keys.shape
        whole = keys.new_empty(B, P * C, E)
        blocks = arriving_blocks(keys[:, None], keys[:, None, :, :0], lengths=[C] * P, group=group)
        for t, (k_j, _) in enumerate(blocks):
            whole[:, positions(layout, P * C, (rank - t) % P, P)] = k_j[:, 0]
        return whole

    def seen(at: Tensor, asked: Any) -> Tensor:
        mine = positions(layout, P * hidden_states.shape[1], rank, P)[at.cpu()]
        return Mask(True, asked.documents).dense(mine, P * hidden_states.shape[1]).to(at.device)

    with one_pass(group):
        return choose(gather, seen, QUERIES, part, hidden_states, *args, **kw)


def alone(part: nn.Module, hidden_states: Tensor, *args: Any, queries: int = QUERIES, **kw: Any) -> Tensor:
    """`choose` on one process."""

    def seen(at: Tensor, _: Any) -> Tensor:
        return Mask(True).dense(at.cpu(), hidden_states.shape[1]).to(at.device)

    return choose(lambda keys: keys, seen, queries, part, hidden_states, *args, **kw)


def cut(part: nn.Module, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Each token has chosen the first one: for an attention that asks nobody."""
    return torch.zeros(*hidden_states.shape[:2], 1, dtype=torch.int64, device=hidden_states.device)


def check_indexers(model: nn.Module, run: Callable[[], Any]) -> None:
    """Raise ValueError unless each indexer, when `run` runs the model, chooses as `alone` does, few queries at a time.

    It must choose few keys for this: 3. Then a query that could not choose what another chose shows it.
    """

    def check(part: Any, args: tuple, kw: dict[str, Any], result: Any) -> None:
        kind, best = type(part).__name__, "positions (B, S, n) of the best index_topk keys, for AttentionInterface"
        tokens = isinstance(result, Tensor) and result.dim() == 3 and not result.is_floating_point()
        expect(tokens and hasattr(part, "index_topk"), f"{kind} chooses keys by another rule", best)
        with meanwhile(part, index_topk=3):
            right, ours = own_forward(part)(part, *args, **kw), alone(part, *args, queries=5, **kw)
        S = right.shape[1]
        past = torch.ones(S, S, dtype=torch.bool, device=right.device).tril()
        same = torch.equal(picked(right, S) & past, picked(ours, S) & past)
        other = f"{kind} chooses other keys for some queries than for all"
        expect(same, other, "the same: else a shard chooses others")

    with torch.no_grad(), ExitStack() as stack:
        for part in indexers(model):
            stack.callback(part.register_forward_hook(check, with_kwargs=True).remove)
        run()
