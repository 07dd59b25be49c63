"""Run a reader's schedule on real processes, under a referee that sees every message, and keep the record.

    run = play(schedule, inputs, Wires())     schedule(comm, *inputs[r]) runs on rank r, a process of its own

A rank asks the referee before each message. The referee pairs each send with its receive, and says "go" to both; then
the numbers move from process to process through gloo. So nothing hangs: when all ranks wait and no pair is left, the
referee knows that this is a deadlock, and who waits for whom. The referee counts, in its own process: what a schedule
does to `comm` changes no count.

Nothing guards against a schedule that cheats, as by messages beside `comm`: it would lie to its author only.

Time in the record is not measured but counted: a message begins when both its ranks are ready, and takes as long as
`Wires` says. So a schedule has the same time on every machine.
"""

import math
import operator
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from notebooks.source.trial import Cell, LiveTensors, cell_of, line_now, line_of
from ringlab.basics.blocking_messages import Program, Recv, Send, simulate_messages
from ringlab.basics.blockwise_attention import attend_tile
from ringlab.basics.online_softmax import State, finish, merge, start
from ringlab.ring.backward import tile_backward
from ringlab.support.processes import LostRank, RankContext, Ranks

SECONDS = 5  # that a rank may compute without a message; a right schedule needs some milliseconds
MOST = 600  # messages of a run
NAMES = {"torch": torch, "math": math, "start": start, "finish": finish, "merge": merge}  # that a schedule may use
_pool = Ranks(size=5)


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
    printed: dict[int, str] = field(default_factory=dict)  # by rank
    owners: dict[float | None, int] = field(default_factory=dict)  # a number of an input -> the rank that has it

    @property
    def time(self) -> float:
        return max(self.clocks)


class _Stop(BaseException):
    """The run is over: a rank has failed, or all wait."""


class _TooLong(BaseException):
    """A rank computes for ever."""


