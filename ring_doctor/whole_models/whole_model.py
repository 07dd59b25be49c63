"""A training step of a whole model, asked as a running job is: a small job is made of it. You give a function.

    def step(text, *, targets=None):
        tokens, labels, at = my_shards(text)        # of this rank; everything below is yours
        ...
        return loss, gradients

Every rank calls it with the same text (B, S + 1), and shards it itself. `loss` is the loss that you report, or the loss
of each token of this rank (B, C). `gradients` is a dict: the name of a weight and its gradient, as the optimizer would
get it; DTensors are gathered. With targets (B, S), the labels of the whole text in place of text[:, 1:], where -100 is
a token without a loss, the function is also asked with some labels hidden, and with all labels of a rank hidden.

calling.py is the job: it calls the function on 1 process, where no ring can be wrong, once more with weights moved by a
unit, and on 3, 2 and 4. ../jobs runs and compares them.

What it cannot see, by design: one process is the judge, so a model that is wrong there too looks right; with dropout
nothing can be compared; the optimizer, accumulated gradients and checkpoints are not asked.

Before: calling.py. After: the command, __main__.py.
"""

import inspect
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ring_doctor.asking.answers import RIGHT_AS_CLAIMED, WRONG_RING
from ring_doctor.asking.case import LAYOUTS, positions
from ring_doctor.asking.examination import SECONDS
from ring_doctor.asking.job import START, CannotExamine
from ring_doctor.asking.names import named
from ring_doctor.jobs.gradients import distance, dtypes_of, eps_of
from ring_doctor.jobs.job import Job, run_job
from ring_doctor.jobs.verdict import Verdict, compare
from ring_doctor.whole_models import calling
from ring_doctor.whole_models.calling import CALLS, SEQ_LEN, WORLDS
from ringlab.support.expect import expect

RACE = "returns other results when it is called again with the same text: look for a buffer that is written while it "
RACE += "is being sent, for a wait that is missing, and for state that a call leaves behind"
SLOWER, OTHERS = 3, 20.0  # times one process, and seconds more, that several may need to start and to call the step
EXPECTED = "weights that are made anew in each call, and random numbers from torch's generator only"


def examine_model(
    name: str,
    *,
    layout: str = "contiguous",
    vocab: int = 32,
    seed: int = 0,
    seconds: float = SECONDS,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda words: None,
) -> Verdict:
    """Call the step "module:function" on 1, 2, 3 and 4 processes, compare, and name the mistakes.

    `layout` is that of its shards; "module:function" names your own. Tokens are below `vocab`. A run may take `seconds`
    beside the start of its processes. Raises ValueError for such an argument, or a function, that is not as described,
    and CannotExamine when nothing can be compared.
    """
    is_known = layout in LAYOUTS or ":" in layout
    expect(is_known, f"layout is {layout!r}", f"one of {', '.join(LAYOUTS)}, or module:function")
    expect(vocab > 0, f"vocab is {vocab}", "1 or more")
    positions(layout, SEQ_LEN, 0, 1)
    calls = CALLS if _takes_targets(name) else CALLS[:2]
    with tempfile.TemporaryDirectory(prefix="ring-doctor-", ignore_cleanup_errors=True) as home:

        def run(P: int, move: str = "") -> Job:
            """What P ranks saw. Raises CannotExamine where one of them raises, dies or hangs."""
            words = [sys.executable, "-m", calling.__name__, P, name, layout, device, vocab, seed, len(calls)]
            paths = shlex.quote(os.pathsep.join(filter(None, sys.path)))
            command = f'PYTHONPATH="$PYTHONPATH":{paths} {shlex.join(map(str, words))}'
            progress(f"{P} process{'es' * (P > 1)}")
            try:
                return run_job(command, Path(home, f"{P}{move}"), steps=len(calls), seconds=limit, move=move)
            except CannotExamine as failed:
                raise CannotExamine(str(failed).replace(f": {command}", "")) from None  # the user did not write it

        began, limit = time.monotonic(), START + seconds
        one = run(1)
        limit = min(limit, seconds + OTHERS + SLOWER * (time.monotonic() - began))
        if _changes(one, 0, 1):
            raise CannotExamine(f"two calls on one process return different results; expected {EXPECTED}")
        if len(calls) > 2 and not _changes(one, 0, 2):
            raise CannotExamine("targets= has no effect on the gradients; expected it to take the place of text[:, 1:]")
        moved = run(1, dtypes_of(one)[0])
        for P in WORLDS:
            try:
                many = run(P)
            except CannotExamine as failed:
                done = {int(file.name.split("-")[1]) for file in Path(home, f"{P}").glob("before-*")}
                when = (CALLS * 2)[max(done, default=-1) + 1]
                return Verdict(WRONG_RING, f"{name} fails with {P} processes{f', {when}' * bool(when)}: {failed}")
            found = compare(one, many, moved, len(calls), calls, layout)
            if found.level == WRONG_RING:
                if _changes(many, 0, 1):
                    return Verdict(WRONG_RING, f"with {P} processes {name} {RACE}", lines=found.lines)
                found.says += f"; {name}, with {P} processes"
                return found
    found.says = f"{name}, loss and gradients are those of one process; not asked: dropout, the optimizer, checkpoints"
    if len(calls) == 2:
        found.level, found.says = RIGHT_AS_CLAIMED, f"{found.says}; a label for every token: it takes no targets="
    return found


def _takes_targets(name: str) -> bool:
    """Whether the function has the option targets=. Raises ValueError when it cannot be called with a text alone."""
    function = named(name)
    try:
        signature = inspect.signature(function)
        signature.bind(None)
    except (TypeError, ValueError) as error:
        given = f"{name.partition(':')[2]} cannot be called with a text alone ({error})"
        raise ValueError(f"{given}; expected step(text, *, targets=None)") from error
    return "targets" in signature.parameters


def _changes(job: Job, step: int, other: int) -> bool:
    """Whether two calls on the same rank gave other numbers; a quarter of the digits may differ."""
    slack = eps_of(dtypes_of(job)[0]) ** 0.75
    for rank, of in enumerate(job.ranks):
        for name in of["weights"]:
            x, y = (job.tensor("before", at, name, rank) for at in (step, other))
            if x is not None and y is not None and distance(y.nan_to_num(), x.nan_to_num(), 1e-9) > slack:
                return True
    return False
