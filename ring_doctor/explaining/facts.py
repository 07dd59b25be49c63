"""What all wrong answers have in common, as sentences for the report. A pattern looks for one kind of fact.

    for pattern in CONTENTS: pattern.common(answers, "dk")    ->    what dk holds in each of these wrong answers

    P times: a sum over ranks counts too much.    1/scale times: the scale is missing.

Each fact says what the whole result would be, and is compared with it within rounding. Random numbers fit none. With
two ranks "2 times" and "P times" are the same, so a pattern finds both, and an answer of three ranks decides.

Shapes: the whole results of a `Case`, (B, H, S, D), (B, G, S, D), and lse (B, H, S).

Before: asking/answers.py. After: inference.py, all that is told; diagnosis.py, the name.
Source: Dao et al. 2022, algorithm 4, for what follows from which gradients are wrong.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ring_doctor.asking.answers import Answer, right_results
from ring_doctor.asking.case import UNROUNDED, Case
from ring_doctor.mistakes.paper_ring import RIGHT
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
    def allowed(self) -> dict[str, tuple[float, float]]:
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
        allowed, largest = self.allowed[name]
        largest = largest if largest > 1e-6 * allowed else 1.0  # what is right is 0: no share of it says anything
        return bool((seen - expected).abs().max() <= allowed * max(1.0, most / largest))

    def clear(self, name: str) -> bool:
        """Whether a result is so wrong that its numbers can be told from the right numbers."""
        return not self.near(name, self.exact(name))


@dataclass(frozen=True)
class Finding:
    """What the numbers show, and where to look."""

    says: str  # a sentence without its stop
    look: str = ""
    brief: str = ""  # for a headline; "": as it says

    def __str__(self) -> str:
        return f"{self.says}. Look at {self.look}." if self.look else f"{self.says}."


SUMMED = {"dq": "dS K", "dk": "dSᵀ Q, its way home", "dv": "pᵀ dO, its way home"}  # a gradient: what is summed to it


def of_gradients(wrong: Sequence[str]) -> Finding:
    """What follows from which gradients are wrong, where out is right."""
    if list(wrong) == ["dsinks"]:
        told = "dsinks wrong, dq, dk and dv right, so p and δ are right"
        return Finding(told, "the sum of -e^(sink - lse) δ over the rows of a rank")
    wrong = [name for name in wrong if name in SUMMED]
    right = [name for name in SUMMED if name not in wrong]
    if not right:
        look = "what the backward pass gets: q, k, v, lse, dO, mask"
        return Finding("out is right and all gradients are wrong", look)
    known, look = "p and dS are", f"{', '.join(SUMMED[name] for name in wrong)}, and where that is summed"
    if right == ["dv"]:
        known, look = "p are", "dS = p ∘ (dP - δ): δ, dP = dO Vᵀ and the scale"
    return Finding(f"{listed(wrong)} wrong, {listed(right)} right, so the weights {known} right", look)


@dataclass(frozen=True)
class Fact:
    """What is true of a wrong answer if the result is as expected. Facts with equal words are the same."""

    words: str  # fill the gap in the pattern's sentence; without the numbers of this answer
    look: str = field(default="", compare=False)  # where to look
    expected: Tensor | None = field(default=None, compare=False)  # the result, if this is true; None: it is true
    order: int = field(default=0, compare=False)  # of several facts only those with the least order are told


@dataclass(frozen=True)
class Pattern:
    """A kind of fact."""

    says: str  # a sentence with the gaps {x}, the results, and {words}
    find: Callable[[WrongAnswer, str], Iterable[Fact] | None]  # None where an answer cannot show it
    clear: bool = True  # it says nothing of an error that is little more than rounding

    def common(self, answers: Sequence[WrongAnswer], name: str) -> list[Fact]:
        """The facts of every answer in which this result is wrong and the pattern can be seen."""
        common: list[Fact] | None = None
        for wrong in answers:
            unseen = name not in wrong.answer.wrong or (self.clear and not wrong.clear(name))
            if unseen or (found := self.find(wrong, name)) is None:
                continue
            facts = [fact for fact in found if fact.expected is None or wrong.near(name, fact.expected)]
            common = facts if common is None else [fact for fact in common if fact in facts]
            if not common:
                return []
        least = min((fact.order for fact in common or []), default=0)
        return [fact for fact in common or [] if fact.order == least]

    def finding(self, names: Sequence[str], facts: Sequence[Fact]) -> Finding:
        said = self.says.format(x=listed(names), words=" or ".join(dict.fromkeys(fact.words for fact in facts)))
        return Finding(said, ", or at ".join(dict.fromkeys(fact.look for fact in facts if fact.look)))


def listed(names: Sequence[str]) -> str:
    """ "dq", "dq and dk", "dq, dk and dv"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# What a result holds ------------------------------------------------------------------------------------------------

