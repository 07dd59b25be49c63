"""Unequal devices: chunks in proportion to their speeds, and how many hosts of a mixed cluster are worth having.

    computing of rank r in all rounds    C_r · S / flops_r, times a constant: the same for all ranks if C_r / flops_r is
    equal chunks                         S² / (P · the slowest flops): all ranks wait for the slowest
    chunks in proportion                 S² / the sum of all flops, if no rank waits

A longer chunk is a longer message, and takes longer to compute with on every rank. A rank has room for one block more
than the one in hand, so it gets at most about a round ahead of its neighbours. Fast and slow ranks by turns do not wait
for each other; two slow ranks side by side make the others wait. And one slow NIC slows all hops, so one host
more can make the ring slower: take the fastest hosts first, and try each number of them.

Shapes: S tokens in contiguous chunks of C_r tokens, one for each of P ranks; rank r has flops[r] FLOP/s, and the link
from rank r to r+1 has bandwidths[r] bytes/s. No mask: under a causal one, contiguous chunks are not balanced, and the
chunks of zigzag and striped layouts have one length. All times are simulated.

    $ python -m ringlab.planning.unequal
    S = 262,144, 32 query heads on 8, bf16, forward pass without a mask; simulated
    devices of 990 and 312 TFLOP/s: ms with equal chunks, with chunks in proportion, and the gain
        3 fast, 1 slow                902   343   x 2.63
        2 fast, 2 slow, by turns      902   432   x 2.09
        2 fast, then 2 slow           902   496   x 1.82, but ranks wait
    4 fast hosts with NICs of 50 GB/s, 4 slow ones with 12.5 GB/s, S = 65,536: ms with the n fastest hosts
        1: 71.1   2: 35.5   3: 23.7   4: 17.8   5: 23.7   6: 26.5   7: 29.0   8: 31.1
        worth having: 4 of 8

Before: host_order.py, where only the links differ. After: cost_model.py, a plan for your own cluster.
Source: Liu et al. 2024, section 3, with equal devices; heterogeneous ones are left open there.
"""

import sys
from collections.abc import Sequence

from ringlab.planning.hidden_communication import AttentionLayer, block_flops, gradient_bytes, hop_bytes
from ringlab.planning.host_order import best_order
from ringlab.planning.shared_links import TaskGraph, play

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

    ring = TaskGraph(P, lambda source, target: (source,))
    ring.turn(
        ring.start,
        lambda r: (r + 1) % P,
        P,
        seconds,
        lambda r, t: hop_bytes(layer, lengths[(r - t) % P]),
        (lambda r, t: gradient_bytes(layer, lengths[(r - t) % P])) if backward else None,
    )
    return max(end for _, end in play(ring.tasks, dict(enumerate(bandwidths))))


def seconds_by_hosts(
    seq_len: int, flops: Sequence[float], bandwidths: Sequence[Sequence[float]], layer: AttentionLayer
) -> list[tuple[list[int], float]]:
    """For n = 1, 2, ...: the n fastest hosts in the best order of a ring, and the seconds of its forward pass.

    Chunks are in proportion to the FLOP/s of the hosts. bandwidths[i][j] is that from host i to host j.
    """
    fastest, plans = sorted(range(len(flops)), key=lambda host: -flops[host]), []
    for n in range(1, len(flops) + 1):
        some = fastest[:n]
        order = [some[i] for i in best_order([[bandwidths[i][j] for j in some] for i in some])]
        speeds = [flops[host] for host in order]
        hops = [bandwidths[i][j] for i, j in zip(order, [*order[1:], order[0]], strict=True)]
        plans.append((order, unequal_ring(proportional_chunks(seq_len, speeds), speeds, hops, layer)))
    return plans


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

    S, nics = 65_536, [50e9] * 4 + [12.5e9] * 4
    links = [[min(one, other) for other in nics] for one in nics]
    plans = seconds_by_hosts(S, [fast] * 4 + [slow] * 4, links, LAYER)
    print(f"4 fast hosts with NICs of 50 GB/s, 4 slow ones with 12.5 GB/s, S = {S:,}: ms with the n fastest hosts")
    print("    " + "   ".join(f"{n}: {1e3 * seconds:.1f}" for n, (_, seconds) in enumerate(plans, 1)))
    best, _ = min(plans, key=lambda plan: plan[1])
    print(f"    worth having: {len(best)} of {len(plans)}")
    return 0 if ok and len(best) == 4 else 1


if __name__ == "__main__":
    sys.exit(main())
