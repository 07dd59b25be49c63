"""What is asked of which processes, and the verdict that follows from the answers. Most of it without processes."""

import faulthandler
import importlib
import itertools
import json
import math
import re
from collections import Counter
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_doctor import assertion
from ring_doctor.asking import examination
from ring_doctor.asking.answers import FAILED, LATE, OK, REFUSED, SAID, STATUS, WRONG, Answer, Examination
from ring_doctor.asking.calls import noted, written
from ring_doctor.asking.case import SIZES as SIZES_OF_V
from ring_doctor.asking.case import Case
from ring_doctor.asking.examination import ask_again, examination_of
from ring_doctor.asking.job import CannotExamine, Job, lines_of_ranks
from ring_doctor.asking.patient import patient_of
from ring_doctor.asking.questions import AFTER, BESIDE, LSE, UNEQUAL, Question, kind, questions
from ring_doctor.asking.state_case import StateCase
from ring_doctor.asking.together import without_one
from ring_doctor.assertion import assert_ring, examine, take_xray
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining.conditions import when_it_shows
from ring_doctor.explaining.diagnosis import FEW, Diagnosis, diagnose
from ring_doctor.explaining.explanation import Explanation
from ring_doctor.explaining.facts import Finding
from ring_doctor.explaining.inference import infer
from ring_doctor.explaining.xray import on_paper
from ring_doctor.mistakes.paper_ring import RIGHT, block_out
from ring_doctor.report import Report, as_json, found_in, text
from tests.doctor.examined import answer_on_paper, examined, on_these
from tests.wrong import odd_patients

P3 = Case(3, 18)
PLAIN, LARGE = Question(P3), Question(Case(3, 900))
UNEQUAL_CHUNKS = Question(Case(3, 19), feature=UNEQUAL)
OF_LSE = Question(P3, "gradient of lse", feature=LSE)
GROUPED = Question(Case(3, 18, heads=4), feature="grouped queries")
IN_16_BITS = Question(Case(3, 18, dtype=torch.bfloat16), feature="bfloat16")
LARGE_IN_16_BITS = Question(Case(3, 18, dtype=torch.bfloat16, inputs="large"), feature="bfloat16")
PATIENT = patient_of(odd_patients.right)
HOW = {"seconds": 7, "device": "meta"}


def with_everything(q, k, v, causal=False, window=None, documents=None, sinks=None, scale=None, group=None):
    return q


# The verdict ---------------------------------------------------------------------------------------------------------


def answer(question, state, error=0.1, **more):
    """An answer; a wrong one has an output that is off by this share."""
    if state in (REFUSED, FAILED, LATE):
        return Answer(question, state, **{"says": "a reason", "raised": state == REFUSED, **more})
    case = question.case
    x = torch.zeros(case.batch, case.heads, case.seq_len, case.value_dim or case.head_dim, dtype=torch.float64)
    wrong = {"wrong": {"out": 9.0}, "ranks": {"out": (0,)}} if state == WRONG else {}
    errors = {"errors": {"out": (error, 1e-9)}, "relative": {"out": error}}
    return Answer(question, state, results={"lse": x[..., 0], "out": x + error}, **wrong, **errors, **more)


def of_results(**errors):
    """What an answer says when these results are off by so much."""
    numbers = {name: (error, 1e-9) for name, error in errors.items()}
    wrong = {"wrong": dict.fromkeys(errors, 9.0), "ranks": dict.fromkeys(errors, (0,))}
    return {**wrong, "errors": numbers, "relative": errors}


def said(report):
    """A report without its answers and its X-ray."""
    mistakes = [f"mistakes: {', '.join(it.name for it in report.mistakes)}"] if report.mistakes else []
    return [f"{report.level}: {report.verdict}", *(f"remark: {remark}" for remark in report.remarks), *mistakes]


def test_the_headline_of_an_xray_is_of_its_question():
    """What it shows need not be true of the first wrong answer."""
    xray, shown = on_paper(Case(4, 16, True)), Finding("X-ray (P = 4): round 1 on rank 2: missing")
    views = replace(PLAIN, how="views")
    of_both = [Report(Examination(PATIENT, [answer(views, WRONG)]), None, x, (shown,)).finding for x in (xray, "")]
    assert [said.partition("missing, as with ")[2] for said in of_both] == [xray.case.words(), views.words()]


