"""Is your ring right, and if not, which mistake is it? From tests: `from ringlab.doctor import assert_ring`."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "assert_ring":  # on demand, so that `python -m ringlab.doctor.xray` does not import xray.py twice
        from ringlab.doctor.assertion import assert_ring

        return assert_ring
    raise AttributeError(f"module 'ringlab.doctor' has no attribute {name!r}")
