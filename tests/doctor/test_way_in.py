"""A stranger's way to the doctor, without processes: what a name names, what a signature takes, whose line it is."""

import functools
import importlib
import inspect
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ring_doctor.asking.calls import OFTEN, call, lse_of, options, ours, own_place, theirs
from ring_doctor.asking.case import Case, positions
from ring_doctor.asking.job import ENOUGH, SECONDS, SPINS, hang, lines_of_ranks, rest
from ring_doctor.asking.names import ByName, by_name, named, portable
from ring_doctor.asking.patient import CONSTANTS, Patient, arguments_of, patient_of
from ring_doctor.asking.questions import questions
from ring_doctor.options import claims_of, parse
from ringlab.support.processes import own_frame, place
from tests.wrong.odd_patients import own_chunk

P3 = Case(3, 18, causal=True, head_dim=16)
ODD = "tests.wrong.odd_patients"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write files of a project in the current folder; afterwards Python knows nothing of its modules."""
    before, paths = set(sys.modules), sys.path[:]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()

    yield write
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        del sys.modules[name]


RING = """
import functools

def make():
    def attention(q, k, v, causal=False):
        return q
    return attention

closure = make()
short = lambda q, k, v: q
part = functools.partial(make(), causal=True)

class Thing:
    held = lambda q, k, v: q

    def __call__(self, q, k, v):
        return q

    method = __call__

