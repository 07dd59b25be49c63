"""The steps of every ring of this project, recorded from its real code; happens_before.py checks every order of them.

The code runs once as rank 0, once as rank 1, ..., each time in this process. Functions of torch.distributed that note
what they are asked for take the place of the messages. Each operation of torch says which memory it reads and writes.
What remains is memory that is sent or received. A block has one token with B = H
= G = D = 1 in float32, so a cell of memory is a number.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ring_attn
from ringlab.ring import backward
from ringlab.ring.flash_ring import flash_backward, flash_forward
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.ring.schedule import Ring, Schedule
from ringlab.ways.double_ring import DoubleRing
from tests.orders.happens_before import Cells, Irecv, Isend, Step, Use, Wait

aten = torch.ops.aten
TOUCH_NOTHING = (aten.empty_like, aten.new_empty)
DO_NOT_READ = (aten.copy_, aten.zero_, aten.fill_)  # what they write


class Place(NamedTuple):
    """Some numbers of a storage."""

    storage: int
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> "Place":
        steps = (range(0, n * step, step) if step else [0] * n for n, step in zip(x.shape, x.stride(), strict=True))
        first = x.storage_offset() * x.itemsize // 4
        return cls(x.untyped_storage().data_ptr(), tuple(first + sum(at) for at in itertools.product(*steps)))


@dataclass(frozen=True)
class Access:
    """An operation reads or writes some memory."""

    memory: Place
    writes: bool


@dataclass(frozen=True)
class Begun:
    """A message that begins."""

    kind: type[Isend] | type[Irecv]
    peer: int
    memory: Place
    channel: str


class Recorder(TorchDispatchMode):
    """Notes what a rank does: its messages and accesses to memory, in this order."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.notes: list[Access | Begun | Wait] = []
        self.alive: list[Any] = []  # so that no storage gets the address of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.alive += [x.untyped_storage() for x in (*inputs, *tree_leaves(out)) if isinstance(x, Tensor)]
        aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info]
        written = any(alias.is_write for alias in aliases)
        if func.namespace == "c10d" or func.overloadpacket in TOUCH_NOTHING or (aliases and not written):
            return out  # a message, which was noted by whoever asked for it; no numbers; a view
        self.notes += [Access(Place.of(x), False) for x in inputs[func.overloadpacket in DO_NOT_READ :]]
        if written:  # results in new memory are nobody else's
            self.notes.append(Access(Place.of(inputs[0]), True))
        return out

    def begin(self, kind: type[Isend] | type[Irecv], peer: int, x: Tensor, channel: str) -> int:
        """Note the beginning of a message. Returns its number, for a Wait."""
        self.alive.append(x.untyped_storage())
        self.notes.append(Begun(kind, peer, Place.of(x), channel))
        return len(self.notes) - 1

    def steps(self) -> list[Step]:
        """The program of this rank. Wait steps in the notes count notes; here they count steps."""
        names: dict[int, str] = {}  # of storages in messages
        steps, at = list[Step](), dict[int, int]()
        for note in self.notes:
            if isinstance(note, Begun):
                names.setdefault(note.memory.storage, f"buffer {len(names)}")

        def cells(memory: Place) -> Cells:
            return tuple(f"{names[memory.storage]}, number {n}" for n in memory.numbers)

        for n, note in enumerate(self.notes):
            at[n] = len(steps)
            if isinstance(note, Begun):
                steps.append(note.kind(note.peer, cells(note.memory), note.channel))
            elif isinstance(note, Wait):
                together = steps.pop().steps if steps and isinstance(steps[-1], Wait) else ()
                steps.append(Wait((*together, *(at[m] for m in note.steps))))
            elif note.memory.storage in names:
                steps.append(Use(cells(note.memory), note.writes))
        return steps


