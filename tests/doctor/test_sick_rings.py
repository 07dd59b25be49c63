"""A right ring on a mesh is healthy, and so is PyTorch's own; what is written of public rings."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from ring_attn import ring_attention
from ring_doctor import examine
from ring_doctor.asking.answers import OK, WRONG, Answer, Examination, judge
from ring_doctor.asking.calls import ask_on_rank
from ring_doctor.asking.case import Case
from ring_doctor.asking.job import CannotExamine
from ring_doctor.asking.patient import patient_of
from ring_doctor.asking.questions import Question, questions
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining.diagnosis import Diagnosis, diagnose
from ring_doctor.explaining.explanation import Explanation
from ring_doctor.mistakes.other_ways import hosts
from ring_doctor.patients import __main__ as command
from ring_doctor.patients.__main__ import TABLE, rows_of, table
from ring_doctor.patients.flash_attn_by_hand import flash_attn_backward, flash_attn_forward
from ring_doctor.report import Report
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.support.rounding import exact_attention
from ringlab.ways.hybrid import Hybrid
from tests.attention import SEED
from tests.doctor.examined import examined

MESH = {}  # 2 x 2 for 4 ranks, and one row otherwise


def setup(context):
    MESH["of this rank"] = init_device_mesh(context.device.type, hosts(context.world_size))


def hybrid(q, k, v, *, causal=False, layout="contiguous", scale=None):
    options = {"causal": causal, "layout": layout, "scale": scale, "group": MESH["of this rank"]}
    return ring_flash_attention(q, k, v, **options, schedule=Hybrid)


def test_a_right_ring_is_healthy(ranks):
    options = {"setup": setup, "worlds": 4, "dtypes": ("float64", "bfloat16")}
    found = examined(ranks, hybrid, 1000 * SEED, **options)
    sick = [answer for answer in found.answers if answer.state not in ("ok", "refused")]
    assert found.healthy, "\n".join(f"{answer.question.words()}: {answer.says or answer.wrong}" for answer in sick)
    assert diagnose(found) is None


# Public rings ---------------------------------------------------------------------------------------------------------

ROWS = rows_of(TABLE.read_text())
FINDINGS = Path(__file__).parents[2] / "ring_doctor" / "patients" / "findings"


def test_the_table_is_in_order_and_names_known_mistakes():
    assert TABLE.read_text() == table(dict(sorted(ROWS.items())))
    for row in ROWS.values():
        assert {mistake for names in re.findall("`(.*?)`", row) for mistake in names.split(" and ")} <= set(CATALOGUE)


def test_what_is_written_of_patients(tmp_path, monkeypatch):
    """The rows of others stay; one whose library is not there has none; what cannot be examined has one."""
    monkeypatch.setattr(command, "TABLE", tmp_path / "results.md")
    monkeypatch.setattr(command, "patient_of", lambda name: patient_of(ring_attention, version="1" * ("b" not in name)))
    monkeypatch.setattr(sys, "argv", ["patients", "c", "b", "a"])
    command.TABLE.write_text(table({"b": ROWS["torch_loop"]}).replace("| torch_loop |", "| b |"))
    of = {"relative": {"out": 0.5}, "wrong": {"out": 9.0}, "errors": {"out": (0.5, 1.0)}}
    answers = [Answer(Question(Case(P)), WRONG, **of) for P in (3, 4)]
    found = Diagnosis((Explanation((CATALOGUE["scale_twice"],), id),), tuple(answers), "in every question")
    report = Report(Examination(patient_of(ring_attention), answers), found, "")
    with mock.patch.object(command, "examine", side_effect=[report, CannotExamine("no")]):
        assert command.main() == 0
    written = rows_of(command.TABLE.read_text())
    assert list(written) == ["c", "a", "b"]  # the sick first
    assert written["b"] == ROWS["torch_loop"].replace("torch_loop", "b")
    assert written["a"].startswith("| a | 1 | cannot be examined |  |  | ")
    sick = "sick, 2 answers (wrong) | `scale_twice` | in every question"
    assert written["c"].startswith(f"| c | 1 | {sick} | ")


def test_every_finding_has_a_report_and_is_shown():
    page = (FINDINGS / "README.md").read_text()
    rows = re.findall(r"^\| \[(.*)\]\(#.*\) \| .* \| `(.*)` \|$", page, re.M)
    assert {shown for _, shown in rows} <= {name for name, row in ROWS.items() if " | sick, " in row}
    assert [title for title, _ in rows] == re.findall(r"^## (.*)$", page, re.M)[:-1]


def test_a_right_patient_answers_rightly(ranks, tmp_path):
    patient = patient_of("ring_doctor.patients.all_gather")
    asked = questions(patient, 3, 0)
    for question in [question for question in asked if question.how == "plain"][:3]:
        assert judge(question, ranks(3, ask_on_rank, patient, question, tmp_path, 60.0)).state == OK


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_by_hand_is_attention(causal):
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(2, 5, heads, 4, dtype=torch.float64) for heads in (4, 2, 2, 4))
    options = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": causal}  # by name, as its callers give them
    out, lse, *_ = flash_attn_forward(q, k, v, **options)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    made = dict(zip(("dout", "out", "softmax_lse", "dq", "dk", "dv"), (d_out, out, lse, *gradients), strict=True))
    flash_attn_backward(q=q, k=k, v=v, **made, **options)
    right = exact_attention(*(x.transpose(1, 2) for x in (q, k, v, d_out)), causal=causal, scale=0.3)
    assert right["lse"].accepts(lse)
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        assert right[name].accepts(x.transpose(1, 2))


CLAIMED = """
ABOUT, VERSION, LAYOUTS, GROUPED = "a", "1", ("zigzag",), False

