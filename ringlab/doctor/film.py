"""An X-ray of a patient: two runs on real processes, of the question that went wrong.

    take(patient, choose(examination))    ->    XRay, or the reason why there is none

Shapes: S = 4 P tokens, B = H = G = 1, and D of S numbers or more, for V is the identity. A patient that needs more
heads gets as many, all alike.

Before: xray.py, what the two runs show. After: report.py.
Source: none.
"""

from dataclasses import replace

import torch

from ringlab.doctor.case import Case
from ringlab.doctor.examination import OK, SECONDS, WRONG, Examination, Room
from ringlab.doctor.patient import Patient
from ringlab.doctor.questions import Question
from ringlab.doctor.xray import XRay, cases, xray_of


def choose(examination: Examination) -> Case:
    """What to take: a plain question with a wrong answer, in small, if there is one on 3 ranks; or the last answer."""
    wrong, right = ([it.case for it in examination.outcomes if it.state == state] for state in (WRONG, OK))
    of_wrong, of_right = ([case for case in asked if _is_plain(case)] for asked in (wrong, right))
    on_three = [case for case in of_wrong if case.world_size > 2]
    case = (on_three or of_wrong or wrong or of_right[::-1] or [examination.outcomes[0].case])[0]
    S = 4 * case.world_size
    documents = case.documents and (S // 2 - 1, S - S // 2 + 1)
    one_head = replace(case, batch=1, heads=1, kv_heads=1, head_dim=max(S, case.head_dim))
    return replace(one_head, seq_len=S, documents=documents, scale=None, inputs="normal")


def _is_plain(case: Case) -> bool:
    same = case.heads == case.kv_heads and case.scale is None
    return same and case.inputs == "normal" and torch.finfo(case.dtype).bits > 16


def take(patient: Patient, case: Case, *, seconds: float = SECONDS, device: str = "cpu") -> XRay | str:
    """The X-ray, or why there is none."""
    heads = patient.heads if patient.heads > 2 else 1  # all alike: the first one is shown
    room = Room(patient, case.world_size, seconds, device)
    try:
        outcomes = [room.ask(Question(replace(run, heads=heads, kv_heads=heads))) for run in cases(case)]
    finally:
        room.close()
    if all(outcome.results for outcome in outcomes):
        return xray_of(*(outcome.results for outcome in outcomes), case)
    says = next(outcome.says for outcome in outcomes if not outcome.results)
    return f"none, because with {case.words()} it fails: {says}"
