"""The catalogue, continued: rings whose forward pass is right, and whose backward pass computes other numbers.

Before: gradients.py. After: ../catalogue.py, all entries together.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ring_doctor.asking.case import Case
from ring_doctor.mistakes import Change, but, told
from ring_doctor.mistakes.masks import sees
from ring_doctor.mistakes.paper_ring import Rows, Scores, Steps, Values


def in_backward(wrong: Change) -> Change:
    """Steps that are wrong in the backward pass only."""
    return lambda steps: replace(steps, backward=wrong(steps.backward or steps))


def in_order(at: Callable[[int, int], int], **more: Callable[..., Any]) -> Change:
    """The rounds of the backward pass are in another order: round t is round at(t, P)."""
    wrong = but(
        in_hand=lambda steps, case, rank, t: steps.in_hand(case, rank, at(t, case.world_size)),
        believed=lambda steps, case, rank, t: steps.believed(case, rank, at(t, case.world_size)),
        **more,
    )
    return in_backward(wrong)


def lse_of_the_last(*, seen: bool) -> Change:
    def combine(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
        out, _ = right.combine(steps, case, scores, values)
        return out, steps.block_lse([s for s in scores if not seen or (s > -math.inf).any()][-1])

    return but(combine=combine)


def own_weights(steps: Steps, s: Tensor, lse: Tensor) -> Tensor:
    return steps.weights(s, s.logsumexp(dim=-1))


def own_delta(steps: Steps, s: Tensor, p: Tensor, v: Tensor, d_out: Tensor, out: Tensor) -> Tensor:
    return steps.delta(s, p, v, d_out, steps.block_out(s, v))


def delta_times(factor: Callable[[int], float]) -> Change:
    """δ times factor(D)."""
    return but(delta=lambda steps, s, p, v, d_out, out: factor(v.shape[3]) * steps.delta(s, p, v, d_out, out))


def scale_missing(of_q: int, of_k: int) -> Change:
    """So many times in dq and in dk."""
    return but(parts=lambda steps, q, k, v, scale: steps.parts(q / scale**of_q, k / scale**of_k, v, scale))


def last(steps: Steps, case: Case, total: Tensor | None, part: Tensor) -> Tensor:
    return part


def in_dtype(dtype: torch.dtype | None, *, parts_too: bool = False) -> Callable[..., Tensor]:
    """A sum that is rounded after each part to a dtype; None: to that of q."""

    def add(steps: Steps, case: Case, total: Tensor | None, part: Tensor) -> Tensor:
        to = dtype or case.dtype
        part = part.to(to).double() if parts_too else part
        return (part if total is None else total + part).to(to).double()

    return add


CHANGES = {
    "keys_of_hop_0": [in_backward(but(in_hand=lambda steps, case, rank, t: (rank, rank)))],
    "lse_of_the_last_block": [lse_of_the_last(seen=False), lse_of_the_last(seen=True)],
    "lse_of_the_first_sequence": [but(weights=lambda steps, s, lse: steps.weights(s, lse[:1].expand_as(lse)))],
    "lse_of_the_block": [but(weights=own_weights)],
    "delta_of_the_block": [but(delta=own_delta)],
    "lse_and_delta_of_the_block": [but(weights=own_weights, delta=own_delta)],
    "delta_summed_per_block": [but(delta=lambda steps, s, p, v, d_out, out: steps.delta(s, p, v, d_out, p @ v))],
    "delta_missing": [*map(delta_times, (lambda D: 0.0, lambda D: -1.0, lambda D: 1 / D))],
    "gradient_scale_missing": [scale_missing(1, 1), scale_missing(0, 1), scale_missing(1, 0)],
    "dq_of_the_last_round": [but(add_q=last), but(add_q=last, gives_q=lambda steps, part: not part.hidden)],
    "dq_of_the_own_block": [but(gives_q=lambda steps, part: part.block == part.rank)],
    "dk_dv_of_the_last_round": [
        but(add_kv=last),
        but(add_kv=last, home=lambda steps, part: None if part.hidden else steps.home(part)),
    ],
    "mask_forgotten_in_backward": [
        in_backward(sees(lambda x: x.of(causal=False, window=None))),
        # blocks that are left out stay out; the parts of a block that the kernel computes are whole
        in_backward(sees(lambda x: x.seen.any(dim=1, keepdim=True) & x.seen.any(dim=0) if x.case.causal else x.seen)),
    ],
    "gradients_in_16_bits": [
        but(add_kv=in_dtype(None)),
        but(add_kv=in_dtype(torch.bfloat16)),
        # parts in the dtype of k, in the order of gloo's reduce_scatter: of rank j - 1, j - 2, ..., and j last
        in_order(lambda t, P: P - 1 - t, add_kv=in_dtype(None, parts_too=True)),
    ],
    "dq_in_16_bits": [
        but(add_q=in_dtype(None)),
        but(add_q=in_dtype(torch.bfloat16)),
        # a new float32 copy of q a round: autograd adds their gradients in the dtype of q, the last round first
        in_order(lambda t, P: P - 1 - t, add_q=in_dtype(None, parts_too=True)),
    ],
}
MISTAKES = told("Backward", CHANGES)
