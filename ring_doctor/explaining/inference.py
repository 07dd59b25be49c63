"""What a mistake without a name must be, as far as its numbers prove it: what is seen, and where to look.

    infer(examination, xray)    ->    [Finding("In dk all numbers are P times the right numbers", "a sum ..."), ...]

A sentence is told only if it is true of every wrong answer that can show it. So a pattern of one answer by chance, or
of P = 2 alone, is not told as general. If no pattern holds, what is left is which results are wrong.

Shapes: those of facts.py.

Before: facts.py and grids.py. After: report.py.
Source: Dao et al. 2022, algorithm 4, for what follows from what. The PyTorch manual, torch.distributed: a blocking send
may wait for its receiver.
"""

import linecache
import re
from dataclasses import replace

import torch

from ring_doctor.asking.answers import FAILED, OK, Answer, Examination, imprecise, never_claimed
from ring_doctor.asking.job import ranks_in_words
from ring_doctor.asking.latent_case import LatentCase
from ring_doctor.asking.questions import BESIDE, Question
from ring_doctor.explaining.conditions import separated, where_left
from ring_doctor.explaining.facts import CONTENTS, OF_EACH_TOKEN, Fact, Finding, WrongAnswer, listed, of_gradients
from ring_doctor.explaining.grids import XRay

RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks")
IN_A_PART = Finding(
    "It is wrong only where its group is a part of the job",
    "get_rank(), get_world_size() and every message, at group=, group_src= and group_dst=, and at dist.get_global_rank",
    "a rank of the group is used as a rank of the job, or a group is left out",
)
OF_TAPS = "the tokens that a chunk gets from those before it, and what a document's start clears"
OF_LATENTS = "which latents, rotated keys and positions a rank uses, and the gradients that travel or stay"
OF_STATES = "the state with which a rank begins, the decays between two tokens, and what a document's start clears"
LSE_IS_RIGHT = Finding(
    "out is wrong and lse is right, so each query has the right scores",
    "the order of V beside the order of K, at the sum of p V, and at what becomes of out afterwards",
)
GRADIENTS_ARE_RIGHT = Finding("out is wrong and all gradients are right", "what becomes of out after it was computed")
OF_LARGE_SCORES = Finding(
    "Scores of some hundreds show it: in 16 bits a score or an lse of 800 is off by up to 2, and a weight by e^2 times",
    "the dtype of the scores, of m and of lse",
)
OF_MANY_TOKENS = Finding(
    "In 16 bits only sequences of more than 256 tokens are wrong",
    "positions, numbers of tokens and masks: above 256 bfloat16 has even numbers only. Then look at sums over tokens",
)
DTYPES = {  # by result: whose dtype to look at when 16 bits lose too much of it
    "out": "of the running output, of l and of what is merged",
    "lse": "of m, l and lse",
    "dq": "of the sum of dQ, and of q where autograd sums the gradients of its copies",
    "dk": "of the sum of dK, and of its messages",
    "dv": "of the sum of dV, and of its messages",
}


def infer(examination: Examination, xray: XRay | str) -> list[Finding]:
    """The findings, the most telling first; [] if nothing is wrong. `xray` as take_xray returns it."""
    wrong = examination.wrong
    claimed = [answer for answer in examination.answers if not never_claimed(answer)]
    failed = [answer for answer in claimed if answer.state == FAILED]
    parts = [bool(answer.question.members) for answer in wrong + failed if not imprecise(answer)]
    in_a_part = [IN_A_PART] if parts and all(parts) else []
    hangs = list(dict.fromkeys(said for answer in failed if (said := waiting(answer))))
    if not wrong or all(map(imprecise, wrong)):
        return [*_of_rounding(wrong), *in_a_part, *hangs]
    told = [WrongAnswer(answer) for answer in _comparable(wrong)]
    held = _contents(told)
    if examination.patient.state:
        return [*held.values(), *_of_states(wrong, xray), *hangs]
    shown = [] if isinstance(xray, str) else xray.facts({name for names in held for name in names})
    out_is_wrong = any("out" in each.answer.wrong for each in told)  # then gradients may follow from it
    follows = [said for names, said in held.items() if out_is_wrong and names[0].startswith("d")]
    first = [said for said in held.values() if said not in follows]
    which = _which(told, examination)
    return [*in_a_part, *first, *shown, *which, *follows, *_of_one_rank(examination), *hangs]


