"""Attention without a ring: every rank gathers all K and V, and autograd sends their gradients home and adds them.

attention            by torch's all_gather_single
deprecated           by torch.distributed.nn.functional.all_gather, which torch 2.13 calls deprecated and still has
without_gradients    by dist.all_gather, which autograd does not see: dK and dV come from a rank's own queries only
flex                 the exchange of PyTorch's context parallelism for FlexAttention, forward and back

FlexAttention itself refuses inputs that need gradients on a CPU, so the softmax is plain math here.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.nn.functional import all_gather

from ring_doctor.asking.case import positions

ABOUT = "K and V gathered, then softmax: written here"
VERSION = f"torch {torch.__version__}"
UNEQUAL = False
# Before torch 2.13 it has another name.
all_gather_single = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor_autograd


def in_float32(x):
    """x in float32, or in float64 as it is: gradients of 16 bits are then added up in float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def in_one_tensor(x):
    return all_gather_single(in_float32(x).contiguous(), 0, dist.group.WORLD).chunk(dist.get_world_size())


def as_deprecated(x):
    return all_gather(in_float32(x))


def without_autograd(x):
    parts = [torch.empty_like(in_float32(x)) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, in_float32(x).detach().contiguous())
    parts[dist.get_rank()] = in_float32(x)  # a common mistake: it looks as if gradients could pass
    return parts


def as_flex(x):
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

    gathered, _ = flex_cp_allgather(x, x.detach(), 2, dist.group.WORLD.group_name)
    return in_float32(gathered).chunk(dist.get_world_size(), dim=2)


def attention(q, k, v, causal=False, scale=None, layout="contiguous", gather=in_one_tensor):
    """Attention of this rank's queries to the chunks of all ranks, in q's dtype."""
    C, P, r = q.shape[2], dist.get_world_size(), dist.get_rank()
    k, v = (torch.cat(list(gather(x)), dim=2).repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (in_float32(q) @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        of_ranks = [positions(layout, C * P, rank, P) for rank in range(P)]
        scores = scores.masked_fill(torch.cat(of_ranks) > of_ranks[r].unsqueeze(-1), -math.inf)
    return (scores.softmax(dim=-1) @ v).to(q.dtype)


deprecated, without_gradients, flex = (
    partial(attention, gather=gather) for gather in (as_deprecated, without_autograd, as_flex)
)
CLAIMS: dict[str, dict] = {"deprecated": {}, "without_gradients": {}, "flex": {}}
