"""Every exercise: right answers are right in every form, each common wrong one gets its own hint."""

import ast
import copy
import linecache
import math
import re
import sys
from functools import cache
from importlib import import_module
from itertools import count

import nbformat
import numpy as np
import pytest
import torch

from notebooks.source import build
from notebooks.source.checks.answers import OPEN, Exercise, NotYet
from notebooks.source.checks.rings_that_were_wrong import contradiction, same_numbers, xray_of_ring
from notebooks.your_ring.checks import ONE_BLOCK, step
from tests.mistakes import assert_recorded
from tests.wrong.tried_answers import RIGHT_ANSWERS, WRONG_ANSWERS, every_third_receives_first

CHAPTERS = [*build.chapters(), build.SOURCES / "appendix_ring_of_states.py"]
NAMES = [source.stem.partition("_")[2] for source in CHAPTERS]  # 04_the_ring -> the_ring
CHECKS = {}  # name of a check -> the chapter and the name of its answer
for chapter in CHAPTERS:
    for check, answer in re.findall(r"print\((check_\w+)\((\w+)\)\)", chapter.read_text()):
        CHECKS[check] = chapter, answer
EXERCISES = sorted(CHECKS)
ASKS = "check_new_mistake"  # the doctor: a second for each answer
EACH = [pytest.param(name, marks=pytest.mark.slow) if name == ASKS else name for name in EXERCISES]


MODULES = [import_module(f"notebooks.source.checks.{path.stem}") for path in build.SOURCES.glob("checks/[a-z]*.py")]
DEFINED = {name: check for module in MODULES for name, check in vars(module).items() if name.startswith("check_")}


def cases(answers, names=CHECKS):
    """(check, answer, words) of each answer; the doctor is slow."""
    found = []
    for name in names:
        for i, (answer, words) in enumerate(answers.get(name, ())):
            marks = pytest.mark.slow if name == ASKS else ()
            found.append(pytest.param(name, answer, words, id=f"{name}-{i}-{words}", marks=marks))
    return found


ROWS = [(check, row) for check in EXERCISES if isinstance(row := DEFINED[check], Exercise)]
HINTS = [
    pytest.param(row, hint, id=f"{name}-{hint}")
    for name, row in [*ROWS, ("one block", ONE_BLOCK)]
    for hint in row.wrong
]


# The solutions -----------------------------------------------------------------------------------------------------


def run(cell, names):
    """The names of a notebook in which this cell has been run; inspect finds its source."""
    file = f"<cell {hash(cell)}>"
    linecache.cache[file] = len(cell), None, cell.splitlines(keepends=True), file
    exec(compile(cell, file, "exec"), names)
    return names


def namespace(chapter, code):
    """What the notebook gives to `code`: the names that it imports, of those that are in the code."""
    found = {"__name__": "__main__"}
    for node in ast.parse(chapter.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            if names & set(re.findall(r"\w+", code)):
                exec(compile(ast.Module([node], []), str(chapter), "exec"), found)
    return found


def solution_code(chapter):
    code = re.search(r"Solutions</summary>.*?```python\n(.*?)# ```", chapter.read_text(), re.S)[1]
    return re.sub(r"(?m)^# ?", "", code)


@cache
def solutions(chapter):
    """The answers as they stand in the notebook, run with what the notebook has: nothing is added here."""
    code = solution_code(chapter)
    return run(code, namespace(chapter, code))


def solution(check):
    chapter, answer = CHECKS[check]
    return solutions(chapter)[answer]


@pytest.mark.parametrize("source", CHAPTERS, ids=NAMES)
def test_the_exercises_are_open(source):
    """Each check's cell says so, as it was committed and as the source has it now."""
    notebook = nbformat.read(build.pair(source), as_version=4)
    said = ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in notebook.cells]
    still_open = sum(text.strip() == OPEN for text in said)
    assert still_open == sum(chapter == source for chapter, _ in CHECKS.values())


def test_every_check_has_an_exercise_and_wrong_answers():
    assert CHECKS.keys() == DEFINED.keys() == WRONG_ANSWERS.keys() | dict(ROWS).keys()
    assert [name for name, row in ROWS if bool(row.said) == isinstance(row.cases, dict)] == []


# Right answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", EACH)
def test_the_solution_is_right_and_what_is_not_answered_is_open(check):
    right, judge = solution(check), DEFINED[check]
    assert judge(right).startswith("right")
    assert judge((lambda *args: ...) if callable(right) else ...) == OPEN
    if isinstance(right, list | tuple):
        assert judge([*right[:-1], ...]) == OPEN


@pytest.mark.slow
def test_the_ring_of_chapter_4_passes_its_step_of_the_workshop():
    chapter = build.SOURCES / "04_the_ring.py"
    assert step(2, solutions(chapter)["my_ring"], 60) == "step 2 · a ring of messages: right"


@pytest.mark.parametrize("check", RIGHT_ANSWERS)
def test_other_right_answers_are_right(check):
    said = [DEFINED[check](answer) for answer in RIGHT_ANSWERS[check]]
    assert all(line.startswith("right") for line in said), said


