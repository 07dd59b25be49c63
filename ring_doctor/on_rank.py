"""What each rank does with a question: it cuts its chunks, calls the patient, and takes the gradients.

    q, k, v, dO of rank r    ->    out, lse, dq, dk, dv of rank r, and what the patient did that no ring may do

Shapes: chunks (B, H, C, D) and (B, G, C, D), lse (B, H, C).

Before: questions.py. After: answers.py, the comparison.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ring_doctor.calls import arguments_of, call, ours, theirs
from ring_doctor.patient import Patient
from ring_doctor.questions import Question
from ring_doctor.stacks import written
from ringlab.support.processes import RankContext

FROZEN = {"frozen keys": "k", "frozen keys and values": "kv"}  # by the way to ask: what needs no gradient


@dataclass
class RankResults:
    """What one rank returned, and what it did."""

    results: dict[str, Tensor]  # the chunks of out, lse, dq, dk, dv
    faults: list[str] = field(default_factory=list)  # what no ring may do, in sentences
    again: dict[str, Tensor] = field(default_factory=dict)  # the chunks of a second call with the same inputs
    draws: bool = False  # it takes numbers from torch's random generator
    lse_grad: bool = False  # its lse can be differentiated


def prepare(context: RankContext, patient: Patient) -> None:
    """Import the patient, which may take long, and set it up."""
    arguments_of(patient.name, patient.function)
    if patient.setup is not None:
        patient.setup(context)


def ask_on_rank(
    context: RankContext, patient: Patient, question: Question, folder: Path, seconds: float
) -> RankResults | None:
    """The results of this rank; None on a rank that is not in the group."""
    group, rank, case = None, context.rank, question.case
    if question.members is not None:
        group = dist.new_group(question.members)  # every rank of the job must take part
        if rank not in question.members:
            return None
        rank = question.members.index(rank)
    with written(folder / str(context.rank), seconds):  # so that a hang can be located
        if question.how == "after another length":  # what a patient keeps from these calls does not fit the next one
            for seq_len in (case.seq_len // 2, case.seq_len * 3 // 2):
                other = replace(question, case=replace(case, seq_len=seq_len))
                _results(patient, other, _chunks(context, patient, other, rank), group)
        chunks = _chunks(context, patient, question, rank)
        before, random = [x.clone() for x in chunks], _generator(context)
        first = _results(patient, question, chunks, group)
        first.draws = not torch.equal(_generator(context), random)
        for name, x, y in zip(("q", "k", "v", "dO"), chunks, before, strict=True):
            if not torch.equal(x, y):
                first.faults.append(f"it changed its input {name}")
        if question.how == "twice" and not first.faults:
            first.again = _results(patient, question, chunks, group).results
    return first


def _generator(context: RankContext) -> Tensor:
    """The state of the generator whose numbers dropout takes."""
    return torch.cuda.get_rng_state() if context.device.type == "cuda" else torch.get_rng_state()


def alike(x: Tensor, y: Tensor) -> bool:
    """Whether all numbers are the same; NaN counts as 0."""
    return torch.equal(x.nan_to_num(), y.nan_to_num())


def _chunks(context: RankContext, patient: Patient, question: Question, rank: int) -> list[Tensor]:
    """This rank's chunks of q, k, v and dO, as the question hands them over."""
    case = question.case
    handed = [theirs(patient, case.cut(x, rank).to(context.device)).contiguous() for x in case.whole()]
    if question.how == "views":  # as a model has them: transposed, and dO of a sum, expanded
        handed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in handed]
    chunks = [ours(patient, x) for x in handed]
    if question.how == "views":
        chunks[3] = chunks[3][:, :, :1, :1].expand_as(chunks[3])
    return [x.float() for x in chunks] if question.how == "autocast" else chunks


def _results(
    patient: Patient, question: Question, chunks: list[Tensor], group: dist.ProcessGroup | None
) -> RankResults:
    """The results of one forward pass and one backward pass; where two are asked for, those of the telling one."""
    frozen = FROZEN.get(question.how, "") if patient.gradients and question.how != "without gradients" else "qkv"
    leaves = {name: x.detach().requires_grad_(name not in frozen) for name, x in zip("qkv", chunks, strict=False)}

    def forward(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        needed = any(x.requires_grad for x in inputs.values())
        autocast = torch.autocast(inputs["q"].device.type, torch.bfloat16, enabled=question.how == "autocast")
        with torch.set_grad_enabled(needed), autocast:
            return call(patient, question.case, inputs["q"], inputs["k"], inputs["v"], group)

    out, lse = forward(leaves)
    if question.how == "interleaved":  # the passes of a second layer, between those of the first
        others = {name: x.detach().flip(-1).requires_grad_() for name, x in leaves.items()}
        _gradients(forward(others)[0], others, chunks[3])
    found = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    of_lse = lse if question.how == "gradient of lse" else None
    first = _gradients(out, leaves, chunks[3], of_lse, again=question.how == "two backward passes")
    if question.how == "two backward passes":
        second = _gradients(out, leaves, chunks[3])
        first = {name: x if alike(x, second[name]) else second[name] for name, x in first.items()}
    return RankResults(found | first, lse_grad=lse is not None and lse.requires_grad)


def _gradients(
    out: Tensor,
    leaves: dict[str, Tensor],
    d_out: Tensor,
    lse: Tensor | None = None,
    *,
    again: bool = False,
) -> dict[str, Tensor]:
    """The gradients of the inputs that need one; zeros where autograd finds no way from `out`.

    With `lse` the loss uses it too: its gradient is the first column of `d_out`. `again`: a second pass follows.
    """
    wanted = {f"d{name}": x for name, x in leaves.items() if x.requires_grad}
    used = [(out, d_out)] if lse is None else [(out, d_out), (lse, d_out[..., 0].to(lse.dtype))]
    pairs = [(x, d_x) for x, d_x in used if x.requires_grad]
    if not pairs or not wanted:
        return {name: torch.zeros_like(x) for name, x in wanted.items()}
    results, given = zip(*pairs, strict=True)
    found = torch.autograd.grad(
        results, list(wanted.values()), given, retain_graph=again, allow_unused=True, materialize_grads=True
    )
    return dict(zip(wanted, found, strict=True))
