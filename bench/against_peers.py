"""The flash ring against the limit of the machine and against other rings: speed, bytes on the wire, memory.

The limit is scaled_dot_product_attention in one process with all the cores. It and all rings of a case take turns on
the same two cores. The flash ring moves its blocks by messages or in shared memory. The other rings are PyTorch's own
context-parallel loop (private functions; all-to-all rotation, the same kernel), ring-attention-pytorch (left out if it
is not installed) and this project's ring_attn.py. The last two run the forward pass only. It takes about half an hour
on a quiet machine.

    $ python -m pip install ring-attention-pytorch==0.5.20
    $ python -m bench.against_peers
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from statistics import geometric_mean, median
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.record import Method, in_turn, pin
from notebooks.your_ring.messages import Watch
from ring_attn import ring_attention
from ringlab.basics.ranks import gather
from ringlab.support.host_memory import has_memory, host_memory
from ringlab.support.processes import RankContext, launch
from ringlab.training.causal import idle_share, visible_pairs
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import shard, unshard
from ringlab.training.schedule import Ring
from ringlab.training.shared_memory import SharedMemory

CORES = 2
LIMIT, TORCH, PIP, OWN = "limit", "torch's context-parallel loop", "ring-attention-pytorch", "ring_attn.py"
FULL, ZIGZAG, STRIPED, CONTIGUOUS = "flash ring", "flash ring, zigzag", "flash ring, striped", "flash ring, contiguous"
IN_MEMORY = "in shared memory"
MEMORY, ZIGZAG_MEMORY, STRIPED_MEMORY = (f"{name} {IN_MEMORY}" for name in ("flash ring,", f"{ZIGZAG},", f"{STRIPED},"))
FORWARD, CAUSAL, TRAIN = "forward", "causal forward", "causal forward and backward"
CASES = {
    FORWARD: [MEMORY, FULL, TORCH, PIP, OWN],
    CAUSAL: [ZIGZAG_MEMORY, ZIGZAG, STRIPED_MEMORY, STRIPED, CONTIGUOUS, TORCH],
    TRAIN: [ZIGZAG_MEMORY, ZIGZAG, TORCH],
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SPEED = {"worlds": [2, 4], "lengths": [1024, 2048, 4096, 8192, 16384], "heads": 8, "head_dim": 64, "repetitions": 5}
BESIDE_INPUTS = {"worlds": [1, 2, 4, 8], "chunk": 2048, "heads": 8, "head_dim": 64}
GOALS = [  # in shared memory, in both dtypes: S, P, the smallest share of the limit's speed
    ([2048], 2, 0.95),
    ([2048], 4, 0.88),
    ([8192, 16384], 2, 0.99),
    ([8192, 16384], 4, 0.97),
]


@contextmanager
def torch_loops(layout: str, rotation: str = "all-to-all") -> Iterator[ModuleType]:
    """The module of PyTorch's own loops, set to this layout: contiguous, or zigzag under a causal mask.

    `rotation` is how K and V go round: "all-to-all", from rank to rank, or "all-gather", all of them before round 1.

    Raises ImportError or AttributeError in a version of PyTorch that keeps them elsewhere.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as loop

    method = {"all-to-all": loop._RotateMethod.ALL_TO_ALL, "all-gather": loop._RotateMethod.ALL_GATHER}[rotation]
    switches = {"rotate_method": method, "enable_load_balance": layout == "zigzag"}
    with mock.patch.multiple(loop._cp_options, **switches):
        yield loop


