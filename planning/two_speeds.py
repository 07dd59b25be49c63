"""Two speeds of wire: five ways to share a sequence, simulated step by step on hosts with network cards.

    ring            a hop between hosts, through one card of each host, is due every round: all rounds are as slow
    double ring     it is due once in a turn of per_host rounds, and all cards work: it has the time of a turn
    all-gather      one K/V head after the other: the first gather and the last sum of gradients are exposed
    all-to-all      nothing travels while a rank computes: both exchanges are exposed
    hybrid a x b    an exchange among a ranks, exposed; then b - 1 hops of longer blocks, through more cards

A way is a list of steps, as its file in training/ makes them: what is computed and sent, and what each step waits for.
`play` of shared_links.py says when each begins. Hosts that all do the same are simulated as one: what leaves a host on
a card arrives on a card at the same time. The weights of FSDP may travel on the same links.

Shapes: numbers only, as in ways.py. All times are simulated, of attention only: no latency, no projections, no
feedforward.

    $ python -m planning.two_speeds
    ...

Before: shared_links.py, ways.py. After: unequal.py, where links and devices differ.
Source: Gu et al. 2024 (LoongTrain), double ring; Llama 3 (2024), section 3.3.2; Jacobs et al. 2023 (Ulysses), section
3; Fang & Zhao 2024 (USP); Zhao et al. 2023 (PyTorch FSDP). Liu et al. 2024 leaves links of unlike speed open.
"""

import sys
from collections import Counter
from collections.abc import Callable, Hashable

from planning.hidden_communication import Layer, block_flops, gradient_bytes, hop_bytes, pass_seconds
from planning.ring_memory import param_count
from planning.shared_links import Step, play
from planning.simulated_ring import duration
from planning.ways import Cluster, alike, exchange_ranks, exchanged_bytes, shares

Ready = list[tuple[int, ...]]  # by rank: the steps that end before the rank goes on


def both(*ready: Ready) -> Ready:
    """What all of these wait for."""
    return [sum(each, ()) for each in zip(*ready, strict=True)]


class Schedule:
    """The steps of the first n ranks of P. They stand for all: a message to rank r is one to rank r mod n."""

    def __init__(self, ranks: int, links: Callable[[int, int], tuple[Hashable, ...]]) -> None:
        """`links` are those of a message from one rank to another."""
        self.ranks, self.links, self.steps = ranks, links, list[Step]()
        self.start: Ready = [()] * ranks  # nothing to wait for

    def compute(self, seconds: Callable[[int], float], ready: Ready) -> Ready:
        """Every rank r computes for seconds(r)."""
        first = len(self.steps)
        self.steps += [Step("compute", r, seconds(r), ready[r]) for r in range(self.ranks)]
        return [(first + r,) for r in range(self.ranks)]

    def send(self, messages: Counter[tuple[int, int, float]], ready: Ready) -> Ready:
        """Messages (source, target, bytes): each begins when its two ranks are ready. Returns every rank's messages."""
        of_rank: Ready = [()] * self.ranks
        lumped: Counter[tuple[int, int, float, tuple[Hashable, ...]]] = Counter()
        for (source, target, size), count in messages.items():
            lumped[source, target % self.ranks, size, self.links(source, target)] += count
        for (source, target, size, links), count in lumped.items():
            for rank in {source, target}:
                of_rank[rank] += (len(self.steps),)
            self.steps.append(Step("send", source, size, ready[source] + ready[target], links, count))
        return of_rank

    def hop(self, onward: Callable[[int], int], size: Callable[[int], float], ready: Ready) -> Ready:
        """Every rank r sends size(r) bytes to rank onward(r)."""
        return self.send(Counter((r, onward(r), size(r)) for r in range(self.ranks)), ready)

    def turn(
        self,
        ready: Ready,
        onward: Callable[[int], int],
        rounds: int,
        seconds: Callable[[int, int], float],
        kv: Callable[[int, int], float],
        gradients: Callable[[int, int], float] | None,
        after_first: Callable[[Ready], Ready] = lambda done: done,
    ) -> tuple[Ready, Ready]:
        """A ring of so many rounds; in round t rank r computes for seconds(r, t) and sends kv(r, t) bytes.

        The gradients of a block travel one round after it, and after the last round home. Returns what ends the last
        round, and these last messages. `after_first` adds to what ends the first round.
        """
        under_way = self.start
        for t in range(rounds):
            hops = self.hop(onward, lambda r, t=t: kv(r, t), ready) if t < rounds - 1 else self.start
            done = both(self.compute(lambda r, t=t: seconds(r, t), ready), under_way)
            if gradients and rounds > 1:
                under_way = self.hop(onward, lambda r, t=t: gradients(r, t), done)
            ready = both(after_first(done) if t == 0 else done, hops)
        return ready, under_way


