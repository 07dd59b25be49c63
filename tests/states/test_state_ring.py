"""Linear attention, alone and over ranks, against a ten-line loop in float64: out, the last state and all gradients.

The bound is the worst case of rounding: each result is a sum of products of inputs. The same loop with every sign made
positive, on |inputs|, gives the sum of the sizes of these products, and each of them rounds a number of times that is
counted in ROUNDINGS. The short convolution is compared with conv1d.
"""

import functools
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from ringlab.ring.layouts import positions
from ringlab.states import linear_attention as alone
from ringlab.states import state_ring
from ringlab.states.short_convolution import ring_short_convolution
from ringlab.states.state_ring import ring_linear_attention
from ringlab.support.rounding import Right
from tests.attention import SEED, assert_right
from tests.mistakes import assert_refused

D, DV = 3, 2
ROUNDINGS = 6 * (D + DV + 4)  # of a product, for each token that it passes: two sums over D or Dv, and a few factors
NAMES = ("q", "k", "v", "log_decay", "beta", "state")


def loop(q, k, v, log_decay, beta, state, scale, starts, sign=-1):
    """Out and the last state. `sign` +1: what the delta rule takes back is added."""
    outs = []
    for t in range(q.shape[2]):
        state = torch.zeros_like(state) if t in starts else state * log_decay[:, :, t, :, None].exp()
        u = v[:, :, t]
        if beta is not None:
            u = beta[:, :, t, None] * (u + sign * torch.einsum("bhd,bhde->bhe", k[:, :, t], state))
        state = state + torch.einsum("bhd,bhe->bhde", k[:, :, t], u)
        outs.append(scale * torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
    return torch.stack(outs, dim=2), state


@dataclass(frozen=True)
class Problem:
    """Random inputs of S tokens for the heads of q, k and v, and the options of the call."""

    seed: int = 0
    tokens: int = 12
    heads: tuple = (2, 2, 2)
    delta: bool = True
    decays: int = 1  # how many a token: 0, 1 or D
    options: dict = field(default_factory=dict)
    lengths: tuple | None = None  # of contiguous chunks
    dtype: torch.dtype = torch.float64

    @functools.cached_property
    def inputs(self):
        """The inputs by name, None where the layer has none, and the gradients of out and of the last state."""
        generator = torch.Generator().manual_seed(1000 * SEED + self.seed)
        H, S = max(self.heads), self.tokens

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        q, k, v = (normal(2, heads, S, size) for heads, size in zip(self.heads, (D, D, DV), strict=True))
        shape = (2, H, S, D) if self.decays == D else (2, H, S)
        decays = torch.rand(shape, generator=generator).double().mul(1.5).clamp(max=1)  # a third of them are 1
        decays[torch.rand(shape, generator=generator) < 0.1] = 0
        x = {"q": q, "k": k / k.norm(dim=-1, keepdim=True), "v": v}
        x |= {"log_decay": decays.log() if self.decays else None, "state": normal(2, H, D, DV)}
        x["beta"] = torch.rand(2, H, S, generator=generator).double() if self.delta else None
        x = {name: None if x[name] is None else x[name].to(self.dtype) for name in NAMES}
        return x, (normal(2, H, S, DV).to(self.dtype), normal(2, H, D, DV))

    def exact(self, sign):
        """Out, the last state and the gradients of all inputs by the loop; with sign +1 on absolute values."""
        (x, d_results), H = self.inputs, max(self.heads)
        size = torch.Tensor.double if sign < 0 else torch.Tensor.abs
        leaves = {n: (y if n == "log_decay" else size(y)).double() for n, y in x.items() if y is not None}
        leaves = {n: y.requires_grad_() for n, y in leaves.items()}
        wide = [leaves[n].repeat_interleave(H // leaves[n].shape[1], dim=1) for n in "qkv"]
        decays = leaves.get("log_decay", torch.zeros(2, H, self.tokens, dtype=torch.double))
        decays = decays.reshape(2, H, self.tokens, -1)
        starts = set(torch.tensor(self.options.get("documents", [0])).cumsum(dim=0).tolist()) - {0}
        scale = self.options.get("scale", D**-0.5)
        results = loop(*wide, decays, leaves.get("beta"), leaves["state"], scale, starts, sign)
        gradients = torch.autograd.grad(results, list(leaves.values()), [size(d).double() for d in d_results])
        return {n: y.detach() for n, y in zip(("out", "last", *leaves), (*results, *gradients), strict=True)}

    def rights(self):
        """Each result with its bound."""
        unit = torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps
        sizes = self.exact(+1)
        return {
            name: Right(
                exact,
                ROUNDINGS * self.tokens * unit * sizes[name].abs() + torch.finfo(torch.float32).tiny,
                torch.promote_types(self.dtype, torch.float32) if name == "last" else self.dtype,
                "worst case",
            )
            for name, exact in self.exact(-1).items()
        }


def on_rank(context, problems):
    """For each problem this rank's positions, and by name its chunks of out and of the gradients; the last state."""
    return [results_on_rank(problem, context.rank, context.world_size, context.device) for problem in problems]


def results_on_rank(problem, rank, P, device="cpu"):
    (x, (d_out, d_last)), layout = problem.inputs, problem.options.get("layout", "contiguous")
    at = positions(layout, problem.tokens, rank, P)
    if problem.lengths:
        before = sum(problem.lengths[:rank])
        at = torch.arange(before, before + problem.lengths[rank])
    mine = {n: y.clone() if n == "state" else y[:, :, at] for n, y in x.items() if y is not None}
    mine = {n: y.to(device).requires_grad_() for n, y in mine.items()}
    with mock.patch.object(state_ring, "in_chunks", functools.partial(alone.in_chunks, size=4)):
        with torch.inference_mode():  # an evaluation may come first: what it keeps must serve training
            evaluated, _ = ring_linear_attention(**mine, **problem.options)
        out, last = ring_linear_attention(**mine, **problem.options)
    assert torch.equal(evaluated, out)
    results, given = [out], [d_out[:, :, at].to(device)]
    if last is not None:
        assert last.untyped_storage().nbytes() == last.nbytes  # no view that keeps the states of all chunks
        results, given = [out, last], [*given, d_last.to(last)]
    gradients = torch.autograd.grad(results, list(mine.values()), given)
    found = {name: y.detach().cpu() for name, y in zip(("out", *mine), (out, *gradients), strict=True)}
    return at, found, None if last is None else last.detach().cpu()


def assert_problem(problem, of_ranks):
    rights = problem.rights()
    order = torch.cat([at for at, _, _ in of_ranks]).argsort()
    for name, right in rights.items():
        if name == "last":
            (x,) = [last for _, _, last in of_ranks if last is not None]
        elif name == "state":  # each rank has its part
            x = sum(each[name] for _, each, _ in of_ranks)
        else:
            x = torch.cat([each[name] for _, each, _ in of_ranks], dim=2)[:, :, order]
        assert_right(x, right, f"{name} of {problem}")


def problems_of(world_size, count=12):
    """Random ones: all ways and layouts, uneven chunks, documents, heads, layers, dtypes."""
    generator = torch.Generator().manual_seed(world_size + 100 * SEED)

    def one_of(*things):
        return things[int(torch.randint(len(things), (), generator=generator))]

    for seed in range(count):
        way = one_of("hops", "scan", "gather")
        layout = "contiguous" if way == "scan" else one_of("contiguous", "zigzag")
        S = 2 * world_size * one_of(1, 2, 3)
        options, lengths = {"way": way, "layout": layout}, None
        if one_of(True, False):
            options["scale"] = 0.7
        if one_of(True, False):
            options["documents"] = [1, S // 2, S - 1 - S // 2] if S > 2 else [1, 1]
        if layout == "contiguous":
            cuts = torch.randperm(S - 1, generator=generator)[: world_size - 1].sort().values + 1
            lengths = tuple(torch.tensor([0, *cuts.tolist(), S]).diff().tolist())
        heads = one_of((2, 2, 2), (1, 1, 2), (2, 1, 1), (1, 2, 1))
        dtype = one_of(torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16)
        yield Problem(seed, S, heads, one_of(True, False), one_of(0, 1, 1, D), options, lengths, dtype)


@pytest.mark.parametrize("P", range(1, 8))
def test_the_ring_of_states_is_the_loop(ranks, P):
    problems = list(problems_of(P))
    for problem, *of_ranks in zip(problems, *ranks(P, on_rank, problems), strict=True):
        assert_problem(problem, of_ranks)


@pytest.mark.parametrize("size", [1, 5, 64])
@pytest.mark.parametrize("form", [alone.recurrence, alone.linear_attention])
def test_both_forms_are_the_loop(form, size):
    if form is alone.linear_attention:
        form = functools.partial(form, size=size)
    kinds = ((1, True, 1), (2, False, 1), (3, False, 0), (4, True, 0), (5, True, D), (6, False, D))
    for (seed, delta, decays), dtype in (*((kind, torch.float64) for kind in kinds), ((7, True, 1), torch.bfloat16)):
        problem = Problem(seed, 13, (2, 1, 2), delta, decays, dtype=dtype)
        x, d_results = problem.inputs
        x = {n: y.clone().requires_grad_() for n, y in x.items() if y is not None}
        out, last = form(**x)
        gradients = torch.autograd.grad((out, last), list(x.values()), d_results)
        found = {"out": out, "last": last, **dict(zip(x, gradients, strict=True))}
        for name, right in problem.rights().items():
            assert_right(found[name].detach(), right, name)


def test_scale_moves_and_without_a_state_it_is_zero():
    x, _ = Problem().inputs
    for form in (alone.recurrence, alone.linear_attention):
        scaled, last = form(**x, scale=0.3)
        torch.testing.assert_close(scaled, 0.3 * D**0.5 * form(**x)[0])
    empty = {**x, "state": torch.zeros_like(x["state"])}
    torch.testing.assert_close(alone.recurrence(**{**x, "state": None}), alone.recurrence(**empty))
    for decays, chunks in ((1, 2), (D, 5)):  # of 64 tokens, and of 16
        inputs, _ = alone.checked_inputs(**Problem(0, 65, decays=decays).inputs[0])
        assert alone.in_chunks(inputs, 1.0)[0].add.shape[2] == chunks
    assert last.dtype == torch.float64
    assert last.untyped_storage().nbytes() == last.nbytes


# The short convolution over ranks against conv1d of each document alone ----------------------------------------------


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


def convolved_on_rank(context, four, lengths, options):
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
    of_ranks = ranks(P, convolved_on_rank, four, lengths, options)
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


# What is refused ------------------------------------------------------------------------------------------------------


NEEDS = torch.zeros(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
OF_STATES = [  # on 4 tokens a rank; of a pair the first is given on the other ranks, and the second on rank 1
    ({"layout": "striped"}, ["layout is striped", "expected contiguous or zigzag"]),
    ({"way": "rings"}, ["way is 'rings'", "expected hops or gather"]),
    ({"way": "scan", "layout": "zigzag"}, ["way is 'scan', layout zigzag", "for contiguous chunks"]),
    ({"v": torch.zeros(2, 2, 5, 2)}, ["shapes", "expected (B, H, S, D)"]),
    ({"v": torch.zeros(2, 3, 4, 2).double()}, ["(2, 3, 4, 2)", "divide the largest"]),
    ({"q": torch.zeros(2, 2, 4, 2).double()}, ["(2, 2, 4, 2), (2, 2, 4, 3)", "q and k of one size"]),
    ({"log_decay": torch.zeros(2, 2, 4, 2)}, ["log_decay has shape (2, 2, 4, 2)", "(2, 2, 4) or (2, 2, 4, 3)"]),
    ({"log_decay": (torch.zeros(2, 2, 4), torch.zeros(2, 2, 4, 3))}, ["the ranks disagree", "dim of log_decay=4"]),
    ({"beta": torch.zeros(2, 2, 3)}, ["beta has shape (2, 2, 3)", "expected (B, H, S), (2, 2, 4)"]),
    ({"state": torch.zeros(2, 2, 3, 3)}, ["state has shape (2, 2, 3, 3)", "expected (B, H, D, Dv)", "(2, 2, 3, 2)"]),
    ({"q": torch.zeros(2, 2, 4, 3)}, ["expected one floating dtype"]),
    ({"documents": [5, 2]}, ["documents of 5, 2 tokens", "12 in all"]),
    ({"way": ("hops", "gather")}, ["the ranks disagree", "way=hops", "way=gather"]),
    ({"beta": (None, torch.ones(2, 2, 4))}, ["the ranks disagree", "rank 1: given="]),
    ({"documents": (None, [12])}, ["the ranks disagree", "documents=None", "documents=(12,)"]),
    ({"q": (NEEDS, NEEDS.detach())}, ["the ranks disagree", "gradients=['q']", "gradients=[]"]),
    ({"layout": ("contiguous", "zigzag")}, ["the ranks disagree", "layout=contiguous", "layout=zigzag"]),
    ({"scale": (0.3, 0.4)}, ["the ranks disagree", "scale=0.3", "scale=0.4"]),
    ({"beta": (torch.ones(2, 2, 4), [0.5])}, ["rank 1: beta is a list; expected a tensor"]),
    ({"v": (torch.zeros(2, 2, 4, 2).double(), None)}, ["rank 1: AttributeError: 'NoneType' object"]),
]
IN_ORDER = ({"step": (1, -1)}, ["different functions", "rank 0: the backward pass of call ", "rank 1: the backward"])
OF_TAPS = [
    ({"weight": torch.zeros(2, 3)}, ["weight (2, 3)", "expected (B, N, C) and (N, k)"]),
    ({"weight": torch.zeros(3)}, ["weight (3,)", "expected (B, N, C) and (N, k)"]),
    ({"weight": torch.zeros(3, 0)}, ["weight (3, 0)", "expected (B, N, C) and (N, k)"]),
    ({"bias": torch.zeros(2)}, ["bias has shape (2,)", "expected (N,), (3,)"]),
    ({"weight": (torch.zeros(3, 3), torch.zeros(3, 4))}, ["the ranks disagree", "shape of weight"]),
    ({"x": (torch.zeros(2, 3, 4), 0.5)}, ["rank 1: x is a float; expected a tensor"]),
    ({"bias": (None, torch.zeros(3))}, ["the ranks disagree", "given=['x', 'weight', 'bias']"]),
]


def two_passes(v, step, **x):
    outs = [ring_linear_attention(v=v.requires_grad_(), **x)[0] for _ in range(2)]
    with pytest.raises(RuntimeError, match="a ring can be differentiated once"):
        torch.autograd.grad(outs[0].sum(), v, create_graph=True)
    for out in outs[::step]:
        out.sum().backward()


def call(context, function, x, changes):
    changes = {n: each[context.rank == 1] if isinstance(each, tuple) else each for n, each in changes.items()}
    return function(**{**x, **changes})


@pytest.mark.parametrize(
    ("function", "changes", "words"),
    [
        *((ring_linear_attention, *row) for row in OF_STATES),
        *((ring_short_convolution, *row) for row in OF_TAPS),
        (two_passes, *IN_ORDER),
    ],
    ids=lambda it: "+".join(it) if isinstance(it, dict) else "",
)
def test_a_bad_call_is_refused_on_every_rank(ranks, function, changes, words):
    taps = dict(zip(("x", "weight", "bias"), inputs(4, 3, torch.float32), strict=False))
    x = taps if function is ring_short_convolution else Problem(tokens=4).inputs[0]
    assert_refused(ranks, 3, words, call, function, x, changes)
