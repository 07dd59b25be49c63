"""Double ring: blocks turn fast inside each host, and go to the next host only once a turn.

    flat ring      every round ends when the slowest link has carried a block: all rounds are as slow as that link
    double ring    the slow link carries a block while the devices of a host compute a whole turn of g rounds

P = n·g ranks: n hosts of g devices, rank r = host·g + device. In round t = u·g + s, device i of host a has the block of
device (i - s) mod g of host (a - u) mod n in hand. Inside turn u the blocks hop from device to device. At its beginning
each device sends the block in hand to the same device of the next host as well, which needs it g rounds later. So the
slow link has the time of g rounds, the g devices of a host send at once, and a pass has n - 1 slow hops, not P - 1.

Gradients: inside a turn the sums of dK and dV travel as in the ring, and come home to the device that began the turn
with their block. There they are added to the sums from the host before, which then travel to the next host. What a host
finds for its own blocks need not travel to another host. That is the last turn, while the others come home.

Shapes: on each rank q and out are (B, H, C, D), k and v (B, G, C, D), as in flash_ring.py. A block: 2·B·G·C·D numbers.
In the forward pass a rank sends P - n blocks inside its host and n - 1 to another host. In the backward pass it sends
these again, and the gradients of as many blocks, in float32 at least.

    $ python -m ringlab.ways.double_ring
    2 hosts of 2 devices: blocks in hand on ranks 0 to 3
    round 0: 0 1 2 3
    round 1: 1 0 3 2
    round 2: 2 3 0 1  from the other host
    round 3: 3 2 1 0
    4 ranks, S = 256, 8 query heads on 2, float32, against full attention in float64
    contiguous
    ok    out: largest error 4.7e-07, rounding allows 1.0e-05 (float32 sums)
    ...

In a model, on every rank of `hosts` hosts with `per_host` devices each:

    mesh = init_device_mesh("cuda", (hosts, per_host))  # once; hybrid.py takes the same mesh
    at = positions("zigzag", seq_len, dist.get_rank(), dist.get_world_size())  # as for the flat ring
    out = ring_flash_attention(q, k, v, causal=True, layout="zigzag", schedule=DoubleRing, group=mesh)

With data parallelism besides, cut the mesh out of a larger one: init_device_mesh("cuda", (dp, hosts, per_host),
mesh_dim_names=("dp", "hosts", "devices"))["hosts", "devices"]. A rank then is host · per_host + device of its own mesh.

Before: hybrid.py. After: ../../ring_planner/hidden_communication.py, how long chunks must be.
Source: Gu et al. 2024 (LoongTrain), double ring attention; Liu et al. 2024, algorithm 1.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.masks import Mask
from ringlab.ring.overlap import arriving_blocks, own_last
from ringlab.ring.partition import BlockSlice, Partition
from ringlab.ring.schedule import Group, Ring, Round, Schedule, TravellingSums
from ringlab.support.agreement import check_mesh
from ringlab.support.processes import RankContext, launch

First = tuple[int, tuple[Tensor, Tensor]]  # u, and the block that is in hand when turn u begins


class DoubleRing(Schedule):
    """The schedule of a ring of hosts, each of whose rounds is a turn of a ring of devices. Gu et al. 2024.

    The group is a mesh of hosts x devices of a host, whose ranks rise. Its rank host · g + device has the tokens of
    this rank of P; in a part of a job this is not the rank in the job. All ranks must pass the same mesh: otherwise
    they have no group in which they could find out.
    """

    @staticmethod
    def checked_group(group: Group, heads: int) -> Group:
        check_mesh(group)
        return group

    @property
    def turns(self) -> int:
        """How many turns have a block that some rank of this host, or of another, needs."""
        n, g = self.group.shape
        return 1 + min(n - 1, -(-self.partition.hops // g))

    def turn(self, u: int) -> Ring:
        """The ring inside this host in turn u."""
        (n, g), (host, _) = self.group.shape, self.group.get_coordinate()
        _, inside = self.group.get_all_groups()
        turn: Any = Turn(self.partition, host * g, (host - u) % n * g, g)  # all that a ring asks of a partition
        return Ring(turn, self.scale, inside)

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        return self.rounds_of(self.firsts(k, v))

    def rounds_back(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        return self.rounds_of(own_last(self.firsts(k, v)))

    def firsts(self, k: Tensor, v: Tensor) -> Iterator[First]:
        """Yield u and the first block of turn u. Meanwhile that of the next turn travels."""
        (_, g), (_, device) = self.group.shape, self.group.get_coordinate()
        across, _ = self.group.get_all_groups()
        lengths, hops = self.partition.lengths[device::g], self.turns - 1
        yield from enumerate(arriving_blocks(k, v, lengths=lengths, group=across, hops=hops))

    def rounds_of(self, firsts: Iterator[First]) -> Iterator[Round]:
        for u, first in firsts:
            for s, k_j, v_j, pieces in self.turn(u).rounds(*first):
                yield u * self.group.shape[1] + s, k_j, v_j, pieces

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> "DoubleSums":
        return DoubleSums(k, v, dtype, self)


@dataclass(frozen=True)
class Turn:
    """What the g ranks from `here` on compute in a turn of the blocks of the ranks from `origin` on."""

    whole: Partition
    here: int
    origin: int
    g: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.whole.lengths[self.origin : self.origin + self.g]

    @property
    def hops(self) -> int:
        return self.g - 1

    def pieces(self, rank: int, block: int) -> tuple[BlockSlice, ...]:
        return self.whole.pieces(self.here + rank, self.origin + block)


class DoubleSums:
    """The sums of a turn come home inside the host during the first round of the next turn, and go on to the next host.

    So a slow hop of the sums has the time of g rounds too. The turn of the own host is the last: its sums need not
    travel on, and those of other hosts come home meanwhile. One message is exposed, the last one home inside the host.
    """

    def __init__(self, k: Tensor, v: Tensor, dtype: torch.dtype, rings: DoubleRing) -> None:
        """k and v are this rank's own block."""
        (_, self.g), (_, device) = rings.group.shape, rings.group.get_coordinate()
        across, _ = rings.group.get_all_groups()
        self.rings, self.of_turn = rings, lambda u: rings.turn(u).sums(k, v, dtype)
        lengths, hops = rings.partition.lengths[device :: self.g], rings.turns - 1
        self.between = TravellingSums(k, v, dtype, lengths=lengths, group=across, hops=hops)
        self.ended = self.turn = self.of_turn(min(hops, 1))
        self.u = 0  # of the turn that has ended

    def of_round(self, t: int) -> Sequence[Tensor]:
        return self.turn.of_round(t % self.g)

    def send_on(self, t: int) -> None:
        u, s = divmod(t, self.g)
        self.turn.send_on(s)
        if s == 0 and self.u > 0:
            self.pass_on(self.u)
        if s == self.g - 1:
            self.u, self.ended = u, self.turn
            if u > 0:
                self.turn = self.of_turn((u + 1) % self.rings.turns)  # also where this rank computes nothing

    def pass_on(self, u: int) -> None:
        """Add the sums of turn u to those of the hosts before, and begin to send them to the next host."""
        for total, part in zip(self.between.of_round(u), self.ended.home(), strict=True):
            total += part
        self.between.send_on(u)

    def home(self) -> tuple[Tensor, Tensor]:
        self.pass_on(0)
        return self.between.home()