def attention(q, k, v, causal=False): return q

def other(q, k, v, causal=False): return q

def unclaimed(q, k, v, causal=False): return q

def third(q, k, v, causal=False): return q

CLAIMS = {"other": {"about": "b", "layouts": ("striped",), "heads": 6}, "third": {}}
"""


def test_a_patient_file_may_have_several_functions(tmp_path, monkeypatch):
    """What CLAIMS does not say of one is as for the first; a function without a line there is a plain function."""
    (tmp_path / "several_adapters.py").write_text(CLAIMED)
    monkeypatch.syspath_prepend(str(tmp_path))
    first, other, plain = (patient_of(f"several_adapters{of}") for of in ("", ":other", ":unclaimed"))
    assert (first.about, first.version, first.layouts, first.grouped, first.heads) == ("a", "1", ("zigzag",), False, 2)
    assert (other.about, other.version, other.layouts, other.grouped, other.heads) == ("b", "1", ("striped",), False, 6)
    assert plain.about.startswith(
        "ABOUT, GROUPED, LAYOUTS, VERSION of its module hold for several_adapters, without :un"
    )
    assert (plain.layouts, plain.grouped) == (("contiguous",), True)
    assert patient_of("several_adapters:other", heads=8).heads == 8
    third = patient_of("several_adapters:third")
    assert (third.about, third.layouts, third.grouped) == ("a", ("zigzag",), False)  # a line that says nothing is one
    (tmp_path / "with_own_line.py").write_text(
        CLAIMED + 'CLAIMS = {"attention": {"heads": 6}, "other": {"haeds": 6}}\n'
    )
    assert {patient_of(f"with_own_line{of}").heads for of in ("", ":attention")} == {6}
    with pytest.raises(ValueError, match="haeds given; expected some of about, batch, "):
        patient_of("with_own_line:other")


def test_the_doctor_finds_what_the_table_says_of_pytorchs_loop():
    """`python -m ring_doctor.patients` asks the others, where what they need is installed."""
    report = examine(replace(patient_of("ring_doctor.patients.torch_loop"), worlds=(4,)), quick=True)
    assert (report.healthy, " | healthy, " in ROWS["torch_loop"]) == (True, True)
