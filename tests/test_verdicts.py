"""Every concept runs by itself, its docstring shows what it prints, and every verdict counts for its exit status.

The checks of a concept are calls of `report` and its like, or comparisons of the results of other functions.
"""

import ast
import importlib
import itertools
import os
import re
import textwrap
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from ringlab.ring.cases import random_inputs, report_ranks
from ringlab.support.rounding import exact_attention
from tests.commands import check_shown
from tests.concepts import CONCEPTS, FOLDERS, ROOT, is_concept, marked, run, run_again, run_concept

SCRIPTS = [path for folder in (*FOLDERS, "bench") for path in ROOT.glob(f"{folder}/*.py")]
SCRIPTS = [path for path in SCRIPTS if "\ndef main(" in path.read_text() and is_concept(path)]


def test_what_is_run_once_is_run_on_one_worker(request):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith("@concepts")


@pytest.mark.parametrize("name", marked(CONCEPTS))
def test_a_concept_checks_itself_and_its_docstring_shows_what_it_prints(name):
    seen, text = run_concept(name), importlib.import_module(name).__doc__
    assert seen.status == 0
    assert "WRONG" not in seen.printed
    command, shown = re.search(r"^    \$ (.*)\n((?:    .*\n)+)", text, flags=re.MULTILINE).groups()
    assert command == f"python -m {name}"
    check_shown(textwrap.dedent(shown), seen.printed)


@pytest.mark.parametrize("name", marked([*CONCEPTS, "ring_attn"]))  # what the ring prints: tests/pages/test_pages.py
def test_a_docstring_has_every_part(name):
    text = importlib.import_module(name).__doc__
    assert [part for part in ("Shapes: ", "Before: ", "After: ", "Source: ") if part not in text] == []


def reports_of(name):
    """Those of `report`, `report_ranks` and `report_cases` that the main of a concept calls."""
    _, _, main = ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text().partition("\ndef main")
    return [function for function in ("report", "report_ranks", "report_cases") if f" {function}(" in main]


REPORTING = [name for name in CONCEPTS if reports_of(name)]
COMPARED = {  # the functions whose results main compares without `report`: a wrong result, and the calls it compares
    "ringlab.basics.blocking_messages": {
        "simulate_messages": (lambda seen: replace(seen, waits_for=seen.waits_for or {0: 1}, cycle=[]), range(3, 17))
    },
    "ringlab.ring.layouts": {
        "unshard": (lambda x: x + 1, range(5)),
        "rotary": (lambda x: x + 1, range(1, 5)),  # 0: of the whole; 5 to 8: wrong ones
    },
    "ringlab.ring.causal": {"times_computed": (lambda times: times + 1, range(3))},
    "ringlab.ring.fused_block": {
        "fused_backward": (lambda gradients: [x + 1e-9 for x in gradients], [0, 1]),
    },
    "ringlab.ring.masks": {"Mask": (lambda mask: replace(mask, window=3), [0])},
    "ringlab.ring.partition": {"covered": (lambda drawn: drawn + 1, range(3))},
    "ringlab.ring.schedule": {
        "launch": (lambda of_ranks: [[*seen[:-1], (*seen[-1][:2], 0)] for seen in of_ranks], [0])
    },
    "ringlab.states.linear_attention": {
        "linear_attention": (lambda results: (results[0] + 1e-9, results[1]), range(6))
    },
    "ringlab.states.state_ring": {
        "launch": (lambda of_ranks: [[part + 1e-9 for part in parts] for parts in of_ranks], range(4))
    },
    "ringlab.states.short_convolution": {
        "launch": (lambda of_ranks: [(out, gradient + 1e-9) for out, gradient in of_ranks], [0])
    },
    "ringlab.ring.documents": {
        "mean_loss": (lambda loss: loss + 1e-9, [0, 1, 2, 6, 7, 8]),  # 3 to 5: wrong ones
    },
    "ring_planner.hidden_communication": {
        "min_overlap_chunk": (lambda chunk: 0.9 * chunk, [0, 2, 3, 4])
    },  # 1: misprinted
    "ring_planner.pass_q_or_kv": {
        "published": (
            lambda turn: SimpleNamespace(
                sent=turn.sent, seconds=turn.seconds[::-1], share_for_keys=turn.share_for_keys
            ),
            range(1, 8),
        )
    },
    "ringlab.models.transformer": {
        "launch": (lambda of_ranks: [[*cases[:-1], (cases[-1][0], 0)] for cases in of_ranks], [0])  # no hops
    },
    "ringlab.models.mesh": {
        "launch": (lambda of_ranks: [[(name, ratio, 1.0) for name, ratio, _ in rows] for rows in of_ranks], [0])
    },
    "ringlab.models.generate": {
        "launch": (lambda of_ranks: [(tokens + 1, stored) for tokens, stored in of_ranks], [0])
    },
    "ringlab.models.generate_states": {
        "launch": (lambda of_ranks: [(tokens + 1, kept) for tokens, kept in of_ranks], [0])
    },
}
ELSEWHERE = {
    "ringlab.basics.ranks": "an assert on each rank, which ends the job",
}


