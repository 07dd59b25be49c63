"""One line in a test: is this ring right? If not, the test fails with the diagnosis.

    from ring_doctor import assert_ring, examine

    def test_my_ring():
        assert_ring(my_ring.attention)                                   # on 1 to 5 processes
        assert_ring("my_package.ring:attention", layouts="zigzag", causal=True)

    report = examine(my_ring.attention)         # the same without a test: report.healthy, report.verdict, print(report)

Before: report.py. After: patients/, libraries that were examined.
Source: none.
"""

from collections.abc import Callable, Collection
from typing import Any

from ring_doctor.catalogue import enter
from ring_doctor.examination import SECONDS
from ring_doctor.exit_status import CANNOT_TELL, passes
from ring_doctor.job import CannotExamine
from ring_doctor.patient import patient_of
from ring_doctor.report import Report, visit


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
    function: Callable[..., Any] | str,
    *,
    seconds: float = SECONDS,
    device: str = "cpu",
    seed: int = 0,
    quick: bool = False,
    xray: bool = False,
    catalogue: str = "",
    **claims: Any,
) -> Report:
    """Examine a ring, name its mistake, and return the report. It starts processes of its own.

    function(q, k, v, ...) is called on every rank with its chunks, q (B, H, C, D), k and v (B, G, C, D). It returns out
    or (out, lse); patient.py says which other arguments it may take. A name, "my_package.ring:attention" or
    "path/to/ring.py:attention", is imported by each process. `claims` restrict what is asked, as the options of the
    command do: causal=True, layouts="zigzag", worlds=(1, 2, 3), dtypes="float32", tensors="bshd", heads=8, kv_heads=2,
    head_dim=64, batch=2, chunk=16, shape=(B, H, G, S, D), grouped=False, unequal=False, gradients=False. A question may
    take `seconds`. `quick` asks less, as quick.py says. `xray`: take one of a healthy ring too. `catalogue`: a module
    or a file with mistakes of your own.

    Raises ValueError for a function that cannot be examined, or that no other process can import, and CannotExamine
    where it answers no question at all.
    """
    if catalogue:
        enter(catalogue)
    return visit(patient_of(function, **claims), seconds=seconds, device=device, seed=seed, quick=quick, xray=xray)
