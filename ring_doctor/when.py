"""When does a mistake show? In words: "from 3 ranks on (right with 1, 2), under a causal mask only".

Two questions that differ in one feature are compared. If one answer is right and the other is wrong, the mistake shows
with that feature.

Before: examination.py. After: diagnosis.py.
Source: none.
"""

import itertools
from collections.abc import Callable
from typing import Any

from ring_doctor.answers import OK, WRONG, Answer
from ring_doctor.questions import Question

RANKS = "with {} ranks"
WAYS = {
    "views": "with views as input",
    "twice": "when called twice",
    "without gradients": "without gradients",
    "interleaved": "in two passes at a time",
    "autocast": "under autocast",
    "two backward passes": "in a second backward pass",
    "frozen keys": "where K needs no gradient",
    "frozen keys and values": "where K and V need no gradient",
    "after another length": "after a call with another length",
}
FEATURES: list[tuple[str, Callable[[Question], Any]]] = [
    (RANKS, lambda question: question.case.world_size),
    ("{}", lambda question: "under a causal mask" if question.case.causal else "without a mask"),
    ("in the {} layout", lambda question: question.case.layout),
    ("with {} inputs", lambda question: question.case.inputs),
    ("in {}", lambda question: str(question.case.dtype).removeprefix("torch.")),
    ("{} grouped queries", lambda question: _with(question.case.heads != question.case.kv_heads)),
    ("with {}", lambda question: "one K/V head" if question.case.kv_heads == 1 else "more than one K/V head"),
    ("{}", lambda question: WAYS.get(question.how, "when called once, with gradients")),
    ("with a batch of {}", lambda question: question.case.batch),
    ("{} a given scale", lambda question: _with(question.case.scale is not None)),
    ("{} a window", lambda question: _with(question.case.window)),
    ("{} attention sinks", lambda question: _with(question.case.sinks)),
    ("{} documents", lambda question: _with(question.case.documents)),
    ("with chunks of {}", lambda question: "one length" if question.case.equal_chunks else "unequal lengths"),
    ("with {} a rank", lambda question: "one token" if question.case.one_token_each else "more than one token"),
    ("with an {} number of tokens a rank", lambda question: "odd" if _tokens(question) % 2 else "even"),
    ("with {} tokens a rank", lambda question: "more than 128" if _tokens(question) > 128 else "at most 128"),
    ("in {} job", lambda question: "a part of the" if question.members else "the whole"),
]

MANY = 2  # values of a feature in a sentence; of more, those without the mistake are said


def _tokens(question: Question) -> int:
    """Of rank 0, which has the most."""
    return len(question.case.positions(0))


def _with(feature: Any) -> str:
    return "with" if feature else "without"


def when_it_shows(answers: list[Answer]) -> str:
    """The features with which the mistake shows, in words."""
    right, wrong = (
        [_features(answer.question) for answer in answers if answer.state == state] for state in (OK, WRONG)
    )
    said = []
    for i, (words, _) in enumerate(FEATURES):
        sick = {features[i] for features in wrong}
        healthy = {
            a[i]
            for a, b in itertools.product(right, wrong)
            if a[i] not in sick and a[:i] + a[i + 1 :] == b[:i] + b[i + 1 :]
        }
        if not healthy:
            continue
        if words != RANKS:
            some = f"{_in_words(i, sick)} only" if len(sick) <= MANY else f"but not {_in_words(i, healthy)}"
            said.append(some)
            continue
        worlds = f"with {', '.join(map(str, sorted(sick)))} ranks"
        if max(healthy) < min(sick):
            worlds = f"from {min(sick)} ranks on"
        said.append(f"{worlds} (right with {', '.join(map(str, sorted(healthy)))})")
    return ", ".join(said) if said else "in every question"


def separated(right: list[Answer], wrong: list[Answer]) -> str:
    """What all wrong questions have and no right one has, in words: one feature, or two together; "" if none does."""
    of_right, of_wrong = ([_features(answer.question) for answer in some] for some in (right, wrong))
    sick = [{features[i] for features in of_wrong} for i in range(len(FEATURES))]
    for some in itertools.chain.from_iterable(itertools.combinations(range(len(FEATURES)), n) for n in (1, 2)):
        if all(any(features[i] not in sick[i] for i in some) for features in of_right):
            return " and ".join(_in_words(i, sick[i]) for i in some)
    return ""


def _in_words(i: int, values: set[Any]) -> str:
    return FEATURES[i][0].format(" or ".join(map(str, sorted(values))))


def _features(question: Question) -> tuple[Any, ...]:
    return tuple(feature(question) for _, feature in FEATURES)
