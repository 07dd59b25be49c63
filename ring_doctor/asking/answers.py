"""The answer to a question: what all ranks returned, beside full attention in float64; and how wrong a ring is by all.

    out, lse, dq, dk, dv of all ranks, joined:   right where each number is as near to the exact one as rounding allows

docs/doctor_in_ci.md says what a level means. Shapes: the whole results (B, H, S, D), (B, G, S, D) and lse (B, H, S).

Before: calls.py, what one rank returns. After: job.py, which gives an answer whatever the ranks do.
Source: the bound is derived in ../../ringlab/support/rounding.py.
"""

import math
import re
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ring_doctor.asking.calls import RankResults
from ring_doctor.asking.case import UNROUNDED, Case
from ring_doctor.asking.latent_case import LATENTS
from ring_doctor.asking.patient import Patient
from ring_doctor.asking.questions import AFTER, LSE, STATE, UNEQUAL, VALUES, Question
from ringlab.support.processes import Frame
from ringlab.support.rounding import Right

OK, WRONG, REFUSED, FAILED, LATE = "ok", "wrong", "refused", "failed", "too late"
RIGHT, RIGHT_AS_CLAIMED, IMPRECISE = "right", "right for what it takes", "imprecise in 16 bits"
WRONG_RING, CANNOT_TELL = "wrong", "cannot tell"
STATUS = {RIGHT: 0, RIGHT_AS_CLAIMED: 0, IMPRECISE: 1, WRONG_RING: 1, CANNOT_TELL: 3}
SAID = {RIGHT: "HEALTHY", RIGHT_AS_CLAIMED: "HEALTHY FOR WHAT IT TAKES", IMPRECISE: "IMPRECISE IN 16 BITS"}
SAID |= {WRONG_RING: "SICK", CANNOT_TELL: "CANNOT TELL"}  # how a verdict begins
TYPING_MISTAKES = ("NameError", "UnboundLocalError", "AttributeError", "ImportError", "ModuleNotFoundError")
# a missing set-up, a wrong call, a key that is no number and no dtype, no GPU
OF_NO_SIZE = re.compile(r"TypeError: .*(NoneType|argument)|KeyError: '\D+'|CUDA|NVIDIA")
BAD_INPUT = 2  # the exit status for options that are no options
ROUNDINGS = 32  # steps between two numbers of 16 bits: a ring of 4 that rounds at every step is off by less


@dataclass
class Answer:
    """What a patient answers to a question."""

    question: Question
    state: str  # OK, WRONG, REFUSED, FAILED, or LATE: some rank still computed when the time was over
    says: str = ""  # the reason, in a sentence
    raised: bool = False  # all ranks raised an exception
    kind: str = ""  # of the first exception: "ValueError", "NameError", ...
    where: str = ""  # its line in the user's code
    returned: bool = False  # that was the doctor's own: it returned what is no attention, or changed an input
    wrong: dict[str, float] = field(default_factory=dict)  # by wrong result, how many times too large its error is
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)  # (largest error, what rounding allows there)
    relative: dict[str, float] = field(default_factory=dict)  # the error of each result in norm, over the exact norm
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the ranks whose part of a result is wrong
    results: dict[str, Tensor] = field(default_factory=dict)  # the whole out, lse, dq, dk, dv
    in_float32: bool = False  # float64 was asked, and the answer is only as exact as float32
    changes: bool = False  # asked again, the patient gave other numbers
    kept: bool = False  # it is wrong each time after other calls, and right in new processes
    draws: bool = False  # the patient takes numbers from torch's random generator
    lse_grad: bool = False  # its lse can be differentiated
    unawaited: tuple[str, ...] = ()  # where messages begin for which nobody waits
    whole: bool = False  # each rank has the whole gradient of what is learned, and not its part
    lost: bool = False  # ranks hang or died
    silent: tuple[int, ...] = ()  # the ranks that did not answer in time
    waits: dict[Frame, list[int]] = field(default_factory=dict)  # the ranks, by the line of the user's code
    hangs: bool = False  # ranks wait, and no rank has raised or died

    @property
    def case(self) -> Case:
        return self.question.case

    @property
    def typing_mistake(self) -> bool:
        """Whether it is an exception that neither sizes nor dtypes cause."""
        return self.kind in TYPING_MISTAKES or bool(self.kind and OF_NO_SIZE.search(self.says))

    @property
    def bad(self) -> bool:
        """Whether it is wrong or failed."""
        return self.state in (WRONG, FAILED)


