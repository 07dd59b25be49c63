"""A fact is what is true of a wrong result. A pattern looks for one kind of fact; what all wrong answers share is told.

    pattern.common(answers, "dq")    ->    the facts of every answer in which dq is wrong

With two ranks "2 times" and "P times" are the same, so a pattern finds both, and an answer of three ranks decides.

Before: wrong_answer.py. After: contents.py and where_wrong.py, the patterns.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ring_doctor.wrong_answer import WrongAnswer

OF_GRADIENTS = {  # out is right: what follows from which gradients are wrong
    "dq": "dk and dv are right, so the weights p and dS are: look at where dS K is summed into dq.",
    "dk": "dq and dv are right, so dS and the way of dv are: look at dSᵀ Q, its scale, and where it is summed.",
    "dv": "dq and dk are right, so the weights p and dS are: look at pᵀ dO, and where it is summed.",
    "dk and dv": "dq is right, so the weights p and dS are: look at where dk and dv are summed, and at their way home.",
    "dq and dk": "dv is right, so the weights p are; dq and dk are wrong: look at dS = p ∘ (dP - δ): δ, dP = dO Vᵀ and "
    "the scale.",
    "dq and dv": "dk is right, so dS is: look at dS K, at pᵀ dO, and at where both are summed.",
    "dq, dk and dv": "out is right and all gradients are wrong: look at what the backward pass gets: q, k, v, lse, dO, "
    "and its mask.",
}


@dataclass(frozen=True)
class Fact:
    """What is true of a wrong answer if the result is as expected. Facts with equal words are the same."""

    words: str  # fill the gap in the pattern's sentence; without the numbers of this answer
    look: str = field(default="", compare=False)  # where to look
    expected: Tensor | None = field(default=None, compare=False)  # the result, if this is true; None: it is true
    order: int = field(default=0, compare=False)  # of several facts only those with the least order are told
    example: str = field(default="", compare=False)  # the numbers of one answer


Find = Callable[[WrongAnswer, str], Iterable[Fact] | None]


@dataclass(frozen=True)
class Pattern:
    """A kind of fact. `find` returns None where an answer cannot show it."""

    says: str  # a sentence with the gaps {x}, the results, and {words}
    find: Find

    def common(self, answers: Sequence[WrongAnswer], name: str) -> list[Fact]:
        """The facts of every answer in which this result is wrong and the pattern can be seen."""
        common: list[Fact] | None = None
        for wrong in answers:
            if name not in wrong.answer.wrong or (found := self.find(wrong, name)) is None:
                continue
            facts = [fact for fact in found if fact.expected is None or wrong.near(name, fact.expected)]
            common = facts if common is None else [fact for fact in common if fact in facts]
            if not common:
                return []
        least = min((fact.order for fact in common or []), default=0)
        return [fact for fact in common or [] if fact.order == least]

    def sentence(self, names: Sequence[str], facts: Sequence[Fact]) -> str:
        said = self.says.format(x=listed(names), words=" or ".join(dict.fromkeys(fact.words for fact in facts)))
        looks = ", or at ".join(dict.fromkeys(fact.look for fact in facts if fact.look))
        said += f" ({facts[0].example})" if facts[0].example else ""
        return f"{said}. Look at {looks}." if looks else f"{said}."


def pattern(
    says: str, *names: str, shows: Callable[[WrongAnswer], bool] = lambda wrong: True
) -> Callable[[Find], Pattern]:
    """Make a pattern of a function, for these results or for all, and for answers that can show it.

    It is not called for an error that is little more than rounding.
    """

    def make(find: Find) -> Pattern:
        def find_if_clear(wrong: WrongAnswer, name: str) -> Iterable[Fact] | None:
            return find(wrong, name) if name in (names or (name,)) and wrong.clear(name) and shows(wrong) else None

        return Pattern(says, find_if_clear)

    return make


def listed(names: Sequence[str]) -> str:
    """ "dq", "dq and dk", "dq, dk and dv"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
