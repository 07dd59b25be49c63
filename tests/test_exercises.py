"""Every exercise: right answers are right in every form, wrong ones are told why, cheats are refused."""

import ast
import linecache
import math
import re
import symtable
from collections import deque
from fractions import Fraction
from functools import cache, partial
from importlib import import_module
from itertools import count

import nbformat
import numpy as np
import pytest
import torch

from notebooks import build, trial
from notebooks.checks import answers
from notebooks.checks.answers import OPEN
from tests.readers_rings import QUICK, RIGHT_RINGS, WAITING_RINGS
from tests.right_answers import RIGHT_ANSWERS, one_rank_receives_first
from tests.wrong_answers import WRONG_ANSWERS

CHAPTERS = [*build.chapters(), build.FOLDER / "appendix_ring_of_states.py"]
NAMES = [source.stem.partition("_")[2] for source in CHAPTERS]  # 04_the_ring -> the_ring
PROCESSES = {"check_ring"}  # its answers travel to other processes
CHECKS = {}  # name of a check -> the chapter and the name of its answer
for chapter in CHAPTERS:
    for check, answer in re.findall(r"print\((check_\w+)\((\w+)\)\)", chapter.read_text()):
        CHECKS[check] = chapter, answer
EXERCISES = sorted(CHECKS.keys() - PROCESSES)


def checks_of(name):
    return import_module(f"notebooks.checks.{name}")


def check_named(name):
    return getattr(checks_of(CHECKS[name][0].stem.partition("_")[2]), name)


def cases(answers, names=CHECKS):
    """(check, answer, words) of each answer; a ring that travels to other processes is slow, but for some."""
    found = []
    for name in names:
        for i, (answer, words) in enumerate(answers.get(name, ())):
            slow = name in PROCESSES and not any(answer is ring for ring in QUICK)
            marks = pytest.mark.slow if slow else ()
            found.append(pytest.param(name, answer, words, id=f"{name}-{i}-{words}", marks=marks))
    return found


# The solutions -----------------------------------------------------------------------------------------------------


def bound_names(node):
    """The names that a statement at the top of a cell binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def global_names(code):
    """The names that a piece of code uses and does not bind."""
    top = symtable.symtable(code, "<code>", "exec")
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used, tables = {symbol.get_name() for symbol in top.get_symbols()}, list(top.get_children())
    while tables:
        table = tables.pop()
        used |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        tables += table.get_children()
    return used - own


def namespace(chapter, code):
    """What the notebook gives to `code`: of its cells only what binds a name that the code uses, or that one needs."""
    nodes, needed, names = ast.parse(chapter.read_text()).body, [], global_names(code)
    while wanted := [node for node in nodes if node not in needed and bound_names(node) & names]:
        needed += wanted
        names = names.union(*(global_names(ast.unparse(node)) for node in wanted))
    found = {"__name__": "__main__"}
    for node in sorted(needed, key=lambda node: node.lineno):
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


@pytest.mark.parametrize("check", [*EXERCISES, pytest.param("check_ring", marks=pytest.mark.slow)])
def test_the_solutions_are_right(check):
    assert check_named(check)(solution(check)).startswith("right")


@pytest.mark.parametrize("source", CHAPTERS, ids=NAMES)
def test_the_exercises_are_open(source):
    """Each check's cell says so, as it was committed and as the source has it now."""
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    said = ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in notebook.cells]
    still_open = sum(text.strip() == OPEN for text in said)
    assert still_open == sum(chapter == source for chapter, _ in CHECKS.values())


def test_every_check_has_an_exercise_and_wrong_answers():
    defined = {check for name in NAMES for check in vars(checks_of(name)) if check.startswith("check_")}
    assert CHECKS.keys() == defined == WRONG_ANSWERS.keys()


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


def as_array(items):
    """An array of numbers; other lists stay."""
    fits = not isinstance(items, set) and all(isinstance(x, int | float) for x in items)
    return np.array(items) if fits else items


def is_real(x):
    return isinstance(x, float) or (isinstance(x, torch.Tensor) and x.is_floating_point())


def to_fraction(x):
    if isinstance(x, torch.Tensor) and x.ndim == 1 and bool(x.isfinite().all()):
        return [Fraction(value) for value in x.tolist()]
    return Fraction(x) if not isinstance(x, torch.Tensor) and math.isfinite(x) else x


def as_deque(items):
    return items if isinstance(items, set) else deque(items)


def as_values(items):
    return items if isinstance(items, set) else dict(enumerate(items)).values()


FORMS = {
    "numpy": lambda value: recast(value, to_numpy),
    "tensors of no dimension": lambda value: recast(value, torch.as_tensor),
    "floats": lambda value: recast(value, to_float),
    "float32": lambda value: recast(value, to_float32),
    "lists": lambda value: recast(value, to_list, lambda items: items if isinstance(items, set) else list(items)),
    "tuples": lambda value: recast(value, lambda x: x, tuple),
    "arrays for lists": lambda value: recast(value, lambda x: x, as_array),
    "deques": lambda value: recast(value, lambda x: x, as_deque),
    "values of a dict": lambda value: recast(value, lambda x: x, as_values),
    "fractions": lambda value: recast(value, to_fraction),
    "long doubles": lambda value: recast(value, lambda x: np.longdouble(to_numpy(x)) if is_real(x) else x),
    "lists of arrays": lambda value: recast(
        value, lambda x: list(to_numpy(x)) if isinstance(x, torch.Tensor) and x.ndim else x
    ),
}