class Comm:
    """What a schedule works with: its rank, the number of ranks P, messages, and computing that the film shows.

    All messages block: they return when they have moved.
    """

    def __init__(self, rank: int, world_size: int, referee: "_Desk") -> None:
        self.rank, self.P, self._referee = rank, world_size, referee

    def send(self, to: int, x: Tensor) -> None:
        """Return when rank `to` has received x."""
        self._referee.step({to: x}, [])

    def recv(self, source: int) -> Tensor:
        """The next tensor that rank `source` sends here."""
        return self._referee.step({}, [source])[_number(source)]

    def exchange(self, to: int, x: Tensor, source: int) -> Tensor:
        """Send x to rank `to` and receive from rank `source` at the same time."""
        return self._referee.step({to: x}, [source], "exchange")[_number(source)]

    def exchange_all(self, sends: dict[int, Tensor], sources: Sequence[int]) -> dict[int, Tensor]:
        """Send {to: x} and receive {source: x} on several wires at the same time."""
        return self._referee.step(dict(sends), list(sources), "exchange_all")

    def attend(self, state: State, q: Tensor, k: Tensor, v: Tensor, future: Tensor | None = None) -> State:
        """Fold k and v (B, H, Sk, D) into the (m, l, o) of q (B, H, Sq, D). `future` is True where q may not look."""
        seen = q.shape[2] * k.shape[2] if future is None else int((~future).sum())
        self._referee.work(seen * q.shape[1], k)
        return attend_tile(state, q, k, v, scale=q.shape[-1] ** -0.5, future=future)

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What queries q and a block of keys add to dq, dk and dv. lse and delta are those of the whole rows."""
        self._referee.work(q.shape[1] * q.shape[2] * k.shape[2], k)
        return tile_backward(q, k, v, d_out, lse, delta, q.shape[-1] ** -0.5)


class _Desk:
    """A rank's side of the referee."""

    def __init__(self, rank: int, world_size: int, referee: Connection, rules: tuple[bool, bool, float]) -> None:
        self.rank, self.world_size, self._referee = rank, world_size, referee
        self.blocking, self.neighbours, self.seconds = rules
        self._works: list[tuple[float, float]] = []
        self.memory: LiveTensors | None = None
        self.inputs: list[tuple[Tensor, Tensor]] = []  # and what they were
        self.printed = StringIO()
        self.lines: list[str] = []

    def tell(self, *what: Any) -> None:
        self._referee.send_bytes(pickle.dumps((*what, self._works, self.printed.getvalue()[:1000])))
        self._works = []

    def hear(self) -> Any:
        return pickle.loads(self._referee.recv_bytes())

    def work(self, pairs: int, keys: Tensor) -> None:
        """Note that this rank computed on a block with these keys."""
        if pairs:
            self._works.append((pairs, _first(keys)))

    def unchanged(self) -> None:
        """Raise ValueError where an input is not as it was: what is held there is not counted."""
        with torch._C.DisableTorchFunction():
            if not all(torch.equal(x, was) for x, was in self.inputs):
                raise ValueError("an input was changed in place, and whoever called you needs it again")

    def step(self, sends: dict[int, Tensor], sources: list[int], how: str = "") -> dict[int, Tensor]:
        """Send and receive all of these, at the same time."""
        sends, sources = {_number(to): x for to, x in sends.items()}, [_number(source) for source in sources]
        self._check(sends, sources, how)
        self.unchanged()
        signal.setitimer(signal.ITIMER_REAL, 0)
        sends = {to: x.detach().contiguous() for to, x in sends.items()}
        heads = {to: (tuple(x.shape), x.dtype, _first(x) if x.numel() else None) for to, x in sends.items()}
        self.tell("step", heads, sources, line_now(sys._getframe(), self.lines))
        moving, received = [], {}
        for _ in range(len(sends) + len(sources)):
            what, peer, shape, dtype = self.hear()
            if what == "stop":
                for each in moving:
                    each.wait()
                raise _Stop
            if what == "send":
                x, move = sends[peer], dist.isend
            else:
                x, move = torch.empty(shape, dtype=dtype), dist.irecv
                received[peer] = x
            if x.numel():
                moving.append(move(x, peer))
        assert self.memory is not None
        self.memory.look()
        for each in moving:
            each.wait()
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        return received

    def _check(self, sends: dict[int, Tensor], sources: list[int], how: str) -> None:
        P = self.world_size
        for peer in (*sends, *sources):
            if type(peer) is not int or not 0 <= peer < P:
                if isinstance(peer, Tensor):
                    raise ValueError(f"a tensor {tuple(peer.shape)} is no rank: the rank comes first, comm.send(to, x)")
                raise ValueError(f"there is no rank {peer!r}: with P = {P} the last one is {P - 1}; (rank + 1) % P?")
            if peer == self.rank:
                raise ValueError(f"rank {peer} has a message with itself")
            if self.neighbours and (peer - self.rank) % P not in (1, P - 1):
                raise ValueError(f"there is no wire between ranks {self.rank} and {peer}: they are not neighbours")
        for x in sends.values():
            if not isinstance(x, Tensor):
                raise ValueError(f"a message is a tensor, not {type(x).__name__}")
        if self.blocking and how:
            raise ValueError(f"this puzzle has send and recv only, no {how}")
        if how == "exchange_all" and not self.neighbours and max(len(sends), len(sources)) > 1:
            raise ValueError("here a rank has one wire out and one wire in: one message each at a time")


def _number(rank: Any) -> Any:
    """A rank as an int, also from an int of numpy or a tensor of one int. What is no number stays as it is."""
    try:
        return operator.index(rank)
    except TypeError:
        return rank


def _first(x: Tensor) -> float:
    """Its first number. The counts of memory do not see that it is taken."""
    with torch._C.DisableTorchFunction():
        return float(x.flatten()[0])


