"""Asking: how the doctor calls a training step of a whole model, and what it keeps of the results.

    patient.on_one_process(calls)    ->  for each call what the step returned, or None where it raised
    patient.on_ranks(P, calls)       ->  for each call what each rank returned, or a sentence that says why it failed
    patient.draws()                  ->  the operations of dropout that the step calls, by name

Shapes: text (B, S + 1), targets (B, S), positions (S,); a loss () or (B, C).

Before: examination.py, an attention by itself. After: mistakes_of_models.py, which calls with what is wrong.
"""

import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_doctor.case import positions
from ring_doctor.job import START, CannotExamine
from ringlab.support.processes import LostRank, Raised, RankContext, Ranks

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


class NotAResult(Exception):
    """The step returned something else than (loss, gradients)."""


@dataclass
class ModelPatient:
    """A step, the text with which it is called, and the processes that call it."""

    step: Step
    text: Tensor  # (B, S + 1)
    layout: str
    seed: int
    ranks: Ranks
    takes: frozenset[str]  # which of the options positions= and targets= it has: `options_of`
    seconds: float  # for a call on several ranks, beside the time of the first call: see `on_ranks`
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

    def call(self, text: Tensor, targets: Tensor, at: Tensor) -> Call:
        """A call with those of the labels and positions that the step takes."""
        given = {"targets": targets, "positions": at}
        return Call(text, {name: given[name] for name in given if name in self.takes})

    def on_one_process(self, calls: list[Call], *, required: bool = False) -> list[Returned | None]:
        """For each call what the step returns, or None where it raises; if it is `required`, CannotExamine is raised.

        CannotExamine is also raised when the process hangs or dies.
        """
        began = time.monotonic()
        results = self._alone(calls)
        self.first = self.first or time.monotonic() - began
        raised = [result for result in results if isinstance(result, Raised)]
        if raised and required:
            ours = raised[0].kind == NotAResult.__name__
            raise CannotExamine(_why(raised[0]) if ours else _alone(_why(raised[0])))
        return [None if isinstance(result, Raised) else result for result in results]

    def on_ranks(self, world_size: int, calls: list[Call]) -> list[list[Returned]] | str:
        """For each call what each rank returned, or why there is no result.

        A call may take `seconds`, and P times the first call on one process: compilers and imports need that.
        """
        self.ranks.seconds = len(calls) * self.seconds + world_size * self.first
        try:
            results = self.ranks.outcomes(world_size, _call_all, self.step, calls, self.seed)
        except LostRank as lost:
            return lost.reason
        raised = [(rank, result) for rank, result in enumerate(results) if isinstance(result, Raised)]
        if raised:  # the first rank that failed; the others then lost their connections to it
            rank, first = min(raised, key=lambda each: each[1].lost_connection)
            return f"on rank {rank}, {_why(first)}"
        return [list(of_call) for of_call in zip(*results, strict=True)]

    def draws(self) -> list[str]:
        """The operations of dropout that the step calls, by name."""
        return self._alone([Call(self.text, {})], watch=True)[0]

    def _alone(self, calls: list[Call], *, watch: bool = False) -> list[Any]:
        """Call by call what the step returned on one process, or Raised. Raises CannotExamine when it hangs or dies."""
        self.ranks.seconds = max(START, len(calls) * self.seconds)
        try:
            [results] = self.ranks.outcomes(1, _call_all, self.step, calls, self.seed, watch)
        except LostRank as lost:
            raise CannotExamine(_alone(lost.reason)) from lost
        if isinstance(results, Raised):
            raise CannotExamine(_alone(_why(results)))
        return results


def options_of(step: Step) -> frozenset[str]:
    """Which of positions= and targets= the step takes. Raises ValueError when it cannot be called with a text alone."""
    try:
        signature = inspect.signature(step)
        signature.bind(None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{getattr(step, '__name__', step)!s} cannot be called with a text alone ({error}); expected "
            f"step(text, *, positions=None, targets=None)"
        ) from error
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return frozenset(name for name in ("positions", "targets") if anything or name in signature.parameters)


def _alone(said: str) -> str:
    return f"on one process, {said}; expected it to return"


def _why(raised: Raised) -> str:
    """What was raised and in which line of the user's code."""
    lines = raised.message.strip().splitlines()
    if raised.kind == NotAResult.__name__:
        return lines[0]
    said = f"the function raised {raised.kind}" + (f": {lines[-1]}" if lines else "")
    return said + (f" ({raised.where})" if raised.where else "")


class _Draws(TorchDispatchMode):
    """Notes the operations of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; else each rank would import the compiler, for seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        given = {argument.name: value for argument, value in zip(function._schema.arguments, args, strict=False)}
        if "bernoulli" in name or name == "native_dropout" or {**given, **(kwargs or {})}.get("dropout_p"):
            self.names.setdefault(name)
        return function(*args, **(kwargs or {}))


def _call_all(context: RankContext, step: Step, calls: list[Call], seed: int, watch: bool = False) -> list[Any]:
    """Call by call what the step returns on this rank; on one process, Raised where it raises.

    With `watch`, the names of its operations of dropout.
    """
    results: list[Any] = []
    for call in calls:
        torch.manual_seed(seed)
        options = {name: value.to(context.device) for name, value in call.options.items()}
        try:
            with _Draws() if watch else nullcontext() as draws:
                result = step(call.text.to(context.device), **options)
            results.append(list(draws.names) if draws else _checked(result, call.text, context.world_size))
        except Exception as error:
            if context.world_size > 1:  # the other ranks may be in another call
                raise
            results.append(Raised.of(error))
    return results


def _checked(result: Any, text: Tensor, world_size: int) -> Returned:
    """The result of the step. Raises NotAResult when it is not (loss, gradients)."""
    expected = "expected (loss, gradients): a tensor, and a dict of the gradient of each weight by its name"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict) or not result[1]:
        raise NotAResult(f"the function returned {type(result).__name__}; {expected}")
    for name, gradient in result[1].items():
        if not isinstance(gradient, Tensor):
            raise NotAResult(f"the gradient of {name} is {gradient!r:.60}; {expected}")
    loss, shape = torch.as_tensor(result[0]).detach(), (len(text), (text.shape[1] - 1) // world_size)
    if loss.dim() and loss.shape != shape:
        raise NotAResult(
            f"the loss has shape {tuple(loss.shape)}; expected a number, or a loss for each token of the rank, "
            f"(B, C) = {shape}"
        )
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in result[1].items()}
    dtypes = frozenset(x.dtype for x in (loss, *whole.values()) if x.is_floating_point())
    return Returned(loss.double().cpu(), {name: x.detach().double().cpu() for name, x in whole.items()}, dtypes)
