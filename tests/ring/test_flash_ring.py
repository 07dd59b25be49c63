"""The trainable ring on a schedule of one's own; heads; NaN, padding, DDP, against full attention in float64."""

import math
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringlab.ring.flash_ring import ring_flash_attention, scaled_dot_product_attention
from ringlab.ring.layouts import pad, positions
from ringlab.support.rounding import exact_attention
from ringlab.ways.all_to_all import count
from ringlab.ways.heads import heads_of_ranks, meshes
from tests.attention import NAMES, SEED, assert_four, expected, grouped_inputs
from tests.every_way import CASES, Problem, checked_gradients, cut, ring_gradients, whole
from tests.rings import Circle

# Another schedule ----------------------------------------------------------------------------------------------------


def other_way_round(context, problem, schedule):
    """This rank's chunks of out, dq, dk and dv, by a schedule that is none of ringlab's."""
    mine = cut(context, problem.layout, problem.lengths, *problem.inputs())
    return checked_gradients(ring_flash_attention, mine, {**problem.options, "schedule": schedule})


def test_attention_on_a_schedule_of_ones_own(ranks):
    for causal, layout in CASES:
        lengths = (2, 5, 1) if layout == "contiguous" else None
        options = {"causal": causal, "layout": layout}
        problem = Problem(4, 2, sum(lengths or [12]), options, lengths, head_dim=8)
        assert_four(whole(ranks(3, other_way_round, problem, Circle), layout, lengths), problem.right())


