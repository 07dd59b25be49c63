"""Memory: the peak of a forward pass, and the longest sequence that trains in a memory that cannot grow.

    memory         naive, blockwise, a rank of a ring of 4: the peak of a forward pass, counted and measured
    max_context    the longest context of one attention layer; the paper's table 3 in small

`memory`, in rows of D numbers:

naive          3 squares of S x S: the scores, a masked copy, the weights
blockwise      the output, in tiles and joined: 2·S rows; for a short sequence S rows and 3 tiles of scores
ring, a rank   the K and V in hand, o, and the new o, in tiles and joined: 5·C rows, C = S/P; in a hop as many: the K
               and V in hand, the next K and V, and o

In `max_context` a device is a process of one thread whose private memory may grow by a fixed number of bytes. The
kernel refuses more (RLIMIT_DATA). Like a GPU's allocator it counts what is allocated, touched or not, and it leaves out
the files of the libraries, which RLIMIT_AS would count. The limit is set after imports, connections and a small step,
so that what libraries set up once does not count. All else counts: inputs, gradients, buffers.

A length fits when one training step, forward and backward, completes on every rank and the results are
right: rows of the output and of dq against float64, dk and dv by their sums. There is no mask; a causal one (zigzag)
halves the pairs and needs the same memory. Its peak, in chunks of C = S/P tokens, each as large as q:

naive        3 squares of S x S and 6 chunks          q, k, v, d_out, out, dv; two saved squares and a gradient
blockwise    9 chunks                                 q, k, v, d_out, out; dq, dk, dv; a copy of d_out in the kernel
ring         18 chunks; P = 2: 16, P = 1: 11          as many; K, V and dK, dV in two buffers each, 8; the sum of dq

    $ python -m bench memory max_context
"""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import record
from bench.peers import with_gradients
from bench.record import Results, bench
from ring_attn import ring_attention
from ringlab.basics.blockwise_attention import TILE, blockwise_attention
from ringlab.basics.naive_attention import naive_attention, resolve_scale
from ringlab.basics.online_softmax import merge
from ringlab.ring.backward import block_backward
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext, launch

# The peak of a forward pass -------------------------------------------------------------------------------------------


