"""Every sick ring is wrong where it must be, by the check that right rings pass, and right everywhere else."""

from dataclasses import replace

import pytest
import torch

from ring_doctor.case import Case
from ringlab.support.rounding import exact_attention
from ringlab.training.layouts import LAYOUTS
from tests.sick.plain_ring import ByAutograd, PlainRing
from tests.sick.ring import MASKED, SickRing
from tests.sick_rings import ALL, sick


def options_of(case, takes):
    each = {"causal": case.causal, "layout": case.layout, "documents": case.documents, "window": case.window}
    return {**{name: value for name, value in each.items() if name in takes}, "scale": case.scale}


def on_rank(context, attention, options, gradients, cases):
    """This rank's results of each case: out, lse if there is one, and the gradients."""
    return [_one(context, attention, option, gradients, case) for option, case in zip(options, cases, strict=True)]


def _one(context, attention, options, gradients, case):
    q, k, v, d_out = (case.cut(x, context.rank).contiguous() for x in case.whole())
    for x in (q, k, v):
        x.requires_grad_(gradients)
    out = attention(q, k, v, **options)
    out, lse = out if isinstance(out, tuple) else (out, None)
    results = {"out": out.detach()} | ({} if lse is None else {"lse": lse})
    if gradients:
        if out.requires_grad:
            out.backward(d_out)
        results |= {
            f"d{name}": torch.zeros_like(x) if x.grad is None else x.grad
            for name, x in zip("qkv", (q, k, v), strict=True)
        }
    return results


def cases_of(ring, world_size):
    """Some cases in which a ring can be asked, with and without its mistake to be seen."""
    case = Case(world_size, seed=world_size, heads=ring.heads, kv_heads=ring.heads)
    cases = [case, replace(case, inputs="large", head_dim=8), replace(case, dtype=torch.bfloat16)]
    if ring.grouped:
        cases.append(replace(case, heads=2 * ring.heads, kv_heads=2, scale=0.7))
    if not ring.equal_chunks and "contiguous" in ring.layouts:
        cases.append(replace(case, seq_len=25))
    if ring.takes:
        cases += [replace(case, causal=True, layout=layout) for layout in LAYOUTS]
        cases += [replace(case, layout=ring.layouts[-1])]
    if ring.takes == MASKED:
        cases.append(replace(case, causal=True, layout="striped", window=5))
        cases.append(replace(case, causal=True, window=5, documents=(7, 9, 8)))
        cases.append(replace(case, layout="zigzag", documents=(7, 9, 8)))
    return [case for case in cases if case.layout in ring.layouts or case.world_size == 1]


def plain_answers(case):
    """Without what fused kernels may round to 16 bits: that is more than most mistakes of 16 bits."""
    if case.dtype != torch.bfloat16:
        return case.right()
    return exact_attention(*case.whole(), visible=case.visible(), scale=case.scale)


def verdicts(ranks, world_size, ring, attention):
    """For each case: the names of the results that are wrong."""
    cases = cases_of(ring, world_size)
    options = [options_of(case, ring.takes) for case in cases]
    per_rank = ranks(world_size, on_rank, attention, options, ring.gradients, cases)
    for n, case in enumerate(cases):
        answers = plain_answers(case) if ring.plain else case.right()
        whole = {name: case.join([results[n][name] for results in per_rank]) for name in per_rank[0][n]}
        yield case, [name for name, x in whole.items() if not answers[name].accepts(x)]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.exhaustive if "/" in each else ()) for each in ALL]
)
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_sick_ring_is_wrong_exactly_where_it_must_be(ranks, size, name):
    for case, wrong in verdicts(ranks, size, ALL[name], sick(name)):
        assert bool(wrong) == ALL[name].shows(case), f"{case.words()}: wrong are {wrong}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1, 2])
def test_and_on_fewer_ranks(ranks, size, name):
    for case, wrong in verdicts(ranks, size, ALL[name], sick(name)):
        assert bool(wrong) == ALL[name].shows(case), f"{case.words()}: wrong are {wrong}"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("ring", [PlainRing, ByAutograd])
def test_the_plain_ring_without_a_mistake_is_right(ranks, size, ring):
    for case, wrong in verdicts(ranks, size, SickRing(ring.attention, takes=MASKED), ring.attention):
        assert not wrong, case.words()
