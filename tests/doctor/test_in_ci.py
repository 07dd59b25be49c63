"""docs/doctor_in_ci.md: its files are what they say; its commands run in a stranger's project and print what is shown.

The fixture `ring_doctor` too.
"""

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import yaml

from ring_doctor import __main__ as doctor
from tests.commands import LIMIT, ROOT, check_shown
from tests.doctor.examined import on_these

PAGE = (ROOT / "docs/doctor_in_ci.md").read_text()
BLOCKS = {  # by the name in its first line, the file
    name: body for name, body in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", PAGE, re.M | re.S)
}
SHOWN = dict(re.findall(r"^```console\n\$ ([^\n]+)\n(.*?)^```", PAGE, re.M | re.S))
QUICK = "ring-doctor my_package.ring:attention --quick"
JUNIT = "--junitxml ring.xml "


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
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "PYTEST_"))}
    # In this environment the package may be installed from another checkout, without its plug-in.
    plain |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    plain |= {"PYTEST_ADDOPTS": f"-p ring_doctor.pytest_plugin -p no:cacheprovider {JUNIT}"}
    words = [sys.executable, "-m", *command.split()]
    return subprocess.run(words, cwd=folder, env=plain, capture_output=True, text=True, timeout=3 * LIMIT)


def commands(node):
    """Every command of a file of CI."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("run", "script", "entry"):
                yield from value if isinstance(value, list) else [value]
            yield from commands(value)
    for value in node if isinstance(node, list) else ():
        yield from commands(value)


def test_the_page_has_the_files_that_these_tests_know():
    assert set(BLOCKS) == {
        *("my_package/ring.py", "tests/test_ring.py"),
        *(".github/workflows/ring.yml", ".gitlab-ci.yml", ".pre-commit-config.yaml"),
    }
    assert len(SHOWN) == 2


def test_the_files_of_ci_have_the_keys_that_these_programs_read():
    workflow = yaml.safe_load(BLOCKS[".github/workflows/ring.yml"])
    assert set(workflow[True]) == {"push", "pull_request", "schedule"}  # YAML 1.1 reads `on` as True
    [job] = workflow["jobs"].values()
    assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    [job] = yaml.safe_load(BLOCKS[".gitlab-ci.yml"]).values()
    assert f"--junitxml {job['artifacts']['reports']['junit']} " in job["script"][-1]
    [repo] = yaml.safe_load(BLOCKS[".pre-commit-config.yaml"])["repos"]
    [hook] = repo["hooks"]
    assert {"id", "name", "entry", "language"} <= set(hook)
    assert re.search(hook["files"], "my_package/ring.py")


def ci_commands():
    files = [yaml.safe_load(body) for name, body in BLOCKS.items() if name.endswith(("yml", "yaml"))]
    said = dict.fromkeys(command for file in files for command in commands(file))
    return [command for command in said if not command.startswith("pip install")]


WHOLE = "ring-doctor my_package.ring:attention --html ring.html"


def test_the_files_of_ci_have_commands_that_these_tests_run():
    first, second = SHOWN
    assert set(ci_commands()) == {QUICK, WHOLE, second.replace("tests/", f"{JUNIT}tests/")}
    assert first == f"GITHUB_ACTIONS=true {QUICK}"


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_prints_what_is_shown(project, command, ranks, capsys, monkeypatch):
    if command.startswith("GITHUB"):  # on ranks that are there already
        assignment, _, *words = command.split()
        monkeypatch.setenv(*assignment.split("="))
        monkeypatch.chdir(project)
        monkeypatch.syspath_prepend(project)
        with on_these(ranks):
            assert doctor.main(words) == 1
        printed = capsys.readouterr().out
    else:
        done = run_pytest(project, command)
        assert done.returncode == 1
        printed = done.stdout
        [suite] = ElementTree.parse(project / "ring.xml").getroot()
        assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["1", "1", "0"]
        assert "it is     The scores are scaled twice." in suite.find("testcase/failure").text
    *shown, last = SHOWN[command].splitlines()
    if last.endswith("::Quick: ..."):
        *others, note = printed.splitlines()
        assert note.startswith(last.removesuffix(" ..."))
        printed = "\n".join(others)
    else:
        shown.append(last)
    check_shown("\n".join(shown), printed)


def test_the_plugin_costs_no_import_of_torch():
    code = "import sys, ring_doctor.pytest_plugin; print([x for x in ('torch', 'numpy') if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
