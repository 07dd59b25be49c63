"""What the explorer checks is what real ranks do; each wait and flag is needed; rings with a mistake are found."""

import re
from contextlib import contextmanager
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ring_attn
from ringlab.support.host_memory import IN_COPIES, READY, HostMemory
from ringlab.training import overlap, schedule, shared_memory
from ringlab.training.double_ring import DoubleRing, DoubleSums
from ringlab.training.masks import Mask
from ringlab.training.overlap import two_buffers
from ringlab.training.schedule import Ring, TravellingSums
from ringlab.training.shared_memory import SharedMemory, SharedSums, TwoLevels
from tests.orders.every_order import (
    FLAGS,
    TRAINING,
    TWO_LAYERS,
    Kept,
    Scheduled,
    blocking,
    name_part,
    program,
    programs,
    rings_of,
)
from tests.orders.interleavings import Explorer, explore
from tests.orders.steps import Await, Irecv, Isend, Raise, Read, Wait, Write

CASES = [(P, name) for P in (2, 3, 4) for name in rings_of(P)]


# Real ranks ----------------------------------------------------------------------------------------------------------


class Noted:
    """A real message, whose wait is noted."""

    def __init__(self, recorder, number, work):
        self.recorder, self.number, self.work = recorder, number, work

    def wait(self):
        self.recorder.notes.append(Wait((self.number,)))
        self.work.wait()


@contextmanager
def in_reality(recorder, world_size):
    """Messages and flags are noted, and then carried out."""
    real = {name: getattr(dist, name) for name in ("send", "recv", "batch_isend_irecv")}
    part, raise_flag, wait, counts = HostMemory.part, HostMemory.raise_flag, HostMemory.wait, {}

    def begin(kind, x, peer, group):
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        return recorder.begin(kind, ranks[peer], x, str(tuple(ranks)))

    def send(x, *, group_dst, group=None):
        number = begin(Isend, x, group_dst, group)
        real["send"](x, group_dst=group_dst, group=group)
        recorder.notes.append(Wait((number,)))

    def recv(x, *, group_src, group=None):
        number = begin(Irecv, x, group_src, group)
        real["recv"](x, group_src=group_src, group=group)
        recorder.notes.append(Wait((number,)))

    def batch(operations):
        numbers = [
            begin(Isend if it.op is dist.isend else Irecv, it.tensor, it.group_peer, it.group) for it in operations
        ]
        works = real["batch_isend_irecv"](operations)
        assert len(works) == len(numbers)
        return [Noted(recorder, number, work) for number, work in zip(numbers, works, strict=True)]

    def in_job(memory, rank):
        return recorder.rank - memory.rank + rank  # the ranks of a host follow each other

    def named(memory, which, rank, end):
        found = part(memory, which, rank, end)
        name_part(recorder, which, in_job(memory, rank), found)
        recorder.alive.append(found)
        return found

    def raised(memory, flag, to, value=0):
        recorder.notes.append(Raise(f"{FLAGS[flag]} {recorder.rank}->{in_job(memory, to)}"))
        raise_flag(memory, flag, to, value)

    def awaited(memory, flag, of):
        counts[flag, of] = counts.get((flag, of), 0) + 1
        recorder.notes.append(Await(f"{FLAGS[flag]} {in_job(memory, of)}->{recorder.rank}", counts[flag, of]))
        return wait(memory, flag, of)

    patches = mock.patch.multiple(HostMemory, part=named, raise_flag=raised, wait=awaited)
    with mock.patch.multiple(dist, send=send, recv=recv, batch_isend_irecv=batch), patches:
        yield


def real_programs(context, names):
    """This rank's program of each ring, as recorded while it runs among others; the names of double rings: meshes."""
    found = []
    for name in names:
        ring, passes = rings_of(context.world_size)[name]
        if " x " in name:
            mesh = init_device_mesh("cpu", tuple(int(word) for word in name.split() if word.isdigit()))
            ring = Scheduled(ring.schedule, lambda rank, mesh=mesh: mesh)
        if name in ("shared memory", "no copy"):  # in a group of its own: no pass came before
            group = dist.new_group()
            ring = type(ring)(SharedMemory, lambda rank, group=group: group)
        found.append(program(ring, context.rank, context.world_size, passes, world=in_reality))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_real_ranks_take_the_steps_that_were_explored(ranks, world_size):
    names = list(rings_of(world_size))
    for rank, found in enumerate(ranks(world_size, real_programs, names)):
        for name, steps in zip(names, found, strict=True):
            ring, passes = rings_of(world_size)[name]
            assert list(map(str, steps)) == list(map(str, program(ring, rank, world_size, passes))), name
            assert steps == program(ring, rank, world_size, passes)


