"""Is the ring right on this machine's GPUs, and how fast? Three minutes at most; exit status 0 if all of it is right.

    kernels    the fused blocks: every head dim, dtype and shape, values and gradients
    ring       a ring that computes in turn on one GPU, beside SDPA and beside PyTorch's own loop
    model      a Llama of transformers with `use_ring`, one rank, beside the same with sdpa: time and peak memory
    memory     the peak of a rank, beside the planner's count
    overlap    the ring on several GPUs: the hidden share of its messages, with and without priority for their kernels;
               its speed as a share of P times one GPU's
    machine    FLOP/s of attention and bytes/s of memory, beside the planner's preset: --flops of `ring-plan`

Each line is printed as soon as it is known. Three ranks share the GPU where there are fewer than three. Without a CUDA
GPU nothing is measured and nothing is claimed. With `--device cpu` the same code runs with gloo on small sizes.

    $ python -m bench.gpu
    no CUDA GPU here: nothing measured, nothing claimed; --device cpu tries the same code on small sizes

`make test-gpu` asks the doctor, and whether every way to share a sequence is right. docs/cluster.md says what changes
on GPUs, and what came out.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.peers import dealt, ring_in_turn, torch_loop, torch_loops, with_gradients
from ring_planner.hidden_communication import AttentionLayer, block_flops
from ring_planner.memory import peak_bytes_backward
from ring_planner.presets import GPUS
from ringlab.options import Parser, positive
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.fused_block import choose_kernel, fused_backward, fused_forward
from ringlab.ring.layouts import shard, unshard
from ringlab.ring.overlap import arriving_blocks
from ringlab.support.processes import LostRank, RankContext, Ranks
from ringlab.support.rounding import exact_attention
from ringlab.support.timeline import laps

SECONDS = 150.0  # of the whole bench: a part that is not done by then ends, and the next ones are not begun
SHAPES = ((57, 57, True), (100, 37, False), (1, 64, False), (96, 129, False))  # Sq, Sk, causal
PLANNED = ((128, 128, True), (128, 256, False))  # cuDNN gets these, and needs a second for each: at few head dims
SHORT = 0.03  # seconds: shorter work is repeated until it takes as long
BLIND = 5  # rows of the first block, at most, that see no key of theirs

CLOSE = 2**-6  # how far apart results in bfloat16 may be, in norm: each is rounded some times, by 2^-9 or less

Row = tuple[str, bool | None, str]  # what; whether it is right, None: not done in time; what was found


@dataclass(frozen=True)
class Sizes:
    """How much is computed on a device."""

    head_dims: Sequence[int]
    dtypes: tuple[str, ...]
    rings: tuple[tuple[int, int, int, tuple[int, ...]], ...]  # S, H, D and the numbers of ranks, in turn
    model: dict[str, int]
    tokens: int  # of the model
    layer: tuple[int, int, int, int]  # H, G, D and tokens of a rank: memory, overlap, machine


LLAMA = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"intermediate_size": 8192, "vocab_size": 32_000}
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 32, "vocab_size": 61}
ON = {
    "cuda": Sizes(
        head_dims=range(8, 257, 8),
        dtypes=("bfloat16", "float16", "float32"),
        rings=((131_072, 8, 128, (2, 4, 8)), (32_768, 32, 128, (4, 8))),
        model=LLAMA,
        tokens=16_384,
        layer=(32, 8, 128, 16_384),
    ),
    "cpu": Sizes(
        head_dims=(8, 24),
        dtypes=("float32", "bfloat16"),
        rings=((480, 2, 8, (2, 4)),),
        model=TINY,
        tokens=48,
        layer=(4, 2, 8, 48),
    ),
}


def random_inputs(device: torch.device | str, dtype: str, H: int, G: int, Sq: int, Sk: int, D: int) -> list[Tensor]:
    """q, k, v and d_out, drawn on the device."""
    torch.manual_seed(0)
    shapes = ((1, heads, S, D) for heads, S in ((H, Sq), (G, Sk), (G, Sk), (H, Sq)))
    return [torch.randn(shape, device=device, dtype=torch.float32).to(getattr(torch, dtype)) for shape in shapes]


def block_error(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, causal: bool) -> float:
    """The largest error of a fused block's out and gradients, over what rounding allows. BLIND rows see no key."""
    scale, seen = q.shape[-1] ** -0.5, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    blind = seen.new_zeros(q.shape[2]).index_fill_(0, torch.arange(min(BLIND, q.shape[2] - 1), device=q.device), True)
    seen = (seen.tril() if causal else seen) & ~blind[:, None]
    right = exact_attention(q, k, v, d_out, visible=seen, fused_blocks=1)
    out, lse = fused_forward(q, k, v, scale=scale, causal=causal)
    out, lse = out.masked_fill(blind[:, None], 0.0), lse.masked_fill(blind, -torch.inf)
    results = out, *fused_backward(q, k, v, out, lse, d_out, scale=scale, causal=causal)
    over = []
    for name, x in zip(("out", "dq", "dk", "dv"), results, strict=True):
        over.append((right[name].error(x.to(q.dtype)) / right[name].allowed).max())
    return float(torch.stack(over).nan_to_num(nan=math.inf).max())


