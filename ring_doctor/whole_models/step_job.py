"""A rank of the job that is made of a step: it calls the step, and the recorder gets what that returns.

Before: whole_model.py, which starts it. After: jobs/recorder.py, which sees it.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_doctor.asking.calls import written
from ring_doctor.asking.names import named
from ringlab.support.processes import RankContext

BATCH, SEQ_LEN = 2, 24  # tokens that zigzag deals out to 2, 3 and 4 ranks
EXPECTED = "expected (loss, gradients): a tensor, and a dict of the gradient of each weight by its name"


def end_step(recorder: Any, result: Any) -> None:
    """Give the recorder what the step returned. Raises TypeError for what is no (loss, gradients)."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict) or not result[1]:
        raise TypeError(f"the function returned {type(result).__name__}; {EXPECTED}")
    for name, gradient in result[1].items():
        if not isinstance(gradient, Tensor):
            raise TypeError(f"the gradient of {name} is {gradient!r:.60}; {EXPECTED}")
    loss = torch.as_tensor(result[0]).detach().clone()
    if loss.dim():  # of each token of this rank
        if loss.shape != (shape := (BATCH, SEQ_LEN // dist.get_world_size())):
            expected = f"expected a number, or a loss for each token of the rank, (B, C) = {shape}"
            raise TypeError(f"the loss has shape {tuple(loss.shape)}; {expected}")
        dist.all_reduce(loss := loss.sum())
    weights = [SimpleNamespace(grad=gradient) for gradient in result[1].values()]
    recorder.end_step(weights, dict(zip(map(id, weights), result[1], strict=True)), loss.item())


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
    watching = import_module("ring_doctor.jobs.watching")
    watching.watch(torch)
    watching.watch_functional(import_module(watching.FUNCTIONAL))
    seen = recorder.seen
    seen.of_a_function = True
    text = torch.randint(vocab, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    with written(folder / str(context.rank), often):
        step = named(name)
        for tokens in (None, None, *hidden):
            torch.manual_seed(seed)
            targets = text[:, 1:].index_fill(1, torch.tensor(tokens or [], dtype=torch.int64), -100).to(context.device)
            end_step(seen, step(text.to(context.device), **({} if tokens is None else {"targets": targets})))
    return {"rank": context.rank, "steps": seen.steps, "names": [*seen.names]}
