"""Grouped queries in the ring: only the G key/value heads travel, not H copies, so a hop sends G/H of the bytes.

    query head h uses K/V head  h // (H/G)         G = H: one each (MHA)     1 < G < H: GQA     G = 1: MQA

H/G query heads share one K/V head. To that head their queries are just more rows. So `fold` puts them one below the
other, and the ring of backward.py takes them as they are. The matrix product that gives dk sums over all rows, and so
over the heads that share.

Shapes: H query heads, G key/value heads, H a multiple of G. q and out are chunks (B, H, C, D), k and v (B, G, C, D).
Folded, q is (B, G, H/G · C, D).

    $ python -m ringlab.ring.grouped_query
    4 ranks, S = 32, 8 query heads on 8: in a hop 8,192 bytes of K and V
    ok    out: largest error 2.5e-07, rounding allows 6.0e-06 (float32 sums)
    ok    dq: largest error 3.8e-07, rounding allows 2.6e-05 (float32 sums)
    ...
    4 ranks, S = 32, 8 query heads on 2: in a hop 2,048 bytes of K and V
    ...

Before: causal.py. After: fused_block.py, kernels for a block.
Source: Ainslie et al. 2023 (GQA), section 2.2; Shazeer 2019 (MQA), section 3. The README's blog post on the blocking
ring says that neither works in a ring. Both do.
"""

import sys

from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.basics.chunks import agree_on_chunks, check_grouped_chunks
from ringlab.ring.backward import RingAttention


def fold(q: Tensor, kv_heads: int) -> Tensor:
    """q (B, H, C, D) -> (B, G, H/G · C, D): the query heads that share a K/V head, one below the other."""
    return q.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def unfold(x: Tensor, heads: int) -> Tensor:
    """Undo `fold`: (B, G, H/G · C, D) -> (B, H, C, D)."""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """`ringlab.ring.backward.ring_attention` for grouped queries: q (B, H, C, D), k and v (B, G, C, D) -> out (B,
    H, C, D).

    It raises the same errors, and ValueError when H is not a multiple of G. Ainslie et al. 2023, section 2.2.
    """
    name = f"{__name__}.ring_attention"
    scale, lengths = agree_on_chunks(q, k, v, scale, group, function=name, check=check_grouped_chunks)
    out = RingAttention.apply(fold(q, k.shape[1]), k, v, scale, lengths, group)
    return unfold(out, q.shape[1])


def main() -> int:
    from ringlab.ring.cases import chunks_of_rank, random_inputs, report_ranks
    from ringlab.support.processes import launch
    from ringlab.support.rounding import exact_attention

    P, ok = 4, True
    for G in (8, 2, 1):
        B, H, _, S, D = sizes = 1, 8, G, 32, 16
        whole = random_inputs(*sizes)
        print(f"{P} ranks, S = {S}, {H} query heads on {G}: in a hop {2 * B * G * (S // P) * D * 4:,} bytes of K and V")
        of_ranks = launch(chunks_of_rank, P, whole, ring_attention, "contiguous")
        ok &= report_ranks(of_ranks, "contiguous", exact_attention(*whole))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
