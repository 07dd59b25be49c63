"""What a sick ring is: a ring of this project, the patch that makes it sick, and the cases in which that shows.

And real rings from rows of the catalogue, where a row changes steps of the forward pass only; gradients by autograd:

from_table(CATALOGUE["two_seats"].variants[0])        a SickRing with this mistake
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ring_doctor.asking.case import Case
from ring_doctor.mistakes.paper_ring import RIGHT
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.ring.overlap import post
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


# From a row of the table --------------------------------------------------------------------------------------------


STEPS = {"rounds", "in_hand", "believed", "sees", "keys_and_values", "scale", "kv_heads"}
STEPS |= {"block_out", "block_lse", "merge", "combine"}


def moved(x, shape, group, distance=1):
    """x goes `distance` ranks on, and the tensor of that shape from `distance` ranks back arrives."""
    if distance % dist.get_world_size(group) == 0:
        return x.clone()
    received = x.new_empty(shape)
    for work in post([x.contiguous()], [received], group, distance=distance):
        work.wait()
    return received


class Hop(torch.autograd.Function):
    """`moved`, differentiable: the gradient goes back the same way."""

    @staticmethod
    def forward(ctx, x, shape, group):
        ctx.shape, ctx.group = x.shape, group
        return moved(x, shape, group)

    @staticmethod
    def backward(ctx, d_x):
        return moved(d_x, ctx.shape, ctx.group, -1), None, None


def attention(its, q, k, v, *, causal=False, layout="contiguous", documents=None, window=None, scale=None, group=None):
    """The steps of `its` on this rank. K and V are sent; all else, and all in float64, is as on paper."""
    lengths, rank, (B, H, _, D) = agree(lambda: k.shape[2], group), dist.get_rank(group), q.shape
    P, mask = len(lengths), (causal, layout, documents and tuple(documents), window)
    case = Case(P, sum(lengths), *mask, B, H, k.shape[1], D, q.dtype, scale, value_dim=v.shape[-1])
    kv, blocks = torch.cat((k, v), dim=-1).double(), {}
    for t in range(P):
        blocks[(rank - t) % P] = kv
        if t < P - 1:
            kv = Hop.apply(kv, (*kv.shape[:2], lengths[(rank - t - 1) % P], kv.shape[-1]), group)
    heads, scores, values, wide = its.kv_heads(case), [], [], q.double()  # once: its gradients are summed in float64
    for t in range(its.rounds(case, rank)):
        of_k, of_v = its.in_hand(case, rank, t)
        k_j, v_j = (x[:, heads] for x in its.keys_and_values(t, blocks[of_k][..., :D], blocks[of_v][..., D:]))
        seen = its.sees(case, rank, its.believed(case, rank, t))
        scores.append((its.scale(case) * wide @ k_j.mT).masked_fill(~seen, -torch.inf))
        values.append(v_j)
    out, lse = its.combine(its, case, scores, values)
    unused = 0 * sum(kv.sum() for kv in blocks.values())  # so that all ranks send back the gradients of all blocks
    return (out + unused).to(q.dtype), lse.to(accumulation_dtype(q.dtype))


def from_table(change, shows=always, takes=MASKED):
    """A real ring with this change of the steps; None if the change is not one of the forward pass alone."""
    steps = change(RIGHT)
    if not {field.name for field in fields(steps) if getattr(steps, field.name) != getattr(RIGHT, field.name)} <= STEPS:
        return None
    return SickRing(partial(attention, steps), shows=shows, takes=takes)


right = from_table(lambda steps: steps)
