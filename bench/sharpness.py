"""How sharp the bound of ringlab/support/rounding.py is: the share of it that right rings need, and wrong ones.

Every ring runs on real processes, in every dtype and for several P, on normal inputs. Then it runs again with each of
the mistakes that the tests keep. A number that is off by more than storing it explains needs a share of what the bound
allows for sums (`Right.used`). Of out, dq, dk and dv the largest share counts: 1 is the limit.

The mistakes are those of tests/wrong_*.py, so this bench runs in a checkout of the project only.

    $ python -m bench.sharpness
"""

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ring_attn
from bench import record
from bench.accuracy import DTYPES, RESULTS
from bench.against_peers import with_gradients
from ringlab.basics.ranks import gather
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import Right, exact_attention
from ringlab.training import backward, flash_ring, grouped_query, overlap
from ringlab.training.layouts import shard, unshard
from tests import wrong_backward_passes, wrong_flash_rings, wrong_groupings, wrong_overlapped_rings, wrong_rings

WORLDS = {"worlds": [1, 2, 3, 4, 5, 8, 16], "wrong_worlds": [2, 3, 4, 5, 8]}
SIZES = {"chunk": 48, "heads": 4, "head_dim": 64}
RIGHT = "right"  # in the place of a mistake
MOST, LEAST = 0.5, 3.0  # a right ring needs this share at most, a wrong one at least
Patch = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Case:
    """A ring, how it is called, and its mistakes."""

    ring: Callable[..., Tensor]
    wrong: dict[str, Patch]
    grouped: bool = False
    gradients: bool = True
    fused: bool = False
    causal: bool = False
    layout: str = "contiguous"


def flash(causal: bool, layout: str) -> Case:
    """The trainable ring in one layout, with the mistakes that change its numbers there."""
    wrong = {
        name: patch
        for name, patch in wrong_flash_rings.WRONG.items()
        if (causal, layout) in wrong_flash_rings.SHOWS.get(name, [(causal, layout)])
        or name in ("output_in_the_dtype_of_q", "gradients_in_float32")
    }
    ring = partial(flash_ring.ring_flash_attention, causal=causal, layout=layout)
    return Case(ring, wrong, grouped=True, fused=True, causal=causal, layout=layout)


BACKWARD = wrong_backward_passes.WRONG | wrong_backward_passes.NARROW
CASES = {
    "ring_attn": Case(ring_attn.ring_attention, wrong_rings.WRONG, gradients=False),
    "overlap": Case(overlap.ring_attention, wrong_overlapped_rings.WRONG, gradients=False),
    "backward": Case(backward.ring_attention, BACKWARD),
    "grouped_query": Case(grouped_query.ring_attention, wrong_groupings.WRONG, grouped=True),
    "flash_ring": flash(False, "contiguous"),
    "flash_ring, causal, zigzag": flash(True, "zigzag"),
    "flash_ring, causal, striped": flash(True, "striped"),
}


def shows(mistake: str, world_size: int) -> bool:
    """Whether a mistake changes numbers in a ring of this size. In the others only the order of the blocks is wrong."""
    if mistake == "two_seats":
        return world_size % 2 == 0
    return mistake != "backwards" and (mistake != "one_block_forever" or world_size > 2)


def share_needed(
    context: RankContext, case: Case, four: list[Tensor], rights: dict[str, Right], mistake: str
) -> float | None:
    """The largest share of what is allowed that any number of any result needs, on rank 0. NaN counts as infinite."""
    mine = [shard(x, case.layout, context.rank, context.world_size) for x in four]
    with nullcontext() if mistake == RIGHT else case.wrong[mistake]():
        results = with_gradients(case.ring, *mine) if case.gradients else (case.ring(*mine[:3]),)
    whole = [gather(x, context) for x in results]
    if context.rank > 0:
        return None
    joined = [unshard(list(x.chunk(context.world_size, dim=2)), case.layout) for x in whole]
    shares = [rights[name].used(x).nan_to_num(nan=math.inf).max() for name, x in zip(RESULTS, joined, strict=False)]
    return min(float(f"{max(shares):.4g}"), sys.float_info.max)  # JSON has no infinity


