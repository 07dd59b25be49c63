"""What the ring is for: a transformer, trained over a mesh of processes.

Read transformer.py first, then mesh.py. With a Hugging Face model begin at hugging_face.py, which has use_ring.
"""


def expect(fine: object, given: str, expected: str) -> None:
    """Raise ValueError, "given; expected", unless all is fine."""
    if not fine:
        raise ValueError(f"{given}; expected {expected}")
