"""The longest context that fits into a memory that cannot grow: a small version of the paper's Table 3.

A device is a process of one thread whose private memory may grow by a fixed number of bytes. The kernel refuses more
(RLIMIT_DATA). Like a GPU's allocator it counts what is allocated, touched or not, and it leaves out the files of the
libraries, which RLIMIT_AS would count. The limit is set after imports, connections and a small step, so that what
libraries set up once does not count. All else counts: q, k, v, the gradient of the output, output, gradients, buffers.

A length fits when one training step of one attention layer, forward and backward, completes on every rank and the
results are right: rows of the output and of dq against float64, dk and dv by their sums. There is no mask; a causal one
(zigzag) halves the pairs and needs the same memory. Peak memory, in chunks of C = S/P tokens, each as large as q:

naive        3 squares of S x S and 6 chunks          q, k, v, d_out, out, dv; two saved squares and a gradient
blockwise    9 chunks                                 q, k, v, d_out, out; dq, dk, dv; a copy of d_out in the kernel
ring         18 chunks for any P                      as many; K, V and dK, dV in two buffers each, 8; the sum of dq

A ring of one device sets up its buffers too. Each process has one thread, because a new thread would take its stack
from the limit.

    $ python -m bench.max_context
"""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.against_peers import with_gradients
from ringlab.basics.blockwise_attention import TILE, blockwise_attention
from ringlab.basics.naive_attention import naive_attention, resolve_scale
from ringlab.basics.online_softmax import merge
from ringlab.ring.backward import block_backward
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext, launch

METHODS = {"naive": naive_attention, "blockwise": F.scaled_dot_product_attention, "ring": ring_flash_attention}
SIZES = {"worlds": [1, 2, 4, 8], "budget": 64 * 2**20, "heads": 8, "head_dim": 64}
GRAIN = 16  # tokens; only multiples of it are tried as chunks
SCORES = 2 * 256 * 512 * 4  # bytes: the tiles of scores and of their gradients in the fused kernel of one thread
CHECKED = 4  # rows of each rank
TOO_LITTLE = "MemoryError: the budget"


def counted(method: str, chunk: int, *, heads: int, head_dim: int, world_size: int = 3) -> int:
    """Peak memory of a training step on one device with `chunk` tokens, in float32: bytes, counted."""
    rows = 4 * heads * chunk * head_dim  # as large as q, k, v or the output
    lse = 4 * heads * chunk
    if method == "naive":
        return 3 * 4 * heads * chunk**2 + 6 * rows
    if method == "blockwise":
        return 9 * rows + lse + SCORES
    return (15 if world_size == 2 else 18) * rows + 2 * lse + SCORES  # two ranks need one buffer of each kind


def longest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest n with fits(n), or 0. It is searched in steps that double, up or down from `guess` >= 1, then halve.

    `fits` is True up to some n and False beyond it.
    """
    low, high, n, step = 0, None, guess, 1
    while high is None or high - low > 1:
        if fits(n):
            low = n
        else:
            high = n
        if high is None:
            n = low + step
        elif low == 0:
            n = max(1, high - step)
        else:
            n = (low + high) // 2
        step *= 2
    return low


@contextmanager
def at_most(budget: int) -> Iterator[None]:
    """In its body this process cannot get more than `budget` bytes of private memory beyond what it has now (Linux).

    Raises MemoryError when torch asks for more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (record.proc_status("VmData") + budget, hard))
    try:
        yield
    except RuntimeError as error:  # torch's allocator has no error of its own on a CPU
        if "can't allocate memory" not in str(error):
            raise
        raise MemoryError(f"the budget, {budget:,} bytes, is spent") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def within(work: Callable[..., Any], world_size: int, *args: Any) -> bool:
    """Whether work(context, *args), on `world_size` new processes, stays within the budgets that it sets by `at_most`.

    Any other failure is raised.
    """
    try:
        launch(work, world_size, *args)
    except RuntimeError as error:
        if not str(error).strip().splitlines()[-1].startswith(TOO_LITTLE):
            raise
        return False
    return True


