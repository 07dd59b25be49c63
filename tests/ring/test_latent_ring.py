"""The ring of latents, and chosen keys, against ten lines in float64: out, gradients, messages.

K and V are made from latents, so a rounding there moves every later result. The Jacobian of dense attention says by how
much: `right_of` adds it to the bound of exact_attention, and what the last products of dK and dV round.
"""

import functools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.backends.cuda import cudnn_sdp_enabled

from ringlab import choose_keys, ring_flash_attention, ring_latent_attention, ring_linear_attention
from ringlab.models.pass_q import agree_on_places, cached_attention
from ringlab.ring import chosen_keys, latent_ring
from ringlab.ring.latent_ring import LatentRing
from ringlab.ring.layouts import LAYOUTS, unshard
from ringlab.ring.masks import Mask
from ringlab.support.agreement import NEW_GROUP
from ringlab.support.messages import Watch
from ringlab.support.rounding import Right, exact_attention, half_step
from ringlab.ways.all_gather import AllGather
from ringlab.ways.all_to_all import AllToAll
from tests.attention import SEED, assert_right, dense, grouped_inputs
from tests.every_way import Problem, cut
from tests.mistakes import assert_refused

B, H, D, R, DV, L = 2, 2, 3, 2, 4, 5
NAMES = ("out", "dq", "d_latents", "d_rope_keys", "d_w_k", "d_w_v")
# By the number of ranks, chunk lengths.
UNEVEN = [(), (12,), (3, 9), (5, 1, 6), (2, 5, 1, 4), (3, 1, 4, 2, 2), (1, 4, 2, 1, 3, 1), (2, 2, 2, 2, 2, 1, 1)]


@dataclass(frozen=True)
class Case:
    """What the ring of latents is asked: S tokens, options, chosen keys a query (0: all), chunk lengths if not even."""

    tokens: int = 12
    causal: bool = True
    layout: str = "contiguous"
    documents: tuple | None = None
    count: int = 0
    lengths: tuple | None = None
    dtype: torch.dtype = torch.float64
    scale: float | None = None

    @property
    def options(self):
        """Those that are not as unless given."""
        options = {"causal": self.causal, "layout": self.layout, "documents": self.documents, "scale": self.scale}
        return {name: x for name, x in options.items() if x not in (False, "contiguous", None)}

    @functools.cached_property
    def inputs(self):
        """q, latents, rope_keys, w_k, w_v and d_out of the whole sequence."""
        S, generator = self.tokens, torch.Generator().manual_seed(SEED)
        shapes = (B, H, S, D + R), (B, S, L), (B, S, R), (H, D, L), (H, DV, L), (B, H, S, DV)
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]

    @functools.cached_property
    def visible(self):
        """Whether a query sees a key: (B, S, S)."""
        at = torch.arange(self.tokens)
        seen = dense(Mask(self.causal, self.documents), at, at).expand(B, -1, -1)
        if self.chosen is None:
            return seen
        return picked(self.chosen, self.tokens) & seen

    @functools.cached_property
    def chosen(self):
        """Some of the keys that a query sees, others for each sequence; the sixth query chose none. (B, S, count)"""
        if not self.count:
            return None
        at = torch.arange(self.tokens)
        scores = torch.rand(B, self.tokens, self.tokens, generator=torch.Generator().manual_seed(SEED + 1))
        best = scores.masked_fill(~dense(Mask(self.causal, self.documents), at, at), -1).topk(self.count)
        chosen = best.indices.masked_fill(best.values < 0, -1)
        chosen[:, 5] = -1
        return chosen

    def cut(self, context, *tensors):
        return cut(context, self.layout, self.lengths, *tensors)

    def whole(self, parts):
        return torch.cat(parts, dim=2) if self.lengths else unshard(list(parts), self.layout)


def picked(chosen, S):
    """Whether a query chose a key: (B, S, S). -1 stands for none, and a last column takes it."""
    places = chosen.masked_fill(chosen < 0, S)
    return torch.zeros(*places.shape[:2], S + 1, dtype=torch.bool).scatter_(2, places, True)[..., :S]


def heads_of(c, rope, w_k, w_v):
    """K (B, H, S, D + R) and V (B, H, S, Dv)."""
    k = torch.einsum("bsl,hdl->bhsd", c, w_k)
    return torch.cat([k, rope[:, None].expand(-1, H, -1, -1)], dim=-1), torch.einsum("bsl,hdl->bhsd", c, w_v)


