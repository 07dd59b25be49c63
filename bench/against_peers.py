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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from statistics import median
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from bench import record
from bench.record import Method, in_turn, pin
from ring_attn import ring_attention
from ringlab.basics.ranks import gather
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.fused_block import choose_kernel
from ringlab.ring.layouts import shard, unshard
from ringlab.ring.schedule import Ring
from ringlab.support.host_memory import has_memory, host_memory
from ringlab.support.messages import Watch
from ringlab.support.processes import RankContext, launch
from ringlab.ways.shared_memory import SharedMemory

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

SPEED = {
    "worlds": [2, 4],
    "lengths": [256, 1024, 2048, 4096, 8192, 16384],
    "heads": 8,
    "head_dim": 64,
    "repetitions": 5,
}
BESIDE_INPUTS = {"worlds": [1, 2, 4, 8], "chunk": 2048, "heads": 8, "head_dim": 64}


@contextmanager
def torch_loops(layout: str, rotation: str) -> Iterator[ModuleType]:
    """The module of PyTorch's own loops, set to this layout: contiguous, or zigzag under a causal mask.

    `rotation` is how K and V go round: "all-to-all", from rank to rank, or "all-gather", all of them before round 1.

    Raises ImportError or AttributeError in a version of PyTorch that keeps them elsewhere.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as loop

    method = {"all-to-all": loop._RotateMethod.ALL_TO_ALL, "all-gather": loop._RotateMethod.ALL_GATHER}[rotation]
    switches = {"rotate_method": method, "enable_load_balance": layout == "zigzag"}
    with mock.patch.multiple(loop._cp_options, **switches):
        yield loop


KERNELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # by our name: torch's; what each pass takes besides
    "cpu flash": ("flash_attention_for_cpu", {}, {}),
    "cuda flash": ("flash_attention", {}, {}),
    "cuda cudnn": ("cudnn_attention", {"attn_bias": None, "compute_log_sumexp": True}, {"attn_bias": None}),
}
FOR_BACKWARD = (
    "cum_seq_q",
    "cum_seq_k",
    "max_q",
    "max_k",
    "philox_seed",
    "philox_offset",
)  # a GPU's kernels return them


class TorchLoop(torch.autograd.Function):
    """PyTorch's own loop as an operation of autograd, on the kernel that our ring takes."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, causal: bool, layout: str, rotation: str) -> Tensor:
        name, besides, ctx.besides = KERNELS[choose_kernel(q, k, q.shape[-1] ** -0.5, causal=causal)[0]]
        kernel, ctx.kernel = (getattr(torch.ops.aten, f"_scaled_dot_product_{name}{end}") for end in ("", "_backward"))
        ctx.options = causal, layout, rotation
        with torch_loops(layout, rotation) as loop:
            forwards = loop._templated_ring_attention
            out, lse, *rest = forwards(dist.group.WORLD, 2, kernel, q, k, v, is_causal=causal, dropout_p=0.0, **besides)
        ctx.besides = {**ctx.besides, **dict(zip(FOR_BACKWARD, rest, strict=False))}
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        causal, *how = ctx.options
        q, k, v, out, lse = ctx.saved_tensors
        options = {"is_causal": causal, "dropout_p": 0.0, **ctx.besides}
        options |= {"grad_out": d_out, "grad_out_name": "grad_out", "out": out, "logsumexp": lse}
        with torch_loops(*how) as loop:
            backwards = loop._templated_ring_attention_backward
            return *backwards(dist.group.WORLD, 2, ctx.kernel, query=q, key=k, value=v, **options)[:3], None, None, None


def torch_loop(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, layout: str, rotation: str = "all-to-all") -> Tensor:
    """PyTorch's own loop on local chunks. Errors as `torch_loops`."""
    return TorchLoop.apply(q, k, v, causal, layout, rotation)


def pip_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ring-attention-pytorch's forward pass with its own defaults. Its tensors are (B, C, H, D)."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    with torch.no_grad():
        return ring_flash_attn(*(x.transpose(1, 2) for x in (q, k, v)), ring_reduce_col=True).transpose(1, 2)


