"""The schedule of the ring: its blocks, its sums, the mask that ranks agree on; and attention on another schedule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.gradients_home import Circle
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.ring.schedule import Ring
from ringlab.ways.all_to_all import count, runs
from ringlab.ways.heads import check_split, heads_of_ranks, meshes
from tests.attention import assert_four
from tests.every_way import CASES, Problem, checked_gradients, cut, whole
from tests.mistakes import all_of

LENGTHS = {1: (3,), 3: (2, 5, 1), 5: (3, 1, 4, 1, 2)}
WINDOW = {1: 1, 3: 2, 5: 4}  # such that the blocks make fewer hops than P - 1, where there are any


# Blocks and their sums -----------------------------------------------------------------------------------------------


def added(rank):
    """What a rank adds to dK and to dV, shaped as (2, 1, 1, 1, 1)."""
    return torch.tensor([1.0, 2.0], dtype=torch.float64).view(2, 1, 1, 1, 1) * 10**rank


def walk(context, partition):
    """By round of a backward pass: k and v in hand, and their sums as they arrive. At last, the sums at home."""
    k = torch.full((2, 1, partition.lengths[context.rank], 3), float(context.rank))
    ring = Ring(partition, 1.0)
    sums, rounds = ring.sums(k, k, torch.float64), []
    for t, k_j, v_j, pieces in ring.rounds_back(k, k + 0.5):
        d_kv = sums.of_round(t)
        rounds.append((t, k_j.clone(), v_j.clone(), pieces, torch.stack(d_kv)))
        for x, more in zip(d_kv, added(context.rank), strict=True):
            x += more
        sums.send_on(t)
    return rounds, torch.stack(sums.home())


def assert_walk(ranks, partition):
    """Block j = (r - t) mod P, to whose sums the ranks j + 1 ... j + t - 1 have added; at home, ranks j ... j + hops.

    The own block is the last: what a rank adds to its sums does not travel, and the others come home meanwhile.
    """
    P = len(partition.lengths)
    for rank, (rounds, home) in enumerate(ranks(P, walk, partition)):
        assert [t for t, *_ in rounds] == [*range(1, partition.hops + 1), 0]
        for t, k_j, v_j, pieces, d_kv in rounds:
            j = (rank - t) % P
            block = torch.full((2, 1, partition.lengths[j], 3), float(j))
            assert torch.equal(k_j, block)
            assert torch.equal(v_j, block + 0.5)
            assert pieces == partition.pieces(rank, j)
            assert_sums(d_kv, partition.lengths[j], [(j + i) % P for i in range(1, t)])
        assert_sums(home, partition.lengths[rank], [(rank + i) % P for i in range(partition.hops + 1)])


def assert_sums(d_kv, length, visited):
    """The sums of a block (2, 2, 1, C_j, 3) are what these ranks have added."""
    right = sum(map(added, visited), torch.zeros(2, 2, 1, length, 3, dtype=torch.float64))
    assert d_kv.shape == right.shape, "sums of another block"
    assert torch.equal(d_kv, right), "wrong sums"


def partitions(size):
    """Blocks that go all the way round, and blocks that a window stops before."""
    return Partition(Mask(), "contiguous", LENGTHS[size]), Partition(
        Mask(True, None, WINDOW[size]), "contiguous", LENGTHS[size]
    )


@pytest.mark.parametrize("size", LENGTHS)
def test_every_block_comes_and_its_sums_come_home_complete(ranks, size):
    flat, window = partitions(size)
    assert (flat.hops, window.hops) == (size - 1, size // 2)
    assert_walk(ranks, flat)
    assert_walk(ranks, window)


# Another schedule ----------------------------------------------------------------------------------------------------


def other_way_round(context, problem, schedule):
    """This rank's chunks of out, dq, dk and dv, by a schedule that is none of ringlab's."""
    mine = cut(context, problem.layout, problem.lengths, *problem.inputs())
    return checked_gradients(ring_flash_attention, mine, {**problem.options, "schedule": schedule})


def test_attention_on_a_schedule_of_ones_own(ranks):
    for causal, layout in CASES:
        lengths = LENGTHS[3] if layout == "contiguous" else None
        options = {"causal": causal, "layout": layout}
        problem = Problem(4, 2, sum(lengths or [12]), options, lengths, head_dim=8)
        assert_four(whole(ranks(3, other_way_round, problem, Circle), layout, lengths), problem.right())


# Heads that do not divide --------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_every_head_once_and_as_evenly_as_can_be(kv_heads, served, data):
    heads = kv_heads * served
    P = data.draw(st.integers(1, heads))
    queries, keys = heads_of_ranks(heads, kv_heads, P)
    assert [h for mine in queries for h in range(mine.start, mine.stop)] == list(range(heads))
    assert {count(mine) for mine in queries} <= {heads // P, -(-heads // P)}
    for rank, (mine, need) in enumerate(zip(queries, keys, strict=True)):
        assert {h // served for h in range(mine.start, mine.stop)} == set(range(need.start, need.stop))
        if P % kv_heads == 0:
            assert (need.start, need.stop) == (rank * kv_heads // P, rank * kv_heads // P + 1)
        head, kv_head = 0, 0  # counted from the rank's first
        for of_run, keys in runs(mine, served):  # in a run, K/V head i serves the query heads i · n/g and so on
            n, g = count(of_run), count(keys)
            assert (of_run.start, keys.start) == (head, kv_head)
            used = [(mine.start + h) // served - need.start for h in range(head, head + n)]
            assert used == [kv_head + i // (n // g) for i in range(n)]
            head, kv_head = head + n, kv_head + g
        assert (head, kv_head) == (count(mine), count(need))


def test_meshes_are_those_that_heads_allow():
    assert meshes(5, 12) == "3 x 4, 4 x 3, 6 x 2, 12 x 1"
    assert meshes(5, 7) == "7 x 1"
    assert meshes(8, 4) == "1 x 4, 2 x 2, 4 x 1"


@pytest.mark.parametrize("split", [lambda: check_split(5, 6, 6), lambda: heads_of_ranks(5, 1, 6)])
def test_more_ranks_than_heads_are_refused(split):
    with pytest.raises(
        ValueError, match=all_of(["among 6 ranks, and 5 query heads", "a head or more for each", "2 x 3"])
    ):
        split()