# Heads that do not divide --------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_every_head_once_and_as_evenly_as_can_be(kv_heads, served, data):
    heads = kv_heads * served
    P = data.draw(st.integers(1, heads))
    queries, keys = heads_of_ranks(heads, kv_heads, P)
    assert [h for mine in queries for h in range(mine.start, mine.stop)] == list(range(heads))
    assert {count(mine) for mine in queries} <= {heads // P, -(-heads // P)}
    for rank, (mine, need) in enumerate(zip(queries, keys, strict=True)):
        assert {h // served for h in range(mine.start, mine.stop)} == set(range(need.start, need.stop))
        if P % kv_heads == 0:
            assert (need.start, need.stop) == (rank * kv_heads // P, rank * kv_heads // P + 1)


def test_meshes_are_those_that_heads_allow():
    assert meshes(5, 12) == "3 x 4, 4 x 3, 6 x 2, 12 x 1"
    assert meshes(5, 7) == "7 x 1"
    assert meshes(8, 4) == "1 x 4, 2 x 2, 4 x 1"


# Rows that see no key, and numbers that are NaN -----------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "zigzag")])
def test_queries_that_see_no_key_give_zeros(ranks, causal, layout):
    q, k, v, d_out = grouped_inputs(1, 4, 2, 12, 3)
    fully_masked = [torch.full_like(q, 1e30), torch.full_like(k, -1e30), v, d_out]  # -1e60 is -inf in float32
    for results in ranks(3, ring_gradients, *fully_masked, {"causal": causal, "layout": layout}):
        for x in results:
            assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize(("causal", "layout", "rank"), [(False, "contiguous", 0), (True, "zigzag", 1)])
def test_a_block_that_nobody_sees(ranks, causal, layout, rank):
    """The scores of one rank's keys are -inf in float32. In float64 their weights are 0 beside those of other keys."""
    q, k, v, d_out = grouped_inputs(1, 4, 2, 24, 4)
    k[:, :, positions(layout, 24, rank, 3)] = -3e38
    q = q.abs() + 1
    per_rank = ranks(3, ring_gradients, q, k, v, d_out, {"causal": causal, "layout": layout})
    mine = whole(per_rank, layout)
    visible = torch.ones(24, 24, dtype=torch.bool).index_fill(1, positions(layout, 24, rank, 3), False)
    right = exact_attention(q, k, v, d_out, causal=causal, visible=visible, fused_blocks=3)
    assert_four(mine, [right[name] for name in NAMES])


SEEN, HEAD, TOKEN = slice(0, 11), 1, 10  # keys that query 10 sees; query head 1 uses K/V head 0, K/V head 1 serves 2, 3
LATER = (0, slice(2, 4), slice(10, None))  # the queries that see key 10 of K/V head 1
HAS_NAN = {  # where the NaN is: where out, dq, dk and dv must have one
    "q": [(0, HEAD, TOKEN), (0, HEAD, TOKEN), (0, 0, SEEN), (0, 0, SEEN)],
    "k": [LATER, LATER, (0, 1), (0, 1)],
    "v": [LATER, LATER, (0, 1), None],
    "d_out": [None, (0, HEAD, TOKEN), (0, 0, SEEN), (0, 0, SEEN)],
}


@pytest.mark.parametrize("where", HAS_NAN)
def test_what_is_no_number_stays_visible(ranks, where):
    q, k, v, d_out = grouped_inputs(2, 4, 2, 24, 4)
    {"q": q, "k": k, "v": v, "d_out": d_out}[where][0, HEAD, TOKEN] = math.nan
    mine = whole(ranks(3, ring_gradients, q, k, v, d_out, {"causal": True, "layout": "zigzag"}), "zigzag")
    for name, x, must in zip(NAMES, mine, HAS_NAN[where], strict=True):
        assert not x[1].isnan().any(), f"{name}: a NaN in a sequence that has none"
        assert must is None or x[must].isnan().all(), f"{name} hides a NaN"


def test_padding_on_the_right_changes_no_real_token(ranks):
    real = grouped_inputs(1, 4, 2, 13, 8)
    padded = [pad(x, 6) for x in real]  # 18 tokens; the padding has no gradient to give
    mine = whole(ranks(3, ring_gradients, *padded, {"causal": True, "layout": "zigzag"}), "zigzag")
    assert all(x.shape[2] == 18 for x in mine)
    assert all(x[:, :, 13:].count_nonzero() == 0 for x in mine[1:])
    assert_four([x[:, :, :13] for x in mine], expected(*real, causal=True))


# Under DistributedDataParallel ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Causal attention with 4 query heads on 2, and its projections."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, (4 + 2 + 2) * 4), nn.Linear(16, 16)

    def forward(self, x, attention):
        q, k, v = self.qkv(x).unflatten(2, (8, 4)).transpose(1, 2).split([4, 2, 2], dim=1)
        return self.proj(attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


def gradients_of_weights(x, d_out, attention, wrap=lambda model: model):
    torch.manual_seed(SEED)
    model = Layer().double()
    wrapped = wrap(model)  # must live until the backward pass is over
    wrapped(x, attention).backward(d_out)
    return [weight.grad for weight in model.parameters()]


def on_rank(context, x, d_out):
    at = positions("zigzag", x.shape[1], context.rank, context.world_size)
    attention = partial(scaled_dot_product_attention, layout="zigzag")
    return gradients_of_weights(x[:, at], d_out[:, at], attention, nn.parallel.DistributedDataParallel)


@pytest.mark.slow
def test_ddp_averages_so_the_loss_times_p_gives_the_right_gradients(ranks):
    """Without the factor P every gradient comes out at 1/P, as the docstring of flash_ring.py says."""
    x, d_out = torch.randn(2, 2, 24, 16, dtype=torch.float64).unbind()
    exact = gradients_of_weights(x, d_out, F.scaled_dot_product_attention)
    for times, share in ((1, 1 / 3), (3, 1)):
        for gradients in ranks(3, on_rank, x, times * d_out):
            for mine, right in zip(gradients, exact, strict=True):
                torch.testing.assert_close(mine, share * right, rtol=1e-10, atol=1e-10)


def warned_of(context, shape):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ring_flash_attention(*torch.zeros(3, *shape))
    return [str(each.message) for each in told]


@pytest.mark.parametrize(
    ("shape", "told"), [((1, 129, 16, 4), True), ((1, 136, 17, 4), False), ((1, 128, 2, 4), False)]
)
def test_more_heads_than_tokens_by_far_are_told_once(ranks, shape, told):
    for said in ranks(3, warned_of, shape):
        assert [words.partition("heads")[0][-4:] for words in said] == ["129 "] * told
