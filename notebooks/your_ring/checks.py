"""The six steps of the workshop: what each asks of the reader's file, and what the doctor is asked.

    step(3, "my_ring.py")     ->     "step 3 · gradients: right: HEALTHY: ..." or what the doctor found
    step(2, my_ring)          the same of a function of a notebook's cell

Step 1 is one block in one process: an exercise like the others. Steps 2 to 6 are examined by the doctor on 3 and 4
processes. The doctor judges numbers; what travels is judged here, from what four ranks are seen to send.
"""

import importlib
import inspect
import math
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from notebooks.source.checks.answers import OPEN, Exercise
from ring_doctor import examine
from ring_doctor.asking.answers import OK, RIGHT, RIGHT_AS_CLAIMED
from ring_doctor.asking.calls import ask_on_rank
from ring_doctor.asking.case import Case
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


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
    scores = scale * (q @ k.mT) * q.shape[-1] ** -0.5
    return {"out": torch.softmax(scores, -1) @ v, "lse": torch.logsumexp(scores, -1)}


def _lse(of: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """A wrong lse, made of the right one and the largest scores."""
    return lambda q, k, v: {"lse": of(_attention(q, k, v)["lse"], (q @ k.mT).amax(-1) * q.shape[-1] ** -0.5)}


def _block(size: float) -> tuple[Tensor, Tensor, Tensor]:
    """5 queries and 10 keys; the scores are about so large."""
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=torch.float64)
    return size * q, torch.cat((k, k.flip(2)), dim=2), torch.cat((v, -v), dim=2)


ONE_BLOCK = Exercise(  # step 1, in this process: q, k, v -> (out, lse) of one block
    right=lambda q, k, v: _attention(q, k, v),
    wrong={
        "the scores are not divided by the root of D": lambda q, k, v: _attention(q, k, v, q.shape[-1] ** 0.5),
        "this is l, the sum of e^score": _lse(lambda lse, m: lse.exp()),
        "this is the largest score": _lse(lambda lse, m: m),
        "this is in base 2: the natural logarithm is asked for": _lse(lambda lse, m: lse / math.log(2)),
        "l is counted from the largest score m: lse = m + log l": _lse(lambda lse, m: lse - m),
        "one dimension too many: expected (B, H, Sq)": _lse(lambda lse, m: lse[..., None]),
    },
    cases={
        "out is softmax(scores) v, and lse is log of the sum of e^score": [_block(1.0)],
        "scores of some thousands give another result: subtract the largest of the row before exp": [_block(1000.0)],
    },
)
AGREED = 64  # bytes: a collective so small agrees on sizes, and carries no block
SOLUTION = FOLDER.parents[1] / "trainable_ring.py"
MET = """
import math
import torch
import torch.distributed as dist
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import finish, merge, start, update

"""  # what a function of a cell may use
ALONE = """
def attention(q, k, v):
    out, lse = block_forward(q[:, :, None], k, v, False)
    return out[:, :, 0], lse[:, :, 0]
"""
FIRST_TRIES = {  # step: what is right in SOLUTION, and what somebody wrote first
    1: ("torch.logsumexp(s, dim=-1)", "torch.logsumexp(s, dim=-1) / 0.6931472"),
    2: ("weight = torch.sigmoid(lse_j - lse[..., rows])[..., None]", "weight = 1.0 if j == r else 0.5"),
    3: ("arrive = hop(dkv, group) if j != r else None", "pass"),
    4: ("if not causal or j == r:", "if True:"),
    5: ('if layout == "zigzag":', 'if layout == "zig-zag":'),
    6: (
        "Ring.apply(wide, k, v,",
        "Ring.apply(wide.flatten(1, 2).unsqueeze(2), *(x.repeat(1, wide.shape[2], 1, 1) for x in (k, v)),",
    ),
}


def solution(number: int, right: str = "", wrong: str = "") -> str:
    """The text of SOLUTION under the name that this step calls, with a mistake."""
    return SOLUTION.read_text().replace(right, wrong) + (ALONE if number == 1 else "\nattention = ring_attention\n")


class Said(str):
    """What is said of a file. A notebook shows it as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def step(number: int, ring: str | Path | Callable[..., Any], seconds: float = 5.0) -> Said:
    """What is said at this step of a file, or of a function that was defined in a cell, in one piece.

    A path that is not absolute begins in this folder. A question may take so many `seconds`.
    """
    if number not in range(1, len(TITLES) + 1):
        raise ValueError(f"there is no step {number!r}; expected a number from 1 to {len(TITLES)}")
    if callable(ring):
        source = inspect.getsource(ring)
        if source.rstrip().endswith("return ..."):
            return Said(_title(number) + OPEN)
        return _of_text(number, f"{MET}{source}\nattention = {ring.__name__}\n", ring.__name__, seconds)
    return Said(_said(number, FOLDER / ring, seconds).replace(f"{FOLDER}/", ""))


def first_try(number: int) -> Said:
    """What is said of somebody's first try at this step: a program with the mistake that the notebook shows."""
    return _of_text(number, solution(number, *FIRST_TRIES[number]), f"first_try_{number}", 30.0)