def _of_states(wrong: list[Answer], xray: XRay | str) -> list[Finding]:
    """What a row reads of each earlier token; where that is right, which results are wrong."""
    if not isinstance(xray, str) and (shown := xray.facts()):
        return [replace(finding, look=OF_STATES) for finding in shown]
    bad = list(dict.fromkeys(name for answer in wrong for name in answer.wrong))
    good = [name for name in wrong[0].results if name not in bad]
    right = f", {listed(good)} right" if good else ""
    case = wrong[0].case
    look = OF_TAPS if getattr(case, "taps", 0) else OF_STATES
    if isinstance(case, LatentCase):
        look = OF_LATENTS
    return [Finding(f"{listed(bad)} wrong{right}", look)]


def _of_one_rank(examination: Examination) -> list[Finding]:
    """Where one rank alone is wrong already, with no message between ranks."""
    fine = [it.question for it in examination.answers if it.case.world_size == 1 and it.state == OK]
    if not (alone := [answer for answer in examination.wrong if answer.case.world_size == 1]):
        return []
    names = _in_order({name for answer in alone for name in answer.wrong})
    where = (fine and separated(fine, [it.question for it in alone], 1)) or f"as with {alone[0].question.words()}"
    said = f"One rank alone is wrong already ({names}), {where}"
    return [Finding(f"{said}. Begin there; messages between ranks may be wrong too")]


def _where(told: list[WrongAnswer], fine: list[Question]) -> str:
    """The features that these answers have and no fine one has, or one of these questions."""
    where = (fine and separated(fine, [it.answer.question for it in told])) or ""
    if not where or where.count(" or ") > 1:  # a list of ways says nothing
        where = f"as with {told[0].answer.question.words()}"
    return f"{where[0].upper()}{where[1:]}"


def _in_order(results: set[str]) -> str:
    return listed([name for name in RESULTS if name in results])


def _of_rounding(wrong: list[Answer]) -> list[Finding]:
    """What follows from answers that are right but for rounding to 16 bits."""
    usual = [answer for answer in wrong if answer.case.inputs != "large"]
    names = [name for name in RESULTS if any(name in answer.wrong for answer in usual)]
    said = [OF_LARGE_SCORES] if len(usual) < len(wrong) else []
    if usual and all(answer.case.seq_len > 256 for answer in usual):
        return [*said, OF_MANY_TOKENS]
    return said + [Finding(f"{name} is rounded to 16 bits too often", f"the dtype {DTYPES[name]}") for name in names]


def _comparable(wrong: list[Answer]) -> list[Answer]:
    """Wrong answers in 32 bits or more to random inputs; all wrong answers if there is none."""
    other_ways = ("views", "twice", "two backward passes", "autocast")
    plain = [it for it in wrong if it.question.how not in other_ways and not it.question.how.startswith(BESIDE)]
    plain = [answer for answer in plain if answer.case.inputs in ("normal", "large")]
    plain = [answer for answer in plain if torch.finfo(answer.case.dtype).bits > 16]
    return sorted(plain or wrong, key=lambda answer: answer.case.seq_len)  # a small one refutes in no time


def _contents(told: list[WrongAnswer]) -> dict[tuple[str, ...], Finding]:
    """{results: what they hold}: of each result the first pattern that holds."""
    groups: dict[tuple[int, tuple[Fact, ...]], list[str]] = {}
    for name in dict.fromkeys((*RESULTS, *told[0].answer.results)):
        patterns = CONTENTS[: OF_EACH_TOKEN if any(name[1:] in each.case.learned for each in told) else None]
        common = ((i, tuple(pattern.common(told, name))) for i, pattern in enumerate(patterns))
        if first := next(((i, facts) for i, facts in common if facts), None):
            groups.setdefault(first, []).append(name)
    return {tuple(of): CONTENTS[i].finding(of, facts) for (i, facts), of in groups.items()}


