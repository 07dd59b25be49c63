"""Try a ring that was written in a notebook cell on real processes, with a time limit.

A function of a notebook cell cannot be sent to another process. Its source can: each rank runs the statements of the
function's cell again, in a namespace that already has `NAMES`. `watch_ring` also counts what each rank sent and
received, by whichever function of torch.distributed, and what it held in memory.
"""

import __future__

import ast
import functools
import inspect
import io
import json
import linecache
import math
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import finish, merge, start, update
from ringlab.support.messages import Message
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
LONG = 1000  # then scores are some thousands, and their exp is inf or 0


@dataclass(frozen=True)
class Waiting:
    """Where a rank was when the time was up."""

    line: str  # of the cell
    operation: str  # that it waited for: "send", "recv" or a collective; "": none, it was computing
    peer: int | None  # as in Message
    unwaited: int  # how many of its sends have been posted, and nobody has waited for them


class RingFailed(Exception):
    """A rank failed or was still waiting after the time limit; the message says which, and in which line."""

    def __init__(self, reason: str, waiting: dict[int, Waiting] | None = None, ended: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.waiting, self.ended = waiting or {}, ended  # by rank; ranks that had returned


@dataclass(frozen=True)
class Ran:
    """What one rank returned and did."""

    out: Any
    messages: Counter[Message]  # and how many of each
    held: int  # bytes of all tensors, arrays and lists beside its inputs, when a message began, at most


class LiveTensors(TorchFunctionMode):
    """Counts the bytes of all tensors that a thread has made or used and that are alive, but for the inputs."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._inputs = [StorageWeakRef(x.untyped_storage()) for x in inputs if isinstance(x, Tensor)]
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((result, args, kwargs)):  # a tensor that was made elsewhere shows when it is used
            if isinstance(x, Tensor):
                storage = StorageWeakRef(x.untyped_storage())
                if storage not in self._inputs:
                    self._alive[storage.cdata] = storage, x.untyped_storage().nbytes()
        return result

    def look(self, more: int = 0) -> None:
        """Keep the largest sum so far, of the tensors and `more` bytes."""
        self._alive = {key: (it, size) for key, (it, size) in self._alive.items() if not it.expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()) + more)


class _Watch:
    """Notes the messages of this process, what it holds when a message begins, and for which message it waits.

    Whatever function of torch.distributed is called, a method of ProcessGroup moves the tensors, and its Work waits.
    """

    def __init__(self, memory: LiveTensors) -> None:
        self.memory, self.messages = memory, Counter[Message]()
        self.now: Message | None = None  # what this rank waits for
        self._works: dict[int, Message] = {}  # by the id of a Work
        self._sends_waited = 0
        for name, method in inspect.getmembers(dist.ProcessGroup, callable):
            if not name.startswith("__"):
                setattr(dist.ProcessGroup, name, self._noted(name.strip("_"), method))
        dist.Work.wait = self._waited(dist.Work.wait)

    @property
    def unwaited(self) -> int:
        return sum(count for it, count in self.messages.items() if it.kind == "send") - self._sends_waited

    def _noted(self, operation: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            peer = args[1] if operation in ("send", "recv") else None
            if peer is not None and not 0 <= peer < group.size():  # gloo crashes or waits
                last = group.size() - 1
                raise ValueError(f"there is no rank {peer}; rank {last} has rank 0 as its next: (rank + 1) % P")
            tensors = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
            self.now = message = Message(operation, peer, sum(x.nbytes for x in tensors))
            if tensors:
                self.messages[message] += 1
                self.look()
            work = method(group, *args, **options)
            self.now = None
            self._works[id(work)] = message
            return work

        return call

    def _waited(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def call(work: dist.Work, *args: Any, **options: Any) -> Any:
            self.now = self._works.pop(id(work), None)
            if self.now and self.now.kind == "send":
                self._sends_waited += 1
            done = wait(work, *args, **options)
            self.now = None
            return done

        return call

    def look(self) -> None:
        self.memory.look(tracemalloc.get_traced_memory()[0])  # arrays of numpy, and lists


def whole_input(
    seq_len: int, seed: int = 0, shape: tuple[int, int, int] = SHAPE, long: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, S, D) in float64, the same on every rank. They are transposed views, as in a model.

    `long`: every other query is LONG times as long. Its scores are all positive, or all negative.
    """
    generator, (B, H, D) = torch.Generator().manual_seed(seed), shape
    q, k, v = 2 * torch.randn(3, B, seq_len, H, D, dtype=torch.float64, generator=generator)
    if long:
        k[..., 0] = 16 * D**0.5  # larger than the rest of a score
        q[:, ::4, :, 0], q[:, 2::4, :, 0] = 2.0, -2.0
        q[:, ::2] *= LONG
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def chunk_of(x: Tensor, lengths: list[int], rank: int) -> Tensor:
    """A rank's tokens of x (B, H, S, D), a transposed view of memory of its own: a part of x would bring all of x."""
    return x.transpose(1, 2).split(lengths, dim=1)[rank].clone(memory_format=torch.contiguous_format).transpose(1, 2)


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
    long: bool = False,
) -> list[Ran]:
    """Call ring(q, k, v, lengths) on len(lengths) processes; what each of them returned, its messages and its memory.

    Rank i has lengths[i] tokens of `whole_input`. Raises RingFailed when a rank fails, or waits longer than `seconds`
    (None: SECONDS).
    """
    try:
        cell = cell_of(ring)
    except ValueError as error:
        raise RingFailed(str(error)) from None
    seconds = SECONDS if seconds is None else seconds
    with tempfile.TemporaryDirectory() as folder:
        try:
            arguments = cell, lengths, seconds, Path(folder), seed, shape, long
            return launch(_run, len(lengths), *arguments, device="cpu")
        except (ValueError, RuntimeError) as error:
            reason = str(error)
            files = sorted(Path(folder).iterdir())  # one for each rank that waits, or has ended
            ended = [int(path.stem) for path in files if path.suffix]
            waiting = {int(path.name): Waiting(**json.loads(path.read_text())) for path in files if not path.suffix}
            if waiting and not reason.startswith("rank "):  # no rank has failed before
                reason = f"still waiting after {seconds:g} s"
                for line in sorted({it.line for it in waiting.values()}):
                    ranks = ", ".join(str(rank) for rank, it in waiting.items() if it.line == line)
                    reason += f"; rank {ranks} in: {line}"
            raise RingFailed(f"P = {len(lengths)}, chunks of {lengths} tokens: {reason}", waiting, ended) from error


