"""The ring, on real processes, against full attention; and what it sends."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ring_attn
from ring_attn import ring_attention
from ringlab.basics.blocking_messages import Recv, Send, ring_programs
from tests.attention import DTYPES, WORLDS, assert_attention, assert_lse, random_qkv
from tests.rings import assert_ring, even_lengths, messages_of_ring, ring, ring_and_events, ring_lse


def ring_of(ranks, world_size, *args):
    """The whole result of a ring: every rank's chunk, joined."""
    return torch.cat(ranks(world_size, ring, *args), dim=2)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 2, 120, 8), torch.bfloat16), ((3, 1, 13, 5), torch.float64)],  # the first: equal chunks in every world
    ids=str,
)
def test_full_attention(ranks, world_size, dtype, shape):
    assert_ring(ranks, world_size, *random_qkv(shape, dtype))


def test_one_token_a_rank_and_chunks_longer_than_a_tile(ranks):
    for S in (3, 901):
        assert_ring(ranks, 3, *random_qkv((1, 1, S, 4)))


@settings(max_examples=15)
@given(data=st.data())
def test_any_chunk_lengths_shape_dtype_scale_and_tile(ranks, world_size, data):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=world_size, max_size=world_size), label="lengths")
    B, H, D = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7)), label="B, H, D")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    largest_score = data.draw(st.sampled_from([None, 0.0, 30.0, 1e4]), label="largest score")
    scale = data.draw(st.sampled_from([None, -0.5, 0.2, 2.0]), label="scale")
    tile = data.draw(st.integers(1, 10), label="tile")
    seed = data.draw(st.integers(0, 2**32), label="seed")
    q, k, v = random_qkv((B, H, sum(lengths), D), dtype, seed=seed, largest_score=largest_score)
    out = ring_of(ranks, world_size, q, k, v, lengths, scale, tile)
    assert_attention(out, q, k, v, scale=scale)


def test_log_sum_exp(ranks, world_size):
    q, k, v = random_qkv((2, 3, 11, 5), torch.bfloat16)
    lse = torch.cat(ranks(world_size, ring_lse, q, k, v, even_lengths(11, world_size), 0.3), dim=2)
    assert_lse(lse, q, k, scale=0.3)


def test_keys_that_nobody_sees_are_as_good_as_none(ranks):
    q, k, v = random_qkv((1, 2, 9, 4))
    q, hidden = q.abs(), torch.arange(9) < 4  # all the keys of rank 0, and one of rank 1
    k[:, :, hidden] = -math.inf  # q > 0: scores of -inf
    assert_attention(ring_of(ranks, 3, q, k, v, [3] * 3), q, k[:, :, ~hidden], v[:, :, ~hidden])
    assert ring_of(ranks, 3, q, torch.full_like(k, -math.inf), v, [3] * 3).count_nonzero() == 0


@pytest.mark.parametrize("world_size", WORLDS[1:])
def test_the_messages_are_those_of_the_simulator(ranks, world_size):
    B, H, S, D = 2, 3, 21, 4
    lengths = even_lengths(S, world_size)
    programs = ring_programs(world_size, hops=world_size - 1)
    q, k, v = random_qkv((B, H, S, D), torch.bfloat16)
    for rank, (messages, _) in enumerate(ranks(world_size, messages_of_ring, ring_attention, lengths, q, k, v)):
        assert [(Send if it.kind == "send" else Recv)(it.peer) for it in messages] == programs[rank]
        blocks = [(rank - t) % world_size for t in range(world_size)]
        sent = [it.bytes for it in messages if it.kind == "send"]
        received = [it.bytes for it in messages if it.kind == "recv"]
        bytes_of = [2 * B * H * length * D * 2 for length in lengths]  # K and V, in bfloat16
        assert sent == [bytes_of[block] for block in blocks[:-1]]
        assert received == [bytes_of[block] for block in blocks[1:]]


def test_a_ring_of_one_sends_nothing(ranks):
    assert ranks(1, messages_of_ring, ring_attention, [4], *random_qkv((1, 1, 4, 2))) == [([], [])]


def with_hops(context, hops, *args, hop=ring_attn.hop):
    """The ring with so many hops in place of each."""

    def some(block, *args):
        for _ in range(hops):
            block = hop(block, *args)
        return block

    with mock.patch.object(ring_attn, "hop", some):
        return ring_and_events(context, *args)


@pytest.mark.parametrize(("hops", "says"), [(2, "blocks in use"), (0, "numbers are wrong")])
def test_a_ring_with_other_hops_is_rejected(ranks, hops, says):
    with pytest.raises(AssertionError, match=says):
        assert_ring(lambda P, _, *args: ranks(P, with_hops, hops, *args), 3, *random_qkv((1, 2, 12, 4)))
