"""Real rings: a sick one is wrong exactly where it must be and has its name, a right one is healthy."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from ring_attn import ring_attention
from ring_doctor.asking.answers import WRONG, Examination, judge
from ring_doctor.asking.calls import RankResults
from ring_doctor.asking.case import Case
from ring_doctor.asking.patient import patient_of
from ring_doctor.asking.questions import Question
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining import diagnosis
from ring_doctor.explaining.diagnosis import diagnose
from ring_doctor.mistakes.other_ways import hosts
from ringlab.ring import backward, grouped_query, overlap
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import LAYOUTS
from ringlab.ways.double_ring import DoubleRing
from ringlab.ways.hybrid import Hybrid
from tests.attention import SEED
from tests.doctor.examined import examined, examined_sick, names_of
from tests.every_way import WAYS
from tests.wrong.sick_rings import ALL, BY_HAND, MASKED, UNKNOWN, Sick


def options_of(case, takes):
    each = {"causal": case.causal, "layout": case.layout, "documents": case.documents, "window": case.window}
    return {**{name: value for name, value in each.items() if name in takes}, "scale": case.scale}


def on_rank(context, attention, options, cases):
    """This rank's results of each case: out, lse if there is one, and the gradients."""
    return [_one(context, attention, option, case) for option, case in zip(options, cases, strict=True)]


def _one(context, attention, options, case):
    q, k, v, d_out = (case.cut(x, context.rank).contiguous() for x in case.whole())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, **options)
    out, lse = out if isinstance(out, tuple) else (out, None)
    gradients = torch.autograd.grad(out, leaves, d_out, allow_unused=True, materialize_grads=True)
    results = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    return {name: x.detach() for name, x in results.items() if x is not None}


def cases_of(ring, world_size):
    """Some cases in which a ring can be asked, with and without its mistake to be seen."""
    case = Case(world_size, seed=world_size, heads=ring.heads, kv_heads=ring.heads)
    cases = [case, replace(case, inputs="large", head_dim=8), replace(case, dtype=torch.bfloat16)]
    if ring.grouped:
        cases.append(replace(case, heads=2 * ring.heads, kv_heads=2, scale=0.7))
    if not ring.equal_chunks:
        cases.append(replace(case, seq_len=25))
    if ring.takes:
        cases += [replace(case, causal=True, layout=layout) for layout in LAYOUTS]
        cases += [replace(case, layout=LAYOUTS[-1])]
    if ring.takes == MASKED:
        cases.append(replace(case, causal=True, layout="striped", window=5))
        cases.append(replace(case, causal=True, window=5, documents=(7, 9, 8)))
        cases.append(replace(case, layout="zigzag", documents=(7, 9, 8)))
    return cases


def verdicts(ranks, world_size, ring, attention):
    """For each case: the names of the results that are wrong, and the answer."""
    cases = cases_of(ring, world_size)
    per_rank = ranks(world_size, on_rank, attention, [options_of(case, ring.takes) for case in cases], cases)
    for n, case in enumerate(cases):
        right = case.right()
        whole = {name: case.join([results[n][name] for results in per_rank]) for name in per_rank[0][n]}
        answer = judge(Question(case), [RankResults(results[n]) for results in per_rank])
        yield case, [name for name, x in whole.items() if not right[name].accepts(x)], answer


@pytest.mark.parametrize("name", {**BY_HAND, **UNKNOWN})
@pytest.mark.parametrize("size", [3, *(pytest.param(P, marks=pytest.mark.exhaustive) for P in (1, 2, 4))])
def test_a_sick_ring_is_wrong_exactly_where_it_must_be_and_its_entry_says_how(ranks, size, name, monkeypatch):
    """That no other entry gives its numbers is asked in test_a_mistake_is_named."""
    answers = []
    for case, wrong, answer in verdicts(ranks, size, ALL[name], Sick(name)):
        assert bool(wrong) == ALL[name].shows(case), f"{case.words()}: wrong are {wrong}"
        answers += [answer] if case.dtype == torch.float64 else []
    entry = name.partition("/")[0]
    if entry in CATALOGUE and any(answer.state == WRONG for answer in answers):
        monkeypatch.setattr(diagnosis, "CATALOGUE", {entry: CATALOGUE[entry]})
        found = diagnose(Examination(patient_of(Sick(name), name=name), answers))
        assert (names_of(found), found.part) == ({entry}, "")


# From all questions --------------------------------------------------------------------------------------------------


NAMED = [name for name in BY_HAND if name != "float32_inside"]
IN_CI = "base_2_as_natural"  # it has gradients that float32 cannot hold


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == IN_CI else pytest.mark.exhaustive) for n in NAMED])
def test_a_mistake_is_named(ranks, name):
    found = diagnose(examined_sick(ranks, name, worlds=(4,)))
    assert (names_of(found), found.part) == ({name.split("/")[0]}, "")


def test_float32_inside_is_a_remark_and_no_mistake(ranks):
    found = examined_sick(ranks, "float32_inside", worlds=(1, 3))
    assert diagnose(found) is None
    assert any("computes in float32" in remark for remark in found.remarks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_mistake_that_is_not_in_the_catalogue_gets_no_name_of_it(ranks, name):
    found = diagnose(examined_sick(ranks, name, worlds=(2, 3)))
    assert found
    assert not names_of(found)


MESH = {}  # 2 x 2 for 4 ranks, and one row otherwise


def setup(context):
    MESH["of this rank"] = init_device_mesh(context.device.type, hosts(context.world_size))


def hybrid(q, k, v, *, causal=False, layout="contiguous", scale=None):
    options = {"causal": causal, "layout": layout, "scale": scale, "group": MESH["of this rank"]}
    return ring_flash_attention(q, k, v, **options, schedule=Hybrid)


def double_ring(q, k, v, *, causal=False, layout="contiguous", scale=None):
    options = {"causal": causal, "layout": layout, "scale": scale, "group": MESH["of this rank"]}
    return ring_flash_attention(q, k, v, **options, schedule=DoubleRing)


FORWARD = {"gradients": False, "grouped": False}
HEALTHY = {  # PyTorch's loop is in test_patients.py
    "hybrid": (hybrid, {"setup": setup}),
    "flash_ring": (ring_flash_attention, {}),
    "ring_attn": (ring_attention, FORWARD),
    "overlap": (overlap.ring_attention, FORWARD),
    "backward": (backward.ring_attention, {"grouped": False}),
    "grouped_query": (grouped_query.ring_attention, {}),
    "all_gather": (WAYS["all-gather"], {}),
    "all_to_all": (WAYS["all-to-all"], {}),
    "double_ring": (double_ring, {"setup": setup}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "hybrid" else pytest.mark.exhaustive) for n in HEALTHY]
)
def test_a_right_ring_is_healthy(ranks, name):
    function, claims = HEALTHY[name]
    found = examined(ranks, function, 1000 * SEED, **claims, worlds=(1, 4) if name == "hybrid" else (1, 3, 4))
    sick = [answer for answer in found.answers if answer.state not in ("ok", "refused")]
    assert found.healthy, "\n".join(f"{answer.question.words()}: {answer.says or answer.wrong}" for answer in sick)
    assert diagnose(found) is None
