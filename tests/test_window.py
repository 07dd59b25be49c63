"""A sliding window and global tokens: hops, torch as a second oracle, and windows that are wrong by one."""

import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ringlab.training.layouts import LAYOUTS
from ringlab.training.masks import Mask
from ringlab.training.window import window_hops, window_mask
from tests.flash_rings import ring_gradients, whole
from tests.gradients import gradients
from tests.grouped_queries import assert_four, expected, grouped_inputs
from tests.masked import changed, forget, right_keys

S = 48


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 8), st.booleans())
def test_hops_of_a_window(window, chunk, P, sinks):
    """In the contiguous layout by the formula; in the others, as ringlab/training/window.py says."""
    hops = {
        layout: Mask(layout, (2 * chunk,) * P, True, None, window, global_tokens=int(sinks)).hops for layout in LAYOUTS
    }
    assert window_hops(window, 2 * chunk, P) == min(-((1 - window) // (2 * chunk)), P - 1)
    if sinks:  # the first rank's block is seen by all, and in the zigzag layout by the last tokens on rank 0 itself
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
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 1), (7, 0), (7, 3), (13, 40), (48, 0), (100, 9)])
def test_the_ring_is_sdpa_with_a_dense_mask(ranks, layout, window, sinks):
    """A second oracle. More global tokens than a query has before its window are no more than all."""
    four = grouped_inputs(1, 4, 2, S, 8, torch.float64)
    options = {"causal": True, "layout": layout, "window": window, "global_tokens": sinks}
    mine = whole(ranks(4, ring_gradients, *four, options), layout)
    sdpa = functools.partial(F.scaled_dot_product_attention, attn_mask=window_mask(S, window, sinks), enable_gqa=True)
    for x, right in zip(mine, gradients(sdpa, *four), strict=True):
        torch.testing.assert_close(x, right)


def wrapped(mask, at):
    """The first queries see the last keys too, as if the sequence were a circle."""
    first, end = torch.maximum(at + 1 - mask.window, torch.zeros_like(at)), at + 1
    begin = torch.where(at < mask.window - 1, mask.seq_len + at + 1 - mask.window, mask.seq_len)
    return [(first, end), (begin, torch.full_like(at, mask.seq_len))]


def other_sinks(mask, at):
    """A window of which the global tokens are counted twice, once more inside the window."""
    first, end = torch.maximum(at + 1 - mask.window, torch.zeros_like(at)), at + 1
    return [(first, end), (torch.zeros_like(at), torch.minimum(torch.full_like(at, mask.global_tokens), end))]


def replaced(visible_keys):
    return mock.patch.object(Mask, "visible_keys", visible_keys)


def other_window(more):
    return replaced(lambda mask, at: right_keys(replace(mask, window=mask.window + more), at))


WRONG = {
    "a window of one more": lambda: other_window(+1),
    "a window of one less": lambda: other_window(-1),
    "the next token is seen": lambda: changed(end=1),
    "a wrap-around from the first rank to the last": lambda: replaced(wrapped),
    "global tokens inside the window count twice": lambda: replaced(other_sinks),
    "no global tokens": lambda: replaced(lambda mask, at: right_keys(mask, at)[:1]),
}


def wrong_window(context, *args, wrong):
    forget()
    try:
        with WRONG[wrong]():
            return ring_gradients(context, *args)
    finally:
        forget()


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("size", [3, 4])
def test_a_wrong_window_is_rejected(ranks, size, wrong):
    four = grouped_inputs(1, 4, 2, S, 8)
    right = expected(*four, visible=window_mask(S, 20, 3), fused_blocks=3 * 8)
    options = {"causal": True, "window": 20, "global_tokens": 3}
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_four(
            whole(ranks(size, functools.partial(wrong_window, wrong=wrong), *four, options), "contiguous"), right
        )
