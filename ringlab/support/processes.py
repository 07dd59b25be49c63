"""Start the processes of a ring, give each its device, and end them together.

    with join_ring() as context:            under torchrun, on one host or many
    launch(work, 4, *args)                  starts 4 processes on this host: work(context, *args) on each

One process drives one device. If every process of the host can have a GPU, they use GPUs and NCCL; otherwise they share
the CPU's cores and use gloo. The first rank that fails ends all the others, and the caller gets its reason.

A reader of the ring may skip this file.
Source: the PyTorch manual, torch.distributed.
"""

import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from ringlab.support.places import place_of

# The longest wait for one message. When a rank ends, its connections close, and the others notice at once. The limit is
# for a rank that hangs. It must exceed the time that a slow machine needs to compute on one block.
TIME_LIMIT = timedelta(minutes=5)
NO_GUARD = 96  # the exit status of a rank that would start ranks while it imports the script
UNGUARDED = (
    "each process imports this script, and the script would start processes again; expected its last lines under "
    "`if __name__ == '__main__':`"
)
# Imported once, not once a rank: torch, and what the first backward pass imports (0.6 s).
PRELOAD = ["torch.distributed", "torch.fx.experimental.symbolic_shapes"]
# fmt: off
LOST_CONNECTION = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused",
    "Timed out waiting", "timed out", "Socket closed", "remote process exited",
)
# fmt: on
FAILED = "failed-"  # the files in which the ranks of `launch` say why they fail; their names sort by time


@dataclass(frozen=True)
class RankContext:
    """Where this process stands in the job."""

    rank: int
    world_size: int
    device: torch.device
    why: str  # the reason for this device and backend, for the reader


@dataclass(frozen=True)
class Raised:
    """The error of a rank, in place of its result."""

    kind: str  # "ValueError", "RuntimeError", ...
    message: str
    trace: str
    where: str = ""  # "ring.py, line 12 in attention": in the user's own files, if it passed through them

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        """The kind, message, trace and place of an error."""
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)), place_of(error))

    @property
    def lost_connection(self) -> bool:
        """Whether it was raised because another rank had failed: that rank's connections close."""
        return self.kind in ("RuntimeError", "DistBackendError", "DistNetworkError") and any(
            words in self.message for words in LOST_CONNECTION
        )


