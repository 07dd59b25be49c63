"""Two speeds of wire: five ways to share a sequence, simulated step by step on hosts with network cards.

    ring            a hop between hosts, through one card of each host, is due every round: all rounds are as slow
    double ring     it is due once in a turn of per_host rounds, and all cards work: it has the time of a turn
    all-gather      one K/V head after the other: the first gather and the last sum of gradients are exposed
    all-to-all      nothing travels while a rank computes: both exchanges are exposed
    hybrid n x g    an exchange in rows of g ranks, exposed; then n - 1 hops of longer blocks, through more cards

A way is a list of steps, as its file in ringlab/training/ makes them: what is computed and sent, and what each step
waits for. `play` of shared_links.py says when each begins. Hosts that all do the same are simulated as one: what leaves
a host on a card arrives on a card at the same time. The weights of FSDP may travel on the same links.

Shapes: numbers only, as in ways.py. All times are simulated, of attention only: no latency, no projections, no
feedforward. Where cards or groups are shared unevenly, a faster link may come out slower by a percent (Graham 1969).

    $ python -m ringlab.planning.two_speeds
    16 hosts of 8: 990 TFLOP/s, 450 GB/s inside, a card of 12.5 GB/s for each device; simulated, not measured
    S = 1,048,576, 32 query heads on 8, bf16, half of the pairs visible: ms of a layer
                           forward  backward       sum
        computing alone       71.1     177.7     248.8
        ring                 341.5    1028.1    1369.6  x 5.51
        double ring           71.1     183.2     254.3  x 1.02
        all-gather            76.4     193.7     270.1  x 1.09
        all-to-all          all-to-all among 128 ranks, and 32 query heads
        hybrid 16 x 8         71.4     183.4     254.8  x 1.02
    one host: a ring of 8 takes as long as in hidden_communication.py

Before: shared_links.py. After: host_order.py, where the links between hosts differ.
Source: Gu et al. 2024 (LoongTrain), double ring; Llama 3 (2024), section 3.3.2; Jacobs et al. 2023 (Ulysses), section
3; Fang & Zhao 2024 (USP); Zhao et al. 2023 (PyTorch FSDP). Liu et al. 2024 leaves links of unlike speed open.
"""

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ringlab.planning.hidden_communication import Layer, block_flops, gradient_bytes, hop_bytes, pass_seconds
from ringlab.planning.ring_memory import param_count
from ringlab.planning.shared_links import Links, Ready, Schedule, Step, both, play
from ringlab.planning.ways import WAYS, Cluster, alike, exchange_ranks, exchanged_bytes, named, shares


