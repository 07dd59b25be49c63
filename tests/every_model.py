"""The ring in every causal language model of transformers: equal to one process, or refused with a reason.

    exact     the loss and every gradient of a small model with the attention of transformers, on one process
    apart     the same without the ring: each rank attends in its own chunk. It must differ, or nothing is proved
    ring      the same model after use_ring, on 2 and on 3 processes, zigzag; the parts of the ranks are summed

    $ python -m tests.every_model --only llama mistral
    $ python -m tests.every_model --write      all of them, and ringlab/models/EVERY_MODEL.md

All is computed in float64. An outcome is one of MEANING.
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

from ringlab.models.hugging_face import use_ring
from ringlab.models.hugging_face_batch import shard_batch, shifted
from ringlab.models.transformer import IGNORED, summed_loss
from ringlab.support.processes import LostRank, Raised, RankContext, Ranks
from ringlab.training.layouts import positions
from tests.small_models import NAMES, VARIANTS, Exactly, S, batch_of, small_model

TABLE = Path(__file__).parent.parent / "ringlab" / "models" / "EVERY_MODEL.md"
WORLDS = (2, 3)
SECONDS = 120.0  # for one model on the ranks of a ring
TOLERANCE = 1e-10  # of the norm: 24 tokens and a few layers in float64
TOLD_APART = 1e-3
MEANING = {  # the later, the worse
    "equal": "the loss and every gradient are those of one process",
    "refused": "`use_ring` or the first call raises ValueError, with the sentence below, on every rank",
    "not buildable": "transformers does not run the small model on one process",
    "unproven": "equal, but equal without the ring too",
    "crashed": "another error, another error on another rank, or no answer in time",
    "wrong": "the loss or a gradient differs, without an error",
}
OUTCOMES = tuple(MEANING)
PAGE = """# Every causal language model of transformers, in the ring

`python -m tests.every_model --write` writes this page. `make exhaustive` runs it again and compares the outcomes.

Each of the {count} models that AutoModelForCausalLM knows is built small, with random weights: its default config,
shrunk by [one rule](../../tests/small_models.py). Windows and chunks are shorter than the sequence. On one process it
computes its own loss and every gradient with the attention of transformers, in float64. Then `use_ring` gives it the
ring on 2 and on 3 processes. For a model that is equal, the same is done without the ring: each rank attends in its
own chunk. That must differ, else nothing is proved.

| outcome | models | what it means |
|---|---:|---|
{summary}

## Models

The last column has the relative errors, or the sentence of the refusal.

| model | outcome | error or sentence |
|---|---|---|
{models}

## Models with other settings

A default config leaves these out: windows, longer contexts, other layers. A limit of 20 tokens is more than a shard
has, and less than the sequence has.

| model | outcome | error or sentence |
|---|---|---|
{variants}
"""

UNPACKED = "; packed documents: refused, since layers are not told of them"
Results = tuple[float, Tensor, bool]  # the loss, the gradient of all parameters, whether layers take documents


@dataclass(frozen=True)
class Outcome:
    """What came of a model: one of OUTCOMES, its errors, or a sentence."""

    kind: str
    loss: float = 0.0
    gradient: float = 0.0
    sentence: str = ""
    packs: bool = True


def gradient_of(model: PreTrainedModel) -> Tensor:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in weights])


def mean_loss(logits: Tensor, labels: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The sum over these labels, which are shifted, divided by the labels of the batch."""
    return summed_loss(logits, labels) / (shifted(batch["labels"]) != IGNORED).sum()


def exact(name: str) -> Results:
    """The loss of one process: the model's own. Of a model of images it needs images: then the loss of its logits."""
    model = small_model(name)
    batch = batch_of(model)
    tokens = {part: x for part, x in batch.items() if part != "labels"}
    try:
        loss = model(**batch, use_cache=False).loss
    except ValueError:
        loss = mean_loss(model(**tokens, use_cache=False).logits, shifted(batch["labels"]), batch)
    loss.backward()
    return loss.item(), gradient_of(model), True


def apart(name: str, world_size: int) -> Results:
    """The loss and the gradient if each rank attended in its own chunk, at its own positions."""
    model = small_model(name)
    batch, total = batch_of(model), 0.0
    numbered = [part for part in model.modules() if hasattr(part, "create_position_ids_from_input_ids")]
    first = numbered[0].padding_idx + 1 if numbered else 0  # RoBERTa and its kin count from there
    for rank in range(world_size):
        at = positions("zigzag", S, rank, world_size)
        tokens = batch["input_ids"][:, at]
        passed = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "position_ids": first + at[None]}
        loss = mean_loss(model(**passed, use_cache=False).logits, shifted(batch["labels"])[:, at], batch)
        loss.backward()
        total += loss.item()
    return total, gradient_of(model), True


def in_the_ring(name: str) -> Results:
    """The loss and the gradient, summed over the ranks."""
    model = small_model(name)
    use_ring(model)
    loss = model(**shard_batch(batch_of(model))).loss
    loss.backward()
    results = torch.cat([loss.detach()[None], gradient_of(model)])
    dist.all_reduce(results)
    return results[0].item(), results[1:], model.ring[0].packs


