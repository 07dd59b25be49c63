"""The name of the mistake: the answers of a sick ring are compared with what each entry of the catalogue would return.

    a mistake is named    if a ring with this mistake gives the same numbers in every wrong answer,
                          and the right answers are right, or a condition keeps the mistake from them

An entry that explains everything comes first. Then entries with a condition: "without gradients only", "on rank 0
only". Then two entries together. Then entries that explain a part: out and lse, or the questions without masks. If
nothing fits, the diagnosis says only what can be seen: which results are wrong, and when.

Before: catalogue.py, when.py. After: xray.py, a picture of what is wrong.
Source: the mistakes of public rings, as each entry of the catalogue names them.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from ring_doctor.answers import WRONG, Answer, imprecise
from ring_doctor.case import Case
from ring_doctor.catalogue import CATALOGUE, OF_GRADIENTS
from ring_doctor.examination import Examination, never_claimed
from ring_doctor.inputs import UNROUNDED
from ring_doctor.mistakes import Change, Mistake
from ring_doctor.mistakes_of_calls import BY_WAY
from ring_doctor.paper_ring import RIGHT, NotOnPaper, compute
from ring_doctor.when import separated, when_it_shows
from ringlab.support.rounding import Right, half_step

FORWARD, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv")
EVERYTHING = FORWARD + GRADIENTS
SLACK = 8.0  # times the bound of a right ring, because a wrong ring rounds in other places
LARGEST = 1200  # tokens in an answer that is computed on paper for each entry
SEARCH = 15.0  # seconds of computing for the search for two mistakes together, and for that of a large answer

SOME_RANKS: dict[str, Callable[[int], range]] = {  # of P ranks, those that may have a mistake by themselves
    "on rank 0": lambda P: range(1),
    "on the last rank": lambda P: range(P - 1, P),
    "on rank 1": lambda P: range(1, min(2, P)),
    "on odd ranks": lambda P: range(1, P, 2),
    "on even ranks": lambda P: range(0, P, 2),
    "on all ranks but the first": lambda P: range(1, P),
    "on all ranks but the last": lambda P: range(P - 1),
}


def _no_special_mask(case: Case) -> bool:
    return not (case.window or case.documents or case.sinks)


PARTS: dict[str, Callable[[Case], bool]] = {  # questions that a mistake may explain by themselves
    "the questions without windows, documents and sinks": _no_special_mask,
    "the questions without any mask": lambda case: _no_special_mask(case) and not case.causal,
    "the causal questions": lambda case: _no_special_mask(case) and case.causal,
}

PARTS_OF_AN_ANSWER: tuple[tuple[str, ...], ...] = (FORWARD, ("out",), ("dk", "dv"), ("dq",), ("dk",), ("dv",))


@dataclass(frozen=True)
class Explanation:
    """One mistake, or two together, and the condition under which they are made."""

    mistakes: tuple[Mistake, ...]
    change: Change = field(compare=False)
    ranks: str = ""  # a name in SOME_RANKS; "": on all ranks
    condition: str = ""  # in words; "": in every question

    @property
    def name(self) -> str:
        return " and ".join(mistake.name for mistake in self.mistakes)

    @property
    def words(self) -> str:
        """The name with its condition: "last_block_skipped (on rank 0 only)"."""
        said = [f"{words} only" for words in (self.ranks, self.condition) if words]
        return f"{self.name} ({', '.join(said)})" if said else self.name


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a ring."""

    explanations: tuple[Explanation, ...]  # each gives the ring's numbers in every wrong answer, or in a part of them
    answers: tuple[Answer, ...]  # the wrong answers
    when: str  # the mistake shows, in words
    part: str = ""  # the explanations explain this part of the wrong answers only; "": all of them

    @property
    def names(self) -> set[str]:
        return {explanation.name for explanation in self.explanations}