def blocks_in_hand(context: RankContext, n: int) -> list[int]:
    """The blocks in hand on this rank of n hosts, by round."""
    mesh = init_device_mesh(context.device.type, (n, context.world_size // n))
    block = torch.full((1, 1, 1, 1), context.rank, device=context.device)
    schedule = DoubleRing(Partition(Mask(), "contiguous", (1,) * context.world_size), 1.0, mesh)
    return [int(k_j) for _, k_j, _, _ in schedule.rounds(block, block)]


def main() -> int:
    from ringlab.ring.cases import random_inputs, report_cases

    n, g = 2, 2
    whole, attention = random_inputs(1, 8, 2, 256, 64), partial(ring_flash_attention, schedule=DoubleRing)
    blocks = launch(blocks_in_hand, n * g, n)
    print(f"{n} hosts of {g} devices: blocks in hand on ranks 0 to {n * g - 1}")
    for t, in_hand in enumerate(zip(*blocks, strict=True)):
        print(f"round {t}: {' '.join(map(str, in_hand))}" + ("  from the other host" if t and t % g == 0 else ""))
    ok = report_cases(n * g, whole, attention, (n, g))
    return 0 if ok and all(sorted(of_rank) == list(range(n * g)) for of_rank in blocks) else 1


if __name__ == "__main__":
    sys.exit(main())
