"""Ask a ring many questions, on real processes, each with a time limit, and compare every answer with float64.

    out, lse, dq, dk, dv of all ranks, joined:   right where each number is as near to the exact one as rounding allows

Each number of ranks gets processes of its own, because libraries note the rank when they are
imported. A rank that hangs, crashes or raises is an answer too, and the next question follows.

Before: questions.py. After: diagnosis.py, which names the mistake.
Source: the bound is that of ../support/rounding.py.
"""

import faulthandler
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.doctor.case import Case
from ringlab.doctor.messages import Watch, words
from ringlab.doctor.patient import Patient, dtype_of
from ringlab.doctor.questions import Question, questions
from ringlab.support.pool import LostRank, Raised, Ranks
from ringlab.support.processes import RankContext
from ringlab.support.rounding import Right, exact_attention

OK, WRONG, REFUSED, FAILED = "ok", "wrong", "refused", "failed"
SECONDS = 20.0  # for one question; a right ring needs some milliseconds
START = 120.0  # seconds to import a library and to set it up
GIVE_UP = 3  # questions of one world that hang or crash: then the others of this world are left out
REFUSALS = ("ValueError", "NotImplementedError", "AssertionError")  # raised by all ranks: what it does not take


@dataclass
class Outcome:
    """What came of a question."""

    question: Question
    state: str  # OK, WRONG, REFUSED or FAILED
    says: str = ""  # the reason, in a sentence
    raised: bool = False  # all ranks raised an exception
    wrong: dict[str, float] = field(default_factory=dict)  # by wrong result, how many times too large its error is
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)  # (largest error, what rounding allows there)
    relative: dict[str, float] = field(default_factory=dict)  # the error of each result in norm, over the exact norm
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the ranks whose part of a result is wrong
    results: dict[str, Tensor] = field(default_factory=dict)  # the whole out, lse, dq, dk, dv
    messages: str = ""  # what the ranks sent, where it was watched
    in_float32: bool = False  # float64 was asked, and the answer is only as exact as float32

    @property
    def case(self) -> Case:
        return self.question.case


# On each rank ------------------------------------------------------------------------------------------------------


def answer(context: RankContext, patient: Patient, question: Question, folder: Path, seconds: float) -> dict[str, Any]:
    """What this rank's part of the ring returns: chunks of out, lse, dq, dk, dv, and what it did that it must not."""
    group = None
    rank = context.rank
    if question.members is not None:
        group = dist.new_group(question.members)  # every rank of the job must form it
        if rank not in question.members:
            return {}
        rank = question.members.index(rank)
    with (folder / str(context.rank)).open("w") as stack:
        faulthandler.dump_traceback_later(0.8 * seconds, file=stack)  # so that a hang can be located
        try:
            return _answer(context, patient, question, rank, group)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _answer(
    context: RankContext, patient: Patient, question: Question, rank: int, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    case = question.case
    chunks = [case.cut(x, rank).to(context.device).contiguous() for x in case.whole()]
    if question.how == "views":  # as a model has them: transposed, and dO of a sum, expanded
        chunks = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in chunks]
        chunks[3] = chunks[3][:, :, :1, :1].expand_as(chunks[3])
    *inputs, d_out = chunks
    before = [x.clone() for x in chunks]
    with Watch() if question.how == "watched" else nullcontext() as watch:
        first = _once(patient, question, inputs, d_out, group)
    first["messages"] = watch.messages if watch else None
    first["faults"] = [
        f"it changed its input {name}"
        for name, x, y in zip(("q", "k", "v", "dO"), chunks, before, strict=True)
        if not torch.equal(x, y)
    ]
    if question.how == "twice" and not first["faults"] and context.device.type == "cpu":  # GPUs may add in any order
        second = _once(patient, question, inputs, d_out, group)
        for name in ("out", "dq", "dk", "dv"):
            if name in first and not torch.equal(first[name].nan_to_num(), second[name].nan_to_num()):
                first["faults"] += [f"called again with the same input, it gave another {name}"]
    return first


