"""One new token against the length of the context: a merge over ranks, a ring that moves the cache, and one process.

The attention of one layer for one new token, whose S keys and values are in the cache, the token's own among them.
Three ways, measured in turn:

    merge over ranks   ringlab.models.generate: each rank attends to its C = S/P keys; a message of each joins the parts
    ring               each rank attends to the blocks of all ranks, which go round as in training: P - 1 hops
    one process        one process with all the cores and the whole cache: scaled_dot_product_attention

P ranks share the cores of the one process. Bytes are counted where they are handed over: to `of_every_rank`, and to
the sends of the ring. Every result must be exact attention up to rounding.

    $ python -m bench.generation
"""

from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.record import Method, in_turn
from ringlab.basics.blockwise_attention import attend_tile
from ringlab.basics.naive_attention import resolve_scale
from ringlab.basics.online_softmax import finish, start
from ringlab.models import generate
from ringlab.models.generate import SpreadCache
from ringlab.ring.layouts import positions
from ringlab.ring.overlap import arriving_blocks
from ringlab.support.messages import Watch
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention

MERGE, RING, ONE = "merge over ranks", "ring", "one process"
SHAPE = {"heads": 8, "kv_heads": 2, "head_dim": 64}
SIZES = {"worlds": [2, 4], "contexts": [1024, 4096, 16384, 65536], "repetitions": 9, **SHAPE}
TOKENS = 5  # new tokens in a turn


def full_cache(k: Tensor, v: Tensor, rank: int, world_size: int) -> SpreadCache:
    """The slots of this rank in a cache of k, v (1, G, S, D), ready for the token at position S - 1."""
    S = k.shape[2]
    at = positions("striped", S, rank, world_size)
    cache = SpreadCache("striped")
    cache.begin(at[None, :-1], room=1)
    cache.blocks = [(k[:, :, at].contiguous(), v[:, :, at].contiguous())]
    for position in range(S - world_size, S):
        cache.store(torch.tensor([[position]]))
    return cache


def by_ring(q: Tensor, k: Tensor, v: Tensor, world_size: int) -> Tensor:
    """The token's q (1, H, 1, D) over the blocks of all ranks, of which k and v (1, G, C, D) are this rank's."""
    q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # (1, G, H/G, D)
    state = start(q)
    for k_j, v_j in arriving_blocks(k, v, lengths=[k.shape[2]] * world_size):
        state = attend_tile(state, q, k_j, v_j, scale=resolve_scale(None, q.shape[-1]))  # all keys are in the past
    return finish(state)[0].flatten(1, 2).unsqueeze(2)


def on_one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The token's q (1, H, 1, D) over the whole cache, k and v (1, G, S, D)."""
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # with enable_gqa, torch would copy k and v for each head
    return F.scaled_dot_product_attention(grouped, k, v).flatten(1, 2).unsqueeze(2)


def handed_over(work: Callable[[], Tensor]) -> int:
    """The bytes that this rank gives to all ranks and to sends in `work`."""
    with Watch() as watch, mock.patch.object(generate, "of_every_rank", side_effect=generate.of_every_rank) as given:
        work()
    sends = [message.bytes for message in watch.messages if message.kind == "send"]
    return sum(sends) + sum(call.args[0].nbytes for call in given.call_args_list)


