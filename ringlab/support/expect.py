"""Refusals in one form: what was given; what is expected. A reader of the ring may skip this file."""

from collections.abc import Callable
from typing import Any


def expect(fine: object, given: str, expected: str) -> None:
    """Raise ValueError, "given; expected", unless all is fine."""
    if not fine:
        raise ValueError(f"{given}; expected {expected}")


def attempt(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What `work` returns, or the words of its ValueError."""
    try:
        return work(*args, **options)
    except ValueError as error:
        return str(error)
