"""When is the ring free? When computing on a block takes at least as long as sending it: from a chunk of F/B tokens on.

    computing on a block     4·C²·H·D FLOPs     QKᵀ and PV: C²·D multiplications and as many additions each, in H heads
    sending it               2·C·G·D·w bytes    a K and a V of w bytes a number, in G heads
    a hop is free when       4·C²·H·D / F  >=  2·C·G·D·w / B,     that is,     C  >=  w/2 · G/H · F/B

F is a device's FLOP/s, B a link's bytes/s one way. D cancels out, and so does the batch. In bf16 (w = 2) with G = H the
paper's C >= F/B is left. A causal mask hides half the pairs of a balanced layout, but no bytes: C doubles. Backwards a
block costs 10·C²·H·D FLOPs (five products), and its gradients travel too, in float32: C >= (w + 4)/5 · G/H · F/B; but
their last hop, home, comes after all computing and always shows. On P ranks such chunks make a sequence of P·C; the
paper asks for 6·C, as many as the blocks that a rank holds.

    P rounds take     P·computing + (P-1)·message                   one after the other
                      computing + (P-1)·max(computing, message)     overlapped

Shapes: q and out (H, C, D) on a rank, k and v (G, C, D), C = S/P. All of it is modelled; bench/overlap_threshold.py
measures it.

    $ python -m planning.hidden_communication
    Table 2: the smallest free chunk, F/B tokens in bf16, and the shortest sequence, six of it (K: 1000 tokens)
                       TFLOP/s   GB/s    chunk: printed, ours    sequence: printed, ours
    A100 NVLink            312  300.0             1.0K   1.04K              6.2K    6.24K
    A100 InfiniBand        312   12.5            24.5K  24.96K            149.5K  149.76K  not the quotient of its row
    TPU v3                 123  112.0             1.1K   1.10K              6.6K    6.59K
    TPU v4                 275  268.0             1.0K   1.03K              6.2K    6.16K
    TPU v5e                196  186.0             1.1K   1.05K              6.3K    6.32K

Before: flash_ring.py, the ring that this is about. After: simulated_ring.py, where ranks and hops differ.
Source: Liu et al. 2024, section 3 and table 2; Jacobs et al. 2023 (Ulysses), section 3, for all-to-all.
"""

import sys
from dataclasses import dataclass

TABLE_2 = [  # as printed: hardware, FLOP/s, bytes/s, the smallest chunk and sequence in thousands of tokens
    ("A100 NVLink", 312e12, 300e9, 1.0, 6.2),
    ("A100 InfiniBand", 312e12, 12.5e9, 24.5, 149.5),
    ("TPU v3", 123e12, 112e9, 1.1, 6.6),
    ("TPU v4", 275e12, 268e9, 1.0, 6.2),
    ("TPU v5e", 196e12, 186e9, 1.1, 6.3),
]
NOT_THE_QUOTIENT = ["A100 InfiniBand"]  # 312 / 12.5 = 24.96, and 149.5 is 6 · 24.92


@dataclass(frozen=True)
class Layer:
    """The attention of a layer: H query heads, G key/value heads, head dim D, and w, the bytes of a number."""

    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2

    @property
    def hidden(self) -> int:
        """The width h = H·D."""
        return self.heads * self.head_dim


LLAMA_7B = Layer(heads=32, kv_heads=32, head_dim=128)  # in bf16


def block_flops(layer: Layer, pairs: float, *, backward: bool = False) -> float:
    """FLOPs of attention over `pairs` (query, key) pairs, C² in a whole block. Liu et al. 2024, section 3: 4dc².

    Forwards QKᵀ and PV; backwards the scores again, dV, dP, dQ and dK.
    """
    return (10 if backward else 4) * pairs * layer.hidden


def gradient_bytes(layer: Layer, chunk: float) -> float:
    """Bytes of the dK and dV of a block, in float32 at least. They travel too, and take one hop more, home."""
    return 2 * chunk * layer.kv_heads * layer.head_dim * max(layer.itemsize, 4)


def hop_bytes(layer: Layer, chunk: float, *, backward: bool = False) -> float:
    """Bytes that a rank sends in a hop, K and V of C tokens; backwards dK and dV as well.

    In flash_ring.py gradients travel a round behind: its first hop back has none, so this is the most a hop sends.
    Liu et al. 2024, section 3: 4cd, in bf16 with G = H.
    """
    block = 2 * chunk * layer.kv_heads * layer.head_dim * layer.itemsize
    return block + gradient_bytes(layer, chunk) if backward else block


