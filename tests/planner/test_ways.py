"""The bytes, the memory and the seconds of each way, by hand."""

import math
from dataclasses import replace

import pytest

from ring_planner.hidden_communication import AttentionLayer
from ring_planner.memory import peak_bytes_backward, training_bytes
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
    assert shares(AttentionLayer(40, 8, 1), 16) == [AttentionLayer(3, 1, 1), AttentionLayer(2, 1, 1)] * 8
    assert shares(AttentionLayer(6, 3, 1), 2) == [AttentionLayer(3, 2, 1)] * 2  # heads 2 and 3 share a K/V head
    host = Cluster(1, 2, 1, 1)
    # rank 0 sends 3 + 2·2 heads there and 3 back, of which the K/V heads are 4 though G = 3
    assert traffic("all-to-all", AttentionLayer(6, 3, 4), 8, host) == (64 * (3 + 4 + 3), 0)
    # backward, a rank of 4 heads on 2: 4 heads of dO there, 4 of dQ and 2·2 of dK and dV back
    assert traffic("all-to-all", AttentionLayer(8, 4, 4), 8, host, backward=True) == (64 * (4 + 4 + 4), 0)
    # 3 and 2 query heads: of dO the other rank's, of dQ its own
    assert traffic("all-to-all", AttentionLayer(5, 1, 4), 8, host, backward=True) == (64 * (2 + 3 + 2), 0)


def test_published_rings_send_the_sums_once_more():
    for way, split, gradients in (("ring", None, 512), ("hybrid", 2, 512)):
        ours, theirs = (
            traffic(way, LAYER, CHUNK, TWO, backward=True, split=split, ours=each) for each in (True, False)
        )
        assert theirs[1] - ours[1] == gradients
    two = [busiest(sent, TWO) for sent in exchanges(LAYER, CHUNK, TWO, 4)]
    assert [sum(each) for each in zip(*two, strict=True)] == [256, 512]  # as all-to-all by hand


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


LEAST = {"hosts": 1, "per_host": 2, "nics": 0, "memory_bandwidth": 1e-9, "slowdown": 1.0, "causal": 1.0}
LEAST |= dict.fromkeys(("flops", "bandwidth", "host_bandwidth"), 1e-9)
LEAST |= dict.fromkeys(("latency", "host_latency", "launch", "backward_flops", "multiprocessors"), 0.0)


@pytest.mark.parametrize("value", [0, -1, 3, math.nan, math.inf])
@pytest.mark.parametrize("name", LEAST)
def test_a_cluster_that_cannot_be(name, value):
    """Each number has a least value. Two devices of a host have no third NIC, and infinity is no factor."""
    most = {"nics": 2, "slowdown": 1e9, "causal": 1e9}.get(name, math.inf)
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