def training_step(context: RankContext, method: str, chunk: int, budget: int, heads: int, head_dim: int) -> None:
    """One step on this rank's chunk, within the budget. Raises MemoryError, or RuntimeError when a result is wrong."""
    torch.set_num_threads(1)  # a device has the same speed for any number of devices
    record.return_freed_memory()
    attention = METHODS[method]

    def inputs(length: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(context.rank)
        return [torch.randn(1, heads, length, head_dim, generator=generator) for _ in ("q", "k", "v", "d_out")]

    alone = attention if context.world_size == 1 else F.scaled_dot_product_attention
    for warm_up, length in ((alone, 1024), (attention, 64)):  # the libraries' own buffers; connections
        with_gradients(warm_up, *inputs(length))
    with at_most(budget):
        mine = inputs(chunk)
        results = with_gradients(attention, *mine)
    check(*mine, *results)


def check(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, out: Tensor, *gradients: Tensor) -> None:
    """Raise RuntimeError on every rank unless the chunks (1, H, C, D) of all ranks are right.

    Some rows of out and dq are computed in float64: each rank attends to its own keys, and the parts are merged. The
    sum of dv over all tokens is that of d_out, because the weights of a row sum to 1. The sum of dk is 0, because the
    gradients of a row's scores sum to 0.
    """
    d_q, d_k, d_v = gradients
    rows = torch.linspace(0, q.shape[2] - 1, CHECKED).long()
    mine = [x[:, :, rows].double() for x in (q, d_out, out, d_q)]
    queries, d_rows, out_rows, d_q_rows = (torch.cat(each, dim=2) for each in zip(*agree(lambda: mine), strict=True))
    keys, values = k.double(), v.double()
    parts = agree(lambda: blockwise_attention(queries, keys, values, block_size=TILE))  # (out, lse) of each rank's keys
    exact, lse = reduce(lambda a, b: merge(*a, *b), parts)
    of_rows = d_rows, lse, (d_rows * exact).sum(dim=-1), resolve_scale(None, q.shape[3])
    exact_d_q = sum(agree(lambda: block_backward(queries, keys, values, *of_rows)[0]))
    sums = agree(lambda: [x.double().sum(dim=2) for x in (d_v - d_out, d_v.abs(), d_k, d_k.abs())])
    off_v, size_v, off_k, size_k = (sum(each) for each in zip(*sums, strict=True))
    pairs = {"out": (out_rows - exact, exact), "dq": (d_q_rows - exact_d_q, exact_d_q)}
    for name, (off, size) in {**pairs, "dv": (off_v, size_v), "dk": (off_k, size_k)}.items():
        share = (off.abs().max() / size.abs().max()).item()
        if not share <= 32 * torch.finfo(q.dtype).eps:  # NaN fails too
            raise RuntimeError(f"{name} is wrong: off by {share:.1e} of the largest number")


def measured(method: str, world_size: int, budget: int, heads: int, head_dim: int) -> dict[str, Any]:
    """The longest chunk that fits, counted and measured, in tokens, and what was tried: [tokens, fits] each."""
    size = {"heads": heads, "head_dim": head_dim}
    modelled = longest(lambda n: counted(method, n * GRAIN, **size, world_size=world_size) <= budget, 1)
    probes = []

    def fits(n: int) -> bool:
        probes.append([n * GRAIN, within(training_step, world_size, method, n * GRAIN, budget, heads, head_dim)])
        return probes[-1][1]

    chunk = GRAIN * longest(fits, max(1, modelled))
    return {"counted_chunk": GRAIN * modelled, "chunk": chunk, "probes": probes}


def measure(worlds: list[int], *, budget: int, heads: int, head_dim: int) -> record.Results:
    """The whole bench, with a row for each method and P."""
    made = record.made("max_context", "float32")
    settings = {"worlds": worlds, "budget": budget, "heads": heads, "head_dim": head_dim}
    cases = [("naive", 1), ("blockwise", 1), *(("ring", P) for P in worlds)]
    steps = {f"{method}, P = {P}": (method, P, budget, heads, head_dim) for method, P in cases}
    found = record.in_steps("max_context", settings, steps, measured).values()
    rows = [{"method": method, "world_size": P, **row} for (method, P), row in zip(cases, found, strict=True)]
    return {**made, **settings, "grain": GRAIN, "rows": rows}


def lengths(results: record.Results, method: str, of: str = "chunk") -> list[int]:
    """The longest S of a method for each P, in rising order. `of` is "chunk" (measured) or "counted_chunk"."""
    return [row["world_size"] * row[of] for row in results["rows"] if row["method"] == method]


def linear(results: record.Results) -> list[float]:
    """The ring's longest S on P devices over P times that of one device; 1 is linear."""
    ring, worlds = lengths(results, "ring"), results["worlds"]
    return [S / P * worlds[0] / ring[0] for S, P in zip(ring, worlds, strict=True)]


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    (one_device,), ring, rows = lengths(results, "blockwise"), lengths(results, "ring"), []
    for row in results["rows"]:
        P, S = row["world_size"], row["world_size"] * row["chunk"]
        found = [f"{S:,}", f"{P * row['counted_chunk']:,}", f"{row['chunk']:,}", f"{S / one_device:.2f}"]
        rows.append([row["method"], P, *found, f"{S / ring[0]:.2f}" if row["method"] == "ring" else ""])
    return record.page(
        "The longest context in a fixed memory",
        results,
        f"A training step of one attention layer, no mask, B = 1, H = {results['heads']}, "
        f"D = {results['head_dim']}. Each device is a process of one thread with a hard limit of "
        f"{results['budget'] / 2**20:g} MiB for inputs, output, gradients and buffers. Chunks are multiples of "
        f"{results['grain']} tokens. Modelled: by counting bytes. Blockwise is scaled_dot_product_attention.",
        record.grid(
            "<method | devices P | longest S, measured | modelled | tokens on a device | over blockwise's S | "
            f"over the ring's, P = {results['worlds'][0]}",
            rows,
        ),
    )


def no_limit_here() -> str | None:
    """The reason why this system cannot hold a process to a budget; None if it can."""
    if sys.platform != "linux":
        return "a hard limit on a process's private memory needs Linux"
    if within(_ask_for, 1, 2, 1):
        return "this kernel does not hold a process to RLIMIT_DATA"
    return None


def _ask_for(context: RankContext, MiB: int, budget_MiB: int) -> None:
    record.return_freed_memory()
    with at_most(budget_MiB * 2**20):
        torch.empty(MiB * 2**20, dtype=torch.uint8)


def main() -> int:
    if reason := no_limit_here():
        print(f"nothing measured: {reason}")
    else:
        record.save("max_context", measure(**SIZES), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
