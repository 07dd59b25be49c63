"""The doctor's examination on the ranks of the tests, which are there already: to start new ones takes seconds."""

from contextlib import contextmanager
from unittest import mock

import torch

from ring_doctor import assertion
from ring_doctor.asking import examination
from ring_doctor.asking.answers import judge
from ring_doctor.asking.calls import RankResults
from ring_doctor.asking.examination import examination_of
from ring_doctor.asking.job import Job
from ring_doctor.asking.patient import patient_of
from ring_doctor.asking.questions import questions
from ring_doctor.mistakes.paper_ring import RIGHT, compute

IN_TURN = "ring_doctor.asking.questions.questions"


@contextmanager
def on_these(ranks):
    """Every job of the doctor runs on the pool of the tests."""

    class Shared(Job):
        def __init__(self, patient, *size, **how):
            super().__init__(patient, *size, **how)
            self.ranks, self.ready = ranks, patient.setup is None

        def ask(self, question):
            if last != [self]:  # another job has formed another process group
                self.ready = self.patient.setup is None
            last[:] = [self]
            return super().ask(question)

        def close(self):
            ranks.seconds, ranks.hang = usual
            self._errors.cleanup()

    usual, last = (ranks.seconds, ranks.hang), []
    with mock.patch.object(examination, "Job", Shared), mock.patch.object(assertion, "Job", Shared):
        yield


def examined(ranks, function, seed=0, wanted=lambda question: True, **claims):
    """The examination of a ring: the questions that are `wanted`, and the plain ones."""

    def some(*how):
        asked = list(questions(*how))
        return iter([question for question in asked if wanted(question) or question == asked[0]])

    with on_these(ranks), mock.patch.object(examination, "questions", some), mock.patch(IN_TURN, some):
        return examination_of(patient_of(function, **claims), seed=seed)


def by_autograd(case, steps):
    """What a ring of these steps returns, whose gradients are those of its forward pass, by autograd."""
    *leaves, d_out = (x.double().requires_grad_() for x in case.whole())
    results = compute(case, steps, (*leaves, d_out), gradients=False)
    found = torch.autograd.grad(results["out"], leaves, d_out, allow_unused=True, materialize_grads=True)
    results |= dict(zip(("dq", "dk", "dv"), found, strict=True))
    return {name: x.detach() for name, x in results.items()}


def answer_on_paper(question, steps=RIGHT, change=lambda case, results: results):
    """The answer of a ring on paper to a question; `change` is planted at the end."""
    case = question.case
    results = change(case, compute(case, steps))
    if question.how == "without gradients":
        results = {name: results[name] for name in ("out", "lse")}
    wide = {name: x if name == "lse" else x.to(case.dtype) for name, x in results.items()}
    return judge(question, [RankResults({n: case.cut(x, r) for n, x in wide.items()}) for r in range(case.world_size)])
