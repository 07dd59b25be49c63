"""Checks of chapter 8a: the share of a merge, a kernel's lse made natural."""

import math
from functools import partial

import torch

from notebooks.source.checks.answers import Exercise, as_tensor, torch_generator


def plain_kernel(q, k, v, scale=1.0, causal=False, base=math.e):
    """Attention of q (Sq, D) over k and v (Sk, D): out (Sq, D) and lse (Sq,), the logarithm to this base."""
    q, k, v = (as_tensor(x) for x in (q, k, v))  # of numpy, too
    scores = scale * (q @ k.T) / q.shape[1] ** 0.5
    if causal:  # the last query sees all keys
        scores = scores.masked_fill(torch.ones_like(scores).tril(max(0, len(k) - len(q))) == 0, -math.inf)
    return torch.softmax(scores, dim=1) @ v, scores.logsumexp(dim=1) / math.log(base)


def _lses(random):
    size, place = (2, random.randint(1, 9)), random.uniform(-2e3, 2e3)
    return tuple(place + 3 * torch.randn(size, dtype=torch.float64, generator=torch_generator(random)))


LSE, LSE_J = torch.tensor([0.0, 1.0, -2.0]).double(), torch.tensor([0.0, 3.0, -2.5]).double()
MANY = torch.linspace(-5, 5, 7)
DEPENDS = "the share depends on the difference of the two only"
check_merging_share = Exercise(  # (lse, lse_j), both (Sq,) -> the share that the second has of the merged result
    right=lambda lse, lse_j: torch.sigmoid(lse_j - lse),
    wrong={
        "that is the share of what was merged before; lerp wants that of the new block": (
            lambda lse, lse_j: torch.sigmoid(lse - lse_j)
        ),
        "divide by the sum of both, e^lse + e^lse_j": lambda lse, lse_j: lse_j.exp(),
        "that is e^lse_j / e^lse; divide by the sum of both, e^lse + e^lse_j": lambda lse, lse_j: (lse_j - lse).exp(),
    },
    cases={
        "it is e^lse_j / (e^lse + e^lse_j)": [(LSE, LSE_J)],
        f"lse near 1000: e^1000 overflows; {DEPENDS}": [(LSE + 1000, LSE_J + 1000)],
        f"lse near -1000: e^-1000 is 0; {DEPENDS}": [(LSE - 1000, LSE_J - 1000)],
        "with 7 queries": [(MANY, -MANY)],
    },
    draw=_lses,
)


GENERATOR = torch.Generator().manual_seed(0)


def _named(kernel, q, k, v):
    """out, and the natural lse, whatever the kernel's base."""
    return dict(zip(("out", "lse"), plain_kernel(q, k, v, causal=kernel.keywords["causal"]), strict=True))


def _of(S, D, base, generator, causal=False):
    return partial(plain_kernel, causal=causal, base=base), *torch.randn(3, S, D, generator=generator)


NATURAL = "it was natural already; ask the kernel before you change its lse"
check_natural_lse = Exercise(  # kernel, q, k, v -> (out, natural lse), for a kernel whose lse is natural or in base 2
    right=_named,
    wrong={
        NATURAL: lambda kernel, q, k, v: {"lse": kernel(q, k, v)[1] * math.log(2)},
        "you return it as it came; ask the kernel, with one key of score 1": (
            lambda kernel, q, k, v: {"lse": kernel(q, k, v)[1]}
        ),
        "multiply by log 2, do not divide: log2(a) = log(a) / log(2)": lambda kernel, q, k, v: {
            "lse": kernel(q, k, v)[1] / math.log(kernel.keywords["base"])
        },
        "this is not what the kernel returns, whose causal mask is its own": lambda kernel, q, k, v: {
            "out": plain_kernel(q, k, v)[0]
        },
    },
    cases={
        "a kernel whose lse is natural": [_of(*size, math.e, GENERATOR) for size in ((6, 4), (3, 2), (5, 9))],
        "a kernel whose lse is in base 2; the base is a matter of lse only, out is right as it is": [
            _of(*size, 2, GENERATOR) for size in ((6, 4), (3, 2), (5, 9))
        ],
        "a kernel with a causal mask": [_of(4, 3, base, GENERATOR, causal=True) for base in (2, math.e)],
    },
    draw=lambda r: _of(r.randint(1, 9), r.randint(1, 12), r.choice((2, math.e)), torch_generator(r), r.random() < 0.5),
)