def attention(q, d_out, visible, scale, k, v):
    """Dense: out, dq, dk, dv; and p and dS."""
    scores = (scale * q @ k.mT).masked_fill(~visible, -1e300)
    p = torch.softmax(scores, dim=-1) * visible
    out = p @ v
    d_s = scale * p * (d_out @ v.mT - (d_out * out).sum(dim=-1, keepdim=True))
    return out, d_s @ k, d_s.mT @ q, p.mT @ d_out, p, d_s


@functools.cache
def right_of(case):
    """What out and the gradients must be; those of w_k and w_v are summed over ranks in float64."""
    q, c, rope, w_k, w_v, d_out = (x.double() for x in case.inputs)
    scale, visible = (D + R) ** -0.5 if case.scale is None else case.scale, case.visible[:, None].expand(B, H, -1, -1)
    u, wide = (torch.finfo(dtype).eps / 2 for dtype in (case.dtype, torch.promote_types(case.dtype, torch.float32)))
    k, v = heads_of(c, rope, w_k, w_v)
    of_k, of_v = ((2 + L**0.5) * wide * x for x in heads_of(c.abs(), 0 * rope, w_k.abs(), w_v.abs()))
    off = [x + half_step(y.abs() + x, case.dtype) for x, y in ((of_k, k), (of_v, v))]
    right = exact_attention(case.inputs[0], k, v, d_out, visible=visible, scale=scale, fused_blocks=3 * 8)
    dense_attention = functools.partial(attention, q, d_out, visible, scale)
    *_, p, d_s = dense_attention(k, v)
    jacobians = torch.autograd.functional.jacobian(lambda k, v: dense_attention(k, v)[:4], (k, v), vectorize=True)
    moved = [sum((j.abs() * x).sum(dim=(4, 5, 6, 7)) for j, x in zip(both, off, strict=True)) for both in jacobians]
    out, d_q, d_k, d_v = (
        replace(right[name], sums=right[name].sums + more)
        for name, more in zip(("out", "dq", "dk", "dv"), moved, strict=True)
    )
    parts = d_s.abs().mT @ q.abs(), p.mT @ d_out.abs()  # of dk and dv, without their signs

    def products(names, n, *factors):
        """The sum of products of dk and dv with factors; each part is rounded before and after, and on its rank."""
        exact, sums = 0.0, 0.0
        for x, part, factor in zip((d_k, d_v), parts, factors, strict=True):
            if factor is not None:
                exact = exact + torch.einsum(
                    names, x.exact[..., : factor.shape[1]] if names[-1] == "l" else x.exact, factor
                )
                rounded = x.sums + ((3 + n**0.5) * wide + 3 * u) * part
                sums = sums + torch.einsum(names, rounded[..., : factor.shape[1]], factor.abs())
        return exact, sums

    d_c = products("bhsd,hdl->bsl", H * (D + DV), w_k, w_v)
    d_rope = [x[..., D:].sum(dim=1) for x in (d_k.exact, d_k.sums + (3 + H**0.5) * wide * parts[0])]
    d_w = [
        [torch.einsum("bhsd,bsl->hdl", x, y) for x, y in ((it.exact[..., :n], c), (rounded[..., :n], c.abs()))]
        for it, part, n in ((d_k, parts[0], D), (d_v, parts[1], DV))
        for rounded in [it.sums + ((3 + (B * case.tokens) ** 0.5) * wide + 3 * u) * part]
    ]
    rest = [(d_c, case.dtype), (d_rope, case.dtype), *((each, torch.float64) for each in d_w)]
    return [out, d_q, *(Right(exact, sums, dtype, d_q.why) for (exact, sums), dtype in rest)]


def in_a_part(context, work, cases):
    """`work` by all ranks of the job but its first one."""
    group = dist.new_group(range(1, context.world_size))
    here = replace(context, rank=context.rank - 1, world_size=context.world_size - 1)
    return work(here, cases, group) if context.rank else None


def on_ranks(ranks, world_size, work, cases):
    """Of each case the results of all ranks. Two ranks are a part of a job of three."""
    per_rank = ranks(3, in_a_part, work, cases)[1:] if world_size == 2 else ranks(world_size, work, cases)
    return zip(cases, zip(*per_rank, strict=True), strict=True)


