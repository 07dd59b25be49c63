"""The order of hosts in a ring: links differ, and the slowest link that the ring uses is the speed of all its hops.

    of all cyclic orders of n hosts, take one whose slowest hop is fastest; among these, one with the largest sum

There are (n - 1)! orders, since the ring may begin at any host. Up to 9 hosts all of them are tried. For more, the
first order goes from each host along its fastest link to a free host. Then a piece of the ring is turned round, or a
host is moved, as long as this helps. That is quick, but may miss the best order.

Shapes: bandwidths[i][j] is the bytes/s from host i to host j, n x n; an order is n different hosts.

    $ python -m ringlab.planning.host_order
    the slowest hop and the sum of all hops, in GB/s; modelled
    4 hosts, 5 GB/s between 1 and 2
        by number   slowest    5, sum   80   0 1 2 3
        best found  slowest   25, sum  100   0 1 3 2
    8 hosts, 2 racks by turns
        by number   slowest 12.5, sum  100   0 1 2 3 4 5 6 7
        best found  slowest 12.5, sum  325   0 1 3 5 7 2 4 6
    16 hosts, 2 racks by turns
        by number   slowest 12.5, sum  200   0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
        best found  slowest 12.5, sum  725   0 2 4 6 8 10 12 14 1 3 5 7 9 11 13 15
    6 hosts, 100 times at random: the search for more than 9 hosts finds the best order 80 times

Before: seconds.py. After: unequal.py, where the devices differ.
Source: the bottleneck travelling salesman (Garfinkel & Gilbert 1978); turning a piece round is 2-opt (Croes 1958). Liu
et al. 2024 leaves links of unlike speed open.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from itertools import permutations, product

EXACT = 9  # hosts whose orders are all tried: 40,320


def score(order: Sequence[int], bandwidths: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The slowest hop of a ring in this order, and the sum of all its hops, in bytes/s."""
    hops = [bandwidths[i][j] for i, j in zip(order, [*order[1:], order[0]], strict=True)]
    return min(hops), sum(hops)


def best_order(bandwidths: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """An order of the hosts, from host 0 on, with the best `score`: exactly up to 9 hosts, else by `improved_order`.

    Raises ValueError unless `bandwidths` is square, and above 0 beside its diagonal.
    """
    hosts = len(bandwidths)
    pairs = [(i, j) for i, j in product(range(hosts), repeat=2) if i != j]
    if not hosts or {len(row) for row in bandwidths} != {hosts} or any(not bandwidths[i][j] > 0 for i, j in pairs):
        raise ValueError(f"bandwidths is {bandwidths}; expected a row for each host, of bytes/s above 0 to each other")
    if hosts > EXACT:
        return improved_order(bandwidths)
    return max(((0, *rest) for rest in permutations(range(1, hosts))), key=lambda order: score(order, bandwidths))


def improved_order(bandwidths: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """An order that no single move makes better, from host 0 on."""
    hosts = range(len(bandwidths))

    def nearest_first(host: int) -> tuple[int, ...]:
        order, free = [host], {*hosts} - {host}
        while free:
            order.append(max(free, key=lambda j: (bandwidths[order[-1]][j], -j)))
            free.remove(order[-1])
        return tuple(order)

    def moved(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for i, j in product(hosts, repeat=2):
            if i < j:
                yield order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
            rest = order[:i] + order[i + 1 :]
            yield rest[:j] + order[i : i + 1] + rest[j:]

    best = max(map(nearest_first, hosts), key=lambda order: score(order, bandwidths))
    while True:
        better = max(moved(best), key=lambda order: score(order, bandwidths))
        if score(better, bandwidths) <= score(best, bandwidths):
            first = best.index(0)
            return best[first:] + best[:first]
        best = better


def racks(of_host: Sequence[int], within: float, between: float) -> list[list[float]]:
    """The bandwidths of hosts in racks: `of_host` is the rack of each."""
    return [[within if i == j else between for j in of_host] for i in of_host]


def main() -> int:
    ok = True
    slow = [[25e9] * 4 for _ in range(4)]
    slow[1][2] = slow[2][1] = 5e9
    print("the slowest hop and the sum of all hops, in GB/s; modelled")
    for name, bandwidths in (
        ("4 hosts, 5 GB/s between 1 and 2", slow),
        ("8 hosts, 2 racks by turns", racks([0, 1] * 4, 50e9, 12.5e9)),
        ("16 hosts, 2 racks by turns", racks([0, 1] * 8, 50e9, 12.5e9)),
    ):
        order = best_order(bandwidths)
        print(name)
        for what, each in (("by number", tuple(range(len(order)))), ("best found", order)):
            least, total = score(each, bandwidths)
            row = f"    {what:<12}slowest {least / 1e9:>4g}, sum {total / 1e9:>4g}"
            print(f"{row}   {' '.join(map(str, each))}")
        ok &= score(order, bandwidths) == {4: (25e9, 100e9), 8: (12.5e9, 325e9), 16: (12.5e9, 725e9)}[len(order)]

    generator, found = random.Random(0), 0
    for _ in range(100):
        bandwidths = [[generator.uniform(1, 10) for _ in range(6)] for _ in range(6)]
        exact, quick = (score(order(bandwidths), bandwidths) for order in (best_order, improved_order))
        ok &= quick <= exact
        found += quick == exact
    print(f"6 hosts, 100 times at random: the search for more than {EXACT} hosts finds the best order {found} times")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
