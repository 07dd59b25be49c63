"""A sliding window: a query sees the last w keys only, and in the contiguous layout few hops bring all of them.

    window            query i sees the keys  i - w + 1 ... i        hops = ceil((w - 1) / C), at most P - 1
    global tokens     and the keys  0 ... g - 1                     hops = P - 1

The window's keys lie in a rank's own block and in the blocks just before it. In the contiguous layout they are one,
two, ... hops away. In the zigzag layout the second half of the chunks runs back, from rank P - 1 to rank 0: there the
block just before is P - 1 hops away. In the striped layout the token n places back is n hops away.

All queries may see some global tokens besides: the first ones (attention sinks), or a question at the beginning. They
are a second run of keys. The computing stays small, but the first block must now visit every rank.

Shapes: S tokens, P ranks, C = S/P. q (B, H, C, D), k and v (B, G, C, D) on each rank.

    $ python -m ringlab.training.window
    hops on 8 ranks, C = 1024; and how much the busiest rank computes, 1 is the average
    window  global      contiguous          zigzag         striped
         1       0         0  1.00         0  1.00         0  1.00
         2       0         1  1.00         7  1.00         1  1.00
      1025       0         1  1.07         7  1.07         7  1.00
      1026       0         2  1.07         7  1.07         7  1.00
      4096       0         4  1.33         7  1.29         7  1.00
      1024       4         7  1.07         7  1.07         7  1.00
    4 ranks, S = 512, 4 query heads on 2, float32, against full attention in float64
    a window of 100: a rank sends 32,768 bytes
    ok    out: largest error 5.5e-07, rounding allows 8.5e-06 (float32 sums)
    ...
    a window of 100 and 4 global tokens: a rank sends 98,304 bytes
    ...

Before: documents.py. After: all_gather.py, other ways than the ring.
Source: Beltagy et al. 2020 (Longformer), section 3.1, sliding windows and global tokens; Jiang et al. 2023 (Mistral),
section 2; Xiao et al. 2024 (StreamingLLM), section 3.2, attention sinks. Liu et al. 2024 compute full attention only.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from ringlab.support import timeline
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention
from ringlab.training.documents import same_document
from ringlab.training.flash_ring import chunks_of_rank, random_inputs, report_ranks, ring_flash_attention
from ringlab.training.layouts import LAYOUTS
from ringlab.training.masks import Mask
from ringlab.training.partition import Partition


def window_hops(window: int, chunk: int, world_size: int) -> int:
    """The hops of a causal window in the contiguous layout, with `chunk` tokens on each rank."""
    return min(-(-(window - 1) // chunk), world_size - 1)


def window_mask(seq_len: int, window: int, global_tokens: int = 0) -> Tensor:
    """Which keys a query sees under a causal window with global tokens: (S, S), bool."""
    at = torch.arange(seq_len)
    behind = at[:, None] - at
    return (behind >= 0) & ((behind < window) | (at < global_tokens))


def on_rank(context: RankContext, whole: list[Tensor], options: dict[str, Any]) -> tuple[list[Tensor], int]:
    """This rank's chunks of out, dq, dk and dv for the whole q, k, v, d_out; and the bytes that it sent forwards."""
    sent = 0

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal sent
        with timeline.record(k.detach()) as events:
            out = ring_flash_attention(q, k, v, causal=True, **options)
        sent = sum(event.bytes for event in events if event.what == "send" and event.rank == context.rank)
        return out

    return chunks_of_rank(context, whole, attention, options["layout"]), sent


def main() -> int:
    P, C, ok = 8, 1024, True
    print(f"hops on {P} ranks, C = {C}; and how much the busiest rank computes, 1 is the average")
    print("window  global" + "".join(f"{layout:>16}" for layout in LAYOUTS))
    for window, global_tokens in ((1, 0), (2, 0), (C + 1, 0), (C + 2, 0), (4 * C, 0), (C, 4)):
        mask = Mask(causal=True, window=window, global_tokens=global_tokens)
        partitions = [Partition(mask, layout, (C,) * P) for layout in LAYOUTS]
        cells = ""
        for partition in partitions:
            pairs = [partition.pairs(rank) for rank in range(P)]
            cells += f"{partition.hops:>10}  {P * max(pairs) / sum(pairs):.2f}"
        print(f"{window:>6}{global_tokens:>8}{cells}")
        ok &= partitions[0].hops == (P - 1 if global_tokens else window_hops(window, C, P))

    H, G, S, D, P = 4, 2, 512, 16, 4
    whole = random_inputs(1, H, G, S, D)
    print(f"{P} ranks, S = {S}, {H} query heads on {G}, float32, against full attention in float64")
    documents = [100, 300, 112]
    for name, options, visible in (
        ("a window of 100", {"window": 100}, window_mask(S, 100)),
        ("a window of 100 and 4 global tokens", {"window": 100, "global_tokens": 4}, window_mask(S, 100, 4)),
        (
            "a window of 100 and documents",
            {"window": 100, "documents": documents},
            window_mask(S, 100) & same_document(documents),
        ),
    ):
        results = launch(on_rank, P, whole, {"layout": "contiguous", **options})
        chunks, sent = zip(*results, strict=True)
        print(f"{name}: a rank sends {sent[0]:,} bytes")
        right = exact_attention(*whole, causal=True, visible=visible, fused_blocks=3 * P)
        ok &= report_ranks(chunks, "contiguous", right)
        hops = P - 1 if "global_tokens" in options else window_hops(100, S // P, P)
        ok &= set(sent) == {hops * 2 * G * (S // P) * D * 4}
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
