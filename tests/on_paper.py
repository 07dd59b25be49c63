"""Examinations without processes: each answer is what a ring on paper returns, right or with a mistake."""

from dataclasses import replace

from ring_doctor.answers import judge
from ring_doctor.calls import RankResults
from ring_doctor.examination import Examination
from ring_doctor.paper_ring import RIGHT, compute
from ring_doctor.patient import dtype_of, from_function
from ring_doctor.questions import questions


def answer_on_paper(question, steps=RIGHT, ranks=None, change=lambda case, results: results):
    """The answer of a ring on paper to a question; `ranks` take these steps, and `change` is planted at the end."""
    case = question.case
    results = change(case, compute(case, steps, ranks=ranks))
    if question.how == "without gradients":
        results = {name: results[name] for name in ("out", "lse")}
    wide = {name: x if name == "lse" else x.to(case.dtype) for name, x in results.items()}
    return judge(question, [RankResults({n: case.cut(x, r) for n, x in wide.items()}) for r in range(case.world_size)])


def examined_on_paper(
    function, mistake=lambda steps: steps, when=lambda question: True, ranks=lambda world_size: None, **claims
):
    """The examination of a ring that makes the mistake when `when(question)`, on the ranks `ranks(P)`."""
    patient = from_function(function, **claims)
    found = Examination(patient)
    for world_size in patient.worlds:
        for question in questions(patient, world_size, dtype_of("float64"), 0):
            if question.how in ("plain", "without gradients") and question.case.dtype == dtype_of("float64"):
                if question.case.large_tiles:
                    question = replace(question, case=replace(question.case, seq_len=6 * world_size))
                sick = when(question)
                steps = mistake(RIGHT) if sick else RIGHT
                found.answers.append(answer_on_paper(question, steps, ranks(world_size) if sick else None))
    return found
