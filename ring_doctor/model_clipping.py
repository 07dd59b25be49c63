"""Clipping: a step that returns clipped gradients, and what it would return if each rank clipped by a norm of its own.

    g  ->  g min(1, c / |g|)        |g| must be the norm of the whole gradient, over all ranks and all weights

Clipping shows on one process: whatever the labels are, the norm of all gradients is c. Then factors are hidden, and the
gradients of parts of the text cannot be added. What a rank returns that clips its shard of the weights by the norm of
this shard can be predicted, where each shard is clipped: these rows of every weight, times c / (their norm).
A rank that clips its part of the sum, before the sum, uses numbers that one process does not have: model_clues.py.

Shapes: those of model_calls.py.

Before: model_patterns.py. After: model_comparison.py.
Source: Pascanu, Mikolov & Bengio 2013, algorithm 1; the shards are those of torch's fully_shard.
"""

import math
from collections.abc import Sequence
from functools import partial

from ring_doctor.model_calls import ModelPatient, Returned
from ring_doctor.model_patterns import Pattern, whole

EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by |g| + EPS
ALIKE = 1e-3  # norms that differ by less, as shares, are of clipped gradients: EPS moves them, if |g| is small


def norm_of(result: Returned) -> float:
    """The norm of all gradients together."""
    return math.sqrt(sum(gradient.norm().item() ** 2 for gradient in result.gradients.values()))


def is_clipped(results: Sequence[Returned]) -> bool:
    """Whether the gradients are clipped: the results are of different labels, and the norms are alike."""
    norms = [norm_of(result) for result in results]
    return max(norms) - min(norms) < ALIKE * max(norms)


def clipped_per_rank(patient: ModelPatient, world_size: int) -> Pattern:
    """Each rank clips its rows of the weights by the norm of these rows."""
    return Pattern(("clipped_per_rank",), whole(patient).calls, partial(_rows_clipped, world_size))


def slack(exact: Returned) -> float:
    """How far EPS moves a prediction from clipped gradients, as a share of its norm.

    A gradient that is clipped to c has a norm of c or more, so the factor c / (|g| + EPS) is off by EPS/c at most. The
    prediction and the result are both off.
    """
    return 2 * EPS / norm_of(exact)


def _rows_clipped(world_size: int, results: Sequence[Returned]) -> Returned:
    """The rows of a weight are shared out as by torch.chunk: the last ranks may have fewer, or none."""
    [exact] = results
    gradients = {name: gradient.clone() for name, gradient in exact.gradients.items()}
    for rank in range(world_size):
        rows = [parts[rank] for x in gradients.values() if x.dim() and len(parts := x.chunk(world_size)) > rank]
        norm = math.sqrt(sum(part.norm().item() ** 2 for part in rows))
        for part in rows:
            part *= norm_of(exact) / max(norm, EPS)  # a part is a view of its gradient
    return Returned(exact.loss, gradients, exact.dtypes)
