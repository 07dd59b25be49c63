"""Unequal devices: chunks in proportion to their speeds.

    computing of rank r in all rounds    C_r · S / flops_r, times a constant: the same for all ranks if C_r / flops_r is
    equal chunks                         S² / (P · the slowest flops): all ranks wait for the slowest
    chunks in proportion                 S² / the sum of all flops, if no rank waits

A longer chunk is a longer message, and takes longer to compute with on every rank. A rank has room for one block more
than the one in hand, so it gets at most about a round ahead of its neighbours. Fast and slow ranks by turns do not wait
for each other; two slow ranks side by side make the others wait. And one slow NIC slows all hops, so one host
more can make the ring slower.

Shapes: S tokens in contiguous chunks of C_r tokens, one for each of P ranks; rank r has flops[r] FLOP/s, and the link
from rank r to r+1 has bandwidths[r] bytes/s. No mask: under a causal one, contiguous chunks are not balanced, and the
chunks of zigzag and striped layouts have one length. All times are simulated.

    $ python -m ringlab.planning.unequal
    S = 262,144, 32 query heads on 8, bf16, forward pass without a mask; simulated
    devices of 990 and 312 TFLOP/s: ms with equal chunks, with chunks in proportion, and the gain
        3 fast, 1 slow                902   343   x 2.63
        2 fast, 2 slow, by turns      902   432   x 2.09
        2 fast, then 2 slow           902   496   x 1.82, but ranks wait

Before: host_order.py, where only the links differ. After: cost_model.py, a plan for your own cluster.
Source: Liu et al. 2024, section 3, with equal devices; heterogeneous ones are left open there.
"""

import sys
from collections.abc import Sequence

from ringlab.planning.hidden_communication import AttentionLayer, block_flops, gradient_bytes, hop_bytes

LAYER = AttentionLayer(heads=32, kv_heads=8, head_dim=128)


def proportional_chunks(seq_len: int, flops: Sequence[float]) -> list[int]:
    """Lengths of P chunks in proportion to the FLOP/s of P ranks, at least 1 each, which add up to `seq_len`.

    Each is rounded down, then the tokens left over go to the largest fractions. Raises ValueError for fewer tokens than
    ranks, and for FLOP/s that are not above 0.
    """
    P = len(flops)
    if not P or not min(flops) > 0 or seq_len < P:
        raise ValueError(
            f"{seq_len} tokens for FLOP/s {list(flops)}; expected a token or more for each, FLOP/s above 0"
        )
    exact = [1 + (seq_len - P) * each / sum(flops) for each in flops]
    lengths = [int(each) for each in exact]
    rest = sorted(range(P), key=lambda r: lengths[r] - exact[r])
    for r in rest[: seq_len - sum(lengths)]:
        lengths[r] += 1
    return lengths


def unequal_ring(
    lengths: Sequence[float],
    flops: Sequence[float],
    bandwidths: Sequence[float],
    layer: AttentionLayer,
    *,
    visible: float = 1.0,
    backward: bool = False,
) -> float:
    """Seconds of a pass of the ring: rank r has lengths[r] tokens and flops[r], its link to rank r+1 bandwidths[r].

    `visible` is the share of each block's pairs that is computed. Raises ValueError unless there are P of each.
    """
    P = len(lengths)
    if not len(flops) == len(bandwidths) == P > 0:
        raise ValueError(f"{P} lengths, {len(flops)} FLOP/s, {len(bandwidths)} bandwidths; expected one for each rank")

    def seconds(r: int, t: int) -> float:
        return block_flops(layer, visible * lengths[r] * lengths[(r - t) % P], backward=backward) / flops[r]

    def sums(r: int, t: int) -> float:
        """Bytes of the gradients that rank r passes on after round t."""
        return gradient_bytes(layer, lengths[(r - t) % P]) if backward and P > 1 else 0.0

    begin = [0.0] * P
    for t in range(P):  # beside round t travel K and V, and the gradients of the round before
        sizes = [
            (hop_bytes(layer, lengths[(r - t) % P]) if t < P - 1 else 0.0) + (sums(r, t - 1) if t else 0.0)
            for r in range(P)
        ]
        left = [max(begin[r], begin[(r + 1) % P]) if sizes[r] else 0.0 for r in range(P)]
        arrived = [left[r] + sizes[r] / bandwidths[r] for r in range(P)]
        begin = [max(begin[r] + seconds(r, t), arrived[r], arrived[r - 1]) for r in range(P)]
    return max(max(begin[r], begin[(r + 1) % P]) + sums(r, P - 1) / bandwidths[r] for r in range(P))


def main() -> int:
    fast, slow, ok = 990e12, 312e12, True
    S = 262_144
    print(f"S = {S:,}, {LAYER.heads} query heads on {LAYER.kv_heads}, bf16, forward pass without a mask; simulated")
    print("devices of 990 and 312 TFLOP/s: ms with equal chunks, with chunks in proportion, and the gain")
    for name, speeds in (
        ("3 fast, 1 slow", [fast] * 3 + [slow]),
        ("2 fast, 2 slow, by turns", [fast, slow] * 2),
        ("2 fast, then 2 slow", [fast] * 2 + [slow] * 2),
    ):
        chunks = proportional_chunks(S, speeds)
        equal, fair = (unequal_ring(each, speeds, [50e9] * 4, LAYER) for each in ([S / 4] * 4, chunks))
        least = block_flops(LAYER, S**2) / sum(speeds)  # no device ever waits
        waits = fair > least * (1 + 1 / min(chunks))  # more than the rounding of a chunk
        row = f"    {name:<27}{1e3 * equal:>6.0f}{1e3 * fair:>6.0f}   x {equal / fair:.2f}"
        print(f"{row}, but ranks wait" if waits else row)
        ok &= waits == (name == "2 fast, then 2 slow")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