thing = Thing()
thing.unpicklable = short
"""


@pytest.mark.parametrize("name", ["closure", "part", "thing", "Thing.held", "make"])
@pytest.mark.parametrize("home", ["the_ring", "a__package", "a/package.py"])
def test_what_a_module_makes_is_found_by_its_name(project, name, home):
    project(**{home.replace("/", "__").removesuffix(".py"): RING})
    found = by_name(f"{home.replace('__', '.')}:{name}")
    module = {"a__package": "a.package", "a/package.py": "package"}.get(home, "the_ring")
    assert found.name == f"{module}:{name}"
    assert inspect.unwrap(found) == named(found.name)
    if name == "make":
        assert callable(found())
    else:
        assert found(1, 2, 3) == 1
        assert patient_of(f"{home.replace('__', '.')}:{name}").function == found


def test_the_folder_of_a_package_is_where_its_file_is_found_from(project, tmp_path):
    project(src__mine__ring="from mine import other\ndef f(q, k, v): return q", src__mine__other="")
    (tmp_path / "src/mine/__init__.py").touch()
    for _ in range(2):
        assert by_name("src/mine/ring.py:f").name == "mine.ring:f"
    assert sys.path.count(str(tmp_path / "src")) == 1


CLAIMS = {  # what a patient says, and the option of the command
    **{"layouts": (("striped",), "--layout striped"), "causal": ((True,), "--causal"), "about": ("a", "")},
    **{"dtypes": (("float16",), "--dtype float16"), "tensors": ("sbhd", "--tensors sbhd"), "grouped": (False, "")},
    **{"unequal": (False, "--equal-chunks"), "own_values": (False, "--one-head-dim")},
    **{"gradients": (False, "--forward-only"), "batch": (3, "--batch 3"), "chunk": (10, "--chunk 10")},
    **{"heads": (6, "--heads 6"), "kv_heads": (2, "--kv-heads 2"), "head_dim": (8, "--head-dim 8")},
    **{"worlds": ((16,), "--worlds 16"), "version": ("1", "")},
}


def takes_all(q, k, v, causal=False, layout="contiguous"):
    return q


@pytest.mark.parametrize("constant", sorted(CONSTANTS))
def test_a_claim_is_a_constant_of_a_patient_file_or_an_option_of_the_command(project, constant):
    name = constant.lower()
    claim, words = CLAIMS[name]
    project(adapter=f"def attention(q, k, v): return q\n{constant} = {claim!r}\n")
    assert getattr(patient_of("adapter"), name) == claim != getattr(patient_of("adapter:attention"), name)
    found = claims_of(parse(["module:function", *words.split()]))
    assert set(found) == ({name} if words else set())
    assert not words or getattr(patient_of(takes_all, **found), name) == claim


def test_other_claims(project):
    project(other="STATE, SHAPE = 'Berlin', (2, 3)\ndef attention(q, k, v): return q\n")
    assert patient_of("other") == patient_of("other:attention", name="other")  # no claims
    for option, state in (("--state", True), ("--state-of-each-key", "each key")):
        assert claims_of(parse(["m:f", option])) == {"state": state}
    assert claims_of(parse(["m:f", "--no-causal", "--shape", "1,8,2,4096,64"])) == {
        "causal": False,
        "shape": (1, 8, 2, 4096, 64),
    }


def test_a_function_that_pickle_cannot_send_goes_by_its_name(project):
    project(the_ring=RING)
    ring = importlib.import_module("the_ring")
    assert portable(own_chunk) is own_chunk
    for name in ("closure", "short", "part", "thing"):
        assert portable(getattr(ring, name)) == ByName(f"the_ring:{name}")
    (stranger := ring.make()).__module__ = "of_no_file"
    for function in (ring.make(), stranger):
        with pytest.raises(ValueError, match=r"make.<locals>.attention cannot be sent .*; make it in a module, when"):
            portable(function)


def test_a_function_of_a_notebook_is_told_to_move(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(own_chunk, "__module__", "__main__")
    with pytest.raises(ValueError, match="defined in a notebook or a shell; expected a function of a file"):
        portable(own_chunk)


def function_of(signature):
    scope = {}
    exec(f"def f({signature}): pass", scope)
    return scope["f"]


def given(signature, case=P3):
    """What the doctor gives to a function of this signature, beside q, k and v."""
    patient = Patient("f", function_of(signature), causal=(False,), layouts=("contiguous",))
    return options(patient, case, {"q": torch.zeros(1)}, None)


NEEDED = {"is_causal": True, "softmax_scale": 0.25, "window_size": (-1, -1), "cu_seqlens": [0, 18]}  # one document
BOUNDS = {"cu_seqlens_q": [0, 7, 18], "cu_seqlens_k": [0, 7, 18]}
PACKED, WINDOWED = Case(3, 18, documents=(7, 11)), Case(3, 18, causal=True, window=5)


@pytest.mark.parametrize(
    ("signature", "case", "expected"),
    [
        ("q, k, v, softmax_scale=None, window=None, cu_seqlens=None", P3, {}),
        ("q, k, v, is_causal, softmax_scale, window_size, cu_seqlens", P3, NEEDED),
        ("q, k, v, is_causal, causal=True", Case(3), {"is_causal": False, "causal": False}),
        ("q, k, v, sm_scale=None", Case(3, scale=0.3), {"sm_scale": 0.3}),
        ("q, k, v, window=None, window_size=(-1, -1)", WINDOWED, {"window": 5, "window_size": (4, 0)}),
        ("q, k, v, documents=None, cu_seqlens_q=0, cu_seqlens_k=0", PACKED, {"documents": (7, 11), **BOUNDS}),
        ("q, k, v, layout='x'", Case(3, layout="zigzag"), {"layout": "zigzag"}),
    ],
)
def test_an_option_has_the_form_of_its_name(signature, case, expected):
    found = given(signature, case)
    tensors = {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}
    assert found | {name: x.tolist() for name, x in tensors.items()} == expected
    assert {x.dtype for x in tensors.values()} <= {torch.int32}


class Net(torch.nn.Module):
    def forward(self, q, k, v, causal=False, **more):
        return q


def test_a_module_shows_the_arguments_of_forward():
    assert set(arguments_of("net", Net())) == {"causal"}
    assert set(arguments_of("net", torch.compile(Net(), backend="eager"))) == {"causal"}
    assert set(arguments_of("part", functools.partial(Net().forward, causal=True))) == {"causal"}


UNEQUAL = {"shape": (1, 2, 2, 31, 4), "worlds": (3, 4)}
ZIGZAG = {"shape": (1, 2, 2, 36, 4), "layouts": "zigzag", "worlds": 4}
REFUSED = [  # a function or its name, what is claimed, and what is said of it
    ("the_ring:thing.metod", {}, "has no attribute 'metod'"),
    ("nowhere.py:f", {}, "there is no file 'nowhere.py'; expected path/to/ring.py:function"),
    (":f", {}, "'' is no name of a module"),
    (".the_ring:f", {}, "'.the_ring' is no name of a module"),
    ("nowhere.ring:f", {}, r"No module named 'nowhere'; expected module:function"),
    ("needs:f", {}, r"'needs' .*: it raised ModuleNotFoundError: .* 'flash_attn_9' \(needs.py, line 2\)"),
    ("package.needs:f", {}, r"ModuleNotFoundError: No module named 'package.missing' \(package/needs.py, line 1\)"),
    ("fails:f", {}, r"it raised ZeroDivisionError: division by zero \(fails.py, line 2 in half\)"),
    ("wrong:f", {}, r"it raised SyntaxError: .* \(wrong.py, line 1\)"),
    ("leaves:f", {}, r"it raised SystemExit: no \(leaves.py, line 1\)"),
    ("textwrap.py:f", {}, "the module textwrap is .*; expected a file of another name"),
    ("the_ring", {}, r"'the_ring:attention' cannot be imported: .*; expected module:function"),
    ("adapter", {}, "adapter has a constant CASUAL; expected CAUSAL, or another name"),
    (function_of("q, k, v, dropout"), {}, r"f\(q, k, v, dropout\) cannot be .*: missing .* 'dropout'; the doc"),
    (function_of("q, k, v, *, mesh"), {}, "missing .* 'mesh'; .* q, k, v of this rank, and any of causal, .*: wrap"),
    (function_of("q"), {}, "too many positional arguments; the doctor gives"),
    (f"{ODD}:Accumulates", {}, "is a class; expected a function, or an object of the class"),
    (torch.nn.functional.scaled_dot_product_attention, {}, r"has no signature .*; wrap it in a function"),
    (1, {}, "is int; expected a function, or its name"),
    (own_chunk, {"tensors": "bsdh"}, "tensors is 'bsdh'; expected one of bhsd, bshd, sbhd"),
    (own_chunk, {"batch": 0}, "batch is 0; expected a whole number from 1 on"),
    (own_chunk, {"worlds": (1, 2)}, "2 ranks at most; expected 3 or more"),
    (own_chunk, {"worlds": ()}, "0 ranks at most; expected 3 or more"),
    *((own_chunk, {"worlds": it}, "worlds is .*; expected numbers from 1 on") for it in ((0, 3), ["3"])),
    (own_chunk, {"layouts": "nowhere:f"}, "'nowhere' cannot be imported"),
    (own_chunk, {"worlds": (3, 17)}, "17 ranks; expected 16 or fewer: each is a process of this machine"),
    (own_chunk, {"head_dim": 1.5}, "head_dim is 1.5"),
    (own_chunk, {"chunk": 3}, "chunk is 3; expected a whole number from 4 on"),
    (own_chunk, {"heads": 4, "kv_heads": 3}, "4 query heads and 3 key/value heads; expected a multiple"),
    (own_chunk, {"layouts": "zigzag", "chunk": 7}, "chunk is 7 tokens a rank in the zigzag layout; expected an even"),
    (own_chunk, {"layouts": "zig"}, "expected one of contiguous, zigzag, striped"),
    (own_chunk, {"layouts": ("zigzag", "striped")}, "has no argument `layout`"),
    (own_chunk, {"causal": (False, True)}, "has no argument `causal`"),
    (own_chunk, {"layout": "zigzag"}, r"layout given; expected some of .*layouts"),
    *((own_chunk, {"dtypes": it}, f"dtype is '{it}'; expected float64") for it in ("int8", "fp32")),
    *((own_chunk, {"shape": of}, "shape is .*; expected five whole numbers") for of in ((1, 2, 3), (1, 2, 0, 8, 4))),
    (own_chunk, {"shape": (1, 2, 3, 8, 4)}, "2 query heads and 3 key/value heads"),
    (own_chunk, UNEQUAL, "31 tokens on 3, 4 ranks; expected equal parts, two a rank for"),
    (own_chunk, ZIGZAG, "36 tokens on 4 ranks; expected equal parts"),
]


@pytest.mark.parametrize(("function", "claims", "words"), REFUSED)
def test_what_cannot_be_asked_is_told_what_to_do(project, function, claims, words):
    project(
        the_ring=RING,
        needs="import os\nimport flash_attn_9",
        package__needs="import package.missing",
        fails="def half():\n    1 / 0\nhalf()",
        wrong="def",
        leaves="import sys; sys.exit('no\\nmore')",
        textwrap="",
        adapter="SIZE = 3\nCASUAL = True\ndef attention(q, k, v): return q\n",
    )
    with pytest.raises(ValueError, match=words):
        patient_of(function, **claims)


def test_a_patient_gets_other_claims():
    claims = {"name": "mine", "worlds": (3,)}
    assert patient_of(patient_of(own_chunk, batch=3), **claims) == patient_of(own_chunk, batch=3, **claims)


def shares(seq_len, rank, world_size):
    """A layout of the user's, as a test sets it."""


