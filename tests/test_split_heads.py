"""Which heads each rank gets: every one once, as evenly as can be, with the K/V heads that they need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.training.split_heads import check_split, count, heads_of_ranks, meshes, runs
from tests.refusals import all_of


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
