"""Whole models over ranks: how fast they train, and a new token of a long context.

training_speed    tokens per second and memory of `ringlab.models.train` on 1, 2 and 4 ranks with as many tokens each.
                  The ranks share the cores, so what counts is the speed of all ranks together, over that of one process
                  with all the cores on the same sequence. PyTorch's `context_parallel` does not train on a CPU: it has
                  no rule for the fused kernel. Its private loop takes the place of our ring in the same model.

generation        the attention of one layer for one new token, whose S keys and values are in the cache, in turn:
    merge over ranks   ringlab.models.generate: each rank attends to its C = S/P keys; a message of each joins the parts
    ring               each rank attends to the blocks of all ranks, which go round as in training: P - 1 hops
    one process        one process with all the cores and the whole cache: scaled_dot_product_attention

    $ python -m bench training_speed generation
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.peers import torch_loop
from bench.record import Method, Results, bench, in_turn
from ringlab.basics.blockwise_attention import attend_tile
from ringlab.basics.naive_attention import resolve_scale
from ringlab.basics.online_softmax import finish, start
from ringlab.models import generate
from ringlab.models.generate import SpreadCache
from ringlab.models.loader import open_text, read_batch
from ringlab.models.mesh import build_mesh
from ringlab.models.train import RATE, build, take_step
from ringlab.models.transformer import Config
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.ring.layouts import positions
from ringlab.ring.overlap import arriving_blocks
from ringlab.support.agreement import agree
from ringlab.support.messages import Watch
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention
from ringlab.support.timeline import laps
from ringlab.ways.shared_memory import SharedMemory

ONE, RING, TORCH = "one process", "ring", "PyTorch's loop"

# The speed of training ------------------------------------------------------------------------------------------------

MEMORY = "ring in shared memory"


def peer(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    """PyTorch's loop, called as a transformer calls its attention; as many heads of K and V as of Q."""
    return torch_loop(q, k, v, causal=is_causal, layout="zigzag")


ATTENTION = {
    ONE: F.scaled_dot_product_attention,
    RING: partial(scaled_dot_product_attention, layout="zigzag"),
    MEMORY: partial(scaled_dot_product_attention, layout="zigzag", schedule=SharedMemory),
    TORCH: peer,
}


def prepare(context: RankContext, method: str, seq_len: int, model: dict[str, int]) -> Callable[[], Tensor]:
    """A step of `ringlab.models.train` on this rank, always with the same sequence. It returns the rank's loss."""
    _, line = build_mesh(1, context.world_size, "cpu")
    sliced, optimizer = build(Config(**model), ATTENTION[method], line, torch.float32)
    place = context.rank, context.world_size
    batch = read_batch(open_text(None), 1, 1, seq_len, "zigzag", (0, 1), place)
    return lambda: take_step(sliced, optimizer, *batch, rate=RATE)


def seconds_of_steps(
    context: RankContext, method: str, seq_len: int, steps: int, model: dict[str, int]
) -> tuple[list[float], float]:
    """The seconds of each step, until its last rank is done, and the loss of the first, which warms up."""
    step = prepare(context, method, seq_len, model)
    first = step().item()
    loss, seconds = sum(agree(lambda: first)) / context.world_size, []
    for _ in range(steps):
        seconds.append(max(laps(step, context.device)).seconds)
    return seconds, loss


def memory_of_steps(context: RankContext, method: str, seq_len: int, model: dict[str, int]) -> int | None:
    """The peak of this rank's memory beyond what it had before the model was built, in two steps: bytes."""
    record.return_freed_memory()
    prepare(context, method, 64 * context.world_size, model)()  # what libraries set up once

    def work() -> None:
        step = prepare(context, method, seq_len, model)
        step()
        step()

    return record.peak_extra(work)


def speed(results: Results, method: str, world_size: int) -> float:
    """Tokens per second of all ranks together, on the sequence of `world_size` chunks."""
    (row,) = (row for row in results["rows"] if row["world_size"] == world_size)
    return world_size * results["chunk"] / median(row["seconds"][method])


def training_speed_tables(results: Results) -> list[str]:
    rows = []
    for row in results["rows"]:
        P = row["world_size"]
        for method, peak in row["peak_bytes"].items():
            fast, alone = speed(results, method, P), speed(results, ONE, P)
            memory = "not measured" if peak is None else f"{peak / 1e6:,.1f} MB"
            rows.append([P, f"{P * results['chunk']:,}", method, f"{fast:,.0f}", f"{fast / alone:.2f}", memory])
    return [record.grid("P | S | <attention | tokens/s, all ranks | over one process on this S | memory a rank", rows)]


