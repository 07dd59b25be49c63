"""Every parameter of every ring is moved, forward and backward, to a value where the default would be seen.

A ring is a public function with the optional parameter `scale` and a `group` or a `mesh`. A new ring, or a new
parameter, without a test here fails `test_every_ring_and_parameter_is_here`. Bad input gives a ValueError.
"""

import functools
import importlib
import inspect
import itertools
import math
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ring_attn
from ring_attn import ring_attention
from ringlab.basics.blocking_messages import Recv, Send, ring_programs, simulate_messages
from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.basics.chunks import check_grouped_chunks
from ringlab.basics.naive_attention import naive_attention
from ringlab.basics.online_softmax import merge
from ringlab.basics.ranks import scatter
from ringlab.models.transformer import Config
from ringlab.ring import backward, flash_ring, overlap
from ringlab.ring.chosen_keys import choose_keys
from ringlab.ring.documents import document_lengths, pack
from ringlab.ring.latent_ring import ring_latent_attention
from ringlab.ring.layouts import Layout, check_layout, check_lengths, positions, shard, unshard
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.ring.schedule import Ring, check_sinks, check_softcap
from ringlab.states.short_convolution import ring_short_convolution
from ringlab.states.state_ring import ring_linear_attention
from ringlab.support.agreement import members
from ringlab.support.devices import choose_device
from ringlab.ways.all_gather import AllGather
from ringlab.ways.heads import check_split, heads_of_ranks
from tests.attention import assert_right, expected, gradients, grouped_inputs, random_qkv
from tests.concepts import needed_by
from tests.mistakes import all_of, assert_recorded, assert_refused
from tests.rings import assert_ring

RINGS = {
    "ring_attn": ring_attn.ring_attention,
    "overlap": overlap.ring_attention,
    "backward": backward.ring_attention,
    "scaled_dot_product_attention": flash_ring.scaled_dot_product_attention,
    "ring": flash_ring.ring_flash_attention,  # with other schedules: tests/ways/test_schedules.py
}
FORWARD_ONLY = {"ring_attn", "overlap"}
UNGROUPED = {"ring_attn", "overlap", "backward"}  # as many heads of K and V as of Q
INPUTS = {"q", "k", "v", "query", "key", "value"}

NUMBERS = torch.tensor([0] * 10 + [1] * 14)  # of each token's document
WINDOW = torch.ones(24, 24, dtype=torch.bool).triu(-6)  # of 7 tokens
CAUSAL = {"causal": True, "is_causal": True}  # options that a ring does not have are left out
MOVED = {  # parameter: (the value it is moved to, other options of the ring, the same for full attention)
    "scale": (0.3, {}, {"scale": 0.3}),
    "causal": (True, {}, {"causal": True}),
    "is_causal": (True, {}, {"causal": True}),
    "layout": ("zigzag", CAUSAL, {"causal": True}),
    "documents": ([10, 14], CAUSAL, {"causal": True, "visible": NUMBERS[:, None] == NUMBERS}),
    "window": (7, CAUSAL, {"causal": True, "visible": WINDOW}),
    "global_tokens": (2, {**CAUSAL, "window": 7}, {"causal": True, "visible": WINDOW | (torch.arange(24) < 2)}),
    "softcap": (0.7, CAUSAL, {"causal": True, "softcap": 0.7}),
    "group": ([1, 3], CAUSAL, {"causal": True}),
    "enable_gqa": (True, {}, {}),
    "schedule": (AllGather, {}, {}),
}
REFUSED = {  # of the ring or the drop-in, a parameter: (a value that no ring takes, or several, words of the message)
    "scale": (math.nan, ["scale is nan", "finite"]),
    "layout": ("spiral", ["layout is 'spiral'", "contiguous, zigzag, striped"]),
    "documents": ([10, 13], ["documents of 10, 13 tokens, 23 in all", "expected", "24 in all"]),
    "window": (2.5, ["window is 2.5", "expected a whole number"]),
    "global_tokens": (-1, ["global_tokens is -1", "expected 0 or more"]),
    "softcap": ((0.0, True, math.inf), ["softcap is", "expected a finite number above 0"]),
    "sinks": (
        (torch.zeros(3), torch.zeros(4, dtype=torch.int64), torch.zeros(4, device="meta")),
        ["sinks is torch.", "so a floating dtype, shape (4,)"],
    ),  # moved: tests/ways/test_schedules.py
    "attn_mask": (torch.ones(6, 6), ["attn_mask was given", "expected None"]),
    "dropout_p": (0.1, ["dropout_p is 0.1", "expected 0.0"]),
    "enable_gqa": (False, ["query has 4 heads and key 2", "expected enable_gqa=True"]),
}
OPTIONS = [(name, it) for name, ring in RINGS.items() for it in inspect.signature(ring).parameters if it not in INPUTS]


