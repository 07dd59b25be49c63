"""Whole models over ranks: how fast they train.

training_speed    tokens per second and memory of `ringlab.models.train` on 1, 2 and 4 ranks with as many tokens each.
                  The ranks share the cores, so what counts is the speed of all ranks together, over that of one process
                  with all the cores on the same sequence. PyTorch's `context_parallel` does not train on a CPU: it has
                  no rule for the fused kernel. Its private loop takes the place of our ring in the same model.

    $ python -m bench training_speed
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from bench import record
from bench.peers import torch_loop
from bench.record import Results, bench
from ringlab.models.loader import open_text, read_batch
from ringlab.models.mesh import build_mesh
from ringlab.models.train import RATE, build, take_step
from ringlab.models.transformer import Config
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext, launch
from ringlab.support.timeline import laps
from ringlab.ways.shared_memory import SharedMemory

ONE, RING, TORCH = "one process", "ring", "PyTorch's loop"

# The speed of training ------------------------------------------------------------------------------------------------

MEMORY = "ring in shared memory"


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
        seconds.append(max(laps(step, context.device)))
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


def speed(results: Results, method: str, world_size: int) -> float:
    """Tokens per second of all ranks together, on the sequence of `world_size` chunks."""
    (row,) = (row for row in results["rows"] if row["world_size"] == world_size)
    return world_size * results["chunk"] / median(row["seconds"][method])


def training_speed_tables(results: Results) -> list[str]:
    rows = []
    for row in results["rows"]:
        P = row["world_size"]
        for method, peak in row["peak_bytes"].items():
            fast, alone = speed(results, method, P), speed(results, ONE, P)
            memory = "not measured" if peak is None else f"{peak / 1e6:,.1f} MB"
            rows.append([P, f"{P * results['chunk']:,}", method, f"{fast:,.0f}", f"{fast / alone:.2f}", memory])
    return [record.grid("P | S | <attention | tokens/s, all ranks | over one process on this S | memory a rank", rows)]


@bench(
    training_speed_tables,
    worlds=[1, 2, 4],
    chunk=1024,
    steps=3,
    repetitions=3,
    layers=2,
    hidden=128,
    heads=4,
    kv_heads=4,
    feedforward=384,
)
def training_speed(worlds: list[int], chunk: int, steps: int, repetitions: int, **model: int) -> Results:
    """A row for each P. Raises RuntimeError when a loss is not that of one process."""
    rows = []
    for P in tqdm(worlds, desc="training_speed"):
        ranks = {method: 1 if method == ONE else P for method in ATTENTION if P > 1 or method in (ONE, RING)}
        peaks = {name: record.most(launch(memory_of_steps, n, name, P * chunk, model)) for name, n in ranks.items()}
        seconds: dict[str, list[float]] = {name: [] for name in ranks}
        losses: dict[str, float] = {}
        for _ in range(repetitions):  # methods take turns
            for name, n in ranks.items():
                more, losses[name] = launch(seconds_of_steps, n, name, P * chunk, steps, model)[0]
                seconds[name] += more
                if abs(losses[name] / losses[ONE] - 1) > 1e-5:
                    raise RuntimeError(f"{name}, P = {P}: the loss is {losses[name]}; of one process {losses[ONE]}")
        rows.append({"world_size": P, "seconds": seconds, "peak_bytes": peaks})
    return {"rows": rows}


# The losses on every mesh, which were measured once -------------------------------------------------------------------

ROUNDED, BF16 = "one process, weights off by one rounding", "ring of 4, bf16"  # runs, beside ONE


def curves(results: Results) -> dict[str, torch.Tensor]:
    """The losses of each run, float64."""
    return {row["run"]: torch.tensor(row["losses"], dtype=torch.float64) for row in results["rows"]}


def differences(results: Results) -> dict[str, torch.Tensor]:
    """For each other run, how far its losses are from those of one process, as a share of them."""
    each = curves(results)
    return {name: (losses / each[ONE] - 1).abs() for name, losses in each.items() if name != ONE}


# A new token, which was measured once ---------------------------------------------------------------------------------

MERGE = "merge over ranks"  # beside ONE and RING


def milliseconds(results: Results, way: str, world_size: int) -> list[float]:
    """The median time of a token in a layer, for each context."""
    rows = [row for row in results["rows"] if row["world_size"] == world_size]
    return [1e3 * median(row["seconds"][way]) for row in rows]
