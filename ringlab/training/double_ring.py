"""Double ring: blocks turn fast inside each host, and go to the next host only once a turn.

    flat ring      every round ends when the slowest link has carried a block: all rounds are as slow as that link
    double ring    the slow link carries a block while the devices of a host compute a whole turn of g rounds

P = n·g ranks: n hosts of g devices, rank r = host·g + device. In round t = u·g + s, device i of host a has the block of
device (i - s) mod g of host (a - u) mod n in hand. Inside turn u the blocks hop from device to device. At its beginning
each device sends the block in hand to the same device of the next host as well, which needs it g rounds later. So the
slow link has the time of g rounds, the g devices of a host send at once, and a pass has n - 1 slow hops, not P - 1.

Gradients: inside a turn the sums of dK and dV travel as in the ring, and come home to the device that began the turn
with their block. There they are added to the sums from the host before, which then travel to the next host.

Shapes: on each rank q and out are (B, H, C, D), k and v (B, G, C, D), as in flash_ring.py. A block: 2·B·G·C·D numbers.
In the forward pass a rank sends P - n blocks inside its host and n - 1 to another host. In the backward pass it sends
these again, and the gradients of P blocks inside and of n to another host, in float32 at least.

    $ python -m ringlab.training.double_ring
    2 hosts of 2 devices: blocks in hand on ranks 0 to 3
    round 0: 0 1 2 3
    round 1: 1 0 3 2
    round 2: 2 3 0 1  from the other host
    round 3: 3 2 1 0
    S = 512, 8 query heads on 2, float32, causal, zigzag, against full attention in float64
    ok    out: largest error 7.0e-07, rounding allows 1.1e-05 (float32 sums)
    ...

In a model, on every rank of `hosts` hosts with `per_host` devices each:

    mesh = init_device_mesh("cuda", (hosts, per_host))  # once; hybrid.py takes the same mesh
    at = positions("zigzag", seq_len, dist.get_rank(), dist.get_world_size())  # as for the flat ring
    out = double_ring_attention(q, k, v, group=mesh, causal=True, layout="zigzag")

With data parallelism besides, cut the mesh out of a larger one: init_device_mesh("cuda", (dp, hosts, per_host),
mesh_dim_names=("dp", "hosts", "devices"))["hosts", "devices"]. A rank then is host · per_host + device of its own mesh.

Before: hybrid.py. After: shared_memory.py, inside a host without messages.
Source: Gu et al. 2024 (LoongTrain), double ring attention; Liu et al. 2024, algorithm 1.
"""

import sys
from collections.abc import Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringlab.support.agreement import check_mesh
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention
from ringlab.training.flash_ring import chunks_of_rank, random_inputs, report_ranks, ring_flash_attention
from ringlab.training.masks import Mask
from ringlab.training.overlap import arriving_blocks
from ringlab.training.partition import Partition
from ringlab.training.schedule import Group, Round, Schedule, TravellingSums


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

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        (n, g), (host, device) = self.group.shape, self.group.get_coordinate()
        across, inside = self.group.get_all_groups()
        lengths, hops = self.partition.lengths, self.turns - 1
        for u, first in enumerate(arriving_blocks(k, v, lengths=lengths[device::g], group=across, hops=hops)):
            origin = (host - u) % n * g  # the first rank of the host whose blocks turn here
            turn = arriving_blocks(*first, lengths=lengths[origin : origin + g], group=inside)
            for s, (k_j, v_j) in enumerate(turn):
                yield u * g + s, k_j, v_j, self.partition.pieces(host * g + device, origin + (device - s) % g)

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> "DoubleSums":
        return DoubleSums(k, v, dtype, self.partition.lengths, self.group, self.turns)


