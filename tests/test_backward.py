"""The gradients of every rank against full attention in float64, and backward passes with one mistake each."""

import pytest
import torch

from ringlab.training.backward import block_backward, ring_attention
from tests.attention import random_qkv
from tests.gradients import gradcheck_on_ranks
from tests.rings import assert_gradients, chunks, even_lengths


def assert_backward(ranks, world_size, shape, dtype=torch.float32, **options):
    B, H, S, D = shape
    assert_gradients(ranks, world_size, B, H, H, S, D, dtype, ring=ring_attention, **options)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 2, 64, 16), torch.float32),
        ((2, 3, 37, 5), torch.float64),
        ((1, 1, 8, 2), torch.bfloat16),
        ((1, 2, 300, 32), torch.float32),
        ((1, 2, 300, 32), torch.bfloat16),
    ],
    ids=str,
)
def test_gradients(ranks, world_size, shape, dtype):
    assert_backward(ranks, world_size, shape, dtype)


def test_chunks_of_any_length(ranks):
    assert_backward(ranks, 4, (1, 2, 23, 4), lengths=[1, 9, 2, 11])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradcheck(ranks, size):
    inputs = random_qkv((1, 1, 4, 2), torch.float64)
    assert ranks(size, gradcheck_on_ranks, ring_attention, "contiguous", *inputs) == [True] * size


def backward_twice(context, q, k, v, d_out):
    q, k, v = (x.requires_grad_() for x in chunks(context, even_lengths(q.shape[2], context.world_size), q, k, v))
    out = ring_attention(q, k, v)
    mine = chunks(context, even_lengths(d_out.shape[2], context.world_size), d_out)[0]
    first = torch.autograd.grad(out, (q, k, v), mine, retain_graph=True)
    again = torch.autograd.grad(out, (q, k, v), mine)
    return all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_backward_twice_gives_the_same(ranks):
    assert all(ranks(3, backward_twice, *random_qkv((1, 2, 12, 4)), random_qkv((1, 2, 12, 4), seed=9)[0]))


def test_a_row_that_saw_no_key_has_no_gradient():
    q, v = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    k = torch.tensor([[[[1.0, 1.0], [1.0, 0.0]]]])
    lse, delta = torch.tensor([[[-torch.inf, 2.0]]]), torch.zeros(1, 1, 2)
    d_q, d_k, d_v = block_backward(q, k, v, torch.ones(1, 1, 2, 2), lse, delta, 1.0)
    assert torch.equal(d_q[0, 0, 0], torch.zeros(2))
    assert not d_k.isnan().any()
    assert not d_v.isnan().any()


def test_it_is_not_twice_differentiable(ranks):
    assert ranks(1, second_derivative) == ["RuntimeError"]


def second_derivative(context):
    q, k, v = (x.requires_grad_() for x in random_qkv((1, 1, 4, 2)))
    try:
        torch.autograd.grad(ring_attention(q, k, v).sum(), q, create_graph=True)
    except RuntimeError as error:
        return type(error).__name__
    return None
