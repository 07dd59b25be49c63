"""The name of the mistake: the answers of a sick ring are compared with what each entry of the catalogue would return.

    a mistake is named    if a ring with this mistake gives the same numbers, right or wrong, in every question

A mistake that fits some wrong answers and not all is not the mistake. If no entry fits, pairs of entries are tried. If
no pair fits either, the diagnosis says only what can be seen: which results are wrong, and when.

Before: catalogue.py. After: xray.py, a picture of what is wrong.
Source: the mistakes of public rings, as each entry of the catalogue names them.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from ringlab.doctor import mistakes_of_gradients
from ringlab.doctor.answers import OK, WRONG, Answer
from ringlab.doctor.case import UNROUNDED, Case
from ringlab.doctor.catalogue import CATALOGUE
from ringlab.doctor.examination import Examination
from ringlab.doctor.mistakes import Change, Mistake
from ringlab.doctor.paper_ring import RIGHT, NotOnPaper, compute
from ringlab.doctor.when import when_it_shows
from ringlab.support.rounding import Right, half_step

FORWARD, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv")
EVERYTHING = FORWARD + GRADIENTS
SLACK = 8.0  # times the bound of a right ring, because a wrong ring rounds in other places


@dataclass(frozen=True)
class Explanation:
    """One mistake, or two together."""

    mistakes: tuple[Mistake, ...]
    change: Change = field(compare=False)

    @property
    def name(self) -> str:
        return " and ".join(mistake.name for mistake in self.mistakes)


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a ring."""

    explanations: tuple[Explanation, ...]  # each gives the ring's numbers in every question
    answers: tuple[Answer, ...]  # the wrong answers that they explain
    when: str  # the mistake shows, in words
    forward_only: bool = False  # they explain out and lse; the gradients fit neither the formula nor autograd

    @property
    def names(self) -> set[str]:
        return {explanation.name for explanation in self.explanations}


def diagnose(examination: Examination) -> Diagnosis | None:
    """The diagnosis of the wrong answers; None when no answer is wrong."""
    answered = [answer for answer in examination.answers if answer.results and not answer.in_float32]
    wrong = tuple(answer for answer in answered if answer.state == WRONG)
    if not wrong:
        return None
    numeric = [answer for answer in answered if _on_paper(answer)]
    shown = [answer for answer in answered if answer.case.inputs not in UNROUNDED]
    if all(answer.state == OK for answer in numeric):  # then the mistake may be one of 16 bits
        numeric, shown = [answer for answer in answered if answer.case.inputs in UNROUNDED], answered
    if all(answer.state == OK for answer in numeric):
        return Diagnosis((), wrong, when_it_shows(shown))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small more threads only wait for each other
    try:
        found, forward_only = _explain(_telling_first(numeric))
        usual = [answer for answer in numeric if not _special(answer.case)]
        if not found and any(answer.state == WRONG for answer in usual) and len(usual) < len(numeric):
            found, forward_only = _explain(_telling_first(usual))
    finally:
        torch.set_num_threads(threads)
    return Diagnosis(tuple(found), wrong, when_it_shows(shown), forward_only)


def _on_paper(answer: Answer) -> bool:
    """Whether the numbers of an answer can be computed on paper. Numbers of 16-bit kernels cannot.

    A question that asks twice is for other faults.
    """
    return answer.question.how not in ("views", "twice") and torch.finfo(answer.case.dtype).bits > 16


def _telling_first(answers: list[Answer]) -> list[Answer]:
    """Wrong answers of three ranks first: they are small, and most entries are ruled out by the first of them."""

    def key(answer: Answer) -> tuple[bool, int, int]:
        return answer.state != WRONG, abs(answer.case.world_size - 3), answer.case.seq_len

    return sorted(answers, key=key)


