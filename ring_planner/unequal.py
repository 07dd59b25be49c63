"""A ring whose ranks or links differ is as fast as its slowest hop, because a rank that waits delays its neighbours.

    rank r begins round t when      it has computed on the block of round t-1, sent it, and received that of round t
    the hop r -> r+1 begins when    rank r and rank r+1 have both begun the round: one sends, one receives

Links differ: visit the hosts in an order whose slowest hop is fastest, and of these in one with the largest sum. Up to
9 hosts all (n - 1)! orders are tried. For more, a first order follows the fastest links. Then a piece is turned round
or a host is moved, as long as this helps: that may miss the best order.

Devices differ: chunks in proportion to their FLOP/s keep all busy for S² / (sum of all FLOP/s), equal chunks for
S² / (P · the slowest). Two slow ranks side by side make the others wait even so: a rank gets at most a round ahead.

Shapes: seconds of computing (P, P), by round and rank; seconds of hops (P - 1, P), from rank r to r+1. C_r tokens on
rank r, in contiguous chunks without a mask. bandwidths[i][j]: bytes/s from host i to host j. All times are simulated.

    $ python -m ring_planner.unequal
    8 ranks of 312 TFLOP/s, C = 4,096, h = 4,096, bf16: computing 0.88 ms, a hop 0.22 ms, a slow one 5.37 ms
        all links fast              7.05 ms
        one of 8 slow              38.46 ms
        two slow (2 hosts of 4)    38.46 ms
        all slow                   38.46 ms
    4 devices of 990 or 312 TFLOP/s, S = 262,144: ms with equal chunks, with chunks in proportion
        3 fast, 1 slow                902   343
        2 fast, 2 slow, by turns      902   432
        2 fast, then 2 slow           902   496, but ranks wait
    8 hosts, 2 racks by turns: (0, 1, 3, 5, 7, 2, 4, 6) has hops of 325 GB/s in all, by number 100

Before: hidden_communication.py, where all are alike. After: ways.py, other ways to share a sequence.
Source: Liu et al. 2024, section 3 and algorithm 1, which leaves unlike devices and links open; the bottleneck
travelling salesman (Garfinkel & Gilbert 1978); 2-opt (Croes 1958).
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import permutations, product

from ring_planner.hidden_communication import LLAMA_7B, TABLE_2, AttentionLayer, block_flops, hop_bytes, ring_seconds
from ringlab.support.timeline import Event

FLOPS, FAST = TABLE_2[0][1:3]  # FLOP/s of an A100, and bytes/s inside a host
SLOW = TABLE_2[1][2]  # bytes/s between hosts
EXACT = 9  # hosts whose orders are all tried: 40,320

Table = Sequence[Sequence[float]]


def simulate_timeline(computing: Table, hops: Table) -> list[Event]:
    """The "compute", "send" and "wait" events of every rank of an overlapped ring; times in seconds.

    In round t rank r computes for computing[t][r] seconds, and a block travels to rank r+1 in hops[t][r] seconds.
    Raises ValueError unless there are P rounds of P times and P - 1 of P hops, none negative.
    """
    P = len(computing)
    if P == 0 or [len(times) for times in (*computing, *hops)] != [P] * (2 * P - 1):
        shapes = [[len(times) for times in table] for table in (computing, hops)]
        raise ValueError(
            f"computing and hops have rounds of {shapes}; expected P rounds of P ranks and P - 1 of P hops"
        )
    if min(min(times) for times in (*computing, *hops)) < 0:
        raise ValueError("a time is negative; expected seconds")
    events, begin = [], [0.0] * P
    for t in range(P):
        blocks = [(r - t) % P for r in range(P)]
        done = [begin[r] + computing[t][r] for r in range(P)]
        events += [Event(r, "compute", t, blocks[r], begin[r], done[r], bytes=0) for r in range(P) if computing[t][r]]
        if t == P - 1:
            break
        left = [max(begin[r], begin[(r + 1) % P]) for r in range(P)]  # both ranks have begun the round
        arrived = [left[r] + hops[t][r] for r in range(P)]
        begin = [max(done[r], arrived[r], arrived[r - 1]) for r in range(P)]
        events += [Event(r, "send", t, blocks[r], left[r], arrived[r], bytes=0) for r in range(P)]
        waits = [r for r in range(P) if begin[r] > done[r]]
        events += [Event(r, "wait", t, blocks[r - 1], done[r], begin[r], bytes=0) for r in waits]
    return events


def duration(events: list[Event]) -> float:
    """Seconds from 0 to the last end; 0 without events."""
    return max((event.end for event in events), default=0.0)


def unequal_ring(
    lengths: Sequence[float], flops: Sequence[float], bandwidths: Sequence[float], layer: AttentionLayer
) -> float:
    """Seconds of a forward pass: rank r has lengths[r] tokens, flops[r] FLOP/s, and bandwidths[r] bytes/s to rank r+1.

    Raises ValueError unless there are P of each.
    """
    P = len(lengths)
    if not len(flops) == len(bandwidths) == P > 0:
        raise ValueError(f"{P} lengths, {len(flops)} FLOP/s, {len(bandwidths)} bandwidths; expected one for each rank")
    blocks = [[lengths[(r - t) % P] for r in range(P)] for t in range(P)]
    computing = [[block_flops(layer, lengths[r] * block[r]) / flops[r] for r in range(P)] for block in blocks]
    hops = [[hop_bytes(layer, block[r]) / bandwidths[r] for r in range(P)] for block in blocks[:-1]]
    return duration(simulate_timeline(computing, hops))


def proportional_chunks(seq_len: int, flops: Sequence[float]) -> list[int]:
    """Lengths of P chunks in proportion to the FLOP/s of P ranks, at least 1 each, which add up to `seq_len`.

    Each is rounded down, then the tokens left over go to the largest fractions. Raises ValueError for fewer tokens than
    ranks, and for FLOP/s that are not above 0.
    """
    P = len(flops)
    if not P or not min(flops) > 0 or seq_len < P:
        given = f"{seq_len} tokens for FLOP/s {list(flops)}"
        raise ValueError(f"{given}; expected a token or more for each, FLOP/s above 0")
    exact = [1 + (seq_len - P) * each / sum(flops) for each in flops]
    lengths = [int(each) for each in exact]
    for r in sorted(range(P), key=lambda r: lengths[r] - exact[r])[: seq_len - sum(lengths)]:
        lengths[r] += 1
    return lengths


def score(order: Sequence[int], bandwidths: Table) -> tuple[float, float]:
    """The slowest hop of a ring in this order, and the sum of all its hops, in bytes/s."""
    hops = [bandwidths[i][j] for i, j in zip(order, [*order[1:], order[0]], strict=True)]
    return min(hops), sum(hops)


def best_order(bandwidths: Table) -> tuple[int, ...]:
    """An order of the hosts, from host 0 on, with the best `score`: exactly up to `EXACT` hosts.

    Raises ValueError unless `bandwidths` is square, and above 0 beside its diagonal.
    """
    hosts = len(bandwidths)
    pairs = [(i, j) for i, j in product(range(hosts), repeat=2) if i != j]
    if not hosts or {len(row) for row in bandwidths} != {hosts} or any(not bandwidths[i][j] > 0 for i, j in pairs):
        raise ValueError(f"bandwidths is {bandwidths}; expected a row for each host, of bytes/s above 0 to each other")
    if hosts > EXACT:
        return improved_order(bandwidths)
    return max(((0, *rest) for rest in permutations(range(1, hosts))), key=lambda order: score(order, bandwidths))


def improved_order(bandwidths: Table) -> tuple[int, ...]:
    """An order that no single move makes better, from host 0 on."""
    hosts = range(len(bandwidths))
    order, free = [0], {*hosts} - {0}
    while free:
        order.append(max(free, key=lambda j: (bandwidths[order[-1]][j], -j)))
        free.remove(order[-1])

    def moved(order: Sequence[int]) -> Iterator[list[int]]:
        for i, j in product(hosts, repeat=2):
            if i < j:
                yield [*order[:i], *reversed(order[i : j + 1]), *order[j + 1 :]]
            rest = [*order[:i], *order[i + 1 :]]
            yield [*rest[:j], order[i], *rest[j:]]

    while True:
        better = max(moved(order), key=lambda each: score(each, bandwidths))
        if score(better, bandwidths) <= score(order, bandwidths):
            break
        order = better
    first = order.index(0)
    return (*order[first:], *order[:first])


def main() -> int:
    P, chunk, ok = 8, 4096, True
    computing = block_flops(LLAMA_7B, chunk**2) / FLOPS
    fast, slow = (hop_bytes(LLAMA_7B, chunk) / rate for rate in (FAST, SLOW))
    sizes = f"C = {chunk:,}, h = {LLAMA_7B.hidden:,}, bf16"
    times = f"computing {1e3 * computing:.2f} ms, a hop {1e3 * fast:.2f} ms, a slow one {1e3 * slow:.2f} ms"
    print(f"{P} ranks of {FLOPS / 1e12:g} TFLOP/s, {sizes}: {times}")
    for name, hops in (
        ("all links fast", [fast] * P),
        ("one of 8 slow", [slow] + [fast] * 7),
        ("two slow (2 hosts of 4)", ([fast] * 3 + [slow]) * 2),
        ("all slow", [slow] * P),
    ):
        seconds = duration(simulate_timeline([[computing] * P] * P, [hops] * (P - 1)))
        ok &= abs(seconds / ring_seconds(P, computing, max(hops)) - 1) < 1e-9  # as if every hop were the slowest
        print(f"    {name:<25} {1e3 * seconds:6.2f} ms")

    S, quick, slower, layer = 262_144, 990e12, 312e12, AttentionLayer(heads=32, kv_heads=8, head_dim=128)
    print(f"4 devices of 990 or 312 TFLOP/s, S = {S:,}: ms with equal chunks, with chunks in proportion")
    for name, speeds in (
        ("3 fast, 1 slow", [quick] * 3 + [slower]),
        ("2 fast, 2 slow, by turns", [quick, slower] * 2),
        ("2 fast, then 2 slow", [quick] * 2 + [slower] * 2),
    ):
        chunks = proportional_chunks(S, speeds)
        equal, fair = (unequal_ring(each, speeds, [50e9] * 4, layer) for each in ([S / 4] * 4, chunks))
        waits = fair > block_flops(layer, S**2) / sum(speeds) * (1 + 1 / min(chunks))  # more than a chunk's rounding
        ok &= waits == (name == "2 fast, then 2 slow")
        print(f"    {name:<27}{1e3 * equal:>6.0f}{1e3 * fair:>6.0f}{', but ranks wait' if waits else ''}")

    rates = [[50e9 if i % 2 == j % 2 else 12.5e9 for j in range(8)] for i in range(8)]
    order, by_number = best_order(rates), score(range(8), rates)
    total = f"{score(order, rates)[1] / 1e9:g} GB/s in all, by number {by_number[1] / 1e9:g}"
    print(f"8 hosts, 2 racks by turns: {order} has hops of {total}")
    return 0 if ok and score(order, rates) == (12.5e9, 325e9) else 1


if __name__ == "__main__":
    sys.exit(main())
