"""Which of K and V or Q should travel: the closed share, the times it comes from, and the paper's tables."""

import math

import pytest

from ringlab.planning.hidden_communication import AttentionLayer
from ringlab.planning.pass_q_or_kv import (
    HOSTS,
    LLAMA_405B,
    MEASURED,
    ON_A_GPU,
    TOKENS,
    pass_seconds,
    reached,
    sent_bytes,
    share_for_keys,
    what_travels,
)

LAYERS = [ON_A_GPU, LLAMA_405B, AttentionLayer(8, 8, 64, 4), AttentionLayer(32, 1, 128), AttentionLayer(6, 2, 8, 8)]
SPEEDS = [(500e12, 25e9), (500e12, 450e9), (50e9, 1e9), (1e12, 1e3)]  # FLOP/s and bytes/s


@pytest.mark.parametrize(("new", "megabytes"), [(3_200, 3.28), (12_800, 13.11)])
def test_a_hop_has_the_bytes_of_the_papers_table_5(new, megabytes):
    keys, queries, _ = sent_bytes(ON_A_GPU, new, TOKENS - new, HOSTS)
    assert queries / (HOSTS - 1) == pytest.approx(megabytes * 1e6, rel=2e-3)
    assert keys / (HOSTS - 1) == pytest.approx(16.38e6, rel=1e-3)


@pytest.mark.parametrize("partial", [None, 2])
@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("P", [2, 3, 16])
def test_at_the_closed_share_both_take_as_long(layer, P, speeds, partial):
    N, flops, bandwidth = 200_000, *speeds
    share = share_for_keys(layer, N, P, flops, bandwidth, partial)
    for times, faster in ((0.9, 1), (1.0, None), (1.1, 0)):
        new = times * share * N
        both = pass_seconds(layer, new, N - new, P, flops, bandwidth, partial)
        if faster is None:
            assert both[0] == pytest.approx(both[1], rel=1e-12)
        else:
            assert both[faster] < both[1 - faster]


@pytest.mark.parametrize("layer", LAYERS)
def test_without_a_speed_it_is_the_share_of_as_many_bytes(layer):
    N, P = 1000, 4
    share = share_for_keys(layer, N, P)
    keys, queries, home = sent_bytes(layer, share * N, (1 - share) * N, P)
    assert keys == pytest.approx(queries + home, rel=1e-12)
    assert share == share_for_keys(layer, 7 * N, 9)


def test_the_papers_rules_are_limits_of_this_share():
    """Rule (1) leaves the way home out; rule (5) takes D + 1 for D; rule (2), K and V hidden, is more tokens."""
    flops, bandwidth = reached()
    wide = AttentionLayer(16, 1, 10**9)
    slope = 4 * TOKENS * bandwidth / (HOSTS * flops * 2)  # rule (5) is linear in the share: share (1 + slope) = 2 G/H
    assert share_for_keys(wide, TOKENS, HOSTS, flops, bandwidth, 2) == pytest.approx((2 / 16) / (1 + slope), rel=1e-8)
    assert share_for_keys(wide, TOKENS, HOSTS, partial=1e-9) == pytest.approx(2 / 16, rel=1e-8)
    hidden = HOSTS * 2 / (2 * 16) * flops / bandwidth / TOKENS
    assert share_for_keys(ON_A_GPU, TOKENS, HOSTS, flops, bandwidth, 2) < hidden


def test_the_winner_is_that_of_table_4_where_the_ways_differ_by_more_than_five_per_cent():
    asked = [(new, *ms) for new, *ms in MEASURED if max(ms) > 1.05 * min(ms)]
    assert len(asked) >= 9
    for new, by_keys, by_queries in asked:
        said = what_travels(ON_A_GPU, new, TOKENS - new, HOSTS, *reached(), partial=2)
        assert said == ("KV" if by_keys < by_queries else "Q"), new


@pytest.mark.parametrize(
    "wrong",
    [
        (0, 5, 2),
        (1, -1, 2),
        (1, 5, 0),
        (1, 5, 2, 0.0),
        (1, 5, 2, math.nan),
        (1, 5, 2, 1e9, 0.0),
        (1, 5, 2, 1e9, math.inf),
    ],
)
def test_bad_input_is_refused(wrong):
    with pytest.raises(ValueError, match=r"new tokens over .* expected 1 new token, 0 cached ones and 1 rank or more"):
        what_travels(ON_A_GPU, *wrong)
