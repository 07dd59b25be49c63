"""Rank the ways to share a sequence on a cluster: the fastest that fits first, and why each takes its time.

    ms          simulated, of a layer, forward and backward; exposed: those that computing does not hide
    GB sent     by the busiest device inside its host, and by the busiest NIC (network interface card) to other hosts
    GB held     by a device: parameters, gradients and Adam; the inputs of all layers; one layer's backward pass
    n rings of g    last: n sequences at once, each in the ring of a host of g. ms until all are done; why: ms of each
    why         the longest messages (backward pass), and the computing that may hide them; how many NICs of a host
                send; "exchange": heads are exchanged before and after all computing, so this time is exposed

The first cluster is ideal: FLOPs and links only, and the double ring wins. The second pays what a round costs beside
its products. Then fewer rounds, with longer blocks, win: heads are exchanged inside a host, a ring joins the hosts.

Shapes: numbers only, as in ways.py. A row is a way, or a split of hybrid. Causal, in a balanced layout.

    $ python -m ringlab.planning.ranking
    16 hosts of 8: 990 TFLOP/s, 450 GB/s inside, 8 NICs of 12.5 GB/s; 32 query heads on 8, S = 1,048,576
    a layer of 32, bf16, causal, forward + backward; simulated, not measured
                            GB sent         GB held      ms  computing alone: 249 ms
    way                ms  inside between  device exposed  why (n x g: mesh of n rows, g ranks exchange heads)
    double ring       254    16.1    2.08    3.72    5.52  hops hidden: 8.05 ms, computing 11.1, 8 of 8 NICs
    hybrid 16 x 8     255   0.294    2.08    3.59    6.02  hops hidden: 8.05 ms, computing 11.1, 8 of 8 NICs; exchange
    all-gather        270    14.9    2.13    8.15    21.3  gathers, sums hidden: 16 ms, computing 22.2; first, last not
    hybrid 8 x 16     276   0.176    2.21    3.86    26.8  hops hidden: 16.1 ms, computing 22.2, 8 of 8 NICs; exchange
    hybrid 4 x 32     302   0.117    2.28     4.4    53.7  hops hidden: 32.2 ms, computing 44.4, 8 of 8 NICs; exchange
    hybrid 32 x 4     344    4.48    4.23    3.59    95.3  hops exposed: 8.05 ms, computing 5.55, 4 of 8 NICs; exchange
    hybrid 64 x 2     683    8.69    8.52    3.59     435  hops exposed: 8.05 ms, computing 2.78, 2 of 8 NICs; exchange
    ring            1,370    17.1    17.1    3.52   1,121  hops exposed: 8.05 ms, computing 1.39, 1 of 8 NICs
    all-to-all     not possible: all-to-all among 128 ranks, and 32 query heads
    16 rings of 8   3,983    16.1       0    45.8    2.39  16 at once, 249 ms each; hops hidden: 3.58 ms, computing 355
    the same, with what FlashAttention 3 reaches on an H100, and the costs of round_costs.py
                            GB sent         GB held      ms  computing alone: 407 ms
    way                ms  inside between  device exposed  why (n x g: mesh of n rows, g ranks exchange heads)
    hybrid 16 x 8     490   0.294    2.08    3.59    83.4  hops hidden: 11.5 ms, computing 18.8, 8 of 8 NICs; exchange
    ...
    double ring       606    16.1    2.08    3.72     199  hops hidden: 11.5 ms, computing 18.8, 8 of 8 NICs
    ...
    ring            1,970    17.1    17.1    3.52   1,563  hops exposed: 11.5 ms, computing 2.35, 1 of 8 NICs
    ...

Before: unequal.py. After: cost_model.py, the same for a cluster of your own.
Source: as two_speeds.py. Liu et al. 2024 compares the ring with no other exact way to share a sequence.
"""

import math
import sys
from dataclasses import dataclass, replace

from ringlab.planning.hidden_communication import AttentionLayer, block_flops, hop_bytes
from ringlab.planning.ring_memory import STATE, param_count
from ringlab.planning.round_costs import efficiency, realistic
from ringlab.planning.two_speeds import simulate
from ringlab.planning.ways import RING_PER_HOST, WAYS, Cluster, named, shares, splits, traffic, training_bytes

