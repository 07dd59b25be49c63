"""What chapter 17 runs on the ranks: every way to share a sequence, on the same chunks."""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringlab.support.processes import RankContext
from ringlab.training.all_gather import AllGather
from ringlab.training.all_to_all import AllToAll
from ringlab.training.cases import chunks_of_rank
from ringlab.training.double_ring import DoubleRing
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.hybrid import Hybrid
from ringlab.training.layouts import LAYOUTS, Layout
from ringlab.training.schedule import Ring

WAYS = {"ring": Ring, "double ring": DoubleRing, "all-gather": AllGather, "all-to-all": AllToAll, "hybrid": Hybrid}


def diagonal(seq_len: int, rank: int, world_size: int) -> Tensor:
    """Rows of P tokens, one for each rank; a row begins one rank further than the row before."""
    row = torch.arange(seq_len // world_size)
    return world_size * row + (rank + row) % world_size


FOUR_LAYOUTS = *LAYOUTS, Layout("diagonal", diagonal, multiple=1)


def every_way(
    context: RankContext, masks: dict[str, dict[str, Any]], whole: list[Tensor]
) -> dict[tuple[str, str, str], list[Tensor]]:
    """This rank's chunks of out, dq, dk and dv, by way, mask and layout. `whole`: as in chunks_of_rank."""
    mesh = init_device_mesh(context.device.type, (2, context.world_size // 2))
    results = {}
    for (way, schedule), (mask, options), layout in product(WAYS.items(), masks.items(), FOUR_LAYOUTS):
        group = mesh if way in ("double ring", "hybrid") else None
        attention = partial(ring_flash_attention, schedule=schedule, group=group, layout=layout, **options)
        results[way, mask, str(layout)] = chunks_of_rank(context, whole, attention, layout)
    return results
