"""The simulator of blocking messages, and real gloo processes that do what it says. And the record of a ring.

It has which block each rank used, sent and received in each round, in what order, and the bytes.
"""

from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ringlab.basics.blocking_messages import Recv, Send, Transfer, ring_programs, simulate_messages
from ringlab.support import timeline
from ringlab.support.colours import BLOCK_COLOURS
from ringlab.support.drawing import draw_events
from ringlab.support.timeline import Event
from tests.attention import random_qkv
from tests.rings import chunks, even_lengths, ring_and_events


@pytest.mark.parametrize("world_size", [2, 3, 8, 9])
@pytest.mark.parametrize("hops", [1, 3])
def test_all_send_first_deadlocks(world_size, hops):
    outcome = simulate_messages(ring_programs(world_size, hops=hops, even_odd=False))
    assert outcome.transfers == []
    assert outcome.waits_for == {rank: (rank + 1) % world_size for rank in range(world_size)}
    assert outcome.cycle == list(range(world_size))


@pytest.mark.parametrize("world_size", range(2, 10))
@pytest.mark.parametrize("hops", [0, 1, 7])
def test_even_odd_delivers_every_message_once(world_size, hops):
    outcome = simulate_messages(ring_programs(world_size, hops=hops))
    assert (outcome.waits_for, outcome.cycle) == ({}, [])
    one_hop = [(rank, (rank + 1) % world_size) for rank in range(world_size)]
    assert sorted((it.source, it.to) for it in outcome.transfers) == sorted(one_hop * hops)
    for phase in range(outcome.phases):  # a rank takes part in one message at a time
        busy = [rank for it in outcome.transfers if it.phase == phase for rank in (it.source, it.to)]
        assert len(set(busy)) == len(busy) > 0
    if hops == 1:
        assert outcome.phases == (3 if world_size % 2 else 2)


def test_a_hop_of_three_ranks_in_full():
    assert ring_programs(3) == [[Send(1), Recv(2)], [Recv(0), Send(2)], [Send(0), Recv(1)]]
    assert simulate_messages(ring_programs(3)).transfers == [Transfer(0, 0, 1), Transfer(1, 2, 0), Transfer(2, 1, 2)]


@pytest.mark.parametrize(
    ("programs", "waits_for", "cycle"),
    [
        ([[Send(1)], []], {0: 1}, []),  # rank 1 has ended: nobody will receive
        ([[Recv(1)], [Recv(2)], []], {0: 1, 1: 2}, []),
        ([[Recv(1)], [Recv(2)], [Recv(1)]], {0: 1, 1: 2, 2: 1}, [1, 2]),  # rank 0 only leads into the circle
        ([[Send(1)], [Send(0)], [Recv(1)]], {0: 1, 1: 0, 2: 1}, [0, 1]),
        ([[Recv(2)], [Send(2)], [Recv(1), Send(1)]], {0: 2, 2: 1}, []),  # a message moves before the rest is stuck
        ([[Send(2)], [], [Recv(1)]], {0: 2, 2: 1}, []),  # rank 2 receives, but not from the one that sends
    ],
    ids=["ended", "chain", "tail into circle", "circle with tail", "partly", "another sender"],
)
def test_who_waits_for_whom(programs, waits_for, cycle):
    outcome = simulate_messages(programs)
    assert outcome.waits_for == waits_for
    assert outcome.cycle == cycle


def do(context, programs, seconds):
    """Run this rank's program with real messages. Returns None at its end, or the error that stopped it."""
    group = dist.new_group()  # one that may break
    x = torch.zeros(1)
    try:
        for step in programs[context.rank]:
            if isinstance(step, Send):
                work = dist.isend(x, group_dst=step.to, group=group)
            else:
                work = dist.irecv(x, group_src=step.source, group=group)
            work.wait(timedelta(seconds=seconds))  # dist.send and dist.recv are these two lines without the limit
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("world_size", [2, 3])
def test_real_processes_do_as_the_simulator_says(ranks, world_size):
    assert ranks(world_size, do, ring_programs(world_size), ranks.seconds) == [None] * world_size
    errors = ranks(world_size, do, ring_programs(world_size, even_odd=False), 1)
    assert None not in errors  # not one message moved
    assert any("Timed out" in error for error in errors)  # whoever loses patience first closes his connections


# The record of a ring ------------------------------------------------------------------------------------------------


B, H, D = 2, 3, 5


