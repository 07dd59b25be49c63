"""Ask a ring many questions, on real processes, each with a time limit.

    examine(patient)    ->    Examination: the answers, the verdict, and what a reader must know about them

    HEALTHY           every answer is right
    LIMITED           what the function claims is right. What it never claimed fails: chunks of unequal length, 16 bits
    SICK              an answer is wrong, or the function fails where every ring must answer

Before: job.py. After: diagnosis.py, which names the mistake.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

import torch

from ring_doctor.answers import FAILED, OK, REFUSED, WRONG, Answer, imprecise
from ring_doctor.job import REFUSALS, CannotExamine, Job
from ring_doctor.on_rank import alike
from ring_doctor.patient import Patient, dtype_of
from ring_doctor.questions import UNEQUAL, Question, every_question, few_worlds, questions, quick_questions

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
    def faults(self) -> list[Answer]:
        """The wrong answers and the failures that count."""
        return [answer for answer in self.answers if answer.bad and not never_claimed(answer)]

    @property
    def verdict(self) -> str:
        """HEALTHY, LIMITED or SICK."""
        return SICK if self.faults else LIMITED if self.limits or self.beyond else HEALTHY

    @property
    def healthy(self) -> bool:
        """Whether what the patient claims is right."""
        return not self.faults

    @property
    def beyond(self) -> dict[str, Answer]:
        """What the patient never claimed to take, and the first failure or wrong answer with it."""
        failed = [answer for answer in self.answers if answer.bad and never_claimed(answer)]
        return {answer.question.feature: answer for answer in reversed(failed)}

    @property
    def imprecise(self) -> bool:
        """Whether only answers in 16 bits are wrong, and by no more than rounding can do."""
        return bool(self.faults) and all(map(imprecise, self.faults))

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
    """Ask all questions; with `quick` those of `quick_questions`. `progress` is told each question in words first.

    Raises CannotExamine when the patient answers no question at all, or none on three or more ranks.
    """
    worlds = patient.worlds
    found = Examination(few_worlds(patient) if quick else patient)
    with ExitStack() as stack:  # of jobs, which start with their first question
        # parts of a job have jobs of their own, in which rank 0 is never called
        sizes = itertools.product(range(1, max(worlds) + 2), (False, True))
        jobs = {(size, part): Job(found.patient, size, seconds, device) for size, part in sizes}
        for job in jobs.values():
            stack.callback(job.close)
        _without_what_it_refuses(found, jobs[max(found.patient.worlds), False], seed)
        _ask_everything(found, jobs, seed, quick, progress)
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
        changes = again.state != answer.state or any(not alike(x, answer.results[n]) for n, x in again.results.items())
        if changes and WRONG in (answer.state, again.state):  # right answers may differ in their last digits
            return replace(answer if answer.state == WRONG else again, changes=True)
    return answer


def _in_fresh_processes(found: Examination, seconds: float, device: str) -> None:
    """Ask a wrong question once more, before any other: a patient that is right then keeps something between calls."""
    wrong = [answer for answer in found.answers if answer.state == WRONG and not answer.question.members]
    if not wrong or not any(answer.state == OK for answer in found.answers if answer.case.world_size > 1):
        return
    last = wrong[-1]
    with closing(Job(found.patient, last.case.world_size, seconds, device)) as job:
        if job.ask(last.question).state == OK and not last.changes:
            asked = f"asked first in fresh processes, it is right with {last.question.words()}"
            found.remark(f"{asked}: it keeps something between calls, as a mask, a buffer or a counter")


def _on_one_rank(found: Examination, seconds: float, device: str) -> None:
    """Ask one rank alone where answers change: then no message can be late."""
    if found.changes and 1 in found.patient.worlds:
        with closing(Job(found.patient, 1, seconds, device)) as job:
            answer = ask_again(job, _first(found.patient, job, found.changes[0].case.seed))
            found.answers += [answer] if answer.changes else []


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


def _first(patient: Patient, job: Job, seed: int) -> Question:
    return next(questions(patient, job.size, dtype_of(patient.dtypes[0]), seed))


def _with_what_it_needs(found: Examination, job: Job, seed: int) -> None:
    """Ask without gradients in each dtype, and with a head for each rank, as an all-to-all needs them."""
    patient, refused = found.patient, ""
    for (i, dtype), per_rank in itertools.product(enumerate(patient.dtypes), (0, 2)):
        asked = replace(patient, heads_per_rank=per_rank, dtypes=patient.dtypes[i:])
        answer = job.ask(replace(_first(asked, job, seed), how="without gradients"))
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
    question = _first(found.patient, job, seed)
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

    def in_dtype() -> Iterator[Question]:
        patient, dtype = found.patient, dtype_of(found.patient.dtypes[0])
        asked = quick_questions(patient, dtype, seed) if quick else questions(patient, world_size, dtype, seed)
        return (question for question in asked if question.case.world_size == world_size)

    dtypes = found.patient.dtypes
    for question in in_dtype():
        yield question
        if dtypes[0] == "float64" and dtypes[1:] and any(answer.in_float32 for answer in found.answers):
            found.remark("it takes float64 and computes in float32; it is examined in float32")
            found.patient = replace(found.patient, dtypes=dtypes[1:])
            yield from in_dtype()
            return
