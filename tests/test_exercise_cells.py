"""What travels to the ranks of an exercise, the cell of a function, and what is said of ranks that wait."""

import linecache
from itertools import count

import pytest
import torch

from notebooks import trial
from notebooks.checks import the_ring
from notebooks.trial import Ran, RingFailed, Waiting, cell_of, chunk_of, run_cell, whole_input
from ringlab.basics.naive_attention import naive_attention
from tests import readers_rings

NUMBER = count()


def notebook(cell, **known):
    """The names of a notebook in which this cell has been run."""
    file = f"<cell {next(NUMBER)}>"
    linecache.cache[file] = len(cell), None, cell.splitlines(keepends=True), file
    exec(compile(cell, file, "exec"), known)
    return known


USES = "def f():\n    return ROOT"
CELLS = {  # f() is 2
    "a constant": "ROOT = 2",
    "a constant that calls": "import math\nROOT = math.sqrt(4)",
    "an annotated constant": "ROOT: float = 2.0",
    "one of a pair": "ROOT, *_ = 2, 3",
    "a constant that grows": "ROOT = 1\nROOT += 1",
    "a table": "TABLE = {}\nfor i in range(3):\n    TABLE[i] = i\nROOT = TABLE[2]",
    "under a condition": "if True:\n    ROOT = 2",
    "a fallback": "try:\n    import no_such_module\nexcept ImportError:\n    ROOT = 2",
    "a with": "with open('/dev/null'):\n    ROOT = 2",
    "a class": "class ROOT:\n    pass\nROOT.__eq__ = lambda self, other: True\nROOT = 2",
    "an assertion": "ROOT = 2\nassert ROOT == 2",
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
    cell = "from notebooks.checks.the_ring import check_ring\ndef f(q, k, v, n):\n    return ...\nsaid = check_ring(f)"
    names = {}
    run_cell(cell, "f", names)
    assert "a rank starts no ranks" in names["said"]
    with pytest.raises(ValueError, match="define it with def"):
        cell_of(print)  # this is no rank


def test_annotations_may_be_of_another_cell():
    names = {}
    run_cell("def f(x: Tensor = 2, y: 'Tensor' = 0) -> Tensor:\n    return x", "f", names)
    assert names["f"]() == 2


def test_a_cell_prints_nothing_on_the_ranks(capsys):
    run_cell("print('here')\ndef f():\n    pass", "f", {})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("cell", ["@of_another_cell\ndef f():\n    pass", "f = of_another_cell(2)"])
def test_what_the_function_cannot_do_without_is_told(cell):
    with pytest.raises(NameError, match="of_another_cell"):
        run_cell(cell, "f", {})


FORMS = """
import functools

def plain():
    return 2

@functools.wraps(plain)
def wrapped():
    return plain()

class Ring:
    func = 3  # no partial

    def __call__(self):
        return 2

    @staticmethod
    def static():
        return 2

def make():
    def inner():
        return 2

    return inner

short = lambda: 2
part = functools.partial(plain)
thing = Ring()
made = make()
alone = Ring.static
"""


@pytest.mark.parametrize("name", ["plain", "wrapped", "short", "part", "thing", "made", "alone"])
def test_a_function_may_have_any_form_that_has_a_name(name):
    assert cell_of(notebook(FORMS)[name]).function({})() == 2


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


UNNAMED = {
    "a lambda": lambda: notebook(FORMS)["make"].__globals__ and eval("lambda: 2"),
    "a closure": lambda: notebook(FORMS)["make"](),
    "an object": lambda: notebook(FORMS)["Ring"](),
    "a method": lambda: notebook(FORMS)["thing"].__call__,
    "a partial of a foreign function": lambda: notebook("import functools, math\npart = 1")["functools"].partial(max),
    "a builtin": lambda: print,
    "a number": lambda: 3,
}


@pytest.mark.parametrize("form", UNNAMED.values(), ids=UNNAMED)
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


def test_a_rank_has_the_memory_of_its_own_tokens_only():
    lengths = [3, 1, 2]
    for B in (1, 2):
        whole = whole_input(6, shape=(B, 2, 4))
        for x in whole:
            for rank, part in enumerate(x.split(lengths, dim=2)):
                mine = chunk_of(x, lengths, rank)
                assert torch.equal(mine, part)
                assert mine.untyped_storage().nbytes() == mine.nbytes
                assert mine.is_contiguous() == (lengths[rank] == 1)


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
    ("ring", "blocks"),
    [(readers_rings.ring, 0), (readers_rings.keeps_arrays, 5), (readers_rings.keeps_lists, 12)],
)
def test_arrays_and_lists_are_memory_too(ring, blocks):
    """With 4 ranks. In the last hop 3 copies are there, and 2 blocks travel; a number in a list is 4 of a tensor."""
    ran = trial.watch_ring(ring, [8] * 4, shape=(1, 2, 200), seconds=60)
    held = max(it.held for it in ran) / (2 * 8 * 2 * 200 * 8)
    assert held > blocks if blocks else held < 4


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (lambda P, chunk: 7 * chunk, "right"),
        (lambda P, chunk: min(P, 3) * 2 * chunk, "right"),  # three buffers of K and V
        (lambda P, chunk: P * chunk + 90, "not yet: chunks of "),  # it keeps all K, or all V, or all results
        (lambda P, chunk: P * 2 * chunk, "the memory grows with the sequence"),
    ],
)
def test_memory_must_not_grow_with_the_ranks(held, words, monkeypatch):
    """Rings that return what is right, in P - 1 hops, and hold what `held` says."""

    def watched(answer, lengths, *, seed, shape, long):
        (B, H, D), P, whole = shape, len(lengths), whole_input(sum(lengths), seed, shape, long)
        rows = naive_attention(*whole).split(lengths, dim=2)
        messages = [
            trial.Counter(
                trial.Message(how, (rank + to) % P, 2 * 8 * B * H * D * lengths[(rank + first - t) % P])
                for t in range(P - 1)
                for how, to, first in (("send", 1, 0), ("recv", -1, -1))
            )
            for rank in range(P)
        ]
        chunk = 8 * B * H * D * lengths[0]
        return [Ran(rows[rank], messages[rank], held(P, chunk)) for rank in range(P)]

    monkeypatch.setattr(the_ring, "watch_ring", watched)
    assert words in the_ring.check_ring(lambda q, k, v, lengths: q)
