"""What all exercises share. An exercise is a row: the right answer, the common wrong ones with a hint each, and cases.

    check_hops = Exercise(
        right=lambda w, C, P: min(math.ceil((w - 1) / C), P - 1),
        wrong={"that is a ring without a window": "P - 1", ...},
        said="the farthest key is w - 1 tokens back",
        cases=[(1, 8, 4), (2, 8, 4), ...],
    )

check_hops(answer) returns a line: "right", "right: remark", "not yet: hint" or `OPEN`. The tests give each wrong one as
an answer, and expect its own hint. A number may be Python's, numpy's or a tensor; a list may be a tuple or an array.
Cases are tried in order. Nothing guards against an answer that cheats, as a table of the cases: it would lie to its
author only. An answer that computes for ever is ended by the notebook's stop button.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from itertools import islice, permutations
from math import inf, isclose
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

OPEN = "not answered yet: replace the ..."
MOST = 10_000  # no right answer has more items


class NotYet(Exception):
    """The answer is wrong; the message says what is wrong with it."""


class StillOpen(Exception):
    """The answer is a function that returns `...`."""


@dataclass(frozen=True)
class Exercise:
    """A value or a function that is asked for. A function is called with each case; a value has the case ()."""

    right: Any  # a number, a tensor, a list or set of numbers, or a dict of several; or the function that returns it
    said: str = ""  # of an unknown mistake
    cases: Iterable[tuple] | Mapping[str, Iterable[tuple]] = ((),)  # easy ones first; or by what is said in their place
    # By hint: as `right`, or a formula; of a dict, what is wrong
    wrong: Mapping[str, Any] = field(default_factory=dict)
    remark: str | None = None
    decimals: int | None = None  # of a value: how exact it must be
    then: Callable[[Callable[..., Any]], None] | None = None  # what else is asked of a function: raises NotYet

    def __call__(self, answer: Any) -> str:
        return line(self._judge, answer, callable(self.right))

    def _judge(self, answer: Any) -> str | None:
        groups = self.cases if isinstance(self.cases, Mapping) else {self.said: self.cases}
        for otherwise, cases in groups.items():
            tried = [(case, *self.both(answer, case)) for case in cases]
            for case, given, right in tried:
                if problem := self.problem(given, right):
                    raise NotYet(self._hint(tried) or f"{self._named(case)}{problem}: {otherwise}")
        if self.then:
            self.then(watched(answer))
        return self.remark

    def of(self, row: Any, case: tuple) -> Any:
        """What a row of ours gives in a case; a formula knows the names of `right`."""
        if isinstance(row, str):
            names = dict(zip(signature(self.right).parameters, case, strict=True))
            return eval(row, self.right.__globals__ | names)
        return row(*case) if callable(row) else row

    def both(self, answer: Any, case: tuple) -> tuple[Any, Any]:
        """What the answer gives in a case, and what is right; of several values, by name."""
        right, given = self.of(self.right, case), called(answer, *case) if callable(answer) else answer
        if isinstance(right, dict):
            given = several(given, tuple(right))
            in_order(given, right)
            given = dict(zip(right, given, strict=True))
        return given, right

    def problem(self, given: Any, right: Any) -> str | None:
        """What is wrong with what was given, in words; None: nothing."""
        if isinstance(right, dict):
            parts = ((name, self.problem(given[name], x)) for name, x in right.items())
            return next((f"{name}: {problem}" for name, problem in parts if problem), None)
        if isinstance(right, Tensor):
            return difference(given, right)
        if self.near(given, right):
            return None
        if self.decimals and any(number(given) == round(right, fewer) for fewer in range(1, self.decimals)):
            return f"{given} is right but not exact enough: give {self.decimals} decimals, or an expression"
        return f"you say {f'{given:,}' if isinstance(given, Real) else given}"

    def near(self, given: Any, value: Any) -> bool:
        """Whether what was given is this value, up to rounding. Raises NotYet where it is of another kind."""
        if isinstance(value, Tensor) and not value.ndim:
            value = value.item()
        if isinstance(value, Tensor):
            given = as_tensor(given)
            return given.shape == value.shape and near(given, value)
        if isinstance(value, set):
            return value == {plain(x) for x in items(given, "a set")}
        if isinstance(value, list):
            return [plain(x) for x in items(given, f"a list of {len(value)}")] == value
        if value is None:
            return given is None
        given = number(given)
        if self.decimals is not None:
            return abs(given - value) <= 0.501 * 10**-self.decimals
        whole = isinstance(given, int) and isinstance(value, int)
        return given == value if whole else isclose(given, value, rel_tol=1e-6, abs_tol=1e-12)

    def _hint(self, tried: list[tuple[tuple, Any, Any]]) -> str | None:
        """The hint whose formula explains all these cases, so that two mistakes with one number are told apart; of what
        is more than a number, the first case that is wrong may be enough.
        """
        first = next(each for each in tried if self.problem(*each[1:]))
        part, right = None, first[2]
        if isinstance(right, dict):
            part = next(name for name in right if any(self.problem(x[name], value[name]) for _, x, value in tried))
        alone = isinstance(right, Real) or part is not None

        def explains(value: Any, given: Any) -> bool:
            return self.near(given, value) if part is None else part in value and self.near(given[part], value[part])

        for hint, some in ((hint, some) for some in ([tried] if alone else [tried, [first]]) for hint in self.wrong):
            with suppress(ArithmeticError, RuntimeError, NotYet):  # it may have no value in a case
                if all(explains(self.of(self.wrong[hint], case), given) for case, given, _ in some):
                    return f"{part}: {hint}" if part else hint
        return None

    def _named(self, case: tuple) -> str:
        """What the function was called with, in words."""
        inputs = zip(signature(self.right).parameters, case, strict=True) if case else ()
        said = [f"{name} = {_shown(x)}" for name, x in inputs if not callable(x)]
        return f"{', '.join(said)}: " if said else ""


def _shown(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{x.numpy().round(3).tolist()}" if x.numel() < 5 else f"a tensor {tuple(x.shape)}"
    if isinstance(x, list) and x and not isinstance(x[0], Real):
        return f"a list of {len(x)}"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{name}: {_shown(value)}' for name, value in x.items())}}}"
    return f"{x:,}" if isinstance(x, Real) else f"{x}"


def line(check: Callable[[Any], str | None], answer: Any, wants_function: bool) -> str:
    """What a check says of an answer: a line, and never an error.

    An answer that is `...` or returns `...` is open, not wrong: the notebooks run to their end with open exercises.
    """
    if answer is ...:
        return OPEN
    if callable(answer) != wants_function:
        expected = "a function" if wants_function else "a value, not a function"
        return f"not yet: expected {expected}, got {type(answer).__name__}"
    try:
        remark = check(answer)
    except StillOpen:
        return OPEN
    except NotYet as hint:
        return f"not yet: {hint}"
    except Exception as error:  # the check could not use what it was given
        return f"not yet: this is not the kind of answer asked for ({type(error).__name__}: {error})"
    return "right" if remark is None else f"right: {remark}"


def exercise(check: Callable[[Any], str | None]) -> Callable[[Any], str]:
    """A check that no row can say: it raises NotYet, or returns None or a remark. It is called with the function asked
    for, whose calls are those of `called`, or with the value, if its parameter is called `value`.
    """
    wants_function = "value" not in signature(check).parameters

    @wraps(check)
    def checked(answer: Any) -> str:
        return line(lambda given: check(watched(given) if wants_function else given), answer, wants_function)

    return checked


def watched(answer: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, called by `called`."""
    return wraps(answer)(lambda *args: called(answer, *args))


