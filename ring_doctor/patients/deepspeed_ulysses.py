"""DeepSpeed's Ulysses: DistributedAttention, which brings all tokens of some heads to each rank.

`uneven` has a head count that the ranks do not divide: some ranks get one head more.
"""

import deepspeed
import deepspeed.comm
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringlab.support.processes import RankContext

ABOUT = "DistributedAttention of DeepSpeed, unmodified, around torch's scaled_dot_product_attention"
VERSION = f"deepspeed {deepspeed.__version__}"
UNEQUAL = False
LAYOUTS, TENSORS = ("contiguous",), "bshd"
HEADS, WORLDS = 12, (1, 2, 3, 4)  # a head count that every number of ranks divides


def setup(context: RankContext) -> None:
    deepspeed.init_distributed("gloo")


def local(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    return DistributedAttention(local, dist.group.WORLD, gather_idx=1)(q, k, v, 0, None, causal, scale)


def setup_uneven(context: RankContext) -> None:
    setup(context)
    names = ("data_parallel", "sequence_parallel")  # as deepspeed.initialize does with mesh_param
    groups.mesh_device = deepspeed.comm.initialize_mesh_device((1, context.world_size), names)


uneven = attention
CLAIMS = {
    "uneven": {
        "about": "DistributedAttention of DeepSpeed, unmodified, with 7 heads",
        "heads": 7,
        "worlds": (1, 2, 3, 4, 5),
        "setup": setup_uneven,
    }
}
