"""Rings with a mistake are rejected by the check that the right ring passes with the same input."""

import pytest
import torch

import ring_attn
from ringlab.training import backward, grouped_query, overlap
from tests import wrong_rings
from tests.attention import DTYPES, random_qkv
from tests.rings import assert_gradients, assert_ring
from tests.ways import HERE, Problem, assert_right_results, name_of
from tests.wrong_rings import BACKWARD, BLOCKING, FLASH, GROUPED, OVERLAPPED

SEEN_RIGHT = set()  # what the right rings have passed
IN_16_BITS = {"output_in_bfloat16": DTYPES, "state_in_q_dtype": (torch.bfloat16, torch.float16)}
FORWARD = [(ring_attn, wrong, 3, torch.float32) for wrong in BLOCKING if wrong not in IN_16_BITS]
FORWARD += [(ring_attn, "two_seats", 4, torch.float32)]  # an even P: half of the blocks never come
FORWARD += [(ring_attn, wrong, 3, dtype) for wrong, dtypes in IN_16_BITS.items() for dtype in dtypes]
FORWARD += [(overlap, wrong, 3, torch.float32) for wrong in OVERLAPPED]
IN_ANOTHER_ORDER = [("two_seats", 3), ("backwards", 3)]  # all blocks come


@pytest.mark.parametrize(("module", "wrong", "size", "dtype"), FORWARD, ids=lambda it: getattr(it, "__name__", str(it)))
def test_forward(ranks, module, wrong, size, dtype):
    ring, inputs = module.ring_attention, random_qkv((1, 2, 24, 8), dtype)
    if (ring, size, dtype) not in SEEN_RIGHT:
        assert_ring(ranks, size, *inputs, ring=ring)
        SEEN_RIGHT.add((ring, size, dtype))
    says = "blocks in use" if (wrong, size) in IN_ANOTHER_ORDER else "numbers are wrong"
    with pytest.raises(AssertionError, match=says):
        assert_ring(ranks, size, *inputs, ring=ring, wrong=wrong)


# fmt: off
GRADIENTS = [  # the ring, its mistakes, B, H, G, S, D, dtype, the first result that is wrong
    (backward.ring_attention, BACKWARD, (1, 2, 2, 36, 8, torch.float32), ""),
    (backward.ring_attention, ["DqInTheDtypeOfQ"], (1, 2, 2, 144, 64, torch.bfloat16), "dq: "),
    (backward.ring_attention, ["DqInTheDtypeOfQ"], (1, 2, 2, 144, 64, torch.float16), "dq: "),
    (grouped_query.ring_attention, GROUPED, (1, 8, 2, 24, 6, torch.float32), "out: "),
]
# fmt: on


@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: f"{case[0].__module__}, {case[2][-1]}")
def test_backward(ranks, case):
    ring, mistakes, sizes, first = case
    assert_gradients(ranks, 3, *sizes, ring=ring)
    for wrong in mistakes:
        with pytest.raises(AssertionError, match=f"{first}.*numbers are wrong"):
            assert_gradients(ranks, 3, *sizes, ring=ring, wrong=wrong)


ZIGZAG, STRIPED, FULL = {"causal": True, "layout": "zigzag"}, {"causal": True, "layout": "striped"}, {}
SOMETIMES = {  # of the trainable ring: the cases in which a mistake shows, where not in all
    "backward_without_a_mask": [ZIGZAG, STRIPED],
    "contiguous_slices": [ZIGZAG, STRIPED],
    "the_diagonal_hidden": [ZIGZAG],
    "the_next_token_seen": [STRIPED],
    "last_half_of_the_keys": [ZIGZAG],
    "first_half_of_the_queries": [ZIGZAG],
    "first_query_kept": [STRIPED],
}
FOUR, SIX, ON_FOUR = (4, 2, 48), (6, 3, 48), (2, 2)
DOCUMENTS = {"causal": True, "documents": [1, 10, 37], "window": 23}
WINDOW, SHORT = {"causal": True, "window": 20, "global_tokens": 3}, {"causal": True, "window": 5}
SINKS = (4, 2, 48, {"causal": True}, None, torch.float32, 1, 4, 0, 1.0, None, torch.float32)
CAPPED = (4, 2, 48, {"causal": True, "softcap": 2.0})
# fmt: off
SHOWS = {  # where the mistakes of the other ways show: a way, its ranks, a problem
    "K/V head r mod G": [("all-to-all", 4, (8, 2, 48, {})), ("hybrid", (2, 4), (8, 2, 48, {}))],
    "gradients of copies not added": [("all-to-all", 4, (8, 2, 48, {})), ("hybrid", ON_FOUR, (4, 1, 48, {}))],
    "the layout is not undone": [("all-to-all", 3, (*FOUR, ZIGZAG)), ("hybrid", ON_FOUR, (*FOUR, ZIGZAG))],
    "out goes back in order of rank": [("all-to-all", 3, (*FOUR, ZIGZAG))],
    "rows taken for ranks": [("hybrid", ON_FOUR, (*FOUR, STRIPED))],
    "gathered gradients are not added": [("all-gather", 3, (*SIX, {})), ("all-gather", 5, (6, 3, 60, ZIGZAG))],
    "the slow hop a round early": [("double ring", (3, 2), (*FOUR, ZIGZAG))],
    "sums of a turn not brought home": [("double ring", (3, 2), (*FOUR, ZIGZAG))],
    "the block of another rank": [("shared memory", 3, (*FOUR, ZIGZAG)), ("two levels", ON_FOUR, (*FOUR, ZIGZAG))],
    "gradients sent to the next rank, and not home":
        [("ring", 4, (*FOUR, SHORT)), ("double ring", (3, 2), (*FOUR, SHORT))],
    "sinks counted twice": [("ring", 4, SINKS)],
    "the sinks of the first heads": [("all-to-all", 3, SINKS), ("hybrid", ON_FOUR, SINKS)],
    "the mask before the cap": [("ring", 4, CAPPED)],
    "a document leaks into the next": [("ring", 4, (*FOUR, DOCUMENTS)), ("all-gather", 3, (*FOUR, DOCUMENTS))],
    "a window of one more": [("ring", 4, (*FOUR, WINDOW)), ("hybrid", ON_FOUR, (*FOUR, WINDOW))],
    "no global tokens": [("ring", 4, (*FOUR, WINDOW))],
    "a hop too few": [("ring", 4, (*FOUR, SHORT)), ("double ring", (3, 1), (*FOUR, SHORT))],
}
# fmt: on
SHOWS |= {
    wrong: [("ring", 4, (*FOUR, case, None, torch.float32, 1, 16)) for case in SOMETIMES.get(wrong, [ZIGZAG, FULL])]
    for wrong in FLASH
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "way", "shape", "problem"),
    [(wrong, way, shape, problem) for wrong, cases in SHOWS.items() for way, shape, problem in cases if way in HERE],
    ids=name_of,
)
def test_a_way(ranks, wrong, way, shape, problem):
    right = Problem(*problem)
    if (way, shape, repr(problem)) not in SEEN_RIGHT:
        assert_right_results(ranks, way, shape, [right])
        SEEN_RIGHT.add((way, shape, repr(problem)))
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_right_results(ranks, way, shape, [right], wrong)


def test_every_mistake_is_here():
    assert SHOWS.keys() == {*FLASH, *wrong_rings.WAYS}
