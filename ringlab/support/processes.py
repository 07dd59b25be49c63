"""Start the processes of a ring, give each its device, and end them together.

    with join_ring() as context:            under torchrun, on one host or many
    launch(work, 4, *args)                  work(context, *args) on each of 4 new processes of this host
    ranks = Ranks(); ranks(3, work, x)      the same on processes that stay alive: to start one costs a second

`work` must be a function of a module; its arguments and its result are pickled. One process drives one device: a GPU
with NCCL if every process of the host can have one, else its share of the CPU's cores, with gloo. Asked for "cuda", the
processes share the GPUs that there are. A rank that dies ends all the others, and the caller gets the reason.

Source: the PyTorch manual, torch.distributed.
"""

import gc
import math
import os
import pickle
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ringlab.support.devices import COUNT, NUMBER, choose_device, cpu_cores, on_this_host, sees_its_own, share_gpus

# The longest wait for one message. When a rank ends, its connections close, and the others notice at once. The limit is
# for a rank that hangs. It must exceed the time that a slow machine needs to compute on one block.
TIME_LIMIT = timedelta(minutes=5)
PRELOAD = ["torch.distributed", "torch.fx.experimental.symbolic_shapes"]  # once, not once a rank: backward, 0.6 s
LOOK = 1.0  # seconds between two looks at ranks that do not answer
GRACE = 5.0  # seconds for the other ranks once a rank has raised
LOST_CONNECTION = re.compile(
    "Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Timed out waiting|timed out|"
    "Socket closed|remote process exited"
)

Frame = tuple[str, int, str]  # (file, line, function)
HERE = Path(__file__).parent
CALLERS = tuple(f"{path}{os.sep}" for path in (Path(torch.__file__).parent, HERE, HERE.parents[1] / "ring_doctor"))
PYTHON = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
INSTALLED = f"{os.sep}site-packages{os.sep}"


@dataclass(frozen=True)
class RankContext:
    """Where this process stands in the job."""

    rank: int
    world_size: int
    device: torch.device
    why: str  # the reason for this device and backend, for the reader