@bench(
    training_speed_tables,
    worlds=[1, 2, 4],
    chunk=1024,
    steps=3,
    repetitions=3,
    layers=2,
    hidden=128,
    heads=4,
    kv_heads=4,
    feedforward=384,
)
def training_speed(worlds: list[int], chunk: int, steps: int, repetitions: int, **model: int) -> Results:
    """A row for each P. Raises RuntimeError when a loss is not that of one process."""
    pairs = [(P, method) for P in worlds for method in ATTENTION if P > 1 or method in (ONE, RING)]

    def measure(world_size: int, method: str, turn: int | None) -> Results:
        ranks = 1 if method == ONE else world_size
        if turn is not None:
            return {"found": launch(seconds_of_steps, ranks, method, world_size * chunk, steps, model)[0]}
        each = launch(memory_of_steps, ranks, method, world_size * chunk, model)
        return {"found": None if None in each else max(each)}

    turns = (None, *range(repetitions))
    every = [{"world_size": P, "method": method, "turn": i} for i in turns for P, method in pairs]
    settings = {"chunk": chunk, "steps": steps, **model}
    seen = record.rows("training_speed", settings, every, measure)
    found = {(row["world_size"], row["method"], row["turn"]): row["found"] for row in seen}
    rows = []
    for P in worlds:
        row: Results = {"world_size": P, "seconds": {}, "peak_bytes": {}}
        for method in [method for ranks, method in pairs if ranks == P]:
            of_turns, right = [found[P, method, i] for i in range(repetitions)], found[P, ONE, 0][1]
            if any(abs(loss / right - 1) > 1e-5 for _, loss in of_turns):
                raise RuntimeError(f"{method}, P = {P}: the loss is {of_turns[0][1]}; that of one process is {right}")
            row["seconds"][method] = [second for each, _ in of_turns for second in each]
            row["peak_bytes"][method] = found[P, method, None]
        rows.append(row)
    return {"rows": rows}


# The losses on every mesh, which were measured once -------------------------------------------------------------------

ROUNDED, BF16 = "one process, weights off by one rounding", "ring of 4, bf16"  # runs, beside ONE


def curves(results: Results) -> dict[str, torch.Tensor]:
    """The losses of each run, float64."""
    return {row["run"]: torch.tensor(row["losses"], dtype=torch.float64) for row in results["rows"]}


def differences(results: Results) -> dict[str, torch.Tensor]:
    """For each other run, how far its losses are from those of one process, as a share of them."""
    each = curves(results)
    return {name: (losses / each[ONE] - 1).abs() for name, losses in each.items() if name != ONE}


# A new token ----------------------------------------------------------------------------------------------------------

MERGE, TOKENS = "merge over ranks", 5  # new tokens in a turn


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
    H, G, D = (shape[name] for name in ("heads", "kv_heads", "head_dim"))
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


def milliseconds(results: Results, way: str, world_size: int) -> list[float]:
    """The median time of a token in a layer, for each context."""
    rows = [row for row in results["rows"] if row["world_size"] == world_size]
    return [1e3 * median(row["seconds"][way]) for row in rows]


def generation_tables(results: Results) -> list[str]:
    rows = []
    for row in results["rows"]:
        one, merge, ring = (1e3 * median(row["seconds"][way]) for way in (ONE, MERGE, RING))
        times = [f"{one:.2f}", f"{merge:.2f}", f"{ring:.2f}", f"{merge / one:.1f}", f"{ring / merge:.1f}"]
        counts = [f"{row[of][way]:,}" for way in (MERGE, RING) for of in ("bytes", "formula")]
        rows.append([row["world_size"], f"{row['context']:,}", *times, *counts])
    heads = "P | S | one process | merge | ring | merge / one process | ring / merge | bytes of the merge | formula"
    return [record.grid(f"{heads} | of the ring | formula", rows)]


@bench(
    generation_tables,
    worlds=[2, 4],
    contexts=[1024, 4096, 16384, 65536],
    repetitions=9,
    heads=8,
    kv_heads=2,
    head_dim=64,
)
def generation(worlds: list[int], contexts: list[int], repetitions: int, **shape: int) -> Results:
    """A row for each P and S; `shape` has heads, kv_heads and head_dim."""

    def measure(world_size: int, context: int) -> Results:
        seconds, sent = zip(*launch(measured_on_ranks, world_size, context, repetitions, shape), strict=True)
        most = {way: max(each[way] for each in sent) for way in (MERGE, RING)}
        return {"seconds": seconds[0], "bytes": most, "formula": formula(world_size, context, **shape)}

    steps = [{"world_size": P, "context": S} for P in worlds for S in contexts]
    rows = record.rows("generation", {"repetitions": repetitions, **shape}, steps, measure)
    return {"rows": rows}
