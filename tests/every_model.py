"""The ring in every causal language model of transformers: equal to one process, or refused with a reason.

    exact     the loss and every gradient of a small model with the attention of transformers, on one process
    apart     the same without the ring: each rank attends in its own chunk. It must differ, or nothing is proved
    ring      the same model after use_ring, on 2 and on 3 processes, zigzag; the parts of the ranks are summed

    $ python -m tests.every_model --only llama mistral
    $ python -m tests.every_model --write      all of them, and ringlab/models/EVERY_MODEL.md

All is computed in float64. An outcome is one of

    equal          loss and gradient are those of one process, within TOLERANCE, and apart is not
    refused        a ValueError or ImportError of this package, the same on every rank
    not buildable  transformers does not run the small model on one process either
    unproven       equal, but apart is equal too
    crashed        any other error, another error on another rank, or no answer in time
    wrong          a loss or a gradient that differs
"""

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ringlab.models.hugging_face import shard_batch, use_ring
from ringlab.models.hugging_face_batch import shifted
from ringlab.models.transformer import IGNORED, summed_loss
from ringlab.support.pool import LostRank, Ranks
from ringlab.support.processes import Raised, RankContext
from ringlab.training.layouts import positions
from tests.small_models import NAMES, Exactly, S, batch_of, small_model

TABLE = Path(__file__).parent.parent / "ringlab" / "models" / "EVERY_MODEL.md"
WORLDS = (2, 3)
SECONDS = 120.0  # for one model on the ranks of a ring
TOLERANCE = 1e-10  # of the norm: 24 tokens and a few layers in float64
TOLD_APART = 1e-3
OUTCOMES = ("equal", "refused", "not buildable", "unproven", "crashed", "wrong")

Results = tuple[float, Tensor]  # the loss, and the gradient of all parameters


@dataclass(frozen=True)
class Outcome:
    """What came of a model: one of OUTCOMES, its errors, or a sentence."""

    kind: str
    loss: float = 0.0
    gradient: float = 0.0
    sentence: str = ""


class NotBuildableError(Exception):
    """transformers cannot run this model on one process."""


def gradient_of(model: PreTrainedModel) -> Tensor:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in weights])


def mean_loss(logits: Tensor, labels: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The sum over these labels, which are shifted, divided by the labels of the batch."""
    return summed_loss(logits, labels) / (shifted(batch["labels"]) != IGNORED).sum()


def exact(name: str) -> Results:
    """The loss of one process: the model's own. A model of images, say, has none for tokens alone: then from logits."""
    model = small_model(name)
    batch = batch_of(model)
    tokens = {part: x for part, x in batch.items() if part != "labels"}
    try:
        loss = model(**batch, use_cache=False).loss
    except Exception:
        loss = mean_loss(model(**tokens, use_cache=False).logits, shifted(batch["labels"]), batch)
    loss.backward()
    return loss.item(), gradient_of(model)


def apart(name: str, world_size: int) -> Results:
    """The loss and the gradient if each rank attended in its own chunk, at its own positions."""
    model = small_model(name)
    batch, total = batch_of(model), 0.0
    for rank in range(world_size):
        at = positions("zigzag", S, rank, world_size)
        tokens = batch["input_ids"][:, at]
        passed = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "position_ids": at[None]}
        loss = mean_loss(model(**passed, use_cache=False).logits, shifted(batch["labels"])[:, at], batch)
        loss.backward()
        total += loss.item()
    return total, gradient_of(model)


def in_the_ring(name: str) -> Results:
    """The loss and the gradient, summed over the ranks."""
    model = small_model(name)
    use_ring(model)
    loss = model(**shard_batch(batch_of(model))).loss
    loss.backward()
    results = torch.cat([loss.detach()[None], gradient_of(model)])
    dist.all_reduce(results)
    return results[0].item(), results[1:]


def on_rank(context: RankContext, step: Callable[..., Results], *args: str | int) -> Results | None:
    """What a process of the pool does. Only rank 0 sends its results back."""
    warnings.simplefilter("ignore")
    with Exactly():
        results = step(*args)
    return results if context.rank == 0 else None


class Processes:
    """One process for what is exact, and a ring."""

    def __init__(self) -> None:
        self.alone, self.ring = Ranks(1, SECONDS), Ranks(max(WORLDS), SECONDS)

    def stop(self) -> None:
        self.alone.stop()
        self.ring.stop()


def outcome(name: str, processes: Processes, worlds: Sequence[int] = WORLDS) -> Outcome:
    """What comes of a model on each of these numbers of ranks: the worst."""
    right = answer(processes.alone, 1, exact, name)
    if isinstance(right, Outcome):
        return Outcome("not buildable", sentence=right.sentence)
    seen = [compared(name, world_size, right, processes) for world_size in worlds]
    return max(seen, key=lambda each: (OUTCOMES.index(each.kind), each.gradient))


def compared(name: str, world_size: int, right: Results, processes: Processes) -> Outcome:
    given = answer(processes.ring, world_size, in_the_ring, name)
    if isinstance(given, Outcome):
        return given
    loss, gradient = errors(given, right)
    if not max(loss, gradient) <= TOLERANCE:
        return Outcome("wrong", loss, gradient)
    other = answer(processes.alone, 1, apart, name, world_size)
    if isinstance(other, Outcome) or not max(errors(other, right)) >= TOLD_APART:
        return Outcome("unproven", loss, gradient)
    return Outcome("equal", loss, gradient)


def answer(ranks: Ranks, world_size: int, step: Callable[..., Results], *args: str | int) -> Results | Outcome:
    """The results of a step, or an Outcome: refused if this package says why on every rank, else crashed."""
    try:
        first, *others = ranks.outcomes(world_size, on_rank, step, *args)
    except LostRank as lost:
        return Outcome("crashed", sentence=last_line(str(lost)))
    raised = [each for each in (first, *others) if isinstance(each, Raised)]
    if not raised:
        return first
    same = len(raised) == world_size and len({each.message for each in raised}) == 1
    ours = all("ringlab" in Path(FILE.findall(each.trace)[-1]).parts for each in raised)
    refused = same and ours and raised[0].kind in ("ValueError", "ImportError")
    kind = "" if refused else f"{raised[0].kind}: "
    return Outcome("refused" if refused else "crashed", sentence=kind + raised[0].message)


FILE = re.compile(r'^  File "(.*)", line', re.MULTILINE)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def errors(given: Results, right: Results) -> tuple[float, float]:
    """Of the loss and of the gradient, in the norm."""
    (loss, gradient), (right_loss, right_gradient) = given, right
    return abs(loss - right_loss) / abs(right_loss), ((gradient - right_gradient).norm() / right_gradient.norm()).item()


def sweep(names: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    processes = Processes()
    try:
        for name in names:
            yield name, outcome(name, processes)
    finally:
        processes.stop()


def said(outcome: Outcome) -> str:
    errors = f"loss {outcome.loss:.0e}, gradient {outcome.gradient:.0e}"
    return " ".join(outcome.sentence.split()) or errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=NAMES, default=NAMES)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    args = parser.parse_args()
    found = {}
    for name, found[name] in sweep(args.only):
        print(f"{found[name].kind:14}{name}: {said(found[name])}", flush=True)
    print(Counter(each.kind for each in found.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
