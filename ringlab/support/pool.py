"""Real processes that stay alive between calls: to start one costs a second, a small ring some milliseconds.

    ranks = Ranks()
    ranks(3, work, x)    ->  [work(context, x) as rank 0 of 3 returned it, as rank 1 did, as rank 2 did]

`work` must be a function of a module; its arguments and its result are pickled. A rank that dies, or does not answer in
time, ends all; the next call starts new ones. The tests and the doctor use them. A reader of the ring may skip this
file.
"""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ringlab.support.processes import (
    NO_GUARD,
    UNGUARDED,
    Raised,
    RankContext,
    choose_device,
    end_with_parent,
    forkserver,
    prepare,
)

LOOK = 1.0  # seconds between two looks at ranks that do not answer
GRACE = 5  # seconds for the other ranks once a rank has raised


class LostRank(BaseException):
    """A rank died or did not answer. It is no Exception, or Hypothesis would try hundreds of smaller examples."""

    def __init__(self, reason: str, raised: dict[int, Raised]) -> None:
        super().__init__(reason + "".join(f"\nrank {rank} raised: {error.trace}" for rank, error in raised.items()))
        self.reason, self.raised = reason, raised  # what other ranks had raised before


class Ranks:
    """The processes, or none until they are needed."""

    def __init__(self, size: int = 8, seconds: float = 60.0, device: str = "cpu", errors: Path | None = None) -> None:
        """At most `size` ranks. A call may take `seconds`; a message, twice as long: the end of a call comes first.

        `errors`: a folder for what the ranks write to stderr, a file for each; None: the stderr of this process.
        """
        self._size, self.seconds, self._device, self._errors = size, seconds, device, errors
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
        """The result of each rank, or `Raised`. Raises LostRank if a rank died or did not answer.

        Raises ValueError in a script that starts ranks outside `if __name__ == "__main__":`.
        """
        if not all(worker.is_alive() for worker in self._workers):
            self.stop()
        if not self._workers:
            self._start()
        if world_size != self._world_size:
            self._world, self._world_size = self._world + 1, world_size
        request = pickle.dumps((self._world, world_size, work, args))
        outcomes: dict[int, Any] = {}
        for rank, pipe in enumerate(self._pipes[:world_size]):
            try:
                pipe.send_bytes(request)
            except OSError:  # it ended while it started
                self._give_up(self._death_of(rank), outcomes)
        deadline = time.monotonic() + self.seconds
        while len(outcomes) < world_size:
            waiting = {rank: self._pipes[rank] for rank in range(world_size) if rank not in outcomes}
            answered = wait(list(waiting.values()), timeout=max(0.0, min(LOOK, deadline - time.monotonic())))
            if not answered and (time.monotonic() >= deadline or self.hang(list(waiting))):
                self._give_up(f"rank(s) {list(waiting)} did not answer in time", outcomes)
            for rank, pipe in waiting.items():
                if pipe in answered:
                    try:
                        outcomes[rank] = pickle.loads(pipe.recv_bytes())
                    except (EOFError, OSError):
                        self._give_up(self._death_of(rank), outcomes)
            if any(isinstance(outcome, Raised) for outcome in outcomes.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        if any(isinstance(outcome, Raised) and outcome.kind != "ValueError" for outcome in outcomes.values()):
            self._world_size = 0  # messages may still be under way in this process group: the next call forms a new one
        return [outcomes[rank] for rank in range(world_size)]

    def stop(self) -> None:
        """End the processes; another call would start new ones."""
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._forget()

    def _start(self) -> None:
        context = forkserver()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        device, backend, _ = choose_device(self._device, self._size)
        for rank in range(self._size):
            here, there = context.Pipe()
            of_rank = rank, self._store.port, there, device, backend, timedelta(seconds=2 * self.seconds), self._errors
            self._workers.append(context.Process(target=_serve, args=of_rank, daemon=True))
            self._pipes.append(here)
            self._workers[-1].start()
            there.close()  # the worker's copy is now the only one, so its death ends the pipe

    def _death_of(self, rank: int) -> str:
        """How a rank died, in words. Raises ValueError when it ended because a script has no main guard."""
        worker = self._workers[rank]
        worker.join(GRACE)
        status = worker.exitcode or 0
        if status == NO_GUARD:
            self.stop()
            raise ValueError(UNGUARDED) from None
        return f"rank {rank} died ({signal.Signals(-status).name if status < 0 else f'exit status {status}'})"

    def _give_up(self, reason: str, outcomes: dict[int, Any]) -> NoReturn:
        self.stop()
        raise LostRank(reason, {rank: each for rank, each in outcomes.items() if isinstance(each, Raised)})


def _serve(
    rank: int, port: int, pipe: Connection, device_type: str, backend: str, limit: timedelta, errors: Path | None
) -> None:
    """The life of a rank: receive some work, join the process group for it, send back the result."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C: the process that started the pool ends this one
    if errors:
        with (errors / f"stderr of rank {rank}").open("wb") as file:
            os.dup2(file.fileno(), 2)
    device = prepare(device_type, rank, threads=1, one_host=True)  # one thread: the ranks share a few cores
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    joined = None
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return  # the process that started the pool has ended
        try:
            world, world_size, work, args = pickle.loads(request)
            if world != joined:
                if dist.is_initialized():
                    dist.destroy_process_group()
                names = dist.PrefixStore(f"world {world}", store)  # no key of an earlier group is seen
                dist.init_process_group(backend, store=names, rank=rank, world_size=world_size, timeout=limit)
                joined = world
            outcome = work(RankContext(rank, world_size, device, "a pool of ranks"), *args)
        except Exception as error:
            outcome = Raised.of(error)
        pipe.send_bytes(pickle.dumps(outcome))
