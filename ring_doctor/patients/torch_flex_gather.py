"""PyTorch's context parallelism for FlexAttention: K and V by its flex_cp_allgather, forward and back.

FlexAttention itself refuses inputs that need gradients on a CPU, so the softmax is plain math here.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

from ring_doctor.patients.all_gather import in_float32, softmax_attention

ABOUT = "torch's flex_cp_allgather, unmodified; then softmax, written here"
VERSION = f"torch {torch.__version__}"
UNEQUAL = False


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, layout: str = "contiguous"
) -> Tensor:
    everyone = dist.group.WORLD
    assert everyone is not None  # torch forms it before a rank computes
    ks, vs = map(in_float32, flex_cp_allgather(k, v, 2, everyone.group_name))
    P = everyone.size()
    return softmax_attention(q, ks.chunk(P, dim=2), vs.chunk(P, dim=2), causal, scale, layout)
