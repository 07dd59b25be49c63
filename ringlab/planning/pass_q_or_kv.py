"""Shall K and V travel, or Q? Of S tokens T are new, and the others cached: if few are new, the queries should travel.

A rank sends in a layer, with w bytes for a number of q, k and v and w' for a number of a partial result:

    pass-KV     (P-1)/P · S · 2·G·D·w          K and V of all tokens, while the rank computes
    pass-Q      (P-1)/P · T · H·D·w            the queries, while the rank computes
              + (P-1)/P · T · H·(D+1)·w'       out and lse on their way home, when all is computed

K and V should travel from the share of new tokens on at which both ways take as long:

    T/S  =  2·G·D·w / (H · (max(D·w, 4·S·D·bandwidth/(P·flops)) + (D+1)·w'))

The max is the longer of a query's message and its computing. While messages are longer, this is the share at which both
ways send as many bytes. A faster link lowers it: then computing hides more of K and V, and nothing hides the way home.
The paper's rule (1), 2·G/H, leaves out the way home. Its rule (5) is this one with w' = w, D + 1 = D and the second
term of the max. Its rule (2) says when K and V are hidden, T >= P·G·w/(2·H) · flops/bandwidth: always more tokens.

Shapes: H query heads on G, D numbers in a head, P ranks. `flops` and `bandwidth` are those of a rank. A new token is
counted with all S keys; under a causal mask the new keys are half masked, which matters where most tokens are new.

    $ python -m ringlab.planning.pass_q_or_kv
    Llama 3 405B, 128,000 tokens on 4 hosts of 8 H100. A GPU: 16 heads on 1; 507 TFLOP/s and 26.1 GB/s reached
     share  a layer sends, of a GPU  modelled, a layer       measured, the whole model
       new   K and V     Q and home  pass-KV  pass-Q         pass-KV  pass-Q
     1.00%   49.2 MB   3.9 +  4.0 MB  2.05 ms  0.81 ms  Q   1023 ms   899 ms  Q
     2.50%   49.2 MB   9.8 +  9.9 MB  2.29 ms  2.04 ms  Q   1110 ms  1046 ms  Q
     3.25%   49.2 MB  12.8 + 12.9 MB  2.42 ms  2.65 ms  KV  1299 ms  1280 ms  Q
     5.00%   49.2 MB  19.7 + 19.8 MB  3.31 ms  4.07 ms  KV  1306 ms  1302 ms  Q
    10.00%   49.2 MB  39.3 + 39.6 MB  6.62 ms  8.14 ms  KV  2081 ms  2205 ms  KV
    20.00%   49.2 MB  78.6 + 79.3 MB 13.25 ms 16.28 ms  KV  3353 ms  3617 ms  KV
    K and V should travel from this share on, by the paper's rule (1): 12.5%
        partial results in 16 bits: as many bytes at 6.2%, as long at 2.9%
        partial results in float32: as many bytes at 4.1%, as long at 2.4%
        measured: near 5%, and there both take as long within 1%

The model takes the paper's partial results for 16 bits: in float32, table 5's all-to-all of 12,800 tokens would have
needed 77 GB/s of a link of 50.

Before: hidden_communication.py. After: ../models/pass_q.py, both ways.
Source: Yang et al. 2025 (arXiv 2411.01783v3), section 3.4, equations 1 to 3; appendix C, equation 5; tables 4 and 5.
"""

import math
import sys
from dataclasses import replace

from ringlab.planning.hidden_communication import AttentionLayer, block_flops, hop_bytes, ring_seconds

LLAMA_405B = AttentionLayer(heads=128, kv_heads=8, head_dim=128)  # in bf16
ON_A_GPU = replace(LLAMA_405B, heads=16, kv_heads=1)  # 8 GPUs of a host share the heads out
HOSTS, TOKENS = 4, 128_000
MEASURED = [  # table 4: new tokens, milliseconds to the first token with pass-KV, and with pass-Q
    (1_280, 1023.39, 898.71),
    (3_200, 1110.18, 1046.43),
    (4_160, 1298.92, 1280.10),
    (6_400, 1305.56, 1302.01),
    (12_800, 2080.67, 2205.27),
    (25_600, 3353.02, 3617.02),
    (38_400, 4629.23, 4922.52),
    (51_200, 5745.08, 6217.83),
    (64_000, 6845.21, 7367.99),
    (76_800, 7890.35, 8468.66),
    (89_600, 8697.27, 9666.62),
    (102_400, 10105.78, 10652.39),
    (115_200, 11136.40, 11571.62),
    (128_000, 11462.15, 12360.57),
]
TABLE_5 = (3_200, 627e-6, 414e-6)  # new tokens; seconds of a hop of K and V, and of computing on a block


def partial_itemsize(layer: AttentionLayer) -> int:
    """w': bytes of a number of a partial result. ringlab/models/pass_q.py keeps them in float32 at least."""
    return max(layer.itemsize, 4)


