import torch
import torch.distributed as dist


def block(q, k, v):
    """out (B, H, Sq, D) and lse (B, H, Sq) of queries q and one block of keys."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse[..., None]) @ v, lse


def merge(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


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


def attention(q, k, v):
    kv = torch.stack((k, v))
    out, lse = block(q, *kv)
    for _ in range(dist.get_world_size() - 1):
        kv = hop(kv)
        out, lse = merge(out, lse, *block(q, *kv))
    return out, lse
