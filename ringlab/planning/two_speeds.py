"""Two speeds of wire: five ways to share a sequence, simulated on hosts with network interface cards (NICs).

    ring            each round has a slow hop between hosts, on one NIC of a host: every round takes as long as this hop
    double ring     each turn of per_host rounds has one slow hop, on all NICs: computing of a whole turn can hide it
    all-gather      one K/V head after the other: the first gather and the last sum of gradients are exposed
    all-to-all      nothing travels while a rank computes: both exchanges are exposed
    hybrid n x g    an exposed exchange in rows of g ranks; then n - 1 hops of longer blocks, on more NICs
    ring per host   for several sequences: the ring of one host, in all hosts at once

A way is a list of tasks, in the order of its file in ringlab/training/: what is computed and sent, and what each task
waits for. `play` of shared_links.py gives the times. If all hosts do the same, one host is simulated: when a message
leaves it through a NIC, an equal message arrives through that NIC. The weights of FSDP may travel on the same links.

Where each cost of a `Cluster` is paid (an ideal one, as below, has FLOPs and links only):

    memory_bandwidth   the bytes of round_costs.py: each call of the kernel, each merge of a ring, each packing of an
                       exchange; all-gather puts the chunks that arrived in order
    launch             a call of the kernel; each operation of a merge; a packing
    latency            a message waits so long before its bytes flow, a collective in each of its P - 1 steps
    slowdown           a device computes and merges more slowly while its messages flow
    causal             a call with a causal mask
    multiprocessors    a call with few blocks: `efficiency` of round_costs.py. All-gather counts those of all heads,
                       as published ones compute them in one call; ringlab/training/all_gather.py takes one at a time
    mask, layout       contiguous: a causal call, then whole blocks on the last rank. Zigzag: a causal call, then half
                       of the keys. Striped: a causal call in every round

Shapes: numbers only, as in ways.py. All times are simulated, of attention only: no projections, no feedforward. Where
devices share NICs unevenly, or messages slow the computing, a faster link may make a way slower by a percent (Graham
1969).

    $ python -m ringlab.planning.two_speeds
    16 hosts of 8: 990 TFLOP/s, 450 GB/s inside, a NIC of 12.5 GB/s for each device; simulated, not measured
    S = 1,048,576, 32 query heads on 8, bf16, half of the pairs visible: ms of a layer
                           forward  backward       sum
        computing alone       71.1     177.7     248.8
        ring                 341.5    1028.1    1369.6  x 5.51
        double ring           71.1     183.2     254.3  x 1.02
        all-gather            76.4     193.7     270.1  x 1.09
        all-to-all          all-to-all among 128 ranks, and 32 query heads
        hybrid 16 x 8         71.4     183.4     254.8  x 1.02
    one host: a ring of 8 takes as long as in hidden_communication.py

Before: round_costs.py. After: host_order.py, where the links between hosts differ.
Source: Gu et al. 2024 (LoongTrain), double ring; Llama 3 (2024), section 3.3.2; Jacobs et al. 2023 (Ulysses), section
3; Fang & Zhao 2024 (USP); Zhao et al. 2023 (PyTorch FSDP). Liu et al. 2024 leaves links of unlike speed open.
"""

import sys
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

from ringlab.planning.hidden_communication import AttentionLayer, block_flops, gradient_bytes, hop_bytes, pass_seconds
from ringlab.planning.ring_memory import param_count
from ringlab.planning.round_costs import MERGE_CALLS, call_bytes, causal_pairs, efficiency, merge_bytes, packing_bytes
from ringlab.planning.shared_links import Links, Ready, Task, TaskGraph, play, wait_for
from ringlab.planning.ways import (
    RING_PER_HOST,
    WAYS,
    Cluster,
    alike,
    exchange_ranks,
    exchanged_bytes,
    named,
    shares,
)

MASKS, LAYOUTS = ("none", "causal"), ("contiguous", "zigzag", "striped")


