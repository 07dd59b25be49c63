"""docs/doctor_in_ci.md: its files are what they say; its commands run in a stranger's project and print what is shown.

The fixture `ring_doctor` too; and what other programs read: levels and exit statuses; and that no option is lost on its
way.
"""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
import yaml

import ring_doctor.__main__ as command
from ring_doctor import assertion, pytest_plugin
from ring_doctor.asking import examination
from ring_doctor.asking.answers import FAILED, LATE, OK, REFUSED, Answer
from ring_doctor.asking.calls import RankResults, prepare
from ring_doctor.asking.case import Case
from ring_doctor.asking.job import DEADLOCK, START, CannotExamine, Job
from ring_doctor.asking.patient import patient_of
from ring_doctor.asking.questions import Question
from ring_doctor.assertion import assert_ring
from ring_doctor.options import parse
from ringlab.support import processes
from ringlab.support.processes import LostRank, Raised
from tests.commands import LIMIT, ROOT, check_shown
from tests.doctor.examined import on_these
from tests.wrong import odd_patients

PAGE = (ROOT / "docs/doctor_in_ci.md").read_text()
BLOCKS = {  # by the name in its first line, the file
    name: body for name, body in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", PAGE, re.M | re.S)
}
SHOWN = dict(re.findall(r"^```console\n\$ ([^\n]+)\n(.*?)^```", PAGE, re.M | re.S))
QUICK = "ring-doctor my_package.ring:attention --quick"
JUNIT = "--junitxml ring.xml "
PROJECT = ("my_package/ring.py", "tests/test_ring.py")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with the files of the page."""
    folder = tmp_path_factory.mktemp("project")
    for name, body in BLOCKS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(body if name != "my_package/ring.py" else f"# {name}\n{body}")
    (folder / "my_package/__init__.py").touch()
    return folder


def run_pytest(folder, command):
    """A line of the page, in a project where the package is installed: the plug-in is that of this checkout."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # In this environment the package may be installed from another checkout, without its plug-in.
    plain |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    plain |= {"PYTEST_ADDOPTS": f"-p ring_doctor.pytest_plugin -p no:cacheprovider {JUNIT}"}
    words = [sys.executable, "-m", *command.split()]
    return subprocess.run(words, cwd=folder, env=plain, capture_output=True, text=True, timeout=3 * LIMIT)


def test_the_files_of_ci_are_read_and_have_commands_that_these_tests_run():
    assert {*BLOCKS} - {".github/workflows/ring.yml", ".gitlab-ci.yml", ".pre-commit-config.yaml"} == {*PROJECT}
    workflow, gitlab, hooks = (yaml.safe_load(body) for name, body in BLOCKS.items() if name not in PROJECT)
    assert set(workflow[True]) == {"push", "pull_request", "schedule"}  # YAML 1.1 reads `on` as True
    ([job], [test], [repo]) = workflow["jobs"].values(), gitlab.values(), hooks["repos"]
    [hook] = repo["hooks"]
    said = [step["run"] for step in job["steps"] if "uses" not in step] + test["script"] + [hook["entry"]]
    first, second = SHOWN
    assert first == QUICK
    whole = "ring-doctor my_package.ring:attention --html ring.html"
    commands = {QUICK, whole, second.replace("tests/", f"{JUNIT}tests/")}
    assert {command for command in said if not command.startswith("pip install")} == commands
    assert f"--junitxml {test['artifacts']['reports']['junit']} " == JUNIT
    assert {"id", "name", "entry", "language"} <= set(hook)
    assert re.search(hook["files"], "my_package/ring.py")