def sent_bytes(
    layer: AttentionLayer, new: float, cached: float, world_size: int, partial: int | None = None
) -> tuple[float, float, float]:
    """Bytes that a rank sends in a layer: K and V in pass-KV; the queries, and the partial results, in pass-Q.

    The means over the ranks, however unevenly they share the tokens. `partial` is w' (None: `partial_itemsize`).
    """
    hops, w = world_size - 1, partial or partial_itemsize(layer)
    keys = hops * hop_bytes(layer, (cached + new) / world_size)
    queries = hops * new / world_size * layer.hidden * layer.itemsize
    return keys, queries, hops * new / world_size * layer.heads * (layer.head_dim + 1) * w


def pass_seconds(
    layer: AttentionLayer,
    new: float,
    cached: float,
    world_size: int,
    flops: float,
    bandwidth: float,
    partial: int | None = None,
) -> tuple[float, float]:
    """Seconds of a layer's attention by pass-KV, and by pass-Q. Yang et al. 2025, appendix C, before they rearrange."""
    computing = block_flops(layer, new / world_size * (cached + new) / world_size) / flops
    keys, queries, home = (x / bandwidth for x in sent_bytes(layer, new, cached, world_size, partial))
    hops = max(1, world_size - 1)
    by_keys, by_queries = (ring_seconds(world_size, computing, x / hops, overlap=True) for x in (keys, queries))
    return by_keys, by_queries + home


def share_for_keys(
    layer: AttentionLayer,
    tokens: float,
    world_size: int,
    flops: float = math.inf,
    bandwidth: float = 1.0,
    partial: int | None = None,
) -> float:
    """The share of new tokens among all `tokens` from which K and V should travel.

    Without `flops` it is the share at which both ways send as many bytes.
    """
    D, w = layer.head_dim, layer.itemsize
    query = max(D * w, 4 * tokens * D * bandwidth / (world_size * flops))
    home = (D + 1) * (partial or partial_itemsize(layer))
    return 2 * layer.kv_heads * D * w / (layer.heads * (query + home))


def what_travels(
    layer: AttentionLayer,
    new: int,
    cached: int,
    world_size: int,
    flops: float = math.inf,
    bandwidth: float = 1.0,
    partial: int | None = None,
) -> str:
    """What should travel, "KV" or "Q", as `share_for_keys` says. Without `flops`: what is fewer bytes.

    Raises ValueError for fewer than 1 new token, 0 cached ones or 1 rank, and for speeds that are not above 0.
    """
    if new < 1 or cached < 0 or world_size < 1 or not (flops > 0 and 0 < bandwidth < math.inf):
        raise ValueError(
            f"{new} new tokens over {cached} on {world_size} ranks, flops={flops}, bandwidth={bandwidth}; expected 1 "
            f"new token, 0 cached ones and 1 rank or more, and speeds above 0"
        )
    tokens = cached + new
    return "KV" if new >= tokens * share_for_keys(layer, tokens, world_size, flops, bandwidth, partial) else "Q"


def reached() -> tuple[float, float]:
    """FLOP/s and bytes/s of a GPU in table 5."""
    new, hop, computing = TABLE_5
    flops = block_flops(ON_A_GPU, new / HOSTS * TOKENS / HOSTS) / computing
    return flops, hop_bytes(ON_A_GPU, TOKENS / HOSTS) / hop


def main() -> int:
    flops, bandwidth = reached()
    a_gpu = f"A GPU: {ON_A_GPU.heads} heads on {ON_A_GPU.kv_heads}; {flops / 1e12:.0f} TFLOP/s and"
    print(f"Llama 3 405B, {TOKENS:,} tokens on {HOSTS} hosts of 8 H100. {a_gpu} {bandwidth / 1e9:.1f} GB/s reached")
    print(" share  a layer sends, of a GPU  modelled, a layer       measured, the whole model")
    print("   new   K and V     Q and home  pass-KV  pass-Q         pass-KV  pass-Q")
    ok = True
    for new, *measured in MEASURED[:6]:
        case = ON_A_GPU, new, TOKENS - new, HOSTS
        keys, queries, home = (x / 1e6 for x in sent_bytes(*case, partial=2))
        times = pass_seconds(*case, flops, bandwidth, partial=2)
        ours, theirs = ("KV" if by_keys <= by_queries else "Q" for by_keys, by_queries in (times, measured))
        ok &= ours == what_travels(*case, flops, bandwidth, partial=2)
        ok &= ours == theirs or max(measured) < 1.05 * min(measured)
        sent = f"{keys:6.1f} MB {queries:5.1f} + {home:4.1f} MB"
        modelled = " ".join(f"{seconds * 1e3:5.2f} ms" for seconds in times)
        seen = " ".join(f"{milliseconds:5.0f} ms" for milliseconds in measured)
        print(f"{new / TOKENS:6.2%} {sent} {modelled}  {ours:<2} {seen}  {theirs}")
    rule_1 = 2 * ON_A_GPU.kv_heads / ON_A_GPU.heads
    print(f"K and V should travel from this share on, by the paper's rule (1): {rule_1:.1%}")
    for name, partial in (("16 bits", 2), ("float32", 4)):
        as_many = share_for_keys(ON_A_GPU, TOKENS, HOSTS, partial=partial)
        as_long = share_for_keys(ON_A_GPU, TOKENS, HOSTS, flops, bandwidth, partial)
        print(f"    partial results in {name}: as many bytes at {as_many:.1%}, as long at {as_long:.1%}")
    print("    measured: near 5%, and there both take as long within 1%")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
