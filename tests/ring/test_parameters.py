"""Every parameter of every ring is moved, forward and backward, to a value where the default would be seen.

A ring is a public function with the optional parameter `scale` and a `group` or a `mesh`. A new ring, or a new
parameter, without a test here fails `test_every_ring_and_parameter_is_here`.
"""

import functools
import importlib
import inspect
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ring_attn
from ringlab.ring import backward, flash_ring, grouped_query, overlap
from ringlab.ring.layouts import shard, unshard
from tests.attention import assert_right, expected, gradients, grouped_inputs
from tests.concepts import needed_by
from tests.mistakes import all_of, refusal

RINGS = {
    "ring_attn": ring_attn.ring_attention,
    "overlap": overlap.ring_attention,
    "backward": backward.ring_attention,
    "grouped_query": grouped_query.ring_attention,
    "scaled_dot_product_attention": flash_ring.scaled_dot_product_attention,
    "ring": flash_ring.ring_flash_attention,  # with other schedules: tests/ways/test_schedules.py
}
FORWARD_ONLY = {"ring_attn", "overlap"}
UNGROUPED = {"ring_attn", "overlap", "backward"}  # as many heads of K and V as of Q
INPUTS = {"q", "k", "v", "query", "key", "value", "schedule"}

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
OPTIONS = [
    (name, option)
    for name, ring in RINGS.items()
    for option in inspect.signature(ring).parameters
    if option not in INPUTS
]


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
            a_ring = (
                "scale" in parameters and parameters["scale"].default is None and {"group", "mesh"} & set(parameters)
            )
            if function.__module__ == module.__name__ and name[0] != "_" and a_ring:
                rings.add(function)
    assert rings == set(RINGS.values())
    assert {parameter for _, parameter in OPTIONS} == {*MOVED, *REFUSED}


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
        outcomes = ranks.outcomes(2, outcome_on_rank, name, inputs_of(name), options)
        assert re.search(all_of(words), refusal(outcomes)), options
