"""Is all of it right on this machine's GPUs, and how fast? One command, five parts, a short report, exit status 0 or 1.

    blocks    the fused blocks of a ring that is simulated on one GPU: values, gradients, speed beside SDPA's
    ways      the five ways to share a sequence on all GPUs, every mask and layout, in float32 and in 16 bits
    doctor    `ring-doctor --quick` on the ring, with 3 and 4 GPUs
    overlap   the share of the messages' time that the ring hides behind computing
    speed     the ring on all GPUs, as a share of P times the speed of SDPA on one of them

Values and gradients are compared with full attention in float64, computed on the CPU. Without a CUDA GPU nothing is
measured and nothing is claimed. With `--device cpu` the same code runs with gloo on small sizes, to try the bench.

    $ python -m bench.gpu
    no CUDA GPU here: nothing measured, nothing claimed; --device cpu tries the same code on small sizes

docs/cluster.md says what changes on GPUs, and what of it was never run.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench.against_peers import with_gradients
from ring_doctor import examine
from ring_doctor.asking.job import CannotExamine
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.ring.causal import visible_slice
from ringlab.ring.flash_ring import merge_into, ring_flash_attention
from ringlab.ring.fused_block import choose_kernel, fused_backward, fused_forward
from ringlab.ring.layouts import LAYOUTS, shard, unshard
from ringlab.ring.overlap import arriving_blocks
from ringlab.ring.schedule import Ring, Schedule
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import Right, exact_attention
from ringlab.ways.all_gather import AllGather
from ringlab.ways.all_to_all import AllToAll
from ringlab.ways.double_ring import DoubleRing
from ringlab.ways.hybrid import Hybrid

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
RESULTS = ("out", "dq", "dk", "dv")
CASES = [(dtype, layout) for dtype in ("bfloat16", "float16", "float32") for layout in ("full", "zigzag", "striped")]
WORLD_SIZE, REPETITIONS = 4, 10
WAYS = {"ring": Ring, "all-gather": AllGather, "all-to-all": AllToAll, "double ring": DoubleRing, "hybrid": Hybrid}


@dataclass(frozen=True)
class Sizes:
    """How much is computed on a device."""

    exact: tuple[int, int, int]  # S, H, D of the simulated ring, against float64, whose scores take S x S
    speed: tuple[int, int, int]  # of the simulated ring, of overlap and of speed
    chunk: int  # tokens of a rank in the five ways
    head_dim: int  # there
    dtypes: tuple[str, ...]  # there


ON = {
    "cuda": Sizes((4096, 4, 64), (32768, 16, 128), chunk=128, head_dim=64, dtypes=("float32", "bfloat16", "float16")),
    "cpu": Sizes((48, 2, 8), (480, 2, 8), chunk=12, head_dim=8, dtypes=("float32", "bfloat16")),
}


def inputs(seq_len: int, heads: int, head_dim: int, dtype: str) -> list[Tensor]:
    """q, k, v and d_out (1, H, S, D), seeded."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 1, heads, seq_len, head_dim)
    return [x.to(DTYPES[dtype]) for x in torch.randn(shape, generator=generator, dtype=torch.float64)]


def errors(results: tuple[Tensor, ...], rights: dict[str, Right]) -> dict[str, float]:
    """The largest error of out, dq, dk and dv. Raises RuntimeError where rounding does not explain an error."""
    largest = {name: float(rights[name].error(x).max()) for name, x in zip(RESULTS, results, strict=True)}
    for name, x in zip(RESULTS, results, strict=True):
        if not rights[name].accepts(x):
            raise RuntimeError(f"{name} is wrong: off by {largest[name]:.1e}")
    return largest


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
    times, wait = [], torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(1 + REPETITIONS):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def measured_blocks(device: str, exact: tuple[int, int, int], speed: tuple[int, int, int]) -> list[str]:
    """A line for each dtype and layout: the kernel, errors of the ring over those of SDPA, speed as a share of SDPA's.

    Raises RuntimeError where rounding does not explain an error.
    """
    lines = []
    for dtype, layout in CASES:
        whole = [x.to(device) for x in inputs(*exact, dtype)]
        sdpa = partial(F.scaled_dot_product_attention, is_causal=layout != "full")
        rights = exact_attention(*whole, causal=layout != "full", fused_blocks=WORLD_SIZE)
        ring = errors(simulated_ring(*whole, layout, WORLD_SIZE), rights)
        alone = errors(with_gradients(sdpa, *whole), rights)
        off = ", ".join(f"{name} {ring[name] / alone[name]:.2f}" for name in RESULTS)
        long = [x.to(device) for x in inputs(*speed, dtype)]
        ring_seconds = seconds(lambda long=long, layout=layout: simulated_ring(*long, layout, WORLD_SIZE), device)
        share = seconds(lambda long=long, sdpa=sdpa: with_gradients(sdpa, *long), device) / ring_seconds
        lines.append(f"{dtype}, {layout}, {choose_kernel(*whole[:2], 0.125)[0]}: errors {off}; speed {share:.2f}")
    return lines


