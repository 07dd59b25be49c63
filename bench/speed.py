"""The speed of attention over ranks, as a share of something measured in the same run, in turn; and its memory.

ring_vs_full     ring_attn.py, beside blockwise attention in one process; memory when S and P grow together
against_peers    the flash ring and other rings, beside the limit: fused attention in one process; memory

$ python -m bench ring_vs_full against_peers
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.memory import measured_ring
from bench.peers import torch_loop, with_gradients
from bench.record import Method, Results, bench, in_turn, pin
from ring_attn import ring_attention
from ringlab.basics.blockwise_attention import TILE, blockwise_attention
from ringlab.basics.ranks import gather, scatter
from ringlab.ring.cases import random_inputs
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import shard, unshard
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention


def of_world(results: Results, world_size: int) -> Results:
    """The row of P ranks."""
    (row,) = (row for row in results["rows"] if row["world_size"] == world_size)
    return row


def in_chunks(peak: int | None, chunk: int) -> str:
    """A peak in chunks of so many bytes."""
    return "not measured" if peak is None else f"{peak / chunk:.2f}"


# ring_attn.py, beside blockwise attention in one process --------------------------------------------------------------

RING = "ring_attention, P ranks"
BLOCKWISE, SDPA = "blockwise_attention, one process", "scaled_dot_product_attention, one process"
MEMORY_OF = {"worlds": [1, 2, 4, 8], "chunk": 2048, "heads": 8, "head_dim": 128}  # a chunk is 8 MiB
PEAKS = (("peak_bytes", False), ("peak_bytes_as_it_comes", True))  # a peak, and whether glibc keeps what is freed


def seconds_of_ring(
    context: RankContext, seq_len: int, heads: int, head_dim: int, repetitions: int
) -> dict[str, list[float]] | None:
    """The seconds of every repetition of every method (on rank 0, else None), on the same q, k, v in float32.

    Raises RuntimeError when the results differ by more than rounding explains.
    """
    whole = random_inputs(1, heads, heads, seq_len, head_dim)[:3] if context.rank == 0 else [None] * 3
    q, k, v = (scatter(x, context) for x in whole)
    methods = {
        RING: (False, lambda: ring_attention(q, k, v)),
        BLOCKWISE: (True, lambda: blockwise_attention(*whole, block_size=TILE)[0]),
        SDPA: (True, lambda: F.scaled_dot_product_attention(*whole)),
    }
    seconds, outs = in_turn(context, methods, repetitions)
    outs[RING] = gather(outs[RING], context)
    if context.rank > 0:
        return None
    right = exact_attention(*whole)["out"]
    for method, out in outs.items():
        if not right.accepts(out):
            raise RuntimeError(f"{method} differs from full attention")
    return seconds


def speed_of_ring(results: Results, world_size: int, method: str) -> float:
    """The speed of a method over that of blockwise attention in one process."""
    seconds = of_world(results, world_size)["seconds"]
    return median(seconds[BLOCKWISE]) / median(seconds[method])


def ring_vs_full_tables(results: Results) -> list[str]:
    memory = results["memory"]
    speeds = [
        [f"P = {P}", method, f"{median(each):.3f}", f"{speed_of_ring(results, P, method):.2f}"]
        for P, seconds in ((row["world_size"], row["seconds"]) for row in results["rows"])
        for method, each in seconds.items()
    ]
    peaks = []
    for row in memory["rows"]:
        cells = [in_chunks(row[name], memory["chunk_bytes"]) for name, _ in PEAKS]
        peaks.append([row["world_size"], f"{row['world_size'] * memory['chunk']:,}", *cells])
    return [
        record.grid("<run | <method | seconds | speed", speeds),
        record.grid("P | S | tensors alive | as it comes", peaks),
    ]


@bench(ring_vs_full_tables, worlds=[2, 4], seq_len=8192, heads=8, head_dim=64, repetitions=7, memory=MEMORY_OF)
def ring_vs_full(
    worlds: list[int], seq_len: int, heads: int, head_dim: int, repetitions: int, memory: Results
) -> Results:
    """A row for each P, with the seconds of each method; memory with the same chunk for each P."""
    sizes = seq_len, heads, head_dim, repetitions
    rows = [{"world_size": P, "seconds": launch(seconds_of_ring, P, *sizes)[0]} for P in worlds]
    C, H, D = (memory[name] for name in ("chunk", "heads", "head_dim"))
    peaks = [
        {"world_size": P}
        | {name: launch(measured_ring, P, [C], H, D, as_it_comes)[0][0] for name, as_it_comes in PEAKS}
        for P in memory["worlds"]
    ]
    of_memory = {"chunk_bytes": 4 * H * C * D, "tile_bytes": 4 * H * min(C, TILE) ** 2, "rows": peaks}
    return {"block_size": TILE, "rows": rows, "memory": {**memory, **of_memory}}


# The flash ring, beside the limit of the machine and other rings ------------------------------------------------------

CORES = 2
BESIDE = {"worlds": [1, 2, 4, 8], "chunk": 2048, "heads": 8, "head_dim": 64}  # memory
LIMIT, TORCH, OWN = "limit", "torch's context-parallel loop", "ring_attn.py"
FULL, ZIGZAG, STRIPED, CONTIGUOUS = "flash ring", "flash ring, zigzag", "flash ring, striped", "flash ring, contiguous"
FORWARD, CAUSAL, TRAIN = "forward", "causal forward", "causal forward and backward"
CASES = {
    FORWARD: [FULL, TORCH, OWN],
    CAUSAL: [ZIGZAG, STRIPED, CONTIGUOUS, TORCH],
    TRAIN: [ZIGZAG, TORCH],
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def layout_of(method: str, case: str) -> str:
    """The layout of the method's tokens."""
    if method == TORCH:
        return "contiguous" if case == FORWARD else "zigzag"
    return next((layout for layout in ("zigzag", "striped") if layout in method), "contiguous")