# The explored programs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "name"), [(P, name) for P, name in CASES if P < 4])
def test_orders_that_were_left_out_change_nothing(world_size, name):
    ring, passes = rings_of(world_size)[name]
    steps = programs(ring, world_size, passes)
    few, every = explore(steps), explore(steps, every_order=True)
    assert few.why == every.why == ""
    assert few.ends == every.ends == 1  # the same sums, added up in the same order: the same bits
    assert few.states < every.states


@pytest.mark.parametrize(("kind", "hops"), [(Ring, 1), (Ring, 2), (SharedMemory, 1), (SharedMemory, 2)])
def test_blocks_that_a_window_stops(kind, hops):
    """The first ranks add less, and the sums come home from fewer hops. The last rank reads so many blocks."""
    window = Mask(causal=True, window=hops + 1)
    steps = programs(Scheduled(kind, mask=window), 4, TRAINING, window)
    assert not explore(steps).why
    read = {cell for step in steps[3] for cell in getattr(step, "cells", ()) if "copies of rank" in cell}
    assert len(read) == (2 * (hops + 1) if kind is SharedMemory else 0)  # K and V, its own too


def without(steps, at):
    """Without a step. Numbers of steps after it are still those of other steps."""
    return [*steps[:at], Read((), frozenset()), *steps[at + 1 :]]


@pytest.mark.parametrize(("world_size", "name"), [(P, name) for P, name in CASES if P == 3])
def test_no_wait_is_there_for_nothing(world_size, name):
    """But for sends of ring_attn.py, whose blocks are never written again, and readers after whom nobody writes."""
    ring, passes = rings_of(world_size)[name]
    passes = {"shared memory": TRAINING, "no copy": passes[:2]}.get(name, passes)  # later ones have sums that say more
    right, tried = programs(ring, world_size, passes), 0
    for at, step in enumerate(right[0]):
        of_send = isinstance(step, Wait) and all(isinstance(right[0][n], Isend) for n in step.steps)
        last_readers = isinstance(step, Await) and name == "no copy" and "read " in step.flag and step.count > 1
        if last_readers or (of_send and name == "blocking"):
            continue
        if isinstance(step, Await | Wait):
            assert explore([without(right[0], at), *right[1:]]).why, f"{step} is needless"
            tried += 1
    assert tried >= 6


def raised_early(steps, at):
    """A flag is raised one access too early."""
    before = max(n for n in range(at) if isinstance(steps[n], Read | Write))
    return [*steps[:before], steps[at], *steps[before:at], *steps[at + 1 :]]


def test_no_flag_may_be_raised_before_what_it_promises():
    """But for "read" where no pass follows that would write the copies before the sums are home."""
    right = programs(Scheduled(SharedMemory), 3, TWO_LAYERS)
    flags = [at for at, step in enumerate(right[0]) if isinstance(step, Raise)]
    of = [right[0][at].flag.split()[0] for at in flags]
    assert {flag: of.count(flag) for flag in FLAGS} == {"ready": 8, "read": 8, "turn": 4, "home": 2}
    needed = [at for n, at in enumerate(flags) if of[n] != "read" or of[:n].count("read") < 4]
    for at in needed:
        assert explore([raised_early(right[0], at), *right[1:]]).why, right[0][at]


# Mistakes in the code ------------------------------------------------------------------------------------------------


def all_alike(first):
    """ring_attn.hop in which all ranks send first, or all receive first."""

    def hop(block, length, group=None):
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        received = block.new_empty(*block.shape[:-2], length, block.shape[-1])
        if first == "send":
            dist.send(block, group_dst=(rank + 1) % world_size, group=group)
        dist.recv(received, group_src=(rank - 1) % world_size, group=group)
        if first == "receive":
            dist.send(block, group_dst=(rank + 1) % world_size, group=group)
        return received

    return hop


def one_buffer(k, v, lengths, rank, dtype=None):
    right = two_buffers(k, v, lengths, rank, dtype)
    return lambda t: right(0)