SECOND = [  # after a right one
    answer(PLAIN, OK),
    answer(UNEQUAL_CHUNKS, OK),
    answer(PLAIN, WRONG),
    answer(GROUPED, REFUSED),
    answer(GROUPED, FAILED),
    answer(GROUPED, FAILED, returned=True),  # it took the input
    answer(GROUPED, FAILED, lost=True),  # it dies
    answer(GROUPED, FAILED, lost=True, hangs=True),
    answer(UNEQUAL_CHUNKS, FAILED, lost=True),
    answer(UNEQUAL_CHUNKS, FAILED, lost=True, hangs=True),
    answer(PLAIN, FAILED, lost=True),
    answer(GROUPED, WRONG),
    answer(UNEQUAL_CHUNKS, WRONG),
    answer(OF_LSE, WRONG),
    answer(IN_16_BITS, WRONG, 32 / 128),
    answer(IN_16_BITS, WRONG, 33 / 128),  # more than 32 steps of bfloat16
    answer(IN_16_BITS, WRONG, float("inf")),
    replace(answer(IN_16_BITS, WRONG, 32 / 128), **of_results(out=0.25, dq=0.5)),
    answer(LARGE_IN_16_BITS, WRONG, 2.0),
    answer(LARGE_IN_16_BITS, WRONG, float("inf")),
    answer(Question(replace(P3, dtype=torch.float32)), WRONG, 1e-4),
    answer(Question(replace(P3, causal=True, dtype=torch.bfloat16)), WRONG, 32 / 128),  # not asked so in float64
    answer(Question(Case(4, 24, dtype=torch.bfloat16)), WRONG, 32 / 128),  # nor so
    answer(replace(IN_16_BITS, how="autocast"), WRONG, 32 / 128),
]
RAISED, CHANGING = answer(PLAIN, FAILED, says="rank 1 raised X"), answer(GROUPED, WRONG, changes=True)
HEADLINES = [  # how many mistakes are named, or none and no pattern is seen; and the answers
    (1, [answer(PLAIN, WRONG)]),
    (2, [answer(PLAIN, WRONG)]),
    (3, [answer(PLAIN, WRONG)]),
    (0, [answer(PLAIN, WRONG)]),
    (None, [answer(PLAIN, WRONG)]),
    (1, [answer(PLAIN, WRONG), RAISED]),
    (3, [answer(PLAIN, WRONG), RAISED]),
    (0, [answer(UNEQUAL_CHUNKS, FAILED), RAISED]),
    (1, [answer(PLAIN, WRONG, changes=True), RAISED]),
    (0, [answer(PLAIN, WRONG, changes=True, draws=True), replace(CHANGING, **of_results(lse=0.1))]),
    (None, [answer(IN_16_BITS, WRONG, 32 / 128), answer(PLAIN, WRONG)]),  # roundings beside a mistake are no excuse
    (None, [answer(UNEQUAL_CHUNKS, FAILED, hangs=True), answer(PLAIN, WRONG)]),
    (None, [answer(UNEQUAL_CHUNKS, WRONG), answer(PLAIN, WRONG)]),
    (None, [answer(UNEQUAL_CHUNKS, WRONG), answer(GROUPED, WRONG)]),  # in which grouped queries have no part
    (None, [answer(UNEQUAL_CHUNKS, FAILED), answer(GROUPED, WRONG)]),
    (0, [answer(GROUPED, FAILED, says="rank 1 raised X"), RAISED, replace(RAISED, **of_results(out=0.1))]),
    (None, [answer(replace(PLAIN, how="views"), FAILED, says="rank 2 raised Y"), RAISED]),  # asked plainly it fails too
]
CLAIMED = [  # a function, what is claimed, and the answers after a right one
    (odd_patients.with_sinks, {}, []),
    (odd_patients.own_chunk, {"causal": True}, []),
    (odd_patients.own_chunk, {}, []),
    *((odd_patients.own_chunk, {"causal": causal}, [answer(PLAIN, WRONG)]) for causal in (False, True)),
    (odd_patients.with_sinks, {"unequal": False}, []),
    (odd_patients.with_sinks, {}, [answer(GROUPED, REFUSED)]),
    (odd_patients.with_sinks, {}, [answer(GROUPED, REFUSED), answer(GROUPED, OK)]),
    (with_everything, {}, []),
    (with_everything, {"causal": False}, [answer(PLAIN, WRONG)]),
    (odd_patients.with_sinks, {"shape": (1, 2, 2, 12, 4)}, []),
    (odd_patients.with_sinks, {}, [answer(it, FAILED, says=f"no\n{it}") for it in (GROUPED, UNEQUAL_CHUNKS)]),
]


def headline(named, answers):
    explanations = tuple(Explanation((mistake,), id) for mistake in list(CATALOGUE.values())[: named or 0])
    found = Diagnosis(explanations, tuple(answers), "in zigzag" if named in (0, 3) else "in every question")
    shown = Finding("X-ray (P = 3, no mask): W", "the number of rounds", "round 0 on every rank: counted twice")
    return Report(Examination(PATIENT, answers), found, "", (shown, Finding("more")) if named in (0, 3) else ())


def of_p3(**case):
    return Question(replace(P3, **case))


