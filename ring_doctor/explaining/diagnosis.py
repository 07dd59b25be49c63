"""The name of the mistake: the answers of a sick ring are compared with what each entry of the catalogue would return.

    a mistake is named    if a ring with this mistake gives the same numbers in every wrong answer,
                          and the right answers are right, or a condition keeps the mistake from them

If out is wrong, out and lse are compared: gradients follow from them, by more ways than one. Else all results are.
First come entries that explain everything, then those with a condition ("on rank 0 only"), or of a part: dk and dv.

Before: explanation.py. After: xray.py, a picture of what is wrong.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ring_doctor.asking.answers import WRONG, Answer, Examination, as_claimed, but_autocast, imprecise, never_claimed
from ring_doctor.asking.case import UNROUNDED
from ring_doctor.asking.latent_case import LATENTS
from ring_doctor.asking.questions import BESIDE, KEPT, Question
from ring_doctor.catalogue import BY_WAY, CATALOGUE
from ring_doctor.explaining.conditions import ALWAYS, when_it_shows, where_left
from ring_doctor.explaining.explanation import (
    EVERYTHING,
    FORWARD,
    Explanation,
    expected,
    fits,
    fitting,
    in_part,
    special,
    under_a_condition,
)
from ring_doctor.explaining.facts import WrongAnswer
from ring_doctor.mistakes import Mistake, latents, states

PARTS = ("dk", "dv"), ("dq",), ("dk",), ("dv",)  # of gradients, which may be wrong by a mistake each
LARGEST = 800  # tokens in an answer that is computed on paper for each entry
OTHER_GRADIENTS = ("views", "gradient of lse")  # ways to ask whose right gradients are not those of a plain question
FEW = 2  # explanations that a headline may name


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
    found, follow = _explain(asked := _telling(answered), of_kind.values(), progress)
    if not found and any("out" in it.answer.wrong for it in asked):  # where out is right another mistake may be
        right = [it for it in asked if "out" not in it.answer.wrong]
        found, follow = _explain(right, of_kind.values(), progress)
    faults = [it for it in examination.faults if it.state == WRONG and it.results]
    left = _left(found if len(found) <= FEW else [], faults, follow)
    told = [it for it in telling if it.state != WRONG or {*it.wrong} - {*left.get(it.question, ())}]
    if not _wrong(told):  # but for some roundings
        told, found, left = telling, [], {}
    when, shows = when_it_shows(told, list(filter(never_claimed, faults)))
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
    usual = [answer for answer in answers if not special(answer.case)]
    usual = usual if any(answer.answer.wrong for answer in usual) else answers
    wrong = {name for answer in usual for name in answer.answer.wrong}
    clear = {name for answer in usual for name in answer.answer.wrong if answer.clear(name)}
    right = tuple(name for name in EVERYTHING if name not in wrong)
    parts = [EVERYTHING, *(part + right for part in PARTS if set(part) < wrong)]
    if any(name in each.answer.wrong for each in usual if not imprecise(each.answer) for name in FORWARD):
        parts = [FORWARD, ("out",), *([] if "out" in wrong else parts[1:])]
    parts = [names for names in parts if not clear.isdisjoint(names)]  # else any entry fits
    for names in parts:
        searches = (answers, fitting), (usual, fitting), (usual, under_a_condition), (usual, in_part)
        for some, search in searches:
            progress(f"diagnosis: {len(entries)} mistakes, {len(some)} answers, {', '.join(names)}")
            if found := search(entries, some, names):
                same = {each.name for each in found if not each.condition}  # out and lse; their gradients may differ
                whole = fitting((each for each in entries if each.name in same), some, EVERYTHING)
                return whole or found, bool(whole) or (not same and _follow(found, some))
    found = under_a_condition(entries, usual, parts[0], most=True) if parts else []
    return found, _follow(found, usual)


def _follow(found: list[Explanation], answers: list[WrongAnswer]) -> bool:
    """Whether the gradients of a wrong out, in any answer, are those that its explanation makes of it."""
    sick = [it for it in answers if "out" in it.answer.wrong and "dq" in it.answer.results]
    given = {fits(each, it, EVERYTHING) for each in found for it in sick}
    return True in given or False not in given


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
    if (fit := fits(explanation, of, (name,))) is not False or of.case.dtype.itemsize > 2:
        return fit is not False
    on_paper = expected(of.case, explanation.change, name not in FORWARD, explanation.condition)[name]
    error, rest = ((of.seen(name) - x).norm() for x in (of.exact(name), on_paper))
    return bool(2 * rest < error) or (imprecise(of.answer) and of.case.inputs not in UNROUNDED)


def _rest(answers: Iterable[WrongAnswer], left: dict[Question, tuple[str, ...]]) -> list[WrongAnswer]:
    """The right answers, and what is left of wrong ones, but where a wrong out that is explained changes it too."""
    rest = []
    for answer, names in ((of.answer, left.get(of.answer.question, ())) for of in answers):
        results = {name: x for name, x in answer.results.items() if name in names or name not in answer.wrong}
        if not answer.wrong or (names and ("out" in names or "out" not in answer.wrong)):
            rest.append(WrongAnswer(replace(answer, results=results, wrong={n: answer.wrong[n] for n in names})))
    return rest
