"""What a round costs beside its products: bytes counted by running the operations, each cost in the simulation, closed
forms of hidden communication, and which of K and V or Q should travel."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.scoreboard import unlimited
from ring_planner import hidden_communication
from ring_planner.hidden_communication import AttentionLayer
from ring_planner.pass_q_or_kv import HOSTS, ON_A_GPU, TOKENS, Prefill, published
from ring_planner.round_costs import TILE, call_bytes, causal_pairs, efficiency, merge_bytes, packing_bytes
from ring_planner.seconds import Pass, pass_of
from ring_planner.ways import Cluster
from ringlab.basics.naive_attention import naive_attention
from ringlab.ring.backward import block_backward
from tests.planner.test_ways import CHUNK, LAYER, TWO


def simulate(way, cluster, layer, chunk, split=None, **options):
    return pass_of(way, Pass(cluster, layer, chunk, **options), split)


ROWS, KEYS = 6, 4


def test_bytes_by_hand():
    """q: 6 · 16 = 96 numbers; K and V: 2 · 4 · 8 = 64, of all query heads 128; in bf16."""
    assert call_bytes(LAYER, ROWS, KEYS) == 0  # while it computes
    # out and dO; zeroes and reads dQ in float32; writes it; dK and dV of each query head, and again
    assert call_bytes(LAYER, ROWS, KEYS, backward=True) == 2 * 96 * 2 + 2 * 96 * 4 + 96 * 2 + 2 * 128 * 2
    alike = replace(LAYER, kv_heads=4)  # a K/V head for each query head: nothing is summed
    assert call_bytes(alike, ROWS, KEYS, backward=True) == 2 * 96 * 2 + 2 * 96 * 4 + 96 * 2
    assert merge_bytes(LAYER, ROWS, KEYS) == 96 * 24  # measured: as 23 to 24 bytes of a number
    assert merge_bytes(LAYER, ROWS, KEYS, backward=True) == pytest.approx((96 + 64) * 12)
    assert merge_bytes(LAYER, ROWS, KEYS, fused=True) == pytest.approx(96 * 12)  # 10 bytes, in one pass
    assert merge_bytes(LAYER, ROWS, KEYS, first=True, backward=True) == 2 * (96 + 64) * (2 + 4)
    assert 2 * packing_bytes(LAYER, 6) == 2 * (96 + 96 + 96) * 2  # q, k, v and out; each is read and written
    assert (causal_pairs(1024), causal_pairs(16)) == (1024 * (1024 + TILE) / 2, 16 * 16)


MEMORY = replace(TWO, bandwidth=math.inf, host_bandwidth=math.inf, flops=1e30, memory_bandwidth=1.0)
SEND = replace(TWO, bandwidth=math.inf, host_bandwidth=math.inf, flops=1e30)
MERGES = merge_bytes(LAYER, CHUNK, CHUNK, first=True) + 3 * merge_bytes(LAYER, CHUNK, CHUNK)
ONE_HEAD, TWO_HEADS = AttentionLayer(1, 1, 4), AttentionLayer(2, 1, 4)
SECONDS = {  # by hand, on 2 hosts of 2: the way, its split, a cluster where only one cost is not 0, seconds
    "memory, ring": ("ring", None, MEMORY, 4 * call_bytes(LAYER, CHUNK, CHUNK) + MERGES),
    "memory, double ring": ("double ring", None, MEMORY, 4 * call_bytes(LAYER, CHUNK, CHUNK) + MERGES),
    "memory, all-to-all": (
        *("all-to-all", None, MEMORY),
        call_bytes(ONE_HEAD, 4 * CHUNK, 4 * CHUNK) + 4 * packing_bytes(LAYER, CHUNK),
    ),
    "memory, all-gather": (  # two heads; the chunks of each, that arrived, are read and written
        *("all-gather", None, MEMORY),
        2 * (call_bytes(TWO_HEADS, CHUNK, 4 * CHUNK) + 2 * 2 * 4 * CHUNK * 4 * 2),
    ),
    "launch, ring": ("ring", None, replace(SEND, launch=1.0), 4 + 4 * 4),
    "launch, all-to-all": ("all-to-all", None, replace(SEND, launch=1.0), 1 + 4),
    "latency, ring": ("ring", None, replace(SEND, latency=1.0), 3),  # every round has a hop inside the host
    "host latency, ring": ("ring", None, replace(SEND, latency=1.0, host_latency=5.0), 3 * 5),
    "latency, double ring": ("double ring", None, replace(SEND, latency=1.0, host_latency=5.0), 5 + 1),
    "latency, all-to-all": ("all-to-all", None, replace(SEND, host_latency=5.0), 2 * 5),
    "latency, all-gather": ("all-gather", None, replace(SEND, latency=1.0, host_latency=5.0), 2 * (2 * 1 + 5)),
}


@pytest.mark.parametrize("name", SECONDS)
def test_each_cost_is_paid_where_the_text_says(name):
    way, split, cluster, seconds = SECONDS[name]
    assert simulate(way, cluster, LAYER, CHUNK, split=split) == pytest.approx(seconds)


LONG = 1024
HOST = Cluster(1, 4, 2 * 4 * LAYER.hidden, math.inf, backward_flops=10 * LAYER.hidden)  # pairs/s: 2, backward 1


def test_messages_slow_the_computing_beside_them():
    """A hop of 1 s, computing of 2 s a round: 2 s of each of the first three rounds last 1 s longer at slowdown 2."""
    host = Cluster(1, 4, 1024, 256, slowdown=1.5)
    # In 1 s of messages 2/3 s of computing are done; 4/3 s follow: a round takes 7/3 s, the last one 2 s.
    assert simulate("ring", host, LAYER, CHUNK) == pytest.approx(3 * 7 / 3 + 2)
    one, other = (simulate("all-to-all", replace(host, slowdown=each), LAYER, CHUNK) for each in (1.0, 1.5))
    assert one == other
    cards = Pass(Cluster(2, 4, 1.0, 1.0, 1.0, 2), LAYER, CHUNK)  # 4 devices share 2; in a hop of 1 only the last leaves
    assert [cards.between(10.0, stride) for stride in (1, 2, 4)] == [10, 20, 20]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mask": "casual"}, "mask is 'casual'; expected one of None, 'none', 'causal'"),
        ({"mask": "causal", "layout": "zig"}, "layout is 'zig'; expected one of 'contiguous', 'zigzag', 'striped'"),
    ],
)
def test_bad_input(options, says):
    with pytest.raises(ValueError, match=says):
        simulate("ring", TWO, LAYER, CHUNK, **options)


# Waves --------------------------------------------------------------------------------------------------------------


def test_few_blocks():
    """Half a wave without a mask takes as long as a block; infinitely many blocks wait for nothing."""
    assert efficiency(1, 50 * TILE, 100) == 0.5
    assert efficiency(1, 1, 100) == 1 / TILE / 100
    assert efficiency(10**9, 8192, 132, causal=True) == pytest.approx(1)
    assert efficiency(1, 1, 0, causal=True) == 1
    reached = efficiency(32, 8192, 132, causal=True)
    assert [rate * reached for rate in unlimited((89.0, 94.0), 32, 8192, 132, causal=True)] == pytest.approx([89, 94])


GPU = replace(HOST, multiprocessors=16)


def waves(heads, tokens):
    return heads * tokens / TILE / GPU.multiprocessors


def test_every_call_waits():
    """4 heads on 4 devices, 1,024 tokens on each: 2 waves of queries; zigzag's half block has 1 wave of keys."""
    triangle, block, few, half = LONG * (LONG + TILE) / 2, LONG**2, waves(4, LONG), waves(4, LONG / 2)
    assert (few, half) == (2, 1)
    causal, one, two = ((n + 3 / 2) / n for n in (few, waves(1, 4 * LONG), waves(8, LONG)))  # all-to-all; two sequences
    whole, of_keys = (few + 1 / 2) / few, (half + 1 / 2) / half
    for options, right in (
        ({"layout": "striped"}, 4 * causal * triangle),
        ({"layout": "contiguous"}, causal * triangle + 3 * whole * block),
        ({}, causal * triangle + 3 * whole * block / 2),
        ({"backward": True}, 2 * (causal * triangle + 3 * of_keys * block / 2)),  # 10 · hidden FLOPs, at half the rate
        ({"way": "all-to-all"}, one * 4 * LONG * (4 * LONG + TILE) / 2 / 4),  # a head of all tokens
        ({"way": "all-gather"}, causal * 4 * block / 2),  # all heads, though one at a time
        ({"way": "all-gather", "layout": "contiguous"}, whole * LONG * (4 * LONG - LONG / 2)),
        ({"layout": "striped", "batch": 2}, 2 * 4 * two * triangle),
    ):
        way = options.pop("way", "ring")
        assert 2 * simulate(way, GPU, LAYER, LONG, mask="causal", **options) == pytest.approx(right), (way, options)


