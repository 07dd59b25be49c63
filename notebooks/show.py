"""Show the source of a function in a notebook, as it is in its file."""

import inspect
import re
from collections.abc import Callable
from typing import Any


def print_source(*functions: Callable[..., Any], last: int = 0) -> None:
    """Print functions without their docstrings, or only the `last` lines of each."""
    sources = [re.sub(r' *""".*?"""\n', "", inspect.getsource(function), flags=re.S) for function in functions]
    print("\n".join("".join(source.splitlines(keepends=True)[-last:]) for source in sources))
