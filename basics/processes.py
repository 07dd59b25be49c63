"""The processes of a ring: start them, find your neighbours, agree before you send, and end together.

    rank r of P:   receives from (r - 1) mod P,  sends to (r + 1) mod P,  holds chunk r of the sequence

Shapes: `scatter` cuts (B, H, S, D) along S into P chunks, the first S mod P one token longer; `gather` joins them.
One process drives one device: a GPU each with NCCL where every process can have one, else CPU cores with gloo.
Processes come from torchrun, one host or many, or from `launch`, which starts them on this host.

    $ python -m basics.processes
    4 processes would use cpu with gloo: 0 GPU(s) for 4 process(es) on this host
    rank 0 of 3: 3 tokens; receives from 2, sends to 1
    rank 1 of 3: 3 tokens; receives from 0, sends to 2
    rank 2 of 3: 2 tokens; receives from 1, sends to 0
    a rank fails and all end, after 0.0 s: OverflowError: rank 1 gives up

Before: blocking_messages.py. After: timeline.py, then ../ring_attn.py, the ring on these processes.
Source: the PyTorch manual, torch.distributed; Liu et al. 2024, section 3 (one chunk of the sequence on every host).
"""

import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from basics.naive_attention import TOKENS

# The longest wait for one message. A rank that ends is noticed at once, because its connections close; the limit is for
# one that neither ends nor answers. It must exceed the time that a slow machine computes on one block.
TIME_LIMIT = timedelta(minutes=5)
LETTER = 512  # bytes, enough for what a ring has to agree on
RESULT_LIMIT = 8_000_000  # bytes; a TCPStore takes no value above 8 MiB


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job."""

    rank: int
    world_size: int
    device: torch.device
    why: str  # the reason for this device and backend, for the reader


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


@contextmanager
def join_ring(requested_device: str = "auto", **init: Any) -> Iterator[Place]:
    """Join the job that started this process, yield this rank's Place, and leave in order.

    Reads torchrun's environment; `init` goes to init_process_group (`launch` passes store, rank and world_size).
    Each rank gets its own GPU or its share of the cores. Raises ValueError as `choose_device` does.
    """
    world_size = init.get("world_size") or int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device_type, backend, why = choose_device(requested_device, local_world_size)
    if local_world_size == world_size:  # all on this host: loopback works whatever the network around it does
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", init.get("rank", 0))))
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, cpu_cores() // local_world_size))  # more, and the ranks fight for the cores
    dist.init_process_group(backend, timeout=TIME_LIMIT, **init)
    yield Place(dist.get_rank(), world_size, device, f"{device_type} with {backend}: {why}")
    dist.destroy_process_group()  # not after an error: it could wait for messages that never come


def neighbours(group: ProcessGroup | None = None) -> tuple[int, int, int, int]:
    """(rank, world_size, next_rank, prev_rank), all counted inside `group` (None: the whole job).

    Raises ValueError when no process group exists or this process is not in `group`.
    """
    if not dist.is_initialized():
        raise ValueError("no process group here; start the ring with torchrun, or with basics.processes.launch")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"global rank {dist.get_rank()} is not in the group; expected only its members to call")
    return rank, world_size, (rank + 1) % world_size, (rank - 1) % world_size


def agree(check: Callable[[], Any], group: ProcessGroup | None = None) -> list[Any]:
    """Run `check` on every rank and give each rank the results of all, in order of rank.

    When it raises ValueError on some rank, the same ValueError is raised on all of them, so that no rank is left
    waiting for a message from one that has given up. Every rank of the group must call this.
    """
    _, world_size, _, _ = neighbours(group)
    try:
        mine = (check(), None)
    except ValueError as error:
        mine = (None, str(error))
    everyone = _exchange_letters(mine, world_size, group)
    wrong = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(everyone) if error]
    if wrong:
        raise ValueError("\n".join(wrong))
    return [facts for facts, _ in everyone]


def _exchange_letters(mine: Any, world_size: int, group: ProcessGroup | None) -> list[Any]:
    """all_gather_object, which sends sizes first and goes round step by step: here, if every object fits into LETTER
    bytes, each rank sends its own to all the others at once.
    """
    text = pickle.dumps(mine)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    letter = torch.zeros(LETTER, dtype=torch.uint8, device=device)
    if len(text) <= LETTER:  # else a letter of zeros, which no pickle begins with
        letter[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    copies = letter.repeat(world_size, 1)  # (P, LETTER), one for each rank
    letters = torch.empty_like(copies)
    dist.all_to_all_single(letters, copies, group=group)
    if letters[:, 0].all():
        return [pickle.loads(received.numpy().tobytes()) for received in letters.cpu()]
    everyone = [None] * world_size
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def scatter(x: Tensor | None, place: Place) -> Tensor:
    """Rank 0's tensor (B, H, S, D) -> every rank's chunk (B, H, C, D), on its device.

    C = S/P, rounded up on the first S mod P ranks and down on the others. All ranks but 0 pass None.
    Raises ValueError on every rank when S < P or x is not (B, H, S, D).
    """

    def check() -> tuple[list[torch.Size], torch.dtype] | None:
        if place.rank > 0:
            return None
        if x is None or x.dim() != 4:
            raise ValueError(f"x is {'None' if x is None else tuple(x.shape)}; expected (B, H, S, D) on rank 0")
        if x.shape[2] < place.world_size:
            raise ValueError(
                f"{x.shape[2]} tokens for {place.world_size} ranks; expected at least one token for each rank"
            )
        return [part.shape for part in x.tensor_split(place.world_size, dim=2)], x.dtype

    shapes, dtype = agree(check)[0]
    if place.rank == 0:
        chunks = [part.contiguous().to(place.device) for part in x.tensor_split(place.world_size, dim=2)]
        for to in range(1, place.world_size):
            dist.send(chunks[to], to)
        return chunks[0]
    chunk = torch.empty(shapes[place.rank], dtype=dtype, device=place.device)
    dist.recv(chunk, 0)
    return chunk


def gather(chunk: Tensor, place: Place) -> Tensor | None:
    """Every rank's chunk (B, H, C, D) -> the whole (B, H, S, D) on rank 0, else None. For checks: no ring needs it."""
    shapes = agree(lambda: chunk.shape)
    if place.rank > 0:
        dist.send(chunk.contiguous(), 0)
        return None
    chunks = [chunk] + [torch.empty(shape, dtype=chunk.dtype, device=place.device) for shape in shapes[1:]]
    for source in range(1, place.world_size):
        dist.recv(chunks[source], source)
    return torch.cat(chunks, dim=2)