PASSES = (False, True)  # backward?
H100 = 680e12, 586e12  # FLOP/s of attention under a causal mask, forward and backward: published.json, MagiAttention


@dataclass(frozen=True)
class Row:
    """A way for a layer in training: seconds, bytes sent by the busiest device and NIC, bytes held by a device.

    A way of several `sequences` computes all of them in `seconds`: that is the latency, and `each` is the throughput.
    """

    name: str
    why: str
    seconds: float = math.inf  # infinite: the way is not possible
    in_host: float = 0.0
    between_hosts: float = 0.0
    held: float = math.inf
    sequences: int = 1

    @property
    def each(self) -> float:
        """Seconds for a sequence: all `seconds`, divided by the sequences that are done in them."""
        return self.seconds / self.sequences


def digits(number: float) -> str:
    """Three digits of a number, or all before the point: 0.0179, 5.89, 3,804."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def computing_seconds(cluster: Cluster, layer: AttentionLayer, chunk: float, *, mask: str | None = None) -> float:
    """Seconds of computing of a layer, forward and backward: half of the pairs, all heads in one call on a device.

    With `mask` "causal" they take as long as in a causal call.
    """
    S, seconds = cluster.devices * chunk, 0.0
    pairs = chunk * S / 2 * (cluster.causal if mask else 1)
    for backward in PASSES:
        reached = efficiency(layer.heads, S if backward else chunk, cluster.multiprocessors, backward=backward)
        seconds += block_flops(layer, pairs, backward=backward) / cluster.rate(backward) / reached
    return seconds


def why(way: str, cluster: Cluster, layer: AttentionLayer, chunk: float, split: int | None) -> str:
    """What decides the time, in words. `split` is hybrid's number of ranks that exchange heads."""
    P, per_host = cluster.devices, cluster.per_host
    if way == RING_PER_HOST:
        return why("ring", replace(cluster, hosts=1), layer, chunk, None)
    if P == 1:
        return "nothing travels"
    if way == "all-to-all":
        return "both exchanges exposed"
    share, tokens = max(shares(layer, split or 1), key=lambda each: each.heads), chunk * (split or 1)
    computing = block_flops(share, tokens**2 / 2, backward=True) / cluster.rate(backward=True)  # of one block
    if way == "all-gather":
        in_host, between = traffic(way, layer, chunk, cluster, backward=True)
        message = max(in_host / cluster.bandwidth, between / cluster.host_bandwidth) / layer.kv_heads
        computing *= P / layer.kv_heads
        what, rest = "gathers, sums", "; first, last not" if message <= computing else ""
    else:
        computing *= per_host if way == "double ring" else 1
        message, what = hop_bytes(share, tokens, backward=True) / cluster.bandwidth, "hops"
        rest = "; exchange" if split else ""
        if cluster.hosts > 1:
            sending = range(per_host) if way == "double ring" else range(max(0, per_host - (split or 1)), per_host)
            nics = [cluster.nic(device) for device in sending]
            message *= max(map(nics.count, nics)) * cluster.bandwidth / cluster.host_bandwidth
            rest = f", {len(set(nics))} of {cluster.nics} NICs{rest}"
    verdict = "hidden" if message <= computing else "exposed"
    return f"{what} {verdict}: {digits(1e3 * message)} ms, computing {digits(1e3 * computing)}{rest}"


