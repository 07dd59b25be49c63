"""A short convolution over ranks: what else crosses a border. Linear layers mix each token with the k - 1 before it.

    y_t = Σ_d w_(k-1-d) x_(t-d),   d = 0 ... k-1, and t - d in the same document

A rank needs the last k - 1 tokens before its own, and they may lie on more than one rank when chunks are short. All
ranks gather the last k - 1 tokens of every run: few, so one message. In the backward pass each token that was lent
brings its gradient back: the sum of what all ranks found for it.

Shapes: x (B, N, C), N channels of C = S/P tokens, weight (N, k), bias (N,), as in torch's conv1d with N groups.

    $ python -m ringlab.training.short_convolution
    3 ranks, 7 tokens, 4 taps; chunks of [3, 2, 2] tokens: the last rank reads tokens of both others
    ok    out and gradient are those of one process: they differ by 4.4e-16

Before: state_ring.py. After: ../models/transformer.py, a model around the attention.
Source: Poli et al. 2023 (Hyena), section 3.2, short convolutions; Yang et al. 2025 (Gated DeltaNet), section 3.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringlab.basics.chunks import agree_on_chunks, needs_gradients
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.basics.ranks import neighbours
from ringlab.support.agreement import flat_group
from ringlab.support.processes import RankContext, launch
from ringlab.training.all_gather import all_gather, reduce_scatter
from ringlab.training.backward import differentiable_once
from ringlab.training.flash_ring import left_as_it_is
from ringlab.training.masks import Mask, lengths_of
from ringlab.training.partition import Partition
from ringlab.training.schedule import Group
from ringlab.training.state_ring import check_layout_of_states, runs_of


class Gathered(torch.autograd.Function):
    """The same tensor of every rank, (P, ...); backward the sum of what all ranks found for mine."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any) -> Tensor:
        ctx.group = group
        everyone = mine.new_empty(neighbours(group)[1], *mine.shape)
        all_gather(everyone.flatten(), mine.contiguous().flatten(), group=group)
        return everyone

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_everyone: Tensor) -> tuple[Tensor, None]:
        d_mine = torch.empty_like(d_everyone[0])
        reduce_scatter(d_mine.flatten(), d_everyone.contiguous().flatten(), group=ctx.group)
        return d_mine, None


