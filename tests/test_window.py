"""A sliding window and global tokens: their hops, and torch as a second oracle."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ringlab.training.layouts import LAYOUTS
from ringlab.training.masks import Mask
from ringlab.training.partition import Partition
from ringlab.training.window import window_hops, window_mask
from tests.gradients import gradients
from tests.grouped_queries import grouped_inputs
from tests.ways import ring_gradients, whole

S = 48


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 8), st.booleans())
def test_hops_of_a_window(window, chunk, P, global_token):
    """In the contiguous layout by the formula; in the others, as ringlab/training/window.py says."""
    mask = Mask(True, None, window, int(global_token))
    hops = {layout: Partition(mask, layout, (2 * chunk,) * P).hops for layout in LAYOUTS}
    assert window_hops(window, 2 * chunk, P) == min(-((1 - window) // (2 * chunk)), P - 1)
    if global_token:  # all ranks see the first block
        assert hops == dict.fromkeys(LAYOUTS, P - 1)
    else:
        assert hops["contiguous"] == window_hops(window, 2 * chunk, P)
        assert hops["striped"] == min(window - 1, P - 1)
        assert hops["zigzag"] == (P - 1 if window > 1 else 0)


def test_the_mask_by_hand():
    assert window_mask(5, 2, 1).long().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("window", "global_tokens"), [(1, 0), (1, 1), (7, 0), (7, 3), (13, 40), (48, 0), (100, 9)])
def test_the_ring_is_sdpa_with_a_dense_mask(ranks, layout, window, global_tokens):
    """A second oracle. More global tokens than a query has before its window are no more than all."""
    four = grouped_inputs(1, 4, 2, S, 8, torch.float64)
    options = {"causal": True, "layout": layout, "window": window, "global_tokens": global_tokens}
    mine = whole(ranks(4, ring_gradients, *four, options), layout)
    sdpa = functools.partial(
        F.scaled_dot_product_attention, attn_mask=window_mask(S, window, global_tokens), enable_gqa=True
    )
    for x, right in zip(mine, gradients(sdpa, *four), strict=True):
        torch.testing.assert_close(x, right)
