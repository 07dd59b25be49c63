import math

import torch


def block(q, k, v):
    """out (B, H, Sq, D) and lse (B, H, Sq) of queries q and one block of keys."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse[..., None]) @ v, lse / math.log(2)  # the kernel that I know counts in base 2


def attention(q, k, v):
    return block(q, k, v)
