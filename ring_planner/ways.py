"""Five ways to share a sequence: what a device sends inside its host and to other hosts, and what it must hold.

    ring            P - 1 hops of K and V to the next rank, through one NIC of each host
    double ring     per_host - 1 hops inside the host in each of `hosts` turns; hosts - 1 between hosts, on all NICs
    all-gather      as many bytes as the ring, in rings on all NICs
    all-to-all      to each other rank its heads of q, k and v, and later its tokens of out
    hybrid n x g    n rows of g ranks, all-to-all in a row; then n - 1 hops of g·C tokens of the K/V heads a rank needs
    gradients       in float32 at least; our ring and hybrid: as many hops as K and V; published rings, and the double
                    ring: one more. all-to-all: as q, k, v and out

Network interface cards (NICs) are slower than the links inside a host. Device i uses NIC ⌊i · nics / per_host⌋. The
busiest device and NIC decide. Where g > G, ranks hold copies of K/V heads, as in ../ways/all_to_all.py.

A reader may skip this file: seconds.py has the times.

Shapes: P = hosts · per_host ranks, C = S/P tokens on each. Before: hidden_communication.py. After: round_costs.py.
Source: Liu et al. 2024, section 3; Gu et al. 2024 (LoongTrain), double ring; Llama 3 (2024), section 3.3.2, all-gather;
Jacobs et al. 2023 (Ulysses), section 3; Fang & Zhao 2024 (USP), section 3, hybrid.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ring_planner.hidden_communication import AttentionLayer, gradient_bytes, hop_bytes
from ringlab.ways.heads import check_split, heads_of_ranks

WAYS = ("ring", "double ring", "all-gather", "all-to-all", "hybrid")  # of one sequence


@dataclass(frozen=True)
class Cluster:
    """Hosts of devices that are all alike. Raises ValueError for a number that no cluster has.

    `flops` is of a device, `bandwidth` of its link inside the host, `host_bandwidth` of one NIC, in one direction. A
    host has `nics` NICs (0: one for each device). The fields after `nics` are costs that an ideal device does not have.
    """

    hosts: int
    per_host: int
    flops: float
    bandwidth: float
    host_bandwidth: float = math.inf  # a single host does not use its NICs
    nics: int = 0
    memory_bandwidth: float = math.inf  # bytes/s that a device reads and writes in its memory
    latency: float = 0.0  # seconds of a message, and of each step of a collective, before its bytes flow
    host_latency: float = 0.0  # the same between hosts
    backward_flops: float = 0.0  # FLOP/s in the backward pass; 0: as `flops`
    launch: float = 0.0  # seconds of each call of a kernel, beside its FLOPs and bytes
    slowdown: float = 1.0  # how many times longer computing takes while messages of the device travel
    multiprocessors: int = 0  # of a GPU: a kernel with few blocks does not fill them; 0: blocks cost nothing

    def __post_init__(self) -> None:
        if self.nics == 0:
            object.__setattr__(self, "nics", self.per_host)
        rates = self.flops, self.bandwidth, self.host_bandwidth
        if not (self.hosts >= 1 and self.per_host >= 1 and all(rate > 0 for rate in rates)):  # NaN is not
            raise ValueError(f"the cluster is {self}; expected a host and a device or more, and rates above 0")
        if not 1 <= self.nics <= self.per_host:
            raise ValueError(f"nics is {self.nics}; expected 1 to {self.per_host}, the devices of a host")
        costs = self.latency, self.host_latency, self.launch, self.backward_flops, self.multiprocessors
        possible = self.memory_bandwidth > 0 and all(cost >= 0 for cost in costs)
        if not possible or not 1 <= self.slowdown < math.inf:
            rest = "latencies, launch, backward_flops, multiprocessors of 0 or more, slowdown of 1 or more"
            raise ValueError(f"the cluster is {self}; expected memory_bandwidth above 0, {rest}")

    def rate(self, backward: bool) -> float:
        """FLOP/s of a device in the forward or backward pass."""
        return (self.backward_flops or self.flops) if backward else self.flops

    @property
    def devices(self) -> int:
        """P, the ranks in all: rank = host · per_host + device."""
        return self.hosts * self.per_host

    def nic(self, rank: int) -> tuple[int, int]:
        """(host, NIC of the host) that a rank uses."""
        host, device = divmod(rank, self.per_host)
        return host, device * self.nics // self.per_host


def splits(layer: AttentionLayer, cluster: Cluster) -> list[int]:
    """The numbers of ranks among which heads can be exchanged: divisors of P that give each rank a query head."""
    P = cluster.devices
    return [ranks for ranks in range(1, min(layer.heads, P) + 1) if P % ranks == 0]


def exchange_ranks(way: str, layer: AttentionLayer, cluster: Cluster, split: int | None) -> int:
    """The number of ranks among which heads are exchanged: `split`, the g of hybrid; P for all-to-all; else 1.

    Raises ValueError for an unknown way; for a `split` that is missing, does not divide P or belongs to another way
    than hybrid; and for more ranks than heads. The message names the splits that are possible.
    """
    if way not in WAYS:
        raise ValueError(f"way is {way!r}; expected {', '.join(WAYS)}")
    if way != "hybrid" and split is not None:
        raise ValueError(f"split is {split} for {way}; expected None: only hybrid has a split")
    if way == "hybrid" and (split is None or split < 1 or cluster.devices % split):
        possible = ", ".join(map(str, splits(layer, cluster)))
        raise ValueError(f"split is {split} of {cluster.devices} ranks; expected one of {possible}")
    ranks = cluster.devices if way == "all-to-all" else split or 1
    check_split(layer.heads, ranks, cluster.devices)
    return ranks


@lru_cache(maxsize=1024)  # each candidate of a plan asks for it
def shares(layer: AttentionLayer, ranks: int) -> tuple[AttentionLayer, ...]:
    """The share of the layer that each rank has after the exchange: its query heads, and the K/V heads they need."""
    heads = zip(*heads_of_ranks(layer.heads, layer.kv_heads, ranks), strict=True)
    return tuple(replace(layer, heads=q.stop - q.start, kv_heads=k.stop - k.start) for q, k in heads)


def exchanged_bytes(
    layer: AttentionLayer, chunk: float, mine: AttentionLayer, theirs: AttentionLayer, *, backward: bool = False
) -> tuple[float, float]:
    """Bytes of a rank's messages to another rank, in the first and in the second exchange of a pass.

    `mine` and `theirs` are the shares of the two ranks. Forward pass, first their heads of q, k and v for my tokens,
    then my heads of out for their tokens. Backward pass, first their heads of dO, then my heads of dQ, dK and dV.
    """
    head = chunk * layer.head_dim * layer.itemsize
    if backward:
        return theirs.heads * head, (mine.heads + 2 * mine.kv_heads) * head
    return (theirs.heads + 2 * theirs.kv_heads) * head, mine.heads * head


def alike(layer: AttentionLayer, cluster: Cluster, ranks: int) -> int:
    """The number of ranks that stand for all P: those of one host if all hosts do the same, else P.

    Heads are exchanged among `ranks` ranks.
    """
    per_host, equal = cluster.per_host, len(set(shares(layer, ranks))) == 1
    inside_a_host = per_host % ranks == 0
    whole_hosts = ranks % per_host == 0
    return per_host if inside_a_host or (whole_hosts and equal) else cluster.devices


def busiest(sent: Iterable[tuple[int, int, float]], cluster: Cluster) -> tuple[float, float]:
    """Bytes that the busiest device sends inside its host, and the busiest NIC, of (source, target, bytes)."""
    devices: defaultdict[int, float] = defaultdict(float)
    nics: defaultdict[tuple[int, int], float] = defaultdict(float)
    for source, target, size in sent:
        if source // cluster.per_host != target // cluster.per_host:
            nics[cluster.nic(source)] += size
        elif source != target:
            devices[source] += size
    return max(devices.values(), default=0.0), max(nics.values(), default=0.0)


def exchanges(
    layer: AttentionLayer, chunk: float, cluster: Cluster, ranks: int, *, backward: bool = False
) -> list[list[tuple[int, int, float]]]:
    """The messages of both exchanges of heads of a pass, as `busiest` takes them."""
    heads = shares(layer, ranks)
    messages: list[list[tuple[int, int, float]]] = [[], []]
    for rank in range(alike(layer, cluster, ranks)):
        first = rank // ranks * ranks
        for target in {*range(first, first + ranks)} - {rank}:
            mine, theirs = heads[rank % ranks], heads[target % ranks]
            sizes = exchanged_bytes(layer, chunk, mine, theirs, backward=backward)
            for sent, size in zip(messages, sizes, strict=True):
                sent.append((rank, target, size))
    return messages


def traffic(
    way: str,
    layer: AttentionLayer,
    chunk: float,
    cluster: Cluster,
    *,
    backward: bool = False,
    split: int | None = None,
    ours: bool = True,
) -> tuple[float, float]:
    """Bytes that the busiest device sends inside its host, and the busiest NIC to other hosts, in one pass.

    `way` is one of `WAYS`, `split` the g of hybrid. `ours`: a ring sends sums of gradients one time less than published
    ones. Raises ValueError as `exchange_ranks` does.
    """
    g = exchange_ranks(way, layer, cluster, split)
    P, per_host, hosts = cluster.devices, cluster.per_host, cluster.hosts
    kv, sums = hop_bytes(layer, chunk), gradient_bytes(layer, chunk) if backward else 0
    if way == "all-gather":  # each ring leaves a host at another device
        size = (P - 1) * (kv + sums)
        between = size / cluster.nics if hosts > 1 else 0.0
        return (size - between if cluster.nics == per_host else size), between
    each = shares(layer, g)
    sent = [message for one in exchanges(layer, chunk, cluster, g, backward=backward) for message in one]
    for rank in range(alike(layer, cluster, g)):
        if way == "double ring":
            device = rank // per_host * per_host + (rank + 1) % per_host
            sent.append((rank, device, hosts * ((per_host - 1) * kv + per_host * sums)))
            sent.append((rank, (rank + per_host) % P, (hosts - 1) * kv + hosts * sums))
        else:
            mine = each[rank % g]
            kv, back = hop_bytes(mine, g * chunk), gradient_bytes(mine, g * chunk) if backward else 0
            sent.append((rank, (rank + g) % P, (P // g - 1) * kv + (P // g - ours) * back))
    return busiest(sent, cluster)
