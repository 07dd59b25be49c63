import torch
import torch.distributed as dist


def scores_of(q, k, hidden):
    """(B, H, Sq, Sk), -inf where `hidden` (Sq, Sk) is True."""
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)


def block(q, k, v, hidden):
    """out (B, H, Sq, D) and lse (B, H, Sq) of queries q and one block of keys. A row that sees no key: 0 and -inf."""
    scores = scores_of(q, k, hidden)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]) @ v, lse


def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * torch.exp(lse_a - lse)[..., None] + out_b * torch.exp(lse_b - lse)[..., None], lse


def hop(x):
    """Send x to the next rank, and return what the rank before sends. Even ranks send first."""
    rank, P = dist.get_rank(), dist.get_world_size()
    x = x.contiguous()
    received = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, (rank + 1) % P)
        dist.recv(received, (rank - 1) % P)
    else:
        dist.recv(received, (rank - 1) % P)
        dist.send(x, (rank + 1) % P)
    return received


def block_gradients(q, k, v, d_out, lse, delta, hidden):
    """What this rank's queries and one block of keys add to d_q, d_k and d_v."""
    scale = q.shape[-1] ** -0.5
    p = torch.exp(scores_of(q, k, hidden) - lse[..., None])
    d_scores = p * (d_out @ v.mT - delta[..., None])
    return scale * d_scores @ k, scale * d_scores.mT @ q, p.mT @ d_out


def positions(rank, C, layout):
    """The tokens of a rank."""
    P = dist.get_world_size()
    if layout == "zigzag":
        halves = torch.arange(C * P).chunk(2 * P)
        return torch.cat((halves[rank], halves[2 * P - 1 - rank]))
    return torch.arange(C * rank, C * (rank + 1))


def hidden_keys(t, C, causal, layout):
    """Round t: which keys of the block in hand come after which query, (C, C)."""
    rank, P = dist.get_rank(), dist.get_world_size()
    at, key_at = positions(rank, C, layout), positions((rank - t) % P, C, layout)
    return key_at > at[:, None] if causal else torch.zeros(C, C, dtype=torch.bool)


def wide(x):
    """In the dtype of the sums: float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def heads(kv, q):
    """A copy of each K/V head for each query head that uses it, made where it is needed."""
    return wide(kv).repeat_interleave(q.shape[1] // kv.shape[2], dim=2)


def groups(d_kv, kv):
    """The gradient of a K/V head is the sum over the query heads that use it."""
    return d_kv.unflatten(2, (kv.shape[2], -1)).sum(3)


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, layout):
        kv, C = torch.stack((k, v)), q.shape[2]
        dtype, q, own = q.dtype, wide(q), kv  # sums in float32; what travels keeps its dtype and its few heads
        out, lse = block(
            q, *heads(kv, q), hidden_keys(0, C, causal, layout)
        )  # its own block first: then no row is empty
        for t in range(1, dist.get_world_size()):
            kv = hop(kv)
            out, lse = merge(out, lse, *block(q, *heads(kv, q), hidden_keys(t, C, causal, layout)))
        ctx.causal, ctx.layout = causal, layout
        ctx.save_for_backward(q, own, out, lse)
        return out.to(dtype)

    @staticmethod
    def backward(ctx, d_out):
        q, kv, out, lse = ctx.saved_tensors
        P = dist.get_world_size()
        dtype, d_out = d_out.dtype, wide(d_out)
        delta = (d_out * out).sum(-1)
        d_q, d_kv = torch.zeros_like(q), torch.zeros_like(wide(kv))
        for t in range(P):
            hidden = hidden_keys(t, q.shape[2], ctx.causal, ctx.layout)
            more = block_gradients(q, *heads(kv, q), d_out, lse, delta, hidden)
            d_q, d_kv = d_q + more[0], d_kv + groups(torch.stack(more[1:]), kv)
            if t < P - 1:
                kv = hop(kv)
            if P > 1:
                d_kv = hop(d_kv)  # the last hop brings the gradients home
        return d_q.to(dtype), *d_kv.to(dtype), None, None


def attention(q, k, v, causal=False, layout="contiguous"):
    with torch.autocast(q.device.type, enabled=False):  # it would round each product
        return Ring.apply(q, k, v, causal, layout)
