"""Try a ring that was written in a notebook cell on real processes, with a time limit.

A function of a notebook cell cannot be sent to another process. Its source can: each rank runs the functions, imports
and constants of the function's cell again, in a namespace that already has `NAMES`. `watch_ring` also counts what each
rank sent and received, by whichever function of torch.distributed.
"""

import ast
import functools
import inspect
import linecache
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import finish, merge, start, update
from ringlab.support.processes import RankContext, launch

NAMES = {
    "torch": torch,
    "dist": dist,
    "math": math,
    "start": start,
    "update": update,
    "attend": attend,
    "finish": finish,
    "merge": merge,
}
SECONDS = 5.0  # a right ring on a few tokens needs some milliseconds
CELL = "<your cell>"  # the file name of the cell's code on the ranks
SHAPE = (2, 2, 4)  # B, H, D


class RingFailed(Exception):
    """A rank failed or was still waiting after the time limit; the message says which, and in which line."""


@dataclass(frozen=True)
class Message:
    """A call of torch.distributed on one rank."""

    operation: str  # "send", "recv" or a collective, such as "allgather"
    peer: int | None  # the rank that it is sent to or comes from; None: a collective, or from any rank
    bytes: int  # of the tensors that are sent or received


@dataclass(frozen=True)
class Ran:
    """What one rank returned and did."""

    out: Any
    messages: list[Message]  # in their order
    held: int  # bytes of all tensors that received a message and were in memory at once, at most


class _Watch:
    """Notes the messages of this process, and which received tensors are still alive.

    Whatever function of torch.distributed is called, a method of ProcessGroup moves the tensors.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.received: dict[int, tuple[StorageWeakRef, int]] = {}
        self.held = 0
        for name, method in inspect.getmembers(dist.ProcessGroup, callable):
            if not name.startswith("__"):
                setattr(dist.ProcessGroup, name, self._noted(name.strip("_"), method))

    def _noted(self, operation: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            if tensors := [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]:
                peer = dist.get_global_rank(group, args[1]) if operation in ("send", "recv") else None
                self.messages.append(Message(operation, peer, sum(x.nbytes for x in tensors)))
                if operation in ("recv", "recv_anysource"):
                    self._hold(tensors)
            return method(group, *args, **options)

        return call

    def _hold(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            storage = x.untyped_storage()
            self.received[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.received = {key: (ref, size) for key, (ref, size) in self.received.items() if not ref.expired()}
        self.held = max(self.held, sum(size for _, size in self.received.values()))


def whole_input(seq_len: int, seed: int = 0, shape: tuple[int, int, int] = SHAPE) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, S, D) in float64, the same on every rank. They are transposed views, as in a model."""
    generator, (B, H, D) = torch.Generator().manual_seed(seed), shape
    q, k, v = 2 * torch.randn(3, B, seq_len, H, D, dtype=torch.float64, generator=generator)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def try_ring(ring: Callable[..., Any], lengths: list[int], *, seconds: float | None = None) -> list[Any]:
    """Call ring(q, k, v, lengths) on len(lengths) processes and return what each of them returned, as `watch_ring`."""
    return [ran.out for ran in watch_ring(ring, lengths, seconds=seconds)]


def watch_ring(
    ring: Callable[..., Any],
    lengths: list[int],
    *,
    seconds: float | None = None,
    seed: int = 0,
    shape: tuple[int, int, int] = SHAPE,
) -> list[Ran]:
    """Call ring(q, k, v, lengths) on len(lengths) processes; what each of them returned, its messages and its memory.

    Rank i has lengths[i] tokens of `whole_input`. Raises RingFailed when a rank fails, or waits longer than `seconds`
    (None: SECONDS).
    """
    ring = inspect.unwrap(ring)
    code = getattr(ring, "__code__", None)
    source = "".join(linecache.getlines(code.co_filename)) if code else ""
    if not source or ring.__name__ == "<lambda>" or ring.__qualname__ != ring.__name__:
        raise RingFailed(
            "the source of your function is not known: define it with def at the left margin, in a cell without %%magic"
        )
    seconds = SECONDS if seconds is None else seconds
    with tempfile.TemporaryDirectory() as folder:
        try:
            arguments = source, ring.__name__, lengths, seconds, Path(folder), seed, shape
            return launch(_run, len(lengths), *arguments, device="cpu")
        except (ValueError, RuntimeError) as error:
            reason = str(error)
            if waiting := sorted(Path(folder).iterdir()):  # a file for each rank: the line in which it waits
                lines = {path.name: path.read_text() for path in waiting}
                reason = f"still waiting after {seconds:g} s"
                for line in sorted(set(lines.values())):
                    reason += f"; rank {', '.join(rank for rank in lines if lines[rank] == line)} in: {line}"
            raise RingFailed(f"P = {len(lengths)}, chunks of {lengths} tokens: {reason}") from error


