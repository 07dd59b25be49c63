"""The name of the mistake: the answers of a sick ring are compared with what each entry of the catalogue would return.

    a mistake is named    if a ring with this mistake gives the same numbers in every wrong answer,
                          and the right answers are right, or a condition keeps the mistake from them

If out is wrong, out and lse are compared: gradients follow from them, by more ways than one. Else all results are.
First come entries that explain everything, then those with a condition ("on rank 0 only"), or of a part: dk and dv.

Before: ../catalogue.py, conditions.py. After: xray.py, a picture of what is wrong.
Source: the mistakes of public rings, as each entry of the catalogue names them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from ring_doctor.asking.answers import WRONG, Answer, Examination, as_claimed, but_autocast, imprecise
from ring_doctor.asking.case import UNROUNDED, Case
from ring_doctor.asking.latent_case import LATENTS, LatentCase, LatentSteps, compute_latents
from ring_doctor.asking.questions import BESIDE, KEPT, Question
from ring_doctor.asking.state_case import StateCase
from ring_doctor.catalogue import BY_WAY, CATALOGUE
from ring_doctor.explaining.conditions import ALWAYS, separated, when_it_shows, where_left
from ring_doctor.explaining.facts import WrongAnswer
from ring_doctor.mistakes import Change, Mistake, latents, states
from ring_doctor.mistakes.backward import in_backward
from ring_doctor.mistakes.paper_ring import RIGHT, NotOnPaper, compute
from ring_doctor.mistakes.states import RIGHT_STATES, compute_states

FORWARD = ("out", "lse")
OF_KINDS = ("dlog_decay", "dbeta", "dstate", "dweight", "drope_keys", "dlatents", "dw_k", "dw_v")  # of states, latents
EVERYTHING = (*FORWARD, "dq", "dk", "dv", *OF_KINDS)
Results = tuple[str, ...]  # their names
PARTS = ("dk", "dv"), ("dq",), ("dk",), ("dv",)  # of gradients, which may be wrong by a mistake each
LARGEST = 800  # tokens in an answer that is computed on paper for each entry
OTHER_GRADIENTS = ("views", "gradient of lse")  # ways to ask whose right gradients are not those of a plain question
FEW = 2  # explanations that a headline may name

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


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a ring."""

    explanations: tuple[Explanation, ...]  # each gives the ring's numbers in every wrong answer, or in a part of them
    answers: tuple[Answer, ...]  # the wrong answers
    when: str  # the mistake shows, in words; "": no two questions tell it
    rest: str = ""  # what is wrong that the explanations do not give, in words: "dv with grouped queries"; "": nothing
    count: int = 0  # of the answers that it is in; without a name, those outside of `when`, or wrong in other results
    others: tuple[Explanation, ...] = ()  # of the rest
    follow: bool = True  # the gradients of a wrong out are those that an explanation makes of it, by formula

    @property
    def told(self) -> tuple[Explanation, ...]:
        """The explanations; () where they are so many that none of them is likely."""
        return self.explanations if len(self.explanations) <= FEW else ()


