"""All-to-all against full attention in float64: heads that divide and heads that do not; bytes, input, mistakes."""

import functools
import re
from itertools import chain
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.training.all_to_all import Alone, Exchange, all_to_all_attention, exchanged_attention, places
from ringlab.training.layouts import shard
from ringlab.training.masks import Mask
from ringlab.training.split_heads import heads_of_ranks
from tests.attention import DTYPES, SEED
from tests.exchanges import Case, assert_cases
from tests.flash_rings import CASES, cut, whole
from tests.gradients import gradcheck_on_ranks, gradients
from tests.grouped_queries import assert_four, expected, grouped_inputs
from tests.masked import dense
from tests.refusals import all_of, refusal

ZIGZAG = {"causal": True, "layout": "zigzag"}
HEADS = [(8, 8), (8, 2), (8, 1), (10, 2), (9, 3), (11, 1)]  # of q, and of k and v


def test_any_heads_in_every_layout_and_world(ranks, world_size):
    S = 8 * world_size
    options = [{"layout": "striped"}, ZIGZAG, {**ZIGZAG, "layout": "striped"}]
    assert_cases(ranks, world_size, [Case(*heads, S, each) for heads in HEADS for each in options])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_other_dtypes_and_scales(ranks, dtype):
    some = [{}, ZIGZAG, {**ZIGZAG, "scale": -0.4}, {"scale": 0.0}]
    assert_cases(ranks, 4, [Case(6, 2, 48, options, dtype=dtype, batch=2, head_dim=16) for options in some])


