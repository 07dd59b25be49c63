"""The questions to a ring: all masks and layouts plainly, and what showed the mistakes of public rings.

A question is a `Case` and a way to ask: plainly, with views instead of contiguous tensors, twice, without gradients, in
a part of the job. Three and four ranks are asked everything, other masks and layouts each, and one rank every option,
because its code is another one in many rings. Other numbers of ranks are asked the plain questions only.

Some questions have a feature: what a function may not take, as grouped queries. It may refuse them. Every ring must
answer the others.

Before: patient.py. After: examination.py, which asks.
Source: what the owners of wrong rings learnt: never 2 ranks only, float64 first, each gradient by itself, odd lengths.
"""

import itertools
import math
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ring_doctor.asking.case import UNROUNDED, Case
from ring_doctor.asking.latent_case import LATENTS, LatentCase
from ring_doctor.asking.patient import LEAST, Patient, arguments_of, dtype_of
from ring_doctor.asking.state_case import TAPS, Convolution, StateCase
from ring_doctor.asking.together import GROUPED, UNEQUAL, feature_of, together

AFTER = "after another length"
WAYS = {  # to ask: in words, and the mistake of a ring that is wrong in this way alone, which no number tells
    "plain": ("when called once, with gradients", ""),
    "views": ("with views as input", "strides_ignored"),  # transposed q, k, v; dO is one number on a rank, expanded
    "twice": ("when called twice", "changed_by_a_call"),  # the second answer is right too
    "interleaved": ("in two passes at a time", "buffers_shared_by_calls"),  # as of two layers
    AFTER: ("after a call with another length", "state_of_another_length"),  # a shorter one, and a longer one
    "two backward passes": ("in a second backward pass", "gradients_kept_in_a_buffer"),  # over the same graph
    "frozen queries": ("where Q needs no gradient", "frozen_queries_forgotten"),
    "frozen keys": ("where K needs no gradient", "frozen_keys_forgotten"),
    "frozen values": ("where V needs no gradient", "frozen_values_forgotten"),
    "frozen keys and values": ("where K and V need no gradient", "frozen_keys_and_values_forgotten"),
    "without gradients": ("without gradients", "another_way_without_gradients"),
    "autocast": ("under autocast", "autocast_forgotten"),  # of float32 tensors
    "gradient of lse": ("where the loss uses lse", ""),  # asked where the lse that is returned can be differentiated
}
FROZEN = {"frozen queries": "q", "frozen keys": "k", "frozen values": "v", "frozen keys and values": "kv"}  # as by LoRA
BESIDE = "beside other "  # and an option: calls in which it is another one come before, and one between the two passes
KEPT = ("heads", "head dims", "batches", "dtypes", "masks", "layouts", "scales", "sinks", "windows", "documents")
WAYS |= {BESIDE + option: (f"beside calls with other {option}", "kept_from_another_call") for option in KEPT}
LSE = "a loss that uses lse"
VALUES, STATE = "a V with a head dim of its own", "a state before the first token"
TO_THE_RIGHT, WIDE = "a window_size whose right side is not 0", "a window wider than the sequence"
FULL = (3, 4)  # ranks that are asked everything: 3 show what 2 cannot; 4 is even, and shows sums of 4 parts in 16 bits
FEW_OR_MANY = {1: "one rank", 5: "five ranks"}  # some rings need a neighbour, others a power of 2
TWO_TILES, LARGE_HEAD = 257, 64  # tokens a rank, more than two tiles of a usual kernel have; and D


@dataclass(frozen=True)
class Question:
    """A case, and a way to ask."""

    case: Case
    how: str = "plain"  # a name in WAYS
    members: tuple[int, ...] | None = None  # the ranks of a larger job that are the group; None: the whole job
    feature: str = ""  # what a function may not take, in words: it may refuse; "": every ring must answer
    others: tuple[Case, ...] = ()  # what is called before
    watched: bool = False  # messages for which nobody waits are noted
    together: str = ""  # many options at once, which a mistake may need: of such questions one answer is enough

    def words(self) -> str:
        """The question in words."""
        said = self.case.words()
        said += f", {self.how}" if self.how != "plain" else ""
        return said + (f", ranks {', '.join(map(str, self.members))} of a larger job" if self.members else "")

    def what(self) -> str:
        """What is asked, whatever the mask, the layout, the dtype and the number of ranks: "views, C = 6"."""
        said = [] if self.how == "plain" else [self.how]
        said += [*self.case.features(), *(["part of a larger job"] if self.members else [])]
        return ", ".join(said)

    def options(self) -> set[str]:
        """What the question has and the plain one has not, whatever the numbers."""
        given = [re.sub(r"[\d, ]+", " ", words) for words in self.case.features()[:-1]]
        return {*given, self.how.replace("plain", ""), "causal" * self.case.causal}

    def same(self) -> tuple[int, str, str]:
        """What a question in another dtype, with other inputs, has in common; without autocast, if this is one."""
        return self.case.world_size, self.case.mask(), "plain" if self.how == "autocast" else self.how