def diagnose(examination: Examination) -> Diagnosis | None:
    """The diagnosis of the wrong answers; None when no answer is wrong."""
    answered = [answer for answer in examination.answers if answer.results and not answer.in_float32]
    claimed = [answer for answer in answered if not never_claimed(answer)]
    if any(answer.state == WRONG for answer in claimed):
        answered = claimed  # what was never claimed may be anything
    wrong = tuple(answer for answer in answered if answer.state == WRONG)
    if not wrong:
        return None
    when = when_it_shows([answer for answer in _but_rounding(answered) if not answer.changes])
    if examination.changes:
        return Diagnosis((), wrong, when)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small more threads only wait for each other
    try:
        found, part = _explain(_telling_first(_telling(answered)))
    finally:
        torch.set_num_threads(threads)
    wide = [answer for answer in wrong if torch.finfo(answer.case.dtype).bits > 16]
    ways = {answer.question.how for answer in wide or wrong}
    if ways <= set(BY_WAY) and not (found and "without gradients" in ways):
        found, part = [Explanation(tuple(BY_WAY[way] for way in BY_WAY if way in ways), lambda steps: steps)], ""
    return Diagnosis(tuple(found), wrong, when, part)


def _but_rounding(answered: list[Answer]) -> list[Answer]:
    """Without those that are only imprecise in 16 bits, where others are wrong: these have another cause."""
    wrong = [answer for answer in answered if answer.state == WRONG]
    return answered if all(map(imprecise, wrong)) else [answer for answer in answered if not imprecise(answer)]


def _telling(answered: list[Answer]) -> list[Answer]:
    """The answers that name a mistake. The first kind of answer of which one is wrong is taken."""
    plain = [answer for answer in answered if _on_paper(answer)]
    if any(answer.state == WRONG for answer in plain):
        return plain
    for some in (
        [answer for answer in answered if answer.case.inputs in UNROUNDED],  # a mistake of 16 bits
        [answer for answer in answered if _in_16_bits(answer)],  # a ring for 16 bits only
    ):
        if any(answer.state == WRONG for answer in some):
            return plain + some  # an entry that would make a wider dtype wrong too is not the mistake
    wrong = sorted((answer for answer in answered if answer.state == WRONG), key=lambda answer: answer.case.seq_len)
    return plain + [answer for answer in wrong if answer.question.large and answer.case.seq_len <= LARGEST][:1]


def _on_paper(answer: Answer) -> bool:
    """Whether the numbers of an answer can be computed on paper. Numbers of 16-bit kernels cannot.

    A question that asks in another way is for other faults; a large one would take seconds for each entry.
    """
    usual = answer.question.how in ("plain", "watched", "without gradients")
    return usual and not answer.question.large and torch.finfo(answer.case.dtype).bits > 16


def _in_16_bits(answer: Answer) -> bool:
    return _on_paper(replace(answer, question=replace(answer.question, case=replace(answer.case, dtype=torch.float32))))


def _telling_first(answers: list[Answer]) -> list[Answer]:
    """Wrong answers of three ranks first: they are small, and most entries are ruled out by the first of them."""

    def key(answer: Answer) -> tuple[bool, int, int]:
        return answer.state != WRONG, abs(answer.case.world_size - 3), answer.case.seq_len

    return sorted(answers, key=key)


