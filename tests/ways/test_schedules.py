"""Every way to share a sequence against full attention in float64: masks, layouts, worlds, gradients; mistakes.

And heads that do not divide, NaN, padding, sequences of calls.
"""

import math
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from ringlab.ring import flash_ring
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import LAYOUTS, Layout, pad, positions, shard, unshard
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.ring.schedule import Ring
from ringlab.states import state_ring
from ringlab.states.state_ring import ring_linear_attention
from ringlab.support import exchange
from ringlab.support.agreement import NEW_GROUP, agree
from ringlab.support.expect import attempt
from ringlab.ways.all_gather import AllGather, pieces_of_all
from ringlab.ways.all_to_all import AllToAll, Alone, count
from ringlab.ways.heads import heads_of_ranks
from tests.attention import NAMES, assert_four, assert_right, expected, gradients, grouped_inputs
from tests.every_way import (
    ALL_LAYOUTS,
    EVERY,
    FLAT,
    ON_MESH,
    OWN,
    SOME,
    TRIED,
    WAYS,
    Problem,
    assert_programs,
    assert_right_results,
    attention_of,
    checked_gradients,
    cut,
    few_or_many,
    masks_of,
    name_of,
    problems,
    ranks_of,
    results_on_rank,
    ring_gradients,
    shapes,
    whole,
)
from tests.fake_gpu import Kernels, on_gpu
from tests.mistakes import all_of, assert_refused
from tests.states import test_state_ring as states

STRIPED = {"causal": True, "layout": "striped"}
every_way = pytest.mark.parametrize(("way", "shape"), EVERY, ids=name_of)
some_ways = pytest.mark.parametrize(("way", "shape"), SOME, ids=name_of)


@every_way
def test_every_mask_and_layout(ranks, way, shape):
    """8 query heads on 2: of three ranks two then have a run of query heads on each K/V head. With other numbers of
    ranks, each mask in one layout, and causal in each."""
    S, every = 6 * ranks_of(shape), shape == TRIED[way][-1]
    problems = [
        Problem(8, 2, S, {**mask, "layout": layout})
        for i, (name, mask) in enumerate(masks_of(S).items())
        for j, layout in enumerate(ALL_LAYOUTS)
        if every or name == "causal" or i % len(ALL_LAYOUTS) == j
    ]
    lengths = tuple(range(1, ranks_of(shape) + 1))  # a document on each rank: no block is needed elsewhere
    problems.append(Problem(8, 2, sum(lengths), {"documents": lengths}, lengths))
    assert_right_results(ranks, way, shape, problems)


@pytest.mark.slow
@some_ways
def test_another_head_dimension_of_v_sinks_and_a_softcap(ranks, way, shape):
    """Alone and together, in every mask, other dtypes and unequal chunks, with queries that see no key."""
    S, P = 6 * ranks_of(shape), ranks_of(shape)
    masks = [{**mask, "layout": ("zigzag", "striped", OWN)[i % 3]} for i, mask in enumerate(masks_of(S).values())]
    problems = [Problem(8, 2, S, mask, sinks=torch.float32, value_dim=3) for mask in masks]
    problems += [Problem(8, 2, S, {**mask, "softcap": 2}, times_q=2.0, head_dim=3, value_dim=5) for mask in masks]
    problems += [
        Problem(8, 4, S, {"causal": True, "scale": -0.5}, dtype=dtype, batch=2, value_dim=6, sinks=of_sinks)
        for dtype, of_sinks in ((torch.bfloat16, torch.float32), (torch.bfloat16,) * 2, (torch.float32, torch.float64))
    ]
    problems += [
        Problem(8, 4, S, {"causal": True, "scale": scale, "softcap": 1.5}, dtype=dtype, batch=2, value_dim=3)
        for dtype, scale in ((torch.bfloat16, None), (torch.float64, -0.4), (torch.float16, 0.0))
    ]
    both = Problem(8, 8, S, {"causal": True, "softcap": 20.0}, times_q=9.0, sinks=torch.float32)
    problems.append(replace(both, lengths=(1,) * (P - 1) + (S - P + 1,)))
    assert_right_results(ranks, way, shape, problems)


def at_the_edge(context, four):
    """out, and what is learned where only the sinks are: the first is -inf, and query 2 sees no key."""
    q, k, v, d_out = cut(context, "striped", None, *four)
    sinks = torch.tensor([-torch.inf, 0.5, 1.0, -2.0], requires_grad=True)
    out = ring_flash_attention(q, k, v, **STRIPED, sinks=sinks)
    out.backward(d_out)
    return out.detach(), sinks.grad


