"""What worked_example.py prints: every number as recorded; and a result that torch in float64 does not confirm."""

import re
import runpy
import sys
import textwrap

import numpy as np
import pytest
import torch

import worked_example as example
from ringlab.basics.naive_attention import TOKENS
from ringlab.support.colours import BLOCK_COLOURS, paint
from ringlab.support.rounding import exact_attention
from tests.commands import check_shown
from tests.mistakes import assert_recorded

X = TOKENS[None, None]


def run(capsys, *argv) -> str:
    assert example.main(list(argv)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("off", [1e-13, np.nan])  # rounding allows 3.7e-14
@pytest.mark.parametrize("wrong", ["full attention", "torch"])
def test_a_result_that_is_off_by_more_than_rounding_exits_1(monkeypatch, capsys, wrong, off, causal):
    """Each of the two comparisons alone ends in WRONG and exit status 1; the other one stays ok."""
    if wrong == "torch":
        right = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(
            torch.nn.functional, "scaled_dot_product_attention", lambda *args, **options: right(*args, **options) + off
        )
    else:
        right = example.full_attention
        monkeypatch.setattr(example, "full_attention", lambda causal: right(causal) + np.array([0, off]))
    assert example.main(["--causal"] * causal) == 1
    printed = capsys.readouterr().out
    assert len(re.findall(r"\| +(1e-13|nan)$", printed, re.M)) == 8 * (wrong == "full attention")
    first, second = re.findall(r"^(ok   |WRONG) (?=the ring|and torch)", printed, re.M)
    assert (first, second) == (("ok   ", "WRONG") if wrong == "torch" else ("WRONG", "ok   "))


def test_its_own_bound_is_no_larger_than_the_derived_one():
    """It stands alone, so it cannot import ringlab/support/rounding.py."""
    assert example.rounding() <= exact_attention(X, X, X)["out"].allowed.max()


@pytest.mark.parametrize(
    ("gpu", "t", "holds"),
    [(0, 0, "KV0 (tokens 0 and 1)\n"), (1, 2, "KV3 (tokens 6 and 7), received from GPU 0; it started on GPU 3\n")],
)
def test_gpu_and_round_select(capsys, gpu, t, holds):
    printed = run(capsys, "--gpu", str(gpu), "--round", str(t))
    assert re.findall(r"^ROUND (\d)", printed, re.M) == [str(t)]
    assert re.findall(r"GPU (\d) holds (.*\n)", printed) == [(str(gpu), holds)]
    result = printed.partition("RESULT")[2]
    assert re.findall(r"^ +(\d) \|", result, re.M) == [str(2 * gpu), str(2 * gpu + 1)]


@pytest.mark.parametrize("option", ["--gpu", "--round"])
def test_there_is_no_fifth_gpu_or_round(option):
    with pytest.raises(SystemExit):
        example.main([option, "4"])


def test_the_docstring_shows_what_is_printed(capsys):
    assert_recorded(run(capsys, "--causal"))
    assert_recorded(run(capsys))
    shown = re.search(r"^    \$ python worked_example.py\n((?:    .*\n|\n)*)", example.__doc__, re.M)[1]
    check_shown(textwrap.dedent(shown), run(capsys))


def test_width_and_colour(capsys, monkeypatch):
    for argv in ([], ["--causal"]):
        printed = run(capsys, *argv)
        assert max(len(line) for line in printed.splitlines()) <= 100
        assert "\033" not in printed
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert all("\033[1;38;2;0;114;178mKV0" in text for text in (run(capsys), paint(8, "KV0")))
    monkeypatch.setenv("NO_COLOR", "")
    assert "\033" not in run(capsys) + paint(8, "KV0")


def test_it_can_be_taken_away_alone(monkeypatch, capsys):
    """No import but numpy: without torch, and without this project, it still runs and says what it could not check."""
    for module in ("torch", "ringlab"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["worked_example.py"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(example.__file__, run_name="__main__")
    assert stopped.value.code == 0
    assert "torch is not installed" in capsys.readouterr().out


def test_what_it_repeats_so_as_to_stand_alone_is_the_same():
    np.testing.assert_array_equal(example.TOKENS, TOKENS.numpy())
    assert BLOCK_COLOURS[:4] == example.BLOCK_COLOURS
