"""Bad input gives a ValueError that says what came, what was expected and what to do; on every rank, and before any
block travels, so that nobody waits for ever."""

import functools
import math
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attn import ring_attention
from ringlab.basics.blocking_messages import Recv, Send, ring_programs, simulate_messages
from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.basics.chunks import check_grouped_chunks
from ringlab.basics.naive_attention import naive_attention
from ringlab.basics.online_softmax import merge
from ringlab.basics.ranks import neighbours, scatter
from ringlab.ring import backward, grouped_query, overlap
from tests.attention import random_qkv
from tests.mistakes import all_of, refusal
from tests.rings import assert_ring

X = torch.ones(1, 2, 4, 3)

BAD = {  # what is wrong: ((q, k, v), scale, words of the message)
    "three dimensions": ((X[0], X[0], X[0]), None, ["q has shape (2, 4, 3)", "expected (B, H, S, D)", "x[None]"]),
    "five dimensions": ((X, X[None], X), None, ["k has shape (1, 1, 2, 4, 3)", "expected (B, H, S, D)"]),
    "k and v": ((X, X, X[:, :, :3]), None, ["k has shape (1, 2, 4, 3) and v (1, 2, 3, 3)", "one shape"]),
    "D of q and k": ((X, *[X[..., :2]] * 2), None, ["q has shape (1, 2, 4, 3) and k (1, 2, 4, 2)", "same B, H"]),
    "H of q and k": ((X, X[:, :1], X[:, :1]), None, ["q has shape (1, 2, 4, 3) and k (1, 1, 4, 3)", "same B, H"]),
    "B of q and k": ((X, *[torch.cat([X, X])] * 2), None, ["q has shape (1, 2, 4, 3) and k (2, 2, 4, 3)", "same B, H"]),
    "two dtypes": ((X, X, X.double()), None, ["v is torch.float64", "q is torch.float32", "one dtype", "x.to(q)"]),
    "two devices": ((X, X.to("meta"), X), None, ["k is torch.float32 on meta", "on cpu", "one device", "x.to(q)"]),
    "integers": ((X.long(), X.long(), X.long()), None, ["q has dtype torch.int64", "floating dtype", "x.float()"]),
    "complex numbers": ((X.cfloat(), X.cfloat(), X.cfloat()), None, ["q has dtype torch.complex64", "floating dtype"]),
    "no batch": ((X[:0], X[:0], X[:0]), None, ["q has shape (0, 2, 4, 3)", "every size to be 1 or more"]),
    "no keys": ((X, X[:, :, :0], X[:, :, :0]), None, ["k has shape (1, 2, 0, 3)", "every size to be 1 or more"]),
    "D of 0": ((X[..., :0], X[..., :0], X[..., :0]), None, ["q has shape (1, 2, 4, 0)", "every size to be 1 or more"]),
    "scale of nan": ((X, X, X), math.nan, ["scale is nan", "finite", "None for 1/sqrt(D)"]),
    "scale of inf": ((X, X, X), -math.inf, ["scale is -inf", "finite", "None for 1/sqrt(D)"]),
}
GRADIENTS = (X, X.clone().requires_grad_(), X), None, ["requires gradients", "forward only", "torch.no_grad()"]
FOUR = torch.ones(1, 4, 4, 3)  # query heads
BAD_GROUPS = {
    "no multiple": ((FOUR[:, :3], X, X), None, ["q has shape (1, 3, 4, 3) and k (1, 2, 4, 3)", "3 heads to be a mul"]),
    "fewer heads": (
        (X[:, :1], X, X),
        None,
        ["q has shape (1, 1, 4, 3) and k (1, 2, 4, 3)", "1 heads to be a mul"],
    ),
    "tokens": ((FOUR, X[:, :, :3], X[:, :, :3]), None, ["q has shape (1, 4, 4, 3) and k (1, 2, 3, 3)", "same tokens"]),
    "order of dimensions": (
        (torch.zeros(1, 6, 4, 3), *[torch.zeros(1, 6, 2, 3)] * 2),
        None,
        ["q has shape (1, 6, 4, 3) and k (1, 6, 2, 3)", "they would fit as (B, S, H, D)"],
    ),
    "D of q and k": ((FOUR, *[X[..., :2]] * 2), None, ["q has shape (1, 4, 4, 3) and k (1, 2, 4, 2)", "same B and D"]),
    "B of q and k": (
        (torch.cat([FOUR] * 2), X, X),
        None,
        ["q has shape (2, 4, 4, 3) and k (1, 2, 4, 3)", "same B a"],
    ),
    "H of k and v": ((FOUR, X, X[:, :1]), None, ["k has shape (1, 2, 4, 3) and v (1, 1, 4, 3)", "one shape"]),
    "D of k and v": ((FOUR, X, X[..., :2]), None, ["k has shape (1, 2, 4, 3) and v (1, 2, 4, 2)", "one shape"]),
    "no heads": ((FOUR, X[:, :0], X[:, :0]), None, ["k has shape (1, 0, 4, 3)", "every size to be 1 or more"]),
}
# All rings check their input in one function, that of ALONE below: some cases on the first of each kind, one on others.
RINGS = [
    *((ring_attention, BAD[bad]) for bad in ("k and v", "two dtypes", "three dimensions", "scale of nan")),
    (
        ring_attention,
        ((X, X[:, :, :3], X[:, :, :3]), None, ["q has shape (1, 2, 4, 3) and k (1, 2, 3, 3)", "one shape"]),
    ),
    (ring_attention, GRADIENTS),
    (overlap.ring_attention, GRADIENTS),
    (overlap.ring_attention, BAD["k and v"]),
    (backward.ring_attention, BAD["k and v"]),
    (grouped_query.ring_attention, BAD_GROUPS["no multiple"]),
    (grouped_query.ring_attention, BAD_GROUPS["tokens"]),
]


