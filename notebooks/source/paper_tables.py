"""Tables 1 to 3 of the paper, as printed, beside what follows from their rows: for the appendix of errata.

    $ python -m notebooks.source.paper_tables

Source: Liu et al. 2024, tables 1, 2 and 3, section 3 and appendix A.
"""

import sys

from ring_planner import hidden_communication
from ring_planner.hidden_communication import LLAMA_7B, AttentionLayer

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


def main() -> int:
    status, seq_len, chunk = hidden_communication.main(), 256 * 1024, 32 * 1024
    print(f"Table 1, printed beside GB in bf16, for h = 4096, n = 32, s = {seq_len:,}, c = {chunk:,}, b = 1")
    print(f"{'':<17}{'attention':>22}{'feedforward':>22}{'both':>22}")
    for method, printed in TABLE_1.items():
        ours = largest_activations(method, LLAMA_7B, seq_len, chunk)
        cells = zip(printed, (*ours, max(ours)), strict=True)
        print(f"{method:<17}" + "".join(f"{p:>13}{x / 1e9:9.2f}" for p, x in cells))
    print("2bhs² should be 2bns², as in its row; 6bch counts elements, all other cells count bytes: 12bch")

    print("Table 3: the longest context in K, as printed, and the gain: printed, and computed from the row")
    for devices, hardware, model, blockwise, ring, gain in TABLE_3:
        status |= ring != gain * blockwise
        note = "" if gain == devices else f"  half of its {devices} devices; no reason is given"
        print(f"{hardware:<20}{model:>4}{blockwise:>6}{ring:>8}{gain:>6}x{ring / blockwise:6g}x{note}")
    print(f"our model: (L + 1)/(L + 6) of P, {33 / 38:.2f} with L = 32; contexts in powers of two do not show it")

    print("512 devices")
    print(f"    30B, sharded over 8: 512 / 8 = {512 // 8} are left for the ring; printed 32")
    print(f"    7B, all in one ring: 256K on 8 are {256 // 8}K on each, {256 // 8 * 512:,}K on 512; printed 16 million")
    outputs = largest_activations("blockwise", AttentionLayer(heads=8, kv_heads=8, head_dim=128), 100e6, chunk)[0]
    print(
        f"100 million tokens, h = 1024: {outputs / 1e9:.0f} GB a layer in bf16; printed over 1000 GB, which is 5 layers"
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
