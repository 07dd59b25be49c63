"""What needs JAX or transformers is slow, and is skipped, with a reason, where they are not installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

MISSING = {
    "jax": "needs JAX: pip install -r requirements-jax.txt (Python 3.11 or newer)",
    "transformers": "needs transformers: pip install -r requirements-hf.txt",
}
NEEDED = {
    "jax_block": "jax",
    "jax_ring": "jax",
    "11_ring_in_jax": "jax",
    "hugging_face_batch": "transformers",
    "hugging_face": "transformers",
    "14_your_own_model": "transformers",
}  # concepts and chapters


def with_extras(names):
    """The names of modules, or paths of chapters, as parameters of a test.

    Those that need more are slow, and are skipped where it is missing.
    """
    parameters = []
    for name in names:
        needed, marks = NEEDED.get(name.stem if isinstance(name, Path) else name.rpartition(".")[2]), []
        if needed:
            marks = [pytest.mark.slow, pytest.mark.skipif(find_spec(needed) is None, reason=MISSING[needed])]
        parameters.append(pytest.param(name, marks=marks))
    return parameters