def judge(question: Question, of_ranks: list[RankResults]) -> Answer:
    """Compare what all ranks returned with the right results."""
    case = question.case
    faults = list(dict.fromkeys(fault for each in of_ranks for fault in each.faults))
    answer = Answer(question, OK, returned=bool(faults), draws=any(of.draws for of in of_ranks))
    answer.lse_grad = all(of.lse_grad for of in of_ranks)
    answer.unawaited = tuple(dict.fromkeys(line for of in of_ranks for line in of.unawaited))
    right = right_results(question)
    for name in of_ranks[0].results:
        chunks, learned = [each.results[name].cpu() for each in of_ranks], name[1:] in case.learned
        exact = [right[name].exact if learned else case.cut(right[name].exact, r) for r in range(case.world_size)]
        shapes = [tuple(x.shape) for x in exact]
        r = next((rank for rank, x in enumerate(chunks) if x.shape != shapes[rank]), None)
        if r is not None:
            faults += [f"its {name} has shape {tuple(chunks[r].shape)} on rank {r}; expected {shapes[r]}"]
            continue
        whole = learned and all(x.dtype == right[name].dtype and right[name].accepts(x) for x in chunks)
        answer.whole = answer.whole or (whole and case.world_size > 1)
        x = chunks[0] if whole else torch.stack(chunks).sum(dim=0) if learned else case.join(chunks)
        answer.results[name] = x
        if x.dtype != right[name].dtype:
            if name != "lse" and (question.how, x.dtype) != ("autocast", torch.float32):  # as the tensors given
                faults += [f"its {name} is {x.dtype}, its input {right[name].dtype}"]
            x = x.to(right[name].dtype)
        _compare(answer, name, x, right[name])
    if answer.wrong:
        answer.in_float32 = _as_float32(answer)
        answer.state, answer.wrong = (OK, {}) if answer.in_float32 else (WRONG, answer.wrong)
    if faults:
        answer.state, answer.says = FAILED, "; ".join(faults)
    if answer.state == OK and of_ranks[0].again:
        again = judge(question, [RankResults(each.again, draws=each.draws) for each in of_ranks])
        if again.state != OK:
            return replace(again, changes=True)
    return answer


def _compare(answer: Answer, name: str, x: Tensor, right: Right) -> None:
    """Note the errors of one result, and the ranks whose part of the result is wrong."""
    case = answer.case
    error = right.error(x).nan_to_num(nan=math.inf, posinf=math.inf)
    share = error / right.allowed
    worst = int(share.argmax())
    answer.errors[name] = float(error.flatten()[worst]), float(right.allowed.flatten()[worst])
    exact = torch.where(right.exact.isfinite(), right.exact, 0.0)
    answer.relative[name] = float(error.norm() / exact.norm().clamp(1e-300))
    if not right.accepts(x):
        answer.wrong[name] = float(share.max())
        bad = torch.ones(case.seq_len) if name[1:] in case.learned else (share > 1).movedim(2, 0).flatten(1).any(dim=1)
        answer.ranks[name] = tuple(r for r in range(case.world_size) if bad[case.positions(r)].any())


