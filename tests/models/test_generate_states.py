"""Generation of a hybrid model: token for token what one process computes, in constant memory; and with mistakes."""

from contextlib import nullcontext
from functools import lru_cache, partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringlab.models.generate import SpreadCache, alone, generate, seeded
from ringlab.models.generate_states import HybridCache
from ringlab.models.transformer import Linear
from ringlab.training.linear_attention import recurrence
from ringlab.training.short_convolution import short_convolution
from tests.attention import SEED
from tests.mistakes import refusal

NEW = 6
SIZES = {"vocab": 61, "layers": 4, "linear": 1, "hidden": 48, "heads": 6, "kv_heads": 2, "feedforward": 40}
LENGTHS = ((1, 17, 6), (2, 3))  # of the prompts: they end on different ranks, some before the convolution is full


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(5 + SEED)
    return [torch.randint(61, (length,), generator=generator).tolist() for length in lengths]


@lru_cache
def right(lengths):
    model = seeded(F.scaled_dot_product_attention, Linear(short_convolution, recurrence), **SIZES)
    return [alone(model, prompt, NEW) for prompt in prompts_of(lengths)]


def answers(context, layout, lengths, wrong=None):
    """The new tokens, and how many numbers the states have after the prompt and at the end."""
    counts = []

    def counted(cache, position, store=SpreadCache.store):
        counts.append(sum(x.numel() for x in (*cache.states, *cache.ends)))
        return store(cache, position)

    cache = HybridCache(layout)
    with WRONG[wrong]() if wrong else nullcontext(), mock.patch.object(HybridCache, "store", counted):
        tokens = generate(seeded(cache, cache, **SIZES), cache, prompts_of(lengths), NEW)
    return tokens.tolist(), {*counts, sum(x.numel() for x in (*cache.states, *cache.ends))}


@pytest.mark.parametrize(("P", "layout"), [(1, "zigzag"), (3, "zigzag"), (4, "contiguous")])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_hybrid_generates_what_one_process_computes_and_its_states_do_not_grow(ranks, P, layout, lengths):
    D, B = 8, len(lengths)
    for tokens, counts in ranks(P, answers, layout, lengths):
        assert tokens == right(lengths)
        assert counts == {2 * B * (6 * D * D + 10 * D * 3)}  # 2 linear layers: 6 states, 6 + 2 + 2 heads before 4 taps


def cache_with(name, change):
    """HybridCache whose method `name` is changed: change(cache, method, *arguments)."""
    method = getattr(HybridCache, name)
    return lambda: mock.patch.object(
        HybridCache, name, lambda cache, *args: change(cache, partial(method, cache), *args)
    )


def own(cache, method, *args):
    """Every rank keeps what it has, as if it were all."""
    with mock.patch.object(dist, "all_reduce"):
        return method(*args)


def padding_written(cache, method, *args):
    with mock.patch.object(cache, "at", torch.zeros_like(cache.at)):
        return method(*args)


WRONG = {
    "the state stays on its rank": cache_with("rule", own),
    "the last tokens stay on their rank": cache_with("convolution", own),
    "padding changes the state": cache_with("rule", padding_written),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_is_seen(ranks, wrong):
    results = ranks(3, answers, "zigzag", LENGTHS[0], wrong)
    assert any(tokens != right(LENGTHS[0]) for tokens, _ in results)


def without_states(context):
    cache = SpreadCache()
    generate(seeded(cache, **SIZES), cache, [[1]], 2)


def test_a_cache_without_states_is_refused(ranks):
    assert "with linear layers by Transformer(..., cache, cache)" in refusal(ranks.outcomes(3, without_states))
