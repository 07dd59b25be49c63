"""The longest sequence that trains a whole model in a memory that cannot grow: naive, blockwise, and rings.

The same hard limit as in max_context.py, for a step of `ringlab.models.train`: transformer, loss, gradients, clipping,
AdamW. The model is built within the limit, so weights, optimizer state and gradients count too; FSDP shares them out.
Before the limit is set, a step of another model sets up libraries and connections. Within the limit a short step comes
first, which makes the optimizer's state. Then comes the step that counts. Each rank is a process of one thread.

A length fits when the step completes on every rank. That its numbers are right is what tests/test_models_mesh.py and
tests/test_models_train.py check. The prediction is ringlab/planning/step_memory.py, made before the measurement.

    $ python -m bench.longest_training
"""

import gc
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.max_context import at_most, longest, no_limit_here, within
from ringlab.basics.naive_attention import naive_attention
from ringlab.models.mesh import build_mesh
from ringlab.models.train import RATE, build, take_step
from ringlab.models.transformer import Config
from ringlab.planning.step_memory import longest_chunk
from ringlab.support.processes import RankContext
from ringlab.training.flash_ring import scaled_dot_product_attention
from ringlab.training.layouts import positions

GRAIN = 16  # tokens; only multiples of it are tried as chunks
SHORT = 64  # tokens of a step that warms up
ONE_PROCESS = [("naive", 1), ("blockwise", 1)]
MODEL = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "feedforward": 384}
SIZES = {"worlds": [2, 4], "budget": 64 * 2**20, **MODEL}


def naive(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    """`naive_attention`, called as a transformer calls its attention; as many heads of K and V as of Q."""
    return naive_attention(q, k, v, causal=is_causal)


def training_step(context: RankContext, method: str, chunk: int, budget: int, config: Config) -> None:
    """Two steps within the budget, of SHORT and of `chunk` tokens on each rank. Raises MemoryError."""
    torch.set_num_threads(1)  # a thread that starts within the limit takes its stack from it
    record.return_freed_memory()
    mesh, line = build_mesh(1, context.world_size, "cpu")
    ring = partial(scaled_dot_product_attention, layout="zigzag", group=mesh["cp"].get_group())
    attention = {"naive": naive, "blockwise": F.scaled_dot_product_attention, "ring": ring}[method]

    def steps(*lengths: int) -> None:
        model, optimizer = build(config, attention, line, torch.float32)
        for length in lengths:
            at = positions("zigzag", length * context.world_size, context.rank, context.world_size)
            tokens = at[None] % config.vocab
            loss = take_step(model, optimizer, tokens, tokens, at, rate=RATE)
        if not loss.isfinite():
            raise RuntimeError(f"the loss of rank {context.rank} is {loss}")

    steps(
        SHORT, SHORT if method == "naive" else 1024
    )  # the fused kernel's own buffers have their full size from 512 on
    gc.collect()  # FSDP's modules refer to each other
    with at_most(budget):
        steps(SHORT, chunk)


def measured(method: str, world_size: int, budget: int, config: Config) -> dict[str, Any]:
    """The longest chunk that trains, predicted and measured, in tokens, and what was tried: [tokens, fits] each."""
    predicted = longest_chunk(method, config, world_size, budget, GRAIN)
    probes = []

    def fits(n: int) -> bool:
        probes.append([n * GRAIN, within(training_step, world_size, method, n * GRAIN, budget, config)])
        return probes[-1][1]

    chunk = GRAIN * longest(fits, max(1, predicted // GRAIN))
    return {"predicted_chunk": predicted, "chunk": chunk, "probes": probes}


def measure(worlds: list[int], *, budget: int, folder: Path = record.FOLDER, **model: int) -> record.Results:
    """The whole bench, with a row for each method, P and with or without activation checkpointing."""
    cases = [(*case, again) for again in (False, True) for case in (*ONE_PROCESS, *(("ring", P) for P in worlds))]
    steps = {f"{method}, P = {P}{', checkpointing' if again else ''}": (method, P, again) for method, P, again in cases}
    machine = record.machine()

    def step(name: str) -> dict[str, Any]:
        method, world_size, again = steps[name]
        return measured(method, world_size, budget, Config(**model, checkpointing=again))

    settings = {"worlds": worlds, "budget": budget, **model}
    found = record.in_steps("longest_training", settings, list(steps), step, folder)
    return {
        "command": "python -m bench.longest_training",
        "machine": machine,
        "dtype": "float32",
        **settings,
        "grain": GRAIN,
        "rows": [
            {"method": method, "world_size": P, "checkpointing": again, **found[name]}
            for name, (method, P, again) in steps.items()
        ],
    }


def lengths(results: record.Results, method: str, checkpointing: bool, of: str = "chunk") -> list[int]:
    """The longest S of a method for each P, in rising order. `of` is "chunk" (measured) or "predicted_chunk"."""
    rows = results["rows"]
    found = [row for row in rows if row["method"] == method and row["checkpointing"] == checkpointing]
    return [row["world_size"] * row[of] for row in found]


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    lines = [
        "# The longest sequence that trains a whole model in a fixed memory",
        "",
        record.heading(results),
        f"A step of `ringlab.models.train`: {results['layers']} layers, hidden {results['hidden']}, "
        f"{results['heads']} heads, "
        f"feedforward {results['feedforward']}, causal, one sequence. Each rank is a process of one thread with a hard "
        f"limit of {results['budget'] / 2**20:g} MiB for weights, optimizer, gradients, activations and buffers. "
        f"Chunks are multiples of {results['grain']} tokens. Predicted: ringlab/planning/step_memory.py.",
        "",
        "| activations | attention | ranks P | longest S, measured | predicted | measured / predicted | "
        "over blockwise's S |",
        "| --- | --- |" + " ---: |" * 5,
    ]
    for row in results["rows"]:
        S, predicted = (row["world_size"] * row[of] for of in ("chunk", "predicted_chunk"))
        (one,) = lengths(results, "blockwise", row["checkpointing"])
        kept = "checkpointed" if row["checkpointing"] else "all kept"
        lines.append(
            f"| {kept} | {row['method']} | {row['world_size']} | {S:,} | {predicted:,} | {S / predicted:.3f} | "
            f"{S / one:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    reason = no_limit_here()
    if reason:
        print(f"nothing measured: {reason}")
        return 0
    record.save("longest_training", measure(**SIZES), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