def right_results(question: Question) -> dict[str, Right]:
    """The right results. With "views" d_out is the same number for all tokens of a rank.

    With "autocast" each product, and what becomes of it, may be rounded to 16 bits. The bound of sums in float32 is a
    sum of roundings, so with larger roundings it is the bound of sums in 16 bits.
    """
    case = question.case
    if question.how == "gradient of lse":
        return case.right() | _with_gradient_of_lse(case)
    if question.how == "autocast" and case.inputs not in UNROUNDED:
        wider = torch.finfo(case.dtype).eps / torch.finfo(torch.float32).eps
        wide = case.exact(*(x.float() for x in case.whole()))
        stored = {name: case.dtype for name in wide if name != "lse"}
        return {name: replace(x, sums=wider * x.sums, dtype=stored.get(name, x.dtype)) for name, x in wide.items()}
    if question.how != "views":
        return case.right()
    q, k, v, d_out = case.whole()
    return case.exact(q, k, v, case.join([chunk[:, :, :1, :1].expand_as(chunk) for chunk in case.chunks(d_out)]))


def _with_gradient_of_lse(case: Case) -> dict[str, Right]:
    """dq and dk where the loss uses lse too, with the gradient g (B, H, S), the first column of dO.

    dS grows by scale g ∘ p. So dq grows by scale g ∘ (p K), the out of attention whose values are K. dk grows by
    pᵀ (scale g ∘ Q), the dv of attention whose dO is scale g ∘ Q. Their roundings are added.
    """
    q, k, _, d_out = case.whole()
    g = (case.head_dim**-0.5 if case.scale is None else case.scale) * d_out[..., :1]
    more, right = case.exact(q, k, k, g * q), case.right()
    parts = {"dq": (g * more["out"].exact, g.abs() * more["out"].sums), "dk": (more["dv"].exact, more["dv"].sums)}
    return {
        name: replace(right[name], exact=right[name].exact + exact, sums=right[name].sums + sums)
        for name, (exact, sums) in parts.items()
    }


def _as_float32(answer: Answer) -> bool:
    """Whether every number of every result is as near to the exact one as sums in float32 are.

    The inputs were rounded to float32 too. That moves a result by no more than the roundings of its sums.
    """
    case = answer.case
    if case.dtype != torch.float64 or case.inputs != "normal":
        return False
    in_float32 = right_results(replace(answer.question, case=replace(case, dtype=torch.float32)))
    exact, found = right_results(answer.question), answer.results.items()
    return all(bool((exact[name].error(x.double()) <= 2 * in_float32[name].allowed).all()) for name, x in found)


def other_numbers(a: Answer, b: Answer) -> bool:
    """Whether two wrong answers differ by more than two right ones may."""
    allowed = {name: 2 * right.allowed for name, right in right_results(a.question).items()}
    pairs = {name: (x.double().nan_to_num(), b.results[name].double().nan_to_num()) for name, x in a.results.items()}
    return any(bool(((x - y).abs() > allowed[name]).any()) for name, (x, y) in pairs.items())


def imprecise(answer: Answer) -> bool:
    """Whether an answer is wrong in 16 bits by no more than rounding at every step can do: never NaN, nor a failure.

    Scores of 800 in 16 bits are off by 2, and so are weights: there the size of an error says nothing.
    """
    step = torch.finfo(answer.case.dtype)
    most = ROUNDINGS * step.eps if answer.case.inputs == "normal" else torch.finfo(torch.float64).max
    return answer.state == WRONG and step.bits == 16 and all(answer.relative[name] <= most for name in answer.wrong)


# All answers of a patient ---------------------------------------------------------------------------------------------

OF_ATTENTION = {"window": "windows", "documents": "documents", "sinks": "attention sinks"}  # options in words
OF_LATENTS = {"documents": "documents"}
OF_STATES = {"documents": "documents", "state": STATE}


