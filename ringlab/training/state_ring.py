"""A ring of states: linear attention over the ranks. There are no keys to send, so the state travels, and its gradient.

    a rank's tokens are one affine map of the state:    h_out = keep h_in + add
    forward     the state before a rank's tokens  =  the maps of all tokens before them, one after the other
    backward    d_h_in = keepᵀ d_h_out + d_read: an affine map too, and it goes the other way

So one function hands on states and gradients. Three ways to do it, for P ranks:

    hops      a rank waits for the state, maps it, and sends it on: P - 1 messages of a state, one after the other
    scan      maps are put together, of 1, 2, 4, ... ranks: ⌈log₂ P⌉ messages of a map, all ranks at the same time
    gather    every rank gets the maps of all, and puts together what stands before it: one all-gather

Everything else is local and needs no message. The bytes do not depend on S: a state is B·H·D·Dv numbers, in float32 at
least, and `keep` is one number a head, or D x D for the delta rule.

A rank may hold several runs of tokens. In the zigzag layout, which balances the softmax layers of a model, it holds
two: each is a map, and the chain of maps passes the rank twice. A scan needs one run a rank, in order. In the striped
layout each token is a run of its own, which is refused.

Shapes: as in linear_attention.py, with C = S/P tokens on each of P ranks.

    $ python -m ringlab.training.state_ring
    4 ranks, S = 512, 4 heads of 32, float64: the gated delta rule, beside token by token
    ok    hops, contiguous: out and five gradients differ by 9.7e-16 at most
    ...

Before: linear_attention.py, the map of a chunk. After: short_convolution.py, what else crosses a border.
Source: Blelloch 1990, section 1.4, scans of linear recurrences; Sun et al. 2025 (LASP-2), algorithms 1 and 2, one
all-gather of states in each direction, for linear attention without the delta rule.
"""

import sys
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.basics.chunks import agree_on_chunks, as_autocast, needs_gradients
from ringlab.basics.ranks import neighbours
from ringlab.support.agreement import flat_group
from ringlab.support.processes import RankContext, launch
from ringlab.training.all_gather import all_gather
from ringlab.training.backward import differentiable_once
from ringlab.training.flash_ring import left_as_it_is
from ringlab.training.layouts import shard, unshard
from ringlab.training.linear_attention import (
    Inputs,
    Map,
    checked_inputs,
    each_of,
    empty_state,
    in_chunks,
    outputs,
    recurrence,
    states_along,
)
from ringlab.training.masks import Mask, lengths_of
from ringlab.training.partition import Partition
from ringlab.training.schedule import Group

Chain = Sequence[int]  # the rank of each run of tokens, in the order of the sequence


def packed(one: Map) -> Tensor:
    """A map as one message."""
    return torch.cat([one.keep.flatten(), one.add.flatten()])


def unpacked(message: Tensor, like: Map) -> Map:
    """The map in a message, in the shapes of `like`."""
    keep, add = message.split([like.keep.numel(), like.add.numel()])
    return Map(keep.view_as(like.keep), add.view_as(like.add))


def by_hops(maps: Sequence[Map], chain: Chain, h: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """The state before each of this rank's runs, whose maps are given: it comes from the rank before, and goes on."""
    rank, before = neighbours(group)[0], []
    for i, owner in enumerate(chain):
        if owner != rank:
            continue
        if i > 0 and chain[i - 1] != rank:
            h = torch.empty_like(h)
            dist.recv(h, group=group, group_src=chain[i - 1])
        before.append(h)
        h = maps[len(before) - 1](h)
        if i + 1 < len(chain) and chain[i + 1] != rank:
            dist.send(h.contiguous(), group=group, group_dst=chain[i + 1])
    return before


def by_scan(maps: Sequence[Map], chain: Chain, h: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """The same, by maps of 1, 2, 4, ... runs: after each step a rank knows twice as many of those before it."""
    rank, P, _, _ = neighbours(group)
    place, (total,), before = chain.index(rank), maps, None  # total: of this run and those in `before`
    distance = 1
    while distance < P:
        message = packed(total)
        arriving, messages = torch.empty_like(message), []
        if place >= distance:
            messages.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=chain[place - distance]))
        if place + distance < P:
            messages.append(dist.P2POp(dist.isend, message, group=group, group_peer=chain[place + distance]))
        for work in dist.batch_isend_irecv(messages) if messages else []:  # a rank in the middle may have none
            work.wait()
        if place >= distance:
            earlier = unpacked(arriving, total)
            before, total = before.after(earlier) if before else earlier, total.after(earlier)
        distance *= 2
    return [before(h) if before else h]


