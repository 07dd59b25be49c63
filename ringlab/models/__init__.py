"""What the ring is for: a transformer, trained over a mesh of processes."""


def expect(fine: object, given: str, expected: str) -> None:
    """Raise ValueError, "given; expected", unless all is fine."""
    if not fine:
        raise ValueError(f"{given}; expected {expected}")