KINDS = [answer(of_p3(causal=causal), WRONG, 0.5) for causal in (False, True, True)]  # of wrong answers, and others
KINDS += [answer(of_p3(dtype=torch.bfloat16), WRONG, 0.5), answer(of_p3(batch=2), WRONG, 0.25), SECOND[0], RAISED]
KINDS += [answer(of_p3(batch=batch), REFUSED, says="ValueError: no") for batch in (1, 2)]
KINDS += [answer(Question(Case(1, 6)), OK), replace(KINDS[0], **of_results(dq=0.5))]
TEXTS = {
    "text of all kinds": KINDS,
    "text of infinity": [answer(PLAIN, WRONG, math.inf)],
    **{f"text of {n} kinds": [answer(of_p3(batch=batch), WRONG) for batch in range(1, n + 1)] for n in (12, 14)},
}
XRAYED = {
    f"text with {of} X-ray": replace(headline(1, [answer(PLAIN, WRONG)]), xray=on_paper(Case(3, 12), steps))
    for of, steps in (("a right", RIGHT), ("a wrong", CATALOGUE["own_block_twice"].variants[0](RIGHT)))
}
OF_TWO = [answer(of_p3(causal=True, window=3), WRONG), answer(of_p3(batch=2), WRONG)]  # the X-ray has a window
SHORTER = on_paper(Case(3, 12, True, window=3), CATALOGUE["window_one_less"].variants[0](RIGHT))
XRAYED["text of two"] = Report(Examination(PATIENT, OF_TWO), Diagnosis((), tuple(OF_TWO), ""), SHORTER)
NAMELESS = replace(XRAYED["text with a right X-ray"], diagnosis=None)
TWICE = (Explanation((CATALOGUE["own_block_twice"],), id),) * 2
XRAYED |= {"text of a right X-ray alone": NAMELESS}
XRAYED |= {"text of one twice": replace(it := headline(1, []), diagnosis=replace(it.diagnosis, explanations=TWICE))}
THREE = headline(3, []).diagnosis.explanations
REPORTS = {
    **XRAYED,
    **{
        f"{n} others": replace(
            it := headline(1, []), diagnosis=replace(it.diagnosis, rest="dv", count=n, others=THREE[:n])
        )
        for n in (0, 2)
    },
    "limited beside unequal chunks": Report(
        Examination(PATIENT, [SECOND[0], answer(UNEQUAL_CHUNKS, FAILED)], limits=["x"]), None, ""
    ),
    "no word of lse beside a wrong ring": Report(
        Examination(PATIENT, [answer(PLAIN, WRONG), answer(OF_LSE, WRONG)]), None, ""
    ),
    **{name: Report(Examination(PATIENT, answers), None, "none was taken") for name, answers in TEXTS.items()},
    **{f"second answer {i}": Report(Examination(PATIENT, [SECOND[0], it]), None, "") for i, it in enumerate(SECOND)},
    **{f"headline {i}": headline(*it) for i, it in enumerate(HEADLINES)},
    **{
        f"claim {i}": Report(
            Examination(patient_of(function, function.__name__, **claims), [SECOND[0], *answers]), None, ""
        )
        for i, (function, claims, answers) in enumerate(CLAIMED)
    },
}
TOLD = Path(__file__).with_name("told.txt")  # python -m tests.doctor.test_examination writes it


def verdict_of(name):
    """What follows from answers: the level, the first line and the remarks."""
    report = REPORTS[name]
    asked = (f"{it.state}: {it.question.words()}" for it in report.examination.answers)
    lines = text(report).splitlines() if name in TEXTS | XRAYED else said(report)
    lines += json.dumps(as_json(report) | {"torch": ""}, indent=1).splitlines() if name in XRAYED else []
    return "\n    ".join([name, *asked, *lines]) + "\n\n"


@pytest.mark.parametrize("name", REPORTS)
def test_a_verdict_follows_from_the_answers_and_assert_ring_from_it(name):
    """assert_ring raises without a diagnosis too, as for a ring that hangs."""
    report = REPORTS[name]
    assert verdict_of(name) in TOLD.read_text()
    assert report.healthy == (STATUS[report.level] == 0)
    in_json = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert in_json["level"] == report.level
    assert len(in_json["mistakes"]) <= FEW  # those of the verdict
    raises = nullcontext() if report.healthy else pytest.raises(AssertionError, match=f"^{SAID[report.level]}: ")
    with mock.patch.object(assertion, "examine", return_value=report), raises:
        assert_ring(odd_patients.right)


def test_the_worst_share_is_told_and_a_wider_dtype_where_all_its_questions_are_right():
    wrong = answer(IN_16_BITS, WRONG, 0.25)
    causal = replace(wrong, question=of_p3(causal=True, dtype=torch.bfloat16))
    assert Report(Examination(PATIENT, [SECOND[0], wrong, causal]), None, "").remarks == ["It is imprecise in 16 bits."]
    worst = found_in(replace(wrong, errors=wrong.errors | {"dq": (9.0, 10.0)}))
    assert worst.endswith("one number of out is off by 2.5e-01, rounding allows 1.0e-09")
    of_zero = found_in(replace(wrong, relative={"out": 5e15}))  # no share of the norm
    assert of_zero.startswith("out: off by more than 1e9 times the norm, as where 0 is right; one number of out is")


@pytest.mark.parametrize(
    ("named", "more", "changes", "unclear"),
    [
        *((n, {}, False, n in (0, 3)) for n in range(4)),  # of three names none is told
        (0, {}, True, False),
        (1, {"rest": "dv"}, False, True),
        (1, {"rest": "dv", "others": THREE[:1]}, False, False),
    ],
)
def test_what_the_numbers_show_is_told_where_no_name_explains_all(named, more, changes, unclear):
    """Meanwhile one thread computes, and afterwards, also after an error, as many as before."""
    report, parts = headline(named, [answer(PLAIN, WRONG, changes=changes)]), {"infer": [Finding("more")]}
    parts["take_xray"] = "no ranks"
    parts["diagnose"] = replace(report.diagnosis, **more)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(examination, "examination_of", return_value=report.examination))
        threads = stack.enter_context(mock.patch.object(torch, "set_num_threads"))
        before = lambda: threads.call_args.args[0] if threads.called else 7  # noqa: E731
        stack.enter_context(mock.patch.object(torch, "get_num_threads", before))
        for name, value in parts.items():
            stack.enter_context(mock.patch.object(assertion, name, return_value=value))
        found = examine(PATIENT, **HOW)
        assert changes or assertion.take_xray.call_args.kwargs == HOW
        with mock.patch.object(assertion, "diagnose", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            examine(PATIENT)
    assert (bool(found.inference), found.xray) == (unclear, "none was taken" if changes else "no ranks")
    assert [call.args[0] for call in threads.call_args_list] == [1, 7, 1, 7]


class Runs:
    """The ranks of an X-ray: right ones, but for the sizes of V; the heads that they are asked with are noted."""

    def __init__(self, patient, size, **how):
        self.heads, self.closed, self.how, Runs.last = set(), False, (size, how), self

    def ask(self, question):
        self.heads.add(question.case.heads)
        twice = {"out": 2.0} if question.case.inputs == SIZES_OF_V else {}
        return answer_on_paper(question, change=lambda case, x: {n: twice.get(n, 1.0) * y for n, y in x.items()})

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("claims", "heads"), [({}, 1), ({"heads": 2}, 1), ({"heads": 3}, 3), ({"heads_per_rank": 2}, 6)]
)
def test_an_xray_has_the_heads_that_a_ring_needs_and_a_third_run_where_two_are_right(claims, heads):
    patient, failed = replace(PATIENT, **claims), answer(PLAIN, FAILED, says="no")
    with mock.patch.object(assertion, "Job", Runs):
        found = take_xray(patient, Question(Case(3, 12, head_dim=12)), **HOW)
    assert (Runs.last.heads, found.case.inputs, found.right, Runs.last.closed) == ({heads}, SIZES_OF_V, False, True)
    assert Runs.last.how == (3, HOW)
    with mock.patch.object(Runs, "ask", return_value=failed), mock.patch.object(assertion, "Job", Runs):
        said = take_xray(patient, PLAIN)
        assert take_xray(patient, Question(StateCase(4, 12)), **HOW) == "none: no"
    assert Runs.last.how == (4, HOW)
    assert said == "none, because with P = 3, no mask, contiguous, C = 6, float64 it fails: no"


