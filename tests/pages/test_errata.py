"""The errata of the paper and of a published page: each mistake is found, each number that explains one is right."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import worked_example as example
from notebooks.source import paper_tables
from notebooks.source import published_example as published
from notebooks.source.paper_tables import TABLE_1, TABLE_3, largest_activations
from ring_planner.hidden_communication import LLAMA_7B, TABLE_2, AttentionLayer
from ring_planner.memory import peak_bytes_backward
from ringlab.basics.naive_attention import TOKENS, naive_attention
from tests.commands import check_shown

# The appendix of errata ----------------------------------------------------------------------------------------------

TEXT = (Path(__file__).parents[2] / "notebooks/appendix_errata.md").read_text()
SLIPS = re.findall(r"^\| ((?:table|section|appendix|algorithm).*?) \| (.*?) \| (.*?) \| (.*?) \|$", TEXT, re.M)


def slip(where):
    """What was printed, what is right, and why, of the slip in this place."""
    return next(rest for found, *rest in SLIPS if found.startswith(where))


def test_it_shows_what_the_command_prints(capsys):
    command, shown = re.search(r"```console\n\$ (.*?)\n(.*?)```", TEXT, re.S).groups()
    assert command == "python -m notebooks.source.paper_tables"
    assert paper_tables.main() == 0
    check_shown(shown, capsys.readouterr().out)


def test_the_slips_of_table_2():
    _, flops, bandwidth, chunk, sequence = next(row for row in TABLE_2 if row[0] == "A100 InfiniBand")
    printed, right, why = slip("table 2")
    assert printed == f"{chunk}K"
    assert right == f"{flops / bandwidth / 1000:.2f}K"
    assert f"{sequence}K, is six times {sequence / 6:.2f}K and not" in why


def test_the_slips_of_table_1():
    printed, right, _ = slip("table 1, vanilla")
    assert (printed, right) == (TABLE_1["vanilla"][2], TABLE_1["vanilla"][0])
    printed, right, _ = slip("table 1, ring")
    h, c = LLAMA_7B.hidden, 1000
    assert printed == TABLE_1["ring"][0]
    assert right == f"{largest_activations('ring', LLAMA_7B, 8 * c, c)[0] // (h * c)}bch"


def test_the_other_slips():
    assert slip("appendix A, 512 devices")[1] == f"a ring of {512 // 8}"
    assert slip("sections 1 and 2")[1] == f"{100e6 * 1024 * 2 / 1e9:.0f} GB a layer"
    assert round(1000e9 / (100e6 * 1024 * 2)) == 5
    assert len(SLIPS) == 7


def test_what_is_said_of_table_3():
    gains = [(devices, gain) for devices, *_, gain in TABLE_3]
    assert sum(devices == gain for devices, gain in gains) == 8
    assert sum(devices == 2 * gain for devices, gain in gains) == 2
    assert all(length.bit_count() == 1 for *_, blockwise, ring, _ in TABLE_3 for length in (blockwise, ring))
    assert [alone for _, hardware, model, alone, _, _ in TABLE_3 if model == "7B" and "A100" in hardware] == [32, 128]
    state, token = 16 * 32 * 12 * 4096**2, 32 * 2 * 4096 + peak_bytes_backward(LLAMA_7B, 1)  # 16 bytes a parameter
    on_8, on_32 = ((80e9 - state / P) / token for P in (8, 32))
    assert f"that gives {on_32 / on_8:.2f} times the tokens" in TEXT
    assert f"should be {(32 + 1) / (32 + 6):.2f} of the number" in TEXT


def value(formula, **letters):
    """The number that a formula of table 1 stands for: its terms are a number, letters, and perhaps a square."""
    total = 0
    for term in formula.split(" + "):
        number, names, square = re.fullmatch(r"(\d+)([bcnsh]+)(²?)", term).groups()
        total += math.prod([int(number), *(letters[name] for name in names + (names[-1] if square else ""))])
    return total


RIGHT = {  # cells of table 1 whose formula is not ours, and ours
    ("vanilla", 2): "2bns²",  # as in its own row: scores have heads, and no width
    ("ring", 0): "12bch",  # 6 blocks of bch elements are 12bch bytes; all other cells count bytes
    ("ring", 2): "12bch",
}


@pytest.mark.parametrize("method", TABLE_1)
def test_table_1_and_its_two_slips(method):
    for layer, s, c in ((LLAMA_7B, 262_144, 32_768), (AttentionLayer(4, 2, 3), 40, 5)):
        letters = {"b": 1, "n": layer.heads, "s": s, "c": c, "h": layer.hidden}
        ours = largest_activations(method, layer, s, c)
        for column, mine in enumerate((*ours, max(ours))):
            printed, right = TABLE_1[method][column], RIGHT.get((method, column))
            assert mine == value(right or printed, **letters)
            assert right is None or value(printed, **letters) != mine
    wide = largest_activations(method, AttentionLayer(4, 2, 3, itemsize=4), 40, 5)
    assert wide == tuple(2 * each for each in largest_activations(method, AttentionLayer(4, 2, 3), 40, 5))


# The published page of the worked example ----------------------------------------------------------------------------

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


@pytest.mark.parametrize(("printed", "letter"), [((0.731, 0.269), ""), ((0.670, 0.330), "A")])
def test_a_wrong_row_without_explanation_and_a_right_one_with_it_exit_1(monkeypatch, capsys, printed, letter):
    row = (0, 0, "weights", (printed, (0.330, 0.670)), (letter, ""))
    monkeypatch.setattr(published, "PUBLISHED", [row])
    assert published.main() == 1
    assert "WRONG" in capsys.readouterr().out
