"""The simulator of blocking messages, and real gloo processes that do what it says."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ringlab.basics.blocking_messages import Recv, Send, Transfer, ring_programs, simulate_messages


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
