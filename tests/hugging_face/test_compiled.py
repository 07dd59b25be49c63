"""torch.compile around two ways, and around a model that generates: right, in few graphs."""

import functools

import pytest
import torch

from ringlab.models.generate import NEW, PROMPTS, SpreadCache, alone, generate, seeded
from tests.attention import assert_four, gradients
from tests.every_way import Problem, attention_of, cut, results_on_rank, whole

CAUSAL = {"causal": True, "layout": "zigzag"}
PROBLEM = Problem(4, 2, 36, CAUSAL)


def around(attention, options, q, k, v):
    """Something to compile before the attention and behind it: in powers of two, so nothing is rounded."""
    return 4 * attention(2 * q, k, v, **options)


def compiled_on_rank(context, way, backend):
    """Chunks of out, dq, dk, dv of PROBLEM, twice; and how many graphs there were after the first and second time."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.compile(functools.partial(around, attention_of(context, way, 3), CAUSAL), backend=backend)
    q, k, v, d_out = cut(context, PROBLEM.layout, None, *PROBLEM.inputs())
    results = []
    for _ in range(2):
        out, d_q, d_k, d_v = gradients(model, q / 2, k, v, d_out / 4)
        results.append(((out / 4, d_q / 2, d_k, d_v), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("way", "backend"), [("ring", "aot_eager"), ("all-to-all", "eager")])
def test_a_way_is_right_between_two_graphs(ranks, way, backend):
    uncompiled = [results[0] for results in ranks(3, results_on_rank, way, 3, [PROBLEM])]
    for per_rank in zip(*ranks(3, compiled_on_rank, way, backend), strict=True):
        assert [graphs for _, graphs in per_rank] == [2] * 3
        four = [chunks for chunks, _ in per_rank]
        assert_four(whole(four, PROBLEM.layout), PROBLEM.right())
        assert all(torch.equal(x, y) for pair in zip(four, uncompiled, strict=True) for x, y in zip(*pair, strict=True))


def written(context):
    """The tokens of a compiled model, and how many graphs there were."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cache = SpreadCache()
    model = torch.compile(seeded(cache), backend="aot_eager")
    return generate(model, cache, PROMPTS, NEW).tolist(), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.exhaustive
def test_a_compiled_model_generates_in_few_graphs(ranks):
    model = seeded(torch.nn.functional.scaled_dot_product_attention)
    right = [alone(model, prompt, NEW) for prompt in PROMPTS]
    for tokens, graphs in ranks(3, written):
        assert tokens == right
        assert graphs < NEW  # not one for each token
