"""The overlapped ring: right numbers from the right blocks, one batch a hop, posted before it computes; wrong rings."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringlab.basics.blockwise_attention import attend
from ringlab.support import timeline
from ringlab.support.timeline import Event
from ringlab.training import overlap
from ringlab.training.overlap import hidden_share, ring_attention, two_buffers
from tests.attention import DTYPES, assert_attention, random_qkv
from tests.refusals import all_of
from tests.rings import chunks, even_lengths
from tests.wrong_overlapped_rings import WRONG


def overlapped(context, q, k, v, lengths, wrong=None):
    """This rank's chunk of the result and the recorded events of all ranks. `wrong` names a broken ring."""
    q, k, v = chunks(context, lengths, q, k, v)
    before = [x.clone() for x in (q, k, v)]
    with WRONG[wrong]() if wrong else nullcontext(), timeline.record(k, ring=ring_attention) as events:
        out = ring_attention(q, k, v)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True)), "the ring changed its input"
    return out, events


def assert_overlapped(ranks, world_size, q, k, v, lengths=None, wrong=None):
    """The right numbers, from block (r - t) mod P on rank r in round t."""
    lengths = lengths or even_lengths(q.shape[2], world_size)
    outs, events = zip(*ranks(world_size, overlapped, q, k, v, lengths, wrong), strict=True)
    used = {(it.rank, it.round): it.block for it in events[0] if it.what == "compute"}
    right = {(r, t): (r - t) % world_size for r in range(world_size) for t in range(world_size)}
    assert_attention(torch.cat(outs, dim=2), q, k, v)
    assert used == right, f"blocks in use, by (rank, round): {used}; expected {right}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 120, 8), (3, 1, 13, 5), (1, 2, 530, 4)], ids=str)
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
    block = two_buffers(k, lengths, rank)
    return [block(t) for t in range(len(lengths) + 1)]


@pytest.mark.parametrize("lengths", [[3, 3], [2, 5, 1], [1, 2, 3, 4]], ids=str)
def test_two_buffers_take_turns_and_fit_every_block(lengths):
    k, P = torch.empty(2, 3, lengths[1], 4, dtype=torch.bfloat16), len(lengths)
    blocks = blocks_in_buffers(k, lengths, 1)
    assert [x.shape for x in blocks] == [(2, 2, 3, lengths[(1 - t) % P], 4) for t in range(P + 1)]
    assert all(x.is_contiguous() and x.dtype == k.dtype for x in blocks)
    assert len({x.data_ptr() for x in blocks[0::2]}) == len({x.data_ptr() for x in blocks[1::2]}) == 1
    sizes = [max(x.nbytes for x in blocks[i::2]) for i in (0, 1)]
    first, second = blocks[0].data_ptr(), blocks[1].data_ptr()
    assert first + sizes[0] <= second or second + sizes[1] <= first, "the buffers overlap"
    assert two_buffers(k, lengths, 1, torch.float32)(0).dtype == torch.float32


NUMBERS, BLOCKS = "numbers are wrong", "blocks in use"


@pytest.mark.parametrize(
    ("size", "wrong"),  # with 2 ranks there is only one direction, and one buffer is enough
    [(P, wrong) for P in (2, 3, 4) for wrong in WRONG if P > 2 or wrong not in ("backwards", "one_block_forever")],
)
def test_a_wrong_ring_is_rejected(ranks, size, wrong):
    inputs = random_qkv((1, 2, 24, 8))
    assert_overlapped(ranks, size, *inputs)
    with pytest.raises(AssertionError, match=BLOCKS if wrong == "backwards" else NUMBERS):
        assert_overlapped(ranks, size, *inputs, wrong=wrong)


# How much is hidden, and what is refused ------------------------------------------------------------------------------


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


X = torch.ones(1, 2, 4, 3)


def refused(context, inputs):
    """The ring on this rank's own q, k, v; a block that travels anyway is an error."""
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("a block travels")):
        ring_attention(*inputs[context.rank])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ((X, X.clone().requires_grad_(), X), ["rank 1: the input requires gradients", "forward only", "no_grad()"]),
        ((X, X[:, :1], X[:, :1]), ["rank 1: q has shape (1, 2, 4, 3) and k (1, 1, 4, 3)"]),
        ((X.double(),) * 3, ["the ranks disagree", "rank 0: ", "float32", "rank 1: ", "float64"]),
    ],
    ids=["gradients", "heads", "dtypes"],
)
def test_bad_input_is_refused_before_a_block_travels(ranks, bad, words):
    outcomes = ranks.outcomes(3, refused, [(X, X, X), bad, (X, X, X)])
    assert [it.kind for it in outcomes] == ["ValueError"] * 3
    assert len({it.message for it in outcomes}) == 1
    with pytest.raises(ValueError, match=all_of(words)):
        raise ValueError(outcomes[0].message)
    assert_overlapped(ranks, 3, *random_qkv((1, 1, 8, 2)))
