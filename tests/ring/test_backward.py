"""The gradients of every rank against full attention in float64, with grouped queries too, and the bytes sent."""

from functools import partial

import pytest
import torch

from ringlab.ring import grouped_query
from ringlab.ring.backward import block_backward, ring_attention
from tests.attention import grouped_inputs
from tests.rings import assert_gradients, messages_of_ring


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 37, 5), torch.float64), ((1, 2, 300, 32), torch.float32), ((1, 2, 300, 32), torch.bfloat16)],
    ids=str,
)
def test_gradients(ranks, world_size, shape, dtype):
    B, H, S, D = shape
    assert_gradients(ranks, world_size, B, H, H, S, D, dtype, ring=ring_attention)


def test_a_row_that_saw_no_key_has_no_gradient():
    q, v = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    k = torch.tensor([[[[1.0, 1.0], [1.0, 0.0]]]])
    lse, delta = torch.tensor([[[-torch.inf, 2.0]]]), torch.zeros(1, 1, 2)
    d_q, d_k, d_v = block_backward(q, k, v, torch.ones(1, 1, 2, 2), lse, delta, 1.0)
    assert torch.equal(d_q[0, 0, 0], torch.zeros(2))
    assert not d_k.isnan().any()
    assert not d_v.isnan().any()


# Grouped queries -----------------------------------------------------------------------------------------------------

assert_grouped = partial(assert_gradients, ring=grouped_query.ring_attention)


@pytest.mark.parametrize(
    ("kv_heads", "dtype"), [(8, torch.float32), (4, torch.bfloat16), (2, torch.float64), (1, torch.bfloat16)], ids=str
)
def test_any_number_of_kv_heads(ranks, world_size, kv_heads, dtype):
    assert_grouped(ranks, world_size, 2, 8, kv_heads, 37, 6, dtype)


@pytest.mark.parametrize(
    ("ring", "kv_heads"), [(grouped_query.ring_attention, 2), (grouped_query.ring_attention, 1), (ring_attention, 8)]
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