def launch(work: Callable[..., Any], world_size: int, *args: Any, device: str = "auto") -> list[Any]:
    """Run work(place, *args) on `world_size` new processes of this host and return what each returned, by rank.

    `work` must be a function of a module, its arguments and result picklable, the result at most 8 MB. The first rank
    that fails ends all the others. Raises ValueError with the rank's message when the input was bad, otherwise
    RuntimeError with its traceback or with the signal that killed it.
    """
    choose_device(device, world_size)
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # import torch once, not once a rank
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [
        context.Process(target=_run_rank, args=(rank, world_size, store.port, device, work, args), daemon=True)
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    running = workers
    while running and not any(worker.exitcode for worker in workers):
        connection.wait([worker.sentinel for worker in running])
        running = [worker for worker in running if worker.is_alive()]
    failed = {rank: worker.exitcode for rank, worker in enumerate(workers) if worker.exitcode}
    for worker in workers:
        worker.kill()  # nothing to a worker that has ended
        worker.join()
    for rank, status in failed.items():
        if status < 0:  # looked at first: the other failures are its neighbours' lost connections
            raise RuntimeError(f"rank {rank} was killed by {signal.Signals(-status).name}")
    if store.check(["failure"]):
        rank, bad_input, text = json.loads(store.get("failure"))
        raise ValueError(text) if bad_input else RuntimeError(f"rank {rank} failed: {text}")
    if failed:
        raise RuntimeError(f"ranks ended before their work was done; exit status by rank: {failed}")
    return [pickle.loads(store.get(f"result/{rank}")) for rank in range(world_size)]


def _run_rank(
    rank: int, world_size: int, port: int, device: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        with join_ring(device, store=dist.PrefixStore("ring", store), rank=rank, world_size=world_size) as place:
            result = pickle.dumps(work(place, *args))
            if len(result) > RESULT_LIMIT:
                raise ValueError(f"rank {rank} returned {len(result):,} bytes; expected {RESULT_LIMIT:,} at most")
            store.set(f"result/{rank}", result)
    except BaseException as error:
        bad_input = isinstance(error, ValueError)
        failure = json.dumps([rank, bad_input, str(error) if bad_input else traceback.format_exc()])
        store.compare_set("failure", "", failure)  # the first to fail has the reason; the others lost their neighbour
        os._exit(1)


def _end_with_parent() -> None:
    """End this rank when the process that launched it is killed: a rank must not work on alone."""
    connection.wait([parent_process().sentinel])
    os._exit(1)


def _show(place: Place) -> str:
    rank, world_size, following, previous = neighbours()
    chunk = scatter(TOKENS[None, None] if rank == 0 else None, place)  # (1, 1, C, 2)
    whole = gather(chunk, place)
    assert rank > 0 or torch.equal(whole, TOKENS[None, None])
    return f"rank {rank} of {world_size}: {chunk.shape[2]} tokens; receives from {previous}, sends to {following}"


def _fail(place: Place) -> None:
    if place.rank == 1:
        raise OverflowError("rank 1 gives up")
    dist.recv(torch.empty(1), 1)  # would wait for ever


def main() -> int:
    device, backend, why = choose_device("auto", 4)
    print(f"4 processes would use {device} with {backend}: {why}")
    print("\n".join(launch(_show, 3, device="cpu")))
    start = time.monotonic()
    try:
        launch(_fail, 3, device="cpu")
    except RuntimeError as error:
        print(f"a rank fails and all end, after {time.monotonic() - start:.1f} s: {str(error).splitlines()[-1]}")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
