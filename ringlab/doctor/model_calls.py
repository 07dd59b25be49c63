"""How the doctor calls a training step of a whole model, and what it keeps of the results.

    patient.on_one_process(calls)    ->  what the step returned, call by call
    patient.on_ranks(P, call)        ->  what the step returned on each rank, or a sentence that says why it failed

Shapes: text (B, S + 1), targets (B, S), positions (S,); a loss () or (B, C).

Before: examination.py, an attention by itself. After: model_patterns.py.
Source: none.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringlab.doctor.case import positions
from ringlab.support.pool import LostRank, Raised, Ranks
from ringlab.support.processes import RankContext

Step = Callable[..., tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Call:
    """The inputs of one call of the step."""

    text: Tensor  # (B, S + 1)
    options: dict[str, Tensor]  # positions and targets, if they are given


@dataclass(frozen=True)
class Returned:
    """What the step returned on a rank, or what it would return on all: float64, on the CPU."""

    loss: Tensor  # (), or (B, C) of a rank, or (B, S)
    gradients: dict[str, Tensor]
    dtypes: frozenset[torch.dtype]


@dataclass(frozen=True)
class ModelPatient:
    """A step, the text with which it is called, and the processes that call it."""

    step: Step
    text: Tensor  # (B, S + 1)
    layout: str
    seed: int
    ranks: Ranks
    takes: frozenset[str]  # which of the options positions= and targets= it has: `options_of`

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

    def call(self, text: Tensor, targets: Tensor, at: Tensor) -> Call:
        """A call with those of the labels and positions that the step takes."""
        given = {"targets": targets, "positions": at}
        return Call(text, {name: given[name] for name in given if name in self.takes})

    def on_one_process(self, calls: list[Call]) -> list[Returned]:
        """What the step returns, call by call. Raises ValueError when it fails."""
        try:
            [results] = self._on_each(1, calls)
        except LostRank as lost:
            raise ValueError(f"on one process, {str(lost).splitlines()[0]}; expected it to return") from lost
        if isinstance(results, Raised):
            ours = results.kind == "ValueError"
            raise ValueError(results.message if ours else f"on one process, {_reason(results)}; expected it to return")
        return results

    def on_ranks(self, world_size: int, call: Call) -> list[Returned] | str:
        """What each rank returned, or why there is no result."""
        try:
            results = self._on_each(world_size, [call])
        except LostRank as lost:
            return str(lost).splitlines()[0]
        raised = [(rank, result) for rank, result in enumerate(results) if isinstance(result, Raised)]
        if raised:  # the first rank that failed; the others then lost their connections to it
            rank, first = min(raised, key=lambda each: each[1].kind in ("RuntimeError", "DistBackendError"))
            return f"on rank {rank}, {_reason(first)}"
        return [result for [result] in results]

    def _on_each(self, world_size: int, calls: list[Call]) -> list[Any]:
        """By rank: what the step returned, call by call, or Raised. Raises LostRank."""
        return self.ranks.outcomes(world_size, _call_all, self.step, calls, self.seed)


def options_of(step: Step) -> frozenset[str]:
    """Which of positions= and targets= the step takes. Raises ValueError when it cannot be called with a text alone."""
    try:
        parameters = inspect.signature(step).parameters.values()
        inspect.signature(step).bind(None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{getattr(step, '__name__', step)!s} cannot be called with a text alone ({error}); expected "
            f"step(text, *, positions=None, targets=None)"
        ) from error
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return frozenset(name for name in ("positions", "targets") if anything or name in names)


def _reason(raised: Raised) -> str:
    lines = raised.message.strip().splitlines()
    return f"the function raised {raised.kind}" + (f": {lines[-1]}" if lines else "")


def _call_all(context: RankContext, step: Step, calls: list[Call], seed: int) -> list[Returned]:
    """What the step returns on this rank, call by call."""
    results = []
    for call in calls:
        torch.manual_seed(seed)
        options = {name: value.to(context.device) for name, value in call.options.items()}
        results.append(_checked(step(call.text.to(context.device), **options), call.text, context.world_size))
    return results


def _checked(result: Any, text: Tensor, world_size: int) -> Returned:
    """The result of the step. Raises ValueError when it is not (loss, gradients)."""
    expected = "expected (loss, gradients): a tensor, and a dict of the gradient of each weight by its name"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict) or not result[1]:
        raise ValueError(f"the function returned {type(result).__name__}; {expected}")
    for name, gradient in result[1].items():
        if not isinstance(gradient, Tensor):
            raise ValueError(f"the gradient of {name} is {gradient!r:.60}; {expected}")
    loss, C = torch.as_tensor(result[0]).detach(), (text.shape[1] - 1) // world_size
    if loss.dim() and loss.shape != (len(text), C):
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}; expected a number, or a loss for each token of the rank, "
            f"(B, C) = {(len(text), C)}"
        )
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in result[1].items()}
    gradients = {name: x.detach().double().cpu() for name, x in whole.items()}
    dtypes = frozenset(x.dtype for x in (loss, *whole.values()) if x.is_floating_point())
    return Returned(loss.double().cpu(), gradients, dtypes)
