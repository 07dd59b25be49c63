"""How wrong is a ring? Five levels, and the exit status of each; a user may accept two of them.

    level                     exit status    what it means
    right                     0              every answer is right
    right for what it takes   0              what the function claims is right, and it claims less than a ring may
    imprecise in 16 bits      1              right in float64 and float32; in bfloat16 or float16 it rounds too often
    wrong                     1
    cannot tell               3              there was nothing to compare

Shapes: none here.

Before: answers.py. After: examination.py, report.py and __main__.py. Exit status 2 is for bad options.
Source: none.
"""

from collections.abc import Collection

import torch

from ring_doctor.answers import WRONG, Answer

RIGHT, RIGHT_AS_CLAIMED, IMPRECISE = "right", "right for what it takes", "imprecise in 16 bits"
WRONG_RING, CANNOT_TELL = "wrong", "cannot tell"
STATUS = {RIGHT: 0, RIGHT_AS_CLAIMED: 0, IMPRECISE: 1, WRONG_RING: 1, CANNOT_TELL: 3}
BAD_INPUT = 2  # the exit status for options that are no options
ACCEPTABLE = {"imprecise": IMPRECISE, "cannot-tell": CANNOT_TELL}  # what --accept and accept= take
ROUNDINGS = 32  # steps between two numbers of 16 bits: a ring of 4 that rounds at every step is off by less


def passes(level: str, accept: Collection[str]) -> bool:
    """Whether a test passes with this level. Raises ValueError where `accept` holds anything but ACCEPTABLE."""
    if isinstance(accept, str) or not set(accept) <= set(ACCEPTABLE):
        raise ValueError(f'accept is {accept!r}; expected some of {", ".join(ACCEPTABLE)}, as ("imprecise",)')
    return STATUS[level] == 0 or level in {ACCEPTABLE[name] for name in accept}


def imprecise(answer: Answer) -> bool:
    """Whether an answer is wrong in 16 bits by no more than rounding at every step can do: never NaN, nor a failure.

    Scores of 800 in 16 bits are off by 2, and so are weights: there the size of an error says nothing.
    """
    step = torch.finfo(answer.case.dtype)
    if answer.state != WRONG or step.bits != 16:
        return False
    largest = ROUNDINGS * step.eps if answer.case.inputs == "normal" else torch.finfo(torch.float64).max
    return all(answer.relative[name] <= largest for name in answer.wrong)
