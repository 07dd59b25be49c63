"""The gradients of every rank against full attention in float64, and backward passes with one mistake each."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attn import hop
from support import timeline
from support.rounding import exact_attention
from tests.attention import random_qkv
from tests.gradients import NAMES, gradcheck_on_ranks, gradients
from tests.grouped_queries import assert_four
from tests.rings import chunks, even_lengths
from training import backward
from training.backward import block_backward, ring_attention


def ring_gradients(context, q, k, v, d_out, lengths, wrong=None):
    """This rank's chunks of out, dq, dk, dv. `wrong` names a broken backward pass."""
    with WRONG[wrong]() if wrong else nullcontext():
        return gradients(ring_attention, *chunks(context, lengths, q, k, v, d_out))


def assert_gradients(ranks, world_size, q, k, v, *, lengths=None, wrong=None):
    """out, dq, dk, dv are as near to float64 as rounding allows."""
    d_out = random_qkv(q.shape, q.dtype, seed=9)[0]
    lengths = lengths or even_lengths(q.shape[2], world_size)
    per_rank = ranks(world_size, ring_gradients, q, k, v, d_out, lengths, wrong)
    mine = [torch.cat(parts, dim=2) for parts in zip(*per_rank, strict=True)]
    assert_four(mine, [exact_attention(q, k, v, d_out)[name] for name in NAMES])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2, 64, 16), (2, 3, 37, 5), (1, 1, 8, 2), (1, 2, 300, 32)])
def test_gradients(ranks, world_size, shape, dtype):
    assert_gradients(ranks, world_size, *random_qkv(shape, dtype))


def test_chunks_of_any_length(ranks):
    assert_gradients(ranks, 4, *random_qkv((1, 2, 23, 4)), lengths=[1, 9, 2, 11])


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


def sent_in_backward(context, q, k, v, d_out):
    """The bytes that this rank sends in the backward pass, as recorded."""
    q, k, v, d_out = chunks(context, even_lengths(q.shape[2], context.world_size), q, k, v, d_out)
    out = ring_attention(*(x.requires_grad_() for x in (q, k, v)))
    with timeline.record(k.detach()) as events:
        out.backward(d_out)
    return sum(it.bytes for it in events if it.what == "send" and it.rank == context.rank)


def test_bytes_are_those_of_the_formula(ranks, world_size):
    B, H, C, D = 1, 2, 4, 8
    q, k, v = random_qkv((B, H, C * world_size, D), torch.bfloat16)
    kv, d_kv = 2 * B * H * C * D * 2, 2 * B * H * C * D * 4  # bfloat16, and float32
    expected = (world_size - 1) * kv + world_size * d_kv if world_size > 1 else 0
    assert ranks(world_size, sent_in_backward, q, k, v, q) == [expected] * world_size


def test_a_row_that_saw_no_key_has_no_gradient():
    q, v = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    k = torch.tensor([[[[1.0, 1.0], [1.0, 0.0]]]])
    lse, delta = torch.tensor([[[-torch.inf, 2.0]]]), torch.zeros(1, 1, 2)
    d_q, d_k, d_v = block_backward(q, k, v, torch.ones(1, 1, 2, 2), lse, delta, 1.0)
    assert torch.equal(d_q[0, 0, 0], torch.zeros(2))
    assert not d_k.isnan().any()
    assert not d_v.isnan().any()


# Backward passes with one mistake each ------------------------------------------------------------------------------


def replaced(name, mistake):
    return lambda: mock.patch.object(backward, name, mistake() if isinstance(mistake, type) else mistake)


def swapped(*args):
    d_q, d_k, d_v = block_backward(*args)
    return d_q, d_v, d_k


def summed(*args):
    d_q, d_k, d_v = block_backward(*args)
    return d_q, d_k + d_v, d_k + d_v


class OwnQueriesOnly:
    """Each rank keeps what its own queries add to its own block. The other ranks' parts are lost."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        d_q, d_k, d_v = block_backward(*args)
        return (d_q, d_k, d_v) if self.calls == 1 else (d_q, 0 * d_k, 0 * d_v)


class OneHopShort:
    """The last hop is left out: the gradients stay one rank from home."""

    hops = 0

    def __call__(self, block, length, group):
        self.hops += 1  # K and V make P - 1, their gradients P
        return block if self.hops == 2 * dist.get_world_size(group) - 1 else hop(block, length, group)


class Aliased:
    """dk and dv arrive in one buffer, so the second overwrites the first."""

    hops = 0

    def __call__(self, block, length, group):
        self.hops += 1
        received, last = hop(block, length, group), 2 * dist.get_world_size(group) - 1
        if self.hops % 2 == 0 or self.hops == last:  # gradients
            received[0] = received[1]
        return received


def lse_of_the_block(q, k, v, d_out, lse, delta, scale):
    lse = torch.logsumexp(q.to(lse.dtype) @ k.to(lse.dtype).transpose(-2, -1) * scale, dim=-1)
    return block_backward(q, k, v, d_out, lse, delta, scale)


def without_delta(q, k, v, d_out, lse, delta, scale):
    return block_backward(q, k, v, d_out, lse, 0 * delta, scale)


def scale_forgotten(*args):
    d_q, d_k, d_v = block_backward(*args)
    return d_q / args[-1], d_k / args[-1], d_v


def in_bfloat16(*args):
    return tuple(x.bfloat16().to(x.dtype) for x in block_backward(*args))


WRONG = {
    **{
        mistake.__name__: replaced("block_backward", mistake)
        for mistake in (swapped, summed, OwnQueriesOnly, lse_of_the_block, without_delta, scale_forgotten, in_bfloat16)
    },
    "one_hop_short": lambda: mock.patch.object(backward, "hop", OneHopShort()),
    "aliased": lambda: mock.patch.object(backward, "hop", Aliased()),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_backward_is_rejected(ranks, wrong, size):
    q, k, v = random_qkv((1, 2, 12 * size, 8))
    assert_gradients(ranks, size, q, k, v)
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_gradients(ranks, size, q, k, v, wrong=wrong)


def test_it_is_not_twice_differentiable(ranks):
    assert ranks(1, second_derivative) == ["RuntimeError"]


def second_derivative(context):
    q, k, v = (x.requires_grad_() for x in random_qkv((1, 1, 4, 2)))
    (d_q,) = torch.autograd.grad(ring_attention(q, k, v).sum(), q, create_graph=True)
    try:
        d_q.sum().backward()
    except RuntimeError as error:
        return type(error).__name__
    return None
