"""Every exercise: right answers are right in every form, each common wrong one gets its own hint."""

import ast
import linecache
import re
import sys
from collections import Counter
from functools import cache, partial
from importlib import import_module
from itertools import count
from unittest import mock

import nbformat
import numpy as np
import pytest
import torch

from notebooks.source import build, trial
from notebooks.source.checks import answers, the_ring
from notebooks.source.checks.answers import OPEN, Exercise
from notebooks.source.trial import Ran, RingFailed, Waiting, cell_of, run_cell, whole_input
from ring_doctor.asking.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.mistakes.paper_ring import RIGHT, compute
from ringlab.basics.naive_attention import naive_attention
from ringlab.support.messages import Message
from tests.wrong import readers_rings
from tests.wrong.readers_rings import QUICK, RIGHT_RINGS, WAITING_RINGS
from tests.wrong.tried_answers import RIGHT_ANSWERS, WRONG_ANSWERS, one_rank_receives_first

CHAPTERS = [*build.chapters(), build.SOURCES / "appendix_ring_of_states.py"]
NAMES = [source.stem.partition("_")[2] for source in CHAPTERS]  # 04_the_ring -> the_ring
PROCESSES = {"check_ring"}  # its answers travel to other processes
CHECKS = {}  # name of a check -> the chapter and the name of its answer
for chapter in CHAPTERS:
    for check, answer in re.findall(r"print\((check_\w+)\((\w+)\)\)", chapter.read_text()):
        CHECKS[check] = chapter, answer
EXERCISES = sorted(CHECKS.keys() - PROCESSES)
ASKS = "check_new_mistake"  # the doctor: a second for each answer
EACH = [pytest.param(name, marks=pytest.mark.slow) if name == ASKS else name for name in EXERCISES]


def checks_of(name):
    return import_module(f"notebooks.source.checks.{name}")


def check_named(name):
    return getattr(checks_of(CHECKS[name][0].stem.partition("_")[2]), name)


def cases(answers, names=CHECKS):
    """(check, answer, words) of each answer; slow are the doctor and, but for some, rings on other processes."""
    found = []
    for name in names:
        for i, (answer, words) in enumerate(answers.get(name, ())):
            slow = name == ASKS or (name in PROCESSES and not any(answer is ring for ring in QUICK))
            marks = pytest.mark.slow if slow else ()
            found.append(pytest.param(name, answer, words, id=f"{name}-{i}-{words}", marks=marks))
    return found


ROWS = [
    (name, hint) for name in EXERCISES if isinstance(check_named(name), Exercise) for hint in check_named(name).wrong
]

# The solutions -----------------------------------------------------------------------------------------------------


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
    found, file = namespace(chapter, code), f"<solutions of {chapter.stem}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)  # where inspect finds their source
    exec(compile(code, file, "exec"), found)
    return found


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
    defined = {check for name in NAMES for check in vars(checks_of(name)) if check.startswith("check_")}
    assert CHECKS.keys() == defined == WRONG_ANSWERS.keys() | {check for check, *_ in ROWS}


# Right answers in other forms --------------------------------------------------------------------------------------


def recast(value, leaf, sequence=lambda items: items):
    """The same answer with each tensor and number changed by `leaf`, each list and tuple of them by `sequence`."""
    if isinstance(value, dict):
        return {key: recast(x, leaf, sequence) for key, x in value.items()}
    if isinstance(value, list | tuple | set | range):
        return sequence(
            type(value)(recast(x, leaf, sequence) for x in value) if not isinstance(value, range) else value
        )
    is_number = isinstance(value, torch.Tensor | int | float) and not isinstance(value, bool)
    return leaf(value) if is_number else value


def to_numpy(x):
    return x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)[()]


def to_float(x):
    return x if isinstance(x, torch.Tensor) and x.ndim else float(x)


def to_float32(x):
    floating = isinstance(x, float) or (isinstance(x, torch.Tensor) and x.is_floating_point())
    return torch.as_tensor(x, dtype=torch.float32) if floating else x