def diagnose(examination: Examination, progress: Callable[[str], None] = lambda words: None) -> Diagnosis | None:
    """The diagnosis of the wrong answers; None when no answer is wrong. `progress` is told what is compared."""
    answered = [answer for answer in examination.answers if answer.results and not answer.in_float32]
    answered = but_autocast(as_claimed(answered))
    if not (wrong := _wrong(answered)):
        return None
    others = [answer for answer in answered if not imprecise(answer)]  # what is only imprecise has another cause
    telling = others if _wrong(others) else answered
    usual = [it for it in telling if it.case.inputs not in UNROUNDED or it in _wrong(others)]  # they hide all but NaN
    telling = usual if _wrong(usual) else telling
    if examination.changes:
        return Diagnosis((), tuple(wrong), "")  # right answers are right by luck
    of_ways = _of_ways([answer for answer in wrong if answer.case.dtype.itemsize > 2] or wrong, answered)
    if of_ways and BY_WAY["without gradients"] not in of_ways[0].mistakes:
        return Diagnosis((*of_ways,), tuple(wrong), when_it_shows(telling)[0])
    state = examination.patient.state
    of_kind = latents.MISTAKES if state == LATENTS else states.MISTAKES if state else CATALOGUE
    found, follow = _explain(_telling(answered), of_kind.values(), progress)
    faults = [it for it in examination.faults if it.state == WRONG and it.results]
    left = _left(found if len(found) <= FEW else [], faults, follow)
    told = [it for it in telling if it.state != WRONG or {*it.wrong} - {*left.get(it.question, ())}]
    if not _wrong(told):  # but for some roundings
        told, found, left = telling, [], {}
    when, shows = when_it_shows(told)
    found = found or of_ways
    left = left if 0 < len(found) <= FEW else {it.question: tuple(it.wrong) for it in faults if not shows(it)}
    kinds = {"out" in answer.wrong for answer in _wrong(told)}  # two may be two mistakes, each with its condition
    when = "" if (left and when == ALWAYS) or (kinds == {True, False} and not found) else when
    of_left = [it for it in faults if it.question in left]
    rest = _rest(_telling(but_autocast([it for it in answered if it.state != WRONG] + of_left)), left) if left else []
    besides, of_rest = _explain(rest, of_kind.values())
    unnamed = _left(besides, [of.answer for of in _rest(map(WrongAnswer, of_left), left)], of_rest)
    besides = _of_ways(of_left, answered) or ([] if unnamed or len(besides) > FEW else besides)
    where = where_left(left, examination.answers)
    return Diagnosis(tuple(found), tuple(wrong), when, where, len(left), tuple(besides), follow or bool(state))


def _of_ways(wrong: list[Answer], answered: list[Answer]) -> list[Explanation]:
    """The ways to ask, if they are what the wrong answers have in common: asked as usual, the same inputs are right."""
    ways = {answer.question.how for answer in wrong}
    usual = {"plain", "without gradients"} - ways  # all of them right
    right = {answer.case.inputs for answer in answered if answer.question.how in usual}
    if not (ways and ways <= set(BY_WAY) and right >= {answer.case.inputs for answer in wrong}):
        return []
    kept = " and ".join(option for option in KEPT if BESIDE + option in ways)
    of_ways = tuple(dict.fromkeys(BY_WAY[way] for way in BY_WAY if way in ways))
    return [Explanation(of_ways, lambda steps: steps, kept)]