def test_sinks_alone_are_learned_and_a_query_that_sees_no_key_gives_0(ranks):
    q, k, *others = four = grouped_inputs(1, 4, 2, 24, 8)
    q[..., -1], k[..., -1] = 0.0, -1e30
    q[:, :, 2, -1] = 1e30  # all scores of query 2 are -inf
    outs, of_ranks = zip(*ranks(3, at_the_edge, four), strict=True)
    (out,) = whole([[out] for out in outs], "striped")
    d_sinks = sum(x.double() for x in of_ranks)
    assert out[:, :, 2].count_nonzero() == 0
    seen = torch.arange(24) != 2
    right = expected(q[..., :-1], k[..., :-1], *others, causal=True, scale=8**-0.5)[0]
    first = replace(right, exact=right.exact[:, :1, seen], sums=right.sums[:, :1, seen])
    assert_right(out[:, :1, seen], first)  # a sink of -inf is none
    assert d_sinks[0] == 0
    assert d_sinks[1:].isfinite().all()
    assert d_sinks[1:].all()


@settings(max_examples=20)
@given(data=st.data())
def test_any_heads_lengths_mask_layout_dtype_and_scale(ranks, data):
    way = data.draw(st.sampled_from([*WAYS]), label="way")
    P = data.draw(st.integers(1, 6), label="P")
    shape = data.draw(st.sampled_from(shapes(way, P)), label="shape")
    split = {"all-to-all": P, "hybrid": shape[1] if way == "hybrid" else 1}.get(way, 1)  # a head or more for each
    assert_right_results(ranks, way, shape, [data.draw(problems(P, split), label="problem")])


# Parts of a job ------------------------------------------------------------------------------------------------------

