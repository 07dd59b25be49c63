"""What each rank does with a question: it cuts its chunks, calls the patient, and takes the gradients.

    q, k, v, dO of rank r    ->    out, lse, dq, dk, dv of rank r, and what the patient did that no ring may do

Shapes: chunks (B, H, C, D) and (B, G, C, D), lse (B, H, C).

Before: questions.py. After: answers.py, the comparison.
Source: none.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.doctor.arguments import arguments_of
from ringlab.doctor.messages import Message, Watch
from ringlab.doctor.patient import Patient
from ringlab.doctor.questions import Question
from ringlab.doctor.stacks import written
from ringlab.support.processes import RankContext


@dataclass
class RankResults:
    """What one rank returned, and what it did."""

    results: dict[str, Tensor]  # the chunks of out, lse, dq, dk, dv
    faults: list[str] = field(default_factory=list)  # what no ring may do, in sentences
    messages: list[Message] = field(default_factory=list)  # where the question is "watched"


def prepare(context: RankContext, patient: Patient) -> None:
    """Import the patient, which may take long, and set it up."""
    arguments_of(patient.name, patient.function)
    if patient.setup is not None:
        patient.setup(context)


def ask_on_rank(
    context: RankContext, patient: Patient, question: Question, folder: Path, seconds: float
) -> RankResults | None:
    """The results of this rank; None on a rank that is not in the group. A rank that hangs writes its stack."""
    group = None
    rank = context.rank
    if question.members is not None:
        group = dist.new_group(question.members)  # every rank of the job must take part
        if rank not in question.members:
            return None
        rank = question.members.index(rank)
    with written(folder / str(context.rank), seconds):  # so that a hang can be located
        return _ask(context, patient, question, rank, group)


def _ask(
    context: RankContext, patient: Patient, question: Question, rank: int, group: dist.ProcessGroup | None
) -> RankResults:
    case = question.case
    theirs = [patient.theirs(case.cut(x, rank).to(context.device)).contiguous() for x in case.whole()]
    if question.how == "views":  # as a model has them: transposed, and dO of a sum, expanded
        theirs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in theirs]
    chunks = [patient.ours(x) for x in theirs]
    if question.how == "views":
        chunks[3] = chunks[3][:, :, :1, :1].expand_as(chunks[3])
    before = [x.clone() for x in chunks]
    with Watch() if question.how == "watched" else nullcontext() as watch:
        first = RankResults(_call(patient, question, chunks, group))
    first.messages = watch.messages if watch else []
    for name, x, y in zip(("q", "k", "v", "dO"), chunks, before, strict=True):
        if not torch.equal(x, y):
            first.faults.append(f"it changed its input {name}")
    if question.how == "twice" and not first.faults and context.device.type == "cpu":  # GPUs may add in any order
        second = _call(patient, question, chunks, group)
        for name, x in first.results.items():
            if name != "lse" and not torch.equal(x.nan_to_num(), second[name].nan_to_num()):
                first.faults.append(f"called again with the same input, it gave another {name}")
    return first


def _call(
    patient: Patient, question: Question, chunks: list[Tensor], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """The results of one call and one backward pass; with "twice" a second backward pass over the same graph."""
    gradients = patient.gradients and question.how != "without gradients"
    q, k, v = leaves = [x.detach().requires_grad_(gradients) for x in chunks[:3]]
    with torch.set_grad_enabled(gradients):
        out, lse = patient.call(question.case, q, k, v, group=group)
    results = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    if not gradients:
        return results
    again = question.how == "twice"
    results |= _gradients(out, leaves, chunks[3], again=again)
    if again:
        for name, x in _gradients(out, leaves, chunks[3], again=False).items():
            if not torch.equal(x.nan_to_num(), results[name].nan_to_num()):
                results[name] = x  # of the second backward pass: then this gradient is compared
    return results


def _gradients(out: Tensor, leaves: list[Tensor], d_out: Tensor, *, again: bool) -> dict[str, Tensor]:
    """dq, dk and dv; zeros where autograd finds no way from `out`. `again`: another backward pass follows."""
    found: Sequence[Tensor] = [torch.zeros_like(x) for x in leaves]
    if out.requires_grad:
        found = torch.autograd.grad(out, leaves, d_out, retain_graph=again, allow_unused=True, materialize_grads=True)
    return dict(zip(("dq", "dk", "dv"), found, strict=True))