def counted(method: str, seq_len: int, *, heads: int, head_dim: int, world_size: int = 1, itemsize: int = 4) -> int:
    """Peak memory in bytes, for B = 1, without the inputs and the statistics (1/D of a chunk).

    `method` is "naive", "blockwise" or "ring" (one rank; a chunk of seq_len / world_size tokens, rounded up).
    """
    C = -(-seq_len // world_size) if method == "ring" else seq_len
    rows = itemsize * heads * C * head_dim  # as large as q, k, v or the output
    tile = itemsize * heads * min(C, TILE) ** 2
    if method == "naive":
        square = itemsize * heads * seq_len**2
        return 2 * square + max(square, rows)
    if method == "blockwise":
        return max(2 * rows, rows + 3 * tile)  # scores, scores - m and weights
    block = 2 * rows  # the K and V in hand, stacked
    return block + max(3 * rows, rows + 3 * tile)  # beside them o, the new o in tiles, the new o joined


def measured_alone(
    context: RankContext, lengths: list[int], heads: int, head_dim: int, naive_limit: int
) -> dict[str, list[int | None]]:
    """Peak memory beyond the inputs, in bytes, of naive and blockwise attention at each length; None: not measured."""
    record.return_freed_memory()
    methods = {"naive": naive_attention, "blockwise": lambda q, k, v: blockwise_attention(q, k, v, block_size=TILE)}
    peaks = {name: [] for name in methods}
    for name, attention in methods.items():
        for seq_len in [lengths[0], *lengths]:  # the first one warms up
            x = torch.randn(1, heads, seq_len, head_dim)
            too_long = name == "naive" and seq_len > naive_limit
            peaks[name].append(None if too_long else record.peak_extra(lambda x=x, f=attention: f(x, x, x)))
    return {name: each[1:] for name, each in peaks.items()}


def measured_ring(
    context: RankContext, chunks: list[int], heads: int, head_dim: int, as_it_comes: bool = False
) -> list[int | None]:
    """Peak memory beyond the inputs, in bytes, of the rank that needs most, for each chunk length; None: not measured.

    `as_it_comes` leaves the allocator alone: freed memory that it keeps then counts too.
    """
    if not as_it_comes:
        record.return_freed_memory()
    peaks = []
    for chunk in [min(TILE, chunks[0]), *chunks]:  # the first one warms up
        q, k, v = (torch.randn(1, heads, chunk, head_dim) for _ in "qkv")
        peak = record.peak_extra(lambda q=q, k=k, v=v: ring_attention(q, k, v))
        peaks.append(max(agree(lambda peak=peak: peak or 0)) or None)
    return peaks[1:]


def memory_tables(results: Results) -> list[str]:
    """MiB counted / MiB measured for each length."""
    rows = []
    for i, seq_len in enumerate(results["lengths"]):
        pairs = [(results["counted"][name][i], results["measured"][name][i]) for name in results["counted"]]
        seen = ["not measured" if peak is None else f"{peak / 2**20:,.1f}" for _, peak in pairs]
        rows.append([f"{seq_len:,}", *(f"{n / 2**20:,.1f} / {peak}" for (n, _), peak in zip(pairs, seen, strict=True))])
    return [record.grid("S | naive | blockwise | ring, one rank", rows)]


@bench(memory_tables, lengths=[512 * 2**i for i in range(6)], heads=2, head_dim=64, world_size=4, naive_limit=8192)
def memory(lengths: list[int], heads: int, head_dim: int, world_size: int, naive_limit: int) -> Results:
    """A number for each length. Beyond `naive_limit` tokens the squares need gigabytes: they are not measured."""
    measured = launch(measured_alone, 1, lengths, heads, head_dim, naive_limit)[0]
    chunks, sizes = [S // world_size for S in lengths], {"heads": heads, "head_dim": head_dim, "world_size": world_size}
    measured["ring"] = launch(measured_ring, world_size, chunks, heads, head_dim)[0]
    return {"measured": measured, "counted": {name: [counted(name, S, **sizes) for S in lengths] for name in measured}}


# A memory that cannot grow --------------------------------------------------------------------------------------------

BUDGET = 64 * 2**20  # bytes
GRAIN = 16  # tokens; only multiples of it are tried as chunks
TOO_LITTLE = "MemoryError: the budget"


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


def lengths(results: Results, method: str, of: str = "chunk") -> list[int]:
    """The longest S of a method for each P, in rising order. `of` is "chunk" (measured) or "counted_chunk"."""
    return [row["world_size"] * row[of] for row in results["rows"] if row["method"] == method]


def no_limit_here() -> None:
    """Raise OSError with the reason where this system cannot hold a process to a budget."""
    if sys.platform != "linux":
        raise OSError("a hard limit on a process's private memory needs Linux")
    if within(_ask_for, 1, 64, 1):  # malloc may find less than 33 MiB in what it has already
        raise OSError("this kernel does not hold a process to RLIMIT_DATA")


def _ask_for(context: RankContext, MiB: int, budget_MiB: int) -> None:
    record.return_freed_memory()
    with at_most(budget_MiB * 2**20):
        torch.empty(MiB * 2**20, dtype=torch.uint8)


# One attention layer --------------------------------------------------------------------------------------------------

METHODS = {"naive": naive_attention, "blockwise": F.scaled_dot_product_attention, "ring": ring_flash_attention}
SCORES = 2 * 256 * 512 * 4  # bytes: the tiles of scores and of their gradients in the fused kernel of one thread
CHECKED = 4  # rows of each rank


def counted_training(method: str, chunk: int, *, heads: int, head_dim: int, world_size: int = 3) -> int:
    """Peak memory of a training step on one device with `chunk` tokens, in float32: bytes, counted."""
    rows = 4 * heads * chunk * head_dim  # as large as q, k, v or the output
    lse = 4 * heads * chunk
    if method == "naive":
        return 3 * 4 * heads * chunk**2 + 6 * rows
    if method == "blockwise":
        return 9 * rows + lse + SCORES
    return {1: 11, 2: 16}.get(world_size, 18) * rows + 2 * lse + SCORES  # few ranks need fewer buffers


def step_of_a_layer(context: RankContext, method: str, chunk: int, budget: int, heads: int, head_dim: int) -> None:
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


def max_context_tables(results: Results) -> list[str]:
    """The results as a table in markdown."""
    (one_device,), ring, rows = lengths(results, "blockwise"), lengths(results, "ring"), []
    for row in results["rows"]:
        P, S = row["world_size"], row["world_size"] * row["chunk"]
        found = [f"{S:,}", f"{P * row['counted_chunk']:,}", f"{row['chunk']:,}", f"{S / one_device:.2f}"]
        rows.append([row["method"], P, *found, f"{S / ring[0]:.2f}" if row["method"] == "ring" else ""])
    heads = "<method | devices P | longest S, measured | modelled | tokens on a device | over blockwise's S"
    return [record.grid(f"{heads} | over the ring's, P = {results['worlds'][0]}", rows)]


@bench(max_context_tables, worlds=[1, 2, 4, 8], budget=BUDGET, heads=8, head_dim=64)
def max_context(worlds: list[int], budget: int, heads: int, head_dim: int) -> Results:
    """A row for each method and P: the longest chunk that fits, counted and measured, and each [tokens, fits] tried."""
    no_limit_here()

    def measure(method: str, world_size: int) -> Results:
        count = partial(counted_training, method, heads=heads, head_dim=head_dim, world_size=world_size)
        modelled, probes = longest(lambda n: count(n * GRAIN) <= budget, 1), []

        def fits(n: int) -> bool:
            fit = within(step_of_a_layer, world_size, method, n * GRAIN, budget, heads, head_dim)
            probes.append([n * GRAIN, fit])
            return fit

        chunk = GRAIN * longest(fits, max(1, modelled))
        return {"counted_chunk": GRAIN * modelled, "chunk": chunk, "probes": probes}

    steps = [{"method": method, "world_size": P} for method in METHODS for P in (worlds if method == "ring" else [1])]
    return {"grain": GRAIN, "rows": record.rows("max_context", steps, measure)}


# What autograd keeps --------------------------------------------------------------------------------------------------


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
