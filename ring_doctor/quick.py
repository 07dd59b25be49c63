"""What a quick examination asks: every mask and layout on 3 and on 4 ranks, and every other kind of question once.

    P = 1, 2, 3, 4    ->    P = 3: each mask and layout; each other kind with the last mask    P = 4: the same, if new

A ring that is wrong with grouped queries is usually wrong with them under every mask. What is left out shows mistakes
of two features together, as "grouped queries without a mask only", and mistakes of 1 and of 2 ranks only.

Shapes: none here.

Before: questions.py. After: examination.py, which asks.
Source: none; tests/doctor/test_quick.py lists the kinds of question that a quick examination must ask.
"""

from collections.abc import Hashable
from dataclasses import replace

import torch

from ring_doctor.patient import Patient
from ring_doctor.questions import Question, questions

WORLDS = (3, 4)  # 3 ranks show what 2 cannot; 4 is even, and sums of four parts show sums in 16 bits


def few_worlds(patient: Patient) -> Patient:
    """The patient on 3 and 4 ranks; on its largest number of ranks if it has neither."""
    return replace(patient, worlds=tuple(P for P in patient.worlds if P in WORLDS) or patient.worlds[-1:])


def every_question(patient: Patient, dtype: torch.dtype, seed: int) -> list[Question]:
    """What a whole examination asks in `dtype`, world after world."""
    return [question for P in patient.worlds for question in questions(patient, P, dtype, seed)]


def quick_questions(patient: Patient, dtype: torch.dtype, seed: int) -> list[Question]:
    """The plain questions of every world, and the last question of each other kind, in the first world that asks it.

    The last one is causal, in the last layout that its kind may have.
    """
    chosen: list[Question] = []
    for P in patient.worlds:
        of_world = list(questions(patient, P, dtype, seed))
        last = {kind(question): question for question in of_world}
        old = {kind(question) for question in chosen}
        plain = kind(of_world[0])
        chosen += [
            question
            for question in of_world
            if kind(question) == plain or (question == last[kind(question)] and kind(question) not in old)
        ]
    return chosen


def kind(question: Question) -> Hashable:
    """All that is asked but the mask and the layout. Lengths count in tokens a rank, so that all worlds have them."""
    case = question.case
    length = case.seq_len // case.world_size, case.equal_chunks
    same = replace(case, world_size=1, seq_len=1, causal=False, layout="contiguous", documents=None, seed=0)
    return same, length, case.documents is None, question.how, question.members is None