def on_rank(context, cases, group=None):
    """This rank's out and gradients of each case."""
    results = []
    for case in cases:
        q, c, rope, d_out = case.cut(
            context, *(x if x.dim() == 4 else x[:, None] for x in (*case.inputs[:3], case.inputs[5]))
        )
        inputs = [x.clone().requires_grad_() for x in (q, c[:, 0], rope[:, 0], *case.inputs[3:5])]
        before = [x.detach().clone() for x in inputs]
        chosen = None if case.chosen is None else case.cut(context, case.chosen[:, None])[0][:, 0]
        with mock.patch.object(latent_ring, "without_cudnn", side_effect=latent_ring.without_cudnn) as switch:
            out = ring_latent_attention(*inputs, chosen=chosen, group=group, **case.options)
            gradients = torch.autograd.grad(out, inputs, d_out)
        assert [call.args for call in switch.call_args_list] == [(case.documents is not None,)] * 2
        assert all(map(torch.equal, inputs, before)), "the input changed"
        assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in inputs]
        results.append([out.detach(), *gradients])
    return results


def assert_right_results(ranks, world_size, cases):
    for case, per_rank in on_ranks(ranks, world_size, on_rank, cases):
        for name, parts, right in zip(NAMES, zip(*per_rank, strict=True), right_of(case), strict=True):
            if name in ("d_w_k", "d_w_v"):
                mine = sum(x.double() for x in parts)
            else:
                mine = case.whole([x if x.dim() == 4 else x[:, None] for x in parts]).view(right.exact.shape)
            assert_right(mine, right, f"{name} of {case}")


FEW = [2, 3, *(pytest.param(P, marks=pytest.mark.slow) for P in (1, 4, 5))]
FEW += [pytest.param(P, marks=pytest.mark.exhaustive) for P in (6, 7)]