class Callable:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


def renamed(function, count):
    """The same function with other names of its arguments."""
    names = ", ".join(f"x_{i}" for i in range(count))
    return eval(f"lambda {names}: function({names})", {"function": function})


def spoil(x):
    """Overwrite what a caller passed."""
    if isinstance(x, torch.Tensor):
        x.zero_()
    elif isinstance(x, list):
        for item in x:
            spoil(item)
        x.clear()


def works_in_place(function, *args):
    """Returns what is right, and uses up its arguments."""
    given = recast(function(*args), lambda x: x.clone() if isinstance(x, torch.Tensor) else x)
    spoil(list(args))
    return given


def generates(function, *args):
    """Returns a generator; for several values, generators of them."""
    given = function(*args)
    if isinstance(given, tuple) and all(isinstance(x, torch.Tensor) and x.ndim for x in given):
        return tuple((row for row in x) for x in given)
    return (x for x in given) if isinstance(given, list | tuple | set | range) else given


@pytest.mark.parametrize("check", EXERCISES)
def test_right_answers_are_right_in_every_form(check):
    right, judge = solution(check), check_named(check)
    tried = FORMS
    if check == "check_new_mistake":  # Steps have no other form, and each try takes a second
        tried = {"partial": partial(right)}
    elif callable(right):
        count = right.__code__.co_argcount
        tried = {name: partial(lambda form, *args: form(right(*args)), form) for name, form in tried.items()}
        tried |= {"partial": partial(right), "lambda": lambda *args: right(*args), "object": Callable(right)}
        tried |= {"other names": renamed(right, count), "in place": partial(works_in_place, right)}
        tried |= {"generator": partial(generates, right)}
    else:
        tried = {name: form(right) for name, form in tried.items()}
    said = {name: judge(answer) for name, answer in tried.items()}
    assert {name: line for name, line in said.items() if not line.startswith("right")} == {}


@pytest.mark.slow
@pytest.mark.parametrize("ring", RIGHT_RINGS)
def test_other_right_rings_are_right(ring):
    assert check_named("check_ring")(ring).startswith("right: full attention")


@pytest.mark.parametrize("check", RIGHT_ANSWERS)
def test_other_right_answers_are_right(check):
    said = [check_named(check)(answer) for answer in RIGHT_ANSWERS[check]]
    assert all(line.startswith("right") for line in said), said


# What is asked -----------------------------------------------------------------------------------------------------

CALLS = {  # how often a check calls an answer when nothing is drawn: a case that is lost shows
    1: "state_gradient two_maps",
    3: "attention_function bytes_of_a_token mended_sum merge softmax_backward",
    4: (
        "attention_on_a_kernel batch_loss bytes_sent_back hidden_by_overlap longest_text merging_share "
        "peak_memory_backward running_update smallest_chunk"
    ),
    5: ("blocks_of_a_nic caches copies labels overlap_order rank_loss seconds sent training_chunk"),
    6: "gradient_norm hops_of_a_step longest_sequence visible_tiles",
    7: "blockwise meshes safe_softmax",
    8: "merge_two natural_lse scan_steps",
    9: "hops",
    10: "pairs what_is_refused",
    13: "shard_by_hand",
    14: "ring_order",
    15: "rank_input zigzag_positions",
    25: "place",
    42: "first_key",
    45: "kv_head",
    54: "striped_mask",
    55: "block_in_hand",
    119: "added_so_far",
    125: "block",
}


@pytest.mark.parametrize(
    ("check", "number"), [(f"check_{name}", n) for n, some in CALLS.items() for name in some.split()]
)
def test_every_case_is_asked_and_more_are_drawn(check, number, monkeypatch):
    right, calls = solution(check), []

    def answer(*args):
        calls.append(args)
        return right(*args)

    assert check_named(check)(answer).startswith("right")
    assert len(calls) >= number + answers.DRAWS
    calls.clear()
    monkeypatch.setattr(answers, "DRAWS", 0)
    assert check_named(check)(answer).startswith("right")
    assert len(calls) == number


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


# Wrong answers and cheats ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("check", "answer", "words"), cases(WRONG_ANSWERS))
def test_a_wrong_answer_is_told_why(check, answer, words):
    said = check_named(check)(answer)
    assert said.startswith("not yet: ")
    assert words in said


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
        yield {"ring": "all-to-all", "all-to-all": "ring"}.get(value, f"{value}_")
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


