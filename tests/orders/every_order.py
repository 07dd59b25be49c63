"""The steps of every ring of this project, recorded from its real code; happens_before.py checks every order of them.

The code runs once as rank 0, once as rank 1, ..., each time in this process. Functions of torch.distributed that note
what they are asked for take the place of the messages. Each operation of torch says which memory it reads and writes.
A block has one token with B = H = G = D = 1, so a cell of memory is a number. The code itself says which block it
expects to have in hand: it asks the mask what to compute of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import ring_attn
from ringlab.support.host_memory import HostMemory
from ringlab.training import backward, shared_memory
from ringlab.training import schedule as schedules
from ringlab.training.causal import BlockSlice
from ringlab.training.double_ring import DoubleRing
from ringlab.training.flash_ring import ring_backward, ring_forward
from ringlab.training.masks import Mask
from ringlab.training.partition import Partition
from ringlab.training.schedule import Ring, Schedule
from ringlab.training.shared_memory import SharedMemory, TwoLevels
from tests.orders.happens_before import Await, Irecv, Isend, Raise, Read, Step, Wait, Write
from tests.orders.recorded_steps import Recorder, block_in, part_name

FLAGS = ("ready", "read", "turn", "home")
PARTS = ("copies", "sums")


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


class PaperMemory(HostMemory):
    """The memory of a host on which this rank is alone: it writes the flags down, and waits for none."""

    def __init__(self, recorder: Recorder, ranks: tuple[int, ...]) -> None:
        """`ranks` of the job are on this host."""
        self.recorder, self.ranks, self.rank, self.world_size = recorder, ranks, ranks.index(recorder.rank), len(ranks)
        self.views, self.readers = {}, []
        self.counts: dict[tuple[int, int], int] = {}  # of each flag and rank: how often it was waited for

    def part(self, which: int, rank: int, end: int) -> Tensor:
        if (which, rank) not in self.views:
            self.views[which, rank] = torch.empty(1024, dtype=torch.uint8)
            name = block_in(f"{PARTS[which]} of rank {self.ranks[rank]}")
            self.recorder.names[self.views[which, rank].untyped_storage().data_ptr()] = name
        return self.views[which, rank]

    def raise_flag(self, flag: int, to: int) -> None:
        self.recorder.notes.append(Raise(f"{FLAGS[flag]} {self.recorder.rank}->{self.ranks[to]}"))

    def wait(self, flag: int, of: int) -> None:
        self.counts[flag, of] = self.counts.get((flag, of), 0) + 1
        name = f"{FLAGS[flag]} {self.ranks[of]}->{self.recorder.rank}"
        self.recorder.notes.append(Await(name, self.counts[flag, of]))


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

    memories: dict[tuple[int, ...], PaperMemory] = {}

    def memory(group: PaperGroup | None) -> PaperMemory:
        ranks = ranks_of(group)
        if ranks not in memories:
            memories[ranks] = PaperMemory(recorder, ranks)
        return memories[ranks]

    with ExitStack() as patches:
        patches.enter_context(
            mock.patch.multiple(
                dist,
                is_initialized=lambda: True,
                get_rank=lambda group=None: ranks_of(group).index(recorder.rank),
                get_world_size=lambda group=None: len(ranks_of(group)),
                send=send,
                recv=recv,
                P2POp=lambda op, tensor, *, group, group_peer: (op, tensor, group_peer, group),
                batch_isend_irecv=batch,
            )
        )
        patches.enter_context(mock.patch.object(shared_memory, "host_memory", memory))
        yield


def block_name(layer: int, j: int) -> str:
    return f"KV{j} of layer {layer}"


class Claims(list[int]):
    """The chunk lengths of a ring that takes the length of a block just before it receives the block."""

    def __init__(self, recorder: Recorder, layer: int, world_size: int) -> None:
        super().__init__([1] * world_size)
        self.recorder, self.layer = recorder, layer
        recorder.claim = block_name(layer, recorder.rank)

    def __getitem__(self, j: Any) -> Any:
        self.recorder.claim = block_name(self.layer, j)
        return super().__getitem__(j)


class Claiming(Partition):
    """A partition that notes which block the schedule has in hand: it asks what to compute of it."""

    def noting(self, recorder: Recorder, layer: int) -> None:
        """Note the blocks of this layer in this recorder. (A partition is frozen.)"""
        object.__setattr__(self, "note", lambda block: setattr(recorder, "claim", block_name(layer, block)))

    def pieces(self, rank: int, block: int) -> tuple[BlockSlice, ...]:  # type: ignore[override]
        vars(self)["note"](block)
        return Partition.pieces(self, rank, block)


Code = Callable[[Recorder, int, int, list[Tensor]], Iterator[Sequence[Tensor]]]
TRAINING = [(0, "forward"), (0, "backward")]  # what a job does, by number of the layer
TWO_LAYERS = [(0, "forward"), (1, "forward"), (1, "backward"), (0, "backward")]


def blocking(recorder: Recorder, world_size: int, layer: int, inputs: list[Tensor]) -> Iterator[Sequence[Tensor]]:
    """ring_attn.py, and then its backward pass, which yields dK and dV."""
    q, k, v, d_out = inputs
    lengths = Claims(recorder, layer, world_size)
    out, lse = ring_attn.ring_forward(q, k, v, scale=1.0, lengths=lengths)
    yield ()
    lengths = Claims(recorder, layer, world_size)
    yield backward.ring_backward(q, k, v, out, lse, d_out, scale=1.0, lengths=lengths)[1:]


@dataclass(frozen=True)
class Scheduled:
    """flash_ring.py with a schedule, forward, and then backward, which yields dK and dV."""

    schedule: type[Schedule]
    group_of: Callable[[int], Any] = lambda rank: None
    mask: Mask = field(default_factory=Mask)

    def __call__(
        self, recorder: Recorder, world_size: int, layer: int, inputs: list[Tensor]
    ) -> Iterator[Sequence[Tensor]]:
        q, k, v, d_out = inputs
        partition = Claiming(self.mask, "contiguous", (1,) * world_size)
        partition.noting(recorder, layer)
        schedule = self.schedule(partition, 1.0, self.group_of(recorder.rank))
        out, lse = ring_forward(q, k, v, schedule)
        yield ()

        def own_last(rounds: Iterator[Any]) -> Iterator[Any]:
            own, claim = next(rounds), recorder.claim
            yield from rounds
            recorder.claim = claim  # the ring asked the mask before
            yield own

        with mock.patch.object(schedules, "own_last", own_last):
            gradients = ring_backward(q, k, v, out, lse, d_out, schedule)
        yield gradients[1:]


def program(
    ring: Code,
    rank: int,
    world_size: int,
    passes: Sequence[tuple[int, str]] = TRAINING,
    mask: Mask | None = None,
) -> list[Step]:
    """The steps of one rank in these passes of a ring, recorded from its code. At last it reads its dK and dV.

    `mask` is that of the ring.
    """
    recorder, running, home = Recorder(rank), {}, []
    with on_paper(recorder, world_size):
        for layer, direction in passes:
            if direction == "forward":
                inputs = [torch.ones(1, 1, 1, 1) for _ in range(4)]
                for name, x in zip("kv", inputs[1:3], strict=True):
                    place = recorder.name(x, f"{name} of rank {rank}, layer {layer}")
                    recorder.notes.append(Write(place, (block_name(layer, rank),)))
                running[layer] = ring(recorder, world_size, layer, inputs)
            with recorder:
                results = next(running[layer])
            for name, x in zip(("dk", "dv"), results, strict=bool(results)):
                home.append((x, f"{name} of rank {rank}, layer {layer}", layer))
    of = Partition(mask or Mask(), "contiguous", (1,) * world_size)
    adding = [other for other in range(world_size) if of.pieces(other, rank)]
    for x, name, layer in home:
        whole = frozenset(part_name(other, block_name(layer, rank)) for other in adding)
        together = x.untyped_storage().nbytes() > x.nbytes
        recorder.notes.append(Read(recorder.name(x, *(block_in(f"sums of {name}") if together else (name,))), whole))
    return recorder.steps()


def rings_of(world_size: int) -> dict[str, tuple[Code, list[tuple[int, str]]]]:
    """The rings of this project for so many ranks, by name, each with the passes in which its memory is used again."""
    meshes = [(n, world_size // n) for n in range(1, world_size + 1) if world_size % n == 0]
    return {
        "blocking": (blocking, TRAINING),
        "overlapped": (Scheduled(Ring), TRAINING),
        **{f"double {n} x {g}": (Scheduled(DoubleRing, partial(PaperMesh, (n, g))), TRAINING) for n, g in meshes},
        **{
            f"two levels {n} x {g}": (Scheduled(TwoLevels, partial(PaperMesh, (n, g))), TRAINING)
            for n, g in meshes
            if n > 1 and g > 1
        },
        "shared memory": (Scheduled(SharedMemory), TWO_LAYERS),
    }


def programs(
    ring: Code, world_size: int, passes: Sequence[tuple[int, str]] = TRAINING, mask: Mask | None = None
) -> list[list[Step]]:
    """`program` of every rank."""
    return [program(ring, rank, world_size, passes, mask) for rank in range(world_size)]
