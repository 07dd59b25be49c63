"""How a function is called on a rank, what it may return, and what a rank does with a question.

    attention(q, k, v, is_causal=False, softmax_scale=None, process_group=None)    takes causal, scale and group
    q, k, v, dO of rank r    ->    out, lse, dq, dk, dv of rank r, and what the function did that no ring may do

The options are those of patient.py.

Shapes: q (B, H, C, D), k and v (B, G, C, D) of this rank's tokens; out like q; lse (B, H, C), natural, or in another of
the shapes that `lse_of` knows. With tensors "bshd" they are (B, C, H, D) and (B, C, G, D), with "sbhd" (C, B, H, D).

Before: patient.py, the claims; questions.py. After: answers.py, the comparison.
"""

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_doctor.asking.case import UNROUNDED, Case
from ring_doctor.asking.names import layout_of
from ring_doctor.asking.patient import NAMES, OPTION, TENSORS, Patient, arguments_of
from ring_doctor.asking.questions import BESIDE, FROZEN, Question
from ringlab.support.processes import Frame, RankContext, own_frame, place


class WrongResult(ValueError):
    """A function returned what is no attention. That is a fault; a ValueError of its own refuses a question."""


def options(patient: Patient, case: Case, inputs: dict[str, Tensor], group: ProcessGroup | None) -> dict[str, Any]:
    """The arguments beside q, k and v for a case, by the names of the signature."""
    takes, layout = arguments_of(patient.name, patient.function), layout_of(case.layout)
    more = {name: theirs(patient, x) if name in case.names else x for name, x in inputs.items() if name not in "qkv"}
    ends = [0, *accumulate(case.documents or (case.seq_len,))]
    given: dict[str, Any] = {name: getattr(case, name) for name in ("causal", "scale", "documents", "window")}
    given |= {"group": group, "layout": case.layout if callable(layout) else layout, **more}
    forms = {  # of what is given, and of what must be given although the case has none
        "scale": case.head_dim**-0.5 if case.scale is None else case.scale,
        "group": group or dist.group.WORLD,
        "window_size": (-1, -1) if case.window is None else (case.window - 1, case.window_right),
        "decay": more["log_decay"].exp() if "log_decay" in more else None,
        **dict.fromkeys(NAMES["documents"][1:], torch.tensor(ends, dtype=torch.int32, device=inputs["q"].device)),
    }
    needed = [name for name, of in takes.items() if given.get(OPTION[name]) is not None or of.default is of.empty]
    return {name: forms.get(name, forms.get(OPTION[name], given.get(OPTION[name]))) for name in needed}


def theirs(patient: Patient, x: Tensor) -> Tensor:
    """A view of x (B, H, C, D) in the order of dimensions that the function takes."""
    return x.permute(TENSORS[patient.tensors][: x.dim()])


def ours(patient: Patient, x: Tensor) -> Tensor:
    """A view (B, H, C, D) of a tensor of the function."""
    return x.permute(torch.tensor(TENSORS[patient.tensors][: x.dim()]).argsort().tolist())


def call(
    patient: Patient, case: Case, inputs: dict[str, Tensor], group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor | None]:
    """This rank's out (B, H, C, D), and lse (B, H, C) if it is returned. Raises WrongResult for other results."""
    q, k, v = (theirs(patient, inputs[name]) for name in case.names[:3])
    returned = patient.function(q, k, v, **options(patient, case, inputs, group))
    out, lse = returned[:2] if isinstance(returned, tuple | list) and len(returned) > 1 else (returned, None)
    expected = (*q.shape[:-1], v.shape[-1])
    if not isinstance(out, Tensor) or out.shape != expected:
        got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        queries = f"the output of this rank's queries, shape {tuple(expected)}"
        raise WrongResult(f"{patient.name} returned {got}; expected {queries}, or (output, lse)")
    lse = None if patient.state or not isinstance(lse, Tensor) else lse_of(patient, lse, inputs["q"])
    return ours(patient, out), lse


def lse_of(patient: Patient, lse: Tensor, q: Tensor) -> Tensor | None:
    """A view (B, H, C) of the lse that the function returned with queries (B, H, C, D).

    It may also be (B, C, H), of one sequence (H, C) or (C, H), and have a last dimension of 1. Where H = C and the
    tensors are not (B, H, S, D), nobody can tell which it is: then None, and it is not compared. Raises WrongResult
    for other shapes.
    """
    B, H, C = q.shape[:3]
    x = lse.squeeze(-1) if lse.dim() == 4 else lse[None] if lse.dim() == 2 else lse
    if x.shape == (B, H, C):
        return None if H == C and C > 1 and patient.tensors != "bhsd" else x
    if x.shape == (B, C, H):
        return x.transpose(1, 2)
    raise WrongResult(f"{patient.name} returned an lse of shape {tuple(lse.shape)}; expected (B, H, C) = {(B, H, C)}")