def _explain(answers: list[Answer]) -> tuple[list[Explanation], str]:
    """All explanations, and which part of the wrong answers they explain; "" for all.

    The simplest kind of explanation that fits is returned.
    """
    if not any(answer.state == WRONG for answer in answers):
        return [], ""
    in_forward, in_gradients = _entries(of_gradients=False), _entries(of_gradients=True)
    other_gradients = [change(entry) for change in (_by_autograd, _in_forward_only) for entry in in_forward]
    single = [*in_gradients, *in_forward, *other_gradients]
    if large := [answer for answer in answers if answer.state == WRONG and answer.question.large]:
        return _of_large(large[0], answers, in_forward, in_gradients), ""
    usual = [answer for answer in answers if not _special(answer.case)]
    usual = usual if any(answer.state == WRONG for answer in usual) else answers
    for some in (answers, usual) if len(usual) < len(answers) else (answers,):
        if found := _fitting(single, some, EVERYTHING):
            return found, ""
    if found := _under_a_condition(single, usual, EVERYTHING) or _on_some_ranks(single, usual):
        return found, ""
    deadline = time.process_time() + SEARCH
    if found := _two_together(in_forward, in_gradients, usual, deadline):
        return found, ""
    wrong = {name for answer in usual for name in answer.wrong}
    never_wrong = tuple(name for name in EVERYTHING if name not in wrong)
    out_is_wrong = any(name in answer.wrong for answer in usual if not imprecise(answer) for name in FORWARD)
    for names in PARTS_OF_AN_ANSWER:
        if out_is_wrong and not set(names) <= set(FORWARD):
            break  # wrong gradients follow from a wrong output: to name them would mislead
        if set(names) < wrong:
            known = names + never_wrong
            if found := _fitting(single, usual, known) or _under_a_condition(single, usual, known):
                return found, " and ".join(names)
    for part, of_part in PARTS.items():
        some = [answer for answer in usual if of_part(answer.case)]
        if any(answer.state == WRONG for answer in some) and len(some) < len(usual):
            for names in (EVERYTHING, FORWARD):
                if any(set(names) & set(answer.wrong) for answer in some) and (found := _fitting(single, some, names)):
                    return found, part if names == EVERYTHING else f"out and lse in {part}"
    return [], ""


def _of_large(
    large: Answer, answers: list[Answer], in_forward: list[Explanation], in_gradients: list[Explanation]
) -> list[Explanation]:
    """The explanations of a large answer where small ones are right. Each takes long: the likely ones come first."""
    forward, deadline = any(name in large.wrong for name in FORWARD), time.process_time() + SEARCH
    entries, names = (in_forward, FORWARD) if forward else (in_gradients, EVERYTHING)
    small = [answer for answer in answers if not answer.question.large][:4]
    entries.sort(key=lambda entry: sum(_fits(entry, answer, names) is False for answer in small))
    if forward:  # one result tells most of them apart
        entries = [entry for entry in entries if time.process_time() < deadline and _fits(entry, large, FORWARD)]
        entries = [change(entry) for entry in entries for change in (lambda same: same, _by_autograd, _in_forward_only)]
    return _under_a_condition(entries, answers, EVERYTHING, deadline + SEARCH)


def _entries(*, of_gradients: bool) -> list[Explanation]:
    """Every variant of every entry about gradients, or of every other entry."""
    return [
        Explanation((mistake,), variant)
        for mistake in CATALOGUE.values()
        for variant in mistake.variants
        if (mistake.name in OF_GRADIENTS) == of_gradients
    ]


def _by_autograd(explanation: Explanation) -> Explanation:
    """The same forward pass; its gradients by autograd instead of by the formula."""
    return replace(explanation, change=lambda steps: replace(explanation.change(steps), autograd=True))


def _in_forward_only(explanation: Explanation) -> Explanation:
    """A right backward pass, with the out and lse that the wrong forward pass saved."""
    return replace(explanation, change=lambda steps: replace(explanation.change(steps), backward=steps))


# Which explanations fit ---------------------------------------------------------------------------------------------


def _fitting(
    explanations: Iterable[Explanation], answers: list[Answer], names: tuple[str, ...], deadline: float = math.inf
) -> list[Explanation]:
    """The explanations that give the ring's numbers in every answer, each name once. Ends at the deadline."""
    found: dict[str, Explanation] = {}
    for explanation in explanations:
        if time.process_time() > deadline:
            break
        if explanation.name not in found and _explains(explanation, answers, names):
            found[explanation.name] = explanation
    return list(found.values())


