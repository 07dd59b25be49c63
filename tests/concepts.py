"""The concept files and chapters: their names, a run of main, and which of them are slow."""

import contextlib
import importlib
import io
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ringlab.ring import cases
from ringlab.support import processes
from ringlab.support.extras import install

ROOT = Path(__file__).parent.parent


def is_concept(path: Path) -> bool:
    """Whether a file teaches something: it does not say that a reader may skip it."""
    return "may skip this file" not in path.read_text()


FOLDERS = (  # where a reader finds them
    *(f"ringlab/{folder}" for folder in ("basics", "ring", "ways", "ways/jax", "states", "models", "hugging_face")),
    "ring_planner",
)
CONCEPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in FOLDERS
    for path in ROOT.glob(f"{folder}/[!_]*.py")
    if path.stem != "train"  # a run with files of its own: tests/models/test_train.py
    and is_concept(path)
]


def run(name: str, launch: Callable[..., Any] = processes.launch) -> tuple[int, str]:
    """Run the main of a concept in this process: its exit status, and what it printed. `launch` starts its ranks."""
    with contextlib.ExitStack() as stack:
        for home in {cases, module := importlib.import_module(name)}:
            if hasattr(home, "launch"):
                stack.enter_context(mock.patch.object(home, "launch", launch))
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(mock.patch.object(sys, "argv", [name]))  # no options
        return module.main(), printed.getvalue()


# Which are slow, and which need JAX or transformers and are skipped where these are missing --------------------------


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
LATER = {  # concepts of chapters 13, 16 and 17, and linear attention
    *("documents", "all_gather", "all_to_all", "hybrid", "double_ring"),
    *("linear_attention", "state_ring", "short_convolution"),
    "orders",
}
RUNS = {"latent_ring", "chosen_keys"}  # of these the main is slow, and not their tests
AFTER = tuple(f"ringlab.{folder}." for folder in ("ways", "states", "models", "hugging_face"))


def marked(names):
    """The names of modules, or paths of chapters, as parameters of a test.

    Whole models, the concepts in LATER, the chapters after EVER, and what needs an extra package are slow.
    """
    parameters = []
    for name in names:
        short = name.stem if isinstance(name, Path) else name.rpartition(".")[2]
        needed, marks = needed_by(name.stem if isinstance(name, Path) else name), []
        later = short[:2] > EVER if isinstance(name, Path) else name.startswith(AFTER) or short in LATER | RUNS
        if needed or later:
            marks = [pytest.mark.slow]
        if short in RARELY:
            marks = [pytest.mark.exhaustive]
        if needed:
            marks += [pytest.mark.skipif(find_spec(needed) is None, reason=MISSING[needed])]
        parameters.append(pytest.param(name, marks=marks))
    return parameters
