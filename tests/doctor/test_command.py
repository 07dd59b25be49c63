"""The doctor's command: exit statuses, one sentence for bad input, the report as text, JSON and page; assert_ring."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from html import escape
from importlib.util import find_spec
from unittest import mock

import pytest

import ring_doctor.__main__ as command
from ring_doctor import examine
from ring_doctor.asking.answers import FAILED, OK, REFUSED, WRONG
from ring_doctor.options import parse
from ring_doctor.report import page
from tests.commands import ROOT, ends_soon, wait_for
from tests.doctor.examined import on_these
from tests.wrong import odd_patients

HERE = "tests.wrong.odd_patients"
FEW = ("--worlds", "3", "--forward-only", "--dtype", "float64")  # few questions


MODULE_NOT_FOUND = "'nowhere' cannot be imported: No module named 'nowhere'; expected module:function"
TORCHRUN = f"{HERE}:right --quick"  # under torchrun, which sets WORLD_SIZE
BAD = [  # what is typed, and the sentence
    (TORCHRUN, "WORLD_SIZE is set, as torchrun and sbatch scripts set it; expected no torchrun"),
    ("nowhere:f", f"ring-doctor: {MODULE_NOT_FOUND}"),
    (f"{HERE}:right --worlds 1,x", "argument --worlds: 'x' given, expected a whole number"),
    *(
        (f"{HERE}:right --time-limit {n}", f"--time-limit is {n}; expected a number of seconds")
        for n in ("0", "inf", "nan")
    ),
    (f"{HERE}:right --json /nowhere/x.json", "expected a name ending in .json of a file, in a folder that exists"),
    (f"{HERE}:right --html x.htm", "'x.htm' given, expected a name ending in .html"),
    *(
        (f"{HERE}:right --model {of}", "a --model takes --layout, --vocab, --seed, --device and --time-limit;")
        for of in ("--quick", "--state", "--causal", "--worlds 3", "--layout zigzag --heads 4")
    ),
    (f"{HERE}:right --vocab 9", "--vocab is given without --model"),
    *((f"run 1 2 --{of} 0", f"argument --{of}: '0' given, expected a whole") for of in ("steps", "time-limit")),
    ("run 1 2 --json x.txt", "argument --json: 'x.txt' given, expected a name ending in .json"),
    ("", "ring-doctor: the following arguments are required: module:function"),
]


@pytest.mark.parametrize(("typed", "sentence"), BAD)
def test_bad_input_is_one_sentence_and_status_2(capsys, typed, sentence):
    with mock.patch.dict(os.environ):
        os.environ.pop("WORLD_SIZE", None)
        os.environ |= {"WORLD_SIZE": "3"} if typed == TORCHRUN else {}
        try:
            status = command.main(typed.split())
        except SystemExit as end:
            status = end.code
    seen = capsys.readouterr()
    assert (status, seen.out) == (2, "")
    [said] = seen.err.splitlines()
    assert re.search(sentence, said)


def test_the_help_says_the_exit_status(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "0 healthy, or healthy for what it takes    1 sick    2 bad input    3 cannot tell" in said
    assert max(map(len, said.splitlines())) <= 120


def test_a_sick_ring_on_the_terminal_in_json_and_on_the_page(ranks, tmp_path, capsys):
    """Verdict, diagnosis, answers and X-ray; the page loads nothing."""
    files = {name: tmp_path / f"report.{name}" for name in ("json", "html")}
    with on_these(ranks):
        options = [f"--{name}={path}" for name, path in files.items()]
        assert command.main([f"{HERE}:own_chunk", *FEW, *options]) == 1
    verdict, *others = capsys.readouterr().out.splitlines()
    assert verdict == f"SICK: never_called or nothing_moves, in {HERE}:own_chunk"
    assert any(line.startswith("  what it is     The ring is not called") for line in others)
    assert any(re.match(r"3 ranks +0 +\d+ +0 +0$", line) for line in others)
    assert any(re.match(r"wrong     P = 3, no mask, .*C = 6, float64.*: off by out \d", line) for line in others)
    assert "    rank 0   ok       missing  missing" in others
    assert max(map(len, others)) < 200
    said, text = json.loads(files["json"].read_text()), files["html"].read_text()
    assert (said["healthy"], said["mistakes"]) == (False, [["never_called"], ["nothing_moves"]])
    assert {answer["state"] for answer in said["answers"]} <= {OK, WRONG, REFUSED, FAILED}
    wrong = [answer for answer in said["answers"] if answer["state"] == WRONG]
    assert all(answer["errors"]["out"]["largest"] > answer["errors"]["out"]["allowed"] for answer in wrong)
    assert wrong[0]["wrong"]["out"] == [0, 1, 2]
    assert not re.search(r"\s(src|href)=.(?!#)", text)
    assert f"<title>ring doctor: {HERE}:own_chunk</title>" in text
    assert text.count("<tr>") == 1 + len(said["answers"])
    assert "    rank 0   ok       missing  missing" in text
    assert ("<svg" in text) == (find_spec("matplotlib") is not None)


def test_a_page_shows_every_letter():
    answer = {"state": WRONG, "question": "<question>", "found": "<found>"}
    said = {"name": "<lambda>", "verdict": "a < b", "healthy": False, "torch": "2", "answers": [answer]}
    shown = page(said, "a < b\nby <class 'int'>")
    for words in ("<question>", "<found>", "<lambda>", "a < b", "by <class 'int'>"):
        assert (escape(words) in shown, words in shown) == (True, False)
    assert ('<h1 class="sick">' in shown, shown.count("<td class='sick'>"), shown.count("a &lt; b")) == (True, 1, 1)


def test_the_signals_that_end_it_exit_with_their_number(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with mock.patch.object(signal, "signal") as taken, mock.patch.object(command, "run"):
        command.main(["module:function"])
    assert {call.args[0] for call in taken.call_args_list} == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    for number, handler in (call.args for call in taken.call_args_list):
        with pytest.raises(SystemExit, match=str(128 + number)):
            handler(number, None)


def test_a_signal_ends_all_processes_at_once(tmp_path):
    psutil = pytest.importorskip("psutil")
    command = [sys.executable, "-m", "ring_doctor", f"{HERE}:leaves_its_number", "--worlds", "3"]
    environment = {**os.environ, "NUMBERS": str(tmp_path)}
    doctor = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: list(tmp_path.iterdir()), 3)
    others = psutil.Process(doctor.pid).children(recursive=True)
    assert {int(path.name) for path in tmp_path.iterdir()} <= {other.pid for other in others}
    doctor.send_signal(signal.SIGTERM)
    with ends_soon():
        printed, said = doctor.communicate()
        wait_for(lambda: [other for other in others if not other.is_running()], len(others))
    assert doctor.returncode == 128 + signal.SIGTERM
    assert printed == b""
    assert b"Traceback" not in said


@pytest.mark.parametrize("terminal", [False, True])
def test_it_says_how_far_it_is_and_clears_the_line_of_a_terminal(capsys, monkeypatch, terminal):
    monkeypatch.setattr(command, "QUIET", 0.02)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    threads, said = threading.enumerate(), []
    wanted = f"\r{99 * '7'}%, for 0 s\x1b[K" if terminal else f"ring-doctor: {99 * '7'}%, for 0 s\n"
    with contextlib.suppress(KeyError), command.telling() as tell:
        tell(f"{99 * '7'}% and more")
        wait_for(lambda: said.append(capsys.readouterr().err) or [text for text in said if wanted in text], 1)
        raise KeyError
    assert threads == threading.enumerate()
    assert capsys.readouterr().err.endswith("\r\x1b[K") == terminal


@pytest.mark.parametrize(("file", "homes"), [("a.py", ["."]), ("src/a.py", [".", "src"]), ("src/__init__.py", ["."])])
def test_modules_are_found_in_the_project_and_in_its_src(tmp_path, monkeypatch, capsys, file, homes):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    for _ in range(2):
        assert command.run(parse(["nowhere:f"])) == 2
    assert sys.path == [*(str(tmp_path / home) for home in homes), "elsewhere"]


FEW_ASKED = {"worlds": 3, "dtypes": "float64", "gradients": False}
EXAMINED = [  # a function, how it is asked, and whether it is healthy
    ("tests/wrong/odd_patients.py:made_of_zigzag", {"layouts": "zigzag", "causal": True}, True),
    (odd_patients.made_of_zigzag, {"layouts": "striped", "causal": True}, False),  # found in its module
    (odd_patients.sequence_first, {"tensors": "sbhd", "gradients": True}, True),
]


@pytest.mark.parametrize(("function", "how", "healthy"), EXAMINED)
def test_a_function_is_examined_as_it_is_said(ranks, function, how, healthy):
    steps = []
    with on_these(ranks):
        report = examine(function, **FEW_ASKED | how, quick=True, progress=steps.append)
    assert report.healthy == healthy
    assert steps[0].startswith("starting: P = 3, ")
    assert any(step.startswith("diagnosis: ") for step in steps) != healthy
    assert str(report).startswith(report.verdict)
