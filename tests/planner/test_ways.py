"""The bytes, the memory and the seconds of each way, and what a round costs beside its products, by hand."""

import math
from dataclasses import replace

import pytest

from bench.scoreboard import unlimited
from ring_planner import hidden_communication
from ring_planner.hidden_communication import AttentionLayer
from ring_planner.memory import peak_bytes_backward, training_bytes
from ring_planner.round_costs import TILE, call_bytes, causal_pairs, efficiency, merge_bytes, packing_bytes
from ring_planner.seconds import Pass, pass_of
from ring_planner.ways import Cluster, alike, busiest, exchanges, shares, splits, traffic

# A block of 8 tokens: 2048 FLOPs forward under a causal mask, 5120 backward; K and V 256 bytes, their gradients 512.
LAYER, CHUNK = AttentionLayer(heads=4, kv_heads=2, head_dim=4, itemsize=2), 8
TWO = Cluster(hosts=2, per_host=2, flops=1024, bandwidth=256, host_bandwidth=64)  # computing: 2 s and 5 s a block
ONE_NIC = replace(TWO, nics=1)


# TWO: 4 ranks, 2 on a host. A head of a chunk has 8 · 4 · 2 = 64 bytes, a block of K and V 256, its gradients 512.
HAND = {  # forward, then backward: bytes of the busiest device inside its host, and of the busiest NIC
    ("ring", None): ((3 * 256, 3 * 256), (3 * 256 + 3 * 512, 3 * 256 + 3 * 512)),
    ("double ring", None): ((2 * 256, 256), (2 * (256 + 2 * 512), 256 + 2 * 512)),
    ("all-gather", None): ((3 * 128, 3 * 128), (3 * 128 * 3, 3 * 128 * 3)),  # half of it is carried by either NIC
    # a query head and a copied K/V head each: 1 + 2 heads there and 1 back, to one rank inside and two outside
    ("all-to-all", None): ((4 * 64, 2 * 4 * 64), (4 * 64, 2 * 4 * 64)),
    # 2 + 2 heads there and 2 back; then one hop of 16 tokens of one K/V head
    ("hybrid", 2): ((6 * 64, 256), (6 * 64, 256 + 512)),
}


@pytest.mark.parametrize(
    ("hosts", "per_host", "ranks", "stand"), [(3, 2, 2, 2), (2, 2, 4, 2), (2, 3, 2, 6), (4, 1, 3, 4)]
)
def test_the_ranks_of_one_host_stand_for_all_where_hosts_do_the_same(hosts, per_host, ranks, stand):
    # 4 query heads on 3 ranks are 2, 1, 1; two of three devices exchange over a border of hosts
    assert alike(LAYER, replace(TWO, hosts=hosts, per_host=per_host, nics=0), ranks) == stand


def test_bytes_by_hand():
    for (way, split), passes in HAND.items():
        for backward, sent in zip((False, True), passes, strict=True):
            assert traffic(way, LAYER, CHUNK, TWO, backward=backward, split=split) == sent, way
    shared = {"ring": (768, 768), "double ring": (512, 512), "all-gather": (768, 768), "all-to-all": (256, 1024)}
    for way, sent in shared.items():
        assert traffic(way, LAYER, CHUNK, ONE_NIC) == sent, way
    assert traffic("hybrid", LAYER, CHUNK, ONE_NIC, split=2) == (384, 512)


def test_memory_by_hand():
    two_buffers, ring = 2 * (256 + 512), peak_bytes_backward(LAYER, CHUNK)
    assert training_bytes("ring", LAYER, CHUNK, TWO) == ring
    assert training_bytes("double ring", LAYER, CHUNK, TWO) == ring + two_buffers
    assert training_bytes("all-gather", LAYER, CHUNK, TWO) == ring - two_buffers + 3 * (32 * 8 * 2 + 32 * 8 * 4)
    assert training_bytes("double ring", LAYER, CHUNK, replace(TWO, hosts=1)) == ring  # no hop between hosts
    # q, k, v, out, dO, two buffers of K and V, dq, dk and dv; dQ and two buffers in 4 bytes; and dO of the own chunk
    assert training_bytes("hybrid", LAYER, CHUNK, TWO, split=2) == (16 * 2 + 6 * 4) * 16 * 4 + 256
    assert training_bytes("all-to-all", LAYER, CHUNK, TWO) == (8 * 2 + 3 * 4) * 32 * 4 + 256  # no buffers