def min_overlap_chunk(
    flops: float, bandwidth: float, layer: Layer, *, visible: float = 1.0, backward: bool = False
) -> float:
    """Tokens C at which computing on a block takes as long as its hop. Liu et al. 2024, section 3: c >= F/B.

    `flops` is F in FLOP/s, `bandwidth` B in bytes/s, one way. `visible` is the share of a block's C² pairs that is
    computed: under a causal mask 1/2 in zigzag and striped, but 1 in contiguous chunks: their last rank sees all of it.
    (Only of its own block it sees half, so there the first hop still shows, with half of its time.)
    """
    # computing grows with C², a hop with C: they meet at the C that is their ratio for one token
    computing = block_flops(layer, visible, backward=backward) / flops
    return hop_bytes(layer, 1, backward=backward) / bandwidth / computing


def hidden_share(chunk: float, free_chunk: float) -> float:
    """The share of the messages' time that computing covers: min(1, C / smallest free chunk)."""
    return min(1.0, chunk / free_chunk)


def ring_seconds(world_size: int, computing: float, message: float, *, overlap: bool) -> float:
    """Seconds of P rounds of `computing` with P - 1 hops of `message` seconds, overlapped or one after the other.

    A blocking ring in even/odd order sends, then receives: two messages a hop.
    """
    hops = world_size - 1
    return computing + hops * (max(computing, message) if overlap else computing + message)


def pass_seconds(
    layer: Layer,
    chunk: float,
    world_size: int,
    flops: float,
    bandwidth: float,
    *,
    visible: float = 1.0,
    backward: bool = False,
    overlap: bool = True,
) -> float:
    """Seconds of a layer's forward or backward pass on a ring; arguments as above. Backwards with the hop home."""
    computing = block_flops(layer, visible * chunk**2, backward=backward) / flops
    message = hop_bytes(layer, chunk, backward=backward) / bandwidth
    home = gradient_bytes(layer, chunk) / bandwidth if backward and world_size > 1 else 0.0
    return ring_seconds(world_size, computing, message, overlap=overlap) + home


def sent_bytes(method: str, layer: Layer, chunk: float, world_size: int) -> float:
    """Bytes that a rank sends in a forward pass, for attention by "ring", "all-gather" or "all-to-all".

    All-gather sends what the ring sends, before computing begins. All-to-all (Ulysses) swaps chunks of tokens for
    groups of heads, and back: a rank sends all but 1/P of its q, k, v and out. Raises ValueError for another method,
    and for all-to-all when G is no multiple of P: ranks would need copies of K/V heads, which are not modelled.
    """
    if method in ("ring", "all-gather"):
        return (world_size - 1) * hop_bytes(layer, chunk)
    if method != "all-to-all":
        raise ValueError(f"method is {method!r}; expected ring, all-gather or all-to-all")
    if layer.kv_heads % world_size:
        raise ValueError(f"{layer.kv_heads} K/V heads for {world_size} ranks; expected a multiple, or copies of heads")
    return (1 - 1 / world_size) * 2 * chunk * (layer.heads + layer.kv_heads) * layer.head_dim * layer.itemsize


def main() -> int:
    ok = True
    print("Table 2: the smallest free chunk, F/B tokens in bf16, and the shortest sequence, six of it (K: 1000 tokens)")
    print("                   TFLOP/s   GB/s    chunk: printed, ours    sequence: printed, ours")
    for hardware, flops, bandwidth, printed, printed_sequence in TABLE_2:
        chunk = min_overlap_chunk(flops, bandwidth, LLAMA_7B) / 1000
        row = f"{hardware:<18} {flops / 1e12:7.0f} {bandwidth / 1e9:6.1f} {printed:15.1f}K {chunk:6.2f}K"
        row += f" {printed_sequence:16.1f}K {6 * chunk:7.2f}K"
        same = (round(chunk, 1), round(6 * chunk, 1)) == (printed, printed_sequence)
        ok &= same == (hardware not in NOT_THE_QUOTIENT)
        print(row if same else f"{row}  not the quotient of its row")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
