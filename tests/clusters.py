"""What the tests of the planner for two speeds of wire share: a small cluster in round numbers, and random ones."""

from hypothesis import strategies as st

from ringlab.planning.hidden_communication import AttentionLayer
from ringlab.planning.ways import WAYS, Cluster, splits

# A block of 8 tokens: 2048 FLOPs forward under a causal mask, 5120 backward; K and V 256 bytes, their gradients 512.
LAYER, CHUNK = AttentionLayer(heads=4, kv_heads=2, head_dim=4, itemsize=2), 8
TWO = Cluster(hosts=2, per_host=2, flops=1024, bandwidth=256, host_bandwidth=64)  # computing: 2 s and 5 s a block
ONE_NIC = Cluster(hosts=2, per_host=2, flops=1024, bandwidth=256, host_bandwidth=64, nics=1)


@st.composite
def clusters(draw, most=9):
    """Hosts of devices, at most so many in all."""
    per_host = draw(st.integers(1, 4))
    rates = (draw(st.sampled_from([64, 100, 256, 1000])) for _ in range(3))
    return Cluster(draw(st.integers(1, most // per_host)), per_host, *rates, nics=draw(st.integers(1, per_host)))


@st.composite
def layers(draw):
    kv_heads = draw(st.integers(1, 4))
    return AttentionLayer(
        kv_heads * draw(st.integers(1, 4)), kv_heads, draw(st.integers(1, 4)), draw(st.sampled_from([2, 4]))
    )


def ways_on(layer, cluster):
    """All ways that the heads allow, and all splits of hybrid: (way, split)."""
    possible = splits(layer, cluster)
    flat = [way for way in WAYS if way != "hybrid" and (way != "all-to-all" or cluster.devices in possible)]
    return [(way, None) for way in flat] + [("hybrid", a) for a in possible]
