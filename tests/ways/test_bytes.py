"""What each way sends, forward and backward, and what an all-gather keeps: as the docstrings say, and no more."""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringlab.support import pipes
from ringlab.support.messages import Watch
from ringlab.ways import all_gather, all_to_all
from ringlab.ways.heads import heads_of_ranks
from tests.attention import DTYPES
from tests.every_way import ON_MESH, WAYS, Problem, attention_of, cut, name_of, ranks_of

B, C, D = 2, 6, 5


def messages(context, way, shape, problem):
    """The messages of this rank in the forward pass, without those of the agreement, and in the backward pass."""
    q, k, v, d_out = cut(context, problem.layout, problem.lengths, *problem.inputs())
    attention = attention_of(context, way, shape)
    attention(q, k, v, **problem.options)  # opens the pipes
    with Watch() as watch:
        out = attention(*(x.requires_grad_() for x in (q, k, v)), **problem.options)
        forward = len(watch.messages)
        out.backward(d_out)
    agreements = 2 if way in ON_MESH else 1  # as messages
    if pipes.host_of_process():  # through pipes
        agreements = 0
    return watch.messages[agreements:forward], watch.messages[forward + agreements :]


def sent(of_pass):
    """The bytes sent, by the rank that they go to."""
    return sum_of(*({message.peer: message.bytes} for message in of_pass if message.kind == "send"))


def sum_of(*parts):
    """{rank: bytes} of several, without those to whom nothing goes."""
    return dict(sum(map(Counter, parts), Counter()))


HOPS = [  # of 4 ranks with 6 tokens each
    ({"causal": True, "layout": "zigzag"}, 3),
    ({"causal": True, "window": 1}, 0),  # hops = ceil((w - 1) / C): tests/ring/test_masks.py
    ({"causal": True, "window": 8}, 2),
    ({"causal": True, "window": 2, "global_tokens": 1}, 3),  # all ranks see the first block
    ({"documents": [7, 6, 6, 5]}, 3),  # both ways: the first rank sees a key of the second, three hops on
    ({"causal": True, "documents": [7, 6, 6, 5]}, 1),
    ({"causal": True, "layout": "striped", "window": 4}, 3),
]


@pytest.mark.parametrize(("options", "hops"), HOPS, ids=str)
def test_a_ring_sends_what_its_hops_cost(ranks, options, hops):
    """hops blocks, forward and backward; and as many messages of gradients, the last of which goes home."""
    D_v = D - 2
    block = B * 2 * C * (D + D_v) * 4
    problem = Problem(4, 2, 4 * C, options, batch=B, head_dim=D, value_dim=D_v)
    for rank, (forward, backward) in enumerate(ranks(4, messages, "ring", 4, problem)):
        following, home = (rank + 1) % 4, (rank - hops) % 4
        assert sent(forward) == sum_of({following: hops * block})
        assert sent(backward) == (sum_of({following: (2 * hops - 1) * block}, {home: block}) if hops else {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_ring_sends_blocks_in_the_dtype_of_q_and_sums_in_float32_at_least(ranks, size, dtype):
    numbers = B * 1 * C * D  # of K, and of V
    problem = Problem(4, 1, size * C, dtype=dtype, batch=B, head_dim=D)
    wide = torch.promote_types(dtype, torch.float32).itemsize
    for forward, backward in ranks(size, messages, "ring", size, problem):
        kv, d_kv = [numbers * dtype.itemsize] * 2 * (size - 1), [2 * numbers * wide] * (size - 1)
        assert [message.bytes for message in forward if message.kind == "send"] == kv
        assert sorted(message.bytes for message in backward if message.kind == "send") == sorted(kv + d_kv)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (2, 3), (3, 2)], ids=name_of)
@pytest.mark.parametrize("window", [None, 2])
def test_a_double_ring_sends_few_blocks_to_another_host(ranks, shape, window):
    """A window of two tokens ends after the second turn."""
    (n, g), P, block = shape, ranks_of(shape), 2 * B * 2 * C * D * 2  # bytes of K and V in bfloat16; sums have twice
    turns = n if window is None else min(n, 2)
    problem = Problem(4, 2, P * C, {"causal": True, "window": window}, dtype=torch.bfloat16, batch=B, head_dim=D)
    for rank, (forward, backward) in enumerate(ranks(P, messages, "double ring", shape, problem)):
        host, device = divmod(rank, g)
        inside, across = host * g + (device + 1) % g, (host + 1) % n * g + device
        home = (host - turns + 1) % n * g + device  # of the sums between hosts, after the last turn
        hops = {inside: turns * (g - 1) * block}, {across: (turns - 1) * block}
        assert sent(forward) == sum_of(*hops)
        sums = {inside: 2 * block * turns * max(g - 2, 0)}, {across: 2 * block * max(turns - 2, 0)}
        homes = {inside: 2 * block * turns if g > 1 else 0}, {home: 2 * block if turns > 1 else 0}
        assert sent(backward) == sum_of(*hops, *sums, *homes)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "heads", "kv_heads"), [((3, 2), 6, 1), ((2, 3), 10, 2)], ids=name_of)
