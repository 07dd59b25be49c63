"""A layout says which tokens each rank has. Under a causal mask it decides how evenly the ranks share the work.

    contiguous   rank r holds the tokens r·C ... (r+1)·C - 1
    zigzag       of 2P half chunks, rank r holds numbers r and 2P - 1 - r    (also called DualChunkSwap)
    striped      rank r holds the tokens r, r + P, r + 2P, ...               (also called interleaved)

A layout of your own is an object: its name, its positions, and which numbers of tokens it can deal out. It works
wherever a name works: `layout=Layout("pairs", pairs, multiple=2)`.

Rotary positions must follow the layout. The score of a rotated query and a rotated key depends on how far apart the two
stand. When each rank counts its tokens from its own rank · C, zigzag chunks get positions of other tokens: no error is
raised. `rotary` turns each pair of neighbours (a, b) in D by φ = position · base^(-2i/D).

Shapes: P ranks, S tokens. x is (B, H, S, D), and each rank holds a chunk of it, (B, H, C, D) with C = S/P tokens in
rising order. Positions are (C,), int64.

    $ python -m ringlab.ring.layouts
    contiguous: ranks 0 to 3 hold [0, 1]  [2, 3]  [4, 5]  [6, 7]
    zigzag: ranks 0 to 3 hold [0, 7]  [1, 6]  [2, 5]  [3, 4]
    striped: ranks 0 to 3 hold [0, 4]  [1, 5]  [2, 6]  [3, 7]
    pairs, a layout of your own: ranks 0 to 3 hold [0, 1, 8, 9]  [2, 3, 10, 11]  [4, 5, 12, 13]  [6, 7, 14, 15]
    ok    in each of them every token is on one rank, and unshard undoes shard
    zigzag with rotary positions of the layout: off by 0.0000
    zigzag with rotary positions of contiguous chunks: off by 0.1564

Before: overlap.py. After: causal.py, what each rank computes under a causal mask.
Source: Brandon et al. 2023 (Striped Attention), section 3; Llama 3 (2024), section 3.3.2, for the 2P half chunks; Su et
al. 2021 (RoFormer), equation 34.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ringlab.basics.naive_attention import TOKENS, naive_attention

LayoutName = Literal["contiguous", "zigzag", "striped"]


@dataclass(frozen=True)
class Layout:
    """Which tokens each rank has."""

    name: str
    positions: Callable[[int, int, int], Tensor]  # (seq_len, rank, world_size) -> (C,), int64, rising; never others
    multiple: int = 0  # S must be a multiple of this times P; 0: any S from P on

    def __str__(self) -> str:
        return self.name


def _contiguous(seq_len: int, rank: int, world_size: int) -> Tensor:
    return torch.arange(seq_len).tensor_split(world_size)[rank]


def _zigzag(seq_len: int, rank: int, world_size: int) -> Tensor:
    half = seq_len // (2 * world_size)
    return torch.cat([torch.arange(i * half, (i + 1) * half) for i in (rank, 2 * world_size - 1 - rank)])


def _striped(seq_len: int, rank: int, world_size: int) -> Tensor:
    return torch.arange(rank, seq_len, world_size)


NAMED = {
    layout.name: layout
    for layout in (Layout("contiguous", _contiguous), Layout("zigzag", _zigzag, 2), Layout("striped", _striped, 1))
}
LAYOUTS = tuple(NAMED)


def layout_of(layout: str | Layout) -> Layout:
    """The layout of this name, or a layout as it is. Raises ValueError for anything else."""
    if isinstance(layout, Layout):
        return layout
    if not isinstance(layout, str) or layout not in NAMED:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}, or a Layout of your own")
    return NAMED[layout]


def is_own(layout: str | Layout) -> bool:
    """Whether it is none of the three, whatever its name."""
    return layout_of(layout) not in NAMED.values()


def check_layout(layout: str | Layout, seq_len: int, world_size: int) -> None:
    """Raise ValueError for an unknown layout, or for a number of tokens that it cannot deal out to the ranks.

    Contiguous takes any number of tokens from `world_size` on, striped a multiple of it, zigzag a multiple of twice it.
    A layout of your own must give each token to one rank, and each rank its tokens in rising order.
    """
    layout = layout_of(layout)
    if world_size < 1 or seq_len < world_size:
        raise ValueError(f"{seq_len} tokens for {world_size} ranks; expected one rank or more, and a token for each")
    multiple = max(1, layout.multiple * world_size)
    if seq_len % multiple:
        raise ValueError(
            f"{seq_len} tokens in the {layout} layout on {world_size} ranks; expected a multiple of {multiple}: pad "
            f"the tokens on the right, or x (B, H, S, D) with pad(x, {multiple}), and cut the result (under a causal "
            f"mask no real token sees the padding)"
        )
    if is_own(layout):
        _check_own_layout(layout, seq_len, world_size)


@lru_cache(maxsize=64)  # every layer of a model asks the same
def _check_own_layout(layout: Layout, seq_len: int, world_size: int) -> None:
    dealt = [layout.positions(seq_len, rank, world_size) for rank in range(world_size)]
    for rank, at in enumerate(dealt):
        fits = isinstance(at, Tensor) and at.dim() == 1 and at.dtype == torch.int64 and len(at) > 0
        if not fits or (at.diff() <= 0).any():
            raise ValueError(
                f"the layout {layout} gives rank {rank} of {world_size} the positions {at}; expected (C,), int64, one "
                f"or more, in rising order"
            )
    times = Counter(torch.cat(dealt).tolist())
    for token in sorted({*range(seq_len), *times}):
        if times[token] != (0 <= token < seq_len):
            raise ValueError(
                f"the layout {layout} gives token {token} to {times[token]} of {world_size} ranks; expected each of "
                f"0 to {seq_len - 1} on one rank"
            )


def check_lengths(layout: str | Layout, lengths: Sequence[int]) -> None:
    """Raise ValueError unless chunks of `lengths` tokens, one length a rank, can come from `shard` in this layout.

    Contiguous chunks may have any lengths: rank r's tokens follow those of rank r - 1.
    """
    seq_len, world_size = sum(lengths), len(lengths)
    check_layout(layout, seq_len, world_size)
    if layout_of(layout) == NAMED["contiguous"]:
        return
    expected = [len(positions(layout, seq_len, rank, world_size)) for rank in range(world_size)]
    if list(lengths) != expected:
        raise ValueError(
            f"the ranks have {list(lengths)} tokens in the {layout} layout; expected {expected}: cut them with shard"
        )


def pad(x: Tensor, multiple: int) -> Tensor:
    """x (B, H, S, D) with zeros on the right, up to a length that is a multiple of `multiple`."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % multiple))