def _of_text(number: int, text: str, name: str, seconds: float) -> Said:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(text)
        return Said(_said(number, path, seconds).replace(f"{folder}/", ""))


def _title(number: int) -> str:
    return f"step {number} · {TITLES[number - 1]}: "


def _said(number: int, path: Path, seconds: float) -> str:
    title = _title(number)
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
    if number == 1:
        return title + ONE_BLOCK(attention)
    problem = _examined(number, path, seconds)
    return f"{title}not yet: {problem}" if problem else f"{title}right"


def _forget(path: Path) -> None:
    """The file may have changed since it was imported."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "") == str(path.resolve()):
            del sys.modules[name]
    importlib.invalidate_caches()


def _examined(number: int, path: Path, seconds: float) -> str:
    """Steps 2 to 6: what the doctor found, and what travelled."""
    try:
        asked = {"quick": True, "unequal": False, "worlds": (3, 4), "seconds": seconds}
        report = examine(f"{path}:attention", **asked, **CLAIMS[number])
    except (CannotExamine, ValueError) as error:
        return str(error)
    if report.level in (RIGHT, RIGHT_AS_CLAIMED):
        for it in report.examination.answers:  # one that stacks K and V takes no V with a head dim of its own
            if it.state != OK and it.question.feature != VALUES:
                return f"it does not take {it.question.words()}: {it.says}"
        return _no_ring(number, report.examination.patient)
    _, xray, what = str(report).rpartition("\nX-ray")
    return f"the doctor says\n\n{head(report)}" + (f"\n{xray}{what}" if xray else "")


def _sent(context: RankContext, patient: Patient, question: Question) -> list[Message]:
    """What this rank sends and receives in the forward and the backward pass."""
    with TemporaryDirectory() as folder, Watch() as watch:
        ask_on_rank(context, patient, question, Path(folder), START)
    return watch.messages


def _no_ring(number: int, patient: Patient) -> str:
    """What is wrong with the messages of a ring whose numbers are right; "": nothing."""
    *_, question = takewhile(lambda it: it.what() == "C = 6", questions(patient, 4, 0))
    case, ranks = question.case, Ranks(4, START)
    try:
        of_ranks = ranks(4, _sent, patient, question)
    finally:
        ranks.stop()
    sent = [carrying(messages) for messages in of_ranks]
    for rank, messages in enumerate(sent):
        if problem := elsewhere(messages, rank, case.world_size):
            return f"the numbers of rank {rank} are right. {problem}"
    return too_much(number, case, max(sum(message.bytes for message in messages) for messages in sent))


def carrying(messages: list[Message]) -> list[Message]:
    """What a rank sends of blocks."""
    return [it for it in messages if it.kind != "recv" and (it.peer is not None or it.bytes > AGREED)]


def too_much(number: int, case: Case, total: int) -> str:
    """What is wrong with a rank that sends so many bytes; "": nothing."""
    hops = case.world_size - 1  # of K and V
    if number > 2:
        hops += 2 * case.world_size - 1  # and in the backward pass: of K and V again, and of dK and dV, which go home
    block = 2 * case.batch * case.kv_heads * case.seq_len // case.world_size * case.head_dim * case.dtype.itemsize
    if total > hops * block:
        return (
            f"the numbers are right, but a rank sends too much: {total:,} bytes, and {hops} hops of a block take "
            f"{hops * block:,}. After the last round nobody needs K and V"
        )
    return ""


def elsewhere(messages: list[Message], rank: int, P: int) -> str:
    """What is wrong with the messages of a rank that go not to a neighbour; "": nothing."""
    for message in messages:
        if message.peer is None and not message.kind.startswith("recv"):
            return (
                f"But it called a collective, {message.kind} ({message.bytes:,} bytes): one that gathers blocks "
                "needs memory for all of them. In a ring a rank sends to the next rank and receives from the one before"
            )
        if message.peer not in ((rank + 1) % P, (rank - 1) % P, None):
            return (
                f"But it exchanged a message with rank {message.peer} ({message.bytes:,} bytes). In a ring a rank "
                f"sends to rank {(rank + 1) % P} and receives from rank {(rank - 1) % P}, and passes on what comes"
            )
    return ""