def test_a_hybrid_sends_the_blocks_of_a_ring_between_rows(ranks, shape, heads, kv_heads):
    rows, inside = shape
    _, keys = heads_of_ranks(heads, kv_heads, inside)
    problem = Problem(heads, kv_heads, ranks_of(shape) * C, dtype=torch.bfloat16, batch=B, head_dim=D)
    for rank, (forward, backward) in enumerate(ranks(ranks_of(shape), messages, "hybrid", shape, problem)):
        need = keys[rank % inside]
        block = 2 * B * (need.stop - need.start) * inside * C * D  # numbers
        hops = 2 * (rows - 1) * block
        assert sum(sent(forward).values()) == hops
        assert sum(sent(backward).values()) == 3 * hops  # K and V again; their gradients in float32


@pytest.mark.slow
@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(1, 4, 2), (4, 6, 2), (3, 10, 2), (5, 7, 1)])
def test_all_to_all_sends_heads_once_each_way(ranks, size, heads, kv_heads):
    """D numbers of a token of q and k, Dv of v and out; backward as many of the gradients."""
    D_v = D + 3
    lengths, bfloat16 = (5, 2, 4, 1, 3)[:size], torch.bfloat16
    problem = Problem(heads, kv_heads, sum(lengths), {}, lengths, bfloat16, batch=B, head_dim=D, value_dim=D_v)
    n, g = ([part.stop - part.start for part in share] for share in heads_of_ranks(heads, kv_heads, size))
    for rank, of_passes in enumerate(ranks(size, exchanged, problem)):
        others = sum(lengths) - lengths[rank]
        there, back = (heads - n[rank]) * lengths[rank], n[rank] * others  # of query heads
        kv_there, kv_back = (sum(g) - g[rank]) * lengths[rank], g[rank] * others
        forward = there * D + kv_there * (D + D_v) + back * D_v
        backward = there * D_v + back * D + kv_back * (D + D_v)
        assert of_passes == [B * 2 * numbers for numbers in (forward, backward)]


def exchanged(context, problem):
    """The bytes that this rank sends to others by the exchanges of the forward pass, and of the backward pass."""
    bytes_of_passes, real = [0, 0], dist.all_to_all_single

    def watched(received, x, sizes, sent_sizes, group):
        bytes_of_passes[backward] += (sum(sent_sizes) - sent_sizes[context.rank]) * x.itemsize
        real(received, x, sizes, sent_sizes, group=group)

    q, k, v, d_out = cut(context, "contiguous", problem.lengths, *problem.inputs())
    with mock.patch.object(all_to_all, "dist", mock.Mock(wraps=dist, all_to_all_single=watched)):
        backward = 0
        out = WAYS["all-to-all"](*(x.requires_grad_() for x in (q, k, v)))
        backward = 1
        out.backward(d_out)
    return bytes_of_passes


# All-gather ----------------------------------------------------------------------------------------------------------


def watched_gathers(context, problem):
    """The numbers that this rank hands to each collective, with their dtype, forward and backward."""
    sent, right = [], (all_gather.all_gather, all_gather.reduce_scatter)

    def gather(blocks, own, **others):
        sent.append(("all-gather", blocks.numel() - own.numel(), own.dtype))
        return right[0](blocks, own, **others)

    def scatter(total, parts, **others):
        sent.append(("reduce-scatter", parts.numel() - total.numel(), parts.dtype))
        return right[1](total, parts, **others)

    q, k, v, d_out = cut(context, problem.layout, problem.lengths, *problem.inputs())
    with mock.patch.multiple(all_gather, all_gather=gather, reduce_scatter=scatter):
        out = WAYS["all-gather"](*(x.requires_grad_() for x in (q, k, v)), **problem.options)
        forward = list(sent)
        out.backward(d_out)
    return forward, sent[len(forward) :]


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_an_all_gather_sends_what_the_docstring_says(ranks, kv_heads):
    """(P-1)·B·G·C·(D + Dv) numbers for each collective, where C is the longest chunk."""
    lengths, D_v = (3, 9, 1), D - 2
    problem = Problem(6, kv_heads, 13, {"causal": True}, lengths, torch.bfloat16, batch=B, head_dim=D, value_dim=D_v)
    gather = ("all-gather", 2 * B * 9 * (D + D_v), torch.bfloat16)
    scatter = ("reduce-scatter", 2 * B * 9 * (D + D_v), torch.float32)  # sums in 16 bits would show here
    for forward, backward in ranks(3, watched_gathers, problem):
        assert forward == [gather] * kv_heads
        assert sorted(backward, key=str) == sorted([gather, scatter] * kv_heads, key=str)
