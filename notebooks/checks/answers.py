"""What all checks share: open answers stay open, errors become hints, and tensors and numbers are compared.

A check takes an answer and tries it. It raises `NotYet` with a hint when the answer is wrong. When the answer is
right it returns None or a remark. `exercise` turns that into a line: "right", "right: remark", "not yet: hint", `OPEN`.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from math import isclose
from numbers import Real
from typing import Any

import torch
from torch import Tensor

OPEN = "not answered yet: replace the ..."


class NotYet(Exception):
    """The answer is wrong; the message says what is wrong with it."""


class StillOpen(Exception):
    """The answer is a function that returns `...`."""


def exercise(check: Callable[[Any], str | None]) -> Callable[[Any], str]:
    """Turn a check into a function that returns one line and never raises.

    An answer that is `...` or returns `...` is open, not wrong: the notebooks run to their end with open exercises.
    """

    @wraps(check)
    def checked(answer: Any) -> str:
        if answer is ...:
            return OPEN
        try:
            remark = check(_watched(answer) if callable(answer) else answer)
        except StillOpen:
            return OPEN
        except NotYet as hint:
            return f"not yet: {hint}"
        except Exception as error:  # the check could not use what it was given
            return f"not yet: this is not the kind of answer asked for ({type(error).__name__}: {error})"
        return "right" if remark is None else f"right: {remark}"

    return checked


def _watched(answer: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; its own errors become hints, and `...` becomes `StillOpen`."""

    @wraps(answer)
    def call(*args: Any) -> Any:
        try:
            given = answer(*args)
        except Exception as error:
            raise NotYet(f"your answer ends in {type(error).__name__}: {error}") from error
        if given is ...:
            raise StillOpen
        return given

    return call


def several(given: Any, names: Sequence[str]) -> list[Any]:
    """The values of an answer that must have one for each name. Raises NotYet when there are more or fewer."""
    if not isinstance(given, tuple | list) or len(given) != len(names):
        count = f"{len(given)} value(s)" if isinstance(given, tuple | list) else type(given).__name__
        raise NotYet(f"expected {len(names)} values ({', '.join(names)}), got {count}")
    return list(given)


def difference(given: Any, expected: Tensor) -> str | None:
    """What is wrong with a tensor, in words; None when it is `expected` up to rounding."""
    if not isinstance(given, Tensor):
        return f"expected a tensor of shape {tuple(expected.shape)}, got {type(given).__name__}"
    if given.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(given.shape)}"
    if given.isnan().any():
        return "there are NaNs in it; look for inf - inf, inf/inf or 0/0"
    if not torch.allclose(given.double(), expected.double(), rtol=1e-5, atol=1e-6):
        return f"off by up to {(given.double() - expected.double()).abs().max():.3g}"
    return None


def compare_number(given: Any, right: float, hints: dict[float, str], otherwise: str, *, decimals: int = 0) -> None:
    """Raise NotYet unless `given` is `right`, rounded to `decimals` decimals or more exact.

    `hints` says what is wrong with each common wrong number, `otherwise` what to say of all others.
    """
    if not isinstance(given, Real):
        raise NotYet(f"expected a number, got {type(given).__name__}")

    def near(value: float) -> bool:
        return abs(given - value) <= 0.501 * 10**-decimals

    if near(right):
        return
    for wrong, hint in hints.items():
        if near(wrong):
            raise NotYet(hint)
    if any(given == round(right, fewer) for fewer in range(1, decimals)):
        raise NotYet(f"{given} is right but not exact enough: give {decimals} decimals, or an expression")
    raise NotYet(f"{otherwise}; you say {given:,}")


def compare_formula(
    answer: Callable[..., Any],
    right: Callable[..., float],
    wrong: dict[str, Callable[..., float]],
    cases: Sequence[tuple[Any, ...]],
    otherwise: str,
) -> None:
    """Raise NotYet unless `answer` gives what `right` gives in every case.

    A case is what both are called with. `wrong` has the formula behind each hint. A hint is given when its
    formula explains the answer in every case: two mistakes with the same number in one case are still told apart.
    """
    given = [answer(*case) for case in cases]
    for value in given:
        if not isinstance(value, Real):
            raise NotYet(f"expected a number, got {type(value).__name__}")
    failed = [(case, value) for case, value in zip(cases, given, strict=True) if not isclose(value, right(*case))]
    if not failed:
        return
    for hint, formula in wrong.items():
        if all(isclose(value, formula(*case)) for case, value in zip(cases, given, strict=True)):
            raise NotYet(hint)
    case, value = failed[0]
    inputs = zip(signature(right).parameters, case, strict=True)
    named = ", ".join(f"{name} = {x:,}" if isinstance(x, Real) else f"{name} = {x}" for name, x in inputs)
    raise NotYet(f"wrong in {len(failed)} of {len(cases)} cases; with {named} you say {value:,}: {otherwise}")
