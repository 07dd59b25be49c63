"""Optional packages: what needs one says so in one sentence, with the command that installs it.

with extra("jax", __name__):
    import jax
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

COMES_WITH = "; it comes with: "
PYTHON = dict.fromkeys(("hf", "jax", "loops"), ", with Python 3.11 or newer")


def install(name: str) -> str:
    """How to install the extra `name` of pyproject.toml."""
    return f"pip install -e '.[{name}]' in a checkout of this project{PYTHON.get(name, '')}"


@contextmanager
def extra(name: str, module: str) -> Iterator[None]:
    """The body imports packages of the extra `name`, for `module`, its __name__.

    Raises ImportError, in one sentence, when a package is missing, or is of a version that lacks something. A command
    ends with that sentence and status 1.
    """
    try:
        yield
    except ImportError as error:
        other = "" if isinstance(error, ModuleNotFoundError) else ": another version than the one that was tried"
        missing = str(error) if COMES_WITH in str(error) else f"{error}{other}{COMES_WITH}{install(name)}"
        if module == "__main__":
            sys.exit(missing)
        raise type(error)(missing, name=error.name) from None