def _once(
    patient: Patient, question: Question, inputs: list[Tensor], d_out: Tensor, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """One call, and one backward pass; with `twice` a second backward pass over the same graph."""
    gradients = patient.gradients and question.how != "without gradients"
    leaves = [x.detach().requires_grad_(gradients) for x in inputs]
    with torch.set_grad_enabled(gradients):
        out, lse = patient.call(question.case, *leaves, group=group)
    results: dict[str, Any] = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    if not gradients:
        return results
    found = _gradients(out, leaves, d_out, again=question.how == "twice")
    results |= dict(zip(("dq", "dk", "dv"), found, strict=True))
    if question.how == "twice":
        for name, x in zip(("dq", "dk", "dv"), _gradients(out, leaves, d_out, again=False), strict=True):
            if not torch.equal(x.nan_to_num(), results[name].nan_to_num()):
                results[name] = x  # of the second backward pass over the same graph: it is compared too
    return results


def _gradients(out: Tensor, leaves: list[Tensor], d_out: Tensor, *, again: bool) -> list[Tensor]:
    """dq, dk and dv; zeros where autograd finds no way from `out`."""
    if not out.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(out, leaves, d_out, retain_graph=again, allow_unused=True)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, found, strict=True)]


def prepare(context: RankContext, patient: Patient) -> None:
    """The patient was imported when this call was unpickled. Its own set-up follows."""
    if patient.setup is not None:
        patient.setup(context)


# The comparison ----------------------------------------------------------------------------------------------------


def judge(question: Question, of_ranks: list[dict[str, Any]]) -> Outcome:
    """Compare what all ranks returned with the right answer."""
    case = question.case
    faults = list(dict.fromkeys(fault for parts in of_ranks for fault in parts["faults"]))
    names = [name for name in ("out", "lse", "dq", "dk", "dv") if name in of_ranks[0]]
    outcome = Outcome(question, OK)
    for name in names:
        outcome.results[name] = case.join([parts[name].cpu() for parts in of_ranks])
    if question.how == "watched":
        outcome.messages = words([parts["messages"] for parts in of_ranks])
    right = right_answers(question)
    for name in names:
        x, of = outcome.results[name], right[name]
        if x.dtype != of.dtype:
            if name != "lse":
                faults += [f"its {name} is {x.dtype}, its input {of.dtype}"]
            x = x.to(of.dtype)
        error = of.error(x).nan_to_num(nan=math.inf)
        share = error / of.allowed
        worst = int(share.argmax())
        outcome.errors[name] = float(error.flatten()[worst]), float(of.allowed.flatten()[worst])
        finite = torch.where(error.isfinite(), error, 0.0)
        exact = torch.where(of.exact.isfinite(), of.exact, 0.0)
        outcome.relative[name] = math.inf if error.isinf().any() else float(finite.norm() / exact.norm().clamp(1e-300))
        if not of.accepts(x):
            outcome.wrong[name] = float(share.max())
            bad = (share > 1).movedim(2, 0).flatten(1).any(dim=1)
            outcome.ranks[name] = tuple(r for r in range(case.world_size) if bad[case.place(r)].any())
    if outcome.wrong:
        outcome.state = WRONG
        if case.dtype == torch.float64 and case.inputs == "normal" and _as_float32(question, outcome):
            outcome.state, outcome.in_float32, outcome.wrong = OK, True, {}
    if faults:
        outcome.state, outcome.says = FAILED, "; ".join(faults)
    return outcome


def right_answers(question: Question) -> dict[str, Right]:
    """The right answers; those of d_out = dO[0, 0] everywhere for `views`."""
    if question.how != "views":
        return question.case.right()
    return _right_of_views(question.case)


def _right_of_views(case: Case) -> dict[str, Right]:
    q, k, v, d_out = case.whole()
    firsts = [
        case.cut(d_out, r)[:, :, :1, :1].expand(-1, -1, len(case.place(r)), case.head_dim)
        for r in range(case.world_size)
    ]
    options = {"visible": case.visible(), "scale": case.scale, "fused_blocks": case.world_size}
    return exact_attention(q, k, v, case.join(firsts), **options)