Pass = tuple[Callable[[], Any], Callable[[Any], tuple[Tensor, ...]]]  # forward; backward, from the result of forward


def passes(attention: Callable[..., Tensor], *inputs: Tensor) -> Pass:
    """The forward pass of a differentiable attention, which returns out; and the backward pass, from that to out and
    the gradients of all inputs but the last, which is the gradient of out.
    """
    *inputs, d_out = inputs
    leaves = [x.detach().requires_grad_() for x in inputs]
    return partial(attention, *leaves), lambda out: (out.detach(), *torch.autograd.grad(out, leaves, d_out))


def with_gradients(attention: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Both of the `passes`: out and the gradients."""
    forward, backward = passes(attention, *inputs)
    return backward(forward())


def layout_of(method: str, case: str) -> str:
    """The layout of the method's tokens."""
    if method == TORCH:
        return "contiguous" if case == FORWARD else "zigzag"
    return next((layout for layout in ("zigzag", "striped") if layout in method), "contiguous")


def method(name: str, case: str, whole: list[Tensor], context: RankContext) -> Method:
    """(rank 0 only?, the function to time). The function returns out or (out, dq, dk, dv)."""
    causal, layout, alone = case != FORWARD, layout_of(name, case), name == LIMIT
    chunks = whole if alone else [shard(x, layout, context.rank, context.world_size) for x in whole]
    schedule = SharedMemory if IN_MEMORY in name else Ring
    others: dict[str, Callable[..., Tensor]] = {
        LIMIT: partial(F.scaled_dot_product_attention, is_causal=causal),
        TORCH: partial(torch_loop, causal=causal, layout=layout),
        PIP: pip_ring,
        OWN: ring_attention,
    }
    ours = partial(ring_flash_attention, causal=causal, layout=layout, schedule=schedule)
    attention = others.get(name, ours)
    if case == TRAIN:
        return alone, lambda: with_gradients(attention, *chunks)
    return alone, lambda: (attention(*chunks[:3]),)


def rings_of(case: str, dtype: str, seq_len: int) -> list[str]:
    """The rings that are measured against the limit in this case: the two slow ones up to S = 4096 only."""
    left_out = {OWN, PIP} if seq_len > 4096 else set()
    if not find_spec("ring_attention_pytorch") or dtype != "float32":  # in bfloat16 it raises on a CPU
        left_out |= {PIP}
    return [name for name in CASES[case] if name not in left_out]


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
            generator = torch.Generator().manual_seed(0)
            shape = (1, heads, seq_len, head_dim)
            whole = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in ("q", "k", "v", "d_out")]
            for case in CASES:
                names = rings_of(case, dtype, seq_len)
                methods = {name: method(name, case, whole, context) for name in (LIMIT, *names)}
                more = min(4, max(1, 8192 // seq_len))  # short ones are noisy, and cheap
                seconds, results = in_turn(context, methods, repetitions * more if turn else 1)
                off = {}
                for name in names:
                    off[name] = differences(context, results[name], results.get(LIMIT), layout_of(name, case))
                    if off[name] and max(off[name]) > 32 * torch.finfo(DTYPES[dtype]).eps:
                        where = f"{name}, {case}, {dtype}, S = {seq_len}"
                        raise RuntimeError(f"{where}: off by {off[name]} of the largest number")
                if turn:
                    row = {"world_size": context.world_size, "dtype": dtype, "seq_len": seq_len, "case": case}
                    rows.append({**row, "off": off, "seconds": seconds})
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
    made = record.made("against_peers", "float32 and bfloat16")
    sizes = [speed[name] for name in ("lengths", "heads", "head_dim", "repetitions")]
    chunks = [memory[name] for name in ("worlds", "chunk", "heads", "head_dim")]
    rows = [row for P in speed["worlds"] for row in launch(measured_speed, P, *sizes)[0]]
    others = {
        "bytes": {**memory, "rows": measured_bytes(*chunks)},
        "memory": {**memory, "rows": measured_memory(*chunks)},
    }
    return {**made, "reference": LIMIT, **speed, "rows": rows, **others}


def speeds(results: record.Results, *, method: str, **wanted: Any) -> list[float]:
    """The speeds of this ring, as shares of the limit's, in the rows that have these values."""
    rows = [row["seconds"] for row in results["rows"] if wanted.items() <= row.items() and method in row["seconds"]]
    return [median(seconds[LIMIT]) / median(seconds[method]) for seconds in rows]


def over_peer(results: record.Results, peer: str, dtype: str, *, shared: bool = False) -> list[float]:
    """The speed of the flash ring over the peer's, for each of the peer's rows; causal ones against zigzag.

    The ring moves its blocks by messages, or in shared memory.
    """
    ratios = []
    for row in results["rows"]:
        if peer in row["seconds"] and row["dtype"] == dtype:
            by_message, in_memory = (FULL, MEMORY) if row["case"] == FORWARD else (ZIGZAG, ZIGZAG_MEMORY)
            mine = row["seconds"][in_memory if shared else by_message]
            ratios.append(median(row["seconds"][peer]) / median(mine))
    return ratios


def table(results: record.Results) -> str:
    """The results as tables in markdown."""
    memory, lengths = results["memory"], sorted({row["seq_len"] for row in results["rows"]})
    chunk = 4 * memory["heads"] * memory["chunk"] * memory["head_dim"]
    parts = [
        "## Speed",
        f"B = 1, H = {results['heads']}, D = {results['head_dim']}. Speed 1 is the limit: scaled_dot_product_attention "
        f"in one process with all {results['machine']['cores']} cores, in turn with all rings of the case. Medians "
        f"of {results['repetitions']} repetitions, of more below S = 8,192. With P = 4 two ranks share a core.",
    ]
    for dtype in DTYPES:
        for P in results["worlds"]:
            found = [
                [case, name, speeds(results, dtype=dtype, world_size=P, case=case, method=name)]
                for case, rings in CASES.items()
                for name in rings
            ]
            rows = [
                [case, name, *(f"{x:.3f}" for x in seen), *[""] * (len(lengths) - len(seen))]
                for case, name, seen in found
                if seen
            ]
            parts += [
                f"{dtype}, P = {P}:",
                record.grid(" | ".join(["<case | <ring", *(f"S = {S:,}" for S in lengths)]), rows),
            ]
    sent = [
        [row["world_size"], row["dtype"], row["kv_heads"]]
        + [f"{x:,}" for pair in zip(row["sent"], row["formula"], strict=True) for x in pair]
        for row in results["bytes"]["rows"]
    ]
    peaks = [
        [row["world_size"], IN_MEMORY if row["shared"] else "by messages"]
        + ["not measured" if peak is None else f"{peak / chunk:.2f}" for peak in row["peak_bytes"]]
        for row in memory["rows"]
    ]
    parts += [
        "## Bytes that a rank sends",
        f"C = {memory['chunk']:,}, H = {memory['heads']}, D = {memory['head_dim']}, G heads of K and V. Counted in the "
        "calls that send, and by the formula in ringlab/ring/flash_ring.py.",
        record.grid("P | <dtype | G | forward | formula | backward | formula", sent),
        "## Memory of one rank beyond its inputs",
        f"Causal, zigzag, float32, C = {memory['chunk']:,}, H = {memory['heads']}, D = {memory['head_dim']}: a chunk "
        f"(one of q, k, v, out) is {chunk / 2**20:g} MiB. Peak of the rank that needs most, in chunks. Freed memory "
        "goes back to the system at once. Of shared memory each rank's own part counts.",
        record.grid("P | <blocks move | forward | forward and backward", peaks),
    ]
    return record.page("The flash ring against the limit and its peers", results, *parts)


if __name__ == "__main__":
    record.save("against_peers", measure(SPEED, BESIDE_INPUTS), table)
