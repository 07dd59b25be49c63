"""What a round costs beside its products: bytes in the device's memory, calls of kernels, and rates below the nominal.

    a call, forward     nothing: the kernel reads and writes while it computes
    a call, backward    before its products it reads out and dO for their row sums and zeroes dQ in float32; after them
                        it reads dQ and writes it in 16 bits; dK and dV of each query head are written and read again
                        if K/V heads are shared
    a merge, forward    published: as long as 24 bytes of each number take; ours on a GPU is one pass, as 12 bytes
    a merge, backward   dQ += the block's; dK += the block's; dV += the block's: one pass each, as 12 bytes
    an exchange         packs before it and unpacks after it: each reads and writes all bytes once
    a causal call       computes the tiles of its diagonal whole
    waves               few blocks do not fill a GPU: its multiprocessors wait for the last blocks, see `efficiency`

The bytes of a call are counted from FlashAttention 2's kernels. Those of a merge were measured by hand on one H100, at
the bytes/s of a copy: our merge in PyTorch takes as long as 23 bytes of each number, compiled as 13, `dQ +=` as 12.
Ten bytes are what one pass must move; PyTorch's own merge takes as long as 41.

Shapes: numbers only. `rows` queries and `keys` keys, H query heads, G key/value heads, D numbers in a head.

A reader may skip this file. Before: ways.py. After: seconds.py, where these costs take their time.
Source: Dao 2023 (FlashAttention 2), algorithms 1 and 2; zhuzilin/ring-flash-attention, utils.py, for the merge; NVIDIA,
Matrix Multiplication Background, on wave quantization. bench/scoreboard.py fits two of the constants, and grades all.
"""

from dataclasses import replace

from ring_planner.hidden_communication import AttentionLayer
from ring_planner.ways import Cluster

TILE = 128  # queries and keys of a tile of the kernel: Dao 2023, section 3.3
MERGE_CALLS = {False: 4, True: 3}  # operations of a merge, forward and backward
MERGED, ONE_PASS = 4, 1.2  # times the bytes of a number and its sum; in one pass, of a number and twice its sum
WAIT = {False: 0.5, True: 1.5}  # waves that a call waits, without a mask and with a causal one: see `efficiency`
MEMORY_SHARE = 0.81  # of the nominal bytes/s of memory: a copy on one H100 reaches 2.7 of 3.35 TB/s, by hand

# Fitted on the three hops of published.json, of one machine: arXiv 2411.01783, table 5. Its NIC's bytes/s: presets.py.
HOST_LATENCY = 5e-5  # seconds of a message to another host, before its bytes flow

# Assumed: the times of one host and of long chunks hardly depend on these.
HOST_SHARE = 0.7  # of a NIC's bytes/s; on the one machine where single messages were measured, they reach 0.566
BANDWIDTH_SHARE = 0.8  # of the nominal bytes/s inside a host
LATENCY = 5e-6  # seconds of a message inside a host, or of a step of a collective
LAUNCH = 1e-5  # seconds of an operation of PyTorch
# By the year of a framework, how many times longer its attention takes than its kernels do, where cp GPUs share it:
# fitted on the six steps of NeMo and the seven of TRL in published.json, and graded on all others. Without cp there is
# none: torchtitan's step of 32,768 tokens on one GPU each, of which attention is 60 %, is planned 3.5 % too long.
FRAMEWORK = {2024: 1.45, 2026: 1.15}
SLOWDOWN = 1.1  # NCCL has a tenth of an H100: pytorch issue 143988; at most 1.3 to 1.4 (pytorch PR 179937)


def realistic(nominal: Cluster, host_share: float = HOST_SHARE, bandwidth_share: float = BANDWIDTH_SHARE) -> Cluster:
    """What the rates of a data sheet become: shares of them, latencies, and messages that slow the computing.

    `host_share`: that of a NIC's bytes/s which a message to another host reaches; other than HOST_SHARE if measured.
    `flops` and `backward_flops` stay: a data sheet does not know them, a run of the kernel does.
    """
    return replace(
        nominal,
        bandwidth=bandwidth_share * nominal.bandwidth,
        host_bandwidth=host_share * nominal.host_bandwidth,
        memory_bandwidth=MEMORY_SHARE * nominal.memory_bandwidth,
        latency=LATENCY,
        host_latency=HOST_LATENCY,
        launch=LAUNCH,
        slowdown=SLOWDOWN,
    )


def efficiency(heads: float, tokens: float, multiprocessors: int, *, causal: bool = False) -> float:
    """The share of a kernel's FLOP/s that a call reaches whose blocks are few: at its end, multiprocessors wait.

    A block is a tile of queries of a head; in the backward pass, a tile of keys. `heads` are those of all sequences,
    `tokens` their queries, or keys. Without waiting a call would take as long as `waves` blocks of mean length do, one
    after the other: blocks / multiprocessors. It takes longer:

        no mask     max(1, waves + 1/2)    the last wave is half empty, on an average
        causal      waves + 3/2            blocks differ: the last one to end may be twice the mean

    3/2 lies between the counts of what FlashAttention 2 launches, 2 forward and 1 backward. 28 times of two kernels,
    measured by hand on one H100, lie within 7 % of it. 0 multiprocessors: an ideal device, 1.
    """
    if not multiprocessors:
        return 1.0
    waves = heads * tokens / TILE / multiprocessors
    return waves / max(1.0, waves + WAIT[causal])


def numbers(layer: AttentionLayer, rows: float, keys: float) -> tuple[float, float]:
    """The numbers in Q of `rows` tokens, and in K and V of `keys` tokens."""
    return rows * layer.hidden, 2 * keys * layer.kv_heads * layer.head_dim


def causal_pairs(tokens: float) -> float:
    """The pairs that a causal call on `tokens` queries and keys computes."""
    return tokens * (tokens + min(TILE, tokens)) / 2


def call_bytes(layer: AttentionLayer, rows: float, keys: float, *, backward: bool = False) -> float:
    """Bytes that one call of the attention kernel moves before and after its products."""
    (q, kv), w, sums = numbers(layer, rows, keys), layer.itemsize, max(layer.itemsize, 4)
    copies = kv * layer.heads / layer.kv_heads if layer.heads > layer.kv_heads else 0.0  # written, then read
    return q * (3 * w + 2 * sums) + 2 * copies * w if backward else 0.0


def merge_bytes(
    layer: AttentionLayer, rows: float, keys: float, *, first: bool = False, backward: bool = False, fused: bool = False
) -> float:
    """Bytes that adding a block's results to the running ones moves.

    The first block has nothing to be added to: its result is converted to float32, and at the end back. `fused`: the
    merge of a forward pass is one pass over memory, as each sum of a backward pass is.
    """
    (q, kv), w, sums = numbers(layer, rows, keys), layer.itemsize, max(layer.itemsize, 4)
    convert = w + sums if w < sums else 0
    if first:
        return 2 * (q + (kv if backward else 0)) * convert
    if backward or fused:
        return ONE_PASS * (q + kv * backward) * (w + 2 * sums)
    return MERGED * q * (w + sums)


def packing_bytes(layer: AttentionLayer, chunk: float) -> float:
    """Bytes that packing, or unpacking, moves for one of the two exchanges of heads: half of q, k, v and out."""
    q, kv = numbers(layer, chunk, chunk)
    return (2 * q + kv) * layer.itemsize
