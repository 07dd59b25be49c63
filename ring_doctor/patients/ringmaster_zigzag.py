"""axolotl-ai-cloud/ringmaster, `zigzag_ring_attention`: zigzag layout, causal, packed documents.

Without documents it needs a GPU: one document of the whole sequence takes the path that a CPU can run."""

from itertools import accumulate

import torch
from ringmaster.ring.zigzag import zigzag_ring_attention
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import group as groups

ABOUT = "zigzag_ring_attention of ringmaster, unmodified, its own math on CPUs"
VERSION = "axolotl-ringmaster 0.2.7"
UNEQUAL = False
LAYOUTS, CAUSAL, DTYPES = ("zigzag",), (True,), ("float32", "bfloat16")
WORLDS = (2, 3, 4)  # on one rank it sends to itself, which gloo refuses


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    documents: tuple[int, ...] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    everyone = group or groups.WORLD
    assert everyone is not None  # torch forms it before a rank computes
    ends = torch.tensor([0, *accumulate(documents or (q.shape[2] * everyone.size(),))])
    out = zigzag_ring_attention(q, k, v, group=everyone, scaling=scale, cu_seqlens=ends)
    return out.transpose(1, 2)