class Verdict:
    """What our `report` returns: false, joined by `&`, and noted when main tests whether it is true."""

    tested = frozenset()

    def __init__(self, *numbers):
        self.numbers = frozenset(numbers)

    def __and__(self, other):
        return Verdict(*self.numbers, *(other.numbers if isinstance(other, Verdict) else ()))

    __rand__ = __and__

    def __bool__(self):
        Verdict.tested = self.numbers
        return False


@pytest.mark.parametrize("name", marked(REPORTING))
def test_every_report_counts(name):
    """The last verdict that main tests, which decides its exit status, is made of all."""
    reported = []

    def report(*args):
        reported.append(args[0] if isinstance(args[0], str) else f"call {len(reported)}")
        return Verdict(len(reported) - 1)

    Verdict.tested = frozenset()
    assert run_again(name, dict.fromkeys(reports_of(name), lambda _: report)) == 1
    assert reported
    dropped = [text for i, text in enumerate(reported) if i not in Verdict.tested]
    assert not dropped, f"main reports this and drops the verdict: {dropped}"


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_each_of_four_results_counts(wrong):
    four = random_inputs(1, 2, 1, 8, 4)
    right = exact_attention(*four)
    whole = [right[name].exact.float() for name in ("out", "dq", "dk", "dv")]
    if wrong is not None:
        whole[wrong][0, 0, 7, 3] += 1e-3
    of_ranks = list(zip(*(x.chunk(2, dim=2) for x in whole), strict=True))
    assert report_ranks(of_ranks, "contiguous", right) == (wrong is None)


@pytest.mark.parametrize("name", marked(COMPARED))
def test_every_comparison_counts(name):
    for each, (spoil, calls) in COMPARED[name].items():
        for call in calls:

            def spoiled(function, spoil=spoil, call=call):
                numbers = itertools.count()
                return lambda *args, **options: (
                    spoil(function(*args, **options)) if next(numbers) == call else function(*args, **options)
                )

            assert run_again(name, {each: spoiled}) == 1, f"call {call} of {each} is wrong, and main returns 0"


def test_every_concept_has_a_check():
    """Name the functions whose results main compares, in COMPARED."""
    assert set(CONCEPTS) == {*REPORTING, *COMPARED, *ELSEWHERE}


@pytest.mark.parametrize(
    ("name", "table", "column"),
    [("ring_planner.hidden_communication", "TABLE_2", 3), ("notebooks.source.paper_tables", "TABLE_3", 5)],
)
def test_every_row_of_a_table_counts(name, table, column):
    module = importlib.import_module(name)
    rows = getattr(module, table)
    for i, row in enumerate(rows):
        if row[0] not in getattr(module, "MISPRINTED", ()):
            changed = (*row[:column], row[column] + 1, *row[column + 1 :])
            with mock.patch.object(module, table, [*rows[:i], changed, *rows[i + 1 :]]):
                assert run(module.__name__, {})[0] == 1, f"row {row[:3]} is wrong, and main returns 0"


def test_the_exit_status_of_a_script_is_what_its_main_returns():
    ends = [f"if __name__ == '__main__':\n    sys.exit(main({words}))" for words in ("", "sys.argv[1:]")]
    for path in SCRIPTS:
        assert ast.unparse(ast.parse(path.read_text()).body[-1]) in ends, path
