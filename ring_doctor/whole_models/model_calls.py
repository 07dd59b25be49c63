"""Asking: how the doctor calls a training step of a whole model, and what it keeps of the results.

    patient.ask(P)                  ->  what each of P ranks returned, or a sentence that says why they did not
    patient.alone(targets, at)      ->  what one process returned with these labels and positions, or a sentence

Shapes: text (B, S + 1), targets (B, S), positions (S,); a loss () or (B, S), of a rank (B, C).

Before: asking/examination.py, an attention by itself. After: model_mistakes.py, which calls with what is wrong.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_doctor.asking.case import positions
from ring_doctor.asking.job import START, CannotExamine
from ringlab.support.processes import LostRank, Raised, RankContext, Ranks

Step = Callable[..., tuple[Tensor, dict[str, Tensor]]]
EXPECTED = "expected (loss, gradients): a tensor, and a dict of the gradient of each weight by its name"
DROPOUT = (
    "the function drops numbers at random ({}): other processes draw other masks, so right results differ; "
    "expected dropout of 0, for example by model.eval(). Whether the masks of the ranks differ, as they must, cannot "
    "be examined: the doctor gives all ranks the same seed"
)


@dataclass(frozen=True)
class Returned:
    """What the step returned on a rank, or what it would return on all: float64, on the CPU."""

    loss: Tensor  # (), or (B, S): the losses of the tokens of all ranks in the order of the text
    gradients: dict[str, Tensor]
    dtypes: frozenset[torch.dtype]

    @property
    def numbers(self) -> dict[str, Tensor]:
        """The loss and the gradients, by what they are in words."""
        return {"the loss": self.loss} | {f"the gradient of {name}": x for name, x in self.gradients.items()}


class NotAResult(Exception):
    """The step returned something else than (loss, gradients), or what cannot be compared."""


@dataclass
class ModelPatient:
    """A step, the text with which it is called, and the processes that call it."""

    step: Step
    text: Tensor  # (B, S + 1)
    layout: str
    seed: int
    ranks: Ranks
    takes: frozenset[str]  # which of the options positions= and targets= it has: `options_of`
    seconds: float  # for a call on several ranks, beside the time of the first call: see `ask`
    first: float = 0.0  # seconds that the first call on one process took

    @property
    def seq_len(self) -> int:
        return self.text.shape[1] - 1

    @property
    def labels(self) -> Tensor:
        """(B, S): for each token the next one."""
        return self.text[:, 1:]

    def shards(self, world_size: int, layout: str | None = None) -> list[Tensor]:
        """For each rank the positions (C,) of its tokens."""
        return [positions(layout or self.layout, self.seq_len, rank, world_size) for rank in range(world_size)]

    def ask(self, world_size: int, text: Tensor | None = None, **options: Tensor) -> list[Returned] | str:
        """What each rank returned, or why there is no result. CannotExamine is raised when one process hangs or dies.

        A call may take `seconds`, and P times the first call on one process: compilers and imports need that.
        """
        alone = world_size == 1
        self.ranks.seconds = max(START, self.seconds) if alone else self.seconds + world_size * self.first
        began, text = time.monotonic(), self.text if text is None else text
        try:
            results = self.ranks.outcomes(world_size, _call, self.step, text, options, self.seed)
        except LostRank as lost:
            if alone:
                raise CannotExamine(f"on one process, {lost.reason}; expected it to return") from lost
            causes = {rank: error for rank, error in lost.raised.items() if not error.lost_connection}
            said = [f"on rank {rank}, {_why(error)}" for rank, error in causes.items()][:1]
            return "; ".join([*said, lost.reason])
        self.first = self.first or time.monotonic() - began
        raised = [(rank, result) for rank, result in enumerate(results) if isinstance(result, Raised)]
        if raised:  # the first rank that failed; the others then lost their connections to it
            rank, first = min(raised, key=lambda each: each[1].lost_connection)
            return f"{'on one process' if alone else f'on rank {rank}'}, {_why(first)}"
        if all(result.loss.dim() for result in results):
            at = [positions(self.layout, text.shape[1] - 1, rank, world_size) for rank in range(world_size)]
            loss = torch.cat([result.loss for result in results], dim=1)[:, torch.cat(at).argsort()]
            results = [replace(result, loss=loss) for result in results]
        return results

    def alone(
        self, targets: Tensor | None = None, at: Tensor | None = None, text: Tensor | None = None
    ) -> Returned | str:
        """What one process returned with these labels and positions, as far as the step takes them, or why it did not.

        Without them it gets the right ones.
        """
        given = {"targets": self.labels if targets is None else targets}
        given["positions"] = torch.arange(self.seq_len) if at is None else at
        found = self.ask(1, text, **{name: given[name] for name in given if name in self.takes})
        return found if isinstance(found, str) else found[0]

    def must(self, targets: Tensor | None = None) -> Returned:
        """What one process returned. Raises CannotExamine where it did not."""
        found = self.alone(targets)
        if isinstance(found, str):
            raise CannotExamine(found)
        return found


def options_of(step: Step) -> frozenset[str]:
    """Which of positions= and targets= the step takes. Raises ValueError when it cannot be called with a text alone."""
    try:
        signature = inspect.signature(step)
        signature.bind(None)
    except (TypeError, ValueError) as error:
        given = f"{getattr(step, '__name__', step)!s} cannot be called with a text alone ({error})"
        raise ValueError(f"{given}; expected step(text, *, positions=None, targets=None)") from error
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return frozenset(name for name in ("positions", "targets") if anything or name in signature.parameters)


def _why(raised: Raised) -> str:
    """What was raised and in which line of the user's code."""
    lines = raised.message.strip().splitlines()
    if raised.kind == NotAResult.__name__:
        return lines[0]
    said = f"the function raised {raised.kind}" + (f": {lines[-1]}" if lines else "")
    return said + (f" ({raised.where})" if raised.where else "")