class DoubleSums:
    """The sums of a turn come home inside the host during the first round of the next turn, and go on to the next host.

    So a slow hop of the sums has the time of g rounds too. After the last turn two messages home are exposed.
    """

    def __init__(
        self, k: Tensor, v: Tensor, dtype: torch.dtype, lengths: tuple[int, ...], mesh: DeviceMesh, turns: int
    ) -> None:
        """k and v are this rank's own block, `lengths` the chunk length C of every rank."""
        here = mesh.get_coordinate()
        assert here is not None  # check_mesh has refused other ranks
        (self.n, self.g), (self.host, device) = mesh.shape, here
        across, inside = mesh.get_all_groups()
        self.lengths, self.sums_of_turn = lengths, partial(TravellingSums, k, v, dtype, group=inside, hops=self.g - 1)
        self.between = TravellingSums(k, v, dtype, lengths=lengths[device :: self.g], group=across, hops=turns - 1)
        self.turns = turns
        self.begin_turn(0)

    def begin_turn(self, u: int) -> None:
        """New sums for the blocks of turn u, also for those of which this rank computes nothing."""
        origin = (self.host - u) % self.n * self.g
        self.turn = self.sums_of_turn(lengths=self.lengths[origin : origin + self.g])

    def of_round(self, t: int) -> tuple[Tensor, Tensor]:
        return self.turn.of_round(t % self.g)

    def send_on(self, t: int) -> None:
        u, s = divmod(t, self.g)
        self.turn.send_on(s)
        if s == 0 and u > 0:
            self.pass_on(u - 1)
        if s == self.g - 1:
            self.ended, self.of_turn = self.turn, self.turn.begin_home()
            if u + 1 < self.turns:
                self.begin_turn(u + 1)

    def pass_on(self, u: int) -> None:
        """Add the sums of turn u to those of the hosts before, and begin to send them to the next host."""
        self.ended.wait()
        for total, part in zip(self.between.of_round(u), self.of_turn, strict=True):
            total += part
        self.between.send_on(u)

    def home(self) -> tuple[Tensor, Tensor]:
        self.pass_on(self.turns - 1)
        return self.between.home()


@wraps(ring_flash_attention, assigned=["__doc__"])
def double_ring_attention(*args: Any, **options: Any) -> Tensor:
    return ring_flash_attention(*args, schedule=DoubleRing, **options)


def on_rank(context: RankContext, n: int, whole: list[Tensor]) -> tuple[list[int], list[Tensor]]:
    """The blocks in hand by round, and this rank's chunks of out, dq, dk, dv; for whole q, d_out, k and v."""
    mesh = init_device_mesh(context.device.type, (n, context.world_size // n))
    own = torch.full((1, 1, 1, 1), context.rank, device=context.device)
    schedule = DoubleRing(Partition(Mask(), "contiguous", (1,) * context.world_size), 1.0, mesh)
    blocks = [int(k_j) for _, k_j, _, _ in schedule.rounds(own, own)]
    attention = partial(double_ring_attention, group=mesh, causal=True, layout="zigzag")
    return blocks, chunks_of_rank(context, whole, attention, "zigzag")


def main() -> int:
    H, G, S, n, g = 8, 2, 512, 2, 2
    whole = random_inputs(1, H, G, S, 64)
    blocks, chunks = zip(*launch(on_rank, n * g, n, whole), strict=True)
    print(f"{n} hosts of {g} devices: blocks in hand on ranks 0 to {n * g - 1}")
    for t, in_hand in enumerate(zip(*blocks, strict=True)):
        print(f"round {t}: {' '.join(map(str, in_hand))}" + ("  from the other host" if t and t % g == 0 else ""))
    print(f"S = {S}, {H} query heads on {G}, float32, causal, zigzag, against full attention in float64")
    ok = report_ranks(chunks, "zigzag", exact_attention(*whole, causal=True, fused_blocks=n * g))
    return 0 if ok and all(sorted(each) == list(range(n * g)) for each in blocks) else 1


if __name__ == "__main__":
    sys.exit(main())