def _as_float32(question: Question, outcome: Outcome) -> bool:
    """Whether the errors are those of sums in float32."""
    of_float32 = right_answers(replace(question, case=replace(question.case, dtype=torch.float32)))
    return all(outcome.errors[name][0] <= of_float32[name].allowed.max() for name in outcome.wrong)


# The examination ---------------------------------------------------------------------------------------------------


@dataclass
class Examination:
    """A patient and what came of the questions."""

    patient: Patient
    outcomes: list[Outcome] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return all(outcome.state in (OK, REFUSED) for outcome in self.outcomes)


class CannotExamine(Exception):
    """There is nothing to examine: the patient refuses or fails where every ring must answer."""


class Room:
    """Processes for one number of ranks, with the patient set up on each."""

    def __init__(self, patient: Patient, size: int, seconds: float, device: str) -> None:
        self.patient, self.size, self.seconds = patient, size, seconds
        self.ranks = Ranks(size, START, device)
        self.ready, self.lost = False, 0

    def ask(self, question: Question) -> Outcome:
        """The outcome of a question, whatever the ranks do."""
        with TemporaryDirectory() as name:
            try:
                if not self.ready:
                    self.ranks.seconds = START
                    self.ranks(self.size, prepare, self.patient)
                    self.ready = True
                self.ranks.seconds = self.seconds
                answers = self.ranks.outcomes(self.size, answer, self.patient, question, Path(name), self.seconds)
            except RuntimeError as error:
                raise CannotExamine(f"its set-up fails: {str(error).splitlines()[-1]}") from error
            except LostRank as lost:
                self.ready, self.lost = False, self.lost + 1
                return Outcome(question, FAILED, _why_lost(str(lost), Path(name)))
        members = question.members or tuple(range(self.size))
        answers = [answers[rank] for rank in members]
        raised = [it for it in answers if isinstance(it, Raised)]
        if not raised:
            return judge(question, answers)
        if any(it.kind != "ValueError" for it in raised):
            self.ready = False  # the ranks form another process group: set up again
        said = f"{raised[0].kind}: {raised[0].message.strip().splitlines()[0] if raised[0].message.strip() else ''}"
        if len(raised) < len(members):
            return Outcome(question, FAILED, f"{len(raised)} of {len(members)} ranks raised {said}")
        refused = question.may_refuse or raised[0].kind in REFUSALS
        return Outcome(question, REFUSED if refused else FAILED, said, raised=True)

    def close(self) -> None:
        self.ranks.stop()


def _why_lost(reason: str, folder: Path) -> str:
    """Which rank died or waits, and in which line of code, as far as the ranks could write it."""
    first = reason.splitlines()[0]
    if "raised:" in reason:
        return f"{first}; another rank raised {reason.strip().splitlines()[-1]}"
    waiting: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip().startswith("File")]
        theirs = [line for line in lines if not any(folder in line for folder in ("/torch/", "/doctor/", "/python3"))]
        theirs += [line for line in lines if "site-packages" in line and "/torch/" not in line]
        if theirs:
            waiting.setdefault(theirs[0].replace("File ", ""), []).append(path.name)
    return first + "".join(f"; {', '.join(ranks)} in {line}" for line, ranks in waiting.items())