def test_memory_of_a_batch_of_unequal_shares_by_hand():
    """3 query heads of 4 numbers on 1, 2 ranks: a rank of 2 heads decides. It holds dO of all 3 heads of its 8 tokens.

    Of 16 tokens q, out, dO and dq of 2 heads; k, v, two buffers, dk and dv; in 4 bytes dQ, and two buffers or one.
    """
    layer, host = AttentionLayer(3, 1, 4), replace(TWO, hosts=1)
    assert training_bytes("hybrid", layer, 8, host, split=2) == 64 * ((8 + 2 + 4 + 2) * 2 + (2 + 4) * 4) + 3 * 32 * 2
    assert training_bytes("all-to-all", layer, 8, host) == 64 * ((8 + 2 + 2) * 2 + (2 + 2) * 4) + 3 * 32 * 2


def test_a_collective_of_few_cards_by_hand():
    """4 ranks on 2 hosts of 2 with one card of 64: 3 · 64 bytes of 3 sequences through it. On one host, the links."""
    work = Pass(ONE_NIC, LAYER, CHUNK, batch=3)
    assert work.collective(64.0) == 3 * 3 * 64 / 64
    assert replace(work, cluster=replace(ONE_NIC, hosts=1)).collective(64.0) == 3 * 64 / 256


def test_copies_and_unequal_shares():
    """40 query heads on 16 ranks, with 8 K/V heads: 3 or 2 heads a rank, with the K/V head that they use."""
    assert shares(AttentionLayer(40, 8, 1), 16) == (AttentionLayer(3, 1, 1), AttentionLayer(2, 1, 1)) * 8
    assert shares(AttentionLayer(6, 3, 1), 2) == (AttentionLayer(3, 2, 1),) * 2  # heads 2 and 3 share a K/V head
    host = Cluster(1, 2, 1, 1)
    # rank 0 sends 3 + 2·2 heads there and 3 back, of which the K/V heads are 4 though G = 3
    assert traffic("all-to-all", AttentionLayer(6, 3, 4), 8, host) == (64 * (3 + 4 + 3), 0)
    # backward, a rank of 4 heads on 2: 4 heads of dO there, 4 of dQ and 2·2 of dK and dV back
    assert traffic("all-to-all", AttentionLayer(8, 4, 4), 8, host, backward=True) == (64 * (4 + 4 + 4), 0)
    # 3 and 2 query heads: of dO the other rank's, of dQ its own
    assert traffic("all-to-all", AttentionLayer(5, 1, 4), 8, host, backward=True) == (64 * (2 + 3 + 2), 0)