# What is asked -----------------------------------------------------------------------------------------------------


def told(x):
    """What is right in a case, as text; of a tensor its shape and the sum of its sizes."""
    if isinstance(x, torch.Tensor) and x.ndim:
        return f"{' x '.join(map(str, x.shape))} of {x.double().abs().nan_to_num().sum():.3g}"
    if isinstance(x, dict):
        return ", ".join(f"{name} {told(value)}" for name, value in x.items())
    return f"{x:.3g}" if isinstance(x, float) else str(sorted(x) if isinstance(x, set) else x)


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_each_case_is_asked(name, row):
    groups, rights = row.cases if isinstance(row.cases, dict) else {row.said: row.cases}, [name]
    for words, cases in groups.items():
        rights.append(f"{words}: {' | '.join(told(row.of(row.right, case)) for case in cases)}")
    assert_recorded("\n".join(rights))


def test_an_order_in_which_messages_wait_in_a_row_is_no_deadlock_and_slow():
    said = DEFINED["check_ring_order"](every_third_receives_first)
    assert said.startswith("right: no deadlock, but 4 ranks need 3 phases")
    assert DEFINED["check_ring_order"](solution("check_ring_order")) == "right"


@pytest.mark.parametrize(("off", "same"), [(0.9e-9, True), (1.1e-9, False), (math.nan, False)])
def test_the_numbers_of_a_mistake_are_compared_up_to_rounding(off, same):
    x = torch.zeros(3, dtype=torch.float64)
    shown, guessed = xray_of_ring("C"), copy.deepcopy(xray_of_ring("C"))
    x[2] += off
    guessed.matrices[-1].sheet.seen[0, 0] += off
    assert same_numbers({"out": x}, {"out": 0 * x.nan_to_num()}) == same
    assert (contradiction(shown, guessed) is None) == same


# Wrong answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("check", "answer", "words"), cases(WRONG_ANSWERS))
def test_a_wrong_answer_is_told_why(check, answer, words):
    said = DEFINED[check](answer)
    assert said.startswith("not yet: ")
    assert words in said


def as_answer(row, wrong):
    """The wrong value of a row, or its function, as a reader would give it: of several values, the others are right."""

    def answer(*case):
        right, given = row.of(row.right, case), row.of(wrong, case)
        return tuple((right | given).values()) if isinstance(right, dict) else given

    return answer if callable(row.right) else answer()


@pytest.mark.parametrize(("row", "hint"), HINTS)
def test_a_common_mistake_gets_its_own_hint(row, hint):
    said = row(as_answer(row, row.wrong[hint]))
    assert re.fullmatch(rf"not yet: (\w+: )?{re.escape(hint)}", said)


# What a row says of answers of every kind ---------------------------------------------------------------------------


def in_place(x):
    x += 1
    return x.add_(x)