# What is asked, of which job -----------------------------------------------------------------------------------------


class Replies:
    """A job that gives these answers in turn, the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), 0

    def ask(self, question):
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


ALLOWED = float(P3.right()["out"].allowed.min())  # two right answers differ by twice as much at most
DIGITS, WRONG_2 = (answer(PLAIN, WRONG, 0.1 + share * ALLOWED) for share in (1.9, 2.1))
WRONG_2.results["out"][..., 1:] = 0.1  # one number of a row is enough, and one result


@pytest.mark.parametrize(
    ("replies", "state", "changes", "asked"),
    [
        ([answer(PLAIN, OK)], OK, False, 1),
        ([answer(LARGE, OK)], OK, False, 3),
        ([answer(PLAIN, WRONG)], WRONG, False, 3),
        ([answer(PLAIN, WRONG), answer(PLAIN, OK)], WRONG, True, 2),
        ([answer(PLAIN, WRONG), answer(PLAIN, WRONG), answer(PLAIN, OK)], WRONG, True, 3),
        ([answer(PLAIN, WRONG), WRONG_2], WRONG, True, 2),
        ([answer(PLAIN, WRONG), DIGITS], WRONG, False, 3),  # the last digits of a wrong number
        ([answer(PLAIN, WRONG, math.nan), answer(PLAIN, WRONG)], WRONG, True, 2),
        ([answer(PLAIN, WRONG, math.nan)], WRONG, False, 3),
        ([answer(LARGE, OK), answer(LARGE, OK), answer(LARGE, WRONG)], WRONG, True, 3),
        ([answer(PLAIN, WRONG), answer(PLAIN, FAILED)], WRONG, True, 2),
        ([answer(PLAIN, FAILED)], FAILED, False, 1),
    ],
)
def test_a_wrong_answer_and_a_large_one_are_asked_three_times(replies, state, changes, asked):
    job = Replies(*replies)
    found = ask_again(job, replies[0].question)
    assert (found.state, found.changes, job.asked) == (state, changes, asked)


def examination_by(reply, made, quick=False, function=odd_patients.right, **claims):
    """The examination of a ring whose jobs reply so: they are added to `made`."""

    class Fake:
        ask_with_fewer = Job.ask_with_fewer

        def __init__(self, patient, size, *_):
            self.patient, self.size, self.lost, self.asked, self.closed, self.spoilt = patient, size, 0, 0, False, False
            made.append(self)

        def ask(self, question):
            assert self.size == question.case.world_size + (question.members is not None)
            assert not self.closed
            self.asked += 1
            given = reply(question, self)
            given = given if isinstance(given, Answer) else answer(question, given)
            self.lost += given.lost
            return given

        def close(self):
            self.closed = True

        def restart(self):
            self.spoilt = False

    with mock.patch.object(examination, "Job", Fake):
        return examination_of(patient_of(function, **claims), quick=quick)


def told(reply, quick=False, **claims):
    """What is told of a ring whose jobs reply so, what is asked of it, and how it is examined."""
    made = []
    try:
        found = examination_by(reply, made, quick, **claims)
    except CannotExamine as error:
        return [f"CANNOT TELL: {error}", f"asked: {sum(job.asked for job in made)}"]
    finally:
        assert all(job.closed for job in made)
    patient, asked = found.patient, Counter((it.case.world_size, it.state) for it in found.answers)
    sizes = f"C = {patient.chunk}, D = {patient.head_dim}, {patient.heads} heads, {', '.join(patient.dtypes)}"
    return [
        *said(Report(found, None, "")),
        *(f"limit: {limit}" for limit in found.limits),
        "answers: " + ", ".join(f"P = {P} {n} {state}" for (P, state), n in sorted(asked.items())),
        f"examined: {sizes}, {', '.join(patient.layouts)}, {'with' if patient.gradients else 'without'} gradients",
        "not right: " + "; ".join(it.question.words() for it in found.faults[:3]),
    ]


def which(wrong, state=REFUSED, **facts):
    """OK, but for the questions of which `wrong` is true."""
    return lambda question, job: answer(question, state, **facts) if wrong(question) else OK


def needs(takes, state=REFUSED, then=lambda question, job: OK, **facts):
    refused = which(lambda question: not takes(question.case), state, **facts)
    return lambda question, job: then(question, job) if takes(question.case) else refused(question, job)


def always(**facts):
    return lambda question, job: answer(question, OK, **facts)


def raises(kind, says):
    error = {"raised": True, "kind": kind, "where": "ring.py, line 3 in f"}
    return lambda question, job: replace(answer(question, FAILED, **error), says=says)


def raises_under_a_mask(question, job):
    return answer(question, FAILED, raised=True) if question.case.causal else OK


def causal_only(case):
    return "" if case.causal else "causal only"


def narrow(case):
    return "" if case.dtype == torch.bfloat16 else "bfloat16 only"


def refuses_in_words(*reasons):
    """The first reason that there is."""

    def reply(question, job):
        said = next(filter(None, (reason(question.case) for reason in reasons)), "")
        return answer(question, REFUSED, says=f"ValueError: {said}") if said else OK

    return reply


def made_for_a_length(question, job):
    """Right in new processes, which a ring gets that is known to keep a length."""
    case = question.case
    if case.heads != case.kv_heads or question.how == AFTER:
        return answer(question, REFUSED, raised=True)
    return OK if case.seq_len == 6 * case.world_size or job.keeps else answer(question, FAILED, raised=True)


def made_for_a_length_and_heads(question, job):
    """What it raises is no refusal, and no reason for new processes: a call after another length is."""
    state = made_for_a_length(question, job)
    return replace(state, state=FAILED) if isinstance(state, Answer) else state


def keeps_heads(question, job):
    """Wrong beside calls with other heads, and from then on in the same processes."""
    job.spoilt = job.spoilt or question.how == f"{BESIDE}heads"
    return WRONG if job.spoilt else OK


def right_at_first(question, job):
    """Wrong after any other call in the same processes."""
    job.spoilt, before = True, job.spoilt
    return answer(question, WRONG) if before else answer(question, OK, 0.0)


def in_16_bits(to):
    steps = replace(RIGHT, block_out=lambda s, v: block_out(s, v).to(to).double())
    plain = lambda it: it.case.dtype == torch.bfloat16 and it.how == "plain"  # noqa: E731
    return lambda question, job: answer_on_paper(question, steps) if plain(question) else OK


def in_float32(asked, numbers):
    """As exact as float32 where `asked` says so; each result holds one number. Float32 has 0.5, and not 0.1."""

    def reply(question, job):
        found = answer(question, OK)
        if question.case.dtype == torch.float64 and asked(question):
            results = {name: torch.full_like(found.results["out"], x) for name, x in numbers.items()}
            ranks, errors = (dict.fromkeys(results, x) for x in ((0,), (1e-8, 1e-12)))
            return replace(found, results=results, in_float32=True, ranks=ranks, errors=errors)
        return found

    return reply


def forward_only(says):
    def reply(question, job):
        fine = question.how == "without gradients" or not job.patient.gradients
        narrow = question.case.dtype == torch.float64
        return answer(question, OK, in_float32=narrow) if fine else Answer(question, FAILED, says, raised=True)

    return reply


def changing(least, **more):
    """Wrong on so many ranks and more, with other numbers in each call."""
    calls = count(1)
    return lambda question, job: (
        answer(question, WRONG, float(next(calls)), **(more if question.watched else {}))
        if question.case.world_size >= least
        else OK
    )


def three(question):
    return question.case.world_size == 3 and question.members is None


def views(question):
    return question.how == "views"


def two_calls(question):
    return question.how == "interleaved" or question.how.startswith(BESIDE)


def masked_or_in_a_batch(question):
    return question.case.causal or question.case.batch > 1


def in_sbhd(other):
    return lambda question, job: OK if job.patient.tensors == "sbhd" else other


def in_stripes(question, job):
    """Made for a causal mask in the striped layout, in which one rank is as in any other."""
    return OK if question.case.causal and (question.case.layout == "striped" or job.size == 1) else WRONG


def dies_in_zigzag(question, job):
    if question.case.causal and job.size > 1 and question.case.layout != "contiguous":
        return answer(question, FAILED, lost=True) if question.case.layout == "zigzag" else OK
    return WRONG if question.case.causal and job.size > 1 else OK


def hangs_but_in_sbhd(question, job):
    return OK if job.patient.tensors == "sbhd" else answer(question, FAILED, lost=True, hangs=True)


def one_rank_in_sbhd(question, job):
    return OK if job.size == 1 and job.patient.tensors == "sbhd" else WRONG


def plainly(state):
    return lambda question, job: state if question.how == "plain" else REFUSED


def wrong_views_on_4(question, job):
    return WRONG if question.case.world_size == 4 and views(question) else which(three)(question, job)


SIZES = {
    "D is no multiple of 8": lambda case: case.head_dim % 8 == 0,
    "C is no multiple of 16": lambda case: case.seq_len % (16 * case.world_size) == 0,
    "C or D is odd": lambda case: case.seq_len % (16 * case.world_size) == case.head_dim % 64 == 0,
    "it is called": lambda case: False,
}
ENDS = {"raises": {"raised": True}, "dies": {"lost": True}, "hangs": {"lost": True, "hangs": True}}
UNEQUALLY, ANY = (lambda question: question.feature == UNEQUAL), (lambda question: True)
MASKED, PLAINLY = (lambda question: question.case.causal), {"unequal": False, "grouped": False, "own_values": False}
TWO_WORLDS = {"worlds": (1, 3), "dtypes": "float64"}
RINGS = {  # what a ring does: the replies to questions, and what is claimed
    **{f"refuses where {of}": (needs(takes), {}) for of, takes in SIZES.items()},
    **{f"{end} where C or D is odd": (needs(SIZES["C or D is odd"], FAILED, **how), {}) for end, how in ENDS.items()},
    **{f"{end} where it is called": (which(ANY, FAILED, **how), {}) for end, how in ENDS.items()},
    "refuses 3 ranks and more": (needs(lambda case: case.world_size < 3), {}),
    "refuses all but the plain questions": (which(lambda each: kind(each) != kind(Question(each.case))), {}),
    "refuses other ways to ask than plainly": (which(lambda each: each.how != "plain"), {}),
    "is late with views": (which(views, LATE), {}),
    "is late": (which(ANY, LATE), {}),
    **{f"is {other} but in another order": (in_sbhd(other), {}) for other in (REFUSED, WRONG, FAILED)},
    "is made for masked stripes": (in_stripes, {"function": odd_patients.own_chunk}),
    "is made for stripes, and has a mask": (in_stripes, {"function": odd_patients.own_chunk, "causal": True}),
    "is for masked stripes, and takes both": (in_stripes, {"worlds": 3}),
    "is made for masked stripes, for zigzag as said": (
        in_stripes,
        {"function": odd_patients.own_chunk, "causal": True, "layouts": "zigzag", "worlds": 3},
    ),
    "dies in another layout": (dies_in_zigzag, {"function": odd_patients.sequence_first, "worlds": 3}),
    "is right in another layout, which it takes": (
        which(lambda question: question.case.causal and question.case.layout == "contiguous", WRONG),
        {"layouts": "contiguous", "worlds": 3},
    ),
    "hangs but in another order": (hangs_but_in_sbhd, {"worlds": 3}),
    "is made for stripes, and refuses 1 and 5 ranks": (
        needs(lambda case: 1 < case.world_size < 5, then=in_stripes),
        {"function": odd_patients.own_chunk},
    ),
    "is right on one rank in another order": (one_rank_in_sbhd, {"worlds": (1, 3)}),
    **{f"is {state} plainly, and refuses all else": (plainly(state), {}) for state in (FAILED, WRONG)},
    "refuses stripes": (needs(lambda case: case.layout != "striped"), {}),
    "refuses fewer heads than ranks": (needs(lambda case: case.heads % case.world_size == 0), {}),
    "takes float32 only": (needs(lambda case: case.dtype == torch.float32), {}),
    "takes bfloat16 only": (needs(lambda case: case.dtype == torch.bfloat16), {}),
    "takes D of 16, 32 and 64": (needs(lambda case: case.head_dim in (16, 32, 64)), {}),
    "has no such name": (raises("NameError", "NameError: no such name (ring.py, line 3 in f)"), {}),
    "has nothing": (raises("TypeError", "TypeError: 'NoneType' object has no length"), {}),
    "raises under a causal mask": (raises_under_a_mask, {}),
    "takes a causal mask only": (refuses_in_words(causal_only), {}),
    "takes bfloat16 under a causal mask only": (refuses_in_words(narrow, causal_only), {}),
    "raises in 16 bits in a part": (
        which(lambda it: it.members and it.case.dtype.itemsize == 2, FAILED, raised=True),
        {},
    ),
    "raises on one rank": (which(lambda each: each.case.world_size == 1, FAILED, raised=True), {}),
    "raises with grouped queries, and is made for its first length": (made_for_a_length_and_heads, {}),
    "is made for its first length, and refuses grouped queries": (made_for_a_length, {}),
    "returns no attention": (which(ANY, FAILED, raised=True, returned=True), {}),
    "has no such key": (raises("KeyError", "KeyError: 'LOCAL_RANK'"), {}),
    "knows no such size": (raises("KeyError", "KeyError: 6"), {}),
    "keeps heads": (keeps_heads, {"worlds": 3}),
    "is wrong in two passes, and beside other calls": (which(two_calls, WRONG), {"worlds": 3}),
    "is wrong under a causal mask, and in a batch": (which(masked_or_in_a_batch, WRONG), {"worlds": 3}),
    "refuses 3 ranks": (which(three), {}),
    "refuses 3 ranks, and is wrong with views on 4": (wrong_views_on_4, {}),
    "has an lse with a gradient": (always(lse_grad=True), {}),
    "draws random numbers": (always(draws=True), {"worlds": 3}),
    "returns blocks in bfloat16": (in_16_bits(torch.bfloat16), PLAINLY | {"worlds": 4}),
    "returns blocks in float32": (in_16_bits(torch.float32), PLAINLY | {"worlds": 4}),
    "computes in float32": (in_float32(ANY, {"out": 0.1}), {}),
    "computes in float32 under a mask": (in_float32(MASKED, {"out": 0.1}), {}),
    "computes in float32 under a mask, exactly": (in_float32(MASKED, {"out": 0.5}), {}),
    "has gradients in float32 under a mask": (in_float32(MASKED, {"out": 0.5, "dq": 0.1}), {}),
    "dies of unequal chunks": (which(UNEQUALLY, FAILED, lost=True), {}),
    "hangs of unequal chunks": (which(UNEQUALLY, FAILED, lost=True, hangs=True), {}),
    "refuses gradients": (forward_only("ValueError: no"), {"worlds": 3, "dtypes": ("float64", "float32")}),
    "fails with gradients": (forward_only("RuntimeError: no"), {"worlds": 3, "dtypes": ("float64", "float32")}),
    "changes on one rank": (changing(1), TWO_WORLDS),
    "changes on 3 ranks": (changing(2), TWO_WORLDS),
    "is right at first": (right_at_first, {"worlds": 3}),
    "waits for no message": (changing(2, unawaited=("ring.py, line 3 in f",)), TWO_WORLDS),
}


@pytest.mark.parametrize("chunk", [4, 6])
def test_documents_end_with_the_sequence(chunk):
    """With all options, without one, and on two ranks."""
    patient = patient_of(with_everything, chunk=chunk)
    of_all = [it for P in patient.worlds for it in questions(patient, P, 0)]
    cases = [each for it in of_all for each in (it.case, *(without_one(patient, it.case) if it.together else ()))]
    documents = [(case.documents or (case.seq_len,), case.seq_len) for case in cases]
    assert [it for it in documents if min(it[0]) < 1 or sum(it[0]) != it[1]] == []


def told_of(name):
    """In full and quickly: what is told, where both tell the same once."""
    reply, claims = RINGS[name]
    full, quick = (told(reply, quick, **claims) for quick in (False, True))
    lines = [name, *full, *(f"--quick: {line}" for line in quick if line not in full)]
    return "\n    ".join(lines) + "\n\n"


@pytest.mark.parametrize("name", RINGS)
def test_what_is_told_of_a_ring(name):
    assert told_of(name) in TOLD.read_text()


OPTIONS = {  # what a verdict says of a mistake that shows with this option alone, and whether a question has the option
    "with a batch of 2 only": lambda it: it.case.batch > 1,
    "with grouped queries only": lambda it: it.case.heads != it.case.kv_heads,
    "with attention sinks only": lambda it: it.case.sinks,
    "with a given scale only": lambda it: it.case.scale is not None,
    "with a window only": lambda it: it.case.window,
    "with documents only": lambda it: it.case.documents,
    "with chunks of unequal lengths only": lambda it: not it.case.equal_chunks,
}
BESIDES = {  # the same, but for the words: fewer questions have it
    "in bfloat16": lambda it: it.case.dtype == torch.bfloat16,
    "in a part": lambda it: it.members,
    "V": lambda it: it.case.value_dim and it.case.value_dim < it.case.head_dim,
}


PAIRS = [*itertools.product(itertools.combinations(OPTIONS, 2), (False, True))]
OTHERS = [*itertools.product(OPTIONS, BESIDES), ("in bfloat16", "in a part"), ("V", "in a part")]


@pytest.mark.parametrize(("two", "quick"), [*PAIRS, *((two, True) for two in OTHERS)])
def test_what_is_right_of_each_option_and_wrong_of_two_is_told(two, quick):
    both = which(lambda question: all((OPTIONS | BESIDES)[words](question) for words in two), WRONG)
    found = examination_by(both, [], quick, with_everything)
    assert not found.healthy
    when, _ = when_it_shows(found.answers)
    assert all(words in when for words in two if words in OPTIONS) or two[1] in BESIDES, when


# Real processes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ask():
    """The answer of one question to a patient, on three ranks of its own: they may be lost."""

    def asked(function, question=PLAIN, seconds=20.0, job=Job):
        with closing(job(patient_of(function), 3, seconds, "cpu")) as job:
            return job.ask(question)

    return asked


SHARED = Question(Case(3, 19, True, "tests.wrong.odd_patients:shares"))


def test_a_refusal_leaves_the_processes(ranks):
    with on_these(ranks), closing(examination.Job(patient_of(odd_patients.refuses), 3, 20.0, "cpu")) as job:
        assert job.ask(PLAIN).state == REFUSED
        assert job.ready


IN = r"tests/wrong/odd_patients.py, line \d+ in"
LOST = (odd_patients.hangs, odd_patients.crashes)


@pytest.mark.parametrize(
    ("function", "question", "state", "says"),
    [
        (
            odd_patients.hangs,
            PLAIN,
            FAILED,
            rf"in time; rank 1 in {IN} receives, called by {IN} hangs; ranks 0, 2 have returned$",
        ),
        (odd_patients.crashes, PLAIN, FAILED, rf"^rank 1 died \(SIGSEGV\); rank 1 in {IN} crashes"),
        (odd_patients.raises_on_the_last_rank, PLAIN, FAILED, rf"^rank 2 raised ValueError: too much \({IN} raises"),
        (odd_patients.changes_its_input, Question(P3, "without gradients"), FAILED, "changed its input k"),
        (odd_patients.another_dtype, Question(replace(P3, dtype=torch.float32)), FAILED, "its out is torch.float64"),
        (odd_patients.another_shape, PLAIN, FAILED, r"of this rank's queries, shape \(1, 2, 6, 4\)"),
        (odd_patients.refuses, PLAIN, REFUSED, "^NotImplementedError: not today"),
        (
            odd_patients.own_chunk,
            SHARED,
            REFUSED,
            ":shares deals out 18 of 19 tokens, 18 in all; expected each",
        ),
        (odd_patients.backward_once, PLAIN, OK, ""),
        (odd_patients.backward_once, Question(P3, "two backward passes"), WRONG, ""),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_a_ring_does_is_told(ask, ranks, function, question, state, says):
    lost = function in LOST
    with nullcontext() if lost else on_these(ranks):
        answer = ask(function, question, 2.0 if function is odd_patients.hangs else 20.0, examination.Job)
    assert answer.state == state
    assert re.search(says, answer.says), answer.says
    assert answer.lost == lost
    wrong = {"two backward passes": {"dq", "dk", "dv"}}.get(question.how, {"out"})
    assert set(answer.wrong) >= (wrong if state == WRONG else set())


def exchange(context, x):
    """This rank's work of two messages."""
    to, back = ((context.rank + step) % context.world_size for step in (1, -1))
    return dist.isend(x, to), dist.irecv(x.clone(), back)


