"""zhuzilin/ring-flash-attention, packed documents as for Llama 3: K and V of all ranks, in bfloat16."""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_doctor.patients.flash_attn_by_hand import module_of

LIBRARY = module_of("ring_flash_attn", "llama3_flash_attn_varlen")

ABOUT = "llama3_flash_attn_varlen_func of ring-flash-attn; flash_attn's kernels replaced by float64 math"
VERSION = "ring-flash-attn 0.1.8"
UNEQUAL = False
LAYOUTS, TENSORS, DTYPES = ("contiguous",), "bshd", ("bfloat16",)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    documents: tuple[int, ...] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    r, P = dist.get_rank(group), dist.get_world_size(group)
    bounds = torch.tensor([0, *accumulate(documents or (q.shape[1] * P,))], dtype=torch.int32)
    where = LIBRARY.llama3_flash_attn_prepare_cu_seqlens(bounds, causal, r, P)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    options = dict(zip(names, where, strict=True)) | {"causal": causal, "softmax_scale": scale, "group": group}
    rows = zip(q, k, v, strict=True)  # it takes no batch
    return torch.stack([LIBRARY.llama3_flash_attn_varlen_func(*row, heads_k_stride=1, **options) for row in rows])