def _which(told: list[WrongAnswer], examination: Examination) -> list[Finding]:
    """What follows from which results are wrong, and where others are wrong too."""
    wrong = {name for each in told for name in each.answer.wrong}
    more = {it.question: [name for name in it.wrong if name not in wrong] for it in examination.faults if it.results}
    if any(more.values()):
        but, found = where_left(more, examination.answers), _which(told, replace(examination, answers=[]))
        return [replace(each, says=f"But for {but}: {each.says}", brief=each.brief or each.says) for each in found]
    right = {name for each in told for name in each.answer.results} - wrong
    gradients = [name for name in RESULTS[2:] if name in wrong]
    back = [it for it in told if "out" not in it.answer.wrong and {"dq", "dk", "dv"} & it.answer.wrong.keys()]
    if "out" in wrong and back:  # two mistakes, or one that is in the backward pass too
        first = [it for it in told if "out" in it.answer.wrong]
        fine = [it.question for it in examination.answers if it.state == OK]
        kinds = (first, [*fine, *(it.answer.question for it in back)]), (back, fine)
        pairs = [(_where(some, right), _which(some, replace(examination, answers=[]))) for some, right in kinds]
        return [replace(each, says=f"{where}: {each.says}") for where, found in pairs for each in found]
    if "out" not in wrong:
        alone = Finding("out is right and lse is wrong", "which lse is returned, and what else uses it")
        of_lse = [alone] if "lse" in wrong else []
        return [*of_lse, of_gradients(gradients)] if gradients else of_lse
    said = [LSE_IS_RIGHT] if "lse" in right else []
    said += [GRADIENTS_ARE_RIGHT] if "dq" in right and not gradients else []
    return said or [Finding(f"wrong {_in_order(wrong)}", "out first: all other results depend on the same scores")]


# A hang -------------------------------------------------------------------------------------------------------------

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "reduce", "gather", "scatter", "broadcast")
CALLS = "|".join((*COLLECTIVES, "barrier", "send", "recv"))
CALL = re.compile(rf"\b({CALLS})(?:_into_tensor|_tensor|_single|_object|_object_list)?\(")
ALL_WAIT = {  # in the same call, where that is no collective
    "send": Finding(
        "Every rank waits in a send: even ranks must send first and odd ranks receive first, or all use isend and irecv"
    ),
    "recv": Finding(
        "Every rank waits in a receive: what they wait for was not sent, or was sent to another rank",
        "the order of send and receive, and at the ranks on both sides",
    ),
}


def waiting(answer: Answer) -> Finding | None:
    """Who waits for whom in a hang; None where the answer does not prove it.

    The answer names the line of code in which each rank waits. The call in this line says whether the rank sends,
    receives or waits in a collective.
    """
    silent, members = answer.silent, answer.question.members or range(answer.case.world_size)
    lines = [(ranks, linecache.getline(path, line)) for (path, line, _), ranks in answer.waits.items()]
    calls = {rank: set(CALL.findall(line)) for ranks, line in lines for rank in ranks}
    if not silent or set(calls) < set(silent) or any(len(of_rank) != 1 for of_rank in calls.values()):
        return None  # a line that shows no call, or two
    kinds = set.union(*calls.values())
    collectives = kinds - set(ALL_WAIT)
    inside = [rank for rank in members if collectives & calls.get(rank, set())]
    outside = [rank for rank in members if rank not in inside]
    if len(collectives) == 1 and outside:
        waits, missing = ranks_in_words(inside, "waits", "wait"), ranks_in_words(outside, "is", "are")
        said = f"{waits.capitalize()} in {min(collectives)}, and {missing} not in it"
        return Finding(f"{said}: every rank of the group must call it, equally often")
    if len(kinds) > 1 or collectives or len(members) == 1:
        return None
    if len(silent) == len(members):
        return ALL_WAIT[min(kinds)]
    back = ranks_in_words([rank for rank in members if rank not in silent]).capitalize()
    what = "for a message that no rank sends" if kinds == {"recv"} else "for a rank to receive its message"
    said = f"{back} returned, and {ranks_in_words(silent, 'waits', 'wait')} {what}"
    return Finding(said, "the number of sends and receives, and at a rank that leaves the loop early")
