"""Every mistake of the published page is found, and every number that explains one is right."""

import re

import numpy as np
import pytest
import torch

import worked_example as example
from notebooks import published_example as published
from ringlab.basics.naive_attention import TOKENS, naive_attention

X = TOKENS[None, None]


def run(capsys) -> str:
    assert published.main() == 0
    return capsys.readouterr().out


def decimals(text: str) -> list[float]:
    """The numbers with a decimal point, in order."""
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def softmax(*scores: float) -> torch.Tensor:
    return torch.softmax(torch.tensor(scores, dtype=torch.float64), dim=0)


def test_a_row_is_marked_wrong_exactly_when_it_is():
    """The letters are written by hand; the exact values here come from torch."""
    for t, gpu, what, printed_rows, letters in published.PUBLISHED:
        keys = TOKENS[2 * ((gpu - t) % 4) :][:2]
        seen = torch.cat([TOKENS[2 * ((gpu - earlier) % 4) :][:2] for earlier in range(t + 1)])
        for i in (0, 1):
            q = TOKENS[2 * gpu + i]
            weights = softmax(*(keys @ q / 2**0.5))
            right = {
                "q.k": keys @ q,
                "scores": keys @ q / 2**0.5,
                "weights": weights,
                "output": weights @ keys,
                "so far": softmax(*(seen @ q / 2**0.5)) @ seen,
            }[what]
            np.testing.assert_allclose(published.exact(example.ring()[t][gpu], i, what), right, atol=1e-13)
            is_right = np.abs(right.numpy() - printed_rows[i]).max() < 6e-4
            assert is_right == (letters[i] == ""), (t, gpu, what, i)
            assert is_right or letters[i] in published.explanations()


def test_every_number_of_every_explanation():
    seven = naive_attention(X[:, :, :7], X[:, :, :7], X[:, :, :7])[0, 0, 0]
    expected = {
        "A": softmax(1, 0),
        "B": [3 / 2**0.5],
        "C": [1.414, 3.536, *softmax(1.414, 3.536)],
        "D": [0.690, 0.690, 1.380],
        "E": [0.707, 2.121, *softmax(1 / 2**0.5, 3 / 2**0.5)],
        "F": torch.tensor([0.219, 0.781], dtype=torch.float64) @ TOKENS[6:],
        "G": softmax(1, 2),
        "I": [0.142, 0.858, 0.858, 1.716],
        "L": (TOKENS @ TOKENS.T @ TOKENS)[0],
        "P": seven,
    }
    explanations = published.explanations()
    for letter, text in explanations.items():
        np.testing.assert_allclose(decimals(text), [float(x) for x in expected.get(letter, [])], atol=5.001e-4)
    holds = [(r - 2) % 4 for r in (0, 1)]  # in round 2
    for gpu, block in enumerate(holds):
        assert f"GPU {gpu} holds block {block} (tokens {2 * block} and {2 * block + 1})" in explanations["K"]
    C, D, S, P = 2, 2, 8, 4
    assert f"6 chunks of {C * D} values" in explanations["O"]
    assert f"output): {6 * C * D}. " in explanations["O"]
    assert f"{4 * S * D} values, and the {S} x {S} scores" in explanations["O"]
    assert f"{P} rounds have {P - 1} hops" in explanations["N"]


def test_the_sum_of_averages_number_by_number(capsys):
    table, moral = run(capsys).partition("THE SUM OF AVERAGES")[2].split("The page stops")
    total, seen = torch.zeros(2, dtype=torch.float64), []
    for t, block in enumerate((0, 3, 2, 1)):
        keys = TOKENS[2 * block : 2 * block + 2]
        output = softmax(*(keys @ TOKENS[0] / 2**0.5)) @ keys
        total, seen = total + output, [*seen, keys]
        so_far = softmax(*(torch.cat(seen) @ TOKENS[0] / 2**0.5)) @ torch.cat(seen)
        (line,) = re.findall(rf"^ +{t} \| +KV{block} .*", table, re.M)
        np.testing.assert_allclose(decimals(line), torch.cat([output, total, so_far]), atol=5.001e-4)
        assert f" {t + 1} " in line.split("|")[3]
    mended = softmax(1 / 2**0.5, 0) + torch.tensor([3, 2])  # round 0 with the scale, round 1 as on the page
    shares = softmax(*(TOKENS @ TOKENS[0] / 2**0.5)).reshape(4, 2).sum(1)
    exact = naive_attention(X, X, X)[0, 0, 0]
    expected = [3.731, 2.269, *mended, *total / 4, *shares, *exact, 2.269]
    np.testing.assert_allclose(decimals(moral), [float(x) for x in expected], atol=5.001e-4)
    assert "No value of the example is above 3," in moral
    assert TOKENS.max() == 3


def test_the_page_is_shown_whole(capsys):
    printed = run(capsys)
    assert printed.count("right\n") == 18
    assert printed.count("wrong, see") == 18
    assert "ok    18 of the 36 rows are wrong" in printed
    for letter in published.explanations():
        assert f"\n  {letter}  " in printed
    assert max(len(line) for line in printed.splitlines()) <= 100
    assert "\033" not in printed


@pytest.mark.parametrize(("printed", "letter"), [((0.731, 0.269), ""), ((0.670, 0.330), "A")])
def test_a_wrong_row_without_explanation_and_a_right_one_with_it_exit_1(monkeypatch, capsys, printed, letter):
    row = (0, 0, "weights", (printed, (0.330, 0.670)), (letter, ""))
    monkeypatch.setattr(published, "PUBLISHED", [row])
    assert published.main() == 1
    assert "WRONG" in capsys.readouterr().out
