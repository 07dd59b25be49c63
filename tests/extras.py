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
NEEDED = {
    "jax_block": "jax",
    "jax_ring": "jax",
    "appendix_ring_in_jax": "jax",
    "hugging_face_batch": "transformers",
    "hugging_face_generate": "transformers",
    "hugging_face_masks": "transformers",
    "hugging_face_pass": "transformers",
    "hugging_face_proof": "transformers",
    "hugging_face_states": "transformers",
    "hugging_face": "transformers",
    "hugging_face_trainer": "trl",
    "12_your_own_model": "transformers",
}  # concepts and chapters


RARELY = ("appendix_ring_in_jax", "appendix_ring_of_states", "your_ring")  # they take half a minute: exhaustive
EVER = "03"  # the chapters up to this one run in every `make test`
LATER = {  # concepts of chapters 13, 17 and 18, of a planned cluster, and linear attention
    *("documents", "all_gather", "all_to_all", "hybrid", "double_ring"),
    *("linear_attention", "state_ring", "short_convolution"),
    *("unequal", "pass_q_or_kv", "orders", "shared_memory"),
}


def marked(names):
    """The names of modules, or paths of chapters, as parameters of a test.

    Whole models, the concepts in LATER, the chapters after EVER, and what needs an extra package are slow.
    """
    parameters = []
    for name in names:
        short = name.stem if isinstance(name, Path) else name.rpartition(".")[2]
        needed, marks = NEEDED.get(short), []
        later = short[:2] > EVER if isinstance(name, Path) else name.startswith("ringlab.models.") or short in LATER
        if needed or later:
            marks = [pytest.mark.slow]
        if short in RARELY:
            marks = [pytest.mark.exhaustive]
        if needed:
            marks += [pytest.mark.skipif(find_spec(needed) is None, reason=MISSING[needed])]
        parameters.append(pytest.param(name, marks=marks))
    return parameters