@dataclass(frozen=True)
class PaperGroup:
    """In place of a process group."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class PaperMesh:
    """In place of a mesh of hosts x devices, as one rank sees it."""

    shape: tuple[int, int]
    rank: int

    def get_coordinate(self) -> tuple[int, int]:
        return divmod(self.rank, self.shape[1])

    def get_all_groups(self) -> tuple[PaperGroup, PaperGroup]:
        (n, g), (host, device) = self.shape, self.get_coordinate()
        inside = tuple(host * g + i for i in range(g))
        return PaperGroup(tuple(a * g + device for a in range(n))), PaperGroup(inside)


class PaperWork(NamedTuple):
    recorder: Recorder
    number: int

    def wait(self) -> None:
        self.recorder.notes.append(Wait((self.number,)))


@contextmanager
def on_paper(recorder: Recorder, world_size: int) -> Iterator[None]:
    """torch.distributed as this rank of a job sees it; what it sends and receives is noted, and nothing else."""

    def ranks_of(group: PaperGroup | None) -> tuple[int, ...]:
        return group.ranks if group else tuple(range(world_size))

    def post(kind: Any, x: Tensor, peer: int, group: PaperGroup | None) -> PaperWork:
        return PaperWork(recorder, recorder.begin(kind, ranks_of(group)[peer], x, str(ranks_of(group))))

    def send(x: Tensor, *, group_dst: int, group: Any = None) -> None:
        post(Isend, x, group_dst, group).wait()

    def recv(x: Tensor, *, group_src: int, group: Any = None) -> None:
        post(Irecv, x, group_src, group).wait()

    def batch(operations: list[Any]) -> list[PaperWork]:
        return [post(Isend if op is dist.isend else Irecv, *rest) for op, *rest in operations]

    with mock.patch.multiple(
        dist,
        is_initialized=lambda: True,
        get_rank=lambda group=None: ranks_of(group).index(recorder.rank),
        get_world_size=lambda group=None: len(ranks_of(group)),
        send=send,
        recv=recv,
        P2POp=lambda op, tensor, *, group, group_peer: (op, tensor, group_peer, group),
        batch_isend_irecv=batch,
    ):
        yield


def inputs() -> list[Tensor]:
    """q, k, v and d_out of one token."""
    return [torch.ones(1, 1, 1, 1) for _ in range(4)]


def blocking(rank: int, partition: Partition) -> None:
    """ring_attn.py, and then its backward pass."""
    (q, k, v, d_out), lengths = inputs(), list(partition.lengths)
    out, lse = ring_attn.ring_forward(q, k, v, scale=1.0, lengths=lengths)
    backward.ring_backward(q, k, v, out, lse, d_out, scale=1.0, lengths=lengths)


@dataclass(frozen=True)
class Scheduled:
    """flash_ring.py with a schedule, forward, and then backward."""

    schedule: type[Schedule]
    group_of: Callable[[int], Any] = lambda rank: None

    def __call__(self, rank: int, partition: Partition) -> None:
        (q, k, v, d_out), schedule = inputs(), self.schedule(partition, 1.0, self.group_of(rank))
        out, lse = flash_forward(q, k, v, schedule)
        flash_backward(q, k, v, out, lse, d_out, schedule)


Code = Callable[[int, Partition], None]


def rings_of(world_size: int) -> dict[str, Code]:
    """The rings of this project for so many ranks, by name."""
    meshes = [(n, world_size // n) for n in range(1, world_size + 1) if world_size % n == 0]
    return {
        "blocking": blocking,
        "overlapped": Scheduled(Ring),
        **{f"double {n} x {g}": Scheduled(DoubleRing, partial(PaperMesh, (n, g))) for n, g in meshes},
    }


def programs(ring: Code, world_size: int, mask: Mask | None = None) -> list[list[Step]]:
    """The steps of each rank, forward and backward, recorded from the code of a ring."""
    partition, found = Partition(mask or Mask(), "contiguous", (1,) * world_size), []
    for rank in range(world_size):
        with on_paper(recorder := Recorder(rank), world_size), recorder:
            ring(rank, partition)
        found.append(recorder.steps())
    return found