def _too_long(*_: Any) -> NoReturn:
    raise _TooLong("it computes for seconds without a message: a loop without end?")


def _on_rank(
    context: RankContext,
    address: str,
    cell: Cell,
    rules: tuple[bool, bool, float],
) -> None:
    """One rank: run the reader's schedule, and tell the referee how it ended."""
    referee = Client(address)
    referee.send_bytes(pickle.dumps(context.rank))
    inputs = pickle.loads(referee.recv_bytes())  # its own, and nobody else's
    desk = _Desk(context.rank, context.world_size, referee, rules)
    desk.lines = cell.source.splitlines()
    signal.signal(signal.SIGALRM, _too_long)
    desk.inputs = [(x, x.clone()) for x in inputs if isinstance(x, Tensor)]
    torch.manual_seed(0)
    try:
        schedule = cell.function(dict(NAMES))
        with LiveTensors(inputs) as memory, redirect_stdout(desk.printed):
            desk.memory = memory
            signal.setitimer(signal.ITIMER_REAL, desk.seconds)
            output = schedule(Comm(context.rank, context.world_size, desk), *inputs)
            output = list(output) if isinstance(output, tuple | Iterator) else output
            memory.look()
            desk.unchanged()
        desk.tell("end", output, memory.most)
    except _Stop:
        desk.tell("stopped")
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        line = line_of(error)
        reason = f"{type(error).__name__.lstrip('_')}: {error}" + (
            f", in: {desk.lines[line - 1].strip()}" if line else ""
        )
        if type(error) is NameError:
            reason += f". It knows the functions, imports and constants of its own cell, and {', '.join(NAMES)}"
        desk.tell("error", reason)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        referee.close()


@dataclass
class _Step:
    """What a rank waits for: messages that have not moved yet."""

    sends: dict[int, tuple[tuple[int, ...], torch.dtype, float | None]]
    sources: list[int]
    line: str
    begin: float
    moved: list[tuple[float, float, int]] = field(default_factory=list)  # begin and end of its messages, and the peers

    @property
    def end(self) -> float:
        return max([self.begin, *(end for _, end, _ in self.moved)])

    @property
    def peers(self) -> tuple[int, ...]:
        return (*self.sends, *self.sources)


