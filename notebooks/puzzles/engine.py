"""Run a reader's schedule on ranks that are threads, under a referee that sees every message, and keep the record.

    run = play(schedule, inputs, Wires())     schedule(comm, *inputs[r]) runs on rank r, a thread of its own

The referee pairs each send with its receive, and hands over a copy. So nothing hangs: when all ranks wait and no pair
is left, the referee knows that this is a deadlock, and who waits for whom. Nothing guards against a schedule that
cheats, as by a list that all ranks know: it would lie to its author only.

Time in the record is not measured but counted: a message begins when both its ranks are ready, and takes as long as
`Wires` says. So a schedule has the same time on every machine.
"""

import ctypes
import linecache
import math
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from notebooks.source.live_tensors import LiveTensors
from ringlab.basics.blocking_messages import Program, Recv, Send, simulate_messages
from ringlab.basics.blockwise_attention import attend_tile
from ringlab.basics.online_softmax import State
from ringlab.ring.backward import tile_backward

SECONDS = 5  # that a rank may compute without a message; a right schedule needs some milliseconds
MOST = 600  # messages of a run


@dataclass(frozen=True)
class Wires:
    """Which messages a puzzle allows, and how long they take."""

    time: Callable[[int, int, int], float] = lambda source, to, size: 1.0  # of a message of `size` bytes
    blocking: bool = False  # send and recv only
    neighbours: bool = False  # a wire to each neighbour on the ring, and no other; else one wire out and one wire in
    block: float = math.inf  # query-key pairs of all heads that take a unit of time; inf: computing takes no time


@dataclass(frozen=True)
class Message:
    source: int
    to: int
    begin: float
    end: float
    size: int  # bytes
    number: float | None  # its first number, by which its block is known


@dataclass(frozen=True)
class Work:
    rank: int
    begin: float
    end: float
    pairs: float  # of a query and a key, of all heads
    number: float  # the first number of its keys


@dataclass(frozen=True)
class Wait:
    rank: int
    begin: float
    end: float | None  # None: for ever
    peers: tuple[int, ...]


@dataclass
class Run:
    """What a schedule did."""

    world_size: int
    messages: list[Message] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)  # by rank: bytes of its tensors, beyond its inputs, at the worst
    clocks: list[float] = field(default_factory=list)  # by rank: when it ended
    fault: str = ""  # a sentence; "": all ranks came to their end
    where: int | None = None  # the rank that failed
    owners: dict[float | None, int] = field(default_factory=dict)  # a number of an input -> the rank that has it

    @property
    def time(self) -> float:
        return max(self.clocks)


class _Stop(BaseException):
    """The run is over: a rank has failed, or all wait."""


class TooLong(BaseException):
    """A rank computes for ever."""

    def __str__(self) -> str:
        return "it computes for seconds without a message: a loop without end?"