def examine(
    patient: Patient,
    *,
    seconds: float = SECONDS,
    device: str = "cpu",
    seed: int = 0,
    progress: Callable[[str], None] = lambda words: None,
) -> Examination:
    """Ask all the questions. `progress` is called with each question in words before it is asked.

    Raises CannotExamine when the patient answers no question at all, or none on three or more ranks.
    """
    patient, remarks = _without_what_it_refuses(patient, seconds, device, seed)
    found = Examination(patient, remarks=remarks)
    dtype = dtype_of(patient.dtypes[0])
    for world_size in patient.worlds:
        room = Room(patient, world_size, seconds, device)
        larger = Room(patient, world_size + 1, seconds, device)
        try:
            for question in _asked(patient, world_size, found, dtype, seed):
                where = larger if question.members else room
                if where.lost >= GIVE_UP:
                    remark = f"after {GIVE_UP} hangs or crashes of {where.size} ranks, they were asked no more"
                    found.remarks += [remark] if remark not in found.remarks else []
                    continue
                progress(question.words())
                found.outcomes.append(where.ask(question))
        finally:
            room.close()
            larger.close()
    if all(outcome.raised for outcome in found.outcomes):
        raise CannotExamine(f"{patient.name} answers no question: {found.outcomes[-1].says}")
    plain = [it for it in found.outcomes if it.question.how == "plain" and not it.question.may_refuse]
    of_many = [outcome for outcome in plain if outcome.case.world_size > 2]
    if all(outcome.state == REFUSED for outcome in of_many):
        raise CannotExamine(
            f"{patient.name} answers no plain question on three or more ranks, and with two many mistakes do not show: "
            f"{of_many[-1].says if of_many else 'none was asked'}"
        )
    return found


def _without_what_it_refuses(patient: Patient, seconds: float, device: str, seed: int) -> tuple[Patient, list[str]]:
    """The patient with the heads that it needs; for the forward pass only where it refuses inputs that need gradients.

    And what must be remarked.
    """
    remarks = []
    if max(patient.worlds) < 4:
        remarks.append("with fewer than 4 ranks some questions are not asked: sums in 16 bits, parts of a larger job")
    room = Room(patient, max(patient.worlds), seconds, device)
    try:
        patient, said = _with_enough_heads(patient, room, seed)
        remarks += said
        for name in patient.dtypes[:2] if patient.gradients else ():
            question = next(questions(patient, room.size, dtype_of(name), seed))
            with_gradients, without = (room.ask(it) for it in (question, replace(question, how="without gradients")))
            if with_gradients.raised and not without.raised:
                remarks.append(
                    f"it refuses inputs that need gradients ({with_gradients.says}): it was asked for the forward pass"
                )
                return replace(patient, gradients=False), remarks
            if not with_gradients.raised:
                break
    finally:
        room.close()
    return patient, remarks


def _with_enough_heads(patient: Patient, room: Room, seed: int) -> tuple[Patient, list[str]]:
    """The patient, and what must be remarked. An all-to-all refuses fewer heads than ranks."""
    more = replace(patient, heads=room.size + room.size % 2)
    for name in patient.dtypes[:2] if more.heads > patient.heads else ():
        few, many = (next(questions(it, room.size, dtype_of(name), seed)) for it in (patient, more))
        refused = room.ask(replace(few, how="without gradients"))
        if not refused.raised:
            break
        if not room.ask(replace(many, how="without gradients")).raised:
            return more, [f"it refuses {patient.heads} heads ({refused.says}): it was asked with {more.heads}"]
    return patient, []


def _asked(patient: Patient, world_size: int, found: Examination, dtype: torch.dtype, seed: int) -> Iterator[Question]:
    """The questions, in the widest dtype that the patient takes: it is found out by the answers."""
    for name in patient.dtypes:
        dtype = dtype_of(name)
        if _unfit(found, dtype):
            continue
        for question in questions(patient, world_size, dtype, seed):
            yield question
            if _unfit(found, dtype):
                break
        else:
            return


def _unfit(found: Examination, dtype: torch.dtype) -> bool:
    """Whether float64 is refused, or computed in float32: then the questions are asked in float32."""
    if dtype != torch.float64:
        return False
    of_dtype = [outcome for outcome in found.outcomes if outcome.case.dtype == dtype]
    for outcome in list(of_dtype):
        if outcome.in_float32:
            remark = "it takes float64 and computes in float32; it is examined in float32"
        elif outcome.raised and outcome is of_dtype[0]:
            outcome.state = REFUSED
            remark = f"it refuses float64 ({outcome.says}); it is examined in float32"
        else:
            continue
        found.remarks += [remark] if remark not in found.remarks else []
        return True
    return False
