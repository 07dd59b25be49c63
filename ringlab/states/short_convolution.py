"""A short convolution over ranks: what else crosses a border. Linear layers mix each token with the k - 1 before it.

    y_t = Σ_d w_(k-1-d) x_(t-d),   d = 0 ... k-1, and t - d in the same document

A rank needs the last k - 1 tokens before its own, and they may lie on more than one rank when chunks are short. They
are a state too: n tokens move it along by n places, and put themselves behind. So the ring of states hands it on. In
the backward pass each token that was lent gets its gradient back: the sum of what all ranks found for it.

Shapes: x (B, N, C), N channels of C = S/P tokens, weight (N, k), bias (N,), as in torch's conv1d with N groups.

    $ python -m ringlab.states.short_convolution
    3 ranks, 7 tokens, 4 taps; chunks of [3, 2, 2] tokens: the last rank reads tokens of both others
    ok    out and gradient, beside one process: differs by 1.1e-16

Before: state_ring.py. After: ../models/transformer.py, a model around the attention.
Source: Poli et al. 2023 (Hyena), section 3.2, short convolutions; Yang et al. 2025 (Gated DeltaNet), section 3.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.ring.backward import left_as_it_is
from ringlab.ring.schedule import Group
from ringlab.states.linear_attention import Map
from ringlab.states.state_ring import HandOn, agree_on_runs, by_gather
from ringlab.support.agreement import flat_group
from ringlab.support.expect import expect


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

    def check() -> dict[str, Any]:
        fits = x.dim() == 3 and weight.dim() == 2 and len(weight) == x.shape[1] and 0 not in (*x.shape, *weight.shape)
        expect(fits, f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}", "(B, N, C) and (N, k)")
        if bias is not None and bias.shape != x.shape[1:2]:
            raise ValueError(f"bias has shape {tuple(bias.shape)}; expected (N,), {tuple(x.shape[1:2])}")
        return {"shape of weight": weight.shape}

    token = x.mT[:, None] if isinstance(x, Tensor) and x.dim() == 3 else x  # (B, 1, C, N), as chunks of attention
    inputs, called = {"x": x, "weight": weight, "bias": bias}, ("ring_short_convolution", (token, token, token))
    runs = agree_on_runs(*called, inputs, 1.0, group, check, documents, layout)

    wide, taps = x.to(accumulation_dtype(x.dtype)), weight.to(accumulation_dtype(x.dtype))
    mine, before, since = wide.split(runs.mine, dim=2), taps.shape[1] - 1, runs.since.split(runs.mine)
    nothing = wide.new_zeros(len(x), 1, before, x.shape[1])
    maps = [y for run in mine for y in pushed(run, before)]
    states = HandOn.apply(by_gather, runs, group, nothing, *maps)
    ahead = [state[:, 0, 0].mT for state in states]  # (B, N, k - 1)
    out = torch.cat([convolved(*run, taps) for run in zip(ahead, mine, since, strict=True)], dim=2)
    return (out if bias is None else out + bias[:, None]).to(x.dtype)


def pushed(run: Tensor, before: int) -> Map:
    """What a run (B, N, n) does to the last k - 1 tokens, a state (B, 1, k - 1, N): they move along by n places."""
    B, _, n = run.shape
    keep = pad(torch.eye(before, dtype=run.dtype, device=run.device), (n, 0))[:, :before]
    return Map(keep.expand(B, 1, 1, -1, -1), pad(run, (before, 0))[..., n:].mT[:, None, None])


def convolved(ahead: Tensor, run: Tensor, since: Tensor, taps: Tensor) -> Tensor:
    """The convolution of a run (B, N, n) behind the k - 1 tokens `ahead`; `since` (n,) says how many of them count."""
    k, n = taps.shape[1], run.shape[2]
    row = torch.cat([ahead, run], dim=2)
    parts = [taps[:, d, None] * row[..., d : d + n] * (since >= k - 1 - d) for d in range(k)]
    return torch.stack(parts).sum(dim=0)


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same on one process: x (B, N, S), weight (N, k), bias (N,) -> y (B, N, S)."""
    return conv1d(pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight))


def main() -> int:
    from ringlab.ring.cases import chunks_of_rank, report_loop
    from ringlab.support.processes import launch

    P, S, k = 3, 7, 4
    x, d_out = torch.randn(2, 1, 2, S, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, weight = x.requires_grad_(), torch.ones(2, k, dtype=x.dtype)
    right = short_convolution(x, weight)
    rights = right.detach(), torch.autograd.grad(right, x, d_out)[0]
    lengths = [len(chunk) for chunk in torch.arange(S).tensor_split(P)]
    print(f"{P} ranks, {S} tokens, {k} taps; chunks of {lengths} tokens: the last rank reads tokens of both others")
    attention = partial(ring_short_convolution, weight=weight)
    of_ranks = launch(chunks_of_rank, P, [x.detach(), d_out], attention, "contiguous")
    results = [torch.cat(parts, dim=2) for parts in zip(*of_ranks, strict=True)]
    return 0 if report_loop("out and gradient, beside one process", results, rights) else 1


if __name__ == "__main__":
    sys.exit(main())
