"""Overlap: right numbers from the right blocks, one batch a hop, posted before it computes. And the backward pass."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringlab.basics.blockwise_attention import attend
from ringlab.ring import backward, grouped_query, overlap
from ringlab.ring.overlap import hidden_share, seconds
from ringlab.support.timeline import Event
from tests.attention import grouped_inputs, random_qkv
from tests.rings import assert_gradients, assert_ring, chunks, even_lengths, messages_of_ring

assert_overlapped = partial(assert_ring, ring=overlap.ring_attention)


@pytest.mark.parametrize(("shape", "dtype"), [((1, 2, 24, 8), torch.bfloat16), ((3, 1, 13, 5), torch.float64)], ids=str)
def test_full_attention(ranks, world_size, dtype, shape):
    assert_overlapped(ranks, world_size, *random_qkv(shape, dtype))


class Watched:
    """A message under way that notes when the ring waits for it."""

    def __init__(self, work, log):
        self.work, self.log = work, log

    def wait(self):
        if self.log[-1] != "wait":
            self.log.append("wait")
        self.work.wait()


def steps_and_messages(context, q, k, v, lengths):
    """The order in which this rank posts, computes and waits; the bytes of its messages; the number of its buffers."""
    steps, sent, received, places = [], [], [], set()
    real = dist.batch_isend_irecv

    def batch(operations):
        steps.append("post")
        assert [it.op for it in operations] == [dist.irecv] * 2 + [dist.isend] * 2  # `post` says why in this order
        sent.append([it.tensor.nbytes for it in operations if it.op is dist.isend])
        received.append([it.tensor.nbytes for it in operations if it.op is dist.irecv])
        return [Watched(work, steps) for work in real(operations)]

    def compute(state, q, k_j, v_j, *, scale):
        steps.append("compute")
        places.add(k_j.data_ptr())
        return attend(state, q, k_j, v_j, scale=scale)

    with mock.patch.object(dist, "batch_isend_irecv", batch), mock.patch.object(overlap, "attend", compute):
        overlap.ring_attention(*chunks(context, lengths, q, k, v))
    return steps, sent, received, len(places)


def test_it_posts_then_computes_then_waits_with_one_batch_a_hop_in_two_buffers(ranks, world_size):
    P, lengths = world_size, even_lengths(21, world_size)
    q, k, v = random_qkv((2, 3, 21, 4), torch.bfloat16)
    for rank, (steps, sent, received, places) in enumerate(ranks(P, steps_and_messages, q, k, v, lengths)):
        assert steps == ["post", "compute", "wait"] * (P - 1) + ["compute"]
        sizes = [2 * 3 * lengths[(rank - t) % P] * 4 * 2 for t in range(P)]  # K, and V, of a block, bfloat16
        assert sent == [[size, size] for size in sizes[:-1]]
        assert received == [[size, size] for size in sizes[1:]]
        assert places == min(P, 3)  # the rank's own block, and the two buffers


# How much is hidden ---------------------------------------------------------------------------------------------------


def events(*spans):
    """Events of (rank, what, start, end)."""
    return [Event(rank, what, 0, 0, start, end, 8) for rank, what, start, end in spans]


@pytest.mark.parametrize(("waited", "share"), [(0.0, 1.0), (1.0, 0.75), (4.0, 0.0), (6.0, -0.5)])
def test_the_hidden_share_by_hand(waited, share):
    blocking = events(
        (0, "send", 0, 2), (0, "receive", 2, 4), (1, "receive", 0, 1), (1, "send", 1, 4), (1, "compute", 4, 9)
    )
    overlapped = events((0, "send", 0, 9), (0, "wait", 5, 5 + waited), (1, "wait", 5, 5 + waited), (1, "receive", 0, 9))
    assert hidden_share(blocking, overlapped) == pytest.approx(share)
    assert seconds(blocking, "send", "receive") == (4 + 4) / 2  # of a rank, on average
    assert seconds(blocking, "compute") == 5 / 2


# Backward, with grouped queries too: the gradients of every rank, and the bytes sent ---------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 37, 5), torch.float64), ((1, 2, 300, 32), torch.float32), ((1, 2, 300, 32), torch.bfloat16)],
    ids=str,
)
def test_gradients(ranks, world_size, shape, dtype):
    B, H, S, D = shape
    assert_gradients(ranks, world_size, B, H, H, S, D, dtype, ring=backward.ring_attention)


def test_a_row_that_saw_no_key_has_no_gradient():
    q, v = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    k = torch.tensor([[[[1.0, 1.0], [1.0, 0.0]]]])
    lse, delta = torch.tensor([[[-torch.inf, 2.0]]]), torch.zeros(1, 1, 2)
    d_q, d_k, d_v = backward.block_backward(q, k, v, torch.ones(1, 1, 2, 2), lse, delta, 1.0)
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
    ("ring", "kv_heads"),
    [(grouped_query.ring_attention, 2), (grouped_query.ring_attention, 1), (backward.ring_attention, 8)],
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
