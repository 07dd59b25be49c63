"""What all checks share: open answers stay open, errors become hints, and answers of every kind are compared.

A check takes an answer and tries it. It raises `NotYet` with a hint when the answer is wrong. When the answer is
right it returns None or a remark. `exercise` turns that into a line: "right", "right: remark", "not yet: hint", `OPEN`.

The same answer is right in many forms. `number`, `items` and `as_tensor` read them: a Python number, an array of numpy
or JAX, a tensor; a list, tuple, set or generator. A check tries fixed cases first, because hints are written for them,
and then cases that are drawn anew each time: a table of answers to the fixed cases is not enough.
Nothing guards against an answer that cheats: it would lie to its author only.
"""

import copy
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from decimal import Decimal
from functools import wraps
from inspect import Parameter, signature
from itertools import islice, permutations
from math import isclose
from numbers import Integral, Real
from random import Random
from typing import Any, get_origin

import numpy as np
import torch
from torch import Tensor

OPEN = "not answered yet: replace the ..."
SECONDS = 10.0  # a right answer needs some milliseconds
DRAWS = 6  # how many cases a check draws beside its fixed ones
MOST = 10_000  # no right answer has more items


class NotYet(Exception):
    """The answer is wrong; the message says what is wrong with it."""


class StillOpen(Exception):
    """The answer is a function that returns `...`."""


class TimeUp(BaseException):
    """The time limit: an answer's own `except Exception` does not catch it."""


def exercise(check: Callable[[Any], str | None]) -> Callable[[Any], str]:
    """Turn a check into a function that returns one line and never raises.

    An answer that is `...` or returns `...` is open, not wrong: the notebooks run to their end with open exercises.
    """
    (parameter,) = signature(check).parameters.values()
    wants_function = get_origin(parameter.annotation) is Callable

    @wraps(check)
    def checked(answer: Any) -> str:
        if answer is ...:
            return OPEN
        if callable(answer) != wants_function:
            expected = "a function" if wants_function else "a value, not a function"
            return f"not yet: expected {expected}, got {type(answer).__name__}"
        try:
            remark = check(watched(answer) if wants_function else answer)
        except StillOpen:
            return OPEN
        except NotYet as hint:
            return f"not yet: {hint}"
        except Exception as error:  # the check could not use what it was given
            return f"not yet: this is not the kind of answer asked for ({type(error).__name__}: {error})"
        return "right" if remark is None else f"right: {remark}"

    return checked


