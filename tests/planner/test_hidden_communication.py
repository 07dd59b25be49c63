"""The closed forms against numbers worked out by hand, torch's counts. Real rings send these bytes: test_bytes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ring_planner import hidden_communication
from ring_planner.hidden_communication import LLAMA_7B, MISPRINTED, TABLE_2, AttentionLayer
from ringlab.basics.naive_attention import naive_attention
from ringlab.ring.backward import block_backward

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


@pytest.mark.parametrize("row", TABLE_2, ids=[row[0] for row in TABLE_2])
def test_table_2(row):
    hardware, flops, bandwidth, chunk, sequence = row
    ours = hidden_communication.min_overlap_chunk(flops, bandwidth, LLAMA_7B)
    assert ours == pytest.approx(flops / bandwidth)  # the paper's c >= F/B
    same = (round(ours / 1000, 1), round(6 * ours / 1000, 1)) == (chunk, sequence)
    assert same == (hardware not in MISPRINTED)


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
