"""axolotl-ai-cloud/ringmaster, `distflash_attention`: contiguous chunks, busy ranks give work to idle ranks; causal, also for packed documents."""

from itertools import accumulate

import torch
from ringmaster.ring.distflash import distflash_attention
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import group as groups

ABOUT = "distflash_attention of ringmaster, unmodified, its own math on CPUs"
VERSION = "axolotl-ringmaster 0.2.7"
UNEQUAL = False
LAYOUTS, CAUSAL, DTYPES = ("contiguous",), (True,), ("float32", "bfloat16")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    documents: tuple[int, ...] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    ends = torch.tensor([0, *accumulate(documents)], dtype=torch.int32) if documents else None
    out = distflash_attention(q, k, v, group=group or groups.WORLD, scaling=scale, cu_seqlens=ends)
    return out.transpose(1, 2)
