"""Grouped queries: out and gradients for any number of K/V heads, the bytes that are sent, and wrong groupings."""

from functools import partial

import pytest
import torch

from ringlab.training import backward
from ringlab.training.grouped_query import fold, ring_attention, unfold
from tests.grouped_queries import grouped_inputs
from tests.rings import assert_gradients, messages_of_ring

assert_grouped = partial(assert_gradients, ring=ring_attention)


@pytest.mark.parametrize(
    ("kv_heads", "dtype"),
    [(8, torch.float32), (4, torch.bfloat16), (2, torch.float32), (2, torch.float64), (1, torch.bfloat16)],
    ids=str,
)
def test_any_number_of_kv_heads(ranks, world_size, kv_heads, dtype):
    assert_grouped(ranks, world_size, 2, 8, kv_heads, 37, 6, dtype)


def test_chunks_of_any_length(ranks):
    assert_grouped(ranks, 4, 1, 6, 2, 23, 4, torch.float32, lengths=[1, 9, 2, 11])


@pytest.mark.parametrize(
    ("ring", "kv_heads"), [(ring_attention, 8), (ring_attention, 2), (ring_attention, 1), (backward.ring_attention, 8)]
)
def test_fewer_kv_heads_are_fewer_bytes(ranks, world_size, ring, kv_heads):
    P, B, C, D = world_size, 2, 4, 6
    four = grouped_inputs(B, 8, kv_heads, C * P, D, torch.bfloat16)
    numbers = 2 * B * kv_heads * C * D  # in K and V of a block; each has 2 bytes, its gradient 4
    backwards = (P - 1) * numbers * (2 + 4)
    sent = [
        [sum(it.bytes for it in messages if it.kind == "send") for messages in passes]
        for passes in ranks(P, messages_of_ring, ring, [C] * P, *four)
    ]
    assert sent == [[(P - 1) * numbers * 2, backwards]] * P


def test_fold_and_unfold():
    q = torch.arange(2 * 6 * 5 * 3).view(2, 6, 5, 3)
    for G in (6, 3, 2, 1):
        folded = fold(q, G)
        assert folded.shape == (2, G, 6 // G * 5, 3)
        assert torch.equal(unfold(folded, 6), q)
        for h in range(6):  # query head h is with K/V head h // (H/G)
            row = h % (6 // G) * 5
            assert torch.equal(folded[:, h // (6 // G), row : row + 5], q[:, h])
