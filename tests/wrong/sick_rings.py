"""Real rings, over real messages, a mistake in each: what the doctor must recognise, and what it cannot know.

    attention = Sick("last_block_skipped")      # pickles; call it on every rank: attention(q, k, v, scale=, group=)
    ALL["last_block_skipped"].shows(case)       # whether its results must be wrong in this case of asking/case.py

BY_HAND are rings that share nothing with the doctor's catalogue: patches of this project's rings; "name/variant" is
another ring with a mistake.
"""

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ringlab.ring import flash_ring, schedule
from ringlab.ring.flash_ring import flash_backward, ring_flash_attention
from ringlab.ring.fused_block import fused_forward
from ringlab.ring.overlap import post
from ringlab.ring.partition import Partition, Places
from ringlab.support.agreement import agree, members
from ringlab.ways import all_gather, all_to_all
from ringlab.ways.all_to_all import Exchange
from tests.mistakes import patch
from tests.rings import Circle

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


all_gather_attention = partial(ring_flash_attention, schedule=all_gather.AllGather)
all_to_all_attention = partial(ring_flash_attention, schedule=all_to_all.AllToAll)
FLASH = partial(ring_flash_attention, schedule=Circle)  # as other rings send sums: the catalogue tells their mistakes
right_pieces, right_to_tokens = Partition.pieces, Exchange.to_tokens


def flash(name, mistake):
    """A function that patches the flash ring or its schedule; a class gives a new object to each pass."""
    module = flash_ring if hasattr(flash_ring, name) else schedule
    return patch(module, name, mistake)


# The merge -----------------------------------------------------------------------------------------------------------


def base_2_forward(*block, **options):
    out, lse = fused_forward(*block, **options)
    return out, lse / math.log(2)


def unstabilised(out, lse, out_j, lse_j):
    a, b = lse.exp(), lse_j.exp()
    out.copy_((a[..., None] * out + b[..., None] * out_j.to(out.dtype)) / (a + b)[..., None])
    lse.copy_((a + b).log())


def in_float32(q, k, v, **options):
    return ring_flash_attention(*(x.float() for x in (q, k, v)), **options).to(q.dtype)


# The blocks that arrive ----------------------------------------------------------------------------------------------


def pieces(mistake):
    return patch(Partition, "pieces", mistake)


def last_block_skipped(partition, rank, block):
    """Nothing is computed of the block that arrives last, from rank r + 1."""
    world_size = len(partition.lengths)
    return () if world_size > 1 and block == (rank + 1) % world_size else right_pieces(partition, rank, block)


# Gradients -----------------------------------------------------------------------------------------------------------


def received_and_sent(sent, received, group, *, distance=1):
    """Of the last message both buffers are returned, the one for dk and the other for dv, each summed over its two."""
    works = post(sent, received, group, distance=distance)
    if distance == 1:
        return works
    for work in works:
        work.wait()
    came, went = (x[0].view(2, -1).sum(dim=0) for x in (received, sent))
    received[0].copy_(torch.cat((came, went)))
    return []


def own_kv(k, v, *, hops, **_):
    return ((k, v) for _ in range(hops + 1))


# The other ways -----------------------------------------------------------------------------------------------------


def back_as_they_came(exchange, wholes):
    """Out goes back as if its tokens were in order of rank."""
    if len(wholes) == 3:
        return right_to_tokens(exchange, wholes)
    lengths = [len(at) for at in exchange.order]
    in_order = [*map(Places, torch.arange(sum(lengths)).split(lengths))]
    return right_to_tokens(replace(exchange, order=in_order), wholes)


def not_added(total, parts, *, group, async_op):
    """Each rank keeps what its own queries found for its block."""
    rank, world_size = members(group)
    total.copy_(parts.view(world_size, -1)[rank])
    return mock.Mock()


# Mistakes that the catalogue does not hold ----------------------------------------------------------------------------


def moved(x, shape, group, distance=1):
    """x goes `distance` ranks on, and the tensor of that shape from `distance` ranks back arrives."""
    if distance % dist.get_world_size(group) == 0:
        return x.clone()
    received = x.new_empty(shape)
    for work in post([x.contiguous()], [received], group, distance=distance):
        work.wait()
    return received


def d_out_of_another_rank(q, k, v, out, lse, d_out, ring):
    return flash_backward(q, k, v, out, lse, moved(d_out, d_out.shape, ring.group), ring)


EQUAL = {"takes": CAUSAL, "equal_chunks": True}
BY_HAND = {
    "base_2_as_natural": SickRing(ring_flash_attention, flash("fused_forward", base_2_forward), always, CAUSAL),
    "unstabilised": SickRing(
        ring_flash_attention,
        flash("merge_into", unstabilised),
        lambda case: case.world_size > 1 and case.inputs == "large",
    ),
    "float32_inside": SickRing(in_float32, shows=lambda case: case.dtype == torch.float64, takes=MASKED),
    "last_block_skipped": SickRing(ring_flash_attention, pieces(last_block_skipped), takes=CAUSAL),
    "received_and_sent": SickRing(FLASH, flash("post", received_and_sent), **EQUAL),
    "own_queries_only/all_gather": SickRing(
        all_gather_attention, patch(all_gather, "reduce_scatter", not_added), takes=CAUSAL
    ),
    "keys_of_hop_0": SickRing(FLASH, patch(schedule, "arriving_blocks", own_kv), in_forward=False, **EQUAL),
    "block_left_out_in_backward/pieces": SickRing(
        ring_flash_attention, pieces(last_block_skipped), takes=CAUSAL, in_forward=False
    ),
    "all_to_all_back_in_wrong_token_order": SickRing(
        all_to_all_attention,
        patch(Exchange, "to_tokens", back_as_they_came),
        lambda case: case.layout != "contiguous" and case.world_size > 1,
        CAUSAL,
        heads=4,
    ),
}
UNKNOWN = {"d_out_of_another_rank": SickRing(FLASH, flash("flash_backward", d_out_of_another_rank), **EQUAL)}
ALL = {**BY_HAND, **UNKNOWN}
OPTIONS = {"causal": False, "layout": "contiguous", "documents": None, "window": None, "scale": None, "group": None}
ARGUMENTS = dict.fromkeys("qkv", inspect.Parameter.empty) | OPTIONS  # and their defaults


@dataclass(frozen=True)
class Sick:
    """The ring of this name: f(q, k, v), with those options that it takes."""

    name: str

    @property
    def __signature__(self):
        takes = {*"qkv", "scale", "group", *ALL[self.name].takes}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        given = [inspect.Parameter(name, kind, default=default) for name, default in ARGUMENTS.items() if name in takes]
        return inspect.Signature(given)

    def __call__(self, q, k, v, **options):
        return ALL[self.name](q, k, v, **options)