X = torch.tensor([1.0, -2.0])
GROWS = Exercise(
    right=lambda x: 2 * x + 2,
    wrong={"the 2 is missing": lambda x: 2 * x, "that is half of it": lambda x: x + 1},
    cases={
        **{"twice x and 2": [(X,), (X[:1],)], "large ones": [(100 * X,)]},
        "infinite ones": [(X / 0,), (X / torch.tensor([0, 0.5]),)],
    },
)
NUMBER = Exercise(
    right=lambda n: 3 * n,
    wrong={"that is n": lambda n: n, "that is its square": lambda n: n * n, "no value": lambda n: n / 0},
    said="three times n",
    cases=[(3,), (2,), (1,), (0,), (10**7,)],
    remark="triple",
)
PARTS = Exercise(right={"a": 1.53, "b": X}, wrong={"b has the other sign": {"b": -X}}, said="1.53 and x", decimals=2)
PAIR = Exercise(right={"a": 1.0, "b": 2.0}, said="1 and 2")
PLACES = Exercise(right=[1, 2], said="two")
PAIRS = Exercise(right=lambda n: {(n, 1), (n, 2)}, said="pairs", cases=[(1,), (2,)])
CAPPED = Exercise(right=lambda: 1.0, said="one", then=lambda answer: check_again(answer()))
JUDGED = [  # an exercise, an answer, what is said of it
    (GROWS, lambda x: (2 * x + 2).numpy(), "right"),
    (GROWS, lambda x: [2 * each + 2 for each in x.tolist()], "right"),
    (GROWS, lambda x: tuple(2 * each + 2 for each in x), "right"),
    (GROWS, lambda x: (2 * x + 2).requires_grad_(), "right"),
    (GROWS, in_place, "right"),
    (GROWS, lambda x: 2 * x, "not yet: the 2 is missing"),
    (GROWS, lambda x: 2.1 * x + 2, "not yet: x = [1.0, -2.0]: off by up to 0.2: twice x and 2"),
    (GROWS, lambda x: 2 * x + 2 if x.abs().max() < 9 else x, "not yet: x = [100.0, -200.0]: off by up to 198: large"),
    (GROWS, lambda x: (2 * x + 2).clamp(-1e9, 1e9), "not yet: x = [inf, -inf]: off by up to inf: infinite"),
    (GROWS, lambda x: torch.where(x == -4, x, 2 * x + 2), "not yet: x = [inf, -4.0]: off by up to 2: infinite"),
    (GROWS, lambda x: 2 * x[:1] + 2, "not yet: x = [1.0, -2.0]: expected shape (2,), got (1,)"),
    (GROWS, lambda x: x / 0 - x / 0, "not yet: x = [1.0, -2.0]: there are NaNs in it"),
    (GROWS, lambda x: 1j * x, "not yet: x = [1.0, -2.0]: expected real numbers, got complex ones"),
    (GROWS, lambda x: {}, "not yet: x = [1.0, -2.0]: expected a tensor of shape (2,), got dict"),
    (GROWS, lambda x: [[1.0], [1.0, 2.0]], "not yet: x = [1.0, -2.0]: expected a tensor of shape (2,), got list"),
    (GROWS, lambda: X, "not yet: your answer ends in TypeError"),
    (GROWS, lambda x: sys.exit(), "not yet: your answer ends in SystemExit"),
    (GROWS, X, "not yet: expected a function, got Tensor"),
    (NUMBER, lambda n: np.int64(3 * n), "right: triple"),
    (NUMBER, lambda n: torch.tensor([3.0 * n]), "right: triple"),
    (NUMBER, lambda n: (1 + 0.9e-6) * 3 * n + 1e-13, "right: triple"),
    (NUMBER, lambda n: (1 + 1.1e-6) * 3 * n, "not yet: n = 3: you say 9.0"),
    (NUMBER, lambda n: 3 * n + 1e-9, "not yet: n = 0: you say 1e-09"),
    (NUMBER, lambda n: 3 * n + (n > 9), "not yet: n = 10,000,000: you say 30,000,001"),
    (NUMBER, lambda n: math.nan, "not yet: n = 3: you say nan"),
    (GROWS, lambda x: 2 * x + 2 + 5e-5 * x.abs().max().clamp(max=1), "right"),  # 1e-5 of 4, and of itself
    (GROWS, lambda x: 2 * x + 2 + 9e-5 * x.abs().max().clamp(max=1), "not yet: x = [1.0, -2.0]: off by up to 9"),
    (NUMBER, lambda n: n, "not yet: that is n"),
    (NUMBER, lambda n: n * n, "not yet: that is its square"),  # right in the first case
    (NUMBER, lambda n: n if n == 2 else 3 * n, "not yet: n = 2: you say 2: three times n"),
    (NUMBER, lambda n: True, "not yet: expected a number, got bool"),
    (NUMBER, lambda n: torch.ones(2), "not yet: expected one number, got a Tensor of shape (2,)"),
    (PARTS, [np.float32(1.53), X.tolist()], "right"),
    (PARTS, (1.53, -X), "not yet: b: b has the other sign"),
    (PARTS, (1.5, X), "not yet: a: 1.5 is right but not exact enough: give 2 decimals"),
    (PARTS, (1.49, X), "not yet: a: you say 1.49: 1.53 and x"),
    (PARTS, (1.535, X), "right"),
    (PARTS, (1.5352, X), "not yet: a: you say 1.5352"),
    (PARTS, (math.nan, X), "not yet: a: you say nan"),
    (PARTS, (X, 1.53), "not yet: the right values in another order, b, a: return a, b"),
    (PARTS, (1.53,), "not yet: expected 2 values (a, b), got 1 value(s)"),
    (PARTS, lambda: 1, "not yet: expected a value, not a function, got function"),
    (PAIR, torch.tensor([1.0, 2.0]), "right"),
    (PLACES, np.array([1, 2]), "right"),
    (PLACES, range(1, 3), "right"),
    (PLACES, (torch.tensor(1), 2.0), "right"),
    (PLACES, [2, 1], "not yet: you say [2, 1]: two"),
    (PLACES, (1 / (i < 60_000) for i in count()), "not yet: you say <generator"),  # so many are not asked for
    (PLACES, 3, "not yet: expected a list of 2, got int"),
    (PLACES, "12", "not yet: expected a list of 2, got str"),
    (PAIRS, lambda n: [[n, 2], (n, np.int64(1))], "right"),
    (PAIRS, lambda n: {(n, 1)}, "not yet: n = 1: you say {(1, 1)}: pairs"),
    (CAPPED, lambda: 1.0, "not yet: not again"),
]


def check_again(given):
    assert given == 1.0
    raise NotYet("not again")


@pytest.mark.parametrize(
    ("row", "answer", "words"), JUDGED, ids=[f"{i}-{words}" for i, (*_, words) in enumerate(JUDGED)]
)
def test_a_row_tells_right_from_wrong_in_every_form(row, answer, words):
    assert (said := row(answer)).startswith(words)
    assert words != "right" or said == words
