"""The overlapped ring: right numbers from the right blocks, one batch a hop, posted before it computes."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringlab.basics.blockwise_attention import attend
from ringlab.ring import overlap
from ringlab.ring.overlap import hidden_share, ring_attention, seconds
from ringlab.support.timeline import Event
from tests.attention import random_qkv
from tests.rings import assert_ring, chunks, even_lengths

assert_overlapped = partial(assert_ring, ring=ring_attention)


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
        ring_attention(*chunks(context, lengths, q, k, v))
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