def those_of(table):
    """(ring, parameter), for every ring and every parameter of the table that it has."""
    return [(name, parameter) for name, parameter in OPTIONS if parameter in table]


def test_every_ring_and_parameter_is_here():
    root, rings = Path(ring_attn.__file__).parent, set()
    files = [path for folder in ("ring", "ways") for path in root.glob(f"ringlab/{folder}/[!_]*.py")]
    names = ["ring_attn", *(f"ringlab.{path.parent.name}.{path.stem}" for path in files)]
    for module in map(importlib.import_module, [name for name in names if not needed_by(name)]):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            parameters = inspect.signature(function).parameters
            scale = parameters.get("scale")
            a_ring = scale and scale.default is None and {"group", "mesh"} & set(parameters)
            if function.__module__ == module.__name__ and name[0] != "_" and a_ring:
                rings.add(function)
    assert rings == {*RINGS.values(), ring_latent_attention}  # asked, as chosen keys are, in test_latent_ring.py
    assert {parameter for _, parameter in OPTIONS} == {*MOVED, *REFUSED, "chosen"}


def inputs_of(name):
    """q, k, v and d_out (1, 4, 24, 4) in float64; k and v have 2 heads, if the ring takes fewer than q has."""
    return grouped_inputs(1, 4, 4 if name in UNGROUPED else 2, 24, 4, torch.float64)


def options_of(name, **options):
    known = inspect.signature(RINGS[name]).parameters
    return {option: value for option, value in {"enable_gqa": True, **options}.items() if option in known}


def results_on_rank(context, name, four, options):
    """This rank's chunks of out, dq, dk and dv, or of out where the ring is forward only; None outside the group."""
    members, layout = options.get("group", range(context.world_size)), options.get("layout", "contiguous")
    group = dist.new_group(members)  # every rank of the job must call this
    if context.rank not in members:
        return None
    mine = [shard(x, layout, members.index(context.rank), len(members)) for x in four]
    if "group" in options:
        options = {**options, "group": group}
    ring = functools.partial(RINGS[name], **options)
    no_ring = mock.patch.object(Ring, "rounds", side_effect=AssertionError("it is the ring"))
    with no_ring if "schedule" in options else nullcontext():
        return [ring(*mine[:3])] if name in FORWARD_ONLY else gradients(ring, *mine)


@pytest.mark.parametrize(("name", "parameter"), those_of(MOVED))
def test_a_moved_parameter_does_what_it_says_forward_and_backward(ranks, name, parameter):
    value, others, same = MOVED[parameter]
    options, four = options_of(name, **{**others, parameter: value}), inputs_of(name)
    if not any(option in options for option in CAUSAL):
        same = {option: it for option, it in same.items() if option != "causal"}
    per_rank = [it for it in ranks(4, results_on_rank, name, four, options) if it is not None]
    mine = [unshard(list(chunks), options.get("layout", "contiguous")) for chunks in zip(*per_rank, strict=True)]
    assert len(mine) == (1 if name in FORWARD_ONLY else 4)
    for x, right, unmoved in zip(mine, expected(*four, **same), expected(*four), strict=False):
        assert_right(x, right)
        assert not same or unmoved.error(x).max() > 0.01  # the default would be seen


