"""What follows from a hang: who waits for whom, as far as the answer says it.

    inferred(answer)    ->    "every rank waits in a send, and no rank receives: ..."

An answer names the line of code in which each rank waits. The call in this line says whether the rank sends, receives
or waits in a collective. A line that says neither proves nothing, and then nothing is said.

Before: job.py, which words the answer. After: inference.py.
Source: the PyTorch manual, torch.distributed: a blocking send may wait for its receiver.
"""

import linecache
import re

from ring_doctor.answers import FAILED, Answer
from ring_doctor.job import ranks_in_words

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_to_all", "reduce_scatter"),
    *("reduce", "gather", "scatter", "broadcast", "barrier"),
)
CALL = re.compile(
    rf"\b({'|'.join((*COLLECTIVES, 'send', 'recv'))})(?:_into_tensor|_tensor|_single|_object|_object_list)?\("
)
WAITS = re.compile(r"(?:^|; )ranks? (\d+(?:, \d+)*) in ([^;]+), line (\d+)")
ALL_WAIT = {  # in the same call, where that is no collective
    "send": "Every rank waits in a send, and no rank receives: even ranks must send first and odd ranks receive first, "
    "or all use isend and irecv.",
    "recv": "Every rank waits in a receive: what they wait for was not sent, or was sent to another rank. Look at the "
    "order of send and receive, and at the ranks on both sides.",
}


def inferred(answer: Answer) -> str:
    """What a hang proves, in a sentence; "" if it proves nothing."""
    late = re.match(r"rank\(s\) \[([\d, ]+)\] did not answer in time", answer.says)
    return _of_hang([int(rank) for rank in late[1].split(",")], answer) if late and answer.state == FAILED else ""


def _of_hang(late: list[int], answer: Answer) -> str:
    P = answer.case.world_size
    calls = {
        int(rank): _call(linecache.getline(path, int(line)))
        for ranks, path, line in WAITS.findall(answer.says)
        for rank in ranks.split(", ")
    }
    if set(calls) < set(late):
        return ""
    kinds = set(calls.values())
    if len(kinds) == 1 and kinds < set(ALL_WAIT) and len(late) == P > 1:
        return ALL_WAIT[kinds.pop()]
    inside = {rank: call for rank, call in calls.items() if call in COLLECTIVES}
    others = [rank for rank in range(P) if rank not in inside]
    if len(set(inside.values())) == 1 and others and all(calls.get(rank, "answered") for rank in others):
        one, few = len(inside) == 1, len(others) == 1
        waits = f"{ranks_in_words(sorted(inside)).capitalize()} wait{'s' * one} in {min(inside.values())}"
        missing = f"{ranks_in_words(others)} {'is' if few else 'are'} not in it"
        return f"{waits}, and {missing}: every rank of the group must call it, equally often."
    if len(late) == 1 and P > 1 and kinds <= set(ALL_WAIT):
        what = "for a message that no rank sends" if kinds == {"recv"} else "for a rank to receive its message"
        return f"The other ranks have answered; rank {late[0]} waits {what}: look at the number of sends and receives."
    return ""


def _call(line: str) -> str:
    """ "send", "recv", a collective, or "" for a line of code that shows none of them."""
    found = set(CALL.findall(line))
    return found.pop() if len(found) == 1 else ""