_on_a_rank = False  # whether a cell is being run again


@dataclass(frozen=True)
class Cell:
    """Where a function was made."""

    source: str  # of the cell, up to the call of the check if that is in the cell too
    name: str  # of the function there
    line: int  # where its own code begins

    def function(self, names: dict[str, Any]) -> Callable[..., Any]:
        """Run the cell again in the namespace `names`. Raises ValueError when the name has another function there."""
        run_cell(self.source, self.name, names)
        if inspect.unwrap(names[self.name]).__code__.co_firstlineno != self.line:
            raise ValueError(f"the cell has more than one {self.name}: give each function its own name")
        return names[self.name]


def cell_of(function: Any) -> Cell:
    """The cell in which a function was made, by def or lambda, as it was when the check was called.

    Raises ValueError when it has no source or no name there, and on a rank: the call of the check may be in the cell.
    """
    if _on_a_rank:
        raise ValueError("a rank starts no ranks")
    function = inspect.unwrap(function)
    source = run_so_far(function.__code__.co_filename) if inspect.isfunction(function) else ""
    names = [name for name, it in getattr(function, "__globals__", {}).items() if it is function and name != "_"]
    names += [function.__name__] if source and function.__qualname__ == function.__name__ else []
    names = [name for name in names if source and name in bound(ast.parse(source))]
    if not names:
        raise ValueError(
            "the source of your function is not known: define it with def at the left margin, in a cell without %%magic"
        )
    return Cell(source, names[0], function.__code__.co_firstlineno)