def rank_ways(
    cluster: Cluster,
    layer: AttentionLayer,
    layers: int,
    chunk: float,
    memory: float,
    *,
    fsdp: bool = False,
    mask: str | None = None,
) -> list[Row]:
    """A row for each way, and for each split of hybrid: those that fit in `memory` bytes first, then by time.

    If there are several hosts, the last row is a ring per host, for as many sequences as hosts. `chunk` is the number
    of tokens on a device when one sequence has all devices. `mask`: "causal", in zigzag, with the costs of its calls;
    None: half of the pairs in every round.
    """
    ways: list[tuple[str, int | None]] = [(way, None) for way in WAYS if way != "hybrid"]
    if min(cluster.hosts, cluster.per_host) == 1:
        ways.remove(("double ring", None))  # it is the ring
    meshes = [split for split in splits(layer, cluster) if 1 < split < cluster.devices]
    ways += [("hybrid", g) for g in meshes if cluster.per_host % g == 0 or g % cluster.per_host == 0]
    ways += [(RING_PER_HOST, None)] if cluster.hosts > 1 else []
    state, rows = STATE * param_count(layer, layers) / cluster.devices, []
    for way, split in ways:
        name, sequences = named(way, cluster, split), cluster.hosts if way == RING_PER_HOST else 1
        tokens = sequences * chunk  # on a device
        held = state + layers * layer.itemsize * layer.hidden * tokens
        try:
            held += training_bytes(way, layer, tokens, cluster, split=split)
        except ValueError as reason:
            rows.append(Row(name, str(reason).partition(";")[0]))
            continue
        kind = {"split": split, "fsdp": fsdp, "mask": mask}
        seconds = sum(simulate(way, cluster, layer, tokens, backward=each, **kind) for each in PASSES)
        passes = [traffic(way, layer, tokens, cluster, backward=each, split=split) for each in PASSES]
        in_host, between_hosts = (sum(each) for each in zip(*passes, strict=True))
        words = ("" if held <= memory else "does not fit; ") + why(way, cluster, layer, tokens, split)
        rows.append(Row(name, words, seconds, in_host, between_hosts, held, sequences))
    return sorted(rows, key=lambda row: (row.sequences, row.held > memory, row.seconds))


def show_ranking(rows: list[Row], computing: float) -> None:
    """Print the rows as a table. `computing` is the time of computing alone."""
    print(f"                        GB sent         GB held      ms  computing alone: {digits(1e3 * computing)} ms")
    print("way                ms  inside between  device exposed  why (n x g: mesh of n rows, g ranks exchange heads)")
    for row in rows:
        if math.isinf(row.seconds):
            print(f"{row.name:<14} not possible: {row.why}")
            continue
        exposed = max(0.0, row.seconds - row.sequences * computing)
        numbers = row.in_host / 1e9, row.between_hosts / 1e9, row.held / 1e9, 1e3 * exposed
        cells = "".join(f" {digits(number):>7}" for number in numbers)
        many = f"{row.sequences} at once, {digits(1e3 * row.each)} ms each; " if row.sequences > 1 else ""
        print(f"{row.name:<14}{digits(1e3 * row.seconds):>7}{cells}  {many}{row.why}")


def main() -> int:
    cluster, S = Cluster(16, 8, 990e12, 450e9, 12.5e9), 2**20
    layer = AttentionLayer(heads=32, kv_heads=8, head_dim=128)
    chunk = S / cluster.devices
    rows, computing = rank_ways(cluster, layer, 32, chunk, 80e9), computing_seconds(cluster, layer, chunk)
    print(f"16 hosts of 8: 990 TFLOP/s, 450 GB/s inside, 8 NICs of 12.5 GB/s; 32 query heads on 8, S = {S:,}")
    print("a layer of 32, bf16, causal, forward + backward; simulated, not measured")
    show_ranking(rows, computing)
    seconds = {row.name: row.seconds for row in rows}
    ok = all(row.seconds >= computing * (1 - 1e-9) for row in rows)
    ok &= rows[0].name == "double ring" and seconds["hybrid 16 x 8"] < 0.3 < 1 < seconds["ring"]

    forward, backward = H100
    cluster = Cluster(16, 8, forward, 450e9, 12.5e9, memory_bandwidth=3.35e12, backward_flops=backward)
    cluster = realistic(replace(cluster, multiprocessors=132))
    computing = computing_seconds(cluster, layer, chunk, mask="causal")
    print("the same, with what FlashAttention 3 reaches on an H100, and the costs of round_costs.py")
    rows = rank_ways(cluster, layer, 32, chunk, 80e9, mask="causal")
    show_ranking(rows, computing)
    return 0 if ok and rows[0].name == "hybrid 16 x 8" else 1


if __name__ == "__main__":
    sys.exit(main())
