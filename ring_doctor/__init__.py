"""Is your ring right, and if not, which mistake is it? From tests: `from ring_doctor import assert_ring`.

Read asking/examination.py first: the main loop. explaining/diagnosis.py finds the name. mistakes/ holds tables.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ring_doctor.assertion import assert_ring, examine

__all__ = ["assert_ring", "examine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ring_doctor' has no attribute {name!r}")
    from ring_doctor import assertion  # when it is first used: it loads the catalogue

    return getattr(assertion, name)
