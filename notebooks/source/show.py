"""Show the source of a function in a notebook, as it is in its file."""

import inspect
import re
from collections.abc import Callable
from typing import Any


def print_source(*functions: Callable[..., Any], first: int | None = None, last: int = 0) -> None:
    """Print functions without their docstrings, or only the `first` or the `last` lines of each.

    A page shows at most 12 lines at once, with a sentence about them above (tests/pages/test_notebooks.py).
    """
    sources = [re.sub(r' *""".*?"""\n', "", inspect.getsource(function), flags=re.S) for function in functions]
    print("\n".join("".join(source.splitlines(keepends=True)[:first][-last:]) for source in sources))