def torch_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, layout: str, rotation: str = "all-to-all"
) -> tuple[Tensor, Tensor]:
    """out and lse of PyTorch's own loop on local chunks. Errors as `torch_loops`."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with torch_loops(layout, rotation) as loop:
        forwards = loop._templated_ring_attention
        return forwards(dist.group.WORLD, 2, flash, q, k, v, is_causal=causal, dropout_p=0.0)


def torch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    *,
    causal: bool,
    layout: str,
    rotation: str = "all-to-all",
) -> tuple[Tensor, ...]:
    """dq, dk and dv of PyTorch's own loop, from what `torch_forward` returned."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    options = {"is_causal": causal, "dropout_p": 0.0}
    options |= {"grad_out": d_out, "grad_out_name": "grad_out", "out": out, "logsumexp": lse}
    with torch_loops(layout, rotation) as loop:
        backwards = loop._templated_ring_attention_backward
        return backwards(dist.group.WORLD, 2, flash, query=q, key=k, value=v, **options)[:3]


def torch_loop(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None, *, causal: bool, layout: str
) -> tuple[Tensor, ...]:
    """PyTorch's own loop on local chunks: out, and dq, dk and dv where d_out is given. Errors as `torch_loops`."""
    out, lse = torch_forward(q, k, v, causal=causal, layout=layout)
    if d_out is None:
        return (out,)
    return out, *torch_backward(q, k, v, out, lse, d_out, causal=causal, layout=layout)


