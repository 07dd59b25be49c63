"""The record of a run: what every rank did, with which block, and when. Recorded while the ring runs, and drawn.

    with record(k, ring=ring_attention) as events:     # watches a ring that knows nothing of this file
        ring_attention(q, k, v)
    with span("compute", t, k):                        # or: one line inside the ring
        ...

Shapes: a block is identified by its content, its first keys (B, H, 64, D). So the record exposes a stale block or a
wrong neighbour. Times are seconds; the ranks of one host share a clock.

A reader of the ring may skip this file. `ring_attn.py --trace` draws such a record.
Source: the pipeline pictures of Liu et al. 2024, figure 2; here measured.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.support.agreement import agree
from ringlab.support.colours import BLOCK_COLOURS, ink_on
from ringlab.support.extras import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # a ring needs no pictures

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


@contextmanager
def _watch(names: dict[str, Any], name: str, what: str, block: Callable[..., Sequence[Tensor]]) -> Iterator[None]:
    """Put a span around each call of a function in `names`, the names of a module. ring_attn.py stays free of timing.

    `block` gives the tensors to record, from the arguments of the call. Messages belong to the round of the last
    computation.
    """
    real = names[name]

    def watched(*args: Any, **options: Any) -> Any:
        computed = sum(noted == "compute" for noted, *_ in _recording or [])
        t = computed if what == "compute" else max(0, computed - 1)
        with span(what, t, *block(*args)):
            return real(*args, **options)

    names[name] = watched
    try:
        yield
    finally:
        names[name] = real


@contextmanager
def record(
    k: Tensor, group: ProcessGroup | None = None, *, ring: Callable[..., Any] | None = None
) -> Iterator[list[Event]]:
    """Record the body on every rank; afterwards the list yielded holds the events of all of them.

    k (B, H, C, D) is the block that this rank starts with; a block with the first keys of rank r is block r. Every rank
    of the group must enter. Recorded are spans and blocking messages. With ring_attn.py's `ring_attention` as `ring`,
    its computations are recorded too. Ranks of one host share a clock, which starts when the first of them passes the
    barrier. Clocks of different hosts are not compared.
    """
    global _recording
    firsts = agree(lambda: k[:, :, :FIRST].cpu(), group)
    dist.barrier(group=group)
    begin = time.perf_counter()
    events: list[Event] = []
    _recording = []
    try:
        with ExitStack() as watches:
            watches.enter_context(_watch(vars(dist), "send", "send", lambda block: block))  # K and V (2, B, H, C, D)
            watches.enter_context(_watch(vars(dist), "recv", "receive", lambda block: block))
            if ring is not None:
                watches.enter_context(_watch(ring.__globals__, "attend", "compute", lambda state, q, k, v: [k]))
            yield events
        mine = []
        for what, t, start, end, size, first in _recording:
            block = next((j for j, other in enumerate(firsts) if torch.equal(first.cpu(), other)), -1)  # -1: no rank's
            mine.append((what, t, block, start, end, size))
        seen = agree(lambda: (platform.node(), begin, mine), group)
    finally:
        _recording = None
    for rank, (host, _, spans) in enumerate(seen):
        zero = min(begin for other, begin, _ in seen if other == host)
        for what, t, block, start, end, size in spans:
            events.append(Event(rank, what, t, block, start - zero, end - zero, size))


def save(events: list[Event], path: Path) -> None:
    """Write the events as JSON, one a line."""
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(event)) for event in events) + "\n]\n")


def load(path: Path) -> list[Event]:
    """Read what `save` wrote."""
    return [Event(**event) for event in json.loads(path.read_text())]


def draw(events: list[Event], ax: Axes) -> None:
    """Draw the events on a matplotlib axis, one lane for each rank.

    Computing is a thick bar in the block's colour, with messages as thin bars below it. The "wait" of an overlapped
    ring is hatched, in place of computing.
    """
    ranks = 1 + max(event.rank for event in events)
    for event in events:
        computing, waiting = event.what == "compute", event.what == "wait"
        bottom, height = (
            (event.rank - 0.36, 0.44)
            if computing or waiting
            else (event.rank + (0.1 if event.what == "send" else 0.25), 0.13)
        )
        colour = BLOCK_COLOURS[event.block % len(BLOCK_COLOURS)] if event.block >= 0 else "#A0A0A0"
        start, width = 1e3 * event.start, 1e3 * (event.end - event.start)
        look = {"fc": "none", "ec": colour, "hatch": "//////"} if waiting else {"color": colour}
        ax.barh(bottom, width, left=start, height=height, align="edge", linewidth=0, **look)
        if computing:
            middle = (start + width / 2, bottom + height / 2)
            ax.text(*middle, f"KV{event.block}", ha="center", va="center", color=ink_on(colour), weight="bold")
    ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    ax.set_ylim(ranks - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.set_xlabel(
        "milliseconds   (thick: computing on a block; thin: sending it, and below that receiving the next one)"
    )


def save_picture(events: list[Event], path: Path) -> None:
    """Draw the events into a picture file, of the kind that its ending names.

    Raises ModuleNotFoundError when matplotlib is not installed.
    """
    with extra("plots", __name__):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    draw(events, figure.add_subplot())
    figure.savefig(path)