def _wrong(answers: Iterable[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.state == WRONG]


def _telling(answered: list[Answer]) -> list[WrongAnswer]:
    """The answers that name a mistake. The first kind of answer of which one is wrong is taken.

    Wrong answers of three ranks come first: they are small, and most entries are ruled out by the first of them.
    """
    usual = [it for it in answered if it.question.how in ("plain", "without gradients")]
    on_paper = [answer for answer in usual if not answer.case.large_tiles]  # but for kernels of 16 bits that round
    plain, in_16_bits = ([x for x in on_paper if (x.case.dtype.itemsize > 2) == wide] for wide in (True, False))
    of_16_bits = [answer for answer in answered if answer.case.inputs in UNROUNDED]
    large = [answer for answer in _wrong(answered) if answer.case.large_tiles and answer.case.seq_len <= LARGEST]
    large.sort(key=lambda answer: answer.case.seq_len)
    kinds: list[list[Answer]] = [[], of_16_bits, in_16_bits, large[:1]]  # a mistake of 16 bits, a ring for 16 bits only
    # with the plain ones: an entry that would make a wider dtype wrong too is not the mistake
    answers = next((plain + kind for kind in kinds if _wrong(plain + kind)), plain)
    answers.sort(key=lambda it: (it.case.large_tiles, it.state != WRONG, abs(it.case.world_size - 3), it.case.seq_len))
    return list(map(WrongAnswer, answers))


def _explain(
    answers: list[WrongAnswer], mistakes: Iterable[Mistake], progress: Callable[[str], None] = lambda words: None
) -> tuple[list[Explanation], bool]:
    """All explanations of the simplest kind that fits; whether they give all gradients too."""
    entries = [Explanation((mistake,), variant) for mistake in mistakes for variant in mistake.variants]
    usual = [answer for answer in answers if not _special(answer.case)]
    usual = usual if any(answer.answer.wrong for answer in usual) else answers
    wrong = {name for answer in usual for name in answer.answer.wrong}
    clear = {name for answer in usual for name in answer.answer.wrong if answer.clear(name)}
    right = tuple(name for name in EVERYTHING if name not in wrong)
    parts = [EVERYTHING, *(part + right for part in PARTS if set(part) < wrong)]
    if any(name in each.answer.wrong for each in usual if not imprecise(each.answer) for name in FORWARD):
        parts = [FORWARD, ("out",), *([] if "out" in wrong else parts[1:])]
    parts = [names for names in parts if not clear.isdisjoint(names)]  # else any entry fits
    for names in parts:
        searches = (answers, _fitting), (usual, _fitting), (usual, under_a_condition), (usual, _in_part)
        for some, search in searches:
            how = search.__name__.strip("_").replace("_", " ")
            progress(f"diagnosis: {len(entries)} mistakes, {len(some)} answers, {', '.join(names)}, {how}")
            if found := search(entries, some, names):
                same = {each.name for each in found if not each.condition}  # out and lse; their gradients may differ
                whole = _fitting((each for each in entries if each.name in same), some, EVERYTHING)
                return whole or found, bool(whole) or not same
    found = under_a_condition(entries, usual, parts[0], most=True) if parts else []
    return [replace(each, condition="") for each in found], True


def _left(found: list[Explanation], wrong: list[Answer], follow: bool) -> dict[Question, tuple[str, ...]]:
    """By question the wrong results that no explanation gives; no gradients that do not follow from a wrong out."""
    left = {}
    for of in map(WrongAnswer, wrong if found else ()):
        if of.case.seq_len <= LARGEST:
            other = of.answer.question.how in OTHER_GRADIENTS or ("out" in of.answer.wrong and not follow)
            names = [name for name in (FORWARD if other else EVERYTHING) if name in of.answer.wrong]
            alone = ("dsinks",) * (list(of.answer.wrong) == ["dsinks"])  # which no paper ring gives
            left[of.answer.question] = alone + tuple(n for n in names if not any(_may_give(x, of, n) for x in found))
    return {question: names for question, names in left.items() if names}


def _may_give(explanation: Explanation, of: WrongAnswer, name: str) -> bool:
    """Whether an explanation gives this wrong result; in 16 bits, most of its error."""
    if (fits := _fits(explanation, of, (name,))) is not False or of.case.dtype.itemsize > 2:
        return fits is not False
    expected = _expected(of.case, explanation.change, name not in FORWARD, explanation.condition)[name]
    error, rest = ((of.seen(name) - x).norm() for x in (of.exact(name), expected))
    return bool(2 * rest < error) or (imprecise(of.answer) and of.case.inputs not in UNROUNDED)


def _rest(answers: Iterable[WrongAnswer], left: dict[Question, tuple[str, ...]]) -> list[WrongAnswer]:
    """The right answers, and what is left of wrong ones, but where a wrong out that is explained changes it too."""
    rest = []
    for answer, names in ((of.answer, left.get(of.answer.question, ())) for of in answers):
        results = {name: x for name, x in answer.results.items() if name in names or name not in answer.wrong}
        if not answer.wrong or (names and ("out" in names or "out" not in answer.wrong)):
            rest.append(WrongAnswer(replace(answer, results=results, wrong={n: answer.wrong[n] for n in names})))
    return rest


# Which explanations fit ---------------------------------------------------------------------------------------------


def _fitting(explanations: Iterable[Explanation], answers: list[WrongAnswer], names: Results) -> list[Explanation]:
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
        if (fits := _fits(explanation, answer, names)) is False:
            return False
        confirmed = confirmed or (fits is True and any(name in answer.answer.wrong for name in names))
    return confirmed


def under_a_condition(
    explanations: list[Explanation], answers: list[WrongAnswer], names: Results, *, most: bool = False
) -> list[Explanation]:
    """Those that give the numbers of every wrong answer, and with which a feature separates the right answers.

    Only the right answers that the mistake would make wrong count. Those with the fewest of them are returned. With
    `most`: those that give the numbers of most wrong answers, and one feature separates these from all others.
    """
    wrong = [answer for answer in answers if any(name in answer.answer.wrong for name in names)]
    sample = wrong[:: len(wrong) // 4 + 1] if most else wrong  # of an entry that is not the mistake, none fits
    found: dict[str, tuple[int, Explanation]] = {}
    for explanation in explanations:
        if not (any if most else all)(_fits(explanation, answer, names) for answer in sample):
            continue
        fits = {answer: _fits(explanation, answer, names) for answer in answers}
        told = [answer for answer in wrong if fits[answer]]
        spared = [answer for answer in answers if fits[answer] is False or (answer in wrong and not fits[answer])]
        if 2 * len(told) <= len(wrong):
            continue
        right, sick = ([answer.answer.question for answer in some] for some in (spared, told))
        condition = separated(right, sick, 1 if most else 2) if spared else ""
        if condition is not None and len(spared) < found.get(explanation.name, (len(answers), None))[0]:
            found[explanation.name] = len(spared), replace(explanation, condition=condition)
    least = min((count for count, _ in found.values()), default=0)
    return [explanation for count, explanation in found.values() if count == least]


def _in_part(explanations: list[Explanation], answers: list[WrongAnswer], names: Results) -> list[Explanation]:
    """Those that give out and lse when some ranks make the mistake; or gradients, when nothing else is wrong by it."""
    for words, ranks in SOME_RANKS.items() if names == FORWARD else ():
        of_ranks = [(it.answer.ranks.get(name, ()), ranks(it.case.world_size)) for it in answers for name in names]
        fits = all(set(wrong) <= set(sick) for wrong, sick in of_ranks)
        if fits and (found := _fitting((replace(x, condition=words) for x in explanations), answers, names)):
            return found
    if names != EVERYTHING or isinstance(answers[0].case, LatentCase | StateCase):  # whose steps have one pass
        return []
    backward = (replace(x, change=in_backward(x.change), condition="in the backward pass") for x in explanations)
    wrong = tuple({name for it in answers for name in it.answer.wrong})
    alone = (replace(each, condition=f"in {wrong[0]}") for each in explanations if len(wrong) == 1)
    return _fitting(backward, answers, names) or _fitting(alone, answers, (*FORWARD, *wrong))


def _fits(explanation: Explanation, wrong: WrongAnswer, names: Results) -> bool | None:
    """Whether a ring with this mistake gives these numbers. None: they cannot be computed on paper."""
    answer, case = wrong.answer, wrong.case
    names = tuple(name for name in names if name in answer.results)
    if _special(case) and not any(name in answer.wrong for name in names):  # a ring may be right there by other code
        return True
    kept = _expected if case.seq_len < 128 else _expected.__wrapped__  # large results would fill the memory
    parts = [names] if set(names) <= set(FORWARD) else [FORWARD, names]  # most fail by their output, which costs less
    for part in parts:
        expected = kept(case, explanation.change, not set(part) <= set(FORWARD), explanation.condition)
        if not expected:
            return None
        if not all(wrong.near(name, expected[name]) for name in part if name in names):
            return False
    return True


@lru_cache(maxsize=8192)
def _expected(case: Case, change: Change, gradients: bool, condition: str) -> dict[str, Tensor]:
    """What a ring with this mistake returns, on some ranks or on all; {} where it cannot be computed on paper."""
    try:
        return _on_paper(case, change, gradients, condition)
    except (NotOnPaper, RuntimeError):  # or shapes that do not fit, where V has a head dim of its own
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


def _special(case: Case) -> bool:
    """One rank, or one token on each rank: many rings treat such a case in another way."""
    return case.world_size == 1 or case.one_token_each
