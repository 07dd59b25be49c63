"""Try a ring that was written in a notebook cell on real processes, with a time limit.

A function of a notebook cell cannot be sent to another process. Its source can: each rank runs the statements of the
function's cell again, in a namespace that already has `NAMES`. `watch_ring` also counts what each rank sent and
received, by whichever function of torch.distributed, and what it held in memory.
"""

import __future__

import ast
import inspect
import io
import linecache
import math
import sys
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import finish, merge, start, update
from ringlab.support.messages import Message, Watch
from ringlab.support.processes import LostRank, RankContext, Ranks

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
LONGER = (
    "A message that is longer than the tensor that receives it ends the rank. That tensor needs the dtype of q, and "
    "the length of the block that comes: a rank sends to rank + 1, so the hop after round t brings "
    "lengths[(rank - t - 1) % P] tokens"
)
_pool = Ranks(size=6)


class RingFailed(Exception):
    """A rank failed, or `waits` after the time limit; the message says which, and in which line."""

    def __init__(self, reason: str, waits: bool = False) -> None:
        super().__init__(reason)
        self.waits = waits


@dataclass(frozen=True)
class Ran:
    """What one rank returned and did."""

    out: Any = None
    messages: list[Message] = field(default_factory=list)
    held: int = 0  # bytes of all tensors, arrays and lists beside its inputs, when a message began, at most
    error: str = ""  # that ended it, and its line
    waits: str = ""  # the line where it was when the time was up


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that a thread has made or used and that are alive, but for the inputs."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._inputs = [StorageWeakRef(x.untyped_storage()) for x in inputs if isinstance(x, Tensor)]
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each rank would import the compiler, for seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
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


class _Watch(Watch):
    """Watch that also notes what is held when a message begins, and refuses one to a rank that is not there."""

    def __init__(self, memory: LiveTensors) -> None:
        super().__init__()
        self.memory = memory
        tracemalloc.start()  # never stopped: while gloo's threads work, Python 3.11 crashes in stop()
        self._before = tracemalloc.get_traced_memory()[0]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            last = dist.get_world_size() - 1
            if function.overloadpacket.__name__ in ("send", "recv_") and not 0 <= args[2] <= last:  # gloo would wait
                raise ValueError(f"there is no rank {args[2]}; rank {last} has rank 0 as its next: (rank + 1) % P")
            self.look()
        return super().__torch_dispatch__(function, types, args, kwargs)

    def look(self) -> None:
        self.memory.look(tracemalloc.get_traced_memory()[0] - self._before)  # arrays of numpy, and lists


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
    where, seconds = f"P = {len(lengths)}, chunks of {lengths} tokens", SECONDS if seconds is None else seconds
    try:
        ranks = _pool(len(lengths), _run, cell_of(ring), lengths, seconds, seed, shape, long)
    except ValueError as error:
        raise RingFailed(str(error)) from None
    except LostRank as lost:
        raise RingFailed(f"{where}: {lost.reason}. {LONGER}") from None
    except BaseException:  # Ctrl-C, or the stop button: what the ranks answer must not be taken for a later answer
        _pool.stop()
        raise
    failed = next((rank for rank, ran in enumerate(ranks) if ran.error), None)
    waiting: dict[str, list[str]] = {}
    for rank, ran in enumerate(ranks):
        if ran.waits:
            waiting.setdefault(ran.waits, []).append(str(rank))
    if failed is None and not waiting:
        return ranks
    _pool.stop()  # a rank that waits would wait in the next call, too
    if failed is not None:
        raise RingFailed(f"{where}: rank {failed} ends in {ranks[failed].error}")
    lines = "; ".join(f"rank {', '.join(of)} in: {line}" for line, of in sorted(waiting.items()))
    raise RingFailed(f"{where}: still waiting after {seconds:g} s; {lines}", waits=True)


@dataclass(frozen=True)
class Cell:
    """Where a function was made."""

    source: str  # of the cell
    name: str  # of the function there
    line: int  # where its own code begins

    def function(self, names: dict[str, Any]) -> Callable[..., Any]:
        """Run the cell again in the namespace `names`. Raises ValueError when the name has another function there."""
        run_cell(self.source, names)
        if inspect.unwrap(names[self.name]).__code__.co_firstlineno != self.line:
            raise ValueError(f"the cell has more than one {self.name}: give each function its own name")
        return names[self.name]


def cell_of(function: Any) -> Cell:
    """The cell in which a function was made by def. Raises ValueError when it has no source or no name there."""
    function = inspect.unwrap(function)
    source = "".join(linecache.getlines(function.__code__.co_filename)) if inspect.isfunction(function) else ""
    if not source or not function.__qualname__.isidentifier():
        raise ValueError(
            "the source of your function is not known: define it with def at the left margin, in a cell without %%magic"
        )
    return Cell(source, function.__name__, function.__code__.co_firstlineno)


def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run the statements of a cell again, and bind their names in `names`.

    A statement may need a name of another cell, as one that calls the check does. Then it is left out, if it defines
    nothing: the function may not need it. Annotations are not evaluated.
    """
    names["__name__"] = "__main__"
    for node in ast.parse(source).body:
        try:
            with redirect_stdout(io.StringIO()):
                flags = __future__.annotations.compiler_flag
                exec(compile(ast.Module([node], []), CELL, "exec", flags=flags), names)
        except Exception:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
                raise


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
    seed: int,
    shape: tuple[int, int, int],
    long: bool,
) -> Ran:
    """One rank. The ring runs in a thread of its own, so that this one can see that it waits."""
    q, k, v = (chunk_of(x, lengths, context.rank) for x in whole_input(sum(lengths), seed, shape, long))
    memory, lines = LiveTensors((q, k, v)), cell.source.splitlines()
    watch, outcome = _Watch(memory), []

    def failed(error: BaseException) -> Ran:
        line = line_of(error)
        where = f", in: {lines[line - 1].strip()}" if line else ""
        longer = f". {LONGER}" if type(error) is RuntimeError else ""
        return Ran(error=f"{type(error).__name__}: {error}{where}{longer}")

    def call() -> None:
        try:
            with memory, watch:
                out = ring(q, k, v, lengths)
                watch.look()
            dist.monitored_barrier(timeout=timedelta(seconds=2 * seconds))  # its messages have ended, too
            outcome.append(Ran(out, watch.messages, memory.most))
        except BaseException as error:  # SystemExit too
            outcome.append(failed(error))

    try:
        ring = cell.function(dict(NAMES))
    except Exception as error:
        return failed(error)
    dist.barrier()  # all ranks are here: the time begins
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        frame = sys._current_frames().get(thread.ident)
        return Ran(waits=line_now(frame, lines) or "its end: its messages are still under way")
    return outcome[0]
