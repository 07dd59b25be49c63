"""all_gather.py with dist.all_gather, which autograd does not see: dK and dV come from a rank's own queries only."""

import torch
import torch.distributed as dist
from torch import Tensor

from ring_doctor.patients.all_gather import UNEQUAL, VERSION, in_float32, softmax_attention

__all__ = ["UNEQUAL", "VERSION", "attention"]
ABOUT = "K and V by torch.distributed.all_gather, the own chunk put back in its place: a common mistake, written here"


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, layout: str = "contiguous"
) -> Tensor:
    gathered = []
    for x in (in_float32(k), in_float32(v)):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach().contiguous())
        parts[dist.get_rank()] = x
        gathered.append(parts)
    return softmax_attention(q, gathered[0], gathered[1], causal, scale, layout)
