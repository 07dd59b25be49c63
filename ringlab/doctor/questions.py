"""The questions to a ring: all masks and layouts plainly, and what showed the mistakes of public rings.

A question is a `Case` and a way to ask: plainly, with views instead of contiguous tensors, twice, without gradients, in
a part of the job. With one and two ranks only the plain questions are asked, because more ranks show more.

Before: patient.py. After: examination.py, which asks.
Source: what the owners of wrong rings learnt: never 2 ranks only, float64 first, each gradient by itself, odd lengths.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ringlab.doctor.case import UNROUNDED, Case
from ringlab.doctor.patient import Patient, dtype_of

UNEQUAL = "chunks of unequal length"


@dataclass(frozen=True)
class Question:
    """A case, and a way to ask."""

    case: Case
    how: str = "plain"  # "views", "twice", "without gradients", "watched"
    members: tuple[int, ...] | None = None  # the ranks of a larger job that are the group; None: the whole job
    feature: str = ""  # what a function may refuse, in words; "": every function must answer

    @property
    def may_refuse(self) -> bool:
        return bool(self.feature)

    @property
    def large(self) -> bool:
        """Whether its messages take long enough to show a race, and its tiles are many."""
        return self.case.seq_len > 128 * self.case.world_size

    def words(self) -> str:
        said = self.case.words()
        said += f", {self.how}" if self.how != "plain" else ""
        return said + (f", ranks {', '.join(map(str, self.members))} of a larger job" if self.members else "")


def questions(patient: Patient, world_size: int, dtype: torch.dtype, seed: int) -> Iterator[Question]:
    """All the questions for one number of ranks, the plain ones first."""
    P = world_size
    masks = [
        (causal, layout) for causal in patient.causal for layout in (patient.layouts if causal else patient.layouts[:1])
    ]
    H, D = patient.heads, patient.head_dim
    base = Case(P, 6 * P, heads=H, kv_heads=H, head_dim=D, dtype=dtype, seed=seed)
    plain = [replace(base, causal=causal, layout=layout) for causal, layout in masks]
    for case in plain:
        yield Question(case)
    if min(3, max(patient.worlds)) > P:
        return  # the others show more on more ranks
    yield Question(plain[-1], "watched")
    for case in plain:
        if patient.grouped:
            yield Question(replace(case, heads=2 * H, kv_heads=2), feature="grouped queries")
        if patient.gradients and case in (plain[0], plain[-1]):
            yield Question(case, "twice")
            yield Question(case, "views")
    first, last = plain[0], plain[-1]
    for case in dict.fromkeys((first, last)):
        yield Question(replace(case, inputs="large"))
        yield Question(replace(case, batch=2), "without gradients")
        if case.layout != "zigzag":
            yield Question(replace(case, seq_len=P), feature="one token a rank")
            yield Question(replace(case, seq_len=7 * P), feature="an odd number of tokens a rank")
        if case.layout == "contiguous" and patient.unequal:
            yield Question(replace(case, seq_len=6 * P + 1), feature=UNEQUAL)
        if "scale" in patient.takes:
            yield Question(replace(case, scale=0.3))
        for narrow in patient.dtypes:
            if torch.finfo(dtype_of(narrow)).bits < torch.finfo(dtype).bits:
                yield Question(replace(case, dtype=dtype_of(narrow)), feature=narrow)
                yield Question(replace(case, dtype=dtype_of(narrow), inputs="large"), feature=narrow)
    for narrow in patient.dtypes:
        if P == 4 and not first.causal and torch.finfo(dtype_of(narrow)).bits == 16:
            exact = [replace(first, seq_len=32, dtype=dtype_of(narrow), inputs=inputs) for inputs in UNROUNDED]
            yield Question(exact[0], "without gradients", feature=narrow)
            if patient.gradients:
                yield Question(exact[1], feature=narrow)
    causal = [case for case in plain if case.causal]
    if "window" in patient.takes:
        for case in causal:
            yield Question(replace(case, window=case.seq_len // P + 2))
            yield Question(replace(case, window=3))
    if "documents" in patient.takes:
        for case in causal or plain[:1]:
            yield Question(replace(case, documents=(7, 6 * P - 7)))
    if "sinks" in patient.takes:
        yield Question(replace(first, sinks=True))
        yield Question(replace(last, sinks=True))
    if "group" in patient.takes and max(patient.worlds) > P:
        yield Question(last, members=tuple(range(1, P + 1)))