def watched(answer: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, called by `called`."""

    @wraps(answer)
    def call(*args: Any) -> Any:
        return called(answer, *args)

    return call


def called(answer: Callable[..., Any], *args: Any) -> Any:
    """answer(*args), on copies of the arguments; its own errors become hints, and `...` becomes `StillOpen`."""
    needs_parameters(answer, len(args))
    args = copy.deepcopy(args)  # an answer may work in place; what it does to them does not change what is expected
    try:
        with time_limit():
            given = answer(*args)
            if isinstance(given, Iterator):
                given = list(islice(given, MOST))
            if isinstance(given, list | tuple) and any(isinstance(x, Iterator) for x in given):
                given = [listed(x) if isinstance(x, Iterator) else x for x in given]
    except TimeUp:
        raise NotYet(f"your answer was still running after {SECONDS:g} s; expected some milliseconds") from None
    except (Exception, SystemExit) as error:
        raise NotYet(f"your answer ends in {type(error).__name__}: {error}") from error
    if given is ...:
        raise StillOpen
    return given


def needs_parameters(answer: Callable[..., Any], count: int) -> None:
    """Raise NotYet when a function cannot be called with so many arguments."""
    try:
        parameters = signature(answer)
    except ValueError:  # a function of C may have none
        return
    try:
        parameters.bind(*range(count))
    except TypeError:
        taken = [p.name for p in parameters.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        names = f" ({', '.join(taken)})" if taken else ""
        raise NotYet(f"the function is called with {count} argument(s); yours takes {len(taken)}{names}") from None


@contextmanager
def time_limit() -> Generator[None]:
    """Raise TimeUp in the body after SECONDS. (Only in a main thread of Unix, as that of a notebook is.)"""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeUp

    handler = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, SECONDS, 1.0)  # of the limit around this one, if there is one
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, handler)


def draws() -> Iterator[Random]:
    """DRAWS generators of random numbers; nobody knows their seeds."""
    return (Random() for _ in range(DRAWS))


def torch_generator(random: Random) -> torch.Generator:
    return torch.Generator().manual_seed(random.randrange(2**31))


# What an answer is -------------------------------------------------------------------------------------------------


def as_tensor(given: Any, expected: str = "a tensor") -> Tensor:
    """A tensor, an array, a number or a list of those, as a tensor of the CPU. Raises NotYet for anything else."""
    if given is ...:
        raise StillOpen
    try:
        if isinstance(given, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                return given.detach().cpu().as_subclass(Tensor)
        given = listed(given)
        if isinstance(given, list) and any(isinstance(x, Tensor | Sequence) and not isinstance(x, str) for x in given):
            return torch.stack([as_tensor(x, expected) for x in given])
        array = np.asarray(given)
        of_python = array.dtype == object and all(isinstance(x, Real | Decimal) for x in array.flat)
        if of_python or array.dtype == np.longdouble:  # Fraction and Decimal; numbers that torch does not know
            array = array.astype(float)
        return torch.as_tensor(array.copy())
    except (TypeError, ValueError, RuntimeError):
        raise NotYet(f"expected {expected}, got {type(given).__name__}") from None


def listed(given: Any) -> Any:
    """A list of what is in a sequence, an iterator or the values of a dict; other things stay."""
    in_order = isinstance(given, Sequence | deque | Iterator | ValuesView) and not isinstance(given, str | bytes)
    return list(islice(given, MOST)) if in_order else given


def number(given: Any) -> float:
    """A number as Python's int or float: also one of numpy, or the only one of a tensor. Raises NotYet otherwise."""
    if given is ...:
        raise StillOpen
    if isinstance(given, Tensor | np.ndarray | np.generic) or hasattr(given, "__array__"):
        tensor = as_tensor(given, "a number")
        if tensor.numel() != 1:
            raise NotYet(f"expected one number, got a {type(given).__name__} of shape {tuple(tensor.shape)}")
        given = tensor.item()
    if isinstance(given, bool) or not isinstance(given, Real | Decimal):
        raise NotYet(f"expected a number, got {type(given).__name__}")
    return int(given) if isinstance(given, Integral) else float(given)


def rounding(given: Any) -> float:
    """The relative error that the dtype of a number makes in some operations."""
    return 1e-6 if str(getattr(given, "dtype", "")).endswith("float32") else 1e-9


def items(given: Any, expected: str = "a list") -> list[Any]:
    """What is in a list, tuple, set, range, array or tensor. Raises NotYet when it is nothing of the kind."""
    if isinstance(given, Tensor):
        given = as_tensor(given)
    if isinstance(given, Tensor | np.ndarray):
        given = given.tolist()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise NotYet(f"expected {expected}, got {type(given).__name__}")
    found = list(islice(given, MOST))
    if isinstance(given, set | frozenset) and all(isinstance(x, Real) for x in found):
        found.sort()  # a set has no order
    if any(x is ... for x in found):
        raise StillOpen
    return found


def numbers(given: Any, expected: str = "a list of numbers") -> list[float]:
    """The numbers in a list, tuple, set, range, array or tensor; whole ones are int. Raises NotYet otherwise."""
    found = [number(x) for x in items(given, expected)]
    return [int(x) if isinstance(x, float) and x.is_integer() else x for x in found]


def several(given: Any, names: Sequence[str]) -> list[Any]:
    """The values of an answer that must have one for each name. Raises NotYet when there are more or fewer."""
    kind, given = type(given).__name__, listed(given)
    if isinstance(given, Tensor | np.ndarray) and given.ndim in (1, 2):
        given = list(given)
    if not isinstance(given, list) or len(given) != len(names):
        count = f"{len(given)} value(s)" if isinstance(given, list) else kind
        raise NotYet(f"expected {len(names)} values ({', '.join(names)}), got {count}")
    if any(x is ... for x in given):
        raise StillOpen
    return given


# What is right -----------------------------------------------------------------------------------------------------


def difference(given: Any, expected: Tensor, rtol: float = 1e-5) -> str | None:
    """What is wrong with a tensor, in words; None when it is `expected` up to rounding."""
    try:
        given = as_tensor(given, f"a tensor of shape {tuple(expected.shape)}")
    except NotYet as problem:
        return str(problem)
    if given.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(given.shape)}"
    if given.is_complex():
        return "expected real numbers, got complex ones"
    if given.isnan().any():
        return "there are NaNs in it; look for inf - inf, inf/inf or 0/0"
    size = expected[expected.isfinite()].double().abs().max() if expected.isfinite().any() else 0.0
    atol = rtol * max(0.1, float(size))  # a small number may be the difference of large ones
    if not torch.allclose(given.double(), expected.double(), rtol=rtol, atol=atol):
        return f"off by up to {(given.double() - expected.double()).abs().max():.3g}"
    return None