def begun_on_rank(context):
    """The lines that are noted while two messages are under way, one, and none; afterwards messages go as before."""
    with noted() as begun:
        sent, received = exchange(context, torch.zeros(1))
        lines = list(begun.values())
        received.wait()
        left = list(begun.values())
        sent.wait()
    for work in exchange(context, torch.zeros(1)):
        work.wait()
    return lines, left, list(begun.values())


def test_messages_are_noted_until_somebody_waits_for_them(ranks):
    """By their line, and the line of the function that called this one."""
    line = rf"{Path(__file__).name}, line \d+ in exchange, called by .*, line \d+ in begun_on_rank$"
    for both, one, none in ranks(3, begun_on_rank):
        assert (len(both), both[:1], none) == (2, one, [])
        assert re.search(line, one[0])


@pytest.mark.parametrize(
    ("kind", "says", "is_one"),
    [
        *((of, "", True) for of in ("NameError", "UnboundLocalError", "AttributeError")),
        *((of, "", True) for of in ("ImportError", "ModuleNotFoundError")),
        *(
            (of, f"{of}: Found no {by} driver", True)
            for of in ("RuntimeError", "AssertionError")
            for by in ("NVIDIA", "CUDA")
        ),
        ("TypeError", "TypeError: f() got an unexpected keyword argument 'causal'", True),
        ("TypeError", "TypeError: unsupported operand type(s) for /: 'str' and 'int'", False),
        ("KeyError", "KeyError: 'fp64'", False),
        ("ValueError", "ValueError: no", False),
        ("", "no CUDA", False),
    ],
)
def test_a_typing_mistake_is_an_error_that_no_size_and_no_dtype_causes(kind, says, is_one):
    assert answer(PLAIN, FAILED, kind=kind, says=says).typing_mistake == is_one


