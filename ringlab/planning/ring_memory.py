"""How far does a ring reach? Each rank needs memory for its chunk only, so P devices hold P times the sequence.

    forward pass     2·H + 4·G heads of C tokens     q, out, the K and V in hand and the next: 6·w·C·h, if G = H
    backward pass    4·H + 8·G, and H + 4·G in fp32  with all gradients: 22·w·C·h in bf16, if G = H
    a model          L·w·C·h more                    the input of each of L layers; the rest is computed again
    the longest S    (P · memory - 16 · parameters) / (w·h · (L + 22)); L + 6 if only the forward pass is counted

    Forward pass, paper's accounting: one device with blockwise attention stores L + 1 chunks, a ring L + 6.
    So P devices reach (L + 1)/(L + 6) · P times as far, nearly P.

Shapes: as in hidden_communication.py: h = H·D, C = S/P tokens on a rank, w bytes an element, a batch of 1. All numbers
are modelled; bench/max_context.py measures a training step of one layer.

    $ python -m ringlab.planning.ring_memory
    Table 1, printed beside GB in bf16, for h = 4096, n = 32, s = 262,144, c = 32,768, b = 1
                                  attention           feedforward                  both
    vanilla                  2bns²  4398.05         8bsh     8.59        2bhs²  4398.05
    memory efficient   2bsh + 4bch     2.68         8bsh     8.59         8bsh     8.59
    blockwise                 2bsh     2.15         2bsh     2.15         2bsh     2.15
    ring                      6bch     1.61         2bch     0.27         6bch     1.61
    2bhs² should be 2bns², as in its row; 6bch counts elements, all other cells count bytes: 12bch
    Table 3: the longest context in K, as printed, and the gain: printed, and computed from the row
    8x A100 NVLink        3B    64     512     8x     8x
    8x A100 NVLink        7B    32     256     8x     8x
    8x A100 NVLink       13B    16     128     8x     8x
    32x A100 InfiniBand   7B   128    4096    32x    32x
    32x A100 InfiniBand  13B    64    2048    32x    32x
    TPUv3-512             7B     8    2048   256x   256x
    TPUv4-1024            3B    32   16384   512x   512x
    TPUv4-1024            7B    16    8192   512x   512x
    TPUv4-1024           13B    16    4096   256x   256x  half of its 512 devices; no reason is given
    TPUv4-1024           30B     8    2048   256x   256x  half of its 512 devices; no reason is given
    our model: (L + 1)/(L + 6) of P, 0.87 with L = 32; contexts in powers of two do not show it
    512 devices
        30B, sharded over 8: 512 / 8 = 64 are left for the ring; printed 32
        7B, all in one ring: 256K on 8 are 32K on each, 16,384K on 512; printed 16 million
    100 million tokens, h = 1024: 205 GB a layer in bf16; printed over 1000 GB, which is 5 layers

Before: simulated_ring.py. After: ways.py, other ways to share a sequence.
Source: Liu et al. 2024, tables 1 and 3, section 3 and appendix A.
"""

import sys
from bisect import bisect_left
from math import ceil

from ringlab.planning.hidden_communication import LLAMA_7B, AttentionLayer

# Bytes of a parameter in training, with its gradient and Adam's two moments. In fp32: 4 · 4. In bf16: 2 + 2 + 3 · 4.
STATE = 16

TABLE_1 = {  # as printed: the largest activations of attention, of the feedforward, of both; n is H, c is C
    "vanilla": ("2bns²", "8bsh", "2bhs²"),
    "memory efficient": ("2bsh + 4bch", "8bsh", "8bsh"),
    "blockwise": ("2bsh", "2bsh", "2bsh"),
    "ring": ("6bch", "2bch", "6bch"),
}
# The number of devices (the names of TPU v3 and v4 count cores; a chip has two). Then as printed: hardware, model, the
# longest context in thousands of tokens of blockwise attention and of the ring, and the gain.
TABLE_3 = [
    (8, "8x A100 NVLink", "3B", 64, 512, 8),
    (8, "8x A100 NVLink", "7B", 32, 256, 8),
    (8, "8x A100 NVLink", "13B", 16, 128, 8),
    (32, "32x A100 InfiniBand", "7B", 128, 4096, 32),
    (32, "32x A100 InfiniBand", "13B", 64, 2048, 32),
    (256, "TPUv3-512", "7B", 8, 2048, 256),
    (512, "TPUv4-1024", "3B", 32, 16384, 512),
    (512, "TPUv4-1024", "7B", 16, 8192, 512),
    (512, "TPUv4-1024", "13B", 16, 4096, 256),
    (512, "TPUv4-1024", "30B", 8, 2048, 256),
]


def largest_activations(method: str, layer: AttentionLayer, seq_len: float, chunk: float) -> tuple[float, float]:
    """Bytes of the largest activation of attention, and of the feedforward, by a method of `TABLE_1`.

    The paper's "2bsh" is 2 bytes for each of b·s·h elements. Its "6bch" is six blocks of b·c·h elements: 12bch bytes.
    """
    row, square = layer.itemsize * layer.hidden, layer.itemsize * layer.heads
    return {
        "vanilla": (square * seq_len**2, 4 * row * seq_len),
        "memory efficient": (row * (seq_len + 2 * chunk), 4 * row * seq_len),
        "blockwise": (row * seq_len, row * seq_len),
        "ring": (6 * row * chunk, row * chunk),
    }[method]


