"""The six steps of the workshop: what each asks of the reader's file, and what the doctor is asked.

    step(3, "my_ring.py")     ->     "step 3 · gradients: right: HEALTHY: ..." or what the doctor found

Step 1 is one block in one process, so it is compared here. Steps 2 to 6 are examined by the doctor on 3 and 4
processes. The doctor judges numbers; what travels is judged here, from what three ranks are seen to send.
"""

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from notebooks.source.checks import answers
from notebooks.source.checks.answers import TimeUp, difference, time_limit
from ring_doctor import examine
from ring_doctor.asking.answers import REFUSED, RIGHT
from ring_doctor.asking.calls import ask_on_rank
from ring_doctor.asking.job import START, CannotExamine
from ring_doctor.asking.names import named
from ring_doctor.asking.patient import Patient
from ring_doctor.asking.questions import VALUES, Question, questions
from ring_doctor.report import head
from ringlab.support.messages import Message, Watch
from ringlab.support.processes import RankContext, Ranks

FOLDER = Path(__file__).parent
TITLES = ("one block", "a ring of messages", "gradients", "a causal mask", "zigzag", "grouped queries and 16 bits")
CLAIMS: dict[int, dict[str, Any]] = {  # of step 2 and later: what the doctor asks
    2: {"causal": False, "layouts": "contiguous", "gradients": False, "grouped": False, "dtypes": "float64"},
    3: {"causal": False, "layouts": "contiguous", "grouped": False, "dtypes": "float64"},
    4: {"layouts": "contiguous", "grouped": False, "dtypes": "float64"},
    5: {"layouts": ("contiguous", "zigzag"), "grouped": False, "dtypes": "float64"},
    6: {"layouts": ("contiguous", "zigzag")},
}
TAKES = {4: ("causal",), 5: ("causal", "layout"), 6: ("causal", "layout")}  # arguments that `attention` must have


AGREED = 64  # bytes: a collective so small agrees on sizes, and carries no block
SOLUTION = FOLDER.parents[1] / "trainable_ring.py"
FIRST_TRIES = {  # step: what is right in SOLUTION, and what somebody wrote first. Steps 1 and 2: files of their own
    3: ("arrive = hop(dkv, group)", "pass"),
    4: ("if not causal or j == r:", "if True:"),
    5: ('if layout == "zigzag":', 'if layout == "zig-zag":'),
    6: (
        "Ring.apply(wide, k, v,",
        "Ring.apply(wide.flatten(1, 2).unsqueeze(2), *(x.repeat(1, H // G, 1, 1) for x in (k, v)),",
    ),
}


def solution(right: str = "", wrong: str = "") -> str:
    """The text of SOLUTION under the name that the steps call, with a mistake."""
    text = SOLUTION.read_text().replace(right, wrong) if right else SOLUTION.read_text()
    return text + "\n\nattention = ring_attention\n"


class Said(str):
    """What is said of a file. A notebook shows it as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def step(number: int, path: str | Path) -> Said:
    """What is said of the file at this step. A path that is not absolute begins in this folder."""
    if number not in range(1, len(TITLES) + 1):
        raise ValueError(f"there is no step {number!r}; expected a number from 1 to {len(TITLES)}")
    return Said(_said(number, FOLDER / path).replace(f"{FOLDER}/", ""))


def first_try(number: int) -> Said:
    """What is said of somebody's first try at this step: a program with the mistake that the notebook shows."""
    path = FOLDER / f"first_try_{number}.py"
    if path.exists():
        return step(number, path)
    right, wrong = FIRST_TRIES[number]
    with TemporaryDirectory() as folder:
        path = Path(folder) / path.name
        path.write_text(solution(right, wrong))
        return Said(step(number, path).replace(f"{folder}/", ""))


def _said(number: int, path: Path) -> str:
    title = f"step {number} · {TITLES[number - 1]}: "
    if not path.exists():
        return f"{title}not answered yet: {path.name} is not there. Write it, and run this cell again"
    _forget(path)
    try:
        attention = named(f"{path}:attention")
    except ValueError as error:
        return f"{title}not yet: {error}"
    parameters = inspect.signature(attention).parameters
    anything = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    missing = [] if anything else [name for name in TAKES.get(number, ()) if name not in parameters]
    if missing:
        return f"{title}not yet: attention has no argument {' and no '.join(missing)}"
    problem = _one_block(attention) if number == 1 else _examined(number, path)
    return f"{title}not yet: {problem}" if problem else f"{title}right"


