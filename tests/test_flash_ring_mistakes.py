"""Every trainable ring with a mistake is rejected by the check that the right ring passes."""

import pytest
import torch

from tests.flash_rings import assert_flash, assert_large
from tests.grouped_queries import expected_of_inputs, grouped_inputs
from tests.wrong_flash_rings import FULL, SHOWS, STRIPED, WRONG, ZIGZAG

SMALL = (1, 4, 2, 48, 16)


@pytest.mark.parametrize(
    ("size", "wrong", "causal", "layout"),
    [(P, wrong, *case) for P in (2, 4) for wrong in WRONG for case in SHOWS.get(wrong, [ZIGZAG, STRIPED, FULL])],
)
def test_a_wrong_ring_is_rejected(ranks, size, wrong, causal, layout):
    four, right = grouped_inputs(*SMALL, torch.float32), expected_of_inputs(*SMALL, torch.float32, causal=causal)
    assert_flash(ranks, size, four, right, causal=causal, layout=layout)
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_flash(ranks, size, four, right, wrong=wrong, causal=causal, layout=layout)


@pytest.mark.parametrize(
    ("wrong", "dtype"), [("output_in_the_dtype_of_q", torch.bfloat16), ("gradients_in_float32", torch.float64)]
)
def test_a_ring_that_rounds_too_early_is_rejected(ranks, wrong, dtype):
    assert_large(ranks, 8, *FULL, dtype=dtype)
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_large(ranks, 8, *FULL, dtype=dtype, wrong=wrong)
