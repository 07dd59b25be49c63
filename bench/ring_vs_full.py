"""The ring against attention in one process: speed in the same run, and memory when S and P grow together.

Speed: the P processes take turns. First the ring runs on all of them, then each other method on rank 0 alone, with all
cores, while the other ranks sleep until a message comes; and so on. The result is the ratio of the medians.
Memory: P grows while the chunk stays. The peak beyond the inputs must stay within 6 chunks and one tile of scores.

    $ python -m bench.ring_vs_full
"""

import sys
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

TARGET = 0.9  # ring speed / blockwise speed, at 2 ranks
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
    name = f"ring_attention, {context.world_size} ranks"
    methods = {
        name: (False, lambda: ring_attention(q, k, v)),
        BLOCKWISE: (True, lambda: blockwise_attention(*whole, block_size=TILE)[0]),
        SDPA: (True, lambda: F.scaled_dot_product_attention(*whole)),
    }
    seconds, outs = in_turn(context, methods, repetitions)
    outs[name] = gather(outs[name], context)
    if context.rank > 0:
        return None
    right = exact_attention(*whole)["out"]
    for method, out in outs.items():
        if not right.accepts(out):
            raise RuntimeError(f"{method} differs from full attention")
    return seconds


def measure_speed(worlds: list[int], *, seq_len: int, heads: int, head_dim: int, repetitions: int) -> dict[str, Any]:
    """A run for each P. Its rows are the methods, with their speed as a ratio to that of blockwise_attention."""
    runs = []
    for world_size in worlds:
        each = launch(seconds_in_turn, world_size, seq_len, heads, head_dim, repetitions)[0]
        base = median(each[BLOCKWISE])
        rows = [
            {"method": method, "median_seconds": median(times), "ratio": base / median(times), "seconds": times}
            for method, times in each.items()
        ]
        runs.append({"world_size": world_size, "rows": rows})
    return {
        "seq_len": seq_len,
        "heads": heads,
        "head_dim": head_dim,
        "repetitions": repetitions,
        "block_size": TILE,
        "target": TARGET,
        "runs": runs,
    }


def measure_memory(worlds: list[int], *, chunk: int, heads: int, head_dim: int) -> dict[str, Any]:
    """The peak memory beyond the inputs, in bytes, of the rank that needs most, for each P, with the same chunk."""
    rows = []
    for world_size in worlds:
        peaks = [
            launch(measured_ring, world_size, [chunk], heads, head_dim, as_it_comes)[0][0]
            for as_it_comes in (False, True)
        ]
        rows.append({"world_size": world_size, "peak_bytes": peaks[0], "peak_bytes_as_it_comes": peaks[1]})
    return {
        "chunk": chunk,
        "heads": heads,
        "head_dim": head_dim,
        "chunk_bytes": 4 * heads * chunk * head_dim,
        "tile_bytes": 4 * heads * min(chunk, TILE) ** 2,
        "rows": rows,
    }


def measure(speed: dict[str, Any], memory: dict[str, Any]) -> record.Results:
    """The whole bench; speed and memory are the arguments of the two functions above."""
    return {
        "command": "python -m bench.ring_vs_full",
        "machine": record.machine(),
        "dtype": "float32",
        "speed": measure_speed(**speed),
        "memory": measure_memory(**memory),
    }


def table(results: record.Results) -> str:
    """The results as two tables in markdown."""
    speed, memory = results["speed"], results["memory"]
    lines = [
        "# The ring against attention in one process",
        "",
        record.heading(results),
        "",
        "## Speed",
        "",
        f"B = 1, S = {speed['seq_len']:,}, H = {speed['heads']}, D = {speed['head_dim']}; blocks and tiles of "
        f"{speed['block_size']} tokens. Measured in turn on the same cores, medians of {speed['repetitions']}. "
        f"Speed 1 is blockwise_attention in the same run. Target: {speed['target']} at 2 ranks.",
        "",
        "| run | method | seconds | speed |",
        "| --- | --- | ---: | ---: |",
    ]
    for run in speed["runs"]:
        for row in run["rows"]:
            lines.append(
                f"| P = {run['world_size']} | {row['method']} | {row['median_seconds']:.3f} | {row['ratio']:.2f} |"
            )
    chunk, tile = memory["chunk_bytes"], memory["tile_bytes"]
    lines += [
        "",
        "## Memory of one rank beyond its inputs",
        "",
        f"C = {memory['chunk']:,} tokens a rank, H = {memory['heads']}, D = {memory['head_dim']}: a chunk is "
        f"{chunk / 2**20:g} MiB, a tile of scores {tile / 2**20:g} MiB. Peak resident memory of the rank that needs "
        f"most, in chunks. Limit: 6 chunks and one tile, {6 + tile / chunk:.2f} chunks. *Tensors alive*: freed memory "
        "goes back to the system at once. *As it comes*: glibc keeps some freed memory for later.",
        "",
        "| P | S | tensors alive | as it comes |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for row in memory["rows"]:
        peaks = [row["peak_bytes"], row["peak_bytes_as_it_comes"]]
        cells = ["not measured" if peak is None else f"{peak / chunk:.2f}" for peak in peaks]
        lines.append(f"| {row['world_size']} | {row['world_size'] * memory['chunk']:,} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    results = measure(SPEED, MEMORY)
    record.save("ring_vs_full", results, table)
    ratio, memory = results["speed"]["runs"][0]["rows"][0]["ratio"], results["memory"]
    peaks = [row["peak_bytes"] for row in memory["rows"]]
    limit = 6 * memory["chunk_bytes"] + memory["tile_bytes"]
    fast, small = ratio >= TARGET, None in peaks or max(peaks) <= limit
    seen = "not measured on this system" if None in peaks else f"{max(peaks) / memory['chunk_bytes']:.2f} chunks"
    print(f"{'ok   ' if fast else 'MISS '} speed: {ratio:.2f} of blockwise_attention at 2 ranks, target {TARGET}")
    print(f"{'ok   ' if small else 'MISS '} memory: {seen}, limit {limit / memory['chunk_bytes']:.2f} chunks")
    return 0 if fast and small else 1


if __name__ == "__main__":
    sys.exit(main())