def called(answer: Callable[..., Any], *args: Any) -> Any:
    """answer(*args), on copies of the arguments; its own errors become hints, and `...` becomes `StillOpen`."""
    args = copy.deepcopy(args)  # an answer may work in place; what it does to them does not change what is expected
    try:
        given = answer(*args)
    except (Exception, SystemExit) as error:
        raise NotYet(f"your answer ends in {type(error).__name__}: {error}") from error
    if given is ...:
        raise StillOpen
    return given


# What an answer is -------------------------------------------------------------------------------------------------


def as_tensor(given: Any, expected: str = "a tensor") -> Tensor:
    """A tensor, an array, a number or a list of those, as a tensor of the CPU. Raises NotYet for anything else."""
    if given is ...:
        raise StillOpen
    try:
        if isinstance(given, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                return given.cpu().as_subclass(Tensor)
        if isinstance(given, list | tuple) and any(isinstance(x, Tensor | list | tuple) for x in given):
            return torch.stack([as_tensor(x, expected) for x in given])
        return torch.as_tensor(np.array(given))
    except (TypeError, ValueError, RuntimeError):
        raise NotYet(f"expected {expected}, got {type(given).__name__}") from None


def number(given: Any) -> float:
    """A number as Python's int or float: also one of numpy, or the only one of a tensor. Raises NotYet otherwise."""
    if given is ...:
        raise StillOpen
    if isinstance(given, Tensor | np.ndarray | np.generic):
        tensor = as_tensor(given, "a number")
        if tensor.numel() != 1:
            raise NotYet(f"expected one number, got a {type(given).__name__} of shape {tuple(tensor.shape)}")
        given = tensor.item()
    if isinstance(given, bool) or not isinstance(given, Real):
        raise NotYet(f"expected a number, got {type(given).__name__}")
    return int(given) if isinstance(given, Integral) else float(given)


def items(given: Any, expected: str = "a list") -> list[Any]:
    """What is in a list, tuple, set, range, array or tensor. Raises NotYet when it is nothing of the kind."""
    if isinstance(given, Tensor | np.ndarray):
        given = as_tensor(given).tolist()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise NotYet(f"expected {expected}, got {type(given).__name__}")
    found = list(islice(given, MOST))
    if any(x is ... for x in found):
        raise StillOpen
    return found


def plain(x: Any) -> Any:
    """A word, a number, or a pair of those, in Python's own types. Raises NotYet otherwise."""
    if isinstance(x, list | tuple):
        return tuple(map(plain, x))
    return x if isinstance(x, str) else number(x)


def several(given: Any, names: Sequence[str]) -> list[Any]:
    """The values of an answer that must have one for each name. Raises NotYet when there are more or fewer."""
    if isinstance(given, Tensor | np.ndarray) and given.ndim in (1, 2):
        given = list(given)
    if not isinstance(given, list | tuple) or len(given) != len(names):
        count = f"{len(given)} value(s)" if isinstance(given, list | tuple) else type(given).__name__
        raise NotYet(f"expected {len(names)} values ({', '.join(names)}), got {count}")
    if any(x is ... for x in given):
        raise StillOpen
    return list(given)


# What is right -----------------------------------------------------------------------------------------------------


def near(given: Tensor, expected: Tensor, rtol: float = 1e-5) -> bool:
    """Whether all numbers of two tensors of one shape are equal up to rounding; NaN is NaN."""
    size = expected[expected.isfinite()].double().abs().max() if expected.isfinite().any() else 0.0
    atol = rtol * max(0.1, float(size))  # a small number may be the difference of large ones
    return torch.allclose(given.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


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
    if near(given, expected, rtol):
        return None
    off = (given.double() - expected.double()).abs().nan_to_num(0.0, posinf=inf)  # equal infinities differ by NaN
    return f"off by up to {off.max():.3g}"


def in_order(given: Sequence[Any], expected: Mapping[str, Any]) -> None:
    """Raise NotYet when these are the expected values in another order."""
    right = {name: torch.as_tensor(x) for name, x in expected.items() if x is not None}
    for order in permutations(right):  # the right order first
        if all(difference(x, right[name], 1e-3) is None for x, name in zip(given, order, strict=False)):
            if order != tuple(right):
                raise NotYet(f"the right values in another order, {', '.join(order)}: return {', '.join(right)}")
            return