def outcome_on_rank(context, name, four, options):
    q, k, v = (shard(x, "contiguous", context.rank, context.world_size) for x in four[:3])
    return RINGS[name](q, k, v, **options)


# All rings refuse in one function.
@pytest.mark.parametrize(
    ("name", "parameter"), [it for it in those_of(REFUSED) if it[0] in ("ring", "scaled_dot_product_attention")]
)
def test_a_wrong_value_is_refused(ranks, name, parameter):
    value, words = REFUSED[parameter]
    for wrong, causal in itertools.product(value if isinstance(value, tuple) else [value], (False, True)):
        options = options_of(name, causal=causal, is_causal=causal, **{parameter: wrong})
        assert_refused(ranks, 2, words, outcome_on_rank, name, inputs_of(name), options)


# Bad input: what came, what was expected and what to do; on every rank, before any block travels ---------------------


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
    "no device": ((X.to("meta"),) * 3, None, ["q, k and v are on the device meta", "expected another device"]),
    "integers": ((X.long(), X.long(), X.long()), None, ["q has dtype torch.int64", "floating dtype", "x.float()"]),
    "no batch": ((X[:0], X[:0], X[:0]), None, ["q has shape (0, 2, 4, 3)", "every size to be 1 or more"]),
    "no keys": ((X, X[:, :, :0], X[:, :, :0]), None, ["k has shape (1, 2, 0, 3)", "every size to be 1 or more"]),
    "D of 0": ((X[..., :0], X[..., :0], X[..., :0]), None, ["q has shape (1, 2, 4, 0)", "every size to be 1 or more"]),
    "scale of nan": ((X, X, X), math.nan, ["scale is nan", "finite", "None for 1/sqrt(D)"]),
    "scale of inf": ((X, X, X), -math.inf, ["scale is -inf", "finite", "None for 1/sqrt(D)"]),
}
GRADIENTS = (X, X.clone().requires_grad_(), X), None, ["requires gradients", "forward only", "torch.no_grad()"]
FOUR, BSHD = torch.ones(1, 4, 4, 3), torch.zeros(1, 6, 4, 3)  # 4 query heads; 6 tokens of 4 heads
BAD_GROUPS = {
    "no multiple": ((FOUR[:, :3], X, X), None, ["q has shape (1, 3, 4, 3) and k (1, 2, 4, 3)", "3 heads to be a mul"]),
    "tokens": ((X, X[:, :, :3], X[:, :, :3]), None, ["q has shape (1, 2, 4, 3) and k (1, 2, 3, 3)", "same tokens"]),
    "half": ((FOUR, X[:, :, :2], X[:, :, :2]), None, ["q has shape (1, 4, 4, 3) and k (1, 2, 2, 3)", "same tokens"]),
    "order of dimensions": ((BSHD, *[BSHD[:, :, :2]] * 2), None, ["and k (1, 6, 2, 3)", "would fit as (B, S, H, D)"]),
    "D of q and k": ((FOUR, *[X[..., :2]] * 2), None, ["q has shape (1, 4, 4, 3) and k (1, 2, 4, 2)", "same B and D"]),
    "B of q and k": ((torch.cat([FOUR] * 2), X, X), None, ["q has shape (2, 4, 4, 3) and k (1, 2", "same B a"]),
    "H of k and v": ((FOUR, X, X[:, :1]), None, ["k has shape (1, 2, 4, 3) and v (1, 1, 4, 3)", "one shape"]),
    "D of k and v": ((FOUR, X, X[..., :2]), None, ["k has shape (1, 2, 4, 3) and v (1, 2, 4, 2)", "one shape"]),
    "no heads": ((FOUR, X[:, :0], X[:, :0]), None, ["k has shape (1, 0, 4, 3)", "every size to be 1 or more"]),
}
# All rings check their input in one function, that of ALONE below: some cases on the first of each kind, one on others.
BAD_TO_RINGS = [
    *((ring_attention, BAD[bad]) for bad in ("k and v", "two dtypes", "three dimensions", "scale of nan")),
    (ring_attention, ((X, X[:, :, :3], X[:, :, :3]), None, ["q has shape (1, 2, 4, 3) and k (1, 2, 3", "one shape"])),
    (ring_attention, GRADIENTS),
    (overlap.ring_attention, GRADIENTS),
    (backward.ring_attention, BAD["k and v"]),
    (flash_ring.ring_flash_attention, BAD_GROUPS["no multiple"]),
]