def questions(patient: Patient, world_size: int, seed: int) -> Iterator[Question]:
    """All the questions for one number of ranks, the plain ones first."""
    P, base = world_size, patient.base_case(world_size, seed)
    if patient.state:
        yield from _of_states(patient, base)
        return
    layouts = {True: patient.layouts, False: patient.layouts[:1]}
    plain = [replace(base, causal=causal, layout=layout) for causal in patient.causal for layout in layouts[causal]]
    full = [P for P in patient.worlds if P in FULL] or [max(patient.worlds)]
    for case in plain:
        yield Question(case, feature="" if P in full else FEW_OR_MANY.get(P, ""))
    if patient.shape and patient.world_of_shape == P:
        sizes: Any = dict(zip(("batch", "heads", "kv_heads", "seq_len", "head_dim"), patient.shape, strict=True))
        yield Question(replace(plain[-1], **sizes))
    if P in full:
        yield from _of_options(patient, plain)
    elif P == 1:
        longer = [replace(case, seq_len=LEAST * case.seq_len) for case in plain]  # for documents and windows
        for question in _of_options(patient, longer):
            yield replace(question, feature=question.feature or FEW_OR_MANY[P])
    else:
        for case, mask in together(patient, plain[-1]):
            yield Question(case, feature=feature_of(case) or FEW_OR_MANY.get(P, ""), together=mask)


def _of_options(patient: Patient, plain: list[Case]) -> Iterator[Question]:
    """Every option and way to ask, for the plain cases of a number of ranks."""
    P = plain[0].world_size
    for case in plain:
        yield Question(replace(case, batch=case.batch + 1))
        for kv_heads, more in dict.fromkeys(((case.heads, 0), (2, 0), (1, 0), (1, 1))) if patient.grouped else ():
            feature = GROUPED if kv_heads > 1 else "one K/V head for all query heads"
            shared = replace(case, heads=2 * case.heads, kv_heads=kv_heads, batch=case.batch + more)
            yield Question(shared, feature=feature)
        if "sinks" in patient.takes:
            yield Question(replace(case, sinks=True))
        for name in patient.dtypes if P == 4 else ():
            if torch.finfo(dtype_of(name)).bits == 16:
                yield from _unrounded(patient, case, name)
    # three ranks are asked the first and the last, and four the first and, by turns, those between: each mask meets
    # each way to ask on an odd and on an even number of ranks
    others_come = max(FULL) == P and len(plain) > 2 and set(FULL) <= set(patient.worlds)
    for cases in (plain[:1], plain[1:-1] if others_come else plain[1:][-1:]):
        for case, (how, change, feature) in zip(itertools.cycle(cases), _of_one_mask(patient, plain[0]), strict=False):
            others = tuple(replace(case, seq_len=n * case.seq_len) for n in (1, 3)) if how == AFTER else ()
            yield Question(replace(case, **change), how, feature=feature, others=others)
        for case in cases:
            yield from _of_all(patient, case)
    yield from _of_lengths(patient, plain)
    yield from _of_masks(patient, plain)
    yield from _beside(patient, plain[-1])


def _of_all(patient: Patient, case: Case) -> Iterator[Question]:
    """All options at once; so in other dtypes, and with a V of its own size; and all of these in a part of the job."""
    P, D = case.world_size, case.head_dim
    others: dict[str, Any] = {x: {"dtype": dtype_of(x)} for x in patient.dtypes if dtype_of(x) != case.dtype}
    others |= {VALUES: {"head_dim": 2 * D, "value_dim": D}} if patient.own_values else {}
    of_all = [Question(each, feature=feature_of(each), together=mask) for each, mask in together(patient, case)]
    for (feature, more), every in itertools.product(others.items(), tuple(of_all)):
        taken = feature if every.case.equal_chunks else UNEQUAL
        of_all.append(Question(replace(every.case, **more), feature=taken, together=f"{every.together}, {feature}"))
    yield from of_all
    if "group" in patient.takes and max(patient.worlds) > P > 1:
        first = 1 if P == LEAST else 2  # ranks 1, 2, 3 of 4; and 0, 2, 3, 4 of 5, whose numbers have a gap
        part = (*range(first - 1), *range(first, P + 1))
        yield Question(case, members=part)
        yield from (replace(every, members=part, together=f"{every.together} in a part") for every in of_all)


