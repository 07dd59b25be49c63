"""The ring against attention in one process: speed in the same run, and memory when S and P grow together.

Speed: the P processes take turns. First the ring runs on all of them, then each other method on rank 0 alone, with all
cores, while the other ranks sleep until a message comes; and so on. The result is the ratio of the medians.
Memory: P grows while the chunk stays. The peak beyond the inputs must stay within 6 chunks and one tile of scores.

    $ python -m bench.ring_vs_full
"""

from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from bench import record
from bench.memory import measured_ring
from bench.record import in_turn
from ring_attn import ring_attention
from ringlab.basics.blockwise_attention import TILE, blockwise_attention
from ringlab.basics.ranks import gather, scatter
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention

RING = "ring_attention, P ranks"
BLOCKWISE, SDPA = "blockwise_attention, one process", "scaled_dot_product_attention, one process"
SPEED = {"worlds": [2, 4], "seq_len": 8192, "heads": 8, "head_dim": 64, "repetitions": 7}
MEMORY = {"chunk": 2048, "heads": 8, "head_dim": 128, "worlds": [1, 2, 4, 8]}  # a chunk is 8 MiB, a tile 2 MiB


def seconds_in_turn(
    context: RankContext, seq_len: int, heads: int, head_dim: int, repetitions: int
) -> dict[str, list[float]] | None:
    """The seconds of every repetition of every method (on rank 0, else None), on the same q, k, v in float32.

    Raises RuntimeError when the results differ by more than rounding explains.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (1, heads, seq_len, head_dim)
    whole = [torch.randn(shape, generator=generator) if context.rank == 0 else None for _ in "qkv"]
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


def measure(
    worlds: list[int], seq_len: int, heads: int, head_dim: int, repetitions: int, memory: dict[str, Any]
) -> record.Results:
    """The whole bench: a row for each P, with the seconds of each method. `memory` is as MEMORY."""
    made, size = record.made("ring_vs_full", "float32"), [seq_len, heads, head_dim, repetitions]
    rows = [{"world_size": P, "seconds": launch(seconds_in_turn, P, *size)[0]} for P in worlds]
    sizes = {"seq_len": seq_len, "heads": heads, "head_dim": head_dim, "repetitions": repetitions, "block_size": TILE}
    return {**made, "reference": BLOCKWISE, **sizes, "rows": rows, "memory": measure_memory(**memory)}


def measure_memory(worlds: list[int], *, chunk: int, heads: int, head_dim: int) -> dict[str, Any]:
    """The peak memory beyond the inputs, in bytes, of the rank that needs most, for each P, with the same chunk."""
    rows = []
    for world_size in worlds:
        alive, process = (
            launch(measured_ring, world_size, [chunk], heads, head_dim, as_it_comes)[0][0]
            for as_it_comes in (False, True)
        )
        rows.append({"world_size": world_size, "peak_bytes": alive, "peak_bytes_as_it_comes": process})
    size = {"chunk": chunk, "heads": heads, "head_dim": head_dim, "chunk_bytes": 4 * heads * chunk * head_dim}
    return {**size, "tile_bytes": 4 * heads * min(chunk, TILE) ** 2, "rows": rows}


def speed(results: record.Results, world_size: int, method: str) -> float:
    """The speed of a method over that of blockwise attention in one process."""
    (row,) = (row["seconds"] for row in results["rows"] if row["world_size"] == world_size)
    return median(row[BLOCKWISE]) / median(row[method])


def table(results: record.Results) -> str:
    """The results as two tables in markdown."""
    memory = results["memory"]
    chunk, tile = memory["chunk_bytes"], memory["tile_bytes"]
    speeds = [
        [f"P = {row['world_size']}", method, f"{median(each):.3f}", f"{speed(results, row['world_size'], method):.2f}"]
        for row in results["rows"]
        for method, each in row["seconds"].items()
    ]
    peaks = []
    for row in memory["rows"]:
        seen = [row["peak_bytes"], row["peak_bytes_as_it_comes"]]
        cells = ["not measured" if peak is None else f"{peak / chunk:.2f}" for peak in seen]
        peaks.append([row["world_size"], f"{row['world_size'] * memory['chunk']:,}", *cells])
    return record.page(
        "The ring against attention in one process",
        results,
        "## Speed",
        f"B = 1, S = {results['seq_len']:,}, H = {results['heads']}, D = {results['head_dim']}; blocks and tiles of "
        f"{results['block_size']} tokens. Measured in turn on the same cores, medians of {results['repetitions']}. "
        "Speed 1 is blockwise_attention in the same run.",
        record.grid("<run | <method | seconds | speed", speeds),
        "## Memory of one rank beyond its inputs",
        f"C = {memory['chunk']:,} tokens a rank, H = {memory['heads']}, D = {memory['head_dim']}: a chunk is "
        f"{chunk / 2**20:g} MiB, a tile of scores {tile / 2**20:g} MiB. Peak resident memory of the rank that needs "
        f"most, in chunks. Limit: 6 chunks and one tile, {6 + tile / chunk:.2f} chunks. *Tensors alive*: freed memory "
        "goes back to the system at once. *As it comes*: glibc keeps some freed memory for later.",
        record.grid("P | S | tensors alive | as it comes", peaks),
    )


if __name__ == "__main__":
    record.save("ring_vs_full", measure(**SPEED, memory=MEMORY), table)
