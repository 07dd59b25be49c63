"""axolotl-ai-cloud/ringmaster, `distflash_attention`: causal, packed documents; busy ranks give work away."""

from itertools import accumulate

import torch
from ringmaster.ring.distflash import distflash_attention
from ringmaster.ring.p2p_attn import _flash_ops
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import group as groups

from ringlab.support.processes import RankContext

ABOUT = "distflash_attention of ringmaster, unmodified, its own math on CPUs"
VERSION = "axolotl-ringmaster 0.2.7"
UNEQUAL = False
LAYOUTS, CAUSAL, DTYPES = ("contiguous",), (True,), ("float32", "bfloat16")


def setup(context: RankContext) -> None:
    _flash_ops()  # looks for kernels and imports transformers: some seconds, which the first question would wait for


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
