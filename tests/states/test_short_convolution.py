"""The short convolution over ranks against conv1d of each document alone, in float64: out and all gradients."""

import re

import pytest
import torch
import torch.nn.functional as F

from ringlab.ring.layouts import positions
from ringlab.states.short_convolution import ring_short_convolution
from ringlab.support.rounding import Right
from tests.attention import SEED, assert_right
from tests.mistakes import all_of, refusal


def inputs(S, k, dtype, N=3):
    generator = torch.Generator().manual_seed(S + 100 * SEED)
    x, d_out = torch.randn(2, 2, N, S, generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(N, k, generator=generator).double(), torch.randn(N, generator=generator).double()
    return [y.to(dtype) for y in (x, weight, bias, d_out)]


def exact(four, documents, size=torch.Tensor.double):
    """out and the gradients; with size=abs the sizes of their terms."""
    *leaves, d_out = [size(y).double() for y in four]
    x, weight, bias = (y.requires_grad_() for y in leaves)
    k = weight.shape[1]
    parts = [
        F.conv1d(F.pad(part, (k - 1, 0)), weight[:, None], bias, groups=len(bias)) for part in x.split(documents, dim=2)
    ]
    out = torch.cat(parts, dim=2)
    return [out.detach(), *torch.autograd.grad(out, (x, weight, bias), d_out)]


def on_rank(context, four, lengths, options):
    S, P = four[0].shape[2], context.world_size
    at = positions(options.get("layout", "contiguous"), S, context.rank, P)
    if lengths:
        at = torch.arange(S).split(lengths)[context.rank]
    x, weight, bias, d_out = four
    leaves = [y.clone().requires_grad_() for y in (x[..., at], weight, bias)]
    out = ring_short_convolution(*leaves, **options)
    return at, [out.detach(), *torch.autograd.grad(out, leaves, d_out[..., at])]


CASES = [  # ranks, taps, lengths of chunks or None, options, dtype
    (1, 4, None, {}, torch.float64),
    (2, 4, None, {"layout": "zigzag"}, torch.bfloat16),
    (3, 4, (1, 1, 10), {"documents": [5, 7]}, torch.float64),
    (3, 4, (5, 1, 6), {}, torch.float32),
    (3, 2, None, {"layout": "zigzag", "documents": [3, 1, 8]}, torch.float64),
    (4, 1, None, {"documents": [12]}, torch.float64),
    (5, 4, (2, 1, 1, 1, 7), {"documents": [1, 1, 10]}, torch.float16),
    (6, 4, None, {"layout": "zigzag"}, torch.float64),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_convolution_is_that_of_each_document_alone(ranks, case):
    P, k, lengths, options, dtype = case
    four = inputs(12, k, dtype)
    documents = options.get("documents", [12])
    of_ranks = ranks(P, on_rank, four, lengths, options)
    order = torch.cat([at for at, _ in of_ranks]).argsort()
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    stored = unit if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps  # of each rank's part, once
    both = zip(
        ("out", "dx", "dweight", "dbias"), exact(four, documents), exact(four, documents, torch.abs), strict=True
    )
    for i, (name, right, terms) in enumerate(both):
        each = [results[i] for _, results in of_ranks]
        found = torch.cat(each, dim=2)[..., order] if i < 2 else sum(x.double() for x in each).to(dtype)
        bound = terms * (60 * unit + (P * stored if i >= 2 else 0))  # of 12 products and their sum
        assert_right(found, Right(right, bound, dtype, ""), name)


def call(context, changes):
    x, weight, bias, _ = inputs(4, 3, torch.float32)
    changes = {n: each[context.rank == 1] if isinstance(each, tuple) else each for n, each in changes.items()}
    return ring_short_convolution(**{"x": x, "weight": weight, "bias": bias, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": torch.zeros(2, 3)}, ["weight (2, 3)", "expected (B, N, C) and (N, k)"]),
        ({"weight": torch.zeros(3)}, ["weight (3,)", "expected (B, N, C) and (N, k)"]),
        ({"bias": torch.zeros(2)}, ["bias has shape (2,)", "expected (N,), (3,)"]),
        ({"weight": (torch.zeros(3, 3), torch.zeros(3, 4))}, ["the ranks disagree", "shape of weight"]),
        ({"bias": (None, torch.zeros(3))}, ["the ranks disagree", "given=['x', 'weight', 'bias']"]),
    ],
)
def test_a_bad_call_is_refused_on_every_rank(ranks, changes, words):
    assert re.search(all_of(words), refusal(ranks.outcomes(3, call, changes)))
