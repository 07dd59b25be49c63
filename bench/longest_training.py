"""The longest sequence that trains a whole model in a memory that cannot grow: naive, blockwise, and rings.

The same hard limit as in max_context.py, for a step of `ringlab.models.train`: transformer, loss, gradients, clipping,
AdamW. The model is built within the limit, so weights, optimizer state and gradients count too; FSDP shares them out.
Before the limit is set, a step of another model sets up libraries and connections. Within the limit a short step comes
first, which makes the optimizer's state. Then comes the step that counts. Each rank is a process of one thread.

A length fits when the step completes on every rank. That its numbers are right is what tests/models/test_mesh.py and
tests/models/test_train.py check. The prediction is `peak_bytes`, made before the measurement: the counts of
ring_planner/memory.py, in float32.

    peak = weights + what all layers keep + max(the loss, the attention of the last layer - its feedforward)

The feedforward of the last layer is done when its attention runs backwards. Its memory is free again, so a ring's
buffers fit in it. With activation checkpointing there is nothing to free, and the buffers add to the peak.

    $ python -m bench.longest_training
"""

import gc
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import record
from bench.max_context import at_most, longest, no_limit_here, within
from ring_planner.hidden_communication import AttentionLayer
from ring_planner.memory import F32, kept_at_the_loss, kept_at_work, peak_bytes_backward
from ringlab.basics.naive_attention import naive_attention
from ringlab.models.mesh import build_mesh
from ringlab.models.train import RATE, build, take_step
from ringlab.models.transformer import Config
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.ring.layouts import positions
from ringlab.support.processes import RankContext

GRAIN = 16  # tokens; only multiples of it are tried as chunks
SHORT = 64  # tokens of a step that warms up
ONE_PROCESS = [("naive", 1), ("blockwise", 1)]
MODEL = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "feedforward": 384}
SIZES = {"worlds": [2, 4], "budget": 64 * 2**20, **MODEL}


def kept_by_a_layer(method: str, config: Config, chunk: int) -> tuple[int, int, int]:
    """Numbers of a token: inputs of a layer, and what attention and feedforward keep, if not checkpointed."""
    h, H, D = config.hidden, config.heads, config.hidden // config.heads
    attention, feedforward = kept_at_work(AttentionLayer(H, config.kv_heads, D, F32), h, config.feedforward)
    if method == "naive":
        attention += 2 * H * chunk + chunk // F32 - (h + H)  # all heads' mask has a byte for each pair; no out, lse
    return 2 * h, attention, feedforward