class OnCluster(Schedule):
    """The steps of a pass. Each device has a link into its host and one out of it; each card has one in, one out."""

    def __init__(
        self, cluster: Cluster, layer: Layer, chunk: float, *, ranks: int, visible: float, backward: bool
    ) -> None:
        super().__init__(ranks, self.way)
        self.cluster, self.layer, self.chunk, self.visible, self.backward = cluster, layer, chunk, visible, backward

    def way(self, source: int, target: int) -> Links:
        """The links of a message. A host that is not simulated has those of the host that stands for it."""
        here, there = source % self.ranks, target % self.ranks
        if not self.cluster.crosses(source, target):
            return ("out", here), ("in", there)
        return ("out", "card", *self.cluster.card(here)), ("in", "card", *self.cluster.card(there))

    def seconds(self) -> float:
        """From the begin of the first step to the end of the last."""
        rates = dict.fromkeys((link for step in self.steps for link in step.links), self.cluster.bandwidth)
        rates.update({link: self.cluster.host_bandwidth for link in rates if "card" in link})
        return max((end for _, end in play(self.steps, rates)), default=0.0)

    def computing(self, share: Layer, tokens: float) -> float:
        """Seconds on a block of so many queries and keys, for the heads of a share."""
        return block_flops(share, self.visible * tokens**2, backward=self.backward) / self.cluster.flops

    def collect(self, size: float, ready: Ready) -> Ready:
        """All-gather or reduce-scatter of `size` bytes of each rank: P - 1 hops in a ring for each card.

        Each ring carries an equal part. It enters a host at the first device of its card, and leaves it at the device
        before that one. Its hops are alike, so they are one message on all its links.
        """
        P, per_host = self.cluster.devices, self.cluster.per_host
        cards = self.cluster.cards if self.cluster.hosts > 1 else 1
        if P == 1:
            return ready
        after = tuple(set(sum(ready, ())))
        for card in range(cards):
            first = -(-card * per_host // cards)
            ring = [host + (first + i) % per_host for host in range(0, self.ranks, per_host) for i in range(per_host)]
            ring.append((ring[0] + self.ranks) % P)  # in the next host, if not all are simulated
            links = [link for ends in pairwise(ring) for link in self.way(*ends)]
            self.steps.append(Step(0, (P - 1) / cards * size, after, tuple(links)))
        return [tuple(range(len(self.steps) - cards, len(self.steps)))] * self.ranks

    def weights(self) -> None:
        """FSDP, beside: a layer's weights are gathered; in the backward pass, a layer's gradients are summed too."""
        size = param_count(self.layer, 1) * self.layer.itemsize / self.cluster.devices
        gathered = self.collect(size, self.start)
        if self.backward:
            self.collect(size, gathered)

    def rings(self, ranks: int) -> None:
        """Heads exchanged among so many ranks, then a ring of every such group: ring, hybrid and all-to-all."""
        P, tokens, each = self.cluster.devices, ranks * self.chunk, shares(self.layer, ranks)

        def exchange(back: bool, ready: Ready) -> Ready:
            messages: Counter[tuple[int, int, float]] = Counter()
            for r in range(self.ranks):
                first = r // ranks * ranks
                for target in {*range(first, first + ranks)} - {r}:
                    mine, theirs = each[r % ranks], each[target % ranks]
                    sizes = exchanged_bytes(self.layer, self.chunk, mine, theirs, backward=self.backward)
                    messages[r, target, sizes[back]] += 1
            return both(ready, self.send(messages, ready))

        ready, home = self.turn(
            exchange(False, self.start),
            lambda r: (r + ranks) % P,
            P // ranks,
            lambda r, t: self.computing(each[r % ranks], tokens),
            lambda r, t: hop_bytes(each[r % ranks], tokens),
            (lambda r, t: gradient_bytes(each[r % ranks], tokens)) if self.backward else None,
        )
        exchange(True, both(ready, home))

    def double_ring(self) -> None:
        """Rings inside the hosts, and a hop between hosts during each of their turns."""
        P, per_host, hosts = self.cluster.devices, self.cluster.per_host, self.cluster.hosts
        computing = self.computing(self.layer, self.chunk)
        kv, gradients = hop_bytes(self.layer, self.chunk), gradient_bytes(self.layer, self.chunk)

        def inside(r: int) -> int:
            return r // per_host * per_host + (r + 1) % per_host

        def across(r: int) -> int:
            return (r + per_host) % P

        def pass_on(done: Ready) -> Ready:
            """Wait for the sums of the turn before, and for those of the hosts before; send on what they add up to."""
            nonlocal between
            added = both(done, home, between)
            between = self.hop(across, lambda r: gradients, added)
            return added

        ready, home, between = self.start, self.start, self.start
        for u in range(hosts):
            slow = self.hop(across, lambda r: kv, ready) if u < hosts - 1 else self.start
            ready, home = self.turn(
                ready,
                inside,
                per_host,
                lambda r, t: computing,
                lambda r, t: kv,
                (lambda r, t: gradients) if self.backward else None,
                pass_on if self.backward and u > 0 else lambda done: done,
            )
            ready = both(ready, slow)
        if self.backward and hosts > 1:
            pass_on(ready)

    def all_gather(self) -> None:
        """One K/V head after the other. A collective begins when the one before has ended."""
        P, heads = self.cluster.devices, self.layer.kv_heads
        kv, gradients = hop_bytes(self.layer, self.chunk) / heads, gradient_bytes(self.layer, self.chunk) / heads
        block = self.computing(self.layer, self.chunk) / heads
        ready, summed, arriving = self.start, self.start, self.collect(kv, self.start)
        last = arriving  # of the collectives
        for head in range(heads):
            here = arriving
            if head < heads - 1:
                last = arriving = self.collect(kv, both(ready, last))
            done = self.compute(lambda r: P * block, both(ready, here))
            ready = both(done, summed)  # room for the sums of two heads
            if self.backward:
                last = summed = self.collect(gradients, both(done, last))


def schedule(
    way: str,
    cluster: Cluster,
    layer: Layer,
    chunk: float,
    *,
    visible: float = 1 / 2,
    backward: bool = False,
    inside: int | None = None,
    fsdp: bool = False,
) -> OnCluster:
    """The steps of one pass of a layer: chunks of `chunk` tokens, of whose pairs the share `visible` is computed.

    `inside` is hybrid's number of ranks that exchange heads. With `fsdp` the weights of a layer travel beside. Raises
    ValueError as `ringlab.planning.ways.exchange_ranks` does.
    """
    ranks = exchange_ranks(way, layer, cluster, inside)
    stand_for_all = alike(layer, cluster, ranks)
    steps = OnCluster(cluster, layer, chunk, ranks=stand_for_all, visible=visible, backward=backward)
    if fsdp:
        steps.weights()
    if way == "double ring":
        steps.double_ring()
    elif way == "all-gather":
        steps.all_gather()
    else:
        steps.rings(ranks)
    return steps


def simulate(way: str, cluster: Cluster, layer: Layer, chunk: float, **options: Any) -> float:
    """Seconds of one pass of a layer by a way of `ways.WAYS`; options and errors are those of `schedule`."""
    return schedule(way, cluster, layer, chunk, **options).seconds()


def main() -> int:
    cluster, layer, S = Cluster(16, 8, 990e12, 450e9, 12.5e9), Layer(heads=32, kv_heads=8, head_dim=128), 2**20
    print("16 hosts of 8: 990 TFLOP/s, 450 GB/s inside, a card of 12.5 GB/s for each device; simulated, not measured")
    print(f"S = {S:,}, 32 query heads on 8, bf16, half of the pairs visible: ms of a layer")
    print(f"    {'':<18} forward  backward       sum")
    alone = [block_flops(layer, S**2 / 2, backward=each) / cluster.flops / cluster.devices for each in (False, True)]
    print(f"    {'computing alone':<18}" + "".join(f"{1e3 * each:8.1f}  " for each in (*alone, sum(alone))))
    for way in WAYS:
        inside = 8 if way == "hybrid" else None
        name = named(way, cluster, inside)
        try:
            chunk = S / cluster.devices
            passes = [simulate(way, cluster, layer, chunk, backward=each, inside=inside) for each in (False, True)]
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
