"""A wrong answer beside the exact numbers, in float64: what diagnosis.py and the facts of facts.py are proved on.

    wrong = WrongAnswer(answer)
    wrong.near("dq", 2 * wrong.exact("dq"))    ->    whether dq is twice the right dq, within rounding

Shapes: the whole results of a `Case`, (B, H, S, D), (B, G, S, D), and lse (B, H, S).

Before: asking/answers.py. After: facts.py, what all wrong answers have in common; diagnosis.py, the name.
Source: the bound is derived in ../../ringlab/support/rounding.py.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ring_doctor.asking.answers import Answer, right_results
from ring_doctor.asking.case import UNROUNDED, Case
from ringlab.support.rounding import Right, half_step

SLACK = 8.0  # times the bound of a right ring, because a wrong ring rounds in other places


@dataclass(frozen=True, eq=False)
class WrongAnswer:
    """An answer with wrong numbers. Right answers can be compared with what is expected too."""

    answer: Answer

    @property
    def case(self) -> Case:
        return self.answer.case

    @cached_property
    def right(self) -> dict[str, Right]:
        """The right results, with the bound of this dtype."""
        return right_results(self.answer.question)

    def seen(self, name: str) -> Tensor:
        """The result of the patient, float64."""
        return self.answer.results[name].double()

    def exact(self, name: str) -> Tensor:
        return self.right[name].exact

    def bad(self, name: str) -> Tensor:
        """(B, H, S) bool: the rows of a result with a number that rounding does not allow."""
        right = self.right[name]
        numbers = right.error(self.answer.results[name].to(right.dtype)).nan_to_num(nan=torch.inf) > right.allowed
        return numbers.any(dim=3) if numbers.dim() == 4 else numbers

    @cached_property
    def _allowed(self) -> dict[str, tuple[float, float]]:
        """How far the numbers of a wrong ring may be from what is expected, and the largest right number.

        The ring may compute in float32.
        """
        wide = replace(self.case, dtype=torch.float32) if self.case.dtype == torch.float64 else self.case
        found = {}
        for name, right in right_results(replace(self.answer.question, case=wide)).items():
            finite = right.exact.isfinite()
            largest = float(right.exact[finite].abs().max().clamp(1e-300))
            found[name] = SLACK * float(right.allowed[finite].max()), largest
        return found

    def near(self, name: str, expected: Tensor) -> bool:
        """Whether a result is what was expected: NaN and inf at the same places, the rest within rounding.

        What is expected is float64. A number that the dtype of the ring cannot hold is inf there, or NaN after a sum.
        """
        seen = self.seen(name)
        if seen.shape != expected.shape:
            return False
        if self.answer.results[name].dtype != torch.float64:
            too_large = expected.isfinite() & (expected.abs() > torch.finfo(self.answer.results[name].dtype).max)
            expected = torch.where(too_large & ~seen.isfinite(), seen, expected)
        finite = seen.isfinite() & expected.isfinite()
        if not bool(finite.all()):
            if not torch.equal(seen[~finite].nan_to_num(nan=0.5), expected[~finite].nan_to_num(nan=0.5)):
                return False
            seen, expected = (x.masked_fill(~finite, 0.0) for x in (seen, expected))
        most = float(expected.abs().max())
        if self.case.inputs in UNROUNDED:  # nothing but the last rounding
            return bool(((seen - expected).abs() <= half_step(expected, self.right[name].dtype) + 1e-6 * most).all())
        allowed, largest = self._allowed[name]
        return bool((seen - expected).abs().max() <= allowed * max(1.0, most / largest))

    def clear(self, name: str) -> bool:
        """Whether a result is so wrong that its numbers can be told from the right numbers."""
        return not self.near(name, self.exact(name))
