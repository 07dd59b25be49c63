"""Every number that worked_example.py prints, against torch in float64; and every mistake of the published page."""

import re
import runpy
import sys

import numpy as np
import pytest
import torch

import worked_example as example
from basics.naive_attention import TOKENS, naive_attention
from basics.online_softmax import finish, start, update
from support.colours import BLOCK_COLOURS

X = TOKENS[None, None]


def run(capsys, *argv) -> str:
    assert example.main(list(argv)) == 0
    return capsys.readouterr().out


def states_of_torch(causal: bool):
    """(s, p, f, m, l, o) of every round and token, (4, 8, 10), computed by the package the example does not use."""
    scores = TOKENS @ TOKENS.T / 2**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
    table = torch.zeros(4, 8, 9, dtype=torch.float64)
    for gpu in range(4):
        queries = slice(2 * gpu, 2 * gpu + 2)
        state = start(TOKENS[queries])
        for t in range(4):
            keys = slice(2 * ((gpu - t) % 4), 2 * ((gpu - t) % 4) + 2)
            s, old_m = scores[queries, keys], state[0]
            state = update(state, s, TOKENS[keys])
            m, l, o = state
            p, f = torch.exp(s - m[:, None]), torch.exp(old_m - m)
            columns = [s, p, f[:, None], m[:, None], l[:, None], o]
            table[t, queries] = torch.cat(columns, dim=1)
    return table


