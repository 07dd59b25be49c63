"""What a name names: an attention, a layout, a training step. Every process imports it by the name; nothing is sent.

    named("my_package.ring:attention")        the function, or the object with __call__, of this module
    named("my_package.ring:Ring.apply")       an attribute of an attribute
    named("path/to/ring.py:attention")        the module is in a file: Python finds modules in its folder too

    portable(function)    ->    what can be sent to other processes: the function itself, or its name

So a closure, a lambda, a functools.partial or a torch.nn.Module can be examined, if a module makes it when it is
imported.

Before: nothing. After: case.py.
Source: the form module:object of entry points, Python Packaging User Guide.
"""

import importlib
import operator
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from ringlab.ring.layouts import LAYOUTS, Layout
from ringlab.support.expect import expect
from ringlab.support.processes import place_of

EXPECTED = "module:function, as my_package.ring:attention"


@dataclass(frozen=True)
class ByName:
    """A function that each process imports by its name."""

    name: str

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # where inspect.signature looks
        found: Callable[..., Any] = named(self.name)
        return found

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)


def by_name(name: str) -> ByName:
    """What `named` finds, for other processes. Raises ValueError as `named` does."""
    home, _, attribute = name.partition(":")
    found = ByName(f"{module_named(home).__name__}:{attribute}")
    named(found.name)
    return found


def named(name: str) -> Any:
    """The function, the object with __call__ or the `Layout` that "module:name" names.

    Raises ValueError when there is none, and when the module raises or ends the process while it is imported.
    """
    home, _, attribute = name.partition(":")
    module = module_named(home)
    try:
        found = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise ValueError(f"{name!r} cannot be imported: {error}; expected {EXPECTED}") from error
    expect(callable(found) or isinstance(found, Layout), f"{name!r} is {type(found).__name__}", "a function")
    return found


def module_named(name: str) -> ModuleType:
    """The module "my_package.ring" or "path/to/ring.py", imported. Raises ValueError as `named` does."""
    is_file = name.endswith(".py")
    expect(is_file or (name and not name.startswith(".")), f"{name!r} is no name of a module", EXPECTED)
    module = _module_of(name) if is_file else name
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        here = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name or '-'}.")
        why = f"{error}; expected {EXPECTED}" if here else _raised(error)  # or another module is missing, or it fails
        raise ValueError(f"{name!r} cannot be imported: {why}") from error
    if is_file:
        given = f"{name!r} cannot be imported: the module {module} is {found.__file__}"
        expect(Path(found.__file__ or "").resolve() == Path(name).resolve(), given, "a file of another name")
    return found


def _module_of(path: str) -> str:
    """The module that a file is. Its folder, or that of its package, becomes the first where Python finds modules."""
    file = Path(path).resolve()
    expect(file.is_file(), f"there is no file {path!r}", "path/to/ring.py:function")
    home = file.parent
    while (home / "__init__.py").exists():
        home = home.parent
    if str(home) not in sys.path:
        sys.path.insert(0, str(home))
    return ".".join(file.relative_to(home).with_suffix("").parts)


def _raised(error: BaseException) -> str:
    said, at = f"{type(error).__name__}: {error}".splitlines()[0], place_of(error)
    return f"it raised {said}" + (f" ({at})" if at else "")


def portable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function if pickle can send it, or `ByName` if its module has it under a name.

    Raises ValueError for any other function: it is made where other processes cannot find it.
    """
    module, _, name = name_of(function).partition(":")
    if module == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(f"{name} was defined in a notebook or a shell; expected a function of a file: {TO_A_FILE}")
    try:
        pickle.dumps(function)
    except Exception as error:  # whatever the objects that it holds may raise
        for attribute, value in vars(sys.modules.get(module, object)).items():
            if value is function:
                return ByName(f"{module}:{attribute}")
        raise ValueError(f"{name} cannot be sent to other processes: {error}; {TO_A_FILE}") from error
    return function


def name_of(function: Callable[..., Any]) -> str:
    """module:name of a function, of the function in a functools.partial, or of the class of another object."""
    of = getattr(function, "func", function)
    of = of if hasattr(of, "__qualname__") else type(of)
    return f"{of.__module__}:{of.__qualname__}"


TO_A_FILE = "make it in a module, when that is imported, and give its name: assert_ring('my_package.ring:attention')"


def layout_of(name: str) -> str | Layout | Callable[[int, int, int], Tensor]:
    """The layout of this name, or what "module:name" names. Raises ValueError when there is none."""
    return name if name in LAYOUTS else named(name)
