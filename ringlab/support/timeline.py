"""The record of a run: what every rank did, with which block, and when. Recorded while the ring runs.

    with record(k, ring=ring_attention) as events:     # watches a ring that knows nothing of this file
        ring_attention(q, k, v)
    with span("compute", t, k):                        # or: one line inside the ring
        ...
    max(laps(work, device))                            # how long some work takes, when all ranks do it at once

Shapes: a block is identified by its content, its first keys (B, H, 64, D). So the record exposes a stale block or a
wrong neighbour. Times are seconds; the ranks of one host share a clock. `ring_attn.py --trace` draws such a record.

Source: the pipeline pictures of Liu et al. 2024, figure 2; here measured.
"""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.support.agreement import agree

FIRST = 64  # keys that identify a block


@dataclass(frozen=True)
class Event:
    """One thing one rank did: "compute", "send", "receive" or "wait" for a K/V block, in round t."""

    rank: int
    what: str
    round: int
    block: int
    start: float  # seconds
    end: float  # seconds
    bytes: int  # of the tensors handled


_recording: list[tuple[str, int, float, float, int, Tensor]] | None = None  # None: nothing is recorded


@contextmanager
def span(what: str, t: int, *tensors: Tensor) -> Iterator[None]:
    """Record what the body does in round t with these tensors (B, H, C, D). Does nothing outside `record`."""
    if _recording is None:
        yield
        return
    start = _now(tensors[0])
    yield
    end = _now(tensors[0])
    _recording.append((what, t, start, end, sum(x.nbytes for x in tensors), tensors[0][:, :, :FIRST].clone()))


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)  # CUDA kernels run asynchronously: wait for them
    return time.perf_counter()


def _watched(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """`dist.send`, `dist.recv` or `attend` with a span around each call.

    Messages belong to the round of the last computation. messages.py sees them too, but not the wait behind them.
    """

    def watched(*args: Any, **options: Any) -> Any:
        computed = sum(noted == "compute" for noted, *_ in _recording or [])
        t, tensors = (computed, args[2:3]) if what == "compute" else (max(0, computed - 1), args[0])  # K; K and V
        with span(what, t, *tensors):
            return function(*args, **options)

    return watched


@contextmanager
def record(k: Tensor, *, ring: Callable[..., Any] | None = None) -> Iterator[list[Event]]:
    """Record the body on every rank; afterwards the list yielded holds the events of all of them.

    k (B, H, C, D) is the block that this rank starts with; a block with the first keys of rank r is block r. Every rank
    must enter. Recorded are spans and blocking messages. With ring_attn.py's `ring_attention` as `ring`,
    its computations are recorded too. Ranks of one host share a clock, which starts when the first of them passes the
    barrier. Clocks of different hosts are not compared.
    """
    global _recording
    firsts = agree(lambda: k[:, :, :FIRST].cpu())
    dist.barrier()
    begin = time.perf_counter()
    events: list[Event] = []
    _recording = []
    watched = [(vars(dist), "send", "send"), (vars(dist), "recv", "receive")]
    if ring is not None:
        watched.append((ring.__globals__, "attend", "compute"))
    try:
        with ExitStack() as afterwards:
            for names, name, what in watched:
                afterwards.callback(names.__setitem__, name, names[name])
                names[name] = _watched(names[name], what)
            yield events
        mine = []
        for what, t, start, end, size, first in _recording:
            block = next((j for j, other in enumerate(firsts) if torch.equal(first.cpu(), other)), -1)  # -1: no rank's
            mine.append((what, t, block, start, end, size))
        seen = agree(lambda: (platform.node(), begin, mine))
    finally:
        _recording = None
    for rank, (host, _, spans) in enumerate(seen):
        zero = min(begin for other, begin, _ in seen if other == host)
        for what, t, block, start, end, size in spans:
            events.append(Event(rank, what, t, block, start - zero, end - zero, size))


def laps(work: Callable[[], Any], device: torch.device, calls: int = 1) -> list[float]:
    """The seconds of each rank, by rank: of one of some calls, until its device has done them.

    The ranks begin together. Every rank must call this.
    """
    wait_for(device)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    wait_for(device)
    mine = (time.perf_counter() - begin) / calls
    return agree(lambda: mine)


def wait_for(device: torch.device) -> None:
    """Until this rank's stream is done; messages that travel meanwhile have streams of their own."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
