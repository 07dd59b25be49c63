"""What documents and windows save in the ring: its time against the pairs that are left, in each layout.

Documents: eight of S/8 tokens in a ring, against one process with all the cores that computes them one after the other
with scaled_dot_product_attention. No pair of two documents is computed, so both have the same work.
Windows: the time of a ring with a window of S/8 tokens, as a share of the time of the ring without a mask, over the
share of pairs that the window leaves. 1 would be a window that costs only its pairs.
All methods are measured in turn. Memory: the peak of a rank in both passes beyond its inputs, with and without a mask.

    $ python -m bench.masked_rings
"""

from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from bench import record
from bench.against_peers import with_gradients
from bench.record import Method, in_turn
from ringlab.ring.cases import random_inputs
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import LAYOUTS, positions, shard
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention

FORWARD, TRAIN = "forward", "forward and backward"
PASSES = (FORWARD, TRAIN)
PARTS = 8  # documents in the sequence; a window is as long as one of them
NO_MASK, DOCUMENTS, WINDOW, GLOBAL = "no mask", "documents", "window", "window and 16 global tokens"
SIZES = {"worlds": [2, 4], "seq_len": 8192, "heads": 8, "head_dim": 64, "repetitions": 3}


def options_of(case: str, seq_len: int) -> dict[str, Any]:
    """What the ring is told in this case."""
    length = seq_len // PARTS
    return {
        NO_MASK: {},
        DOCUMENTS: {"causal": True, "documents": (length,) * PARTS},
        WINDOW: {"causal": True, "window": length},
        GLOBAL: {"causal": True, "window": length, "global_tokens": 16},
    }[case]


