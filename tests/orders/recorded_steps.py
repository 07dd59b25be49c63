"""The steps of a rank, recorded from the code that it runs: its messages, its flags, and the memory that it touches.

    with recorder: ...       every operation of torch says which memory it reads and writes
    recorder.begin(...)      whoever sends or receives says so

What remains is what matters to other ranks: memory that is sent, received or shared. All tensors must be float32. A
reader of the ring may skip this file; every_order.py uses it.
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    """Notes what a rank does: its messages, flags and accesses to memory, in this order."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.notes: list[Access | Begun | Step] = []
        self.names: dict[int, str] = {}  # of storages that are shared, by address
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
        names, steps, at = dict(self.names), [], {}
        for note in self.notes:
            if isinstance(note, Begun):
                names.setdefault(note.memory.storage, f"buffer {len(names)} of rank {self.rank}")

        def cells(memory: Place) -> Cells:
            return tuple(f"{names[memory.storage]}, number {n}" for n in memory.numbers)

        for n, note in enumerate(self.notes):
            at[n] = len(steps)
            if isinstance(note, Begun):
                steps.append(note.kind(note.peer, cells(note.memory), note.channel))
            elif isinstance(note, Wait):
                together = steps.pop().steps if steps and isinstance(steps[-1], Wait) else ()
                steps.append(Wait((*together, *(at[m] for m in note.steps))))
            elif not isinstance(note, Access):
                steps.append(note)
            elif note.memory.storage in names:
                steps.append(Use(cells(note.memory), note.writes))
        return steps
