"""Ask a ring many questions, on real processes, each with a time limit.

    examination_of(patient)    ->    the answers, how wrong they are, and what a reader must know about them

Before: taken.py. After: explaining/diagnosis.py, which names the mistake.
"""

import itertools
from collections.abc import Collection, Hashable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from ring_doctor.asking.answers import OK, REFUSED, WRONG, Answer, Examination, excused, judge, other_numbers
from ring_doctor.asking.calls import under_autocast
from ring_doctor.asking.job import CannotExamine, Job, Tell
from ring_doctor.asking.patient import Patient
from ring_doctor.asking.questions import BESIDE, LSE, Question, kind, questions
from ring_doctor.asking.taken import check_that_it_is_in_time, check_what_is_given, takes, why

AGAIN = 2  # times that a question is asked again after a wrong answer, to see whether the answer changes
LEAST = 0.5  # of the kinds of questions that every ring must answer: with fewer answers nothing is said of the ring
DRAWS = "it takes random numbers from torch's generator, as dropout does"
WHOLE = "each rank returns the whole gradient of what is learned, and not its part: nothing may sum it once more"
PRODUCTS = (
    "under autocast torch multiplies in 16 bits, and what is summed of such products is in 16 bits too: it is then as "
    "exact as plain attention. With autocast disabled inside, or torch.amp.custom_fwd, its sums would stay in float32"
)
ONE_BIT = 2  # times the error of plain attention: as exact but for a bit


def examination_of(
    patient: Patient, *, seed: int = 0, quick: bool = False, progress: Tell = lambda words: None, **how: Any
) -> Examination:
    """Ask all questions; with `quick` each kind of question until it is answered. `progress` is told each in words.

    `how`: the time for a question and the device, as a `Job` takes them.
    Raises CannotExamine when the patient answers too little or too late.
    """
    found = Examination(patient)
    if max(patient.worlds) < 4 and not patient.state:
        found.remarks.append("with fewer than 4 ranks sums in 16 bits and parts of a larger job are not asked for")
    with ExitStack() as stack:  # of jobs, which start with their first question
        # parts of a job have jobs of their own, in which rank 0 is never called
        sizes = itertools.product(range(1, max(patient.worlds) + 2), (False, True))
        jobs = {key: stack.enter_context(closing(Job(patient, key[0], **how))) for key in sizes}
        reasons: set[str] = set()
        taken = any(takes(found, jobs[P, False], seed, progress, reasons) for P in reversed(patient.worlds))
        answers = check_what_is_given(found, jobs, seed)
        if not (taken or answers):
            raise CannotExamine(f"{patient.name} answers no question: {'; '.join(sorted(reasons))}")
        _ask_everything(found, jobs, seed, quick, progress)
    found.remarks += compared_under_autocast(found.answers)
    for remark, noticed in ((DRAWS, "draws"), (WHOLE, "whole")):
        found.remarks += [remark] if any(getattr(answer, noticed) for answer in found.answers) else []
    _check_that_it_answers(found)
    if quick:
        every = sum(len(list(questions(found.patient, P, seed))) for P in found.patient.worlds)
        share = f"quick: {len(found.answers)} of {every} questions"
        found.remarks.append(f"{share}; the others ask the same under another mask or with another number of ranks")
    return found


def _check_that_it_answers(found: Examination) -> None:
    """Raise CannotExamine where nothing can be said: no mistake was seen, and too little was answered, or too late."""
    name, answers = found.patient.name, found.answers
    if all(answer.raised for answer in answers):
        raise CannotExamine(f"{name} answers no question: {why(answers[-1])}")
    if not found.healthy:
        return
    check_that_it_is_in_time(name, *answers)
    must = [answer for answer in answers if not answer.question.feature]
    asked, answered = ({kind(it.question) for it in must if it.state != state} for state in (None, REFUSED))
    if len(answered) < LEAST * len(asked):
        it = next(answer for answer in must if answer.state == REFUSED)
        given = f"{name} answers {len(answered)} of {len(asked)} kinds of questions that every ring must answer"
        raise CannotExamine(f"{given}; expected {LEAST:.0%} or more. With {it.question.words()} it refuses: {it.says}")


