"""The steps of a rank, recorded from the code that it runs: its messages, its flags, and the memory that it touches.

    with recorder: ...       every operation of torch says which memory it reads and writes
    recorder.begin(...)      whoever sends or receives says so

What remains is what matters to other ranks: memory that is sent, received or shared. All tensors must be float32. A
block has two numbers, K and V. A reader of the ring may skip this file; tests/orders/every_order.py uses it.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.orders.happens_before import Cells, Irecv, Isend, Read, Step, Wait, Write

aten = torch.ops.aten
MOVES = (aten.clone, aten.copy_, aten.stack, aten.cat)  # they write the numbers that they read
SHAPES = (aten.empty_like, aten.new_empty)  # they touch no numbers
ZEROS = (aten.zero_, aten.zeros, aten.zeros_like, aten.new_zeros)


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
    """What an operation did with some memory, while this block was in hand."""

    what: str  # "read", "move", "add", "zero", "write"
    to: Place | None
    source: Place | None
    claim: str | None  # the block in hand


def part_name(rank: int, block: str) -> str:
    """What a rank adds to dK and dV of a block."""
    return f"rank {rank}'s part of d{block}"


@dataclass(frozen=True)
class Begun:
    """A message that begins."""

    kind: type[Isend] | type[Irecv]
    peer: int
    memory: Place
    channel: str


class Recorder(TorchDispatchMode):
    """Notes what a rank does: its messages, flags and accesses to memory, in this order."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.notes: list[Access | Begun | Step] = []
        self.names: dict[int, Cells] = {}  # by address: of the numbers of a storage
        self.alive: list[Any] = []  # so that no storage gets the address of another
        self.claim: str | None = None  # the block in hand

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            return out  # a message: whoever asked for it has noted it
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.alive += [x.untyped_storage() for x in (*inputs, *outputs)]
        written = any(arg.alias_info and arg.alias_info.is_write for arg in func._schema.arguments)
        if not written and any(arg.alias_info for arg in func._schema.arguments):
            return out  # a view touches no memory
        packet = func.overloadpacket
        if packet in SHAPES:
            return out
        if packet in MOVES:
            sources = inputs[1:] if written else inputs
            places = [Place.of(x) for x in sources]
            for target, source in _pairs(Place.of(outputs[0]), places):
                self.note("move", target, source)
        elif packet in ZEROS:
            self.note("zero", Place.of(outputs[0]), None)
        elif packet is aten.add_:
            self.note("add", Place.of(inputs[0]), Place.of(inputs[1]) if len(inputs) > 1 else None)
        else:
            for x in inputs:
                self.note("read", None, Place.of(x))
            for x in outputs if written else ():
                self.note("write", Place.of(x), None)
        return out

    def name(self, x: Tensor, *names: str) -> Cells:
        """Name the numbers in the storage of x, unless they have names. Returns the cells of x."""
        self.alive.append(x.untyped_storage())
        self.names.setdefault(x.untyped_storage().data_ptr(), names)
        return _cells(Place.of(x), self.names)

    def note(self, what: str, to: Place | None, source: Place | None) -> None:
        self.notes.append(Access(what, to, source, self.claim))

    def begin(self, kind: type[Isend] | type[Irecv], peer: int, x: Tensor, channel: str) -> int:
        """Note the beginning of a message. Returns its number, for a Wait."""
        self.alive.append(x.untyped_storage())
        self.notes.append(Begun(kind, peer, Place.of(x), channel))
        return len(self.notes) - 1

    def known(self) -> set[int]:
        """The addresses of the storages that matter: with a name, in a message, or with sums that come to lie there."""
        known = {note.memory.storage for note in self.notes if isinstance(note, Begun)} | set(self.names)
        accesses = [note for note in self.notes if isinstance(note, Access)]
        moves = [(note.what, note.to.storage, note.source.storage) for note in accesses if note.to and note.source]
        sums = {note.to.storage for note in accesses if note.to and note.what in ("add", "zero")}
        sums |= {to for what, to, source in moves if what == "move" and source in known}  # copies of them
        for _, to, source in reversed(moves):
            if to in known and source in sums:
                known.add(source)
        return known

    def steps(self) -> list[Step]:
        """The program of this rank. Wait steps in the notes count notes; here they count steps."""
        known, names, steps, at = self.known(), dict(self.names), [], {}
        for n, note in enumerate(self.notes):
            for place in _places(note):
                if place.storage in known and place.storage not in names:
                    number = len(names) - len(self.names)
                    names[place.storage] = block_in(f"buffer {number} of rank {self.rank}")
            at[n] = len(steps)
            if isinstance(note, Begun):
                steps.append(note.kind(note.peer, _cells(note.memory, names), note.channel))
            elif isinstance(note, Access):
                steps += self._steps(note, names)
            elif isinstance(note, Wait):
                together = steps.pop().steps if steps and isinstance(steps[-1], Wait) else ()
                steps.append(Wait((*together, *(at[m] for m in note.steps))))
            else:
                steps.append(note)
        return steps

    def _steps(self, note: Access, names: dict[int, Cells]) -> Iterator[Step]:
        to = _cells(note.to, names) if note.to else ()
        source = _cells(note.source, names) if note.source else ()
        assert note.what != "write" or not to, "an operation writes a block in a way that this recorder does not know"
        if source and not to:
            yield Read(source, frozenset([str(note.claim)]))
        if to and to != source:
            parts = (part_name(self.rank, str(note.claim)),) if note.what == "add" and not source else ()
            yield Write(to, parts, source, note.what == "add")


def _pairs(to: Place, sources: Sequence[Place]) -> Iterator[tuple[Place, Place]]:
    """The places of `to` with those that come to lie there, one source after the other."""
    begin = 0
    for source in sources:
        end = begin + len(source.numbers)
        yield Place(to.storage, to.numbers[begin:end]), source
        begin = end


def _places(note: Access | Begun | Step) -> list[Place]:
    if isinstance(note, Begun):
        return [note.memory]
    return [place for place in (note.to, note.source) if place] if isinstance(note, Access) else []


def _cells(memory: Place, names: dict[int, Cells]) -> Cells:
    return tuple(names[memory.storage][n] for n in memory.numbers) if memory.storage in names else ()


def block_in(name: str) -> Cells:
    """The cells of memory in which K and V of a block lie side by side."""
    return f"K in {name}", f"V in {name}"
