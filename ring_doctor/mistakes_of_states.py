"""The catalogue, continued: rings of states. Only these are compared with the answers of a --state.

Shapes: those of states.py.

Before: states.py, the steps. After: catalogue.py, all tables.
"""

import torch
from torch import Tensor

from ring_doctor.mistakes import but, told
from ring_doctor.states import After, StateSteps


def detached(steps: StateSteps, rank: int, P: int, after: After) -> Tensor:
    return after(*range(rank)).detach()


def decayed_afterwards(
    steps: StateSteps, h: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None
) -> Tensor:
    return decay * steps.token(h, k, v, torch.ones_like(decay), beta)


def one_token_late(steps: StateSteps, decay: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(decay[:, :, :1]), decay[:, :, :-1]], dim=2)


CHANGES = {
    "state_not_handed_on": [but(begins=lambda steps, rank, P, after: after())],
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
        but(token=decayed_afterwards),
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
