"""What a GPU changes: kernels, streams, memory, NCCL. 3 or 4 ranks share one GPU where there are no more of them.

`make test-gpu` runs them; `--gpu=cpu` tries the same tests with gloo.
"""

import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from bench import gpu
from ring_doctor import examine
from ringlab.ring.layouts import LAYOUTS
from ringlab.support.processes import Ranks
from tests import every_way as ways
from tests.attention import VIEWS, at_element_3, rows_of_three_more
from tests.every_way import Problem, assert_right_results, masks_of, problems, results_on_rank
from tests.models import test_generate as generation
from tests.models import test_mesh as mesh
from tests.models.test_transformer import errors
from tests.ring import test_trainable_ring as trainable
from tests.ring.test_fused_block import ORDERS, Near, ordered
from tests.states import test_state_ring as states

pytestmark = pytest.mark.gpu

P = 3
WAYS = [("ring", P)] * 3 + [("all-gather", P), ("all-to-all", P), ("double ring", (1, P)), ("hybrid", (P, 1))]
S = 30  # a multiple of 2P
PACKED = {"causal": True, "layout": "zigzag", "documents": [1, 16, 13], "window": 7, "global_tokens": 2}


@pytest.fixture(scope="session")
def device(request):
    return request.config.option.gpu


@pytest.fixture(scope="session")
def ranks(device):
    pool = Ranks(4, 120.0, device)
    yield pool
    pool.stop()


# The kernels ----------------------------------------------------------------------------------------------------------


def test_every_head_dim_dtype_and_shape(ranks, device):
    [rows] = ranks(1, gpu.rows_of_rank, "kernels", gpu.ON[device])
    assert [row for row in rows if not row[1]] == []


def error_of_block(context, *how):
    return gpu.block_error(*gpu.random_inputs(context.device, *how), causal=False)


LARGE = [("float16", 2**16 + 8, 2**16 + 8, 8, 8, 8)]  # dtype, H, G, Sq, Sk, D
LARGE += [(dtype, 1, 1, 40, 2**16 + 40, 64) for dtype in ("float16", "float32")]
LARGE += [(dtype, 2, 1, 2**16 + 40, 40, 64) for dtype in ("float16", "float32")]


@pytest.mark.parametrize("how", LARGE)
def test_counts_beyond_16_bits(ranks, device, how):
    """Heads, keys and queries. float16 has the kernels of bfloat16; a long block in float32 is plain. A CPU
    has none of these kernels: few are enough to try this test."""
    dtype, *counts = how
    assert ranks(1, error_of_block, dtype, *(n if device == "cuda" else n % 2**16 for n in counts)) <= [1]


# The ring and the other ways ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "shape"), [("ring", 3), ("all-gather", 3), ("all-to-all", 3), ("double ring", (2, 2)), ("hybrid", (2, 2))]
)
def test_every_mask_and_layout(ranks, device, way, shape):
    """Dtypes take turns."""
    n = ways.ranks_of(shape)
    tokens, D = (40 * n, 64) if device == "cuda" else (8 * n, 8)
    dtypes = itertools.cycle([torch.bfloat16, torch.float16, torch.float32])
    asked = [(mask, layout) for mask in masks_of(tokens).values() for layout in LAYOUTS]
    each = [
        Problem(2 * n, n, tokens, {**mask, "layout": layout}, dtype=dtype, head_dim=D)
        for (mask, layout), dtype in zip(asked, dtypes, strict=False)
    ]
    assert_right_results(ranks, way, shape, each)


@pytest.mark.parametrize("fused", [False, True])
def test_the_file_that_you_copy(ranks, device, tmp_path, fused):
    aten = "torch.ops.aten" if device == "cuda" else trainable.EMULATED
    path = trainable.with_gpu_blocks(tmp_path, aten) if fused else str(trainable.FILE)
    given = (*trainable.SIZES[:4], 16), torch.bfloat16
    trainable.assert_whole(ranks(P, trainable.on_rank, path, *given), *given, fused_blocks=2 * P * fused)


