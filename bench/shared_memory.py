"""Shared memory against messages on one host: the speed of the same ring, which moves its blocks in two ways.

The same kernels compute the same blocks in the same rounds. "memory": K and V are copied once to where the other ranks
can read them. "memory, no copy": they were made there. All are measured in turn. Ratio: the time of the ring with
messages over that with shared memory; above 1, shared memory is faster.

    $ python -m bench.shared_memory
"""

import sys
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

from bench import record
from bench.against_peers import with_gradients
from bench.turns import Method, in_turn, pin
from ringlab.support.processes import RankContext, launch
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import shard
from ringlab.training.schedule import Ring
from ringlab.training.shared_memory import SharedMemory, shared_keys_and_values

MESSAGES, MEMORY, NO_COPY = "messages", "memory", "memory, no copy"
CASES = {  # options of the attention, and whether its backward pass counts too
    "forward": ({}, False),
    "causal zigzag": ({"causal": True, "layout": "zigzag"}, False),
    "causal zigzag, forward + backward": ({"causal": True, "layout": "zigzag"}, True),
}
SIZES = {"worlds": [2, 4], "lengths": [2048, 4096, 8192], "heads": 8, "head_dim": 64, "repetitions": 9}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def methods_of(case: str, mine: list[torch.Tensor]) -> dict[str, Method]:
    """The attention of this case by messages and by memory, for this rank's q, k, v and d_out."""
    options, both = CASES[case]
    q, k, v, d_out = mine
    kept = shared_keys_and_values(*k.shape, dtype=k.dtype)
    for place, x in zip(kept, (k, v), strict=True):
        place.copy_(x)
    found: dict[str, Method] = {}
    for name, schedule, inputs in (
        (MESSAGES, Ring, (q, k, v)),
        (MEMORY, SharedMemory, (q, k, v)),
        (NO_COPY, SharedMemory, (q, *kept)),
    ):
        ring = partial(ring_flash_attention, schedule=schedule, **options)
        found[name] = False, partial(with_gradients, ring, *inputs, d_out) if both else partial(ring, *inputs)
    return found


def seconds_in_turn(
    context: RankContext, seq_len: int, heads: int, head_dim: int, repetitions: int, dtype: str
) -> dict[str, dict[str, list[float]]]:
    """The seconds of every repetition, by case and way of moving.

    Raises RuntimeError unless all ways of moving give the same bits: they add up the same numbers in the same order.
    """
    generator, found = torch.Generator().manual_seed(0), {}
    shape = 1, heads, seq_len, head_dim
    whole = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in ("q", "k", "v", "d_out")]
    for case, (options, _) in CASES.items():
        layout = str(options.get("layout", "contiguous"))
        mine = [shard(x, layout, context.rank, context.world_size) for x in whole]
        found[case], results = in_turn(context, methods_of(case, mine), repetitions)
        for name in (MEMORY, NO_COPY):
            pairs = zip(_listed(results[MESSAGES]), _listed(results[name]), strict=True)
            if not all(torch.equal(x, y) for x, y in pairs):
                raise RuntimeError(f"{case}, {name}, {dtype}: the result is wrong: not that of messages, bit for bit")
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


def ratio(results: record.Results, P: int, S: int, dtype: str, case: str, name: str) -> float:
    """The median time of messages over that of another way of moving."""
    seconds = results["seconds"][f"{P}, {S}, {dtype}"][case]
    return median(seconds[MESSAGES]) / median(seconds[name])


def table(results: record.Results) -> str:
    """The results as tables in markdown."""
    lines = [
        "# Shared memory against messages",
        "",
        record.heading(results),
        f"B = 1, H = {results['heads']}, D = {results['head_dim']}. Medians of {results['repetitions']} repetitions; "
        "all ways in turn. A number above 1: shared memory is so many times as fast as messages; in brackets, where K "
        "and V need no copy.",
        "",
        f"| P | S | dtype | {' | '.join(CASES)} |",
        f"| ---: | ---: | --- |{' ---: |' * len(CASES)}",
    ]
    ratios: dict[str, list[float]] = {name: [] for name in (MEMORY, NO_COPY)}
    for P in results["worlds"]:
        for S in results["lengths"]:
            for dtype in DTYPES:
                cells = []
                for case in CASES:
                    both = [ratio(results, P, S, dtype, case, name) for name in ratios]
                    for each, value in zip(ratios.values(), both, strict=True):
                        each.append(value)
                    cells.append("{:.2f} ({:.2f})".format(*both))
                lines.append(f"| {P} | {S:,} | {dtype} | {' | '.join(cells)} |")
    lines += ["", "Geometric mean: {:.2f} ({:.2f}).".format(*(geometric_mean(each) for each in ratios.values()))]
    return "\n".join(lines) + "\n"


def main() -> int:
    if "--quick" in sys.argv:
        record.show_quick(measure, table, **{**SIZES, "repetitions": 3})
    else:
        record.save("shared_memory", measure(**SIZES), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