OUT, LSE = torch.zeros(2, 4, 3), torch.zeros(2, 4)
ALONE = [naive_attention, functools.partial(blockwise_attention, block_size=2)]
NO_GROUP = ["no process group", "torchrun", "ringlab.support.processes.launch"]
REFUSED = [  # in one process: function, arguments, options, words of the message
    *((check_grouped_chunks, qkv, {}, words) for qkv, _, words in BAD_GROUPS.values()),
    *((alone, qkv, {"scale": scale}, words) for alone in ALONE for qkv, scale, words in BAD.values()),
    *(
        (
            alone,
            (X[:, :, :queries], X[:, :, :keys], X[:, :, :keys]),
            {"causal": True},
            [f"causal=True with {queries} queries and {keys} keys", "pass causal=False or the whole sequence"],
        )
        for alone in ALONE
        for queries, keys in ((2, 4), (4, 2))
    ),
    (blockwise_attention, (X, X, X), {"block_size": 0}, ["block_size is 0; expected 1 or more"]),
    (blockwise_attention, (X, X, X), {"block_size": -3}, ["block_size is -3; expected 1 or more"]),
    (merge, (OUT, LSE[0], OUT, LSE), {}, ["out_a has shape (2, 4, 3) and lse_a (4,)", "expected out (..., Sq, D)"]),
    (merge, (OUT, LSE, OUT, LSE[..., None]), {}, ["out_b has shape (2, 4, 3) and lse_b (2, 4, 1)", "same for a and b"]),
    (merge, (OUT, LSE, OUT[:, :2], LSE[:, :2]), {}, ["out_b has shape (2, 2, 3)", "beside out_a (2, 4, 3)"]),
    (merge, (OUT, LSE.bfloat16(), OUT, LSE), {}, ["lse_a has dtype torch.bfloat16", "float32 or", "keep the lse"]),
    (merge, (OUT, LSE, OUT, LSE.half()), {}, ["lse_b has dtype torch.float16", "float32 or float64", "keep the lse"]),
    (ring_attention, (X, X, X), {}, NO_GROUP),
    (neighbours, (), {}, NO_GROUP),
    (simulate_messages, ([[Send(0)], []],), {}, ["rank 0 has Send(to=0)", "expected another rank from 0 to 1"]),
    (simulate_messages, ([[Send(2)], []],), {}, ["rank 0 has Send(to=2)", "expected another rank from 0 to 1"]),
    (simulate_messages, ([[Recv(-1)], []],), {}, ["rank 0 has Recv(source=-1)", "expected another rank from 0 to 1"]),
    *(
        (ring_programs, (P,), {"hops": hops}, [f"world_size is {P} and hops {hops}; expected at least 2 ranks"])
        for P, hops in ((1, 1), (0, 1), (-2, 1), (4, -1))
    ),
]


@pytest.mark.parametrize(("function", "args", "options", "words"), REFUSED)
def test_one_process(function, args, options, words):
    with pytest.raises(ValueError, match=all_of(words)):
        function(*args, **options)


def ring_on(context, ring, inputs):
    """The ring on this rank's own q, k, v and scale; a block that travels all the same is an error."""
    (q, k, v), scale = inputs[context.rank]
    travels = mock.Mock(side_effect=AssertionError("a block travels"))
    with mock.patch.multiple(dist, send=travels, batch_isend_irecv=travels):
        ring(q, k, v, scale=scale)


def refused_by(ranks, ring, inputs):
    """The message of the ValueError, the same one on every rank. Then the same processes must run a right ring."""
    message = refusal(ranks.outcomes(len(inputs), ring_on, ring, inputs))
    assert_ring(ranks, len(inputs), *random_qkv((1, 1, 8, 2)))
    return message


@pytest.mark.parametrize(("ring", "bad"), RINGS)
def test_one_rank_of_three(ranks, ring, bad):
    qkv, scale, words = bad
    message = refused_by(ranks, ring, [((X, X, X), None), (qkv, scale), ((X, X, X), None)])
    assert re.match(all_of(["rank 1: ", *words]), message)
    assert "rank 0" not in message  # nothing is wrong there
    assert "rank 2" not in message


def scatter_from_the_first(context, x):
    return scatter(x if context.rank == 0 else None, context)


def test_fewer_tokens_than_ranks(ranks):
    outcomes = ranks.outcomes(5, scatter_from_the_first, X)
    message = "rank 0: 4 tokens for 5 ranks; expected at least one token for each rank"
    assert [(it.kind, it.message) for it in outcomes] == [("ValueError", message)] * 5