def pip_ring(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
    """ring-attention-pytorch's forward pass with its own defaults. Its tensors are (B, C, H, D)."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    with torch.no_grad():
        out = ring_flash_attn(*(x.transpose(1, 2) for x in (q, k, v)), ring_reduce_col=True)
    return (out.transpose(1, 2),)


def with_gradients(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple:
    """(out, dq, dk, dv) of a differentiable attention."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, d_out)


def layout_of(method: str, case: str) -> str:
    """The layout of the method's tokens."""
    if method == TORCH:
        return "contiguous" if case == FORWARD else "zigzag"
    return next((layout for layout in ("zigzag", "striped") if layout in method), "contiguous")


def method(name: str, case: str, whole: list[Tensor], context: RankContext) -> Method:
    """(rank 0 only?, the function to time). The function returns out or (out, dq, dk, dv)."""
    causal, train = case != FORWARD, case == TRAIN
    layout, alone = layout_of(name, case), name == LIMIT
    chunks = whole if alone else [shard(x, layout, context.rank, context.world_size) for x in whole]
    *qkv, d_out = chunks
    if name == TORCH:
        return False, lambda: torch_loop(*qkv, d_out if train else None, causal=causal, layout=layout)
    if name == PIP:
        return False, lambda: pip_ring(*qkv)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if alone:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        if name == OWN:
            return ring_attention(q, k, v)
        schedule = SharedMemory if IN_MEMORY in name else Ring
        return ring_flash_attention(q, k, v, causal=causal, layout=layout, schedule=schedule)

    work = (lambda: with_gradients(attention, *chunks)) if train else (lambda: (attention(*qkv),))
    return alone, work


def rings_of(case: str, dtype: str, seq_len: int) -> list[str]:
    """The rings that are measured against the limit in this case: the two slow ones up to S = 4096 only."""
    pip_runs = find_spec("ring_attention_pytorch") and dtype == "float32"  # in bfloat16 it raises on a CPU
    left_out = {OWN, PIP} if seq_len > 4096 else set() if pip_runs else {PIP}
    return [name for name in CASES[case] if name not in left_out]


def measured_speed(
    context: RankContext, lengths: list[int], heads: int, head_dim: int, repetitions: int
) -> list[dict[str, Any]]:
    """A row for each dtype, S, case and ring: its seconds, those of the limit in turn, and how far the results differ.

    Raises RuntimeError when a result differs from the limit's by more than rounding explains.
    """
    rows = []
    for dtype in DTYPES:
        for turn, seq_len in enumerate([lengths[0], *lengths]):  # the first turn warms up: connections, memory
            generator = torch.Generator().manual_seed(0)
            shape = (1, heads, seq_len, head_dim)
            whole = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in ("q", "k", "v", "d_out")]
            for case in CASES:
                names = rings_of(case, dtype, seq_len)
                methods = {name: method(name, case, whole, context) for name in (LIMIT, *names)}
                more = min(4, max(1, 8192 // seq_len))  # short ones are noisy, and cheap
                seconds, results = in_turn(context, methods, repetitions * more if turn else 1)
                for name in names:
                    off = differences(context, results[name], results.get(LIMIT), layout_of(name, case))
                    if off and max(off) > 32 * torch.finfo(DTYPES[dtype]).eps:
                        raise RuntimeError(
                            f"{name}, {case}, {dtype}, S = {seq_len}: off by {off} of the largest number"
                        )
                    if turn == 0:
                        continue
                    row = {"world_size": context.world_size, "dtype": dtype, "seq_len": seq_len, "case": case}
                    speed = median(seconds[LIMIT]) / median(seconds[name])
                    times = {"seconds": seconds[name], "limit_seconds": seconds[LIMIT]}
                    rows.append({**row, "method": name, "speed": speed, "off": off, **times})
                    if context.rank == 0:
                        print(f"{'  '.join(str(value) for value in row.values())}  {name}: {speed:.3f}", flush=True)
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


def sent_bytes(context: RankContext, chunk: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> list[int]:
    """The bytes that this rank sends in the forward pass and in the backward pass."""
    shapes = ((1, n, chunk, head_dim) for n in (heads, kv_heads, kv_heads))
    q, k, v = (torch.randn(shape).to(DTYPES[dtype]).requires_grad_() for shape in shapes)
    with Watch() as forward:
        out = ring_flash_attention(q, k, v)
    with Watch() as backward:
        out.backward(torch.ones_like(out))
    return [sum(sent.bytes for sent in watch.messages if sent.kind == "send") for watch in (forward, backward)]


def formula_bytes(world_size: int, chunk: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> list[int]:
    """The bytes that a rank sends in the forward and in the backward pass, by the formula of flash_ring.py."""
    elements = (world_size - 1) * 2 * kv_heads * chunk * head_dim  # of K and V in the blocks that travel
    forward = elements * DTYPES[dtype].itemsize
    return [forward, forward + elements * 4]


def measured_bytes(worlds: list[int], chunk: int, heads: int, head_dim: int) -> list[dict[str, Any]]:
    """A row for each P, dtype and number of K/V heads: the bytes of the rank that sends most, and by formula."""
    rows = []
    for world_size in worlds:
        for dtype in DTYPES:
            for kv_heads in (heads, heads // 4):
                sizes = (chunk, heads, kv_heads, head_dim, dtype)
                seen = [max(each) for each in zip(*launch(sent_bytes, world_size, *sizes), strict=True)]
                row = {"world_size": world_size, "dtype": dtype, "kv_heads": kv_heads}
                rows.append({**row, "sent": seen, "formula": formula_bytes(world_size, *sizes)})
    return rows


def peak_memory(context: RankContext, chunk: int, heads: int, head_dim: int, shared: bool) -> list[int | None]:
    """The peak of this rank's memory beyond its inputs, in bytes: of a forward pass, and of forward and backward.

    What a rank has in shared memory is there before and after, so it is added: pages of other ranks do not count twice.
    """
    record.return_freed_memory()
    q, k, v, d_out = (torch.randn(1, heads, chunk, head_dim) for _ in ("q", "k", "v", "d_out"))
    options: dict[str, Any] = {"causal": True, "layout": "zigzag", "schedule": SharedMemory if shared else Ring}
    ring, peaks = partial(ring_flash_attention, **options), []
    for work in (lambda: ring(q, k, v)), (lambda: with_gradients(ring, q, k, v, d_out)):
        work()  # what libraries set up once, and shared memory
        peak = record.peak_extra(work)
        if peak is not None and has_memory(None):
            memory = host_memory(None)
            peak += sum(os.fstat(fd).st_size for fd in memory.fds[:2])  # its own parts
        peaks.append(peak)
    return peaks


def measured_memory(worlds: list[int], chunk: int, heads: int, head_dim: int) -> list[dict[str, Any]]:
    """A row for each P and way of moving, with the same chunk on every rank: the peak of the rank that needs most."""
    rows = []
    for world_size in worlds:
        for shared in (False, True):
            peaks = zip(*launch(peak_memory, world_size, chunk, heads, head_dim, shared), strict=True)
            most = [None if None in each else max(each) for each in peaks]
            rows.append({"world_size": world_size, "shared": shared, "peak_bytes": most})
    return rows


def measure(speed: dict[str, Any], memory: dict[str, Any]) -> record.Results:
    """The whole bench; `speed` and `memory` hold the arguments of the functions above, and the numbers of ranks."""
    pin(CORES)
    machine = record.machine()
    sizes = [speed[name] for name in ("lengths", "heads", "head_dim", "repetitions")]
    chunks = [memory[name] for name in ("worlds", "chunk", "heads", "head_dim")]
    rows = [row for P in speed["worlds"] for row in launch(measured_speed, P, *sizes)[0]]
    return {
        "command": "python -m bench.against_peers",
        "machine": machine,
        "dtype": "float32 and bfloat16",
        "speed": {**speed, "rows": rows},
        "bytes": {**memory, "rows": measured_bytes(*chunks)},
        "memory": {**memory, "rows": measured_memory(*chunks)},
    }


def speeds(results: record.Results, **wanted: Any) -> list[float]:
    """The speeds, as shares of the limit's, of the rows that have these values."""
    rows = results["speed"]["rows"]
    return [row["speed"] for row in rows if all(row[name] == value for name, value in wanted.items())]


def over_peer(results: record.Results, peer: str, dtype: str, *, shared: bool = False) -> list[float]:
    """The speed of the flash ring over the peer's, for each of the peer's rows; causal ones against zigzag.

    The ring moves its blocks by messages, or in shared memory.
    """
    ratios = []
    for row in results["speed"]["rows"]:
        if row["method"] == peer and row["dtype"] == dtype:
            same = {name: row[name] for name in ("world_size", "dtype", "seq_len", "case")}
            by_message, in_memory = (FULL, MEMORY) if row["case"] == FORWARD else (ZIGZAG, ZIGZAG_MEMORY)
            mine = in_memory if shared else by_message
            ratios.append(speeds(results, **same, method=mine)[0] / row["speed"])
    return ratios


def verdicts(results: record.Results) -> list[tuple[bool, str]]:
    """For every goal (whether it is reached, a line of text with what was measured)."""
    lines = []
    for lengths, P, goal in GOALS:
        cells = {
            f"{case}, {name}, {dtype}, S = {S:,}": speed
            for case, rings in CASES.items()
            for name in rings
            for dtype in DTYPES
            for S in lengths
            if IN_MEMORY in name
            for speed in speeds(results, case=case, method=name, world_size=P, dtype=dtype, seq_len=S)
        }
        if cells:
            least = min(cells, key=lambda cell: cells[cell])
            reached = sum(speed >= goal for speed in cells.values())
            text = (
                f"P = {P}, S = {' and '.join(f'{S:,}' for S in lengths)}, in shared memory: {reached} of {len(cells)}"
            )
            text += f" cells reach {goal} of the limit; the least, {cells[least]:.2f}: {least}"
            lines.append((reached == len(cells), text))
    for peer, shared, worst, mean in ((TORCH, True, 1.05, 1.15), (PIP, False, 2.0, 2.0), (OWN, False, 2.0, 2.0)):
        dtypes = [dtype for dtype in DTYPES if peer == TORCH or dtype == "float32"]
        ratios = [ratio for dtype in dtypes for ratio in over_peer(results, peer, dtype, shared=shared)]
        if ratios:
            way, in_the_mean = f"{IN_MEMORY} " if shared else "", geometric_mean(ratios)
            text = f"against {peer}, {way}at least {min(ratios):.2f} times as fast, goal {worst:g}"
            lines.append((min(ratios) >= worst, text))
            text = f"against {peer}, {way}{in_the_mean:.2f} times as fast in the geometric mean, goal {mean:g}"
            lines.append((in_the_mean >= mean, text))
    return lines


def table(results: record.Results) -> str:
    """The results as tables in markdown."""
    speed, memory = results["speed"], results["memory"]
    chunk = 4 * memory["heads"] * memory["chunk"] * memory["head_dim"]
    lines = [
        "# The flash ring against the limit and its peers",
        "",
        record.heading(results),
        "",
        "## Speed",
        "",
        f"B = 1, H = {speed['heads']}, D = {speed['head_dim']}. Speed 1 is the limit: scaled_dot_product_attention in "
        f"one process with all {results['machine']['cores']} cores, in turn with all rings of the case. Medians "
        f"of {speed['repetitions']} repetitions, of more below S = 8,192. With P = 4 two ranks share a core. Idle: the "
        "share of its time that an average rank would wait for the busiest one if each had its own core; computed from "
        "the pairs that the mask leaves.",
    ]
    for dtype in DTYPES:
        for P in speed["worlds"]:
            heads = " | ".join(f"S = {seq_len:,}" for seq_len in speed["lengths"])
            lines += [
                "",
                f"{dtype}, P = {P}:",
                "",
                f"| case | ring | {heads} |",
                "|" + " --- |" * 2 + " ---: |" * len(speed["lengths"]),
            ]
            for case, rings in CASES.items():
                for name in rings:
                    seen = speeds(results, dtype=dtype, world_size=P, case=case, method=name)
                    seen += [None] * (len(speed["lengths"]) - len(seen))
                    if seen[0]:
                        idle = idle_note(name, case, P)
                        lines.append(
                            f"| {case} | {name}{idle} | " + " | ".join(f"{x:.3f}" if x else "" for x in seen) + " |"
                        )
    lines += ["", "## Goals", "", "Missed goals are marked.", ""]
    lines += [f"- {'' if reached else '**missed** '}{text}" for reached, text in verdicts(results)]
    lines += [
        "",
        "## Bytes that a rank sends",
        "",
        f"C = {memory['chunk']:,}, H = {memory['heads']}, D = {memory['head_dim']}, G heads of K and V. Counted in the "
        "calls that send, and by the formula in ringlab/training/flash_ring.py.",
        "",
        "| P | dtype | G | forward | formula | backward | formula |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in results["bytes"]["rows"]:
        cells = [f"{x:,}" for pair in zip(row["sent"], row["formula"], strict=True) for x in pair]
        lines.append(f"| {row['world_size']} | {row['dtype']} | {row['kv_heads']} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Memory of one rank beyond its inputs",
        "",
        f"Causal, zigzag, float32, C = {memory['chunk']:,}, H = {memory['heads']}, D = {memory['head_dim']}: a chunk "
        f"(one of q, k, v, out) is {chunk / 2**20:g} MiB. Peak of the rank that needs most, in chunks. Freed memory "
        "goes back to the system at once. Of shared memory each rank's own part counts.",
        "",
        "| P | blocks move | forward | forward and backward |",
        "| ---: | --- | ---: | ---: |",
    ]
    for row in memory["rows"]:
        cells = ["not measured" if peak is None else f"{peak / chunk:.2f}" for peak in row["peak_bytes"]]
        way = IN_MEMORY if row["shared"] else "by messages"
        lines.append(f"| {row['world_size']} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def idle_note(name: str, case: str, world_size: int) -> str:
    """The idle share of the ranks of a causal ring in its layout, for S = 1024 and a core for each rank."""
    if case != CAUSAL or name == TORCH:
        return ""
    return f" (idle {idle_share(visible_pairs(layout_of(name, case), 1024, world_size)):.0%})"


def main() -> int:
    results = measure(SPEED, BESIDE_INPUTS)
    record.save("against_peers", results, table)
    for reached, text in verdicts(results):
        print(f"{'ok   ' if reached else 'MISS '} {text}")
    return 0 if all(reached for reached, _ in verdicts(results)) else 1


if __name__ == "__main__":
    sys.exit(main())