def by_gather(maps: Sequence[Map], chain: Chain, h: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """The same, from the maps of all ranks."""
    rank, P, _, _ = neighbours(group)
    runs = max(chain.count(r) for r in range(P))
    mine = torch.cat([packed(one) for one in maps])
    mine = torch.nn.functional.pad(mine, (0, mine.numel() // len(maps) * (runs - len(maps))))  # all messages alike
    everyone = mine.new_empty(P * mine.numel())
    all_gather(everyone, mine, group=group)
    of_rank = [iter(part.view(runs, -1)) for part in everyone.view(P, -1)]
    before = []
    for owner in chain:
        if owner == rank:
            before.append(h)
            if len(before) == len(maps):
                break
        h = unpacked(next(of_rank[owner]), maps[0])(h)
    return before


Way = Callable[[Sequence[Map], Chain, Tensor, ProcessGroup | None], list[Tensor]]
WAYS: dict[str, Way] = {"hops": by_hops, "scan": by_scan, "gather": by_gather}


def together(maps: Map) -> Map:
    """One map in place of those of n chunks."""
    return reduce(lambda first, then: then.after(first), each_of(maps))


class HandOn(torch.autograd.Function):
    """The states along each of this rank's runs, as `states_along` gives them, and backward their gradients.

    It is one function for a whole run: autograd would keep and walk the maps of all chunks one by one.
    """

    @staticmethod
    def forward(ctx: Any, way: Way, chain: Chain, group: Any, h: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
        """`maps` are keep and add of each run's chunks; h (B, H, D, Dv) is the state before the sequence."""
        runs = [Map(*pair) for pair in zip(maps[::2], maps[1::2], strict=True)]
        before = way([together(run) for run in runs], chain, h, group)
        states = tuple(states_along(*each) for each in zip(runs, before, strict=True))
        ctx.way, ctx.chain, ctx.group = way, chain, group
        ctx.save_for_backward(*maps[::2], *states)
        return states

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *d_states: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: activation checkpointing computes them anew, and once only
        keeps, states = saved[: len(d_states)], saved[len(d_states) :]
        d_after = [d[:, :, -1] for d in d_states]  # of the state after each run
        numbers = keeps[0].shape[-1] == 1
        runs = [  # the other way: d_h before a chunk = keepᵀ d_h after it + d_read
            Map((keep if numbers else keep.mT).flip(2), d[:, :, :-1].flip(2))
            for keep, d in zip(keeps, d_states, strict=True)
        ]
        wholes = [one._replace(add=one(d)) for one, d in zip(map(together, runs), d_after, strict=True)]
        behind = ctx.way(wholes[::-1], ctx.chain[::-1], torch.zeros_like(d_after[0]), ctx.group)[::-1]
        d_along = [states_along(run, d + more).flip(2) for run, d, more in zip(runs, d_after, behind, strict=True)]
        d_maps: list[Tensor] = []
        for keep, along, d in zip(keeps, states, d_along, strict=True):
            h, d = along[:, :, :-1], d[:, :, 1:]  # the state before each chunk, the gradient of that after it
            d_maps += [(d * h).sum_to_size(keep.shape) if numbers else d @ h.mT, d]
        first = ctx.chain[0] == neighbours(ctx.group)[0]
        return None, None, None, d_along[0][:, :, 0] if first else torch.zeros_like(d_after[0]), *d_maps


def check_layout_of_states(layout: str) -> None:
    """Raise ValueError for a layout that cuts the sequence at every token."""
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(
            f"layout is {layout}; expected contiguous or zigzag: the state passes every border between two ranks, and "
            f"in the striped layout each token has one"
        )


def runs_of(partition: Partition) -> tuple[list[int], list[int]]:
    """The chain of ranks, and where this layout cuts: the lengths of all runs, in the order of the sequence."""
    owner = torch.empty(partition.seq_len, dtype=torch.int64)
    for r in range(len(partition.lengths)):
        owner[partition.positions(r)] = r
    chain, lengths = torch.unique_consecutive(owner, return_counts=True)
    return chain.tolist(), lengths.tolist()


@left_as_it_is
def ring_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    documents: Sequence[int] | Tensor | None = None,
    layout: str = "contiguous",
    group: Group = None,
    way: str = "gather",
) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of `linear_attention` over the whole sequence, differentiable once.

    q, k (B, H, C, D), v (B, H, C, Dv), log_decay (B, H, C) or (B, H, C, D), beta (B, H, C): this rank's chunks, as
    `ringlab.shard` cuts them; contiguous chunks may have any lengths. `state` (B, H, D, Dv), the same on every rank, is
    what was there before the first token. Each rank gets its part of its gradient: the sum over the ranks is the whole.
    `documents` are the lengths of packed documents: each begins with an empty state, but the first with `state`. `way`
    is "hops", "scan" or "gather". Returns out (B, H, C, Dv), in q's dtype, and the state after the last token, in
    float32 at least, on the rank that has this token; None on the others. Every rank must call it and run its backward
    pass.

    Raises the same ValueError on every rank, before any message, where inputs do not fit, the ranks disagree, or layout
    and way do not fit. Sun et al. 2025 (LASP-2), algorithms 1 and 2.
    """
    group = flat_group(group)
    q, k, v = as_autocast(q, k, v)

    def check(q: Tensor, k: Tensor, v: Tensor) -> None:
        checked_inputs(q, k, v, log_decay, beta)
        Mask(documents=documents)
        check_layout_of_states(layout)
        if way not in WAYS or (way == "scan" and layout == "zigzag"):
            raise ValueError(f"way is {way!r}, layout {layout}; expected hops or gather, or scan for contiguous chunks")
        shape = (len(q), max(x.shape[1] for x in (q, k, v)), k.shape[3], v.shape[3])
        if state is not None and state.shape != shape:
            raise ValueError(f"state has shape {tuple(state.shape)}; expected (B, H, D, Dv), {shape}")

    inputs = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "state": state}
    given = {name: x for name, x in inputs.items() if x is not None}
    same: dict[str, Any] = {"heads of v": v.shape[1:2], "given": [*given], "layout": layout, "way": way}
    same |= {"dim of log_decay": getattr(log_decay, "ndim", None)}
    same |= {"documents": lengths_of(documents), "gradients": [name for name, x in given.items() if needs_gradients(x)]}
    scale, lengths = agree_on_chunks(q, k, v, scale, group, check=check, settings=lambda: same)
    partition = Partition(Mask(documents=documents), layout, tuple(lengths))
    chain, tokens = runs_of(partition)
    rank = neighbours(group)[0]
    mine = [length for owner, length in zip(chain, tokens, strict=True) if owner == rank]

    x = checked_inputs(q, k, v, log_decay, beta)
    if documents is not None:  # a token that begins a document forgets everything before it
        starts = torch.isin(partition.positions(rank), torch.tensor(partition.mask.documents).cumsum(dim=0))
        x = x._replace(log_decay=x.log_decay.masked_fill(starts.to(q.device)[:, None], -torch.inf))
    parts = zip(*([None] * len(mine) if y is None else y.split(mine, dim=2) for y in x), strict=True)
    chunks = [in_chunks(Inputs(*part), scale) for part in parts]
    h = empty_state(x) if state is None else state.to(x.k.dtype)
    states = HandOn.apply(WAYS[way], chain, group, h, *(y for run in chunks for y in run.map))
    out = torch.cat([outputs(*each) for each in zip(chunks, states, mine, strict=True)], dim=2)
    return out.to(q.dtype), states[-1][:, :, -1].clone() if chain[-1] == rank else None


def chunks_on_rank(context: RankContext, whole: Sequence[Tensor], layout: str, way: str) -> list[Tensor]:
    """This rank's chunks of out and of the gradients of all inputs, for the whole inputs and d_out (B, H, S, ...)."""
    *inputs, d_out = (shard(x, layout, context.rank, context.world_size) for x in whole)
    inputs = [x.requires_grad_() for x in inputs]
    out, _ = ring_linear_attention(*inputs, layout=layout, way=way)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def main() -> int:
    B, H, S, D, P, ok = 1, 4, 512, 32, 4, True
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = torch.randn(4, B, H, S, D, generator=generator, dtype=torch.float64)
    beta, decay = torch.rand(2, B, H, S, generator=generator, dtype=torch.float64)
    whole = [q, k / k.norm(dim=-1, keepdim=True), v, (0.9 + 0.1 * decay).log(), beta]
    whole = [x.requires_grad_() for x in whole]
    out, _ = recurrence(*whole)
    right = [out, *torch.autograd.grad(out, whole, d_out)]
    print(f"{P} ranks, S = {S}, {H} heads of {D}, float64: the gated delta rule, beside token by token")
    whole = [x.detach() for x in (*whole, d_out)]
    for layout, way in (("contiguous", "hops"), ("contiguous", "scan"), ("contiguous", "gather"), ("zigzag", "gather")):
        of_ranks = launch(chunks_on_rank, P, whole, layout, way)
        found = [unshard(chunks, layout) for chunks in zip(*of_ranks, strict=True)]
        off = max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(found, right, strict=True))
        fine = off < 64 * S**0.5 * torch.finfo(out.dtype).eps
        print(f"{'ok   ' if fine else 'WRONG'} {way}, {layout}: out and five gradients differ by {off:.1e} at most")
        ok &= fine
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