@contextmanager
def join_ring(requested_device: str = "auto", local_world_size: int = 0, **init: Any) -> Iterator[RankContext]:
    """Join the job that started this process, yield this rank's RankContext, and leave in order.

    Reads torchrun's environment, or Slurm's or MPI's, also for `local_world_size`, how many processes share this host;
    `init` goes to init_process_group. Raises ValueError where neither says how many ranks there are, and as
    `choose_device` does.
    Raises RuntimeError when the body ends by sys.exit(0): the job would count that as success, and other ranks wait.
    """
    if "WORLD_SIZE" not in os.environ and "world_size" not in init:
        raise ValueError(f"no WORLD_SIZE is set; expected it of torchrun: torchrun --nproc_per_node=4 {sys.argv[0]}")
    world_size = init.get("world_size") or int(os.environ["WORLD_SIZE"])
    local_world_size = local_world_size or on_this_host(COUNT, world_size)
    one_host = local_world_size >= world_size
    number = init["rank"] if one_host and "rank" in init else on_this_host(NUMBER, 0)
    gpus = torch.cuda.device_count()
    if requested_device != "cpu" and gpus == 1 < local_world_size and "init_method" not in init:
        if "store" not in init:
            init["store"], init["rank"], init["world_size"] = next(rendezvous("env://"))
        gpus = local_world_size if sees_its_own(number, min(local_world_size, world_size), init["store"]) else 1
    device_type, backend, why = choose_device(requested_device, local_world_size, gpus)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", number % torch.cuda.device_count())
        if gpus < local_world_size:
            share_gpus(number, local_world_size)
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # else messages wait until attention leaves an SM free
        torch.cuda.set_device(device)
        init = {"device_id": device, **init}  # else each pair of ranks that sends makes a communicator of its own
    if one_host:  # loopback always works
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(max(1, cpu_cores() // local_world_size))  # with more, the ranks compete for the cores
    dist.init_process_group(backend, **{"timeout": TIME_LIMIT, **init})
    if backend == "gloo":
        dist.barrier()  # or a rank that ends early closes connections that slower ranks still open
    try:
        yield RankContext(dist.get_rank(), world_size, device, f"{device_type} with {backend}: {why}")
    except SystemExit as end:
        if not end.code:
            raise RuntimeError("sys.exit(0) inside join_ring: expected every rank to work to the end") from end
        raise
    if parent_process() is None:  # torchrun's: a model in a ring holds itself in a circle, and goes before the group
        gc.collect()
    dist.destroy_process_group()  # not after an error: it could wait for ever


def own_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame, `frames` begin with it, of the user's own files, or else of a library that they call."""
    called = [frame for frame in frames if not frame[0].startswith(("<", *CALLERS))]
    own = [frame for frame in called if not frame[0].startswith(PYTHON) and INSTALLED not in frame[0]]
    libraries = [frame for frame in called if INSTALLED in frame[0]]
    return next(iter([*own, *libraries]), None)


def place(frame: Frame | None) -> str:
    """A frame in words: "ring.py, line 12 in attention"; "" for none."""
    if frame is None:
        return ""
    file, line, function = frame
    here = Path(file).is_relative_to(Path.cwd())
    short = Path(file).relative_to(Path.cwd()) if here else Path(file).name
    return f"{short}, line {line}" + (f" in {function}" if function != "<module>" else "")


def place_of(error: BaseException) -> str:
    """Where an error was raised, as `place` says it."""
    frames = traceback.extract_tb(error.__traceback__)
    return place(own_frame([(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(frames)]))


@dataclass(frozen=True)
class Raised:
    """The error of a rank, in place of its result."""

    kind: str  # "ValueError", "RuntimeError", ...
    message: str
    trace: str
    where: str = ""  # "ring.py, line 12 in attention": in the user's own files, if it passed through them

    @property
    def lost_connection(self) -> bool:
        """Whether it was raised because another rank had failed: that rank's connections close."""
        kinds = ("RuntimeError", "DistBackendError", "DistNetworkError")
        return self.kind in kinds and LOST_CONNECTION.search(self.message) is not None


class LostRank(BaseException):
    """A rank died or did not answer. It is no Exception, or Hypothesis would try hundreds of smaller examples."""

    def __init__(self, reason: str, raised: dict[int, Raised], silent: Sequence[int] = ()) -> None:
        super().__init__(reason + "".join(f"\nrank {rank} raised: {error.trace}" for rank, error in raised.items()))
        self.reason, self.raised = reason, raised  # by other ranks
        self.silent = silent  # the ranks without an answer in time; none: one died


class Ranks:
    """The processes, or none until they are needed."""

    def __init__(self, size: int = 8, seconds: float = 60.0, device: str = "cpu", errors: Path | None = None) -> None:
        """At most `size` ranks. A call may take `seconds`; a message, twice as long: the end of a call comes first.
        What the ranks write to stderr comes into the folder `errors`, a file for each, or to this process's stderr."""
        self._size, self.seconds, self._device, self._errors = size, seconds, device, errors
        choose_device(device, size)
        self.waits = True  # whether the other ranks may answer when one has raised
        self.hang: Callable[[list[int]], bool] = lambda silent: False  # whether these ranks will never answer
        self._forget()

    def _forget(self) -> None:
        self._workers: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None  # where the ranks meet
        self._world, self._world_size = 0, 0  # the number of the process group that the ranks are in, and its size

    def __call__(self, world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """The result of each rank. Raises RuntimeError if a rank raised, LostRank if it died or did not answer."""
        outcomes = self.outcomes(world_size, work, *args)
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, Raised):
                raise RuntimeError(f"rank {rank} raised: {outcome.trace}")
        return outcomes

    def outcomes(self, world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """The result of each rank, or `Raised`. Raises LostRank if one died or was too slow."""
        if not all(worker.is_alive() for worker in self._workers):
            self.stop()
        if not self._workers:
            self._start()
        if world_size != self._world_size:
            self._world, self._world_size = self._world + 1, world_size
        request = pickle.dumps((self._world, world_size, work, args))
        outcomes: dict[int, Any] = {}
        for pipe in self._pipes[:world_size]:
            with suppress(OSError):  # it ended while it started: then its pipe has ended too
                pipe.send_bytes(request)
        deadline = time.monotonic() + self.seconds
        while len(outcomes) < world_size:
            waiting = {rank: self._pipes[rank] for rank in range(world_size) if rank not in outcomes}
            answered = connection.wait(list(waiting.values()), timeout=max(0.0, min(LOOK, deadline - time.monotonic())))
            if not answered and (time.monotonic() >= deadline or self.hang(list(waiting))):
                self._give_up(f"rank(s) {list(waiting)} did not answer in time", outcomes, list(waiting))
            for rank, pipe in waiting.items():
                if pipe in answered:
                    try:
                        outcomes[rank] = pickle.loads(pipe.recv_bytes())
                    except (EOFError, OSError):
                        self._workers[rank].join(GRACE)
                        status = self._workers[rank].exitcode or 0
                        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                        self._give_up(f"rank {rank} died ({how})", outcomes)
            if raised := [outcome for outcome in outcomes.values() if isinstance(outcome, Raised)]:
                wait = self.waits or all(each.lost_connection for each in raised)  # which follows from another error
                deadline = min(deadline, time.monotonic() + (GRACE if wait else 0))
        if any(isinstance(outcome, Raised) and outcome.kind != "ValueError" for outcome in outcomes.values()):
            self._world_size = 0  # messages may still be under way in this process group: the next call forms a new one
        return [outcomes[rank] for rank in range(world_size)]

    def stop(self, grace: float = 0.0) -> None:
        """End the processes. They have `grace` seconds to end by themselves, so that what they have printed is seen."""
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.join(grace)
            worker.kill()
            worker.join()
        self._forget()

    def _start(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        limit = timedelta(seconds=2 * self.seconds) if self.seconds < math.inf else TIME_LIMIT
        for rank in range(self._size):
            here, there = context.Pipe()
            of_rank = rank, self._size, self._store.port, there, self._device, limit, self._errors
            worker = context.Process(target=_serve, args=of_rank, daemon=True)
            worker.start()
            self._workers.append(worker)  # now it can be ended: a signal may come while it starts
            self._pipes.append(here)
            there.close()  # the worker's copy is now the only one, so its death ends the pipe

    def _give_up(self, reason: str, outcomes: dict[int, Any], silent: Sequence[int] = ()) -> NoReturn:
        self.stop()
        raise LostRank(reason, {rank: each for rank, each in outcomes.items() if isinstance(each, Raised)}, silent)


def _end_with_parent() -> None:
    """In a thread of its own: end this rank when the process that started it ends, even when that was killed."""
    connection.wait([parent_process().sentinel])  # type: ignore[union-attr]  # only a child runs this
    os._exit(1)


def _serve(
    rank: int, size: int, port: int, pipe: Connection, device: str, limit: timedelta, errors: Path | None
) -> None:
    """The life of a rank: receive some work, join the process group for it, send back the result."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C: the process that started the pool ends this one
    if errors:
        with (errors / f"stderr of rank {rank}").open("wb") as file:
            os.dup2(file.fileno(), 2)
    store, joined, job = dist.TCPStore("127.0.0.1", port, is_master=False), None, ExitStack()
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return  # the process that started the pool has ended, or needs no more
        try:
            world, world_size, work, args = pickle.loads(request)
            if world != joined:
                job.close()
                names = dist.PrefixStore(f"world {world}", store)  # no key of an earlier group is seen
                here = {"rank": rank, "world_size": world_size, "store": names, "timeout": limit}
                context = job.enter_context(join_ring(device, size, **here))
                joined = world
            outcome = work(context, *args)
        except (Exception, SystemExit) as error:
            trace = "".join(traceback.format_exception(error))
            outcome = Raised(type(error).__name__, str(error), trace, place_of(error))
        with suppress(OSError):  # the process that asked may have given up: then the next request is the end
            pipe.send_bytes(pickle.dumps(outcome))
        if joined and isinstance(outcome, Raised) and outcome.kind != "ValueError" and context.device.type == "cpu":
            job.close()  # and its connections: ranks that wait for its messages notice at once


def launch(work: Callable[..., Any], world_size: int, *args: Any, device: str = "cpu") -> list[Any]:
    """Run work(context, *args) on `world_size` new processes of this host and return what each returned, by rank.

    `device` is as in `choose_device`. The first rank that fails ends all the others. When it raised ValueError, so does
    this, with the same message. Otherwise this raises RuntimeError with the rank's traceback, signal or exit status.
    """
    ranks, reason, died = Ranks(world_size, math.inf, device), "", False
    ranks.waits = False
    try:
        outcomes = ranks.outcomes(world_size, work, *args)
        ranks.stop(GRACE)
        raised = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Raised)}
    except LostRank as lost:
        raised, reason, died = lost.raised, lost.reason, not lost.silent
    finally:
        ranks.stop()
    for rank, error in sorted(raised.items(), key=lambda each: each[1].lost_connection):
        if not (error.lost_connection and died):  # else it lost its connection to the one that died
            value = error.kind == "ValueError"
            raise ValueError(error.message) if value else RuntimeError(f"rank {rank} failed: {error.trace}")
    if reason:
        raise RuntimeError(f"{reason} before its work was done")
    return outcomes