def dealing(*tokens):
    return Layout("nowhere", lambda seq_len, rank, world_size: torch.arange(*tokens).tensor_split(world_size)[rank])


def of_halves(seq_len, rank, world_size):
    return torch.arange(seq_len).tensor_split(world_size)[rank] / 2


def falling(seq_len, rank, world_size):
    return torch.arange(seq_len).tensor_split(world_size)[rank].flip(0)


def partition_of_8(layout="contiguous", lengths=(4, 4), **mask):
    return Partition(Mask(**mask), layout, lengths)


BAD_MASKS = [
    ({"documents": (3, 4)}, ["documents of 3, 4 tokens, 7 in all, for a sequence of 8; expected ", "8 in all"]),
    *(({"documents": (n, *[1] * 7)}, [f"of {n}, 1, 1, 1, 1, 1, 1, 1 tokens, "]) for n in (0, 2)),
    ({"documents": (1,) * 9}, ["of 1, 1, 1, 1, 1, 1, 1, 1, ... tokens, 9 in all, for"]),
    ({"documents": [4.0, 4.0]}, ["documents is (4.0, 4.0); expected ", "whole numbers"]),
    ({"documents": [True, 7]}, ["documents is (True, 7); expected"]),
    ({"documents": torch.ones(2, 4, dtype=int)}, ["documents is tensor([[1"]),
    ({"documents": "8"}, ["documents is '8'; expected a list of their lengths"]),
    ({"documents": []}, ["documents is (); expected"]),
    ({"causal": True, "window": 2.0}, ["window is 2.0; expected a whole number"]),
    ({"causal": True, "window": 2, "global_tokens": True}, ["global_tokens is True; expected a whole number"]),
    ({"documents": (8, 0)}, ["documents of 8, 0 tokens", " expected 1 token or more in each"]),
    ({"causal": True, "window": 0}, ["window is 0 with causal=True; expected 1 token or more"]),
    ({"window": 4}, ["window is 4 with causal=False; expected ", " causal=True"]),
    ({"causal": True, "window": 4, "global_tokens": -1}, ["global_tokens is -1 with window=4; expected 0 or more"]),
    ({"causal": True, "global_tokens": 2}, ["global_tokens is 2 with window=None; expected ", " a window"]),
    ({"lengths": (3, 5), "layout": "zigzag"}, ["the ranks have [3, 5] tokens ", " expected [4, 4]"]),
]
OUT, LSE = torch.zeros(2, 4, 3), torch.zeros(2, 4)
ALONE = [naive_attention, functools.partial(blockwise_attention, block_size=2)]
NO_GROUP = ["no process group", "torchrun", "ringlab.support.processes.launch"]
BAD_ALONE = [  # in one process: function, arguments, options, words of the message
    *((check_grouped_chunks, qkv, {}, words) for qkv, _, words in BAD_GROUPS.values()),
    *((alone, qkv, {"scale": scale}, words) for alone in ALONE for qkv, scale, words in BAD.values()),
    *(
        (alone, (X[:, :, :a], *[X[:, :, :b]] * 2), {"causal": True}, [f"causal=True with {a} queries and {b} keys"])
        for alone, (a, b) in itertools.product(ALONE, [(2, 4), (4, 2)])
    ),
    (blockwise_attention, (X, X, X), {"block_size": 0}, ["block_size is 0; expected 1 or more"]),
    (merge, (OUT, LSE[0], OUT, LSE), {}, ["out_a has shape (2, 4, 3) and lse_a (4,)", "expected out (..., Sq, D)"]),
    (merge, (OUT, LSE, OUT, LSE[..., None]), {}, ["out_b has shape (2, 4, 3) and lse_b (2, 4, 1)", "same for a and b"]),
    (merge, (OUT, LSE, OUT[:, :2], LSE[:, :2]), {}, ["out_b has shape (2, 2, 3)", "beside out_a (2, 4, 3)"]),
    (merge, (OUT, LSE.bfloat16(), OUT, LSE), {}, ["lse_a has dtype torch.bfloat16", "float32 or", "keep the lse"]),
    (merge, (OUT, LSE, OUT, LSE.half()), {}, ["lse_b has dtype torch.float16", "float32 or float64", "keep the lse"]),
    *(
        (check_layout, (dealing(*tokens), 16, 4), {}, [f"gives token {which} of 4 ranks; expected"])
        for tokens, which in {(1, 16): "0 to 0", (0, 17): "16 to 1", (-1, 16): "-1 to 1"}.items()
    ),
    (check_layout, (Layout("halves", of_halves), 16, 4), {}, ["the layout halves gives rank 0 ", "int64"]),
    (check_layout, (Layout("falling", falling), 16, 4), {}, ["the layout falling gives rank 0 ", "rising order"]),
    (check_lengths, ("striped", [4, 16]), {}, ["have [4, 16] tokens in the striped layout; expected ["]),
    (check_sinks, (torch.zeros(4, 1), FOUR), {}, ["shape (4, 1)"]),
    (check_sinks, ([0.0] * 4, FOUR), {}, ["sinks is [0.0, 0.0, 0.0, 0.0]; expected a tensor"]),
    *((check_softcap, (x,), {}, [f"softcap is {x!r}; expected a finite num"]) for x in (math.nan, "large")),
    (positions, ("spiral", 16, 0, 4), {}, ["expected one of contiguous, zigzag, striped"]),
    (positions, ("zigzag", 12, 0, 4), {}, ["expected a multiple of 8: pad the tokens", "pad(x, 8)"]),
    (positions, ("striped", 15, 0, 4), {}, ["expected a multiple of 4: pad the tokens", "pad(x, 4)"]),
    (positions, ("contiguous", 3, 0, 4), {}, ["a token for each"]),
    (positions, ("contiguous", 16, 4, 4), {}, ["expected 0 to 3"]),
    (positions, ("striped", 16, -1, 4), {}, ["expected 0 to 3"]),
    (positions, ("striped", 16, 0, 0), {}, ["one rank or more"]),
    (check_split, (5, 6, 6), {}, ["among 6 ranks, and 5 query heads", "2 x 3"]),
    (heads_of_ranks, (5, 1, 6), {}, ["among 6 ranks, and 5 query heads", "2 x 3"]),
    (document_lengths, ([0],), {}, ["cu_seqlens is (0,); expected a list or tensor (documents + 1,)"]),
    (document_lengths, ([0, 4.0],), {}, ["cu_seqlens is (0, 4.0); expected ", "whole numbers"]),
    (document_lengths, (torch.tensor([[0, 4]]),), {}, ["cu_seqlens is tensor([[0, 4]]); expected"]),
    (document_lengths, ([5, 17, 24],), {}, ["cu_seqlens begins with 5, ", "; expected 0"]),
    (document_lengths, ([0, 5, 5, 24],), {}, ["document 1 goes from 5 to 5; expected ", "a token or more"]),
    *((pack, (texts,), {}, ["expected one or more, none empty"]) for texts in ([], [torch.arange(3), torch.arange(0)])),
    *((partition_of_8, (), options, words) for options, words in BAD_MASKS),
    *((Config, (), {"layers": 6, "linear": n}, [f"layers is 6, linear {n}; expected linear to be 0"]) for n in (3, -1)),
    (Config, (), {"hidden": 20, "heads": 4}, ["hidden is 20, heads 4; expected hidden to be a multiple"]),
    (Config, (), {"heads": 4, "kv_heads": 3}, ["heads is 4, kv_heads 3; expected kv_heads to divide heads"]),
    (choose_device, ("tpu", 2), {}, ["device is 'tpu'; expected"]),
    (ring_attention, (X, X, X), {}, NO_GROUP),
    (members, (), {}, NO_GROUP),
    (simulate_messages, ([[Send(0)], []],), {}, ["rank 0 has Send(to=0)", "expected another rank from 0 to 1"]),
    (simulate_messages, ([[Send(2)], []],), {}, ["rank 0 has Send(to=2)", "expected another rank from 0 to 1"]),
    (simulate_messages, ([[Recv(-1)], []],), {}, ["rank 0 has Recv(source=-1)", "expected another rank from 0 to 1"]),
    *((ring_programs, (P,), {}, [f"world_size is {P}; expected at least 2 ranks"]) for P in (1, 0, -2)),
]


