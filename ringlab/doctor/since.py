"""Since when does a mistake show? In words: "from 3 ranks on (right with 1, 2), under a causal mask only".

    it shows with a feature    where a right answer and a wrong one are alike in all else

Before: examination.py. After: diagnosis.py.
Source: none.
"""

import itertools
from collections.abc import Callable

from ringlab.doctor.examination import OK, WRONG, Outcome
from ringlab.doctor.questions import Question

FEATURES: list[tuple[str, Callable[[Question], object]]] = [
    ("with {} ranks", lambda it: it.case.world_size),
    ("{}", lambda it: "under a causal mask" if it.case.causal else "without a mask"),
    ("in the {} layout", lambda it: it.case.layout),
    ("with {} inputs", lambda it: it.case.inputs),
    ("in {}", lambda it: str(it.case.dtype).removeprefix("torch.")),
    ("{} grouped queries", lambda it: "with" if it.case.heads != it.case.kv_heads else "without"),
    ("{} a window", lambda it: "with" if it.case.window else "without"),
    ("{} attention sinks", lambda it: "with" if it.case.sinks else "without"),
    ("{} documents", lambda it: "with" if it.case.documents else "without"),
    ("with chunks of {}", lambda it: "one length" if it.case.equal_chunks else "unequal lengths"),
    (
        "with {}",
        lambda it: "one token a rank" if it.case.seq_len == it.case.world_size else "more than one token a rank",
    ),
    ("{}", lambda it: {"views": "with views as input", "twice": "when called twice"}.get(it.how, "when called once")),
    ("in {} job", lambda it: "a part of the" if it.members else "the whole"),
]


def since(outcomes: list[Outcome]) -> str:
    """When the mistake shows, in words: in what right answers differ from wrong ones, all else being alike."""
    kinds = {state: [_features(it.question) for it in outcomes if it.state == state] for state in (WRONG, OK)}
    said = []
    for i, (words, _) in enumerate(FEATURES):
        sick = {features[i] for features in kinds[WRONG]}
        healthy = set()
        for right, wrong in itertools.product(kinds[OK], kinds[WRONG]):
            if right[i] not in sick and right[:i] + right[i + 1 :] == wrong[:i] + wrong[i + 1 :]:
                healthy.add(right[i])
        if not healthy:
            continue
        if words != "with {} ranks":
            said.append(f"{words.format(' or '.join(map(str, sorted(sick))))} only")
            continue
        all_right = ", ".join(map(str, sorted(healthy)))
        if max(healthy) < min(sick):
            said.append(f"from {min(sick)} ranks on (right with {all_right})")
        else:
            said.append(f"with {', '.join(map(str, sorted(sick)))} ranks (right with {all_right})")
    return ", ".join(said) if said else "in every question"


def _features(question: Question) -> tuple[object, ...]:
    return tuple(feature(question) for _, feature in FEATURES)
