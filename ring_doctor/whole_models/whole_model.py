"""A training step of a whole model, asked as a running job is: a small job is made of it. You give a function.

    def step(text, *, targets=None):
        tokens, labels, at = my_shards(text)        # of this rank; everything below is yours
        ...
        return loss, gradients

Every rank calls it with the same text (B, S + 1), and shards it itself. `loss` is the number that you report.
`gradients` is a dict: the name of a weight and its gradient, as the optimizer would get it; DTensors are gathered. With
targets (B, S), they are the labels of the whole text in place of text[:, 1:], and -100 is a token without a loss: the
function is also asked with some labels hidden, and with all labels of a rank hidden.

This file is the job too. It calls the function on 1 process, where no ring can be wrong, once more with weights moved
by a unit, and on 3, 2 and 4. ../jobs runs and compares them.

What it cannot see, by design: one process is the judge, so a model that is wrong there too looks right; with dropout
nothing can be compared; the optimizer, accumulated gradients and checkpoints are not asked.

Before: ../jobs/verdict.py. After: the command, __main__.py.
"""

import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ring_doctor.asking.answers import WRONG_RING
from ring_doctor.asking.case import positions
from ring_doctor.asking.job import SECONDS, START, CannotExamine, Tell
from ring_doctor.asking.names import named
from ring_doctor.jobs.gradients import LOSS, dtypes_of
from ring_doctor.jobs.job import Job, run_job
from ring_doctor.jobs.verdict import Verdict, compare
from ringlab.support.processes import join_ring

WORLDS = (3, 2, 4)  # 3 first: its factors P and √P are no other's
CALLS = ("", "called again", "some labels hidden", "a rank without labels")
SLOWER, OTHERS = 3, 20.0  # times one process, and seconds more, that several may need to start and to call the step
NOISE = 1e-3  # of a loss: another call may change it so far
BATCH, SEQ_LEN = 2, 24  # tokens that zigzag deals out to 2, 3 and 4 ranks


def examine_model(
    name: str,
    *,
    layout: str = "contiguous",
    vocab: int = 32,
    seed: int = 0,
    seconds: float = SECONDS,
    device: str = "cpu",
    progress: Tell = lambda words: None,
) -> Verdict:
    """Call the step "module:function" on 1, 2, 3 and 4 processes, compare, and name the mistakes.

    `layout` is that of its shards; "module:function" names your own. Tokens are below `vocab`. A run may take `seconds`
    beside the start of its processes. Raises ValueError for such an argument, or a function, that is not as described,
    and CannotExamine when nothing can be compared.
    """
    named(name)
    positions(layout, SEQ_LEN, 0, 1)
    with tempfile.TemporaryDirectory(prefix="ring-doctor-", ignore_cleanup_errors=True) as home:

        def run(P: int, move: str = "") -> Job:
            """What P ranks saw. Raises CannotExamine where one of them raises, dies or hangs."""
            command = shlex.join([sys.executable, "-m", __name__, *map(str, (P, name, layout, device, vocab, seed))])
            folder = Path(home, f"{P}-process{move and '-moved'}")
            return run_job(command, folder, steps=len(CALLS), seconds=limit, move=move, paths=sys.path, tell=progress)

        began, limit = time.monotonic(), START + seconds
        one = run(1)
        limit = min(limit, seconds + OTHERS + SLOWER * (time.monotonic() - began))
        moved = run(1, dtypes_of(one)[0])
        for P in WORLDS:
            try:
                many = run(P)
            except CannotExamine as failed:
                return Verdict(WRONG_RING, f"{name} fails: {failed}")
            found = compare(one, many, moved, CALLS, layout)
            if found.level == WRONG_RING:
                found.says += f"; {name}, with {P} processes"
                return found
    found.says = f"{name}, loss and gradients are those of one process; not asked: dropout, the optimizer, checkpoints"
    return found


def step_on_rank(name: str, layout: str, device: torch.device, vocab: int, seed: int) -> None:
    """Call the step, as CALLS says. The recorder gets the gradients, and the loss as one more."""
    step, draw = named(name), torch.Generator().manual_seed(seed)
    text = torch.randint(vocab, (BATCH, SEQ_LEN + 1), generator=draw).to(device)
    # Labels of some tokens, then the ranks have different numbers of labels, and each has one; and all of a rank's.
    hidden = [range(SEQ_LEN // 4 - 1), [t for P in WORLDS for t in positions(layout, SEQ_LEN, 0, P).tolist()]]
    targets = [text[:, 1:].index_fill(1, torch.tensor([*tokens], device=device), -100) for tokens in hidden]
    seen = sys.modules["ring_doctor_recorder"].seen
    losses = []
    for options in ({}, {}, *({"targets": labels} for labels in targets)):
        torch.manual_seed(seed)
        loss, gradients = step(text, **options)
        losses.append(float(loss))
        if dist.get_world_size() == 1 and not options and abs(losses[-1] - losses[0]) > NOISE * abs(losses[0]):
            raise RuntimeError("two calls return different losses; expected new weights in each, and torch's generator")
        if dist.get_world_size() == 1 and options and losses[-1] == losses[0]:
            raise RuntimeError("targets= has no effect on the loss; expected it to take the place of text[:, 1:]")
        weights = {}
        for weight, gradient in (gradients | {LOSS: torch.as_tensor(loss)}).items():
            weights[weight] = torch.zeros_like(gradient)
            weights[weight].grad = gradient.detach()
        seen.write("gradient", weights, weights.values())
        seen.end_step()


if __name__ == "__main__":
    P, (name, layout, device), (vocab, seed) = int(sys.argv[1]), sys.argv[2:5], map(int, sys.argv[5:])
    rank, store = 0, Path(os.environ["RING_DOCTOR_FOLDER"], "store")
    while rank < P - 1 and os.fork():  # so torch is imported once
        rank += 1
    with join_ring(device, P, rank=rank, world_size=P, init_method=f"file://{store}") as context:
        step_on_rank(name, layout, context.device, vocab, seed)
