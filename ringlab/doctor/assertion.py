"""One line in a test: is this ring right? If not, the test fails with the diagnosis.

    from ringlab import assert_ring

    def test_my_ring():
        assert_ring(my_ring.attention)                                   # on 1, 2, 3 and 4 processes
        assert_ring(my_ring.attention, layouts=("zigzag",), causal=(True,))

Before: report.py. After: patients/, libraries that were examined.
Source: none.
"""

from collections.abc import Callable, Collection
from typing import Any

from ringlab.doctor.examination import SECONDS
from ringlab.doctor.job import CannotExamine
from ringlab.doctor.levels import CANNOT_TELL, passes
from ringlab.doctor.patient import from_function
from ringlab.doctor.report import text, visit


def assert_ring(
    function: Callable[..., Any],
    *,
    seconds: float = SECONDS,
    device: str = "cpu",
    seed: int = 0,
    quick: bool = False,
    accept: Collection[str] = (),
    **claims: Any,
) -> None:
    """Raise AssertionError with the diagnosis unless `function` is a right ring. It starts processes of its own.

    function(q, k, v, ...) is called on every rank with its chunks, q (B, H, C, D), k and v (B, G, C, D). It returns out
    or (out, lse); patient.py says which other arguments it may take. `claims` restrict what is asked: causal=(True,),
    layouts=("zigzag",), worlds=(1, 2, 3), dtypes=("float32",), heads_last=True, grouped=False, gradients=False. A
    question may take `seconds`. `quick` asks less, as quick.py says. `accept` may hold "imprecise", for a ring that is
    wrong in 16 bits only and by no more than rounding, and "cannot-tell", for a ring that answers no question at all.
    Raises ValueError for a function that cannot be examined, or is not at the top level of a module.
    """
    passes(CANNOT_TELL, accept)  # names that are none are refused before any process starts
    patient = from_function(function, **claims)
    try:
        report = visit(patient, seconds=seconds, device=device, seed=seed, quick=quick)
    except CannotExamine as error:
        if passes(CANNOT_TELL, accept):
            return
        raise AssertionError(f"CANNOT TELL: {error}") from None
    if not passes(report.level, accept):
        raise AssertionError(text(report))
