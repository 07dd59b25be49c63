"""What chapter 19 runs on the ranks: every way to share a sequence, on the same chunks."""

from functools import partial

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringlab.support.processes import RankContext
from ringlab.training.all_gather import all_gather_attention
from ringlab.training.all_to_all import all_to_all_attention
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.hybrid import hybrid_attention
from ringlab.training.layouts import shard

Results = dict[tuple[str, str], list[Tensor]]  # of a way and a layout


def every_way(context: RankContext, layouts: list[str], whole: list[Tensor]) -> Results:
    """This rank's chunks of out, dq, dk and dv, by way and layout. Whole: q, d_out (B, H, S, D), k, v (B, G, S, D)."""
    mesh = init_device_mesh(context.device.type, (2, context.world_size // 2))
    ways = {
        "ring": ring_flash_attention,
        "all-gather": all_gather_attention,
        "all-to-all": all_to_all_attention,
        "hybrid": partial(hybrid_attention, group=mesh),
    }
    results = {}
    for layout in layouts:
        for way, attention in ways.items():
            q, k, v, d_out = (shard(x, layout, context.rank, context.world_size) for x in whole)
            for x in (q, k, v):
                x.requires_grad_()
            out = attention(q, k, v, causal=True, layout=layout)
            out.backward(d_out)
            results[way, layout] = [out.detach(), q.grad, k.grad, v.grad]
    return results
