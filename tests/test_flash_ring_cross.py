"""Cross-attention: the ranks may have any number of queries when nothing is masked, and K and V have another length."""

import re

import pytest
import torch

from ringlab.training.flash_ring import ring_flash_attention, scaled_dot_product_attention
from tests.gradients import gradients
from tests.grouped_queries import assert_four, expected, grouped_inputs
from tests.refusals import all_of, refusal
from tests.rings import chunks

QUERIES, KEYS = (3, 1, 7, 2, 5, 4, 1, 6), (4, 2, 1, 6, 3, 5, 2, 2)  # tokens of each rank, different on all


def cross_inputs(P):
    """q and d_out (1, 4, Sq, 8), k and v (1, 2, Sk, 8)."""
    q, _, _, d_out = grouped_inputs(1, 4, 2, sum(QUERIES[:P]), 8)
    _, k, v, _ = grouped_inputs(1, 4, 2, sum(KEYS[:P]), 8, seed=1)
    return q, k, v, d_out


def cross_gradients(context, q, k, v, d_out, ring):
    P = context.world_size
    q, d_out = chunks(context, QUERIES[:P], q, d_out)
    return gradients(ring, q, *chunks(context, KEYS[:P], k, v), d_out)


def grouped(q, k, v):
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("ring", [ring_flash_attention, grouped])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_gradients_of_other_queries_than_keys(ranks, size, ring):
    four = cross_inputs(size)
    per_rank = ranks(size, cross_gradients, *four, ring)
    assert_four([torch.cat(parts, dim=2) for parts in zip(*per_rank, strict=True)], expected(*four))


def refused(context, options):
    q, k, v, _ = cross_inputs(2)
    q, (k, v) = chunks(context, QUERIES[:2], q)[0], chunks(context, KEYS[:2], k, v)
    ring_flash_attention(q, k, v, **options)


@pytest.mark.parametrize("options", [{"causal": True}, {"documents": [6]}, {"causal": True, "window": 2}])
def test_a_mask_needs_the_queries_of_the_same_tokens(ranks, options):
    words = ["rank 0: q has 3 tokens and k 4; expected chunks of the same tokens"]
    assert re.match(all_of(words), refusal(ranks.outcomes(2, refused, options)))


def test_the_result_is_that_of_torch(ranks):
    q, k, v, d_out = (x.double() for x in cross_inputs(3))
    per_rank = ranks(3, cross_gradients, q, k, v, d_out, ring_flash_attention)
    right = gradients(
        lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*qkv, enable_gqa=True), q, k, v, d_out
    )
    for mine, exact in zip(zip(*per_rank, strict=True), right, strict=True):
        torch.testing.assert_close(torch.cat(mine, dim=2), exact)
