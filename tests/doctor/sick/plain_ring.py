"""A ring in plain steps, any mask, gradients by formula or by autograd: a sick ring is a subclass with another step.

Nothing here is fused, sliced or overlapped: so it shares no code with ringlab/training/flash_ring.py but positions.
"""

import torch
import torch.distributed as dist

from ringlab.basics.naive_attention import accumulation_dtype, resolve_scale
from ringlab.support.agreement import agree
from ringlab.training.layouts import positions
from ringlab.training.overlap import post

HIDDEN = -1e30  # the score of a hidden pair: no infinity, so no NaN in any derivative


def moved(x, shape, group, distance=1):
    """x goes `distance` ranks on, and the tensor of that shape from `distance` ranks back arrives."""
    if distance % dist.get_world_size(group) == 0:
        return x.clone()
    received = x.new_empty(shape)
    sent = x.contiguous()
    for work in post([sent], [received], group, distance=distance):
        work.wait()
    return received


class Hop(torch.autograd.Function):
    """`moved`, differentiable: the gradient goes back the same way."""

    @staticmethod
    def forward(ctx, x, shape, group, distance=1):
        ctx.shape, ctx.group, ctx.distance = x.shape, group, distance
        return moved(x, shape, group, distance)

    @staticmethod
    def backward(ctx, d_x):
        return moved(d_x, ctx.shape, ctx.group, -ctx.distance), None, None, None


class PlainRing:
    """The steps. `attention` is the ring: it returns out and lse."""

    autograd = False

    @classmethod
    def attention(cls, q, k, v, **options):
        ring = cls(q, k, **options)
        if not cls.autograd:
            return ByFormula.apply(q, k, v, ring)
        out, lse = ring.forward(q, k, v)
        return out.to(q.dtype), lse

    def __init__(self, q, k, *, causal=False, layout="contiguous", documents=None, window=None, scale=None, group=None):
        self.lengths = agree(lambda: k.shape[2], group)
        self.group, self.rank, self.P = group, dist.get_rank(group), dist.get_world_size(group)
        self.causal, self.layout, self.documents, self.window = causal, layout, documents, window
        self.S, self.scale, self.dtype = sum(self.lengths), self.scale_of(scale, q.shape[-1]), q.dtype

    def scale_of(self, scale, head_dim):
        return resolve_scale(scale, head_dim)

    def seen(self, block):
        """Which keys of a block the queries of this rank see: (Cq, Ck)."""
        q_at, k_at = (positions(self.layout, self.S, rank, self.P) for rank in (self.rank, block))
        q_at = q_at[:, None]
        seen = torch.ones(len(q_at), len(k_at), dtype=torch.bool)
        if self.causal:
            seen &= k_at <= q_at
        if self.window is not None:
            seen &= q_at - k_at < self.window
        if self.documents is not None:
            number = torch.arange(len(self.documents)).repeat_interleave(torch.tensor(self.documents))
            seen &= number[q_at] == number[k_at]
        return seen

    def hop(self, kv, t):
        """The block of round t + 1, for the block of round t: (2, B, G, C, D)."""
        return Hop.apply(kv, (*kv.shape[:3], self.lengths[(self.rank - t - 1) % self.P], kv.shape[4]), self.group)

    def blocks(self, k, v):
        kv = torch.stack((k, v))
        for t in range(self.P):
            if t:
                kv = self.hop(kv, t - 1)
            yield t, kv

    def scores(self, q, k, seen):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return (self.scale * q @ k.mT).masked_fill(~seen, HIDDEN)

    def attend(self, q, k, v, seen):
        """out_j, lse_j of a block: 0 and HIDDEN for a row that sees nothing."""
        s = self.scores(q, k, seen)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out = (s.softmax(dim=-1) @ v).masked_fill(~seen.any(dim=-1)[:, None], 0.0)
        return out, s.logsumexp(dim=-1).clamp(min=HIDDEN)

    def merge(self, out, lse, out_j, lse_j, t):
        share = torch.sigmoid(lse_j - lse)[..., None]
        return out + share * (out_j - out), torch.logaddexp(lse, lse_j)

    def forward(self, q, k, v):
        q, out, lse = q.to(accumulation_dtype(q.dtype)), None, None
        for t, (k_j, v_j) in self.blocks(k, v):
            seen = self.seen((self.rank - t) % self.P)
            block = self.attend(q, k_j.to(q.dtype), v_j.to(q.dtype), seen)
            out, lse = (*block,) if out is None else self.merge(out, lse, *block, t)
        unseen = lse <= HIDDEN / 2
        return out.masked_fill(unseen[..., None], 0.0), lse.masked_fill(unseen, -torch.inf)

    def parts(self, q, k, v, d_out, lse, delta, seen):
        """What a block adds to dq, dk, dv."""
        G = k.shape[1]
        p = torch.exp(self.scores(q, k, seen) - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
        k, v = (x.repeat_interleave(q.shape[1] // G, dim=1) for x in (k, v))
        d_s = self.scale * p * (d_out @ v.mT - delta[..., None])
        return d_s @ k, *(x.unflatten(1, (G, -1)).sum(dim=2) for x in (d_s.mT @ q, p.mT @ d_out))

    def backward(self, q, k, v, out, lse, d_out):
        q, out, d_out = (x.to(lse.dtype) for x in (q, out, d_out))
        delta = (d_out * out).sum(dim=-1)
        d_q, sums = torch.zeros_like(q), torch.zeros(2, *k.shape, dtype=lse.dtype)
        for t, (k_j, v_j) in self.blocks(k, v):
            j = (self.rank - t) % self.P
            d_q_j, *d_kv = self.parts(q, k_j.to(q.dtype), v_j.to(q.dtype), d_out, lse, delta, self.seen(j))
            d_q = d_q + d_q_j
            length = self.lengths[(self.rank - t - 1) % self.P]  # of the block of round t + 1, for which sums arrive
            sums = self.add(sums, torch.stack(d_kv))
            sums = moved(sums, (*sums.shape[:3], length, sums.shape[4]), self.group)  # after P rounds they are at home
        return d_q, *sums

    def add(self, sums, parts):
        """dk and dv of the block in hand, with what this rank adds."""
        return sums + parts


class ByAutograd(PlainRing):
    """The plain ring with the gradients of its forward pass."""

    autograd = True


class ByFormula(torch.autograd.Function):
    """The plain ring with p = e^(s - lse) in its backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, ring):
        out, lse = ring.forward(q, k, v)
        ctx.ring = ring
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, _):
        gradients = ctx.ring.backward(*ctx.saved_tensors, d_out)
        return *(x.to(d_out.dtype) for x in gradients), None
