"""Ranks and their neighbours: who sends to whom, and which tokens each rank holds.

    rank r of P:   receives from (r - 1) mod P,  sends to (r + 1) mod P,  holds chunk r of the sequence

Shapes: `scatter` cuts (B, H, S, D) along S into P chunks, the first S mod P one token longer; `gather` joins them.

    $ python -m ringlab.basics.ranks
    rank 0 of 3: 3 tokens; receives from 2, sends to 1
    rank 1 of 3: 3 tokens; receives from 0, sends to 2
    rank 2 of 3: 2 tokens; receives from 1, sends to 0

Before: blocking_messages.py. After: ../../ring_attn.py, the ring on these ranks. ringlab/support/processes.py starts
and ends the processes; a reader may skip it.
Source: the PyTorch manual, torch.distributed; Liu et al. 2024, section 3 (one chunk of the sequence on every host).
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.basics.naive_attention import TOKENS
from ringlab.support.agreement import agree, members
from ringlab.support.processes import RankContext, launch


def scatter(x: Tensor | None, context: RankContext) -> Tensor:
    """Rank 0's tensor (B, H, S, D) -> every rank's chunk (B, H, C, D), on its device.

    C = S/P, rounded up on the first S mod P ranks and down on the others. All ranks but 0 pass None.
    Raises ValueError on every rank when S < P or x is not (B, H, S, D).
    """

    def check() -> tuple[list[torch.Size], torch.dtype] | None:
        if context.rank > 0:
            return None
        if x is None or x.dim() != 4:
            raise ValueError(f"x is {'None' if x is None else tuple(x.shape)}; expected (B, H, S, D) on rank 0")
        if x.shape[2] < context.world_size:
            raise ValueError(
                f"{x.shape[2]} tokens for {context.world_size} ranks; expected at least one token for each rank"
            )
        return [part.shape for part in x.tensor_split(context.world_size, dim=2)], x.dtype

    shapes, dtype = agree(check)[0]
    if context.rank == 0:
        assert x is not None  # `check` raised ValueError if it was
        chunks = [part.contiguous().to(context.device) for part in x.tensor_split(context.world_size, dim=2)]
        for to in range(1, context.world_size):
            dist.send(chunks[to], to)
        return chunks[0]
    chunk = torch.empty(shapes[context.rank], dtype=dtype, device=context.device)
    dist.recv(chunk, 0)
    return chunk


def gather(chunk: Tensor, context: RankContext) -> Tensor | None:
    """Every rank's chunk (B, H, C, D) -> the whole (B, H, S, D) on rank 0, else None. For checks: no ring needs it."""
    shapes = agree(lambda: chunk.shape)
    if context.rank > 0:
        dist.send(chunk.contiguous(), 0)
        return None
    chunks = [chunk] + [torch.empty(shape, dtype=chunk.dtype, device=context.device) for shape in shapes[1:]]
    for source in range(1, context.world_size):
        dist.recv(chunks[source], source)
    return torch.cat(chunks, dim=2)


def _show(context: RankContext) -> str:
    rank, world_size = members()
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    chunk = scatter(TOKENS[None, None] if rank == 0 else None, context)  # (1, 1, C, 2)
    whole = gather(chunk, context)
    assert whole is None or torch.equal(whole, TOKENS[None, None])
    return f"rank {rank} of {world_size}: {chunk.shape[2]} tokens; receives from {previous}, sends to {following}"


def main() -> int:
    print("\n".join(launch(_show, 3)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
