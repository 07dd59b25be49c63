"""The doctor's examination on the ranks of the tests, which are there already: to start new ones takes seconds."""

from contextlib import contextmanager
from tempfile import TemporaryDirectory
from unittest import mock

from ring_doctor import examination
from ring_doctor.examination import examine
from ring_doctor.job import Job
from ring_doctor.patient import from_function
from tests.sick_rings import ALL, sick


@contextmanager
def on_these(ranks):
    """Every job of the doctor runs on the pool of the tests."""

    class Shared(Job):
        def __init__(self, patient, size, seconds, device):
            self.patient, self.size, self.seconds, self.ranks = patient, size, seconds, ranks
            self.ready, self.lost, self.first_call, self.called = patient.setup is None, 0, 0.0, set()
            self._errors = TemporaryDirectory()

        def close(self):
            ranks.seconds, ranks.hang = usual
            self._errors.cleanup()

    usual = ranks.seconds, ranks.hang
    with mock.patch.object(examination, "Job", Shared):
        yield


def examined(ranks, function, seed=0, **claims):
    """The examination of a ring."""
    with on_these(ranks):
        return examine(from_function(function, **claims), seed=seed)


def examined_sick(ranks, name, **claims):
    """The examination of a ring of sick_rings.py."""
    ring = ALL[name]
    layouts = ring.layouts if "layout" in ring.takes else ("contiguous",)
    claims = {"layouts": layouts, "grouped": ring.grouped, "gradients": ring.gradients, "heads": ring.heads, **claims}
    return examined(ranks, sick(name), **{"name": name, **claims})
