"""In a workflow of GitHub the verdict is a note at the line of the function, and the report is on the page of the run.

    ::error file=my_package/ring.py,line=5,title=SICK%3A scale_twice::...

Before: asking/names.py. After: __main__.py, the command.
Source: GitHub Docs, "Workflow commands for GitHub Actions"; the escapes are those of its toolkit, core/src/command.ts.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ring_doctor.asking.answers import STATUS


def tell_github(function: Callable[..., Any], level: str, head: str, report: str, *, passed: bool) -> str:
    """Write the report on the page of the run. Returns the line that becomes a note at the function.

    "" for a right ring, and where no workflow of GitHub runs this process. The first line of `head`, which belongs to
    the report, becomes the title. A level that the user accepts is a warning, not an error.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return ""
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with contextlib.suppress(OSError), Path(summary).open("a", encoding="utf-8") as file:  # a container may lack it
            file.write(f"### ring-doctor: {level}\n\n```text\n{report}\n```\n")
    if STATUS[level] == 0:
        return ""
    verdict, _, others = head.partition("\n")
    properties = {**line_of(function, Path(os.environ.get("GITHUB_WORKSPACE", "."))), "title": verdict}
    listed = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::{'warning' if passed else 'error'} {listed}::{_escaped(others.strip() or verdict)}"


def line_of(function: Callable[..., Any], root: Path) -> dict[str, str]:
    """{file, line} where a function is written, the file as seen from `root`; {} outside of it."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    try:
        file, (_, line) = Path(inspect.getsourcefile(function) or ""), inspect.getsourcelines(function)
        return {"file": str(file.resolve().relative_to(root.resolve())), "line": str(line)}
    except (OSError, TypeError, ValueError):  # no Python source: a compiled function, an object; or in another folder
        return {}


def _escaped(text: str, others: str = "") -> str:
    for character in f"%\r\n{others}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text