def parameters(config: Config) -> tuple[int, int]:
    """The parameters of a layer, and those outside the layers."""
    h, F = config.hidden, config.feedforward
    kv = config.kv_heads * (h // config.heads)
    return 2 * h * h + 2 * h * kv + 3 * h * F + 2 * h, (1 if config.tied else 2) * config.vocab * h + h


def peak_bytes(method: str, config: Config, chunk: int, world_size: int) -> int:
    """Peak memory of a rank with `chunk` tokens in a step of `ringlab.models.train`, float32, batch 1, from the second
    step on. `method` is "naive" or "blockwise" (scaled_dot_product_attention) on one process, or "ring".
    """
    inputs, attention, feedforward = kept_by_a_layer(method, config, chunk)
    h, H, D = config.hidden, config.heads, config.hidden // config.heads
    kv = config.kv_heads * D
    at_work = {
        "naive": H * chunk + h,  # the gradient of the weights, dv
        "blockwise": 2 * h + 2 * kv,  # dq, dk, dv, the kernel's copy of d_out
        # all that peak_bytes_backward counts but q, k, v, out, d_out; a copy of v, the kernel's of d_out
        "ring": int(peak_bytes_backward(AttentionLayer(H, config.kv_heads, D, F32), 1)) // F32 - 2 * h - kv,
    }[method]
    whole = inputs if config.checkpointing else inputs + attention + feedforward
    at_attention = attention + at_work if config.checkpointing else at_work - feedforward
    of_a_token = config.layers * whole + max(sum(kept_at_the_loss(h, config.vocab)), at_attention)
    layer, outside = parameters(config)
    state = 3 * (config.layers * layer + outside) // world_size + 2 * (layer + outside)  # weights and moments; gathered
    return F32 * (of_a_token * chunk + state)


def longest_chunk(method: str, config: Config, world_size: int, budget: int) -> int:
    """The largest multiple of `GRAIN` tokens on a rank whose peak is at most `budget` bytes; 0 if none is."""
    most = range(GRAIN, 2**40, GRAIN)
    return GRAIN * bisect_right(most, budget, key=lambda chunk: peak_bytes(method, config, chunk, world_size))


def kept_bytes(module: nn.Module, work: Callable[[], Tensor]) -> int:
    """The bytes that autograd keeps for the backward pass of `work`, each memory once, without the module's weights."""
    kept = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = work()  # as long as it lives, all that was kept lives
    for weight in module.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    del out
    return sum(kept.values())


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
    predicted = longest_chunk(method, config, world_size, budget)
    probes = []

    def fits(n: int) -> bool:
        probes.append([n * GRAIN, within(training_step, world_size, method, n * GRAIN, budget, config)])
        return probes[-1][1]

    chunk = GRAIN * longest(fits, max(1, predicted // GRAIN))
    return {"predicted_chunk": predicted, "chunk": chunk, "probes": probes}


def measure(worlds: list[int], *, budget: int, **model: int) -> record.Results:
    """The whole bench, with a row for each method, P and with or without activation checkpointing."""
    made, settings = record.made("longest_training", "float32"), {"worlds": worlds, "budget": budget, **model}
    cases = [(*case, again) for again in (False, True) for case in (*ONE_PROCESS, *(("ring", P) for P in worlds))]
    steps = {}
    for method, P, again in cases:
        name = f"{method}, P = {P}, checkpointing" if again else f"{method}, P = {P}"
        steps[name] = method, P, budget, Config(**model, checkpointing=again)
    found = record.in_steps("longest_training", settings, steps, measured).values()
    rows = [
        {"method": method, "world_size": P, "checkpointing": again, **row}
        for (method, P, again), row in zip(cases, found, strict=True)
    ]
    return {**made, **settings, "grain": GRAIN, "rows": rows}


def lengths(results: record.Results, method: str, checkpointing: bool, of: str = "chunk") -> list[int]:
    """The longest S of a method for each P, in rising order. `of` is "chunk" (measured) or "predicted_chunk"."""
    rows = results["rows"]
    found = [row for row in rows if row["method"] == method and row["checkpointing"] == checkpointing]
    return [row["world_size"] * row[of] for row in found]


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    rows = []
    for row in results["rows"]:
        S, predicted = (row["world_size"] * row[of] for of in ("chunk", "predicted_chunk"))
        (one,) = lengths(results, "blockwise", row["checkpointing"])
        kept = "checkpointed" if row["checkpointing"] else "all kept"
        numbers = [f"{S:,}", f"{predicted:,}", f"{S / predicted:.3f}", f"{S / one:.2f}"]
        rows.append([kept, row["method"], row["world_size"], *numbers])
    return record.page(
        "The longest sequence that trains a whole model in a fixed memory",
        results,
        f"A step of `ringlab.models.train`: {results['layers']} layers, hidden {results['hidden']}, "
        f"{results['heads']} heads, "
        f"feedforward {results['feedforward']}, causal, one sequence. Each rank is a process of one thread with a hard "
        f"limit of {results['budget'] / 2**20:g} MiB for weights, optimizer, gradients, activations and buffers. "
        f"Chunks are multiples of {results['grain']} tokens. Predicted: bench/longest_training.py.",
        record.grid(
            "<activations | <attention | ranks P | longest S, measured | predicted | measured / predicted | "
            "over blockwise's S",
            rows,
        ),
    )


if __name__ == "__main__":
    if reason := no_limit_here():
        print(f"nothing measured: {reason}")
    else:
        record.save("longest_training", measure(**SIZES), table)
