"""The catalogue, continued: rings of states. Only these are compared with the answers of a --state.

Shapes: those of states.py.

Before: states.py, the steps. After: catalogue.py, all tables.
Source: each entry names who had it, where that is public.
"""

import torch
from torch import Tensor

from ring_doctor.mistakes import but, entry
from ring_doctor.states import After, StateSteps


def detached(steps: StateSteps, rank: int, P: int, after: After) -> Tensor:
    return after(*range(rank)).detach()


def decayed_afterwards(
    steps: StateSteps, h: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None
) -> Tensor:
    return decay * steps.token(h, k, v, torch.ones_like(decay), beta)


def one_token_late(steps: StateSteps, decay: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(decay[:, :, :1]), decay[:, :, :-1]], dim=2)


BORDER = "what a rank begins with: what rank r - 1 sends is what its tokens left of the state that it got itself"
DECAY = "the cumulative sum of the log decays: the state before token t is decayed by token t, then written and read"

# fmt: off
MISTAKES = (
    entry("state_not_handed_on", "Every rank begins with an empty state, or with its own copy of the first one.",
          BORDER, 0, but(begins=lambda steps, rank, P, after: after()), wild=("AI-Hypercomputer/maxtext #4348",)),
    entry("state_of_the_wrong_neighbour", "A rank begins with the state of another rank than the one before it.",
          BORDER, 0, but(begins=lambda steps, rank, P, after: after(*range(P - 1, rank, -1))),
          but(begins=lambda steps, rank, P, after: after(*range(rank - 1))),
          but(begins=lambda steps, rank, P, after: after(*range(rank + 1)))),  # inclusive in place of exclusive
    entry("states_summed_without_decay",
          "What the ranks before wrote is added up, and does not fade on its way through the ranks between.",
          "the keep of each rank's map: state = keep state + add, rank after rank, and no sum of the adds", 0,
          but(begins=lambda steps, rank, P, after: sum((after(r) for r in range(rank)), after()))),
    entry("decay_of_the_chunk_forgotten", "A rank's tokens read the state handed to them as if it did not decay.",
          DECAY, 0, but(reads=lambda steps, decay: torch.ones_like(decay))),
    entry("decay_after_the_write", "A token's decay falls on what the token itself writes, or one token too late.",
          DECAY, 0, but(token=decayed_afterwards), but(reads=one_token_late),
          but(reads=one_token_late, passes=one_token_late)),
    entry("gradient_of_the_state_dropped",
          "The state is handed on without its gradient: out is right, and gradients are wrong but on the last rank.",
          "a message or a gather outside of autograd: the gradient of the state goes back from rank r to rank r - 1", 0,
          but(begins=detached)),
    entry("state_not_reset_at_documents", "A document begins with what the document before it left.",
          "cu_seqlens: state and convolution are empty before the first token of each, at a rank's border too", 0,
          but(starts=lambda steps, starts, at: torch.zeros(len(at), dtype=torch.bool)),
          but(starts=lambda steps, starts, at: starts[at] & (at > at[0]))),  # but those of a rank's first token
    entry("border_tokens_missing", "A convolution begins with zeros on every rank, or with too few tokens.",
          "the last k - 1 tokens before a rank's own; where chunks are shorter, they lie on several ranks", 0,
          but(lent=lambda steps, rank, P, after: after()),
          but(lent=lambda steps, rank, P, after: after(*range(max(0, rank - 1), rank)))),
    entry("gradient_of_the_border_dropped", "The tokens lent to the next rank bring no gradient back.",
          "a message or a gather outside of autograd: each lent token gets a sum of gradients", 0,
          but(lent=detached)),
)
# fmt: on