COPIES = "a sum or a mean over ranks: it counts a rank's part P times, or divides where nothing was added"
SCALES = "the scale: it is forgotten in this result, or applied twice"
DEFAULT = "the scale: the usual one, 1/√D, stands where one is given"
BATCH = "a sum or a mean over the sequences of the batch"
BASE = "e^x and log beside 2^x and log2: a factor of log 2 is missing or too many"
GROUP = "the sum over the query heads that share a K/V head"
TWICE = "a sum that starts from a number that it also adds, or a mean of two"


def _not_finite(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    bad = ~wrong.seen(name).isfinite() & wrong.exact(name).isfinite()
    if not bad.any():
        return
    where = "everywhere" if bad.all() else "in some places"
    if wrong.case.inputs == "large":
        look = "exp: subtract the row's largest score so far, which begins at -inf: else e^s overflows, or all are 0"
        yield Fact("where scores are large", look)
    if not wrong.case.visible().all():
        yield Fact(where, "the merge of a block of which a query sees no key: -inf - (-inf) is NaN", order=1)
    look = "exp, sums and products that are too large for their dtype, and 0/0"
    yield Fact(f"{where}, without a mask too", look, order=2)


def _another_result(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    look = "the order in which the results are returned or unpacked, and buffers that two of them share"
    yield from (Fact(f"the right {other}", look, wrong.exact(other)) for other in wrong.right if other != name)
    if wrong.exact(name).dim() > 2:
        look = "a buffer that is not set to zero before each head"
        yield Fact("head 0 in head 0, of heads 0 and 1 added in head 1, and so on", look, wrong.exact(name).cumsum(1))


def _factor(wrong: WrongAnswer, name: str) -> Iterator[Fact] | None:
    """None where any factor fits."""
    allowed, largest = wrong.allowed[name]
    return None if 4 * allowed >= largest else _factors(wrong, name)


def _factors(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    """Factors with a meaning. P times is 2 times where P = 2: all that fit are found, and other answers decide."""
    exact, case = wrong.exact(name), wrong.case
    P, n, scale = case.world_size, case.heads // case.kv_heads, RIGHT.scale(case)
    known = [("P", P, COPIES), ("√P", P**0.5, COPIES), ("scale", scale, SCALES), ("log 2", math.log(2), BASE)]
    unfilled = "detach, no_grad, .data, and a buffer that is returned before it is filled"
    yield Fact("0", unfilled, torch.zeros_like(exact))
    yield Fact("-1", "a sign", -exact)
    if case.scale is not None:
        yield Fact("1/(√D scale)", DEFAULT, case.head_dim**-0.5 / case.scale * exact)
    for words, c, look in [*known, ("H/G", n, GROUP), ("B", case.batch, BATCH), ("2", 2, TWICE)]:
        for said, factor in ((words, c), ("G/H" if words == "H/G" else f"1/{words}", 1 / c)):
            if factor != 1:
                yield Fact(said, look, factor * exact)
    finite = (seen := wrong.seen(name)).isfinite() & exact.isfinite()
    own = float((seen * exact)[finite].sum() / exact[finite].square().sum().clamp(1e-300))  # least squares
    look = f"what this result is multiplied by: by {own:.3g} with {case.words()}"
    yield Fact(f"{own:.3g}", "what this result is multiplied by", own * exact, 1)
    yield Fact("c", look, own * exact, 2)


def _another_rank(wrong: WrongAnswer, name: str) -> Iterator[Fact] | None:
    if not wrong.case.equal_chunks:
        return None
    P, chunks = wrong.case.world_size, wrong.case.chunks(wrong.exact(name))
    travel = "the hops of dK and dV: one too few or one too many on the way home"
    look = travel if name in ("dk", "dv") else "the rank that this chunk is cut for, sent to or returned on"
    moved = {f"rank r + {n}": chunks[n:] + chunks[:n] for n in range(1, P)}
    moved |= {f"rank r - {n}": chunks[-n:] + chunks[:-n] for n in range(1, P)}
    return (Fact(words, look, wrong.case.join(of_ranks)) for words, of_ranks in moved.items())


def _another_place(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    look = "roll, slices, view, reshape, the order of heads, and the memory order of buffers for messages"
    exact, seen = wrong.case.chunks(wrong.exact(name)), wrong.case.chunks(wrong.seen(name))
    for words, rows in (("late", 1), ("early", -1)):
        yield Fact(f"one row too {words} in each chunk", look, wrong.case.join([x.roll(rows, dims=2) for x in exact]))
    near = 1e-5 + wrong.allowed[name][0]
    if all(_same_numbers(x, y, near) for x, y in zip(seen, exact, strict=True)):
        yield Fact("in other places of their chunk", look, order=1)
    if _same_numbers(wrong.seen(name), wrong.exact(name), near):
        yield Fact("in other places of the whole sequence", look, order=2)


def _same_numbers(x: Tensor, y: Tensor, near: float) -> bool:
    return torch.allclose(x.flatten().sort().values, y.flatten().sort().values, rtol=1e-4, atol=near)


def _rounded(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    """Errors as small as roundings to 16 bits. Roundings move most numbers, each by a little."""
    seen, exact, eps = wrong.seen(name), wrong.exact(name), torch.finfo(torch.bfloat16).eps
    there = exact.isfinite() & wrong.bad(name).view(*seen.shape[:3], *[1] * (seen.dim() - 3))
    error, typical = (seen - exact)[there].abs(), float(exact[there].square().mean().sqrt())
    small = bool((error <= 4 * eps * (exact[there].abs() + typical)).all()) and error.median() > eps / 100 * typical
    if small and torch.finfo(wrong.case.dtype).bits > 16:
        look = "casts to 16 bits: of messages, of buffers, and of sums over blocks"
        yield Fact("the errors are as small as roundings to 16 bits", look)


def _some_heads(wrong: WrongAnswer, name: str) -> list[Fact] | None:
    """Which heads are wrong, where others are right. An answer with one head cannot show it."""
    bad, G = wrong.bad(name).any(dim=2).any(dim=0), wrong.case.kv_heads
    h = torch.arange(len(bad))
    if len(h) == 1:
        return None
    look = "how heads are split and broadcast; the K/V head of query head h is h // (H/G)"
    known = {"all but the first": h > 0, "those whose h mod G is not h // (H/G)": h % G != h // (len(h) // G)}
    of_rank_0 = h.tensor_split(wrong.case.world_size)[0]
    known["those of the other ranks than rank 0 after an all-to-all"] = h >= len(of_rank_0)
    same = [words for words, heads in known.items() if torch.equal(bad, heads)]
    return [Fact(words, look, order=list(known).index(words)) for words in same]


def _some_sequences(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    """Which sequences of the batch are wrong, where the first is right in all results."""
    if not any(wrong.bad(of)[0].any() for of in wrong.answer.wrong) and wrong.bad(name)[1:].flatten(1).any(dim=1).all():
        yield Fact("all but the first", "what is taken from the first sequence for all: an index 0, a view, an expand")


OF_EACH_TOKEN = 3  # from this pattern on they look at the rows of tokens, which the gradient of a sink has not
CONTENTS = (  # the first that holds says the most
    Pattern("In {x} numbers are NaN or infinite {words}", _not_finite),
    Pattern("The numbers of {x} are those of {words}", _another_result),
    Pattern("In {x} all numbers are {words} times the right numbers", _factor),
    Pattern("In {x} rank r has the right numbers of {words}", _another_rank),
    Pattern("In {x} the right numbers are {words}", _another_place),
    Pattern("{x}: {words}", _rounded, clear=False),
    Pattern("In {x} the wrong heads are {words}", _some_heads, clear=False),
    Pattern("In {x} the wrong sequences of the batch are {words}", _some_sequences, clear=False),
)
