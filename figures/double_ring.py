"""The schedule of a double ring of 2 hosts with 4 devices: fast hops inside a host, one slow hop a turn between hosts.

Drawn from `DoubleRing.rounds` of ringlab/ways/double_ring.py, which threads run here as ranks (simulated.py), round
by round. Its messages are noted: who sends which block, in which round, and in which round the receiver waits for it.
"""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes

from figures import shapes
from figures.simulated import Simulation
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.support import drawing
from ringlab.ways.double_ring import DoubleRing

HOSTS, DEVICES = 2, 4
P = HOSTS * DEVICES
LEFT, ROUND, CELL = 104, 110, (72, 32)  # pixels: the first round, from one to the next, a cell
ROW, LANE = 40, 20  # from one rank to the next, from one slow hop to the next
TOPS = (146, 524)  # of the two hosts
LANES = (316, 412)  # of the slow hops to host 0, and to host 1


@dataclass(frozen=True)
class Hop:
    """A block that travels from rank `sender` to rank `receiver`: sent in round `first`, waited for after `last`."""

    sender: int
    receiver: int
    block: int
    first: int
    last: int

    @property
    def slow(self) -> bool:
        return self.sender // DEVICES != self.receiver // DEVICES


class Mesh(Simulation):
    """The ranks as a mesh of hosts and devices: a slow hop may take as long as a turn."""

    shape = HOSTS, DEVICES

    def get_coordinate(self) -> tuple[int, int]:
        return divmod(self.rank, DEVICES)

    def get_all_groups(self) -> tuple[range, range]:
        host, device = self.get_coordinate()
        return range(device, P, DEVICES), range(host * DEVICES, (host + 1) * DEVICES)


def schedule() -> tuple[list[list[int]], list[Hop]]:
    """The number of the block in hand, by round and rank; and every message. Computing on a block takes a round."""
    mesh = Mesh(P, lambda link, sent: 1.0 if link[0] // DEVICES == link[1] // DEVICES else float(DEVICES))

    def blocks_of(rank: int) -> list[int]:
        k, blocks = torch.full((1, 1, 1, 1), float(rank)), []
        ring = DoubleRing(Partition(Mask(), "contiguous", (1,) * P), 1.0, mesh)
        for _, k_j, _, _ in ring.rounds(k, k):
            blocks.append(int(k_j))
            mesh.compute(1.0)
        return blocks

    blocks = mesh.run(blocks_of)
    messages = [message for of_link in mesh.moved.values() for message in of_link]
    messages.sort(key=lambda it: (it.waited, it.link[1], it.link[0]))
    hops = [Hop(*it.link, int(it.tensors[0]), int(it.begin), int(it.waited) - 1) for it in messages]
    return [list(of_round) for of_round in zip(*blocks, strict=True)], hops


def cell(rank: int, t: int) -> tuple[int, int]:
    """The top left of the cell of `rank` in round t, in pixels."""
    host, device = divmod(rank, DEVICES)
    return LEFT + ROUND * t, TOPS[host] + ROW * device


def _slow_hop(ax: Axes, hop: Hop) -> None:
    """A bar in the block's colour, as long as the hop may take, and an arrow to the rank that receives the block."""
    width, height = CELL
    host, device = divmod(hop.receiver, DEVICES)
    x, y = LEFT + ROUND * hop.first, LANES[host] + LANE * device
    length = ROUND * (hop.last - hop.first) + width
    text = f"KV{hop.block}, from rank {hop.sender} to rank {hop.receiver}"
    shapes.block(ax, x, y, length, LANE - 3, hop.block, text, size=drawing.SMALL)
    left, top = cell(hop.receiver, hop.last + 1)
    look = {"color": drawing.colour(hop.block), "lw": 2.2, "mutation_scale": 10}
    shapes.arrow(ax, (x + length, y + LANE / 2 - 1.5), (left - 1, top + height / 2), **look)


def _fast_hop(ax: Axes, hop: Hop) -> None:
    width, height = CELL
    (x, y), (left, top) = cell(hop.sender, hop.first), cell(hop.receiver, hop.last + 1)
    look = {"color": drawing.colour(hop.block), "lw": 1.4, "mutation_scale": 9}
    shapes.arrow(ax, (x + width, y + height / 2), (left - 1, top + height / 2), **look)


def draw() -> drawing.Picture:
    """Eight ranks by eight rounds. Ranks 0 to 3 are host 0, ranks 4 to 7 are host 1. In rounds 0 to 3 the blocks KV0 to
    KV3 go round the ranks of host 0, by one rank a round, and KV4 to KV7 round those of host 1. During these four
    rounds each rank also sends its own block to the same device of the other host: eight long bars between the hosts.
    In round 4 these blocks arrive: KV0 to KV3 at ranks 4 to 7, and KV4 to KV7 at ranks 0 to 3. In rounds 4 to 7 they go
    round there, and nothing travels between the hosts.
    """
    blocks, hops = schedule()
    width, height = CELL
    title = f"A double ring: {HOSTS} hosts of {DEVICES} devices, one slow hop a turn of {DEVICES} rounds"
    key = "Box: the block that a rank computes on. Thin arrow: a hop inside a host. Bar: a hop to the other host"
    figure, ax = shapes.headed(796, draw, title, {64: key})
    for t in range(P):
        x, _ = cell(0, t)
        drawing.write(ax, x + width / 2, 122, f"round {t}", weight="bold", ha="center")
        if t % DEVICES == 0:
            drawing.write(ax, x, 98, f"turn {t // DEVICES}", size=drawing.SMALL, color=drawing.MUTED)
    for hop in hops:
        (_slow_hop if hop.slow else _fast_hop)(ax, hop)
    for t, in_hand in enumerate(blocks):
        for rank, number in enumerate(in_hand):
            x, y = cell(rank, t)
            shapes.block(ax, x, y, width, height, number, f"KV{number}")
    for host, y in enumerate(TOPS):
        drawing.write(ax, 20, y - 20, f"host {host}", size=drawing.SMALL, color=drawing.MUTED)
    for rank in range(P):
        _, y = cell(rank, 0)
        drawing.write(ax, 20, y + height / 2, f"rank {rank}", weight="bold")
    for host, y in enumerate(LANES):
        middle = y + LANE * DEVICES / 2
        drawing.write(ax, 20, middle - 12, "on the way", size=drawing.SMALL, color=drawing.MUTED)
        drawing.write(ax, 20, middle + 8, f"to host {host}", size=drawing.SMALL, color=drawing.MUTED)
    x, _ = cell(0, DEVICES)
    shapes.lines(ax, x, 388, ("Nothing travels between the hosts in turn 1:", "each host has the blocks of both now."))
    below = (
        "Follow KV0. In turn 0 it goes round host 0. In round 0, rank 0 sends it to rank 4 as well.",
        "Rank 4 computes on it in round 4. So the network between the hosts has the time of 4 rounds for this hop.",
        "In a flat ring it would have the time of one round.",
    )
    shapes.lines(ax, 20, 714, below)
    return figure