def _explains(explanation: Explanation, answers: list[Answer], names: tuple[str, ...]) -> bool:
    """Whether no answer contradicts the explanation, and a wrong answer confirms it."""
    confirmed = False
    for answer in answers:
        if (fits := _fits(explanation, answer, names)) is False:
            return False
        confirmed |= fits is True and bool(answer.wrong)
    return confirmed


def _under_a_condition(
    explanations: list[Explanation], answers: list[Answer], names: tuple[str, ...], deadline: float = math.inf
) -> list[Explanation]:
    """Those that give the numbers of every wrong answer, and with which a feature separates the right answers.

    Only the right answers that the mistake would make wrong count. Those with the fewest of them are returned.
    """
    wrong = [answer for answer in answers if any(name in answer.wrong for name in names)]
    right = [answer for answer in answers if not any(name in answer.wrong for name in names)]
    found: dict[str, tuple[int, Explanation]] = {}
    for explanation in explanations:
        if time.process_time() > deadline:
            break
        if not all(_fits(explanation, answer, names) for answer in wrong):
            continue
        spared = [answer for answer in right if _fits(explanation, answer, names) is False]
        condition = separated(spared, wrong) if spared else ""
        if (condition or not spared) and len(spared) < found.get(explanation.name, (len(answers) + 1, None))[0]:
            found[explanation.name] = len(spared), replace(explanation, condition=condition)
    least = min((count for count, _ in found.values()), default=0)
    return [explanation for count, explanation in found.values() if count == least]


def _on_some_ranks(explanations: list[Explanation], answers: list[Answer]) -> list[Explanation]:
    """Those that explain everything when some ranks make the mistake and the others do not."""
    wrong = [answer for answer in answers if answer.state == WRONG]
    for words, ranks in SOME_RANKS.items():
        if all(
            set(answer.ranks.get(name, ())) <= set(ranks(answer.case.world_size))
            for answer in wrong
            for name in ("out", "lse", "dq")
        ):
            of_ranks = (replace(explanation, ranks=words) for explanation in explanations)
            if found := _fitting(of_ranks, answers, EVERYTHING):
                return found
    return []


def _two_together(
    in_forward: list[Explanation], in_gradients: list[Explanation], answers: list[Answer], deadline: float
) -> list[Explanation]:
    """Pairs of entries that explain everything."""
    first = answers[0]
    if not any(name in answer.wrong for answer in answers for name in FORWARD):
        return _fitting(_pairs(in_gradients, in_gradients, first, EVERYTHING), answers, EVERYTHING, deadline)
    found = _fitting(in_forward, answers, FORWARD)
    found = found or _fitting(_pairs(in_forward, in_forward, first, FORWARD), answers, FORWARD, deadline)
    more = _fitting([*found, *map(_by_autograd, found), *map(_in_forward_only, found)], answers, EVERYTHING)
    return more or _fitting(_pairs(found, in_gradients, first, FORWARD), answers, EVERYTHING, deadline)


def _pairs(
    first: list[Explanation], second: list[Explanation], answer: Answer, names: tuple[str, ...]
) -> Iterator[Explanation]:
    """Pairs that can give a wrong answer: one mistake gives the answer by itself, or both change the answer."""
    alone = [entry for entry in first if _fits(entry, answer, names)]
    acting, also_acting = ([entry for entry in some if _acts(entry, answer, names)] for some in (first, second))
    done: set[frozenset[int]] = set()
    usual, also_usual = ([entry for entry in some if _usual(entry)] for some in (acting, also_acting))
    for a, b in itertools.chain(
        itertools.product(alone, second), itertools.product(usual, also_usual), itertools.product(acting, also_acting)
    ):
        if a.mistakes != b.mistakes and (both := frozenset((id(a), id(b)))) not in done:
            done.add(both)
            mistakes = tuple(sorted((*a.mistakes, *b.mistakes), key=lambda mistake: mistake.name))
            yield Explanation(mistakes, _both(a.change, b.change))
            yield Explanation(mistakes, _both(b.change, a.change))


