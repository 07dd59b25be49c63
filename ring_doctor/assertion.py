"""One line in a test: is this ring right? If not, the test fails with the diagnosis.

    from ring_doctor import assert_ring, examine

    def test_my_ring():
        assert_ring(my_ring.attention)                                   # on 1 to 5 processes
        assert_ring("my_package.ring:attention", layouts="zigzag", causal=True)

    report = examine(my_ring.attention)         # the same without a test: report.healthy, report.verdict, print(report)

Before: report.py. After: __main__.py, the command; patients/, libraries that were examined.
"""

from collections.abc import Callable, Collection
from typing import Any

from ring_doctor import examination
from ring_doctor.answers import CANNOT_TELL, passes
from ring_doctor.catalogue import enter
from ring_doctor.diagnosis import diagnose
from ring_doctor.examination import SECONDS, SICK
from ring_doctor.inference import infer
from ring_doctor.job import CannotExamine
from ring_doctor.patient import Patient, patient_of
from ring_doctor.report import Report
from ring_doctor.take_xray import choose_question, take_xray
from ring_doctor.xray import XRay


def assert_ring(function: Callable[..., Any] | str, *, accept: Collection[str] = (), **options: Any) -> None:
    """Raise AssertionError with the diagnosis unless `function` is a right ring. Options and errors as in `examine`.

    `accept` may hold "imprecise", for a ring that is wrong in 16 bits only and by no more than rounding, and
    "cannot-tell", for a ring that answers no question at all.
    """
    passes(CANNOT_TELL, accept)  # names that are none are refused before any process starts
    try:
        report = examine(function, **options)
    except CannotExamine as error:
        if passes(CANNOT_TELL, accept):
            return
        raise AssertionError(f"CANNOT TELL: {error}") from None
    if not passes(report.level, accept):
        raise AssertionError(str(report))


def examine(
    function: Callable[..., Any] | str | Patient,
    *,
    seconds: float = SECONDS,
    device: str = "cpu",
    seed: int = 0,
    quick: bool = False,
    xray: bool = False,
    catalogue: str = "",
    progress: Callable[[str], None] = lambda words: None,
    **claims: Any,
) -> Report:
    """Examine a ring, name its mistake, and return the report. It starts processes of its own.

    function(q, k, v, ...) is called on every rank with its chunks, q (B, H, C, D), k and v (B, G, C, D). It returns out
    or (out, lse); calls.py says which other arguments it may take. A name, "my_package.ring:attention" or
    "path/to/ring.py:attention", is imported by each process. `claims` restrict what is asked, as the options of the
    command do: causal=True, layouts="zigzag", worlds=(1, 2, 3), dtypes="float32", tensors="bshd", heads=8, kv_heads=2,
    head_dim=64, batch=2, chunk=16, shape=(B, H, G, S, D), grouped=False, unequal=False, gradients=False. A question may
    take `seconds`. `quick` asks less, as questions.py says. `xray`: take one of a healthy ring too. `catalogue`: a
    module or a file with mistakes of your own. `progress` is told what is done, in words.

    Raises ValueError for a function that cannot be examined, or that no other process can import, and CannotExamine
    where it answers no question at all.
    """
    if catalogue:
        enter(catalogue)
    patient = function if isinstance(function, Patient) else patient_of(function, **claims)
    how: dict[str, Any] = {"seconds": seconds, "device": device}
    found = examination.examine(patient, **how, seed=seed, quick=quick, progress=progress)
    progress("diagnosis")
    sick = found.verdict == SICK
    diagnosis = diagnose(found) if sick else None
    taken: XRay | str = "none was taken"
    if xray or diagnosis:
        progress("X-ray")
        taken = take_xray(found.patient, choose_question(found), **how)
    named = diagnosis and diagnosis.told and not diagnosis.part
    return Report(found, diagnosis, taken, tuple(infer(found, taken)) if sick and not named else ())