class OnCluster(Schedule):
    """The steps of a way on a cluster: every device has a link into its host and one out of it, and so has each card."""

    def __init__(self, cluster: Cluster, layer: Layer, chunk: float, visible: float, backward: bool, ranks: int) -> None:
        super().__init__(ranks, self.way)
        self.cluster, self.layer, self.chunk, self.visible, self.backward = cluster, layer, chunk, visible, backward

    def way(self, source: int, target: int) -> tuple[Hashable, ...]:
        """The links of a message, those of the host that stands for the target's host."""
        host, card = (lambda rank: rank % self.ranks // self.cluster.per_host), self.cluster.card
        if self.cluster.crosses(source, target):
            return ("card out", host(source), card(source)), ("card in", host(target), card(target))
        return ("out", source % self.ranks), ("in", target % self.ranks)

    def rates(self) -> dict[Hashable, float]:
        """Bytes/s of every link."""
        cards = [(host, card) for host in range(self.ranks // self.cluster.per_host) for card in range(self.cluster.cards)]
        rates = {(end, r): self.cluster.bandwidth for end in ("out", "in") for r in range(self.ranks)}
        return rates | {(f"card {end}", *card): self.cluster.host_bandwidth for end in ("out", "in") for card in cards}

    def seconds(self, share: Layer, queries: float, keys: float) -> float:
        """Of computing on a block of so many queries and keys, for the heads of a share."""
        return block_flops(share, self.visible * queries * keys, backward=self.backward) / self.cluster.flops

    def collect(self, size: float, ready: Ready) -> Ready:
        """All-gather or reduce-scatter of `size` bytes of each rank: P - 1 hops, in a ring for each card.

        Each ring carries an equal part. It enters a host at the first device of its card, and leaves it at the device
        before that one. All its hops are alike, so they are one message on all its links.
        """
        P, per_host, cards = self.cluster.devices, self.cluster.per_host, self.cluster.cards
        if P == 1:
            return ready
        after = tuple(set(sum(ready, ())))
        for card in range(cards):
            first = -(-card * per_host // cards)
            order = [host + (first + i) % per_host for host in range(0, self.ranks, per_host) for i in range(per_host)]
            # Ranks of hosts that are not simulated follow, so that the last one sends to another host.
            following = order[1:] + [(order[0] + self.ranks) % P]
            links = [link for ends in zip(order, following, strict=True) for link in self.way(*ends)]
            self.steps.append(Step("send", 0, (P - 1) / cards * size, after, tuple(links)))
        return [tuple(range(len(self.steps) - cards, len(self.steps)))] * self.ranks

    def shared_weights(self) -> None:
        """FSDP beside attention: the next layer's weights are gathered, in the backward pass gradients summed as well."""
        weights = param_count(self.layer, 1) * self.layer.itemsize / self.cluster.devices
        gathered = self.collect(weights, self.start)
        if self.backward:
            self.collect(weights, gathered)

    def rings(self, ranks: int) -> None:
        """Heads exchanged among so many ranks, then a ring through every such group: ring, hybrid and all-to-all."""
        P, tokens, each = self.cluster.devices, ranks * self.chunk, shares(self.layer, ranks)

        def exchange(back: bool, ready: Ready) -> Ready:
            sizes: Counter[tuple[int, int, float]] = Counter()
            for r in range(self.ranks):
                for target in range(r // ranks * ranks, (r // ranks + 1) * ranks):
                    if target != r:
                        theirs = each[target % ranks]
                        sent = exchanged_bytes(self.layer, self.chunk, each[r % ranks], theirs, self.backward)
                        sizes[r, target, sent[back]] += 1
            return both(ready, self.send(sizes, ready))

        ready, last = self.turn(
            exchange(False, self.start),
            lambda r: (r + ranks) % P,
            P // ranks,
            lambda r, t: self.seconds(each[r % ranks], tokens, tokens),
            lambda r, t: hop_bytes(each[r % ranks], tokens),
            (lambda r, t: gradient_bytes(each[r % ranks], tokens)) if self.backward else None,
        )
        exchange(True, both(ready, last))

    def double_ring(self) -> None:
        """Rings inside the hosts, and a slow hop during each turn of them. The sums of a turn follow a turn later."""
        P, per_host, hosts = self.cluster.devices, self.cluster.per_host, self.cluster.hosts
        computing = self.seconds(self.layer, self.chunk, self.chunk)
        kv, gradients = hop_bytes(self.layer, self.chunk), gradient_bytes(self.layer, self.chunk)

        def inside(r: int) -> int:
            return r // per_host * per_host + (r + 1) % per_host

        def across(r: int) -> int:
            return (r + per_host) % P

        def pass_on(done: Ready) -> Ready:
            """Add the sums of the last turn, when they are home, to those from the host before; send these on."""
            nonlocal outer
            added = both(done, home, outer)
            outer = self.hop(across, lambda r: gradients, added)
            return added

        ready, home, outer = self.start, self.start, self.start
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
        computing = self.seconds(self.layer, self.chunk, self.chunk) / heads  # of one block, for one K/V head
        ready, queue = self.start, self.collect(kv, self.start)
        for head in range(heads):
            here = queue
            if head < heads - 1:
                queue = self.collect(kv, both(ready, queue))
            ready = self.compute(lambda r: computing, ready)  # its own block is here
            ready = self.compute(lambda r: (P - 1) * computing, both(ready, here))
            if self.backward:
                queue = self.collect(gradients, both(ready, queue))


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

    `inside` is hybrid's number of ranks that exchange heads. With `fsdp` the layer's weights travel beside. Raises
    ValueError for another way, and for a split that P or the heads do not allow (`planning.ways.exchange_ranks`).
    """
    ranks = exchange_ranks(way, layer, cluster, inside)
    steps = OnCluster(cluster, layer, chunk, visible, backward, alike(layer, cluster, ranks))
    if fsdp:
        steps.shared_weights()
    if way == "double ring":
        steps.double_ring()
    elif way == "all-gather":
        steps.all_gather()
    else:
        steps.rings(ranks)
    return steps


def simulate(way: str, cluster: Cluster, layer: Layer, chunk: float, **options: object) -> float:
    """Seconds of one pass of a layer by a way of `WAYS`; options and errors as those of `schedule`."""
    steps = schedule(way, cluster, layer, chunk, **options)
    return max(end for _, end in play(steps.steps, steps.rates()))
