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

    $ python -m ringlab.states.state_ring
    the gated delta rule on 4 ranks, S = 320, 4 heads of 32: out and gradients, beside token by token
    ok    hops, contiguous: differs by 9.6e-16
    ...

Before: linear_attention.py, the map of a chunk. After: short_convolution.py, what else crosses a border.
Source: Blelloch 1990, section 1.4, scans of linear recurrences; Sun et al. 2025 (LASP-2), algorithms 1 and 2, one
all-gather of states in each direction, for linear attention without the delta rule.
"""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.basics.chunks import agree_on_chunks, as_autocast, needs_gradients
from ringlab.ring.backward import differentiable_once, left_as_it_is
from ringlab.ring.layouts import layout_of, unshard
from ringlab.ring.masks import Mask, lengths_of
from ringlab.ring.partition import Partition
from ringlab.ring.schedule import Group, known_partition
from ringlab.states.linear_attention import Inputs, Map, checked_inputs, each_of, in_chunks, recurrence, states_along
from ringlab.support.agreement import agree, flat_group, members, one_pass
from ringlab.support.exchange import all_gather
from ringlab.support.expect import expect

Chain = Sequence[int]  # the rank of each run of tokens, in the order of the sequence


def unpacked(message: Tensor, like: Map) -> Map:
    """The map in a message (..., D, D + Dv or 1 + Dv), with as many columns as `like`: torch.cat(map, dim=-1) back."""
    return Map(*message.split([x.shape[-1] for x in like], dim=-1))


def by_hops(maps: Sequence[Map], chain: Chain, h: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """The state before each of this rank's runs, whose maps are given: it comes from the rank before, and goes on."""
    before: list[Tensor] = []
    for i, owner in enumerate(chain):
        if owner == members(group)[0]:
            if i > 0:
                h = torch.empty_like(h)
                dist.recv(h, group=group, group_src=chain[i - 1])
            before.append(h)
            if i + 1 < len(chain):
                dist.send(maps[len(before) - 1](h).contiguous(), group=group, group_dst=chain[i + 1])
    return before


