"""Which concepts and chapters are slow. Those that need JAX or transformers are skipped where these are missing."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from ringlab.support.extras import install

MISSING = {
    "jax": f"needs JAX: {install('jax')}",
    "transformers": f"needs transformers: {install('hf')}",
    "triton": f"needs Triton: {install('triton')}",
    "trl": f"needs accelerate, PEFT and TRL: {install('loops')}",
}
NEEDED = {  # by how a module's or a chapter's name begins; the first that fits
    "ringlab.ways.jax.": "jax",
    "appendix_ring_in_jax": "jax",
    "ringlab.hugging_face.trainer": "trl",
    "ringlab.hugging_face.": "transformers",
    "12_your_own_model": "transformers",
    "ringlab.ring.fused_merge": "triton",
}


def needed_by(name):
    """The optional package that a module or a chapter needs, or None."""
    return next((package for start, package in NEEDED.items() if name.startswith(start)), None)


RARELY = ("appendix_ring_in_jax", "appendix_ring_of_states", "your_ring")  # they take half a minute: exhaustive
EVER = "03"  # the chapters up to this one run in every `make test`
LATER = {  # concepts of chapters 13, 17 and 18, of a planned cluster, and linear attention
    *("documents", "all_gather", "all_to_all", "hybrid", "double_ring"),
    *("linear_attention", "state_ring", "short_convolution"),
    *("unequal", "pass_q_or_kv", "orders", "shared_memory"),
}
AFTER = tuple(f"ringlab.{folder}." for folder in ("ways", "states", "models", "hugging_face"))


def marked(names):
    """The names of modules, or paths of chapters, as parameters of a test.

    Whole models, the concepts in LATER, the chapters after EVER, and what needs an extra package are slow.
    """
    parameters = []
    for name in names:
        short = name.stem if isinstance(name, Path) else name.rpartition(".")[2]
        needed, marks = needed_by(name.stem if isinstance(name, Path) else name), []
        later = short[:2] > EVER if isinstance(name, Path) else name.startswith(AFTER) or short in LATER
        if needed or later:
            marks = [pytest.mark.slow]
        if short in RARELY:
            marks = [pytest.mark.exhaustive]
        if needed:
            marks += [pytest.mark.skipif(find_spec(needed) is None, reason=MISSING[needed])]
        parameters.append(pytest.param(name, marks=marks))
    return parameters