@settings(max_examples=10)
@given(data=st.data())
def test_any_heads_lengths_layout_dtype_and_scale(ranks, data):
    P = data.draw(st.integers(1, 5), label="P")
    G = data.draw(st.integers(1, 6), label="G")
    H = G * data.draw(st.integers(-(-P // G), 6), label="H/G")
    causal, layout = data.draw(st.sampled_from(CASES), label="causal, layout")
    lengths = None
    if layout == "contiguous":
        lengths = data.draw(st.lists(st.integers(1, 9), min_size=P, max_size=P), label="lengths")
    S = sum(lengths) if lengths else 2 * P * data.draw(st.integers(1, 4), label="tokens")
    scale = data.draw(st.sampled_from([None, 1.0, -0.5, 0.0]), label="scale")
    options, dtype = {"causal": causal, "layout": layout, "scale": scale}, data.draw(st.sampled_from(DTYPES))
    assert_cases(ranks, P, [Case(H, G, S, options, lengths, dtype, seed=data.draw(st.integers(0, 99)) + SEED)])


WINDOW = {"causal": True, "documents": (5, 30, 13), "window": 9, "global_tokens": 2}


def under_a_mask(context, four):
    """The two exchanges around attention under a mask that `all_to_all_attention` has no words for."""
    P, (q, k, v, d_out) = context.world_size, cut(context, "zigzag", None, *four)
    heads = heads_of_ranks(q.shape[1], k.shape[1], P)
    exchange = Exchange(*heads, places(Mask("zigzag", (48 // P,) * P), range(P), q.device), None)
    alone = Alone(Mask("contiguous", (48,), **WINDOW), 0.5)
    return gradients(lambda *qkv: exchanged_attention(*qkv, exchange, alone), q, k, v, d_out)


def test_any_mask_between_the_exchanges(ranks):
    four, everywhere = grouped_inputs(1, 5, 1, 48, 4), torch.arange(48)
    visible = dense(Mask("contiguous", (48,), **WINDOW), everywhere, everywhere)
    mine = whole(ranks(3, under_a_mask, four), "zigzag")
    assert_four(mine, expected(*four, visible=visible, scale=0.5, fused_blocks=3 * 8))


def in_parts_of_the_job(context, members, inputs):
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, group, four in zip(members, groups, inputs, strict=True):
        if context.rank in ranks:
            mine = [shard(x, "zigzag", ranks.index(context.rank), len(ranks)) for x in four]
            return gradients(functools.partial(all_to_all_attention, group=group, **ZIGZAG), *mine)
    return None


@pytest.mark.parametrize(("size", "members"), [(4, [[0, 2], [1, 3]]), (5, [[0, 1, 4], [2, 3]]), (3, [[2]])], ids=str)
def test_in_parts_of_a_job_at_the_same_time(ranks, size, members):
    inputs = [grouped_inputs(1, 4, 2, 24, 8, seed=seed) for seed in range(len(members))]
    per_rank = ranks(size, in_parts_of_the_job, members, inputs)
    for group, four in zip(members, inputs, strict=True):
        assert_four(whole([per_rank[rank] for rank in group], "zigzag"), expected(*four, causal=True))


def test_gradcheck(ranks):
    attention = functools.partial(all_to_all_attention, **ZIGZAG)
    inputs = grouped_inputs(1, 3, 1, 4, 2, torch.float64)[:3]
    assert ranks(2, gradcheck_on_ranks, attention, "zigzag", *inputs) == [True] * 2


def one_gradient(context, four):
    """dk alone; whether no_grad leaves a graph; and whether the same pass again gives the same bits."""
    q, k, v, d_out = cut(context, "zigzag", None, *four)
    k.requires_grad_()
    with torch.no_grad():
        graph = all_to_all_attention(q, k, v, **ZIGZAG).requires_grad
    out = all_to_all_attention(q, k, v, **ZIGZAG)
    d_k = [torch.autograd.grad(out, k, d_out, retain_graph=True)[0] for _ in range(2)]
    return d_k[0], graph, torch.equal(*d_k)


def test_one_gradient_or_none(ranks):
    four = grouped_inputs(1, 4, 2, 24, 8)
    d_k, graph, same = zip(*ranks(3, one_gradient, four), strict=True)
    (both,) = whole([[x] for x in d_k], "zigzag")
    right = expected(*four, causal=True)[2]
    assert right.accepts(both)
    assert graph == (False,) * 3
    assert same == (True,) * 3


# Bytes ----------------------------------------------------------------------------------------------------------------


def bytes_sent(context, four, lengths):
    """The bytes that this rank sends to others in the forward pass, and in the backward pass."""
    q, k, v, d_out = cut(context, "contiguous", lengths, *four)
    sent, real = [], dist.all_to_all_single

    def watched(received, x, sizes, sent_sizes, group):
        sent.append((sum(sent_sizes) - sent_sizes[context.rank]) * x.itemsize)
        real(received, x, sizes, sent_sizes, group=group)

    agreed = mock.patch("ringlab.support.agreement.dist.all_to_all_single", real)
    out = None
    with agreed, mock.patch("ringlab.training.all_to_all.dist", mock.Mock(wraps=dist, all_to_all_single=watched)):
        out = all_to_all_attention(*(x.requires_grad_() for x in (q, k, v)))
        forwards = sum(sent)
        out.backward(d_out)
    return forwards, sum(sent) - forwards


@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(1, 4, 2), (4, 8, 4), (4, 6, 2), (3, 10, 2), (5, 7, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_those_of_the_formula(ranks, size, heads, kv_heads, dtype):
    B, D, lengths = 2, 3, [5, 2, 4, 1, 3][:size]
    four = grouped_inputs(B, heads, kv_heads, sum(lengths), D, dtype)
    n, g = ([it.stop - it.start for it in share] for share in heads_of_ranks(heads, kv_heads, size))
    for rank, sent in enumerate(ranks(size, bytes_sent, four, lengths)):
        others = sum(lengths) - lengths[rank]
        tokens = (heads - n[rank]) * lengths[rank]  # of q and then of the gradient of out
        kv = 2 * (sum(g) - g[rank]) * lengths[rank]
        one = B * D * dtype.itemsize
        assert sent == (one * (tokens + kv + n[rank] * others), one * (tokens + (n[rank] + 2 * g[rank]) * others))


# Copies of K/V heads --------------------------------------------------------------------------------------------------


def sum_of_copies(context):
    """The gradient of the one K/V head, of which each of three ranks has computed a part, in bfloat16."""
    _, keys = heads_of_ranks(3, 1, 3)
    exchange = Exchange(keys, keys, torch.arange(3).split(1), None)
    part = torch.full((1, 1, 3, 1), 1.0 if context.rank == 0 else 2.0**-8, dtype=torch.bfloat16)
    return exchange.to_tokens([part])[0].item()


def test_gradients_of_copies_are_added_in_float32(ranks):
    """In bfloat16 1 + 2^-8 is 1, and once more."""
    assert ranks(3, sum_of_copies) == [1 + 2.0**-7] * 3


# Mistakes -------------------------------------------------------------------------------------------------------------

SHOWS = {  # the mistake: heads of q, heads of k and v, ranks, and options with which it shows
    "heads of out transposed": (8, 4, 4, {}),
    "K/V head r mod G": (8, 2, 4, {}),
    "a copy's gradient counted twice": (8, 2, 4, {}),
    "gradients of copies not added": (8, 2, 4, {}),
    "the layout is not undone": (4, 2, 2, ZIGZAG),
    "back to the wrong ranks": (4, 2, 2, {}),
    "out goes back in order of rank": (4, 2, 2, ZIGZAG),
    "the gradient of out by other heads": (6, 2, 4, {}),
}


@pytest.mark.parametrize("wrong", SHOWS)
def test_a_wrong_exchange_is_rejected(ranks, wrong):
    heads, kv_heads, size, options = SHOWS[wrong]
    assert_cases(ranks, size, [Case(heads, kv_heads, 24, options)])
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_cases(ranks, size, [Case(heads, kv_heads, 24, options, wrong=wrong)])


# Bad input ------------------------------------------------------------------------------------------------------------

X = torch.ones(1, 2, 4, 3)


def refused(context, inputs):
    """All-to-all on this rank's own q, k, v and options; heads that travel anyway are an error."""
    qkv, options = inputs[context.rank]
    with mock.patch("ringlab.training.all_to_all.swap", side_effect=AssertionError("heads travel")):
        all_to_all_attention(*qkv, **options)


@pytest.mark.parametrize(
    ("size", "qkvs", "options", "words"),
    [
        (3, [(X, X, X)], {}, ["among 3 ranks, and 2 query heads", "hybrid.py", "of 3 x 1"]),
        (4, [(X, X, X)], {}, ["among 4 ranks, and 2 query heads", "hybrid.py", "of 2 x 2, 4 x 1"]),
        (2, [(X, X, X)], {"layout": "spiral"}, ["layout is 'spiral'"]),
        (2, [(X, X, X), (X[:, :, :2],) * 3], {"layout": "striped"}, ["the ranks have [4, 2]", "as many on each"]),
        (2, [(X, X, X), (X[:, :, :2], X, X)], {}, ["rank 1: q has 2 tokens and k 4", "chunks of the same tokens"]),
        (2, [(X, X, X), (X, X[:, :1], X[:, :1])], {}, ["the ranks disagree", "G=2", "G=1"]),
    ],
    ids=["3 ranks", "4 ranks", "layout", "lengths", "queries", "kv_heads"],
)
def test_bad_input_is_refused_before_heads_travel(ranks, size, qkvs, options, words):
    inputs = [(qkv, options) for qkv in chain(qkvs, [qkvs[0]] * (size - len(qkvs)))]
    assert re.search(all_of(words), refusal(ranks.outcomes(size, refused, inputs)))
