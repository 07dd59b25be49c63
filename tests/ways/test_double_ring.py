"""The double ring's own promise: how long a slow hop has."""

import functools
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from ringlab.ring import overlap, schedule
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.ways.double_ring import DoubleRing


def journal(context, shape, *, back=False):
    """What this rank does in the rounds of a pass, in order: rounds, and messages between hosts."""
    mesh, noted = init_device_mesh("cpu", shape), []
    across, _ = mesh.get_all_groups()

    def watched(real, what):
        def post(sent, received, group, **distance):
            works = real(sent, received, group, **distance)
            if group is not across:
                return works
            number = sum(entry[0] == f"{what} sent" for entry in noted)
            noted.append((f"{what} sent", number))
            return [mock.Mock(wait=functools.partial(wait, works, what, number))]

        return post

    def wait(works, what, number):
        noted.append((f"{what} waited for", number))
        for work in works:
            work.wait()

    k = torch.full((1, 1, 1, 1), float(context.rank))
    with (
        mock.patch.object(overlap, "post", watched(overlap.post, "K and V")),
        mock.patch.object(schedule, "post", watched(schedule.post, "sums")),
    ):
        ring = DoubleRing(Partition(Mask(), "contiguous", (1,) * context.world_size), 1.0, mesh)
        sums = ring.sums(k, k, k.dtype)
        for t, _, _, _ in (ring.rounds_back if back else ring.rounds)(k, k):
            noted.append(("round", t))
            if back:
                sums.of_round(t)
                sums.send_on(t)
        if back:
            sums.home()
    return noted


def assert_slow_hops_have_a_turn(journal_of_rank, n, g, turns):
    """n - 1 slow hops of K and V, and of the sums in a backward pass; each has the time of g rounds, but for one.

    In a backward pass the own turn is the last. Nothing is computed while the first K and V travel.
    """
    at = {entry: place for place, entry in enumerate(journal_of_rank)}
    assert len(at) == len(journal_of_rank)
    assert [t for what, t in journal_of_rank if what == "round"] == [u * g + s for u in turns for s in range(g)]
    for u in range(n - 1):  # K and V: from before the first round of turn u to after its last
        waited = at["K and V waited for", u]
        assert waited < at["round", (u + 1) * g]
        if turns[0] == 0 or u > 0:
            assert at["K and V sent", u] < at["round", u * g] <= at["round", (u + 1) * g - 1] < waited
    passed = list(turns)[1:] if turns[0] else []
    for i, following in enumerate(passed):  # the sums of a turn: from the first round of the next turn on
        assert at["round", following * g] < at["sums sent", i]
        rounds = [t for t in range(n * g) if at["sums sent", i] < at["round", t] < at["sums waited for", i]]
        assert len(rounds) == (g if following else g - 1)  # the last one ends with the pass
    slow = [what for what, _ in journal_of_rank if what.endswith("sent")]
    assert (slow.count("K and V sent"), slow.count("sums sent")) == (n - 1, len(passed))


@pytest.mark.parametrize("shape", [(1, 3), (3, 2), (2, 3)], ids=lambda shape: "{}x{}".format(*shape))
def test_a_slow_hop_has_the_time_of_a_turn(ranks, shape):
    n, g = shape
    for journal_of_rank in ranks(n * g, journal, shape):
        assert_slow_hops_have_a_turn(journal_of_rank, n, g, range(n))
    for journal_of_rank in ranks(n * g, functools.partial(journal, back=True), shape):
        assert_slow_hops_have_a_turn(journal_of_rank, n, g, [*range(1, n), 0])
