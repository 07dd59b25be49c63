"""The doctor on public rings: those that need torch only are found as they are, the others where they are installed."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ring_doctor import examine
from ring_doctor.answers import OK, judge
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.on_rank import ask_on_rank
from ring_doctor.patient import dtype_of, from_name
from ring_doctor.patients.__main__ import RESULTS, TABLE, names, table
from ring_doctor.patients.flash_attn_by_hand import (
    flash_attn_backward,
    flash_attn_forward,
    flash_attn_varlen_backward,
    flash_attn_varlen_forward,
)
from ring_doctor.questions import questions
from ringlab.support.rounding import exact_attention

LINES = json.loads(RESULTS.read_text())
FINDINGS = Path(__file__).parents[2] / "ring_doctor" / "patients" / "findings"
LIBRARIES = {  # patients and findings that need one: its package
    "blog": "no package",
    "megatron_core": "megatron",
    "para_attn_ulysses": "para_attn",
    **{f"deepspeed_ulysses{which}": "deepspeed" for which in ("", "_uneven")},
    **{f"diffusers{which}": "diffusers" for which in ("", "_ulysses", "_ulysses_anything", "_ring_anything")},
    **{f"ring_attention_pytorch{which}": "ring_attention_pytorch" for which in ("", "_zigzag", "_tree")},
    **{f"ring_flash_attn{which}": "ring_flash_attn" for which in ("", "_zigzag", "_stripe", "_float32", "_llama3")},
    **{f"ringmaster{which}": "ringmaster" for which in ("", "_all_gather", "_zigzag", "_distflash", "_documents")},
    **{f"yunchang{which}": "yunchang" for which in ("", "_ulysses")},
}


def with_marks(some):
    """Names as parameters; those whose library is not installed are skipped."""
    missing = {name for name in some if name in LIBRARIES and not find_spec(LIBRARIES[name])}
    reason = "needs ring_doctor/patients/requirements.txt: see ring_doctor/patients/README.md"
    return [pytest.param(name, marks=[pytest.mark.skip(reason)] * (name in missing)) for name in some]


def test_the_table_is_that_of_the_results():
    assert TABLE.read_text() == table(LINES)
    assert set(LINES) <= set(names())
    for line in LINES.values():
        assert {mistake for names in line.get("mistake", []) for mistake in names.split(" and ")} <= set(CATALOGUE)


def test_every_finding_has_a_report_and_a_script():
    reports = {path.stem for path in FINDINGS.glob("*.md")} - {"README"}
    assert reports == {path.stem for path in FINDINGS.glob("*.py")}
    overview = (FINDINGS / "README.md").read_text()
    for name in reports:
        assert f"({name}.md)" in overview
        assert f"ring_doctor/patients/findings/{name}.py" in overview
        assert f"{name}.py" in (FINDINGS / f"{name}.md").read_text()


def test_a_right_patient_answers_rightly(ranks, tmp_path):
    patient = from_name("ring_doctor.patients.all_gather")
    asked = questions(patient, 3, dtype_of("float64"), 0)
    for question in [question for question in asked if question.how == "plain"][:3]:
        assert judge(question, ranks(3, ask_on_rank, patient, question, tmp_path, 60.0)).state == OK


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_by_hand_is_attention(causal):
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(2, 5, heads, 4, dtype=torch.float64) for heads in (4, 2, 2, 4))
    out, lse, *_ = flash_attn_forward(q, k, v, 0.0, 0.3, causal)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    flash_attn_backward(d_out, q, k, v, out, lse, *gradients, 0.0, 0.3, causal)
    right = exact_attention(*(x.transpose(1, 2) for x in (q, k, v, d_out)), causal=causal, scale=0.3)
    assert right["lse"].accepts(lse)
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        assert right[name].accepts(x.transpose(1, 2))


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_by_hand_is_attention_in_each_document(causal):
    torch.manual_seed(0)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    q, k, v, d_out = (torch.randn(8, heads, 4, dtype=torch.float64) for heads in (4, 2, 2, 4))
    options = (bounds, bounds, 5, 5, 0.0, 0.3, causal)
    out, lse, *_ = flash_attn_varlen_forward(q, k, v, *options)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    flash_attn_varlen_backward(d_out, q, k, v, out, lse, *gradients, *options)
    for document in (slice(0, 3), slice(3, 8)):
        rows = (x[None, document].transpose(1, 2) for x in (q, k, v, d_out))
        right = exact_attention(*rows, causal=causal, scale=0.3)
        assert right["lse"].accepts(lse[None, :, document])
        for name, x in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
            assert right[name].accepts(x[None, document].transpose(1, 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", with_marks([name for name in names() if name in LINES and name != "blog"]))
def test_the_doctor_finds_what_the_table_says(name):
    patient = from_name(f"ring_doctor.patients.{name}")
    report = examine(replace(patient, worlds=patient.worlds[:-1]))
    assert report.healthy == (LINES[name]["level"] in ("right", "right for what it takes"))
    if name != "ring_flash_attn_float32":  # its errors change from run to run
        found = report.diagnosis.names if report.diagnosis else set()
        assert set(LINES[name].get("mistake", [])) <= found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", with_marks([path.stem for path in sorted(FINDINGS.glob("*.py"))]))
def test_a_reproduction_shows_its_mistake(name, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=3", FINDINGS / f"{name}.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "relative error" in done.stdout or "WRONG" in done.stdout  # it ended by its own verdict