def cases(world_size: int, seq_len: int) -> dict[str, tuple[Partition, dict[str, Any]]]:
    """By "case, layout": its mask, and what the ring is told; without a mask all layouts are alike."""
    lengths, found = (seq_len // world_size,) * world_size, {}
    for case in (NO_MASK, DOCUMENTS, WINDOW, GLOBAL):
        for layout in LAYOUTS[:1] if case == NO_MASK else LAYOUTS:
            options = options_of(case, seq_len)
            found[f"{case}, {layout}"] = Partition(Mask(**options), layout, lengths), {"layout": layout, **options}
    return found


def one_by_one(whole: list[torch.Tensor], which: str) -> list[Any]:
    """The documents in one process, each by itself."""
    fused = partial(F.scaled_dot_product_attention, is_causal=True)
    each = zip(*(x.chunk(PARTS, dim=2) for x in whole), strict=True)
    return [fused(*four[:3]) if which == FORWARD else with_gradients(fused, *four) for four in each]


def seconds_in_turn(
    context: RankContext, seq_len: int, heads: int, head_dim: int, repetitions: int
) -> dict[str, list[float]]:
    """The seconds of every repetition: of "one by one" and of the ring in every case, in both passes.

    Raises RuntimeError when the ring's numbers are wrong.
    """
    P, whole = context.world_size, random_inputs(1, heads, heads, seq_len, head_dim)
    methods: dict[str, Method] = {f"one by one, {which}": (True, partial(one_by_one, whole, which)) for which in PASSES}
    found = cases(P, seq_len)
    for name, (_, options) in found.items():
        mine = [shard(x, options["layout"], context.rank, P) for x in whole]
        ring = partial(ring_flash_attention, **options)
        methods[f"{name}, {FORWARD}"] = False, partial(ring, *mine[:3])
        methods[f"{name}, {TRAIN}"] = False, partial(with_gradients, ring, *mine)
    seconds, results = in_turn(context, methods, repetitions)
    for name, (_, options) in found.items():
        check(name, results[f"{name}, {TRAIN}"], whole, positions(options["layout"], seq_len, context.rank, P), options)
    return seconds


def check(
    name: str, result: list[torch.Tensor], whole: list[torch.Tensor], at: torch.Tensor, options: dict[str, Any]
) -> None:
    """Raise RuntimeError unless the rows of this rank's last query are right in out and dq."""
    q, k, v, d_out = whole
    mask = {name: option for name, option in options.items() if name != "layout"}
    query = at[-1:]
    seen = Mask(**mask).dense(query, k.shape[2])
    rights = exact_attention(q[:, :, query], k, v, d_out[:, :, query], visible=seen, fused_blocks=3 * PARTS)
    for each, x in zip(("out", "dq"), result, strict=False):
        if not rights[each].accepts(x[:, :, -1:]):
            raise RuntimeError(f"{name}: {each} of the ring is wrong, by {rights[each].error(x[:, :, -1:]).max():.1e}")


def memory_of_ring(
    context: RankContext, seq_len: int, heads: int, head_dim: int, options: dict[str, Any]
) -> int | None:
    """The peak of this rank's memory in both passes, beyond its inputs: bytes."""
    record.return_freed_memory()
    layout, P = options["layout"], context.world_size
    mine = [shard(x, layout, context.rank, P) for x in random_inputs(1, heads, heads, seq_len, head_dim)]
    few = [x[:, :, : 2 * PARTS] for x in mine]
    with_gradients(ring_flash_attention, *few)  # what libraries set up once
    return record.peak_extra(lambda: with_gradients(partial(ring_flash_attention, **options), *mine))


def measure(worlds: list[int], seq_len: int, heads: int, head_dim: int, repetitions: int) -> record.Results:
    """The whole bench: a row for each P."""
    made = record.made("masked_rings", "float32")
    sizes = {"seq_len": seq_len, "heads": heads, "head_dim": head_dim}
    contiguous = [name for name in cases(worlds[-1], seq_len) if name.endswith("contiguous")]
    steps: dict[str, tuple] = {f"P = {P}": (P, None) for P in worlds}
    steps |= {f"memory, P = {worlds[-1]}: {name}": (worlds[-1], name) for name in contiguous}

    def step(P: int, name: str | None) -> Any:
        if name is None:
            return launch(seconds_in_turn, P, *sizes.values(), repetitions)[0]
        peaks = launch(memory_of_ring, P, *sizes.values(), cases(P, seq_len)[name][1])
        return None if None in peaks else max(peaks)

    settings = {"worlds": worlds, "repetitions": repetitions, **sizes}
    found = list(record.in_steps("masked_rings", settings, steps, step).values())
    rows = [{"world_size": P, "seconds": seconds} for P, seconds in zip(worlds, found, strict=False)]
    memory = {
        "chunk_bytes": heads * seq_len // worlds[-1] * head_dim * 4,
        "peak_bytes": dict(zip(contiguous, found[len(worlds) :], strict=True)),
    }
    return {**made, "reference": f"one by one, {FORWARD}", **settings, "rows": rows, **memory}


def seconds_of(results: record.Results, world_size: int, name: str, which: str) -> float:
    """The median seconds of "case, layout", or of the documents "one by one", in a pass."""
    (row,) = (row for row in results["rows"] if row["world_size"] == world_size)
    return median(row["seconds"][f"{name}, {which}"])


def speed(results: record.Results, world_size: int, name: str, which: str) -> float:
    """The time of the documents one by one, over that of the ring in "case, layout"."""
    return seconds_of(results, world_size, "one by one", which) / seconds_of(results, world_size, name, which)


def cost(results: record.Results, world_size: int, name: str, which: str) -> float:
    """The share of the unmasked ring's time, over the share of its pairs. `name` is "case, layout", or "one by one":
    what PyTorch's causal kernel reaches on the documents in one process.
    """
    found = cases(world_size, results["seq_len"])
    mask, _ = found[f"{DOCUMENTS}, contiguous" if name == "one by one" else name]
    full = seconds_of(results, world_size, f"{NO_MASK}, contiguous", which)
    return seconds_of(results, world_size, name, which) / full / (sum(pairs(mask)) / results["seq_len"] ** 2)


def pairs(mask: Partition) -> list[int]:
    """The pairs of a query and a key that each rank computes."""
    return [mask.pairs(rank) for rank in range(len(mask.lengths))]


def table(results: record.Results) -> str:
    """The results as tables in markdown."""
    S, worlds = results["seq_len"], results["worlds"]
    length = S // PARTS
    documents, windows = [], []
    for P in worlds:
        for name, (mask, options) in cases(P, S).items():
            case, layout, of_ranks = name.rpartition(", ")[0], options["layout"], pairs(mask)
            about = [layout, mask.hops, f"{max(of_ranks) * P / sum(of_ranks):.2f}"]
            if case == DOCUMENTS:
                documents.append([P, *about, *(f"{speed(results, P, name, which):.2f}" for which in PASSES)])
            elif case in (WINDOW, GLOBAL):
                share, cells = sum(of_ranks) / S**2, []
                for which in PASSES:
                    over = cost(results, P, name, which)
                    cells += [f"{share * over:.1%}", f"{over:.2f}"]
                windows.append([P, case, *about, f"{share:.1%}", *cells])
    kernel = " and ".join(f"{cost(results, worlds[-1], 'one by one', which):.2f}" for which in PASSES)
    peaks = {name.rpartition(", ")[0]: peak for name, peak in results["peak_bytes"].items()}
    chunks = [f"{name} {peak / results['chunk_bytes']:.1f}" for name, peak in peaks.items() if peak is not None]
    return record.page(
        "Documents and windows in the ring",
        results,
        f"B = 1, S = {S:,}, H = {results['heads']}, D = {results['head_dim']}, causal. "
        f"Medians of {results['repetitions']} repetitions; all methods in turn. Busiest: the pairs of the busiest rank "
        "over the average of the ranks.",
        f"Eight documents of {length:,} tokens: the speed of the ring over that of one process with all the cores, "
        "which computes them one after the other by scaled_dot_product_attention.",
        record.grid("P | <layout | hops | busiest | forward | forward and backward", documents),
        f"A window of {length:,} tokens: the time as a share of the time without a mask, over the share of the pairs. "
        f"PyTorch's causal kernel costs, by the same measure, {kernel} on the documents one by one (forward, both "
        "passes): it computes tiles of 512 keys whole, so a triangle costs more than half of a square.",
        record.grid(
            "P | <mask | <layout | hops | busiest | pairs | forward: time | over pairs | both: time | over pairs",
            windows,
        ),
        f"Memory of a rank in both passes beyond its inputs, P = {worlds[-1]}, contiguous, in chunks: "
        f"{', '.join(chunks) or 'not measured'}.",
    )


if __name__ == "__main__":
    record.save("masked_rings", measure(**SIZES), table)