def to_list(x):
    return x.tolist() if isinstance(x, torch.Tensor) else x


FORMS = {
    "numpy": lambda value: recast(value, to_numpy),
    "tensors of no dimension": lambda value: recast(value, torch.as_tensor),
    "floats": lambda value: recast(value, to_float),
    "float32": lambda value: recast(value, to_float32),
    "lists": lambda value: recast(value, to_list, lambda items: items if isinstance(items, set) else list(items)),
    "tuples": lambda value: recast(value, lambda x: x, tuple),
}


def spoil(x):
    """Overwrite what a caller passed."""
    if isinstance(x, torch.Tensor):
        x.zero_()
    elif isinstance(x, list):
        for item in x:
            spoil(item)
        x.clear()


def copied(value):
    return recast(value, lambda x: x.clone() if isinstance(x, torch.Tensor) else x)


def works_in_place(function, *args):
    """Returns what is right, and uses up its arguments."""
    given = copied(function(*args))
    spoil(list(args))
    return given


@pytest.mark.parametrize("check", EACH)
def test_the_solution_is_right_in_every_form(check):
    right, judge = solution(check), check_named(check)
    if check == ASKS:  # Steps have no other form, and each try takes a second
        tried = {"as it stands": right}
    elif callable(right):
        tried = {name: partial(lambda form, *args: form(right(*args)), form) for name, form in FORMS.items()}
        tried["in place"] = partial(works_in_place, right)
    else:
        tried = {name: form(right) for name, form in FORMS.items()}
    said = {name: judge(answer) for name, answer in tried.items()}
    assert {name: line for name, line in said.items() if not line.startswith("right")} == {}


@pytest.mark.slow
@pytest.mark.parametrize("ring", [None, *RIGHT_RINGS])
def test_right_rings_are_right(ring, monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 1e6)  # a busy machine is no mistake
    assert check_named("check_ring")(ring or solution("check_ring")).startswith("right: full attention")


@pytest.mark.parametrize("check", RIGHT_ANSWERS)
def test_other_right_answers_are_right(check):
    said = [check_named(check)(answer) for answer in RIGHT_ANSWERS[check]]
    assert all(line.startswith("right") for line in said), said


# What is asked -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("P", [2, 3, 4, 5])
def test_no_two_steps_of_overlap_may_change_places(P):
    right = solution("check_overlap_order")
    for i in range(len(right(P)) - 1):
        steps = list(right(P))
        steps[i : i + 2] = reversed(steps[i : i + 2])
        said = check_named("check_overlap_order")(lambda given, steps=steps: steps if given == P else right(given))
        assert said.startswith("not yet: "), steps


def test_an_order_in_which_messages_wait_in_a_row_is_no_deadlock_and_slow():
    said = check_named("check_ring_order")(one_rank_receives_first)
    assert said.startswith("right: no deadlock, but 4 ranks need 4 phases")
    assert check_named("check_ring_order")(solution("check_ring_order")) == "right"


# Wrong answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("check", "answer", "words"), cases(WRONG_ANSWERS))
def test_a_wrong_answer_is_told_why(check, answer, words):
    said = check_named(check)(answer)
    assert said.startswith("not yet: ")
    assert words in said


def as_answer(right, wrong):
    """The wrong value of a row, or its function, as a reader would give it: of several values, the others are right."""
    if callable(right):
        return lambda *case: as_answer(right(*case), wrong(*case))
    return tuple((right | wrong).values()) if isinstance(right, dict) else wrong


@pytest.mark.parametrize(("check", "hint"), ROWS)
def test_a_common_mistake_gets_its_own_hint(check, hint):
    row = check_named(check)
    said = row(as_answer(row.right, row.wrong[hint]))
    parts = [f"{part}: " for part in row.right] if isinstance(row.right, dict) else [""]
    assert said in [f"not yet: {part}{hint}" for part in ["", *parts]] or re.fullmatch(
        rf"not yet: \w+: {re.escape(hint)}", said
    )


