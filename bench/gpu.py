"""The fused blocks on a CUDA GPU: a whole ring simulated on one device, its values, gradients and speed against SDPA.

One GPU computes for all ranks, one after the other, with the blocks, merges and sums of ringlab/training/flash_ring.py.
No message travels. Without a CUDA GPU nothing is measured and nothing is claimed.

    $ python -m bench.gpu
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.accuracy import RESULTS, errors, inputs
from bench.against_peers import with_gradients
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.support.rounding import exact_attention
from ringlab.training.causal import visible_slice
from ringlab.training.flash_ring import merge_into
from ringlab.training.fused_block import choose_kernel, fused_backward, fused_forward
from ringlab.training.layouts import shard, unshard

CASES = [(dtype, layout) for dtype in ("bfloat16", "float16", "float32") for layout in ("full", "zigzag", "striped")]
EXACT = {"seq_len": 4096, "heads": 4, "head_dim": 64}  # against float64, whose scores take S x S
SPEED = {"seq_len": 32768, "heads": 16, "head_dim": 128}
WORLD_SIZE, REPETITIONS = 4, 10


def simulated_ring(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, layout: str, world_size: int) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv), each (B, H, S, D), of all ranks in one process. Layout "full": contiguous, not causal."""
    causal, layout = layout != "full", "contiguous" if layout == "full" else layout
    scale, dtype = q.shape[-1] ** -0.5, accumulation_dtype(q.dtype)
    chunks = [[shard(x, layout, rank, world_size) for rank in range(world_size)] for x in (q, k, v, d_out)]
    lengths = [chunk.shape[2] for chunk in chunks[0]]
    gradients = [[torch.zeros(x.shape, dtype=dtype, device=x.device) for x in each] for each in chunks[:3]]
    outs = []
    for rank in range(world_size):
        q_r, d_out_r, d_q = chunks[0][rank], chunks[3][rank], gradients[0][rank]
        blocks = []
        for t in range(world_size):
            block = (rank - t) % world_size
            visible = visible_slice(layout, rank, block, lengths, causal=causal)
            if visible is None:
                continue
            rows, keys = visible.queries, visible.keys
            k_j, v_j = chunks[1][block][:, :, keys], chunks[2][block][:, :, keys]
            blocks.append((block, visible, k_j, v_j))
            out_j, lse_j = fused_forward(q_r[:, :, rows], k_j, v_j, scale=scale, causal=visible.triangle)
            if t == 0:
                out, lse = out_j.to(dtype), lse_j
            else:
                merge_into(out[:, :, rows], lse[:, :, rows], out_j, lse_j)
        out = out.to(q.dtype)
        outs.append(out)
        for block, visible, k_j, v_j in blocks:
            rows, keys = visible.queries, visible.keys
            of_rows = out[:, :, rows], lse[:, :, rows], d_out_r[:, :, rows]
            shares = fused_backward(q_r[:, :, rows], k_j, v_j, *of_rows, scale=scale, causal=visible.triangle)
            d_q[:, :, rows] += shares[0]
            gradients[1][block][:, :, keys] += shares[1]
            gradients[2][block][:, :, keys] += shares[2]
    return tuple(unshard(each, layout).to(q.dtype) for each in (outs, *gradients))


def seconds(work: Callable[[], Any], device: str) -> float:
    """The median time of `work`, after one call to warm up."""
    times = []
    for _ in range(1 + REPETITIONS):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def measure(device: str, exact: dict[str, int], speed: dict[str, int]) -> record.Results:
    """A row for each dtype and layout: the kernel, errors of the ring and of SDPA, speed as a share of SDPA's.

    Raises RuntimeError where rounding does not explain an error.
    """
    rows = []
    for dtype, layout in CASES:
        whole = [x.to(device) for x in inputs(*exact.values(), dtype)]
        sdpa = partial(F.scaled_dot_product_attention, is_causal=layout != "full")
        rights = exact_attention(*whole, causal=layout != "full", fused_blocks=WORLD_SIZE)
        row = {"dtype": dtype, "layout": layout, "kernel": choose_kernel(*whole[:2], 0.125)[0]}
        row["ring"] = errors(simulated_ring(*whole, layout, WORLD_SIZE), rights)
        row["sdpa"] = errors(with_gradients(sdpa, *whole), rights)
        long = [x.to(device) for x in inputs(*speed.values(), dtype)]
        ring_seconds = seconds(lambda long=long, layout=layout: simulated_ring(*long, layout, WORLD_SIZE), device)
        rows.append(
            {**row, "speed": seconds(lambda long=long, sdpa=sdpa: with_gradients(sdpa, *long), device) / ring_seconds}
        )
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {
        "command": "python -m bench.gpu",
        "machine": {**record.machine(), "device": name},
        "dtype": "bfloat16, float16 and float32",
        "world_size": WORLD_SIZE,
        "exact": exact,
        "speed": speed,
        "rows": rows,
    }


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    exact, speed = results["exact"], results["speed"]
    lines = [
        "# The fused blocks on one GPU, as a simulated ring",
        "",
        record.heading(results),
        f"Device: {results['machine']['device']}.",
        "",
        f"{results['world_size']} ranks simulated one after the other. Largest errors against float64 over those of "
        f"SDPA (S = {exact['seq_len']:,}, H = {exact['heads']}, D = {exact['head_dim']}). Speed, forward and backward, "
        f"as a share of SDPA's (S = {speed['seq_len']:,}, H = {speed['heads']}, D = {speed['head_dim']}).",
        "",
        "| dtype | layout | kernel | " + " | ".join(RESULTS) + " | speed |",
        "| --- | --- | --- |" + " ---: |" * (1 + len(RESULTS)),
    ]
    for row in results["rows"]:
        cells = [f"{row['ring'][name] / row['sdpa'][name]:.2f}" for name in RESULTS]
        lines.append(
            f"| {row['dtype']} | {row['layout']} | {row['kernel']} | {' | '.join(cells)} | {row['speed']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing measured, nothing claimed")
        return 0
    record.save("gpu", measure("cuda", EXACT, SPEED), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
