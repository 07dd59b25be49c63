"""Shared memory against messages and against PyTorch's loop, on one host.

The same kernels compute the same blocks in the same rounds. In shared memory K and V are copied once to where the other
ranks can read them. PyTorch's own context-parallel loop (private functions, all-to-all rotation) takes turns with them.
Ratio: the time of messages, or of the loop, over that of another way; above 1, this way is faster.

    $ python -m bench.shared_memory
"""

import sys
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

from bench import record
from bench.against_peers import torch_loop, with_gradients
from bench.record import Method, in_turn, pin
from ringlab.support.processes import RankContext, launch
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import shard
from ringlab.training.schedule import Ring
from ringlab.training.shared_memory import SharedMemory

MESSAGES, MEMORY, LOOP = "messages", "memory", "PyTorch's loop"
CASES = {  # options of the attention, and whether its backward pass counts too
    "forward": ({}, False),
    "causal zigzag": ({"causal": True, "layout": "zigzag"}, False),
    "causal zigzag, forward + backward": ({"causal": True, "layout": "zigzag"}, True),
}
SIZES = {"worlds": [2, 4], "lengths": [256, 1024, 2048, 4096], "heads": 8, "head_dim": 64, "repetitions": 9}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def methods_of(case: str, mine: list[torch.Tensor]) -> dict[str, Method]:
    """The attention of this case by messages and by memory, for this rank's q, k, v and d_out."""
    options, both = CASES[case]
    q, k, v, d_out = mine
    found: dict[str, Method] = {}
    for name, schedule in ((MESSAGES, Ring), (MEMORY, SharedMemory)):
        ring = partial(ring_flash_attention, schedule=schedule, **options)
        found[name] = False, partial(with_gradients, ring, q, k, v, d_out) if both else partial(ring, q, k, v)
    layout, causal = str(options.get("layout", "contiguous")), bool(options.get("causal"))
    found[LOOP] = False, partial(torch_loop, q, k, v, d_out if both else None, causal=causal, layout=layout)
    return found


def seconds_in_turn(
    context: RankContext, seq_len: int, heads: int, head_dim: int, repetitions: int, dtype: str
) -> dict[str, dict[str, list[float]]]:
    """The seconds of every repetition, by case and way of moving.

    Raises RuntimeError unless messages and memory give the same bits: they add up the same numbers in the same order.
    """
    generator, found = torch.Generator().manual_seed(0), {}
    shape = 1, heads, seq_len, head_dim
    whole = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in ("q", "k", "v", "d_out")]
    for case, (options, _) in CASES.items():
        layout = str(options.get("layout", "contiguous"))
        mine = [shard(x, layout, context.rank, context.world_size) for x in whole]
        found[case], results = in_turn(context, methods_of(case, mine), repetitions)
        pairs = zip(_listed(results[MESSAGES]), _listed(results[MEMORY]), strict=True)
        if not all(torch.equal(x, y) for x, y in pairs):
            raise RuntimeError(f"{case}, {dtype}: the result is wrong: not that of messages, bit for bit")
    return found


def _listed(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def measure(
    worlds: list[int],
    lengths: list[int],
    heads: int,
    head_dim: int,
    repetitions: int,
    cores: int = 2,
    folder: Path = record.FOLDER,
) -> record.Results:
    """The whole bench, on so many cores."""
    pin(cores)
    machine, sizes = record.machine(), {"heads": heads, "head_dim": head_dim}

    def run(step: str) -> Any:
        P, S, dtype = step.split(", ")
        return launch(seconds_in_turn, int(P), int(S), heads, head_dim, repetitions, dtype)[0]

    steps = [f"{P}, {S}, {dtype}" for P in worlds for S in lengths for dtype in DTYPES]
    settings = {"worlds": worlds, "lengths": lengths, "repetitions": repetitions, **sizes}
    return {
        "command": "python -m bench.shared_memory",
        "machine": machine,
        "dtype": "float32 and bfloat16",
        **settings,
        "seconds": record.in_steps("shared_memory", settings, steps, run, folder),
    }


def ratio(results: record.Results, P: int, S: int, dtype: str, case: str, name: str, over: str = MESSAGES) -> float:
    """The median time of one way over that of another."""
    seconds = results["seconds"][f"{P}, {S}, {dtype}"][case]
    return median(seconds[over]) / median(seconds[name])


def rows(results: record.Results, names: tuple[str, ...], over: str) -> list[str]:
    """A table of ratios: a line for each P, S and dtype, a column for each case, the ways in one cell."""
    lines = [f"| P | S | dtype | {' | '.join(CASES)} |", f"| ---: | ---: | --- |{' ---: |' * len(CASES)}"]
    found: dict[str, list[float]] = {name: [] for name in names}
    for P in results["worlds"]:
        for S in results["lengths"]:
            for dtype in DTYPES:
                cells = []
                for case in CASES:
                    here = [ratio(results, P, S, dtype, case, name, over) for name in names]
                    for name, value in zip(names, here, strict=True):
                        found[name].append(value)
                    cells.append(" / ".join(f"{value:.2f}" for value in here))
                lines.append(f"| {P} | {S:,} | {dtype} | {' | '.join(cells)} |")
    means = "; ".join(f"{name} {geometric_mean(each):.2f}, at least {min(each):.2f}" for name, each in found.items())
    return [*lines, "", f"Geometric means: {means}."]


def table(results: record.Results) -> str:
    """The results as tables in markdown."""
    lines = [
        "# Shared memory, messages and PyTorch's loop on one host",
        "",
        record.heading(results),
        f"B = 1, H = {results['heads']}, D = {results['head_dim']}. Medians of {results['repetitions']} repetitions; "
        "all ways in turn. A number above 1: so many times as fast.",
        "",
        f"Over messages: {MEMORY}",
        "",
        *rows(results, (MEMORY,), MESSAGES),
        "",
        f"Over PyTorch's loop: {MESSAGES} / {MEMORY}",
        "",
        *rows(results, (MESSAGES, MEMORY), LOOP),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    if "--quick" in sys.argv:
        record.show_quick(measure, table, **{**SIZES, "repetitions": 3})
    else:
        record.save("shared_memory", measure(**SIZES), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