class Comm:
    """What a schedule works with: its rank, the number of ranks P, messages, and computing that the film shows.

    All messages block: they return when they have moved.
    """

    def __init__(self, rank: int, referee: "_Referee", memory: LiveTensors, inputs: Sequence[Any]) -> None:
        self.rank, self.P = rank, referee.run.world_size
        self._referee, self._memory = referee, memory
        self._inputs = [(x, x.clone()) for x in inputs if isinstance(x, Tensor)]  # and what they were

    def send(self, to: int, x: Tensor) -> None:
        """Return when rank `to` has received x."""
        self._step({to: x}, [])

    def recv(self, source: int) -> Tensor:
        """The next tensor that rank `source` sends here."""
        return self._step({}, [source])[_number(source)]

    def exchange(self, to: int, x: Tensor, source: int) -> Tensor:
        """Send x to rank `to` and receive from rank `source` at the same time."""
        return self._step({to: x}, [source], "exchange")[_number(source)]

    def exchange_all(self, sends: dict[int, Tensor], sources: Sequence[int]) -> dict[int, Tensor]:
        """Send {to: x} and receive {source: x} on several wires at the same time."""
        return self._step(dict(sends), list(sources), "exchange_all")

    def attend(self, state: State, q: Tensor, k: Tensor, v: Tensor, future: Tensor | None = None) -> State:
        """Fold k and v (B, H, Sk, D) into the (m, l, o) of q (B, H, Sq, D). `future` is True where q may not look."""
        seen = q.shape[2] * k.shape[2] if future is None else int((~future).sum())
        self._referee.work(self.rank, seen * q.shape[1], k)
        return attend_tile(state, q, k, v, scale=q.shape[-1] ** -0.5, future=future)

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What queries q and a block of keys add to dq, dk and dv. lse and delta are those of the whole rows."""
        self._referee.work(self.rank, q.shape[1] * q.shape[2] * k.shape[2], k)
        return tile_backward(q, k, v, d_out, lse, delta, q.shape[-1] ** -0.5)

    def unchanged(self) -> None:
        """Raise ValueError where an input is not as it was: what is held there is not counted."""
        with _disable_current_modes():
            if not all(torch.equal(x, was) for x, was in self._inputs):
                raise ValueError("an input was changed in place, and whoever called you needs it again")

    def _step(self, sends: dict[int, Tensor], sources: list[int], how: str = "") -> dict[int, Tensor]:
        """Send and receive all of these, at the same time."""
        sends, sources = {_number(to): x for to, x in sends.items()}, [_number(source) for source in sources]
        self._check(sends, sources, how)
        self.unchanged()
        sends = {to: x.detach().contiguous() for to, x in sends.items()}
        with _disable_current_modes():  # the copies that travel are not the rank's
            came = self._referee.step(self.rank, sends, sources)
        received = {source: torch.empty(x.shape, dtype=x.dtype) for source, x in came.items()}
        self._memory.look()
        with _disable_current_modes():
            for source, x in came.items():
                received[source].copy_(x)
        return received

    def _check(self, sends: dict[int, Tensor], sources: list[int], how: str) -> None:
        P, wires = self.P, self._referee.wires
        for peer in (*sends, *sources):
            if type(peer) is not int or not 0 <= peer < P:
                if isinstance(peer, Tensor):
                    raise ValueError(f"a tensor {tuple(peer.shape)} is no rank: the rank comes first, comm.send(to, x)")
                raise ValueError(f"there is no rank {peer!r}: with P = {P} the last one is {P - 1}; (rank + 1) % P?")
            if peer == self.rank:
                raise ValueError(f"rank {peer} has a message with itself")
            if wires.neighbours and (peer - self.rank) % P not in (1, P - 1):
                raise ValueError(f"there is no wire between ranks {self.rank} and {peer}: they are not neighbours")
        for x in sends.values():
            if not isinstance(x, Tensor):
                raise ValueError(f"a message is a tensor, not {type(x).__name__}")
        if wires.blocking and how:
            raise ValueError(f"this puzzle has send and recv only, no {how}")
        if how == "exchange_all" and not wires.neighbours and max(len(sends), len(sources)) > 1:
            raise ValueError("here a rank has one wire out and one wire in: one message each at a time")


def _number(rank: Any) -> Any:
    """A rank as an int, also from an int of numpy or a tensor of one int. What is no number stays as it is."""
    try:
        return operator.index(rank)
    except TypeError:
        return rank


def _first(x: Tensor) -> float:
    """Its first number. The counts of memory do not see that it is taken."""
    with _disable_current_modes():
        return float(x.flatten()[0])


@dataclass(eq=False)
class _Step:
    """What a rank waits for: messages that have not moved yet."""

    sends: dict[int, Tensor]
    sources: list[int]
    line: str
    begin: float
    moved: list[tuple[float, float, int]] = field(default_factory=list)  # begin and end of its messages, and the peers
    came: dict[int, Tensor] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return max([self.begin, *(end for _, end, _ in self.moved)])

    @property
    def peers(self) -> tuple[int, ...]:
        return (*self.sends, *self.sources)


class _Referee:
    """Pairs sends with receives, keeps the clocks, and sees when nothing can move any more."""

    def __init__(self, inputs: Sequence[tuple[Any, ...]], wires: Wires, schedule: Callable[..., Any]) -> None:
        self.wires, self._inputs, self._schedule = wires, inputs, schedule
        self.run = Run(len(inputs), clocks=[0.0] * len(inputs), owners=_owners(inputs))
        self._file = getattr(getattr(schedule, "__code__", None), "co_filename", "")
        self._changed = threading.Condition()
        self._events = 0  # how often something has happened
        self._waiting: dict[int, _Step] = {}
        self._done: set[int] = set()
        self._errors: dict[int, str] = {}

    # Of each rank, in its thread

    def rank(self, rank: int) -> None:
        """Run the reader's schedule, and note how it ended."""
        memory, output, error = LiveTensors(self._inputs[rank]), None, ""
        comm = Comm(rank, self, memory, self._inputs[rank])
        try:
            with memory:
                output = self._schedule(comm, *self._inputs[rank])
                output = list(output) if isinstance(output, tuple | Iterator) else output
                memory.look()
                comm.unchanged()
        except _Stop:
            pass
        except BaseException as raised:
            lines = [frame.line for frame in traceback.extract_tb(raised.__traceback__) if frame.filename == self._file]
            error = f"{type(raised).__name__}: {raised}{f', in: {lines[-1]}' if lines else ''}"
        with self._changed:
            self._end(rank, error)
            if not error:
                self.run.outputs[rank], self.run.held[rank] = output, memory.most

    def work(self, rank: int, pairs: int, keys: Tensor) -> None:
        """Note that this rank computes on a block with these keys."""
        if pairs:
            begin = self.run.clocks[rank]
            self.run.clocks[rank] = begin + pairs / self.wires.block
            self.run.works.append(Work(rank, begin, self.run.clocks[rank], pairs, _first(keys)))

    def step(self, rank: int, sends: dict[int, Tensor], sources: list[int]) -> dict[int, Tensor]:
        """Wait until all of these have moved, and return what came."""
        copies = {to: x.clone() for to, x in sends.items()}
        with self._changed:
            if self.run.fault:
                raise _Stop
            step = _Step(copies, list(sources), self._line(sys._getframe()), self.run.clocks[rank])
            self._waiting[rank] = step
            for to in list(sends):
                if to in self._waiting and rank in self._waiting[to].sources:
                    self._move(rank, to)
            for source in sources:
                if source in self._waiting and rank in self._waiting[source].sends:
                    self._move(source, rank)
            self._happened()
            self._changed.wait_for(lambda: self._waiting.get(rank) is not step)
        if step.peers:  # the run is over
            raise _Stop
        return step.came

    # With the lock

    def _line(self, frame: FrameType | None) -> str:
        while frame and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return linecache.getline(self._file, frame.f_lineno).strip() if frame else ""

    def _end(self, rank: int, error: str = "") -> None:
        self._done.add(rank)
        if error:
            self._errors[rank] = error
        self._happened()

    def _happened(self) -> None:
        self._events += 1
        if self._waiting and len(self._waiting) + len(self._done) == len(self._inputs):
            self._stuck()
        self._changed.notify_all()

    def _move(self, source: int, to: int) -> None:
        sender, receiver = self._waiting[source], self._waiting[to]
        x = sender.sends.pop(to)
        receiver.sources.remove(source)
        receiver.came[source] = x
        size = x.nbytes or 8 * x.ndim  # of an empty tensor, the shape is a message
        begin = max(sender.begin, receiver.begin)
        end = begin + self.wires.time(source, to, size)
        self.run.messages.append(Message(source, to, begin, end, size, _first(x) if x.numel() else None))
        for rank, peer in ((source, to), (to, source)):
            step = self._waiting[rank]
            step.moved.append((begin, end, peer))
            if not step.peers:
                self._waited(rank, step)
                self.run.clocks[rank] = step.end
                del self._waiting[rank]
        if len(self.run.messages) > MOST:
            self._fail(f"more than {MOST} messages: does a loop end?")

    def _waited(self, rank: int, step: _Step) -> None:
        """Note when none of its messages was under way."""
        now = step.begin
        for begin, end, peer in sorted(step.moved):
            if begin > now:
                self.run.waits.append(Wait(rank, now, begin, (peer,)))
            now = max(now, end)

    def _fail(self, reason: str) -> None:
        self.run.fault = self.run.fault or reason
        for rank, step in sorted(self._waiting.items()):
            self._waited(rank, step)
            self.run.waits.append(Wait(rank, step.end, None, step.peers))
        self._waiting = {}

    def _stuck(self) -> None:
        """All ranks wait or have ended: say who waits for whom."""
        lines: dict[str, list[str]] = {}
        for rank in sorted(self._waiting):
            lines.setdefault(self._waiting[rank].line, []).append(str(rank))
        where = "; ".join(f"rank {', '.join(ranks)} in: {line}" for line, ranks in lines.items())
        for rank, step in sorted(self._waiting.items()):
            for peer in step.peers:
                if peer in self._done:
                    how = "receives" if peer in step.sends else "sends"
                    return self._fail(f"rank {rank} waits for rank {peer}, which has returned and never {how}; {where}")
        first: list[Program] = [[] for _ in self._inputs]  # what each rank waits for
        for rank, step in self._waiting.items():
            first[rank] = [Send(step.peers[0]) if step.sends else Recv(step.peers[0])]
        circle = simulate_messages(first).cycle
        waits = ", ".join(f"{rank} waits for {self._waiting[rank].peers[0]}" for rank in circle)
        return self._fail(f"a deadlock: rank {waits}, in a circle; {where}")

    # In the thread of the notebook

    def watch(self, threads: list[threading.Thread]) -> None:
        """Until all ranks have ended. One that computes for ever is told to end, and given up if it does not."""
        told: set[int] = set()
        with self._changed:
            while len(self._done) < len(threads):
                before = self._events
                if self._changed.wait(SECONDS) or self._events > before:
                    continue
                for rank in set(range(len(threads))) - self._done - self._waiting.keys():
                    _interrupt(threads[rank])
                    if rank in told:
                        self._end(rank, f"TooLong: {TooLong()}")
                    told.add(rank)
            if self._errors:  # the others went on as far as they could, so the record is the same in every run
                self.run.where = min(self._errors)
                self.run.fault = f"rank {self.run.where} ends in {self._errors[self.run.where]}"

    def stop(self, threads: list[threading.Thread]) -> None:
        """End them all, after Ctrl-C or the stop button."""
        with self._changed:
            for rank in set(range(len(threads))) - self._done - self._waiting.keys():
                _interrupt(threads[rank])
            self._fail("stopped")
            self._changed.notify_all()


def _interrupt(thread: threading.Thread) -> None:
    """Raise TooLong there, at its next line of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TooLong))


def _owners(inputs: Sequence[tuple[Any, ...]]) -> dict[float | None, int]:
    given = (
        (rank, x) for rank, mine in enumerate(inputs) for x in mine if isinstance(x, Tensor) and x.is_floating_point()
    )
    return {number: rank for rank, x in given for number in x.flatten().tolist()}


def play(schedule: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], wires: Wires) -> Run:
    """Run schedule(comm, *inputs[r]) on each rank r and return the record, up to the fault if there is one."""
    inputs = [tuple(x.clone() if isinstance(x, Tensor) else x for x in mine) for mine in inputs]
    referee = _Referee(inputs, wires, schedule)
    run = referee.run
    threads = [threading.Thread(target=referee.rank, args=(rank,), daemon=True) for rank in range(len(inputs))]
    for thread in threads:
        thread.start()
    try:
        referee.watch(threads)
    except BaseException:
        referee.stop(threads)
        raise
    run.messages.sort(key=lambda message: (message.begin, message.source, message.to))
    run.works.sort(key=lambda work: (work.begin, work.rank))
    return run
