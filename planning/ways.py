"""Five ways to share a sequence: what a device sends inside its host and to other hosts, and what it must hold.

    ring            P-1 hops of K and V, whichever link is next          gradients: P hops, float32 at least
    double ring     hosts·(per_host - 1) hops inside, hosts-1 between    gradients: as many, and one more of each home
    all-gather      the same bytes as the ring, at once, on all cards    gradients: the same, summed on the way
    all-to-all      each other rank's heads of q, k, v; and out back     gradients: the same numbers, in reverse
    hybrid a x b    all-to-all among a ranks; then b-1 hops of the K and V that a rank's heads need, of a·C tokens

A host has network cards, which are slower than the links inside. Device i uses card ⌊i·cards / per_host⌋. What counts
is the busiest device and the busiest card: the flat ring sends everything through one card of each host.

Shapes: numbers only. P = hosts · per_host ranks, C = S/P tokens on each; H query heads, G key/value heads, D numbers in
a head, w bytes a number. Where a > G, ranks have copies of K/V heads, and these cost bytes and memory as they do in
training/all_to_all.py. All numbers are modelled, not measured.

    $ python -m planning.ways
    16 hosts of 8, S = 1,048,576, 32 query heads on 8, bf16: GB of a layer, forward + backward; modelled
                          inside a host      between hosts     in memory
                         busiest device       busiest card      backward
    ring
    ...

Before: ring_memory.py. After: shared_links.py, how long messages take that share a link.
Source: Liu et al. 2024, section 3; Gu et al. 2024 (LoongTrain), double ring; Llama 3 (2024), section 3.3.2, all-gather;
Jacobs et al. 2023 (Ulysses), section 3; Fang & Zhao 2024 (USP), section 3, hybrid.
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass

from planning.hidden_communication import Layer, gradient_bytes, hop_bytes, sent_bytes
from planning.ring_memory import peak_bytes_backward
from training.all_to_all import check_split, heads_of_ranks, splits

WAYS = ("ring", "double ring", "all-gather", "all-to-all", "hybrid")


@dataclass(frozen=True)
class Cluster:
    """Hosts of devices that are all alike. Raises ValueError for a number that no cluster has.

    `flops` is the FLOP/s of a device, `bandwidth` the bytes/s of its link inside the host, `host_bandwidth` the bytes/s
    of one network card, each in one direction. A host has `cards` of them (None: one for each device).
    """

    hosts: int
    per_host: int
    flops: float
    bandwidth: float
    host_bandwidth: float = math.inf  # of one host: it has no use for cards
    cards: int | None = None

    def __post_init__(self) -> None:
        if self.cards is None:
            object.__setattr__(self, "cards", self.per_host)
        if min(self.hosts, self.per_host) < 1 or min(self.flops, self.bandwidth, self.host_bandwidth) <= 0:
            raise ValueError(f"the cluster is {self}; expected a host and a device or more, and rates above 0")
        if not 1 <= self.cards <= self.per_host:
            raise ValueError(f"cards is {self.cards}; expected 1 to {self.per_host}, the devices of a host")

    @property
    def devices(self) -> int:
        """P, the ranks in all: rank = host · per_host + device."""
        return self.hosts * self.per_host

    def card(self, rank: int) -> int:
        """The network card, of those of its host, that a rank uses."""
        return rank % self.per_host * self.cards // self.per_host

    def crosses(self, source: int, target: int) -> bool:
        """Whether a message leaves its host."""
        return source // self.per_host != target // self.per_host


def exchange_ranks(way: str, layer: Layer, cluster: Cluster, inside: int | None) -> int:
    """The ranks among which heads are exchanged: a of hybrid's `inside`, all P of all-to-all, 1 of a ring.

    Raises ValueError for another way, for a number `inside` that does not divide P, and for one above H. It says which
    splits are possible.
    """
    if way not in WAYS:
        raise ValueError(f"way is {way!r}; expected {', '.join(WAYS)}")
    P = cluster.devices
    if way != "hybrid":
        if inside is not None:
            raise ValueError(f"inside is {inside} for {way}; expected None: only hybrid has a number of ranks inside")
        ranks = P if way == "all-to-all" else 1
    elif inside is None or inside < 1 or P % inside:
        possible = ", ".join(str(ranks) for _, ranks in splits(layer.heads, P))
        raise ValueError(f"inside is {inside}; expected one of {possible}, which divide P = {P}")
    else:
        ranks = inside
    check_split(layer.heads, ranks, P)
    return ranks


def shares(layer: Layer, ranks: int) -> list[Layer]:
    """What each of these ranks has of the layer after the exchange: its query heads, and the K/V heads they need."""
    heads = zip(*heads_of_ranks(layer.heads, layer.kv_heads, ranks), strict=True)
    return [Layer(q.stop - q.start, k.stop - k.start, layer.head_dim, layer.itemsize) for q, k in heads]


def exchanged_bytes(layer: Layer, chunk: float, mine: Layer, theirs: Layer, backward: bool) -> tuple[float, float]:
    """Bytes of a rank's message to another one of the exchange, there and back: `mine` and `theirs` are their shares.

    There: the other's heads of q, k and v (of dO in the backward pass). Back: my heads of out (of dQ, dK and dV).
    """
    head = chunk * layer.head_dim * layer.itemsize
    qkv = [share.heads + 2 * share.kv_heads for share in (theirs, mine)]
    return (theirs.heads * head, qkv[1] * head) if backward else (qkv[0] * head, mine.heads * head)


def alike(layer: Layer, cluster: Cluster, ranks: int) -> int:
    """How many ranks stand for all, when heads are exchanged among `ranks`: one host's, if all hosts do the same."""
    per_host, equal = cluster.per_host, len(set(shares(layer, ranks))) == 1
    return per_host if per_host % ranks == 0 or (ranks % per_host == 0 and equal) else cluster.devices


