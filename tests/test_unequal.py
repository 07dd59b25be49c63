"""Unequal devices: chunks and rings by hand, against equal ones, by properties; and wrong chunks fail."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.planning.hidden_communication import AttentionLayer, block_flops, hop_bytes, pass_seconds
from ringlab.planning.unequal import proportional_chunks, unequal_ring

LAYER = AttentionLayer(
    heads=1, kv_heads=1, head_dim=1, itemsize=2
)  # 4 FLOPs a pair, 10 backward; 4 and 8 bytes a token
FLOPS = st.lists(st.integers(1, 50), min_size=1, max_size=7)


def check_chunks(cut):
    assert cut(8, [1, 1]) == [4, 4]
    assert cut(8, [3, 1]) == [6, 2] or cut(8, [3, 1]) == [5, 3]  # 1 each, and 6 tokens: 4.5 and 1.5
    assert cut(1000, [1, 1, 2]) == pytest.approx([250, 250, 500], abs=1)
    assert cut(3, [1000, 1, 1]) == [1, 1, 1]
    for seq_len, flops in ((10, [1, 1, 1]), (1000, [3, 5, 7, 11]), (1001, [3, 5, 7, 11]), (5, [9, 1, 1])):
        lengths = cut(seq_len, flops)
        assert sum(lengths) == seq_len
        assert min(lengths) >= 1
        spare = seq_len - len(flops)
        for length, each in zip(lengths, flops, strict=True):
            assert abs(length - 1 - spare * each / sum(flops)) < 1


def test_chunks_by_hand():
    check_chunks(proportional_chunks)


@given(FLOPS, st.integers(0, 1000))
def test_chunks_of_any_devices(flops, more):
    lengths = proportional_chunks(len(flops) + more, flops)
    assert sum(lengths) == len(flops) + more
    assert min(lengths) >= 1
    assert all(lengths[i] >= lengths[j] for i in range(len(flops)) for j in range(len(flops)) if flops[i] > flops[j])


def test_a_ring_by_hand():
    """2 ranks: 6 tokens at 12 FLOP/s and 2 at 4. Rank 0: 12 s and 4 s; rank 1: 4 s and 12 s, forward.

    The message of block 0 takes 24 bytes / 1, that of block 1 8 bytes / 2.
    """
    lengths, flops = [6, 2], [12, 4]
    assert unequal_ring(lengths, flops, [100, 100], LAYER) == pytest.approx(12 + 4)
    assert unequal_ring(lengths, flops, [1, 2], LAYER) == pytest.approx(24 + 12)  # rank 1 waits for block 0
    assert unequal_ring(lengths, flops, [4, 0.5], LAYER) == pytest.approx(16 + 12)  # each has an end of both
    assert unequal_ring(lengths, flops, [100, 100], LAYER, visible=1 / 2) == pytest.approx(8)
    # Backward: rank 0 30 s and 10 s, rank 1 10 s and 30 s. Gradients of block 0, 48 bytes, go home on rank 1's link.
    assert unequal_ring(lengths, flops, [1000, 4], LAYER, backward=True) == pytest.approx(40 + 48 / 4)


@given(st.integers(1, 6), st.integers(1, 50), st.integers(1, 50), st.booleans())
def test_equal_devices_are_the_closed_form(P, chunk, bandwidth, backward):
    took = unequal_ring([chunk] * P, [100] * P, [bandwidth] * P, LAYER, backward=backward)
    right = pass_seconds(LAYER, chunk, P, 100, bandwidth, backward=backward)
    block = block_flops(LAYER, chunk**2, backward=backward) / 100
    assert right - (block if backward else 0) <= took * (1 + 1e-9)  # gradients are not in the first hop
    assert took <= right * (1 + 1e-9)


@given(FLOPS, st.integers(100, 1000), st.booleans())
def test_bounds(flops, more, backward):
    """Without messages: no faster than all devices without a pause; with equal chunks, the slowest decides."""
    P, S = len(flops), len(flops) * more
    work = block_flops(LAYER, S**2, backward=backward)
    fair = unequal_ring(proportional_chunks(S, flops), flops, [1e12] * P, LAYER, backward=backward)
    equal = unequal_ring([more] * P, flops, [1e12] * P, LAYER, backward=backward)
    assert fair * (1 + 1e-9) >= work / sum(flops)
    assert equal == pytest.approx(work / P / min(flops), rel=1e-6)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
def test_fast_and_slow_ranks_by_turns_lose_nothing(pairs, fast, slow):
    flops = [fast, slow] * pairs
    chunks = [100 * each for each in flops]
    took = unequal_ring(chunks, flops, [1e12] * len(flops), LAYER)
    assert took == pytest.approx(block_flops(LAYER, sum(chunks) ** 2) / sum(flops), rel=1e-6)


def test_slow_ranks_side_by_side_wait():
    flops = [3, 3, 1, 1]
    took = unequal_ring([300, 300, 100, 100], flops, [1e12] * 4, LAYER)
    assert took > 1.1 * block_flops(LAYER, 800**2) / sum(flops)


@given(FLOPS, st.integers(1, 9), st.data())
def test_a_longer_message_or_computing_is_never_faster(flops, bandwidth, data):
    P = len(flops)
    lengths = [data.draw(st.integers(1, 20)) for _ in flops]
    took = unequal_ring(lengths, flops, [bandwidth] * P, LAYER)
    assert unequal_ring(lengths, [2 * each for each in flops], [bandwidth] * P, LAYER) <= took * (1 + 1e-9)
    assert unequal_ring(lengths, flops, [2 * bandwidth] * P, LAYER) <= took * (1 + 1e-9)
    slowest = max(lengths) * hop_bytes(LAYER, 1) / bandwidth if P > 1 else 0
    assert took * (1 + 1e-9) >= slowest


@pytest.mark.parametrize(("seq_len", "flops"), [(2, [1, 1, 1]), (5, []), (5, [1, 0]), (5, [1, -1])])
def test_bad_chunks(seq_len, flops):
    with pytest.raises(ValueError, match="expected a token or more for each, FLOP/s above 0"):
        proportional_chunks(seq_len, flops)


@pytest.mark.parametrize("numbers", [([1, 2], [1], [1, 1]), ([1, 2], [1, 1], [1]), ([], [], [])])
def test_bad_rings(numbers):
    with pytest.raises(ValueError, match="expected one for each rank"):
        unequal_ring(*numbers, LAYER)
