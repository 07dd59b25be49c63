"""The errata of the paper and of a published page: each mistake is found, each number that explains one is right."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import worked_example as example
from notebooks.source import paper_tables
from notebooks.source import published_example as published
from ringlab.basics.naive_attention import TOKENS
from tests.commands import check_shown

# The appendix of errata ----------------------------------------------------------------------------------------------

TEXT = (Path(__file__).parents[2] / "notebooks/appendix_errata.md").read_text()


def test_it_shows_what_the_command_prints(capsys):
    command, shown = re.search(r"```console\n\$ (.*?)\n(.*?)```", TEXT, re.S).groups()
    assert command == "python -m notebooks.source.paper_tables"
    assert paper_tables.main() == 0
    check_shown(shown, capsys.readouterr().out)


# The published page of the worked example ----------------------------------------------------------------------------


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


@pytest.mark.parametrize(("printed", "letter"), [((0.731, 0.269), ""), ((0.670, 0.330), "A")])
def test_a_wrong_row_without_explanation_and_a_right_one_with_it_exit_1(monkeypatch, capsys, printed, letter):
    row = (0, 0, "weights", (printed, (0.330, 0.670)), (letter, ""))
    monkeypatch.setattr(published, "PUBLISHED", [row])
    assert published.main() == 1
    assert "WRONG" in capsys.readouterr().out
