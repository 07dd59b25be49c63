"""What a mistake without a name must be, as far as its numbers prove it: what is seen, and where to look.

    infer(examination, xray)    ->    ["In dk and dv ... the part of the last round is missing: look at ...", ...]

A sentence is told only if it is true of every wrong answer that can show it. So a pattern of one answer by chance, or
of P = 2 alone, is not told as general. If no pattern holds, what is left is which results are wrong.

Shapes: those of wrong_answer.py.

    $ python -m ringlab.doctor.inference
    A ring whose dK and dV lack what the last round adds:
    - X-ray (P = 3, no mask, contiguous, C = 4, float64): W backward, weights of the backward pass (dV): round 2
      on every rank: missing. Look at the number of rounds, and at what a round leaves out.
    - In dk and dv the right parts of ranks and blocks are summed, but the part of the last round is missing: look
      at the rounds of the backward pass: the first, the last, the hop.
    - dq is right, so the weights p and dS are: look at where dk and dv are summed, and at their way home.
    A right ring: nothing to tell.

Before: contents.py, places.py and waiting.py. After: report.py.
Source: Dao et al. 2022, algorithm 4, for what follows from what.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from textwrap import fill

import torch

from ringlab.doctor.answers import OK, WRONG, Answer, judge
from ringlab.doctor.case import UNROUNDED, Case
from ringlab.doctor.contents import CONTENTS
from ringlab.doctor.examination import Examination
from ringlab.doctor.grids import Matrix, XRay
from ringlab.doctor.on_rank import RankResults
from ringlab.doctor.paper_ring import RIGHT, BlockGradients, Steps, compute
from ringlab.doctor.patient import Patient
from ringlab.doctor.places import PLACES
from ringlab.doctor.questions import Question
from ringlab.doctor.waiting import inferred
from ringlab.doctor.wrong_answer import Found, WrongAnswer, listed
from ringlab.doctor.xray import on_paper as xray_on_paper

WIDTH = 110
RESULTS = ("out", "lse", "dq", "dk", "dv")


def infer(examination: Examination, xray: XRay | str) -> list[str]:
    """The sentences, the most telling first; [] if nothing is wrong. `xray` as take_xray returns it."""
    wrong = [answer for answer in examination.answers if answer.state == WRONG and answer.results]
    hangs = list(dict.fromkeys(said for answer in examination.answers if (said := inferred(answer))))
    if not wrong:
        return hangs
    told = [WrongAnswer(answer) for answer in _comparable(wrong)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small more threads only wait for each other
    try:
        contents, known = _contents(told)
        places = _places(told, [name for name in RESULTS if name not in known])
    finally:
        torch.set_num_threads(threads)
    shown, cannot_show = _of_xray(xray, wrong, known)
    return [*contents, *shown, *_which(told), *places, *_worlds(examination.answers, told), *cannot_show, *hangs]


def text(sentences: Sequence[str]) -> str:
    """The sentences for a terminal; "" if there is none."""
    return "\n".join(fill(f"- {sentence}", WIDTH, subsequent_indent="  ") for sentence in sentences)


def _comparable(wrong: list[Answer]) -> list[Answer]:
    """Wrong answers in 32 bits or more to random inputs, asked once; all wrong answers if there is none."""
    plain = [
        answer
        for answer in wrong
        if answer.question.how not in ("views", "twice")
        and answer.case.inputs not in UNROUNDED
        and torch.finfo(answer.case.dtype).bits > 16
    ]
    return plain or wrong


def _contents(told: list[WrongAnswer]) -> tuple[list[str], set[str]]:
    """Of each result the first pattern that holds, and the results of which there is one."""
    groups: dict[int, dict[tuple[Found, ...], list[str]]] = {}
    for name in RESULTS:
        for i, pattern in enumerate(CONTENTS):
            if found := tuple(pattern.common(told, name)):
                groups.setdefault(i, {}).setdefault(found, []).append(name)
                break
    sentences = {
        tuple(names): CONTENTS[i].sentence(names, found) for i, of in groups.items() for found, names in of.items()
    }
    in_order = sorted(sentences, key=lambda names: RESULTS.index(names[0]))
    return [sentences[names] for names in in_order], {name for names in sentences for name in names}


def _places(told: list[WrongAnswer], names: list[str]) -> list[str]:
    """Where results are wrong of which no pattern says what they hold."""
    said = []
    for pattern in PLACES:
        same: dict[tuple[Found, ...], list[str]] = {}
        for name in names:
            if found := tuple(pattern.common(told, name)):
                same.setdefault(found, []).append(name)
        said += [pattern.sentence(of, found) for found, of in same.items()]
    return said


OF_GRADIENTS = {
    ("dq",): "dk and dv are right, so the weights p and dS are: look at where dS K is summed into dq.",
    ("dk",): "dq and dv are right, so dS and the way of dv are: look at dSᵀ Q, its scale, and where it is summed.",
    ("dv",): "dq and dk are right, so the weights p and dS are: look at pᵀ dO, and where it is summed.",
    (
        "dk",
        "dv",
    ): "dq is right, so the weights p and dS are: look at where dk and dv are summed, and at their way home.",
    (
        "dq",
        "dk",
    ): "dv is right, so the weights p are; dq and dk are wrong: look at dS = p ∘ (dP - δ): δ, dP = dO Vᵀ and "
    "the scale.",
    ("dq", "dv"): "dk is right, so dS is: look at dS K, at pᵀ dO, and at where both are summed.",
    (
        "dq",
        "dk",
        "dv",
    ): "out is right and all gradients are wrong: look at what the backward pass gets: q, k, v, lse, dO, and its mask.",
}


def _which(told: list[WrongAnswer]) -> list[str]:
    """What follows from which results are wrong."""
    wrong = {name for each in told for name in each.answer.wrong}
    given = {name for each in told for name in each.answer.results}
    gradients = tuple(name for name in ("dq", "dk", "dv") if name in wrong)
    if "out" not in wrong:
        said = ["out is right and lse is wrong: whatever uses this lse is wrong, as a merge or a backward pass."]
        said = said if "lse" in wrong else []
        return said + ([OF_GRADIENTS[gradients]] if gradients else [])
    said = []
    if "lse" in given and "lse" not in wrong:
        said.append(
            "lse is right, so the scores, the mask and l are: look at the values V, at the sum of p V, and at what "
            "becomes of out afterwards."
        )
    if "dq" in given and not gradients:
        said.append("out is wrong and all gradients are right: look at what becomes of out after it was computed.")
    right = [name for name in RESULTS if name in given - wrong]
    return said or [f"{listed([name for name in RESULTS if name in wrong])}: wrong" + _and_right(right)]


def _and_right(names: list[str]) -> str:
    if names:
        return f"; {listed(names)}: right."
    return ". Mend out first: all other results depend on the same scores."


def _worlds(answers: list[Answer], told: list[WrongAnswer]) -> list[str]:
    """What follows from the number of ranks."""
    worlds = {each.case.world_size for each in told}
    if 1 in worlds:
        return [
            "One rank alone is wrong too, so the mistake needs no message: look at what a rank does with its own block."
        ]
    asked = {_but_for_ranks(each.answer) for each in told}

    def right(P: int) -> bool:
        """Whether the same questions were asked with P ranks, and all were answered rightly."""
        of = [answer for answer in answers if answer.case.world_size == P and _but_for_ranks(answer) in asked]
        return bool(of) and all(answer.state == OK for answer in of)

    if min(worlds) > 2 and right(2):
        return [
            "Two ranks are right. With two, the next and the previous rank are the same, and so are the second and the "
            "last round: look at the direction of the hops, and at the rounds after the second."
        ]
    if right(1):
        return [
            "One rank alone is right: look at what is done between blocks: the hops, the merge, the masks of others."
        ]
    return []


def _but_for_ranks(answer: Answer) -> Question:
    """The question with one rank and one token: those of different numbers of ranks are equal."""
    question, case = answer.question, answer.case
    chunk = case.seq_len // case.world_size if case.equal_chunks else 0
    return Question(replace(case, world_size=1, seq_len=chunk), question.how)


SHOWN_BY = {"W forward": "out", "W backward": "dv", "dS in dQ": "dq", "dS in dK": "dk"}
LOOK = {  # by kind of tile
    "missing": "the number of rounds, and at what a round leaves out",
    "twice": "the number of rounds, and at the start of the sums",
    "shifted": "the hops: who sends to whom, and which block a rank takes it for",
    "sum": "buffers that are added to and not replaced",
    "mask": "the mask of these tiles: the positions of queries and keys, < and <=",
    "foreign": "the mask of these tiles: the positions of queries and keys, < and <=",
    "scaled": "the scale, and the factors with which blocks are merged",
    "NaN": "queries that see no key of a block",
}


def _of_xray(xray: XRay | str, wrong: list[Answer], known: set[str]) -> tuple[list[str], list[str]]:
    """What an X-ray shows, or why it cannot show the mistake. `known`: results of which is known what they hold."""
    if isinstance(xray, str):
        return [], []
    if xray.right:
        lacks = _lacks(xray.case, wrong)
        why = f"every wrong answer is one {listed(lacks)}" if lacks else "it has one head, small scores and few tokens"
        return [], [f"An X-ray cannot show this mistake: {why}."]
    matrix = next(matrix for matrix in xray.matrices if not matrix.ok)
    kinds = [tile.kind for tile in matrix.wrong]
    held = SHOWN_BY[matrix.name] in known
    if held and set(kinds) <= {"wrong"}:
        return [], []  # that all tiles are wrong says less
    seen = "; ".join(matrix.details()) + "." if matrix.wrong else " ".join(matrix.sentences())
    said = f"X-ray ({xray.case.words()}): {matrix.title}: {seen}"
    if kinds and set(kinds) <= {"mask", "foreign"}:
        said += _diagonals(matrix, xray.case)
    looks = [_look(matrix, kind) for kind in dict.fromkeys(kinds) if kind in LOOK and not held]
    return [said + (f" Look at {looks[0]}." if looks else "")], []


def _look(matrix: Matrix, kind: str) -> str:
    of_backward = "the lse that the backward pass gets: p = e^(s - lse), with the lse of the whole row"
    return of_backward if kind == "scaled" and matrix.name == "W backward" else LOOK[kind]


def _lacks(case: Case, wrong: list[Answer]) -> list[str]:
    """What all wrong answers have and the X-ray has not."""
    features = {
        "with another mask": lambda x: x.case.causal != case.causal,
        "in another layout": lambda x: x.case.layout != case.layout,
        "with another number of ranks": lambda x: x.case.world_size != case.world_size,
        "with a batch": lambda x: x.case.batch > 1,
        "with grouped queries": lambda x: x.case.heads != x.case.kv_heads,
        "with large scores": lambda x: x.case.inputs == "large",
        "with a scale": lambda x: x.case.scale is not None,
        "with attention sinks": lambda x: x.case.sinks,
        "in 16 bits": lambda x: torch.finfo(x.case.dtype).bits <= 16,
        "with chunks of unequal length": lambda x: not x.case.equal_chunks and case.equal_chunks,
        "with more tokens": lambda x: x.case.seq_len > 8 * case.seq_len,
        "to views": lambda x: x.question.how == "views",
        "to a second call": lambda x: x.question.how == "twice",
        "without gradients": lambda x: x.question.how == "without gradients",
        "in a part of a job": lambda x: x.question.members is not None,
    }
    return [words for words, has in features.items() if all(has(answer) for answer in wrong)]


def _diagonals(matrix: Matrix, case: Case) -> str:
    """The pairs that are seen and must be hidden, or the reverse, by the distance from the query to the key."""
    sheet = matrix.sheet
    present = torch.where(sheet.full.abs() > 2 * sheet.allowed, sheet.seen.abs() > sheet.allowed, sheet.visible)
    order = torch.cat([case.positions(rank) for rank in range(case.world_size)])
    distance, said = order[None, :] - order[:, None], ""
    for pairs, words in ((present & ~sheet.visible, "seen too"), (sheet.visible & ~present, "not seen")):
        at = distance[pairs].unique()
        if len(at) == 1:
            every = "Each" if bool((pairs == (distance == at)).all()) else "Some"
            said += f" {every} pair of query i and key i{_signed(int(at))} is {words}."
    return said


def _signed(n: int) -> str:
    return f" {'+' if n > 0 else '-'} {abs(n)}" if n else ""


def answer_on_paper(question: Question, steps: Steps = RIGHT) -> Answer:
    """The answer of a ring on paper, right or with a mistake: see paper_ring.py."""
    case, gradients = question.case, question.how != "without gradients"
    results = {name: x.to(case.dtype) for name, x in compute(case, steps, gradients=gradients).items()}
    of_ranks = [{name: case.cut(x, rank) for name, x in results.items()} for rank in range(case.world_size)]
    return judge(question, [RankResults(of_rank) for of_rank in of_ranks])


def main() -> int:
    def lost(part: BlockGradients) -> int | None:
        return None if part.round == part.world_size - 1 else part.block

    patient = Patient("on paper", compute, causal=(False,), layouts=("contiguous",))
    told = []
    for steps in (replace(RIGHT, home=lost), RIGHT):
        answers = [answer_on_paper(Question(Case(P, 6 * P)), steps) for P in (2, 3, 4)]
        told.append(infer(Examination(patient, answers), xray_on_paper(Case(3, 12), steps)))
    print("A ring whose dK and dV lack what the last round adds:")
    print(text(told[0]))
    print("A right ring: " + (text(told[1]) or "nothing to tell."))
    return 0 if told[0] and not told[1] else 1


if __name__ == "__main__":
    sys.exit(main())