def traffic(
    way: str, layer: Layer, chunk: float, cluster: Cluster, *, backward: bool = False, inside: int | None = None
) -> tuple[float, float]:
    """Bytes that the busiest device sends inside its host, and the busiest card to other hosts, in one pass.

    `way` is one of `WAYS`; `inside` is hybrid's a. Raises ValueError as `exchange_ranks` does.
    """
    a = exchange_ranks(way, layer, cluster, inside)
    P, per_host, hosts = cluster.devices, cluster.per_host, cluster.hosts
    sent: Counter[tuple[str, int]] = Counter()

    def send(source: int, target: int, size: float) -> None:
        host = source // per_host * per_host
        sent["card", host + cluster.card(source)] += size if cluster.crosses(source, target) else 0
        sent["device", source] += 0 if cluster.crosses(source, target) else size

    def hops(moves: int, share: Layer, tokens: float) -> float:
        """The bytes of a ring with so many hops of K and V. Gradients make one more, home."""
        back = (moves + 1) * gradient_bytes(share, tokens) if backward and moves else 0
        return moves * hop_bytes(share, tokens) + back

    if way == "all-gather":  # a ring for each card carries its part of every block; no hop home, where a sum ends it is
        size = (P - 1) * hop_bytes(layer, chunk, backward=backward)
        leaves = size / cluster.cards if hosts > 1 else 0.0
        return (size - leaves if cluster.cards == per_host else size), leaves
    if way == "double ring":
        for rank in range(per_host):
            turned = hop_bytes(layer, chunk) * (per_host - 1) + (gradient_bytes(layer, chunk) * per_host if backward else 0)
            send(rank, (rank + 1) % per_host, hosts * turned if per_host > 1 else 0)
            send(rank, (rank + per_host) % P, hops(hosts - 1, layer, chunk))
    else:
        each = shares(layer, a)
        for rank in range(alike(layer, cluster, a)):
            mine, first = each[rank % a], rank // a * a
            for target in {*range(first, first + a)} - {rank}:
                send(rank, target, sum(exchanged_bytes(layer, chunk, mine, each[target % a], backward)))
            send(rank, (rank + a) % P, hops(P // a - 1, mine, a * chunk))
    return tuple(max((size for (where, _), size in sent.items() if where == it), default=0.0) for it in ("device", "card"))


def training_bytes(way: str, layer: Layer, chunk: float, cluster: Cluster, *, inside: int | None = None) -> float:
    """Peak memory of a rank in attention's backward pass, in bytes, as `peak_bytes_backward` counts it for the ring.

    The double ring has two more buffers of K and V and of their gradients, for the hops between hosts. All-gather has
    its buffers for all S tokens, of one K/V head at a time. After an exchange a rank has a·C tokens of its share of the
    heads, and its own chunk of dO. All-to-all keeps no block of another rank. Raises ValueError as `exchange_ranks` does.
    """
    a = exchange_ranks(way, layer, cluster, inside)
    w, sums = layer.itemsize, max(layer.itemsize, 4)

    def two_buffers(kv_heads: int, tokens: float) -> float:
        """K and V, and dK and dV, twice each."""
        return 4 * kv_heads * tokens * layer.head_dim * (w + sums)

    if way == "double ring" and cluster.hosts > 1:
        return peak_bytes_backward(layer, chunk) + two_buffers(layer.kv_heads, chunk)
    if way == "all-gather":
        ring = peak_bytes_backward(layer, chunk) - two_buffers(layer.kv_heads, chunk)
        return ring + two_buffers(1, cluster.devices * chunk)
    tokens, most = a * chunk, max(shares(layer, a), key=lambda share: peak_bytes_backward(share, 1))
    peak = peak_bytes_backward(most, tokens) + (chunk * layer.hidden * w if a > 1 else 0)
    if way == "all-to-all":
        peak += gradient_bytes(most, tokens) - two_buffers(most.kv_heads, tokens)
    return peak
