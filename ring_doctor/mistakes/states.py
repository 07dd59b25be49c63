"""The mistakes of a ring of states. Only these are compared with the answers of a --state.

A mistake replaces a step of the ring on paper in asking/state_case.py. Gradients are those of autograd, so a state that
is detached on its way is a mistake too.

Shapes: those of asking/state_case.py.

Before: __init__.py. After: explaining/diagnosis.py.
Source: the page names who had a mistake.
"""

import torch
from torch import Tensor

from ring_doctor.asking.state_case import After, StateSteps
from ring_doctor.mistakes import but, told


def detached(steps: StateSteps, rank: int, P: int, after: After) -> Tensor:
    return after(*range(rank)).detach()


def one_token_late(steps: StateSteps, decay: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(decay[:, :, :1]), decay[:, :, :-1]], dim=2)


CHANGES = {
    "state_not_handed_on": [
        but(begins=lambda steps, rank, P, after: after()),
        but(begins=lambda steps, rank, P, after: after(*range(rank)[-1:])),  # of one rank only
    ],
    "state_of_the_wrong_neighbour": [
        but(begins=lambda steps, rank, P, after: after(*range(P - 1, rank, -1))),
        but(begins=lambda steps, rank, P, after: after(*range(rank - 1))),
        but(begins=lambda steps, rank, P, after: after(*range(rank + 1))),  # inclusive in place of exclusive
    ],
    "states_summed_without_decay": [
        but(begins=lambda steps, rank, P, after: sum((after(r) for r in range(rank)), after()))
    ],
    "decay_of_the_chunk_forgotten": [but(reads=lambda steps, decay: torch.ones_like(decay))],
    "decay_after_the_write": [
        but(token=lambda steps, h, k, v, decay, beta: decay * steps.token(h, k, v, torch.ones_like(decay), beta)),
        but(reads=one_token_late),
        but(reads=one_token_late, passes=one_token_late),
    ],
    "gradient_of_the_state_dropped": [but(begins=detached)],
    "state_not_reset_at_documents": [
        but(starts=lambda steps, starts, at: torch.zeros(len(at), dtype=torch.bool)),
        but(starts=lambda steps, starts, at: starts[at] & (at > at[0])),  # but those of a rank's first token
    ],
    "border_tokens_missing": [
        but(lent=lambda steps, rank, P, after: after()),
        but(lent=lambda steps, rank, P, after: after(*range(max(0, rank - 1), rank))),
    ],
    "gradient_of_the_border_dropped": [but(lent=detached)],
}
MISTAKES = told("States", CHANGES)
