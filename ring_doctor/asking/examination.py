"""Ask a ring many questions, on real processes, each with a time limit.

    examination_of(patient)    ->    the answers, how wrong they are, and what a reader must know about them

Before: job.py. After: explaining/diagnosis.py, which names the mistake.
"""

import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from ring_doctor.asking.answers import FAILED, LATE, OK, REFUSED, WRONG, Answer, Examination, excused, other_numbers
from ring_doctor.asking.job import REFUSALS, CannotExamine, Job
from ring_doctor.asking.patient import TENSORS, Patient, dtype_of
from ring_doctor.asking.questions import BESIDE, LSE, Question, in_turn, kind, questions
from ring_doctor.asking.sixteen_bits import compared_under_autocast, rounded_early

SECONDS = 10.0  # for one question; a right ring needs some milliseconds
AGAIN = 2  # times that a question is asked again after a wrong answer, to see whether the answer changes
SIZES = (8, 16, 32, 64, 128)  # of a head and of a chunk: kernels take multiples of one of them
LEAST = 0.5  # of the kinds of questions that every ring must answer: with fewer answers nothing is said of the ring
LAST_DIGITS = "called again, it gives other numbers, all of them right, as where blocks are added as they come"
DRAWS = "it takes random numbers from torch's generator, as dropout does"
WHOLE = "each rank returns the whole gradient of what is learned, and not its part: nothing may sum it once more"


