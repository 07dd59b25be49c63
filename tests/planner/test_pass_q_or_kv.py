"""Which of K and V or Q should travel: the closed share, the times it comes from, and the paper's tables."""

import math
from dataclasses import replace

import pytest

from ring_planner.hidden_communication import AttentionLayer
from ring_planner.pass_q_or_kv import HOSTS, MEASURED, ON_A_GPU, TOKENS, Prefill, published

LAYERS = [ON_A_GPU, AttentionLayer(8, 8, 64, 4), AttentionLayer(6, 2, 8, 8)]
SPEEDS = [(500e12, 25e9), (500e12, 450e9), (1e12, 1e3)]  # FLOP/s and bytes/s


@pytest.mark.parametrize(("new", "megabytes"), [(3_200, 3.28), (12_800, 13.11)])
def test_a_hop_has_the_bytes_of_the_papers_table_5(new, megabytes):
    keys, queries, _ = Prefill(ON_A_GPU, new, TOKENS - new, HOSTS).sent
    assert queries / (HOSTS - 1) == pytest.approx(megabytes * 1e6, rel=2e-3)
    assert keys / (HOSTS - 1) == pytest.approx(16.38e6, rel=1e-3)


@pytest.mark.parametrize("partial", [0, 2])
@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("P", [2, 3, 16])
def test_at_the_closed_share_both_take_as_long(layer, P, speeds, partial):
    N = 200_000
    share = Prefill(layer, 1, N - 1, P, *speeds, partial).share_for_keys
    for times, faster in ((0.9, 1), (1.0, None), (1.1, 0)):
        if times * share >= 1:
            continue  # with as many K/V heads as queries Q travels, even if all tokens are new
        turn = Prefill(layer, times * share * N, N - times * share * N, P, *speeds, partial)
        if faster is None:
            assert turn.seconds[0] == pytest.approx(turn.seconds[1], rel=1e-12)
        else:
            assert turn.seconds[faster] < turn.seconds[1 - faster]
            assert (turn.new >= N * turn.share_for_keys) == (faster == 0)


@pytest.mark.parametrize("layer", LAYERS)
def test_without_a_speed_it_is_the_share_of_as_many_bytes(layer):
    share = Prefill(layer, 1, 999, 4).share_for_keys
    keys, queries, home = Prefill(layer, 1000 * share, 1000 - 1000 * share, 4).sent
    assert keys == pytest.approx(queries + home, rel=1e-12)
    assert share == Prefill(layer, 1, 6999, 9).share_for_keys
    sums = max(layer.itemsize, 4)
    assert home == pytest.approx(3 * 1000 * share / 4 * layer.heads * (layer.head_dim + 1) * sums)  # float32 at least


def test_the_papers_rules_are_limits_of_this_share():
    """Rule (1) leaves the way home out; rule (5) takes D + 1 for D; rule (2), K and V hidden, is more tokens."""
    ours = published(1)
    wide = replace(ours, layer=AttentionLayer(16, 1, 10**9))
    slope = 4 * TOKENS * ours.bandwidth / (HOSTS * ours.flops * 2)  # rule (5): share · (1 + slope) = 2 G/H
    assert wide.share_for_keys == pytest.approx((2 / 16) / (1 + slope), rel=1e-8)
    assert replace(wide, flops=math.inf, partial=1e-9).share_for_keys == pytest.approx(2 / 16, rel=1e-8)
    hidden = HOSTS * 2 / (2 * 16) * ours.flops / ours.bandwidth / TOKENS
    assert ours.share_for_keys < hidden


def test_the_winner_is_that_of_table_4_where_the_ways_differ_by_more_than_five_per_cent():
    asked = [(new, *ms) for new, *ms in MEASURED if max(ms) > 1.05 * min(ms)]
    assert len(asked) >= 5
    for new, by_keys, by_queries in asked:
        assert (new >= TOKENS * published(new).share_for_keys) == (by_keys < by_queries), new
