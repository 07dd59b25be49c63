"""Try a ring that was written in a notebook cell on real processes, with a time limit.

A function of a notebook cell cannot be sent to another process. Its source can: each rank runs the functions and
imports of the function's cell again, in a namespace that already has `NAMES`.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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


class RingFailed(Exception):
    """A rank failed or was still waiting after the time limit; the message says which, and in which line."""


def whole_input(seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (2, 2, S, 4) in float64, the same on every rank. They are transposed views, as in a model."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = 2 * torch.randn(3, 2, seq_len, 2, 4, dtype=torch.float64, generator=generator)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def try_ring(ring: Callable[..., Any], lengths: list[int], *, seconds: float | None = None) -> list[Any]:
    """Call ring(q, k, v, lengths) on len(lengths) processes and return what each of them returned.

    Rank i has lengths[i] tokens of `whole_input`. Raises RingFailed when a rank fails, or waits longer than `seconds`
    (None: SECONDS).
    """
    ring = inspect.unwrap(ring)
    source = "".join(linecache.getlines(ring.__code__.co_filename))
    if not source or ring.__name__ == "<lambda>":
        raise RingFailed("the source of your function is not known: define it with def, in a cell without %%magic")
    seconds = SECONDS if seconds is None else seconds
    with tempfile.TemporaryDirectory() as folder:
        try:
            return launch(_run, len(lengths), source, ring.__name__, lengths, seconds, Path(folder), device="cpu")
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


def _run(context: RankContext, source: str, name: str, lengths: list[int], seconds: float, folder: Path) -> Any:
    """One rank. The ring runs in a thread of its own, so that this one can see that it waits."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom)]
    dist.send, dist.recv = (to_a_rank(move, context.world_size) for move in (dist.send, dist.recv))
    names = dict(NAMES)
    exec(compile(tree, CELL, "exec"), names)
    q, k, v = (x.split(lengths, dim=2)[context.rank] for x in whole_input(sum(lengths)))
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(names[name](q, k, v, lengths))
        except BaseException as error:  # SystemExit too
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    dist.barrier()  # all ranks are here: the time begins
    thread.start()
    thread.join(seconds)
    lines = source.splitlines()
    if not outcome:
        frame = sys._current_frames()[thread.ident]
        while frame.f_code.co_filename != CELL:
            frame = frame.f_back
        (folder / str(context.rank)).write_text(lines[frame.f_lineno - 1].strip())
        time.sleep(0.3)  # the first rank that raises ends the others, so let them write their line too
        raise ValueError("waits")
    if isinstance(outcome[0], BaseException):
        trace, line = outcome[0].__traceback__, 1
        while trace is not None:  # the last line of the cell on the way to the error
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == CELL else line
            trace = trace.tb_next
        kind = type(outcome[0]).__name__
        raise ValueError(f"rank {context.rank} ends in {kind}: {outcome[0]}, in: {lines[line - 1].strip()}")
    dist.barrier()  # a rank that ends closes its connections, and its neighbours may still need them
    return outcome[0]