def peak_bytes(method: str, layer: AttentionLayer, chunk: float, world_size: int) -> float:
    """Peak memory of a rank in attention's forward pass, in bytes, by a method of `sent_bytes`.

    ring: q, out, the K and V in hand, and those that arrive. all-gather: q, out, and every K and V. all-to-all: q, k
    and v twice, as they leave and as they arrive. Raises ValueError for another method. The ring's is the paper's count
    (section 3). For a backward pass a rank keeps its own K and V too.
    """
    H, G = layer.heads, layer.kv_heads
    heads = {"ring": 2 * H + 4 * G, "all-gather": 2 * H + 2 * G * world_size, "all-to-all": 2 * H + 4 * G}
    if method not in heads:
        raise ValueError(f"method is {method!r}; expected {', '.join(heads)}")
    return heads[method] * chunk * layer.head_dim * layer.itemsize


def peak_bytes_backward(layer: AttentionLayer, chunk: float) -> float:
    """Peak memory of a rank of flash_ring.py in its backward pass, in bytes.

    q, k, v, out and the gradient of out; K and V in two buffers; dq, dk and dv of the block in hand. The sums are
    float32 at least: dQ, and dK and dV in two buffers. bench/max_context.py measures it.
    """
    H, G = layer.heads, layer.kv_heads
    tensors, sums = (3 * H + 2 * G) + 4 * G + (H + 2 * G), H + 4 * G
    return (tensors * layer.itemsize + sums * max(layer.itemsize, 4)) * chunk * layer.head_dim


def param_count(layer: AttentionLayer, layers: int) -> int:
    """The parameters of a transformer without its embeddings: in each layer 2h² + 2h²·G/H for attention, 8h² for the
    feedforward. Models with a wider feedforward (later LLaMAs) have more.
    """
    return layers * (10 * layer.hidden**2 + 2 * layer.hidden * layer.kv_heads * layer.head_dim)


def token_bytes(layer: AttentionLayer, layers: int, at_work: str) -> float:
    """Bytes of activations for a token of a rank: the input of every layer, and one layer `at_work`.

    "blockwise": attention and feedforward on one device, which hold their output (table 1). "forward": a ring's forward
    pass, by the paper's count. "training": a ring's backward pass.
    """
    row = layer.itemsize * layer.hidden
    working = {"blockwise": row, "forward": peak_bytes("ring", layer, 1, 1), "training": peak_bytes_backward(layer, 1)}
    return layers * row + working[at_work]


def longest_context(memory: float, layer: AttentionLayer, layers: int, devices: int) -> int:
    """Tokens of the longest sequence that `devices` of `memory` bytes each can train; 0: the model does not fit.

    Parameters, gradients and Adam's moments are sharded over the devices (FSDP). This is an upper bound. It does not
    count the embeddings, the logits, a layer's gathered parameters, what is inside the feedforward (compute it in
    pieces, and the loss too), and the memory that kernels and libraries take for themselves.
    """
    left = memory - STATE * param_count(layer, layers) / devices
    return devices * max(0, int(left / token_bytes(layer, layers, "training")))


def min_devices(memory: float, layer: AttentionLayer, layers: int, seq_len: int) -> int | None:
    """The fewest devices that hold `seq_len` tokens in training. None: a single token is too much for any device."""
    room = memory - token_bytes(layer, layers, "training")
    if room <= 0:
        return None
    enough = seq_len + ceil(STATE * param_count(layer, layers) / room)  # with one token each
    return bisect_left(range(enough), seq_len, lo=1, key=lambda P: longest_context(memory, layer, layers, P))


def main() -> int:
    seq_len, chunk = 256 * 1024, 32 * 1024
    print(f"Table 1, printed beside GB in bf16, for h = 4096, n = 32, s = {seq_len:,}, c = {chunk:,}, b = 1")
    print(f"{'':<17}{'attention':>22}{'feedforward':>22}{'both':>22}")
    for method, printed in TABLE_1.items():
        ours = largest_activations(method, LLAMA_7B, seq_len, chunk)
        cells = zip(printed, (*ours, max(ours)), strict=True)
        print(f"{method:<17}" + "".join(f"{p:>13}{x / 1e9:9.2f}" for p, x in cells))
    print("2bhs² should be 2bns², as in its row; 6bch counts elements, all other cells count bytes: 12bch")

    print("Table 3: the longest context in K, as printed, and the gain: printed, and computed from the row")
    ok = True
    for devices, hardware, model, blockwise, ring, gain in TABLE_3:
        ok &= ring / blockwise == gain
        note = "" if gain == devices else f"  half of its {devices} devices; no reason is given"
        print(f"{hardware:<20}{model:>4}{blockwise:>6}{ring:>8}{gain:>6}x{ring / blockwise:6g}x{note}")
    share = token_bytes(LLAMA_7B, 32, "blockwise") / token_bytes(LLAMA_7B, 32, "forward")
    print(f"our model: (L + 1)/(L + 6) of P, {share:.2f} with L = 32; contexts in powers of two do not show it")

    print("512 devices")
    print(f"    30B, sharded over 8: 512 / 8 = {512 // 8} are left for the ring; printed 32")
    print(f"    7B, all in one ring: 256K on 8 are {256 // 8}K on each, {256 // 8 * 512:,}K on 512; printed 16 million")
    outputs = largest_activations("blockwise", AttentionLayer(heads=8, kv_heads=8, head_dim=128), 100e6, chunk)[0]
    print(
        f"100 million tokens, h = 1024: {outputs / 1e9:.0f} GB a layer in bf16; printed over 1000 GB, which is 5 layers"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