@pytest.mark.parametrize("world_size", FEW)
def test_out_and_all_gradients_are_those_of_ten_lines(ranks, world_size):
    S, documents = max(12, 4 * world_size), (1, 4, 7)
    cases = [Case(S, causal, layout) for layout in LAYOUTS for causal in (False, True)]
    uneven = Case(12, lengths=UNEVEN[world_size], documents=documents)
    cases += [uneven, replace(uneven, causal=False), replace(uneven, documents=None, scale=0.7)]
    cases += [Case(S, layout="zigzag", documents=(3, S - 3), dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    cases += [replace(uneven, count=3, causal=causal) for causal in (False, True)]
    cases += [Case(S, layout=layout, count=4, dtype=torch.float32) for layout in ("zigzag", "striped")]
    assert_right_results(ranks, world_size, cases)


# Chosen keys ---------------------------------------------------------------------------------------------------------


def index_of(S, dtype, ties):
    """index_q (2, 3, S, 4), index_weights (2, 3, S) and index_k (2, S, 4); with `ties` small whole numbers."""
    generator = torch.Generator().manual_seed(SEED)
    shapes = (2, 3, S, 4), (2, 3, S), (2, S, 4)
    if ties:
        return [torch.randint(-1, 2, shape, generator=generator).to(dtype) for shape in shapes]
    return [2 + torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def best_of_rows(index, count, causal, documents):
    """By torch.topk of the whole row, of the ranks of its scores; a later token counts a little less. All is exact."""
    q, weights, k = (x.double() for x in index)
    S = k.shape[1]
    at = torch.arange(S)
    scores = (weights[..., None] * torch.relu(q @ k[:, None].mT)).sum(dim=1)
    scores = scores.unique(return_inverse=True)[1].double() * S - at
    best = scores.masked_fill(~dense(Mask(causal, documents), at, at), -torch.inf)
    best = torch.cat([best, torch.full((2, S, count), -torch.inf)], dim=-1).topk(count)
    return best.indices.masked_fill(best.values == -torch.inf, -1).sort().values


DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def choose_on_rank(context, cases, group=None):
    """In tiles of 3 queries and keys; under autocast, which changes nothing."""
    chosen = []
    for index, count, options, lengths in cases:
        q, weights, k = index
        mine = cut(context, options["layout"], lengths, q, weights[..., None], k[:, None])
        options = {name: x for name, x in options.items() if x is not True}  # causal unless given otherwise
        with mock.patch.object(chosen_keys, "TILE", 3), torch.autocast("cpu", torch.bfloat16):
            chosen.append(choose_keys(mine[0], mine[1][..., 0], mine[2][:, 0], count, group=group, **options))
    return chosen


@pytest.mark.parametrize("world_size", FEW)
def test_chosen_keys_are_those_of_topk_of_the_whole_row(ranks, world_size):
    S, cases = 4 * world_size * (3 if world_size < 4 else 1), []
    for layout in LAYOUTS:
        for ties, dtype in ((True, DTYPES[0]), *((False, dtype) for dtype in DTYPES)):
            for count, causal, documents in ((1, True, None), (3, False, None), (S + 2, True, (3, S - 3))):
                options = {"causal": causal, "layout": layout, "documents": documents}
                cases.append((index_of(S, dtype, ties), count, options, None))
    uneven = {"causal": True, "layout": "contiguous", "documents": (4, 8)}
    cases.append((index_of(12, torch.float32, True), 3, uneven, UNEVEN[world_size]))
    for case, per_rank in on_ranks(ranks, world_size, choose_on_rank, cases):
        index, count, options, lengths = case
        parts = [x[:, None] for x in per_rank]
        chosen = (torch.cat(parts, dim=2) if lengths else unshard(parts, options["layout"]))[:, 0]
        assert chosen.dtype == torch.int64
        assert torch.equal(chosen.sort().values, best_of_rows(index, count, options["causal"], options["documents"]))


def ring_on_rank(context, problem, chosen, tile):
    """This rank's chunks of out, dq, dk, dv of the ring with its chosen keys, after a look at its messages."""
    mine = [x.requires_grad_() for x in cut(context, problem.layout, problem.lengths, *problem.inputs())]
    (chosen,) = cut(context, problem.layout, problem.lengths, chosen[:, None])
    chosen = chosen[:, 0].clone()
    with mock.patch.object(chosen_keys, "TILE", tile):
        with Watch() as watch:
            out = ring_flash_attention(*mine[:3], chosen=chosen, **problem.options)
        chosen.fill_(-1)  # the caller may: the backward pass has its own
        sent = sum(it.bytes for it in watch.messages if it.kind == "send")
        return [out.detach(), *torch.autograd.grad(out, mine[:3], mine[3])], sent


@pytest.mark.parametrize("tile", [2, 256])
@pytest.mark.parametrize("near", [False, True, None])
def test_attention_to_chosen_keys_in_the_ring_of_keys(ranks, near, tile):
    """`near`: all keys are of the own chunk, or there is none, and no block travels. Else they travel."""
    case = Case(12, count=3)
    chosen = case.chosen.where((case.chosen // 4 == torch.arange(12)[:, None] // 4) | (near is False), -1)
    chosen = torch.full_like(chosen, -1) if near is None else chosen
    problem = Problem(4, 2, 12, {"causal": True, "softcap": 2.0}, batch=B)
    visible = picked(chosen, 12)[:, None]
    right = exact_attention(*problem.inputs(), visible=visible, softcap=2.0, fused_blocks=24)
    results = ranks(3, ring_on_rank, problem, chosen, tile)
    for name, parts in zip(("out", "dq", "dk", "dv"), zip(*(x for x, _ in results), strict=True), strict=True):
        assert_right(torch.cat(parts, dim=2), right[name], name)
    block = 2 * B * 2 * 4 * 4 * 4
    assert [sent for _, sent in results] == [2 * block if near is False else 0] * 3


# Passes that do not fit ---------------------------------------------------------------------------------------------


def of_three_tokens():
    """Inputs of a ring of latents, and of choose_keys."""
    *inputs, w_k, w_v, _ = Case(6).inputs
    q, weights, k = index_of(3, torch.float32, True)
    return [x[..., :3, :].requires_grad_() for x in inputs] + [w_k, w_v], (q, weights, k, 2)


def turned_on_one(context):
    """Two calls, whose backward passes rank 1 runs in the other order."""
    inputs, _ = of_three_tokens()
    outs = [ring_latent_attention(*inputs).sum() for _ in range(2)]
    with pytest.raises(RuntimeError, match="a ring can be differentiated once"):
        torch.autograd.grad(outs[0], inputs[:1], create_graph=True, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert ring_latent_attention(*(x.float() for x in inputs)).dtype == torch.bfloat16
    for out in outs[:: 1 - 2 * context.rank]:
        out.backward()


def test_backward_passes_in_another_order_are_refused(ranks):
    assert_refused(ranks, 2, ["different functions", "rank 0: the backward pass of call"], turned_on_one)


def after_an_error(context, function):
    """What is said of a pass that an error of this function ends, and of the next one."""
    said, group, (inputs, index) = [], dist.new_group(), of_three_tokens()
    at = (3 * context.rank + torch.arange(3)).expand(B, -1)
    for broken in (mock.patch(function, side_effect=MemoryError("none left")), nullcontext()):
        try:
            with broken:
                choose_keys(*index, group=group)
                ring_linear_attention(*index[:1] * 3, group=group)
                cached_attention(*index[:1] * 3, agree_on_places(at, at, group))
                ring_latent_attention(*inputs, documents=[2, 4], group=group).sum().backward()
        except (MemoryError, ValueError) as error:
            said.append(str(error))
    assert cudnn_sdp_enabled()  # documents switch it off for a pass
    return said


BROKEN = ["ring.chosen_keys.best_of_blocks", "ring.latent_ring.flash_forward", "ring.latent_ring.latent_backward"]
BROKEN += ["states.state_ring.reduce", "models.pass_q.attend_pieces"]


@pytest.mark.parametrize("name", BROKEN)
def test_a_group_in_which_an_error_ended_a_pass_is_refused(ranks, name):
    for first, then in ranks(2, after_an_error, f"ringlab.{name}"):
        assert first == "none left"
        assert NEW_GROUP in then


# Messages, and what is refused ---------------------------------------------------------------------------------------


def sent_on_rank(context, dtype):
    """The bytes of each message that this rank sends: by choose_keys, forward, and in the backward pass."""
    case = Case(12, lengths=(5, 1, 6), dtype=dtype)
    whole = [x if x.dim() == 4 else x[:, None] for x in (*case.inputs[:3], case.inputs[5])]
    q, c, rope, d_out = case.cut(context, *whole)
    inputs = [x.requires_grad_() for x in (q, c[:, 0], rope[:, 0], *case.inputs[3:5])]
    q, weights, k = index_of(12, dtype, True)
    q, weights, k = case.cut(context, q, weights[..., None], k[:, None])
    index = q, weights[..., 0], k[:, 0]
    watches = [Watch(), Watch(), Watch()]
    with watches[0]:
        choose_keys(*index, 2)
    with watches[1]:
        out = ring_latent_attention(*inputs)
    with watches[2]:
        out.backward(d_out)
    return [[it.bytes for it in watch.messages if it.kind == "send"] for watch in watches]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_hop_is_one_message_of_the_latents_and_rope_keys(ranks, dtype):
    """The block of rank r - t leaves in round t. Its gradient, in float32 at least, follows it, and goes home."""
    lengths, size = (5, 1, 6), torch.finfo(dtype).bits // 8
    for rank, (index, forward, backward) in enumerate(ranks(3, sent_on_rank, dtype)):
        blocks = [lengths[(rank - t) % 3] for t in (0, 1)]
        assert index == [2 * 4 * C * size for C in blocks]
        assert forward == [B * (L + R) * C * size for C in blocks]
        of_sums = [B * (L + R) * lengths[(rank - t) % 3] * max(size, 4) for t in (1, 2)]
        assert sorted(backward) == sorted(forward + of_sums)


def refused_on_rank(context, function, rank, changed):
    """Call with inputs that are right, but on one rank, or on all."""
    case = Case(6)
    q, c, rope, w_k, w_v, _ = case.inputs
    mine = {"q": q[:, :, :3], "latents": c[:, :3], "rope_keys": rope[:, :3], "w_k": w_k, "w_v": w_v}
    if function is choose_keys:
        q, weights, k = index_of(3, torch.float32, True)
        mine = {"index_q": q, "index_weights": weights, "index_k": k, "count": 2}
    if function is ring_flash_attention:
        mine = dict(zip("qkv", (x[:, :, :3] for x in grouped_inputs(B, H, H, 6, D)[:3]), strict=True))
    if rank is None or context.rank == rank:
        mine |= changed
    return function(**mine)


def keys(*numbers):
    return torch.tensor(numbers).expand(B, 3, -1)


def other(L=L, R=R, D=D):
    """Inputs of a ring of latents that fit each other."""
    shapes = (B, H, 3, D + R), (B, 3, L), (B, 3, R), (H, D, L), (H, DV, L)
    names = ("q", "latents", "rope_keys", "w_k", "w_v")
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in zip(names, shapes, strict=True)}


def index(J=3, E=4):
    return {"index_q": torch.zeros(2, J, 3, E), "index_weights": torch.zeros(2, J, 3), "index_k": torch.zeros(2, 3, E)}


K_OF_5 = torch.zeros(B, H, 5, D)
REFUSED = [
    (ring_latent_attention, None, {"w_k": torch.zeros(H, D, L + 1)}, ["w_k is torch.float32", "q's dtype"]),
    (ring_latent_attention, 1, {"latents": torch.zeros(B, 3, L, 1).double()}, ["rank 1: latents is", "3 dimensions"]),
    (ring_latent_attention, 0, {"w_v": torch.zeros(H, DV, L + 1).double()}, ["rank 0: ", "expected (B, H, C, D + R)"]),
    (ring_latent_attention, 0, {"q": None}, ["rank 0: q is None"]),
    (ring_latent_attention, None, {"scale": float("nan")}, ["scale is nan"]),
    (ring_latent_attention, 1, {"layout": "striped"}, ["disagree about layout"]),
    (ring_latent_attention, 1, {"chosen": keys(0)}, ["disagree about chosen", "rank 0: chosen=None"]),
    (ring_latent_attention, 1, other(R=1, D=4, L=4), ["the ranks disagree about", "rank 0: ", "L=5, R=2"]),
    *((ring_latent_attention, 1, {n: x.requires_grad_()}, ["disagree about gradients"]) for n, x in other().items()),
    (ring_latent_attention, None, {"chosen": keys(6)}, ["chosen has key 6 for the query at 0"]),
    (ring_latent_attention, 1, {"chosen": keys(0, 5), "causal": True}, ["disagree about"]),
    (ring_flash_attention, None, {"chosen": keys(0), "schedule": AllGather}, ["schedule=AllGather", "the ring"]),
    (ring_flash_attention, None, {"chosen": keys(0), "schedule": AllToAll}, ["schedule=AllToAll", "the ring"]),
    (ring_flash_attention, None, {"schedule": LatentRing}, ["schedule is LatentRing, for K and V; expected ring_lat"]),
    (ring_flash_attention, 1, {"chosen": keys(0, 1)}, ["disagree about chosen", "rank 0: chosen=None"]),
    (ring_flash_attention, None, {"chosen": keys(0.5)}, ["chosen is torch.float32", "expected int64"]),
    (ring_flash_attention, None, {"chosen": keys(0).to("meta")}, ["chosen is torch.int64 on meta", "expected int64"]),
    (ring_flash_attention, None, {"chosen": keys(0)[..., :0]}, ["chosen has shape (2, 3, 0)", "expected (2, 3, 1 or"]),
    (ring_flash_attention, None, {"chosen": keys(0)[:, :2]}, ["chosen has shape (2, 2, 1)", "expected (2, 3, 1 or"]),
    (ring_flash_attention, None, {"chosen": keys(6)}, ["chosen has key 6 for the query at 0", "or -1"]),
    (ring_flash_attention, None, {"chosen": keys(-2)}, ["chosen has key -2 for the query at 0"]),
    (ring_flash_attention, None, {"chosen": keys(0, 4), "causal": True}, ["chosen has key 4 for the query at 3"]),
    (ring_flash_attention, None, {"chosen": keys(0), "q": torch.zeros(B, H, 2, D)}, ["chosen has shape (2, 3, 1)"]),
    (ring_flash_attention, None, {"chosen": keys(0), "k": K_OF_5, "v": K_OF_5}, ["of 3 queries for 5 keys"]),
    *((choose_keys, None, {"count": n}, [f"count is {n}; expected 1 key"]) for n in (0, 2.0)),
    (choose_keys, 1, {"count": 3}, ["disagree about count"]),
    (choose_keys, 1, index(J=1), ["disagree about", "J=3"]),
    (choose_keys, 1, index(E=5), ["disagree about", "E=4"]),
    (choose_keys, 1, {"index_weights": torch.zeros(2, 1, 3)}, ["rank 1: index_q has shape (2, 3, 3, 4)", "(B, J, C)"]),
    (choose_keys, 1, {"index_k": torch.zeros(2, 3, 4).half()}, ["rank 1: index_k is torch.float16", "of one dtype"]),
    (choose_keys, 1, {"index_k": torch.zeros(2, 3, 4, device="meta")}, ["rank 1: index_k is", "on meta; expected"]),
    (choose_keys, 0, {"index_k": torch.zeros(2, 3)}, ["rank 0: index_k is torch.float32 of shape (2, 3)"]),
]


@pytest.mark.parametrize(
    ("function", "rank", "changed", "words"), REFUSED, ids=lambda it: getattr(it, "__name__", None)
)
def test_bad_input_is_refused_on_every_rank(ranks, function, rank, changed, words):
    assert_refused(ranks, 2, words, refused_on_rank, function, rank, changed)