def by_scan(maps: Sequence[Map], chain: Chain, h: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """The same, by maps of 1, 2, 4, ... runs: after each step a rank knows twice as many of those before it."""
    rank, P = members(group)
    place, (total,), before = chain.index(rank), maps, None  # total: of this run and those in `before`
    distance = 1
    while distance < P:
        message = torch.cat(total, dim=-1)
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
    rank, P = members(group)
    most = max(map(chain.count, chain))  # runs of a rank: the messages of all are as long
    mine = torch.stack(([torch.cat(one, dim=-1) for one in maps] * most)[:most])
    everyone = mine.new_empty(P, *mine.shape)
    all_gather(everyone.flatten(), mine.flatten(), group=group)
    of_rank = [iter(its_maps) for its_maps in everyone]
    states = states_along((unpacked(next(of_rank[owner]), maps[0]) for owner in chain), h)
    return [before for owner, before in zip(chain, states[:-1], strict=True) if owner == rank]


Way = Callable[[Sequence[Map], Chain, Tensor, ProcessGroup | None], list[Tensor]]
WAYS: dict[str, Way] = {"hops": by_hops, "scan": by_scan, "gather": by_gather}


def along(way: Way, chain: Chain, group: Any, runs: list[list[Map]], h: Tensor) -> list[list[Tensor]]:
    """The state before each chunk of this rank's runs, whose maps are given; h is the state before the sequence."""
    with one_pass(group):
        wholes = [reduce(lambda first, then: then.after(first), run) for run in runs]
        before = way(wholes, chain, h, group)
        return [states_along(run[:-1], state) for run, state in zip(runs, before, strict=True)]


class HandOn(torch.autograd.Function):
    """The state before each chunk of this rank's runs, (B, H, n, D, Dv) a run, and backward the gradients.

    It is one function for all chunks: autograd would keep and walk their maps one by one.
    """

    @staticmethod
    def forward(ctx: Any, way: Way, where: "Runs", group: Any, h: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
        """`maps` are keep and add of each run's chunks; h (B, H, D, Dv) is the state before the sequence."""
        runs = [each_of(Map(*pair)) for pair in zip(maps[::2], maps[1::2], strict=True)]
        states = tuple(torch.stack(of_run, dim=2) for of_run in along(way, where.chain, group, runs, h))
        ctx.way, ctx.chain, ctx.group, ctx.call = way, where.chain, group, where.call
        ctx.save_for_backward(*maps[::2], *states)
        return states

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *d_states: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: activation checkpointing computes them anew, and once only
        keeps, states, numbers = saved[: len(d_states)], saved[len(d_states) :], saved[0].shape[-1] == 1
        runs = [  # the other way: the gradient before a chunk = keepᵀ (that behind it) + what the chunk reads
            each_of(Map(keep if numbers else keep.mT, d))[::-1] for keep, d in zip(keeps, d_states, strict=True)
        ][::-1]
        zeros = torch.zeros_like(d_states[0][:, :, 0])
        agree(lambda: None, ctx.group, function=f"the backward pass of call {ctx.call}")
        behind = along(ctx.way, ctx.chain[::-1], ctx.group, runs, zeros)
        d_h = runs[-1][-1](behind[-1][-1]) if ctx.chain[0] == members(ctx.group)[0] else zeros
        d_maps: list[Tensor] = []
        for h, of_run in zip(states, behind[::-1], strict=True):
            d = torch.stack(of_run[::-1], dim=2)  # of the state behind each chunk
            d_maps += [(d * h).sum(dim=-1, keepdim=True) if numbers else d @ h.mT, d]
        return None, None, None, d_h, *d_maps


def check_layout_of_states(layout: str) -> None:
    """Raise ValueError for a layout that cuts the sequence at every token."""
    few = "contiguous or zigzag: the state passes every border between two ranks, and striped tokens have one each"
    expect(layout in ("contiguous", "zigzag"), f"layout is {layout}", few)


class Runs(NamedTuple):
    """Where a layout cuts the sequence into runs of tokens, and which of them this rank has."""

    scale: float
    chain: list[int]  # the rank of each run, in the order of the sequence
    mine: list[int]  # the lengths of this rank's runs
    since: Tensor  # (C,): how many tokens of its document stand before each token of this rank
    first: Tensor  # (C,): whether a token begins a document, but the first
    call: int = 0  # the number of the agreement on this call


def agree_on_runs(
    function: str,
    chunks: tuple[Tensor, Tensor, Tensor],
    inputs: dict[str, Tensor | None],
    scale: float | None,
    group: ProcessGroup | None,
    check: Callable[[], dict[str, Any]],
    documents: Sequence[int] | Tensor | None,
    layout: str,
) -> Runs:
    """The runs of this call; or the same ValueError on every rank, where `check` raises it or the ranks disagree.

    `chunks` are (B, H, C, ...). The ranks must give the same of the inputs, and need gradients of the same. What
    `check` returns must be the same too.
    """
    given, of_documents = {name: x for name, x in inputs.items() if x is not None}, lengths_of(documents)
    same: dict[str, Any] = {}

    def check_all(*_: Tensor) -> None:
        for name, x in given.items():
            expect(isinstance(x, Tensor), f"{name} is a {type(x).__name__}", "a tensor")
        same.update(check(), given=[*given], layout=layout, documents=of_documents)
        same["gradients"] = [name for name, x in given.items() if needs_gradients(x)]
        check_layout_of_states(layout)
        Mask(documents=documents)

    options: dict[str, Any] = {"function": function, "check": check_all, "settings": lambda: same}
    scale, lengths = agree_on_chunks(*chunks, scale, group, **options)
    partition = known_partition(Mask(True, of_documents), layout_of(layout), tuple(lengths))
    return runs_of(scale, partition, members(group)[0], chunks[0].device)._replace(call=lengths.number)


@lru_cache(maxsize=8)  # every layer of a model asks for the same: it is copied to the device once
@torch.inference_mode(False)  # an evaluation may be the first to ask, and a backward pass cannot use its tensors
def runs_of(scale: float, partition: Partition, rank: int, device: torch.device | None = None) -> Runs:
    owner = torch.empty(partition.seq_len, dtype=torch.int64)
    for r in range(len(partition.lengths)):
        owner[partition.positions(r)] = r
    chain, tokens = (x.tolist() for x in torch.unique_consecutive(owner, return_counts=True))
    mine = [length for r, length in zip(chain, tokens, strict=True) if r == rank]
    at, ((begin, _),) = partition.positions(rank), partition.visible_keys(rank)
    return Runs(scale, chain, mine, (at - begin).to(device), ((at == begin) & (at > 0)).to(device))


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

    checked: tuple[Inputs, Tensor]

    def check() -> dict[str, Any]:
        nonlocal checked  # made here, once: it may refuse what is given
        checked = checked_inputs(q, k, v, log_decay, beta, state)
        fits = way in WAYS and (way != "scan" or layout != "zigzag")
        expect(fits, f"way is {way!r}, layout {layout}", "hops or gather, or scan for contiguous chunks")
        return {"heads of v": v.shape[1:2], "dim of log_decay": getattr(log_decay, "ndim", None), "way": way}

    inputs = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "state": state}
    runs = agree_on_runs("ring_linear_attention", (q, k, v), inputs, scale, group, check, documents, layout)

    x, h = checked
    with torch.autocast(q.device.type, enabled=False):  # it would compute states in 16 bits
        if documents is not None:  # a token that begins a document forgets everything before it
            x = x._replace(log_decay=x.log_decay.masked_fill(runs.first[:, None], -torch.inf))
        none = [None] * len(runs.mine)
        of_runs = zip(*(none if y is None else y.split(runs.mine, dim=2) for y in x), strict=True)
        maps = [in_chunks(Inputs(*of_run), runs.scale) for of_run in of_runs]  # of its chunks
        reads, changes = zip(*maps, strict=True)
        states = HandOn.apply(WAYS[way], runs, group, h, *(y for run in changes for y in run))  # (B, H, n, D, Dv)
        outs = [read(h).flatten(2, 3)[:, :, :n] for read, h, n in zip(reads, states, runs.mine, strict=True)]
        last = Map(*(y[:, :, -1] for y in changes[-1]))
        out = torch.cat(outs, dim=2).to(q.dtype)
        return out, last(states[-1][:, :, -1]) if runs.chain[-1] == members(group)[0] else None


def main() -> int:
    from ringlab.ring.cases import chunks_of_rank, report_loop
    from ringlab.support.processes import launch

    B, H, S, D, P, ok = 1, 4, 320, 32, 4, True
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = torch.randn(4, B, H, S, D, generator=generator, dtype=torch.float64)
    beta, decay = torch.rand(2, B, H, S, generator=generator, dtype=torch.float64)
    whole = [q, k / k.norm(dim=-1, keepdim=True), v, (0.9 + 0.1 * decay).log(), beta]
    whole = [x.requires_grad_() for x in whole]
    out, _ = recurrence(*whole)
    right = [out, *torch.autograd.grad(out, whole, d_out)]
    print(f"the gated delta rule on {P} ranks, S = {S}, {H} heads of {D}: out and gradients, beside token by token")
    whole = [x.detach() for x in (*whole, d_out)]
    for layout, way in (("contiguous", "hops"), ("contiguous", "scan"), ("contiguous", "gather"), ("zigzag", "gather")):
        of_ranks = launch(chunks_of_rank, P, whole, partial(ring_linear_attention, layout=layout, way=way), layout)
        results = [unshard(chunks, layout) for chunks in zip(*of_ranks, strict=True)]
        ok &= report_loop(f"{way}, {layout}", results, right)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
