"""What the tests of gradients share: out, dq, dk and dv of any attention, and gradcheck over all ranks."""

import torch
import torch.distributed as dist

from ringlab.training.layouts import positions

NAMES = ("out", "dq", "dk", "dv")


def gradients(attention, q, k, v, d_out):
    """out, dq, dk, dv of any attention."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    out.backward(d_out)
    return out.detach(), q.grad, k.grad, v.grad


class Replicated(torch.autograd.Function):
    """Every rank holds the same tensor: its gradient is the sum of what they all found."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_x):
        d_x = d_x.clone()
        dist.all_reduce(d_x)
        return d_x


class SumOfRanks(torch.autograd.Function):
    """The sum of every rank's tensor, on all of them."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, d_x):
        return d_x


def gradcheck_on_ranks(context, ring, layout, q, k, v):
    """gradcheck of `ring` as a function of whole q, k, v (float64). All ranks move the same number at once."""
    at = positions(layout, q.shape[2], context.rank, context.world_size)

    def attention(*qkv):
        out = ring(*(Replicated.apply(x)[:, :, at] for x in qkv))
        return SumOfRanks.apply(torch.zeros_like(q).index_copy(2, at, out))

    return torch.autograd.gradcheck(attention, tuple(x.requires_grad_() for x in (q, k, v)))
