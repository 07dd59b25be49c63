"""The job that is made of a step: python -m ring_doctor.whole_models.step_job '{"name": "module:step", ...}' RANKS

It forks its ranks, so torch is imported once. Each calls the step, and the recorder gets what it returns.

Before: whole_model.py, which starts it. After: jobs/recorder.py, which sees it.
"""

import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_doctor.asking.names import named
from ringlab.support.processes import PRELOAD, join_ring

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


def call(rank: int, P: int, name: str, vocab: int, seed: int, device: str, calls: int, hidden: list[int]) -> None:
    """Call the step with a text, again, with some labels hidden, and with all labels of a rank hidden."""
    recorder = sys.modules["ring_doctor_recorder"].seen
    recorder.of_a_function = True
    step, store = named(name), Path(os.environ["RING_DOCTOR_FOLDER"], "store")
    text = torch.randint(vocab, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    early = torch.arange(SEQ_LEN // 4 - 1)  # different numbers of labels, and each rank has one
    with join_ring(device, P, init_method=f"file://{store}", rank=rank, world_size=P) as context:
        for tokens in (None, None, early, torch.tensor(hidden))[:calls]:
            torch.manual_seed(seed)
            targets = {} if tokens is None else {"targets": text[:, 1:].index_fill(1, tokens, -100).to(context.device)}
            end_step(recorder, step(text.to(context.device), **targets))


if __name__ == "__main__":
    P = int(sys.argv[2])
    for module in PRELOAD:  # by one process, and not by each
        import_module(module)
    gc.freeze()
    for rank in range(P):
        if not os.fork():
            call(rank, P, **json.loads(sys.argv[1]))
            sys.exit()
    while not os.wait()[1]:  # one that fails ends the job
        pass
    sys.exit(1)
