"""All-gather of K and V: values, gradients, bytes and memory in every world; and gathers that are wrong."""

import functools
import re
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from ringlab.basics.ranks import neighbours
from ringlab.training import all_gather
from ringlab.training.all_gather import all_gather_attention, gather_that_does_not_add, room_for_all
from tests.flash_rings import CASES, cut, whole
from tests.gradients import gradients
from tests.grouped_queries import assert_four, expected, grouped_inputs
from tests.refusals import all_of, refusal

B, H, G, D = 2, 6, 3, 8  # three K/V heads: both buffers are used, and one of them again


def on_rank(context, four, cases, wrong=None):
    """This rank's chunks of out, dq, dk and dv, for each case (options, lengths). The input must not change."""
    results = []
    with WRONG[wrong]() if wrong else nullcontext():
        for options, lengths in cases:
            mine = cut(context, options.get("layout", "contiguous"), lengths, *four)
            before = [x.clone() for x in mine]
            results.append(gradients(functools.partial(all_gather_attention, **options), *mine))
            assert all(torch.equal(x, y) for x, y in zip(mine, before, strict=True)), "the input changed"
            assert all(x.dtype == four[0].dtype for x in results[-1])
    return results


def assert_gathered(ranks, world_size, four, cases, wrong=None):
    per_rank = ranks(world_size, on_rank, four, cases, wrong)
    for i, (options, lengths) in enumerate(cases):
        right = expected(*four, causal=options.get("causal", False), scale=options.get("scale"))
        layout = options.get("layout", "contiguous")
        assert_four(whole([results[i] for results in per_rank], layout, lengths), right)


LAYOUTS_AND_MASKS = [({"causal": causal, "layout": layout}, None) for causal, layout in CASES]


