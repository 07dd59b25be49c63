"""Three conventions for a log-sum-exp and two merges: which fit together, and that the others are noticed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.basics.online_softmax import merge
from ringlab.training.log2_lse import CONVENTIONS, attention_with_lse, merge_base2, to_natural, which_convention
from tests.attention import assert_attention, random_qkv

RIGHT = {("natural", merge), ("log2 of e", merge_base2)}
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def merged(q, k, v, convention, rule, cut):
    a = attention_with_lse(q, k[:, :, :cut], v[:, :, :cut], convention)
    b = attention_with_lse(q, k[:, :, cut:], v[:, :, cut:], convention)
    return rule(*a, *b)


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(sorted(RIGHT, key=str)), st.integers(1, 6), st.sampled_from([0.1, 1.0, 30.0, 1000.0]))
def test_the_right_pairs_are_exact(pair, cut, largest_score):
    q, k, v = random_qkv((1, 2, 7, 4), torch.float64, largest_score=largest_score)
    out, lse = merged(q, k, v, *pair, cut)
    assert_attention(out, q, k, v)
    if pair[1] is merge_base2:
        lse = to_natural(lse)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.transpose(-2, -1) / 2, dim=-1))


@pytest.mark.parametrize(
    ("convention", "rule"), [(c, rule) for c in CONVENTIONS for rule in (merge, merge_base2) if (c, rule) not in RIGHT]
)
def test_the_wrong_pairs_are_rejected_though_they_give_no_nan(convention, rule):
    q, k, v = random_qkv((1, 2, 8, 4), torch.float64)
    out, _ = merged(q, k, v, convention, rule, 4)
    assert out.isfinite().all()
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_attention(out, q, k, v)


def test_the_convention_of_real_kernels():
    assert which_convention(lambda q, k, v: flash(q, k, v, 0.0, False)) == "natural"
    assert which_convention(lambda q, k, v: blockwise_attention(q, k, v, block_size=1)) == "natural"
    assert which_convention(lambda q, k, v: flash(*(x.bfloat16() for x in (q, k, v)), 0.0, False)) == "natural"


def test_an_unknown_convention_is_refused():
    with pytest.raises(ValueError, match="expected one of natural, log2 of e, log2 of 2"):
        attention_with_lse(*random_qkv((1, 1, 2, 2)), "log10")
    with pytest.raises(ValueError, match="expected one of"):
        which_convention(lambda q, k, v: (q, torch.zeros(1)))
