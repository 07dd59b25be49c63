"""Rotary positions must follow the layout: a token's position is its place in the sequence, on whichever rank it is.

    (a, b) -> (a cos φ - b sin φ, a sin φ + b cos φ)    for each pair of neighbours in D, φ = position · base^(-2i/D)

The score of a rotated query and a rotated key depends on how far apart the two stand. When each rank counts its tokens
from its own rank · C, the chunks of a zigzag layout get positions of other tokens. No error is raised.

Shapes: x is (B, H, C, D) with D even, positions are (C,) or (B, 1, C).

    $ python -m ringlab.training.rotary
    zigzag with rotary positions of the layout: off by 0.0000
    zigzag with rotary positions of contiguous chunks: off by 0.1564

Before: layouts.py. After: causal.py, what each rank computes under a causal mask.
Source: Su et al. 2021 (RoFormer), equation 34.
"""

import sys

import torch
from torch import Tensor

from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.support.rounding import exact_attention
from ringlab.training.layouts import positions, shard, unshard


def rotary(x: Tensor, position: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary embedding of x (B, H, C, D), D even, for tokens at `position` (C,) or (B, 1, C) in the sequence.

    Each pair of neighbours in D is turned by an angle that grows with the position. Su et al. 2021, equation 34.
    """
    pair = torch.arange(0, x.shape[3], 2, dtype=torch.float64, device=x.device)
    angle = position.to(pair)[..., None] * base ** (-pair / x.shape[3])  # (C, D/2), radians; bfloat16 has no 257
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def main() -> int:
    x, S, P, ok = TOKENS[None, None], len(TOKENS), 4, True  # x is (B, H, S, D) = (1, 1, 8, 2)
    whole = rotary(x, torch.arange(S))
    exact = exact_attention(whole, whole, x, causal=True)["out"]
    right = [positions("zigzag", S, rank, P) for rank in range(P)]
    wrong = [positions("contiguous", S, rank, P) for rank in range(P)]
    for name, held in (("of the layout", right), ("of contiguous chunks", wrong)):
        turned = unshard([rotary(shard(x, "zigzag", rank, P), at) for rank, at in enumerate(held)], "zigzag")
        out = naive_attention(turned, turned, x, causal=True)
        print(f"zigzag with rotary positions {name}: off by {exact.error(out).max():.4f}")
        ok &= exact.accepts(out) == (held is right)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
