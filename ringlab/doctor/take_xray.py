"""An X-ray of a patient: two runs on real processes, of a question that the patient answers wrongly.

    take_xray(patient, choose_case(examination))    ->    XRay, or the reason why there is none

Shapes: S = 4 P tokens, B = H = G = 1, and D of S numbers or more, because V is the identity. A patient that needs more
heads gets them, all alike.

Before: xray.py, what the two runs show. After: report.py.
Source: none.
"""

from dataclasses import replace

import torch

from ringlab.doctor.answers import OK, WRONG
from ringlab.doctor.case import Case
from ringlab.doctor.examination import SECONDS, Examination
from ringlab.doctor.job import Job
from ringlab.doctor.patient import Patient
from ringlab.doctor.questions import Question
from ringlab.doctor.xray import XRay, cases, xray_of


def choose_case(examination: Examination) -> Case:
    """A plain question with a wrong answer on 3 or more ranks, if there is one, with fewer tokens and one head.

    Otherwise a wrong answer on fewer ranks, then any wrong answer, then the last right answer to a plain question.
    """
    wrong, right = ([answer.case for answer in examination.answers if answer.state == state] for state in (WRONG, OK))
    plain_wrong, plain_right = ([case for case in of_state if _is_plain(case)] for of_state in (wrong, right))
    on_three = [case for case in plain_wrong if case.world_size > 2]
    case = (on_three or plain_wrong or wrong or plain_right[::-1] or [examination.answers[0].case])[0]
    S = 4 * case.world_size
    documents = (S // 2 - 1, S - S // 2 + 1) if case.documents else None
    one_head = replace(case, batch=1, heads=1, kv_heads=1, head_dim=max(S, case.head_dim))
    return replace(one_head, seq_len=S, documents=documents, scale=None, inputs="normal")


def _is_plain(case: Case) -> bool:
    same = case.heads == case.kv_heads and case.scale is None
    return same and case.inputs == "normal" and torch.finfo(case.dtype).bits > 16


def take_xray(patient: Patient, case: Case, *, seconds: float = SECONDS, device: str = "cpu") -> XRay | str:
    """The X-ray, or why there is none."""
    heads = patient.heads if patient.heads > 2 else 1  # all alike: the first one is shown
    job = Job(patient, case.world_size, seconds, device)
    try:
        first, second = (job.ask(Question(replace(run, heads=heads, kv_heads=heads))) for run in cases(case))
    finally:
        job.close()
    for answer in (first, second):
        if not answer.results:
            return f"none, because with {case.words()} it fails: {answer.says}"
    return xray_of(first.results, second.results, case)
