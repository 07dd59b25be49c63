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
term of the max.

Shapes: H query heads on G, D numbers in a head, P ranks. A new token is counted with all S keys; under a causal mask
the new keys are half masked, which matters where most tokens are new.

    $ python -m ring_planner.pass_q_or_kv
    Llama 3 405B, 128,000 tokens on 4 hosts of 8 H100. A GPU: 16 heads on 1; 507 TFLOP/s and 26.1 GB/s reached
     share  a layer sends, of a GPU  modelled, a layer       measured, the whole model
       new   K and V     Q and home  pass-KV  pass-Q         pass-KV  pass-Q
     1.00%   49.2 MB   3.9 +  4.0 MB  2.05 ms  0.81 ms  Q   1023 ms   899 ms  Q
     2.50%   49.2 MB   9.8 +  9.9 MB  2.29 ms  2.04 ms  Q   1110 ms  1046 ms  Q
     3.25%   49.2 MB  12.8 + 12.9 MB  2.42 ms  2.65 ms  KV  1299 ms  1280 ms  Q
     5.00%   49.2 MB  19.7 + 19.8 MB  3.31 ms  4.07 ms  KV  1306 ms  1302 ms  Q
    10.00%   49.2 MB  39.3 + 39.6 MB  6.62 ms  8.14 ms  KV  2081 ms  2205 ms  KV
    20.00%   49.2 MB  78.6 + 79.3 MB 13.25 ms 16.28 ms  KV  3353 ms  3617 ms  KV
    50.00%   49.2 MB 196.6 + 198.1 MB 33.12 ms 40.70 ms  KV  6845 ms  7368 ms  KV
    K and V should travel from this share on: rule (1) 12.5%, bytes 6.2% (in float32 4.1%), time 2.9%
        measured: near 5%, and there both take as long within 1%

The model takes the paper's partial results for 16 bits: in float32, as ringlab/models/pass_q.py sends them, table 5's
all-to-all of 12,800 tokens would have needed 77 GB/s of a link of 50.

Before: ringlab/models/pass_q.py, both ways. After: nothing.
Source: Yang et al. 2025 (arXiv 2411.01783v3), section 3.4, equations 1 to 3; appendix C, equation 5; tables 4 and 5.
"""

import math
import sys
from dataclasses import dataclass, replace

from ring_planner.hidden_communication import AttentionLayer, block_flops, hop_bytes, ring_seconds
from ringlab.models.pass_q import numbers_sent

ON_A_GPU = AttentionLayer(heads=16, kv_heads=1, head_dim=128)  # Llama 3 405B in bf16: 8 GPUs share 128 heads on 8
HOSTS, TOKENS = 4, 128_000
MEASURED = [  # of table 4: new tokens, milliseconds to the first token with pass-KV, and with pass-Q
    (1_280, 1023.39, 898.71),
    (3_200, 1110.18, 1046.43),
    (4_160, 1298.92, 1280.10),
    (6_400, 1305.56, 1302.01),
    (12_800, 2080.67, 2205.27),
    (25_600, 3353.02, 3617.02),
    (64_000, 6845.21, 7367.99),
]
TABLE_5 = (3_200, 627e-6, 414e-6)  # new tokens; seconds of a hop of K and V, and of computing on a block


@dataclass(frozen=True)
class Prefill:
    """New tokens over cached ones, on `world_size` ranks of `flops` FLOP/s and `bandwidth` bytes/s.

    Without `flops`, bytes alone decide. `partial` is w' (0: float32 at least, as in ringlab/models/pass_q.py).
    """

    layer: AttentionLayer
    new: float
    cached: float
    world_size: int
    flops: float = math.inf
    bandwidth: float = 1.0
    partial: float = 0

    @property
    def sent(self) -> tuple[float, float, float]:
        """Bytes that a rank sends in a layer: K and V in pass-KV; the queries, and the partial results, in pass-Q.

        The means over the ranks, however unevenly they share the tokens.
        """
        layer, share = self.layer, (self.world_size - 1) / self.world_size
        w, all_tokens = layer.itemsize, self.cached + self.new
        keys, queries, home = numbers_sent(layer.heads, layer.kv_heads, layer.head_dim, self.new, all_tokens)
        return share * keys * w, share * queries * w, share * home * (self.partial or max(w, 4))

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of a layer's attention by pass-KV, and by pass-Q. Yang et al. 2025, appendix C, equation 5."""
        P = self.world_size
        computing = block_flops(self.layer, self.new / P * (self.cached + self.new) / P) / self.flops
        keys, queries, home = (x / self.bandwidth for x in self.sent)
        by_keys, by_queries = (ring_seconds(P, computing, x / max(1, P - 1)) for x in (keys, queries))
        return by_keys, by_queries + home

    @property
    def share_for_keys(self) -> float:
        """The share of new tokens among all from which K and V should travel."""
        D, w, all_tokens = self.layer.head_dim, self.layer.itemsize, self.cached + self.new
        query = max(D * w, 4 * all_tokens * D * self.bandwidth / (self.world_size * self.flops))
        home = (D + 1) * (self.partial or max(w, 4))
        return 2 * self.layer.kv_heads * D * w / (self.layer.heads * (query + home))


def published(new: int) -> Prefill:
    """The turn of a row of table 4, with the FLOP/s and bytes/s that a GPU reached in table 5."""
    rows, hop, computing = TABLE_5
    flops = block_flops(ON_A_GPU, rows / HOSTS * TOKENS / HOSTS) / computing
    return Prefill(ON_A_GPU, new, TOKENS - new, HOSTS, flops, hop_bytes(ON_A_GPU, TOKENS / HOSTS) / hop, partial=2)


def main() -> int:
    first, ok = published(MEASURED[0][0]), True
    a_gpu = f"A GPU: 16 heads on 1; {first.flops / 1e12:.0f} TFLOP/s and {first.bandwidth / 1e9:.1f} GB/s reached"
    print(f"Llama 3 405B, {TOKENS:,} tokens on {HOSTS} hosts of 8 H100. {a_gpu}")
    print(" share  a layer sends, of a GPU  modelled, a layer       measured, the whole model")
    print("   new   K and V     Q and home  pass-KV  pass-Q         pass-KV  pass-Q")
    for new, *measured in MEASURED:
        turn = published(new)
        keys, queries, home = (x / 1e6 for x in turn.sent)
        ours, theirs = ("KV" if by_keys <= by_queries else "Q" for by_keys, by_queries in (turn.seconds, measured))
        ok &= (ours == "KV") == (new >= TOKENS * turn.share_for_keys)
        ok &= ours == theirs or max(measured) < 1.05 * min(measured)
        sent = f"{keys:6.1f} MB {queries:5.1f} + {home:4.1f} MB"
        modelled = " ".join(f"{seconds * 1e3:5.2f} ms" for seconds in turn.seconds)
        seen = " ".join(f"{milliseconds:5.0f} ms" for milliseconds in measured)
        print(f"{new / TOKENS:6.2%} {sent} {modelled}  {ours:<2} {seen}  {theirs}")
    in_16, in_32 = (f"{replace(first, flops=math.inf, partial=w).share_for_keys:.1%}" for w in (2, 4))
    rule_1, by_time = 2 * ON_A_GPU.kv_heads / ON_A_GPU.heads, first.share_for_keys
    rules = f"rule (1) {rule_1:.1%}, bytes {in_16} (in float32 {in_32}), time {by_time:.1%}"
    print(f"K and V should travel from this share on: {rules}")
    print("    measured: near 5%, and there both take as long within 1%")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