def test_published_rings_send_the_sums_once_more():
    for way, split in (("ring", None), ("hybrid", 2)):
        sent = [traffic(way, LAYER, CHUNK, TWO, backward=True, split=split, ours=each) for each in (True, False)]
        assert sent[1][1] - sent[0][1] == 512
    two = [busiest(sent, TWO) for sent in exchanges(LAYER, CHUNK, TWO, 4)]
    assert [sum(each) for each in zip(*two, strict=True)] == [256, 512]  # as all-to-all by hand
    assert busiest([(0, 1, 3.0), (1, 0, 5.0), (0, 2, 7.0), (3, 1, 2.0)], TWO) == (5, 7)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("tree", None), "way is 'tree'; expected ring, double ring, all-gather, all-to-all, hybrid"),
        (("hybrid", None), "split is None of 12 ranks; expected one of 1, 2, 3, 4"),
        (("hybrid", 5), "split is 5 of 12 ranks; expected one of 1, 2, 3, 4"),
        (("hybrid", 0), "split is 0 of 12 ranks"),
        (("ring", 2), "split is 2 for ring; expected None"),
        (("hybrid", 6), "all-to-all among 6 ranks, and 4 query heads.*3 x 4, 4 x 3, 6 x 2, 12 x 1"),
        (("all-to-all", None), "all-to-all among 12 ranks, and 4 query heads.*3 x 4, 4 x 3, 6 x 2, 12 x 1"),
    ],
)
def test_a_split_that_is_not_possible(call, says):
    cluster = Cluster(3, 4, 1, 1, 1)
    for count in (traffic, training_bytes):
        with pytest.raises(ValueError, match=says):
            count(call[0], LAYER, 8, cluster, split=call[1])
    assert splits(LAYER, cluster) == [1, 2, 3, 4]
    assert splits(AttentionLayer(64, 8, 1), cluster) == [1, 2, 3, 4, 6, 12]


LEAST = {"hosts": 1, "per_host": 2, "nics": 0, "memory_bandwidth": 1e-9, "slowdown": 1.0}
LEAST |= dict.fromkeys(("flops", "bandwidth", "host_bandwidth"), 1e-9)
LEAST |= dict.fromkeys(("latency", "host_latency", "launch", "backward_flops", "multiprocessors"), 0.0)


@pytest.mark.parametrize("value", [0, -1, 3, math.nan, math.inf])
@pytest.mark.parametrize("name", LEAST)
def test_a_cluster_that_cannot_be(name, value):
    """Each number has a least value. Two devices of a host have no third NIC, and infinity is no factor."""
    most = {"nics": 2, "slowdown": 1e9}.get(name, math.inf)
    if LEAST[name] <= value <= most:
        replace(TWO, **{name: value})
        return
    with pytest.raises(ValueError, match=r"expected (a host and a device|1 to -?\w+, the|memory_bandwidth above 0)"):
        replace(TWO, **{name: value})


# Seconds -------------------------------------------------------------------------------------------------------------


# TWO: a block is computed in 2 s, 5 s backward; K and V are 256 bytes, 1 s or 4 s; their sums 512, 2 s or 8 s


def test_a_ring_by_hand():
    """Forward: three rounds wait for a slow hop of 4 s. Backward, 5 s each: a hop of 4 s, then 5 beside 4, 12, 8 and 8.
    Published: 5 beside 4, 12, 12 and 8, then 8 s home."""
    assert pass_of("ring", Pass(TWO, LAYER, CHUNK)) == 3 * 4 + 2
    assert pass_of("ring", Pass(TWO, LAYER, CHUNK, True)) == 4 + 5 + 12 + 8 + 8
    assert pass_of("ring", Pass(TWO, LAYER, CHUNK, True, ours=False)) == 5 + 12 + 12 + 8 + 8
    two = replace(TWO, hosts=1)  # two ranks: ours has one message of sums, beside the own block
    assert pass_of("ring", Pass(two, LAYER, CHUNK, True)) == 1 + 5 + 5
    assert pass_of("ring", Pass(two, LAYER, CHUNK, True, ours=False)) == 5 + 5 + 2
    slow = replace(two, bandwidth=64)
    assert pass_of("ring", Pass(slow, LAYER, CHUNK, True)) == 4 + 5 + 8
    assert pass_of("ring", Pass(slow, LAYER, CHUNK, True, ours=False)) == 5 + 8 + 8