def run_so_far(file: str) -> str:
    """The source of a cell. If the call is in it, what is below the call is left out: it has not been run."""
    source, frame = "".join(linecache.getlines(file)), sys._getframe()
    while frame and (frame.f_code.co_filename, frame.f_code.co_name) != (file, "<module>"):
        frame = frame.f_back
    if not source or not frame:
        return source
    ends = [node.end_lineno for node in ast.parse(source).body if node.lineno <= frame.f_lineno]
    return "".join(source.splitlines(keepends=True)[: ends[-1]])


def bound(tree: ast.AST) -> set[str]:
    """The names that a cell or a statement binds, at any depth."""
    nodes = list(ast.walk(tree))
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def run_cell(source: str, name: str, names: dict[str, Any]) -> None:
    """Run the statements of a cell again, and bind their names in `names`: the function `name` and what it needs.

    A statement may need a name of another cell, as one that calls the check does. Then it is left out, if it defines
    nothing: the function may not need it. Annotations are not evaluated.
    """
    global _on_a_rank
    names["__name__"] = "__main__"
    for node in ast.parse(source).body:
        _on_a_rank = True
        try:
            with redirect_stdout(io.StringIO()):
                flags = __future__.annotations.compiler_flag
                exec(compile(ast.Module([node], []), CELL, "exec", flags=flags), names)
        except Exception:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom) or name in bound(node):
                raise
        finally:
            _on_a_rank = False


def line_of(error: BaseException) -> int:
    """The last line of the cell on the way to an error; 0: none."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == CELL else line
        trace = trace.tb_next
    return line


def line_now(frame: FrameType | None, lines: Sequence[str]) -> str:
    """The line of the cell in which this frame, or one that called it, is; "": in none."""
    while frame and frame.f_code.co_filename != CELL:
        frame = frame.f_back
    return lines[frame.f_lineno - 1].strip() if frame else ""


def _run(
    context: RankContext,
    cell: Cell,
    lengths: list[int],
    seconds: float,
    folder: Path,
    seed: int,
    shape: tuple[int, int, int],
    long: bool,
) -> Ran:
    """One rank. The ring runs in a thread of its own, so that this one can see that it waits."""
    q, k, v = (chunk_of(x, lengths, context.rank) for x in whole_input(sum(lengths), seed, shape, long))
    watch = _Watch(LiveTensors((q, k, v)))
    ring = cell.function(dict(NAMES))
    outcome: list[Any] = []
    dist.barrier()  # all ranks are here: the time begins

    def call() -> None:
        try:
            with watch.memory:
                out = ring(q, k, v, lengths)
                watch.look()
            outcome.append(out)
        except BaseException as error:  # SystemExit too
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    tracemalloc.start()  # never stopped: while gloo's threads work, Python 3.11 crashes in stop()
    thread.start()
    thread.join(seconds)
    lines = cell.source.splitlines()
    if not outcome:
        now, line = watch.now, line_now(sys._current_frames()[thread.ident], lines) or "?"
        if now and "send" in line and "recv" in line:  # which of the two?
            line += f" (it waits in {now.kind})"
        state = Waiting(line, now.kind if now else "", now.peer if now else None, watch.unwaited)
        (folder / str(context.rank)).write_text(json.dumps(asdict(state)))
        time.sleep(0.3)  # the first rank that raises ends the others, so let them write their line too
        raise ValueError("waits")
    if isinstance(outcome[0], BaseException):
        line = line_of(outcome[0])
        kind = type(outcome[0]).__name__
        raise ValueError(f"rank {context.rank} ends in {kind}: {outcome[0]}, in: {lines[line - 1].strip()}")
    (folder / f"{context.rank}.ended").touch()
    try:  # a rank that ends closes its connections, and its neighbours may still need them
        dist.monitored_barrier(timeout=timedelta(seconds=seconds + 1))  # ranks that wait tell it before
    except RuntimeError as error:
        raise ValueError(
            "the ranks have ended, and their messages have not: wait() for each isend and irecv"
        ) from error
    return Ran(outcome[0], watch.messages, watch.memory.most)
