"""A case for a ring of states: linear attention whose state goes from rank to rank, or a short convolution.

    h_t = a_t h_(t-1) + k_t u_tᵀ        a_t = e^(log_decay_t); u_t = v_t, or β_t (v_t - a_t h_(t-1)ᵀ k_t) with beta
    o_t = scale h_tᵀ q_t
    y_t = Σ_d w_(n-1-d) x_(t-d)         a short convolution of n taps: x are the rows of q, one channel each

Shapes: q, k, v and out (B, H, S, D), beta (B, H, S), log_decay as beta or as k, a state (B, H, D, D), x (B, H·D, S).

On paper a rank's tokens write from an empty state, and the state handed to it fades beside them. The state of a
convolution is the last n tokens. One rank gives the right results, token by token.

Before: case.py. After: questions.py, which asks; mistakes/states.py, the steps that go wrong.
Source: Yang et al. 2025, section 3; ../../ringlab/states/linear_attention.py, with which a test compares it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ring_doctor.asking.case import Case
from ringlab.support.rounding import Right

TAPS = 4  # of the convolution


@dataclass(frozen=True)
class StateCase(Case):
    """A case for a function of q, k, v and the `given`, or, with `taps`, for a convolution of q alone."""

    given: tuple[str, ...] = ("log_decay", "beta")
    taps: int = 0
    each_key: bool = False  # a decay for each number of a key: (B, H, S, D)
    from_state: bool = False  # there is a state before the first token

    @property
    def names(self) -> tuple[str, ...]:
        return ("q", "k", "v", *self.given)

    def whole(self) -> tuple[Tensor, ...]:
        """The inputs, and d_out. Keys have norm 1 and decays are 0.5 to 1, so that no state grows."""
        q, k, v, d_out = super().whole()
        generator = torch.Generator().manual_seed(self.seed + 1)
        shapes = q.shape if self.each_key else q.shape[:3], q.shape[:3]
        decay, beta = (torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        more = {"log_decay": (0.5 + decay / 2).log(), "beta": beta}
        k = k / k.norm(dim=-1, keepdim=True)
        return (q, k, v, *(more[name].to(q.dtype) for name in self.given), d_out)

    @property
    def learned(self) -> dict[str, Tensor]:
        """The taps of a convolution, or the state before the first token."""
        generator = torch.Generator().manual_seed(self.seed + 2)
        shape = self.batch, self.heads, self.head_dim, self.head_dim
        state = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
        return {"weight": weight(self)} if self.taps else {"state": state} if self.from_state else {}

    def features(self) -> list[str]:
        return [*(["from a state"] if self.from_state else []), *super().features()]

    def mask(self) -> str:
        words = f"{self.taps} taps" if self.taps else " and ".join(("state", *self.given))
        return f"{words}{', a decay for each key' if self.each_key else ''}, {self.layout}"

    def right(self) -> dict[str, Right]:
        """The right results, and how far rounding may move them."""
        return right_of(self, compute_states)


@lru_cache(maxsize=512)
def right_of(case: Case, compute: Callable[[Any], dict[str, Tensor]]) -> dict[str, Right]:
    """Its exact results, of one rank, and their roundings: each of S tokens adds one of D + 3 operations to a sum.

    No map of a state enlarges what it holds; a softmax is a mean.
    """
    exact = compute(replace(case, world_size=1, layout="contiguous"))
    size = max(float(x.norm()) for x in exact.values())
    wide = torch.promote_types(case.dtype, torch.float32)
    rounding = case.seq_len * (case.head_dim + 3) * torch.finfo(wide).eps * size
    return {name: Right(x, torch.full_like(x, rounding), case.dtype, "sums over tokens") for name, x in exact.items()}


def leaves(case: Case) -> tuple[list[Tensor], Tensor]:
    """The inputs, those that are learned last, which need gradients, and d_out; float64."""
    *inputs, d_out = (x.double() for x in case.whole())
    inputs += [x.double() for x in case.learned.values()]
    return [x.requires_grad_() for x in inputs], d_out


def with_gradients(case: Case, out: Tensor, inputs: list[Tensor], d_out: Tensor) -> dict[str, Tensor]:
    """out and the gradients of the inputs, by name."""
    gradients = torch.autograd.grad(out, inputs, d_out, allow_unused=True, materialize_grads=True)
    names = [f"d{name}" for name in (*case.names, *case.learned)]
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


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


# On paper -------------------------------------------------------------------------------------------------------------

After = Callable[..., Tensor]  # ranks: the state after their tokens, one rank after the other, from an empty one


def right_token(h: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """The state after a token: k (..., D, 1), v (..., 1, D), decay (..., 1 or D, 1), beta (..., 1, 1)."""
    h = decay * h
    return h + k @ (v if beta is None else beta * (v - k.mT @ h))


def moved_on(h: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """The last TAPS tokens (..., TAPS, D) of a convolution after token v, the newest first: its state."""
    return torch.cat([v, decay * h[..., :-1, :]], dim=-2)


def all_before(rank: int, P: int, after: After) -> Tensor:
    return after(*range(rank))


@dataclass(frozen=True)
class StateSteps:
    """The steps of a ring of states. Ranks and starts are those of the whole sequence, `at` the tokens of a rank."""

    token: Callable[..., Tensor] = right_token
    begins: Callable[[int, int, After], Tensor] = all_before  # what a rank of P begins with
    lent: Callable[[int, int, After], Tensor] = all_before  # the same in a convolution
    reads: Callable[[Tensor], Tensor] = lambda decay: decay  # of the handed state, as the rank's tokens read it
    passes: Callable[[Tensor], Tensor] = lambda decay: decay  # and as it passes through the rank
    starts: Callable[[Tensor, Tensor], Tensor] = lambda starts, at: starts[at]  # whether a token begins a document


RIGHT_STATES = StateSteps()


def compute_states(case: StateCase, steps: StateSteps = RIGHT_STATES) -> dict[str, Tensor]:
    """Every result of a ring with these steps: {name: whole}. Raises RuntimeError unless it is contiguous."""
    if case.layout != "contiguous":
        raise RuntimeError("a rank has several runs of tokens")
    inputs, d_out = leaves(case)
    x = dict(zip((*case.names, *case.learned), inputs, strict=True))
    k, beta, decay = x["k"], x.get("beta"), x.get("log_decay", torch.zeros_like(x["q"][..., 0])).exp()
    decay = decay if case.each_key else decay[..., None]
    starts = torch.zeros(case.seq_len, dtype=torch.bool)
    starts[torch.tensor((case.documents or ())[:-1], dtype=torch.int64).cumsum(0)] = True
    weight = x.get("weight", inputs[0].new_zeros(case.heads, case.head_dim, TAPS))
    taps = weight.view(case.heads, case.head_dim, TAPS).mT.flip(1)  # (H, TAPS, D), the newest first
    token, begins, v = (moved_on, steps.lent, x["q"]) if case.taps else (steps.token, steps.begins, x["v"])
    empty = v.new_zeros(case.batch, case.heads, TAPS if case.taps else case.head_dim, case.head_dim)

    def run(rank: int, h: Tensor, values: Tensor, fades: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        at, outs = case.positions(rank), []
        kept = fades(decay[:, :, at]) * ~steps.starts(starts, at)[:, None]
        for i, t in enumerate(at.tolist()):
            betas = None if beta is None else beta[:, :, t, None, None]
            h = token(h, k[:, :, t, :, None], values[:, :, t, None], kept[:, :, i, :, None], betas)
            scaled = x["q"][:, :, t, None] * case.head_dim**-0.5
            outs.append((taps * h).sum(dim=2, keepdim=True) if case.taps else scaled @ h)
        return torch.cat(outs, dim=2), h

    @cache
    def alone(rank: int) -> tuple[Tensor, Tensor]:
        return run(rank, empty, v, lambda decay: decay)

    @cache
    def after(*ranks: int) -> Tensor:
        *before, last = ranks or (None,)
        first = x.get("state", empty)
        return first if last is None else alone(last)[1] + run(last, after(*before), 0 * v, steps.passes)[1]

    ranks, P = range(case.world_size), case.world_size
    out = torch.cat([alone(r)[0] + run(r, begins(r, P, after), 0 * v, steps.reads)[0] for r in ranks], dim=2)
    return with_gradients(case, out, inputs, d_out)


# A convolution as a function of q, k and v -------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """f(x, weight, ...) as f(q, k, v, weight, ...), so that it is asked like a ring. x are the channels of q."""

    function: Callable[..., Any]

    @property
    def __signature__(self) -> inspect.Signature:
        given = inspect.signature(self.function)
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (*"qkv", "weight")]
        return given.replace(parameters=[*first, *list(given.parameters.values())[2:]])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
        case = Case(1, heads=q.shape[1], head_dim=q.shape[3])
        return tokens(self.function(channels(q), weight, **options), case)
