"""The ring of states on paper, and its mistakes. Only these are compared with the answers of a --state.

On paper a rank's tokens write from an empty state, and the state handed to it fades beside them. The state of a
convolution is the last n tokens. A mistake replaces one of the steps. Gradients are those of autograd, so a state that
is detached on its way is a mistake too.

Shapes: those of asking/state_case.py.

Before: __init__.py. After: explaining/diagnosis.py.
Source: Yang et al. 2025, section 3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ring_doctor.asking.state_case import TAPS, StateCase, leaves, with_gradients
from ring_doctor.mistakes import but, told
from ring_doctor.mistakes.paper_ring import NotOnPaper

After = Callable[..., Tensor]  # ranks: the state after their tokens, one rank after the other, from an empty one
Begins = Callable[[int, int, After], Tensor]  # what a rank of P begins with


def right_token(h: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """The state after a token: k (..., D, 1), v (..., 1, D), decay (..., 1 or D, 1), beta (..., 1, 1)."""
    h = decay * h
    return h + k @ (v if beta is None else beta * (v - k.mT @ h))


def moved_on(h: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """The last TAPS tokens (..., TAPS, D) of a convolution after token v, the newest first: its state."""
    return torch.cat([v, decay * h[..., :-1, :]], dim=-2)


def all_before(rank: int, P: int, after: After) -> Tensor:
    return after(*range(rank))


@dataclass(frozen=True)
class StateSteps:
    """The steps of a ring of states. Ranks and starts are those of the whole sequence, `at` the tokens of a rank."""

    token: Callable[..., Tensor] = right_token
    begins: Begins = all_before
    lent: Begins = all_before  # the same in a convolution
    reads: Callable[[Tensor], Tensor] = lambda decay: decay  # of the handed state, as the rank's tokens read it
    passes: Callable[[Tensor], Tensor] = lambda decay: decay  # and as it passes through the rank
    starts: Callable[[Tensor, Tensor], Tensor] = lambda starts, at: starts[at]  # whether a token begins a document


RIGHT_STATES = StateSteps()


def compute_states(case: StateCase, steps: StateSteps = RIGHT_STATES) -> dict[str, Tensor]:
    """Every result of a ring with these steps: {name: whole}. Raises NotOnPaper for a layout that is not contiguous."""
    if case.layout != "contiguous":
        raise NotOnPaper("a rank has several runs of tokens")
    inputs, d_out = leaves(case)
    x = dict(zip((*case.names, *case.learned), inputs, strict=True))
    k, beta, decay = x["k"], x.get("beta"), x.get("log_decay", torch.zeros_like(x["q"][..., 0])).exp()
    decay = decay if case.each_key else decay[..., None]
    starts = torch.zeros(case.seq_len, dtype=torch.bool)
    starts[torch.tensor((case.documents or ())[:-1], dtype=torch.int64).cumsum(0)] = True
    weight = x.get("weight", inputs[0].new_zeros(case.heads, case.head_dim, TAPS))
    taps = weight.view(case.heads, case.head_dim, TAPS).mT.flip(1)  # (H, TAPS, D), the newest first
    token, begins, v = (moved_on, steps.lent, x["q"]) if case.taps else (steps.token, steps.begins, x["v"])
    empty = v.new_zeros(case.batch, case.heads, TAPS if case.taps else case.head_dim, case.head_dim)

    def run(rank: int, h: Tensor, values: Tensor, fades: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        at, outs = case.positions(rank), []
        kept = fades(decay[:, :, at]) * ~steps.starts(starts, at)[:, None]
        for i, t in enumerate(at.tolist()):
            betas = None if beta is None else beta[:, :, t, None, None]
            h = token(h, k[:, :, t, :, None], values[:, :, t, None], kept[:, :, i, :, None], betas)
            scaled = x["q"][:, :, t, None] * case.head_dim**-0.5
            outs.append((taps * h).sum(dim=2, keepdim=True) if case.taps else scaled @ h)
        return torch.cat(outs, dim=2), h

    @cache
    def alone(rank: int) -> tuple[Tensor, Tensor]:
        return run(rank, empty, v, lambda decay: decay)

    @cache
    def after(*ranks: int) -> Tensor:
        *before, last = ranks or (None,)
        first = x.get("state", empty)
        return first if last is None else alone(last)[1] + run(last, after(*before), 0 * v, steps.passes)[1]

    ranks, P = range(case.world_size), case.world_size
    out = torch.cat([alone(r)[0] + run(r, begins(r, P, after), 0 * v, steps.reads)[0] for r in ranks], dim=2)
    return with_gradients(case, out, inputs, d_out)


# Its mistakes -------------------------------------------------------------------------------------------------------


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
