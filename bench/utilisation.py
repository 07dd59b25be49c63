"""The share of a machine's peak that attention reaches: one device, and rings with P times its context. Table 4, small.

    utilisation = model FLOPs / seconds / peak        peak: the fastest matrix product of this machine

Model FLOPs (as in MFU): 4·H·D in the forward pass for each of the S·(S+1)/2 (query, key) pairs that the causal mask
leaves, and twice as many in the backward pass. The backward kernel also computes the scores again; this extra work does
not count.
One device is scaled_dot_product_attention in one process with all the cores, on C tokens. The ring has P processes that
share the same cores, and P·C tokens in the zigzag layout. Peak, device and ring are measured in turn, so that a
disturbance affects all of them.

    $ python -m bench.utilisation
"""

import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from bench import record
from bench.against_peers import with_gradients
from bench.record import Method, in_turn
from ringlab.planning.hidden_communication import AttentionLayer, block_flops
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import positions, shard

FORWARD, TRAIN = "forward", "forward and backward"
PASSES = (FORWARD, TRAIN)
SIZES = {"worlds": [2, 4], "chunks": [512, 1024, 2048, 4096], "heads": 8, "head_dim": 64, "repetitions": 5}
SQUARES = [1024, 2048, 3072]  # sizes n of the products of two n x n matrices; the fastest one is the peak


def model_flops(seq_len: int, heads: int, head_dim: int, which: str) -> int:
    """FLOPs of a causal attention layer by its formulas, B = 1: QKᵀ and PV; in the backward pass dV, dP, dQ and dK."""
    forward = block_flops(AttentionLayer(heads, heads, head_dim), seq_len * (seq_len + 1) // 2)
    return forward if which == FORWARD else 3 * forward


def seconds_in_turn(
    context: RankContext, chunk: int, heads: int, head_dim: int, repetitions: int, squares: list[int]
) -> dict[str, list[float]]:
    """The seconds of every repetition: of the products "peak, n", and of "one device" and "ring" in both passes.

    Raises RuntimeError when the ring's numbers are wrong.
    """
    P = context.world_size

    def inputs(seq_len: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(1, heads, seq_len, head_dim, generator=generator) for _ in ("q", "k", "v", "d_out")]

    whole, alone = inputs(P * chunk), inputs(chunk)
    mine = [shard(x, "zigzag", context.rank, P) for x in whole]
    fused = partial(F.scaled_dot_product_attention, is_causal=True)
    ring = partial(ring_flash_attention, causal=True, layout="zigzag")
    matrices = {n: torch.randn(2, n, n) for n in squares}
    methods: dict[str, Method] = {f"peak, {n}": (True, lambda x=x: x[0] @ x[1]) for n, x in matrices.items()}
    methods |= {
        f"one device, {FORWARD}": (True, lambda: fused(*alone[:3])),
        f"one device, {TRAIN}": (True, lambda: with_gradients(fused, *alone)),
        f"ring, {FORWARD}": (False, lambda: ring(*mine[:3])),
        f"ring, {TRAIN}": (False, lambda: with_gradients(ring, *mine)),
    }
    seconds, results = in_turn(context, methods, repetitions)
    last = positions("zigzag", P * chunk, context.rank, P)[-1]  # of this rank: its row sees no key after it
    q, k, v, d_out = whole
    row = slice(last, last + 1)
    seen = k[:, :, : last + 1], v[:, :, : last + 1]
    rights = exact_attention(q[:, :, row], *seen, d_out[:, :, row], fused_blocks=P)
    for name, result in zip(("out", "dq"), results[f"ring, {TRAIN}"], strict=False):
        if not rights[name].accepts(result[:, :, -1:]):
            raise RuntimeError(f"{name} of the ring is wrong: off by {rights[name].error(result[:, :, -1:]).max():.1e}")
    return seconds


def measured(world_size: int, chunk: int, heads: int, head_dim: int, repetitions: int) -> dict[str, Any]:
    """FLOP/s of the peak, and the seconds and utilisation of one device on C tokens and of the ring on P·C."""
    more = min(4, max(1, 2048 // chunk))  # short chunks are noisy, and cheap
    each = launch(seconds_in_turn, world_size, chunk, heads, head_dim, repetitions * more, SQUARES)[0]
    peak = max(2 * n**3 / median(each[f"peak, {n}"]) for n in SQUARES)
    utilisation = {
        f"{of}, {which}": model_flops(seq_len, heads, head_dim, which) / median(each[f"{of}, {which}"]) / peak
        for of, seq_len in (("one device", chunk), ("ring", world_size * chunk))
        for which in PASSES
    }
    return {"peak": peak, "utilisation": utilisation, "seconds": each}


def measure(worlds: list[int], chunks: list[int], *, folder: Path = record.FOLDER, **sizes: int) -> record.Results:
    """The whole bench, with a row for each P and C; `sizes` are heads, head_dim and repetitions."""
    settings = {"worlds": worlds, "chunks": chunks, **sizes}
    steps = {f"P = {P}, C = {C}": (P, C) for C in chunks for P in worlds}
    machine = record.machine()
    found = record.in_steps("utilisation", settings, list(steps), lambda step: measured(*steps[step], **sizes), folder)
    return {
        "command": "python -m bench.utilisation",
        "machine": machine,
        "dtype": "float32",
        **settings,
        "rows": [{"world_size": P, "chunk": C, **found[step]} for step, (P, C) in steps.items()],
    }


def utilisations(results: record.Results, of: str, which: str, world_size: int) -> list[float]:
    """The utilisation of "one device" or of the "ring" in a pass, for each C, in the runs with this number of ranks."""
    return [row["utilisation"][f"{of}, {which}"] for row in results["rows"] if row["world_size"] == world_size]


def table(results: record.Results) -> str:
    """The results as tables in markdown, one for each pass."""
    peaks = [row["peak"] / 1e9 for row in results["rows"]]
    lines = [
        "# Utilisation: one device, and rings with P times its context",
        "",
        record.heading(results),
        f"B = 1, H = {results['heads']}, D = {results['head_dim']}, causal. Model FLOPs per second (a visible pair has "
        "4·H·D in the forward pass, 8·H·D in the backward pass) as a share of the peak. The peak is the fastest "
        f"product of two square matrices, {min(peaks):,.0f} to {max(peaks):,.0f} GFLOP/s, measured in turn with each "
        "row. One device is scaled_dot_product_attention in one process with all the cores. P ranks share them. "
        f"Medians of {results['repetitions']} repetitions, of more below C = 2,048. The last column compares the ring "
        "with one device on the same number of tokens: a short sequence leaves each rank a chunk too short to be fast.",
    ]
    for which in PASSES:
        lines += [
            "",
            f"{which.capitalize()}:",
            "",
            "| P | one device: S | utilisation | ring: S | utilisation | ring / one device | at the ring's S |",
            "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for P in results["worlds"]:
            alone, rings = (
                dict(zip(results["chunks"], utilisations(results, of, which, P), strict=True))
                for of in ("one device", "ring")
            )
            for C, ring in rings.items():
                same = f"{ring / alone[P * C]:.2f}" if P * C in alone else "not measured"
                cells = f"{alone[C]:.1%} | {P * C:,} | {ring:.1%} | {ring / alone[C]:.2f} | {same}"
                lines.append(f"| {P} | {C:,} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    record.save("utilisation", measure(**SIZES), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
