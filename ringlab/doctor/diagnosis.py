"""Which mistake is it? The answers of a sick ring are compared with what each entry of the catalogue would return.

    a mistake is named  where it gives the ring's own numbers, right or wrong, in every question that was answered

A mistake that fits some wrong answers and not all is not the mistake. If no entry fits, pairs of entries are tried. If
no pair fits either, the diagnosis says only what can be seen: which results are wrong, and since when.

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
from ringlab.doctor.case import UNROUNDED, Case
from ringlab.doctor.catalogue import CATALOGUE
from ringlab.doctor.examination import OK, WRONG, Examination, Outcome
from ringlab.doctor.mistakes import Change, Mistake
from ringlab.doctor.paper_ring import RIGHT, NotOnPaper, compute
from ringlab.doctor.since import since
from ringlab.support.rounding import Right, half_step

FORWARD, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv")
EVERYTHING = FORWARD + GRADIENTS
SLACK = 8.0  # a wrong ring rounds in other places than a right one: so many times its bound is allowed


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

    explanations: tuple[Explanation, ...]  # all that give its numbers: no question tells two of them apart
    outcomes: tuple[Outcome, ...]  # the wrong answers that they explain
    since: str  # when it shows
    forward_only: bool = False  # they explain out and lse; the gradients fit neither the formula nor autograd

    @property
    def names(self) -> set[str]:
        return {explanation.name for explanation in self.explanations}


def diagnose(examination: Examination) -> Diagnosis | None:
    """The diagnosis of the wrong answers; None when no answer is wrong. Without an explanation, it says since when."""
    answered = [outcome for outcome in examination.outcomes if outcome.results and not outcome.in_float32]
    wrong = tuple(outcome for outcome in answered if outcome.state == WRONG)
    if not wrong:
        return None
    numeric = [outcome for outcome in answered if _on_paper(outcome)]
    shown = [outcome for outcome in answered if outcome.case.inputs not in UNROUNDED]
    if all(outcome.state == OK for outcome in numeric):  # then the mistake may be one of 16 bits
        numeric, shown = [outcome for outcome in answered if outcome.case.inputs in UNROUNDED], answered
    if all(outcome.state == OK for outcome in numeric):
        return Diagnosis((), wrong, since(shown))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small more threads only wait for each other
    try:
        found, forward_only = _explain(_telling_first(numeric))
        usual = [outcome for outcome in numeric if not _special(outcome.case)]
        if not found and any(outcome.state == WRONG for outcome in usual) and len(usual) < len(numeric):
            found, forward_only = _explain(_telling_first(usual))
    finally:
        torch.set_num_threads(threads)
    return Diagnosis(tuple(found), wrong, since(shown), forward_only)


def _on_paper(outcome: Outcome) -> bool:
    """Whether the numbers of an answer can be computed on paper: those of 16-bit kernels cannot, and a question that
    asks twice is for other faults."""
    return outcome.question.how not in ("views", "twice") and torch.finfo(outcome.case.dtype).bits > 16


def _telling_first(outcomes: list[Outcome]) -> list[Outcome]:
    """Wrong answers of three ranks first: they are small, and most entries are ruled out by the first of them."""
    return sorted(outcomes, key=lambda it: (it.state != WRONG, abs(it.case.world_size - 3), it.case.seq_len))


def _explain(outcomes: list[Outcome]) -> tuple[list[Explanation], bool]:
    """All explanations, and whether they explain the forward pass only."""
    in_forward, in_gradients = _entries(of_gradients=False), _entries(of_gradients=True)
    other_gradients = [of(it) for of in (_by_autograd, _in_forward_only) for it in in_forward]
    if found := _fitting([*in_gradients, *in_forward, *other_gradients], outcomes, EVERYTHING):
        return found, False
    if not any(name in outcome.wrong for outcome in outcomes for name in FORWARD):
        return _fitting(_pairs(in_gradients, in_gradients, outcomes[0], EVERYTHING), outcomes, EVERYTHING), False
    found = _fitting(in_forward, outcomes, FORWARD)
    if not found:
        found = _fitting(_pairs(in_forward, in_forward, outcomes[0], FORWARD), outcomes, FORWARD)
    more = _fitting([*found, *map(_by_autograd, found), *map(_in_forward_only, found)], outcomes, EVERYTHING)
    more = more or _fitting(_pairs(found, in_gradients, outcomes[0], FORWARD), outcomes, EVERYTHING)
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
    first: list[Explanation], second: list[Explanation], outcome: Outcome, names: tuple[str, ...]
) -> Iterator[Explanation]:
    """Pairs that can give a wrong answer: one of them gives it by itself, or both change it."""
    alone = [it for it in first if _fits(it, outcome, names)]
    acting = [it for it in first if _acts(it, outcome, names)]
    for a, b in itertools.chain(
        itertools.product(alone, second), itertools.product(acting, (it for it in second if _acts(it, outcome, names)))
    ):
        if a.mistakes != b.mistakes:
            mistakes = tuple(sorted((*a.mistakes, *b.mistakes), key=lambda mistake: mistake.name))
            yield Explanation(mistakes, lambda steps, a=a, b=b: b.change(a.change(steps)))
            yield Explanation(mistakes, lambda steps, a=a, b=b: a.change(b.change(steps)))


def _acts(explanation: Explanation, outcome: Outcome, names: tuple[str, ...]) -> bool:
    """Whether the mistake changes the answer to this question."""
    right = _right(outcome.case)
    try:
        changed = compute(outcome.case, explanation.change(RIGHT), gradients=names == EVERYTHING)
    except NotOnPaper:
        return False
    return any(not torch.allclose(changed[name], right[name].exact) for name in names if name in changed)


def _fitting(explanations: Iterable[Explanation], outcomes: list[Outcome], names: tuple[str, ...]) -> list[Explanation]:
    """Those that give the ring's own numbers in every answer; of those with one name, the first."""
    found: dict[str, Explanation] = {}
    for explanation in explanations:
        if explanation.name not in found and all(_fits(explanation, outcome, names) for outcome in outcomes):
            found[explanation.name] = explanation
    return list(found.values())


def _fits(explanation: Explanation, outcome: Outcome, names: tuple[str, ...]) -> bool:
    """Whether a ring with this mistake gives these numbers.

    On one rank, and with one token a rank, it may go a way of its own, and be right.
    """
    case = outcome.case
    names = tuple(name for name in names if name in outcome.results)
    if _special(case) and not any(name in outcome.wrong for name in names):
        return True
    steps, gradients = explanation.change(RIGHT), any(name in GRADIENTS for name in names)
    try:
        if gradients and any(name in outcome.wrong for name in FORWARD):  # most fail by their output, which costs less
            expected = compute(case, steps, gradients=False)
            if not all(_near(outcome, name, expected[name]) for name in names if name in FORWARD):
                return False
        expected = compute(case, steps, gradients=gradients)
    except NotOnPaper:
        return True  # this answer says nothing about this mistake
    return all(_near(outcome, name, expected[name]) for name in names)


def _special(case: Case) -> bool:
    """One rank, or one token a rank: many rings treat them in another way."""
    return case.world_size == 1 or case.seq_len == case.world_size


def _near(outcome: Outcome, name: str, expected: Tensor) -> bool:
    """Whether a result is what was expected on paper: NaN and inf at the same places, the rest within rounding.

    Paper is float64. A number that the dtype of the ring cannot hold is inf there, or NaN after the next sum.
    """
    x, of, case = outcome.results[name].double(), _right(outcome.case)[name], outcome.case
    too_large = expected.isfinite() & (expected.abs() > torch.finfo(outcome.results[name].dtype).max)
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
