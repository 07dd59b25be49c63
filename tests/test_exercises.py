"""Every exercise: its solution is right, the chapter leaves it open, its check rejects wrong answers and says why."""

import linecache
import math
import re
from importlib import import_module

import nbformat
import pytest
import torch

from notebooks import build
from notebooks.checks.answers import OPEN
from ringlab.basics.blocking_messages import Recv, Send

CHAPTERS = build.chapters()
NAMES = [source.stem.partition("_")[2] for source in CHAPTERS]  # 04_the_ring -> the_ring
WRONG_ANSWERS = [
    pytest.param(check, answer, reason, id=f"{check.__name__}-{reason}")
    for name in NAMES
    for check, answer, reason in import_module(f"tests.wrong_answers.{name}").WRONG_ANSWERS
]


def exercises(source) -> list[tuple[str, str]]:
    """The name of the check and of the answer of every exercise of a chapter."""
    return re.findall(r"print\((check_\w+)\((\w+)\)\)", source.read_text())


def checks_of(name):
    return import_module(f"notebooks.checks.{name}")


@pytest.mark.parametrize(("source", "name"), list(zip(CHAPTERS, NAMES, strict=True)), ids=NAMES)
def test_the_solutions_are_right(source, name):
    solutions = re.search(r"Solutions</summary>.*?```python\n(.*?)# ```", source.read_text(), re.S)[1]
    solutions = re.sub(r"(?m)^# ?", "", solutions)
    answers = {"torch": torch, "math": math, "Send": Send, "Recv": Recv}
    file = f"<solutions of {name}>"  # where inspect finds their source, as it finds that of a cell
    linecache.cache[file] = (len(solutions), None, solutions.splitlines(keepends=True), file)
    exec(compile(solutions, file, "exec"), answers)
    for check, answer in exercises(source):
        assert getattr(checks_of(name), check)(answers[answer]).startswith("right"), answer


@pytest.mark.parametrize("source", CHAPTERS, ids=NAMES)
def test_the_exercises_are_open(source):
    """Each check's cell says so, as it was committed and as the source has it now."""
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    said = ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in notebook.cells]
    still_open = sum(text.strip() == OPEN for text in said)
    assert still_open == len(exercises(source))


@pytest.mark.parametrize("name", NAMES)
def test_every_check_has_an_exercise_and_wrong_answers(name):
    wanted = {check for check, _ in exercises(CHAPTERS[NAMES.index(name)])}
    defined = {check for check in vars(checks_of(name)) if check.startswith("check_")}
    wrong = {check.__name__ for check, *_ in import_module(f"tests.wrong_answers.{name}").WRONG_ANSWERS}
    assert wanted == defined == wrong


@pytest.mark.parametrize(("check", "answer", "reason"), WRONG_ANSWERS)
def test_a_wrong_answer_is_told_why(check, answer, reason):
    said = check(answer)
    assert said.startswith("not yet: ")
    assert reason in said
