"""How exact 16 bits can be under autocast: as exact as plain attention.

Before: answers.py. After: job.py.
Source: the PyTorch manual, torch.amp: which operations autocast computes in 16 bits.
"""

from collections.abc import Sequence

from ring_doctor.asking.answers import OK, WRONG, Answer, judge
from ring_doctor.asking.calls import under_autocast

PRODUCTS = (
    "under autocast torch multiplies in 16 bits, and what is summed of such products is in 16 bits too: it is then as "
    "exact as plain attention. With autocast disabled inside, or torch.amp.custom_fwd, its sums would stay in float32"
)
ONE_BIT = 2  # times the error of plain attention: as exact but for a bit


def compared_under_autocast(answers: Sequence[Answer]) -> list[str]:
    """Take sums in 16 bits under autocast only for right, where plain attention is no more exact; say so."""
    under = [answer for answer in answers if answer.question.how == "autocast"]
    right = [answer.case for answer in answers if answer.state == OK and answer not in under]
    wrong = [answer for answer in under if answer.state == WRONG]
    usual = [answer for answer in under if answer.state == OK and answer.case.inputs == "normal"]
    if not (wrong and usual) or any(answer.case not in right for answer in wrong):
        return []  # the same numbers in 16 bits are wrong too: its own sums are to blame
    errors = [(its.relative, judge(its.question, under_autocast(its.case)).relative) for its in usual]
    if any(sum(its[x] - ONE_BIT * of[x] for its, of in errors) > 0 for x in errors[0][0].keys() & errors[0][1]):
        return []
    for answer in wrong:
        answer.state, answer.wrong, answer.says = OK, {}, "as exact as plain attention under autocast"
    return [PRODUCTS]