def in_order(context, i, way, shape, problems):
    with mock.patch.dict(ways.WAYS, {way: ordered(ways.WAYS[way], *ORDERS[i])}):
        return results_on_rank(context, way, shape, problems)


@pytest.mark.parametrize("i", range(3))
def test_a_plan_fits_every_later_call(ranks, device, i):
    """What cuDNN keeps in a process: layers of two masks, tensors in other orders. And all scores near -100."""
    S, D = (256 * P, 64) if device == "cuda" else (16 * P, 8)
    options = [{"causal": True, "layout": "zigzag", "window": window} for window in (None, S // 2)]
    few = [Problem(4, 2, S, each, dtype=torch.bfloat16, head_dim=D) for each in options]
    few.append(Near(4, 2, S // 2, options[0], dtype=torch.bfloat16, head_dim=D))
    assert_right_results(lambda n, work, *given: ranks(n, in_order, i, *given), "ring", P, few)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_options(ranks, data):
    way, shape = data.draw(st.sampled_from(WAYS), label="way")
    problem = data.draw(problems(P, P if way == "all-to-all" else 1), label="problem")
    if data.draw(st.booleans(), label="a head dim of the kernels"):
        D, D_v = (8 * data.draw(st.integers(1, 32), label=name) for name in ("D", "Dv"))
        problem = replace(problem, head_dim=D, value_dim=D_v, times_q=1)
    assert_right_results(ranks, way, shape, [problem])


def checkpointed(attention):
    return lambda *qkv, **options: checkpoint(partial(attention, **options), *qkv, use_reentrant=False)


def under_autocast(attention):
    """From float32 tensors."""

    def call(*qkv, **options):
        with torch.autocast(qkv[0].device.type, torch.bfloat16):
            return attention(*(x.float() for x in qkv), **options)

    return call


def documents_there(attention):
    """The lengths are a tensor on the device."""

    def call(q, *kv, documents, **options):
        return attention(q, *kv, documents=torch.tensor(documents, device=q.device), **options)

    return call


def viewed(view):
    return lambda attention: lambda *qkv, **options: attention(*map(view, qkv), **options)


CALLS = {"checkpointed": checkpointed, "under autocast": under_autocast, "documents there": documents_there}
CALLS |= {view.__name__: viewed(view) for view in (*VIEWS, at_element_3, rows_of_three_more)}


def called(context, call, way, shape, problems):
    with mock.patch.dict(ways.WAYS, {way: CALLS[call](ways.WAYS[way])}):
        return results_on_rank(context, way, shape, problems)


@pytest.mark.parametrize("call", CALLS)
def test_however_it_is_called(ranks, call):
    dtypes = [torch.bfloat16] if call == "under autocast" else [torch.bfloat16, torch.float32]
    few = [Problem(4, 2, S, PACKED, dtype=dtype, head_dim=64, value_dim=16) for dtype in dtypes]
    assert_right_results(lambda n, work, *given: ranks(n, called, call, *given), "ring", P, few)


# What it is for -------------------------------------------------------------------------------------------------------


def test_states(ranks):
    asked = list(states.problems_of(P))
    for problem, *of_ranks in zip(asked, *ranks(P, states.on_rank, asked), strict=True):
        states.assert_problem(problem, of_ranks)


def test_generation(ranks):
    tokens, *_ = zip(*ranks(P, generation.answers), strict=True)
    assert list(tokens) == [generation.right_answers()] * P


def on_one(context):
    return mesh.one_process(context.device)


def test_training_on_a_mesh(ranks):
    [exact] = ranks(1, on_one)
    for outcomes in ranks(4, mesh.on_a_mesh):
        assert max(max(errors(results, exact)) for results, _, _ in outcomes) <= 1e-10


def test_the_doctor(device):
    report = examine("ringlab:ring_flash_attention", device=device, worlds=(P,), quick=True, head_dim=8)
    assert report.healthy, str(report)
