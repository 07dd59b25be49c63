"""A wrong answer beside the exact numbers, in float64: what the sentences of inference.py are proved on.

    wrong = WrongAnswer(answer)
    wrong.near("dq", 2 * wrong.exact("dq"))    ->    whether dq is twice the right dq, within rounding

Shapes: the whole results of a `Case`, (B, H, S, D), (B, G, S, D), and lse (B, H, S). A part of a gradient is what the
queries of one rank and the keys of one block add to it.

Before: answers.py. After: patterns.py, what can be seen in all wrong answers.
Source: Dao et al. 2022, algorithm 4, for the parts of the gradients.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ring_doctor.answers import Answer, right_results
from ring_doctor.case import Case
from ringlab.support.rounding import Right

SLACK = 8.0  # times the bound of a right ring, because a wrong ring rounds in other places
FEW = 256  # tokens up to which every pair of a query and a key may be looked at by itself
QUERY_ROWS = ("out", "lse", "dq")  # the other results have a row for each key


@dataclass(frozen=True)
class WrongAnswer:
    """An answer with wrong numbers."""

    answer: Answer

    @property
    def case(self) -> Case:
        return self.answer.case

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """q, k, v and d_out, float64."""
        return dict(zip(("q", "k", "v", "d_out"), (x.double() for x in self.case.whole()), strict=True))

    @cached_property
    def right(self) -> dict[str, Right]:
        """The right results, with the bound of this dtype."""
        return right_results(self.answer.question)

    @cached_property
    def _allowed(self) -> dict[str, tuple[float, float]]:
        """How far the numbers of a wrong ring may be from what is expected, and the largest right number.

        The ring may compute in float32.
        """
        case = self.case
        wide = replace(case, dtype=torch.float32) if case.dtype == torch.float64 else case
        of, found = right_results(replace(self.answer.question, case=wide)), {}
        for name, right in of.items():
            finite = right.exact.isfinite()
            largest = float(right.exact[finite].abs().max().clamp(1e-300))
            found[name] = SLACK * float(right.allowed[finite].max()), largest
        return found

    def seen(self, name: str) -> Tensor:
        """The result of the patient, float64."""
        return self.answer.results[name].double()

    def exact(self, name: str) -> Tensor:
        return self.right[name].exact

    def bad(self, name: str) -> Tensor:
        """(B, H, S) bool: the rows of a result with a number that rounding does not allow."""
        right = self.right[name]
        error = right.error(self.answer.results[name].to(right.dtype)).nan_to_num(nan=torch.inf)
        return (error > right.allowed).flatten(3).any(dim=3) if error.dim() == 4 else error > right.allowed

    def near(self, name: str, expected: Tensor) -> bool:
        """Whether all numbers of a result are what is expected, within rounding; NaN and inf at the same places."""
        seen, (allowed, largest) = self.seen(name), self._allowed[name]
        if seen.shape != expected.shape:
            return False
        finite = seen.isfinite() & expected.isfinite()
        if not bool(finite.all()):
            if not torch.equal(seen[~finite].nan_to_num(nan=0.5), expected[~finite].nan_to_num(nan=0.5)):
                return False
            seen, expected = (x.masked_fill(~finite, 0.0) for x in (seen, expected))
        return bool((seen - expected).abs().max() <= allowed * max(1.0, float(expected.abs().max()) / largest))

    @cached_property
    def _clear(self) -> dict[str, bool]:
        return {name: not self.near(name, self.exact(name)) for name in self.answer.results}

    def clear(self, name: str) -> bool:
        """Whether a result is so wrong that its numbers can be told from the right numbers."""
        return self._clear[name]

    def chunks(self, x: Tensor) -> list[Tensor]:
        """The chunks of all ranks of a whole tensor."""
        return [self.case.cut(x, rank) for rank in range(self.case.world_size)]

    @cached_property
    def matrices(self) -> tuple[Tensor, Tensor] | None:
        """The right weights p and scale dS, (B, H, S, S) float64; None where d_out is another one than the case's."""
        case = self.case
        if self.answer.question.how == "views":
            return None
        q, k, v, d_out = self.inputs.values()
        k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v))
        lse, out = self.exact("lse"), self.exact("out")
        scores = (self.scale * q @ k.mT).masked_fill(~case.visible(), -torch.inf)
        p = (scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp()
        return p, self.scale * p * (d_out @ v.mT - (d_out * out).sum(dim=-1, keepdim=True))

    @property
    def scale(self) -> float:
        return self.case.head_dim**-0.5 if self.case.scale is None else self.case.scale

    def of_kv_heads(self, x: Tensor) -> Tensor:
        """(B, H, ...) -> (B, G, ...): the sums over the query heads that share a K/V head."""
        return x.unflatten(1, (self.case.kv_heads, -1)).sum(dim=2)

    @cached_property
    def parts(self) -> dict[str, list[list[Tensor]]] | None:
        """By gradient, [rank][block]: the right part of this rank's queries and this block's keys. float64.

        None where chunks differ in length, and where d_out is another one than the case's.
        """
        case = self.case
        if not case.equal_chunks or self.matrices is None:
            return None
        (p, d_s), (q, k, _, d_out) = self.matrices, self.inputs.values()
        k = k.repeat_interleave(case.heads // case.kv_heads, dim=1)
        places = [case.positions(rank) for rank in range(case.world_size)]
        found: dict[str, list[list[Tensor]]] = {"dq": [], "dk": [], "dv": []}
        for mine in places:
            tiles = [(p[:, :, mine][..., theirs], d_s[:, :, mine][..., theirs], theirs) for theirs in places]
            found["dq"].append([d @ k[:, :, theirs] for _, d, theirs in tiles])
            found["dk"].append([self.of_kv_heads(d.mT @ q[:, :, mine]) for _, d, _ in tiles])
            found["dv"].append([self.of_kv_heads(w.mT @ d_out[:, :, mine]) for w, _, _ in tiles])
        return found
