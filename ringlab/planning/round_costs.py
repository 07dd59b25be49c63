"""What a round costs beside its products: bytes in the device's memory, calls of kernels, and rates below the nominal.

    a call, forward     reads Q, K, V; writes out
    a call, backward    reads out and dO for their row sums; Q, dO, K, V; zeroes dQ in float32, reads it, writes it in
                        16 bits; writes dK and dV, of each query head if K/V heads are shared: read again to be summed
    a merge, forward    block to float32; out - block; times sigmoid; out - that: 38 bytes of each number, at 16 bits
    a merge, backward   dQ += the block's; dK += the block's; dV += the block's: 10 bytes of each number, at 16 bits
    an exchange         packs before it and unpacks after it: each reads and writes all bytes once
    a causal call       computes the tiles of its diagonal whole, and takes longer for each pair

The bytes are counted from FlashAttention 2's kernels, and from PyTorch's operations in published rings: each operation
reads its inputs and writes its result. A kernel that merges in one operation would move 10 bytes in place of 38.

Shapes: numbers only. `rows` queries and `keys` keys, H query heads, G key/value heads, D numbers in a head.

    $ python -m ringlab.planning.round_costs
    ring of 8, C = 8,192, 32 query heads on 8, bf16, causal in zigzag: the last rank, MB and ms
                      a call   a merge   at 2 TB/s   computing at 200 TFLOP/s
        forward        151.0    1275.1        0.71                       2.75
        backward       771.8     419.4        0.60                       6.87

Before: shared_links.py. After: two_speeds.py, where these costs take their time.
Source: Dao 2023 (FlashAttention 2), algorithms 1 and 2; zhuzilin/ring-flash-attention, utils.py, for the merge. The
sources of the constants stand beside them; scoreboard.py fits one of them, and grades all.
"""

import sys
from dataclasses import replace

from ringlab.planning.hidden_communication import AttentionLayer, block_flops
from ringlab.planning.ways import Cluster

TILE = 128  # queries and keys of a tile of the kernel: Dao 2023, section 3.3
MERGE_CALLS = {False: 4, True: 3}  # operations of a merge, forward and backward: counted above

# Fitted on the 28 times of published.json; scoreboard.py prints the error on each source that is left out of the fit.
MEMORY_SHARE = 0.8  # of the nominal bytes/s of memory, which kernels reach that only read and write

# Chosen, not fitted. The 28 times would be met by 1.15 a little better (and 0.7 above): a mean error of 4.3 for 4.6 %.
# But then a ring on a million tokens would be faster than its kernel on one device.
CAUSAL = 1.1  # a call with a causal mask takes so many times as long for each pair as a call without a mask

# Assumed: the 28 times hardly depend on these, because they are of one host and of long chunks.
LINK_SHARE = 0.8  # of the nominal bytes/s inside a host
CARD_SHARE = 0.7  # of a card's bytes/s: messages of 16 MB reach 0.57 in arXiv 2411.01783, table 5; collectives more
LATENCY = 5e-6  # seconds of a message inside a host, or of a step of a collective
HOST_LATENCY = 4e-5  # seconds of a message between hosts: arXiv 2411.01783, table 5, the smallest message
LAUNCH = 1e-5  # seconds of an operation of PyTorch
SLOWDOWN = 1.2  # between 1.1 (NCCL has a tenth of an H100: pytorch issue 143988) and 1.3 to 1.4 (pytorch PR 179937)


def realistic(nominal: Cluster) -> Cluster:
    """What the rates of a data sheet become: shares of them, latencies, and messages that slow the computing.

    `flops` and `backward_flops` stay: a data sheet does not know them, a run of the kernel without a mask does.
    """
    return replace(
        nominal,
        bandwidth=LINK_SHARE * nominal.bandwidth,
        host_bandwidth=CARD_SHARE * nominal.host_bandwidth,
        memory_bandwidth=MEMORY_SHARE * nominal.memory_bandwidth,
        latency=LATENCY,
        host_latency=HOST_LATENCY,
        launch=LAUNCH,
        slowdown=SLOWDOWN,
        causal=CAUSAL,
    )


def numbers(layer: AttentionLayer, rows: float, keys: float) -> tuple[float, float]:
    """The numbers in Q of `rows` tokens, and in K and V of `keys` tokens."""
    return rows * layer.hidden, 2 * keys * layer.kv_heads * layer.head_dim


def causal_pairs(tokens: float) -> float:
    """The pairs that a causal call on `tokens` queries and keys computes."""
    return tokens * (tokens + min(TILE, tokens)) / 2


def call_bytes(layer: AttentionLayer, rows: float, keys: float, *, backward: bool = False) -> float:
    """Bytes that one call of the attention kernel moves."""
    (q, kv), w, sums = numbers(layer, rows, keys), layer.itemsize, max(layer.itemsize, 4)
    if not backward:
        return (2 * q + kv) * w
    copies = kv * layer.heads / layer.kv_heads if layer.heads > layer.kv_heads else 0.0  # written, then read
    return q * (5 * w + 2 * sums) + 2 * (kv + copies) * w


def merge_bytes(
    layer: AttentionLayer, rows: float, keys: float, *, first: bool = False, backward: bool = False
) -> float:
    """Bytes that adding a block's results to the running ones moves.

    The first block has nothing to be added to: its result is converted to float32, and at the end back.
    """
    (q, kv), w, sums = numbers(layer, rows, keys), layer.itemsize, max(layer.itemsize, 4)
    convert = w + sums if w < sums else 0
    if first:
        return 2 * (q + (kv if backward else 0)) * convert
    if backward:
        return (q + kv) * (w + 2 * sums)
    return q * (convert + 3 * sums + 2 * sums + 3 * sums)


def packing_bytes(layer: AttentionLayer, chunk: float) -> float:
    """Bytes that packing, or unpacking, moves for one of the two exchanges of heads: half of q, k, v and out."""
    q, kv = numbers(layer, chunk, chunk)
    return (2 * q + kv) * layer.itemsize


def main() -> int:
    layer, chunk = AttentionLayer(heads=32, kv_heads=8, head_dim=128), 8192
    print(f"ring of 8, C = {chunk:,}, 32 query heads on 8, bf16, causal in zigzag: the last rank, MB and ms")
    print("                  a call   a merge   at 2 TB/s   computing at 200 TFLOP/s")
    for backward in (False, True):
        call = call_bytes(layer, chunk, chunk / 2, backward=backward)
        merge = merge_bytes(layer, chunk, chunk / 2, backward=backward)
        computing = 1e3 * block_flops(layer, chunk**2 / 2, backward=backward) / 200e12
        name = "backward" if backward else "forward"
        print(f"    {name:<12}{call / 1e6:8.1f}{merge / 1e6:10.1f}{1e3 * (call + merge) / 2e12:12.2f}{computing:27.2f}")
    return 0 if merge_bytes(layer, chunk, chunk) == 38 * chunk * layer.hidden else 1


if __name__ == "__main__":
    sys.exit(main())
