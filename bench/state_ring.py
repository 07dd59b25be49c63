"""Linear attention over ranks, in turn with one process that runs the same chunks on all cores, and with softmax.

The layer is the gated delta rule, forward and backward. A speed of 1 is that of one process, with as many threads as
all ranks have together. The ring of keys is `ring_flash_attention`, causal and zigzag, with as many heads and tokens.

The chunked code makes some 60 tensors a pass. By default glibc gives large ones back to the system at once (from 32 MiB
on always, smaller ones by what was freed before), and each comes back page by page: at 2 us a page this takes as long
as computing. So glibc is told to keep memory, on one process and on all ranks; two rows show what happens else.

    $ python -m bench.state_ring
"""

import ctypes
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from bench import record
from bench.against_peers import with_gradients
from bench.record import Method, in_turn
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import shard
from ringlab.states.linear_attention import linear_attention
from ringlab.states.state_ring import WAYS, ring_linear_attention
from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext, launch

ONE, KEYS = "one process", "ring of keys"
KEPT, DEFAULT = "memory kept", "glibc's default"


def keep_memory() -> None:
    """Tell glibc to give nothing back to the system; nothing where there is another library."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(option, 2**31 - 1)


def seconds_in_turn(
    context: RankContext, case: str, seq_len: int, heads: int, head_dim: int, repetitions: int
) -> dict[str, list[float]]:
    """Seconds of each way in turn. Raises ValueError where a rank's results are not those of one process."""
    if case == KEPT:
        keep_memory()
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = torch.randn(4, 1, heads, seq_len, head_dim, generator=generator).to(context.device)
    beta, decay = torch.rand(2, 1, heads, seq_len, generator=generator).to(context.device)
    whole = [q, k / k.norm(dim=-1, keepdim=True), v, (0.9 + 0.1 * decay).log(), beta]

    def mine(layout: str) -> list[Tensor]:
        return [shard(x, layout, context.rank, context.world_size) for x in (*whole, d_out)]

    of_states, of_keys = mine("contiguous"), mine("zigzag")
    softmax = partial(ring_flash_attention, causal=True, layout="zigzag")
    methods: dict[str, Method] = {
        ONE: (True, lambda: with_gradients(lambda *x: linear_attention(*x)[0], *whole, d_out))
    }
    for way in WAYS:
        ring = partial(ring_linear_attention, way=way)
        methods[way] = (False, partial(with_gradients, lambda *x, ring=ring: ring(*x)[0], *of_states))
    if case == KEPT:
        methods[KEYS] = (False, partial(with_gradients, softmax, *of_keys[:3], of_keys[-1]))
    seconds, results = in_turn(context, methods, repetitions)
    rights = [x.contiguous() for x in results.get(ONE, [torch.empty_like(x) for x in (v, *whole)])]
    for right in rights:
        dist.broadcast(right, 0)

    def check() -> None:
        for way in WAYS:
            for x, right in zip(results[way], rights, strict=True):
                mine = shard(right, "contiguous", context.rank, context.world_size)
                off = (x - mine).norm() / mine.norm()
                if not off < 1e-4:
                    raise ValueError(f"{way}: a result is off by {off:.1e} from one process")

    agree(check)
    return seconds


def measure(worlds: list[int], lengths: list[int], *, heads: int, head_dim: int, repetitions: int) -> record.Results:
    """A row for each number of ranks and tokens, and of the first number of ranks with glibc's default."""
    made = record.made("state_ring", "float32")
    sizes = {"heads": heads, "head_dim": head_dim, "repetitions": repetitions}
    cases = [(KEPT, P, S) for P in worlds for S in lengths] + [(DEFAULT, worlds[0], S) for S in lengths[1:]]
    rows = [
        {"case": case, "world_size": P, "seq_len": S}
        | {"seconds": launch(seconds_in_turn, P, case, S, *sizes.values())[0]}
        for case, P, S in cases
    ]
    return {**made, "reference": ONE, **sizes, "rows": rows}


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    rows = []
    for row in results["rows"]:
        seconds = {name: median(each) for name, each in row["seconds"].items()}
        speeds = [f"{seconds[ONE] / seconds[way]:.2f}" if way in seconds else "" for way in (*WAYS, KEYS)]
        rows.append([row["world_size"], f"{row['seq_len']:,}", row["case"], *speeds])
    return record.page(
        "The gated delta rule over ranks",
        results,
        f"{results['heads']} heads of {results['head_dim']}, forward and backward. Shares of the speed of one process "
        f"on all cores that runs the same chunks: medians of {results['repetitions']} turns.",
        record.grid(f"P | S | <memory | {' | '.join(WAYS)} | {KEYS}, causal", rows),
    )


if __name__ == "__main__":
    record.save("state_ring", measure([2, 4], [1024, 4096, 16384], heads=8, head_dim=64, repetitions=5), table)
