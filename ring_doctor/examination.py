"""Ask a ring many questions, on real processes, each with a time limit.

    examine(patient)    ->    Examination: the answers, the verdict, and what a reader must know about them

    HEALTHY           every answer is right
    LIMITED           what the function claims is right. What it never claimed fails: chunks of unequal length, 16 bits
    SICK              an answer is wrong, or the function fails where every ring must answer

Before: job.py. After: diagnosis.py, which names the mistake.
Source: none.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from ring_doctor.answers import FAILED, OK, REFUSED, WRONG, Answer
from ring_doctor.exit_status import imprecise
from ring_doctor.job import REFUSALS, CannotExamine, Job
from ring_doctor.patient import Patient, dtype_of
from ring_doctor.questions import UNEQUAL, Question, questions
from ring_doctor.quick import every_question, few_worlds, quick_questions

SECONDS = 10.0  # for one question; a right ring needs some milliseconds
GIVE_UP = 2  # hangs or crashes where every ring must answer: then nothing more is asked
SLOW = 10.0  # seconds of a first call, of which each number of ranks has one; a right ring needs some milliseconds
AGAIN = 2  # times that a question is asked again after a wrong answer, to see whether the answer changes

HEALTHY, LIMITED, SICK = "healthy", "healthy for what it takes", "sick"


@dataclass
class Examination:
    """A patient, its answers, and what a reader must know about them."""

    patient: Patient
    answers: list[Answer] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)  # what the patient takes, where that is less than a ring may take

    @property
    def verdict(self) -> str:
        """HEALTHY, LIMITED or SICK."""
        if any(answer.state in (WRONG, FAILED) and not never_claimed(answer) for answer in self.answers):
            return SICK
        return LIMITED if self.limits or self.beyond else HEALTHY

    @property
    def healthy(self) -> bool:
        """Whether what the patient claims is right."""
        return self.verdict != SICK

    @property
    def beyond(self) -> dict[str, Answer]:
        """What the patient never claimed to take, and a failure or a wrong answer with it."""
        failed = [answer for answer in self.answers if answer.state in (WRONG, FAILED) and never_claimed(answer)]
        return {answer.question.feature: answer for answer in reversed(failed)}

    @property
    def imprecise(self) -> bool:
        """Whether only answers in 16 bits are wrong, and by no more than rounding can do."""
        bad = [answer for answer in self.answers if answer.state in (WRONG, FAILED) and not never_claimed(answer)]
        return bool(bad) and all(map(imprecise, bad))

    @property
    def changes(self) -> list[Answer]:
        """The answers that were other ones when the patient was asked again."""
        return [answer for answer in self.answers if answer.changes]

    def remark(self, sentence: str) -> None:
        if sentence not in self.remarks:
            self.remarks.append(sentence)


def never_claimed(answer: Answer) -> bool:
    """Whether a fault does not count: every fault with a feature that no ring must have, but wrong numbers.

    A ring for chunks of one length computes anything with chunks of other lengths.
    """
    feature = answer.question.feature
    return bool(feature) and (answer.state == FAILED or feature == UNEQUAL)


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
    found = Examination(few_worlds(patient) if quick else patient)
    # started by their first question; parts of a job have jobs of their own, in which rank 0 is never called
    sizes = itertools.product(range(1, max(worlds) + 2), (False, True))
    jobs = {(size, part): Job(found.patient, size, seconds, device) for size, part in sizes}
    try:
        _without_what_it_refuses(found, jobs[max(found.patient.worlds), False], seed)
        _ask_everything(found, jobs, seed, quick, progress)
    finally:
        for job in jobs.values():
            job.close()
    _in_fresh_processes(found, seconds, device)
    _on_one_rank(found, seconds, device)
    if all(answer.raised for answer in found.answers):
        raise CannotExamine(f"{patient.name} answers no question: {found.answers[-1].says}")
    plain = [answer for answer in found.answers if answer.question.how == "plain" and not answer.question.feature]
    of_many = [answer for answer in plain if answer.case.world_size > 2]
    if found.verdict != SICK and all(answer.state == REFUSED for answer in of_many):
        raise CannotExamine(
            f"{patient.name} answers no plain question on three or more ranks, and with two many mistakes do not show: "
            f"{of_many[-1].says if of_many else 'none was asked'}"
        )
    if quick:
        every = every_question(replace(found.patient, worlds=worlds), dtype_of(found.patient.dtypes[0]), seed)
        share = f"quick: {sum(answer.question in every for answer in found.answers)} of {len(every)} questions"
        found.remark(f"{share}; the others ask the same with other numbers of ranks, or under another mask")
    return found


def _ask_everything(
    found: Examination, jobs: dict[tuple[int, bool], Job], seed: int, quick: bool, progress: Callable[[str], None]
) -> None:
    """Ask the questions of each number of ranks. Parts of a job are asked of the job with a rank more."""
    lost = 0
    for world_size in found.patient.worlds:
        for question in _questions(found, world_size, seed, quick):
            part = question.members is not None
            job = jobs[world_size + part, part]
            if lost >= GIVE_UP:
                found.remark(f"after {GIVE_UP} hangs or crashes nothing more was asked")
                return
            if question.feature in found.beyond:
                continue
            progress(question.words())
            job.patient = found.patient
            answer = ask_again(job, question)
            lost += answer.state == FAILED and not question.feature and not job.ready
            found.answers.append(answer)
        for job in (jobs[world_size, False], jobs[world_size + 1, True]):
            job.close()  # no larger number of ranks needs its processes


def ask_again(job: Job, question: Question) -> Answer:
    """The answer; a wrong one, and one to a large question, is asked for again, because a race shows now and then."""
    answer = job.ask(question)
    for _ in range(AGAIN if answer.results and (answer.state == WRONG or question.large) else 0):
        again = job.ask(question)
        changes = again.state != answer.state or any(
            not torch.equal(x.nan_to_num(), answer.results[name].nan_to_num()) for name, x in again.results.items()
        )
        if changes and WRONG in (answer.state, again.state):  # right answers may differ in their last digits
            return replace(answer if answer.state == WRONG else again, changes=True)
    return answer


def _in_fresh_processes(found: Examination, seconds: float, device: str) -> None:
    """Ask a wrong question once more, before any other: a patient that is right then keeps something between calls."""
    wrong = [answer for answer in found.answers if answer.state == WRONG and not answer.question.members]
    if not wrong or not any(answer.state == OK for answer in found.answers if answer.case.world_size > 1):
        return
    job = Job(found.patient, wrong[-1].case.world_size, seconds, device)
    try:
        if job.ask(wrong[-1].question).state == OK and not wrong[-1].changes:
            found.remark(
                "asked first in fresh processes, it is right with "
                f"{wrong[-1].question.words()}: it keeps something between calls, as a mask, a buffer or a counter"
            )
    finally:
        job.close()


def _on_one_rank(found: Examination, seconds: float, device: str) -> None:
    """Ask one rank alone where answers change: then no message can be late."""
    if not found.changes or 1 not in found.patient.worlds:
        return
    job = Job(found.patient, 1, seconds, device)
    try:
        answer = ask_again(job, _first(found.patient, job, found.patient.dtypes[0], found.changes[0].case.seed))
        found.answers += [answer] if answer.changes else []
    finally:
        job.close()


def _without_what_it_refuses(found: Examination, job: Job, seed: int) -> None:
    """The patient with the dtypes that it takes, as many heads as it needs, and gradients if it computes them."""
    if max(found.patient.worlds) < 4:
        found.remark("with fewer than 4 ranks some questions are not asked: sums in 16 bits, parts of a larger job")
    _with_what_it_needs(found, job, seed)
    if found.patient.gradients and not job.lost:
        _without_gradients_if_refused(found, job, seed)
    if job.first_call > SLOW:
        worlds = few_worlds(found.patient).worlds
        found.remark(
            f"its first call took {job.first_call:.0f} s, as with a compiler, and each number of ranks has one: it was "
            f"asked on {' and '.join(map(str, worlds))} ranks only"
        )
        found.patient = replace(found.patient, worlds=worlds)


def _first(patient: Patient, job: Job, dtype: str, seed: int) -> Question:
    return next(questions(patient, job.size, dtype_of(dtype), seed))


def _with_what_it_needs(found: Examination, job: Job, seed: int) -> None:
    """Ask without gradients in each dtype, and with a head for each rank, as an all-to-all needs them."""
    patient, refused = found.patient, ""
    for i, dtype in enumerate(patient.dtypes):
        for per_rank in (0, 2):
            asked = replace(patient, heads_per_rank=per_rank, dtypes=patient.dtypes[i:])
            answer = job.ask(replace(_first(asked, job, dtype, seed), how="without gradients"))
            if answer.raised:
                refused = refused or answer.says
                continue
            if i:
                found.remark(f"it refuses {patient.dtypes[0]} ({refused}); it is examined in {dtype}")
            elif per_rank:
                found.remark(f"with {patient.heads} heads it refuses ({refused}): it got {per_rank} for each rank")
            if i and torch.finfo(dtype_of(dtype)).bits == 16:
                found.limits.append(f"{dtype} only")
            found.patient = asked
            return


def _without_gradients_if_refused(found: Examination, job: Job, seed: int) -> None:
    question = _first(found.patient, job, found.patient.dtypes[0], seed)
    answer = job.ask(question)
    if not answer.raised or (without := job.ask(replace(question, how="without gradients"))).raised:
        return
    if answer.says.startswith(REFUSALS):
        found.limits.append(f"the forward pass only: with inputs that need gradients, {answer.says}")
        found.patient = replace(found.patient, gradients=False)
    else:
        found.answers.append(without)
        found.remark("it answers without gradients. For the forward pass only? Then ask with --forward-only")


def _questions(found: Examination, world_size: int, seed: int, quick: bool) -> Iterator[Question]:
    """The questions in the widest dtype that the patient takes and computes in, as its answers show."""
    dtypes = found.patient.dtypes
    for question in _in_dtype(found.patient, world_size, seed, quick):
        yield question
        if dtypes[0] == "float64" and dtypes[1:] and any(answer.in_float32 for answer in found.answers):
            break
    else:
        return
    found.remark("it takes float64 and computes in float32; it is examined in float32")
    found.patient = replace(found.patient, dtypes=dtypes[1:])
    yield from _in_dtype(found.patient, world_size, seed, quick)


def _in_dtype(patient: Patient, world_size: int, seed: int, quick: bool) -> Iterator[Question]:
    """The questions of one world in the patient's first dtype."""
    dtype = dtype_of(patient.dtypes[0])
    if not quick:
        return questions(patient, world_size, dtype, seed)
    return (it for it in quick_questions(patient, dtype, seed) if it.case.world_size == world_size)
