"""The verdict as GitHub shows it: a note at the line of the function, and the report on the page of the run.

    ::error file=my_package/ring.py,line=12,title=SICK%3A scale_twice, in my_package.ring%3Aattention::...

Shapes: none here.

Before: exit_status.py. After: __main__.py, which prints it where GITHUB_ACTIONS is true.
Source: GitHub Docs, "Workflow commands for GitHub Actions"; the escapes are those of its toolkit, core/src/command.ts.
"""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ring_doctor.exit_status import STATUS


def annotation(level: str, said: str, place: tuple[str, int] | None, *, passed: bool) -> str:
    """The line that GitHub turns into a note; "" for a right ring.

    `said` is a report: its first line becomes the title. A level that the user accepts is a warning, not an error.
    """
    if STATUS[level] == 0:
        return ""
    verdict, _, others = said.partition("\n")
    properties = {"file": place[0], "line": str(place[1])} if place else {}
    properties["title"] = verdict
    listed = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::{'warning' if passed else 'error'} {listed}::{_escaped(others.strip() or verdict)}"


def summary(level: str, said: str) -> str:
    """The report in Markdown, for the page of the run."""
    return f"### ring-doctor: {level}\n\n```text\n{said}\n```\n"


def place_of(function: Callable[..., Any], root: Path) -> tuple[str, int] | None:
    """(file, line) where a function is written, the file as seen from `root`; None outside of it."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    try:
        file, (_, line) = inspect.getsourcefile(function), inspect.getsourcelines(function)
        return str(Path(file or "").resolve().relative_to(root.resolve())), line
    except (OSError, TypeError, ValueError):  # no Python source: a compiled function, an object; or in another folder
        return None


def on_github() -> bool:
    """Whether this process runs in a workflow of GitHub, or of a program that does as GitHub does."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def _escaped(text: str, others: str = "") -> str:
    for character in f"%\r\n{others}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text
