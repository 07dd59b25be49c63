"""Two levels: what travels between hosts, and which meshes are refused. Numbers: test_schedules; order: orders/."""

import os
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from notebooks.your_ring.messages import Watch
from tests.grouped_queries import grouped_inputs
from tests.refusals import all_of, as_on_hosts, refusal
from tests.ways import WAYS, cut

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory needs Linux")
FOUR = (1, 4, 2, 24, 8)  # B, H, G, S, D


def on_hosts(context, shape, hosts):
    """The messages of the second call, forward: (kind, peer, bytes)."""
    q, k, v, _ = cut(context, "contiguous", None, *grouped_inputs(*FOUR))
    with as_on_hosts(hosts):
        mesh = init_device_mesh("cpu", shape)
        WAYS["two levels"](q, k, v, group=mesh)  # opens the memory
        with Watch() as watch:
            WAYS["two levels"](q, k, v, group=mesh)
    return [(each.kind, each.peer, each.bytes) for each in watch.messages]


@pytest.mark.parametrize(("shape", "hosts"), [((2, 2), "aabb"), ((3, 2), "aabbcc"), ((2, 3), "aaabbb")])
def test_only_blocks_between_hosts_are_messages(ranks, shape, hosts):
    (n, g), (B, _, G, S, D) = shape, FOUR
    P, size = n * g, B * G * S // (n * g) * D * torch.float32.itemsize  # of K, and of V
    for rank, messages in enumerate(ranks(P, on_hosts, shape, hosts)):
        moves = [each for each in messages if each[0] in ("send", "recv")]
        assert len(moves) == 2 * 2 * (n - 1)
        assert set(moves) == {("send", (rank + g) % P, size), ("recv", (rank - g) % P, size)}
        assert len(messages) == len(moves) + 1  # one agreement between hosts; inside a host it goes through pipes


@pytest.mark.parametrize("hosts", ["aabc", "abcc"])
def test_a_row_that_is_not_on_one_host_is_refused_on_every_rank(ranks, hosts):
    words = ["is on host", "shared memory needs ranks of one host"]
    assert re.search(all_of(words), refusal(ranks.outcomes(4, on_hosts, (2, 2), hosts)))