@left_as_it_is
def ring_short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    documents: Sequence[int] | Tensor | None = None,
    layout: str = "contiguous",
    group: Group = None,
) -> Tensor:
    """This rank's tokens of a causal convolution over the whole sequence, differentiable once.

    x (B, N, C), weight (N, k), bias (N,) -> y (B, N, C) in x's dtype, summed in float32 at least. Before the first
    token of the sequence, and of each of the `documents` (their lengths), are zeros. The weight is the same on every
    rank; each gets its part of the gradient: the sum over the ranks is the whole. Raises the same ValueError on every
    rank where inputs do not fit or the ranks disagree. Every rank must call it and run its backward pass.
    """
    group = flat_group(group)

    def check(*_: Tensor) -> None:
        if x.dim() != 3 or weight.dim() != 2 or len(weight) != x.shape[1] or 0 in (*x.shape, *weight.shape):
            raise ValueError(
                f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; expected (B, N, C) and (N, k)"
            )
        if bias is not None and bias.shape != x.shape[1:2]:
            raise ValueError(f"bias has shape {tuple(bias.shape)}; expected (N,), {tuple(x.shape[1:2])}")
        check_layout_of_states(layout)
        Mask(documents=documents)

    learned = {name: y for name, y in (("x", x), ("weight", weight), ("bias", bias)) if y is not None}
    same: dict[str, Any] = {"shape of weight": weight.shape, "bias": bias is not None, "layout": layout}
    same |= {
        "documents": lengths_of(documents),
        "gradients": [name for name, y in learned.items() if needs_gradients(y)],
    }
    token = x.mT[:, None] if x.dim() == 3 else x  # (B, 1, C, N), as chunks of attention
    _, lengths = agree_on_chunks(token, token, token, 1.0, group, check=check, settings=lambda: same)
    partition = Partition(Mask(causal=True, documents=documents), layout, tuple(lengths))
    chain, tokens = runs_of(partition)
    rank, before = neighbours(group)[0], weight.shape[1] - 1

    wide, taps = x.to(accumulation_dtype(x.dtype)), weight.to(accumulation_dtype(x.dtype))
    mine = wide.split([n for owner, n in zip(chain, tokens, strict=True) if owner == rank], dim=2)
    at = partition.positions(rank)
    since = (at - partition.visible_keys(rank)[0][0]).to(x.device)  # tokens of the same document before each

    ends = [torch.nn.functional.pad(run, (before, 0))[..., run.shape[2] :] for run in mine]  # (B, N, k - 1)
    most = max(chain.count(r) for r in range(len(lengths)))
    lent = torch.stack([*ends, *[torch.zeros_like(ends[0])] * (most - len(ends))])
    everyone = Gathered.apply(lent, group)
    of_rank, ahead = [iter(each) for each in everyone], []
    nothing = everyone[0, 0, ..., :0]  # with it in the graph, the first rank too comes to the backward pass
    known = torch.cat([wide.new_zeros(*wide.shape[:2], before), nothing], dim=2)  # the k - 1 tokens before a run
    for owner, n in zip(chain, tokens, strict=True):
        if owner == rank:
            ahead.append(known)
        end = next(of_rank[owner])[..., max(0, before - n) :]
        known = torch.cat([known, end], dim=2)[..., end.shape[2] :]

    since_of_runs = since.split([run.shape[2] for run in mine])
    out = torch.cat([convolved(*each, taps) for each in zip(ahead, mine, since_of_runs, strict=True)], dim=2)
    return (out if bias is None else out + bias[:, None]).to(x.dtype)


def convolved(ahead: Tensor, run: Tensor, since: Tensor, taps: Tensor) -> Tensor:
    """The convolution of a run (B, N, n) behind the k - 1 tokens `ahead`; `since` (n,) says how many of them count."""
    k, n = taps.shape[1], run.shape[2]
    row = torch.cat([ahead, run], dim=2)
    parts = [taps[:, d, None] * row[..., d : d + n] * (since >= k - 1 - d) for d in range(k)]
    return torch.stack(parts).sum(dim=0)


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same on one process: x (B, N, S), weight (N, k), bias (N,) -> y (B, N, S)."""
    padded = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
    return torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight))


def chunks_on_rank(context: RankContext, x: Tensor, weight: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's tokens of the output and of the gradient of x."""
    mine, d_mine = (y.tensor_split(context.world_size, dim=2)[context.rank] for y in (x, d_out))
    mine.requires_grad_()
    out = ring_short_convolution(mine, weight)
    return out.detach(), torch.autograd.grad(out, mine, d_mine)[0]


def main() -> int:
    P, S, k = 3, 7, 4
    x, d_out = torch.randn(2, 1, 2, S, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, weight = x.requires_grad_(), torch.ones(2, k, dtype=x.dtype)
    right = short_convolution(x, weight)
    rights = right.detach(), torch.autograd.grad(right, x, d_out)[0]
    lengths = [len(chunk) for chunk in torch.arange(S).tensor_split(P)]
    print(f"{P} ranks, {S} tokens, {k} taps; chunks of {lengths} tokens: the last rank reads tokens of both others")
    of_ranks = launch(chunks_on_rank, P, x.detach(), weight, d_out)
    found = [torch.cat(parts, dim=2) for parts in zip(*of_ranks, strict=True)]
    off = max((y - z).abs().max().item() for y, z in zip(found, rights, strict=True))
    ok = off < 64 * torch.finfo(x.dtype).eps
    print(f"{'ok   ' if ok else 'WRONG'} out and gradient are those of one process: they differ by {off:.1e}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