def kernels(context: RankContext, sizes: Sizes) -> Iterator[Row]:
    for dtype in sizes.dtypes:
        found: dict[str, dict[str, float]] = {}  # by kernel and case
        for D in sizes.head_dims:
            for Sq, Sk, causal in SHAPES + (PLANNED if D % 64 == 0 else ()):
                four = random_inputs(context.device, dtype, 4, 2, Sq, Sk, D)
                kernel, _ = choose_kernel(*four[:2], D**-0.5, causal=causal)
                mask = ", causal" if causal else ""
                found.setdefault(kernel, {})[f"D {D}, {Sq} x {Sk}{mask}"] = block_error(*four, causal)
        for kernel, cases in found.items():
            wrong = {case: error for case, error in cases.items() if not error <= 1}
            says = f"{len(cases)} blocks, errors up to {max(cases.values()):.2f} of what rounding allows"
            if wrong:
                says += f"; WRONG: {'; '.join(list(wrong)[:5])}"
            yield f"{dtype}, {kernel}", not wrong, says


class Here:
    """PyTorch's loop asks it for the next block: it has that of before."""

    def __init__(self, *how: Any, **more: Any) -> None: ...

    def exchange_buffers(self, block: Tensor) -> None:
        self.block = block

    def next_buffer(self) -> Tensor:
        return self.block


@contextmanager
def no_messages(world_size: int) -> Iterator[Callable[[int], Any]]:
    """PyTorch's loop of so many ranks in one process. What it gets makes a patch: "this is rank r"."""
    ranks = mock.patch.object(dist, "get_world_size", return_value=world_size)
    with torch_loops("zigzag") as loop, mock.patch.object(loop, "_create_rotater", Here), ranks:
        yield lambda rank: mock.patch.object(dist, "get_rank", return_value=rank)


def loop_in_turn(chunks: list[list[Tensor]]) -> None:
    attention = partial(torch_loop, causal=True, layout="zigzag")
    with no_messages(len(chunks)) as this_is:
        for rank, four in enumerate(chunks):
            with this_is(rank):
                with_gradients(attention, *four)


def typical(context: RankContext, work: Callable[[], Any]) -> float:
    """Seconds until the last rank's device has done the work: the median of five times, after a call to warm up."""
    calls = max(1, round(SHORT / max(laps(work, context.device))))
    return median(max(laps(work, context.device, calls)) for _ in range(5))