def _beside(patient: Patient, case: Case) -> Iterator[Question]:
    """Of each option one value, beside other values: what is kept from a call shows in another."""
    C, S, (H, G) = patient.chunk, case.seq_len, (case.heads, case.kv_heads)
    layouts = [{"layout": layout} for layout in patient.layouts if case.causal and layout != case.layout]
    masks = [{"causal": mask} if mask else {"causal": mask, "layout": patient.layouts[0]} for mask in patient.causal]
    dtypes = [{"dtype": dtype_of(name)} for name in patient.dtypes if dtype_of(name) != case.dtype]
    options: dict[str, list[dict[str, Any]]] = {  # the value, and the others
        "heads": [{"heads": n * H, "kv_heads": n * G} for n in (2, 1, 3)],
        "head dims": [{"head_dim": n * case.head_dim} for n in (2, 1, 4)],
        "batches": [{"batch": case.batch + n} for n in (1, 0, 2)],
        "dtypes": [{}, *dtypes],
        "masks": [{}, *(mask for mask in masks if mask["causal"] != case.causal)],
        "layouts": [{}, *layouts],
        "scales": [{"scale": scale} for scale in (0.3, None, 0.7) if "scale" in patient.takes],
        "sinks": [{"sinks": sinks} for sinks in (True, False) if "sinks" in patient.takes],
        "windows": [{"window": n} for n in (3, None, C + 2) if case.causal and "window" in patient.takes],
        "documents": [{"documents": n and (n, S - n)} for n in (C + 1, None, C - 1) if "documents" in patient.takes],
    }
    for option, (value, *others) in ((option, values) for option, values in options.items() if values[1:]):
        feature = f"calls of other {option}" if KEPT.index(option) < KEPT.index("masks") else ""
        cases = tuple(replace(case, **other) for other in others)
        yield Question(replace(case, **value), BESIDE + option, feature=feature, others=cases)