def positions(layout: str | Layout, seq_len: int, rank: int, world_size: int) -> Tensor:
    """Where in the sequence this rank's tokens stand: (C,), int64, rising.

    Raises ValueError as `check_layout` does, and for a rank outside 0 ... P-1. Brandon et al. 2023, section 3.
    """
    check_layout(layout, seq_len, world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; expected 0 to {world_size - 1}")
    return layout_of(layout).positions(seq_len, rank, world_size)


def order(layout: str | Layout, seq_len: int, world_size: int) -> int:
    """A number for the positions of all ranks, the same where they are the same. Raises ValueError as `positions`."""
    return hash(tuple(tuple(positions(layout, seq_len, rank, world_size).tolist()) for rank in range(world_size)))


def shard(x: Tensor, layout: str | Layout, rank: int, world_size: int) -> Tensor:
    """This rank's chunk (B, H, C, D) of x (B, H, S, D). Raises ValueError as `positions` does."""
    return x[:, :, positions(layout, x.shape[2], rank, world_size).to(x.device)]


def unshard(chunks: Sequence[Tensor], layout: str | Layout) -> Tensor:
    """Undo `shard`: the chunks (B, H, C, D) of all ranks, in order of rank -> x (B, H, S, D).

    Raises ValueError as `check_lengths` does.
    """
    lengths = [chunk.shape[2] for chunk in chunks]
    check_lengths(layout, lengths)
    seq_len, world_size = sum(lengths), len(lengths)
    order = torch.cat([positions(layout, seq_len, rank, world_size) for rank in range(world_size)])
    return torch.cat(list(chunks), dim=2)[:, :, order.argsort().to(chunks[0].device)]


def rotary(x: Tensor, position: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary embedding of x (B, H, C, D), D even, for tokens at `position` (C,) or (B, 1, C) in the sequence.

    Each pair of neighbours in D is turned by an angle that grows with the position. Su et al. 2021, equation 34.
    """
    pair = torch.arange(0, x.shape[3], 2, dtype=torch.float64, device=x.device)
    angle = position.to(pair)[..., None] * base ** (-pair / x.shape[3])  # (C, D/2), radians; bfloat16 has no 257
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def pairs(seq_len: int, rank: int, world_size: int) -> Tensor:
    """Pairs of tokens, dealt out in turn: a layout that is not one of the three."""
    return torch.arange(seq_len).view(-1, world_size, 2)[:, rank].flatten()


def main() -> int:
    from ringlab.support.rounding import exact_attention

    P, ok = 4, True
    examples: list[tuple[str | Layout, int]] = [*((name, 8) for name in LAYOUTS), (Layout("pairs", pairs, 2), 16)]
    for layout, S in examples:
        tokens = "  ".join(str(positions(layout, S, rank, P).tolist()) for rank in range(P))
        print(f"{layout}{'' if layout in LAYOUTS else ', a layout of your own'}: ranks 0 to 3 hold {tokens}")
        x = torch.arange(S)[None, None, :, None]
        ok &= torch.equal(unshard([shard(x, layout, rank, P) for rank in range(P)], layout), x)
    print(f"{'ok   ' if ok else 'WRONG'} in each of them every token is on one rank, and unshard undoes shard")

    x, S = TOKENS[None, None], len(TOKENS)  # x is (B, H, S, D) = (1, 1, 8, 2)
    whole = rotary(x, torch.arange(S))
    exact = exact_attention(whole, whole, x, causal=True)["out"]
    for name, of in (("of the layout", "zigzag"), ("of contiguous chunks", "contiguous")):
        turned = [rotary(shard(x, "zigzag", rank, P), positions(of, S, rank, P)) for rank in range(P)]
        q = unshard(turned, "zigzag")
        out = naive_attention(q, q, x, causal=True)
        print(f"zigzag with rotary positions {name}: off by {exact.error(out).max():.4f}")
        ok &= exact.accepts(out) == (of == "zigzag")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
