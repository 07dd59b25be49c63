"""What needs JAX is skipped, with a reason, where it is not installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

MISSING = "needs JAX: pip install -r requirements-jax.txt (Python 3.11 or newer)"
NEED_JAX = ("jax_block", "jax_ring", "11_ring_in_jax")  # two concepts and a chapter


def needs_jax(name):
    """Whether this name of a module, or this path of a chapter, is one of them."""
    return (name.stem if isinstance(name, Path) else name.rpartition(".")[2]) in NEED_JAX


def with_jax(names):
    """The names as parameters of a test, those that need JAX marked to be skipped where it is missing."""
    skip = pytest.mark.skipif(find_spec("jax") is None, reason=MISSING)
    return [pytest.param(name, marks=skip) if needs_jax(name) else name for name in names]