@pytest.mark.parametrize(("check", "answer", "words"), cases({"check_ring": WAITING_RINGS}))
def test_a_ring_that_waits_for_ever_is_told_why(check, answer, words, monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 1.0)
    assert words in check_named(check)(answer)


def broken(value):
    """The value with its first or its last part changed or left out."""
    if isinstance(value, torch.Tensor) and value.ndim:
        for at in sorted({0, value.numel() - 1}):
            part = value.clone().reshape(-1)
            part[at] = ~part[at] if value.dtype == torch.bool else part[at].nan_to_num(neginf=0) + 1
            yield part.reshape(value.shape)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | torch.Tensor):
        yield value + max(1, abs(int(value)) // 100)
    elif isinstance(value, float):
        yield 1.01 * value + 0.01
    elif isinstance(value, str):
        yield f"{value}_"
    elif isinstance(value, dict):
        yield from (value | {key: x} for key in value for x in broken(value[key]))
    elif isinstance(value, list | tuple | set | range):
        found = list(value)
        parts = range(len(found)) if isinstance(value, tuple) else sorted({0, max(len(found) - 1, 0)})
        if not isinstance(value, tuple):
            yield from (found[1:], found[:-1]) if found else ([0],)
        yield from ([*found[:at], x, *found[at + 1 :]] for at in parts if found for x in broken(found[at]))


def broken_once(right, at, way):
    """The right answer but for call number `at`, whose value is broken in this way; and whether there is such a way."""
    calls, done = count(), []

    def answer(*args):
        given = right(*args)
        if next(calls) != at:
            return given
        done.extend(list(broken(given))[way : way + 1])
        return done[0] if done else given

    return answer, done


@pytest.mark.parametrize("check", EACH)
def test_what_is_wrong_in_one_call_only_is_refused(check):
    """In its first or last element, in some calls of all kinds: the first, the last, and 15 between them."""
    right, judge = solution(check), check_named(check)
    if check == ASKS:
        pytest.skip("its answer is a mistake, and one that is changed is another")
    if not callable(right):
        assert [judge(answer)[:7] for answer in broken(right)] == ["not yet"] * len(list(broken(right)))
        return
    calls = []
    assert judge(lambda *args: (calls.append(0), right(*args))[1]).startswith("right")
    for at in sorted({*range(0, len(calls), 1 + len(calls) // 16), len(calls) - 1}):
        for way in count():
            answer, done = broken_once(right, at, way)
            said = judge(answer)
            if not done:  # no such way, or what is drawn has taken fewer calls
                break
            assert said.startswith("not yet: "), (at, done)


def endless(*args):
    while True:
        pass


VALUES = {  # wrong for every check that wants a value, and as the result of every function
    "None": None,
    "a word": "right",
    "a dict": {},
    "nothing": [],
    "nan": float("nan"),
    "infinity": float("inf"),
    "True": True,
    "complex": 1j,
    "a set": {1, 2},
    "ragged lists": [[1.0], [1.0, 2.0]],
    "a tensor of two": torch.ones(2),
}


def key_of(args):
    return repr([x.shape if isinstance(x, torch.Tensor) else x for x in args])


def wrong_everywhere(right, judge):
    """Answers to an exercise with a function that are wrong for every check."""
    table, first, spoilable = {}, [], []

    def recorded(*args):
        spoilable.append(any(isinstance(x, torch.Tensor | list) for x in args))
        given = copied(right(*args))
        table[key_of(args)] = given
        first.append((copied(list(args)), given))
        return given

    with mock.patch.object(answers, "DRAWS", 0):
        assert judge(recorded).startswith("right")

    def spoils(*args):
        spoil(list(args))
        return right(*args)

    def looks_up(*args):  # by the numbers or the sizes that a check is known to try
        return copied(table.get(key_of(args), first[0][1]))

    own = {"spoiled inputs": spoils} if any(spoilable) else {}
    return own | {
        "a table of the cases": looks_up,
        "a constant": lambda *args: copied(first[0][1]),
        "its first input": lambda *args: args[0],
        "its last input": lambda *args: args[-1],
        **{name: partial(lambda value, *args: value, value) for name, value in VALUES.items()},
        "a function": lambda *args: right,
        "no parameters": lambda: None,
        "too many parameters": lambda *, a, b, c, d, e, f, g, h: None,
        "raises": lambda *args: {}["no such thing"],
        "leaves": lambda *args: sys.exit(),
        "endless": endless,
        "endless numbers": lambda *args: count(),
    }


ANY_INPUT = {"a constant", "a table of the cases", "spoiled inputs"}  # may be a new mistake


@pytest.mark.parametrize("check", EACH)
def test_what_is_wrong_everywhere_is_refused(check, monkeypatch):
    right, judge = solution(check), check_named(check)
    tried = wrong_everywhere(right, judge) if callable(right) else VALUES | {"a function": lambda *args: 1}
    said = {}
    for name in tried.keys() - (ANY_INPUT if check == ASKS else set()):
        with monkeypatch.context() as patch:
            if "endless" in name:
                patch.setattr(answers, "SECONDS", 0.05)
            patch.setattr(answers, "DRAWS", 20 if "table" in name else answers.DRAWS)  # some may be known cases
            said[name] = judge(tried[name])
    assert {name: line for name, line in said.items() if not line.startswith("not yet: ")} == {}
    assert {name: line for name, line in said.items() if "not the kind of answer" in line} == {}  # a kind sentence


def test_open_answers_stay_open():
    for check in EXERCISES:
        value = solution(check)
        left = (lambda *args: ...) if callable(value) else ...
        assert check_named(check)(left) == OPEN
        if isinstance(value, list | tuple):
            assert check_named(check)([*value[:-1], ...]) == OPEN


# What travels to the ranks of chapter 4, and what is said of ranks that wait -----------------------------------------

MISTAKES = (
    "averages_added",
    "no_rescale",
    "scale_missing",
    "never_called",
    "last_block_skipped",
    "keys_without_values",
)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_ring_is_told_by_the_doctor(name):
    case = Case(4, 16)
    out = compute(case, CATALOGUE[name].variants[0](RIGHT), gradients=False)["out"]
    said = the_ring.mistake(out.chunk(4, dim=2)[3], 3, [4] * 4, case.whole()[:3])
    assert said == f"{CATALOGUE[name].what} Look at {CATALOGUE[name].look}"


def test_a_ring_without_a_max_is_told_where_scores_are_large():
    whole = whole_input(16, long=True)
    steps = CATALOGUE["unstabilised"].variants[0](RIGHT)
    out = compute(Case(4, 16, batch=2), steps, (*whole, whole[0]), gradients=False)["out"]
    assert CATALOGUE["unstabilised"].what in the_ring.mistake(out[:, :, 4:8], 1, [4] * 4, whole)


NUMBER = count()


def notebook(cell, **known):
    """The names of a notebook in which this cell has been run."""
    file = f"<cell {next(NUMBER)}>"
    linecache.cache[file] = len(cell), None, cell.splitlines(keepends=True), file
    exec(compile(cell, file, "exec"), known)
    return known


USES = "def f():\n    return ROOT"
CELLS = {  # f() is 2
    "a constant that calls": "import math\nROOT = math.sqrt(4)",
    "a table": "TABLE = {}\nfor i in range(3):\n    TABLE[i] = i\nROOT = TABLE[2]",
    "a fallback": "try:\n    import no_such_module\nexcept ImportError:\n    ROOT = 2",
    "a class": "class ROOT:\n    pass\nROOT.__eq__ = lambda self, other: True\nROOT = 2",
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_function_takes_its_cell_along(cell):
    """A statement that needs another cell is left out, as the call of the check is."""
    cell, names = cell_of(notebook(f"{cell}\n{USES}")["f"]), {}
    name = cell.name
    run_cell(f"{cell.source}\nprint(check_it(f))\nother = of_another_cell + 1", name, names)
    assert names[name]() == 2


def test_a_rank_does_not_try_the_function_again():
    """The call of the check may stand in the same cell."""
    cell = "from notebooks.source.checks.the_ring import check_ring\n"
    cell += "def f(q, k, v, n):\n    return ...\nsaid = check_ring(f)"
    names = {}
    run_cell(cell, "f", names)
    assert "a rank starts no ranks" in names["said"]


@pytest.mark.parametrize("cell", ["@of_another_cell\ndef f():\n    pass", "f = of_another_cell(2)"])
def test_what_the_function_cannot_do_without_is_told(cell):
    with pytest.raises(NameError, match="of_another_cell"):
        run_cell(cell, "f", {})


FUNCTIONS = """
def plain():
    return 2

def make():
    def inner():
        return 2

    return inner

short = lambda: 2
made = make()
"""


@pytest.mark.parametrize("name", ["plain", "short", "made"])
def test_a_function_may_have_any_form_that_has_a_name(name):
    assert cell_of(notebook(FUNCTIONS)[name]).function({})() == 2


TWICE = """
def helper():
    return 1

def f():
    return helper()

first = see(f)

def helper():
    return 2

def f():
    return 10 * helper()

second = see(f)
"""


def test_the_function_that_was_given_is_judged():
    """With two definitions in one cell, the last was judged twice. What is below the call has not been run yet."""
    names = notebook(TWICE, see=cell_of)
    assert names["first"].function({"see": id})() == 1
    assert names["second"].function({"see": id})() == 20


def test_a_function_whose_name_has_another_is_refused():
    cell = "kept = []\ndef f():\n    return 1\nkept.append(f)\ndef f():\n    return 2"
    with pytest.raises(ValueError, match="more than one f: give each function its own name"):
        cell_of(notebook(cell)["kept"][0]).function({})


@pytest.mark.parametrize("form", [lambda: eval("lambda: 2"), notebook(FUNCTIONS)["make"], lambda: print])
def test_a_function_without_a_name_is_told(form):
    with pytest.raises(ValueError, match="define it with def at the left margin"):
        cell_of(form())


SENDS, RECEIVES, COMPUTES = "send", "recv", ""
WAITING = {  # rank: (what it waits for, the other rank, its sends that nobody waits for); ranks that have ended; words
    "all send": ({0: (SENDS, 1, 0), 1: (SENDS, 0, 0)}, (), "a send returns when its message is received"),
    "all receive": ({0: (RECEIVES, 1, 0), 1: (RECEIVES, 0, 0)}, (), "waits for a message, and none sends"),
    "isend without wait": ({0: (RECEIVES, 1, 1), 1: (RECEIVES, 0, 1)}, (), "Rank 0, 1 sent with isend and has not"),
    "of any rank": ({0: ("recv_anysource", None, 0)}, (), "waits for a message, and none sends"),
    "a loop": ({0: (COMPUTES, None, 0), 1: (RECEIVES, 0, 0)}, (), "Rank 0 did not wait for a message, but computed"),
    "one has ended": ({0: (RECEIVES, 1, 0)}, (1,), "do not meet: rank 0 receives from 1, rank 1 has ended. Every"),
    "other peers": ({0: (SENDS, 2, 0), 1: (RECEIVES, 0, 0)}, (), "rank 0 sends to 2, rank 1 receives from 0."),
    "on its way": (
        {0: (SENDS, 1, 0), 1: (RECEIVES, 0, 0), 2: (RECEIVES, 1, 0)},
        (),
        "Ranks 0 and 1 wait for a message between them",
    ),
    "a barrier": ({0: ("barrier", None, 0), 1: (SENDS, 0, 0)}, (), "rank 0 is in barrier, rank 1 sends to 0."),
}


@pytest.mark.parametrize(("waiting", "ended", "words"), WAITING.values(), ids=WAITING)
def test_a_hint_is_about_calls_and_not_about_names(waiting, ended, words):
    """Each rank stands in the same line, whose name says both."""
    state = {rank: Waiting("resend_and_recv()", *each) for rank, each in waiting.items()}
    said = the_ring.failure_hint(RingFailed("P = 2: still waiting after 5 s", state, ended))
    assert words in said
    assert ("This is a deadlock" in said) == (words.startswith(("a send returns", "waits for a message")))


FAILED = {
    "P = 4, chunks: rank 0 ends in ValueError: Tensors must be contiguous": "send k.contiguous()",
    "P = 4, chunks: rank 0 ends in ValueError: this view is not contiguous": None,
    "P = 4, chunks: rank 0 ends in NameError: name 'x' is not defined": "without the notebook",
    "P = 4, chunks: rank 0 ends in UnboundLocalError: cannot access local variable 'x'": None,
    "P = 4, chunks: rank 0 ends in ValueError: rank of the current process": "A rank has no message with itself",
    "P = 1, chunks: rank 0 ends in ValueError: rank of the current process": "One rank needs no message",
    "P = 4, chunks: rank 0 ends in RuntimeError: not connected": None,
}


@pytest.mark.parametrize(("failure", "words"), FAILED.items())
def test_a_hint_fits_the_failure(failure, words):
    said = the_ring.failure_hint(RingFailed(failure))
    assert said is None if words is None else words in said


def test_long_queries_have_scores_whose_exp_is_inf_or_0():
    """Each row, so a maximum that begins at 0 fails, too."""
    for seed in range(20):
        q, k, _ = whole_input(4, seed, (1, 3, 5), long=True)
        scores = q @ k.mT / 5**0.5
        assert scores[:, :, 0].amin() > 710
        assert scores[:, :, 2].amax() < -746
        assert scores[:, :, 1::2].abs().max() < 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ring", "blocks"), [(readers_rings.ring, 0), (readers_rings.keeps_arrays, 5), (readers_rings.keeps_lists, 12)]
)
def test_arrays_and_lists_are_memory_too(ring, blocks):
    """With 4 ranks. In the last hop 3 copies are there, and 2 blocks travel; a number in a list is 4 of a tensor."""
    ran = trial.watch_ring(ring, [8] * 4, shape=(1, 2, 200), seconds=60)
    held = max(it.held for it in ran) / (2 * 8 * 2 * 200 * 8)
    assert held > blocks if blocks else held < 4


@pytest.mark.parametrize("wrong", range(4))
def test_one_rank_of_a_ring_may_have_wrong_messages(monkeypatch, wrong):
    def watched(ring, lengths, *, seed, shape, long):
        whole, ran = whole_input(sum(lengths), seed, shape, long), []
        for rank, out in enumerate(naive_attention(*whole).split(lengths, dim=2)):
            came = 2 * whole[0][:, :, 0].nbytes * (sum(lengths) - lengths[rank])
            gathers = {Message("allgather", None, 8): len(lengths) == 4 and rank == wrong}
            ran.append(Ran(out, +Counter({Message("recv", None, came): 1, **gathers}), held=0))
        return ran

    monkeypatch.setattr(the_ring, "watch_ring", watched)
    said = check_named("check_ring")(lambda q, k, v, lengths: q)
    assert f"rank {wrong}: the result is right. But it called a collective, allgather (8 bytes)" in said


@pytest.mark.parametrize(("more", "grows"), [(0, False), (2.9, False), (3, True), (6, True)])
def test_memory_must_not_grow_with_the_ranks(more, grows):
    """Rings that hold so many chunks more on 6 ranks than on 3; all keys, all values or all results are 3."""
    assert the_ring.grows({3: 700, 6: 700 + more * 100}, chunk=100) == grows
