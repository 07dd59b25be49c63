"""What a patient takes: in which dtype, sizes, order of dimensions, masks and layouts it can be examined at all.

    takes(found, job, ...)        the patient of `found` loses what it refuses, and gets what it needs
    check_what_is_given(...)      a right ring that is asked for another layout, or without its mask, is not sick

Before: job.py. After: examination.py, which asks everything else.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ring_doctor.asking.answers import FAILED, LATE, REFUSED, Answer, Examination
from ring_doctor.asking.job import REFUSALS, CannotExamine, Job, Tell
from ring_doctor.asking.patient import TENSORS, Patient, dtype_of
from ring_doctor.asking.questions import questions
from ringlab.ring.layouts import LAYOUTS

SIZES = (8, 16, 32, 64, 128)  # of a head and of a chunk: kernels take multiples of one of them
Ask = Callable[..., Answer]  # of a patient, a way to ask, and what differs in the case


def takes(found: Examination, job: Job, seed: int, progress: Tell, reasons: set[str]) -> bool:
    """Whether the patient takes any question on so many ranks. Then it loses what it refuses, and gets what it needs.

    It is asked without gradients in each dtype, with heads for each rank, as an all-to-all needs them, and with a mask
    where it refuses to do without; in larger sizes, if it fails; under each mask and layout; with gradients. `reasons`
    are those for which it failed on other numbers of ranks, and get its own: neither dtypes nor sizes change them.
    """

    def ask(patient: Patient, how: str = "without gradients", **mask: Any) -> Answer:
        first = next(questions(patient, job.size, seed))
        question = replace(first, how=how, feature="", case=replace(first.case, **mask))  # an error is no refusal
        progress(f"starting: {question.words()}")
        answer = job.ask(question)
        progress(f"starting: {question.words()}" + (f": {answer.says}" if answer.says else ""))
        return answer

    patient = found.patient
    asked, answer, reason = _first_taken(patient, ask, reasons)
    if answer.raised and why(answer) in reasons:
        return False
    if _fails(answer):
        patient = replace(patient, causal=asked.causal)
        if larger := _in_larger_sizes(patient, ask, SIZES[::-1] if answer.raised else SIZES[-1:], reason):
            before, now = (f"C = {of.chunk}, D = {of.head_dim}" for of in (patient, larger))
            found.remarks.append(f"with {before} it fails ({reason}): it is examined with {now}")
            asked, answer = larger, ask(larger)
        elif answer.raised:
            reasons.add(why(answer))
            return False
    dtype = asked.dtypes[0]
    if dtype != patient.dtypes[0]:
        found.remarks.append(f"it refuses {patient.dtypes[0]} ({reason}); it is examined in {dtype}")
        found.limits += [f"{dtype} only"] if torch.finfo(dtype_of(dtype)).bits == 16 else []
    elif asked.heads_per_rank > patient.heads_per_rank:
        heads = f"{patient.heads} heads on {answer.case.world_size} ranks"
        found.remarks.append(f"with {heads} it refuses ({reason}): it got {asked.heads_per_rank} a rank")
    found.patient = asked
    check_that_it_is_in_time(asked.name, answer)
    if not answer.lost:
        _leave_out_masks(found, ask)
        answer = _leave_out_gradients(found, ask) if asked.gradients else answer
    found.answers += [answer] if answer.bad and answer.hangs else []
    if answer.in_float32 and asked.dtypes[1:]:
        found.remarks.append("with float64 it is only as exact as with float32; it is examined in float32")
        found.patient = replace(found.patient, dtypes=asked.dtypes[1:])
    return True


def why(answer: Answer) -> str:
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
            raise CannotExamine(f"{patient.name} answers no question: {why(answer)}")
        if answer.state == REFUSED and answer.says not in heard and asked.causal == (False, True):
            masked = replace(asked, causal=(True, False))
            if (under_a_mask := ask(masked)).says != answer.says:  # the mask is a reason: from now on it comes first
                asked, answer, patient = masked, under_a_mask, replace(patient, causal=masked.causal)
        heard.append(answer.says)
        if not answer.raised or why(answer) in reasons:
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


def check_what_is_given(found: Examination, jobs: dict[tuple[int, bool], Job], seed: int) -> bool:
    """Whether the patient answers. Raises CannotExamine where it is right with something else only, and tells what.

    The most ranks that do not refuse get tensors in each order, and a mask and layouts where it has no argument for
    these. Then so do the fewest ranks, which may be right where a mistake is between ranks.
    """
    patient, worlds = found.patient, sorted(found.patient.worlds)
    masks = [True] if True in patient.causal else [False] if "causal" in patient.takes else [False, True]
    layouts = LAYOUTS if patient.layouts == LAYOUTS[:1] and "layout" not in patient.takes else patient.layouts[:1]
    forms = itertools.product(dict.fromkeys((patient.tensors, *TENSORS)), masks, layouts)
    asked, *others = [form for form in forms if form[1] or form[2] == layouts[0]]
    answers: list[Answer] = []
    for P in (*worlds[:0:-1], worlds[0]):
        if worlds[0] < P and any(answer.state != REFUSED for answer in answers):
            continue
        failed = set[str]()  # orders: no mask will mend them
        for form in (it for it in (asked, *others) if it[0] not in failed):
            tensors, causal, layout = form
            jobs[P, False].patient = replace(patient, tensors=tensors)
            first = next(questions(patient, P, seed))
            answer = jobs[P, False].ask(replace(first, case=replace(first.case, causal=causal, layout=layout)))
            if "out" in answer.results.keys() - answer.wrong.keys():
                options = f"--tensors {tensors}", "--causal", f"--layout {layout}"
                if other := [option for option, a, b in zip(options, form, asked, strict=True) if a != b]:
                    said = f"the output of {patient.name} is right with {answer.question.words()}, and not as asked"
                    raise CannotExamine(f"{said}: ask with {' '.join(other)}")
                return True
            answers.append(answer)
            if answer.lost and form == asked:
                return True  # that it hangs or dies is told
            failed |= {tensors} if answer.raised or answer.lost else set()
    return not all(answer.raised for answer in answers)


def _fails(answer: Answer) -> bool:
    """Whether it failed, and said so: a hang is no such failure."""
    return answer.state in (REFUSED, FAILED) and not answer.hangs


def check_that_it_is_in_time(name: str, *answers: Answer) -> None:
    """Raise CannotExamine for an answer that came too late."""
    for late in (answer for answer in answers if answer.state == LATE):
        more = "It does not wait for a message there. Give it more time: --time-limit, or seconds="
        raise CannotExamine(f"{name} is slow, or this machine is: with {late.question.words()}, {late.says}. {more}")