class _NoDropout(TorchDispatchMode):
    """Raises NotAResult where an operation drops numbers at random."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; else the rank would import the compiler, for seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        given = {argument.name: value for argument, value in zip(function._schema.arguments, args, strict=False)}
        if "bernoulli" in name or name == "native_dropout" or {**given, **(kwargs or {})}.get("dropout_p"):
            raise NotAResult(DROPOUT.format(name))
        return function(*args, **(kwargs or {}))


def without_dropout(step: Step, text: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The step, which raises where it drops numbers at random."""
    with _NoDropout():
        return step(text)


def _call(context: RankContext, step: Step, text: Tensor, options: dict[str, Tensor], seed: int) -> Returned:
    """What the step returns on this rank. Raises NotAResult when it is not (loss, gradients)."""
    torch.manual_seed(seed)
    result = step(text.to(context.device), **{name: value.to(context.device) for name, value in options.items()})
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict) or not result[1]:
        raise NotAResult(f"the function returned {type(result).__name__}; {EXPECTED}")
    for name, gradient in result[1].items():
        if not isinstance(gradient, Tensor):
            raise NotAResult(f"the gradient of {name} is {gradient!r:.60}; {EXPECTED}")
    loss, shape = torch.as_tensor(result[0]).detach(), (len(text), (text.shape[1] - 1) // context.world_size)
    if loss.dim() and loss.shape != shape:
        expected = f"a number, or a loss for each token of the rank, (B, C) = {shape}"
        raise NotAResult(f"the loss has shape {tuple(loss.shape)}; expected {expected}")
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in result[1].items()}
    dtypes = frozenset(x.dtype for x in (loss, *whole.values()) if x.is_floating_point())
    return Returned(loss.double().cpu(), {name: x.detach().double().cpu() for name, x in whole.items()}, dtypes)