@pytest.mark.parametrize(
    ("found", "fine"), [([11, 0], True), ([12, 0], False), ([-1, 0], False), ([], False), ([[0, 1]], False)]
)
def test_a_layout_of_the_user_has_positions_in_the_sequence(monkeypatch, found, fine):
    monkeypatch.setattr(sys.modules[__name__], "shares", lambda *where: torch.tensor(found))
    positions.cache_clear()
    refused = pytest.raises(ValueError, match="expected the positions, 0 to 11, of the tokens of rank 0")
    with nullcontext() if fine else refused:
        assert positions(f"{__name__}:shares", 12, 0, 3).tolist() == found


@pytest.mark.parametrize("tensors", ["bhsd", "bshd", "sbhd"])
def test_the_function_gets_the_order_of_dimensions_that_it_takes(tensors):
    seen, letters = [], dict(zip("bhsd", (2, 4, 6, 3), strict=True))

    def function(q, k, v):
        seen.append((q.shape, q.is_contiguous()))
        return q

    patient = Patient("f", function, causal=(False,), layouts=("contiguous",), tensors=tensors)
    x = torch.randn(2, 4, 6, 3)
    q = ours(patient, theirs(patient, x).contiguous())
    out, _ = call(patient, P3, dict.fromkeys("qkv", q))
    assert seen == [(tuple(letters[letter] for letter in tensors), True)]
    assert torch.equal(out, x)