@pytest.mark.parametrize("check", EXERCISES)
def test_what_is_wrong_in_one_call_only_is_refused(check):
    """In its first or last element, in each call, those of the last rank, the last round and the drawn cases too."""
    right, judge = solution(check), check_named(check)
    if check == "check_new_mistake":
        pytest.skip("its answer is a mistake, and one that is changed is another")
    if not callable(right):
        assert [judge(answer)[:7] for answer in broken(right)] == ["not yet"] * len(list(broken(right)))
        return
    calls = []
    assert judge(lambda *args: (calls.append(0), right(*args))[1]).startswith("right")
    for at in sorted({*range(0, len(calls), 1 + len(calls) // 40), len(calls) - 1}):
        for way in count():
            answer, done = broken_once(right, at, way)
            said = judge(answer)
            if not done:  # no such way, or what is drawn has taken fewer calls
                break
            assert said.startswith("not yet: "), (at, done)


class Yes:
    """Is equal to everything."""

    __hash__ = None
    __array__ = __iter__ = None

    def __eq__(self, other):
        return True

    def __getattr__(self, name):
        raise AttributeError(name)


class YesTensor(torch.Tensor):
    """Is close to everything."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.allclose, torch.equal, torch.isclose):
            return torch.tensor(True)
        return super().__torch_function__(function, types, args, kwargs or {})


def raises(*args):
    raise KeyError("no such thing")


def leaves(*args):
    raise SystemExit


def endless(*args):
    while True:
        pass


def endless_numbers(*args):
    while True:
        yield 0


def deceives(*args):
    """Replaces what compares the answer."""
    torch.allclose = answers.isclose = lambda *values, **options: True
    answers.difference = lambda *values: None
    return torch.zeros(1)


def copied(value):
    return recast(value, lambda x: x.clone() if isinstance(x, torch.Tensor) else x)


def key_of(args):
    return repr([x.shape if isinstance(x, torch.Tensor) else x for x in args])


def cheats(right, judge):
    """Answers to an exercise with a function that are wrong for every check."""
    table, first, spoilable = {}, [], []

    def recorded(*args):
        spoilable.append(any(isinstance(x, torch.Tensor | list) for x in args))
        given = copied(right(*args))
        table[key_of(args)] = given
        first.append((copied(list(args)), given))
        return given

    assert judge(recorded).startswith("right")
    fixed = dict(list(table.items())[: len(table) // 2])  # what is drawn comes last

    def spoils(*args):
        spoil(list(args))
        return right(*args)

    def looks_up(*args):  # by the numbers or the sizes that a check is known to try
        return copied(fixed.get(key_of(args), first[0][1]))

    own = {"spoiled inputs": spoils} if any(spoilable) else {}
    return own | {
        "a table of the cases": looks_up,
        "a constant": lambda *args: copied(first[0][1]),
        "its first input": lambda *args: args[0],
        "its last input": lambda *args: args[-1],
        "None": lambda *args: None,
        "a word": lambda *args: "right",
        "a dict": lambda *args: {},
        "nothing": lambda *args: [],
        "nan": lambda *args: float("nan"),
        "infinity": lambda *args: float("inf"),
        "ragged lists": lambda *args: [[1.0], [1.0, 2.0]],
        "True": lambda *args: True,
        "complex": lambda *args: 1j,
        "equal to all": lambda *args: Yes(),
        "close to all": lambda *args: torch.ones(2, 2).as_subclass(YesTensor),
        "a function": lambda *args: right,
        "no parameters": lambda: None,
        "too many parameters": lambda *, a, b, c, d, e, f, g, h: None,
        "raises": raises,
        "leaves": leaves,
        "endless": endless,
        "endless numbers": endless_numbers,
        "deceives": deceives,
    }


VALUES = {
    "None": None,
    "a word": "right",
    "a dict": {},
    "nothing": [],
    "nan": float("nan"),
    "infinity": float("inf"),
    "True": True,
    "complex": 1j,
    "equal to all": Yes(),
    "four that are equal to all": [Yes()] * 4,
    "a function": lambda *args: 1,
    "a tensor of two": torch.ones(2),
    "a set": {1, 2},
}

ANY_INPUT = {  # in these exercises the input, spoiled or not, or a constant may be right
    "check_new_mistake": {"a constant", "a table of the cases", "spoiled inputs"},
}


@pytest.mark.parametrize("check", EXERCISES)
def test_cheats_are_refused(check, monkeypatch):
    right, judge = solution(check), check_named(check)
    tried = cheats(right, judge) if callable(right) else VALUES
    said = {}
    for name in tried.keys() - ANY_INPUT.get(check, set()):
        with monkeypatch.context() as patch:
            if "endless" in name:
                patch.setattr(answers, "SECONDS", 0.05)
            said[name] = judge(tried[name])
    assert {name: line for name, line in said.items() if not line.startswith("not yet: ")} == {}
    assert {name: line for name, line in said.items() if "not the kind of answer" in line} == {}  # a kind sentence
    assert judge(right).startswith("right")  # nothing stays replaced


def test_open_answers_stay_open():
    for check in EXERCISES:
        value = solution(check)
        left = (lambda *args: ...) if callable(value) else ...
        assert check_named(check)(left) == OPEN
        if isinstance(value, list | tuple):
            assert check_named(check)([*value[:-1], ...]) == OPEN
