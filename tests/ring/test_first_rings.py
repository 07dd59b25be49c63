"""The rings before the kernels: overlap, the backward pass, causal layouts."""

import math
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.basics.blockwise_attention import attend
from ringlab.ring import backward, overlap
from ringlab.ring.causal import visible_pairs, visible_slice
from ringlab.ring.layouts import LAYOUTS, positions, rotary, shard, unshard
from ringlab.ring.overlap import hidden_share, seconds
from ringlab.support.timeline import Event
from tests.attention import grouped_inputs, random_qkv
from tests.rings import assert_gradients, chunks, even_lengths, messages_of_ring


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


def test_the_demonstration_tells_what_each_ring_waits_for(capsys):
    zeros, spans = torch.zeros(1, 4, 2048, 64), [(0, "compute", 0, 2), (0, "send", 2, 5), (0, "wait", 2, 3)]
    runs = {name: (zeros, events(*spans)) for name in ("blocking", "overlapped")}
    with mock.patch.object(overlap, "launch", return_value=[runs]):
        assert overlap.main() == 1
    found = re.findall(r"(\w+) +computing 2.000 s, messages and waiting (\S+) s", capsys.readouterr().out)
    assert found == [("blocking", "3.0000"), ("overlapped", "1.0000")]


# Backward: the gradients of every rank, and the bytes sent ------------------------------------------------------------


GRADIENTS = [((2, 3, 3, 37, 5), torch.float64), ((1, 2, 2, 300, 32), torch.bfloat16)]


@pytest.mark.parametrize(("sizes", "dtype"), GRADIENTS, ids=str)
def test_gradients(ranks, world_size, sizes, dtype):
    assert_gradients(ranks, world_size, *sizes, dtype, ring=backward.ring_attention)


@pytest.mark.usefixtures("alone")
def test_a_second_derivative_is_refused():
    q = torch.ones(1, 1, 2, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="a ring can be differentiated once"):
        torch.autograd.grad(backward.ring_attention(q, q, q).sum(), q, create_graph=True)


def test_a_row_that_saw_no_key_has_no_gradient():
    q, v = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    k = torch.tensor([[[[1.0, 1.0], [1.0, 0.0]]]])
    lse, delta = torch.tensor([[[-torch.inf, 2.0]]]), torch.zeros(1, 1, 2)
    d_q, d_k, d_v = backward.block_backward(q, k, v, torch.ones(1, 1, 2, 2), lse, delta, 1.0)
    assert torch.equal(d_q[0, 0, 0], torch.zeros(2))
    assert not d_k.isnan().any()
    assert not d_v.isnan().any()


def test_bytes(ranks, world_size):
    P, B, H, C, D = world_size, 2, 3, 4, 6
    four = grouped_inputs(B, H, H, C * P, D, torch.bfloat16)
    numbers = 2 * B * H * C * D  # in K and V of a block; each has 2 bytes, its gradient 4
    backwards = (P - 1) * numbers * (2 + 4)
    sent = [
        [sum(it.bytes for it in messages if it.kind == "send") for messages in passes]
        for passes in ranks(P, messages_of_ring, backward.ring_attention, [C] * P, *four)
    ]
    assert sent == [[(P - 1) * numbers * 2, backwards]] * P


# Layouts --------------------------------------------------------------------------------------------------------------


worlds = st.integers(1, 8)
layouts = st.sampled_from(LAYOUTS)


@st.composite
def sequences(draw):
    """(layout, seq_len, world_size) that fit together."""
    layout, world_size = draw(layouts), draw(worlds)
    if layout == "contiguous":
        return layout, draw(st.integers(world_size, 5 * world_size)), world_size
    return layout, draw(st.integers(1, 4)) * 2 * world_size, world_size


def test_the_first_ranks_have_a_token_more():
    assert [positions("contiguous", 7, rank, 4).tolist() for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6]]


@settings(deadline=None, derandomize=True)
@given(sequences())
def test_a_slice_is_exactly_what_the_mask_leaves(sequence):
    """Every token is on one rank. Slices and triangles leave what the definition leaves: key <= query position."""
    layout, seq_len, world_size = sequence
    at = [positions(layout, seq_len, rank, world_size) for rank in range(world_size)]
    assert sorted(torch.cat(at).tolist()) == list(range(seq_len))
    x = torch.randn(2, 3, seq_len, 4)
    assert torch.equal(unshard([shard(x, layout, rank, world_size) for rank in range(world_size)], layout), x)
    pairs = visible_pairs(at)
    for rank in range(world_size):
        for block in range(world_size):
            visible = at[block] <= at[rank][:, None]
            computed = torch.zeros_like(visible)
            part = visible_slice(layout, rank, block, len(at[rank]))
            if part is not None:
                queries, keys, triangle = part
                square = computed[queries, keys]
                assert not triangle or square.shape[0] == square.shape[1]  # kernels align others elsewhere
                square |= torch.ones_like(square).tril() if triangle else True
            assert torch.equal(computed, visible), (layout, rank, block)
            assert pairs[(rank - block) % world_size, rank] == visible.sum()
    assert pairs.sum() == seq_len * (seq_len + 1) // 2


def rotary_by_hand(x, position, base=10_000.0):
    """Equation 34 of Su et al. 2021, number by number: pair i of D/2 is turned by position · base^(-2i/D)."""
    out, D = torch.empty_like(x, dtype=torch.float64), x.shape[3]
    for c, m in enumerate(position.tolist()):
        for i in range(D // 2):
            cos, sin = math.cos(m * base ** (-2 * i / D)), math.sin(m * base ** (-2 * i / D))
            first, second = x[..., c, 2 * i].double(), x[..., c, 2 * i + 1].double()
            out[..., c, 2 * i] = first * cos - second * sin
            out[..., c, 2 * i + 1] = second * cos + first * sin
    return out


FAR = torch.tensor([0, 1, 2, 100, 255, 256, 257, 4096, 131_071])


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rotary_is_equation_34(base):
    x = random_qkv((2, 2, len(FAR), 8), torch.float64)[0]
    exact = rotary_by_hand(x, FAR, base)
    torch.testing.assert_close(rotary(x, FAR, base), exact, rtol=0, atol=1e-10)  # angles up to 1e5 round to 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_angles_are_not_rounded_to_the_dtype_of_x(dtype):
    """In bfloat16 position 4097 would be 4096. What is rounded: cos and sin, two products and their sum.

    Each rounds by u = eps/2 of itself, so a pair moves by (2√2 + 1) u of its length at most, which is less than 2 eps.
    """
    x = random_qkv((2, 2, len(FAR), 8), dtype)[0]
    turned, exact = rotary(x, FAR), rotary_by_hand(x, FAR)
    assert turned.dtype == dtype
    length = x.double().unflatten(-1, (-1, 2)).norm(dim=-1)  # of each pair
    error = (turned.double() - exact).unflatten(-1, (-1, 2)).norm(dim=-1)
    assert (error <= 2 * torch.finfo(dtype).eps * length).all()
