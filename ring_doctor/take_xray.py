"""An X-ray of a patient: two runs on real processes, of a question that the patient answers wrongly.

    take_xray(patient, choose_question(examination))    ->    XRay, or the reason why there is none

Shapes: S = 4 P tokens, B = H = G = 1, and D of S numbers or more, because V is the identity. A patient that needs more
heads gets them, all alike. A length that matters (unequal chunks, one token each, odd chunks) is kept.

Before: xray.py, what the two runs show. After: report.py.
"""

from dataclasses import replace

import torch

from ring_doctor.answers import OK, WRONG, Answer
from ring_doctor.examination import SECONDS, Examination, never_claimed
from ring_doctor.job import Job
from ring_doctor.patient import Patient
from ring_doctor.questions import Question
from ring_doctor.xray import XRay, cases, xray_of

LONGEST = 16  # tokens on a rank: a longer question is asked with 4


def choose_question(examination: Examination) -> Question:
    """The wrong answer of which an X-ray shows the most, with one head; if none is wrong, the last plain right answer.

    An X-ray has no batch, no heads, no large scores and no scale. 16 bits and two ranks show less.
    """
    answers = examination.answers
    wrong = [answer.question for answer in wrong_answers(examination)]
    right = [answer.question for answer in answers if answer.state == OK]
    plain = [question for question in right if not any(_loses(question))]
    question = min(wrong, key=_loses, default=(plain or right or [answers[0].question])[-1])
    case = question.case
    P, S = case.world_size, case.seq_len
    if S > LONGEST * P or (case.equal_chunks and S // P % 2 == 0):
        S = 4 * P
    documents = (S // 2 - 1, S - S // 2 + 1) if case.documents else None
    one_head = replace(case, batch=1, heads=1, kv_heads=1, head_dim=max(S, case.head_dim), seq_len=S)
    how = "without gradients" if question.how == "without gradients" else "plain"
    return Question(replace(one_head, documents=documents, scale=None, sinks=False, inputs="normal"), how)


def wrong_answers(examination: Examination) -> list[Answer]:
    """The wrong answers that tell of a mistake: always the same numbers, to what it must answer if there are some."""
    wrong = [it for it in examination.answers if it.state == WRONG and it.results and not it.changes]
    return [answer for answer in wrong if not never_claimed(answer)] or wrong


def _loses(question: Question) -> tuple[int, bool, bool, bool]:
    """How many features an X-ray has not; whether a question is in 16 bits, of two ranks, and without gradients."""
    case = question.case
    features = (
        case.batch > 1,
        case.heads != case.kv_heads,
        case.scale is not None,
        case.sinks,
        case.inputs != "normal",
        case.seq_len > LONGEST * case.world_size,
        question.members is not None,
        question.how not in ("plain", "without gradients"),
    )
    return sum(features), torch.finfo(case.dtype).bits <= 16, case.world_size < 3, question.how != "plain"


def take_xray(patient: Patient, question: Question, *, seconds: float = SECONDS, device: str = "cpu") -> XRay | str:
    """The X-ray, or why there is none."""
    heads = patient.heads if patient.heads > 2 else 1  # all alike: the first one is shown
    job = Job(patient, question.case.world_size, seconds, device)
    try:
        runs = [replace(run, heads=heads, kv_heads=heads) for run in cases(question.case)]
        first, second = (job.ask(replace(question, case=run)) for run in runs)
    finally:
        job.close()
    for answer in (first, second):
        if not answer.results:
            return f"none, because with {question.words()} it fails: {answer.says}"
    return xray_of(first.results, second.results, question.case)
