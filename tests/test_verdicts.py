"""Every concept runs by itself, its docstring shows what it prints, and every verdict counts for its exit status."""

import ast
import importlib
import math
import re
import textwrap
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ringlab.ring.cases import random_inputs, report_loop, report_ranks
from ringlab.support import drawing
from ringlab.support.rounding import Right, exact_attention
from tests.attention import assert_right
from tests.commands import assert_legible, check_shown
from tests.concepts import CONCEPTS, FOLDERS, ROOT, marked, run
from tests.mistakes import assert_recorded

SCRIPTS = [path for folder in (*FOLDERS, "bench", "book", "ring_doctor") for path in ROOT.glob(f"{folder}/*.py")]
SCRIPTS += [ROOT / "ring_attn.py", ROOT / "worked_example.py"]
SCRIPTS = [path for path in SCRIPTS if re.search(r"__name__ == .*[^_]main\(", path.read_text(), re.S)]


@pytest.mark.parametrize("name", marked(CONCEPTS))
def test_a_concept_checks_itself_and_its_docstring_shows_what_it_prints(name, ranks):
    """On ranks that are there already."""
    status, printed = run(name, lambda work, P, *args: ranks(P, work, *args))
    assert status == 0
    assert "WRONG" not in printed
    text = importlib.import_module(name).__doc__
    command, shown = re.search(r"^    \$ (.*)\n((?:    .*\n)+)", text, flags=re.MULTILINE).groups()
    assert command == f"python -m {name}"
    check_shown(textwrap.dedent(shown), printed)
    assert_recorded(printed)


def dropped(tree):
    """What main reports or compares and drops: its exit status must be made of every verdict, by `ok &= ...`."""
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    calls = [node.value for node in ast.walk(main) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    found = [ast.unparse(call) for call in calls if ast.unparse(call.func).startswith("report")]
    assigned = [node for node in ast.walk(main) if isinstance(node, ast.Assign)]
    assigned = [node for node in assigned if re.search(r"\bok\b", ast.unparse(node.targets[0]))]
    end = re.fullmatch(r"return 0 if (.+) else 1", ast.unparse(main.body[-1]))
    verdict = end is not None and (assigned == [] or re.search(r"\bok\b", end[1]))
    return found + [ast.unparse(node) for node in assigned[1:]] + ([] if verdict else [ast.unparse(main.body[-1])])


@pytest.mark.parametrize("name", sorted({*CONCEPTS} - {"ringlab.basics.ranks"}))  # which asserts on each rank
def test_every_verdict_counts(name):
    assert dropped(ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text())) == []


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_each_of_four_results_counts(wrong):
    four = random_inputs(1, 2, 1, 8, 4)
    right = exact_attention(*four)
    whole = [right[name].exact.float() for name in ("out", "dq", "dk", "dv")]
    if wrong is not None:
        whole[wrong][0, 0, 7, 3] += 1e-3
    of_ranks = list(zip(*(x.chunk(2, dim=2) for x in whole), strict=True))
    assert report_ranks(of_ranks, "contiguous", right) == (wrong is None)


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize(("off", "fine"), [(9e-13, True), (9.2e-13, False), (math.nan, False)])
def test_each_result_of_a_loop_counts(off, fine, i):
    """2^12 roundings are 9.1e-13 of the largest number."""
    right = torch.tensor([1.0, -2.0], dtype=torch.float64)
    results = [right.clone(), right.clone()]
    results[i][0] += 2 * off
    assert report_loop("two", results, [right, right]) == fine


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize(("off", "fine"), [(0.125, True), (-0.126, False), (math.nan, False), (math.inf, False)])
def test_each_number_counts_for_the_suites_own_judge(off, fine, i):
    exact, x = (torch.zeros(2, dtype=torch.float64) for _ in range(2))
    x[i] = off
    with nullcontext() if fine else pytest.raises(AssertionError, match="out: 1 of 2 numbers are wrong"):
        assert_right(x, Right(exact, torch.full_like(exact, 0.125), torch.float64, ""))


@pytest.mark.parametrize("printed", ["a\nb", "a\nb\nc\nd", "a\nx\nb", "a 0.2 s\nd", "", "a\nb\nc 2 s"])
def test_what_is_shown_but_not_printed_is_seen_and_the_other_way_round(printed):
    check_shown("a 0.2 s\n...\nc", "a 1.5 s\nb\nb\nc\n")
    for shown in ("a\nb\nc", "a\n...\nb\nc", "a\nb\n...\ne"):
        with pytest.raises(AssertionError, match=r"shown"):
            check_shown(shown, printed)


def test_a_label_that_nobody_can_read_is_seen():
    """On 900 pixels: 10 pixels high, cut at each side by two, and one over another."""
    fine = {"x": 450, "y": 450, "size": 12, "ha": "center", "va": "center"}
    wrong = ("small", {"size": 6}), ("cut", {"x": 2}), ("cut", {"x": 898}), ("cut", {"y": 2}), ("cut", {"y": 898})
    for words, change in (*wrong, ("overlap", {"y": 452}), ("", {"y": 500})):
        figure = drawing.canvas(900, 900, "")[0]
        labels = [
            figure.text(it["x"] / 900, it["y"] / 900, "label", size=it["size"], ha=it["ha"], va=it["va"])
            for it in (fine, fine | change)
        ]
        FigureCanvasAgg(figure).draw()
        with pytest.raises(AssertionError, match=words) if words else nullcontext():
            assert_legible(figure, labels)


TABLES = {"ring_planner.hidden_communication": ("TABLE_2", 3), "notebooks.source.paper_tables": ("TABLE_3", 5)}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_a_table_counts(name):
    """Half its number or twice is wrong."""
    module, (table, column) = importlib.import_module(name), TABLES[name]
    rows = getattr(module, table)
    for i, row in enumerate(rows):
        if row[0] not in getattr(module, "MISPRINTED", ()):
            found = []
            for n in (0.5, 2):
                changed = (*row[:column], n * row[column], *row[column + 1 :])
                with mock.patch.object(module, table, [*rows[:i], changed, *rows[i + 1 :]]):
                    found.append(run(name)[0])
            assert 1 in found, f"row {row[:3]} is wrong, and main returns 0"


def test_the_exit_status_of_a_script_is_what_its_main_returns():
    for path in SCRIPTS:
        last = ast.unparse(ast.parse(path.read_text()).body[-1]).splitlines()[-1]
        assert re.fullmatch(r"    sys\.exit\((\w+_command\.)?main\((sys\.argv\[1:\]|ring_attention)?\)\)", last), path
