"""Two levels: shared memory inside a host, messages between hosts.

    inside a host    the blocks of a turn stay where they are, and their readers go round: shared_memory.py
    between hosts    after a turn each block moves to the same rank of the next host: double_ring.py

It is the double ring. Only its ring inside a host is another schedule. A block that arrives from another host is copied
once more: to where the ranks of this host can read it. With n hosts, each of the P ranks sends n - 1 blocks in place of
P - 1, all of them to another host.

Shapes: on each rank q and out are (B, H, C, D), k and v (B, G, C, D), as in flash_ring.py.

    $ python -m ringlab.training.two_levels
    2 hosts of 2 ranks: each sends 1 block and not 3
    S = 512, 8 query heads on 2, float32, causal, zigzag, against full attention in float64
    ok    out: largest error 6.7e-07, rounding allows 1.4e-05 (float32 sums)
    ...

The ranks of this example are on one host, and only the mesh says that they are on two. On n real hosts of g ranks:

    mesh = init_device_mesh("cpu", (n, g))  # once, on every rank
    out = ring_flash_attention(q, k, v, causal=True, layout="zigzag", schedule=TwoLevels, group=mesh)

Before: shared_memory.py. After: every_order.py, which checks the flags of both.
Source: Gu et al. 2024 (LoongTrain), section 4, the double ring; here with loads in place of messages inside a host.
"""

import sys
from collections.abc import Iterator
from functools import partial, wraps
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringlab.support.agreement import agree
from ringlab.support.host_memory import has_memory, host_memory
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention
from ringlab.training import overlap
from ringlab.training.double_ring import DoubleRing
from ringlab.training.flash_ring import chunks_of_rank, random_inputs, report_ranks, ring_flash_attention
from ringlab.training.schedule import Round
from ringlab.training.shared_memory import SharedMemory


class TwoLevels(DoubleRing):
    """The double ring with shared memory in place of the messages inside a host.

    The group is a mesh of hosts x ranks of a host. Raises ValueError on every rank if a row of it is not on one host.
    """

    inside = SharedMemory
    check_device = staticmethod(SharedMemory.check_device)

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        share_memory(self.group)
        return super().rounds(k, v)


def share_memory(mesh: DeviceMesh) -> None:
    """Make the memory of each host of the mesh, once. Raises ValueError on every rank if one of them has none."""
    _, inside = mesh.get_all_groups()
    if not has_memory(inside):  # the same on all ranks: they have made it together
        agree(lambda: bool(host_memory(inside)), mesh)


@wraps(ring_flash_attention, assigned=["__doc__"])
def two_level_attention(*args: Any, **options: Any) -> Tensor:
    return ring_flash_attention(*args, schedule=TwoLevels, **options)


def on_rank(context: RankContext, n: int, whole: list[Tensor]) -> tuple[int, list[Tensor]]:
    """How often this rank begins to send a block forward; its chunks of out, dq, dk, dv, for whole q, d_out, k, v."""
    mesh = init_device_mesh(context.device.type, (n, context.world_size // n))
    attention = partial(two_level_attention, group=mesh, causal=True, layout="zigzag")
    with mock.patch.object(overlap, "post", side_effect=overlap.post) as sent:
        attention(*(x[:, :, : 2 * context.world_size] for x in whole[:3]))
    return sent.call_count, chunks_of_rank(context, whole, attention, "zigzag")


def main() -> int:
    H, G, S, n, g = 8, 2, 512, 2, 2
    whole = random_inputs(1, H, G, S, 64)
    sent, chunks = zip(*launch(on_rank, n * g, n, whole), strict=True)
    print(f"{n} hosts of {g} ranks: each sends {sent[0]} block and not {n * g - 1}")
    print(f"S = {S}, {H} query heads on {G}, float32, causal, zigzag, against full attention in float64")
    ok = report_ranks(chunks, "zigzag", exact_attention(*whole, causal=True, fused_blocks=n * g))
    return 0 if ok and set(sent) == {n - 1} else 1


if __name__ == "__main__":
    sys.exit(main())
