"""One line in a test: is this ring right? If not, the test fails with the diagnosis.

    from ring_doctor import assert_ring, examine

    def test_my_ring():
        assert_ring(my_ring.attention)                                   # on 1 to 5 processes
        assert_ring("my_package.ring:attention", layouts="zigzag", causal=True)

    report = examine(my_ring.attention)         # the same without a test: report.healthy, report.verdict, print(report)

An X-ray is two runs on real processes, of a question that the patient answers wrongly; where both are right, a third
one, with another size of V on each rank. Shapes: S = 4 P tokens, B = H = G = 1, and D of S numbers or more, because V
is the identity. A patient that needs more heads gets them, all alike. A length that matters (unequal chunks, one token
each, odd chunks) is kept.

Before: report.py. After: __main__.py, the command; patients/, libraries that were examined.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from ring_doctor.asking import examination
from ring_doctor.asking.answers import CANNOT_TELL, SAID, STATUS, Answer, Examination
from ring_doctor.asking.case import SIZES
from ring_doctor.asking.job import SECONDS, CannotExamine, Job, Tell
from ring_doctor.asking.latent_case import LatentCase
from ring_doctor.asking.patient import LEAST, Patient, patient_of
from ring_doctor.asking.questions import Question
from ring_doctor.asking.state_case import StateCase
from ring_doctor.explaining.diagnosis import diagnose
from ring_doctor.explaining.inference import infer
from ring_doctor.explaining.xray import XRay, cases, of_states, xray_of
from ring_doctor.report import Report

LONGEST = 16  # tokens on a rank: a longer question is X-rayed with 4


def assert_ring(function: Callable[..., Any] | str, **options: Any) -> None:
    """Raise AssertionError with the diagnosis unless `function` is a right ring. Options and errors as in `examine`."""
    assert_healthy(examine, function, **options)


def assert_healthy(examined: Callable[..., Any], *asked: Any, **options: Any) -> None:
    """Raise AssertionError with the report of `examined` unless it is healthy."""
    try:
        report = examined(*asked, **options)
    except CannotExamine as error:
        raise AssertionError(f"{SAID[CANNOT_TELL]}: {error}") from None
    if STATUS[report.level]:
        raise AssertionError(str(report))


def examine(
    function: Callable[..., Any] | str | Patient,
    *,
    seconds: float = SECONDS,
    device: str = "cpu",
    seed: int = 0,
    quick: bool = False,
    progress: Tell = lambda words: None,
    **claims: Any,
) -> Report:
    """Examine a ring, name its mistake, and return the report. It starts processes of its own.

    function(q, k, v, ...) is called on every rank with its chunks, q (B, H, C, D), k and v (B, G, C, D). It returns out
    or (out, lse); asking/patient.py says which other arguments it may take. A name, "my_package.ring:attention" or
    "path/to/ring.py:attention", is imported by each process. `claims` restrict what is asked, as the options of the
    command do: causal=True, layouts="zigzag", worlds=(1, 2, 3), dtypes="float32", tensors="bshd", heads=8, kv_heads=2,
    head_dim=64, batch=2, chunk=16, shape=(B, H, G, S, D), grouped=False, unequal=False, own_values=False,
    gradients=False. state=True: it is a ring of states, f(q, k, v, log_decay, beta), or a short convolution
    f(x, weight); state="each key": with a log_decay shaped as k. A question may take `seconds`. `quick` asks less
    (asking/questions.py). `progress` is told what is done, in words.

    Raises ValueError for a function that cannot be examined, or that no other process can import, and CannotExamine
    where it answers no question at all.
    """
    patient = patient_of(function, **claims)
    how: dict[str, Any] = {"seconds": seconds, "device": device}
    found = examination.examination_of(patient, **how, seed=seed, quick=quick, progress=progress)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors as small as these more threads only wait for each other
    try:
        diagnosis = None if found.healthy else diagnose(found, progress)
        taken: XRay | str = "none was taken"
        if found.wrong and not found.changes:
            progress("X-ray")
            taken = take_xray(found.patient, choose_question(found), **how)
        explained = diagnosis and diagnosis.told and (not diagnosis.rest or diagnosis.others)
        unclear = not (found.healthy or explained or found.changes)
        return Report(found, diagnosis, taken, tuple(infer(found, taken)) if unclear else ())
    finally:
        torch.set_num_threads(threads)


def choose_question(examination: Examination) -> Question:
    """The wrong answer of which an X-ray shows the most, with one head.

    An X-ray has no batch, no heads, no large scores and no scale. 16 bits and two ranks show less.
    """
    question = min(examination.wrong, key=_loses).question
    case, P, S = question.case, question.case.world_size, question.case.seq_len
    if S > LONGEST * P or (case.equal_chunks and S // P % 2 == 0):
        chunk = examination.patient.chunk  # another one than usual is one that the ring needs
        S = P * (chunk if Patient.chunk < chunk <= LONGEST else 4)
    documents = (S // 2 - 1, S - S // 2 + 1) if case.documents else None
    head_dim = -(-S // case.head_dim) * case.head_dim
    one_head = replace(case, batch=1, heads=1, kv_heads=1, head_dim=head_dim, seq_len=S, documents=documents)
    how = "without gradients" if question.how == "without gradients" else "plain"
    one_head = replace(one_head, from_state=False) if isinstance(one_head, StateCase) else one_head
    return Question(replace(one_head, sinks=False, inputs="normal", value_dim=None), how)


def _loses(answer: Answer) -> tuple[bool, int, bool, bool, bool, int]:
    """Whether it is off as by roundings; the features that an X-ray has not; 16 bits, two ranks, no gradients; all."""
    case, how = answer.case, answer.question.how
    features = len(case.features()) - bool(case.documents) - bool(case.window) + bool(answer.question.members)
    features += how not in ("plain", "without gradients")
    slight = max((answer.relative[name] for name in answer.wrong), default=1.0) < 0.01  # of the norm
    few = case.world_size < LEAST
    return slight, features, case.dtype.itemsize <= 2, few, how == "without gradients", len(case.features())


def take_xray(patient: Patient, question: Question, **how: Any) -> XRay | str:
    """The X-ray, or why there is none. `how`: as a `Job` takes it."""
    if isinstance(question.case, LatentCase):
        return "none: it shows the weights of a ring of q, k and v"
    if isinstance(question.case, StateCase):
        if question.case.taps:
            return "none: a convolution has no weights of its own"
        _, run = cases(question.case)
        with closing(Job(patient, run.world_size, **how)) as job:
            answer = job.ask(Question(run, "without gradients"))
        return of_states(answer.results["out"], run) if answer.results else f"none: {answer.says}"
    heads = max(patient.heads, patient.heads_per_rank * question.case.world_size)
    heads = heads if heads > 2 else 1  # all alike: the first one is shown
    with closing(Job(patient, question.case.world_size, **how)) as job:
        runs = [replace(run, heads=heads, kv_heads=heads) for run in cases(question.case)]
        first, second, third = (job.ask(replace(question, case=run)) for run in (*runs, replace(runs[1], inputs=SIZES)))
    if not first.results:
        return f"none, because with {question.words()} it fails: {first.says}"
    xray = xray_of(first.results, second.results, question.case)
    if xray.right and "out" in third.wrong:
        out = third.results["out"][..., : third.case.seq_len].double() / third.case.sizes()
        return xray_of({}, {"out": out}, replace(question.case, inputs=SIZES))
    return xray
