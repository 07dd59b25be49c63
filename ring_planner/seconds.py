"""How long a pass of attention takes by each way: closed forms, of the rounds and of what travels beside them.

    beside          max(message, computing + message · (1 - 1/slowdown))    both at once: messages slow the computing
    ring            a round for each block: its call beside the hops; `order` says which hops nothing hides
    double ring     a turn of per_host rounds beside a slow hop, in the same order; then the last sums inside a host
    all-gather      ours: one K/V head after the other, beside the call of the head before. Published: nothing is hidden
    all-to-all      nothing travels while a rank computes: both exchanges are exposed
    hybrid n x g    an exchange in rows of g ranks, then a ring of n with blocks of g·C tokens
    hop             latency + bytes / bandwidth, or, between hosts, the ranks that share a NIC one after the other

The slowest rank and the busiest NIC decide. A causal mask: zigzag, a causal call, then half of the keys; contiguous, a
causal call, then whole blocks on the last rank; striped, a causal call in every round.

Shapes: numbers only, as in ways.py. All times are modelled, of attention only: no projections, no feedforward.

A reader may skip this file: chapter 17 prints its times. Before: round_costs.py. After: step.py.
Source: Liu et al. 2024, algorithm 1; Gu et al. 2024 (LoongTrain), double ring; Llama 3 (2024), section 3.3.2; Jacobs et
al. 2023 (Ulysses), section 3; Fang & Zhao 2024 (USP).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from ring_planner.hidden_communication import AttentionLayer, block_flops, gradient_bytes, hop_bytes
from ring_planner.round_costs import MERGE_CALLS, call_bytes, causal_pairs, efficiency, merge_bytes, packing_bytes
from ring_planner.ways import Cluster, busiest, exchange_ranks, exchanges, shares

MASKS, LAYOUTS = ("none", "causal"), ("contiguous", "zigzag", "striped")


def beside(computing: float, message: float, slowdown: float) -> float:
    """Seconds until both are done. While the message travels, computing takes `slowdown` times as long."""
    return max(message, computing + message * (1 - 1 / slowdown))


@dataclass(frozen=True)
class Pass:
    """One pass of a layer's attention: each rank has `chunk` tokens of each of `batch` sequences.

    `mask` is "none", "causal" in a `layout`, or None: in every round half of the pairs is computed. `ours`: our
    schedules, whose own sums stay at home, whose all-gather takes one head after the other, and whose merge is one pass
    on a GPU. Published rings send sums in all P rounds. Raises ValueError for another mask or layout.
    """

    cluster: Cluster
    layer: AttentionLayer
    chunk: float
    backward: bool = False
    mask: str | None = None
    layout: str = "zigzag"
    batch: int = 1
    ours: bool = True

    def __post_init__(self) -> None:
        for name, given, known in (("mask", self.mask, (None, *MASKS)), ("layout", self.layout, LAYOUTS)):
            if given not in known:
                raise ValueError(f"{name} is {given!r}; expected one of {', '.join(map(repr, known))}")

    def call(
        self, share: AttentionLayer, rows: float, keys: float, pairs: float, causal: bool, heads: int = 0
    ) -> float:
        """Seconds of a call of the kernel: it is launched, computes `pairs`, and moves its bytes.

        `heads`: those whose blocks are at work together (0: the heads of `share`).
        """
        cluster, tokens = self.cluster, keys if self.backward else rows
        width = self.batch * (heads or share.heads)
        reached = efficiency(width, tokens, cluster.multiprocessors, causal=causal)
        flops = block_flops(share, pairs, backward=self.backward) / cluster.rate(self.backward) / reached
        moved = call_bytes(share, rows, keys, backward=self.backward) / cluster.memory_bandwidth
        return cluster.launch + self.batch * (flops + moved)

    def block(self, tokens: float, t: int) -> tuple[float, float, float, bool]:
        """Queries, keys, pairs of the call of round t, and is it causal? On the rank with the most work: r = P - 1."""
        if self.mask is None:
            return tokens, tokens, tokens**2 / 2, False
        if self.mask == "causal" and (t == 0 or self.layout == "striped"):
            return tokens, tokens, causal_pairs(tokens), True
        keys = tokens / 2 if self.mask == "causal" and self.layout == "zigzag" else tokens
        return tokens, keys, tokens * keys, False

    def computing(self, share: AttentionLayer, tokens: float, t: int, rounds: int) -> float:
        """Seconds of round t on a block of `tokens` keys, for the heads of `share`: a call, and in a ring a merge.

        A ring of latents makes K and V of each block, again in the backward pass, and two gradients of each. Those of
        the own block are made once in other ways too.
        """
        rows, keys, pairs, causal = self.block(tokens, t)
        made = (3 if self.backward else 1) - (0 if t else 1 + self.backward)
        seconds = self.call(share, rows, keys, pairs, causal)
        seconds += self.batch * made * share.made * tokens / self.cluster.rate(self.backward)
        if rounds == 1:
            return seconds
        fused = self.ours and self.cluster.multiprocessors > 0  # our merge on a GPU: fused_merge.py
        moved = self.batch * merge_bytes(share, rows, keys, first=t == 0, backward=self.backward, fused=fused)
        calls = 1 if fused and not self.backward else MERGE_CALLS[self.backward]
        return seconds + calls * self.cluster.launch + moved / self.cluster.memory_bandwidth

    def inside(self, size: float) -> float:
        """Seconds of a hop of `size` bytes of a sequence inside a host."""
        return self.cluster.latency + self.batch * size / self.cluster.bandwidth if size else 0.0

    def between(self, size: float, stride: int) -> float:
        """The same to another host, when every rank sends to the rank `stride` further: some share a NIC."""
        cluster = self.cluster
        crossing = min(stride, cluster.per_host)
        nics = [cluster.nic(device) for device in range(cluster.per_host - crossing, cluster.per_host)]
        sharing = max(map(nics.count, nics))
        return cluster.host_latency + self.batch * size * sharing / cluster.host_bandwidth if size else 0.0

    def hop(self, size: float, stride: int) -> float:
        """Seconds of the slowest hop to the rank `stride` further."""
        near = self.inside(size) if stride < self.cluster.per_host or self.cluster.hosts == 1 else 0.0
        return max(near, self.between(size, stride) if self.cluster.hosts > 1 else 0.0)

    def order(
        self, rounds: int, first: float, later: float, kv: float, sums: float
    ) -> tuple[float, list[tuple[float, int, float]]]:
        """Bytes that nothing hides; then for each kind of round: seconds of computing, how many, bytes beside one.

        `first`: computing on the own block, `later`: on another. K and V travel a round before their block, the sums
        of its gradients a round behind it. In our backward pass the own block is the last one: nothing hides the first
        hop of K and V, and the sums come home meanwhile. In published rings it is the first, and its sums travel too.
        """
        if rounds == 1:
            return 0.0, [(first, 1, 0.0)]
        if not self.backward:
            return 0.0, [(first, 1, kv), (later, rounds - 2, kv), (later, 1, 0.0)]
        if not self.ours:
            return sums, [(first, 1, kv), (later, rounds - 2, kv + sums), (later, 1, sums)]
        if rounds == 2:
            return kv, [(later, 1, 0.0), (first, 1, sums)]
        return kv, [(later, 1, kv), (later, rounds - 3, kv + sums), (later, 1, sums), (first, 1, sums)]

    def rings(self, ranks: int) -> float:
        """An exchange of heads in groups of `ranks`, then rings of P / `ranks`: ring, hybrid and all-to-all."""
        cluster, tokens = self.cluster, ranks * self.chunk
        rounds, share = cluster.devices // ranks, max(shares(self.layer, ranks), key=lambda each: each.heads)
        first, later = (self.computing(share, tokens, t, rounds) for t in (0, 1))
        kv, sums = hop_bytes(share, tokens), gradient_bytes(share, tokens)
        exposed, all_rounds = self.order(rounds, first, later, kv, sums)
        slow = cluster.slowdown
        seconds = sum(count * beside(work, self.hop(size, ranks), slow) for work, count, size in all_rounds)
        seconds += self.hop(exposed, ranks)
        if ranks == 1:
            return seconds
        packing = 2 * (cluster.launch + self.batch * packing_bytes(self.layer, self.chunk) / cluster.memory_bandwidth)
        for sent in exchanges(self.layer, self.chunk, cluster, ranks, backward=self.backward):
            near, far = busiest(sent, cluster)
            far_seconds = cluster.host_latency + self.batch * far / cluster.host_bandwidth if far else 0.0
            seconds += packing + max(self.inside(near), far_seconds)
        return seconds

    def double_ring(self) -> float:
        """A ring in each host, and a hop between hosts during each turn of these rings."""
        cluster, per_host, hosts = self.cluster, self.cluster.per_host, self.cluster.hosts
        kv, sums = hop_bytes(self.layer, self.chunk), gradient_bytes(self.layer, self.chunk) if self.backward else 0.0
        first, later = (self.computing(self.layer, self.chunk, t, per_host * hosts) for t in (0, 1))
        exposed, all_turns = self.order(hosts, first, later, kv, sums)
        seconds = self.between(exposed, per_host)
        for begin, turns, size in all_turns:
            far, work = self.between(size, per_host), (begin + (per_host - 1) * later) / per_host  # a round's
            near, last, slow = self.inside(kv + sums), self.inside(sums), cluster.slowdown
            slowed = (per_host - 1) * max(near, slow * work) + max(last, slow * work)  # a turn beside the slow hop
            free = (per_host - 1) * beside(work, near, slow) + beside(work, last, slow)  # after it
            seconds += turns * max(far, far + (1 - far / slowed) * free)
        return seconds + self.inside(sums)

    def collective(self, size: float) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes of each rank: rings through all NICs."""
        cluster, P = self.cluster, self.cluster.devices
        if P == 1:
            return 0.0
        rate = min(cluster.bandwidth, cluster.nics * cluster.host_bandwidth if cluster.hosts > 1 else cluster.bandwidth)
        latency = (P - cluster.hosts) * cluster.latency + (cluster.hosts - 1) * cluster.host_latency
        return latency + self.batch * (P - 1) * size / rate

    def all_gather(self) -> float:
        """One K/V head after the other, or, published, all heads at once."""
        layer, P = self.layer, self.cluster.devices
        parts = layer.kv_heads if self.ours else 1
        S, one = P * self.chunk, replace(layer, heads=layer.heads // parts, kv_heads=layer.kv_heads // parts)
        pairs = self.chunk * (S if self.mask == "none" else S / 2)
        if self.mask == "causal" and self.layout == "contiguous":
            pairs = self.chunk * (S - self.chunk / 2)  # of the last rank
        uneven = self.mask == "causal" and self.layout != "contiguous"  # queries from the begin and from the end of S
        order = 2 * self.batch * hop_bytes(one, S) / self.cluster.memory_bandwidth  # chunks that arrived, in order
        work = self.call(one, self.chunk, S, pairs, uneven, heads=layer.heads) + order
        gather = self.collective(hop_bytes(one, self.chunk))
        scatter = self.collective(gradient_bytes(one, self.chunk)) if self.backward else 0.0
        slow = self.cluster.slowdown
        if parts == 1:
            return gather + work + scatter
        first, last = gather + beside(work, gather, slow), beside(work, scatter, slow) + scatter
        return first + (parts - 2) * beside(work, gather + scatter, slow) + last


@lru_cache(maxsize=4096)  # steps that differ elsewhere share a pass
def pass_of(way: str, work: Pass, split: int | None = None) -> float:
    """Seconds of a pass by a way of `ways.WAYS`; `split`: hybrid's ranks that exchange heads.

    Raises ValueError as `ring_planner.ways.exchange_ranks`.
    """
    ranks = exchange_ranks(way, work.layer, work.cluster, split)
    if way == "double ring" and min(work.cluster.hosts, work.cluster.per_host) > 1:
        return work.double_ring()
    return work.all_gather() if way == "all-gather" else work.rings(ranks)
