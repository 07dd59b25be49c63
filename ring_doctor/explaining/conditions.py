"""When does a mistake show? In words: "from 3 ranks on (right with 1, 2), under a causal mask only".

Two questions that differ in one feature are compared. If one answer is right and the other is wrong, the mistake shows
with that feature.

Before: asking/questions.py. After: explanation.py; inference.py, for what an X-ray cannot show.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ring_doctor.asking.answers import OK, WRONG, Answer, imprecise
from ring_doctor.asking.case import Case
from ring_doctor.asking.questions import WAYS, Question
from ring_doctor.explaining.facts import listed

ALWAYS = "in every question"
OUT_FIRST = "its gradients do not follow from this out by formula, as autograd's may not: mend out, then ask again"
RANKS = "with {} ranks"
FEATURES: list[tuple[str, Callable[[Question], Any]]] = [
    (RANKS, lambda question: question.case.world_size),
    ("{}", lambda question: "under a causal mask" if question.case.causal else "without a mask"),
    ("in the {} layout", lambda question: question.case.layout),
    ("with {}", lambda question: question.case.numbers()),
    ("in {}", lambda question: str(question.case.dtype).removeprefix("torch.")),
    ("{} grouped queries", lambda question: _with(question.case.heads != question.case.kv_heads)),
    ("with {}", lambda question: "one K/V head" if question.case.kv_heads == 1 else "more than one K/V head"),
    ("{}", lambda question: WAYS[question.how][0]),
    ("with a batch of {}", lambda question: question.case.batch),
    ("{} a given scale", lambda question: _with(question.case.scale is not None)),
    ("{} a window", lambda question: _with(question.case.window)),
    ("with {} of one key", lambda question: "a window" if question.case.window == 1 else "no window"),
    ("with a window_size whose right side is {}", lambda question: "not 0" if question.case.window_right else "0"),
    ("{} attention sinks", lambda question: _with(question.case.sinks)),
    ("with a V {}", lambda question: _size_of_values(question.case)),
    ("{} documents", lambda question: _with(question.case.documents)),
    ("with chunks of {}", lambda question: "one length" if question.case.equal_chunks else "unequal lengths"),
    ("with {} a rank", lambda question: "one token" if question.case.one_token_each else "more than one token"),
    ("with an {} number of tokens a rank", lambda question: "odd" if _tokens(question) % 2 else "even"),
    ("with {}", lambda question: "large sizes (C > 128)" if _tokens(question) > 128 else "small sizes"),
    ("{} chosen keys", lambda question: _with(getattr(question.case, "choose", False))),
    ("{} a state before the first token", lambda question: _with(getattr(question.case, "from_state", False))),
    ("in {} job", lambda question: "a part of the" if question.members else "the whole"),
]
Features = tuple[Any, ...]  # of a question, as in FEATURES
LUCK = 1e-6  # how likely it may be that wrong answers have a feature by luck
MANY = 2  # values of a feature in a sentence; of more, those without the mistake are said


def _tokens(question: Question) -> int:
    """Of rank 0, which has the most."""
    return len(question.case.positions(0))


def _size_of_values(case: Case) -> str:
    wider = (case.value_dim or case.head_dim) - case.head_dim
    return "wider than K" if wider > 0 else "narrower than K" if wider else "as wide as K"


def _with(feature: Any) -> str:
    return "with" if feature else "without"


def when_it_shows(answers: Sequence[Answer], more: Sequence[Answer] = ()) -> tuple[str, Callable[[Answer], bool]]:
    """The features with which the mistake shows, in words; "" where no two questions tell it.

    Together they are true of every wrong answer and of no right one. If none are, two features of which each wrong
    answer has one may be; or those of every wrong answer are told, with "sometimes". Also whether another wrong answer
    has them, and is wrong in no other result. Of roundings neither the mask nor the numbers are a feature: whether they
    show is luck. `more`: wrong answers to what nobody claimed. They count where the mistake may show.
    """
    bad = [answer for answer in answers if answer.state == WRONG]
    rounded = all(map(imprecise, bad))
    shown = {answer.case.inputs for answer in (bad if rounded else answers)}
    results = {name for answer in bad for name in answer.wrong}
    seen = results | ({"dq"} if results <= {f"d{name}" for it in answers for name in it.case.learned} else set())
    wrong = {_features(answer.question, rounded) for answer in bad}
    fine = [it for it in answers if it.state == OK and not seen.isdisjoint(it.results)]
    right = {_features(it.question, rounded) for it in fine if it.case.inputs in shown} - (wrong if rounded else set())
    told: list[tuple[int, set[Any]]] = []  # a feature, and its values in wrong answers
    for i, sick in enumerate(map(set, zip(*wrong, strict=True))):
        near = {features[:i] + features[i + 1 :] for features in wrong}
        if any(x[i] not in sick and x[:i] + x[i + 1 :] in near for x in right):
            told.append((i, sick))
    untrue = any(all(x[i] in sick for i, sick in told) for x in right)
    either = _either(right, wrong) if untrue else ()
    if untrue:  # what all wrong answers have, and few others: too many for luck
        share = [sum(x[i] in sick for x in right | wrong) / len(right | wrong) for i, sick in told]
        told = [each for each, x in zip(told, share, strict=True) if not either and x ** len(wrong) < LUCK]
    said = [f"{' or '.join(_in_words(i, {value}) for i, value in either)} only"] if either else []
    said += ["sometimes"] if untrue and told else []
    may: list[tuple[int, set[Any]]] = []  # as told, or with a number of ranks of which nobody knows
    for i, sick in told:
        others = {x[i] for x in right} - sick
        healthy = {x[i] for x in right if x[i] in others and all(x[j] in of for j, of in told if j != i)}
        may.append((i, sick | (others - healthy) if FEATURES[i][0] == RANKS else sick))
        if FEATURES[i][0] == RANKS:
            worlds = f"from {min(sick)} ranks on" if max(healthy) + 1 == min(sick) else _in_words(i, sick, ", ")
            well, unknown = (", ".join(map(str, sorted(of))) for of in (healthy, others - healthy))
            said.append(f"{worlds} (right with {well}{unknown and f'; no answer with {unknown}'})")
        else:
            but, few = "but not" if said else "everywhere but", len(sick) <= MANY and "no window" not in sick
            said.append(f"{_in_words(i, sick)} only" if few else f"{but} {_in_words(i, healthy or others)}")

    def shows(answer: Answer) -> bool:
        x = _features(answer.question, rounded)
        of_all = all(x[i] in of for i, of in may) and (not either or any(x[i] == value for i, value in either))
        return of_all and answer.wrong.keys() <= results

    if found := list(filter(shows, more)):
        return when_it_shows([*answers, *found])
    return ", ".join(said) or ("" if untrue or rounded else ALWAYS), shows


def _either(right: Collection[Features], wrong: Collection[Features]) -> Sequence[tuple[int, Any]]:
    """Two values of features of which every wrong question has one, and no right question has any; () if none are.

    A right question differs from a wrong one in this feature alone.
    """
    near = {(i, x[:i] + x[i + 1 :]) for x in right for i in range(len(x))}
    told = {(i, x[i]) for x in wrong for i in range(len(x)) if (i, x[:i] + x[i + 1 :]) in near}
    pairs = itertools.combinations(sorted(told - {it for x in right for it in enumerate(x)}, key=str), MANY)
    return next((two for two in pairs if all(any(x[i] == value for i, value in two) for x in wrong)), ())


def separated(right: Iterable[Question], wrong: Iterable[Question], most: int = 2) -> str | None:
    """In words, the first feature that all wrong questions have and no right one has; if there is none, two together.

    None if no two features do, or with `most` = 1 no one feature.
    """
    of_right, of_wrong = [_features(question) for question in right], [_features(question) for question in wrong]
    sick = [{features[i] for features in of_wrong} for i in range(len(FEATURES))]
    each = range(len(FEATURES))
    for some in (*itertools.combinations(each, 1), *itertools.combinations(each, most)):
        if all(any(features[i] not in sick[i] for i in some) for features in of_right):
            return " and ".join(_in_words(i, sick[i]) for i in some)
    return None


def where_left(left: Mapping[Question, Sequence[str]], answers: Sequence[Answer]) -> str:
    """Which results of these questions are left, and where: "dv with grouped queries"."""
    where: dict[tuple[Question, ...], list[str]] = {}
    for name in dict.fromkeys(name for names in left.values() for name in names):
        where.setdefault(tuple(question for question, names in left.items() if name in names), []).append(name)
    said = []
    for questions, names in where.items():
        fine = [it.question for it in answers if it.question not in questions and names[0] in it.results]
        told = (separated(fine, questions) or f"as with {questions[0].words()}") if fine else ""
        said.append(f"{listed(names)} {told}".rstrip())
    return "; ".join(said[:MANY])


def _in_words(i: int, values: set[Any], between: str = " or ") -> str:
    return FEATURES[i][0].format(between.join(map(str, sorted(values)))).replace("with 1 ranks", "with one rank")


def _features(question: Question, rounded: bool = False) -> Features:
    case = replace(question.case, causal=False, layout="contiguous") if rounded else question.case
    return tuple(feature(replace(question, case=case)) for _, feature in FEATURES)
