"""Grouped queries: out and gradients for any number of K/V heads, the bytes that are sent, and wrong groupings."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringlab.training.grouped_query import check_grouped_chunks, fold, ring_attention, unfold
from tests.gradients import gradients
from tests.grouped_queries import assert_four, expected_of_inputs, grouped_inputs
from tests.refusals import all_of
from tests.rings import chunks, even_lengths
from tests.wrong_groupings import WRONG


def ring_gradients(context, q, k, v, d_out, lengths, wrong=None):
    """This rank's chunks of out, dq, dk, dv. `wrong` names a broken ring."""
    with WRONG[wrong]() if wrong else nullcontext():
        return gradients(ring_attention, *chunks(context, lengths, q, k, v, d_out))


def assert_grouped(ranks, world_size, *sizes_and_dtype, lengths=None, wrong=None):
    four = grouped_inputs(*sizes_and_dtype)
    lengths = lengths or even_lengths(four[0].shape[2], world_size)
    per_rank = ranks(world_size, ring_gradients, *four, lengths, wrong)
    mine = [torch.cat(parts, dim=2) for parts in zip(*per_rank, strict=True)]
    assert_four(mine, expected_of_inputs(*sizes_and_dtype, causal=False, fused_blocks=0))


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_any_number_of_kv_heads(ranks, world_size, kv_heads, dtype):
    assert_grouped(ranks, world_size, 2, 8, kv_heads, 37, 6, dtype)


def test_chunks_of_any_length(ranks):
    assert_grouped(ranks, 4, 1, 6, 2, 23, 4, torch.float32, lengths=[1, 9, 2, 11])


def bytes_sent(context, q, k, v, d_out, lengths):
    """The bytes that this rank gives to torch.distributed in the forward pass, and in the backward pass."""
    q, k, v, d_out = chunks(context, lengths, q, k, v, d_out)
    sizes, real = [], dist.send

    def send(x, **options):
        sizes.append(x.nbytes)
        real(x, **options)

    with mock.patch.object(dist, "send", send):
        out = ring_attention(*(x.requires_grad_() for x in (q, k, v)))
        forwards = sum(sizes)
        out.backward(d_out)
    return forwards, sum(sizes) - forwards


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_fewer_kv_heads_are_fewer_bytes(ranks, world_size, kv_heads):
    P, B, C, D = world_size, 2, 4, 6
    four = grouped_inputs(B, 8, kv_heads, C * P, D, torch.bfloat16)
    numbers = 2 * B * kv_heads * C * D  # in K and V of a block; each has 2 bytes, its gradient 4
    backwards = (P - 1) * numbers * 2 + P * numbers * 4 if P > 1 else 0
    assert ranks(P, bytes_sent, *four, [C] * P) == [((P - 1) * numbers * 2, backwards)] * P


def test_fold_and_unfold():
    q = torch.arange(2 * 6 * 5 * 3).view(2, 6, 5, 3)
    for G in (6, 3, 2, 1):
        folded = fold(q, G)
        assert folded.shape == (2, G, 6 // G * 5, 3)
        assert torch.equal(unfold(folded, 6), q)
        for h in range(6):  # query head h is with K/V head h // (H/G)
            row = h % (6 // G) * 5
            assert torch.equal(folded[:, h // (6 // G), row : row + 5], q[:, h])


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("size", [1, 3])
def test_a_wrong_grouping_is_rejected(ranks, size, wrong):
    sizes = (1, 8, 2, 24, 6, torch.float32)
    assert_grouped(ranks, size, *sizes)
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_grouped(ranks, size, *sizes, wrong=wrong)


X = torch.ones(1, 4, 4, 3)


@pytest.mark.parametrize(
    ("qkv", "words"),
    [
        ((X[:, :3], X[:, :2], X[:, :2]), ["q has 3 heads and k 2", "expected a multiple"]),
        ((X[:, :1], X[:, :2], X[:, :2]), ["q has 1 heads and k 2", "expected a multiple"]),
        ((X, X[:, :2, :3], X[:, :2, :3]), ["q has 4 tokens and k 3", "expected chunks of the same tokens"]),
        ((X, X[:, :2], X[:, :1]), ["k has shape (1, 2, 4, 3) and v (1, 1, 4, 3)"]),
        ((X, X[:, :2, :, :2], X[:, :2, :, :2]), ["same B, H and D"]),
        ((X, X[:, :2].double(), X[:, :2].double()), ["one dtype"]),
        ((X[0], X[:, :2], X[:, :2]), ["q has shape (4, 4, 3)", "expected (B, H, S, D)"]),
        ((X, X[:, :0], X[:, :0]), ["k has shape (1, 0, 4, 3)", "1 or more"]),
    ],
    ids=["no multiple", "fewer", "tokens", "k and v", "D", "dtypes", "three dimensions", "no heads"],
)
def test_bad_input_is_refused(ranks, qkv, words):
    with pytest.raises(ValueError, match=all_of(words)):
        check_grouped_chunks(*qkv)
    outcomes = ranks.outcomes(2, ring_on, [qkv, (X, X[:, :2], X[:, :2])])
    assert [it.kind for it in outcomes] == ["ValueError"] * 2
    assert len({it.message for it in outcomes}) == 1


def ring_on(context, inputs):
    ring_attention(*inputs[context.rank])