PARTS = {  # a way: of how many ranks, which of them share a sequence; for a mesh, host by host
    "ring": (5, [[0, 1, 4], [2, 3]]),
    "all-gather": (5, [[1, 3], [0, 2, 4]]),
    "all-to-all": (5, [[0, 1, 4], [2, 3]]),
    "hybrid": (8, [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
    "double ring": (7, [[[0, 2], [1, 3]], [[4], [5], [6]]]),
}


def in_parts_of_the_job(context, way, parts, inputs, meshes):
    """Form all the groups, as every rank must, and run the attention of the part that this rank is in, if any."""
    groups = [DeviceMesh("cpu", part) if way in ON_MESH or meshes else dist.new_group(part) for part in parts]
    for part, group, four in zip(parts, groups, inputs, strict=True):
        members = torch.tensor(part).flatten().tolist()
        if context.rank in members:
            mine = [shard(x, "zigzag", members.index(context.rank), len(members)) for x in four]
            return checked_gradients(WAYS[way], mine, {"causal": True, "layout": "zigzag", "group": group})
    return None


@pytest.mark.parametrize(("way", "meshes"), [*((way, False) for way in PARTS), ("ring", True), ("all-to-all", True)])
def test_in_parts_of_a_job_at_the_same_time(ranks, way, meshes):
    """In process groups, or in meshes of one dimension; hybrid and double ring always in meshes."""
    world_size, parts = PARTS[way]
    inputs = [grouped_inputs(1, 4, 2, 24, 8, seed=seed) for seed in range(len(parts))]
    per_rank = ranks(world_size, in_parts_of_the_job, way, parts, inputs, meshes)
    for part, four in zip(parts, inputs, strict=True):
        mine = [per_rank[rank] for rank in torch.tensor(part).flatten().tolist()]
        assert_four(whole(mine, "zigzag"), expected(*four, causal=True))


# As an operation of autograd -----------------------------------------------------------------------------------------


def what_autograd_may_ask(context, way, shape, four):
    """dk alone, of the sum of out; whether the same again gives the same bits, whether no_grad leaves a graph; a second
    derivative. The input is views, and d_out is one number."""
    (q, k, v, d_out), attention = cut(context, "striped", None, *four), attention_of(context, way, shape)
    q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    k, d_out = k.requires_grad_(), torch.ones(()).expand_as(d_out)
    with torch.no_grad():
        graph = attention(q, k, v, **STRIPED).requires_grad
    out, other = (attention(q, k, v, **STRIPED) for _ in range(2))
    d_k = [torch.autograd.grad(out, k, d_out, retain_graph=True)[0] for _ in range(2)]
    d_k.append(torch.autograd.grad(other, k, d_out)[0])
    same = torch.equal(out, other) and all(torch.equal(d_k[0], again) for again in d_k[1:])
    errors = []
    for head in (d_out, d_out.clone().requires_grad_()):  # linear: d_out is a constant; and another
        try:
            torch.autograd.grad(out, k, head, create_graph=True)
        except RuntimeError as error:
            errors.append(str(error))
    return d_k[0], same, graph, errors


@pytest.mark.parametrize(("way", "shape"), SOME[:3])
def test_one_gradient_none_or_a_second_derivative(ranks, way, shape):
    P, (q, k, v, d_out) = ranks_of(shape), grouped_inputs(1, 4, 2, 24, 8)
    four = q, k, v, torch.ones_like(d_out)
    d_k, same, graph, errors = zip(*ranks(P, what_autograd_may_ask, way, shape, four), strict=True)
    (all_of_k,) = whole([[x] for x in d_k], "striped")
    assert expected(*four, causal=True)[2].accepts(all_of_k)
    assert same == (True,) * P
    assert graph == (False,) * P
    assert all(["a ring can be differentiated once" in each for each in of_rank] == [True] * 2 for of_rank in errors)


# Other queries than keys ---------------------------------------------------------------------------------------------

QUERIES, KEYS = (3, 1, 7, 2), (4, 2, 1, 6)  # tokens of each rank


def to_the_device(context, way, layout, four):
    """How often a pass and the next one copy whole numbers to the device of q: there the host would wait for a GPU."""
    counted, right = [0], torch.Tensor.to

    def to(x, *args, **options):
        counted[0] += x.dtype == torch.int64 and isinstance(args[0], torch.device)
        return right(x, *args, **options)

    q, k, v, d_out = (shard(x, layout, context.rank, context.world_size) for x in four)
    copies = []
    with mock.patch.object(torch.Tensor, "to", to):
        for _ in range(2):
            qkv = [x.clone().requires_grad_() for x in (q, k, v)]
            WAYS[way](*qkv, causal=True, layout=layout).backward(d_out)
            copies.append(counted[0])
    return copies


@pytest.mark.parametrize("way", ["all-gather", "all-to-all"])
def test_the_places_of_tokens_are_copied_to_the_device_once_or_never(ranks, way):
    """The three layouts are a few slices. A layout of tokens here and there has an index for each of the 3 ranks."""
    P, four = 3, grouped_inputs(1, 6, 2, 24, 4)
    for layout in LAYOUTS:
        assert ranks(P, to_the_device, way, layout, four) == [[0, 0]] * P
    assert ranks(P, to_the_device, way, OWN, four) == [[P, P]] * P


def test_stripes_are_known_by_their_positions():
    """A layout of one's own is as fast as the striped one, if its tokens are the same; and a name makes no stripes."""
    mine = Layout("mine", stripes)
    for layout, striped in (("striped", True), ("zigzag", False), (mine, True), (OWN, False)):
        lengths = tuple(len(positions(layout, 24, rank, 3)) for rank in range(3))
        partition = Partition(Mask(causal=True), layout, lengths)
        assert partition.striped == striped
    as_named = [pieces_of_all(Partition(Mask(causal=True), it, (8,) * 3), 1) for it in ("striped", mine)]
    assert as_named[0] == as_named[1]


def stripes(seq_len, rank, world_size):
    return torch.arange(rank, seq_len, world_size)


def copies_home(context):
    """What comes home for the copies of one K/V head: 256 from rank 0, and 1 from each of the others."""
    exchange = AllToAll(Partition(Mask(), "contiguous", (1,) * 4), 1.0, None, 4, 1).exchange
    part = torch.full((1, 1, 4, 1), 1.0 if context.rank else 256.0).bfloat16()
    return [x.flatten().tolist() for x in exchange.to_tokens([part, part, part])]


def test_copies_are_added_in_float32(ranks):
    """256 + 1 is 256 in bfloat16, and 256 + 3 is 260."""
    assert ranks(4, copies_home) == [[[256.0, 1, 1, 1], [260.0], [260.0]]] * 4


def crossing(context, way, shape, q, k, v, d_out):
    P, attention = context.world_size, attention_of(context, way, shape)
    (q, d_out), (k, v) = cut(context, None, QUERIES[:P], q, d_out), cut(context, None, KEYS[:P], k, v)
    return checked_gradients(attention, [q, k, v, d_out], {})


@pytest.mark.parametrize(("way", "shape"), [("ring", 4), ("all-gather", 3), ("double ring", (2, 2))], ids=name_of)
def test_cross_attention(ranks, way, shape):
    P = ranks_of(shape)
    q, _, _, d_out = grouped_inputs(1, 4, 2, sum(QUERIES[:P]), 8)
    _, k, v, _ = grouped_inputs(1, 4, 2, sum(KEYS[:P]), 8, seed=1)
    per_rank = ranks(P, crossing, way, shape, q, k, v, d_out)
    assert_four([torch.cat(parts, dim=2) for parts in zip(*per_rank, strict=True)], expected(q, k, v, d_out))


# Bad input -----------------------------------------------------------------------------------------------------------

X = torch.ones(1, 4, 4, 3)


def twice(seq_len, rank, world_size):
    return torch.arange(seq_len // world_size)


def from_the_end(seq_len, rank, world_size):
    return torch.arange(world_size - 1 - rank, seq_len, world_size)


def but_rank_0(seq_len, rank, world_size):
    return from_the_end(seq_len, -rank % world_size, world_size)


def qkv(q, k=X, v=X):
    return {"q": q, "k": k, "v": v}


SMALL = torch.ones(2, 2, 4, 2, dtype=torch.float64)
MINE, TWO, HEADS = Layout("mine", from_the_end), qkv(*[X[:, :2]] * 3), qkv(X[:, :3], X[:, :2], X[:, :2])
# fmt: off
BY_THE_RING = [  # what is given to all of 3 ranks, and what to rank 1 instead; words of the message
    ({}, qkv(X, X, X[:, :1]), ["rank 1: k has shape (1, 4, 4, 3) and v (1, 1, 4, 3)", "same B, heads and"]),
    ({}, qkv(X, X, X[..., :0]), ["rank 1: v has shape (1, 4, 4, 0)", "1 or more"]),
    ({}, qkv(X, X, X[0]), ["rank 1: v has shape (4, 4, 3)", "expected (B, H, S, D)"]),
    ({}, qkv(SMALL, SMALL[:, :1], SMALL[:, :1]) | {"scale": 0.5},
     ["the ranks disagree about B, H, G, D, dtype, scale, head dim of v; ", "head dim of v=3", "head dim of v=2"]),
    ({"layout": Layout("twice", twice)}, {}, ["the layout twice gives token 0", "on one rank"]),
    ({"layout": "zigzag"}, qkv(*[X[:, :, :3]] * 3), ["tokens in the zigzag layout on", "pad(x, "]),
    ({"layout": OWN}, qkv(*[X[:, :, :1]] * 3), ["the ranks have [4, 1", "layout; expected [", "with shard"]),
    ({"causal": True}, qkv(X[:, :, :2]), ["rank 1: q has shape (1, 4, 2, 3)", "of the same tokens"]),
    ({"schedule": Alone}, {}, "Alone'>; expected the class of a way"),
    ({"schedule": "ring"}, {}, "schedule is 'ring'; expected the class of a way, such as Ring or"),
    ({"layout": MINE}, {"layout": Layout("mine", but_rank_0)}, "positions of the"),
    ({"layout": "striped"}, {"layout": Layout("striped", from_the_end)}, ["layout=striped", "its own"]),
    ({"schedule": Ring}, {"schedule": AllGather}, ["schedule=Ring", "schedule=AllGather"]),
    ({}, {"sinks": torch.zeros(4)}, ["rank 0: sinks=None", "rank 1: sinks=torch.float32"]),
    ({"sinks": torch.zeros(4)}, {"sinks": torch.zeros(4).requires_grad_()}, ["gradients=False", "gradients=True"]),
    ({"softcap": 50}, {"softcap": None}, ["rank 0: softcap=50.0", "rank 1: softcap=None"]),
    ({"causal": True, "window": 3}, {"window": 4}, ["rank 0: window=3", "rank 1: window=4"]),
    ({"causal": True, "window": 3}, {"window": 0}, "rank 1: window is 0"),  # wrong on one rank only
    ({}, {"documents": torch.tensor([5, 7])}, ["rank 0: documents=None", "rank 1: documents=(5, 7)"]),
]
BY_OTHERS = [  # a way, its ranks or its mesh; and the same. All ways refuse in one function: one case on a few others
    *((*each, {}, HEADS, ["rank 1: q has shape (1, 3, 4, 3) and k (1, 2", "a multiple"]) for each in SOME[:4]),
    ("all-to-all", 3, {}, qkv(X[:, :, :2]), ["rank 1: q has shape (1, 4, 2, 3)", "of the same tokens"]),
    ("hybrid", [0, 1, 2, 3], TWO, {}, ["mesh of shape (4,)", "all-to-all inside: 2 x 2, 4 x 1"]),
    ("double ring", [[[0, 1], [2, 3]]], TWO, {}, ["mesh of shape (1, 2, 2)", "expected hosts x devices"]),
    ("hybrid", 4, TWO, {}, ["mesh is None", "2 dimensions"]),
    ("double ring", [[2, 3], [0, 1]], TWO, {}, ["mesh is [[2, 3], [0, 1]]", "ranks that rise in"]),
    ("hybrid", [[0, 3, 2, 1]], TWO, {}, ["mesh is [[0, 3, 2, 1]]", "ranks that rise"]),
    ("hybrid", (2, 3), TWO, {}, ["among 3 ranks, and 2 query heads", "of 3 x 2, 6 x 1"]),
    ("all-to-all", 4, TWO, {}, ["among 4 ranks, and 2 query heads", "hybrid.py", "of 2 x 2, 4 x 1"]),
    ("ring", [[0, 1], [2, 3]], TWO, {}, "mesh is a mesh of shape (2, 2); expected a group or"),
    ("all-gather", [0, 2, 1, 3], TWO, {}, "mesh is [0, 2, 1, 3]; expected ranks that rise"),
]
# fmt: on


def refused(context, way, shape, given, of_rank_1):
    """A pass that begins anyway is an error: what is refused inside it ends the group."""
    with mock.patch.object(flash_ring, "one_pass", side_effect=AssertionError("a pass begins")):
        attention_of(context, way, shape)(**{**qkv(X), **given, **(of_rank_1 if context.rank == 1 else {})})


@pytest.mark.parametrize(
    ("way", "shape", "given", "of_rank_1", "words"), [*(("ring", 3, *row) for row in BY_THE_RING), *BY_OTHERS]
)
def test_bad_input_is_refused_on_every_rank_before_anything_travels(ranks, way, shape, given, of_rank_1, words):
    P = 4 if isinstance(shape, list) else ranks_of(shape)
    assert_refused(ranks, P, words, refused, way, shape, given, of_rank_1)


@pytest.mark.parametrize(("way", "shape"), [("ring", 3), ("all-gather", 3), ("hybrid", (2, 2))], ids=name_of)
def test_a_layout_of_ones_own_may_have_the_name_of_another(ranks, way, shape):
    options = {"causal": True, "layout": Layout("striped", from_the_end, 1)}
    assert_right_results(ranks, way, shape, [Problem(4, 2, 6 * ranks_of(shape), options)])


def on_some(context, way):
    with mock.patch.object(exchange, "SOON", timedelta(seconds=0.5)):
        return WAYS[way](X, X, X, group=DeviceMesh("cpu", [0, 1]))


def test_a_rank_outside_the_mesh_is_refused_alone(ranks):
    assert all("inside: 1 x 2, 2 x 1" in error.message for error in ranks.outcomes(3, on_some, "hybrid")[:2])
    *inside, outside = ranks.outcomes(3, on_some, "ring")
    ranks(1, repr)  # so that the next call forms a job of its own: in this one rank 2 is believed no more
    assert all(torch.equal(out, X) for out in inside)
    assert re.search(all_of([r"not in the mesh [0, 1]", "expected only its members"]), outside.message)


# Heads that do not divide --------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_every_head_once_and_as_evenly_as_can_be(kv_heads, served, data):
    heads = kv_heads * served
    P = data.draw(st.integers(1, heads))
    queries, keys = heads_of_ranks(heads, kv_heads, P)
    assert [h for mine in queries for h in range(mine.start, mine.stop)] == list(range(heads))
    assert {count(mine) for mine in queries} <= {heads // P, -(-heads // P)}
    for rank, (mine, need) in enumerate(zip(queries, keys, strict=True)):
        assert {h // served for h in range(mine.start, mine.stop)} == set(range(need.start, need.stop))
        if P % kv_heads == 0:
            assert (need.start, need.stop) == (rank * kv_heads // P, rank * kv_heads // P + 1)


# Numbers that are NaN -------------------------------------------------------------------------------------------------


SEEN, HEAD, TOKEN = slice(0, 11), 1, 10  # keys that query 10 sees; query head 1 uses K/V head 0, K/V head 1 serves 2, 3
LATER = (0, slice(2, 4), slice(10, None))  # the queries that see key 10 of K/V head 1
HAS_NAN = {  # where the NaN is: where out, dq, dk and dv must have one
    "q": [(0, HEAD, TOKEN), (0, HEAD, TOKEN), (0, 0, SEEN), (0, 0, SEEN)],
    "k": [LATER, LATER, (0, 1), (0, 1)],
    "v": [LATER, LATER, (0, 1), None],
    "d_out": [None, (0, HEAD, TOKEN), (0, 0, SEEN), (0, 0, SEEN)],
}


@pytest.mark.parametrize("where", HAS_NAN)
def test_what_is_no_number_stays_visible(ranks, where):
    q, k, v, d_out = grouped_inputs(2, 4, 2, 24, 4)
    {"q": q, "k": k, "v": v, "d_out": d_out}[where][0, HEAD, TOKEN] = math.nan
    mine = whole(ranks(3, ring_gradients, q, k, v, d_out, {"causal": True, "layout": "zigzag"}), "zigzag")
    for name, x, must in zip(NAMES, mine, HAS_NAN[where], strict=True):
        assert not x[1].isnan().any(), f"{name}: a NaN in a sequence that has none"
        assert must is None or x[must].isnan().all(), f"{name} hides a NaN"


def test_padding_on_the_right_changes_no_real_token(ranks):
    real = grouped_inputs(1, 4, 2, 13, 8)
    padded = [pad(x, 6) for x in real]  # 18 tokens; the padding has no gradient to give
    mine = whole(ranks(3, ring_gradients, *padded, {"causal": True, "layout": "zigzag"}), "zigzag")
    assert all(x.shape[2] == 18 for x in mine)
    assert all(x[:, :, 13:].count_nonzero() == 0 for x in mine[1:])
    assert_four([x[:, :, :13] for x in mine], expected(*real, causal=True))


# Under torch.compile: right, in few graphs ---------------------------------------------------------------------------


COMPILED = Problem(4, 2, 36, {"causal": True, "layout": "zigzag"})


def around(attention, options, q, k, v):
    """Something to compile before the attention and behind it: in powers of two, so nothing is rounded."""
    return 4 * attention(2 * q, k, v, **options)


def compiled_on_rank(context, way, backend):
    """Chunks of out, dq, dk, dv of COMPILED, twice; and how many graphs there were after the first and second time."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.compile(partial(around, attention_of(context, way, 3), COMPILED.options), backend=backend)
    q, k, v, d_out = cut(context, COMPILED.layout, None, *COMPILED.inputs())
    results = []
    for _ in range(2):
        out, d_q, d_k, d_v = gradients(model, q / 2, k, v, d_out / 4)
        results.append(((out / 4, d_q / 2, d_k, d_v), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("way", "backend"), [("ring", "aot_eager"), ("all-to-all", "eager")])
def test_a_way_is_right_between_two_graphs(ranks, way, backend):
    uncompiled = [results[0] for results in ranks(3, results_on_rank, way, 3, [COMPILED])]
    for per_rank in zip(*ranks(3, compiled_on_rank, way, backend), strict=True):
        assert [graphs for _, graphs in per_rank] == [2] * 3
        four = [chunks for chunks, _ in per_rank]
        assert_four(whole(four, COMPILED.layout), COMPILED.right())
        assert all(torch.equal(x, y) for pair in zip(four, uncompiled, strict=True) for x, y in zip(*pair, strict=True))


# Sequences of calls --------------------------------------------------------------------------------------------------

MASKS = {S: [*masks_of(S).values(), {"causal": True, "documents": [7, S - 7]}] for S in (24, 48)}


class OutAlone(states.Problem):
    """A problem of states in which the last state gets no gradient."""

    @cached_property
    def inputs(self):
        x, (d_out, d_last) = super().inputs
        return x, (d_out, 0 * d_last)


@dataclass(frozen=True)
class Call:
    """Attention by `way` on the ranks of `where`: the last so many of the job, or a mesh of the first ones."""

    way: str
    where: int | tuple
    problem: Problem | states.Problem
    mode: str = "graph"
    kernel: str | None = None  # of an emulated GPU
    error: type | None = None  # raised on all ranks in mid pass

    @property
    def graph(self):
        return self.error is None and self.mode not in ("no_grad", "inference")


@dataclass(frozen=True)
class Back:
    """The backward pass of call number `of`, which may be asked for again."""

    of: int
    turned: bool = False  # d_out lies in memory as models have it: (B, C, H, D)


CHOICES = {
    "way": [*WAYS, "states", "states"],
    "tokens": [*MASKS],
    "mask": range(7),
    "layout": [*LAYOUTS],
    "scale": [None, None, 0.7],
    "mode": ["graph", "graph", "checkpointed", "autocast", "no_grad", "inference"],
    "dtype": [torch.float32, torch.float64],
    "kernel": [None, None, "cuda cudnn", "cuda cudnn", "cuda flash", "cuda efficient"],
    "sinks": [None, torch.float32],
    "kv_heads": [1, 2, 4],
    "batch": [1, 2],
    "seed": range(3),
    "way_of_states": [*state_ring.WAYS],
    "delta": [True, False],
}


def any_call(P, program, random):
    """Add a call on some of P ranks to a program, or the backward pass of an earlier one, perhaps once more."""
    if program.graphs and random.random() < 0.4:
        program.add(Back(random.choice(program.graphs), random.random() < 0.5))
        return
    meshes = [(rows, inside) for rows in range(1, P + 1) for inside in range(1, P + 1) if 1 < rows * inside <= P]
    it = program.chosen(random, flat=range(2, P + 1), mesh=meshes, **CHOICES)
    way, mode, S = it["way"], it["mode"], it["tokens"]
    where, mask = it["mesh"] if way in ON_MESH else it["flat"], MASKS[S][it["mask"]]
    if way == "states":
        contiguous = it["layout"] == "contiguous" or it["way_of_states"] == "scan"
        options = {"layout": "contiguous" if contiguous else "zigzag", "way": it["way_of_states"]}
        told = {"documents": mask.get("documents"), "scale": it["scale"]}
        options |= {name: x for name, x in told.items() if x}
        dtype = torch.bfloat16 if mode == "autocast" else it["dtype"]
        call = Call(way, where, OutAlone(it["seed"], S, options=options, delta=it["delta"], dtype=dtype), mode)
    else:
        options = {**mask, "layout": it["layout"], "scale": it["scale"]}
        kinds = {"dtype": it["dtype"], "sinks": it["sinks"], "batch": it["batch"], "seed": it["seed"]}
        kinds |= {"dtype": torch.bfloat16, "sinks": None} if mode == "autocast" else {}  # which rounds sinks
        call = Call(way, where, Problem(4, it["kv_heads"], S, options, **kinds), mode)
        call = replace(call, kernel=None if mode == "autocast" else it["kernel"])  # rows of 4 numbers are too short
    ends_job = way in ON_MESH and P in where  # a row of all ranks is the group of the job
    once = any(isinstance(step, Call) and step.error for step in program.steps)  # new groups take long
    if not (ends_job or once) and random.random() < 0.05:
        call = replace(call, error=random.choice([MemoryError, KeyboardInterrupt]))
    program.add(call, call.graph)


def new_group(where):
    """A group or mesh, None on a rank that is not in it, and its ranks. Every rank of the job must call this."""
    P, on_mesh = dist.get_world_size(), isinstance(where, tuple)
    ranks = torch.arange(math.prod(where)).view(where) if on_mesh else torch.arange(P - where, P)
    group = DeviceMesh("cpu", ranks) if on_mesh else dist.new_group(ranks.tolist())
    return group if dist.get_rank() in ranks else None, ranks.flatten().tolist()


MADE = {}  # of the job in hand: the groups of programs, and kernels with their plans


def leaves_of(call, rank, P):
    """This rank's chunks of the inputs by name, which want gradients if there is a graph; and its chunks of d_out."""
    problem, layout = call.problem, call.problem.options["layout"]
    if call.way == "states":
        inputs, (d_out, _) = problem.inputs
        mine = {n: x if n == "state" else shard(x, layout, rank, P) for n, x in inputs.items() if x is not None}
    else:
        *qkv, d_out = problem.inputs()
        mine = {n: shard(x, layout, rank, P) for n, x in zip("qkv", qkv, strict=True)}
        if problem.sinks:
            mine["sinks"] = problem.logits()
    if call.mode == "autocast":
        mine = {n: x.float() for n, x in mine.items()}
    return {n: x.detach().clone().requires_grad_(call.graph) for n, x in mine.items()}, shard(d_out, layout, rank, P)


def called(call, mine, group):
    """out of this rank."""
    options = {**call.problem.options, "group": group}
    if call.way == "states":
        attention = partial(ring_linear_attention, **options)
    else:
        attention = partial(flash_ring.ring_flash_attention, schedule=(FLAT | ON_MESH)[call.way], **options)
    about = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(call.mode, nullcontext)()
    about = torch.autocast("cpu", torch.bfloat16) if call.mode == "autocast" else about

    def compute(*inputs):
        out = attention(**dict(zip(mine, inputs, strict=True)))
        return out[0] if call.way == "states" else out

    part = (state_ring, "reduce") if call.way == "states" else (flash_ring, "fused_forward")
    broken = mock.patch.object(*part, side_effect=call.error) if call.error else nullcontext()
    with about, broken:
        if call.mode == "checkpointed":
            return checkpoint(compute, *mine.values(), use_reentrant=False, preserve_rng_state=False)
        return compute(*mine.values())


def functions_on_rank(context, steps):
    """Of each step this rank's chunks of out, or of the gradients; None where it has no part, or none was expected."""
    if dist.group.WORLD not in MADE:
        MADE.clear()  # a mesh of one row holds the group of its job, and groups that are held have three threads each
    made, graphs, results = MADE.setdefault(dist.group.WORLD, {}), {}, [None] * len(steps)
    for number, step in enumerate(steps):
        call = steps[step.of] if isinstance(step, Back) else step
        kernels = made.setdefault("kernels", Kernels())
        gpu = on_gpu(call.kernel, kernels=kernels) if call.kernel else nullcontext()
        group, of_it = made[call.where] if call.where in made else made.setdefault(call.where, new_group(call.where))
        if isinstance(step, Back) and group is not None:
            out, mine, d_out, its_group = graphs[step.of]
            d_out = d_out.transpose(1, 2).contiguous().transpose(1, 2) if step.turned else d_out
            back = partial(torch.autograd.grad, out, [*mine.values()], d_out, retain_graph=True)
            if its_group is group:
                with gpu:
                    results[number] = [x.detach() for x in back()]
            else:
                assert NEW_GROUP in str(attempt(back)), "a backward pass in a group that has ended"
        elif group is not None:
            mine, d_out = leaves_of(call, of_it.index(context.rank), len(of_it))
            try:
                with gpu:
                    out = called(call, mine, group)
                graphs[number] = out, mine, d_out.to(out.dtype), group
                results[number] = [out.detach()]
            except (MemoryError, KeyboardInterrupt):
                if NEW_GROUP not in str(attempt(agree, str, group)):
                    raise
        if isinstance(step, Call) and step.error:
            made[call.where] = new_group(call.where)
    return results


class Known(dict):
    """What calls must give, by the words of their problem: a loop over tokens takes a while."""

    def of(self, problem):
        if (words := repr(problem)) not in self:
            if isinstance(problem, OutAlone):
                self[words] = {name: right for name, right in problem.rights().items() if name != "last"}
            else:
                self[words] = dict(zip([*NAMES, "sinks"], problem.right(), strict=False))
        return self[words]


KNOWN = Known()


def run_functions(ranks, P, steps):
    """Run a program on P ranks, and compare each result with full attention, or a loop over tokens, of its own call."""
    of_ranks = ranks(P, functions_on_rank, steps)
    for step, of_members in zip(steps, zip(*of_ranks, strict=True), strict=True):
        call = steps[step.of] if isinstance(step, Back) else step
        found, problem = [x for x in of_members if x is not None], call.problem
        if not found:
            continue
        layout, parts = problem.options["layout"], list(zip(*found, strict=True))
        rights = KNOWN.of(problem)
        for name, of_part in zip([*rights][1:] if isinstance(step, Back) else ["out"], parts, strict=True):
            summed = name in ("sinks", "state")  # each rank has its part
            x = sum(y.double() for y in of_part) if summed else unshard(list(of_part), layout)
            assert_right(x.to(rights[name].dtype), rights[name], f"{name} of {step}")
    if any(getattr(step, "error", None) for step in steps):
        ranks(1, functions_on_rank, [])  # another job ends the groups that are left: each has three threads


@pytest.mark.slow
@few_or_many(30, 1250)
def test_no_call_remembers_another(ranks, programs):
    """On 4 ranks, of which a call takes 2, 3 or all."""
    assert_programs(partial(any_call, 4), programs, partial(run_functions, ranks, 4), steps=8)