def _forget(path: Path) -> None:
    """The file may have changed since it was imported."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "") == str(path.resolve()):
            del sys.modules[name]
    importlib.invalidate_caches()


def _one_block(attention: Callable[..., Any]) -> str:
    """Step 1: out and lse of one block, in this process."""
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=torch.float64)
    k, v = torch.cat((k, k.flip(2)), dim=2), torch.cat((v, -v), dim=2)  # 5 queries, 10 keys
    inputs = [x.clone() for x in (q, k, v)]
    try:
        with time_limit():
            given, of_large = attention(*inputs), attention(1000 * q, k, v)
    except TimeUp:
        return f"it was still running after {answers.SECONDS:g} s; expected some milliseconds"
    except (Exception, SystemExit) as error:
        return f"it ends in {type(error).__name__}: {error}"
    if any(not torch.equal(x, y) for x, y in zip(inputs, (q, k, v), strict=True)):
        return "it changes its inputs, as q *= ... does: the caller still needs them"
    if not isinstance(given, tuple | list) or len(given) != 2:
        return f"expected a pair (out, lse), got {type(given).__name__}"
    scores = q @ k.mT / 2
    lse, out = torch.logsumexp(scores, -1), torch.softmax(scores, -1) @ v
    if problem := difference(given[0], out):
        plain = torch.softmax(2 * scores, -1) @ v
        unscaled = difference(given[0], plain) is None
        return f"out: {'the scores are not divided by the root of D' if unscaled else problem}"
    known: dict[str, Tensor] = {
        "this is l, the sum of e^score": lse.exp(),
        "this is the largest score": scores.amax(-1),
        "this is in base 2: the natural logarithm is asked for": lse / torch.log(torch.tensor(2.0)),
        "l is counted from the largest score m: lse = m + log l": lse - scores.amax(-1),
        "one dimension too many: expected (B, H, Sq)": lse[..., None],
    }
    if problem := difference(given[1], lse):
        return "lse: " + next((words for words, x in known.items() if difference(given[1], x) is None), problem)
    large = {"out": torch.softmax(1000 * scores, -1) @ v, "lse": torch.logsumexp(1000 * scores, -1)}
    for (name, right), x in zip(large.items(), of_large, strict=True):
        if difference(x, right):
            return f"{name}: scores of some thousands give another result: subtract the largest of the row before exp"
    return ""


def _examined(number: int, path: Path) -> str:
    """Steps 2 to 6: what the doctor found, and what travelled."""
    try:
        report = examine(f"{path}:attention", quick=True, unequal=False, worlds=(3, 4), seconds=30, **CLAIMS[number])
    except (CannotExamine, ValueError) as error:
        return str(error)
    refused = [it for it in report.examination.answers if it.state == REFUSED and it.question.feature != VALUES]
    if report.level == RIGHT and refused:
        return f"it refuses {refused[0].question.words()}: {refused[0].says}"
    if report.level == RIGHT:
        return _no_ring(number, report.examination.patient)
    _, xray, what = str(report).rpartition("\nX-ray")
    return f"the doctor says\n\n{head(report)}" + (f"\n{xray}{what}" if xray else "")


def _sent(context: RankContext, patient: Patient, question: Question) -> list[Message]:
    """What this rank sends and receives in the forward and the backward pass."""
    with TemporaryDirectory() as folder, Watch() as watch:
        ask_on_rank(context, patient, question, Path(folder), START)
    return watch.messages


def _words(of_ranks: list[list[Message]]) -> str:
    """What the ranks of a job send, in a sentence: "each rank r sends 4 messages of 384 bytes to rank r + 1"."""

    def told(rank: int) -> str:
        said = []
        for message, count in Counter(of_ranks[rank]).items():
            size = f"of {message.bytes:,} bytes"
            if message.peer is None:
                said.append(f"{count} x {message.kind} {size}")
            else:
                number = "1 message" if count == 1 else f"{count} messages"
                said.append(f"{number} {size} to rank r + {(message.peer - rank) % len(of_ranks)}")
        return "; ".join(said) or "nothing"

    sent = [told(rank) for rank in range(len(of_ranks))]
    if len(set(sent)) == 1:
        return f"each rank r sends {sent[0]}"
    return "; ".join(f"rank {rank} sends {what}" for rank, what in enumerate(sent))


def _to_neighbours(of_ranks: list[list[Message]]) -> bool:
    """Whether each message goes to the next rank or to the previous one, and there is no collective."""
    P = len(of_ranks)
    peers = [(rank, message.peer) for rank, messages in enumerate(of_ranks) for message in messages]
    return all(peer is not None and (peer - rank) % P in (1, P - 1) for rank, peer in peers)


def _no_ring(number: int, patient: Patient) -> str:
    """What is wrong with the messages of a ring whose numbers are right; "": nothing."""
    *_, question = takewhile(lambda it: it.what() == "C = 6", questions(patient, 3, torch.float64, 0))
    case, ranks = question.case, Ranks(3, START)
    try:
        of_ranks = ranks(3, _sent, patient, question)
    finally:
        ranks.stop()
    sent = [
        [it for it in messages if it.kind != "recv" and (it.peer is not None or it.bytes > AGREED)]
        for messages in of_ranks
    ]
    if not all(sent) or not _to_neighbours(sent):
        return (
            "the numbers are right, but this is no ring of sends to a neighbour: with "
            f"{case.world_size} ranks, {_words(sent)}"
        )
    hops = case.world_size - 1  # of K and V
    if number > 2:
        hops += 2 * case.world_size - 1  # and in the backward pass: of K and V again, and of dK and dV, which go home
    block = 2 * case.batch * case.kv_heads * case.seq_len // case.world_size * case.head_dim * case.dtype.itemsize
    total = max(sum(message.bytes for message in messages) for messages in sent)
    if total > hops * block:
        return (
            f"the numbers are right, but a rank sends too much: {total:,} bytes, and {hops} hops of a block take "
            f"{hops * block:,}. After the last round nobody needs K and V"
        )
    return ""