@pytest.mark.parametrize("causal", [False, True])
def test_every_printed_number_of_every_round(capsys, causal):
    printed = run(capsys, *["--causal"] * causal)
    expected = states_of_torch(causal)
    seen = set()
    t = -1
    for line in printed.splitlines():
        if match := re.match(r"ROUND (\d)", line):
            t = int(match[1])
        if match := re.match(r" +(\d) \|(.*\|.*\|.*\|.*\|.*)", line):
            token = int(match[1])
            numbers = [-np.inf if x == "." else float(x) for x in match[2].replace("|", " ").split()]
            row = expected[t, token]
            so_far = row[-2:] / row[-3]
            np.testing.assert_allclose(numbers, torch.cat([row, so_far]).numpy(), atol=5.001e-4)
            seen.add((t, token))
    future = {(t, token) for t in range(4) for token in range(8) if causal and (token // 2 - t) % 4 > token // 2}
    assert seen == {(t, token) for t in range(4) for token in range(8)} - future


@pytest.mark.parametrize("causal", [False, True])
def test_the_result_is_full_attention(capsys, causal):
    printed = run(capsys, *["--causal"] * causal)
    rows = re.findall(r"^ +(\d) \|\s+(\S+)\s+(\S+) \|\s+(\S+)\s+(\S+) \|", printed, re.M)[-8:]
    exact = naive_attention(X, X, X, causal=causal)[0, 0].numpy()
    assert [int(row[0]) for row in rows] == list(range(8))
    np.testing.assert_allclose(np.array([row[1:3] for row in rows], dtype=float), exact, atol=5.001e-5)
    np.testing.assert_allclose(np.array([row[3:5] for row in rows], dtype=float), exact, atol=5.001e-5)
    assert printed.count("ok ") == 2


def test_the_final_rows_a_reader_may_know():
    final = [step.o / step.l[:, None] for step in example.ring()[-1]]
    np.testing.assert_allclose(final[0], [[2.2688, 1.6500], [1.9678, 1.9311]], atol=5e-5)
    np.testing.assert_allclose(final[3][1], [2.9806, 2.9527], atol=5e-5)


def test_a_wrong_ring_exits_1(monkeypatch, capsys):
    monkeypatch.setattr(example, "full_attention", lambda causal: example.TOKENS)
    assert example.main([]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_gpu_and_round_select(capsys):
    printed = run(capsys, "--gpu", "1", "--round", "2")
    assert re.findall(r"^ROUND (\d)", printed, re.M) == ["2"]
    assert re.findall(r"GPU (\d) holds KV(\d)", printed) == [("1", "3")]


@pytest.mark.parametrize("argv", [["--gpu", "4"], ["--round", "-1"], ["--round", "x"], ["--published", "--causal"]])
def test_bad_options_are_usage_errors(capsys, argv):
    with pytest.raises(SystemExit) as stopped:
        example.main(argv)
    assert stopped.value.code == 2
    assert "error: argument" in capsys.readouterr().err


def test_width_and_colour(capsys, monkeypatch):
    for argv in ([], ["--causal"], ["--published"]):
        printed = run(capsys, *argv)
        assert max(len(line) for line in printed.splitlines()) <= 100
        assert "\033" not in printed
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[1;38;2;0;114;178mKV0" in run(capsys)


def test_it_can_be_taken_away_alone(monkeypatch, capsys):
    """No import but numpy: without torch, and without this project, it still runs and says what it could not check."""
    for module in ("torch", "basics"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["worked_example.py"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(example.__file__, run_name="__main__")
    assert stopped.value.code == 0
    assert "torch is not installed" in capsys.readouterr().out


def test_what_it_repeats_so_as_to_stand_alone_is_the_same():
    np.testing.assert_array_equal(example.TOKENS, TOKENS.numpy())
    assert BLOCK_COLOURS[:4] == example.BLOCK_COLOURS


# The published page --------------------------------------------------------------------------------------------------


def test_a_published_row_is_marked_wrong_exactly_when_it_is():
    steps = example.ring()
    for t, gpu, what, printed, letters in example.PUBLISHED:
        for i in (0, 1):
            right = np.abs(example.exact(steps[t][gpu], i, what) - printed[i]).max() < 6e-4
            assert right == (letters[i] == ""), (t, gpu, what, i)
            assert right or letters[i] in example.why()


def test_where_the_published_numbers_come_from():
    """Each explanation, computed: the mistake it names gives the number that was printed."""
    softmax, tokens = example.softmax, example.TOKENS
    close = {"atol": 6e-4}
    np.testing.assert_allclose(softmax(np.array([1.0, 0.0])), [0.731, 0.269], **close)  # A: no 1/sqrt(2)
    assert tokens[3] @ tokens[2] == 3  # B: not 2
    for printed in ([0.310, 0.690], [0.142, 0.858]):  # C: not what the printed scores give
        for scores in ([1.414, 2.121], [1.414, 3.536], [2, 3], [2, 5]):
            assert np.abs(softmax(np.array(scores)) - printed).max() > 0.01
    np.testing.assert_allclose(0.690 * tokens[3], [0.690, 1.380], **close)  # D: only the second value row
    np.testing.assert_allclose(0.858 * tokens[3], [0.858, 1.716], **close)
    np.testing.assert_allclose(np.array([0.219, 0.781]) @ tokens[6:], [3.0, 2.562], **close)  # F: not 2.438
    np.testing.assert_allclose(softmax(np.array([1.0, 2.0])), [0.269, 0.731], **close)  # G: no 1/sqrt(2)
    np.testing.assert_allclose(np.add([0.731, 0.269], [3, 2]), [3.731, 2.269], **close)  # H: a sum of averages
    np.testing.assert_allclose(np.add([0.269, 0.731], [2.438, 2.562]), [2.707, 3.293], **close)
    np.testing.assert_allclose(np.add([0.142, 0.858], [0.269, 0.731]), [0.411, 1.589], **close)  # I: of weights
    assert [step.block for step in example.ring()[2][:2]] == [2, 3]  # K: not 1, and not "3:4"
    np.testing.assert_allclose((tokens @ tokens.T @ tokens)[0], [29, 21])  # L: no softmax
    seven = naive_attention(X[:, :, :7], X[:, :, :7], X[:, :, :7])[0, 0, 0]  # P: 7 tokens on 4 GPUs
    np.testing.assert_allclose(seven, [2.011, 1.174], **close)
    ring_of_seven = start(X[:, :, :2])
    for keys in (slice(0, 2), slice(6, 7), slice(4, 6), slice(2, 4)):
        ring_of_seven = update(ring_of_seven, X[:, :, :2] @ X[:, :, keys].transpose(-2, -1) / 2**0.5, X[:, :, keys])
    torch.testing.assert_close(finish(ring_of_seven)[0][0, 0, 0], seven)


def test_the_published_page_is_shown_whole(capsys):
    printed = run(capsys, "--published")
    assert printed.count("right\n") == 18
    assert printed.count("wrong, see") == 18
    for number in ("3.731", "2.642", "2.269", "0.411", "29.000"):
        assert number in printed
    for letter in example.why():
        assert f"\n  {letter}  " in printed
    sums = np.cumsum([example.exact(steps[0], 0, "output") for steps in example.ring()], axis=0)
    for t, total in enumerate(sums):
        assert re.search(rf"^ +{t} \|.*\| +{total[0]:.3f} +{total[1]:.3f} +{t + 1} ", printed, re.M)
