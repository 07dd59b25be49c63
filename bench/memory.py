"""The peak memory of attention beyond its inputs: naive, blockwise and the ring (one rank of 4), counted and measured.

naive          3 squares of S x S: the scores, a masked copy, the weights
blockwise      the output, in tiles and joined: 2·S rows; for a short sequence S rows and 3 tiles of scores
ring, a rank   the K and V in hand, o, and the new o, in tiles and joined: 5·C rows, C = S/P; in a hop as many: the K
               and V in hand, the next K and V, and o

$ python -m bench.memory
"""

import torch

from bench import record
from ring_attn import ring_attention
from ringlab.basics.blockwise_attention import TILE, blockwise_attention
from ringlab.basics.naive_attention import naive_attention
from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext, launch

LENGTHS = [512 * 2**i for i in range(6)]  # tokens
NAIVE_LIMIT = 8192  # tokens; beyond it the squares need gigabytes
HEADS, HEAD_DIM, WORLD_SIZE = 2, 64, 4


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


def measure(lengths: list[int], *, heads: int, head_dim: int, world_size: int, naive_limit: int) -> record.Results:
    """The whole bench, with a number for each length."""
    made, size = record.made("memory", "float32"), {"heads": heads, "head_dim": head_dim}
    measured = launch(measured_alone, 1, lengths, heads, head_dim, naive_limit)[0]
    chunks = [seq_len // world_size for seq_len in lengths]
    measured["ring"] = launch(measured_ring, world_size, chunks, heads, head_dim)[0]
    count = {name: [counted(name, S, world_size=world_size, **size) for S in lengths] for name in measured}
    return {**made, **size, "world_size": world_size, "lengths": lengths, "measured": measured, "counted": count}


def table(results: record.Results) -> str:
    """The results as markdown: MiB counted / MiB measured for each length."""
    rows = []
    for i, seq_len in enumerate(results["lengths"]):
        pairs = [(results["counted"][name][i], results["measured"][name][i]) for name in results["counted"]]
        seen = ["not measured" if peak is None else f"{peak / 2**20:,.1f}" for _, peak in pairs]
        rows.append([f"{seq_len:,}", *(f"{n / 2**20:,.1f} / {peak}" for (n, _), peak in zip(pairs, seen, strict=True))])
    return record.page(
        "Peak memory beyond the inputs, in MiB: counted / measured",
        results,
        f"B = 1, H = {results['heads']}, D = {results['head_dim']}; the ring has P = {results['world_size']} ranks, "
        "and the rank that needs most is shown.",
        record.grid("S | naive | blockwise | ring, one rank", rows),
    )


if __name__ == "__main__":
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM, "world_size": WORLD_SIZE, "naive_limit": NAIVE_LIMIT}
    record.save("memory", measure(LENGTHS, **sizes), table)