def on_rank(context: RankContext, step: Callable[..., Results], *args: str | int) -> Results | None:
    """What a process of the pool does. Only rank 0 sends its results back."""
    warnings.simplefilter("ignore")
    with Exactly():
        results = step(*args)
    return results if context.rank == 0 else None


class Processes:
    """A process by itself, for `exact` and `apart`, and those of a ring. They stay alive from model to model."""

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


def compared(
    name: str, world_size: int, right: Results, processes: Processes, step: Callable[[str], Results] = in_the_ring
) -> Outcome:
    """`step` on the ranks of a ring, beside the `right` results of one process."""
    given = answer(processes.ring, world_size, step, name)
    if isinstance(given, Outcome):
        return given
    loss, gradient = errors(given, right)
    if not max(loss, gradient) <= TOLERANCE:
        return Outcome("wrong", loss, gradient)
    other = answer(processes.alone, 1, apart, name, world_size)
    if isinstance(other, Outcome) or not max(errors(other, right)) >= TOLD_APART:
        return Outcome("unproven", loss, gradient)
    return Outcome("equal", loss, gradient, packs=given[2])


def answer(ranks: Ranks, world_size: int, step: Callable[..., Results], *args: str | int) -> Results | Outcome:
    """The results of a step, or an Outcome: refused if this package says why on every rank, else crashed."""
    try:
        first, *others = ranks.outcomes(world_size, on_rank, step, *args)
    except LostRank as lost:
        return Outcome("crashed", sentence=str(lost).strip().splitlines()[-1])
    raised = [each for each in (first, *others) if isinstance(each, Raised)]
    if not raised:
        return first
    same = len(raised) == world_size and len({each.message for each in raised}) == 1
    files = [re.findall(r'^  File "(.*)", line', each.trace, re.MULTILINE) for each in raised]
    ours = all("ringlab" in Path(of_each[-1]).parts for of_each in files)  # transformers raises ValueError too
    if same and ours and raised[0].kind in ("ValueError", "ImportError"):
        return Outcome("refused", sentence=raised[0].message)
    return Outcome("crashed", sentence=f"{raised[0].kind}: {raised[0].message}")


def errors(given: Results, right: Results) -> tuple[float, float]:
    """Of the loss and of the gradient, in the norm."""
    (loss, gradient, _), (right_loss, right_gradient, _) = given, right
    return abs(loss - right_loss) / abs(right_loss), ((gradient - right_gradient).norm() / right_gradient.norm()).item()


def sweep(names: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    processes = Processes()
    try:
        for name in names:
            yield name, outcome(name, processes)
    finally:
        processes.stop()


def said(outcome: Outcome) -> str:
    errors = f"loss {outcome.loss:.0e}, gradient {outcome.gradient:.0e}{'' if outcome.packs else UNPACKED}"
    return " ".join(outcome.sentence.split()) or errors


def page(found: dict[str, Outcome]) -> str:
    """The committed table, in Markdown."""
    counts = Counter(found[name].kind for name in NAMES)
    summary = [f"| {kind} | {counts[kind]} | {MEANING[kind]} |" for kind in OUTCOMES]
    models = [row(name, found[name], others(name, found)) for name in NAMES]
    variants = [row(name, found[name]) for name in VARIANTS]
    return PAGE.format(
        count=len(NAMES), summary="\n".join(summary), models="\n".join(models), variants="\n".join(variants)
    )


def others(name: str, found: dict[str, Outcome]) -> str:
    """The settings of a model with which another thing becomes of it."""
    own = {variant: found[variant].kind for variant in VARIANTS if variant.startswith(f"{name} ")}
    return "".join(f"; {variant[len(name) + 1 :]}: {kind}" for variant, kind in own.items() if kind != found[name].kind)


def row(name: str, outcome: Outcome, more: str = "") -> str:
    return f"| {name} | {outcome.kind} | {said(outcome).replace('|', chr(92) + '|')}{more} |"


def committed() -> dict[str, str]:
    """{name: outcome} of the committed table."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .* \|$", TABLE.read_text(), re.MULTILINE)
    return {name: kind for name, kind in rows if name in (*NAMES, *VARIANTS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*NAMES, *VARIANTS], default=[*NAMES, *VARIANTS])
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    args = parser.parse_args()
    if args.write and len(args.only) < len(NAMES) + len(VARIANTS):
        parser.error("--write needs all models; expected no --only")
    found = {}
    for name, found[name] in sweep(args.only):
        print(f"{found[name].kind:14}{name}: {said(found[name])}", flush=True)
    print(Counter(each.kind for each in found.values()))
    if args.write:
        TABLE.write_text(page(found))
    return 0 if not {"wrong", "crashed", "unproven"} & {each.kind for each in found.values()} else 1


if __name__ == "__main__":
    sys.exit(main())
