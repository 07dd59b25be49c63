"""Every sick ring is wrong where it must be and right everywhere else; one from the table returns what paper says."""

import contextlib
from dataclasses import replace

import pytest
import torch

from ring_doctor import diagnosis
from ring_doctor.answers import WRONG, judge
from ring_doctor.calls import RankResults
from ring_doctor.case import UNROUNDED, Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.examination import Examination
from ring_doctor.paper_ring import RIGHT, NotOnPaper, compute
from ring_doctor.patient import from_function
from ring_doctor.questions import Question
from ringlab.support.rounding import exact_attention
from ringlab.training.layouts import LAYOUTS
from tests.sick.plain_ring import ByAutograd, PlainRing
from tests.sick.ring import MASKED, SickRing
from tests.sick.table_ring import TableRing
from tests.sick_rings import ALL, BY_HAND, OF_TABLE, UNKNOWN, of_table, sick


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
    """For each case: the names of the results that are wrong, and the answer."""
    cases = cases_of(ring, world_size)
    options = [options_of(case, ring.takes) for case in cases]
    per_rank = ranks(world_size, on_rank, attention, options, ring.gradients, cases)
    for n, case in enumerate(cases):
        answers = plain_answers(case) if ring.plain else case.right()
        whole = {name: case.join([results[n][name] for results in per_rank]) for name in per_rank[0][n]}
        answer = judge(Question(case), [RankResults(results[n]) for results in per_rank])
        yield case, [name for name, x in whole.items() if not answers[name].accepts(x)], answer


@pytest.mark.parametrize("name", {**BY_HAND, **UNKNOWN})
@pytest.mark.parametrize("size", [3, *(pytest.param(P, marks=pytest.mark.exhaustive) for P in (1, 2, 4))])
def test_a_sick_ring_is_wrong_exactly_where_it_must_be_and_its_entry_says_how(ranks, size, name, monkeypatch):
    """That no other entry gives its numbers is asked in tests/doctor/test_catalogue.py."""
    answers = []
    for case, wrong, answer in verdicts(ranks, size, ALL[name], sick(name)):
        assert bool(wrong) == ALL[name].shows(case), f"{case.words()}: wrong are {wrong}"
        answers += [answer] if case.dtype == torch.float64 else []
    entry = name.partition("/")[0]
    if entry in CATALOGUE and any(answer.state == WRONG for answer in answers):
        monkeypatch.setattr(diagnosis, "CATALOGUE", {entry: CATALOGUE[entry]})
        found = diagnosis.diagnose(Examination(from_function(sick(name), name=name), answers))
        assert (found.names, found.part) == ({entry}, "")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("ring", [PlainRing, ByAutograd, TableRing])
def test_the_plain_ring_without_a_mistake_is_right(ranks, size, ring):
    for case, wrong, _ in verdicts(ranks, size, SickRing(ring.attention, takes=MASKED), ring.attention):
        assert not wrong, case.words()


# From the rows of the catalogue --------------------------------------------------------------------------------------


def asked_of_table(P, entry):
    """Cases in which every entry but those of more tokens, large scores or 16 bits is wrong somewhere."""
    full, causal = Case(P, 6 * P, heads=4, kv_heads=2), Case(P, 6 * P, True, heads=2 * P, kv_heads=P)
    cases = [full, replace(full, scale=0.3, batch=2, kv_heads=4), replace(full, seq_len=6 * P + 1)]
    cases += [replace(causal, layout=layout) for layout in LAYOUTS]
    cases += [replace(causal, window=8), replace(causal, window=3, layout="zigzag")]
    cases += [replace(causal, heads=4 * P, kv_heads=2 * P), replace(causal, documents=(7, 6 * P - 7))]
    cases += [replace(causal, heads=12, kv_heads=3, layout="striped")]
    if entry == "last_tile_lost":
        cases = [Case(P, 257 * P)]  # more than the largest of its tiles
    elif entry == "unstabilised":
        cases = [replace(full, inputs="large")]
    elif "16_bits" in entry:
        cases = [Case(P, 32, inputs=inputs, dtype=torch.bfloat16) for inputs in UNROUNDED] + cases[:1]
    return cases


def is_wrong(case, results):
    return not all(right.accepts(results[name].to(right.dtype)) for name, right in case.right().items())


MANY = 2  # cases in which a mistake shows
OTHERS = {name.partition("/")[0] for name in BY_HAND}  # entries with a ring that knows nothing of the table
IN_CI = [pytest.param(n, marks=pytest.mark.exhaustive if ":" in n or n in OTHERS else ()) for n in OF_TABLE]


@pytest.mark.parametrize("name", IN_CI)
def test_a_ring_from_the_table_returns_its_numbers(ranks, name):
    """Over real messages, as the ring on paper without any: so it has this name, and maybe others too."""
    entry, _, variant = name.partition(":")
    steps, computed = replace(CATALOGUE[entry].variants[int(variant or 0)](RIGHT), autograd=True), {}
    for case in asked_of_table(4, entry):
        with contextlib.suppress(NotOnPaper):
            computed[case] = compute(case, steps)
    fit = [case for case, results in computed.items() if is_wrong(case, results)][:MANY]
    assert fit, "the mistake shows nowhere"
    per_rank = ranks(4, on_rank, of_table(name), [options_of(case, MASKED) for case in fit], True, fit)
    for n, case in enumerate(fit):
        for key in per_rank[0][n]:
            x = case.join([results[n][key] for results in per_rank])
            near, on_paper = max(1e-9, 2 * torch.finfo(x.dtype).eps), computed[case][key].to(x.dtype)
            assert torch.allclose(x, on_paper, rtol=near, atol=near, equal_nan=True), f"{key} with {case.words()}"