def test_a_double_ring_by_hand():
    """A turn of 4 s hides the slow hop of 4 s; on one card for both, the hop takes 8 s. Backward: a turn is 10 s, after
    a hop of 4 s, and 2 s bring the last sums home. Published: 8 s more, and no hop before."""
    assert pass_of("double ring", Pass(TWO, LAYER, CHUNK)) == 4 + 4
    assert pass_of("double ring", Pass(ONE_NIC, LAYER, CHUNK)) == 8 + 4
    assert pass_of("double ring", Pass(TWO, LAYER, CHUNK, True)) == 4 + 10 + 10 + 2
    assert pass_of("double ring", Pass(TWO, LAYER, CHUNK, True, ours=False)) == 10 + 10 + 2 + 8


def test_all_gather_by_hand():
    """Two heads of 384 bytes, gathered through two cards of 64: 3 s each; a head is computed in 4 s, 10 s backward.
    Published: both heads at once."""
    assert pass_of("all-gather", Pass(TWO, LAYER, CHUNK)) == 3 + 4 + 4
    assert pass_of("all-gather", Pass(TWO, LAYER, CHUNK, ours=False)) == 6 + 8
    assert pass_of("all-gather", Pass(TWO, LAYER, CHUNK, True)) == 3 + 10 + 10 + 6
    assert pass_of("all-gather", Pass(TWO, LAYER, CHUNK, True, ours=False)) == 6 + 20 + 12


def test_exchanges_by_hand():
    """The cards carry 3 + 3 heads of 64 bytes there and 1 + 1 back; hybrid: 4 and 2 heads inside, a hop of 256."""
    assert pass_of("all-to-all", Pass(TWO, LAYER, CHUNK)) == 6 + 8 + 2
    assert pass_of("hybrid", Pass(TWO, LAYER, CHUNK), 2) == 1 + max(4, 4) + 4 + 0.5


# What a round costs beside its products -------------------------------------------------------------------------------


def simulate(way, cluster, layer, chunk, split=None, **options):
    return pass_of(way, Pass(cluster, layer, chunk, **options), split)


ROWS, KEYS = 6, 4


def test_bytes_beside_the_products_by_hand():
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
    cards = Pass(Cluster(2, 8, 1.0, 1.0, 1.0, 3), LAYER, CHUNK)  # 3, 3 and 2 of 8 devices share one; few hops leave
    assert [cards.between(10.0, stride) for stride in (1, 2, 4, 5, 8, 16)] == [10, 20, 20, 30, 30, 30]
    slow = Pass(Cluster(2, 4, 1.0, 0.1, 1.0), LAYER, CHUNK)  # links that a hop to another host does not use
    assert [slow.hop(10.0, stride) for stride in (1, 4)] == [100, 10]


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
        *(({"way": "all-gather", "mask": "none", "layout": of}, whole * 4 * block) for of in ("zigzag", "contiguous")),
        ({"layout": "striped", "batch": 2}, 2 * 4 * two * triangle),
    ):
        asked = {"way": "ring", "mask": "causal", **options}
        assert 2 * simulate(cluster=GPU, layer=LAYER, chunk=LONG, **asked) == pytest.approx(right), asked


# Closed forms, by hand. Real rings send these bytes: test_bytes. The paper's tables: by themselves


BF16, FLOAT32, FLOAT64 = (AttentionLayer(heads=2, kv_heads=1, head_dim=4, itemsize=w) for w in (2, 4, 8))
FLOPS, BANDWIDTH = 1024, 64  # FLOP/s and bytes/s: their quotient is 16

# layer, backward, visible; then by hand: FLOPs of a block of C = 8, bytes of its hop, the smallest chunk that hides it
COUNTS = {
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
    for name, (layer, backward, visible, flops, sent, chunk) in COUNTS.items():
        assert hidden_communication.block_flops(layer, visible * 8**2, backward=backward) == flops, name
        assert hidden_communication.hop_bytes(layer, 8, backward=backward) == sent, name
        ours = hidden_communication.min_overlap_chunk(FLOPS, BANDWIDTH, layer, visible=visible, backward=backward)
        assert ours == pytest.approx(chunk, rel=1e-12), name
    assert [hidden_communication.hidden_share(C, 8) for C in (2, 8, 9)] == [0.25, 1, 1]
