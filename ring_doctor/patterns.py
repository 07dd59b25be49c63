"""Something that may be seen in a wrong result, and what all wrong answers have in common.

    pattern.common(answers, "dq")    ->    what is found in every answer in which dq is wrong

With two ranks "2 times" and "P times" are the same, so a pattern finds both, and an answer of three ranks decides.

Shapes: those of wrong_answer.py.

Before: wrong_answer.py. After: moves.py, factors.py, sums.py and places.py, the patterns.
Source: none.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ring_doctor.wrong_answer import WrongAnswer


@dataclass(frozen=True)
class Found:
    """What a pattern found in a wrong answer. Two answers may give equal words; then both have it."""

    words: str  # fill the gap in the pattern's sentence; without the numbers of this answer
    look: str = field(default="", compare=False)  # where to look
    order: int = field(default=0, compare=False)  # of several findings only those with the least order are told
    example: str = field(default="", compare=False)  # the numbers of one answer


@dataclass(frozen=True)
class Pattern:
    """Something that may be seen in a result. `find` returns None where an answer cannot show it."""

    says: str  # a sentence with the gaps {x}, the results, and {words}
    find: Callable[[WrongAnswer, str], Iterable[Found] | None]

    def common(self, answers: Sequence[WrongAnswer], name: str) -> list[Found]:
        """What is found in every answer in which this result is wrong and the pattern can be seen."""
        found: list[Found] | None = None
        for answer in answers:
            if name not in answer.answer.wrong:
                continue
            here = self.find(answer, name)
            if here is None:
                continue
            here = list(here)
            found = here if found is None else [one for one in found if one in here]
            if not found:
                return []
        found = found or []
        return [one for one in found if one.order == min(other.order for other in found)]

    def sentence(self, names: Sequence[str], found: Sequence[Found]) -> str:
        said = self.says.format(x=listed(names), words=" or ".join(dict.fromkeys(one.words for one in found)))
        looks = ", or at ".join(dict.fromkeys(one.look for one in found if one.look))
        said += f" ({found[0].example})" if found[0].example else ""
        return f"{said}. Look at {looks}." if looks else f"{said}."


Find = Callable[[WrongAnswer, str], Iterable[Found] | None]


def pattern(says: str) -> Callable[[Find], Pattern]:
    """Make a pattern of a function. It is not called for an error that is little more than rounding."""

    def make(find: Find) -> Pattern:
        return Pattern(says, lambda wrong, name: find(wrong, name) if wrong.clear(name) else None)

    return make


def listed(names: Sequence[str]) -> str:
    """ "dq", "dq and dk", "dq, dk and dv"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
