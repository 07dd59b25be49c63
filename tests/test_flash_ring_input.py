"""What the trainable ring takes (any view of a tensor) and what it refuses, on every rank, before a block travels."""

import functools
import math
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringlab.training.flash_ring import ring_flash_attention, scaled_dot_product_attention
from tests.flash_rings import assert_flash, cut, whole
from tests.grouped_queries import assert_four, expected, grouped_inputs
from tests.refusals import all_of, refusal
from tests.views import VIEWS


def ring_on_views(context, q, k, v, d_out, options):
    """This rank's results with each kind of view, and with d_out expanded from one number."""
    attention = functools.partial(ring_flash_attention, **options)
    mine = cut(context, options["layout"], None, q, k, v, d_out)
    results = []
    for view in VIEWS:
        inputs = [view(x).detach().requires_grad_() for x in mine[:3]]
        before = [x.detach().clone() for x in inputs]
        assert not inputs[0].is_contiguous()
        out = attention(*inputs)
        results.append((out.detach(), *torch.autograd.grad(out, inputs, view(mine[3]))))
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "the ring changed its input"
    inputs = [x.clone().requires_grad_() for x in mine[:3]]
    out = attention(*inputs)
    out.sum().backward()
    return [*results, (out.detach(), *(x.grad for x in inputs))]


@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "zigzag"), (True, "striped")])
@pytest.mark.parametrize("scale", [0.3, -0.3])  # a fused kernel, and the plain one
def test_views_are_as_good_as_contiguous_tensors(ranks, causal, layout, scale):
    four = grouped_inputs(2, 4, 2, 24, 6)
    options = {"causal": causal, "layout": layout, "scale": scale}
    *views, summed = zip(*ranks(3, ring_on_views, *four, options), strict=True)
    assert len(views) == len(VIEWS)
    for per_rank in views:
        assert_four(whole(per_rank, layout), expected(*four, causal=causal, scale=scale))
    ones = [*four[:3], torch.ones_like(four[3])]
    assert_four(whole(summed, layout), expected(*ones, causal=causal, scale=scale))


# Bad input ------------------------------------------------------------------------------------------------------------


def refused(context, inputs):
    """The ring on this rank's own q, k, v and options; a block that travels anyway is an error."""
    qkv, options = inputs[context.rank]
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("a block travels")):
        ring_flash_attention(*qkv, **options)


def refusal_of_the_ring(ranks, inputs):
    """The message that all ranks raised. Then the same processes must run a right ring."""
    message = refusal(ranks.outcomes(len(inputs), refused, inputs))
    assert_flash(ranks, len(inputs), grouped_inputs(1, 2, 1, 12, 2))
    return message


X = torch.ones(1, 2, 4, 3)

BAD = {  # what is wrong: (q, k, v on each of two ranks, options, words of the message)
    "layout": ([(X, X, X)] * 2, {"layout": "spiral"}, ["layout is 'spiral'", "expected one of contiguous, zigzag"]),
    "no layout": ([(X, X, X)] * 2, {"layout": None}, ["layout is None", "expected one of contiguous, zigzag"]),
    "zigzag of 6": (
        [(X[:, :, :3],) * 3] * 2,
        {"causal": True, "layout": "zigzag"},
        ["6 tokens in the zigzag layout on 2 ranks", "multiple of 4", "pad(x, 4)"],
    ),
    "striped of 7": (
        [(X,) * 3, (X[:, :, :3],) * 3],
        {"layout": "striped"},
        ["7 tokens in the striped layout on 2 ranks", "multiple of 2", "pad(x, 2)"],
    ),
    "uneven zigzag": (
        [(X[:, :, :3],) * 3, (torch.ones(1, 2, 5, 3),) * 3],
        {"causal": True, "layout": "zigzag"},
        ["the ranks have [3, 5] tokens in the zigzag layout", "expected as many on each", "use shard"],
    ),
    "uneven striped": (
        [(X[:, :, :3],) * 3, (X[:, :, :1],) * 3],
        {"layout": "striped"},
        ["the ranks have [3, 1] tokens in the striped layout", "expected as many on each", "use shard"],
    ),
    "heads": (
        [(torch.ones(1, 3, 4, 3), X, X)] * 2,
        {},
        ["rank 0: q has 3 heads and k 2; expected a multiple", "rank 1: q has 3 heads"],
    ),
    "fewer queries": (
        [(X, X, X), (X[:, :, :2], X, X)],
        {"causal": True},
        ["rank 1: q has 2 tokens and k 4; expected chunks of the same tokens"],
    ),
    "k and v": ([(X, X, X), (X, X, X[:, :1])], {}, ["rank 1: k has shape (1, 2, 4, 3) and v (1, 1, 4, 3)"]),
    "three dimensions": ([(X[0], X, X), (X, X, X)], {}, ["rank 0: q has shape (2, 4, 3)", "expected (B, H, S, D)"]),
    "nothing": ([(X, X, X), (X[:, :0], X, X)], {}, ["rank 1: q has shape (1, 0, 4, 3)", "1 or more"]),
    "scale": ([(X, X, X)] * 2, {"scale": math.inf}, ["rank 0: scale is inf", "finite"]),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_before_a_block_travels(ranks, bad):
    qkvs, options, words = BAD[bad]
    message = refusal_of_the_ring(ranks, [(qkv, options) for qkv in qkvs])
    assert re.match(all_of(words), message), message


OTHER = {  # what one rank has and the others have not: (q, k, v, options, words)
    "causal": ((X, X, X), {"causal": True}, ["causal=False", "causal=True"]),
    "layout": ((X, X, X), {"layout": "zigzag"}, ["layout=contiguous", "layout=zigzag"]),
    "scale": ((X, X, X), {"scale": 0.25}, ["scale=0.577", "scale=0.25"]),
    "dtype": ((X.bfloat16(),) * 3, {}, ["dtype=torch.float32", "dtype=torch.bfloat16"]),
    "G": ((X, X[:, :1], X[:, :1]), {}, ["G=2", "G=1"]),
    "gradients": ((X, X, X.clone().requires_grad_()), {}, ["gradients=False", "gradients=True"]),
}


@pytest.mark.parametrize("other", OTHER)
def test_ranks_that_disagree(ranks, other):
    qkv, options, words = OTHER[other]
    right = ((X, X, X), {})
    message = refusal_of_the_ring(ranks, [right, (qkv, options), right])
    there = ["the ranks disagree; expected the same on each of them", "rank 0: ", words[0], "rank 1: ", words[1]]
    assert re.match(all_of(there), message), message


@pytest.mark.parametrize(
    ("qkv", "options", "words"),
    [
        ((X, X, X), {"attn_mask": X}, ["attn_mask was given", "expected None", "is_causal=True only"]),
        ((X, X, X), {"dropout_p": 0.1}, ["dropout_p is 0.1", "expected 0.0", "no dropout"]),
        ((X, X[:, :1], X[:, :1]), {}, ["query has 2 heads and key 1", "expected enable_gqa=True"]),
    ],
    ids=["mask", "dropout", "heads"],
)
def test_what_a_ring_does_not_do_is_refused_on_every_rank(ranks, qkv, options, words):
    """One rank asks for it, and every rank raises: so no rank waits for another."""
    outcomes = ranks.outcomes(3, drop_in, [((X, X, X), {}), (qkv, options), ((X, X, X), {})])
    assert re.match(all_of(["rank 1: ", *words]), refusal(outcomes))


def drop_in(context, calls):
    qkv, options = calls[context.rank]
    return scaled_dot_product_attention(*qkv, **options)