def choose_device(requested: str, local_world_size: int) -> tuple[str, str, str]:
    """("cuda" or "cpu", "nccl" or "gloo", the reason), for `local_world_size` processes on this host.

    `requested` is "auto", "cuda" or "cpu". Raises ValueError for another word, and for "cuda" with too few GPUs.
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {requested!r}; expected 'auto', 'cpu' or 'cuda'")
    gpus = torch.cuda.device_count()
    count = f"{gpus} GPU(s) for {local_world_size} process(es) on this host"
    if requested == "cpu":
        return "cpu", "gloo", "as asked"
    if gpus >= local_world_size:
        return "cuda", "nccl", count
    if requested == "cuda":
        raise ValueError(
            f"--device cuda needs one GPU for each process: {count}. Start fewer processes or use --device cpu"
        )
    return "cpu", "gloo", count


def cpu_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forkserver() -> ForkServerContext:
    """The way to start ranks: each is a fork of a process that has imported PRELOAD.

    A rank imports the script that starts it. If the script's last lines then start ranks again, this ends the rank.
    """
    frames = (frame for frame, _ in traceback.walk_stack(None))
    if any(frame.f_globals["__name__"] == "__mp_main__" and frame.f_code.co_name == "<module>" for frame in frames):
        os._exit(NO_GUARD)
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def prepare(device_type: str, number: int, threads: int, *, one_host: bool) -> torch.device:
    """Set this process's GPU (the host's GPU of this number), threads and network interface. Returns its device."""
    if one_host:  # loopback always works
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(threads)
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(device_type, number)
    torch.cuda.set_device(device)
    return device


@contextmanager
def join_ring(requested_device: str = "auto", **init: Any) -> Iterator[RankContext]:
    """Join the job that started this process, yield this rank's RankContext, and leave in order.

    Reads torchrun's environment; `init` goes to init_process_group (`launch` passes init_method, rank and world_size).
    Each rank gets its own GPU or its share of the cores. Raises ValueError as `choose_device` does, and RuntimeError
    when the body ends by sys.exit(0): the job would count that as success, and the other ranks would wait for this one.
    """
    world_size = init.get("world_size") or int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device_type, backend, why = choose_device(requested_device, local_world_size)
    number = int(os.environ.get("LOCAL_RANK", init.get("rank", 0)))
    threads = max(1, cpu_cores() // local_world_size)  # with more threads the ranks compete for the cores
    device = prepare(device_type, number, threads, one_host=local_world_size == world_size)
    dist.init_process_group(backend, timeout=TIME_LIMIT, **init)
    if backend == "gloo":
        dist.barrier()  # or a rank that ends early closes connections that slower ranks still open
    try:
        yield RankContext(dist.get_rank(), world_size, device, f"{device_type} with {backend}: {why}")
    except SystemExit as end:
        if not end.code:
            raise RuntimeError("sys.exit(0) inside join_ring: expected every rank to work to the end") from end
        raise
    dist.destroy_process_group()  # not after an error: it could wait for ever


def launch(work: Callable[..., Any], world_size: int, *args: Any, device: str = "cpu") -> list[Any]:
    """Run work(context, *args) on `world_size` new processes of this host and return what each returned, by rank.

    `work` must be a function of a module; its arguments and its result must be picklable. `device` is as in
    `choose_device`. The first rank that fails ends all the others. When it raised ValueError, so does this, with the
    same message. Otherwise this raises RuntimeError with the rank's traceback, signal or exit status.
    """
    choose_device(device, world_size)
    context = forkserver()
    with TemporaryDirectory() as name:  # where the ranks meet, and write their results or their reasons to fail
        folder = Path(name)
        workers = [
            context.Process(target=_run_rank, args=(rank, world_size, folder, device, work, args), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for worker in workers:
                worker.start()
            failed = _wait(workers, folder)
        finally:
            for worker in workers:
                worker.kill()  # has no effect on a worker that has ended
                worker.join()
        if failed:
            raise _reason(failed, folder)
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world_size)]


def _wait(workers: Sequence[BaseProcess], folder: Path) -> dict[int, int]:
    """Wait until all are done or one has failed. Returns {rank: exit status} of those that ended without a result."""
    running: Sequence[BaseProcess] = workers
    failed: dict[int, int] = {}
    while running and not failed:
        connection.wait([worker.sentinel for worker in running])
        running = [worker for worker in workers if worker.is_alive()]
        ended = {rank: worker.exitcode or 0 for rank, worker in enumerate(workers) if worker not in running}
        failed = {rank: status for rank, status in ended.items() if status or not (folder / str(rank)).exists()}
    return failed


def _reason(failed: dict[int, int], folder: Path) -> ValueError | RuntimeError:
    """The reason of the rank that failed first. The others fail because they lost their connection to it."""
    told = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{FAILED}*"))]
    for rank, status in failed.items():
        if status == NO_GUARD:
            return ValueError(UNGUARDED)
        if rank not in {other for other, *_ in told}:  # it wrote no reason
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"left with exit status {status}"
            return RuntimeError(f"rank {rank} {how} before its work was done")
    rank, *first = told[0]
    raised = Raised(*first)
    if raised.kind == "ValueError":
        return ValueError(raised.message)
    return RuntimeError(f"rank {rank} failed: {raised.trace}")


def _run_rank(
    rank: int, world_size: int, folder: Path, device: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    init = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": world_size}
    try:
        with join_ring(device, **init) as context:
            result = work(context, *args)
        (folder / str(rank)).write_bytes(pickle.dumps(result))
    except BaseException as error:
        told = folder / f"telling-{rank}"
        told.write_text(json.dumps([rank, *astuple(Raised.of(error))]))
        told.rename(folder / f"{FAILED}{time.monotonic_ns():020}-{rank}")  # complete, even if this rank is killed now
        os._exit(1)


def end_with_parent() -> None:
    """In a thread of its own: end this rank when the process that started it ends, even when that was killed."""
    parent = parent_process()
    assert parent is not None, "only the processes that this one starts call this"
    connection.wait([parent.sentinel])
    os._exit(1)