def expected_events(rank, world_size):
    """(what, round, block) of one rank: it computes, then hops in the simulator's order, P - 1 times."""
    hop = ring_programs(world_size)[rank] if world_size > 1 else []
    for t in range(world_size):
        in_hand, next_block = (rank - t) % world_size, (rank - t - 1) % world_size
        yield "compute", t, in_hand
        if t < world_size - 1:
            for step in hop:
                yield ("send", t, in_hand) if isinstance(step, Send) else ("receive", t, next_block)


def test_who_does_what_with_which_block(ranks, world_size):
    S = 17
    lengths = even_lengths(S, world_size)
    events_seen_by = [events for _, events in ranks(world_size, ring_and_events, *random_qkv((B, H, S, D)), lengths)]
    assert events_seen_by == [events_seen_by[0]] * world_size  # every rank knows all of them
    for rank in range(world_size):
        mine = [it for it in events_seen_by[0] if it.rank == rank]
        assert [(it.what, it.round, it.block) for it in mine] == list(expected_events(rank, world_size))
        times = [time for it in mine for time in (it.start, it.end)]
        assert times == sorted(times)  # one thing after the other: this ring overlaps nothing
        assert times[0] >= 0
        sent = sum(it.bytes for it in mine if it.what == "send")
        never_sent = lengths[(rank + 1) % world_size]  # the block that comes last
        assert sent == 2 * B * H * (S - never_sent) * D * 4  # K and V, float32


def record_nothing(context, q, k, v, lengths):
    ring_and_events(context, q, k, v, lengths)
    (k,) = chunks(context, lengths, k)
    with suppress(OverflowError), timeline.record(k):
        raise OverflowError
    with timeline.span("compute", 0):  # nobody records: in a recording it would look for a tensor
        pass
    with timeline.record(k) as events:
        pass
    return events


def test_nothing_is_recorded_outside_or_after_an_error(ranks):
    assert ranks(2, record_nothing, *random_qkv((1, 1, 4, 2)), [2, 2]) == [[], []]


def record_a_foreign_block(context):
    mine, foreign = (torch.full((1, 1, 1, 2), float(x)) for x in (context.rank, 7))
    with timeline.record(mine) as events, timeline.span("compute", 0, foreign):
        pass
    return events[0].block


def test_a_block_that_is_nobodys_is_minus_one(ranks):
    assert ranks(2, record_a_foreign_block) == [-1, -1]


def record_in_parts(context, parts):
    """Each part of the job records its own blocks; the ranks of no part record nothing."""
    groups = [dist.new_group(part) for part in parts]
    for part, group in zip(parts, groups, strict=True):
        if context.rank in part:
            k = torch.full((1, 1, 1, 2), float(context.rank))
            with timeline.record(k, group) as events, timeline.span("compute", 0, k):
                pass
            return [(event.rank, event.block) for event in events]
    return None


def test_a_part_of_a_job_records_its_own_ranks(ranks):
    """Counted inside the part, whatever the other ranks do at the same time."""
    parts = [[2, 4], [0, 1]]
    seen = ranks(5, record_in_parts, parts)
    inside = {rank for part in parts for rank in part}
    assert seen == [[(0, 0), (1, 1)] if rank in inside else None for rank in range(5)]


def test_every_event_is_drawn_in_its_blocks_colour():
    ax = Figure().subplots()
    draw_events([Event(0, "compute", 0, 1, 0.25, 0.5, 96), Event(1, "send", 2, 9, 1e-7, 0.125, 7)], ax)
    draw_events([Event(0, "wait", 0, 1, 0, 1, 8)], hatched := Figure().subplots())
    assert [(bar.get_hatch(), bar.get_facecolor()[3]) for bar in hatched.patches] == [("//////", 0)]
    assert [to_hex(bar.get_facecolor()).upper() for bar in ax.patches] == [BLOCK_COLOURS[1], BLOCK_COLOURS[9 % 8]]
    assert [bar.get_x() for bar in ax.patches] == pytest.approx([250, 1e-4])  # milliseconds
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([250, 125])


def test_blocks_that_begin_alike_are_told_apart(ranks):
    """With few numbers in a key, two blocks may share their first one: the record looks at more than that."""
    x = torch.tensor([7.0, 0, 7, 1, 7, 2, 7, 3]).reshape(1, 1, 8, 1)
    _, events = ranks(4, ring_and_events, x, x, x, [2] * 4)[0]
    used = {(it.rank, it.round): it.block for it in events if it.what == "compute"}
    assert used == {(r, t): (r - t) % 4 for r in range(4) for t in range(4)}