def in_order(given: Sequence[Any], expected: Mapping[str, Tensor]) -> None:
    """Raise NotYet when these are the expected values in another order."""
    for order in permutations(expected):  # the right order first
        if all(difference(x, expected[name], 1e-3) is None for x, name in zip(given, order, strict=True)):
            if order != tuple(expected):
                raise NotYet(f"the right values in another order, {', '.join(order)}: return {', '.join(expected)}")
            return


def compare_number(given: Any, right: float, hints: dict[float, str], otherwise: str, *, decimals: int = 0) -> None:
    """Raise NotYet unless `given` is `right`, rounded to `decimals` decimals or more exact.

    `hints` says what is wrong with each common wrong number, `otherwise` what to say of all others.
    """
    error = rounding(given)
    given = number(given)
    if error <= 1e-9:
        error = 0.0

    def near(value: float) -> bool:
        return abs(given - value) <= 0.501 * 10**-decimals + error * abs(value)

    if near(right):
        return
    for wrong, hint in hints.items():
        if near(wrong):
            raise NotYet(hint)
    if 0 < right < 1 and abs(given - 100 * right) <= 0.5:
        raise NotYet("give a share from 0 to 1, not per cent")
    if any(given == round(right, fewer) for fewer in range(1, decimals)):
        raise NotYet(f"{given} is right but not exact enough: give {decimals} decimals, or an expression")
    raise NotYet(f"{otherwise}; you say {given:,}")


def compare_formula(
    answer: Callable[..., Any],
    right: Callable[..., Any],
    wrong: dict[str, Callable[..., Any]],
    cases: Sequence[tuple[Any, ...]],
    otherwise: str,
    draw: Callable[[Random], tuple[Any, ...]] | None = None,
) -> None:
    """Raise NotYet unless `answer` gives what `right` gives in every case, and in others that `draw` draws.

    They give a number or a list of numbers. A case is what both are called with. `wrong` has the formula behind each
    hint. A hint is given when its formula explains the answer in every case: two mistakes with the same number in one
    case are still told apart.
    """

    def said(case: tuple[Any, ...]) -> tuple[Any, float]:
        given, expected = answer(*case), right(*case)
        if not isinstance(expected, list):
            return number(given), rounding(given)
        what = f"a list of {len(expected)} numbers"
        listed = numbers(given, what)
        if len(listed) != len(expected):
            raise NotYet(f"expected {what}, got {given!r}")
        return listed, 1e-9

    def is_value(said: tuple[Any, float], value: Any) -> bool:
        values = value if isinstance(value, list) else [value]
        given = said[0] if isinstance(value, list) else [said[0]]
        return all(isclose(x, y, rel_tol=said[1], abs_tol=1e-12) for x, y in zip(given, values, strict=True))

    def named(case: tuple[Any, ...]) -> str:
        inputs = zip(signature(right).parameters, case, strict=True)
        return ", ".join(f"{name} = {shown(x)}" for name, x in inputs)

    def shown(value: Any) -> str:
        return f"{value:,}" if isinstance(value, Real) else f"{value}"

    given = [said(case) for case in cases]
    failed = [(case, value) for case, value in zip(cases, given, strict=True) if not is_value(value, right(*case))]
    if failed:
        for hint, formula in wrong.items():
            if all(is_value(value, formula(*case)) for case, value in zip(cases, given, strict=True)):
                raise NotYet(hint)
        case, (value, _) = failed[0]
        raise NotYet(
            f"wrong in {len(failed)} of {len(cases)} cases; with {named(case)} you say {shown(value)}: {otherwise}"
        )
    for random in draws() if draw else ():
        case = draw(random)
        if not is_value(value := said(case), right(*case)):
            raise NotYet(f"right in {len(cases)} cases, but with {named(case)} you say {shown(value[0])}: {otherwise}")
