"""Which mistakes fit: the numbers of a sick ring are compared with what each entry of the catalogue would return.

    fitting(...)              those that explain every answer
    under_a_condition(...)    those with a feature: "under a causal mask"
    in_part(...)              those of some ranks, or of the backward pass

Before: ../catalogue.py, conditions.py. After: diagnosis.py, which chooses among them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from ring_doctor.asking.case import Case
from ring_doctor.asking.latent_case import LatentCase, LatentSteps, compute_latents
from ring_doctor.asking.state_case import RIGHT_STATES, StateCase, compute_states
from ring_doctor.explaining.conditions import separated
from ring_doctor.explaining.facts import WrongAnswer
from ring_doctor.mistakes import Change, Mistake
from ring_doctor.mistakes.backward import in_backward
from ring_doctor.mistakes.paper_ring import RIGHT, NotOnPaper, compute

FORWARD = ("out", "lse")
OF_KINDS = ("dlog_decay", "dbeta", "dstate", "dweight", "drope_keys", "dlatents", "dw_k", "dw_v")  # of states, latents
EVERYTHING = (*FORWARD, "dq", "dk", "dv", *OF_KINDS)
Results = tuple[str, ...]  # their names

SOME_RANKS: dict[str, Callable[[int], range]] = {  # of P ranks, those that may have a mistake by themselves
    "on rank 0": lambda P: range(1),
    "on the last rank": lambda P: range(P - 1, P),
    "on odd ranks": lambda P: range(1, P, 2),
}


@dataclass(frozen=True)
class Explanation:
    """A mistake, or one for each way to ask, and the condition under which it is made."""

    mistakes: tuple[Mistake, ...]
    change: Change = field(compare=False)
    condition: str = ""  # in words, or a name in SOME_RANKS; "": on all ranks and in every question

    @property
    def name(self) -> str:
        return " and ".join(mistake.name for mistake in self.mistakes)

    @property
    def words(self) -> str:
        """The name with its condition: "last_block_skipped (under a causal mask only)"."""
        return f"{self.name} ({self.condition} only)" if self.condition else self.name


def fitting(explanations: Iterable[Explanation], answers: list[WrongAnswer], names: Results) -> list[Explanation]:
    """The explanations that give the ring's numbers in every answer, each name once."""
    found: dict[str, Explanation] = {}
    for explanation in explanations:
        if explanation.name not in found and _explains(explanation, answers, names):
            found[explanation.name] = explanation
    return list(found.values())


def _explains(explanation: Explanation, answers: list[WrongAnswer], names: Results) -> bool:
    """Whether no answer contradicts the explanation, and a wrong answer confirms it."""
    confirmed = False
    for answer in answers:
        if (fit := fits(explanation, answer, names)) is False:
            return False
        confirmed = confirmed or (fit is True and any(name in answer.answer.wrong for name in names))
    return confirmed


def under_a_condition(
    explanations: list[Explanation], answers: list[WrongAnswer], names: Results, *, most: bool = False
) -> list[Explanation]:
    """Those that give the numbers of every wrong answer, and with which a feature separates the right answers.

    Only the right answers that the mistake would make wrong count. Those with the fewest of them are returned. With
    `most`: those that give the numbers of most wrong answers, and one feature separates these from all others. Their
    condition is that of the right ones.
    """
    wrong = [answer for answer in answers if any(name in answer.answer.wrong for name in names)]
    sample = wrong[:: len(wrong) // 4 + 1] if most else wrong  # of an entry that is not the mistake, none fits
    found: dict[str, tuple[int, Explanation]] = {}
    for explanation in explanations:
        if not (any if most else all)(fits(explanation, answer, names) for answer in sample):
            continue
        gives = {answer: fits(explanation, answer, names) for answer in answers}
        told, rest = ([it for it in wrong if bool(gives[it]) == given] for given in (True, False))
        spared = [it for it in answers if gives[it] is False and it not in wrong]
        right, other, sick = ([it.answer.question for it in some] for some in (spared, rest, told))
        size, count = 1 if most else 2, len(right + other)
        if len(sick) <= len(other) or (count and separated(right + other, sick, size) is None):
            continue
        if count < found.get(explanation.name, (len(answers), None))[0]:
            condition = (right and separated(right, sick, size)) or ""  # right answers alone: two mistakes may meet
            found[explanation.name] = count, replace(explanation, condition=condition)
    least = min((count for count, _ in found.values()), default=0)
    return [explanation for count, explanation in found.values() if count == least]


def in_part(explanations: list[Explanation], answers: list[WrongAnswer], names: Results) -> list[Explanation]:
    """Those that give out and lse when some ranks make the mistake; or gradients, when nothing else is wrong by it."""
    for words, ranks in SOME_RANKS.items() if names == FORWARD else ():
        of_ranks = [(it.answer.ranks.get(name, ()), ranks(it.case.world_size)) for it in answers for name in names]
        within = all(set(wrong) <= set(sick) for wrong, sick in of_ranks)
        if within and (found := fitting((replace(x, condition=words) for x in explanations), answers, names)):
            return found
    if names != EVERYTHING or isinstance(answers[0].case, LatentCase | StateCase):  # whose steps have one pass
        return []
    backward = (replace(x, change=in_backward(x.change), condition="in the backward pass") for x in explanations)
    wrong = tuple({name for it in answers for name in it.answer.wrong})
    alone = (replace(each, condition=f"in {wrong[0]}") for each in explanations if len(wrong) == 1)
    return fitting(backward, answers, names) or fitting(alone, answers, (*FORWARD, *wrong))


def fits(explanation: Explanation, wrong: WrongAnswer, names: Results) -> bool | None:
    """Whether a ring with this mistake gives these numbers. None: they cannot be computed on paper."""
    answer, case = wrong.answer, wrong.case
    names = tuple(name for name in names if name in answer.results)
    if special(case) and not any(name in answer.wrong for name in names):  # a ring may be right there by other code
        return True
    kept = expected if case.seq_len < 128 else expected.__wrapped__  # large results would fill the memory
    parts = [names] if set(names) <= set(FORWARD) else [FORWARD, names]  # most fail by their output, which costs less
    for part in parts:
        found = kept(case, explanation.change, not set(part) <= set(FORWARD), explanation.condition)
        if not found:
            return None
        if not all(wrong.near(name, found[name]) for name in part if name in names):
            return False
    return True


@lru_cache(maxsize=8192)
def expected(case: Case, change: Change, gradients: bool, condition: str) -> dict[str, Tensor]:
    """What a ring with this mistake returns, on some ranks or on all; {} where it cannot be computed on paper."""
    try:
        return _on_paper(case, change, gradients, condition)
    except (NotOnPaper, RuntimeError):  # or shapes that do not fit; states in runs of tokens
        return {}


def _on_paper(case: Case, change: Change, gradients: bool, condition: str) -> dict[str, Tensor]:
    steps: Any = change
    if isinstance(case, LatentCase):
        return compute_latents(case, steps(LatentSteps()))
    if isinstance(case, StateCase):
        return compute_states(case, steps(RIGHT_STATES))
    found = compute(case, change(RIGHT), gradients=gradients)
    if condition not in SOME_RANKS:
        return found
    right, sick = compute(case, RIGHT, gradients=gradients), SOME_RANKS[condition](case.world_size)
    of_ranks = {n: [case.cut((found if r in sick else right)[n], r) for r in range(case.world_size)] for n in found}
    return {name: case.join(chunks) for name, chunks in of_ranks.items()}


def special(case: Case) -> bool:
    """One rank, or one token on each rank: many rings treat such a case in another way."""
    return case.world_size == 1 or case.one_token_each
