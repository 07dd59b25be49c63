"""The trainable ring under masks: documents and windows, in every layout and world; what it sends; and mistakes."""

import functools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.training import overlap, schedule
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import LAYOUTS, shard
from ringlab.training.masks import Mask
from tests.attention import SEED
from tests.flash_rings import assert_flash, ring_gradients, whole
from tests.grouped_queries import assert_four, expected, grouped_inputs
from tests.masked import changed, dense, forget, masks, right_hops
from tests.refusals import all_of, refusal

S, DOCUMENTS, WINDOW = 240, (1, 37, 2, 100, 60, 40), 45  # S: a multiple of 2P for P = 1 ... 6 and 8
MASKS = {
    "documents": {"documents": list(DOCUMENTS)},
    "documents, both ways": {"documents": list(DOCUMENTS), "causal": False},
    "one document": {"documents": [S]},
    "a window": {"window": WINDOW},
    "a window of one token": {"window": 1},
    "a window and documents": {"documents": list(DOCUMENTS), "window": WINDOW},
    "a window and global tokens": {"window": WINDOW, "global_tokens": 5},
    "all of them": {"documents": list(DOCUMENTS), "window": 20, "global_tokens": 3},
    "two hops": {"documents": [1, 37, 202], "window": 90},  # of 3 on 4 ranks, of 4 on 5
}


def options_of(name, layout):
    return {"causal": True, "layout": layout, **MASKS[name]}


@functools.cache
def problem(name, dtype=torch.float32):
    """q, k, v, d_out; and what out, dq, dk, dv must be, with a few pieces of each of up to 8 blocks to merge."""
    four, mask = grouped_inputs(1, 4, 2, S, 16, dtype), {"causal": True, **MASKS[name]}
    at = torch.arange(S)
    options = {**mask, "documents": tuple(mask.get("documents", (S,)))}
    mask = Mask("contiguous", (S,), **options)
    visible = dense(mask, at, at)
    return four, expected(*four, visible=visible, fused_blocks=3 * 8)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_every_mask_layout_and_world(ranks, size, layout, name):
    assert_flash(ranks, size, *problem(name), **options_of(name, layout))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(ranks, dtype):
    assert_flash(ranks, 3, *problem("a window and documents", dtype), **options_of("a window and documents", "zigzag"))


@settings(max_examples=15)
@given(masks(), st.integers(0, 2**31))
def test_any_mask_and_any_chunk_lengths(ranks, mask, seed):
    four = grouped_inputs(1, 2, 1, mask.seq_len, 4, torch.float64, seed=seed + SEED)
    at = torch.arange(mask.seq_len)
    right = expected(*four, visible=dense(mask, at, at), fused_blocks=3 * 8)
    options = {"causal": mask.causal, "layout": mask.layout, "window": mask.window, "global_tokens": mask.global_tokens}
    options["documents"] = mask.documents and list(mask.documents)
    lengths = list(mask.lengths) if mask.layout == "contiguous" else None
    assert_flash(ranks, len(mask.lengths), four, right, lengths=lengths, **options)


def sent_bytes(context, four, options):
    """The bytes that this rank sends in the forward pass, and in both passes."""
    sent = []

    def counted(operations):
        sent.extend(it.tensor.nbytes for it in operations if it.op is dist.isend)
        return batch(operations)

    q, k, v, d_out = (shard(x, options["layout"], context.rank, context.world_size) for x in four)
    batch = dist.batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", counted):
        out = ring_flash_attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), **options)
        forward = sum(sent)
        out.backward(d_out)
    return forward, sum(sent)


@pytest.mark.parametrize(
    ("layout", "mask", "hops"),
    [
        ("contiguous", {"window": 1}, 0),  # hops = ceil((w - 1) / C), with C = 60
        ("contiguous", {"window": 2}, 1),
        ("contiguous", {"window": 61}, 1),
        ("contiguous", {"window": 62}, 2),
        ("contiguous", {"window": 2, "global_tokens": 1}, 3),  # all ranks see the first block
        ("contiguous", {"documents": [60, 60, 60, 60]}, 0),
        ("contiguous", {"documents": [61, 60, 60, 59]}, 1),
        ("contiguous", {"documents": [10, 150, 80]}, 2),
        ("zigzag", {"window": 2}, 3),
        ("striped", {"window": 2}, 1),
        ("striped", {"window": 4}, 3),
    ],
)
def test_it_sends_what_the_hops_cost_and_no_more(ranks, layout, mask, hops):
    """hops messages of K and V, forward and backward; and as many of their gradients, and one that brings them home."""
    P, (_, _, G, D) = 4, (1, 4, 2, 16)
    options = {"causal": True, "layout": layout, **mask}
    block = 2 * G * (S // P) * D * 4  # bytes, float32
    for sent in ranks(P, sent_bytes, grouped_inputs(1, 4, G, S, D), options):
        assert sent == (hops * block, (2 * hops + (hops + 1 if hops else 0)) * block)


def one_hop_less():
    return mock.patch.object(Mask, "hops", property(lambda mask: right_hops(mask) - 1))


def sent_home_by_the_next_rank():
    post = overlap.post
    return mock.patch.object(schedule, "post", lambda *args, places=1: post(*args))


WRONG = {
    "a document leaks into the next": lambda: changed(first=-1),
    "a document begins one token late": lambda: changed(first=1),
    "the next token is seen": lambda: changed(end=1),
    "a hop too few": one_hop_less,
    "gradients sent to the next rank, and not home": sent_home_by_the_next_rank,
}


def wrong_gradients(context, *args, wrong):
    forget()
    try:
        with WRONG[wrong]():
            return ring_gradients(context, *args)
    finally:
        forget()


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("size", [4, 5])
def test_a_wrong_mask_is_rejected(ranks, size, wrong):
    name, layout = "two hops", "contiguous"
    four, right = problem(name)
    per_rank = ranks(size, functools.partial(wrong_gradients, wrong=wrong), *four, options_of(name, layout))
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_four(whole(per_rank, layout), right)


def refused_on_ranks(context, options_of_ranks):
    q, k, v, _ = (shard(x, "contiguous", context.rank, context.world_size) for x in grouped_inputs(1, 2, 2, 12, 4))
    return ring_flash_attention(q, k, v, **options_of_ranks[context.rank])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"documents": [5, 6]}, ["documents of 5, 6 tokens, 11 in all, for a sequence of 12", "expected"]),
        ({"documents": [5, 0, 7]}, ["documents of 5, 0, 7 tokens", "expected 1 token or more in each"]),
        ({"documents": [5.0, 7.0]}, ["documents is (5.0, 7.0)", "expected a list of their lengths"]),
        ({"documents": torch.tensor([5, 7])}, ["documents is tensor", "expected a list of their lengths"]),
        ({"window": 0, "causal": True}, ["window is 0", "expected 1 token or more"]),
        ({"window": 3}, ["window is 3 with causal=False", "expected"]),
    ],
)
def test_a_mask_that_makes_no_sense_is_refused_on_every_rank(ranks, options, words):
    assert re.search(all_of(words), refusal(ranks.outcomes(3, refused_on_ranks, [options] * 3)))
