"""A case for a ring of states: linear attention whose state goes from rank to rank, or a short convolution.

    h_t = a_t h_(t-1) + k_t u_tᵀ        a_t = e^(log_decay_t); u_t = v_t, or β_t (v_t - a_t h_(t-1)ᵀ k_t) with beta
    o_t = scale h_tᵀ q_t
    y_t = Σ_d w_(n-1-d) x_(t-d)         a short convolution of n taps: x are the rows of q, one channel each

Shapes: q, k, v and out (B, H, S, D), beta (B, H, S), log_decay as beta or as k, a state (B, H, D, D), x (B, H·D, S).

Before: case.py. After: questions.py, which asks; mistakes/states.py, the ring of states on paper.
Source: ../../ringlab/states/linear_attention.py gives the right results, token by token.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from ring_doctor.asking.case import Case
from ringlab.states.linear_attention import recurrence
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
        """The right results, document by document, and how far rounding may move them."""
        return right_of(self, exact_states)


@lru_cache(maxsize=512)
def right_of(case: Case, compute: Callable[[Any], dict[str, Tensor]]) -> dict[str, Right]:
    """Its exact results, and their roundings: each of S tokens adds one of D + 3 operations to a sum.

    No map of a state enlarges what it holds; a softmax is a mean.
    """
    exact = compute(case)
    size = max(float(x.norm()) for x in exact.values())
    wide = torch.promote_types(case.dtype, torch.float32)
    rounding = case.seq_len * (case.head_dim + 3) * torch.finfo(wide).eps * size
    return {name: Right(x, torch.full_like(x, rounding), case.dtype, "sums over tokens") for name, x in exact.items()}


def exact_states(case: StateCase) -> dict[str, Tensor]:
    outs, (inputs, d_out) = [], leaves(case)
    of_tokens, learned = inputs[: len(case.names)], dict(zip(case.learned, inputs[len(case.names) :], strict=True))
    for part in zip(*(x.split(list(case.documents or (case.seq_len,)), dim=2) for x in of_tokens), strict=True):
        if case.taps:
            x = channels(pad(part[0], (0, 0, case.taps - 1, 0)))
            outs.append(tokens(conv1d(x, learned["weight"][:, None], groups=x.shape[1]), case))
        else:
            more: dict[str, Any] = dict(zip(case.given, part[3:], strict=True))
            more |= {} if outs else learned  # the first document begins with the state
            outs.append(recurrence(*part[:3], **more)[0])
    return with_gradients(case, torch.cat(outs, dim=2), inputs, d_out)


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