def apart(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest distance of two tensors, in norm, as a share of the second. NaN is infinitely far."""
    pairs = [(x.float(), y.float()) for x, y in zip(mine, theirs, strict=True)]
    shares = torch.stack([(x - y).norm() / y.norm() for x, y in pairs])
    return float(shares.nan_to_num(nan=math.inf).max())


def ring(context: RankContext, sizes: Sizes) -> Iterator[Row]:
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
    for S, H, D, worlds in sizes.rings:
        whole = random_inputs(context.device, "bfloat16", H, H, S, S, D)
        alone, right = typical(context, partial(with_gradients, sdpa, *whole)), with_gradients(sdpa, *whole)
        for P in worlds:
            chunks = dealt(whole, "zigzag", P)
            mine = typical(context, partial(ring_in_turn, chunks, "zigzag", True))
            results = zip(*ring_in_turn(chunks, "zigzag", True), strict=True)
            off = apart([unshard(parts, "zigzag") for parts in results], right)
            says = f"{alone / mine:.3f} of SDPA's speed, {off:.1e} from its results"
            try:
                says += f"; PyTorch's loop {alone / typical(context, partial(loop_in_turn, chunks)):.3f}"
            except Exception as error:  # of another's code
                says += f"; PyTorch's loop fails: {type(error).__name__}"
            kernel, _ = choose_kernel(*chunks[0][:2], 1.0, causal=True)
            yield f"zigzag, S = {S:,}, H = {H}, P = {P}, {kernel}", off <= CLOSE, says


def peak(context: RankContext, work: Callable[[], Any]) -> int:
    """The bytes that this work needs beyond what is there, at most."""
    if context.device.type == "cpu":
        return record.peak_extra(work) or 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def model(context: RankContext, sizes: Sizes) -> Iterator[Row]:
    if not find_spec("transformers"):
        yield "a Llama", True, "not asked: transformers is not installed"
        return
    from transformers import AutoModelForCausalLM, BatchEncoding, LlamaConfig

    from ringlab.hugging_face.batch import shard_batch
    from ringlab.hugging_face.use import use_ring

    with torch.device(context.device):
        config = LlamaConfig(**sizes.model, max_position_embeddings=sizes.tokens, use_cache=False)
        llama = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        llama.activation_checkpointing_enable()
    tokens, found = torch.randint(1, sizes.model["vocab_size"], (1, sizes.tokens)), []
    batch = BatchEncoding({"input_ids": tokens, "labels": tokens})

    def step(model: Any) -> list[Tensor]:
        """The gradients that pass through attention's scores: a loss hardly knows them."""
        model.zero_grad()
        model(**batch.to(context.device)).loss.backward()
        return [x.grad for name, x in model.named_parameters() if "q_proj" in name or "k_proj" in name]

    exact = step(deepcopy(llama).float())
    for ringed in (False, True):
        if ringed:
            use_ring(llama)
            batch = shard_batch(batch)
        work = partial(step, llama)
        found.append((typical(context, work), peak(context, work), apart(work(), exact)))
    (sdpa, of_sdpa, sdpa_off), (mine, of_ring, off) = found
    says = f"{mine / sdpa:.3f} times as long as sdpa; peak {of_ring / 2**30:.2f} GiB, sdpa {of_sdpa / 2**30:.2f}"
    says += f"; gradients of q_proj and k_proj {off:.1e} from those in float32, sdpa's {sdpa_off:.1e}"
    yield f"a step of a Llama, one rank, S = {sizes.tokens:,}", off <= 2 * sdpa_off, says


def memory(context: RankContext, sizes: Sizes) -> Iterator[Row]:
    (H, G, D, C), P = sizes.layer, context.world_size
    four = random_inputs(context.device, "bfloat16", H, G, C, C, D)
    attention = partial(ring_flash_attention, causal=True, layout="zigzag")
    with_gradients(attention, *(x[:, :, : 2 * P] for x in four))  # what libraries set up once
    here = peak(context, lambda: with_gradients(attention, *four)) + sum(x.nbytes for x in four)
    counted = peak_bytes_backward(AttentionLayer(H, G, D, 2), C)
    says = f"{here / counted:.3f} of the {counted / 2**20:,.0f} MiB counted"
    yield f"training, H = {H}, G = {G}, C = {C:,}", True, says


def measured_ring(context: RankContext, sizes: Sizes) -> dict[str, float]:
    """Seconds of a causal step, forward and backward, in bfloat16: "one device" with SDPA on the whole sequence, the
    "ring", the same "without priority" for NCCL's kernels, its "computing" with all messages left out, and its
    "messages" alone.
    """
    (H, G, D, C), P = sizes.layer, context.world_size
    whole = random_inputs(context.device, "bfloat16", H, G, P * C, P * C, D)
    q, k, v, d_out = (shard(x, "zigzag", context.rank, P).contiguous() for x in whole)
    options: dict[str, Any] = {"causal": True, "layout": "zigzag"}
    ring = partial(with_gradients, partial(ring_flash_attention, **options), q, k, v, d_out)

    def computing() -> None:
        with mock.patch.object(dist, "batch_isend_irecv", return_value=[]):
            ring()

    def messages() -> None:
        for blocks in ((k, v), (k, v), (k.float(), v.float())):  # the last: dK and dV
            for _ in arriving_blocks(*blocks, lengths=[C] * P, hops=P - 1):
                pass

    sdpa = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    works = {"one device": lambda: with_gradients(sdpa, *whole), "ring": ring}
    works |= {"computing": computing, "messages": messages}
    seen = {name: typical(context, work) for name, work in works.items()}
    with mock.patch.dict(os.environ, TORCH_NCCL_HIGH_PRIORITY="0"):  # read when a communicator is made
        slow = partial(ring_flash_attention, **options, group=dist.new_group())
        return seen | {"without priority": typical(context, partial(with_gradients, slow, q, k, v, d_out))}


def overlap(context: RankContext, sizes: Sizes) -> Iterator[Row]:
    P = context.world_size
    if context.device.type == "cuda" and torch.cuda.device_count() < P:
        yield "the ring", True, "not measured: ranks that share a GPU have slow messages, and wait for each other"
        return
    seen = measured_ring(context, sizes)
    hidden = max(0.0, 1 - (seen["ring"] - seen["computing"]) / seen["messages"])
    share = seen["one device"] / seen["ring"] / P
    says = f"{hidden:.0%} of the messages' time is hidden; {share:.2f} of {P} times SDPA"
    yield f"the ring on {P}", True, says + "".join(f"; {name} {1000 * s:.1f} ms" for name, s in seen.items())


def machine(context: RankContext, sizes: Sizes) -> Iterator[Row]:
    (H, G, D, C), layer = sizes.layer, AttentionLayer(*sizes.layer[:3])
    q, k, v, d_out = random_inputs(context.device, "bfloat16", H, G, C, C, D)
    out, lse = fused_forward(q, k, v, scale=D**-0.5)
    back = partial(fused_backward, q, k, v, out, lse, d_out, scale=D**-0.5)
    works: dict[str, tuple[float, Callable[[], Any]]] = {  # FLOPs or bytes, and what they are of
        "flops": (block_flops(layer, C**2), partial(fused_forward, q, k, v, scale=D**-0.5)),
        "backward_flops": (block_flops(layer, C**2, backward=True), back),
        "memory_bandwidth": (2 * q.nbytes, partial(torch.empty_like(q).copy_, q)),
    }
    name = torch.cuda.get_device_name().lower() if context.device.type == "cuda" else ""
    here = max((key for key in GPUS if key.replace("-", " ") in name), key=len, default="")
    known: dict[str, float] = {}
    if here:
        rates = *GPUS[here].rates(GPUS[here].kernel, D), GPUS[here].memory_bandwidth
        known = dict(zip(works, rates, strict=True))
    for field, (size, work) in works.items():
        preset = f"; the preset has {known[field]:.3g}" if field in known else ""
        yield field, True, f"{size / typical(context, work):.3g}{preset}"


def rows_of_rank(context: RankContext, part: str, sizes: Sizes) -> list[Row]:
    """What a part found, on this rank. Rank 0 prints each line as soon as it is known."""
    rows = [tell(part, row) if context.rank == 0 else row for row in PARTS[part](context, sizes)]
    torch.cuda.empty_cache()  # the next part may be that of other processes
    return rows


def tell(part: str, row: Row) -> Row:
    what, right, says = row
    word = {True: "ok   ", False: "WRONG", None: "LATE "}[right]
    print(f"{word} {part}: {what}: {says}".replace("\n", "\n      "), flush=True)
    return row


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "kernels": kernels,
    "ring": ring,
    "model": model,
    "memory": memory,
    "overlap": overlap,
    "machine": machine,
}
ALONE = ("kernels", "ring", "model", "machine")  # one rank is enough


