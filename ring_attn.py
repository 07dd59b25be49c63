"""Ring Attention: each rank keeps its queries, the K/V blocks go round, and after P rounds all queries met all keys.

    in round t, rank r computes on block j = (r - t) mod P:   (m, l, o) = update((m, l, o), Q_r K_jᵀ / √D, V_j)
    then passes it to rank r+1 and receives the next one from rank r-1: P rounds, P - 1 hops

Shapes: on each rank q, k, v and out are one chunk, (B, H, C, D), of C = S/P tokens, rounded up on the first S mod P.
m, l (B, H, C) and o (B, H, C, D) stay, in float32 at least. One block, K and V together, (2, B, H, C, D), moves.

    $ torchrun --nproc_per_node=4 ring_attn.py
    ...
    the K/V block that each rank computed on, as recorded:
    round    rank 0  rank 1  rank 2  rank 3
        0       KV0     KV1     KV2     KV3
        1       KV3     KV0     KV1     KV2
        2       KV2     KV3     KV0     KV1
        3       KV1     KV2     KV3     KV0
    ...
    ok    against full attention in float64: largest error 3.0e-07, rounding allows 6.8e-06 (float32 sums)
    ...

Before: worked_example.py, the same by hand, and ringlab/basics/ranks.py. After: ringlab/ring/backward.py, its
gradients.
Source: Liu et al. 2024, algorithm 1, whose 'count = 1 to N - 1' counts the hops: there are N blocks to compute.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.basics import chunks
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import finish, start


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, lengths: list[int], group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """The ring itself: checked chunks (B, H, C, D) -> out (B, H, C, D) in q's dtype and lse (B, H, C).

    `lengths` is the chunk length C of every rank. Liu et al. 2024, algorithm 1.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    state = start(q)  # m, l, o: these stay
    block = torch.stack((k, v))  # this moves
    for t in range(world_size):
        state = attend(state, q, *block, scale=scale)  # block j = (rank - t) mod P
        if t < world_size - 1:  # after the last round nobody needs another block
            block = hop(block, lengths[(rank - t - 1) % world_size], group)
    out, lse = finish(state)
    return out.to(q.dtype), lse


def hop(block: Tensor, length: int, group: ProcessGroup | None = None) -> Tensor:
    """Send the block (..., C, D) to the next rank and return the previous rank's, of `length` tokens."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    next_rank, prev_rank = (rank + 1) % world_size, (rank - 1) % world_size
    received = block.new_empty(*block.shape[:-2], length, block.shape[-1])
    if rank % 2 == 0:  # if all ranks sent first, all could wait: ringlab/basics/blocking_messages.py
        dist.send(block, group_dst=next_rank, group=group)
        dist.recv(received, group_src=prev_rank, group=group)
    else:
        dist.recv(received, group_src=prev_rank, group=group)
        dist.send(block, group_dst=next_rank, group=group)
    return received


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's rows of full attention over the whole sequence.

    q, k, v: this rank's chunks (B, H, C, D). C may differ between ranks; B, H, D, dtype and scale may not. Returns out
    (B, H, C, D) in q's dtype; statistics and sums are float32 at least. Every rank of `group` (None: the whole job)
    must call it. Forward only. When the input of a rank is wrong, or the ranks disagree, every rank raises the same
    ValueError before any block travels. Liu et al. 2024, algorithm 1.
    """
    scale, lengths = chunks.agree_on_chunks(q, k, v, scale, group, function=__name__, check=chunks.check_forward_only)
    out, _ = ring_forward(q, k, v, scale=scale, lengths=lengths, group=group)
    return out


if __name__ == "__main__":
    from ringlab.basics import ring_attn_command  # only here: a project that imports the ring needs no command

    sys.exit(ring_attn_command.main(ring_attention))