def method(name: str, case: str, whole: list[Tensor], context: RankContext) -> Method:
    """(rank 0 only?, the function to time). The function returns out or (out, dq, dk, dv)."""
    causal, layout, alone = case != FORWARD, layout_of(name, case), name == LIMIT
    chunks = whole if alone else [shard(x, layout, context.rank, context.world_size) for x in whole]
    others: dict[str, Callable[..., Tensor]] = {
        LIMIT: partial(F.scaled_dot_product_attention, is_causal=causal),
        TORCH: partial(torch_loop, causal=causal, layout=layout),
        OWN: ring_attention,
    }
    ours = partial(ring_flash_attention, causal=causal, layout=layout)
    attention = others.get(name, ours)
    if case == TRAIN:
        return alone, lambda: with_gradients(attention, *chunks)
    return alone, lambda: (attention(*chunks[:3]),)


def measured_speed(
    context: RankContext, lengths: list[int], heads: int, head_dim: int, repetitions: int
) -> list[dict[str, Any]]:
    """A row for each dtype, S and case: the seconds of the limit and of all rings, in turn, and how far their results
    are off.

    Raises RuntimeError when a result differs from the limit's by more than rounding explains.
    """
    rows = []
    for dtype in DTYPES:
        for turn, seq_len in enumerate([lengths[0], *lengths]):  # the first turn warms up: connections, memory
            whole = [x.to(DTYPES[dtype]) for x in random_inputs(1, heads, heads, seq_len, head_dim)]
            for case in CASES:
                names = [name for name in CASES[case] if name != OWN or seq_len <= 4096]  # it is slow
                methods = {name: method(name, case, whole, context) for name in (LIMIT, *names)}
                more = min(4, max(1, 8192 // seq_len))  # short ones are noisy, and cheap
                seconds, results = in_turn(context, methods, repetitions * more if turn else 1)
                off = {}
                for name in names:
                    off[name] = differences(context, results[name], results.get(LIMIT), layout_of(name, case))
                    if not all(x <= 32 * torch.finfo(DTYPES[dtype]).eps for x in off[name] or ()):
                        where = f"{name}, {case}, {dtype}, S = {seq_len}"
                        raise RuntimeError(f"{where}: off by {off[name]} of the largest number")
                if turn:
                    row = {"world_size": context.world_size, "dtype": dtype, "seq_len": seq_len, "case": case}
                    rows.append({**row, "seconds": seconds})
                    if context.rank == 0:
                        print(f"{'  '.join(map(str, row.values()))}", flush=True)
    return rows


def differences(
    context: RankContext, mine: tuple[Tensor, ...], limit: tuple[Tensor, ...] | None, layout: str
) -> list[float] | None:
    """The largest difference of each result from the limit's, as a share of its largest number; None but on rank 0."""
    wholes = [gather(x.detach(), context) for x in mine]
    if context.rank > 0:
        return None
    wholes = [unshard(list(x.chunk(context.world_size, dim=2)), layout) for x in wholes]
    return [float((x - y).abs().max() / y.abs().max()) for x, y in zip(wholes, limit, strict=True)]


def peak_memory(context: RankContext, chunk: int, heads: int, head_dim: int) -> list[int | None]:
    """The peak of this rank's memory beyond its inputs, in bytes: of a forward pass, and of forward and backward."""
    record.return_freed_memory()
    q, k, v, d_out = (torch.randn(1, heads, chunk, head_dim) for _ in ("q", "k", "v", "d_out"))
    ring, peaks = partial(ring_flash_attention, causal=True, layout="zigzag"), []
    for work in (lambda: ring(q, k, v)), (lambda: with_gradients(ring, q, k, v, d_out)):
        work()  # what libraries set up once
        peaks.append(record.peak_extra(work))
    return peaks


def speeds(results: Results, *, method: str, **wanted: Any) -> list[float]:
    """The speeds of this ring, as shares of the limit's, in the rows that have these values."""
    rows = [row["seconds"] for row in results["rows"] if wanted.items() <= row.items() and method in row["seconds"]]
    return [median(seconds[LIMIT]) / median(seconds[method]) for seconds in rows]


def over_peer(results: Results, peer: str, dtype: str) -> list[float]:
    """The speed of the flash ring over the peer's, for each of the peer's rows; causal ones against zigzag."""
    ratios = []
    for row in results["rows"]:
        if peer in row["seconds"] and row["dtype"] == dtype:
            mine = row["seconds"][FULL if row["case"] == FORWARD else ZIGZAG]
            ratios.append(median(row["seconds"][peer]) / median(mine))
    return ratios


def against_peers_tables(results: Results) -> list[str]:
    memory, lengths = results["memory"], sorted({row["seq_len"] for row in results["rows"]})
    chunk, parts = 4 * memory["heads"] * memory["chunk"] * memory["head_dim"], []
    for dtype in DTYPES:
        for P in results["worlds"]:
            rows = []
            for case, rings in CASES.items():
                for name in rings:
                    seen = speeds(results, dtype=dtype, world_size=P, case=case, method=name)
                    if seen:
                        cells = [f"{x:.3f}" for x in seen] + [""] * (len(lengths) - len(seen))
                        rows.append([case, name, *cells])
            heads = " | ".join(["<case | <ring", *(f"S = {S:,}" for S in lengths)])
            parts.append(f"{dtype}, P = {P}:\n\n{record.grid(heads, rows)}")
    peaks = [[row["world_size"], *(in_chunks(peak, chunk) for peak in row["peak_bytes"])] for row in memory["rows"]]
    return [
        "\n\n".join(parts),
        record.grid("P | forward | forward and backward", peaks),
    ]


@bench(
    against_peers_tables,
    dtype="float32 and bfloat16",
    worlds=[2, 4],
    lengths=[256, 1024, 2048, 4096, 8192, 16384],
    heads=8,
    head_dim=64,
    repetitions=5,
    beside=BESIDE,
)
def against_peers(
    worlds: list[int], lengths: list[int], heads: int, head_dim: int, repetitions: int, beside: Results
) -> Results:
    """A row for each P, dtype, S and case; memory of a rank with the chunk of `beside`, for each P there."""
    pin(CORES)
    rows = [row for P in worlds for row in launch(measured_speed, P, lengths, heads, head_dim, repetitions)[0]]
    C, H, D = (beside[name] for name in ("chunk", "heads", "head_dim"))
    peaks = []
    for P in beside["worlds"]:
        each = zip(*launch(peak_memory, P, C, H, D), strict=True)
        peaks.append({"world_size": P, "peak_bytes": [record.most(seen) for seen in each]})
    return {"rows": rows, "memory": {**beside, "rows": peaks}}
