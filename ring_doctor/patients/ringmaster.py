"""axolotl-ai-cloud/ringmaster, which brings plain math for CPUs in float32.

attention     its ring by point-to-point messages          all_gather    with rotate_method ALLGATHER, its default
zigzag        zigzag layout, causal, packed documents       documents     packed documents and windows
distflash     causal, packed documents; busy ranks give work away
"""

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from ringmaster.config import RotateMethod
from ringmaster.ring.distflash import distflash_attention
from ringmaster.ring.loop import ring_attention, varlen_ring_attention
from ringmaster.ring.p2p_attn import _flash_ops
from ringmaster.ring.zigzag import zigzag_ring_attention
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import group as groups

from ringlab.support.processes import RankContext

ABOUT = "ring_attention of ringmaster, rotation point to point, its own math kernel, unmodified"
VERSION = "axolotl-ringmaster 0.2.7"
UNEQUAL = False
LAYOUTS, DTYPES = ("contiguous",), ("float32", "bfloat16")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    group: ProcessGroup | None = None,
    rotation: RotateMethod = RotateMethod.ALLTOALL,
) -> Tensor:
    options = {"provider": "math", "attn_implementation": "math", "rotate_method": rotation}
    out = ring_attention(q, k, v, group=group or groups.WORLD, causal=causal, scaling=scale, dropout=0.0, **options)
    return out.transpose(1, 2)


all_gather = partial(attention, rotation=RotateMethod.ALLGATHER)


def find_kernels(context: RankContext) -> None:
    _flash_ops()  # looks for kernels and imports transformers: some seconds, which the first question would wait for


def distflash(
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


def documents(
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


def zigzag(
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


CAUSAL_ONLY = {"causal": (True,)}
CLAIMS: dict[str, dict[str, Any]] = {
    "all_gather": {"about": "ring_attention of ringmaster, rotation by all-gather, its own math kernel, unmodified"},
    "distflash": CAUSAL_ONLY
    | {"about": "distflash_attention of ringmaster, unmodified, its own math on CPUs", "setup": find_kernels},
    "documents": {
        "about": "varlen_ring_attention of ringmaster, unmodified",
        "dtypes": ("float64", "float32", "bfloat16"),
    },
    "zigzag": CAUSAL_ONLY
    | {  # without documents it needs a GPU: one document of the whole sequence takes the path that a CPU can run
        "about": "zigzag_ring_attention of ringmaster, unmodified, its own math on CPUs",
        "layouts": ("zigzag",),
        "worlds": (2, 3, 4),  # on one rank it sends to itself, which gloo refuses
    },
}