def _usual(explanation: Explanation) -> bool:
    """Whether it is the first variant of its mistake, which most rings have."""
    return explanation.change is explanation.mistakes[0].variants[0]


def _both(first: Change, then: Change) -> Change:
    return lambda steps: then(first(steps))


def _acts(explanation: Explanation, answer: Answer, names: tuple[str, ...]) -> bool:
    """Whether the mistake changes the answer to this question."""
    right = _right(answer.case)
    try:
        changed = compute(answer.case, explanation.change(RIGHT), gradients=names == EVERYTHING)
    except NotOnPaper:
        return False
    return any(not torch.allclose(changed[name], right[name].exact) for name in names if name in changed)


def _fits(explanation: Explanation, answer: Answer, names: tuple[str, ...]) -> bool | None:
    """Whether a ring with this mistake gives these numbers. None: they cannot be computed on paper.

    On one rank, and with one token on each rank, such a ring may use other code, and be right.
    """
    case = answer.case
    names = tuple(name for name in names if name in answer.results)
    if _special(case) and not any(name in answer.wrong for name in names):
        return True
    gradients = any(name in GRADIENTS for name in names)
    try:
        if gradients and any(name in answer.wrong for name in FORWARD):  # most fail by their output, which costs less
            expected = _expected(case, explanation.change, explanation.ranks, gradients=False)
            if not all(_near(answer, name, expected[name]) for name in names if name in FORWARD):
                return False
        expected = _expected(case, explanation.change, explanation.ranks, gradients=gradients)
    except NotOnPaper:
        return None
    return all(_near(answer, name, expected[name]) for name in names)


def _expected(case: Case, change: Change, ranks: str, *, gradients: bool) -> dict[str, Tensor]:
    """What a ring with this mistake returns. Raises NotOnPaper."""
    kept = _kept if case.seq_len < 128 else _kept.__wrapped__  # large results would fill the memory
    return kept(case, change, ranks, gradients)


@lru_cache(maxsize=4096)
def _kept(case: Case, change: Change, ranks: str, gradients: bool) -> dict[str, Tensor]:
    some = SOME_RANKS[ranks](case.world_size) if ranks else None
    return compute(case, change(RIGHT), gradients=gradients, ranks=some)


def _special(case: Case) -> bool:
    """One rank, or one token on each rank: many rings treat such a case in another way."""
    return case.world_size == 1 or case.one_token_each


def _near(answer: Answer, name: str, expected: Tensor) -> bool:
    """Whether a result is what was expected on paper: NaN and inf at the same places, the rest within rounding.

    Paper is float64. A number that the dtype of the ring cannot hold is inf there, or NaN after the next sum.
    """
    x, of, case = answer.results[name].double(), _right(answer.case)[name], answer.case
    too_large = expected.isfinite() & (expected.abs() > torch.finfo(answer.results[name].dtype).max)
    expected = torch.where(too_large & ~x.isfinite(), x, expected)
    finite = x.isfinite() & expected.isfinite()
    if not torch.equal(x[~finite].nan_to_num(nan=0.5), expected[~finite].nan_to_num(nan=0.5)):
        return False
    if not finite.any():
        return True
    largest = expected[finite].abs().max()
    if case.inputs in UNROUNDED:  # nothing but the last rounding
        allowed = half_step(expected, of.dtype) + 1e-6 * largest
    else:
        here = of.exact.isfinite()
        allowed = SLACK * of.allowed[here].max() * max(1.0, float(largest / of.exact[here].abs().max().clamp(1e-300)))
    return bool(((x - expected).abs() <= allowed)[finite].all())


@lru_cache(maxsize=512)
def _right(case: Case) -> dict[str, Right]:
    """The right answers with the bound of float32: two mistakes differ by more, and some rings compute in float32."""
    return replace(case, dtype=torch.float32).right() if case.dtype == torch.float64 else case.right()
