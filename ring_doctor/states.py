"""A case for a state ring, and the ring of states on paper: linear attention whose state goes from rank to rank.

    h_t = a_t h_(t-1) + k_t u_tᵀ        a_t = e^(log_decay_t); u_t = v_t, or β_t (v_t - a_t h_(t-1)ᵀ k_t) with beta
    o_t = scale h_tᵀ q_t
    y_t = Σ_d w_(n-1-d) x_(t-d)         a short convolution of n taps: x are the rows of q, one channel each

On paper a rank's tokens write from an empty state, and the state handed to it fades beside them. A mistake replaces one
of the steps. Gradients are those of autograd, so a state that is detached on its way is a mistake too.

Shapes: q, k, v and out (B, H, S, D), log_decay and beta (B, H, S), a state (B, H, D, D), x (B, H·D, S).

Before: case.py. After: mistakes_of_states.py, changes of the steps; questions.py, which asks.
Source: ../ringlab/training/linear_attention.py, token by token, gives the right results; Yang et al. 2025, section 3.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from ring_doctor.case import Case
from ring_doctor.paper_ring import NotOnPaper
from ringlab.support.rounding import Right
from ringlab.training.linear_attention import recurrence

TAPS = 4  # of the convolution


@dataclass(frozen=True)
class StateCase(Case):
    """A case for a function of q, k, v and the `given`, or, with `taps`, for a convolution of q alone."""

    given: tuple[str, ...] = ("log_decay", "beta")
    taps: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return ("q", "k", "v", *self.given)

    def whole(self) -> tuple[Tensor, ...]:
        """The inputs, and d_out. Keys have norm 1 and decays are 0.5 to 1, so that no state grows."""
        q, k, v, d_out = super().whole()
        generator = torch.Generator().manual_seed(self.seed + 1)
        decay, beta = torch.rand(2, *q.shape[:3], generator=generator, dtype=torch.float64)
        more = {"log_decay": (0.5 + decay / 2).log(), "beta": beta}
        k = k / k.norm(dim=-1, keepdim=True)
        return (q, k, v, *(more[name].to(q.dtype) for name in self.given), d_out)

    def mask(self) -> str:
        words = f"{self.taps} taps" if self.taps else " and ".join(("state", *self.given))
        return f"{words}, {self.layout}"

    def right(self) -> dict[str, Right]:
        """The right results, document by document, and how far rounding may move them."""
        return _right(self)


@lru_cache(maxsize=512)
def _right(case: StateCase) -> dict[str, Right]:
    """No map of a state enlarges it, so each of S tokens adds one rounding of D + 3 operations to what it holds."""
    outs, (inputs, d_out) = [], _leaves(case)
    for part in zip(*(x.split(list(case.documents or (case.seq_len,)), dim=2) for x in inputs), strict=True):
        if case.taps:
            x = channels(pad(part[0], (0, 0, case.taps - 1, 0)))
            outs.append(tokens(conv1d(x, weight(case).double()[:, None], groups=x.shape[1]), case))
        else:
            outs.append(recurrence(*part[:3], **dict(zip(case.given, part[3:], strict=True)))[0])
    exact = _results(case, torch.cat(outs, dim=2), inputs, d_out)
    size = max(float(x.norm()) for x in exact.values())
    wide = torch.promote_types(case.dtype, torch.float32)
    rounding = case.seq_len * (case.head_dim + 3) * torch.finfo(wide).eps * size
    return {name: Right(x, torch.full_like(x, rounding), case.dtype, "sums of states") for name, x in exact.items()}


def _leaves(case: StateCase) -> tuple[list[Tensor], Tensor]:
    *inputs, d_out = (x.double() for x in case.whole())
    return [x.requires_grad_() for x in inputs], d_out


def _results(case: StateCase, out: Tensor, inputs: list[Tensor], d_out: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(out, inputs, d_out, allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), **{f"d{name}": x for name, x in zip(case.names, gradients, strict=True)}}


def channels(x: Tensor) -> Tensor:
    """(B, H, C, D) as (B, H·D, C)."""
    return x.transpose(2, 3).flatten(1, 2)


def tokens(x: Tensor, case: Case) -> Tensor:
    """(B, H·D, C) as (B, H, C, D)."""
    return x.unflatten(1, (case.heads, case.head_dim)).transpose(2, 3)


def weight(case: Case) -> Tensor:
    """(H·D, TAPS): the taps of every channel."""
    numbers = torch.linspace(0.5, 1.5, case.heads * case.head_dim * TAPS, dtype=torch.float64)
    return numbers.view(-1, TAPS).to(case.dtype)


# On paper -----------------------------------------------------------------------------------------------------------

After = Callable[..., Tensor]  # ranks: the state after their tokens, one rank after the other, from an empty one


def right_token(h: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """The state after a token: k (..., D, 1), v (..., 1, D), decay and beta (..., 1, 1)."""
    h = decay * h
    return h + k @ (v if beta is None else beta * (v - k.mT @ h))


@dataclass(frozen=True)
class StateSteps:
    """The steps of a ring of states. Ranks and starts are those of the whole sequence, `at` the tokens of a rank."""

    token: Callable[..., Tensor] = right_token
    begins: Callable[[int, int, After], Tensor] = lambda rank, P, after: after(*range(rank))
    reads: Callable[[Tensor], Tensor] = lambda decay: decay  # of the handed state, as the rank's tokens read it
    passes: Callable[[Tensor], Tensor] = lambda decay: decay  # and as it passes through the rank
    starts: Callable[[Tensor, Tensor], Tensor] = lambda starts, at: starts[at]  # whether a token begins a document
    lent: Callable[[Tensor, int, int], Tensor] = lambda x, first, C: x  # what of the tokens before a rank comes to it


RIGHT_STATES = StateSteps()


def compute_states(case: StateCase, steps: StateSteps = RIGHT_STATES) -> dict[str, Tensor]:
    """Every result of a ring with these steps: {name: whole}. Raises NotOnPaper for a layout that is not contiguous."""
    if case.layout != "contiguous":
        raise NotOnPaper("a rank has several runs of tokens")
    inputs, d_out = _leaves(case)
    starts = torch.zeros(case.seq_len, dtype=torch.bool)
    starts[torch.tensor((case.documents or ())[:-1], dtype=torch.int64).cumsum(0)] = True
    parts = [case.positions(rank) for rank in range(case.world_size)]
    out = (_convolved if case.taps else _of_states)(case, steps, inputs, starts, parts)
    return _results(case, out, inputs, d_out)


def _of_states(case: StateCase, steps: StateSteps, inputs: list[Tensor], starts: Tensor, parts: list[Tensor]) -> Tensor:
    q, k, v = inputs[:3]
    more = dict(zip(case.given, inputs[3:], strict=True))
    decay, beta = more.get("log_decay", torch.zeros_like(q[..., 0])).exp(), more.get("beta")
    empty = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])

    def run(rank: int, h: Tensor, values: Tensor, fades: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        at, outs = parts[rank], []
        kept = fades(decay[:, :, at]) * ~steps.starts(starts, at)
        for i, t in enumerate(at.tolist()):
            betas = None if beta is None else beta[:, :, t, None, None]
            h = steps.token(h, k[:, :, t, :, None], values[:, :, t, None], kept[:, :, i, None, None], betas)
            outs.append(q[:, :, t, None] @ h * case.head_dim**-0.5)
        return torch.cat(outs, dim=2), h

    @cache
    def alone(rank: int) -> tuple[Tensor, Tensor]:
        return run(rank, empty, v, lambda decay: decay)

    @cache
    def after(*ranks: int) -> Tensor:
        *before, last = ranks or (None,)
        return empty if last is None else alone(last)[1] + run(last, after(*before), 0 * v, steps.passes)[1]

    ranks, P = range(case.world_size), case.world_size
    return torch.cat([alone(r)[0] + run(r, steps.begins(r, P, after), 0 * v, steps.reads)[0] for r in ranks], dim=2)


def _convolved(case: StateCase, steps: StateSteps, inputs: list[Tensor], starts: Tensor, parts: list[Tensor]) -> Tensor:
    x, taps, outs = inputs[0], weight(case).double().view(case.heads, 1, case.head_dim, TAPS), []
    for at in parts:
        first = int(at[0])
        row = torch.cat([steps.lent(x[:, :, :first], first, len(at)), x[:, :, at]], dim=2)
        of = steps.starts(starts, torch.arange(int(at[-1]) + 1)).cumsum(0)  # the document of each token
        shifted = [pad(row, (0, 0, d, 0))[:, :, : row.shape[2]] for d in range(TAPS)]
        same = [(pad(of, (d, 0), value=-1)[: len(of)] == of)[:, None] for d in range(TAPS)]
        y = sum(taps[..., TAPS - 1 - d] * shifted[d] * same[d] for d in range(TAPS))
        outs.append(y[:, :, first:])  # type: ignore[index]
    return torch.cat(outs, dim=2)


# A convolution as a function of q, k and v -------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """f(x, weight, ...) as f(q, k, v, ...), so that it is asked like a ring. x are the channels of q."""

    function: Callable[..., Any]

    @property
    def __signature__(self) -> inspect.Signature:
        given = inspect.signature(self.function)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        first = [inspect.Parameter(name, kind) for name in "qkv"]
        return given.replace(parameters=[*first, *list(given.parameters.values())[2:]])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        case = Case(1, heads=q.shape[1], head_dim=q.shape[3], dtype=q.dtype)
        return tokens(self.function(channels(q), weight(case).to(q.device), **options), case)