def test_a_rank_that_computes_on_is_late_and_not_sick():
    with closing(Job(patient_of(odd_patients.computes_on), 3, 2.0, "cpu")) as job:
        assert job.ask(PLAIN).state == OK  # the first call: a compiler may take longer
        answer = job.ask(PLAIN)
    assert (answer.state, answer.bad) == (LATE, False)
    assert re.search(rf"; rank 1 in {IN} computes_on", answer.says)


def test_reading_stacks_kills_no_rank_that_imports_and_compiles(tmp_path):
    """A timer of faulthandler, which asks no lock, died of this in seconds."""
    with written(tmp_path / "0", 0.004):
        for i in range(40):
            importlib.reload(importlib.import_module("colorsys"))
            exec(compile(f"def f{i}(x):\n    return [x] * {i}\n" * 50, f"compiled {i}", "exec"), {})
    assert not faulthandler.is_enabled()  # the file is closed
    [(line, ranks)] = lines_of_ranks(tmp_path).items()
    assert ranks == [0]
    assert line[0] == __file__


OWN = {
    name: {"layouts": f"tests.wrong.odd_patients:{name}", "causal": True} for name in ("PAIRS", "reversed_positions")
}
LSE_ALONE = {"unequal": False}
ODD = [  # a ring, how the questions begin that it is asked, its claims; the level, and words of the report
    ("other_digits", "twice", {}, "right", ""),
    ("other_numbers_each_time", "twice", {}, "wrong", "changes its answers from call to call"),
    ("draws", "twice", {}, "right", "It takes random numbers from torch's generator"),
    ("lse_with_gradient", "gradient of lse", LSE_ALONE, "right", ""),
    ("lse_without_gradient", "gradient of lse", LSE_ALONE, "right for what it takes", "error, of a loss that uses lse"),
    ("gives_no_gradients", "C = 6", {}, "wrong", "no gradient comes out. For inference alone? Add --forward-only"),
    ("with_sinks", "attention sinks", {}, "right", ""),
    ("sinks_reduced", "attention sinks", {}, "right", "nothing may sum it once more"),
    ("sinks_per_block", "attention sinks", {}, "wrong", "SICK: sinks_per_block, in "),
    ("sinks_detached", "attention sinks", {}, "wrong", "In dsinks all numbers are 0 times"),
    ("sinks_times_p", "attention sinks", {}, "wrong", "In dsinks all numbers are P times"),
    ("contiguous", "C = 6", OWN["PAIRS"], "wrong", ""),
    ("reversed_ring", "C = 6", OWN["reversed_positions"] | {"gradients": False}, "right", ""),
]


@pytest.mark.parametrize(("name", "asked", "claims", "level", "words"), ODD)
def test_what_is_told_of_an_odd_ring(ranks, name, asked, claims, level, words):
    few = {"worlds": (3,), "dtypes": "float64", "wanted": lambda question: question.what().startswith(asked)}
    found = examined(ranks, getattr(odd_patients, name), **few, **claims)
    diagnosis = None if found.healthy else diagnose(found)
    report = str(Report(found, diagnosis, "none", () if found.healthy else tuple(infer(found, "none"))))
    assert (found.level, words in report) == (level, True), report
    assert ("nothing may sum" in report) == (name == "sinks_reduced")
    assert diagnosis is None or not asked.endswith("sinks") or diagnosis.when == "with attention sinks only"


if __name__ == "__main__":
    TOLD.write_text("".join([*map(verdict_of, REPORTS), *map(told_of, RINGS)]))