class _Referee:
    """Pairs sends with receives, keeps the clocks, and sees when nothing can move any more."""

    def __init__(self, inputs: Sequence[tuple[Any, ...]], wires: Wires) -> None:
        self._inputs, self._wires = inputs, wires
        self.run = Run(len(inputs), clocks=[0.0] * len(inputs), owners=_owners(inputs))
        self._waiting: dict[int, _Step] = {}
        self._done: set[int] = set()
        self._errors: dict[int, str] = {}

    def watch(self, listener: Listener) -> None:
        """Until all ranks have ended."""
        self._ranks: dict[int, Connection] = {}
        for _ in self._inputs:
            try:
                connection = listener.accept()
                rank = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return  # a rank died before its work began: the pool tells
            self._ranks[rank] = connection
            connection.send_bytes(pickle.dumps(self._inputs[rank]))
        said = {"step": self._step, "end": self._end, "stopped": self._stopped, "error": self._error}
        while len(self._done) < len(self._inputs):
            talking = {connection: rank for rank, connection in self._ranks.items() if rank not in self._done}
            for connection in wait(list(talking)):
                rank = talking[connection]
                try:
                    what, *details, works, self.run.printed[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    what, details, works = "error", ["its process has died"], []
                self._computed(rank, works)
                said[what](rank, *details)
            if self._waiting and len(self._waiting) + len(self._done) == len(self._inputs):
                self._stuck()
        if self._errors:  # the others went on as far as they could, so the record is the same in every run
            self.run.where = min(self._errors)
            self.run.fault = f"rank {self.run.where} ends in {self._errors[self.run.where]}"

    def _computed(self, rank: int, works: list[tuple[float, float]]) -> None:
        for pairs, number in works:
            begin = self.run.clocks[rank]
            self.run.clocks[rank] = begin + pairs / self._wires.block
            self.run.works.append(Work(rank, begin, self.run.clocks[rank], pairs, number))

    def _step(self, rank: int, sends: dict[int, Any], sources: list[int], line: str) -> None:
        now = self.run.clocks[rank]
        self._waiting[rank] = _Step(sends, sources, line, now)
        if self.run.fault:
            return self._stop_all()
        for to in list(sends):
            if to in self._waiting and rank in self._waiting[to].sources:
                self._move(rank, to)
        for source in list(sources):
            if source in self._waiting and rank in self._waiting[source].sends:
                self._move(source, rank)
        return None

    def _move(self, source: int, to: int) -> None:
        sender, receiver = self._waiting[source], self._waiting[to]
        shape, dtype, number = sender.sends.pop(to)
        receiver.sources.remove(source)
        size = math.prod(shape) * dtype.itemsize or 8 * len(shape)  # of an empty tensor, the shape is a message
        begin = max(sender.begin, receiver.begin)
        end = begin + self._wires.time(source, to, size)
        self.run.messages.append(Message(source, to, begin, end, size, number))
        self._tell(source, "send", to, None, None)
        self._tell(to, "recv", source, shape, dtype)
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

    def _tell(self, rank: int, *what: Any) -> None:
        with suppress(OSError):  # it has died, and its end is seen elsewhere
            self._ranks[rank].send_bytes(pickle.dumps(what))

    def _end(self, rank: int, output: Any, held: int) -> None:
        self._done.add(rank)
        self.run.outputs[rank], self.run.held[rank] = output, held

    def _stopped(self, rank: int) -> None:
        self._done.add(rank)

    def _error(self, rank: int, reason: str) -> None:
        self._done.add(rank)
        self._errors[rank] = reason

    def _fail(self, reason: str) -> None:
        self.run.fault = self.run.fault or reason
        self._stop_all()

    def _stop_all(self) -> None:
        for rank, step in sorted(self._waiting.items()):
            self._waited(rank, step)
            self.run.waits.append(Wait(rank, step.end, None, step.peers))
            self._tell(rank, "stop", None, None, None)
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


def _owners(inputs: Sequence[tuple[Any, ...]]) -> dict[float | None, int]:
    given = (
        (rank, x) for rank, mine in enumerate(inputs) for x in mine if isinstance(x, Tensor) and x.is_floating_point()
    )
    return {number: rank for rank, x in given for number in x.flatten().tolist()}


def play(schedule: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], wires: Wires) -> Run:
    """Run schedule(comm, *inputs[r]) on each rank r and return the record, up to the fault if there is one.

    Each rank is a process and gets its own inputs only. It runs the functions and imports of the schedule's cell again.
    """
    try:
        cell = cell_of(schedule)
    except ValueError as error:
        return Run(len(inputs), fault=str(error), clocks=[0.0])
    # A view is pickled with all the memory that it is a view of: that of other ranks.
    inputs = [tuple(x.clone() if isinstance(x, Tensor) else x for x in mine) for mine in inputs]
    referee = _Referee(inputs, wires)
    with Listener() as listener:
        watching = threading.Thread(target=referee.watch, args=(listener,), daemon=True)
        watching.start()
        rules, died = (wires.blocking, wires.neighbours, SECONDS), ""
        try:
            _pool(len(inputs), _on_rank, listener.address, cell, rules)
        except LostRank as lost:
            died = lost.reason
        except BaseException:  # Ctrl-C, or the stop button: what the ranks answer must not be taken for a later answer
            _pool.stop()
            raise
        watching.join(SECONDS)
    run = referee.run
    run.fault = died or run.fault
    run.messages.sort(key=lambda message: (message.begin, message.source, message.to))
    run.works.sort(key=lambda work: (work.begin, work.rank))
    return run