def masks(S: int) -> dict[str, dict[str, Any]]:
    """Options of an attention over S tokens, by the name of the mask."""
    third = S // 3
    documents = [1, third, S - third - 1]
    more = {"documents": documents, "window": third // 2, "global_tokens": 2}
    return {
        "no mask": {},
        "causal": {"causal": True},
        "documents": {"causal": True, "documents": documents},
        "documents, both ways": {"documents": documents},
        "window": {"causal": True, "window": third},
        "window, documents, global tokens": {"causal": True, **more},
    }


def visible(
    S: int, causal: bool = False, documents: Sequence[int] = (), window: int | None = None, global_tokens: int = 0
) -> Tensor:
    """Which keys a query sees, (S, S): the words of `ring_flash_attention` again, without the code of the ring."""
    lengths = torch.tensor(documents or [S])
    number = torch.arange(len(lengths)).repeat_interleave(lengths)  # of each token's document
    begin = (lengths.cumsum(0) - lengths)[number]
    query, key = torch.arange(S)[:, None], torch.arange(S)
    seen = number[:, None] == number
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= (query - key < window) | (key - begin < global_tokens)
    return seen


def group_of(way: type[Schedule], context: RankContext) -> Any:
    """What the way takes as its group: the job, or a mesh with rows as short as the number of ranks allows."""
    if way not in (DoubleRing, Hybrid):
        return None
    P = context.world_size
    inside = next((n for n in range(2, P) if P % n == 0), P)
    return init_device_mesh(context.device.type, (P // inside, inside))


def checked_ways(context: RankContext, chunk: int, head_dim: int, dtypes: Sequence[str]) -> tuple[int, list[str]]:
    """How many results of this rank were compared, and what is wrong: way, dtype, mask, layout, result, its error.

    P · `chunk` tokens, 2P query heads on P. Every rank computes the right results itself.
    """
    P, H = context.world_size, 2 * context.world_size
    S, count, wrong = P * chunk, 0, []
    groups = {name: group_of(way, context) for name, way in WAYS.items()}
    for dtype in dtypes:
        q, k, v, d_out = inputs(S, H, head_dim, dtype)
        whole = [q, k[:, ::2], v[:, ::2], d_out]
        for mask, options in masks(S).items():
            rights = exact_attention(*whole, visible=visible(S, **options), fused_blocks=3 * P)
            for layout in LAYOUTS:
                cut = partial(shard, layout=layout, rank=context.rank, world_size=P)
                mine = [cut(x).to(context.device) for x in whole]
                of_rank = [replace(it, exact=cut(it.exact), sums=cut(it.sums)) for it in (rights[n] for n in RESULTS)]
                for name, way in WAYS.items():
                    attention = partial(
                        ring_flash_attention, layout=layout, schedule=way, group=groups[name], **options
                    )
                    results = with_gradients(attention, *mine)
                    for result, x, right in zip(RESULTS, results, of_rank, strict=True):
                        count += 1
                        if not right.accepts(x.cpu()):
                            off = right.error(x.cpu()).max()
                            wrong.append(f"{name}, {dtype}, {mask}, {layout}: {result} is off by {off:.1e}")
    return count, wrong


def measured_ring(context: RankContext, seq_len: int, heads: int, head_dim: int) -> dict[str, float]:
    """Seconds of a causal step, forward and backward, in bfloat16: "one device" with SDPA on the whole sequence, the
    "ring", its "computing" with all messages left out, and its "messages" alone.
    """
    whole = [x.to(context.device) for x in inputs(seq_len, heads, head_dim, "bfloat16")]
    P, device = context.world_size, context.device.type
    lengths = [seq_len // P] * P
    q, k, v, d_out = (shard(x, "zigzag", context.rank, P).contiguous() for x in whole)
    ring = partial(with_gradients, partial(ring_flash_attention, causal=True, layout="zigzag"), q, k, v, d_out)

    def computing() -> None:
        with mock.patch.object(dist, "batch_isend_irecv", return_value=[]):
            ring()

    def messages() -> None:
        for blocks, hops in (((k, v), P - 1), ((k, v), P - 1), ((k.float(), v.float()), P)):  # the last: dK and dV
            for _ in arriving_blocks(*blocks, lengths=lengths, hops=hops):
                pass

    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
    works = {"one device": lambda: with_gradients(sdpa, *whole), "ring": ring}
    works |= {"computing": computing, "messages": messages}
    return {name: seconds(work, device) for name, work in works.items()}


def blocks(device: str, ranks: int, sizes: Sizes) -> tuple[bool, str]:
    """The part of one device: a ring of WORLD_SIZE ranks, one after the other, beside SDPA."""
    lines = measured_blocks(device, sizes.exact, sizes.speed)
    if device == "cuda":
        torch.cuda.empty_cache()  # the ranks of the next parts are other processes
    return True, "\n".join([f"{len(lines)} cases are right; errors and speed beside SDPA's:", *lines])


def ways(device: str, ranks: int, sizes: Sizes) -> tuple[bool, str]:
    found = launch(checked_ways, ranks, sizes.chunk, sizes.head_dim, sizes.dtypes, device=device)
    wrong = list(dict.fromkeys(words for _, of_rank in found for words in of_rank))
    if wrong:
        return False, "\n".join([f"{len(wrong)} results are wrong, the first of them:", *wrong[:10]])
    return True, f"{sum(count for count, _ in found):,} results on {ranks} ranks are right: {', '.join(WAYS)}"


def doctor(device: str, ranks: int, sizes: Sizes) -> tuple[bool, str]:
    worlds = tuple(P for P in (3, 4) if ranks >= P)
    if not worlds:
        return True, f"not asked: it needs 3 ranks, and here are {ranks}"
    try:
        report = examine("ringlab:ring_flash_attention", device=device, worlds=worlds, quick=True, head_dim=8)
    except CannotExamine as error:
        return False, f"CANNOT TELL: {error}"
    return report.healthy, str(report).splitlines()[0] if report.healthy else str(report)


def speeds(device: str, ranks: int, sizes: Sizes) -> tuple[bool, str]:
    """Overlap and speed: no number of theirs is a mistake."""
    if ranks == 1:
        return True, "not measured: a ring needs 2 ranks"
    of_ranks = launch(measured_ring, ranks, *sizes.speed, device=device)
    slowest = {name: max(of_rank[name] for of_rank in of_ranks) for name in of_ranks[0]}
    ms = ", ".join(f"{name} {1000 * time:.1f} ms" for name, time in slowest.items())
    hidden = max(0.0, 1 - (slowest["ring"] - slowest["computing"]) / slowest["messages"])
    speed = slowest["one device"] / slowest["ring"] / ranks
    return True, f"{hidden:.0%} of the messages' time is hidden; {speed:.2f} of {ranks} times one device\n{ms}"


PARTS = {"blocks": blocks, "ways": ways, "doctor": doctor, "overlap and speed": speeds}


def examined(device: str, ranks: int) -> Iterator[tuple[str, bool, str]]:
    """(part, whether it is right, what it says), part after part. A part that fails is wrong, and the next one runs."""
    for name, part in PARTS.items():
        try:
            yield name, *part(device, ranks, ON[device])
        except (RuntimeError, ValueError) as error:
            yield name, False, f"it failed: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(ON), default="cuda", help="cpu: gloo and small sizes (cuda)")
    parser.add_argument("--ranks", type=int, help="(every GPU; on the CPU 4)")
    args = parser.parse_args(arguments)
    if args.ranks is not None and args.ranks < 1:
        parser.error(f"--ranks is {args.ranks}; expected 1 or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU here: nothing measured, nothing claimed; --device cpu tries the same code on small sizes")
        return 0
    ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 4)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU with gloo: this tries the bench, not a GPU"
    print(f"{ranks} ranks, {name}, torch {torch.__version__}", flush=True)
    right = True
    for part, ok, says in examined(args.device, ranks):
        right &= ok
        print(f"{'ok   ' if ok else 'WRONG'} {part}: {says}".replace("\n", "\n      "), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