class ClusterTasks(TaskGraph):
    """The tasks of one pass. Devices and NICs are joined by links of one direction: "out" to send, "in" to receive."""

    def __init__(
        self,
        cluster: Cluster,
        layer: AttentionLayer,
        chunk: float,
        *,
        ranks: int,
        visible: float,
        backward: bool,
        mask: str | None = None,
        layout: str = "zigzag",
        batch: int = 1,
    ) -> None:
        super().__init__(ranks, self.way, self.first_byte)
        self.cluster, self.layer, self.chunk, self.visible, self.backward = cluster, layer, chunk, visible, backward
        self.mask, self.layout, self.batch = mask, layout, batch

    def way(self, source: int, target: int) -> Links:
        """The links of a message. Ranks that are not simulated use the links of the ranks that stand for them."""
        here, there = source % self.ranks, target % self.ranks
        if not self.cluster.crosses(source, target):
            return ("out", here), ("in", there)
        return ("out", "nic", *self.cluster.nic(here)), ("in", "nic", *self.cluster.nic(there))

    def seconds(self) -> float:
        """Seconds from the begin of the first task to the end of the last."""
        rates: dict[Hashable, float] = {}
        for rank, direction in product(range(self.ranks), ("out", "in")):
            rates[direction, rank] = self.cluster.bandwidth
            rates[(direction, "nic", *self.cluster.nic(rank))] = self.cluster.host_bandwidth
        return max((end for _, end in play(self.tasks, rates, self.cluster.slowdown)), default=0.0)

    def first_byte(self, source: int, target: int) -> float:
        """Seconds before a message's first byte."""
        return self.cluster.host_latency if self.cluster.crosses(source, target) else self.cluster.latency

    def call(
        self, share: AttentionLayer, rows: float, keys: float, pairs: float, *, causal: bool, heads: int | None = None
    ) -> float:
        """Seconds of a call of the kernel: it is launched, computes `pairs`, and moves its bytes.

        `heads`: those whose blocks are at work together (None: the heads of `share`).
        """
        tokens, width = keys if self.backward else rows, self.batch * (heads or share.heads)
        reached = efficiency(width, tokens, self.cluster.multiprocessors, causal=causal, backward=self.backward)
        flops = block_flops(share, pairs, backward=self.backward) / self.cluster.rate(self.backward) / reached
        moved = call_bytes(share, rows, keys, backward=self.backward) / self.cluster.memory_bandwidth
        return self.cluster.launch + flops + moved

    def block(self, tokens: float, t: int) -> tuple[float, float, float, bool]:
        """Queries, keys, pairs of the call of round t, and is it causal? On the rank with the most work: r = P - 1.

        A causal call counts as many pairs as a call without a mask computes in the same time.
        It sees all of an earlier block; in zigzag, the earlier half of it. Striped, half of the pairs of any block.
        """
        if self.mask is None:
            return tokens, tokens, self.visible * tokens**2, False
        if self.mask == "causal" and (t == 0 or self.layout == "striped"):
            return tokens, tokens, self.cluster.causal * causal_pairs(tokens), True
        keys = tokens / 2 if self.mask == "causal" and self.layout == "zigzag" else tokens
        return tokens, keys, tokens * keys, False

    def computing(self, share: AttentionLayer, tokens: float, t: int, rounds: int) -> float:
        """Seconds of round t on a block of `tokens` keys, for the heads of `share`: a call, and in a ring a merge."""
        rows, keys, pairs, causal = self.block(tokens, t)
        seconds = self.call(share, rows, keys, pairs, causal=causal)
        if rounds == 1:
            return seconds
        moved = merge_bytes(share, rows, keys, first=t == 0, backward=self.backward)
        return seconds + MERGE_CALLS[self.backward] * self.cluster.launch + moved / self.cluster.memory_bandwidth

    def collect(self, size: float, ready: Ready) -> Ready:
        """All-gather or reduce-scatter of `size` bytes of each rank: P - 1 hops in one ring for each NIC.

        Each ring carries an equal part. It enters a host at the first device of its NIC, and leaves the host at the
        device before. All hops of a ring are alike, so one message on all links of the ring stands for them.
        """
        P, per_host = self.cluster.devices, self.cluster.per_host
        nics = self.cluster.nics if self.cluster.hosts > 1 else 1
        if P == 1:
            return ready
        after = tuple(set(sum(ready, ())))
        hosts = self.cluster.hosts
        latency = (P - hosts) * self.cluster.latency + (hosts - 1) * self.cluster.host_latency  # of P - 1 steps
        for nic in range(nics):
            first = -(-nic * per_host // nics)
            ring = [host + (first + i) % per_host for host in range(0, self.ranks, per_host) for i in range(per_host)]
            ring.append((ring[0] + self.ranks) % P)  # in the next host, if not all are simulated
            links = [link for ends in pairwise(ring) for link in self.way(*ends)]
            slows = tuple(range(self.ranks))
            self.tasks.append(Task(0, (P - 1) / nics * size, after, tuple(links), latency=latency, slows=slows))
        return [tuple(range(len(self.tasks) - nics, len(self.tasks)))] * self.ranks

    def weights(self) -> None:
        """FSDP, at the same time: gather a layer's weights; in the backward pass, sum a layer's gradients too."""
        size = param_count(self.layer, 1) * self.layer.itemsize / self.cluster.devices / self.batch
        gathered = self.collect(size, self.start)
        if self.backward:
            self.collect(size, gathered)

    def rings(self, ranks: int) -> None:
        """An exchange of heads in groups of `ranks`, then rings of P / `ranks`: ring, hybrid and all-to-all."""
        P, tokens, each = self.cluster.devices, ranks * self.chunk, shares(self.layer, ranks)
        rounds = P // ranks
        packing = self.cluster.launch + packing_bytes(self.layer, self.chunk) / self.cluster.memory_bandwidth

        def exchange(back: bool, ready: Ready) -> Ready:
            if ranks == 1:
                return ready
            messages: Counter[tuple[int, int, float]] = Counter()
            for r in range(self.ranks):
                first = r // ranks * ranks
                for target in {*range(first, first + ranks)} - {r}:
                    mine, theirs = each[r % ranks], each[target % ranks]
                    sizes = exchanged_bytes(self.layer, self.chunk, mine, theirs, backward=self.backward)
                    messages[r, target, sizes[back]] += 1
            packed = self.compute([packing] * self.ranks, ready)
            return self.compute([packing] * self.ranks, wait_for(packed, self.send(messages, packed)))

        ready, home = self.turn(
            exchange(False, self.start),
            lambda r: (r + ranks) % P,
            rounds,
            lambda r, t: self.computing(each[r % ranks], tokens, t, rounds),
            lambda r, t: hop_bytes(each[r % ranks], tokens),
            (lambda r, t: gradient_bytes(each[r % ranks], tokens)) if self.backward else None,
        )
        exchange(True, wait_for(ready, home))

    def next_device(self, rank: int) -> int:
        """The next rank in the ring of a host."""
        host, device = divmod(rank, self.cluster.per_host)
        return host * self.cluster.per_host + (device + 1) % self.cluster.per_host

    def ring_per_host(self) -> None:
        """A ring in each host, with a sequence of its own."""
        gradients = gradient_bytes(self.layer, self.chunk)
        self.turn(
            self.start,
            self.next_device,
            self.cluster.per_host,
            lambda r, t: self.computing(self.layer, self.chunk, t, self.cluster.per_host),
            lambda r, t: hop_bytes(self.layer, self.chunk),
            (lambda r, t: gradients) if self.backward else None,
        )

    def double_ring(self) -> None:
        """A ring in each host, and a hop between hosts during each turn of these rings."""
        P, per_host, hosts = self.cluster.devices, self.cluster.per_host, self.cluster.hosts
        kv, gradients = hop_bytes(self.layer, self.chunk), gradient_bytes(self.layer, self.chunk)

        ready, home, between = self.start, self.start, self.start

        def next_host(r: int) -> int:
            return (r + per_host) % P

        def pass_on(done: Ready) -> Ready:
            """Add the sums of the turn before to those of the hosts before, and send the result to the next host."""
            nonlocal between
            added = wait_for(done, home, between)
            between = self.hop(next_host, [gradients] * self.ranks, added)
            return added

        def computing(u: int, r: int, t: int) -> float:
            return self.computing(self.layer, self.chunk, u * per_host + t, P)

        for u in range(hosts):
            slow = self.hop(next_host, [kv] * self.ranks, ready) if u < hosts - 1 else self.start
            ready, home = self.turn(
                ready,
                self.next_device,
                per_host,
                partial(computing, u),
                lambda r, t: kv,
                (lambda r, t: gradients) if self.backward else None,
                pass_on if self.backward and u > 0 else lambda done: done,
            )
            ready = wait_for(ready, slow)
        if self.backward and hosts > 1:
            pass_on(ready)

    def all_gather(self) -> None:
        """One K/V head after the other. A collective begins when the collective before it has ended."""
        P, heads = self.cluster.devices, self.layer.kv_heads
        kv, gradients = hop_bytes(self.layer, self.chunk) / heads, gradient_bytes(self.layer, self.chunk) / heads
        S, one = P * self.chunk, AttentionLayer(self.layer.heads // heads, 1, self.layer.head_dim, self.layer.itemsize)
        pairs = self.chunk * {None: self.visible * S, "none": S, "causal": self.cluster.causal * S / 2}[self.mask]
        if self.mask == "causal" and self.layout == "contiguous":
            pairs = self.chunk * (S - self.chunk) + self.cluster.causal * self.chunk**2 / 2  # of the last rank
        order = 2 * hop_bytes(one, S) / self.cluster.memory_bandwidth  # chunks that arrived, as one sequence
        uneven = self.mask == "causal" and self.layout != "contiguous"  # queries from the begin and from the end of S
        block = self.call(one, self.chunk, S, pairs, causal=uneven, heads=self.layer.heads) + order
        ready, summed, arriving = self.start, self.start, self.collect(kv, self.start)
        last = arriving  # of the collectives
        for head in range(heads):
            here = arriving
            if head < heads - 1:
                last = arriving = self.collect(kv, wait_for(ready, last))
            done = self.compute([block] * self.ranks, wait_for(ready, here))
            ready = wait_for(done, summed)  # room for the sums of two heads
            if self.backward:
                last = summed = self.collect(gradients, wait_for(done, last))


def task_graph(
    way: str,
    cluster: Cluster,
    layer: AttentionLayer,
    chunk: float,
    *,
    visible: float = 1 / 2,
    backward: bool = False,
    split: int | None = None,
    fsdp: bool = False,
    mask: str | None = None,
    layout: str = "zigzag",
    batch: int = 1,
) -> ClusterTasks:
    """The tasks of one pass of a layer: each rank has `chunk` tokens of each of `batch` sequences.

    `mask` is "none", "causal" in a `layout`, or None: in every round the share `visible` of the pairs is computed.
    `split` is hybrid's number of ranks that exchange heads. With `fsdp` the weights of a layer travel at the same time.
    Raises ValueError for another mask or layout, for a batch below 1, and as `ringlab.planning.ways.exchange_ranks`.
    """
    for name, given, known in (("mask", mask, (None, *MASKS)), ("layout", layout, LAYOUTS)):
        if given not in known:
            raise ValueError(f"{name} is {given!r}; expected one of {', '.join(map(repr, known))}")
    if batch < 1:
        raise ValueError(f"batch is {batch}; expected a sequence or more")
    ranks = exchange_ranks(way, layer, cluster, split)
    stand_for_all = alike(layer, cluster, ranks)
    if batch > 1:  # every task of a batch has as many times the FLOPs and bytes: as if all rates were less by as much
        rates = ("flops", "backward_flops", "bandwidth", "host_bandwidth", "memory_bandwidth")
        cluster = replace(cluster, **{rate: getattr(cluster, rate) / batch for rate in rates})
    tasks = ClusterTasks(
        *(cluster, layer, chunk),
        ranks=stand_for_all,
        visible=visible,
        backward=backward,
        mask=mask,
        layout=layout,
        batch=batch,
    )
    if fsdp:
        tasks.weights()
    if way == "double ring":
        tasks.double_ring()
    elif way == "all-gather":
        tasks.all_gather()
    elif way == RING_PER_HOST:
        tasks.ring_per_host()
    else:
        tasks.rings(ranks)
    return tasks


def simulate(way: str, cluster: Cluster, layer: AttentionLayer, chunk: float, **options: Any) -> float:
    """Seconds of a pass of a layer by a way of `ways.WAYS` or `RING_PER_HOST`. Options, errors: see `task_graph`."""
    return task_graph(way, cluster, layer, chunk, **options).seconds()


def main() -> int:
    cluster, S = Cluster(16, 8, 990e12, 450e9, 12.5e9), 2**20
    layer = AttentionLayer(heads=32, kv_heads=8, head_dim=128)
    print("16 hosts of 8: 990 TFLOP/s, 450 GB/s inside, a NIC of 12.5 GB/s for each device; simulated, not measured")
    print(f"S = {S:,}, 32 query heads on 8, bf16, half of the pairs visible: ms of a layer")
    print(f"    {'':<18} forward  backward       sum")
    alone = [block_flops(layer, S**2 / 2, backward=each) / cluster.flops / cluster.devices for each in (False, True)]
    print(f"    {'computing alone':<18}" + "".join(f"{1e3 * each:8.1f}  " for each in (*alone, sum(alone))))
    for way in WAYS:
        split = 8 if way == "hybrid" else None
        name = named(way, cluster, split)
        try:
            chunk = S / cluster.devices
            passes = [simulate(way, cluster, layer, chunk, backward=each, split=split) for each in (False, True)]
        except ValueError as reason:
            print(f"    {name:<18}  {str(reason).partition(';')[0]}")
        else:
            ratio = sum(passes) / sum(alone)
            print(
                f"    {name:<18}"
                + "".join(f"{1e3 * each:8.1f}  " for each in (*passes, sum(passes)))
                + f"x {ratio:.2f}"
            )

    ok, host = True, replace(cluster, hosts=1)
    for chunk, backward in ((128, False), (8192, False), (8192, True)):  # exposed, hidden, hidden
        seconds = simulate("ring", host, layer, chunk, backward=backward)
        right = pass_seconds(layer, chunk, 8, host.flops, host.bandwidth, visible=1 / 2, backward=backward)
        ok &= abs(seconds - right) < 1e-9 * right
    print("one host: a ring of 8 takes as long as in hidden_communication.py")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
