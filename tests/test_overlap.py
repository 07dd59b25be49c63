"""The overlapped ring: right numbers from the right blocks, one batch a hop, posted before it computes; wrong rings."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringlab.basics.blockwise_attention import attend
from ringlab.support.timeline import Event
from ringlab.training import overlap
from ringlab.training.overlap import hidden_share, keys_and_values, ring_attention, two_buffers
from tests.attention import DTYPES, random_qkv
from tests.rings import assert_ring, chunks, even_lengths

assert_overlapped = partial(assert_ring, ring=ring_attention)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*(((1, 2, 24, 8), dtype) for dtype in DTYPES), ((3, 1, 13, 5), torch.float64)],
    ids=str,
)
def test_full_attention(ranks, world_size, dtype, shape):
    assert_overlapped(ranks, world_size, *random_qkv(shape, dtype))


def test_chunks_of_any_length(ranks):
    assert_overlapped(ranks, 4, *random_qkv((2, 2, 23, 4)), lengths=[1, 9, 2, 11])


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


def blocks_in_buffers(k, lengths, rank):
    block = two_buffers(k, k[..., :3], lengths, rank)
    return [block(t) for t in range(len(lengths) + 1)]


@pytest.mark.parametrize("lengths", [[2, 5, 1], [1, 2, 3, 4]], ids=str)
def test_two_buffers_take_turns_and_fit_every_block(lengths):
    k, P = torch.empty(2, 3, lengths[1], 4, dtype=torch.bfloat16), len(lengths)
    blocks = blocks_in_buffers(k, lengths, 1)
    assert [x.shape for x in blocks] == [(2 * 3 * lengths[(1 - t) % P] * (4 + 3),) for t in range(P + 1)]
    assert all(x.is_contiguous() and x.dtype == k.dtype for x in blocks)
    assert len({x.data_ptr() for x in blocks[0::2]}) == len({x.data_ptr() for x in blocks[1::2]}) == 1
    sizes = [max(x.nbytes for x in blocks[i::2]) for i in (0, 1)]
    first, second = blocks[0].data_ptr(), blocks[1].data_ptr()
    assert first + sizes[0] <= second or second + sizes[1] <= first, "the buffers overlap"
    assert two_buffers(k, k, lengths, 1, torch.float32)(0).dtype == torch.float32


def test_keys_and_values_lie_side_by_side_in_a_block():
    k, v = torch.empty(2, 3, 7, 4), torch.empty(2, 3, 7, 5)
    block = torch.arange(2 * 3 * 2 * (4 + 5))
    k_j, v_j = keys_and_values(block, k, v)
    assert (k_j.shape, v_j.shape) == ((2, 3, 2, 4), (2, 3, 2, 5))
    assert torch.equal(torch.cat([k_j.flatten(), v_j.flatten()]), block)
    assert k_j.data_ptr() == block.data_ptr()


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