def examined(device: str, P: int, sizes: Sizes) -> Iterator[tuple[str, Row]]:
    """Every part and what it found, told. After a part that fails or takes too long the next one runs."""
    end, pools = time.monotonic() + SECONDS, {size: Ranks(size, SECONDS, device) for size in {1, P}}
    for part in PARTS:
        size = 1 if part in ALONE else P
        pool = pools[size]
        pool.seconds = end - time.monotonic()
        try:
            if pool.seconds < 0:
                raise RuntimeError(f"not begun, because {SECONDS:.0f} s are over")
            rows = pool(size, rows_of_rank, part, sizes)[0]
        except (RuntimeError, ValueError, LostRank) as error:
            late = pool.seconds < 0 or (isinstance(error, LostRank) and error.silent)
            says = f"not done in time: {error}" if late else f"it failed: {error}"
            rows = [tell(part, ("all of it", None if late else False, says))]
        yield from ((part, row) for row in rows)
    for pool in pools.values():
        pool.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(ON), default="cuda", help="cpu: gloo and small sizes (cuda)")
    parser.add_argument("--ranks", type=positive, help="(every GPU, and at least 3)")
    args = parser.parse_args(arguments)
    if args.ranks == 1:
        parser.error(f"--ranks is {args.ranks}; expected 2 or more")
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("no CUDA GPU here: nothing measured, nothing claimed; --device cpu tries the same code on small sizes")
        return 0
    ranks = args.ranks or max(3, torch.cuda.device_count() if on_gpu else 0)
    name = torch.cuda.get_device_name() if on_gpu else "CPU with gloo: this tries the bench, not a GPU"
    print(f"{ranks} ranks, {name}, torch {torch.__version__}", flush=True)
    rows = [row for _, row in examined(args.device, ranks, ON[args.device])]
    return 0 if all(right for _, right, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