@pytest.fixture
def there(project, monkeypatch):
    """Ranks that find the project: they start in it."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    pool = processes.Ranks()
    yield pool
    pool.stop()


@pytest.mark.slow
@pytest.mark.parametrize("line", SHOWN)
def test_a_command_prints_what_is_shown(project, line, there, capsys):
    if line == QUICK:
        with on_these(there):
            assert command.main(line.split()[1:]) == 1
        printed = capsys.readouterr().out
    else:
        done = run_pytest(project, line)
        assert done.returncode == 1
        printed = done.stdout
        [suite] = ElementTree.parse(project / "ring.xml").getroot()
        assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["1", "1", "0"]
        assert "it is     The scores are scaled twice." in suite.find("testcase/failure").text
    check_shown(SHOWN[line], printed)


def test_the_plugin_costs_no_import_of_torch():
    code = "import sys, ring_doctor.pytest_plugin; print([x for x in ('torch', 'numpy') if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# What other programs read. No process is started: the ranks are replaced by answers ----------------------------------


RIGHT_RING = "tests.wrong.odd_patients:right"


@pytest.mark.parametrize(
    ("level", "status"),
    [("wrong", 1), ("imprecise in 16 bits", 1), ("right", 0), ("right for what it takes", 0), ("cannot tell", 3)],
)
def test_the_exit_status_says_the_level(capsys, level, status):
    outcome = CannotExamine("no") if level == "cannot tell" else ({"level": level}, "report", "")
    with mock.patch.object(command, "of_attention", side_effect=[outcome]):
        assert command.run(parse([RIGHT_RING])) == status
    assert capsys.readouterr().out == ("CANNOT TELL: no\n" if level == "cannot tell" else "report\n")


def test_a_reader_that_has_read_enough_changes_no_status(capfd):
    enough = mock.Mock(side_effect=BrokenPipeError)
    outcome = mock.Mock(return_value=({"level": "wrong"}, "report", ""))
    with (
        mock.patch.multiple(command, of_attention=outcome, print=enough, create=True),
        mock.patch("os.dup2") as to_nowhere,
    ):
        assert command.run(parse([RIGHT_RING])) == 1
    to_nowhere.assert_called_once()


def asked(how):
    """What an examination of `right` asks, whose ranks answer rightly at once: seeds, ranks, seconds; is it quick?"""
    made, cases = [], []

    class Answers(Job):
        def __init__(self, patient, size, seconds, device):
            super().__init__(patient, size, seconds, device)
            self.ready = True
            made.append((seconds, device))

        def ask(self, question):
            cases.append(question.case)
            return Answer(question, OK)

    with mock.patch.object(examination, "Job", Answers):
        how()
    return {case.seed for case in cases}, {case.world_size for case in cases}, {*made}, len(cases) < 100


OPTIONS = {  # of the command, and of assert_ring; what is asked
    "": ({"device": "auto"}, ({0}, {1, 2, 3, 4, 5}, {(10.0, "auto")}, False)),
    "--seed=3 --time-limit=7 --device=cuda": (
        {"seed": 3, "seconds": 7.0, "device": "cuda"},
        ({3}, {1, 2, 3, 4, 5}, {(7.0, "cuda")}, False),
    ),
    "--worlds=2,3 --quick": (
        {"worlds": (2, 3), "quick": True, "device": "auto"},
        ({0}, {2, 3}, {(10.0, "auto")}, True),
    ),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_an_option_reaches_the_questions(options, tmp_path):
    """And the page of a right ring, which has no X-ray, is written; each step is told."""
    claims, expected = OPTIONS[options]
    steps, page = [], tmp_path / "ring.html"
    telling = mock.Mock(return_value=nullcontext(steps.append))
    options = [RIGHT_RING, *options.split(), f"--html={page}"]
    with mock.patch.object(command, "choose_device"), mock.patch.object(processes, "choose_device"):  # there is no GPU
        with mock.patch.object(command, "telling", telling):
            assert asked(lambda: command.run(parse(options))) == expected
        assert asked(lambda: assert_ring(odd_patients.right, **claims)) == expected
    assert steps[0].startswith("starting: P = ")
    assert '<h1 class="ok">HEALTHY: ' in page.read_text()


def test_the_device_is_looked_for_before_any_rank_starts():
    with mock.patch.object(command, "choose_device", side_effect=ValueError("no GPU")) as choose:
        assert command.run(parse([RIGHT_RING, "--device=cuda"])) == 2
    choose.assert_called_once_with("cuda", 5)


@pytest.mark.parametrize(("error", "how"), [(AssertionError, {}), (ValueError, {"quick": False})])
def test_the_fixture_fails_with_one_sentence_and_nothing_of_ours(monkeypatch, error, how):
    monkeypatch.setattr(assertion, "assert_ring", mock.Mock(side_effect=error("SICK")))
    request = mock.Mock(**{"config.getoption.return_value": True})
    with pytest.raises(pytest.fail.Exception, match=r"^SICK$") as failed:
        pytest_plugin.ring_doctor.__wrapped__(request)(len, seed=1, **how)
    assert (failed.value.__cause__, failed.value.__suppress_context__) == (None, True)  # pytest shows no other error
    assertion.assert_ring.assert_called_once_with(len, **{"seed": 1, "quick": True, **how})


def test_each_option_reaches_the_step_of_a_model():
    found = mock.Mock(level="wrong", **{"as_json.return_value": {"errors": {"dq": 0.5}}})
    options = ["--model", "--layout=zigzag", "--vocab=8", "--seed=5", "--device=cuda", "--time-limit=9"]
    with mock.patch.object(command, "examine_model", return_value=found) as examine_model:
        said, *_ = command.of_model(parse(["a:step", *options]), print)
    assert (said["healthy"], said["errors"]) == (False, {"dq": 0.5})
    given = {"layout": "zigzag", "vocab": 8, "seed": 5, "device": "cuda", "seconds": 9.0, "progress": print}
    examine_model.assert_called_once_with("a:step", **given)


def test_another_seed_gives_other_numbers():
    case = Case(3)
    for x, y in zip(case.whole(), replace(case, seed=1).whole(), strict=True):
        assert not torch.isclose(x, y).any()


class Ranks:
    """A pool whose ranks give these outcomes; the set-ups and the time limits of the calls are noted."""

    def __init__(self, *outcomes):
        self.results, self.seconds, self.limits, self.stopped = outcomes, 0.0, [], False

    def __call__(self, size, work, patient):
        self.limits.append((self.seconds, work))

    def outcomes(self, size, work, patient, question, folder, seconds):
        self.limits.append((self.seconds, seconds))
        if isinstance(self.results[0], RuntimeError | LostRank):
            for rank, stacks in (self.results[1] or {}).items():
                (folder / str(rank)).write_text(stacks)
            raise self.results[0]
        return list(self.results)

    def stop(self):
        self.stopped = True


def job_of(*outcomes):
    job = Job(patient_of(odd_patients.right), len(outcomes), 7.0, "cpu")
    job.ranks, job.ready = Ranks(*outcomes), True
    return job


def test_the_first_call_of_each_kind_has_the_time_of_a_set_up():
    """Libraries compile then."""
    chunk = RankResults({"out": torch.zeros(1, 2, 6, 4)})
    job = job_of(*[chunk] * 4)
    for members in ((1, 2, 3), (1, 2, 3)):
        job.ask(Question(Case(3, 18), members=members))
    for how in ("plain", "plain", "without gradients", "plain"):
        job.ask(Question(Case(4, 24), how))
    job.slowest = 5.0  # seconds of an answer
    for _ in range(2):
        job.ask(Question(Case(4, 24, causal=True)))
    assert job.ask(Question(Case(4, 7, layout="zigzag"))).state == REFUSED  # a layout that does not fit is no call
    job.keeps = True  # a ring that keeps a length gets new processes for another one
    for length in (24, 28, 28):
        job.ask(Question(Case(4, length)))
    first, later, set_up = (START, 7.0), (7.0, 7.0), (START, prepare)
    assert job.ranks.limits == [*[first, later] * 3, *[slow := (15.0, 7.0)] * 3, set_up, first, slow]


def test_a_set_up_that_fails_cannot_be_examined():
    job = job_of(RuntimeError("trace\nno such mesh"), None, None)
    with pytest.raises(CannotExamine, match=r"^its set-up fails: no such mesh$"):
        job.ask(Question(Case(3)))
    with mock.patch.object(job._errors, "cleanup") as cleaned:
        job.close()
    assert (job.ranks.stopped, cleaned.called) == (True, True)


NO, ODD = Raised("ValueError", "no", ""), Raised("KeyError", "k", "", "ring.py, line 3 in f")
CLOSED = "[enforce fail] Connection closed by peer [127.0.0.1]:1"
KINDS = (("RuntimeError", CLOSED), ("ValueError", CLOSED), ("RuntimeError", "shape"))
PEER, OF_USER, SHAPE = (Raised(kind, said, "") for kind, said in KINDS)  # of a lost connection, and of none
NO_OUT = Raised("WrongResult", "no out", "")
FINE = RankResults({"out": torch.zeros(1, 2, 8, 4)})


@pytest.mark.parametrize(
    ("outcomes", "feature", "state", "says"),
    [
        ((NO, NO, NO), "", REFUSED, "ValueError: no"),
        ((NO, FINE, FINE), "", FAILED, "rank 0 raised ValueError: no"),  # of one rank: no refusal
        ((FINE, NO, NO), "grouped queries", FAILED, "ranks 1, 2 raised ValueError: no"),
        ((PEER, NO, PEER), "", FAILED, "rank 1 raised ValueError: no"),  # the others lost their connection to it
        ((OF_USER, NO, NO), "", REFUSED, f"ValueError: {CLOSED}"),
        ((SHAPE, NO, NO), "", FAILED, "RuntimeError: shape"),
        ((ODD, ODD, ODD), "", FAILED, "KeyError: k (ring.py, line 3 in f)"),
        ((ODD, ODD, ODD), "grouped queries", FAILED, "KeyError: k (ring.py, line 3 in f)"),  # a crash is no refusal
        ((NO_OUT, NO_OUT, NO_OUT), "grouped queries", FAILED, "WrongResult: no out"),  # it took the input
    ],
)
def test_only_an_error_of_every_rank_may_be_a_refusal(outcomes, feature, state, says):
    job = job_of(*outcomes)
    answer = job.ask(Question(Case(3), feature=feature))
    assert (answer.state, answer.says) == (state, says)
    assert (f" {answer.kind}: " in f" {says}", answer.where) == (True, ODD.where * (ODD in outcomes))
    assert answer.raised == (FINE not in outcomes and PEER not in outcomes)
    assert answer.returned == (NO_OUT in outcomes)
    assert job.ready == (not job.ranks.stopped) == all(each not in outcomes for each in (ODD, PEER, SHAPE, NO_OUT))


WAITS = f'Stack\n  File "{torch.distributed.__file__}", line 2 in recv\n  File "ring.py", line 3 in f\n'
THERE = "no answer in time; ranks 1, 2 in ring.py, line 3 in f"


@pytest.mark.parametrize(
    ("silent", "raised", "looks", "state", "hangs", "says"),
    [
        ([1, 2], {}, {1: 2, 2: 2}, FAILED, True, f"{THERE}; rank 0 has returned"),
        ([0, 1, 2], {}, {0: 2, 1: 2, 2: 2}, FAILED, True, f"{DEADLOCK.format('recv')}; ranks 0, 1, 2{THERE[29:]}"),
        ([1, 2], {}, {1: 2, 2: 1}, LATE, True, f"{THERE}; rank 0 has returned"),  # one look proves nothing
        ([1, 2], {0: NO}, {}, FAILED, False, "rank 0 raised ValueError: no; no answer in time"),
        ([1, 2], {0: PEER}, {1: 2, 2: 2}, FAILED, True, THERE),
        ([], {0: PEER}, {}, FAILED, False, "rank 2 died; a message of 48 bytes came for a buffer of 24"),
    ],
)
def test_what_lost_ranks_say(silent, raised, looks, state, hangs, says):
    reason = "no answer in time" if silent else "rank 2 died"
    job = job_of(LostRank(reason, raised, silent), {rank: n * WAITS for rank, n in looks.items()}, None)
    (Path(job._errors.name) / "stderr.2").write_text("x\n what():  [f.cc] op.preamble.length <= op.nbytes. 48 vs 24\n")
    answer = job.ask(Question(Case(3)))
    assert (answer.state, answer.hangs, answer.lost, answer.silent) == (state, hangs, True, (*silent,))
    assert (answer.says, job.ready, job.ranks.stopped) == (says, False, True)
