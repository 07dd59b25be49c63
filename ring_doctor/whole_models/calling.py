"""A training script that is made of a function: python -m ring_doctor.whole_models.calling P module:step ...

whole_model.py runs it as jobs/job.py runs every script. It forks its ranks, so torch is imported once. Each calls the
step with a text, again, and with other targets. What a step returns is given to the recorder as the gradient of weights
of an optimizer. The loss that it reports is one more gradient.

Shapes: text (B, S + 1), the same on every rank; rank r has the tokens at positions(layout, S, r, P).

Before: jobs/recorder.py. After: whole_model.py.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_doctor.asking.case import positions
from ring_doctor.asking.names import named
from ring_doctor.jobs.gradients import LOSS
from ringlab.support.processes import join_ring

WORLDS = (3, 2, 4)  # 3 first: its factors P and √P are no other's
CALLS = ("", "called again", "some labels hidden", "a rank without labels")
BATCH, SEQ_LEN = 2, 24  # tokens that zigzag deals out to 2, 3 and 4 ranks
RETURNS = "expected (loss, gradients): a tensor, and a dict of the gradient of each weight by its name"


def call_on_rank(name: str, layout: str, vocab: int, seed: int, calls: int, device: torch.device) -> None:
    """Call the step `calls` times, as CALLS says. Raises TypeError for what is no (loss, gradients)."""
    step = named(name)
    text = torch.randint(vocab, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    # Labels of some tokens, then the ranks have different numbers of labels, and each has one; and all of a rank's.
    some, whole = list(range(SEQ_LEN // 4 - 1)), [t for P in WORLDS for t in positions(layout, SEQ_LEN, 0, P).tolist()]
    seen = sys.modules["ring_doctor_recorder"].seen  # an optimizer of torch's would import 4 seconds of code
    for hidden in (None, None, some, whole)[:calls]:
        torch.manual_seed(seed)
        targets = text[:, 1:].index_fill(1, torch.tensor(hidden or [], dtype=torch.int64), -100).to(device)
        result = step(text.to(device), **({} if hidden is None else {"targets": targets}))
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict) or not result[1]:
            raise TypeError(f"the function returned {type(result).__name__}; {RETURNS}")
        loss = torch.as_tensor(result[0]).detach().clone()
        if loss.dim():  # of each token of this rank
            if loss.shape != (shape := (BATCH, SEQ_LEN // dist.get_world_size())):
                expected = f"expected a number, or a loss for each token of the rank, (B, C) = {shape}"
                raise TypeError(f"the loss has shape {tuple(loss.shape)}; {expected}")
            dist.all_reduce(loss := loss.sum())
        if not seen.passes:  # it took torch.autograd.grad: a pass of no loss
            torch.zeros((), requires_grad=True).backward()
        model = nn.Module()
        for weight, gradient in (result[1] | {LOSS: loss}).items():
            if not isinstance(gradient, Tensor):
                raise TypeError(f"the gradient of {weight} is {gradient!r:.60}; {RETURNS}")
            model._parameters[weight] = of_weight = nn.Parameter(torch.zeros_like(gradient))  # its name may have dots
            of_weight.grad = gradient.detach()
        seen.before_step(SimpleNamespace(param_groups=[{"params": list(model.parameters())}]))
        seen.after_step()


if __name__ == "__main__":
    P, (name, layout, device), (vocab, seed, calls) = int(sys.argv[1]), sys.argv[2:5], map(int, sys.argv[5:])
    rank, store = 0, Path(os.environ["RING_DOCTOR_FOLDER"], "store")
    while rank < P - 1 and os.fork():
        rank += 1
    with join_ring(device, P, rank=rank, world_size=P, init_method=f"file://{store}") as context:
        call_on_rank(name, layout, vocab, seed, calls, context.device)