def shares_of_world(
    context: RankContext, dtypes: list[str], wrong: bool, sizes: dict[str, int]
) -> list[tuple[str, str, str, float]]:
    """(ring, mistake or RIGHT, dtype, share) for everything that runs on so many ranks, from rank 0."""
    B, H, S, D = 1, sizes["heads"], sizes["chunk"] * context.world_size, sizes["head_dim"]
    found = []
    for name, case in CASES.items():
        mistakes = [mistake for mistake in case.wrong if wrong and shows(mistake, context.world_size)]
        for dtype in dtypes:
            G = H // 2 if case.grouped else H
            generator = torch.Generator().manual_seed(0)
            q, d_out = (torch.randn(B, H, S, D, generator=generator).to(DTYPES[dtype]) for _ in range(2))
            k, v = (torch.randn(B, G, S, D, generator=generator).to(DTYPES[dtype]) for _ in range(2))
            rights = {}
            if context.rank == 0:
                blocks = context.world_size if case.fused else 0
                rights = exact_attention(q, k, v, d_out, causal=case.causal, fused_blocks=blocks)
            for mistake in (RIGHT, *mistakes):
                found.append((name, mistake, dtype, share_needed(context, case, [q, k, v, d_out], rights, mistake)))
    return found


def measure(worlds: list[int], wrong_worlds: list[int], dtypes: list[str], **sizes: int) -> record.Results:
    """The whole bench. "shares": by ring, mistake or RIGHT, dtype and P."""
    shares: dict[str, Any] = {}
    for P in worlds:
        for ring, mistake, dtype, share in launch(shares_of_world, P, dtypes, P in wrong_worlds, sizes)[0]:
            shares.setdefault(ring, {}).setdefault(mistake, {}).setdefault(dtype, {})[str(P)] = share
    return {
        "command": "python -m bench.sharpness",
        "machine": record.machine(),
        "dtype": ", ".join(dtypes),
        "worlds": worlds,
        "wrong_worlds": wrong_worlds,
        **sizes,
        "shares": shares,
    }


def smallest_share(results: record.Results, ring: str, mistake: str, dtype: str) -> float | None:
    """The smallest share over all P that a mistake needs; None in a dtype where it changes nothing."""
    wrong, right = (results["shares"][ring][name][dtype] for name in (mistake, RIGHT))
    if all(share == right[P] for P, share in wrong.items()):
        return None
    return min(wrong.values())


def largest_right_share(
    results: record.Results, dtype: str, *, ring: str | None = None, world: int | None = None
) -> float:
    """The largest share that a right ring needs: one ring or all, on so many ranks or over all P."""
    return max(
        share
        for name, of_ring in results["shares"].items()
        for P, share in of_ring[RIGHT][dtype].items()
        if ring in (None, name) and world in (None, int(P))
    )


def table(results: record.Results) -> str:
    """The results as tables in markdown."""

    def line(name: str, cells: list[str]) -> str:
        return f"| {name} | " + " | ".join(cells) + " |"

    def cell(share: float | None) -> str:
        if share is None:
            return "no mistake"
        if share == sys.float_info.max:
            return "NaN"
        return f"{share:.2f}" if share < 10 else f"{share:,.0f}" if share < 1e5 else f"{share:.0e}"

    dtypes = results["dtype"].split(", ")
    head = [line("", dtypes), "| --- |" + " ---: |" * len(dtypes)]
    lines = [
        "# How sharp the bound is",
        "",
        record.heading(results),
        "",
        "The share of what ringlab/support/rounding.py allows for sums that a ring needs, where it needs most: 1 is "
        "the limit. "
        f"N(0, 1), {results['chunk']} tokens a rank, H = {results['heads']}, D = {results['head_dim']}, "
        f"real processes. Right rings need {MOST} at most, wrong rings {LEAST:g} at least. Cells with * need less: "
        "tests/test_precision.py watches the dtypes themselves.",
        "",
        "## Right rings, the largest share over all P",
        "",
        *head,
        *(line(ring, [cell(largest_right_share(results, dtype, ring=ring)) for dtype in dtypes]) for ring in CASES),
        "",
        "## Right rings, the largest share over all rings",
        "",
        *head,
        *(
            line(f"P = {P}", [cell(largest_right_share(results, dtype, world=P)) for dtype in dtypes])
            for P in results["worlds"]
        ),
        "",
        f"## Wrong rings, the smallest share over P = {', '.join(str(P) for P in results['wrong_worlds'])}",
        "",
        "Not here: mistakes whose numbers are right, as all blocks come, in another order. The record of a run shows "
        "them. `no mistake`: in this dtype it changes nothing.",
        "",
        *head,
    ]
    names = [(ring, name) for ring, shares in results["shares"].items() for name in shares]
    for ring, mistake in [(ring, name) for ring, name in names if name != RIGHT]:
        found = [smallest_share(results, ring, mistake, dtype) for dtype in dtypes]
        marks = ["*" if share is not None and share < LEAST else "" for share in found]
        lines.append(line(f"{ring}: {mistake}", [cell(x) + mark for x, mark in zip(found, marks, strict=True)]))
    return "\n".join(lines) + "\n"


def main() -> int:
    record.save("sharpness", measure(**WORLDS, dtypes=list(DTYPES), **SIZES), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