# Closed forms: by hand, and as torch counts. Real rings send these bytes: test_bytes. The paper's tables: by themselves


BF16, FLOAT32, FLOAT64 = (AttentionLayer(heads=2, kv_heads=1, head_dim=4, itemsize=w) for w in (2, 4, 8))
FLOPS, BANDWIDTH = 1024, 64  # FLOP/s and bytes/s: their quotient is 16

# layer, backward, visible; then by hand: FLOPs of a block of C = 8, bytes of its hop, the smallest chunk that hides it
HAND = {
    # QK^T and PV: 2 products, 2 heads, 8 x 8 scores, 4 multiplications and 4 additions each. K, V: 2 x 8 x 4 elements
    "forward": (BF16, False, 1, 2 * 2 * 64 * 8, 2 * 32 * 2, 8),  # 16 · 1/2: two query heads share a K/V head
    "backward": (BF16, True, 1, 5 * 2 * 64 * 8, 2 * 32 * 2 + 2 * 32 * 4, 9.6),  # 6/5 of that: gradients are float32
    "causal": (BF16, False, 1 / 2, 2 * 2 * 32 * 8, 2 * 32 * 2, 16),
    "causal, backward": (BF16, True, 1 / 2, 5 * 2 * 32 * 8, 2 * 32 * 6, 19.2),
    "float32": (FLOAT32, False, 1, 2048, 2 * 32 * 4, 16),
    "float32, backward": (FLOAT32, True, 1, 5120, 2 * 32 * 8, 12.8),  # 8/5 · 1/2 · 16
    "float64, backward": (FLOAT64, True, 1, 5120, 2 * 32 * 16, 25.6),  # its gradients are float64
}


