"""What a sick ring is: a ring of this project, the patch that makes it sick, and the cases in which that shows."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ringlab.support.agreement import agree

MASKED = ("causal", "layout", "documents", "window")
CAUSAL = ("causal", "layout")


def always(case):
    return True


def from_2(case):
    return case.world_size > 1


@dataclass(frozen=True)
class SickRing:
    """A ring with a mistake. `shows` says in which cases its results must differ from right ones."""

    base: Callable[..., Any]  # a right ring: (q, k, v, **options) -> out, or (out, lse)
    patch: Callable[[], AbstractContextManager] = nullcontext  # makes it sick; a new one in each pass
    shows: Callable[[Any], bool] = from_2
    takes: tuple[str, ...] = ()  # besides scale and group: CAUSAL or MASKED
    grouped: bool = True
    heads: int = 2  # the least with which it is asked; an all-to-all needs one for each rank
    equal_chunks: bool = False  # refuses chunks of different lengths
    in_forward: bool = True  # and in the backward pass; False: in the backward pass only

    def __call__(self, q, k, v, *, group=None, **options):
        if self.equal_chunks and len(lengths := set(agree(lambda: k.shape[2], group))) > 1:
            raise ValueError(f"chunks of {sorted(lengths)} tokens; expected one length on all ranks")
        out, lse = Scoped.apply(q, k, v, self, {"group": group, **options})
        return out if lse is None else (out, lse)


class Scoped(torch.autograd.Function):
    """The sick ring as one operation, so that its patch is there when the backward pass runs, and only then."""

    @staticmethod
    def forward(ctx, q, k, v, sick, options):
        ctx.inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        ctx.sick = sick
        with torch.enable_grad(), sick.patch() if sick.in_forward else nullcontext():
            ctx.result = sick.base(*ctx.inputs, **options)
        ctx.result, lse = ctx.result if isinstance(ctx.result, tuple) else (ctx.result, None)
        if lse is not None:
            lse = lse.detach()
            ctx.mark_non_differentiable(lse)
        return ctx.result.detach(), lse

    @staticmethod
    def backward(ctx, d_out, _):
        with ctx.sick.patch():
            gradients = torch.autograd.grad(ctx.result, ctx.inputs, d_out, retain_graph=True, allow_unused=True)
        return *gradients, None, None