# On a rank ------------------------------------------------------------------------------------------------------------

OFTEN = 0.25  # of the time for a question: a stack is written after each such part


@dataclass
class RankResults:
    """What one rank returned, and what it did."""

    results: dict[str, Tensor]  # the chunks of out, lse, dq, dk, dv
    faults: list[str] = field(default_factory=list)  # what no ring may do, in sentences
    again: dict[str, Tensor] = field(default_factory=dict)  # the chunks of a second call with the same inputs
    draws: bool = False  # it takes numbers from torch's random generator
    lse_grad: bool = False  # its lse can be differentiated
    unawaited: list[str] = field(default_factory=list)  # where messages begin for which nobody waits


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

        def ask_others() -> None:  # what a patient keeps from these calls does not fit the next one
            for other in (Question(case) for case in question.others):
                _results(patient, other, _chunks(context, patient, other, rank), group)

        ask_others()
        chunks = _chunks(context, patient, question, rank)
        before, random = [x.clone() for x in chunks], _generator(context)
        between = ask_others if question.how.startswith(BESIDE) else lambda: None
        watching: AbstractContextManager[dict[int, str]] = noted() if question.watched else nullcontext({})
        with watching as begun:
            first = _results(patient, question, chunks, group, between)
        first.unawaited = list(begun.values())
        first.draws = not torch.equal(_generator(context), random)
        for name, x, y in zip((*case.names, "dO"), chunks, before, strict=True):
            if not torch.equal(x, y):
                first.faults.append(f"it changed its input {name}")
        if question.how == "twice" and not first.faults:
            first.again = _results(patient, question, chunks, group).results
    return first


def _generator(context: RankContext) -> Tensor:
    """The state of the generator whose numbers dropout takes."""
    return torch.cuda.get_rng_state() if context.device.type == "cuda" else torch.get_rng_state()


def _chunks(context: RankContext, patient: Patient, question: Question, rank: int) -> list[Tensor]:
    """This rank's chunks of q, k, v and dO, as the question hands them over."""
    case = question.case
    handed = [theirs(patient, case.cut(x, rank).to(context.device)).contiguous() for x in case.whole()]
    if question.how == "views":  # as a model has them: transposed, and dO of a sum, expanded
        handed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in handed]
    chunks = [ours(patient, x) for x in handed]
    if question.how == "views":
        chunks[-1] = chunks[-1][:, :, :1, :1].expand_as(chunks[-1])
    return [x.float() for x in chunks] if question.how == "autocast" else chunks


def _results(
    patient: Patient,
    question: Question,
    chunks: list[Tensor],
    group: dist.ProcessGroup | None,
    between: Callable[[], None] = lambda: None,
) -> RankResults:
    """The results of one forward pass and one backward pass; where two are asked for, those of the telling one.

    `between` is called between the two passes.
    """
    names, d_out = question.case.names, chunks[-1]
    frozen: Collection[str] = FROZEN.get(question.how, ())
    forward_only = question.how == "without gradients" or question.case.inputs == UNROUNDED[0]
    frozen = (*names, *question.case.learned) if forward_only or not patient.gradients else frozen
    inputs = dict(zip(names, chunks, strict=False)) | question.case.learned
    leaves = {name: x.detach().to(d_out.device).requires_grad_(name not in frozen) for name, x in inputs.items()}

    def forward(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        needed = any(x.requires_grad for x in inputs.values())
        autocast = torch.autocast(inputs["q"].device.type, torch.bfloat16, enabled=question.how == "autocast")
        with torch.set_grad_enabled(needed), autocast:
            return call(patient, question.case, inputs, group)

    out, lse = forward(leaves)
    if question.how == "interleaved":  # the passes of a second layer, between those of the first
        others = {name: x.detach().flip(-1).requires_grad_() for name, x in leaves.items()}
        _gradients(forward(others)[0], others, d_out)
    between()
    found = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    of_lse = lse if question.how == "gradient of lse" else None
    gradients = _gradients(out, leaves, d_out, of_lse, again=question.how == "two backward passes")
    if question.how == "two backward passes":
        gradients = _gradients(out, leaves, d_out)
    return RankResults(found | gradients, lse_grad=lse is not None and lse.requires_grad)


def _gradients(
    out: Tensor, leaves: dict[str, Tensor], d_out: Tensor, lse: Tensor | None = None, *, again: bool = False
) -> dict[str, Tensor]:
    """The gradients of the inputs that need one; zeros where autograd finds no way from `out`.

    With `lse` the loss uses it too: its gradient is the first column of `d_out`. `again`: a second pass follows.
    """
    wanted = {f"d{name}": x for name, x in leaves.items() if x.requires_grad}
    used = [(out, d_out)] if lse is None else [(out, d_out), (lse, d_out[..., 0].to(lse.dtype))]
    pairs = [(x, d_x) for x, d_x in used if x.requires_grad]
    if pairs and wanted:  # as in training: autograd.grad would leave out functions that lead to no input
        results, given = zip(*pairs, strict=True)
        torch.autograd.backward(results, given, retain_graph=again)
    found = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in wanted.items()}
    for x in wanted.values():
        x.grad = None
    return found


