"""How exact the flash ring is in every dtype: its errors beside those of fused attention on one device.

Both get the same inputs, N(0, 1), rounded to the dtype, and are compared with full attention in float64. A row has the
largest errors of out, dq, dk and dv. Nothing is timed: the same machine gives the same numbers.

    $ python -m bench.accuracy
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.against_peers import with_gradients
from ringlab.basics.ranks import gather
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import Right, exact_attention
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import shard, unshard

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
RESULTS = ("out", "dq", "dk", "dv")
SIZES = {"world_size": 4, "seq_len": 4096, "heads": 2, "head_dim": 64}


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


def ring_errors(context: RankContext, seq_len: int, heads: int, head_dim: int) -> list[dict[str, Any]]:
    """A row for each dtype: the errors of the ring and of SDPA in one process. Causal, zigzag."""
    ring = partial(ring_flash_attention, causal=True, layout="zigzag")
    rows = []
    for dtype in DTYPES:
        whole = inputs(seq_len, heads, head_dim, dtype)
        mine = with_gradients(ring, *(shard(x, "zigzag", context.rank, context.world_size) for x in whole))
        joined = [gather(x, context) for x in mine]
        if context.rank > 0:
            continue
        results = tuple(unshard(list(x.chunk(context.world_size, dim=2)), "zigzag") for x in joined)
        rights = exact_attention(*whole, causal=True, fused_blocks=context.world_size)
        alone = with_gradients(partial(F.scaled_dot_product_attention, is_causal=True), *whole)
        rows.append({"dtype": dtype, "ring": errors(results, rights), "sdpa": errors(alone, rights)})
    return rows


def measure(world_size: int, **sizes: int) -> record.Results:
    """The whole bench."""
    results = {**record.made("accuracy", ", ".join(DTYPES)), "world_size": world_size, **sizes}
    return {**results, "rows": launch(ring_errors, world_size, *sizes.values())[0]}


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    rows = []
    for row in results["rows"]:
        pairs = [(row["ring"][name], row["sdpa"][name]) for name in RESULTS]
        rows.append([row["dtype"], *(f"{ring:.1e} / {sdpa:.1e} = {ring / sdpa:.2f}" for ring, sdpa in pairs)])
    return record.page(
        "How exact the flash ring is",
        results,
        "Largest error of the ring / largest error of scaled_dot_product_attention in one process = their ratio. Both "
        f"against full attention in float64. Inputs N(0, 1), S = {results['seq_len']:,}, H = {results['heads']}, "
        f"D = {results['head_dim']}, causal, zigzag, P = {results['world_size']}.",
        record.grid(f"<dtype | {' | '.join(RESULTS)}", rows),
    )


if __name__ == "__main__":
    record.save("accuracy", measure(**SIZES), table)
