"""Where the time of one call of the ring goes: agreement, kernels, merges, messages, waiting, the rest.

Each rank notes how long it spends in the functions that do these; time inside another of them counts there only. The
ring with messages and the ring in shared memory take turns. "begun": messages and copies. "waiting": for a message, or
for a flag of another rank. All numbers are milliseconds: the median over the repetitions, then the mean over the ranks.
With more ranks than cores, a rank that computes or begins a message also waits for its core: this counts there. "CPU"
is the time for which a rank had a core. So two ranks on a core take twice that at least.

    $ python -m bench.call_profile
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from itertools import product
from statistics import mean, median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bench import record
from bench.against_peers import with_gradients
from bench.shared_memory import CASES, DTYPES
from bench.turns import pin
from ringlab.support.processes import RankContext, launch
from ringlab.training import flash_ring, overlap, schedule, shared_memory
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import shard
from ringlab.training.schedule import Ring
from ringlab.training.shared_memory import SharedMemory

SIZES = {"worlds": [2, 4], "lengths": [256, 2048], "heads": 8, "head_dim": 64, "repetitions": 20}
WAYS = {"messages": Ring, "memory": SharedMemory}
CPU = "CPU"
PARTS = ("agreement", "kernels", "merges", "begun", "waiting", "rest")


class Clock:
    """Seconds by part. The parts are nested: the inner one stops the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.open = ["rest"]
        self.since = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.turn()
        self.open.append(name)
        try:
            yield
        finally:
            self.turn()
            self.open.pop()

    def turn(self) -> None:
        """The time since the last turn belongs to the part that is open."""
        now = time.perf_counter()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def work(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*args, **options)

        return work

    def span(self, what: str, *_: Any) -> Any:
        """In place of `ringlab.support.timeline.span`: the ring tells it when it waits."""
        return self.part("waiting") if what == "wait" else nullcontext()


@contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """The parts of the ring's functions tell the clock."""
    functions = [
        (flash_ring, "agree_on_schedule", "agreement"),
        (flash_ring, "agree", "agreement"),
        (flash_ring, "fused_forward", "kernels"),
        (flash_ring, "fused_backward", "kernels"),
        (flash_ring, "merge_into", "merges"),
        (overlap, "post", "begun"),
        (schedule, "post", "begun"),
        (schedule.TravellingSums, "wait", "waiting"),
        (shared_memory.SharedSums, "wait_for_turn", "waiting"),
        (shared_memory.HostMemory, "wait_for_readers", "waiting"),
        (torch.Tensor, "copy_", "begun"),
    ]
    with ExitStack() as stack:
        for owner, name, part in functions:
            stack.enter_context(mock.patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        for module in (overlap, shared_memory):
            stack.enter_context(mock.patch.object(module, "span", clock.span))
        yield


def profiled(
    context: RankContext, seq_len: int, heads: int, head_dim: int, repetitions: int, dtype: str
) -> dict[str, dict[str, list[float]]]:
    """Seconds of this rank by "case, way" and part, of each repetition."""
    generator, found, shape = torch.Generator().manual_seed(0), {}, (1, heads, seq_len, head_dim)
    whole = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in ("q", "k", "v", "d_out")]
    for case, (options, both) in CASES.items():
        layout = str(options.get("layout", "contiguous"))
        q, k, v, d_out = (shard(x, layout, context.rank, context.world_size) for x in whole)
        works = {}
        for way, taken in WAYS.items():
            ring = partial(ring_flash_attention, schedule=taken, **options)
            works[way] = partial(with_gradients, ring, q, k, v, d_out) if both else partial(ring, q, k, v)
            found[f"{case}, {way}"] = {part: [] for part in (*PARTS, CPU)}
        for i in range(1 + repetitions):
            for way, work in works.items():
                dist.barrier()
                clock, cpu = Clock(), time.process_time()
                with clocked(clock):
                    clock.turn()
                    clock.seconds.clear()
                    work()
                    clock.turn()
                clock.seconds[CPU] = time.process_time() - cpu
                if i:  # the first call opens connections
                    for part, seconds in found[f"{case}, {way}"].items():
                        seconds.append(clock.seconds[part])
    return found


def measure(worlds: list[int], lengths: list[int], cores: int = 2, **size: int) -> record.Results:
    """The whole bench, on so many cores: a row for each number of ranks, length, case and way."""
    pin(cores)
    machine, rows = record.machine(), []
    for P, S, dtype in product(worlds, lengths, DTYPES):
        of_ranks = launch(profiled, P, S, *size.values(), dtype)
        for name in of_ranks[0]:
            seconds = {part: mean(median(each[name][part]) for each in of_ranks) for part in (*PARTS, CPU)}
            rows.append({"world_size": P, "seq_len": S, "dtype": dtype, "case": name, "seconds": seconds})
    dtypes = {"dtype": "float32 and bfloat16"}
    return {"command": "python -m bench.call_profile", "machine": machine, **dtypes, **size, "rows": rows}


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    lines = [
        "# Where the time of one call goes",
        "",
        record.heading(results),
        f"B = 1, H = G = {results['heads']}, D = {results['head_dim']}. Milliseconds: the median of "
        f"{results['repetitions']} calls, then the mean over the ranks. Begun: messages and copies. Waiting: for a "
        "message, or for a flag of another rank. With 4 ranks on 2 cores a part also has the time in which its rank "
        "waits for a core; CPU is the time for which it has one.",
        "",
        f"| P | S | dtype | case | {' | '.join(PARTS)} | all | kernels' share | CPU |",
        f"| ---: | ---: | --- | --- | {'---: | ' * (len(PARTS) + 3)}".rstrip(),
    ]
    for row in results["rows"]:
        each = [row["seconds"][part] for part in PARTS]
        numbers = " | ".join(f"{1e3 * x:.2f}" for x in (*each, sum(each)))
        share = row["seconds"]["kernels"] / sum(each)
        cells = f"{row['world_size']} | {row['seq_len']:,} | {row['dtype']} | {row['case']} | {numbers} | {share:.0%}"
        lines.append(f"| {cells} | {1e3 * row['seconds'][CPU]:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    if "--quick" in sys.argv:
        print(table(measure(**{**SIZES, "repetitions": 3})))
    else:
        record.save("call_profile", measure(**SIZES), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
