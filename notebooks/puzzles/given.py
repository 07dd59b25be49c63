"""The causal ring that puzzle 7 runs with the reader's tokens. It runs on the ranks, as a schedule of a cell does."""

from typing import Any

import torch
from torch import Tensor

from ringlab.basics.online_softmax import finish, start


def causal_ring(comm: Any, q: Tensor, k: Tensor, v: Tensor, places: list[Tensor]) -> Tensor:
    """q, k, v (B, H, C, D) of this rank; places[r] (C) are the tokens of rank r."""
    state, block = start(q), torch.stack((k, v))
    for t in range(comm.P):
        j = (comm.rank - t) % comm.P
        state = comm.attend(state, q, *block, future=places[j] > places[comm.rank][:, None])
        if t < comm.P - 1:
            block = comm.exchange((comm.rank + 1) % comm.P, block, (comm.rank - 1) % comm.P)
    return finish(state)[0]
