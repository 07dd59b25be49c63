"""Rings with a mistake are rejected by the check that the right ring passes with the same input."""

import pytest
import torch

import ring_attn
from ringlab.training import backward, grouped_query, overlap
from tests.attention import DTYPES, random_qkv
from tests.rings import assert_gradients, assert_ring
from tests.wrong_rings import BACKWARD, BLOCKING, GROUPED, OVERLAPPED

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
