"""A fixture for the tests of a project that has this package installed: `ring_doctor` is assert_ring, in few lines.

    def test_my_ring(ring_doctor):
        ring_doctor(my_ring.attention, causal=(True,), layouts=("zigzag",))

When the ring is wrong, the test fails with the doctor's report, and pytest shows the line of the test, none of ours.
`pytest --ring-quick` asks less: for each push, where the whole examination runs each night.

Before: assertion.py. After: nothing. Every pytest of a project loads this file, so it does not import torch.
Source: the manual of pytest, "Writing plugins".
"""

from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option --ring-quick."""
    group = parser.getgroup("ringlab")
    group.addoption("--ring-quick", action="store_true", help="ring_doctor asks each kind of question once")


@pytest.fixture
def ring_doctor(request: pytest.FixtureRequest) -> Callable[..., None]:
    """A function that fails the test unless a ring is right. It takes what `ring_doctor.assert_ring` takes."""

    def ring_doctor(function: Callable[..., Any], **options: Any) -> None:
        __tracebackhide__ = True
        from ring_doctor.assertion import assert_ring

        options.setdefault("quick", request.config.getoption("--ring-quick"))
        try:
            assert_ring(function, **options)
        except (AssertionError, ValueError) as error:
            raise pytest.fail.Exception(str(error)) from None  # pytest shows this error alone

    return ring_doctor
