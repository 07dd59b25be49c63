"""What the demonstrations of the ways share: inputs, chunks of results, checks. A reader may skip this file."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringlab.ring.layouts import LAYOUTS, shard, unshard
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import Right, exact_attention, report

CASES: list[dict[str, Any]] = [
    {"causal": False, "layout": "contiguous"},
    *({"causal": True, "layout": layout} for layout in LAYOUTS),
]


def random_inputs(B: int, H: int, G: int, S: int, D: int) -> list[Tensor]:
    """q (B, H, S, D), k and v (B, G, S, D), and d_out like q, normal."""
    generator = torch.Generator().manual_seed(0)
    q, d_out = torch.randn(2, B, H, S, D, generator=generator)
    k, v = torch.randn(2, B, G, S, D, generator=generator)
    return [q, k, v, d_out]


def chunks_of_rank(
    context: RankContext, whole: list[Tensor], attention: Callable[..., Any], layout: str
) -> list[Tensor]:
    """This rank's chunks of out and of the gradients of all inputs, for the whole inputs and d_out (B, H, S, ...)."""
    *inputs, d_out = (shard(x, layout, context.rank, context.world_size) for x in whole)
    inputs = [x.requires_grad_() for x in inputs]
    out = attention(*inputs)
    out = out[0] if isinstance(out, tuple) else out  # linear attention gives its state, too
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def chunks_of_cases(
    context: RankContext,
    whole: list[Tensor],
    cases: Sequence[dict[str, Any]],
    attention: Callable[..., Tensor],
    shape: tuple[int, int] | None = None,
) -> list[list[Tensor]]:
    """`chunks_of_rank` for each of the options; on a mesh of this shape, if one is given."""
    if shape:
        attention = partial(attention, group=init_device_mesh(context.device.type, shape))
    return [chunks_of_rank(context, whole, partial(attention, **case), case["layout"]) for case in cases]


def report_ranks(of_ranks: Sequence[Sequence[Tensor]], layout: str, right: dict[str, Right]) -> bool:
    """Print how far out, dq, dk and dv are from the exact ones. Returns whether rounding allows it.

    `of_ranks` holds what `chunks_of_rank` returned on each rank.
    """
    ok = True
    for name, chunks in zip(("out", "dq", "dk", "dv"), zip(*of_ranks, strict=True), strict=True):
        ok &= report(name, unshard(chunks, layout), right[name])
    return ok


def report_cases(
    world_size: int, whole: list[Tensor], attention: Callable[..., Tensor], shape: tuple[int, int] | None = None
) -> bool:
    """`report_ranks` for each of CASES, which new processes run as `chunks_of_cases`."""
    of_ranks = launch(chunks_of_cases, world_size, whole, CASES, attention, shape)
    (_, H, S, _), G, ok = whole[0].shape, whole[1].shape[1], True
    print(f"{len(of_ranks)} ranks, S = {S}, {H} query heads on {G}, float32, against full attention in float64")
    rights = {causal: exact_attention(*whole, causal=causal, fused_blocks=len(of_ranks)) for causal in (False, True)}
    for case, chunks in zip(CASES, zip(*of_ranks, strict=True), strict=True):
        print(f"{'causal, ' if case['causal'] else ''}{case['layout']}")
        ok &= report_ranks(chunks, case["layout"], rights[case["causal"]])
    return ok


def report_loop(name: str, results: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Print how far float64 results are from those of a plain loop. Returns whether that is rounding."""
    each = [(x - y).abs().max() / y.abs().max() for x, y in zip(results, right, strict=True)]
    off = torch.stack(each).max().item()  # NaN if one of them is
    fine = off < 2**12 * torch.finfo(torch.float64).eps  # a few thousand roundings of a sum
    print(f"{'ok   ' if fine else 'WRONG'} {name}: differs by {off:.1e}")
    return fine