def test_counts_by_hand():
    for name, (layer, backward, visible, flops, sent, chunk) in HAND.items():
        assert hidden_communication.block_flops(layer, visible * 8**2, backward=backward) == flops, name
        assert hidden_communication.hop_bytes(layer, 8, backward=backward) == sent, name
        ours = hidden_communication.min_overlap_chunk(FLOPS, BANDWIDTH, layer, visible=visible, backward=backward)
        assert ours == pytest.approx(chunk, rel=1e-12), name
    assert [hidden_communication.hidden_share(C, 8) for C in (2, 8, 9)] == [0.25, 1, 1]


def test_rings_by_hand():
    """4 ranks, computing 3 s, messages 5 s and 2 s."""
    assert hidden_communication.ring_seconds(4, 3, 5) == 5 + 5 + 5 + 3
    assert hidden_communication.ring_seconds(4, 3, 2) == 3 + 3 + 3 + 3


def test_flops_are_those_that_torch_counts():
    H, C, D = 3, 8, 4
    q, k, v, d_out = torch.randn(4, 1, H, C, D)
    layer = AttentionLayer(heads=H, kv_heads=H, head_dim=D)
    with FlopCounterMode(display=False) as forth:
        naive_attention(q, k, v)
    lse, delta = torch.zeros(2, 1, H, C)
    with FlopCounterMode(display=False) as back:
        block_backward(q, k, v, d_out, lse, delta, D**-0.5)
    assert hidden_communication.block_flops(layer, C**2) == forth.get_total_flops()
    assert hidden_communication.block_flops(layer, C**2, backward=True) == back.get_total_flops()


# K and V or Q: the closed share, the times it comes from, and the paper's tables -------------------------------------


LAYERS = [ON_A_GPU, AttentionLayer(8, 8, 64, 4), AttentionLayer(6, 2, 8, 8)]
SPEEDS = [(500e12, 25e9), (500e12, 450e9), (1e12, 1e3)]  # FLOP/s and bytes/s


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
