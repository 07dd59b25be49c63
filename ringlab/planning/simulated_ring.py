"""A ring whose ranks or links differ is as fast as its slowest hop, because a rank that waits delays its neighbours.

    rank r begins round t when      it has computed on the block of round t-1, sent it, and received that of round t
    the hop r -> r+1 begins when    rank r and rank r+1 have both begun the round: one sends, one receives

Shapes: seconds of computing (P, P), by round and rank; seconds of a hop (P,), from rank r to r+1. If all ranks and all
links are alike, the result is hidden_communication.ring_seconds. Under a causal mask the computing of the rounds
differs; between hosts the links differ.

    $ python -m ringlab.planning.simulated_ring
    8 ranks of 312 TFLOP/s, C = 4,096, h = 4,096, bf16; simulated
    a block: computing 0.88 ms, a hop 0.22 ms, over a slow link 5.37 ms
        all links fast              7.05 ms    1.00 x all fast   closed form   7.05 ms
        one of 8 slow              38.46 ms    5.46 x all fast   closed form  38.46 ms
        two slow (2 hosts of 4)    38.46 ms    5.46 x all fast   closed form  38.46 ms
        all slow                   38.46 ms    5.46 x all fast   closed form  38.46 ms
        one of 8 slow, C = 24,960: 1.00 x all fast; a chunk this long hides the slow hop
    a slow rank, and causal layouts, all links fast:
        one rank at half speed    2.00 x all alike
        causal, contiguous        0.94 x no mask
        causal, zigzag            0.50 x no mask

Before: hidden_communication.py, the closed form. After: ring_memory.py, what a rank holds.
Source: Liu et al. 2024, section 3 and algorithm 1. The paper leaves links of unlike speed open.
"""

import sys
from collections.abc import Sequence

from ringlab.planning.hidden_communication import (
    LLAMA_7B,
    TABLE_2,
    block_flops,
    hop_bytes,
    min_overlap_chunk,
    ring_seconds,
)
from ringlab.support.timeline import Event

FLOPS, FAST = TABLE_2[0][1:3]  # FLOP/s, and bytes/s inside a host
SLOW = TABLE_2[1][2]  # bytes/s between hosts


def simulate_timeline(computing: Sequence[Sequence[float]], hops: Sequence[float]) -> list[Event]:
    """The "compute", "send" and "wait" events of every rank of an overlapped ring; times in seconds.

    Rank r computes for computing[t][r] seconds in round t. A block travels from rank r to r+1 in hops[r] seconds.
    Raises ValueError unless there are P rounds of P times and P hops, none negative. Liu et al. 2024, algorithm 1.
    """
    P = len(hops)
    if P == 0 or [len(times) for times in computing] != [P] * P:
        shape = f"{len(computing)} rounds of {sorted({len(times) for times in computing})} ranks and {P} hops"
        raise ValueError(f"computing and hops are {shape}; expected P rounds of P ranks and P hops")
    if min(hops) < 0 or min(min(times) for times in computing) < 0:
        raise ValueError("a time is negative; expected seconds")
    events, begin = [], [0.0] * P
    for t in range(P):
        blocks = [(r - t) % P for r in range(P)]
        done = [begin[r] + computing[t][r] for r in range(P)]
        events += [Event(r, "compute", t, blocks[r], begin[r], done[r], bytes=0) for r in range(P) if computing[t][r]]
        if t == P - 1:
            break
        left = [max(begin[r], begin[(r + 1) % P]) for r in range(P)]  # both ranks have begun the round
        arrived = [left[r] + hops[r] for r in range(P)]
        begin = [max(done[r], arrived[r], arrived[r - 1]) for r in range(P)]
        events += [Event(r, "send", t, blocks[r], left[r], arrived[r], bytes=0) for r in range(P)]
        waits = [r for r in range(P) if begin[r] > done[r]]
        events += [Event(r, "wait", t, blocks[r - 1], done[r], begin[r], bytes=0) for r in waits]
    return events


def duration(events: list[Event]) -> float:
    """Seconds from 0 to the last end; 0 without events."""
    return max((event.end for event in events), default=0.0)


def main() -> int:
    from ringlab.training.causal import visible_pairs  # torch: what imports this file may do without

    P, chunk = 8, 4096
    ok = True

    def times(chunk: float) -> tuple[float, float, float]:
        sent = hop_bytes(LLAMA_7B, chunk)
        return block_flops(LLAMA_7B, chunk**2) / FLOPS, sent / FAST, sent / SLOW

    computing, fast, slow = times(chunk)
    even = [[computing] * P] * P
    uniform = duration(simulate_timeline(even, [fast] * P))
    print(f"{P} ranks of {FLOPS / 1e12:g} TFLOP/s, C = {chunk:,}, h = {LLAMA_7B.hidden:,}, bf16; simulated")
    print(
        f"a block: computing {1e3 * computing:.2f} ms, a hop {1e3 * fast:.2f} ms, over a slow link {1e3 * slow:.2f} ms"
    )
    for name, hops in (
        ("all links fast", [fast] * P),
        ("one of 8 slow", [slow] + [fast] * 7),
        ("two slow (2 hosts of 4)", ([fast] * 3 + [slow]) * 2),
        ("all slow", [slow] * P),
    ):
        seconds = duration(simulate_timeline(even, hops))
        closed = ring_seconds(P, computing, max(hops), overlap=True)  # as if every hop were the slowest
        ok &= abs(seconds - closed) < 1e-9 * closed
        row = f"    {name:<25} {1e3 * seconds:6.2f} ms   {seconds / uniform:5.2f} x all fast"
        print(f"{row}   closed form {1e3 * closed:6.2f} ms")

    chunk_of_slow = min_overlap_chunk(FLOPS, SLOW, LLAMA_7B)
    computing, fast, slow = times(chunk_of_slow)
    even = [[computing] * P] * P
    ratio = duration(simulate_timeline(even, [slow] + [fast] * 7)) / duration(simulate_timeline(even, [fast] * P))
    print(f"    one of 8 slow, C = {chunk_of_slow:,.0f}: {ratio:.2f} x all fast; a chunk this long hides the slow hop")
    ok &= abs(ratio - 1) < 1e-9

    computing, fast, _ = times(chunk)
    print("a slow rank, and causal layouts, all links fast:")
    slow_rank = [[2 * computing] + [computing] * 7] * P
    print(
        f"    one rank at half speed    {duration(simulate_timeline(slow_rank, [fast] * P)) / uniform:.2f} x all alike"
    )
    for layout in ("contiguous", "zigzag"):
        shares = visible_pairs(layout, P * 64, P) / 64**2  # of a block's pairs
        masked = [[share * computing for share in row] for row in shares.tolist()]
        ratio = duration(simulate_timeline(masked, [fast] * P)) / uniform
        print(f"    causal, {layout:<17} {ratio:.2f} x no mask")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