def _ask_everything(
    found: Examination, jobs: dict[tuple[int, bool], Job], seed: int, quick: bool, progress: Tell
) -> None:
    """Ask the questions of each number of ranks. Parts of a job are asked of the job with a rank more."""
    patient = found.patient
    in_turns = {P: in_turn(patient, P, seed, quick=quick) for P in patient.worlds}
    todo = [(P, key, groups[key]) for P, groups in in_turns.items() for key in groups]
    todo.sort(key=lambda of: of[0] == 1 and of[2][0].case.seq_len != patient.chunk)  # one rank's options come last
    total = len({key for _, key, _ in todo})
    done: set[Hashable] = set()
    for world_size, turns in itertools.groupby(todo, key=lambda of: of[0]):
        for key, group in ((key, group) for _, key, group in turns if key not in done):
            refused: list[Answer] = []
            plain = [it for it in found.answers if kind(it.question) == kind(todo[0][2][0])]
            sick = {(it.case.causal, it.case.layout) for it in plain if it.bad}  # where no other mistake shows: last
            for question in sorted(group, key=lambda of: (of.case.causal, of.case.layout) in sick):
                if found.lost > 1 or any(it.silent for it in plain):  # in other questions it would hang too
                    found.remarks.append("after hangs or crashes nothing more was asked")
                    return
                lacks = found.beyond.get(question.feature)
                if (lacks and not lacks.question.together) or _tells_nothing(found, question, sick):
                    continue
                part = question.members is not None
                job = jobs[world_size + part, part]
                job.patient, job.keeps = patient, found.keeps
                progress(f"{len(done) / total:4.0%}  {question.words()}")
                answer = _as_wrong_as_it_is(ask_again(job, question), patient)
                progress(f"{len(done) / total:4.0%}  {question.words()}" + (f": {answer.says}" if answer.says else ""))
                if answer.state == WRONG and world_size not in {it.case.world_size for it in found.faults}:
                    job.restart()  # what is kept from earlier calls would look like a condition of this question
                    first = job.ask(question)
                    answer.kept = first.state == OK and not answer.changes
                    answer.changes |= first.state in (OK, WRONG) and other_numbers(answer, first)
                if answer.changes and not found.changes:
                    found.unawaited = job.ask(replace(question, watched=True)).unawaited
                if answer.state == WRONG and question.together and not found.faults:
                    found.answers += job.ask_with_fewer(question)
                if answer.bad and question.how.startswith(BESIDE):
                    job.restart()  # what is kept would spoil the next answers
                if answer.state != REFUSED and not (question.together and excused(answer)):
                    found.answers.append(answer)
                    done.add(key)
                    break
                refused.append(answer)
            else:
                found.answers += sorted(refused, key=lambda it: it.state != REFUSED)[:1]
        for job in (jobs[world_size, False], jobs[world_size + 1, True]) if world_size > 1 else ():
            job.close()  # no larger number of ranks needs its processes


def in_turn(patient: Patient, world_size: int, seed: int, *, quick: bool) -> dict[Hashable, list[Question]]:
    """The questions for one number of ranks in groups: of each group one answer is enough.

    A group has one question; with `quick`, all questions of a kind, those of the last mask and layout first. The plain
    questions are asked one by one.
    """
    groups: dict[Hashable, list[Question]] = {}
    plain, *others = questions(patient, world_size, seed)
    for question in (plain, *others):
        alone = not quick or kind(question) == kind(plain)
        key: Hashable = question if alone else kind(question)
        if question.together:
            key = question.together, None if quick else (world_size, question.case.mask())
        groups.setdefault(key, []).insert(0, question)
    return groups


def _tells_nothing(found: Examination, question: Question, sick: Collection[Hashable]) -> bool:
    """Other calls before, where it is wrong without them or after equal ones; an option, where one rank takes none.

    Gradients of an lse that has none; and unequal chunks with other options, where they hang.
    """
    beside, alone = question.how.startswith(BESIDE), question.case.world_size == 1
    other_code = alone and question.case.seq_len != found.patient.chunk
    refused = other_code and not any(answer.results for answer in found.answers if answer.case.world_size == 1)
    no_lse = question.feature == LSE and not any(answer.lse_grad for answer in found.answers)
    harm = (question.case.causal, question.case.layout) in sick
    spoilt = beside and (harm or any(it.question.how == "interleaved" for it in found.faults))
    hung = [it.question.feature for it in found.faults if it.hangs]
    return no_lse or refused or spoilt or bool(question.together and question.feature in hung)


def _as_wrong_as_it_is(answer: Answer, patient: Patient) -> Answer:
    """A patient that computes in float32 is asked in float32. Another one that errs by so little is wrong in float64.

    Unless all numbers are those of float32: then it computes in float32 where it is asked for this.
    """
    beyond = {name: answer.results[name] for name in answer.ranks} if answer.in_float32 and patient.dtypes[1:] else {}
    if all(torch.equal(x, x.float().to(x.dtype)) for x in beyond.values()):
        return answer
    shares = {name: error / allowed for name, (error, allowed) in answer.errors.items() if name in beyond}
    return replace(answer, state=WRONG, in_float32=False, wrong=shares)


def ask_again(job: Job, question: Question) -> Answer:
    """The answer; a wrong one, and one to a large question, is asked for again, because a race shows now and then."""
    answer = job.ask(question)
    for _ in range(AGAIN if answer.results and (answer.state == WRONG or question.case.large_tiles) else 0):
        again = job.ask(question)
        if again.state != answer.state or (answer.state == WRONG and other_numbers(answer, again)):
            return replace(answer if answer.state == WRONG else again, changes=True)
    return answer


def compared_under_autocast(answers: Sequence[Answer]) -> list[str]:
    """Take sums in 16 bits under autocast only for right, where plain attention is no more exact; say so."""
    under = [answer for answer in answers if answer.question.how == "autocast"]
    right = [answer.case for answer in answers if answer.state == OK and answer not in under]
    wrong = [answer for answer in under if answer.state == WRONG]
    usual = [answer for answer in under if answer.state == OK and answer.case.inputs == "normal"]
    if not (wrong and usual) or any(answer.case not in right for answer in wrong):
        return []  # the same numbers in 16 bits are wrong too: its own sums are to blame
    errors = [(its.relative, judge(its.question, under_autocast(its.case)).relative) for its in usual]
    if any(sum(its[x] - ONE_BIT * of[x] for its, of in errors) > 0 for x in errors[0][0].keys() & errors[0][1]):
        return []
    for answer in wrong:
        answer.state, answer.wrong, answer.says = OK, {}, "as exact as plain attention under autocast"
    return [PRODUCTS]