@pytest.mark.parametrize(("function", "args", "options", "words"), BAD_ALONE)
def test_one_process(function, args, options, words):
    with pytest.raises(ValueError, match=all_of(words)) as refused:
        function(*args, **options)
    assert_recorded(str(refused.value))


def ring_on(context, ring, inputs):
    """The ring on this rank's own q, k, v and scale; a block that travels all the same is an error."""
    (q, k, v), scale = inputs[context.rank]
    travels = mock.Mock(side_effect=AssertionError("a block travels"))
    with mock.patch.multiple(dist, send=travels, batch_isend_irecv=travels):
        ring(q, k, v, scale=scale)


@pytest.mark.parametrize(("ring", "bad"), BAD_TO_RINGS)
def test_one_rank_of_three(ranks, ring, bad):
    """Nothing is wrong on the other two. Then the same processes must run a right ring."""
    qkv, scale, words = bad
    given = [((X, X, X), None), (qkv, scale), ((X, X, X), None)]
    message = assert_refused(ranks, 3, ["rank 1: ", *words], ring_on, ring, given)
    assert not {"rank 0", "rank 2"} & {*re.findall(r"rank \d", message)}
    assert_ring(ranks, 3, *random_qkv((1, 1, 8, 2)))


def scatter_from_the_first(context, x):
    return scatter(x if context.rank == 0 else None, context)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (X, "rank 0: 4 tokens for 5 ranks; expected at least one token for each rank"),
        (X[0], "rank 0: x is (2, 4, 3); expected (B, H, S, D) on rank 0"),
        (None, "rank 0: x is None; expected (B, H, S, D) on rank 0"),
    ],
)
def test_what_cannot_be_scattered(ranks, x, words):
    assert_refused(ranks, 5, words, scatter_from_the_first, x)


@pytest.mark.usefixtures("alone")
def test_a_ring_asks_whether_so_many_heads_are_tokens():
    for heads, tokens, asks in ((160, 20, False), (161, 20, True), (128, 3, False), (129, 3, True)):
        with warnings.catch_warnings(record=True) as told:
            flash_ring.ring_flash_attention(*torch.zeros(3, 1, heads, tokens, 2))
        words = f": {heads} heads of {tokens} tokens. Is it (B, S, H, D)?"
        assert [(it.filename, words in str(it.message)) for it in told] == [(__file__, True)] * asks


COMPILED = [flash_ring.ring_flash_attention, flash_ring.scaled_dot_product_attention, ring_linear_attention]


@pytest.mark.parametrize("attention", [*COMPILED, ring_short_convolution, ring_latent_attention, choose_keys])
def test_attention_over_ranks_runs_as_it_is_under_torch_compile(monkeypatch, attention):
    compiler = mock.Mock(disable=lambda function: lambda: function)
    monkeypatch.setattr(torch, "compiler", compiler)
    monkeypatch.setitem(vars(torch), "_dynamo", compiler)
    assert attention() is attention.__wrapped__
    compiler.graph_break.assert_called_once_with(msg="attention over ranks is not compiled; expected fullgraph=False")