def formula(world_size: int, context: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """The bytes of a rank by the formulas of ringlab/models/generate.py, float32, B = 1."""
    ring = (world_size - 1) * 2 * kv_heads * (context // world_size) * head_dim
    return {MERGE: 4 * heads * (head_dim + 2), RING: 4 * ring}


def measured_on_ranks(
    context: RankContext, seq_len: int, repetitions: int, shape: dict[str, int]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The seconds of a token by each way, one number for each turn; and the bytes that this rank sends.

    Raises RuntimeError when a result is wrong.
    """
    P, generator = context.world_size, torch.Generator().manual_seed(0)
    H, G, D = (shape[name] for name in SHAPE)
    sizes = (1, H, 1, D), (1, G, seq_len, D), (1, G, seq_len, D)
    q, k, v = (torch.randn(size, generator=generator) for size in sizes)
    cache, new = full_cache(k, v, context.rank, P), (k[:, :, -1:].clone(), v[:, :, -1:].clone())
    if context.rank > 0:
        k = v = None  # only rank 0 has the whole cache too

    def by_merge() -> Tensor:
        cache.layer = 0  # the token is computed anew each time
        return cache(q, *new)

    ways: dict[str, Callable[[], Tensor]] = {
        MERGE: by_merge,
        RING: lambda: by_ring(q, *cache.blocks[0], P),
        ONE: lambda: on_one_process(q, k, v),
    }
    sent = {name: handed_over(ways[name]) for name in (MERGE, RING)}
    methods: dict[str, Method] = {
        name: (name == ONE, lambda way=way: [way() for _ in range(TOKENS)][-1]) for name, way in ways.items()
    }
    seconds, results = in_turn(context, methods, repetitions)
    if context.rank == 0:
        right = exact_attention(q, k, v, fused_blocks=P)["out"]
        for name, out in results.items():
            if not right.accepts(out):
                raise RuntimeError(f"{name}, P = {P}, S = {seq_len}: off by {right.error(out).max():.1e}")
    return {name: [each / TOKENS for each in turns] for name, turns in seconds.items()}, sent


def measure(worlds: list[int], contexts: list[int], *, repetitions: int, **shape: int) -> record.Results:
    """The whole bench, with a row for each P and S; `shape` has heads, kv_heads and head_dim."""
    made = record.made("generation", "float32")
    steps = {f"P = {P}, S = {S}": (P, S) for P in worlds for S in contexts}
    settings = {"worlds": worlds, "contexts": contexts, "repetitions": repetitions, **shape}

    def step(P: int, S: int) -> dict[str, Any]:
        seconds, sent = zip(*launch(measured_on_ranks, P, S, repetitions, shape), strict=True)
        most = {way: max(each[way] for each in sent) for way in (MERGE, RING)}
        row = {"world_size": P, "context": S, "seconds": seconds[0]}
        return {**row, "bytes": most, "formula": formula(P, S, **shape)}

    rows = list(record.in_steps("generation", settings, steps, step).values())
    return {**made, "reference": ONE, **settings, "rows": rows}


def milliseconds(results: record.Results, way: str, world_size: int) -> list[float]:
    """The median time of a token in a layer, for each context."""
    rows = [row for row in results["rows"] if row["world_size"] == world_size]
    return [1e3 * median(row["seconds"][way]) for row in rows]


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    rows = []
    for row in results["rows"]:
        one, merge, ring = (1e3 * median(row["seconds"][way]) for way in (ONE, MERGE, RING))
        times = [f"{one:.2f}", f"{merge:.2f}", f"{ring:.2f}", f"{merge / one:.1f}", f"{ring / merge:.1f}"]
        counts = [f"{row[of][way]:,}" for way in (MERGE, RING) for of in ("bytes", "formula")]
        rows.append([row["world_size"], f"{row['context']:,}", *times, *counts])
    return record.page(
        "A new token against the length of the context",
        results,
        f"The attention of one layer for one new token: B = 1, H = {results['heads']}, G = {results['kv_heads']}, "
        f"D = {results['head_dim']}. P ranks share the {results['machine']['cores']} cores; one process has them all, "
        f"and the whole cache of S tokens. Milliseconds, medians of {results['repetitions']} turns of {TOKENS} tokens, "
        "measured in turn. Bytes: what a rank gives for all ranks, or to the sends of the ring, and the formula.",
        record.grid(
            "P | S | one process | merge | ring | merge / one process | ring / merge | bytes of the merge | formula | "
            "of the ring | formula",
            rows,
        ),
    )


if __name__ == "__main__":
    record.save("generation", measure(**SIZES), table)