def to_a_rank(move: Callable[..., Any], world_size: int) -> Callable[..., Any]:
    """dist.send or dist.recv, for a rank that exists: with another number, gloo crashes or waits."""
    parameters = inspect.signature(move)

    @functools.wraps(move)
    def checked(*args: Any, **options: Any) -> Any:
        given = parameters.bind(*args, **options).arguments
        rank = given.get("dst", given.get("src"))
        if rank is not None and not 0 <= rank < world_size:
            raise ValueError(f"there is no rank {rank}; rank {world_size - 1} has rank 0 as its next: (rank + 1) % P")
        return move(*args, **options)

    return checked


def _run_cell(source: str) -> dict[str, Any]:
    """The names of a cell: what its imports, definitions and constants (assignments that call nothing) bind."""
    names = dict(NAMES)
    for node in ast.parse(source).body:
        constant = isinstance(node, ast.Assign) and not any(isinstance(part, ast.Call) for part in ast.walk(node))
        if constant or isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            # A constant may need a name of another cell, and a function may not need that constant.
            with suppress(NameError) if constant else nullcontext():
                exec(compile(ast.Module([node], []), CELL, "exec"), names)
    return names


def _run(
    context: RankContext,
    source: str,
    name: str,
    lengths: list[int],
    seconds: float,
    folder: Path,
    seed: int,
    shape: tuple[int, int, int],
) -> Ran:
    """One rank. The ring runs in a thread of its own, so that this one can see that it waits."""
    dist.send, dist.recv = (to_a_rank(move, context.world_size) for move in (dist.send, dist.recv))
    names = _run_cell(source)
    q, k, v = (x.split(lengths, dim=2)[context.rank] for x in whole_input(sum(lengths), seed, shape))
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(names[name](q, k, v, lengths))
        except BaseException as error:  # SystemExit too
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    dist.barrier()  # all ranks are here: the time begins
    watch = _Watch()
    thread.start()
    thread.join(seconds)
    lines = source.splitlines()
    if not outcome:
        frame, inside = sys._current_frames()[thread.ident], []
        while frame.f_code.co_filename != CELL:
            inside.append(frame.f_code.co_name)
            frame = frame.f_back
        line = lines[frame.f_lineno - 1].strip()
        if "send" in line and "recv" in line:  # which of the two?
            line += f" (it waits in {'send' if 'send' in inside else 'recv'})"
        (folder / str(context.rank)).write_text(line)
        time.sleep(0.3)  # the first rank that raises ends the others, so let them write their line too
        raise ValueError("waits")
    if isinstance(outcome[0], BaseException):
        trace, line = outcome[0].__traceback__, 1
        while trace is not None:  # the last line of the cell on the way to the error
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == CELL else line
            trace = trace.tb_next
        kind = type(outcome[0]).__name__
        raise ValueError(f"rank {context.rank} ends in {kind}: {outcome[0]}, in: {lines[line - 1].strip()}")
    try:  # a rank that ends closes its connections, and its neighbours may still need them
        dist.monitored_barrier(timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise ValueError(
            "the ranks have ended, and their messages have not: wait() for each isend and irecv"
        ) from error
    return Ran(outcome[0], watch.messages, watch.held)