def _explain(answers: list[Answer]) -> tuple[list[Explanation], bool]:
    """All explanations, and whether they explain the forward pass only."""
    in_forward, in_gradients = _entries(of_gradients=False), _entries(of_gradients=True)
    other_gradients = [change(entry) for change in (_by_autograd, _in_forward_only) for entry in in_forward]
    if found := _fitting([*in_gradients, *in_forward, *other_gradients], answers, EVERYTHING):
        return found, False
    if not any(name in answer.wrong for answer in answers for name in FORWARD):
        return _fitting(_pairs(in_gradients, in_gradients, answers[0], EVERYTHING), answers, EVERYTHING), False
    found = _fitting(in_forward, answers, FORWARD)
    if not found:
        found = _fitting(_pairs(in_forward, in_forward, answers[0], FORWARD), answers, FORWARD)
    more = _fitting([*found, *map(_by_autograd, found), *map(_in_forward_only, found)], answers, EVERYTHING)
    more = more or _fitting(_pairs(found, in_gradients, answers[0], FORWARD), answers, EVERYTHING)
    return (more, False) if more else (found, bool(found))


def _entries(*, of_gradients: bool) -> list[Explanation]:
    """Every variant of every entry about gradients, or of every other entry."""
    return [
        Explanation((mistake,), variant)
        for mistake in CATALOGUE.values()
        for variant in mistake.variants
        if (variant.__module__ == mistakes_of_gradients.__name__) == of_gradients
    ]


def _by_autograd(explanation: Explanation) -> Explanation:
    """The same forward pass; its gradients by autograd instead of by the formula."""
    return replace(explanation, change=lambda steps: replace(explanation.change(steps), autograd=True))


def _in_forward_only(explanation: Explanation) -> Explanation:
    """A right backward pass, with the out and lse that the wrong forward pass saved."""
    return replace(explanation, change=lambda steps: replace(explanation.change(steps), backward=steps))


def _pairs(
    first: list[Explanation], second: list[Explanation], answer: Answer, names: tuple[str, ...]
) -> Iterator[Explanation]:
    """Pairs that can give a wrong answer: one mistake gives the answer by itself, or both change the answer."""
    alone = [entry for entry in first if _fits(entry, answer, names)]
    acting, also_acting = ([entry for entry in some if _acts(entry, answer, names)] for some in (first, second))
    for a, b in itertools.chain(itertools.product(alone, second), itertools.product(acting, also_acting)):
        if a.mistakes != b.mistakes:
            mistakes = tuple(sorted((*a.mistakes, *b.mistakes), key=lambda mistake: mistake.name))
            yield Explanation(mistakes, _both(a.change, b.change))
            yield Explanation(mistakes, _both(b.change, a.change))


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


def _fitting(explanations: Iterable[Explanation], answers: list[Answer], names: tuple[str, ...]) -> list[Explanation]:
    """The explanations that give the ring's numbers in every answer, each name once."""
    found: dict[str, Explanation] = {}
    for explanation in explanations:
        if explanation.name not in found and all(_fits(explanation, answer, names) for answer in answers):
            found[explanation.name] = explanation
    return list(found.values())


def _fits(explanation: Explanation, answer: Answer, names: tuple[str, ...]) -> bool:
    """Whether a ring with this mistake gives these numbers.

    On one rank, and with one token on each rank, such a ring may use other code, and be right.
    """
    case = answer.case
    names = tuple(name for name in names if name in answer.results)
    if _special(case) and not any(name in answer.wrong for name in names):
        return True
    steps, gradients = explanation.change(RIGHT), any(name in GRADIENTS for name in names)
    try:
        if gradients and any(name in answer.wrong for name in FORWARD):  # most fail by their output, which costs less
            expected = compute(case, steps, gradients=False)
            if not all(_near(answer, name, expected[name]) for name in names if name in FORWARD):
                return False
        expected = compute(case, steps, gradients=gradients)
    except NotOnPaper:
        return True  # this answer says nothing about this mistake
    return all(_near(answer, name, expected[name]) for name in names)


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
