"""Tokens per second and memory of `ringlab.models.train` on 1, 2 and 4 ranks with as many tokens each, and of PyTorch's
way.

P ranks train on a sequence of P·C tokens. They share the cores, so what counts is the speed of all ranks together, over
that of one process with all the cores on the same sequence. All cases are measured in turn, several times.

PyTorch's own way is `context_parallel`. It does not train on a CPU: it has no rule for the fused kernel. Its private
loop does run there, with the same kernel, so it takes the place of our ring in the same model (against_peers.py has the
attention alone). Every case must give the loss of one process.

    $ python -m bench.training_speed
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.against_peers import torch_loop
from ringlab.models.loader import open_text, read_batch
from ringlab.models.mesh import build_mesh
from ringlab.models.train import RATE, build, take_step
from ringlab.models.transformer import Config
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext, launch
from ringlab.support.timeline import laps
from ringlab.ways.shared_memory import SharedMemory

ONE, RING, MEMORY, TORCH = "one process", "ring", "ring in shared memory", "PyTorch's loop"
MODEL = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 4, "feedforward": 384}
SIZES = {"worlds": [1, 2, 4], "chunk": 1024, "steps": 3, "repetitions": 3, **MODEL}


def peer(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    """PyTorch's loop, called as a transformer calls its attention; as many heads of K and V as of Q."""
    return torch_loop(q, k, v, causal=is_causal, layout="zigzag")


ATTENTION = {
    ONE: F.scaled_dot_product_attention,
    RING: partial(scaled_dot_product_attention, layout="zigzag"),
    MEMORY: partial(scaled_dot_product_attention, layout="zigzag", schedule=SharedMemory),
    TORCH: peer,
}


def prepare(context: RankContext, method: str, seq_len: int, model: dict[str, int]) -> Callable[[], Tensor]:
    """A step of `ringlab.models.train` on this rank, always with the same sequence. It returns the rank's loss."""
    _, line = build_mesh(1, context.world_size, "cpu")
    sliced, optimizer = build(Config(**model), ATTENTION[method], line, torch.float32)
    place = context.rank, context.world_size
    batch = read_batch(open_text(None), 1, 1, seq_len, "zigzag", (0, 1), place)
    return lambda: take_step(sliced, optimizer, *batch, rate=RATE)


def seconds_of_steps(
    context: RankContext, method: str, seq_len: int, steps: int, model: dict[str, int]
) -> tuple[list[float], float]:
    """The seconds of each step, until its last rank is done, and the loss of the first, which warms up."""
    step = prepare(context, method, seq_len, model)
    first = step().item()
    loss, seconds = sum(agree(lambda: first)) / context.world_size, []
    for _ in range(steps):
        seconds.append(max(laps(step, context.device)).seconds)
    return seconds, loss


def memory_of_steps(context: RankContext, method: str, seq_len: int, model: dict[str, int]) -> int | None:
    """The peak of this rank's memory beyond what it had before the model was built, in two steps: bytes."""
    record.return_freed_memory()
    prepare(context, method, 64 * context.world_size, model)()  # what libraries set up once

    def work() -> None:
        step = prepare(context, method, seq_len, model)
        step()
        step()

    return record.peak_extra(work)


def measure(worlds: list[int], *, chunk: int, steps: int, repetitions: int, **model: int) -> record.Results:
    """The whole bench, with a row for each P. Raises RuntimeError when a loss is not that of one process."""
    made = record.made("training_speed", "float32")
    cases = [(P, method) for P in worlds for method in ATTENTION if P > 1 or method in (ONE, RING)]

    def step(P: int, method: str, turn: int | None) -> Any:
        ranks = 1 if method == ONE else P
        if turn is not None:
            return launch(seconds_of_steps, ranks, method, P * chunk, steps, model)[0]
        each = launch(memory_of_steps, ranks, method, P * chunk, model)
        return None if None in each else max(each)

    turns = (None, *range(repetitions))
    every = {f"{'memory' if i is None else i}: {method}, P = {P}": (P, method, i) for i in turns for P, method in cases}
    settings = {"worlds": worlds, "chunk": chunk, "steps": steps, "repetitions": repetitions, **model}
    found = dict(zip(every.values(), record.in_steps("training_speed", settings, every, step).values(), strict=True))
    rows = []
    for P in worlds:
        row: dict[str, Any] = {"world_size": P, "seconds": {}, "peak_bytes": {}}
        for method in [method for ranks, method in cases if ranks == P]:
            of_turns, right = [found[P, method, i] for i in range(repetitions)], found[P, ONE, 0][1]
            if any(abs(loss / right - 1) > 1e-5 for _, loss in of_turns):
                raise RuntimeError(f"{method}, P = {P}: the loss is {of_turns[0][1]}; that of one process is {right}")
            row["seconds"][method] = [second for each, _ in of_turns for second in each]
            row["peak_bytes"][method] = found[P, method, None]
        rows.append(row)
    return {**made, "reference": ONE, **settings, "rows": rows}


def speed(results: record.Results, method: str, world_size: int) -> float:
    """Tokens per second of all ranks together, on the sequence of `world_size` chunks."""
    (row,) = (row for row in results["rows"] if row["world_size"] == world_size)
    return world_size * results["chunk"] / median(row["seconds"][method])


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    rows = []
    for row in results["rows"]:
        P = row["world_size"]
        for method, peak in row["peak_bytes"].items():
            fast, alone = speed(results, method, P), speed(results, ONE, P)
            memory = "not measured" if peak is None else f"{peak / 1e6:,.1f} MB"
            rows.append([P, f"{P * results['chunk']:,}", method, f"{fast:,.0f}", f"{fast / alone:.2f}", memory])
    return record.page(
        "Training on 1, 2 and 4 ranks with as many tokens each",
        results,
        f"A step of `ringlab.models.train`: {results['layers']} layers, hidden {results['hidden']}, "
        f"{results['heads']} heads, "
        f"causal, zigzag, one sequence of P · {results['chunk']:,} tokens. The ranks share the "
        f"{results['machine']['cores']} cores; one process has them all, and the whole sequence. Medians of "
        f"{results['steps'] * results['repetitions']} steps, measured in turn. Memory: the peak of the rank that needs "
        "most, beyond what it had before it built the model; in shared memory with the pages of other ranks that it "
        "reads.",
        record.grid("P | S | <attention | tokens/s, all ranks | over one process on this S | memory a rank", rows),
    )


if __name__ == "__main__":
    record.save("training_speed", measure(**SIZES), table)
