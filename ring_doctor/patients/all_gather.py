"""Attention without a ring: every rank gathers all K and V, and autograd sends their gradients home and adds them.

FlexAttention itself refuses inputs that need gradients on a CPU, so the softmax of `flex` is plain math here.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.nn.functional import all_gather

from ring_doctor.asking.case import positions

ABOUT = "K and V by torch's all_gather_single, then softmax: written here"
VERSION = f"torch {torch.__version__}"
UNEQUAL = False
# Before torch 2.13 it has another name.
all_gather_single = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor_autograd
DEPRECATED = "K and V by torch.distributed.nn.functional.all_gather, then softmax: written here"
WITHOUT = "K and V by torch.distributed.all_gather, the own chunk put back in its place: a common mistake, written here"
FLEX = "torch's flex_cp_allgather, unmodified; then softmax, written here"
CLAIMS = {"deprecated": {"about": DEPRECATED}, "without_gradients": {"about": WITHOUT}, "flex": {"about": FLEX}}


def in_float32(x: Tensor) -> Tensor:
    """x in float32, or in float64 as it is: gradients of 16 bits are then added up in float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax_attention(
    q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], causal: bool, scale: float | None, layout: str
) -> Tensor:
    """Attention of this rank's queries to the chunks of all ranks, in q's dtype."""
    C, P, r = q.shape[2], len(ks), dist.get_rank()
    k, v = (torch.cat(list(x), dim=2).repeat_interleave(q.shape[1] // x[0].shape[1], dim=1) for x in (ks, vs))
    scores = (in_float32(q) @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        of_ranks = [positions(layout, C * P, rank, P) for rank in range(P)]
        scores = scores.masked_fill(torch.cat(of_ranks) > of_ranks[r].unsqueeze(-1), -math.inf)
    return (scores.softmax(dim=-1) @ v).to(q.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, layout: str = "contiguous"
) -> Tensor:
    everyone = dist.group.WORLD
    assert everyone is not None  # torch forms it before a rank computes
    ks, vs = (all_gather_single(in_float32(x).contiguous(), 0, everyone).chunk(everyone.size()) for x in (k, v))
    return softmax_attention(q, ks, vs, causal, scale, layout)


def deprecated(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, layout: str = "contiguous"
) -> Tensor:
    """With an all-gather that torch 2.13 calls deprecated and still has."""
    return softmax_attention(q, all_gather(in_float32(k)), all_gather(in_float32(v)), causal, scale, layout)


def without_gradients(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, layout: str = "contiguous"
) -> Tensor:
    """With dist.all_gather, which autograd does not see: dK and dV come from a rank's own queries only."""
    gathered = []
    for x in (in_float32(k), in_float32(v)):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach().contiguous())
        parts[dist.get_rank()] = x
        gathered.append(parts)
    return softmax_attention(q, gathered[0], gathered[1], causal, scale, layout)


def flex(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, layout: str = "contiguous"
) -> Tensor:
    """The exchange of PyTorch's context parallelism for FlexAttention, forward and back."""
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

    everyone = dist.group.WORLD
    assert everyone is not None  # torch forms it before a rank computes
    ks, vs = map(in_float32, flex_cp_allgather(k, v, 2, everyone.group_name))
    P = everyone.size()
    return softmax_attention(q, ks.chunk(P, dim=2), vs.chunk(P, dim=2), causal, scale, layout)