@dataclass
class Examination:
    """A patient, its answers, and what a reader must know about them."""

    patient: Patient
    answers: list[Answer] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    unawaited: tuple[str, ...] = ()  # where messages begin for which nobody waits, if answers change
    limits: list[str] = field(default_factory=list)  # what the patient takes, where that is less than a ring may take

    @property
    def faults(self) -> list[Answer]:
        """The wrong answers and the failures that count."""
        return [answer for answer in self.answers if answer.bad and not excused(answer)]

    @property
    def wrong(self) -> list[Answer]:
        """The wrong answers that tell of a mistake: always the same numbers, and if possible to what it must take."""
        return as_claimed([it for it in self.answers if it.state == WRONG and it.results and not it.changes])

    @property
    def level(self) -> str:
        """How wrong: one of those in STATUS."""
        if self.faults:
            return IMPRECISE if all(map(imprecise, self.faults)) else WRONG_RING
        return RIGHT_AS_CLAIMED if self.limits or self.beyond else RIGHT

    @property
    def healthy(self) -> bool:
        return not self.faults  # what the patient claims is right

    @property
    def beyond(self) -> dict[str, Answer]:
        """What the patient never claimed to take, and the first failure or wrong answer with it."""
        return {answer.question.feature: answer for answer in reversed(self.answers) if answer.bad and excused(answer)}

    @property
    def not_asked(self) -> list[str]:
        """What a ring may take and this one was not asked, in words."""
        patient = self.patient
        may = OF_LATENTS if patient.state == LATENTS else OF_STATES if patient.state else OF_ATTENTION
        told = [words for option, words in may.items() if option not in patient.takes]
        claimed = {"grouped queries": patient.grouped or patient.state, UNEQUAL: patient.unequal}
        claimed |= {VALUES: patient.own_values or patient.state, "a causal mask": True in patient.causal}
        claimed |= {"gradients": patient.gradients}
        return told + [words for words, claim in claimed.items() if not claim]

    @property
    def lost(self) -> int:
        """How many hangs, crashes and typing mistakes count: with a feature, or unequal chunks, it may answer all."""
        lost = [it for it in self.answers if (it.lost or it.typing_mistake) and not excused(it)]
        return len([answer for answer in lost if answer.question.feature != UNEQUAL])

    @property
    def keeps(self) -> bool:
        """Whether it fails first where a call comes after one of another length, whatever else it refuses."""
        bad = [x for x in self.answers if (x.question.how == AFTER and x.state != OK) or (x.bad and not excused(x))]
        return [it.question.how for it in bad[:1]] == [AFTER]

    @property
    def changes(self) -> list[Answer]:
        """The answers that were other ones when the patient was asked again."""
        return [answer for answer in self.answers if answer.changes]


def never_claimed(answer: Answer) -> bool:
    """Whether an answer identifies no mistake: a failure with an optional feature, or any fault with these two."""
    feature = answer.question.feature
    return bool(feature) and (answer.state == FAILED or feature in (UNEQUAL, LSE))


def as_claimed(answers: list[Answer]) -> list[Answer]:
    """The answers to what is claimed: others may be wrong in any way. All answers, if only others are clearly wrong."""
    wrong = [answer for answer in answers if answer.state == WRONG]
    clear = [answer for answer in wrong if not imprecise(answer)] or wrong
    return answers if all(map(never_claimed, clear)) else [it for it in answers if not never_claimed(it)]


def but_autocast(answers: list[Answer]) -> list[Answer]:
    """Answers under autocast are of float32 tensors: where all are right, that is no condition of what is wrong."""
    sick = any(answer.question.how == "autocast" for answer in answers if answer.state == WRONG)
    return [answer for answer in answers if sick or answer.question.how != "autocast"]


def excused(answer: Answer) -> bool:
    """Whether a fault does not count: an error of its own with a feature. An lse may be there to be read only."""
    feature, loud = answer.question.feature, answer.state == FAILED and not (answer.hangs or answer.returned)
    return bool(feature) and (loud or feature == LSE)