def under_autocast(case: Case) -> list[RankResults]:
    """What plain attention, softmax(scale Q Kᵀ) V of the whole sequence, gives each rank under autocast on a CPU."""
    *inputs, d_out = (x.float() for x in case.whole())
    leaves = dict(zip(case.names, (x.requires_grad_() for x in inputs), strict=True))
    with torch.autocast("cpu", case.dtype):
        q, k, v = (x.repeat_interleave(case.heads // x.shape[1], dim=1) for x in leaves.values())
        scores = q @ k.mT * case.head_dim**-0.5
        out = scores.masked_fill(~case.visible(), float("-inf")).softmax(dim=-1) @ v
    results = {"out": out.detach()} | _gradients(out, leaves, d_out.to(out.dtype))
    return [RankResults({name: case.cut(x, rank) for name, x in results.items()}) for rank in range(case.world_size)]


class Noted:
    """The work of a message that is noted until somebody waits for it."""

    def __init__(self, work: Any, begun: dict[int, str], number: int) -> None:
        frames = traceback.walk_stack(sys._getframe(2))
        begun[number] = own_place([(of.f_code.co_filename, line, of.f_code.co_name) for of, line in frames])
        self.work, self.begun, self.number = work, begun, number

    def wait(self, *how: Any) -> Any:
        self.begun.pop(self.number, None)
        return self.work.wait(*how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@contextmanager
def noted() -> Iterator[dict[int, str]]:
    """The lines of the user's code that begin a message, while nobody has waited for it."""
    group, begun, numbers = dist.ProcessGroup, dict[int, str](), count()
    kept = {name: vars(group)[name] for name in ("send", "recv")}  # getattr would give functions that bind no group
    for name in kept:
        begin = getattr(group, name)
        setattr(group, name, lambda *args, begin=begin: Noted(begin(*args), begun, next(numbers)))
    try:
        yield begun
    finally:
        for name, method in kept.items():
            setattr(group, name, method)


def own_place(stack: Sequence[Frame]) -> str:
    """The line of the user's code in which a rank is, and the line of another function of it that called this one."""
    if (at := own_frame(stack)) is None:
        return ""
    caller = own_frame([frame for frame in stack[stack.index(at) + 1 :] if frame[2] != at[2]])
    return place(at) + (f", called by {place(caller)}" if caller else "")


@contextmanager
def written(path: Path, seconds: float) -> Iterator[None]:
    """While the body runs, the stack of this thread goes into the file, again and again, and when a signal ends it.

    A thread looks, and not faulthandler's timer: that one reads frames while the interpreter changes them, and kills a
    rank that imports or compiles. With the stack it writes how many seconds this thread has computed.
    """
    working, done = threading.get_ident(), threading.Event()
    clock = getattr(time, "pthread_getcpuclockid", None)  # not on macOS
    with path.open("w") as file:

        def look() -> None:
            while not done.wait(OFTEN * seconds):
                frames = traceback.walk_stack(sys._current_frames()[working])
                lines = [f'  File "{of.f_code.co_filename}", line {line} in {of.f_code.co_name}' for of, line in frames]
                computed = time.clock_gettime(clock(working)) if clock else time.monotonic()
                file.write("\n".join([f"Stack {computed}", *lines, ""]))
                file.flush()

        looking = threading.Thread(target=look, daemon=True)
        faulthandler.enable(file, all_threads=False)
        looking.start()
        try:
            yield
        finally:
            done.set()
            looking.join()
            faulthandler.disable()