def _of_one_mask(patient: Patient, case: Case) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Other ways to ask than plainly, other numbers, dtypes and lengths: (how, what differs in the case, feature)."""
    P, plain = case.world_size, "plain"
    tiles = math.ceil(TWO_TILES / patient.chunk) * patient.chunk  # 258, so a half of zigzag has more than a tile too
    head_dim = LARGE_HEAD if case.head_dim == Patient.head_dim else case.head_dim
    yield "views", {"batch": case.batch + 1}, ""  # of one sequence, heads and batch can be viewed as one dimension
    yield "twice", {}, ""
    yield AFTER, {"seq_len": 2 * case.seq_len}, "a call with another length than the first"
    long: dict[str, Any] = {"seq_len": tiles * P, "head_dim": head_dim}
    yield plain, long, ""
    yield plain, {"inputs": "large"}, ""
    own = {"head_dim": 2 * case.head_dim, "value_dim": case.head_dim}
    if patient.own_values:
        yield plain, own, VALUES
    if patient.grouped:  # 4 heads on each of 3 ranks, or 3 on each of 4: a group begins on one rank and ends on another
        yield plain, {"heads": 12, "kv_heads": 6 if P == 4 else 4}, GROUPED
    if patient.own_values and patient.grouped:
        yield plain, {"value_dim": 2 * case.head_dim, "heads": 2 * case.heads, "kv_heads": case.heads}, VALUES
    scaled = {"scale": 0.3} if "scale" in patient.takes else {}
    if scaled:
        yield plain, scaled, ""
    for name in patient.dtypes:
        narrow = dtype_of(name)
        if torch.finfo(narrow).bits < torch.finfo(case.dtype).bits:
            yield plain, {"dtype": narrow, **scaled}, name
            yield plain, {"dtype": narrow, "inputs": "large"}, name
        if torch.finfo(narrow).bits == 16:  # positions beyond 256 are no numbers of bfloat16
            yield plain, {"dtype": narrow, **long}, name
    if {"float32", "bfloat16"} <= set(patient.dtypes):
        yield "autocast", {"dtype": torch.bfloat16}, "autocast"
    if patient.gradients:
        yield "without gradients", scaled, ""
        yield "interleaved", {}, ""
        yield plain, {"inputs": "silent rank"}, ""
        yield "two backward passes", {}, "a second backward pass over the same graph"
        narrowest = {"dtype": dtype_of(patient.dtypes[-1])} if max(FULL) == P else {}
        for frozen in FROZEN:
            yield frozen, narrowest, frozen
        yield "gradient of lse", {}, LSE


def _of_lengths(patient: Patient, plain: list[Case]) -> Iterator[Question]:
    """Lengths that the zigzag layout does not take, without a mask and with one."""
    P = plain[0].world_size
    odd = [case for case in plain if case.layout != "zigzag"]
    contiguous = [case for case in odd if case.layout == "contiguous" and patient.unequal and P > 1]
    for case in dict.fromkeys((*odd[:1], *odd[-1:])):
        yield Question(replace(case, seq_len=P), feature="one token a rank")
        yield Question(replace(case, seq_len=(patient.chunk + 1 | 1) * P), feature="an odd number of tokens a rank")
    for case in contiguous:  # under a mask the last one is shorter: who counts all by its own length errs
        yield Question(replace(case, seq_len=case.seq_len + (P - 1 if case.causal else 1)), feature=UNEQUAL)


def _of_states(patient: Patient, base: Case) -> Iterator[Question]:
    """Three ranks and more are asked everything: short chunks, borders of documents, and float32. So are latents."""
    given = itertools.product(patient.causal, patient.layouts)
    plain = [_case_of_states(patient, vars(base) | {"causal": causal, "layout": layout}) for causal, layout in given]
    for case in plain:
        yield Question(case)
    if base.world_size < LEAST:
        return
    for case in plain:
        yield Question(replace(case, batch=2))
        yield Question(case, "without gradients")
        if "chosen" in patient.takes:
            yield Question(replace(case, choose=True))
        if "scale" in patient.takes and patient.state == LATENTS:
            yield Question(replace(case, scale=0.3))
        if "state" in patient.takes:
            first = patient.chunk + 1
            documents = (first, case.seq_len - first) if "documents" in patient.takes else None
            yield Question(replace(case, documents=documents, from_state=True), feature=STATE)
        for name in patient.dtypes[1:]:
            yield Question(replace(case, dtype=dtype_of(name)), feature=name)
    yield from _of_lengths(patient, plain)
    yield from _of_masks(patient, plain)


def _case_of_states(patient: Patient, plain: dict[str, Any]) -> Any:
    if patient.state == LATENTS:
        return LatentCase(**plain)
    given = tuple(name for name in ("log_decay", "beta") if name in patient.takes)
    taps = TAPS if isinstance(patient.function, Convolution) else 0
    return StateCase(**plain, given=given, taps=taps, each_key=patient.state == "each key")


def _unrounded(patient: Patient, case: Case, dtype: str) -> Iterator[Question]:
    """Inputs that show sums in 16 bits. Their scale, 1/√D, must be a power of 2."""
    bits = (case.head_dim - 1).bit_length()
    S = max(8, patient.chunk) * case.world_size
    D = max(4, 4 ** ((bits + 1) // 2))
    exact = replace(case, batch=1, seq_len=S, kv_heads=case.heads, head_dim=D, dtype=dtype_of(dtype))
    sums, gradients = (replace(exact, inputs=inputs) for inputs in UNROUNDED)
    ways = [("plain", dtype)]
    if dtype == "bfloat16" and "float32" in patient.dtypes:
        ways.append(("autocast", "autocast"))
    for how, feature in ways:
        yield Question(sums, "without gradients" if how == "plain" else how, feature=feature)
        if patient.gradients:
            yield Question(gradients, how, feature=feature)


def _of_masks(patient: Patient, plain: list[Case]) -> Iterator[Question]:
    """Windows and documents: shorter and longer than a chunk C, and borders inside a chunk and between two."""
    C, causal = patient.chunk, [case for case in plain if case.causal]
    widths = [(1, 0), (3, 0), (C + 2, 0), (2 * C + 1, 0), (plain[0].seq_len + C, 0)]
    both = [(3, 2), (C + 2, -1)] if "window_size" in arguments_of(patient.name, patient.function) else []
    for case, (window, right) in itertools.product(causal, widths + both if "window" in patient.takes else ()):
        feature = WIDE if window > case.seq_len else TO_THE_RIGHT if right else ""
        yield Question(replace(case, window=window, window_right=right), feature=feature)
    for window, right in both if not plain[0].causal else ():
        yield Question(replace(plain[0], window=window, window_right=right), feature="a window without a causal mask")
    if "documents" not in patient.takes:
        return
    alone = [replace(plain[0], causal=False, layout=layout) for layout in patient.layouts] if plain != causal else []
    packed: list[tuple[tuple[int, ...], int | None]] = [((C,), None), ((C + 1,), None), ((2, 1, C // 2, C + 2), None)]
    packed += [((C + 1,), 3)] if "window" in patient.takes else []
    for case, (first, width) in itertools.product(causal + alone, packed):
        if sum(first) < case.seq_len and (case.causal or width is None):
            documents = (*first, case.seq_len - sum(first))
            feature = "" if case.causal else "documents without a causal mask"
            two = "documents and a window" if width else ""
            yield Question(replace(case, documents=documents, window=width), feature=feature, together=two)


def kind(question: Question) -> tuple[Hashable, ...]:
    """All that is asked but the mask and the layout. Lengths count in tokens a rank, so that all worlds have them."""
    case = question.case
    C, more = divmod(case.seq_len, case.world_size)
    same = replace(case, world_size=1, seq_len=1, causal=False, layout="contiguous", documents=None, seed=0)
    return same, C, bool(more), case.documents is None, question.how, question.members is None
