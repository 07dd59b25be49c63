"""axolotl-ai-cloud/ringmaster for packed documents and windows: K and V of all ranks, then a mask."""

from itertools import accumulate

import torch
from ringmaster.ring.loop import varlen_ring_attention
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import group as groups

ABOUT = "varlen_ring_attention of ringmaster, unmodified"
VERSION = "axolotl-ringmaster 0.2.7"
UNEQUAL = False
LAYOUTS = ("contiguous",)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    documents: tuple[int, ...] | None = None,
    window: int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    everyone = group or groups.WORLD
    assert everyone is not None  # torch forms it before a rank computes
    S = q.shape[2] * everyone.size()
    ends = [S * row + end for row in range(len(q)) for end in accumulate(documents or (S,))]
    options = {"cu_seqlens": torch.tensor([0, *ends]), "window": None if window is None else (window - 1, 0)}
    return varlen_ring_attention(q, k, v, group=everyone, scaling=scale, causal=causal, **options).transpose(1, 2)