def yielded_too_late(k, v, *, lengths, group=None, hops=None):
    """The next block arrives in the buffer of the block in hand: it is used one hop early."""
    rank, world_size, _, _ = overlap.neighbours(group)
    buffer = two_buffers(k, v, lengths, rank)
    here = k, v
    for t in range(world_size - 1):
        coming = overlap.keys_and_values(buffer((t + 1) // 2), k, v)
        works = overlap.post(here, coming, group)
        yield here
        for work in works:
            work.wait()
        here = coming
    yield here


def sums_that_do_not_wait(sums, t):
    return sums.both(sums.buffer(t))


def ready_before_the_copy(ways, k, v):
    """SharedMemory.rounds, but the flag comes first."""
    rank, world_size = overlap.neighbours(ways.group)[:2]
    memory = shared_memory.host_memory(ways.group)
    memory.wait_for_readers()
    others = [(rank + t) % world_size for t in range(1, world_size)]
    for reader in others:
        memory.raise_flag(READY, reader, IN_COPIES)
    for copy, x in zip(ways.block(memory, rank, k, v, IN_COPIES), (k, v), strict=True):
        copy.copy_(x)
    memory.readers += others
    yield 0, k, v, ways.partition.pieces(rank, rank)
    for t in range(1, world_size):
        j = (rank - t) % world_size
        place = memory.wait(READY, j)
        yield t, *ways.block(memory, j, k, v, place), ways.partition.pieces(rank, j)
        memory.raise_flag(1, j)


def not_waited_between_hosts(sums, u):
    with mock.patch.object(TravellingSums, "wait"):
        parts = sums.ended.home()
    for total, part in zip(sums.between.of_round(u), parts, strict=True):
        total += part
    sums.between.send_on(u)


def home_too_early(sums, t):
    sums.wait_for_turn(t)
    with mock.patch.object(sums.memory, "wait"):  # for HOME
        right_send_on(sums, t)


def home_not_waited_for(sums):
    return sums.both(sums.own().add_(sums.coming))


right_send_on = SharedSums.send_on


MESSAGE = r"while rank \d (sends|receives)"
no_waiting = HostMemory, "wait_for_readers", lambda memory: memory.readers.clear()
# fmt: off
MISTAKES = {  # name: (the ring, its ranks, what is patched, what is said)
    "all send first": ("blocking", 3, (ring_attn, "hop", all_alike("send")), "all wait: rank 0 for rank 1"),
    "all receive first": ("blocking", 3, (ring_attn, "hop", all_alike("receive")), "all wait: rank 0 for rank 2"),
    "one buffer": ("overlapped", 3, (overlap, "two_buffers", one_buffer), MESSAGE),
    "a buffer one hop early": ("overlapped", 4, (schedule, "arriving_blocks", yielded_too_late), MESSAGE),
    "sums before they arrive": ("overlapped", 3, (TravellingSums, "of_round", sums_that_do_not_wait), MESSAGE),
    "home before they arrive": ("overlapped", 2, (TravellingSums, "home", home_not_waited_for), MESSAGE),
    "sums of a turn too early": ("double 2 x 2", 4, (DoubleSums, "pass_on", not_waited_between_hosts), MESSAGE),
    "the flag before the copy": ("shared memory", 2, (SharedMemory, "rounds", ready_before_the_copy), "rank 1 writes"),
    "readers are not waited for": ("shared memory", 2, no_waiting, "while rank 1 reads"),
    "the caller writes too early": ("no copy", 2, no_waiting, "while rank 1 reads"),
    "two levels: sums too early": ("two levels 2 x 2", 4, (SharedSums, "send_on", home_too_early), "while rank "),
    "two levels: a block too early": ("two levels 2 x 2", 4, no_waiting, "while rank "),
    "two add at a time": ("shared memory", 3, (SharedSums, "wait_for_turn", lambda sums, t: None), "while rank "),
}
# fmt: on


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_ring_with_a_mistake_is_found(mistake):
    name, world_size, (home, function, wrong), said = MISTAKES[mistake]
    ring, passes = rings_of(world_size)[name]
    with mock.patch.object(home, function, wrong):
        steps = programs(ring, world_size, passes)
    found = Explorer(steps).search(every_order=world_size < 4)
    assert re.search(said, found.why)
    assert len(found.run) >= 2


def test_the_rings_that_are_explored_are_those_of_this_project():
    assert {type(ring) for ring, _ in rings_of(4).values()} == {type(blocking), Scheduled, Kept}
    kinds = {ring.schedule for ring, _ in rings_of(4).values() if isinstance(ring, Scheduled)}
    assert kinds == {Ring, DoubleRing, SharedMemory, TwoLevels}
    assert rings_of(4)["shared memory"][1] == TWO_LAYERS
