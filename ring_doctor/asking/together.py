"""All options at once: what is right of each by itself may be wrong of two, as a batch of grouped queries.

    together(patient, case)        all that the patient takes; what it may refuse is left out of some
    without_one(patient, case)     of which options, where such a case shows a mistake

Before: patient.py. After: questions.py.
Source: rings of strangers that were right with each option, and wrong with windows or documents on unequal chunks, and
with sinks or a batch of grouped queries.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ring_doctor.asking.case import Case
from ring_doctor.asking.patient import Patient

GROUPED, UNEQUAL = "grouped queries", "chunks of unequal length"


def together(patient: Patient, case: Case) -> Iterator[tuple[Case, str]]:
    """A plain case with all options, and which mask is one of them. Cases with the fewest options come first."""
    P, C, taken = case.world_size, patient.chunk, {"scale": 0.3, "sinks": True}
    options: dict[str, Any] = {name: value for name, value in taken.items() if name in patient.takes}
    of_masks = [("window", 3), ("window", C + 3), ("documents", 0)]  # C + 3 reaches further in chunks of C + 1 tokens
    masks = [each for each in of_masks if case.causal and each[0] in patient.takes] or [("options", 0)]
    uneven = case.layout == "contiguous" and patient.unequal and P > 1
    grouped, unequal = ({False: None, of: None} for of in (patient.grouped, uneven))
    for (mask, width), groups, more in itertools.product(masks, grouped, unequal):
        S = case.seq_len + more * (P + P // 2)  # of C + 1 tokens on each rank, and one more on the first half
        last = min(C, (S - C - 1) // 2)  # the second border is on the last rank
        documents = (C + 1, S - C - 1 - last, last)
        given: Any = {"window": {"window": width}, "documents": {"documents": documents}}.get(mask, {})
        given |= {"heads": 2 * case.heads, "kv_heads": case.heads if groups else 2 * case.heads}
        yield replace(case, batch=case.batch + 1, seq_len=S, **options, **given), mask


def feature_of(case: Case) -> str:
    """What a ring may refuse in such a case."""
    return GROUPED if case.equal_chunks and case.heads != case.kv_heads else "" if case.equal_chunks else UNEQUAL


def without_one(patient: Patient, case: Case) -> list[Case]:
    """Where such a case is right, the option that it lacks has a part in the mistake."""
    plain = patient.base_case(case.world_size, case.seed)
    first = (case.documents or ())[:1]
    S = case.seq_len if case.equal_chunks else plain.seq_len
    equal = {"seq_len": S, "documents": (*first, S - sum(first)) if first else None}
    names = "batch", "scale", "sinks", "window", "documents", "value_dim"
    given: list[Any] = [{name: getattr(plain, name)} for name in names]
    return [fewer for less in (*given, equal, {"kv_heads": case.heads}) if (fewer := replace(case, **less)) != case]