@pytest.mark.parametrize("more", [(), ("lse",), ("lse", None), (None, None, 0)])
@pytest.mark.parametrize("several", [tuple, list])
def test_out_may_come_alone_with_lse_and_with_more(several, more):
    """As flash_attn returns out, lse and two that a call has no use for; in a tuple by itself it is no attention."""
    x = torch.zeros(1, 2, 3, 4)
    found = several((x, *(x[..., 0] if each == "lse" else each for each in more)))
    patient = Patient("f", lambda q, k, v: found, causal=(False,), layouts=("contiguous",))
    with nullcontext() if more else pytest.raises(ValueError, match=f"f returned a {several.__name__}; expected"):
        assert (call(patient, P3, dict.fromkeys("qkv", x))[1] is not None) == ("lse" in more)


@pytest.mark.parametrize(("B", "H", "C"), [(1, 2, 6), (2, 2, 6), (1, 6, 6), (1, 1, 1)])
@pytest.mark.parametrize("tensors", ["bhsd", "bshd", "sbhd"])
def test_an_lse_is_taken_in_the_shapes_in_use(B, H, C, tensors):
    patient = Patient("f", own_chunk, causal=(False,), layouts=("contiguous",), tensors=tensors)
    q, right = torch.randn(B, H, C, 4), torch.randn(B, H, C)
    forms = [right, right[..., None]] + [right[0]] * (B == 1)
    unclear = H == C > 1
    for form in forms:
        found = lse_of(patient, form, q)
        assert (found is None) == (unclear and tensors != "bhsd")
        assert found is None or torch.equal(found, right)
    if not unclear:
        for form in [right.mT, right.mT[..., None]] + [right[0].mT] * (B == 1):
            assert torch.equal(lse_of(patient, form, q), right)
    with pytest.raises(ValueError, match=r"returned an lse of shape \(7, 7, 7\); expected"):
        lse_of(patient, torch.zeros(7, 7, 7), q)


@pytest.mark.parametrize(("layout", "S", "world"), [("contiguous", 512, 4), ("striped", 500, 5), ("zigzag", 516, 3)])
def test_the_shape_of_the_user_is_asked_once_with_the_most_ranks_that_can_share_it(layout, S, world):
    patient = patient_of(own_chunk, layouts=layout, causal=True, shape=(2, 4, 1, S, 8), worlds=(1, 2, 3, 4, 5))
    shared = [replace(patient, heads=4, kv_heads=2, heads_per_rank=3).base_case(P, 0) for P in (1, 2)]
    assert [(case.heads, case.kv_heads) for case in shared] == [(4, 2), (6, 6)]  # of 2 some ranks would have none
    asked = {P: [each.case for each in questions(patient, P, 0)] for P in patient.worlds}
    large = [(P, case) for P, cases in asked.items() for case in cases if case.seq_len == S and case.batch == 2]
    assert [(P, case.batch, case.heads, case.kv_heads, case.head_dim) for P, case in large] == [(world, 2, 4, 1, 8)]


@pytest.mark.parametrize("causal", [False, True])
def test_a_long_sequence_is_judged_without_the_mask_of_all_pairs(causal, monkeypatch):
    monkeypatch.setattr(Case, "visible", lambda self: pytest.fail("all pairs were computed"))
    assert {*Case(3, 21, causal=causal, heads=4, seed=1).right()} == {"out", "lse", "dq", "dk", "dv"}


