"""The one bound of the project: what it accepts, what it rejects, and how sharp it is."""

import math

import pytest
import torch

from support.rounding import exact_attention, report
from tests.attention import DTYPES, assert_right, random_qkv


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_is_sharp(dtype):
    right = exact_attention(*random_qkv((1, 2, 16, 8), dtype))["out"]
    assert_right(right.exact.to(dtype), right)
    one = (right.allowed / right.exact.abs() == (right.allowed / right.exact.abs()).min()).double()
    # Two steps away from the right answer is too far in half precision, which is stored to half a step. In float32 and
    # float64 the rounded scores move the answer by more than its storage does.
    steps = 2 if dtype.itemsize == 2 else 100
    with pytest.raises(AssertionError, match="1 of 256 numbers are wrong"):
        assert_right((right.exact * (1 + one * steps * torch.finfo(dtype).eps)).to(dtype), right)


def test_report_rejects_a_wrong_number_and_nan(capsys):
    right = exact_attention(*random_qkv((1, 1, 4, 2)))["out"]
    near, far, nan = (right.exact.float() for _ in range(3))
    far[0, 0, 3, 1] += 1e-3
    nan[0, 0, 3, 1] = math.nan
    assert [report("it", x, right) for x in (near, far, nan)] == [True, False, False]
    assert [line[:5] for line in capsys.readouterr().out.splitlines()] == ["ok   ", "WRONG", "WRONG"]
