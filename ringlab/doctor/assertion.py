"""One line in a test: is this ring right? If not, the test fails with the diagnosis.

    from ringlab import assert_ring

    def test_my_ring():
        assert_ring(my_ring.attention)                                   # on 1, 2, 3 and 4 processes
        assert_ring(my_ring.attention, layouts=("zigzag",), causal=(True,))

Before: report.py. After: patients/, libraries that were examined.
Source: none.
"""

from collections.abc import Callable
from typing import Any

from ringlab.doctor.examination import SECONDS
from ringlab.doctor.patient import from_function
from ringlab.doctor.report import text, visit


def assert_ring(
    function: Callable[..., Any], *, seconds: float = SECONDS, device: str = "cpu", seed: int = 0, **claims: Any
) -> None:
    """Raise AssertionError with the diagnosis unless `function` is a right ring. It starts processes of its own.

    function(q, k, v, ...) is called on every rank with its chunks, q (B, H, C, D), k and v (B, G, C, D). It returns out
    or (out, lse); patient.py says which other arguments it may take. `claims` restrict what is asked: causal=(True,),
    layouts=("zigzag",), worlds=(1, 2, 3), dtypes=("float32",), heads_last=True, grouped=False, gradients=False. A
    question may take `seconds`. Raises ValueError for a function that cannot be examined, or is not at the top level of
    a module, and CannotExamine where it answers no question at all.
    """
    report = visit(from_function(function, **claims), seconds=seconds, device=device, seed=seed)
    if not report.healthy:
        raise AssertionError(text(report))