@pytest.mark.parametrize("size", range(1, 9))
def test_every_layout_and_world(ranks, size):
    assert_gathered(ranks, size, grouped_inputs(B, H, G, 6 * size, D), LAYOUTS_AND_MASKS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(ranks, dtype):
    assert_gathered(ranks, 3, grouped_inputs(B, H, G, 48, D, dtype), LAYOUTS_AND_MASKS[3:])


@pytest.mark.parametrize("lengths", [[1, 13, 4], [9, 1, 1, 7, 2]], ids=str)
def test_chunks_of_any_length(ranks, lengths):
    cases = [({"causal": causal, "scale": 0.7}, lengths) for causal in (False, True)]
    assert_gathered(ranks, len(lengths), grouped_inputs(B, H, G, sum(lengths), D), cases)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_any_number_of_kv_heads(ranks, kv_heads):
    assert_gathered(ranks, 4, grouped_inputs(B, 6, kv_heads, 48, D), LAYOUTS_AND_MASKS[4:5])


def crossing(context, q, k, v, d_out):
    q, d_out = (x.split([5, 1, 3], dim=2)[context.rank] for x in (q, d_out))
    k, v = (x.split([2, 6, 4], dim=2)[context.rank] for x in (k, v))
    return gradients(all_gather_attention, q, k, v, d_out)


def test_another_number_of_queries(ranks):
    q, _, _, d_out = grouped_inputs(B, H, G, 9, D)
    _, k, v, _ = grouped_inputs(B, H, G, 12, D)
    mine = [torch.cat(parts, dim=2) for parts in zip(*ranks(3, crossing, q, k, v, d_out), strict=True)]
    assert_four(mine, expected(q, k, v, d_out))


# What it sends, and what it keeps ------------------------------------------------------------------------------------


class Held:
    """A message under way, which needs a tensor until somebody has waited for it and let it go."""

    def __init__(self, work, tensor):
        self.wait, self.tensor = work.wait, tensor


def watched_on_rank(context, four, options, lengths):
    """The numbers that this rank hands to each collective, with their dtype; and the most numbers gathered at once."""
    sent, rooms, most = [], weakref.WeakValueDictionary(), []

    def note_gather(blocks, own, **others):
        sent.append(("all-gather", blocks.numel() - own.numel(), own.dtype))
        return right_gather(blocks, own, **others)

    def note_scatter(total, parts, **others):
        sent.append(("reduce-scatter", parts.numel() - total.numel(), parts.dtype))
        return Held(right_scatter(total, parts, **others), rooms[parts.data_ptr()])

    def note_room(*args):
        room = room_for_all(*args)
        rooms[room.data_ptr()] = room
        most.append(sum(x.numel() for x in rooms.values()))
        return room

    def note_whole(head, dtype):
        rooms[id(head), dtype] = room = right_whole(head, dtype)
        most.append(sum(x.numel() for x in rooms.values()))
        return room

    mine = cut(context, options.get("layout", "contiguous"), lengths, *four)
    with (
        mock.patch.object(all_gather, "all_gather", note_gather),
        mock.patch.object(all_gather, "reduce_scatter", note_scatter),
        mock.patch.object(all_gather, "room_for_all", note_room),
        mock.patch.object(all_gather.GatheredHead, "whole", note_whole),
    ):
        q, k, v, d_out = (x.clone().requires_grad_() for x in mine)
        out = all_gather_attention(q, k, v, **options)
        forward, forward_most = list(sent), max(most)
        out.backward(d_out)
    return forward, sent[len(forward) :], forward_most, max(most)


right_gather, right_scatter = all_gather.all_gather, all_gather.reduce_scatter
right_whole = all_gather.GatheredHead.whole


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("lengths", [[8, 8, 8, 8], [3, 9, 1]], ids=str)
def test_it_sends_and_keeps_what_the_docstring_says(ranks, kv_heads, lengths):
    """(P-1)·2·B·G·C·D numbers for each collective; three buffers of a head, and three for the gradients."""
    P, C = len(lengths), max(lengths)
    block = 2 * B * C * D  # numbers of one head
    whole = 2 * B * sum(lengths) * D
    four = grouped_inputs(B, 6, kv_heads, sum(lengths), D, torch.bfloat16)
    gather = ("all-gather", (P - 1) * block, torch.bfloat16)
    scatter = ("reduce-scatter", (P - 1) * block, torch.float32)  # sums in 16 bits would show here
    for forward, backward, forward_most, most in ranks(P, watched_on_rank, four, {"causal": True}, lengths):
        assert forward == [gather] * kv_heads
        assert sorted(backward) == sorted([gather, scatter] * kv_heads)
        assert forward_most == 2 * P * block + whole
        assert most <= (2 + min(2, kv_heads)) * P * block + 2 * whole


# Wrong all-gathers ---------------------------------------------------------------------------------------------------


class Done:
    """A message that has arrived."""

    def wait(self):
        pass


def not_added(total, parts, *, group, async_op):
    """Each rank keeps what its own queries found for its block."""
    rank, world_size, _, _ = neighbours(group)
    total.copy_(parts.view(world_size, -1)[rank])
    return Done()


def added_for_the_next_rank(total, parts, *, group, async_op):
    _, world_size, _, _ = neighbours(group)
    return right_scatter(total, parts.view(world_size, -1).roll(1, 0).flatten(), group=group, async_op=async_op)


def in_another_order(blocks, own, *, group, async_op):
    """The blocks of the ranks lie in reverse order, where the next reader looks."""
    _, world_size, _, _ = neighbours(group)
    right_gather(blocks, own.clone(), group=group)
    rows = blocks.view(world_size, -1)
    rows.copy_(rows.flip(0))
    return Done()


def values_are_keys(blocks, own, *, group, async_op):
    right_gather(blocks, own.clone(), group=group)
    keys, values = blocks.view(neighbours(group)[1], 2, -1).unbind(1)
    values.copy_(keys)
    return Done()


def at_once(blocks, own, *, group, async_op):
    right_gather(blocks, own.clone(), group=group)
    return Done()


def one_buffer():
    """The next head arrives in the buffer from which this head is read."""
    rooms = {}

    def room(k, lengths, dtype):
        if k.shape[1] == 1:  # of one head: the gradients
            return room_for_all(k, lengths, dtype)
        return rooms.setdefault(k.shape, room_for_all(k, lengths, dtype))

    return mock.patch.multiple(all_gather, room_for_all=room, all_gather=at_once)


def heads_of_the_group_before(q, k, v, ring, right=all_gather.arriving_heads):
    for heads, gathered in right(q, k, v, ring):
        yield slice((heads.start - 2) % H, (heads.start - 2) % H + 2), gathered


WRONG = {
    "the gradients are not added": lambda: mock.patch.object(all_gather, "reduce_scatter", not_added),
    "the gradients of the block before": lambda: mock.patch.object(
        all_gather, "reduce_scatter", added_for_the_next_rank
    ),
    "blocks in another order": lambda: mock.patch.object(all_gather, "all_gather", in_another_order),
    "keys as values": lambda: mock.patch.object(all_gather, "all_gather", values_are_keys),
    "one buffer for two heads": one_buffer,
    "query heads of another K/V head": lambda: mock.patch.object(
        all_gather, "arriving_heads", heads_of_the_group_before
    ),
}
BACKWARD = ("the gradients are not added", "the gradients of the block before")


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("size", [2, 5])
def test_a_wrong_all_gather_is_rejected(ranks, size, wrong):
    four = grouped_inputs(B, H, G, 6 * size, D)
    for case in (({}, None), ({"causal": True, "layout": "zigzag"}, None)):
        unseen = wrong in BACKWARD or (wrong == "blocks in another order" and not case[0])  # out is right
        with pytest.raises(AssertionError, match="dk: " if unseen else "out: "):
            assert_gathered(ranks, size, four, [case], wrong)


def failure_on_rank(context, four):
    return gradients(gather_that_does_not_add, *cut(context, "contiguous", None, *four))


@pytest.mark.parametrize("size", [2, 3])
def test_the_failure_has_right_out_and_dq_and_wrong_dk_and_dv(ranks, size):
    four = grouped_inputs(B, 2, 2, 6 * size, D)
    mine, right = whole(ranks(size, failure_on_rank, four), "contiguous"), expected(*four)
    assert [exact.accepts(x) for x, exact in zip(mine, right, strict=True)] == [True, True, False, False]


# Bad input -----------------------------------------------------------------------------------------------------------

X = torch.ones(1, 2, 4, 4)
BAD = {
    "layout": ([(X, X, X)] * 2, {"layout": "spiral"}, ["layout is 'spiral'", "expected one of contiguous, zigzag"]),
    "heads": ([(X[:, :1], X, X)] * 2, {}, ["rank 0: q has 1 heads and k 2; expected a multiple", "rank 1: q has"]),
    "queries": ([(X, X, X), (X[:, :, :2], X, X)], {"causal": True}, ["rank 1: q has 2 tokens and k 4"]),
    "lengths": ([(X[:, :, :2],) * 3, (X, X, X)], {"layout": "striped"}, ["the ranks have [2, 4] tokens", "as many"]),
    "dtypes": ([(X,) * 3, (X.double(),) * 3], {}, ["the ranks disagree", "rank 0: dtype=torch.float32"]),
}


def bad_on_rank(context, qkv_of_ranks, options):
    return all_gather_attention(*qkv_of_ranks[context.rank], **options)


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_on_every_rank(ranks, bad):
    qkv_of_ranks, options, words = BAD[bad]
    assert re.search(all_of(words), refusal(ranks.outcomes(2, bad_on_rank, qkv_of_ranks, options)))