def test_a_place_is_a_line_of_the_user():
    torch_file, ours = inspect.getfile(torch.nn.Module), inspect.getfile(place)
    stack = [(torch_file, 1, "send"), (ours, 2, "place"), ("<string>", 3, "f"), ("/home/me/ring.py", 4, "attention")]
    assert place(own_frame(stack)) == "ring.py, line 4 in attention"
    library = ("/x/site-packages/rings/core.py", 5, "step")
    assert place(own_frame([library, *stack])) == "ring.py, line 4 in attention"
    assert place(own_frame([*stack[:3], library])) == "core.py, line 5 in step"
    assert place(own_frame(stack[:3])) == ""


WAITS = f"""Stack
  File "{inspect.getfile(dist)}", line 2 in recv
  File "/home/me/ring.py", line 12 in attention
"""


IN_FILE = 'Stack\n  File "mine.py", line {} in attention\n' + 2 * '  File "mine.py", line 3 in f\n' + WAITS[6:]


@pytest.mark.parametrize(
    ("dumps", "silent", "hangs"),
    [
        ({0: [WAITS], 1: [WAITS]}, [0, 1], False),  # one look is not enough
        ({0: [WAITS] * 2, 1: [WAITS] * 3}, [0, 1], True),
        ({0: [WAITS] * 2}, [0], True),  # the other rank has answered
        ({0: [WAITS] * 2, 1: [WAITS, WAITS.replace("line 12", "line 13")]}, [0, 1], False),
        ({0: [WAITS] * 2, 1: [WAITS.replace("/torch/distributed/", "/triton/compiler/")] * 2}, [0, 1], False),
        ({0: [WAITS] * 2}, [0, 1], False),
        *(({0: [IN_FILE.format(line)] * 2}, [0], line != 3) for line in (1, 2, 3, 4)),
    ],
)
def test_ranks_hang_when_all_wait_where_they_waited(tmp_path, dumps, silent, hangs):
    mine = tmp_path / "mine.py"
    mine.write_text("work.wait()\nstore.get('a')\nwork.waits()\nwork.is_completed()\n")
    for rank, texts in dumps.items():
        (tmp_path / str(rank)).write_text("".join(texts).replace("mine.py", str(mine)))
    assert hang(tmp_path, silent) == hangs
    assert [0] in [ranks[:1] for ranks in lines_of_ranks(tmp_path).values()]


def test_ranks_that_wait_in_one_line_are_told_apart_by_who_called_it(tmp_path):
    for rank, caller in enumerate(("forward", "backward", "forward")):
        (tmp_path / str(rank)).write_text(f'{WAITS}  File "/home/me/ring.py", line 20 in {caller}\n')
    there = "ring.py, line 12 in attention, called by ring.py, line 20 in "
    assert lines_of_ranks(tmp_path, own_place) == {f"{there}forward": [0, 2], f"{there}backward": [1]}
    assert list(lines_of_ranks(tmp_path).values()) == [[0, 1, 2]]


SLEEPS = 'Stack 0.5\n  File "/home/me/ring.py", line 8 in attention\n'
COMPILES = SLEEPS.replace("0.5\n", f'0.5\n  File "{inspect.getfile(torch.nn.Module)}", line 2 in lower\n')
COMPUTES = [SLEEPS.replace("0.5", f"0.{n}").replace("line 8", f"line {8 + n % 2}") for n in range(SPINS)]


@pytest.mark.parametrize(
    ("looks", "rests"),
    [
        ([SLEEPS] * ENOUGH, True),
        ([WAITS] * ENOUGH, True),
        ([SLEEPS] * (ENOUGH - 1), False),
        ([SLEEPS.replace("0.5", "0.4"), *[SLEEPS] * (ENOUGH - 1)], False),  # it has computed
        ([COMPILES] * ENOUGH, False),
        (COMPUTES, True),
        (COMPUTES[1:], False),
        ([COMPILES, *COMPUTES[1:]], False),
    ],
)
def test_a_rank_rests_that_computes_nothing_or_for_long_in_a_line_of_the_user(tmp_path, looks, rests):
    (tmp_path / "0").write_text("".join([SLEEPS] * SPINS))
    (tmp_path / "1").write_text("".join(looks))
    assert rest(tmp_path, [0, 1]) == rests
    assert SPINS * OFTEN * SECONDS < 60  # seconds in which a ring is told
