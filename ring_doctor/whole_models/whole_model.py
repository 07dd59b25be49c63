"""A training step of a whole model, asked as a running job is: a small job is made of it. You give a function.

    def step(text, *, targets=None):
        tokens, labels, at = my_shards(text)        # of this rank; everything below is yours
        ...
        return loss, gradients

Every rank calls it with the same text (B, S + 1), and shards it itself. `loss` is the loss that you report, or the loss
of each token of this rank (B, C). `gradients` is a dict: the name of a weight and its gradient, as the optimizer would
get it; DTensors are gathered. With targets (B, S), the labels of the whole text in place of text[:, 1:], where -100 is
a token without a loss, the function is also asked with some labels hidden, and with all labels of a rank hidden.

Each rank calls it with each of CALLS, and the recorder gets what it returns. This is done on 1 process,
where no ring can be wrong, once more with weights moved by a unit, and on 3, 2 and 4. ../jobs compares them.

What it cannot see, by design: one process is the judge, so a model that is wrong there too looks right; with dropout
nothing can be compared; the optimizer, accumulated gradients and checkpoints are not asked.

Shapes: text (B, S + 1), the same on every rank; rank r has the tokens at positions(layout, S, r, P).

Before: jobs/verdict.py, two commands. After: the command, __main__.py.
"""

import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_doctor.asking.answers import RIGHT_AS_CLAIMED, WRONG_RING
from ring_doctor.asking.calls import written
from ring_doctor.asking.case import LAYOUTS, positions
from ring_doctor.asking.examination import SECONDS
from ring_doctor.asking.job import START, CannotExamine, hang, told, why_lost
from ring_doctor.asking.names import named
from ring_doctor.jobs.gradients import distance, dtypes_of, eps_of
from ring_doctor.jobs.job import Job
from ring_doctor.jobs.verdict import Verdict, compare
from ringlab.support.expect import expect
from ringlab.support.processes import LostRank, Raised, RankContext, Ranks

WORLDS = (3, 2, 4)  # 3 first: its factors P and √P are no other's
CALLS = ("", "called again", "some labels hidden", "a rank without labels")
RACE = "returns other results when it is called again with the same text: look for a buffer that is written while it "
RACE += "is being sent, for a wait that is missing, and for state that a call leaves behind"
BATCH, SEQ_LEN = 2, 24  # tokens that zigzag deals out to 2, 3 and 4 ranks
RETURNS = "expected (loss, gradients): a tensor, and a dict of the gradient of each weight by its name"
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
    # Labels of some tokens, then the ranks have different numbers of labels, and each has one; and all of a rank's.
    hidden = [list(range(SEQ_LEN // 4 - 1)), [t for P in WORLDS for t in positions(layout, SEQ_LEN, 0, P).tolist()]]
    hidden = hidden if _takes_targets(name) else []
    calls = CALLS[: 2 + len(hidden)]
    with tempfile.TemporaryDirectory(prefix="ring-doctor-", ignore_cleanup_errors=True) as home:

        def run(P: int, move: str = "") -> Job:
            """What P ranks saw. Raises CannotExamine where one of them raises, dies or hangs."""
            progress(f"{P} process{'es' * (P > 1)}")
            who = "on one process " * (P == 1)
            (folder := Path(home, f"{P}{move}")).mkdir()
            ranks = Ranks(P, START + seconds, device, folder)
            ranks.hang = partial(hang, folder)
            try:
                seen = ranks.outcomes(P, call, name, vocab, seed, hidden, folder, move, seconds)
                if raised := {rank: each for rank, each in enumerate(seen) if isinstance(each, Raised)}:
                    raise CannotExamine(who + told(raised))
            except LostRank as lost:
                raise CannotExamine(who + why_lost(lost, folder, range(P), folder)) from None
            finally:
                ranks.stop()
            return Job(name, folder, seen)

        one = run(1)
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
        pairs = [[job.tensor("gradient", at, name, rank) for at in (step, other)] for name in of["weights"]]
        pairs.append([torch.tensor(of["steps"][at]["reported"], dtype=torch.float64) for at in (step, other)])
        for x, y in pairs:
            if x is not None and y is not None and distance(y.nan_to_num(), x.nan_to_num(), 1e-9) > slack:
                return True
    return False


# On a rank ------------------------------------------------------------------------------------------------------------


def call(
    context: RankContext,
    name: str,
    vocab: int,
    seed: int,
    hidden: list[list[int]],
    folder: Path,
    move: str,
    often: float,
) -> dict[str, Any]:
    """On a rank: call the step with a text, again, and with `hidden` labels. Returns what the recorder saw.

    The gradients go to files in `folder`, and every some seconds the stack of the rank. `move` is as in jobs/job.py.
    """
    os.environ |= {"RING_DOCTOR_FOLDER": str(folder), "RING_DOCTOR_STEPS": "0", "RING_DOCTOR_MOVE": move}
    sys.modules["ring_doctor_recorder"] = recorder = import_module("ring_doctor.jobs.recorder")
    import_module("ring_doctor.jobs.watching").watch(torch)
    seen = recorder.seen
    text = torch.randint(vocab, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    with written(folder / str(context.rank), often):
        step = named(name)
        for tokens in (None, None, *hidden):
            torch.manual_seed(seed)
            targets = text[:, 1:].index_fill(1, torch.tensor(tokens or [], dtype=torch.int64), -100).to(context.device)
            end_step(seen, step(text.to(context.device), **({} if tokens is None else {"targets": targets})))
    return {"rank": context.rank, "steps": seen.steps, "weights": seen.weights}


def end_step(recorder: Any, result: Any) -> None:
    """Give the recorder what the step returned. Raises TypeError for what is no (loss, gradients)."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict) or not result[1]:
        raise TypeError(f"the function returned {type(result).__name__}; {RETURNS}")
    for name, gradient in result[1].items():
        if not isinstance(gradient, Tensor):
            raise TypeError(f"the gradient of {name} is {gradient!r:.60}; {RETURNS}")
    loss = torch.as_tensor(result[0]).detach().clone()
    if loss.dim():  # of each token of this rank
        if loss.shape != (shape := (BATCH, SEQ_LEN // dist.get_world_size())):
            expected = f"expected a number, or a loss for each token of the rank, (B, C) = {shape}"
            raise TypeError(f"the loss has shape {tuple(loss.shape)}; {expected}")
        dist.all_reduce(loss := loss.sum())
    weights = [SimpleNamespace(grad=gradient) for gradient in result[1].values()]
    recorder.write_gradients(weights, dict(zip(map(id, weights), result[1], strict=True)))
    recorder.end_step(loss.item())
    recorder.optimizers.clear()  # of this call
