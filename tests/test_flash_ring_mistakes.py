"""Every trainable ring with a mistake is rejected by the check that the right ring passes."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from ringlab.training import flash_ring
from tests.grouped_queries import expected_of_inputs, grouped_inputs
from tests.ways import assert_flash, assert_large, cut
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


def test_gradients_summed_in_float32_are_rejected_in_float64(ranks):
    assert_large(ranks, 8, *FULL, dtype=torch.float64)
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_large(ranks, 8, *FULL, dtype=torch.float64, wrong="gradients_in_float32")


def merged_numbers(context, q, k, v, wrong):
    """What `merge_into` leaves in the running output on this rank: all numbers, and how many bfloat16 could hold."""
    with WRONG[wrong]() if wrong else nullcontext():
        merge_into, counts = flash_ring.merge_into, []

        def watched(out, lse, out_j, lse_j):
            merge_into(out, lse, out_j, lse_j)
            counts.append((out.numel(), int((out == out.bfloat16()).sum())))

        with mock.patch.object(flash_ring, "merge_into", watched):
            flash_ring.ring_flash_attention(*cut(context, "contiguous", None, q, k, v))
    return [sum(each) for each in zip(*counts, strict=True)]


@pytest.mark.parametrize("wrong", [None, "output_in_the_dtype_of_q"])
def test_the_running_output_is_float32_for_bfloat16(ranks, wrong):
    """A kernel's own rounding to bfloat16 hides this mistake from every bound, so the numbers themselves are looked at.

    A float32 number is one of bfloat16 by chance once in 2^16 times.
    """
    q, k, v, _ = grouped_inputs(*SMALL, torch.bfloat16)
    for total, narrow in ranks(3, merged_numbers, q, k, v, wrong):
        assert narrow == total if wrong else narrow < total / 100
