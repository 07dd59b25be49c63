"""When does a ring hide its communication? When computing on a block takes at least as long as sending it.

    computing on a block     4·C²·H·D FLOPs     QKᵀ and PV: C²·D multiplications and as many additions each, in H heads
    sending it               2·C·G·D·w bytes    a K and a V of w bytes an element, in G heads
    a hop is hidden when     4·C²·H·D / flops  >=  2·C·G·D·w / bandwidth
    that is, when            C  >=  w/2 · G/H · flops / bandwidth

`flops` is a device's FLOP/s, `bandwidth` a link's bytes/s in one direction. D and the batch cancel out. In bf16 (w = 2)
with G = H, C >= flops / bandwidth remains, which the paper writes c >= F/B. A causal mask hides half the pairs of a
balanced layout but none of the bytes, so C doubles.

The backward pass costs 10·C²·H·D FLOPs a block (five products) and sends the gradients of K and V too, in float32:
C >= (w + 4)/5 · G/H · flops / bandwidth. In published rings the last hop of the gradients follows all computing, so
nothing hides it. Our rings compute on the own block last: nothing hides the first hop of K and V, which is shorter.

    P rounds take     computing + (P-1)·max(computing, message)

Shapes: q and out (H, C, D) on a rank, k and v (G, C, D), C = S/P. All numbers are modelled.

    $ python -m ring_planner.hidden_communication
    Table 2 (bf16; K: 1000 tokens): the smallest chunk that hides its messages; a sequence needs six of it
                       TFLOP/s   GB/s    chunk: printed, ours    sequence: printed, ours
    A100 NVLink            312  300.0             1.0K   1.04K              6.2K    6.24K
    A100 InfiniBand        312   12.5            24.5K  24.96K            149.5K  149.76K  not flops / bandwidth
    TPU v3                 123  112.0             1.1K   1.10K              6.6K    6.59K
    TPU v4                 275  268.0             1.0K   1.03K              6.2K    6.16K
    TPU v5e                196  186.0             1.1K   1.05K              6.3K    6.32K

Before: flash_ring.py, the ring that this model describes. After: ways.py, other ways to share a sequence.
Source: Liu et al. 2024, section 3 and table 2.
"""

import sys
from dataclasses import dataclass

TABLE_2 = [  # as printed: hardware, FLOP/s, bytes/s, then the smallest chunk and sequence in thousands of tokens
    ("A100 NVLink", 312e12, 300e9, 1.0, 6.2),
    ("A100 InfiniBand", 312e12, 12.5e9, 24.5, 149.5),
    ("TPU v3", 123e12, 112e9, 1.1, 6.6),
    ("TPU v4", 275e12, 268e9, 1.0, 6.2),
    ("TPU v5e", 196e12, 186e9, 1.1, 6.3),
]
MISPRINTED = ["A100 InfiniBand"]  # 312 / 12.5 is 24.96, not 24.5; and 149.5 is 6 · 24.92


@dataclass(frozen=True)
class AttentionLayer:
    """The attention of a layer: H query heads, G key/value heads, head dim D, and w, the bytes of an element.

    `latents`: the numbers of a token that travel in place of K and V, where latents do: `ring_latent_attention`. Then
    `made`: the FLOPs of a token that make K and V of all heads again.
    """

    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2
    latents: int = 0
    made: int = 0

    @property
    def sent(self) -> int:
        """Numbers of a token that travel in a hop."""
        return self.latents or 2 * self.kv_heads * self.head_dim

    @property
    def hidden(self) -> int:
        """The width h = H·D."""
        return self.heads * self.head_dim


LLAMA_7B = AttentionLayer(heads=32, kv_heads=32, head_dim=128)  # in bf16


def block_flops(layer: AttentionLayer, pairs: float, *, backward: bool = False) -> float:
    """FLOPs of attention over `pairs` (query, key) pairs; a whole block has C². Liu et al. 2024, section 3: 4dc².

    Two products in the forward pass: QKᵀ and PV. Five in the backward pass: the scores again, dV, dP, dQ and dK.
    """
    return (10 if backward else 4) * pairs * layer.hidden


def gradient_bytes(layer: AttentionLayer, chunk: float) -> float:
    """Bytes of the dK and dV of a block, in float32 at least. They make P hops in published rings, P - 1 in ours."""
    return chunk * layer.sent * max(layer.itemsize, 4)


def hop_bytes(layer: AttentionLayer, chunk: float, *, backward: bool = False) -> float:
    """Bytes that a rank sends in a hop: K and V of C tokens; in the backward pass dK and dV as well.

    In flash_ring.py the gradients travel one round behind K and V, so the first hop of its backward pass carries none.
    This is the largest hop. Liu et al. 2024, section 3: 4cd, in bf16 with G = H.
    """
    block = chunk * layer.sent * layer.itemsize
    return block + gradient_bytes(layer, chunk) if backward else block


def min_overlap_chunk(
    flops: float, bandwidth: float, layer: AttentionLayer, *, visible: float = 1.0, backward: bool = False
) -> float:
    """The smallest chunk, in tokens, that hides its messages: computing on a block takes as long as its hop.

    `flops` is the FLOP/s of a device, `bandwidth` the bytes/s of a link in one direction. `visible` is the share of a
    block's C² pairs that is computed. Under a causal mask it is 1/2 in the zigzag and striped layouts. In contiguous
    chunks it is 1, because the last rank sees whole blocks. (Its diagonal block is half masked, so half of the first
    hop is exposed there.) Liu et al. 2024, section 3: c >= F/B.
    """
    # Computing grows with C² and a hop with C. They are equal where C is the ratio of a hop to computing at one token.
    computing = block_flops(layer, visible, backward=backward) / flops
    return hop_bytes(layer, 1, backward=backward) / bandwidth / computing


def hidden_share(chunk: float, min_chunk: float) -> float:
    """The share of the messages' time that computing hides: min(1, C / `min_overlap_chunk`)."""
    return min(1.0, chunk / min_chunk)


def ring_seconds(world_size: int, computing: float, message: float) -> float:
    """Seconds of P overlapped rounds of `computing`, and P - 1 hops of `message` seconds each."""
    return computing + (world_size - 1) * max(computing, message)


def main() -> int:
    ok = True
    print("Table 2 (bf16; K: 1000 tokens): the smallest chunk that hides its messages; a sequence needs six of it")
    print("                   TFLOP/s   GB/s    chunk: printed, ours    sequence: printed, ours")
    for hardware, flops, bandwidth, printed, printed_sequence in TABLE_2:
        chunk = min_overlap_chunk(flops, bandwidth, LLAMA_7B) / 1000
        row = f"{hardware:<18} {flops / 1e12:7.0f} {bandwidth / 1e9:6.1f} {printed:15.1f}K {chunk:6.2f}K"
        row += f" {printed_sequence:16.1f}K {6 * chunk:7.2f}K"
        same = (round(chunk, 1), round(6 * chunk, 1)) == (printed, printed_sequence)
        ok &= same == (hardware not in MISPRINTED)
        print(row if same else f"{row}  not flops / bandwidth")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