def examination_of(
    patient: Patient,
    *,
    seconds: float = SECONDS,
    device: str = "cpu",
    seed: int = 0,
    quick: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Examination:
    """Ask all questions; with `quick` each kind of question until it is answered. `progress` is told each in words.

    Raises CannotExamine when the patient answers too little or too late.
    """
    found = Examination(patient)
    if max(patient.worlds) < 4 and not patient.state:
        found.remarks.append("with fewer than 4 ranks sums in 16 bits and parts of a larger job are not asked for")
    with ExitStack() as stack:  # of jobs, which start with their first question
        # parts of a job have jobs of their own, in which rank 0 is never called
        sizes = itertools.product(range(1, max(patient.worlds) + 2), (False, True))
        jobs = {key: stack.enter_context(closing(Job(patient, key[0], seconds, device))) for key in sizes}
        reasons: set[str] = set()
        taken = any(_takes(found, jobs[P, False], seed, progress, reasons) for P in reversed(patient.worlds))
        answers = _check_the_order(found, jobs[min(patient.worlds), False], seed)
        if not (taken or answers):
            raise CannotExamine(f"{patient.name} answers no question: {'; '.join(sorted(reasons))}")
        _ask_everything(found, jobs, seed, quick, progress)
    if {"bfloat16", "float32"} & set(found.patient.dtypes) == {"bfloat16"} and not patient.state:
        found.remarks.append("nothing was asked under autocast, where tensors are float32: that is none of its dtypes")
    found.remarks += compared_under_autocast(found.answers)
    for remark, noticed in ((LAST_DIGITS, "last_digits"), (DRAWS, "draws"), (WHOLE, "whole")):
        found.remarks += [remark] if any(getattr(answer, noticed) for answer in found.answers) else []
    _check_that_it_answers(found)
    found.remarks += rounded_early(found.answers) if found.healthy else []
    if quick:
        every = sum(len(list(questions(found.patient, P, _dtype(found), seed))) for P in found.patient.worlds)
        share = f"quick: {len(found.answers)} of {every} questions"
        found.remarks.append(f"{share}; the others ask the same under another mask or with another number of ranks")
    return found


def _dtype(found: Examination) -> torch.dtype:
    return dtype_of(found.patient.dtypes[0])


def _check_the_order(found: Examination, job: Job, seed: int) -> bool:
    """Whether the patient answers. Raises CannotExamine where it is right with tensors in another order only."""
    answers: list[Answer] = []
    first = next(questions(found.patient, job.size, _dtype(found), seed))
    asked = found.patient.tensors
    for order in (asked, *TENSORS):
        job.patient = replace(found.patient, tensors=order)
        answers.append(job.ask(first))
        if answers[-1].state == OK:
            if order != asked:
                said = f"{found.patient.name} is right for tensors in the order {order}, and not in {asked}"
                raise CannotExamine(f"{said}: ask with --tensors {order}")
            break
    return not all(answer.raised for answer in answers)


def _check_that_it_answers(found: Examination) -> None:
    """Raise CannotExamine where nothing can be said: no mistake was seen, and too little was answered, or too late."""
    name, answers = found.patient.name, found.answers
    if all(answer.raised for answer in answers):
        raise CannotExamine(f"{name} answers no question: {_reason(answers[-1])}")
    if not found.healthy:
        return
    _check_that_it_is_in_time(name, *answers)
    must = [answer for answer in answers if not answer.question.feature]
    asked, answered = ({kind(it.question) for it in must if it.state != state} for state in (None, REFUSED))
    if len(answered) < LEAST * len(asked):
        it = next(answer for answer in must if answer.state == REFUSED)
        given = f"{name} answers {len(answered)} of {len(asked)} kinds of questions that every ring must answer"
        raise CannotExamine(f"{given}; expected {LEAST:.0%} or more. With {it.question.words()} it refuses: {it.says}")


def _check_that_it_is_in_time(name: str, *answers: Answer) -> None:
    for late in (answer for answer in answers if answer.state == LATE):
        more = "It does not wait for a message there. Give it more time: --time-limit, or seconds="
        raise CannotExamine(f"{name} is slow, or this machine is: with {late.question.words()}, {late.says}. {more}")


def _ask_everything(
    found: Examination, jobs: dict[tuple[int, bool], Job], seed: int, quick: bool, progress: Callable[[str], None]
) -> None:
    """Ask the questions of each number of ranks. Parts of a job are asked of the job with a rank more."""
    patient = found.patient
    in_turns = {P: in_turn(patient, P, _dtype(found), seed, quick=quick) for P in patient.worlds}
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
                if question.feature in found.beyond or _tells_nothing(found, question, sick):
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
                found.answers += [it for it in refused if it.state == REFUSED][:1]
        for job in (jobs[world_size, False], jobs[world_size + 1, True]) if world_size > 1 else ():
            job.close()  # no larger number of ranks needs its processes


def _tells_nothing(found: Examination, question: Question, sick: Collection[Hashable]) -> bool:
    """Other calls before, where it is wrong without them or after equal ones; an option, where one rank takes none.

    And gradients of an lse that has none.
    """
    beside, alone = question.how.startswith(BESIDE), question.case.world_size == 1
    other_code = alone and question.case.seq_len != found.patient.chunk
    refused = other_code and not any(answer.results for answer in found.answers if answer.case.world_size == 1)
    no_lse = question.feature == LSE and not any(answer.lse_grad for answer in found.answers)
    harm = (question.case.causal, question.case.layout) in sick
    return no_lse or refused or (beside and (harm or any(it.question.how == "interleaved" for it in found.faults)))


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


def _fails(answer: Answer) -> bool:
    """Whether it failed, and said so: a hang is no such failure."""
    return answer.state in (REFUSED, FAILED) and not answer.hangs


Ask = Callable[..., Answer]  # of a patient, a way to ask, and what differs in the case


def _takes(found: Examination, job: Job, seed: int, progress: Callable[[str], None], reasons: set[str]) -> bool:
    """Whether the patient takes any question on so many ranks. Then it loses what it refuses, and gets what it needs.

    It is asked without gradients in each dtype, with heads for each rank, as an all-to-all needs them, and with a mask
    where it refuses to do without; in larger sizes, if it fails; under each mask and layout; with gradients. `reasons`
    are those for which it failed on other numbers of ranks, and get its own: neither dtypes nor sizes change them.
    """

    def ask(patient: Patient, how: str = "without gradients", **mask: Any) -> Answer:
        first = next(questions(patient, job.size, dtype_of(patient.dtypes[0]), seed))
        question = replace(first, how=how, feature="", case=replace(first.case, **mask))  # an error is no refusal
        progress(f"starting: {question.words()}")
        answer = job.ask(question)
        progress(f"starting: {question.words()}" + (f": {answer.says}" if answer.says else ""))
        return answer

    patient = found.patient
    asked, answer, reason = _first_taken(patient, ask, reasons)
    if answer.raised and _reason(answer) in reasons:
        return False
    if _fails(answer):
        patient = replace(patient, causal=asked.causal)
        if larger := _in_larger_sizes(patient, ask, SIZES[::-1] if answer.raised else SIZES[-1:], reason):
            before, now = (f"C = {of.chunk}, D = {of.head_dim}" for of in (patient, larger))
            found.remarks.append(f"with {before} it fails ({reason}): it is examined with {now}")
            asked, answer = larger, ask(larger)
        elif answer.raised:
            reasons.add(_reason(answer))
            return False
    dtype = asked.dtypes[0]
    if dtype != patient.dtypes[0]:
        found.remarks.append(f"it refuses {patient.dtypes[0]} ({reason}); it is examined in {dtype}")
        found.limits += [f"{dtype} only"] if torch.finfo(dtype_of(dtype)).bits == 16 else []
    elif asked.heads_per_rank > patient.heads_per_rank:
        found.remarks.append(f"with {patient.heads} heads it refuses ({reason}): it got {asked.heads_per_rank} a rank")
    found.patient = asked
    _check_that_it_is_in_time(asked.name, answer)
    if not answer.lost:
        _leave_out_masks(found, ask)
        answer = _leave_out_gradients(found, ask) if asked.gradients else answer
    found.answers += [answer] if answer.bad and answer.hangs else []
    if answer.in_float32 and asked.dtypes[1:]:
        found.remarks.append("with float64 it is only as exact as with float32; it is examined in float32")
        found.patient = replace(found.patient, dtypes=asked.dtypes[1:])
    return True


def _reason(answer: Answer) -> str:
    """What it says, with the line of the user's code."""
    return answer.says if not answer.where or answer.where in answer.says else f"{answer.says} ({answer.where})"


def _first_taken(patient: Patient, ask: Ask, reasons: Collection[str] = ()) -> tuple[Patient, Answer, str]:
    """In the first dtype and number of heads that it takes, and what it says of the first ones.

    Raises CannotExamine where the reason is a typing mistake, or no attention is returned.
    """
    heard: list[str] = []
    for i, per_rank in itertools.product(range(len(patient.dtypes)), (0, 2)):
        asked = replace(patient, heads_per_rank=per_rank, dtypes=patient.dtypes[i:])
        answer = ask(asked)
        if answer.raised and (answer.typing_mistake or (answer.returned and per_rank)):
            raise CannotExamine(f"{patient.name} answers no question: {_reason(answer)}")
        if answer.state == REFUSED and answer.says not in heard and asked.causal == (False, True):
            masked = replace(asked, causal=(True, False))
            if (under_a_mask := ask(masked)).says != answer.says:  # the mask is a reason: from now on it comes first
                asked, answer, patient = masked, under_a_mask, replace(patient, causal=masked.causal)
        heard.append(answer.says)
        if not answer.raised or _reason(answer) in reasons:
            break
    return asked, answer, heard[0]


def _in_larger_sizes(patient: Patient, ask: Ask, sizes: Sequence[int], reason: str) -> Patient | None:
    """With the smallest head, and then the shortest chunk, that it takes; None where it takes none of the sizes."""
    first = {n: ask(replace(patient, head_dim=n, chunk=n)) for n in sizes}
    for n in (n for n, answer in first.items() if answer.says != reason):  # else this size changes nothing
        found, answer, _ = _first_taken(replace(patient, head_dim=n, chunk=n), ask)
        if not _fails(answer):
            break
    else:
        return None
    heads = (replace(found, head_dim=n) for n in (patient.head_dim, *SIZES))
    found = next((each for each in heads if not _fails(ask(each))), found)
    chunks = (replace(found, chunk=n) for n in (patient.chunk, *SIZES))
    return next((each for each in chunks if not _fails(ask(each))), found)


def _leave_out_masks(found: Examination, ask: Ask) -> None:
    """Masks and layouts that the patient refuses; if it refuses all, none."""
    patient = found.patient
    takes: dict[bool, list[str]] = {}
    for causal in patient.causal:
        for layout in patient.layouts if causal or len(patient.causal) == 1 else patient.layouts[:1]:
            answer = ask(patient, causal=causal, layout=layout)
            if answer.state != REFUSED:
                takes.setdefault(causal, []).append(layout)
                continue
            found.answers.append(answer)
            found.remarks.append(f"{answer.case.mask()}: it refuses this, so it was asked no more of it")
    if takes:
        found.patient = replace(patient, causal=tuple(sorted(takes)), layouts=tuple(takes.get(True) or takes[False]))


def _leave_out_gradients(found: Examination, ask: Ask) -> Answer:
    """Gradients, if the patient refuses them. The answer with them, or the one without them if it gives only this."""
    patient = found.patient
    answer = ask(patient, "plain")
    if not answer.raised or (forward := ask(patient)).raised:
        return answer
    if answer.says.startswith(REFUSALS):
        found.limits.append(f"the forward pass only: with inputs that need gradients, {answer.says}")
        found.patient = replace(patient, gradients=False)
    else:
        found.remarks.append("it answers without gradients. For the forward pass only? Ask with --forward-only")
    return forward
