"""What steps that you measured say of those that you did not.

    seconds     a · attention + c · computing + m · messages       by step.py: three sums of its terms
    factors     a, c and m: the likeliest, when log seconds and log factors err as NOISE and SPREAD say

Published kernels tell the seconds of attention well. A framework's products, passes and other messages are known
worst, and they are the same in short sequences and in long ones. So one short step tells most of what a plan lacks, and
steps that share their work in other ways split computing from messages.

Shapes: numbers only.

A reader may skip this file: `ring-plan --known` asks it. Before: step.py. After: plan.py.
Source: Bishop 2006 (Pattern Recognition and Machine Learning), equations 3.53 and 3.54, in each Gauss-Newton step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

KINDS = {  # and their terms
    "attention": ("attention",),
    "computing": ("products", "head", "passes"),
    "messages": ("tensor parallel", "FSDP"),
}
# Standard deviations of logarithms. Attention: nine in ten of the published times are within 16 %. The others are
# assumed: published products take 0.7 to 1.6 times as long as planned, and messages up to 3 times.
SPREAD = {"attention": 0.1, "computing": 0.4, "messages": 0.7}
NOISE = 0.05  # of a measured step, and of what three factors cannot say


@dataclass(frozen=True)
class Known:
    """The factors of KINDS, and the covariance of their logarithms, from `steps` measured ones."""

    factors: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    steps: int

    def corrected(self, terms: Mapping[str, float]) -> dict[str, float]:
        """The seconds of each term of a step that was planned without these factors."""
        factors = {term: factor for factor, of in zip(self.factors, KINDS.values(), strict=True) for term in of}
        return {term: factors[term] * seconds for term, seconds in terms.items()}

    def spread(self, corrected: Mapping[str, float]) -> float:
        """The standard deviation of the logarithm of a step's seconds, from its corrected terms."""
        shares = sums(corrected) / sum(corrected.values())
        return math.sqrt(shares @ np.array(self.covariance) @ shares + NOISE**2)

    def words(self) -> str:
        return ", ".join(f"{kind} x {factor:.2f}" for kind, factor in zip(KINDS, self.factors, strict=True))


def sums(terms: Mapping[str, float]) -> np.ndarray:
    """Seconds of each of KINDS."""
    return np.array([sum(terms.get(term, 0.0) for term in of) for of in KINDS.values()])


def fit(planned: Sequence[Mapping[str, float]], measured: Sequence[float]) -> Known:
    """The likeliest factors, from the planned terms of steps and their measured seconds.

    Raises ValueError for steps that contradict each other, or a factor that no published step comes near.
    """
    seconds, logs = np.array([sums(terms) for terms in planned]), np.zeros(len(KINDS))
    prior = np.diag([spread**-2 for spread in SPREAD.values()])
    for _ in range(50):
        parts = seconds * np.exp(logs)
        shares, left = parts / parts.sum(1, keepdims=True), np.log(measured / parts.sum(1))
        precision = prior + shares.T @ shares / NOISE**2
        logs = logs + np.linalg.solve(precision, shares.T @ left / NOISE**2 - prior @ logs)
    # Where one step is known and log x of messages passes 1, log x / x falls, and so do the other factors: for a slower
    # step the plan would be faster.
    for (kind, spread), log in zip(SPREAD.items(), logs.tolist(), strict=True):
        if log > (most := min(3 * spread, 1.0 if len(measured) == 1 else math.inf)):
            given = f"by the known steps, times of {kind} x {math.exp(log):.3g}"
            raise ValueError(f"{given}; expected {math.exp(most):.3g} at most: seconds, of a step of this batch")
    if (off := max(abs(left))) > 3 * NOISE:
        raise ValueError(f"steps contradict each other or the plan, {off:.0%} is left; expected steps of one machine")
    return Known(tuple(np.exp(logs).tolist()), tuple(map(tuple, np.linalg.inv(precision).tolist())), len(measured))
