"""Ask a ring many questions, on real processes, each with a time limit.

    examine(patient)    ->    Examination: the answers, and what a reader must know about them

Before: job.py. After: diagnosis.py, which names the mistake.
Source: none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from ringlab.doctor.answers import OK, REFUSED, Answer
from ringlab.doctor.job import CannotExamine, Job
from ringlab.doctor.patient import Patient, dtype_of
from ringlab.doctor.questions import Question, questions
from ringlab.doctor.quick import every_question, few_worlds, quick_questions

SECONDS = 20.0  # for one question; a right ring needs some milliseconds
GIVE_UP = 3  # questions of one world that hang or crash: then the others of this world are left out


@dataclass
class Examination:
    """A patient, its answers, and what a reader must know about them."""

    patient: Patient
    answers: list[Answer] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return all(answer.state in (OK, REFUSED) for answer in self.answers)

    def remark(self, sentence: str) -> None:
        if sentence not in self.remarks:
            self.remarks.append(sentence)


def examine(
    patient: Patient,
    *,
    seconds: float = SECONDS,
    device: str = "cpu",
    seed: int = 0,
    quick: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Examination:
    """Ask all the questions; with `quick` those that quick.py chooses. `progress` is told each question in words first.

    Raises CannotExamine when the patient answers no question at all, or none on three or more ranks.
    """
    worlds = patient.worlds
    found = _without_what_it_refuses(few_worlds(patient) if quick else patient, seconds, device, seed)
    patient = found.patient
    for world_size in patient.worlds:
        job = Job(patient, world_size, seconds, device)
        larger = Job(patient, world_size + 1, seconds, device)
        try:
            for question in _questions(found, world_size, seed, quick):
                asked = larger if question.members else job
                if asked.lost >= GIVE_UP:
                    found.remark(f"after {GIVE_UP} hangs or crashes of {asked.size} ranks, they were asked no more")
                    continue
                progress(question.words())
                found.answers.append(asked.ask(question))
        finally:
            job.close()
            larger.close()
    if all(answer.raised for answer in found.answers):
        raise CannotExamine(f"{patient.name} answers no question: {found.answers[-1].says}")
    plain = [answer for answer in found.answers if answer.question.how == "plain" and not answer.question.may_refuse]
    of_many = [answer for answer in plain if answer.case.world_size > 2]
    if all(answer.state == REFUSED for answer in of_many):
        raise CannotExamine(
            f"{patient.name} answers no plain question on three or more ranks, and with two many mistakes do not show: "
            f"{of_many[-1].says if of_many else 'none was asked'}"
        )
    if quick:
        every = every_question(replace(patient, worlds=worlds), plain[-1].case.dtype, seed)
        found.remark(
            f"quick: {len(found.answers)} of {len(every)} questions; the others have 1 or 2 ranks, or another mask"
        )
    return found


def _without_what_it_refuses(patient: Patient, seconds: float, device: str, seed: int) -> Examination:
    """The patient with as many heads as it needs, and without gradients if it refuses inputs that need gradients."""
    found = Examination(patient)
    if max(patient.worlds) < 4:
        found.remark("with fewer than 4 ranks some questions are not asked: sums in 16 bits, parts of a larger job")
    job = Job(patient, max(patient.worlds), seconds, device)
    try:
        _with_enough_heads(found, job, seed)
        for name in patient.dtypes[:2] if patient.gradients else ():
            question = next(questions(found.patient, job.size, dtype_of(name), seed))
            with_gradients, without = job.ask(question), job.ask(replace(question, how="without gradients"))
            if with_gradients.raised and not without.raised:
                refusal = f"it refuses inputs that need gradients ({with_gradients.says})"
                found.remark(f"{refusal}: it was asked for the forward pass")
                found.patient = replace(found.patient, gradients=False)
            if not (with_gradients.raised and without.raised):
                break
    finally:
        job.close()
    return found


def _with_enough_heads(found: Examination, job: Job, seed: int) -> None:
    """Ask the patient with a head for each rank if it refuses fewer, as an all-to-all does."""
    patient = found.patient
    more = replace(patient, heads=job.size + job.size % 2)
    for name in patient.dtypes[:2] if more.heads > patient.heads else ():
        few, many = (
            replace(next(questions(each, job.size, dtype_of(name), seed)), how="without gradients")
            for each in (patient, more)
        )
        refused = job.ask(few)
        if not refused.raised:
            return
        if not job.ask(many).raised:
            found.remark(f"it refuses {patient.heads} heads ({refused.says}): it was asked with {more.heads}")
            found.patient = more
            return


def _questions(found: Examination, world_size: int, seed: int, quick: bool) -> Iterator[Question]:
    """The questions in the widest dtype that the patient takes, as its answers show."""
    for name in found.patient.dtypes:
        dtype = dtype_of(name)
        if _unfit(found, dtype):
            continue
        chosen = quick_questions(found.patient, dtype, seed) if quick else None
        for question in questions(found.patient, world_size, dtype, seed):
            if chosen is None or question in chosen:
                yield question
            if _unfit(found, dtype):
                break
        else:
            return


def _unfit(found: Examination, dtype: torch.dtype) -> bool:
    """Whether float64 is refused, or computed in float32: then the questions are asked in float32."""
    if dtype != torch.float64:
        return False
    of_dtype = [answer for answer in found.answers if answer.case.dtype == dtype]
    for answer in of_dtype:
        if answer.in_float32:
            found.remark("it takes float64 and computes in float32; it is examined in float32")
            return True
        if answer.raised and answer is of_dtype[0]:
            answer.state = REFUSED
            found.remark(f"it refuses float64 ({answer.says}); it is examined in float32")
            return True
    return False
